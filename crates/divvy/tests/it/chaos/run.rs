//! Plays a plan on a new cluster.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use divvy_testbed::api::{DeleteOptions, Effect, Faults, Match, Rule, RuleId};
use divvy_testbed::embedded::{Embedded, Settings};
use divvy_testbed::node::AdmissionOrder;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::audit::{self, Gpus};
use super::plan::{Op, Plan, Shape, Who};
use super::quiet;
use crate::record::Recorder;

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

struct Chaos {
    seed: u64,
    plan: Plan,
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
    let plan = Plan::draw(seed);
    let mut chaos = Chaos::start(seed, plan)
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

fn programs() -> divvy_testbed::programs::Programs {
    crate::cluster::programs()
}

impl Chaos {
    async fn start(seed: u64, plan: Plan) -> std::io::Result<Chaos> {
        let mut settings = Settings::new(plan.machines(), programs());
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
            plan,
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
        for (at, step) in self.plan.steps.clone().into_iter().enumerate() {
            self.end_rules(at);
            self.create_wanted();
            self.tell(format!("{at}: {:?}", step.op));
            let performed = self.perform(at, &step.op).await;
            performed.with_context(|| format!("step {at}, {:?}", step.op))?;
            self.check()?;
            tokio::time::sleep(Duration::from_millis(step.pause_ms)).await;
            self.check()?;
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

    fn add_rule(&mut self, until: usize, rule: Rule, what: &'static str) {
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

    async fn perform(&mut self, at: usize, op: &Op) -> std::io::Result<()> {
        match *op {
            Op::Create { ref name, shape } => self.create(name, shape),
            Op::Delete { ref name } => drop(self.delete(name, None)),
            Op::ForceDelete { ref name } => drop(self.force_delete(name)),
            Op::Replace { ref name, shape, force } => {
                if if force {
                    self.force_delete(name)
                } else {
                    self.delete(name, None)
                } {
                    self.count("name used again");
                }
                self.note_shape(name, shape);
                self.wanted.retain(|(wanted, _)| wanted != name);
                self.wanted.push((name.clone(), shape.manifest(name).build()));
                self.create_wanted();
            }
            Op::KillAgent { node } if self.agents_up[node].is_some() => {
                self.agents_up[node] = None;
                self.count("agent killed");
                self.cluster.kill_agent(&node_name(node)).await?;
            }
            Op::StopAgent { node } => {
                if let Some(since) = self.agents_up[node].take() {
                    self.count("agent stopped");
                    let ended_well = self.cluster.stop_agent(&node_name(node)).await?;
                    // A process that has just started has no handler for the signal yet, and would be killed by it.
                    if !ended_well && since.elapsed() > Duration::from_secs(1) {
                        return Err(std::io::Error::other(
                            "the agent did not end with status 0 within 2 s of SIGTERM",
                        ));
                    }
                }
            }
            Op::StartAgent { node } => self.start_agent(node).await?,
            Op::KillProbe { node } => {
                if self.kill_probe(node)? {
                    self.count("probe killed");
                }
            }
            Op::StopKubelet { node, hard } => {
                self.count("kubelet stopped");
                self.cluster.node(&node_name(node))?.stop_kubelet(hard).await;
            }
            Op::StartKubelet { node } => self.cluster.node(&node_name(node))?.start_kubelet().await?,
            Op::RestartKubelet { node, hard } => {
                self.count("kubelet restarted");
                self.cluster.node(&node_name(node))?.restart_kubelet(hard).await?;
            }
            Op::ReplacePluginDirectory { node } => self.cluster.node(&node_name(node))?.replace_device_plugin_dir().await?,
            Op::DropStreams { node } => self.cluster.node(&node_name(node))?.drop_streams(),
            Op::Reboot { node, agent_first } => {
                self.count("node rebooted");
                self.cluster.kill_agent(&node_name(node)).await?;
                self.agents_up[node] = None;
                if agent_first {
                    self.cluster.node(&node_name(node))?.stop_kubelet(true).await;
                    self.start_agent(node).await?;
                }
                self.cluster.node(&node_name(node))?.reboot().await?;
                self.start_agent(node).await?;
            }
            Op::KillExtender if self.extender_up => {
                self.extender_up = false;
                self.count("extender killed");
                self.cluster.kill_extender().await?;
            }
            Op::StartExtender => self.start_extender().await?,
            Op::GpuDies { node, gpu, xid } => {
                if self.driver(node, json!({"op": "xid", "gpu": gpu, "xid": xid})).await {
                    self.count("GPU died");
                }
            }
            Op::GpuIsLost { node, gpu } => {
                if self.driver(node, json!({"op": "lost", "gpu": gpu, "lost": true})).await {
                    self.count("GPU died");
                    self.lost.insert((node, gpu));
                }
            }
            Op::GpuRecovers { node, gpu } => {
                if self.lost.contains(&(node, gpu)) && self.driver(node, json!({"op": "lost", "gpu": gpu, "lost": false})).await {
                    self.count("GPU recovered");
                    self.lost.remove(&(node, gpu));
                }
            }
            Op::HarmlessXid { node, gpu } => {
                if self.driver(node, json!({"op": "xid", "gpu": gpu, "xid": 31})).await {
                    self.count("harmless XID");
                }
            }
            Op::DriverHangs { node } => {
                if self.driver(node, json!({"op": "hang", "seconds": 1})).await {
                    self.count("driver hung");
                }
            }
            Op::CutWatches => {
                self.count("watches cut");
                self.faults().cut_watches();
            }
            Op::Compact => {
                self.count("watches cut");
                self.faults().compact();
                self.faults().cut_watches();
            }
            Op::HoldWatches { ms } => {
                self.count("watches held");
                self.faults().hold_watches(true);
                self.later(ms, |faults| faults.hold_watches(false));
            }
            Op::Refuse {
                who,
                code,
                percent,
                steps,
                cut,
            } => {
                let (client, what) = match who {
                    Who::Extender => ("extender", "refused: extender"),
                    Who::Agents => ("agent-*", "refused: agents"),
                    Who::InProcess => ("", "refused: kubelets and scheduler"),
                };
                let effect = Effect::Refuse(code);
                let rule = Rule::new(Match::any().client(client), effect).chance(percent, self.seed + at as u64);
                self.add_rule(at + steps, rule, what);
                if cut {
                    self.faults().cut_watches();
                }
            }
            Op::LoseBindingAnswers { times } => {
                let bindings = Match::any().verb("create").resource("pods/binding");
                self.add_rule(
                    usize::MAX,
                    Rule::new(bindings, Effect::LoseAnswer).times(times),
                    "binding answer lost",
                );
            }
            Op::SlowBindings { ms, steps } => {
                let bindings = Match::any().verb("create").resource("pods/binding");
                let effect = Effect::Latency(Duration::from_millis(ms));
                self.add_rule(at + steps, Rule::new(bindings, effect), "binding delayed");
            }
            Op::ApiDown { ms } => {
                self.count("API down");
                self.faults().set_down(true);
                self.later(ms, |faults| faults.set_down(false));
            }
            // The program is already down.
            Op::KillAgent { .. } | Op::KillExtender => {}
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
