//! The scheduler's loop: it receives watch events, makes one decision at a time, and binds in separate tasks.

mod state;
mod watches;
mod writes;

use std::collections::BTreeMap;
use std::sync::Arc;

use divvy_testkit::dice::Dice;
use futures::FutureExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::{Client, Resource};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::SchedulerConfig;
use super::extender::{CallError, ExtenderClient};
use super::filters::{Cycle, FilterPlugin};
use super::fit::{least_allocated, refusal};
use super::preempt::{self, RunningPod};
use super::queue::Queue;
use super::selector::ObjectLabels;
use super::view::{SchedulerNode, SchedulerPod, Taken};
use crate::node::events::Recorder;
use watches::{WatchResult, Watches};

/// A pod on a node or on its way to one.
#[derive(Debug, Clone)]
struct Placed {
    node: String,
    view: SchedulerPod,
    pod: Arc<Pod>,
}

fn priority_of(pod: &Pod) -> i32 {
    pod.spec.as_ref().and_then(|spec| spec.priority).unwrap_or(0)
}

/// The reason why a pod was not placed.
#[derive(Debug)]
enum SchedulingFailure {
    /// The pod fits nowhere (reason Unschedulable). It waits for an event. If `minds_pods`, a pod that is placed is such an
    /// event.
    Unschedulable { message: String, minds_pods: bool },
    /// A call failed (reason SchedulerError). It is retried after the back-off.
    Error(String),
}

/// The nodes that the filters accept, and the reasons of the others.
#[derive(Debug, Default)]
struct FilteredNodes {
    /// The nodes that fit, with their scores.
    fits: BTreeMap<String, i64>,
    /// The reasons why the other nodes do not fit.
    refusals: Vec<String>,
    /// Whether one of these reasons depends on pods on nodes.
    minds_pods: bool,
}

/// Why a pod was not bound.
#[derive(Debug, thiserror::Error)]
enum PodBindError {
    #[error(transparent)]
    Extender(#[from] CallError),
    #[error("{}", match .0 { kube::Error::Api(status) => status.message.clone(), other => other.to_string() })]
    Api(#[source] kube::Error),
}

struct BindOutcome {
    pod: Arc<Pod>,
    node: String,
    result: Result<(), PodBindError>,
}

struct Loop {
    client: Client,
    config: SchedulerConfig,
    extender: Option<ExtenderClient>,
    recorder: Recorder,
    token: CancellationToken,
    tasks: TaskTracker,
    began: Instant,
    seed: Dice,
    queue: Queue,
    nodes: BTreeMap<String, SchedulerNode>,
    namespaces: BTreeMap<String, ObjectLabels>,
    pending: BTreeMap<String, Arc<Pod>>,
    bound: BTreeMap<String, Placed>,
    assumed: BTreeMap<String, Placed>,
    binds: mpsc::UnboundedSender<BindOutcome>,
}

fn uid_of(pod: &Pod) -> String {
    pod.metadata.uid.clone().unwrap_or_default()
}

fn name_of<K: Resource>(object: &K) -> String {
    object.meta().name.clone().unwrap_or_default()
}

/// Run until dropped.
pub(super) async fn run(client: Client, config: SchedulerConfig, token: CancellationToken, tasks: TaskTracker) {
    let mut seed = Dice::new(config.seed);
    let (recorder, write_events) = Recorder::new(client.clone(), "default-scheduler", None, seed.fork());
    let own = token.clone();
    tasks.spawn(async move {
        let _ = own.run_until_cancelled(write_events).await;
    });
    let extender = config
        .extender_url
        .as_ref()
        .map(|url| ExtenderClient::new(url, config.http_timeout, config.managed_resources.clone()));
    let (binds, mut bound) = mpsc::unbounded_channel();
    let flush = u64::try_from(config.flush_unschedulable.as_millis()).unwrap_or(u64::MAX);
    let mut scheduler = Loop {
        queue: Queue::new(config.backoff, flush),
        extender,
        recorder,
        token,
        tasks,
        began: Instant::now(),
        seed,
        nodes: BTreeMap::new(),
        namespaces: BTreeMap::new(),
        pending: BTreeMap::new(),
        bound: BTreeMap::new(),
        assumed: BTreeMap::new(),
        binds,
        client: client.clone(),
        config,
    };
    let mut watches = Watches::new(&client);
    let mut failures = 0;
    loop {
        // All events that have already arrived count for the next decision.
        while let Some(seen) = watches.next().now_or_never() {
            scheduler.seen(seen, &mut failures).await;
        }
        while let Ok(result) = bound.try_recv() {
            scheduler.bind_ended(result);
        }
        let ready = watches.known();
        if ready && let Some(uid) = scheduler.queue.pop(scheduler.now_ms()) {
            scheduler.cycle(&uid).await;
            continue;
        }
        let wake = scheduler.queue.next_ms().filter(|_| ready);
        let sleep = async {
            match wake {
                Some(at) => tokio::time::sleep_until(scheduler.began + std::time::Duration::from_millis(at)).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            seen = watches.next() => scheduler.seen(seen, &mut failures).await,
            Some(result) = bound.recv() => scheduler.bind_ended(result),
            () = sleep => {}
        }
    }
}

impl Loop {
    fn now_ms(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Apply the result of a watch. `failures` counts the watch failures since a watch last worked.
    async fn seen(&mut self, seen: WatchResult, failures: &mut u32) {
        if let WatchResult::Failed(error) = seen {
            tracing::warn!(%error, "a watch failed; it will be retried");
            tokio::time::sleep(self.config.api_retry.delay(*failures)).await;
            *failures += 1;
            return;
        }
        *failures = 0;
        match seen {
            WatchResult::Pods(change) => self.pods(change),
            WatchResult::Nodes(change) => self.nodes(change),
            WatchResult::Namespaces(change) => self.namespaces(change),
            WatchResult::Part | WatchResult::Failed(_) => {}
        }
    }

    /// Run one scheduling cycle.
    async fn cycle(&mut self, uid: &str) {
        let Some(pod) = self.pending.get(uid).cloned() else {
            self.queue.remove(uid);
            return;
        };
        match self.choose(&pod).await {
            Ok(node) => {
                let placed = Placed {
                    node: node.clone(),
                    view: SchedulerPod::of(&pod),
                    pod: pod.clone(),
                };
                self.assumed.insert(uid.to_owned(), placed);
                self.bind(pod, node);
            }
            Err(failure) => {
                if matches!(failure, SchedulingFailure::Unschedulable { .. }) {
                    self.preempt(&pod).await;
                }
                self.failed(&pod, failure);
            }
        }
    }

    /// Evict pods of lower priority if that makes room, and nominate the node for the pod.
    async fn preempt(&mut self, pod: &Arc<Pod>) {
        let spec = pod.spec.as_ref();
        let priority = priority_of(pod);
        if spec.and_then(|spec| spec.preemption_policy.as_deref()) == Some("Never") {
            return;
        }
        let nominated = pod.status.as_ref().and_then(|status| status.nominated_node_name.as_deref());
        let leaves = |placed: &&Placed| placed.pod.metadata.deletion_timestamp.is_some() && priority_of(&placed.pod) < priority;
        if self
            .bound
            .values()
            .filter(leaves)
            .any(|placed| Some(placed.node.as_str()) == nominated)
        {
            // The room from an earlier preemption is not free yet.
            return;
        }
        let mut candidates = self.candidates(pod, priority);
        let extender = self.extender.clone().filter(|extender| extender.is_interested(pod));
        if let (Some(extender), Some(verb)) = (extender, &self.config.preempt_verb)
            && !candidates.is_empty()
        {
            candidates = match extender.preempt(verb, pod, &candidates).await {
                Ok(candidates) => candidates,
                Err(error) => {
                    tracing::warn!(%error, "preempt failed; no pod is evicted");
                    return;
                }
            };
        }
        let known = |uid: &str| self.bound.get(uid).or_else(|| self.assumed.get(uid));
        let Some(node) = preempt::pick(&candidates, |uid| known(uid).map_or(0, |placed| priority_of(&placed.pod))) else {
            return;
        };
        for victim in candidates.get(node).into_iter().flatten().filter_map(|uid| known(uid)) {
            self.evict(&victim.pod, pod, node);
        }
        self.nominate(pod, node);
    }

    /// Return by node the pods that must leave for a pod of this priority.
    fn candidates(&self, pod: &Pod, priority: i32) -> BTreeMap<String, Vec<String>> {
        let (view, cluster) = (SchedulerPod::of(pod), self.cluster());
        let cycle = Cycle::new(&view, &cluster);
        let mut running: BTreeMap<&str, Vec<RunningPod<'_>>> = BTreeMap::new();
        for (uid, placed) in self.bound.iter().chain(&self.assumed) {
            running.entry(&placed.node).or_default().push(RunningPod {
                uid,
                priority: priority_of(&placed.pod),
                pod: &placed.view,
            });
        }
        let (taken, none) = (cluster.taken(), Taken::default());
        // Where only resources are missing, and where nothing else would be in the way.
        let lacks_resources = |name: &String, node: &SchedulerNode| {
            let refusal = cycle.refusal(node, taken.get(name).unwrap_or(&none));
            refusal.is_some_and(|refusal| refusal.by == FilterPlugin::NodeResourcesFit) && cycle.refusal(node, &none).is_none()
        };
        let nodes = self.nodes.iter().filter(|(name, node)| lacks_resources(name, node));
        let found = nodes.filter_map(|(name, node)| {
            let victims = preempt::victims(&view, priority, node, running.get(name.as_str())?)?;
            Some((name.clone(), victims))
        });
        found.collect()
    }

    /// Return the nodes that pass the filters, with their scores without the extender's.
    fn filter(&self, pod: &Pod) -> FilteredNodes {
        let (view, cluster) = (SchedulerPod::of(pod), self.cluster());
        let cycle = Cycle::new(&view, &cluster);
        let (taken, none) = (cluster.taken(), Taken::default());
        let mut filtered = FilteredNodes::default();
        for (name, node) in &self.nodes {
            let taken = taken.get(name).unwrap_or(&none);
            match cycle.refusal(node, taken) {
                None => {
                    let score = least_allocated(&view, node, &taken.requests);
                    filtered.fits.insert(name.clone(), score);
                }
                Some(refusal) => {
                    filtered.minds_pods |= refusal.by.minds_other_pods();
                    filtered.refusals.extend(refusal.reasons);
                }
            }
        }
        filtered
    }

    async fn choose(&mut self, pod: &Arc<Pod>) -> Result<String, SchedulingFailure> {
        let FilteredNodes {
            fits: mut scores,
            mut refusals,
            minds_pods,
        } = self.filter(pod);
        let extender = self.extender.clone().filter(|extender| extender.is_interested(pod));
        let mut fits: Vec<String> = scores.keys().cloned().collect();
        if let Some(extender) = extender.as_ref().filter(|_| !fits.is_empty()) {
            let filtered = extender.filter(pod, &fits).await;
            let filtered = filtered.map_err(|error| SchedulingFailure::Error(error.to_string()))?;
            refusals.extend(filtered.failed.into_values());
            fits = filtered.fits;
        }
        if fits.is_empty() {
            let message = refusal(self.nodes.len(), refusals);
            return Err(SchedulingFailure::Unschedulable { message, minds_pods });
        }
        if fits.len() == 1 {
            return Ok(fits.remove(0));
        }
        scores.retain(|name, _| fits.contains(name));
        if let (Some(extender), Some(verb)) = (&extender, &self.config.prioritize_verb) {
            // kube-scheduler also ignores an error here.
            match extender.prioritize(verb, pod, &fits).await {
                Ok(given) => {
                    for (name, score) in given {
                        if let Some(sum) = scores.get_mut(&name) {
                            *sum = sum.saturating_add(score.saturating_mul(self.config.weight).saturating_mul(10));
                        }
                    }
                }
                Err(error) => tracing::debug!(%error, "prioritize failed"),
            }
        }
        let best = scores.values().max().copied().unwrap_or(0);
        let best: Vec<&String> = fits
            .iter()
            .filter(|name| scores.get(*name).copied().unwrap_or(0) == best)
            .collect();
        let chosen = self.seed.below(best.len());
        best.get(chosen)
            .map(|name| (*name).clone())
            .ok_or_else(|| SchedulingFailure::Error("no node has a score".to_owned()))
    }

    fn bind_ended(&mut self, ended: BindOutcome) {
        let uid = uid_of(&ended.pod);
        match ended.result {
            Ok(()) => {
                let meta = &ended.pod.metadata;
                let (namespace, name) = (meta.namespace.as_deref().unwrap_or(""), meta.name.as_deref().unwrap_or(""));
                let message = format!("Successfully assigned {namespace}/{name} to {}", ended.node);
                self.note(&ended.pod, false, "Scheduled", message);
            }
            Err(error) => {
                self.assumed.remove(&uid);
                // The pod was bound after all or is gone, so there is nothing to retry.
                if let Some(pod) = self.pending.get(&uid).cloned() {
                    self.failed(&pod, SchedulingFailure::Error(error.to_string()));
                }
                self.queue.wake_all();
            }
        }
    }

    fn failed(&mut self, pod: &Arc<Pod>, failure: SchedulingFailure) {
        let uid = uid_of(pod);
        let now = self.now_ms();
        let (reason, message) = match failure {
            SchedulingFailure::Unschedulable { message, minds_pods } => {
                self.queue.failed(&uid, now, true);
                if minds_pods {
                    self.queue.minds_pods(&uid);
                }
                ("Unschedulable", message)
            }
            SchedulingFailure::Error(message) => {
                self.queue.failed(&uid, now, false);
                ("SchedulerError", message)
            }
        };
        self.note(pod, true, "FailedScheduling", message.clone());
        self.write_condition(pod, reason, message);
    }
}
