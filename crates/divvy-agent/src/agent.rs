//! The agent's shared state, and the one place where decisions meet files. Under one lock, the agent reads the facts, lets the core
//! decide, and performs and commits the core's actions.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use divvy_cdi as cdi;
use divvy_cdi::driver_spec::Place;
use divvy_hardware::client::ProbeHandle;
use divvy_hardware::{Code, Failure, GpuProcesses};
use divvy_kube::list;
use divvy_kubelet::checkpoint::Checkpoint;
use divvy_kubelet::plugin;
use divvy_model::out_of_service::GpusOutOfService;
use divvy_model::{Health, MiB, Node, Pod, WholeKind, runtime};
use futures::future::BoxFuture;
use tokio::sync::{Notify, mpsc, watch};
use tracing::{debug, info, warn};

use crate::cgroups;
use crate::driver_spec::{self, Checked, DriverSpec, News};
use crate::files::FileError;
use crate::guard::Shares;
use crate::labels::Seen;
use crate::memory_in_use::memory_in_use;
use crate::metrics::{Allow, Counts, Measured, Metrics};
use crate::mps;
use crate::observed::{Observed, Shown};
use crate::pending_event::PendingEvent;
use crate::readiness::Readiness;
use crate::store::Store;
use crate::usage::Usage;
use divvy_agent_core::{
    Action, Class, Core, Device, Facts, Handout, Key, Limit, Listing, MigStrategy, OWN_VISIBLE_DEVICES, PreStart, ResourceSpec,
};

/// How long the start of a container waits for facts that should arrive soon: the pod's object, the kubelet's checkpoint.
/// After that, the PreStartContainer call fails, and the kubelet retries.
const PATIENCE: Duration = Duration::from_secs(5);
/// The timeout of one list of the node's pods within [`PATIENCE`].
const LIST_TIMEOUT: Duration = Duration::from_secs(3);
/// The timeout of a list of the node's pods while the kubelet admits one. The kubelet admits no other pod in the meantime.
const ADMISSION_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a reconciliation waits for the driver's lists of processes.
const PROCESSES_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a reconciliation waits for the probe to check the driver's files. It waits as long again for the probe to make a
/// spec.
const DRIVER_TIMEOUT: Duration = Duration::from_secs(2);
/// Text for a node whose pods have grants although the kubelet makes no cgroups for pods.
const NO_POD_CGROUPS: &str = "pods with GPU memory run on this node, but there is no kubepods cgroup, so the agent cannot tell which containers \
     still run, and no memory becomes available again. Set cgroupsPerQOS: true in the kubelet's configuration (the default), or mount the host's \
cgroups for the agent";
/// How long a container start that waits for facts sleeps before it checks again, if nothing wakes it up earlier.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// A resource's devices, as the kubelet receives them.
pub(crate) type Devices = watch::Sender<Arc<Vec<plugin::Device>>>;

/// The state that the agent's tasks share.
pub(crate) struct Agent {
    core: Mutex<Core>,
    /// Held while PreStart or a reconciliation reads, decides, and writes, so that they run one after the other.
    grants: Arc<tokio::sync::Mutex<()>>,
    store: Store,
    usage: Usage,
    /// The guard's files of pods. There are some after `--guard` was switched off, too: until these pods end.
    shares: Shares,
    /// Notified when a pod got such files.
    pub(crate) guarded: Notify,
    /// Notified when a container got a grant: how long it keeps the GPU busy is measured.
    pub(crate) timed: Notify,
    /// Notified when pods may have got or lost limits of the driver.
    pub(crate) limited: Notify,
    driver_spec: DriverSpec,
    sys_root: PathBuf,
    device_plugin_dir: PathBuf,
    client: kube::Client,
    selector: String,
    /// The node's name, if metrics are served under dcgm-exporter's names.
    dcgm_names_of: Option<String>,
    /// True once the list of pods was complete.
    synced: watch::Sender<bool>,
    /// Notified when a pod was created, changed, or deleted.
    pub(crate) pods_changed: Notify,
    /// Notified when the next reconciliation should run soon.
    pub(crate) look: Notify,
    /// The devices of every resource that this node has offered so far.
    devices: Mutex<Vec<(ResourceSpec, Devices)>>,
    /// The resources that this node offers.
    pub(crate) offered: watch::Sender<Vec<ResourceSpec>>,
    /// The state from which the last devices were published: the hardware generation, and whether some GPU was not healthy.
    published: Mutex<(u64, bool)>,
    hardware_generation: std::sync::atomic::AtomicU64,
    /// The inventory as JSON, or an empty string until the first GPU was seen.
    pub(crate) inventory: watch::Sender<Arc<str>>,
    /// What the labels of the node are made from.
    pub(crate) seen: watch::Sender<Seen>,
    /// The labels that the node has, or `None` until it was seen.
    pub(crate) labels_on_node: watch::Sender<Option<BTreeMap<String, String>>>,
    /// The GPUs that the node's annotations take out of service.
    pub(crate) out_of_service: watch::Sender<GpusOutOfService>,
    pub(crate) events: mpsc::Sender<PendingEvent>,
    pub(crate) metrics: Metrics,
    pub(crate) ready: Readiness,
    /// `--device-list-strategy cdi`: the operator states that the container runtime supports CDI.
    cdi_declared: bool,
    /// True if the node's container runtime is known not to support CDI. Then the agent offers nothing.
    pub(crate) without_cdi: watch::Sender<bool>,
    /// Whether another device plugin offers whole GPUs on this node.
    other_plugin: AtomicBool,
    probe: OnceLock<ProbeHandle>,
    /// The disagreements that the last reconciliation found, to log only changes.
    disagreements: Mutex<BTreeMap<Class, u64>>,
}

impl std::fmt::Debug for Agent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Agent")
            .field("selector", &self.selector)
            .finish_non_exhaustive()
    }
}

impl Observed for Agent {
    fn ready(&self) -> &Readiness {
        &self.ready
    }

    fn counts(&self) -> &Counts {
        self.metrics.counts()
    }

    fn metrics(&self, format: divvy_exposition::Format) -> String {
        let measured = self.with_signs(self.usage.measured());
        self.metrics.text(&self.core(), &measured, format)
    }

    fn usage(&self) -> Option<Shown> {
        let (usage, tag) = self.usage.sample(&self.with_signs(self.usage.measured_now()));
        Some(Shown { tag, usage })
    }

    fn measure(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.measure_for_metrics())
    }

    fn dcgm(&self) -> Option<String> {
        let node = self.dcgm_names_of.as_deref()?;
        let measured = self.usage.measured();
        Some(self.metrics.dcgm(node, &self.core(), &measured))
    }
}

impl Agent {
    /// Add what the guard has found.
    fn with_signs(&self, measured: Measured) -> Measured {
        Measured {
            counted: self.shares.counted(),
            escapes: self.escapes(),
            ..measured
        }
    }
}

/// The arguments of [`Agent::new`].
pub(crate) struct Parts {
    pub(crate) core: Core,
    pub(crate) store: Store,
    pub(crate) shares: Shares,
    pub(crate) driver_spec: DriverSpec,
    pub(crate) sys_root: PathBuf,
    pub(crate) device_plugin_dir: PathBuf,
    pub(crate) client: kube::Client,
    pub(crate) node_name: String,
    /// `--dcgm-metrics`.
    pub(crate) dcgm_metrics: bool,
    /// `--metrics-allow`.
    pub(crate) allow: Allow,
    pub(crate) cdi_declared: bool,
    pub(crate) events: mpsc::Sender<PendingEvent>,
}

/// What remains after a reconciliation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum After {
    /// Nothing is pending.
    AtRest,
    /// Containers without a pod object hold memory. The agent checks every second whether they have ended.
    MemoryHeld,
}

impl Agent {
    pub(crate) fn new(parts: Parts) -> Agent {
        Agent {
            core: Mutex::new(parts.core),
            grants: Arc::default(),
            store: parts.store,
            usage: Usage::default(),
            shares: parts.shares,
            guarded: Notify::new(),
            timed: Notify::new(),
            limited: Notify::new(),
            driver_spec: parts.driver_spec,
            sys_root: parts.sys_root,
            device_plugin_dir: parts.device_plugin_dir,
            client: parts.client,
            selector: format!("spec.nodeName={}", parts.node_name),
            dcgm_names_of: parts.dcgm_metrics.then_some(parts.node_name),
            synced: watch::Sender::new(false),
            pods_changed: Notify::new(),
            look: Notify::new(),
            devices: Mutex::default(),
            offered: watch::Sender::new(Vec::new()),
            published: Mutex::new((0, false)),
            hardware_generation: std::sync::atomic::AtomicU64::new(0),
            inventory: watch::Sender::new(Arc::from("")),
            seen: watch::Sender::default(),
            labels_on_node: watch::Sender::default(),
            out_of_service: watch::Sender::default(),
            events: parts.events,
            metrics: Metrics::showing(parts.allow),
            ready: Readiness::default(),
            cdi_declared: parts.cdi_declared,
            without_cdi: watch::Sender::new(false),
            other_plugin: AtomicBool::new(false),
            probe: OnceLock::new(),
            disagreements: Mutex::default(),
        }
    }

    /// Set the probe that lists the processes on the GPUs. Only the first call has an effect.
    pub(crate) fn set_probe(&self, probe: ProbeHandle) {
        self.probe.get_or_init(|| probe);
    }

    /// Return the probe, once there is one.
    pub(crate) fn probe(&self) -> Option<&ProbeHandle> {
        self.probe.get()
    }

    /// Return the root of the machine's files.
    pub(crate) fn sys_root(&self) -> &Path {
        &self.sys_root
    }

    /// Return what is known about the use of GPUs.
    pub(crate) fn usage(&self) -> &Usage {
        &self.usage
    }

    /// Return the UUIDs of the GPUs on which a container has a grant.
    pub(crate) fn granted_gpus(&self) -> BTreeSet<String> {
        let core = self.core();
        let shares = core.records().flat_map(|record| &record.container_gpus);
        let uuids: BTreeSet<&str> = shares.map(|share| share.uuid.as_str()).collect();
        uuids.into_iter().map(str::to_owned).collect()
    }

    /// Return the guard's files of pods.
    pub(crate) fn shares(&self) -> &Shares {
        &self.shares
    }

    /// Lock the core. Hold the lock only briefly: no I/O, no waiting.
    pub(crate) fn core(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn client(&self) -> kube::Client {
        self.client.clone()
    }

    /// The field selector of this node's pods.
    pub(crate) fn selector(&self) -> &str {
        &self.selector
    }

    pub(crate) fn set_synced(&self) {
        self.synced.send_replace(true);
    }

    /// Set the GPUs and MIG devices that the driver reports. The driver's spec names the MIG devices instead of a GPU in MIG mode.
    pub(crate) fn set_places(&self, places: Vec<Place>) {
        if self.driver_spec.set_places(places) {
            self.look.notify_one();
        }
    }

    /// Publish the devices and the inventory after the driver has described the GPUs. `is_new`: they are not as they were described before.
    pub(crate) fn hardware_described(&self, is_new: bool) {
        if is_new || self.hardware_generation.load(std::sync::atomic::Ordering::Relaxed) == 0 {
            self.hardware_generation.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }
        self.publish();
    }

    /// Return the devices of a resource.
    pub(crate) fn devices(&self, spec: ResourceSpec) -> watch::Receiver<Arc<Vec<plugin::Device>>> {
        let mut all = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        of_resource(&mut all, spec).subscribe()
    }

    /// Send the core's devices and inventory to their subscribers, if they changed.
    pub(crate) fn publish(&self) {
        let core = self.core();
        if core.gpus().is_empty() && self.hardware_generation.load(std::sync::atomic::Ordering::Relaxed) == 0 {
            return;
        }
        // While all GPUs are healthy, the device list changes only with the hardware. So pods can come and go without 4,096 ids being
        // formatted each time.
        let bad = core.gpus().iter().any(|gpu| gpu.health != Health::Ok);
        let now = (self.hardware_generation.load(std::sync::atomic::Ordering::Relaxed), bad);
        let mut published = self.published.lock().unwrap_or_else(PoisonError::into_inner);
        let offered = core.offers();
        if bad || *published != now || *self.offered.borrow() != offered {
            *published = now;
            let mut all = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
            for spec in &offered {
                of_resource(&mut all, *spec);
            }
            for (spec, sender) in all.iter() {
                send_devices(sender, &core.devices(*spec));
            }
            drop(all);
            self.offered.send_if_modified(|before| {
                let changed = *before != offered;
                *before = offered;
                changed
            });
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

    /// Log and send the events among these actions. The caller passes no file actions.
    pub(crate) fn post_events(&self, actions: Vec<Action>) {
        for action in actions {
            self.send_event(action);
        }
    }

    pub(crate) fn send_event(&self, action: Action) {
        if let Action::Event { pod, uid, reason, text } = action {
            warn!(%pod, reason, "{text}");
            self.post(PendingEvent {
                pod: Some((pod, uid)),
                // This event reports no failure of the pod.
                warning: reason != OWN_VISIBLE_DEVICES,
                reason,
                text,
            });
        }
    }

    /// Check the current Node object: the container runtime and other device plugins on the node determine whether containers can
    /// get their GPUs, and annotations take GPUs out of service.
    pub(crate) fn check_node(&self, node: &Node) {
        self.out_of_service.send_if_modified(|known| {
            let changed = *known != node.out_of_service;
            known.clone_from(&node.out_of_service);
            changed
        });
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
                    let text = format!("this node offers no GPU memory: {text}");
                    warn!("{text}");
                    self.post_on_node(true, "NoCDI", text);
                }
            }
        }
        self.without_cdi.send_replace(refused.is_some());
        let settings = self.core().settings().clone();
        // Without a MIG strategy, the agent does not offer a GPU in MIG mode.
        let is_shared = |kind: &WholeKind| kind.is_of_shared_gpus() || settings.mig != MigStrategy::None;
        let shared = node
            .whole
            .iter()
            .find(|(kind, _)| kind.vendor().is_shared_by_default() && is_shared(kind));
        let theirs = shared.filter(|_| !settings.whole);
        if let Some((kind, offered)) = theirs
            && !self.other_plugin.swap(true, Ordering::Relaxed)
        {
            let text = format!(
                "another device plugin offers {offered} {} on this node, while Divvy shares the memory of the same GPUs: a pod of either plugin may get \
                 a GPU that pods of the other use. Keep NVIDIA's plugin off this node: give its DaemonSet a nodeSelector or an affinity that \
                 excludes the node. With --whole-gpus, Divvy's agent offers {0} itself",
                kind.resource()
            );
            warn!("{text}");
            self.post_on_node(true, "TwoDevicePlugins", text);
        }
        self.other_plugin.store(theirs.is_some(), Ordering::Relaxed);
    }

    /// Send an event about the node.
    pub(crate) fn post_on_node(&self, warning: bool, reason: &'static str, text: String) {
        self.post(PendingEvent {
            pod: None,
            warning,
            reason,
            text,
        });
    }

    fn post(&self, event: PendingEvent) {
        // The queue is full only while the API server is unreachable. The log has the event.
        if self.events.try_send(event).is_err() {
            debug!("too many events are waiting; this event is only in the log");
        }
    }

    /// Read the facts that a decision needs from the node. Blocks on files.
    fn facts(&self, fresh: bool) -> Facts {
        let handouts = match Checkpoint::read(&self.device_plugin_dir) {
            Ok(checkpoint) => {
                self.ready.clear("checkpoint");
                Some(checkpoint.map_or_else(Vec::new, handouts))
            }
            Err(error) => {
                warn!(%error, "cannot use the kubelet's checkpoint");
                self.ready.set("checkpoint", error.to_string());
                None
            }
        };
        let (populated, trouble) = match cgroups::populated_pods(&self.sys_root) {
            Ok(Some(populated)) => (Some(populated), None),
            Ok(None) => (None, self.core().expects_cgroups().then(|| NO_POD_CGROUPS.to_owned())),
            Err(error) => (None, Some(error.to_string())),
        };
        match trouble {
            Some(text) => {
                warn!("{text}");
                self.ready.set("cgroups", text);
            }
            None => self.ready.clear("cgroups"),
        }
        let device_paths = self.core().device_paths();
        let populated = populated.unwrap_or_else(|| self.core().all_that_may_run(handouts.as_deref()));
        Facts {
            handouts,
            populated,
            synced: *self.synced.borrow(),
            fresh,
            node: self.store.node_files(device_paths),
            specs: BTreeMap::new(),
            memory_in_use: None,
            escapes: BTreeMap::new(),
        }
    }

    /// Perform the actions on files in order and commit each to the core. Stop at the first that fails. Return the steps that hold a pod to its share, which
    /// are to be taken without the lock of the grants.
    fn perform(&self, actions: Vec<Action>) -> Result<Vec<Limit>, FileError> {
        let mut limits = Vec::new();
        for action in actions {
            if let Action::Limit(limit) = action {
                limits.push(limit);
                continue;
            }
            self.store.perform(&action)?;
            self.core().commit(&action);
            self.send_event(action);
        }
        Ok(limits)
    }

    /// Answer one PreStartContainer call. Repeat the decision while a fact is not known yet.
    pub(crate) async fn pre_start(self: &Arc<Self>, spec: ResourceSpec, ids: Vec<String>) -> Result<(), plugin::Refusal> {
        let started = Instant::now();
        let (outcome, result) = self.try_pre_start(spec, ids, started).await;
        self.metrics.pre_start(outcome, started.elapsed());
        if let Err(refusal) = &result {
            warn!(outcome, "a container may not start yet: {refusal}");
        }
        result
    }

    async fn try_pre_start(
        self: &Arc<Self>,
        spec: ResourceSpec,
        ids: Vec<String>,
        started: Instant,
    ) -> (&'static str, Result<(), plugin::Refusal>) {
        let ids = Arc::new(ids);
        let mut fresh = false;
        loop {
            let changed = self.pods_changed.notified();
            let (reason, mut text) = match self.decide(spec, ids.clone(), fresh).await {
                Ok(Decided::Granted(limits)) => {
                    return match self.limit(limits).await {
                        Ok(()) => ("granted", Ok(())),
                        Err(error) => ("not_limited", Err(plugin::Refusal::not_yet(error.to_string()))),
                    };
                }
                Ok(Decided::Refused(label, text)) => return (label, Err(plugin::Refusal::not_yet(text))),
                Ok(Decided::Wait(label, text)) => (label, text),
                Err(text) => return ("files", Err(plugin::Refusal::not_yet(text))),
            };
            let left = PATIENCE.saturating_sub(started.elapsed());
            if left.is_zero() {
                return (reason, Err(plugin::Refusal::not_yet(text)));
            }
            if !fresh {
                match self.list_pods(left.min(LIST_TIMEOUT)).await {
                    Ok(is_complete) => {
                        fresh = is_complete;
                        continue;
                    }
                    Err(error) => text = format!("{text}; {error}"),
                }
                if started.elapsed() >= PATIENCE {
                    return (reason, Err(plugin::Refusal::not_yet(text)));
                }
            }
            debug!("a container's start is waiting: {text}");
            tokio::select! {
                () = changed => {}
                () = tokio::time::sleep(LOOK_AGAIN.min(left)) => {}
            }
        }
    }

    /// Ask the API server for the pods of this node, because the kubelet is admitting one of which the watch has not told yet.
    pub(crate) async fn look_for_pods(&self) {
        if let Err(text) = self.list_pods(ADMISSION_TIMEOUT).await {
            debug!("the kubelet admits a pod that is not known yet: {text}");
        }
    }

    /// List the pods of this node. Return false if the core did not take it over, because the watch started again meanwhile.
    async fn list_pods(&self, limit: Duration) -> Result<bool, String> {
        let listing = Begun::new(self);
        match tokio::time::timeout(limit, list::pods(&self.client, Some(&self.selector))).await {
            Ok(Ok(pods)) => {
                let taken = listing.ended(pods.pods);
                let is_taken = taken.is_some();
                if let Some(actions) = taken {
                    self.post_events(actions);
                    self.set_synced();
                }
                Ok(is_taken)
            }
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err("the API server does not answer".to_owned()),
        }
    }

    async fn decide(self: &Arc<Self>, spec: ResourceSpec, ids: Arc<Vec<String>>, fresh: bool) -> Result<Decided, String> {
        let guard = self.grants.clone().lock_owned().await;
        let agent = self.clone();
        // If the kubelet cancels the call, this still runs to its end, so that record and spec are never half-written.
        let work = tokio::task::spawn_blocking(move || {
            let decided = agent.decide_blocking(spec, &ids, fresh);
            drop(guard);
            decided
        });
        let decided = work.await.map_err(|error| format!("internal error in the agent: {error}"))?;
        self.publish();
        decided
    }

    fn decide_blocking(&self, spec: ResourceSpec, ids: &[String], fresh: bool) -> Result<Decided, String> {
        let facts = self.facts(fresh);
        let answer = {
            let mut core = self.core();
            if let Some(handouts) = &facts.handouts {
                core.set_handouts(handouts.clone());
            }
            core.pre_start(spec, ids, &facts)
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
                    info!(%pod, %container, "the kubelet's recorded answer comes from another plugin: the agent writes no CDI spec");
                }
                let limits = self
                    .perform(actions)
                    .map_err(|error| format!("the grant of container {container} of {pod} could not be written: {error}"))?;
                self.metrics.granted(steered_wrong, shared_ids);
                self.timed.notify_one();
                if gave {
                    info!(%pod, %container, gpus = gpus.join(","), "granted");
                }
                Ok(Decided::Granted(limits))
            }
            PreStart::Wait(reason, text) => Ok(Decided::Wait(reason.label(), text)),
            PreStart::Refused { reason, text, actions } => {
                self.post_events(actions);
                // The pod that holds the memory may end at any time.
                self.look.notify_one();
                Ok(Decided::Refused(reason.label(), text))
            }
        }
    }

    /// Report whether containers can get the guard.
    pub(crate) fn can_guard(&self) -> bool {
        self.core().settings().guard.is_some()
    }

    /// Return the UID of the pod whose MPS control daemon serves the node's GPUs for this agent. `None` if none does.
    pub(crate) fn mps_server(&self) -> Option<String> {
        let has_mps = self.core().settings().mps.is_some();
        has_mps.then(|| mps::server(&self.sys_root)).flatten()
    }

    /// Report whether the node's cgroups are of the version that drivers can limit.
    pub(crate) fn can_limit_cgroups(&self) -> bool {
        cgroups::is_v2(&self.sys_root)
    }

    /// Run one reconciliation. With `ask_driver`, also compare the processes on the GPUs with the grants. The wait for the driver is limited.
    pub(crate) async fn reconcile(self: &Arc<Self>, ask_driver: bool) -> After {
        let in_use = if ask_driver { self.memory_in_use().await } else { None };
        self.check_driver().await;
        let guard = self.grants.clone().lock_owned().await;
        let agent = self.clone();
        let work = tokio::task::spawn_blocking(move || {
            let after = agent.reconcile_blocking(in_use);
            drop(guard);
            after
        });
        let after = match work.await {
            Ok(Ok((after, gone))) => {
                self.ready.clear("files");
                self.shares.clear(&gone, self.probe.get()).await;
                self.metrics.guarded_pods(self.shares.pods().len());
                after
            }
            Ok(Err(error)) => {
                warn!(%error, "a reconciliation could not be completed; the agent tries again");
                self.ready.set("files", error.to_string());
                After::AtRest
            }
            Err(error) => {
                warn!(%error, "a reconciliation failed");
                After::AtRest
            }
        };
        self.publish();
        self.limited.notify_one();
        after
    }

    async fn memory_in_use(&self) -> Option<BTreeMap<String, BTreeMap<String, MiB>>> {
        self.processes().await.map(|processes| memory_in_use(&processes))
    }

    /// Ask the driver for the processes on the GPUs. `None` if it does not answer.
    pub(crate) async fn processes(&self) -> Option<Vec<GpuProcesses>> {
        let processes = match tokio::time::timeout(PROCESSES_TIMEOUT, self.probe.get()?.processes()).await {
            Ok(Ok(mut processes)) => {
                if let Some(server) = self.mps_server() {
                    mps::disown(&mut processes, &server);
                }
                processes
            }
            // `hardware` reports that the driver does not work.
            Ok(Err(failure)) => {
                debug!("the agent does not know the processes on the GPUs: {failure}");
                return None;
            }
            Err(_) => {
                debug!(
                    "the agent does not know the processes on the GPUs: no answer in {} s",
                    PROCESSES_TIMEOUT.as_secs()
                );
                return None;
            }
        };
        for gpu in &processes {
            if let Some(error) = &gpu.error {
                debug!(gpu = gpu.uuid, "the agent does not know the processes on this GPU: {error}");
            }
        }
        Some(processes)
    }

    /// Check the specs from which grants take the driver's libraries. This runs before the grants are reconciled, so that their
    /// specs use the new libraries in the same pass. It does not hold the lock of the grants, because the probe may answer
    /// slowly.
    async fn check_driver(self: &Arc<Self>) {
        let Some(checked) = self.driver_checked().await else { return };
        self.metrics.driver_spec(checked.trouble.is_some());
        self.core().set_driver_trouble(checked.trouble);
        for news in checked.news {
            match news {
                News::Trouble(trouble) => {
                    warn!("{}", trouble.text);
                    self.post_on_node(true, trouble.reason(), trouble.text);
                }
                News::Made(text) => {
                    info!("{text}");
                    self.post_on_node(false, "DriverSpecMade", text);
                }
                News::Removed(text) => info!("{text}"),
                News::Over => info!("the CDI specs of the GPUs match the loaded driver again"),
            }
        }
    }

    /// Return the state of the driver's specs, or `None` if it is unknown at the moment.
    async fn driver_checked(self: &Arc<Self>) -> Option<Checked> {
        let probe = self.probe.get()?;
        let question = self
            .blocking(|agent| {
                let driver = agent.core().driver(driver_spec::VENDOR).to_owned();
                agent.driver_spec.question(&agent.store, &driver)
            })
            .await??;
        let answer = answered(probe.driver(question.asked.clone())).await;
        let checked = self
            .blocking(move |agent| agent.driver_spec.check(&agent.store, question, answer))
            .await?;
        let wanted = match checked {
            Ok(checked) => return checked,
            Err(wanted) => wanted,
        };
        let made = answered(probe.driver_spec(wanted.basis.clone())).await;
        self.blocking(move |agent| agent.driver_spec.made(&agent.store, *wanted, made))
            .await?
    }

    /// Run work that blocks on files.
    pub(crate) async fn blocking<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Agent) -> T + Send + 'static,
    ) -> Option<T> {
        let agent = self.clone();
        let done = tokio::task::spawn_blocking(move || work(&agent)).await;
        done.inspect_err(|error| warn!(%error, "work on files failed")).ok()
    }

    /// Return also the UIDs of pods whose files of shares can be removed.
    fn reconcile_blocking(
        &self,
        memory_in_use: Option<BTreeMap<String, BTreeMap<String, MiB>>>,
    ) -> Result<(After, BTreeSet<String>), FileError> {
        let facts = Facts {
            specs: self.store.specs()?,
            memory_in_use,
            escapes: self.escapes(),
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
                // A lasting disagreement is logged once and counted each time.
                class if before.get(class) == Some(count) && *class != Class::GrantEnded => {}
                Class::GrantEnded => info!(count, "grants ended: their pods have ended and their processes are gone"),
                Class::HeldWithoutPod => debug!(count, "containers without a pod object hold memory"),
                class => warn!(
                    count,
                    class = class.label(),
                    "found disagreements between records, specs, checkpoint, pods, cgroups, and processes"
                ),
            }
        }
        let held = !found.held.is_empty();
        self.perform(found.actions)?;
        let mut gone = self.shares.pods();
        {
            let core = self.core();
            gone.retain(|uid| core.is_gone(uid, &facts));
        }
        Ok((if held { After::MemoryHeld } else { After::AtRest }, gone))
    }
}

/// A running request for the list of this node's pods. It is abandoned if it fails or if the kubelet cancels the call.
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

/// Wait for an answer of the probe, but not longer than [`DRIVER_TIMEOUT`].
pub(crate) async fn answered<T>(answer: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let late = |_| {
        Err(Failure::new(
            Code::Timeout,
            format!("no answer in {} s", DRIVER_TIMEOUT.as_secs()),
        ))
    };
    tokio::time::timeout(DRIVER_TIMEOUT, answer).await.unwrap_or_else(late)
}

enum Decided {
    /// The steps that hold the pod to its share.
    Granted(Vec<Limit>),
    Refused(&'static str, String),
    Wait(&'static str, String),
}

/// Return the devices of a resource, and add the resource if it is new.
fn of_resource(all: &mut Vec<(ResourceSpec, Devices)>, spec: ResourceSpec) -> &Devices {
    let position = all.iter().position(|(of, _)| *of == spec).unwrap_or_else(|| {
        all.push((spec, Devices::default()));
        all.len() - 1
    });
    &all[position].1
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

/// Convert the checkpoint's entries. An Allocate response with more than one grant did not come from this agent.
fn handouts(checkpoint: Checkpoint) -> Vec<Handout> {
    for text in &checkpoint.skipped {
        warn!("skipped an entry of the kubelet's checkpoint: {text}");
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
