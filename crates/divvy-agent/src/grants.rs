//! The grants of containers, and the one place where decisions meet files. Under one lock, the agent reads the facts, lets the core decide, and performs and
//! commits the core's actions.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::time::{Duration, Instant};

use divvy_agent_core::{
    AgentAction, AgentCore, ContainerKey, DecisionFacts, DisagreementClass, LimitStep, PreStart, ResourceSpec,
};
use divvy_cdi::driver_spec::NvmlGpu;
use divvy_kubelet::plugin;
use divvy_model::{MiB, PodKey};
use tokio::sync::Notify;
use tokio::task::JoinError;
use tracing::field::{Empty, display};
use tracing::{Span, debug, info, instrument, warn};

use crate::driver_check::DriverCheck;
use crate::files::FileError;
use crate::limiting::Limiting;
use crate::memory_in_use::memory_in_use;
use crate::node_facts::NodeFacts;
use crate::own_pods::OwnPods;
use crate::probe_access::ProbeAccess;
use crate::publishing::Publishing;
use crate::reports::Reports;
use crate::shared_core::SharedCore;
use crate::store::Store;

/// How long the start of a container waits for facts that should arrive soon: the pod's object, the kubelet's checkpoint.
/// After that, the PreStartContainer call fails, and the kubelet retries.
const PATIENCE: Duration = Duration::from_secs(5);
/// The timeout of one list of the node's pods within [`PATIENCE`].
const LIST_TIMEOUT: Duration = Duration::from_secs(3);
/// How long a container start that waits for facts sleeps before it checks again, if nothing wakes it up earlier.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// What remains after a reconciliation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AfterReconcile {
    /// Nothing is pending.
    AtRest,
    /// Containers without a pod object hold memory. The agent checks every second whether they have ended.
    MemoryHeld,
}

/// Answers the kubelet's calls about containers, and keeps records and CDI specs in agreement with the node.
pub(crate) struct Grants {
    core: Arc<SharedCore>,
    probe: Arc<ProbeAccess>,
    reports: Arc<Reports>,
    pods: Arc<OwnPods>,
    store: Arc<Store>,
    publishing: Arc<Publishing>,
    limiting: Arc<Limiting>,
    facts: NodeFacts,
    driver: Arc<DriverCheck>,
    /// Held while PreStart or a reconciliation reads, decides, and writes, so that they run one after the other.
    lock: Arc<tokio::sync::Mutex<()>>,
    /// Notified when the next reconciliation should run soon.
    look: Notify,
    /// The disagreements that the last reconciliation found, to log only changes.
    disagreements: Mutex<BTreeMap<DisagreementClass, u64>>,
}

impl Grants {
    pub(crate) fn new(facts: NodeFacts, driver: DriverCheck, publishing: Arc<Publishing>, limiting: Arc<Limiting>) -> Grants {
        Grants {
            core: facts.core.clone(),
            probe: driver.probe.clone(),
            reports: facts.reports.clone(),
            pods: facts.pods.clone(),
            store: facts.store.clone(),
            publishing,
            limiting,
            facts,
            driver: Arc::new(driver),
            lock: Arc::default(),
            look: Notify::new(),
            disagreements: Mutex::default(),
        }
    }

    /// Have the next reconciliation run soon.
    pub(crate) fn look_soon(&self) {
        self.look.notify_one();
    }

    /// Wait until the next reconciliation should run.
    pub(crate) async fn wait_for_look(&self) {
        self.look.notified().await;
    }

    /// Set the GPUs and MIG devices that the driver reports. The driver's spec names the MIG devices instead of a GPU in MIG mode.
    pub(crate) fn set_places(&self, places: Vec<NvmlGpu>) {
        if self.driver.set_places(places) {
            self.look_soon();
        }
    }

    /// Answer GetPreferredAllocation.
    pub(crate) async fn preferred(
        &self,
        spec: ResourceSpec,
        available: &[String],
        must_include: &[String],
        size: usize,
    ) -> Vec<String> {
        if spec.grants() && !self.core.lock().is_expected(spec, must_include, size) {
            self.pods.look().await;
        }
        self.core.lock().preferred(spec, available, must_include, size)
    }

    /// Answer Allocate with the names of CDI devices.
    pub(crate) fn allocate(&self, spec: ResourceSpec, ids: &[String]) -> Result<Vec<String>, plugin::CallRefusal> {
        let allocated = self.core.lock().allocate(spec, ids);
        let cdi_devices = allocated.map_err(|error| plugin::CallRefusal::invalid(error.to_string()))?;
        if spec.grants() {
            // The handed-out ids decide which ids stay healthy.
            self.publishing.publish();
            self.look_soon();
        }
        Ok(cdi_devices)
    }

    /// Perform the actions on files in order and commit each to the core. Stop at the first that fails. Return the steps that hold a pod to its share, which
    /// are to be taken without the lock of the grants.
    fn perform(&self, actions: Vec<AgentAction>) -> Result<Vec<LimitStep>, FileError> {
        let mut limits = Vec::new();
        for action in actions {
            if let AgentAction::Limit(limit) = action {
                limits.push(limit);
                continue;
            }
            self.store.perform(&action)?;
            self.core.lock().commit(&action);
            self.reports.post_event(action);
        }
        Ok(limits)
    }

    /// Answer one PreStartContainer call. Repeat the decision while a fact is not known yet.
    #[instrument(skip_all, fields(resource = %spec.name(), uid = Empty, pod = Empty, container = Empty))]
    pub(crate) async fn pre_start(self: &Arc<Self>, spec: ResourceSpec, ids: Vec<String>) -> Result<(), plugin::CallRefusal> {
        let started = Instant::now();
        let (outcome, result) = self.try_pre_start(spec, ids, started).await;
        self.reports.metrics.pre_start(outcome, started.elapsed());
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
    ) -> (&'static str, Result<(), plugin::CallRefusal>) {
        let call = Arc::new(PreStartCall {
            spec,
            ids,
            named: Once::new(),
        });
        let mut fresh = false;
        loop {
            let changed = self.pods.changed();
            let (reason, mut text) = match self.decide(&call, fresh).await {
                Ok(Decided::Granted(limits)) => {
                    return match self.limiting.limit(limits).await {
                        Ok(()) => ("granted", Ok(())),
                        Err(error) => ("not_limited", Err(plugin::CallRefusal::not_yet(error.to_string()))),
                    };
                }
                Ok(Decided::Refused(label, text)) => return (label, Err(plugin::CallRefusal::not_yet(text))),
                Ok(Decided::Wait(label, text)) => (label, text),
                Err(error) => return ("files", Err(plugin::CallRefusal::not_yet(error.to_string()))),
            };
            let left = PATIENCE.saturating_sub(started.elapsed());
            if left.is_zero() {
                return (reason, Err(plugin::CallRefusal::not_yet(text)));
            }
            if !fresh {
                match self.pods.list(left.min(LIST_TIMEOUT)).await {
                    Ok(is_complete) => {
                        fresh = is_complete;
                        continue;
                    }
                    Err(error) => text = format!("{text}; {error}"),
                }
                if started.elapsed() >= PATIENCE {
                    return (reason, Err(plugin::CallRefusal::not_yet(text)));
                }
            }
            debug!("a container's start is waiting: {text}");
            tokio::select! {
                () = changed => {}
                () = tokio::time::sleep(LOOK_AGAIN.min(left)) => {}
            }
        }
    }

    async fn decide(self: &Arc<Self>, call: &Arc<PreStartCall>, fresh: bool) -> Result<Decided, Undecided> {
        let guard = self.lock.clone().lock_owned().await;
        let (grants, call, span) = (self.clone(), call.clone(), Span::current());
        // If the kubelet cancels the call, this still runs to its end, so that record and spec are never half-written.
        let work = tokio::task::spawn_blocking(move || {
            let decided = span.in_scope(|| grants.decide_blocking(&call, fresh));
            drop(guard);
            decided
        });
        let decided = work.await?;
        self.publishing.publish();
        decided
    }

    fn decide_blocking(&self, call: &PreStartCall, fresh: bool) -> Result<Decided, Undecided> {
        let facts = self.facts.read(fresh);
        let answer = {
            let mut core = self.core.lock();
            if let Some(handouts) = &facts.handouts {
                core.set_handouts(handouts.clone());
            }
            call.name(&core);
            core.pre_start(call.spec, &call.ids, &facts)
        };
        match answer {
            PreStart::Granted {
                actions,
                key: ContainerKey { container, .. },
                pod,
                gpus,
                steered_wrong,
                shared_ids,
            } => {
                let gave = actions.iter().any(|action| matches!(action, AgentAction::WriteRecord(_)));
                if !actions.iter().any(|action| matches!(action, AgentAction::WriteSpec { .. })) {
                    info!(%pod, %container, "the kubelet's recorded answer comes from another plugin: the agent writes no CDI spec");
                }
                let limits = match self.perform(actions) {
                    Ok(limits) => limits,
                    Err(source) => return Err(Undecided::Files { container, pod, source }),
                };
                self.reports.metrics.granted(steered_wrong, shared_ids);
                self.limiting.timed.notify_one();
                if gave {
                    info!(%pod, %container, gpus = gpus.join(","), "granted");
                }
                Ok(Decided::Granted(limits))
            }
            PreStart::Wait(reason, text) => Ok(Decided::Wait(reason.label(), text)),
            PreStart::Refused { reason, text, actions } => {
                self.reports.post_events(actions);
                // The pod that holds the memory may end at any time.
                self.look.notify_one();
                Ok(Decided::Refused(reason.label(), text))
            }
        }
    }

    /// Run one reconciliation. With `ask_driver`, also compare the processes on the GPUs with the grants. The wait for the driver is limited.
    #[instrument(skip_all)]
    pub(crate) async fn reconcile(self: &Arc<Self>, ask_driver: bool) -> AfterReconcile {
        let in_use = if ask_driver {
            self.probe.processes().await.map(|processes| memory_in_use(&processes))
        } else {
            None
        };
        self.driver.check().await;
        let guard = self.lock.clone().lock_owned().await;
        let (grants, span) = (self.clone(), Span::current());
        let work = tokio::task::spawn_blocking(move || {
            let after = span.in_scope(|| grants.reconcile_blocking(in_use));
            drop(guard);
            after
        });
        let after = match work.await {
            Ok(Ok((after, gone))) => {
                self.reports.ready.clear("files");
                self.limiting.clear(&gone).await;
                after
            }
            Ok(Err(error)) => {
                warn!(%error, "a reconciliation could not be completed; the agent tries again");
                self.reports.ready.set("files", error.to_string());
                AfterReconcile::AtRest
            }
            Err(error) => {
                warn!(%error, "a reconciliation failed");
                AfterReconcile::AtRest
            }
        };
        self.publishing.publish();
        self.limiting.look_at_containers();
        after
    }

    /// Return also the UIDs of pods whose files of shares can be removed.
    fn reconcile_blocking(
        &self,
        memory_in_use: Option<BTreeMap<String, BTreeMap<String, MiB>>>,
    ) -> Result<(AfterReconcile, BTreeSet<String>), FileError> {
        let facts = DecisionFacts {
            specs: self.store.specs()?,
            memory_in_use,
            escapes: self.limiting.escapes(),
            ..self.facts.read(false)
        };
        let found = {
            let mut core = self.core.lock();
            if let Some(handouts) = &facts.handouts {
                core.set_handouts(handouts.clone());
            }
            core.reconcile(&facts)
        };
        self.reports.metrics.reconciled(&found);
        let before = std::mem::replace(
            &mut *self.disagreements.lock().unwrap_or_else(PoisonError::into_inner),
            found.classes.clone(),
        );
        for (class, count) in &found.classes {
            match class {
                // A lasting disagreement is logged once and counted each time.
                class if before.get(class) == Some(count) && *class != DisagreementClass::GrantEnded => {}
                DisagreementClass::GrantEnded => info!(count, "grants ended: their pods have ended and their processes are gone"),
                DisagreementClass::HeldWithoutPod => debug!(count, "containers without a pod object hold memory"),
                class => warn!(
                    count,
                    class = class.label(),
                    "found disagreements between records, specs, checkpoint, pods, cgroups, and processes"
                ),
            }
        }
        let held = !found.held.is_empty();
        self.perform(found.actions)?;
        let mut gone = self.limiting.shares.pods();
        {
            let core = self.core.lock();
            gone.retain(|uid| core.is_gone(uid, &facts));
        }
        Ok((
            if held {
                AfterReconcile::MemoryHeld
            } else {
                AfterReconcile::AtRest
            },
            gone,
        ))
    }
}

/// A PreStartContainer call.
struct PreStartCall {
    spec: ResourceSpec,
    ids: Vec<String>,
    /// Whether the call's span names the container. The span can take that once.
    named: Once,
}

impl PreStartCall {
    /// Name the container in the call's span, as far as the ids tell. Containers of one pod may have the same ids.
    fn name(&self, core: &AgentCore) {
        let holders = core.holders(self.spec, &self.ids);
        let Some((first, others)) = holders.split_first() else {
            return;
        };
        if others.iter().any(|other| other.uid != first.uid) {
            return;
        }
        self.named.call_once(|| {
            let span = Span::current();
            span.record("uid", &first.uid);
            if let Some(pod) = core.pod(&first.uid) {
                span.record("pod", display(pod.key()));
            }
            if others.is_empty() {
                span.record("container", &first.container);
            }
        });
    }
}

/// An error that kept the agent from deciding about a container.
#[derive(Debug, thiserror::Error)]
enum Undecided {
    #[error("internal error in the agent: {0}")]
    Panic(#[from] JoinError),
    #[error("the grant of container {container} of {pod} could not be written: {source}")]
    Files {
        container: String,
        pod: PodKey,
        source: FileError,
    },
}

enum Decided {
    /// The steps that hold the pod to its share.
    Granted(Vec<LimitStep>),
    Refused(&'static str, String),
    Wait(&'static str, String),
}
