//! The agent's shared state, and the one place where decisions meet files: facts are read, the core decides, its actions are
//! performed and committed, all under one lock.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use divvy_cdi as cdi;
use divvy_hardware::client::ProbeHandle;
use divvy_hardware::{Code, Failure};
use divvy_kube::list;
use divvy_kubelet::checkpoint::Checkpoint;
use divvy_kubelet::plugin;
use divvy_model::{Health, MiB, MigDevice, Node, Pod, names, runtime};
use tokio::sync::{Notify, mpsc, watch};
use tracing::{debug, info, warn};

use crate::cgroups;
use crate::cluster::Told;
use crate::driver::{DriverSpec, Looked, Said};
use crate::files::FileError;
use crate::hardware;
use crate::metrics::Metrics;
use crate::ready::Readiness;
use crate::store::Store;
use divvy_agent_core::{Action, Class, Core, Device, Facts, Handout, Key, Listing, OWN_VISIBLE_DEVICES, PreStart};

/// How long a start waits for what will be known soon: the pod's object, the kubelet's checkpoint. Then the kubelet retries.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long one list of the node's pods may take within that.
const LIST_TIMEOUT: Duration = Duration::from_secs(3);
/// How long a reconciliation waits for the driver's lists of processes.
const PROCESSES_TIMEOUT: Duration = Duration::from_secs(2);
/// How long it waits for the probe to look at the driver's files, and as long for a spec to be made.
const DRIVER_TIMEOUT: Duration = Duration::from_secs(2);
/// Pods have grants, and the kubelet makes no cgroups for pods.
const NO_POD_CGROUPS: &str = "pods with GPU memory run on this node, but there is no kubepods cgroup, so it is not known which containers still run, \
     and no memory is given again. Set cgroupsPerQOS: true in the kubelet's configuration (it is the default), or mount the host's cgroups for the agent";
/// How often a waiting start looks again when nothing tells it to.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// The lists of devices as the kubelet sees them.
pub(crate) type Devices = watch::Sender<Arc<Vec<plugin::Device>>>;

/// Everything that the agent's tasks share.
pub(crate) struct Agent {
    core: Mutex<Core>,
    /// PreStart and reconciliation read, decide and write one after the other.
    grants: Arc<tokio::sync::Mutex<()>>,
    store: Store,
    driver_spec: DriverSpec,
    sys_root: PathBuf,
    device_plugin_dir: PathBuf,
    client: kube::Client,
    selector: String,
    /// Pods were listed completely at least once.
    synced: watch::Sender<bool>,
    /// A pod was created, changed, or is gone.
    pub(crate) pods_changed: Notify,
    /// Something happened that the next reconciliation should see soon.
    pub(crate) look: Notify,
    pub(crate) memory: Devices,
    pub(crate) count: Devices,
    /// What was published last of the devices: hardware generation, and whether a GPU was bad then.
    published: Mutex<(u64, bool)>,
    hardware_generation: std::sync::atomic::AtomicU64,
    /// The inventory's text; empty until GPUs were seen.
    pub(crate) inventory: watch::Sender<Arc<str>>,
    pub(crate) events: mpsc::Sender<Told>,
    pub(crate) metrics: Metrics,
    pub(crate) ready: Readiness,
    /// `--device-list-strategy cdi`: the operator says that the runtime does CDI.
    cdi_declared: bool,
    /// The node's runtime is known to lack CDI: nothing is offered.
    pub(crate) without_cdi: watch::Sender<bool>,
    /// The node offers whole GPUs, too.
    other_plugin: AtomicBool,
    probe: OnceLock<ProbeHandle>,
    /// What the last reconciliation found, for the log.
    disagreements: Mutex<BTreeMap<Class, u64>>,
}

impl std::fmt::Debug for Agent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Agent")
            .field("selector", &self.selector)
            .finish_non_exhaustive()
    }
}

/// What [`Agent::new`] needs.
pub(crate) struct Parts {
    pub(crate) core: Core,
    pub(crate) store: Store,
    pub(crate) driver_spec: DriverSpec,
    pub(crate) sys_root: PathBuf,
    pub(crate) device_plugin_dir: PathBuf,
    pub(crate) client: kube::Client,
    pub(crate) node_name: String,
    pub(crate) cdi_declared: bool,
    pub(crate) events: mpsc::Sender<Told>,
}

/// What a reconciliation left to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum After {
    /// Nothing is pending.
    AtRest,
    /// Containers without a pod hold memory: their end is worth a look every second.
    MemoryHeld,
}

impl Agent {
    pub(crate) fn new(parts: Parts) -> Agent {
        Agent {
            core: Mutex::new(parts.core),
            grants: Arc::default(),
            store: parts.store,
            driver_spec: parts.driver_spec,
            sys_root: parts.sys_root,
            device_plugin_dir: parts.device_plugin_dir,
            client: parts.client,
            selector: format!("spec.nodeName={}", parts.node_name),
            synced: watch::Sender::new(false),
            pods_changed: Notify::new(),
            look: Notify::new(),
            memory: watch::Sender::new(Arc::default()),
            count: watch::Sender::new(Arc::default()),
            published: Mutex::new((0, false)),
            hardware_generation: std::sync::atomic::AtomicU64::new(0),
            inventory: watch::Sender::new(Arc::from("")),
            events: parts.events,
            metrics: Metrics::new(),
            ready: Readiness::default(),
            cdi_declared: parts.cdi_declared,
            without_cdi: watch::Sender::new(false),
            other_plugin: AtomicBool::new(false),
            probe: OnceLock::new(),
            disagreements: Mutex::default(),
        }
    }

    /// Whom to ask for the processes on the GPUs. The first one stays.
    pub(crate) fn set_probe(&self, probe: ProbeHandle) {
        self.probe.get_or_init(|| probe);
    }

    /// The core. Held for moments: no I/O, no waiting.
    pub(crate) fn core(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn client(&self) -> kube::Client {
        self.client.clone()
    }

    /// Field selector of this node's pods.
    pub(crate) fn selector(&self) -> &str {
        &self.selector
    }

    pub(crate) fn set_synced(&self) {
        self.synced.send_replace(true);
    }

    /// The parts of GPUs whose MIG is on, by the GPU's UUID: what the driver's spec names in their place.
    pub(crate) fn set_mig(&self, mig: BTreeMap<String, Vec<MigDevice>>) {
        if self.driver_spec.set_mig(mig) {
            self.look.notify_one();
        }
    }

    /// The GPUs changed.
    pub(crate) fn hardware_changed(&self) {
        self.hardware_generation.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        self.publish();
    }

    /// Sends what the core now says of devices and inventory to whoever listens; the same again is not sent.
    pub(crate) fn publish(&self) {
        let core = self.core();
        if core.gpus().is_empty() && self.hardware_generation.load(std::sync::atomic::Ordering::Relaxed) == 0 {
            return;
        }
        // With all GPUs well the list changes only with the hardware: pods come and go without 4,096 ids being printed.
        let bad = core.gpus().iter().any(|gpu| gpu.health != Health::Ok);
        let now = (self.hardware_generation.load(std::sync::atomic::Ordering::Relaxed), bad);
        let mut published = self.published.lock().unwrap_or_else(PoisonError::into_inner);
        if bad || *published != now {
            *published = now;
            let devices = core.devices();
            send_devices(&self.memory, &devices.memory);
            send_devices(&self.count, &devices.count);
        }
        drop(published);
        let text = core.inventory().to_json();
        drop(core);
        self.inventory.send_if_modified(|sent| {
            let changed = **sent != *text;
            if changed {
                *sent = Arc::from(text);
            }
            changed
        });
    }

    /// Actions that are no files.
    pub(crate) fn say(&self, actions: Vec<Action>) {
        for action in actions {
            self.send_event(action);
        }
    }

    fn send_event(&self, action: Action) {
        if let Action::Event { pod, uid, reason, text } = action {
            warn!(%pod, reason, "{text}");
            self.tell(Told {
                pod: Some((pod, uid)),
                // All is well with the pod.
                warning: reason != OWN_VISIBLE_DEVICES,
                reason,
                text,
            });
        }
    }

    /// The node's object, as it is now: what runs beside the agent decides whether containers can get their GPUs at all.
    pub(crate) fn look_at_node(&self, node: &Node) {
        let refused = node
            .runtime
            .as_deref()
            .filter(|_| !self.cdi_declared)
            .and_then(runtime::without_cdi);
        match &refused {
            None => self.ready.clear("runtime"),
            Some(text) => {
                self.ready.set("runtime", text.clone());
                if !*self.without_cdi.borrow() {
                    let text = format!("no GPU memory is offered on this node: {text}");
                    warn!("{text}");
                    self.tell_of_node(true, "NoCDI", text);
                }
            }
        }
        self.without_cdi.send_replace(refused.is_some());
        let others = node.whole_gpus > 0;
        if others && !self.other_plugin.swap(true, Ordering::Relaxed) {
            let text = format!(
                "another device plugin offers {} {} on this node, and Divvy offers the memory of its GPUs: a pod of either may get a GPU that pods of the \
                 other use. Keep NVIDIA's plugin off nodes that Divvy shares: its DaemonSet needs a nodeSelector or an affinity that leaves out this node",
                node.whole_gpus,
                names::WHOLE_GPU
            );
            warn!("{text}");
            self.tell_of_node(true, "TwoDevicePlugins", text);
        }
        self.other_plugin.store(others, Ordering::Relaxed);
    }

    /// An event about the node, for whoever looks at its GPUs.
    pub(crate) fn tell_of_node(&self, warning: bool, reason: &'static str, text: String) {
        self.tell(Told {
            pod: None,
            warning,
            reason,
            text,
        });
    }

    fn tell(&self, told: Told) {
        // Full only while the API server is away: the log has it.
        if self.events.try_send(told).is_err() {
            debug!("too many events wait; this one is only in the log");
        }
    }

    /// Everything that a decision needs from the node. Blocks on files.
    fn facts(&self, fresh: bool) -> Facts {
        let handouts = match Checkpoint::read(&self.device_plugin_dir) {
            Ok(checkpoint) => {
                self.ready.clear("checkpoint");
                Some(checkpoint.map_or_else(Vec::new, handouts))
            }
            Err(error) => {
                warn!(%error, "the kubelet's checkpoint");
                self.ready.set("checkpoint", error.to_string());
                None
            }
        };
        let (populated, trouble) = match cgroups::populated_pods(&self.sys_root) {
            Ok(Some(populated)) => (Some(populated), None),
            Ok(None) => (None, self.core().expects_cgroups().then(|| NO_POD_CGROUPS.to_owned())),
            Err(text) => (None, Some(text)),
        };
        match trouble {
            Some(text) => {
                warn!("{text}");
                self.ready.set("cgroups", text);
            }
            None => self.ready.clear("cgroups"),
        }
        let populated = populated.unwrap_or_else(|| self.core().all_that_may_run(handouts.as_deref()));
        Facts {
            handouts,
            populated,
            synced: *self.synced.borrow(),
            fresh,
            node: self.store.node_files(),
            specs: BTreeMap::new(),
            memory_in_use: None,
        }
    }

    /// Performs actions in order and tells the core of each; stops at the first that fails.
    fn perform(&self, actions: Vec<Action>) -> Result<(), FileError> {
        for action in actions {
            self.store.perform(&action)?;
            self.core().commit(&action);
            self.send_event(action);
        }
        Ok(())
    }

    /// One PreStartContainer: the decision, repeated while something is not known yet.
    pub(crate) async fn pre_start(self: &Arc<Self>, ids: Vec<String>) -> Result<(), plugin::Refusal> {
        let started = Instant::now();
        let (outcome, result) = self.try_pre_start(ids, started).await;
        self.metrics.pre_start(outcome, started.elapsed());
        if let Err(refusal) = &result {
            warn!(outcome, "a container may not start now: {refusal}");
        }
        result
    }

    async fn try_pre_start(self: &Arc<Self>, ids: Vec<String>, started: Instant) -> (&'static str, Result<(), plugin::Refusal>) {
        let ids = Arc::new(ids);
        let mut fresh = false;
        loop {
            let changed = self.pods_changed.notified();
            let (reason, mut text) = match self.decide(ids.clone(), fresh).await {
                Ok(Decided::Granted) => return ("granted", Ok(())),
                Ok(Decided::Refused(label, text)) => return (label, Err(plugin::Refusal::not_yet(text))),
                Ok(Decided::Wait(label, text)) => (label, text),
                Err(text) => return ("files", Err(plugin::Refusal::not_yet(text))),
            };
            let left = PATIENCE.saturating_sub(started.elapsed());
            if left.is_zero() {
                return (reason, Err(plugin::Refusal::not_yet(text)));
            }
            if !fresh {
                let listing = Begun::new(self);
                match tokio::time::timeout(left.min(LIST_TIMEOUT), list::pods(&self.client, Some(&self.selector))).await {
                    Ok(Ok(pods)) => {
                        if let Some(actions) = listing.ended(pods.pods) {
                            self.say(actions);
                            self.set_synced();
                            fresh = true;
                        }
                        continue;
                    }
                    Ok(Err(error)) => text = format!("{text}; {error}"),
                    Err(_) => text = format!("{text}; the API server does not answer"),
                }
                if started.elapsed() >= PATIENCE {
                    return (reason, Err(plugin::Refusal::not_yet(text)));
                }
            }
            debug!("a container's start waits: {text}");
            tokio::select! {
                () = changed => {}
                () = tokio::time::sleep(LOOK_AGAIN.min(left)) => {}
            }
        }
    }

    async fn decide(self: &Arc<Self>, ids: Arc<Vec<String>>, fresh: bool) -> Result<Decided, String> {
        let guard = self.grants.clone().lock_owned().await;
        let agent = self.clone();
        // If the kubelet gives up the call, this runs to its end: record and spec are never left half-done.
        let work = tokio::task::spawn_blocking(move || {
            let decided = agent.decide_blocking(&ids, fresh);
            drop(guard);
            decided
        });
        let decided = work.await.map_err(|error| format!("the agent failed: {error}"))?;
        self.publish();
        decided
    }

    fn decide_blocking(&self, ids: &[String], fresh: bool) -> Result<Decided, String> {
        let facts = self.facts(fresh);
        let answer = {
            let mut core = self.core();
            if let Some(handouts) = &facts.handouts {
                core.set_handouts(handouts.clone());
            }
            core.pre_start(ids, &facts)
        };
        match answer {
            PreStart::Granted {
                actions,
                key: Key { container, .. },
                pod,
                gpus,
                steered_wrong,
                shared_ids,
            } => {
                let gave = actions.iter().any(|action| matches!(action, Action::WriteRecord(_)));
                if !actions.iter().any(|action| matches!(action, Action::WriteSpec { .. })) {
                    info!(%pod, %container, "the kubelet's recorded answer is another plugin's: no CDI spec is written");
                }
                self.perform(actions)
                    .map_err(|error| format!("the grant of container {container} of {pod} could not be written: {error}"))?;
                self.metrics.granted(steered_wrong, shared_ids);
                if gave {
                    info!(%pod, %container, gpus = gpus.join(","), "granted");
                }
                Ok(Decided::Granted)
            }
            PreStart::Wait(reason, text) => Ok(Decided::Wait(reason.label(), text)),
            PreStart::Refused { reason, text, actions } => {
                self.say(actions);
                // Whoever holds the memory may end at any time.
                self.look.notify_one();
                Ok(Decided::Refused(reason.label(), text))
            }
        }
    }

    /// One reconciliation.
    /// With `ask_driver` it looks at the processes on the GPUs too; a driver that is slow to answer is not waited for.
    pub(crate) async fn reconcile(self: &Arc<Self>, ask_driver: bool) -> After {
        let in_use = match ask_driver {
            true => self.memory_in_use().await,
            false => None,
        };
        self.look_at_driver().await;
        let guard = self.grants.clone().lock_owned().await;
        let agent = self.clone();
        let work = tokio::task::spawn_blocking(move || {
            let after = agent.reconcile_blocking(in_use);
            drop(guard);
            after
        });
        let after = match work.await {
            Ok(Ok(after)) => {
                self.ready.clear("files");
                after
            }
            Ok(Err(error)) => {
                warn!(%error, "a reconciliation could not be completed; it is tried again");
                self.ready.set("files", error.to_string());
                After::AtRest
            }
            Err(error) => {
                warn!(%error, "a reconciliation failed");
                After::AtRest
            }
        };
        self.publish();
        after
    }

    async fn memory_in_use(&self) -> Option<BTreeMap<String, BTreeMap<String, MiB>>> {
        let processes = match tokio::time::timeout(PROCESSES_TIMEOUT, self.probe.get()?.processes()).await {
            Ok(Ok(processes)) => processes,
            // That the driver does not work is said where its GPUs are followed.
            Ok(Err(failure)) => {
                debug!("the processes on the GPUs are not known: {failure}");
                return None;
            }
            Err(_) => {
                debug!(
                    "the processes on the GPUs are not known: no answer in {} s",
                    PROCESSES_TIMEOUT.as_secs()
                );
                return None;
            }
        };
        for gpu in &processes {
            if let Some(error) = &gpu.error {
                debug!(gpu = gpu.uuid, "the processes on this GPU are not known: {error}");
            }
        }
        Some(hardware::memory_in_use(processes))
    }

    /// The specs from which grants take the driver's libraries. Before the grants are looked at: they are made again in the same pass. Without the
    /// lock of the grants, since the probe may be slow to answer.
    async fn look_at_driver(self: &Arc<Self>) {
        let Some(looked) = self.driver_looked_at().await else { return };
        self.metrics.driver_spec(looked.trouble.is_some());
        self.core().set_driver_trouble(looked.trouble);
        for said in looked.said {
            match said {
                Said::Trouble(trouble) => {
                    warn!("{}", trouble.text);
                    self.tell_of_node(true, trouble.reason(), trouble.text);
                }
                Said::Made(text) => {
                    info!("{text}");
                    self.tell_of_node(false, "DriverSpecMade", text);
                }
                Said::Removed(text) => info!("{text}"),
                Said::Over => info!("the CDI specs of the GPUs are of the driver that is loaded"),
            }
        }
    }

    /// `None`: nothing is known now.
    async fn driver_looked_at(self: &Arc<Self>) -> Option<Looked> {
        let probe = self.probe.get()?;
        let question = self
            .blocking(|agent| {
                let (driver, gpus) = {
                    let core = agent.core();
                    (core.driver().to_owned(), core.gpus().to_vec())
                };
                (!gpus.is_empty()).then(|| agent.driver_spec.question(&agent.store, &driver, &gpus))
            })
            .await??;
        let answer = answered(probe.driver(question.asked.clone())).await;
        let looked = self
            .blocking(move |agent| agent.driver_spec.look(&agent.store, question, answer))
            .await?;
        let wanted = match looked {
            Ok(looked) => return looked,
            Err(wanted) => wanted,
        };
        let made = answered(probe.driver_spec(wanted.basis.clone())).await;
        self.blocking(move |agent| agent.driver_spec.made(&agent.store, *wanted, made))
            .await?
    }

    /// Runs what blocks on files.
    async fn blocking<T: Send + 'static>(self: &Arc<Self>, work: impl FnOnce(&Agent) -> T + Send + 'static) -> Option<T> {
        let agent = self.clone();
        let done = tokio::task::spawn_blocking(move || work(&agent)).await;
        done.inspect_err(|error| warn!(%error, "a look at the driver's files failed"))
            .ok()
    }

    fn reconcile_blocking(&self, memory_in_use: Option<BTreeMap<String, BTreeMap<String, MiB>>>) -> Result<After, FileError> {
        let facts = Facts {
            specs: self.store.specs()?,
            memory_in_use,
            ..self.facts(false)
        };
        let found = {
            let mut core = self.core();
            if let Some(handouts) = &facts.handouts {
                core.set_handouts(handouts.clone());
            }
            core.reconcile(&facts)
        };
        self.metrics.reconciled(&found);
        let before = std::mem::replace(
            &mut *self.disagreements.lock().unwrap_or_else(PoisonError::into_inner),
            found.classes.clone(),
        );
        for (class, count) in &found.classes {
            match class {
                // What lasts is said once, and counted each time.
                class if before.get(class) == Some(count) && *class != Class::GrantEnded => {}
                Class::GrantEnded => info!(count, "grants ended: their pods are over and their processes gone"),
                Class::HeldWithoutPod => debug!(count, "containers without a pod hold memory"),
                class => warn!(
                    count,
                    class = class.label(),
                    "records, specs, checkpoint, pods, cgroups and processes disagreed"
                ),
            }
        }
        let held = !found.held.is_empty();
        self.perform(found.actions)?;
        Ok(if held { After::MemoryHeld } else { After::AtRest })
    }
}

/// A list of this node's pods that is under way. One that fails, or whose call the kubelet gives up, is forgotten.
struct Begun<'a> {
    agent: &'a Agent,
    listing: Option<Listing>,
}

impl<'a> Begun<'a> {
    fn new(agent: &'a Agent) -> Begun<'a> {
        let listing = Some(agent.core().begin_list());
        Begun { agent, listing }
    }

    fn ended(mut self, pods: Vec<Pod>) -> Option<Vec<Action>> {
        let listing = self.listing.take()?;
        self.agent.core().listed(listing, pods)
    }
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        if let Some(listing) = self.listing.take() {
            self.agent.core().list_failed(listing);
        }
    }
}

/// An answer of the probe, if it comes in time.
async fn answered<T>(answer: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let late = |_| {
        Err(Failure::new(
            Code::Timeout,
            format!("no answer in {} s", DRIVER_TIMEOUT.as_secs()),
        ))
    };
    tokio::time::timeout(DRIVER_TIMEOUT, answer).await.unwrap_or_else(late)
}

enum Decided {
    Granted,
    Refused(&'static str, String),
    Wait(&'static str, String),
}

fn send_devices(sender: &Devices, devices: &[Device]) {
    let list: Vec<plugin::Device> = devices
        .iter()
        .map(|device| plugin::Device {
            id: device.id.to_string(),
            healthy: device.healthy,
            numa: device.numa.map(i64::from),
        })
        .collect();
    sender.send_if_modified(|sent| {
        let changed = **sent != list;
        if changed {
            *sent = Arc::new(list);
        }
        changed
    });
}

/// The checkpoint's entries as the core knows them. An answer with more than one grant is nobody's that we know.
fn handouts(checkpoint: Checkpoint) -> Vec<Handout> {
    for text in &checkpoint.skipped {
        warn!("the kubelet's checkpoint: {text}");
    }
    checkpoint
        .entries
        .into_iter()
        .map(|entry| {
            let mut grants = entry.cdi_devices().iter().filter_map(|name| cdi::grant_name(name));
            let grant = match (grants.next(), grants.next()) {
                (Some(name), None) => Some(name.to_owned()),
                _ => None,
            };
            Handout {
                key: Key {
                    uid: entry.pod_uid,
                    container: entry.container,
                },
                resource: entry.resource,
                ids: entry.ids,
                grant,
            }
        })
        .collect()
}
