//! The GPUs as the core sees them: the facts from the probe's updates, and the agent's verdict on each GPU's health.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use divvy_cdi::driver_spec::NvmlGpu;
use divvy_hardware::client::{ProbeClient, ProbeSource as Where, ProbeTiming, Spawn, Update};
use divvy_hardware::health::{HealthVerdict, RecoverySettings, Tracker};
use divvy_hardware::{Fault, GpuFacts, Snapshot};
use divvy_model::limits::NODE_GPUS;
use divvy_model::out_of_service::{GpusOutOfService, is_out_of_service, out_of_service_key};
use divvy_model::{Enforcement, Gpu, Health, Inventory, MiB, MigDevice, Partition, TestRun, Vendor, nvidia};
use divvy_nvidia_plugin::HealthChecks;
use tracing::{info, warn};

use divvy_agent_core::{GpuOffer, Tests};

use crate::args::{LabelsMode, ProbeChoice};
use crate::grants::Grants;
use crate::health_change::HealthChange;
use crate::labels::SeenGpus;
use crate::own_node::OwnNode;
use crate::probe_access::ProbeAccess;
use crate::publishing::Publishing;
use crate::reports::Reports;
use crate::shared_core::SharedCore;
use crate::{AgentConfig, Error, cgroups, driver_spec};

/// How long the driver may be silent before the agent withdraws its GPUs. A container that starts later would hang as well.
const SILENCE: Duration = Duration::from_secs(60);

/// How long pods are placed for MPS after the control daemon has stopped serving. It starts again within seconds, and containers wait for it.
const MPS_GRACE: Duration = Duration::from_secs(30);

/// The maximum number of annotations in an event about those that name no GPU.
const MISNAMED_SHOWN: usize = 4;

/// All GPUs that this process has seen, and all GPUs that grants on disk use.
struct AgentMachine {
    tracker: Tracker,
    /// Which XIDs make an NVIDIA GPU fail.
    checks: HealthChecks,
    drivers: BTreeMap<Vendor, String>,
    /// Whether MIG devices are offered.
    mig_devices: bool,
    /// The last snapshot's GPUs, as the drivers report them, by UUID.
    reported: BTreeMap<String, GpuFacts>,
    /// The facts that the drivers last reported about each GPU, by UUID. If MIG devices are offered, each of them is a GPU here.
    seen: BTreeMap<String, GpuFacts>,
    /// GPUs of the previous agent's inventory that this process has not seen yet, by UUID.
    recalled: BTreeMap<String, Gpu>,
    /// The GPUs that the node's annotations take out of service.
    out_of_service: GpusOutOfService,
    /// The runs that test such GPUs.
    tests: Tests,
    /// When this process began to look. The times of tests and of the GPUs' health count from it.
    started: Instant,
    silent_since: Option<Instant>,
    /// When the MPS control daemon was last seen to serve.
    mps_seen: Option<Instant>,
    /// Why GPUs or MIG devices are not offered as a whole, as of the last snapshot: the text by the event's reason.
    told: BTreeMap<&'static str, String>,
}

/// Where the news of the drivers go.
pub(crate) struct NewsOutlets {
    pub(crate) core: Arc<SharedCore>,
    pub(crate) probe: Arc<ProbeAccess>,
    pub(crate) reports: Arc<Reports>,
    pub(crate) node: Arc<OwnNode>,
    pub(crate) publishing: Arc<Publishing>,
    pub(crate) grants: Arc<Grants>,
    /// The root of the machine's files, where the version of the cgroups shows.
    pub(crate) sys_root: PathBuf,
}

/// Follow the probe indefinitely. `before` is the node's inventory as an earlier agent left it: a failed GPU does not recover
/// just because the agent restarts.
///
/// # Errors
/// The memory unit does not fit this node.
pub(crate) async fn follow(
    to: NewsOutlets,
    config: AgentConfig,
    before: impl Future<Output = Option<Inventory>> + Send,
) -> Result<(), Error> {
    let wait_ms = u64::try_from(config.health_recovery.as_millis()).unwrap_or(u64::MAX);
    let mut machine = AgentMachine {
        tracker: Tracker::new(RecoverySettings {
            wait_ms,
            longest_wait_ms: RecoverySettings::default().longest_wait_ms.max(wait_ms),
            ..RecoverySettings::default()
        }),
        checks: config.health_checks()?,
        drivers: BTreeMap::new(),
        mig_devices: config.offers_mig(),
        reported: BTreeMap::new(),
        seen: BTreeMap::new(),
        recalled: BTreeMap::new(),
        out_of_service: GpusOutOfService::default(),
        tests: Tests::default(),
        started: Instant::now(),
        silent_since: None,
        mps_seen: None,
        told: BTreeMap::new(),
    };
    let timing = ProbeTiming {
        poll: config.probe_interval,
        ..ProbeTiming::default()
    };
    let mut client = ProbeClient::start(probe(&config)?, timing);
    to.probe.set(client.handle());
    // Runs while the probe starts.
    machine.recall(&to, before.await);
    let mut out_of_service = to.node.out_of_service.subscribe();
    machine.set_out_of_service(out_of_service.borrow_and_update().clone());
    let mut warned = None;
    // Whether the driver's silence was reported.
    let mut silence_told = false;
    loop {
        let update = tokio::select! {
            update = client.next() => update.ok_or_else(|| Error::Ended {
                part: "the probe's client",
                text: "it stopped sending updates".to_owned(),
            })?,
            Ok(()) = out_of_service.changed() => {
                let changes = machine.set_out_of_service(out_of_service.borrow_and_update().clone());
                if !machine.is_empty() {
                    machine.publish(&to)?;
                }
                changes.into_iter().for_each(|change| post(&to, change));
                continue;
            }
        };
        let now = machine.now_ms();
        let mut changed = Vec::new();
        let mut of_driver = None;
        match update {
            Update::Snapshot(snapshot) => {
                to.reports.ready.clear("gpus");
                of_driver = std::mem::take(&mut silence_told).then(HealthChange::answer);
                to.reports.metrics.counts().probe(true);
                to.grants.set_places(places(&snapshot));
                if config.labels != LabelsMode::Off {
                    to.publishing
                        .seen
                        .send_replace(SeenGpus::Snapshot(Arc::new(snapshot.clone())));
                }
                changed = machine.snapshot(&to, now, snapshot);
            }
            Update::Fault(event) => {
                let fault = event.fault;
                to.reports.metrics.counts().fault(&fault);
                changed = machine.fault(now, &fault);
                if changed.is_empty() {
                    info!(
                        gpu = fault.uuid.as_deref().unwrap_or("?"),
                        code = fault.code,
                        "{} needs no action",
                        fault.name
                    );
                    continue;
                }
            }
            Update::Unavailable(failure) => {
                machine.tracker.unavailable(now);
                to.reports.metrics.counts().probe(false);
                to.reports.ready.set("gpus", failure.to_string());
                let since = *machine.silent_since.get_or_insert_with(Instant::now);
                if since.elapsed() >= SILENCE {
                    to.publishing.seen.send_replace(SeenGpus::Silence);
                }
                if since.elapsed() < SILENCE || machine.is_empty() {
                    continue;
                }
                of_driver = (!std::mem::replace(&mut silence_told, true)).then(HealthChange::silence);
            }
        }
        let warning = machine.publish(&to)?;
        // Events go last, so that a reader of the event finds a matching inventory.
        if let Some(change) = of_driver {
            post(&to, change);
        }
        machine.post_changes(&to, &changed);
        if warning != warned {
            if let Some(text) = &warning {
                warn!("{text}");
            }
            warned = warning;
        }
    }
}

fn probe(config: &AgentConfig) -> Result<Where, Error> {
    let program = match &config.probe {
        Some(ProbeChoice::Socket(socket)) => return Ok(Where::Socket(socket.clone())),
        Some(ProbeChoice::Start(program)) => program.clone(),
        None => beside_us()?,
    };
    let sys_root = (config.sys_root != std::path::Path::new("/")).then(|| config.sys_root.clone());
    // Here the probe finds the driver's library, unless --nvml-library names it, and the files that a CDI spec lists.
    let below = config.sys_root.join(config.driver_root.trim_start_matches('/'));
    let driver_root = Some(below).filter(|root| root != std::path::Path::new("/"));
    Ok(Where::Spawn(Spawn {
        program,
        nvml_library: config.nvml_library.clone(),
        driver_root,
        sys_root,
        env: Vec::new(),
        share_files: std::path::absolute(config.state_dir().join("shares")).ok(),
        watchdog: None,
        dir: config.state_dir().join("probe"),
        log: None,
    }))
}

fn beside_us() -> Result<PathBuf, Error> {
    let own = std::env::current_exe().map_err(|error| Error::Config {
        origin: "--probe".to_owned(),
        text: format!(
            "the option is not set, and the agent cannot find its own program to look for divvy-probe next to it: {error}"
        ),
    })?;
    Ok(own.with_file_name("divvy-probe"))
}

impl AgentMachine {
    /// Restore what the node's annotation says about failed GPUs, and about lost GPUs that still have grants.
    fn recall(&mut self, to: &NewsOutlets, before: Option<Inventory>) {
        let Some(before) = before else { return };
        for gpu in before.gpus {
            let in_use = is_in_use(&to.core, &gpu.uuid);
            // What the annotations say is known without the inventory.
            let has_failed = !gpu.reason.as_deref().is_some_and(is_out_of_service);
            if (gpu.health == Health::Failed && has_failed) || in_use {
                let verdict = if has_failed {
                    HealthVerdict {
                        health: gpu.health,
                        reason: gpu.reason.clone(),
                    }
                } else {
                    HealthVerdict::default()
                };
                if gpu.health != Health::Ok {
                    info!(
                        gpu = gpu.uuid,
                        reason = verdict.reason,
                        "this GPU had failed before the agent started"
                    );
                }
                self.tracker.recall(gpu.vendor, &gpu.uuid, verdict);
                self.recalled.insert(gpu.uuid.clone(), gpu);
            }
        }
    }

    /// Report whether no GPU is known.
    fn is_empty(&self) -> bool {
        self.seen.is_empty() && self.recalled.is_empty()
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Set the GPUs that are out of service, and return what has changed.
    fn set_out_of_service(&mut self, now: GpusOutOfService) -> Vec<HealthChange> {
        self.tests.look(self.now_ms(), &now);
        let before = std::mem::replace(&mut self.out_of_service, now);
        let changes = self.seen.values().filter_map(|gpu| {
            let of = |known: &GpusOutOfService| known.get(&gpu.uuid, parent(gpu.partition.as_ref()));
            let now = of(&self.out_of_service);
            (of(&before) != now).then(|| HealthChange::service(&gpu.index.to_string(), &gpu.model, &gpu.uuid, now.as_ref()))
        });
        changes.collect()
    }

    /// Return the verdict on a GPU that may be out of service, and the run that tests it. What the driver reports counts first.
    fn in_service(&self, verdict: HealthVerdict, uuid: &str, partition: Option<&Partition>) -> (HealthVerdict, Option<TestRun>) {
        let out = self.out_of_service.get(uuid, parent(partition));
        let Some(out) = out.filter(|_| verdict.health == Health::Ok) else {
            return (verdict, None);
        };
        // A test of a part does not show that the GPU works.
        let is_own = out.key() == out_of_service_key(uuid);
        let test = self.tests.of(uuid, self.now_ms()).filter(|_| is_own);
        let verdict = HealthVerdict {
            health: if test.is_some() { Health::Testing } else { Health::Failed },
            reason: Some(out.text()),
        };
        (verdict, test.cloned())
    }

    /// Return which annotations take GPUs out of service that the node does not have. `None` if there are none.
    fn misnamed(&self) -> Option<String> {
        // Before the first snapshot, few GPUs are known.
        if self.reported.is_empty() {
            return None;
        }
        let reported = self.reported.keys().map(String::as_str);
        let seen = self
            .seen
            .values()
            .flat_map(|gpu| [Some(gpu.uuid.as_str()), parent(gpu.partition.as_ref())]);
        let recalled = self
            .recalled
            .values()
            .flat_map(|gpu| [Some(gpu.uuid.as_str()), parent(gpu.partition.as_ref())]);
        let unknown = self.out_of_service.unknown(reported.chain(seen.chain(recalled).flatten()));
        let shown: Vec<&str> = unknown.iter().take(MISNAMED_SHOWN).map(String::as_str).collect();
        let (first, more) = (shown.first()?, unknown.len().saturating_sub(shown.len()));
        let more = if more > 0 {
            format!(" and {more} more")
        } else {
            String::new()
        };
        Some(format!(
            "this node has no GPU that the annotation {}{more} names, so it takes nothing out of service. kubectl inspect gpushare -o json shows the UUIDs of \
             the GPUs; kubectl annotate node NODE {first}- removes the annotation",
            shown.join(", ")
        ))
    }

    /// Apply a snapshot, and return the UUIDs of the GPUs whose verdict changed.
    fn snapshot(&mut self, to: &NewsOutlets, now: u64, mut snapshot: Snapshot) -> Vec<String> {
        self.silent_since = None;
        if self.checks.are_off() {
            // It does not matter that XIDs cannot be received.
            snapshot.gpus.iter_mut().for_each(|gpu| gpu.no_events = None);
        }
        let reported = snapshot.gpus.iter().map(|gpu| (gpu.uuid.clone(), gpu.clone()));
        self.reported = reported.collect();
        let snapshot = if self.mig_devices { snapshot.divided() } else { snapshot };
        self.forget(to, &snapshot);
        self.forget_excess(to, &snapshot);
        let changed = self.tracker.snapshot(now, &snapshot);
        let drivers = snapshot.drivers.into_iter();
        self.drivers = drivers.map(|(vendor, driver)| (vendor, driver.version)).collect();
        for facts in snapshot.gpus {
            self.recalled.remove(&facts.uuid);
            self.seen.insert(facts.uuid.clone(), facts);
        }
        changed
    }

    /// Apply a fault, and return the UUIDs of the GPUs whose verdict changed.
    fn fault(&mut self, now: u64, fault: &Fault) -> Vec<String> {
        let fault = &judged(fault, &self.checks);
        let gpu = fault.uuid.as_ref().and_then(|uuid| self.reported.get(uuid));
        let faults = fault.divided(gpu.filter(|_| self.mig_devices));
        let mut changed = Vec::new();
        for fault in faults {
            changed.extend(self.tracker.fault(now, &fault));
        }
        changed
    }

    /// Forget the MIG devices that were destroyed, and the GPUs that were divided into MIG devices. They are not lost: their GPU is
    /// there. A device that a container still has stays, and counts as lost.
    fn forget(&mut self, to: &NewsOutlets, now: &Snapshot) {
        let is_listed = |uuid: &str| now.gpus.iter().any(|gpu| gpu.uuid == uuid);
        let is_reported = |uuid: &str, partition: Option<&Partition>| {
            let gpu = self.reported.get(partition.map_or(uuid, |partition| &partition.parent));
            gpu.is_some_and(|gpu| !gpu.lost && gpu.error.is_none())
        };
        let seen = self.seen.values().map(|gpu| (&gpu.uuid, gpu.partition.as_ref()));
        let recalled = self.recalled.values().map(|gpu| (&gpu.uuid, gpu.partition.as_ref()));
        let gone: Vec<String> = seen
            .chain(recalled)
            .filter(|(uuid, partition)| !is_listed(uuid) && is_reported(uuid, *partition))
            .map(|(uuid, _)| uuid.clone())
            .collect();
        for uuid in gone.iter().filter(|uuid| !is_in_use(&to.core, uuid)) {
            info!(
                gpu = uuid,
                "this device no longer exists, because MIG was configured in another way"
            );
            self.forget_gpu(uuid);
        }
    }

    /// Forget GPUs that are gone if more are known than an inventory can have: nobody could read it.
    fn forget_excess(&mut self, to: &NewsOutlets, now: &Snapshot) {
        let known = self.seen.keys().chain(self.recalled.keys());
        let listed: BTreeSet<&str> = now.gpus.iter().map(|gpu| gpu.uuid.as_str()).collect();
        for uuid in excess(known.map(String::as_str), &listed, |uuid| is_in_use(&to.core, uuid)) {
            info!(
                gpu = uuid,
                "this GPU has been lost, and is forgotten because too many others were found since"
            );
            self.forget_gpu(&uuid);
        }
    }

    fn forget_gpu(&mut self, uuid: &str) {
        self.tracker.forget(uuid);
        self.seen.remove(uuid);
        self.recalled.remove(uuid);
    }

    /// Log which GPUs failed or recovered, and post an event about each on the node.
    fn post_changes(&self, to: &NewsOutlets, changed: &[String]) {
        for uuid in changed {
            let (Some(verdict), Some(gpu)) = (self.tracker.verdict(uuid), self.seen.get(uuid)) else {
                continue;
            };
            // It is not offered again, although the driver reports no fault any more.
            if verdict.health == Health::Ok && self.out_of_service.get(uuid, parent(gpu.partition.as_ref())).is_some() {
                info!(gpu = uuid, "this GPU has recovered, and is still out of service");
                continue;
            }
            post(to, HealthChange::new(&gpu.index.to_string(), &gpu.model, uuid, verdict));
        }
    }

    /// Log why something is not offered as a whole, and post an event on the node, unless the text is the same as before.
    fn tell(&mut self, to: &NewsOutlets, reason: &'static str, text: Option<String>) {
        let Some(text) = text else {
            self.told.remove(reason);
            return;
        };
        if self.told.get(reason) != Some(&text) {
            warn!("{text}");
            to.reports.post_on_node(true, reason, text.clone());
            self.told.insert(reason, text);
        }
    }

    fn publish(&mut self, to: &NewsOutlets) -> Result<Option<String>, Error> {
        let silent = self.silent_since.is_some_and(|since| since.elapsed() >= SILENCE);
        let verdict = |uuid: &str| {
            let verdict = self.tracker.verdict(uuid).cloned().unwrap_or_default();
            if silent && verdict.health == Health::Ok {
                HealthVerdict {
                    health: Health::Failed,
                    reason: Some("the driver does not answer".to_owned()),
                }
            } else {
                verdict
            }
        };
        let settings = to.core.lock().settings().clone();
        let (can_limit, can_guard) = (cgroups::is_v2(&to.sys_root), settings.guard.is_some());
        if to.probe.mps_server().is_some() {
            self.mps_seen = Some(Instant::now());
        }
        let has_mps = self.mps_seen.is_some_and(|seen| seen.elapsed() < MPS_GRACE);
        let enforcement = |facts: &GpuFacts| {
            // The guard knows GPUs by the UUID that CUDA reports, which a MIG device does not have.
            let is_guarded = can_guard && facts.vendor == Vendor::Nvidia && facts.partition.is_none();
            let mechanisms = [
                (can_limit && facts.memory_limit, Enforcement::CGROUP),
                (is_guarded, Enforcement::GUARD),
                (
                    has_mps && facts.vendor == Vendor::Nvidia && facts.partition.is_none() && !is_divided(facts),
                    Enforcement::MPS,
                ),
            ];
            Enforcement::all_of(
                mechanisms
                    .into_iter()
                    .filter(|(is_there, _)| *is_there)
                    .map(|(_, mechanism)| mechanism),
            )
        };
        let seen = self.seen.values().map(|facts| {
            let offer = settings.offer(facts.vendor, facts.total, facts.partition.as_ref());
            let (verdict, test) = self.in_service(fit(facts, verdict(&facts.uuid)), &facts.uuid, facts.partition.as_ref());
            Gpu {
                test,
                enforcement: enforcement(facts),
                ..described(facts, verdict, offer)
            }
        });
        let recalled = self.recalled.values().map(|gpu| {
            let (HealthVerdict { health, reason }, test) = self.in_service(verdict(&gpu.uuid), &gpu.uuid, gpu.partition.as_ref());
            let gpu = gpu.clone();
            // The previous agent may have offered it in another way, and in another unit.
            let GpuOffer { reserve, units, whole } = settings.offer(gpu.vendor, gpu.total, gpu.partition.as_ref());
            Gpu {
                health,
                reason,
                test,
                reserve,
                units,
                whole,
                ..gpu
            }
        });
        let mut gpus: Vec<Gpu> = seen.chain(recalled).collect();
        // A lost GPU keeps its index, which another GPU may have by now.
        gpus.sort_by(|a, b| {
            let place = |gpu: &Gpu| (gpu.vendor, gpu.index, gpu.health == Health::Lost);
            place(a).cmp(&place(b)).then_with(|| a.uuid.cmp(&b.uuid))
        });
        withhold(&mut gpus, |uuid| is_in_use(&to.core, uuid));
        let unlike = settings.unlike(&gpus);
        if unlike.is_some() {
            let shared = gpus.iter_mut().filter(|gpu| gpu.vendor.is_shared_by_default());
            // A pod that has the whole GPU can start.
            let free = shared.filter(|gpu| !to.core.lock().holds_whole(gpu));
            free.for_each(|gpu| gpu.whole = None);
        }
        self.tell(to, "GPUsNotDividedAlike", unlike);
        self.tell(to, "MIGProfileUnknown", settings.unnamed(&gpus));
        self.tell(to, "NoSuchGpuOutOfService", self.misnamed());
        let (warning, is_new) = {
            let mut core = to.core.lock();
            let before = core.gpus().to_vec();
            let warning = core.set_hardware(self.drivers.clone(), gpus)?;
            if self.out_of_service.is_read() {
                core.knows_service();
            }
            (warning, core.gpus() != before)
        };
        to.publishing.hardware_described(is_new);
        Ok(warning.map(|warning| warning.to_string()))
    }
}

/// Report whether a GPU is in MIG mode: it cannot be used as one GPU.
fn is_divided(facts: &GpuFacts) -> bool {
    facts.mig.is_some_and(|(is_enabled, _)| is_enabled)
}

/// Log a change, and post it as an event on the node.
fn post(to: &NewsOutlets, change: HealthChange) {
    change.log();
    to.reports.post_on_node(change.warning, change.reason, change.text);
}

/// Return the GPUs to forget so that an inventory can hold the others. GPUs that are listed now or in use are never among them.
fn excess<'a>(known: impl Iterator<Item = &'a str>, listed: &BTreeSet<&str>, is_in_use: impl Fn(&str) -> bool) -> Vec<String> {
    let gone: BTreeSet<&str> = known.filter(|uuid| !listed.contains(uuid)).collect();
    let too_many = (listed.len() + gone.len()).saturating_sub(NODE_GPUS);
    let unused = gone.into_iter().filter(|uuid| !is_in_use(uuid));
    unused.take(too_many).map(str::to_owned).collect()
}

/// Return a fault that is fatal if these checks say so. They concern NVIDIA's GPUs only. NVIDIA's plugin counts each XID that is not in its
/// list of those that applications cause; the agent follows NVIDIA's catalog (`fault.fatal`), unless the checks name the XID.
fn judged(fault: &Fault, checks: &HealthChecks) -> Fault {
    let fatal = match fault.vendor {
        Vendor::Nvidia => checks.is_fatal(fault.code) && (fault.fatal || checks.is_enabled(fault.code)),
        Vendor::Amd | Vendor::Intel => fault.fatal,
    };
    Fault { fatal, ..fault.clone() }
}

/// Return the verdict on a GPU. A GPU that works but cannot be offered in its present mode counts as failed.
fn fit(facts: &GpuFacts, verdict: HealthVerdict) -> HealthVerdict {
    match facts.unfit() {
        Some(reason) if verdict.health == Health::Ok => HealthVerdict {
            health: Health::Failed,
            reason: Some(reason),
        },
        _ => verdict,
    }
}

/// Return the UUID of the GPU of which this is a part.
fn parent(partition: Option<&Partition>) -> Option<&str> {
    partition.map(|partition| partition.parent.as_str())
}

/// Describe a GPU for the inventory. Every [`Gpu`] of this node is made here, or comes from the previous agent's inventory.
fn described(
    facts: &GpuFacts,
    HealthVerdict { health, reason }: HealthVerdict,
    GpuOffer { reserve, units, whole }: GpuOffer,
) -> Gpu {
    Gpu {
        vendor: facts.vendor,
        uuid: facts.uuid.clone(),
        index: facts.index,
        nodes: facts.nodes.clone(),
        partition: facts.partition.clone(),
        pci: facts.pci.clone(),
        model: facts.model.clone(),
        cc: facts.cc.clone(),
        sms: facts.sms,
        clock_mhz: facts.clock_mhz,
        bandwidth_gbs: facts.bandwidth_gbs,
        total: facts.total,
        reserve,
        units,
        whole,
        // The core fills in what containers hold without an allocation: this changes without the hardware.
        held: MiB::ZERO,
        held_by_pod: None,
        numa: facts.numa,
        health,
        reason,
        test: None,
        links: facts.links.clone(),
        // Whether a limit can be set does not depend on the GPU alone.
        enforcement: None,
    }
}

/// Mark the GPUs and MIG devices of a physical GPU as failed while a container has a device of the same GPU that no longer exists. The
/// container may still reach the memory that is theirs now.
fn withhold(gpus: &mut [Gpu], is_in_use: impl Fn(&str) -> bool) {
    fn card(gpu: &Gpu) -> &str {
        gpu.partition.as_ref().map_or(&gpu.uuid, |partition| &partition.parent)
    }
    let is_former = |gpu: &&Gpu| gpu.vendor.is_shared_by_default() && gpu.health == Health::Lost && is_in_use(&gpu.uuid);
    let former: Vec<(String, String)> = gpus
        .iter()
        .filter(is_former)
        .map(|gpu| (card(gpu).to_owned(), gpu.uuid.clone()))
        .collect();
    for gpu in gpus
        .iter_mut()
        .filter(|gpu| matches!(gpu.health, Health::Ok | Health::Testing))
    {
        if let Some((_, before)) = former.iter().find(|(of, _)| of == card(gpu)) {
            (gpu.health, gpu.test) = (Health::Failed, None);
            gpu.reason = Some(format!(
                "MIG was configured in another way while a container used {before}; wait until that container has ended"
            ));
        }
    }
}

/// Report whether a grant names the GPU.
fn is_in_use(core: &SharedCore, uuid: &str) -> bool {
    let core = core.lock();
    let mut records = core.records();
    records.any(|record| record.gpus.iter().any(|share| share.uuid == uuid))
}

/// Return the GPUs for which a CDI spec of NVIDIA's driver describes devices.
fn places(snapshot: &Snapshot) -> Vec<NvmlGpu> {
    let gpus = snapshot
        .gpus
        .iter()
        .filter(|gpu| gpu.vendor == driver_spec::VENDOR && !gpu.lost);
    gpus.filter_map(|gpu| {
        Some(NvmlGpu {
            index: gpu.index,
            uuid: gpu.uuid.clone(),
            minor: nvidia::minor(&gpu.nodes)?,
            pci: gpu.pci.clone(),
            mig: MigDevice::of(gpu.mig, &gpu.mig_devices).map(<[MigDevice]>::to_vec),
        })
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_health_checks_judge_the_xids_of_nvidia_alone() {
        let fault = |vendor, code, fatal| Fault {
            vendor,
            uuid: None,
            code,
            fatal,
            name: "a fault".to_owned(),
            partition: None,
        };
        let (checks, _) = HealthChecks::parse("79", "13");
        for (vendor, code, before, after) in [
            (Vendor::Nvidia, 79, true, false),
            (Vendor::Nvidia, 13, false, true),
            (Vendor::Nvidia, 48, true, true),
            (Vendor::Nvidia, 63, false, false),
            (Vendor::Nvidia, 94, false, false),
            (Vendor::Amd, 79, true, true),
            (Vendor::Amd, 13, false, false),
        ] {
            assert_eq!(judged(&fault(vendor, code, before), &checks).fatal, after, "{vendor} {code}");
        }
    }

    #[test]
    fn a_full_inventory_drops_lost_unused_gpus() {
        let names: Vec<String> = (0..NODE_GPUS + 3).map(|index| format!("GPU-{index:03}")).collect();
        let known = |count: usize| names.iter().take(count).map(String::as_str);
        let present: BTreeSet<&str> = ["GPU-000", "GPU-002"].into();
        let in_use = |uuid: &str| uuid == "GPU-001";
        assert_eq!(excess(known(NODE_GPUS), &present, in_use), Vec::<String>::new());
        assert_eq!(excess(known(NODE_GPUS + 1), &present, in_use), ["GPU-003"]);
        assert_eq!(
            excess(known(NODE_GPUS + 3), &present, in_use),
            ["GPU-003", "GPU-004", "GPU-005"]
        );
        // A GPU that is listed for the first time counts as well.
        let new: BTreeSet<&str> = ["GPU-000", "GPU-new"].into();
        assert_eq!(excess(known(NODE_GPUS), &new, in_use), ["GPU-002"]);
        let all: BTreeSet<&str> = known(NODE_GPUS + 3).collect();
        assert_eq!(excess(known(NODE_GPUS + 3), &all, in_use), Vec::<String>::new());
    }
}
