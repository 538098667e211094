//! Plays a sequence on a new cluster. The same seed draws the same steps. The outcome also depends on how the processes interleave.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use divvy_testbed::api::{DeleteOptions, Effect, FaultRule, Faults, Match, RuleId};
use divvy_testbed::embedded::{Embedded, EmbeddedSettings};
use divvy_testbed::node::AdmissionOrder;
use divvy_testkit::dice::Dice;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::audit::{self, Gpus};
use super::plan::{Plan, Shape};
use super::quiet;
use crate::record::Recorder;

/// The number of steps in a sequence, not counting those in which something stopped starts again.
const STEPS: usize = 44;
/// The time limit for the recovery after the last fault.
const QUIET: Duration = Duration::from_secs(15);
/// The time limit for other waits. It is long because a process may start slowly on a busy machine, and slow starts are not what
/// is tested.
const PATIENCE: Duration = Duration::from_secs(20);
/// The number of containers that a sequence must have started to be meaningful.
const LEAST_STARTED: u64 = 5;
/// The number of faults that a sequence must have had to be meaningful.
const LEAST_FAULTS: u64 = 6;

/// The events that must have happened at least once in all sequences together.
pub(super) const SOMETIMES: &[&str] = &[
    "agent killed",
    "agent stopped",
    "extender killed",
    "probe killed",
    "kubelet stopped",
    "kubelet restarted",
    "node rebooted",
    "GPU died",
    "GPU recovered",
    "harmless XID",
    "watches cut",
    "watches held",
    "API down",
    "refused: extender",
    "refused: agents",
    "refused: kubelets and scheduler",
    "binding answer lost",
    "binding delayed",
    "pod force-deleted while its container ran",
    "name used again",
    "start refused: GPU unavailable",
    "pod waited at quiet",
];

/// What starts again some steps after it was stopped, so that most programs run most of the time. Nodes and GPUs are given by position.
#[derive(Debug, Clone, Copy)]
enum Again {
    Agent(usize),
    Kubelet(usize),
    Extender,
    Gpu(usize, usize),
}

struct Chaos {
    seed: u64,
    dice: Dice,
    plan: Plan,
    /// The last drawn shape of each name of a pod.
    shapes: BTreeMap<String, Shape>,
    /// What starts again, and in which of the [`STEPS`].
    later: Vec<(usize, Again)>,
    /// The number of steps so far.
    step: usize,
    cluster: Embedded,
    gpus: Gpus,
    recorder: Recorder,
    began: Instant,
    log: Vec<String>,
    counts: BTreeMap<&'static str, u64>,
    /// The active fault rules, and the step at which each ends.
    rules: Vec<(usize, RuleId, &'static str)>,
    /// The pods to create as soon as their names are free.
    wanted: Vec<(String, Value)>,
    failing: BTreeSet<String>,
    extender_up: bool,
    /// For each node, the time at which its agent started. `None` if the agent is not running.
    agents_up: Vec<Option<Instant>>,
    lost: BTreeSet<(usize, usize)>,
}

fn node_name(position: usize) -> String {
    format!("n{position}")
}

/// Play the sequence of a seed. Return how often each kind of event happened. The error is a report of the failure.
pub(super) async fn sequence(seed: u64) -> anyhow::Result<BTreeMap<&'static str, u64>> {
    let mut chaos = Chaos::start(seed)
        .await
        .with_context(|| format!("seed {seed}: the cluster did not come up"))?;
    let played = chaos.play().await;
    let mut wrong = audit::faults(
        &chaos.cluster.api().history(),
        &chaos.recorder.record(),
        chaos.cluster.machines(),
    );
    wrong.extend(played.err().map(|error| format!("{error:#}")));
    let outcome = if wrong.is_empty() {
        Ok(std::mem::take(&mut chaos.counts))
    } else {
        Err(anyhow!(chaos.report(&wrong.join("\n")).await))
    };
    chaos.cluster.shutdown().await;
    outcome
}

fn bindings() -> Match {
    Match::any().verb("create").resource("pods/binding")
}

fn programs() -> divvy_testbed::programs::Programs {
    crate::cluster::programs()
}

impl Chaos {
    async fn start(seed: u64) -> std::io::Result<Chaos> {
        let mut dice = Dice::new(seed);
        let plan = Plan::draw(&mut dice);
        let mut settings = EmbeddedSettings::new(plan.machines(), programs());
        settings.seed = seed;
        let mut cluster = Embedded::start(settings).await?;
        let gpus = audit::gpus(cluster.machines());
        let mut recorder = Recorder::default();
        for position in 0..plan.nodes.len() {
            cluster
                .join_as(&node_name(position), |spec| {
                    spec.admission = AdmissionOrder::Shuffled {
                        window: Duration::from_millis(20),
                    };
                    spec.timings.default_grace = Duration::from_secs(2);
                    if plan.kubelet_bugs {
                        spec.bugs = divvy_testbed::node::Bugs::as_in_kubernetes_1_36();
                    }
                })
                .await?;
            recorder.listen(cluster.node(&node_name(position))?);
        }
        let nodes = plan.nodes.len();
        Ok(Chaos {
            seed,
            dice,
            plan,
            shapes: BTreeMap::new(),
            later: Vec::new(),
            step: 0,
            cluster,
            gpus,
            recorder,
            began: Instant::now(),
            log: Vec::new(),
            counts: BTreeMap::new(),
            rules: Vec::new(),
            wanted: Vec::new(),
            failing: BTreeSet::new(),
            extender_up: true,
            agents_up: vec![Some(Instant::now()); nodes],
            lost: BTreeSet::new(),
        })
    }

    async fn play(&mut self) -> anyhow::Result<()> {
        self.until(PATIENCE, "the nodes to be ready", async |chaos| {
            quiet::amiss(&chaos.cluster, &chaos.gpus, &BTreeSet::new()).await
        })
        .await?;
        for round in 0..STEPS {
            let (due, rest) = std::mem::take(&mut self.later)
                .into_iter()
                .partition(|(when, _)| *when <= round);
            self.later = rest;
            let due: Vec<(usize, Again)> = due;
            for (_, what) in due {
                self.begin();
                let started = self.again(what).await;
                started.with_context(|| format!("step {}, {what:?}", self.step))?;
                self.end(0).await?;
            }
            self.begin();
            let drawn = self.draw(round).await;
            drawn.with_context(|| format!("step {}", self.step))?;
            let pause_ms = self.dice.one_of(&[0, 5, 20, 60, 150, 300]);
            self.end(pause_ms).await?;
        }
        self.heal().await?;
        self.until(QUIET, "everything that fits to run", async |chaos| {
            quiet::amiss(&chaos.cluster, &chaos.gpus, &chaos.failing).await
        })
        .await?;
        self.tell("quiet".to_owned());
        let waits = |pod: &Value| pod["spec"]["nodeName"].is_null();
        if self.pods().iter().any(waits) {
            self.count("pod waited at quiet");
        }
        let containers = self.recorder.record().runs.len() as u64;
        for pod in self.pods() {
            self.delete(pod["metadata"]["name"].as_str().unwrap_or_default(), None);
        }
        self.until(QUIET, "everything to be given back", async |chaos| {
            quiet::left_behind(&chaos.cluster, &chaos.gpus).await
        })
        .await?;
        self.check()?;
        self.look_for_panics()?;
        // A run without events is meaningless.
        let faults: u64 = self.counts.values().sum();
        if containers < LEAST_STARTED || faults < LEAST_FAULTS {
            bail!("only {containers} containers were started and {faults} faults met");
        }
        self.counts.insert("containers started", containers);
        for (what, part) in [
            ("start refused: memory held", "memory is still held by"),
            ("start refused: GPU unavailable", "is allocated on GPU"),
            ("pod refused for good", "UnexpectedAdmissionError"),
        ] {
            let refusals = self.refusals().iter().filter(|text| text.contains(part)).count();
            if refusals > 0 {
                self.counts.insert(what, refusals as u64);
            }
        }
        Ok(())
    }

    fn begin(&mut self) {
        self.end_rules(self.step);
        self.create_wanted();
    }

    async fn end(&mut self, pause_ms: u64) -> anyhow::Result<()> {
        self.check()?;
        tokio::time::sleep(Duration::from_millis(pause_ms)).await;
        self.step += 1;
        self.check()
    }

    /// Note what the present step does.
    fn does(&mut self, what: impl std::fmt::Display) {
        self.tell(format!("{}: {what}", self.step));
    }

    /// Note and count what the present step does.
    fn counts(&mut self, what: &'static str, place: impl std::fmt::Display) {
        self.does(format_args!("{what} {place}"));
        self.count(what);
    }

    fn tell(&mut self, what: String) {
        self.log.push(format!("{:>6} ms  {what}", self.began.elapsed().as_millis()));
    }

    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    fn faults(&self) -> &Faults {
        self.cluster.api().faults()
    }

    fn pods(&self) -> Vec<Value> {
        self.cluster.api().list("pods", "default").expect("pods are a resource")
    }

    async fn until(
        &mut self,
        limit: Duration,
        what: &str,
        look: impl AsyncFn(&Chaos) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let began = Instant::now();
        loop {
            self.check()?;
            self.create_wanted();
            match look(self).await {
                Ok(()) => return Ok(()),
                Err(seen) if began.elapsed() > limit => {
                    return Err(seen.context(format!("waited {} s for {what}", limit.as_secs())));
                }
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    }

    /// Return the messages of refused PreStartContainer calls, and of permanently refused pods.
    fn refusals(&self) -> Vec<String> {
        let record = self.recorder.record();
        let starts = record.refused_starts.iter();
        let starts = starts.map(|(pod, container, message)| format!("{pod}/{container}: {message}"));
        let pods = record.refused_pods.iter();
        let pods = pods.map(|(pod, reason, message)| format!("{pod}: {reason}: {message}"));
        starts.chain(pods).collect()
    }

    /// Check that no program ended on its own.
    fn check(&self) -> anyhow::Result<()> {
        for (position, up) in self.agents_up.iter().enumerate() {
            let name = node_name(position);
            if up.is_some() && !self.cluster.agent_pid(&name).is_some_and(is_alive) {
                bail!("the agent of {name} ended unexpectedly. {}", self.cluster.agent_log(&name));
            }
        }
        let extender = self.cluster.pids().first().copied();
        if self.extender_up && !extender.is_some_and(is_alive) {
            bail!("the extender ended unexpectedly");
        }
        Ok(())
    }

    fn end_rules(&mut self, at: usize) {
        let (over, left): (Vec<_>, Vec<_>) = std::mem::take(&mut self.rules).into_iter().partition(|(end, ..)| *end <= at);
        self.rules = left;
        for (_, rule, what) in over {
            let fired = self.faults().remove(rule);
            if fired > 0 {
                *self.counts.entry(what).or_default() += fired;
            }
        }
    }

    fn add_rule(&mut self, until: usize, rule: FaultRule, what: &'static str) {
        let id = self.faults().add(rule);
        self.rules.push((until, id, what));
    }

    fn create_wanted(&mut self) {
        for (name, manifest) in std::mem::take(&mut self.wanted) {
            match self.cluster.api().create("pods", manifest.clone()) {
                Ok(_) => self.tell(format!("   {name} is created under a name that was used before")),
                Err(_) => self.wanted.push((name, manifest)),
            }
        }
    }

    /// Create a pod. If an ended pod has the name, delete that pod first, as a controller does.
    fn create(&mut self, name: &str, shape: Shape) {
        if self
            .pods()
            .iter()
            .any(|pod| pod["metadata"]["name"] == name && audit::ended(pod))
            && self.delete(name, Some(0))
        {
            self.count("name used again");
        }
        let manifest = shape.manifest(name).build();
        if self.cluster.api().create("pods", manifest).is_ok() {
            self.note_shape(name, shape);
        }
    }

    fn note_shape(&mut self, name: &str, shape: Shape) {
        if matches!(shape, Shape::Failing(_)) {
            self.failing.insert(name.to_owned());
        } else {
            self.failing.remove(name);
        }
    }

    /// Delete a pod, and return whether it existed.
    fn delete(&mut self, name: &str, grace_period_s: Option<i64>) -> bool {
        let options = DeleteOptions {
            grace_period_s,
            ..DeleteOptions::default()
        };
        self.cluster.api().delete("pods", "default", name, &options).is_ok()
    }

    fn force_delete(&mut self, name: &str) -> bool {
        let running = self
            .pods()
            .iter()
            .any(|pod| pod["metadata"]["name"] == name && pod["status"]["phase"] == "Running");
        let deleted = self.delete(name, Some(0));
        if running && deleted {
            self.count("pod force-deleted while its container ran");
        }
        deleted
    }

    async fn again(&mut self, what: Again) -> std::io::Result<()> {
        self.does(format_args!("{what:?} again"));
        match what {
            Again::Agent(node) => self.start_agent(node).await?,
            Again::Kubelet(node) => self.cluster.node(&node_name(node))?.start_kubelet().await?,
            Again::Extender => self.start_extender().await?,
            Again::Gpu(node, gpu) => {
                if self.lost.contains(&(node, gpu)) && self.driver(node, json!({"op": "lost", "gpu": gpu, "lost": false})).await {
                    self.count("GPU recovered");
                    self.lost.remove(&(node, gpu));
                }
            }
        }
        Ok(())
    }

    /// Draw a step, and do it. All that is drawn depends on the seed alone.
    async fn draw(&mut self, round: usize) -> std::io::Result<()> {
        let position = self.dice.between(0, 1) as usize;
        let gpu = self.dice.between(0, self.plan.nodes[position].len() as u64 - 1) as usize;
        let name = if round < 5 {
            format!("p{round}")
        } else {
            format!("p{}", self.dice.between(0, 8))
        };
        let drawn = Shape::draw(&mut self.dice);
        let soon = round + self.dice.between(1, 4) as usize;
        let node = node_name(position);
        match (round < 5 || self.dice.percent(50), self.dice.between(0, 99)) {
            (true, kind) if round < 5 || kind <= 44 => {
                self.does(format_args!("create {name}, {drawn:?}"));
                self.shapes.insert(name.clone(), drawn);
                self.create(&name, drawn);
            }
            (true, 0..=59) => {
                self.does(format_args!("delete {name}"));
                self.delete(&name, None);
            }
            (true, 60..=71) => {
                self.does(format_args!("delete {name} by force"));
                self.force_delete(&name);
            }
            (true, _) => {
                // Most pods are replaced by equal pods, as a controller does; immediately after a forced deletion, or as soon as the name is free.
                let before = self.shapes.get(&name).copied();
                let shape = before.filter(|_| self.dice.percent(70)).unwrap_or(drawn);
                let force = self.dice.percent(60);
                self.does(format_args!("replace {name} by {shape:?}, by force: {force}"));
                self.shapes.insert(name.clone(), shape);
                let deleted = if force {
                    self.force_delete(&name)
                } else {
                    self.delete(&name, None)
                };
                if deleted {
                    self.count("name used again");
                }
                self.note_shape(&name, shape);
                self.wanted.retain(|(wanted, _)| *wanted != name);
                self.wanted.push((name.clone(), shape.manifest(&name).build()));
                self.create_wanted();
            }
            (false, 0..=11) => {
                self.later.push((soon, Again::Agent(position)));
                let kill = self.dice.percent(80);
                let Some(since) = self.agents_up[position].take() else {
                    return Ok(());
                };
                if kill {
                    self.counts("agent killed", &node);
                    self.cluster.kill_agent(&node).await?;
                } else {
                    self.counts("agent stopped", &node);
                    let ended_well = self.cluster.stop_agent(&node).await?;
                    // A process that has just started has no handler for the signal yet, and would be killed by it.
                    if !ended_well && since.elapsed() > Duration::from_secs(1) {
                        return Err(std::io::Error::other(
                            "the agent did not end with status 0 within 2 s of SIGTERM",
                        ));
                    }
                }
            }
            (false, 12..=16) => {
                if self.kill_probe(position)? {
                    self.counts("probe killed", &node);
                }
            }
            (false, 17..=20) => {
                self.later.push((soon, Again::Kubelet(position)));
                let hard = self.dice.percent(50);
                self.counts("kubelet stopped", &node);
                self.cluster.node(&node)?.stop_kubelet(hard).await;
            }
            (false, 21..=28) => {
                let hard = self.dice.percent(50);
                self.counts("kubelet restarted", &node);
                self.cluster.node(&node)?.restart_kubelet(hard).await?;
            }
            (false, 29..=30) => {
                self.does(format_args!("replace the plugin directory of {node}"));
                self.cluster.node(&node)?.replace_device_plugin_dir().await?;
            }
            (false, 31..=33) => {
                self.does(format_args!("drop the streams of {node}"));
                self.cluster.node(&node)?.drop_streams();
            }
            (false, 34..=36) => {
                let agent_first = self.dice.percent(50);
                self.counts("node rebooted", format_args!("{node}, the agent first: {agent_first}"));
                self.cluster.kill_agent(&node).await?;
                self.agents_up[position] = None;
                if agent_first {
                    self.cluster.node(&node)?.stop_kubelet(true).await;
                    self.start_agent(position).await?;
                }
                self.cluster.node(&node)?.reboot().await?;
                self.start_agent(position).await?;
            }
            (false, 37..=48) => {
                self.later.push((soon, Again::Extender));
                if std::mem::take(&mut self.extender_up) {
                    self.counts("extender killed", "");
                    self.cluster.kill_extender().await?;
                }
            }
            (false, 49..=54) => {
                let xid = self.dice.one_of(&[48, 63, 79, 94]);
                if self.driver(position, json!({"op": "xid", "gpu": gpu, "xid": xid})).await {
                    self.counts("GPU died", format_args!("{gpu} of {node}: XID {xid}"));
                }
            }
            (false, 55..=59) => {
                self.later.push((soon + 3, Again::Gpu(position, gpu)));
                if self.driver(position, json!({"op": "lost", "gpu": gpu, "lost": true})).await {
                    self.counts("GPU died", format_args!("{gpu} of {node}: lost"));
                    self.lost.insert((position, gpu));
                }
            }
            (false, 60..=63) => {
                if self.driver(position, json!({"op": "xid", "gpu": gpu, "xid": 31})).await {
                    self.counts("harmless XID", format_args!("{gpu} of {node}"));
                }
            }
            (false, 64..=65) => {
                if self.driver(position, json!({"op": "hang", "seconds": 1})).await {
                    self.counts("driver hung", &node);
                }
            }
            (false, 66..=68) => {
                self.counts("watches cut", "");
                self.faults().cut_watches();
            }
            (false, 69..=71) => {
                // These watches cannot resume, so the clients must list again.
                self.counts("watches cut", "and compacted");
                self.faults().compact();
                self.faults().cut_watches();
            }
            (false, 72..=76) => {
                // Caches become stale.
                let ms = self.dice.between(100, 600);
                self.counts("watches held", format_args!("{ms} ms"));
                self.faults().hold_watches(true);
                self.later(ms, |faults| faults.hold_watches(false));
            }
            (false, 77..=86) => {
                let (client, what) = self.dice.one_of(&[
                    ("extender", "refused: extender"),
                    ("agent-*", "refused: agents"),
                    ("", "refused: kubelets and scheduler"),
                ]);
                let effect = Effect::Refuse(self.dice.one_of(&[500, 409, 429]));
                let percent = self.dice.one_of(&[30, 60, 100]);
                let steps = self.dice.between(2, 5) as usize;
                let cut = self.dice.percent(50);
                self.does(format_args!(
                    "{what}: {effect:?}, {percent} %, {steps} steps, watches cut: {cut}"
                ));
                let rule = FaultRule::new(Match::any().client(client), effect).chance(percent, self.seed + self.step as u64);
                self.add_rule(self.step + steps, rule, what);
                // Watches must then be resumed during the fault.
                if cut {
                    self.faults().cut_watches();
                }
            }
            (false, 87..=92) => {
                let times = self.dice.between(1, 3);
                self.does(format_args!("lose {times} answers to bindings"));
                let rule = FaultRule::new(bindings(), Effect::LoseAnswer).times(times);
                self.add_rule(usize::MAX, rule, "binding answer lost");
            }
            (false, 93..=96) => {
                let ms = self.dice.between(50, 400);
                let steps = self.dice.between(2, 5) as usize;
                self.does(format_args!("{steps} steps with bindings that take {ms} ms"));
                let effect = Effect::Latency(Duration::from_millis(ms));
                self.add_rule(self.step + steps, FaultRule::new(bindings(), effect), "binding delayed");
            }
            (false, _) => {
                let ms = self.dice.between(200, 1000);
                self.counts("API down", format_args!("{ms} ms"));
                self.faults().set_down(true);
                self.later(ms, |faults| faults.set_down(false));
            }
        }
        Ok(())
    }

    fn later(&self, ms: u64, then: impl FnOnce(&Faults) + Send + 'static) {
        let faults = self.faults().clone();
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(ms)).await;
            then(&faults);
        });
    }

    async fn start_agent(&mut self, node: usize) -> std::io::Result<()> {
        if self.agents_up[node].is_none() {
            self.cluster.start_agent(&node_name(node)).await?;
            self.agents_up[node] = Some(Instant::now());
        }
        Ok(())
    }

    /// Start the extender without waiting until it is ready, because it cannot become ready while the API server is down.
    async fn start_extender(&mut self) -> std::io::Result<()> {
        if !self.extender_up {
            if let Ok(Err(error)) = tokio::time::timeout(Duration::from_millis(300), self.cluster.start_extender()).await {
                return Err(error);
            }
            self.extender_up = true;
        }
        Ok(())
    }

    /// Send a request to the node's simulated driver, and return whether the driver accepted the change. Without a running probe,
    /// nothing listens.
    async fn driver(&self, node: usize, request: Value) -> bool {
        let name = node_name(node);
        let sent = self.cluster.driver(&name, request);
        matches!(tokio::time::timeout(Duration::from_secs(2), sent).await, Ok(Ok(())))
    }

    fn kill_probe(&self, node: usize) -> std::io::Result<bool> {
        let Some(agent) = self.cluster.agent_pid(&node_name(node)) else {
            return Ok(false);
        };
        for probe in children(agent) {
            if let Some(pid) = i32::try_from(probe).ok().and_then(rustix::process::Pid::from_raw) {
                // The process may just have ended.
                return Ok(rustix::process::kill_process(pid, rustix::process::Signal::KILL).is_ok());
            }
        }
        Ok(false)
    }

    /// End all faults, and start all programs again.
    async fn heal(&mut self) -> anyhow::Result<()> {
        self.tell("heal".to_owned());
        self.end_rules(usize::MAX);
        self.faults().clear();
        if !self.extender_up {
            self.cluster.start_extender().await?;
            self.extender_up = true;
        }
        for node in 0..self.plan.nodes.len() {
            self.cluster.node(&node_name(node))?.start_kubelet().await?;
            self.start_agent(node).await?;
            let until = Instant::now() + PATIENCE;
            for gpu in 0..self.plan.nodes[node].len() {
                while !self.driver(node, json!({"op": "lost", "gpu": gpu, "lost": false})).await {
                    if Instant::now() > until {
                        bail!(
                            "the probe of n{node} does not come back. {}",
                            self.cluster.agent_log(&node_name(node))
                        );
                    }
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
        // Also end the faults that would end later.
        tokio::time::sleep(Duration::from_millis(100)).await;
        self.faults().clear();
        Ok(())
    }

    fn logs(&self) -> PathBuf {
        self.cluster.kubeconfig().parent().unwrap_or(Path::new("/")).join("logs")
    }

    fn look_for_panics(&self) -> anyhow::Result<()> {
        for entry in std::fs::read_dir(self.logs()).into_iter().flatten().flatten() {
            let text = std::fs::read_to_string(entry.path()).unwrap_or_default();
            if let Some(line) = text.lines().find(|line| line.contains("panicked at")) {
                bail!("{}: {line}", entry.path().display());
            }
        }
        Ok(())
    }

    async fn report(&mut self, what: &str) -> String {
        let mut said = String::new();
        for path in ["/gpushare-scheduler/inspect", "/readyz", "/metrics"] {
            let answer = self.cluster.ask_extender("GET", path, "").await;
            said.push_str(&answer.map_or_else(|error| error.to_string(), |(_, body)| body + "\n"));
        }
        let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("chaos-{}", self.seed));
        let copied = std::fs::create_dir_all(&kept).and_then(|()| {
            for entry in std::fs::read_dir(self.logs())?.flatten() {
                std::fs::copy(entry.path(), kept.join(entry.file_name()))?;
            }
            let pods = serde_json::to_string_pretty(&self.pods())?;
            std::fs::write(kept.join("pods.json"), pods)?;
            std::fs::write(kept.join("extender.txt"), said)?;
            std::fs::write(kept.join("refusals.txt"), self.refusals().join("\n"))
        });
        let kept = copied.map_or_else(|error| format!("not kept: {error}"), |()| kept.display().to_string());
        format!(
            "seed {} (again: DIVVY_CHAOS_SEED={}):\n{what}\n\nmachines: {:?}, kubelet bugs: {}\n{}\nlogs: {kept}",
            self.seed,
            self.seed,
            self.plan.nodes,
            self.plan.kubelet_bugs,
            self.log.join("\n")
        )
    }
}

/// Return the state letter and the parent PID of a process.
fn stat(pid: u32) -> Option<(char, u32)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name is in parentheses and may contain any characters.
    let mut fields = text.rsplit_once(')')?.1.split_whitespace();
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}

fn is_alive(pid: u32) -> bool {
    stat(pid).is_some_and(|(state, _)| !matches!(state, 'Z' | 'X'))
}

fn children(of: u32) -> Vec<u32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid| stat(*pid).is_some_and(|(state, parent)| parent == of && state != 'Z'))
        .collect()
}
