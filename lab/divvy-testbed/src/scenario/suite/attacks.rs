//! Hostile pods, each with another attack on the files of its share, next to an honest pod on the same GPU (`divvy agent --guard shadow`).
//!
//! The hostile program is root in its container, without capabilities. During each attack the agent answers, a bystander starts, the honest pod keeps its
//! share, and an event of the hostile pod names the attack, unless the kernel refuses all of it.

use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use divvy_model::out_of_service::{out_of_service_key, under_test_key};
use divvy_model::{Enforcement, Gpu, Health, names};
use k8s_openapi::api::core::v1::{ContainerStatus, Node, Pod};
use kube::api::{Api, Patch, PatchParams};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use super::node_configs::configure;
use super::programs::{restart_with, restored};
use crate::builders::pod;
use crate::scenario::isolation::{self, LoadedLibrary, UsingPod};
use crate::scenario::play::NAMESPACE;
use crate::scenario::{Play, PlayStop, RunsGpuPrograms, TestbedMachine};

const MIB: u64 = 1 << 20;
/// What a context of the simulated driver takes.
const CONTEXT_MIB: u64 = 300;
/// How long an answer of the agent may take.
const ANSWERS: Duration = Duration::from_secs(1);
/// How long a pod may take to start during an attack.
const STARTS: Duration = Duration::from_secs(5);
/// How many times as long as without an attack it may take, if that is more: hostile programs use the processors, too, and a machine may have few of them.
const SLOWER: u32 = 5;
/// How long it may take before any attack.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long an agent that is restarted may take until it offers its GPUs. A lease that it waits for takes 45 s (`/proc/sys/fs/lease-break-time`).
const RESTARTS: Duration = Duration::from_secs(30);
/// For how long an attack goes on at least: some of the agent's measurements, of which there is one a second.
const LENGTH: Duration = Duration::from_secs(4);
/// How long after the beginning of an attack the agent must have reported it.
const REPORTS: Duration = Duration::from_secs(8);
/// The most that the files of a share may take of the node's disk, in bytes.
const ON_DISK: u64 = 16 * MIB;
/// The shares of the pods in GiB. A context is more than a quarter of the hostile pod's.
const HONEST: u64 = 3;
const HOSTILE: u64 = 1;
/// What the honest pod may use of the GPU's compute time, in percent.
const CORES: &str = "30";
/// The piece in which the honest program allocates, in MiB.
const PIECE: u64 = 16;

const CHANGED: &str = "GuardFileChanged";
const BUSY: &str = "GuardFileBusy";
const AVOIDED: &str = "GuardAvoided";
const EXCEEDED: &str = "GpuMemoryExceeded";
/// The events that name a hostile pod.
const REASONS: [&str; 5] = [CHANGED, BUSY, AVOIDED, EXCEEDED, "TooManyGpuProcesses"];

/// What must come of an attack.
#[derive(Debug, Clone, Copy)]
enum ExpectedResult {
    /// The kernel refuses every call, and nothing is reported.
    Refused,
    /// One of these events.
    Named(&'static [&'static str]),
    /// The same, if the kernel does not refuse every call.
    NamedIfDone(&'static [&'static str]),
}

/// What the hostile program does besides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Besides {
    Nothing,
    /// It takes 1 GiB more than its share, with the guard that it finds after the attack has begun.
    Allocates,
    /// It does so without the guard, before the attack begins.
    AvoidsTheGuard,
    /// It makes a context without the guard, before the attack begins.
    Starts,
}

/// An attack that `divvy-cuda-program` knows by this name.
#[derive(Debug, Clone, Copy)]
struct Attack {
    name: &'static str,
    besides: Besides,
    expected: ExpectedResult,
}

const fn attack(name: &'static str, expected: ExpectedResult) -> Attack {
    Attack {
        name,
        besides: Besides::Nothing,
        expected,
    }
}

const fn with(besides: Besides, attack: Attack) -> Attack {
    Attack { besides, ..attack }
}

/// What happens at the same time on the two nodes. What can delay an agent is alone on its node.
const TURNS: [[&[Attack]; 2]; 5] = {
    use Besides::{Allocates, AvoidsTheGuard};
    use ExpectedResult::{Named, NamedIfDone, Refused};
    [
        // The agent has both files open for writing, so there is no lease.
        [&[attack("lease-limits", Refused)], &[attack("lease-usage", Refused)]],
        [
            &[attack("locks", Named(&[CHANGED, BUSY]))],
            &[attack("writers", Named(&[CHANGED, BUSY]))],
        ],
        [
            &[attack("grow", Named(&[CHANGED]))],
            &[attack("truncate", Named(&[CHANGED])), attack("chmod", Named(&[CHANGED]))],
        ],
        [
            // Root without capabilities can give a file only to a group that it is in.
            &[
                attack("forged-version", Named(&[CHANGED])),
                attack("chown", NamedIfDone(&[CHANGED])),
            ],
            &[
                attack("replaced-neighbor", Refused),
                with(Allocates, attack("replaced-files", NamedIfDone(&[AVOIDED, EXCEEDED]))),
            ],
        ],
        [
            &[with(AvoidsTheGuard, attack("full-memory", Named(&[AVOIDED, EXCEEDED])))],
            &[with(AvoidsTheGuard, attack("forged-slots", Named(&[EXCEEDED, CHANGED])))],
        ],
    ]
};

/// A node with an honest pod.
struct Lane {
    node: String,
    agent: SocketAddr,
    honest: UsingPod,
    limits: StatedLimits,
}

/// A hostile pod.
struct Hostile {
    attack: Attack,
    user: UsingPod,
}

/// What the file of limits says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
struct StatedLimits {
    bytes: u64,
    rate: u64,
    is_stopped: bool,
}

/// What became of an attack.
#[derive(Debug, Deserialize)]
struct AttackOutcome {
    says: String,
    tried: u64,
    done: u64,
    on_disk: u64,
}

/// What `divvy-cuda-program` answers to `pieces`, in bytes.
#[derive(Debug, Deserialize)]
struct Pieces {
    before: u64,
    got: u64,
    refused: Option<String>,
    freed: u64,
}

/// The machines have one GPU and three GPUs.
pub(in crate::scenario) async fn play<C: RunsGpuPrograms>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene("Two nodes have the guard, and on each an honest pod uses its share of a GPU")
        .await?;
    let nodes = [
        play.ready(TestbedMachine::Laptop).await?,
        play.ready(TestbedMachine::Mixed).await?,
    ];
    for node in &nodes {
        play.cluster.provide_cuda(node, true)?;
    }
    let played = attacked(play, &nodes).await;
    for (node, machine) in nodes.iter().zip([TestbedMachine::Laptop, TestbedMachine::Mixed]) {
        restored(play, node, machine).await?;
    }
    played
}

async fn attacked<C: RunsGpuPrograms>(play: &mut Play<'_, C>, nodes: &[String; 2]) -> Result<(), PlayStop> {
    configure(play, json!({"default": {"guard": "shadow", "on-escape": "event"}})).await?;
    let mut lanes = Vec::new();
    for (node, name) in nodes.iter().zip(["honest-1", "honest-2"]) {
        play.enforces(node, Enforcement::GUARD, true).await?;
        lanes.push(lane(play, node, name).await?);
    }
    play.scene("Before any attack, a pod starts on each node").await?;
    let (pods, usual) = bystanders(play, &lanes, "usual", PATIENCE).await?;
    for name in &pods {
        play.delete(NAMESPACE, name, "it has shown how long a start takes").await?;
    }
    let most = STARTS.max(usual * SLOWER);
    for (turn, attacks) in TURNS.iter().enumerate() {
        let all = attacks.iter().flat_map(|attacks| attacks.iter());
        let names: Vec<&str> = all.map(|attack| attack.name).collect();
        play.scene(&format!("At the same time: {}", names.join(", "))).await?;
        one_turn(play, &mut lanes, turn, attacks, most).await?;
    }
    under_test(play, &lanes[1]).await?;
    killed(play, &mut lanes).await
}

/// Start an honest pod. The simulated driver lets programs see all GPUs of a node, and they use the first one.
async fn lane<C: RunsGpuPrograms>(play: &mut Play<'_, C>, node: &str, name: &'static str) -> Result<Lane, PlayStop> {
    let first = gpus(play, node).await?.into_iter().find(|gpu| gpu.index == 0);
    let first = first.ok_or_else(|| io::Error::other("the node has no GPU"))?;
    let manifest = pod(name).gpu_mem(HONEST).annotation(names::GPU_CORES, CORES);
    let manifest = manifest.annotation(names::GPU_UUID, &first.uuid);
    let manifest = manifest.select(node).grace_seconds(1);
    let text = format!("asks for {HONEST} GiB and {CORES} % of the compute time");
    let mut honest = isolation::run(play, node, name, manifest, &text, LoadedLibrary::Usual).await?;
    isolation::ask(play, &mut honest, "start").await?;
    isolation::measured(play, &mut honest).await?;
    isolation::gets(play, &mut honest, 512).await?;
    // Each launch takes 0.1 ms.
    honest.program.ask_for::<Value>("kernel 100000 1000").await?;
    Ok(Lane {
        node: node.to_owned(),
        agent: play.cluster.agents_address(node).await?,
        limits: honest.program.ask_for("limits").await?,
        honest,
    })
}

/// Play one line of [`TURNS`]. A bystander may take `most` to start.
async fn one_turn<C: RunsGpuPrograms>(
    play: &mut Play<'_, C>,
    lanes: &mut [Lane],
    turn: usize,
    attacks: &[&[Attack]; 2],
    most: Duration,
) -> Result<(), PlayStop> {
    let mut all = Vec::new();
    for (lane, attacks) in lanes.iter().zip(attacks) {
        for attack in *attacks {
            all.push(hostile(play, lane, attack.name, *attack).await?);
        }
    }
    let watches: Vec<AgentWatch> = lanes.iter().map(|lane| AgentWatch::begin(lane.agent)).collect();
    let began = Instant::now();
    for of in &mut all {
        begin(play, of).await?;
    }
    let (bystanders, _) = bystanders(play, lanes, &format!("bystander-{turn}"), most).await?;
    for lane in lanes.iter_mut() {
        keeps_its_share(play, lane).await?;
    }
    for of in &all {
        reported(play, of, began).await?;
    }
    tokio::time::sleep(LENGTH.saturating_sub(began.elapsed())).await;
    for of in &mut all {
        ended(play, of).await?;
    }
    for (watch, lane) in watches.into_iter().zip(lanes.iter()) {
        watch.end(play, &lane.node).await?;
    }
    let honest = lanes.iter().map(|lane| lane.honest.pod);
    for name in honest.chain(bystanders.iter().map(String::as_str)) {
        is_not_named(play, name).await?;
    }
    for of in all {
        let pod = of.user.pod;
        of.user.program.end().await?;
        play.delete(NAMESPACE, pod, "the attack is over").await?;
    }
    for name in &bystanders {
        play.delete(NAMESPACE, name, "the attack is over").await?;
    }
    Ok(())
}

/// Start a hostile pod on the GPU of an honest one.
async fn hostile<C: RunsGpuPrograms>(
    play: &mut Play<'_, C>,
    lane: &Lane,
    name: &'static str,
    attack: Attack,
) -> Result<Hostile, PlayStop> {
    let manifest = pod(name).gpu_mem(HOSTILE).annotation(names::GPU_UUID, &lane.honest.gpu);
    let manifest = manifest.confined().select(&lane.node).grace_seconds(1);
    let library = match attack.besides {
        Besides::AvoidsTheGuard | Besides::Starts => LoadedLibrary::Real,
        Besides::Nothing | Besides::Allocates => LoadedLibrary::Usual,
    };
    let text = format!("asks for {HOSTILE} GiB of the same GPU");
    let user = isolation::run(play, &lane.node, name, manifest, &text, library).await?;
    Ok(Hostile { attack, user })
}

/// Begin an attack. What the kernel says of the program must be what a hostile tenant has.
async fn begin<C: RunsGpuPrograms>(play: &mut Play<'_, C>, of: &mut Hostile) -> Result<(), PlayStop> {
    #[derive(Debug, Deserialize)]
    struct ProgramStanding {
        says: String,
        user: String,
        capabilities: String,
        seccomp: String,
    }
    let too_much = format!("allocate {}", of.user.share + 1024);
    match of.attack.besides {
        Besides::Nothing | Besides::Allocates => {}
        Besides::Starts => drop(isolation::ask(play, &mut of.user, "start").await?),
        Besides::AvoidsTheGuard => {
            isolation::ask(play, &mut of.user, "start").await?;
            isolation::ask(play, &mut of.user, &too_much).await?;
        }
    }
    let held = play.cluster.held(&of.user.gpu)?.get(&of.user.program.pid()).copied();
    let request = format!("attack {} {}", of.attack.name, held.unwrap_or_default());
    let standing: ProgramStanding = of.user.program.ask_for(&request).await?;
    let about = format!("{NAMESPACE}/{}", of.user.pod);
    play.step("attacks", &about, &standing.says, Vec::new())?;
    let is_root = standing.user == "0" && standing.capabilities.bytes().all(|digit| digit == b'0');
    // Only a real container runtime has a profile.
    let is_confined = !play.cluster.has_seccomp() || standing.seccomp == "2";
    play.check(is_root && is_confined, "it is root without capabilities", || {
        format!("{standing:?}")
    })?;
    if of.attack.besides == Besides::Allocates {
        isolation::ask(play, &mut of.user, "start").await?;
        isolation::ask(play, &mut of.user, &too_much).await?;
    }
    Ok(())
}

/// Start a pod on the GPU of each honest pod, check that each runs in time, and return their names and how long the slowest one took.
async fn bystanders<C: RunsGpuPrograms>(
    play: &mut Play<'_, C>,
    lanes: &[Lane],
    name: &str,
    most: Duration,
) -> Result<(Vec<String>, Duration), PlayStop> {
    let names: Vec<String> = (1..=lanes.len()).map(|lane| format!("{name}-{lane}")).collect();
    let created = Instant::now();
    for (lane, name) in lanes.iter().zip(&names) {
        let manifest = pod(name).gpu_mem(1).annotation(names::GPU_UUID, &lane.honest.gpu);
        let manifest = manifest.select(&lane.node).grace_seconds(1);
        play.create(&manifest, "asks for 1 GiB of the same GPU").await?;
    }
    let mut slowest = Duration::ZERO;
    for name in &names {
        slowest = slowest.max(starts(play, name, created, most).await?);
    }
    Ok((names, slowest))
}

/// Wait until a pod runs, check how long that took, and return it. A pod that is very late is not waited for.
async fn starts<C: RunsGpuPrograms>(
    play: &mut Play<'_, C>,
    name: &str,
    created: Instant,
    most: Duration,
) -> Result<Duration, PlayStop> {
    let pods: Api<Pod> = Api::namespaced(play.cluster.client(), NAMESPACE);
    loop {
        let object = pods.get(name).await.map_err(io::Error::other)?;
        let seen = created.elapsed();
        let phase = object.status.as_ref().and_then(|status| status.phase.as_deref());
        let is_running = phase == Some("Running");
        if is_running || seen > most * 4 {
            // On a busy machine, this may see late that it runs.
            let took = seen.min(started(&object).unwrap_or(seen));
            let text = format!("{name} runs within {} s ({} ms)", most.as_secs(), took.as_millis());
            play.check(is_running && took <= most, &text, || {
                format!("it is {} after {} ms", phase.unwrap_or("nowhere"), took.as_millis())
            })?;
            return Ok(took);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Return how long a pod took to start at most according to its object, whose times are whole seconds.
fn started(pod: &Pod) -> Option<Duration> {
    let created = pod.metadata.creation_timestamp.as_ref()?;
    let running = |container: &ContainerStatus| container.state.as_ref()?.running.as_ref()?.started_at.clone();
    let started = pod.status.as_ref()?.container_statuses.as_ref()?.first().and_then(running)?;
    let took = Duration::try_from(started.0.duration_since(created.0)).ok()?;
    Some(took + Duration::from_secs(1))
}

/// Check that an honest pod has its share, no more and no less, and that its launches go on.
async fn keeps_its_share<C: RunsGpuPrograms>(play: &mut Play<'_, C>, lane: &mut Lane) -> Result<(), PlayStop> {
    let honest = &mut lane.honest;
    let name = honest.pod;
    let limits: StatedLimits = honest.program.ask_for("limits").await?;
    let is_same = limits == lane.limits && limits.bytes == honest.share * MIB;
    play.check(is_same, &format!("{name} has the same limits as before"), || {
        format!("{limits:?}; before: {:?}", lane.limits)
    })?;
    let held = isolation::held(play, honest)?;
    let pieces: Pieces = honest
        .program
        .ask_for(&format!("pieces {} {}", PIECE * MIB, honest.share))
        .await?;
    let (left, got) = (pieces.before / MIB, pieces.got * PIECE);
    let is_refused = pieces.refused.as_deref() == Some("CUDA_ERROR_OUT_OF_MEMORY");
    let is_whole = left + held == honest.share && (left - left % PIECE) == got && pieces.freed == pieces.before;
    let text = format!("{name} gets all that is left of its share, and is refused then");
    play.check(is_refused && is_whole, &text, || {
        format!(
            "its share is {} MiB, the driver has given it {held} MiB; {pieces:?}",
            honest.share
        )
    })?;
    let work: Value = honest.program.ask_for("work kernels 5 0 30").await?;
    let has_launched = work["launches"].as_u64() > Some(0);
    play.check(has_launched, &format!("{name} launches"), || work.to_string())?;
    Ok(())
}

/// Wait until an event names a hostile pod, if one must.
async fn reported<C: RunsGpuPrograms>(play: &mut Play<'_, C>, of: &Hostile, began: Instant) -> Result<(), PlayStop> {
    let ExpectedResult::Named(reasons) = of.attack.expected else {
        return Ok(());
    };
    let found = named(play, of.user.pod, reasons, began + REPORTS).await?;
    says_who(play, of.user.pod, reasons, &found)
}

fn says_who<C: RunsGpuPrograms>(play: &mut Play<'_, C>, name: &str, reasons: &[&str], found: &[String]) -> Result<(), PlayStop> {
    let about = format!("{NAMESPACE}/{name}");
    for text in found {
        play.step("event", &about, text, Vec::new())?;
    }
    let text = format!("an event of {name} is {}", reasons.join(" or "));
    play.check(!found.is_empty(), &text, || "there is none".to_owned())?;
    Ok(())
}

/// Wait until a pod has an event of one of these reasons, or the time is up.
async fn named<C: RunsGpuPrograms>(
    play: &Play<'_, C>,
    pod: &str,
    reasons: &[&str],
    until: Instant,
) -> Result<Vec<String>, PlayStop> {
    loop {
        let mut found = Vec::new();
        for reason in reasons {
            let texts = play.event_texts(pod, reason).await?;
            found.extend(texts.into_iter().map(|text| format!("{reason}: {text}")));
        }
        if !found.is_empty() || Instant::now() > until {
            return Ok(found);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// End an attack, and check what came of it.
async fn ended<C: RunsGpuPrograms>(play: &mut Play<'_, C>, of: &mut Hostile) -> Result<(), PlayStop> {
    let outcome: AttackOutcome = of.user.program.ask_for("attack-end").await?;
    let name = of.user.pod;
    play.step("ended", &format!("{NAMESPACE}/{name}"), &outcome.says, Vec::new())?;
    let text = format!("its files take at most {} MiB of the node's disk", ON_DISK / MIB);
    if outcome.on_disk > 0 {
        play.check(outcome.on_disk <= ON_DISK, &text, || format!("{} MiB", outcome.on_disk / MIB))?;
    }
    match of.attack.expected {
        ExpectedResult::Named(_) => {}
        ExpectedResult::NamedIfDone(reasons) if outcome.done > 0 => {
            let found = named(play, name, reasons, Instant::now() + REPORTS).await?;
            says_who(play, name, reasons, &found)?;
        }
        ExpectedResult::Refused | ExpectedResult::NamedIfDone(_) => {
            let text = format!("the kernel refuses all that {name} tries");
            play.check(outcome.done == 0 && outcome.tried > 0, &text, || outcome.says.clone())?;
            is_not_named(play, name).await?;
        }
    }
    Ok(())
}

/// Check that no event says that a pod avoids its limits.
async fn is_not_named<C: RunsGpuPrograms>(play: &mut Play<'_, C>, name: &str) -> Result<(), PlayStop> {
    let found = named(play, name, &REASONS, Instant::now()).await?;
    play.check(found.is_empty(), &format!("no event names {name}"), || found.join("; "))?;
    Ok(())
}

/// A GPU is out of service and is tested: pods of others do not get it, whatever their annotation says.
async fn under_test<C: RunsGpuPrograms>(play: &mut Play<'_, C>, lane: &Lane) -> Result<(), PlayStop> {
    play.scene("A GPU is under test; pods say that they are the test").await?;
    let other = gpus(play, &lane.node)
        .await?
        .into_iter()
        .find(|gpu| gpu.uuid != lane.honest.gpu);
    let uuid = other.ok_or_else(|| io::Error::other("the node has no other GPU"))?.uuid;
    let mark = |reason: Option<&str>, run: Option<&str>| json!({out_of_service_key(&uuid): reason, under_test_key(&uuid): run});
    annotate(play, &lane.node, mark(Some("fan is broken"), Some("runofanadministrator"))).await?;
    play.eventually("the GPU to be under test", async |play| {
        let tested = gpus(play, &lane.node).await?.into_iter().find(|gpu| gpu.uuid == uuid);
        Ok(match tested {
            Some(gpu) if gpu.health == Health::Testing => Ok(()),
            other => Err(format!("{other:?}")),
        })
    })
    .await?;
    for (name, value) in [("says-true", "true"), ("guesses", "guessedrun")] {
        let manifest = pod(name).gpu_mem(1).annotation(names::GPU_UUID, &uuid);
        let manifest = manifest
            .annotation(names::GPU_TEST, value)
            .select(&lane.node)
            .grace_seconds(1);
        let text = format!("a pod with {}: {value} does not get the GPU", names::GPU_TEST);
        match play
            .create(&manifest, &format!("asks for 1 GiB of the GPU that is tested, with {value}"))
            .await
        {
            Ok(_) => {
                let place = play
                    .eventually(&format!("pod {name} to be scheduled, or refused"), async |play| {
                        let object = play.get(NAMESPACE, name).await?;
                        let conditions = object.status.unwrap_or_default().conditions;
                        let is_refused = conditions.iter().any(|of| of.kind == "PodScheduled" && of.status == "False");
                        Ok(match object.spec.node_name {
                            Some(node) => Ok(Some(node)),
                            None if is_refused => Ok(None),
                            None => Err("it waits".to_owned()),
                        })
                    })
                    .await?;
                play.check(place.is_none(), &text, || format!("it is bound to {place:?}"))?;
                play.delete(NAMESPACE, name, "because it would wait forever").await?;
            }
            // A policy may refuse it.
            Err(PlayStop::Api { what, source }) => {
                play.check(true, &text, String::new)?;
                play.step("refused", name, &what, vec![source.to_string()])?;
            }
            Err(stop) => return Err(stop),
        }
    }
    annotate(play, &lane.node, mark(None, None)).await?;
    play.offers(&lane.node, TestbedMachine::Mixed.units()).await
}

/// Return the GPUs in a node's inventory.
async fn gpus<C: RunsGpuPrograms>(play: &Play<'_, C>, node: &str) -> Result<Vec<Gpu>, PlayStop> {
    let node = divvy_kube::list::node(&play.cluster.client(), node).await;
    let node = node.map_err(|error| io::Error::other(error.to_string()))?;
    let inventory = node.inventory.and_then(Result::ok);
    Ok(inventory.map(|inventory| inventory.gpus).unwrap_or_default())
}

/// Set annotations of a node, or remove those that are null.
async fn annotate<C: RunsGpuPrograms>(play: &mut Play<'_, C>, node: &str, annotations: Value) -> Result<(), PlayStop> {
    let nodes: Api<Node> = Api::all(play.cluster.client());
    let patch = Patch::Merge(json!({"metadata": {"annotations": annotations}}));
    let patched = nodes.patch(node, &PatchParams::default(), &patch).await;
    patched.map_err(|source| PlayStop::Api {
        what: format!("node {node} could not be annotated"),
        source: Box::new(source),
    })?;
    play.step("annotated", node, &annotations.to_string(), Vec::new())
}

/// The agent is restarted during an attack, and kills then. Only hostile programs are killed.
async fn killed<C: RunsGpuPrograms>(play: &mut Play<'_, C>, lanes: &mut [Lane]) -> Result<(), PlayStop> {
    play.scene("The agent is restarted with --on-escape kill, and finds a file with a lease on it")
        .await?;
    let [lane, _] = lanes else {
        return Err(io::Error::other("there are two nodes").into());
    };
    let lease = attack("lease-limits", ExpectedResult::Named(&[CHANGED, BUSY]));
    let mut lease = hostile(play, lane, "lease-again", lease).await?;
    begin(play, &mut lease).await?;
    let began = Instant::now();
    restart_with(play, &lane.node, json!({"guard": "shadow", "on-escape": "kill"})).await?;
    let took = began.elapsed();
    let (most, took) = (RESTARTS.as_secs(), took.as_millis());
    let text = format!("the agent offers its GPUs within {most} s ({took} ms)");
    play.check(began.elapsed() <= RESTARTS, &text, || format!("{took} ms"))?;
    lane.agent = play.cluster.agents_address(&lane.node).await?;
    let watch = AgentWatch::begin(lane.agent);
    reported(play, &lease, Instant::now()).await?;
    ended(play, &mut lease).await?;

    play.scene("A program says in all slots that it has next to nothing, and has more than its share: it is killed")
        .await?;
    let slots = with(
        Besides::AvoidsTheGuard,
        attack("forged-slots", ExpectedResult::Named(&[EXCEEDED, CHANGED, AVOIDED])),
    );
    let mut slots = hostile(play, lane, "slots-again", slots).await?;
    begin(play, &mut slots).await?;
    let until = Instant::now() + REPORTS;
    while Instant::now() < until && !slots.user.program.has_ended()? {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let is_killed = slots.user.program.has_ended()?;
    play.check(is_killed, "the program is killed", || {
        format!("it runs after {} s", REPORTS.as_secs())
    })?;
    reported(play, &slots, Instant::now()).await?;
    keeps_its_share(play, lane).await?;

    play.scene("A program says that its context takes next to nothing; then a new pod takes all of its share, and is not killed")
        .await?;
    // It takes no more than its share, so there need be no event.
    let context = with(Besides::Starts, attack("forged-context", ExpectedResult::Refused));
    let mut context = hostile(play, lane, "forged-context", context).await?;
    begin(play, &mut context).await?;
    // The agent believes what it has measured several times.
    tokio::time::sleep(LENGTH).await;
    let (mut late, _) = isolation::start(play, &lane.node, "late", HONEST, LoadedLibrary::Usual).await?;
    // A program that takes all at its start: the agent has not measured yet how much less its context takes than it is charged with.
    isolation::fills_within(play, &mut late, isolation::CONTEXT_CHARGE_MIB - CONTEXT_MIB).await?;
    tokio::time::sleep(LENGTH).await;
    for user in [&mut late, &mut lane.honest] {
        let answer = user.program.ask("memory").await;
        let text = answer.as_ref().err().map(ToString::to_string).unwrap_or_default();
        play.check(answer.is_ok(), &format!("{} goes on", user.pod), || text)?;
        is_not_named(play, user.pod).await?;
    }
    watch.end(play, &lane.node).await?;
    for user in [lease.user, slots.user, context.user, late] {
        user.program.end().await?;
    }
    Ok(())
}

/// Asks an agent again and again whether it answers. It does so in a thread of its own, because the embedded cluster keeps this one busy.
struct AgentWatch {
    /// The thread ends when nothing but itself has this.
    alive: Arc<()>,
    task: JoinHandle<AnswerTally>,
}

#[derive(Debug, Default)]
struct AnswerTally {
    count: u64,
    slowest: Duration,
    /// The answers that were late or failed.
    bad: Vec<String>,
}

impl AgentWatch {
    fn begin(agent: SocketAddr) -> AgentWatch {
        let alive = Arc::new(());
        let own = Arc::clone(&alive);
        let task = tokio::task::spawn_blocking(move || {
            let mut answers = AnswerTally::default();
            while Arc::strong_count(&own) > 1 {
                for path in ["/healthz", "/metrics"] {
                    let began = Instant::now();
                    let answer = get(agent, path);
                    let took = began.elapsed();
                    answers.count += 1;
                    answers.slowest = answers.slowest.max(took);
                    match answer {
                        Ok(()) if took <= ANSWERS => {}
                        Ok(()) => answers.bad.push(format!("{path}: {} ms", took.as_millis())),
                        Err(_) => answers.bad.push(format!("{path}: no answer after {} ms", took.as_millis())),
                    }
                }
                std::thread::sleep(Duration::from_millis(100));
            }
            answers
        });
        AgentWatch { alive, task }
    }

    async fn end<C: RunsGpuPrograms>(self, play: &mut Play<'_, C>, node: &str) -> Result<(), PlayStop> {
        drop(self.alive);
        let AnswerTally { count, slowest, bad } = self.task.await.map_err(io::Error::other)?;
        let slowest = slowest.as_millis();
        let text = format!(
            "the agent of {node} has answered {count} times, each within {} s (at most {slowest} ms)",
            ANSWERS.as_secs()
        );
        play.check(bad.is_empty() && count > 0, &text, || bad.join("; "))?;
        Ok(())
    }
}

/// Ask for a page, and wait for all of it.
fn get(agent: SocketAddr, path: &str) -> io::Result<()> {
    let patience = ANSWERS * 5;
    let mut stream = TcpStream::connect_timeout(&agent, patience)?;
    stream.set_read_timeout(Some(patience))?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {agent}\r\nConnection: close\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    if answer.starts_with(b"HTTP/1.1 200 ") {
        Ok(())
    } else {
        Err(io::Error::other(format!(
            "an answer of {} bytes that is no success",
            answer.len()
        )))
    }
}
