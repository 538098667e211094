//! The loop: watches in, one decision at a time, binds beside it.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures::{FutureExt as _, StreamExt as _};
use k8s_openapi::api::core::v1::{Binding, Node, ObjectReference, Pod, PodCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::runtime::watcher;
use kube::{Api, Client};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::SchedulerConfig;
use super::extender::Extender;
use super::fit::{NodeView, PodView, least_allocated, reasons, refusal};
use super::preempt::{self, Running};
use super::queue::{Queue, Rank};
use crate::node::events::{Note, Recorder};
use crate::node::seed::Seed;

/// A pod on a node, or on its way to one.
#[derive(Debug, Clone)]
struct Placed {
    node: String,
    requests: BTreeMap<String, u64>,
    pod: Arc<Pod>,
}

fn priority_of(pod: &Pod) -> i32 {
    pod.spec.as_ref().and_then(|spec| spec.priority).unwrap_or(0)
}

/// Why a pod was not placed.
#[derive(Debug)]
enum Failure {
    /// It fits nowhere: reason Unschedulable; waits for an event.
    Unschedulable(String),
    /// A call failed: reason SchedulerError; tried again after the back-off.
    Error(String),
}

struct BindResult {
    pod: Arc<Pod>,
    node: String,
    result: Result<(), String>,
}

struct Loop {
    client: Client,
    config: SchedulerConfig,
    extender: Option<Extender>,
    recorder: Recorder,
    token: CancellationToken,
    tasks: TaskTracker,
    began: Instant,
    seed: Seed,
    queue: Queue,
    nodes: BTreeMap<String, NodeView>,
    pending: BTreeMap<String, Arc<Pod>>,
    bound: BTreeMap<String, Placed>,
    assumed: BTreeMap<String, Placed>,
    binds: mpsc::UnboundedSender<BindResult>,
}

/// Collects a watch's list until it is whole, and says which objects are gone after it.
struct Listing<K>(Option<BTreeMap<String, K>>);

enum Change<K> {
    Apply(K),
    Delete(String),
    List(BTreeMap<String, K>),
}

impl<K> Listing<K> {
    fn take(&mut self, event: watcher::Event<K>, key: impl Fn(&K) -> String) -> Option<Change<K>> {
        match event {
            watcher::Event::Init => self.0 = Some(BTreeMap::new()),
            watcher::Event::InitApply(object) => {
                if let Some(listing) = &mut self.0 {
                    listing.insert(key(&object), object);
                }
            }
            watcher::Event::InitDone => return self.0.take().map(Change::List),
            watcher::Event::Apply(object) => return Some(Change::Apply(object)),
            watcher::Event::Delete(object) => return Some(Change::Delete(key(&object))),
        }
        None
    }
}

fn uid_of(pod: &Pod) -> String {
    pod.metadata.uid.clone().unwrap_or_default()
}

fn name_of(node: &Node) -> String {
    node.metadata.name.clone().unwrap_or_default()
}

/// Runs until it is dropped.
pub(super) async fn run(client: Client, config: SchedulerConfig, token: CancellationToken, tasks: TaskTracker) {
    let mut seed = Seed::new(config.seed);
    let (recorder, write_events) = Recorder::new(client.clone(), "default-scheduler", None, seed.fork());
    let own = token.clone();
    tasks.spawn(async move {
        let _ = own.run_until_cancelled(write_events).await;
    });
    let extender = config
        .extender_url
        .as_ref()
        .map(|url| Extender::new(url, config.http_timeout, config.managed_resources.clone()));
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
        pending: BTreeMap::new(),
        bound: BTreeMap::new(),
        assumed: BTreeMap::new(),
        binds,
        client: client.clone(),
        config,
    };
    let retry = scheduler.config.api_retry;
    let mut failures = 0;
    let mut pods = watcher(Api::<Pod>::all(client.clone()), watcher::Config::default()).boxed();
    let mut nodes = watcher(Api::<Node>::all(client), watcher::Config::default()).boxed();
    let (mut pod_list, mut node_list) = (Listing(None), Listing(None));
    let (mut pods_known, mut nodes_known) = (false, false);
    loop {
        // Everything that has come already counts for the next decision.
        let mut quiet = false;
        while !quiet {
            quiet = true;
            let mut failed = None;
            if let Some(Some(event)) = pods.next().now_or_never() {
                quiet = false;
                match event {
                    Ok(event) => {
                        failures = 0;
                        let change = pod_list.take(event, uid_of);
                        pods_known |= matches!(change, Some(Change::List(_)));
                        scheduler.pods(change);
                    }
                    Err(error) => failed = Some(error),
                }
            }
            if let Some(Some(event)) = nodes.next().now_or_never() {
                quiet = false;
                match event {
                    Ok(event) => {
                        failures = 0;
                        let change = node_list.take(event, name_of);
                        nodes_known |= matches!(change, Some(Change::List(_)));
                        scheduler.nodes(change);
                    }
                    Err(error) => failed = Some(error),
                }
            }
            while let Ok(result) = bound.try_recv() {
                scheduler.bind_ended(result);
            }
            if let Some(error) = failed {
                tracing::warn!(%error, "watch failed; will be tried again");
                tokio::time::sleep(retry.delay(failures)).await;
                failures += 1;
            }
        }
        let ready = pods_known && nodes_known;
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
            event = pods.next() => match event {
                Some(Ok(event)) => {
                    failures = 0;
                    let change = pod_list.take(event, uid_of);
                    pods_known |= matches!(change, Some(Change::List(_)));
                    scheduler.pods(change);
                }
                Some(Err(error)) => {
                    tracing::warn!(%error, "pod watch failed; will be tried again");
                    tokio::time::sleep(retry.delay(failures)).await;
                    failures += 1;
                }
                None => return,
            },
            event = nodes.next() => match event {
                Some(Ok(event)) => {
                    failures = 0;
                    let change = node_list.take(event, name_of);
                    nodes_known |= matches!(change, Some(Change::List(_)));
                    scheduler.nodes(change);
                }
                Some(Err(error)) => {
                    tracing::warn!(%error, "node watch failed; will be tried again");
                    tokio::time::sleep(retry.delay(failures)).await;
                    failures += 1;
                }
                None => return,
            },
            Some(result) = bound.recv() => scheduler.bind_ended(result),
            () = sleep => {}
        }
    }
}

impl Loop {
    fn now_ms(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn pods(&mut self, change: Option<Change<Pod>>) {
        match change {
            None => {}
            Some(Change::Apply(pod)) => self.pod(pod),
            Some(Change::Delete(uid)) => self.pod_gone(&uid),
            Some(Change::List(listed)) => {
                let known = self.pending.keys().chain(self.bound.keys()).chain(self.assumed.keys());
                let gone: Vec<String> = known.filter(|uid| !listed.contains_key(*uid)).cloned().collect();
                for uid in gone {
                    self.pod_gone(&uid);
                }
                for pod in listed.into_values() {
                    self.pod(pod);
                }
            }
        }
    }

    fn pod(&mut self, pod: Pod) {
        let uid = uid_of(&pod);
        let spec = pod.spec.as_ref();
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        if matches!(phase, Some("Succeeded" | "Failed")) {
            return self.pod_gone(&uid);
        }
        if let Some(node) = spec.and_then(|spec| spec.node_name.clone()).filter(|node| !node.is_empty()) {
            let requests = PodView::of(&pod).requests;
            self.assumed.remove(&uid);
            self.pending.remove(&uid);
            self.queue.remove(&uid);
            let pod = Arc::new(pod);
            self.bound.insert(uid, Placed { node, requests, pod });
            return;
        }
        let ours = spec
            .and_then(|spec| spec.scheduler_name.as_deref())
            .unwrap_or("default-scheduler")
            == self.config.name;
        let gated = spec
            .and_then(|spec| spec.scheduling_gates.as_ref())
            .is_some_and(|gates| !gates.is_empty());
        if !ours || gated || pod.metadata.deletion_timestamp.is_some() {
            self.queue.remove(&uid);
            self.pending.remove(&uid);
            return;
        }
        let rank = Rank {
            priority: -i64::from(spec.and_then(|spec| spec.priority).unwrap_or(0)),
            created: pod
                .metadata
                .creation_timestamp
                .as_ref()
                .map_or(0, |time| time.0.as_nanosecond()),
            uid: uid.clone(),
        };
        let changed = self.pending.get(&uid).is_some_and(|known| {
            let (new, old) = (&pod.metadata, &known.metadata);
            known.spec != pod.spec || old.annotations != new.annotations || old.labels != new.labels
        });
        self.pending.insert(uid.clone(), Arc::new(pod));
        self.queue.add(rank);
        if changed {
            self.queue.wake(&uid);
        }
    }

    fn pod_gone(&mut self, uid: &str) {
        self.queue.remove(uid);
        self.pending.remove(uid);
        if self.bound.remove(uid).is_some() || self.assumed.remove(uid).is_some() {
            self.queue.wake_all();
        }
    }

    fn nodes(&mut self, change: Option<Change<Node>>) {
        let mut changed = false;
        match change {
            None => {}
            Some(Change::Apply(node)) => {
                let (name, view) = (name_of(&node), NodeView::of(&node));
                changed = self.nodes.get(&name) != Some(&view);
                self.nodes.insert(name, view);
            }
            Some(Change::Delete(name)) => {
                self.nodes.remove(&name);
                changed = true;
            }
            Some(Change::List(listed)) => {
                let listed = listed.iter().map(|(name, node)| (name.clone(), NodeView::of(node))).collect();
                changed = self.nodes != listed;
                self.nodes = listed;
            }
        }
        if changed {
            self.queue.wake_all();
        }
    }

    /// What pods on each node request, those on their way included.
    fn used(&self) -> BTreeMap<String, BTreeMap<String, u64>> {
        let mut used: BTreeMap<String, BTreeMap<String, u64>> = BTreeMap::new();
        for placed in self.bound.values().chain(self.assumed.values()) {
            let node = used.entry(placed.node.clone()).or_default();
            for (resource, amount) in &placed.requests {
                let sum = node.entry(resource.clone()).or_default();
                *sum = sum.saturating_add(*amount);
            }
        }
        used
    }

    /// One scheduling cycle.
    async fn cycle(&mut self, uid: &str) {
        let Some(pod) = self.pending.get(uid).cloned() else {
            self.queue.remove(uid);
            return;
        };
        match self.choose(&pod).await {
            Ok(node) => {
                let requests = PodView::of(&pod).requests;
                self.assumed.insert(
                    uid.to_owned(),
                    Placed {
                        node: node.clone(),
                        requests,
                        pod: pod.clone(),
                    },
                );
                self.bind(pod, node);
            }
            Err(failure) => {
                if matches!(failure, Failure::Unschedulable(_)) {
                    self.preempt(&pod).await;
                }
                self.failed(&pod, failure);
            }
        }
    }

    /// Evicts pods of lower priority if that makes room, and promises the room to the pod.
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
            // The room that it made is not free yet.
            return;
        }
        let view = PodView::of(pod);
        let mut running: BTreeMap<&str, Vec<Running>> = BTreeMap::new();
        for (uid, placed) in self.bound.iter().chain(&self.assumed) {
            running.entry(&placed.node).or_default().push(Running {
                uid: uid.clone(),
                priority: priority_of(&placed.pod),
                requests: placed.requests.clone(),
            });
        }
        let found = self.nodes.iter().filter_map(|(name, node)| {
            let victims = preempt::victims((&view, priority), node, running.get(name.as_str())?)?;
            Some((name.clone(), victims))
        });
        let mut candidates: BTreeMap<String, Vec<String>> = found.collect();
        let extender = self.extender.clone().filter(|extender| extender.is_interested(pod));
        if let (Some(extender), Some(verb)) = (extender, &self.config.preempt_verb)
            && !candidates.is_empty()
        {
            candidates = match extender.preempt(verb, pod, &candidates).await {
                Ok(candidates) => candidates,
                Err(error) => {
                    tracing::warn!(error, "preempt failed; nobody is evicted");
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

    fn evict(&self, victim: &Pod, preemptor: &Pod, node: &str) {
        self.note(
            victim,
            false,
            "Preempted",
            format!("Preempted by pod {} on node {node}", uid_of(preemptor)),
        );
        if victim.metadata.deletion_timestamp.is_some() {
            return;
        }
        let api: Api<Pod> = Api::namespaced(self.client.clone(), victim.metadata.namespace.as_deref().unwrap_or("default"));
        let name = victim.metadata.name.clone().unwrap_or_default();
        let params = DeleteParams::default().preconditions(Preconditions {
            uid: victim.metadata.uid.clone(),
            resource_version: None,
        });
        let token = self.token.clone();
        self.tasks.spawn(async move {
            if let Some(Err(error)) = token.run_until_cancelled(api.delete(&name, &params)).await {
                tracing::warn!(%error, name, "a victim was not deleted");
            }
        });
    }

    fn nominate(&self, pod: &Pod, node: &str) {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), pod.metadata.namespace.as_deref().unwrap_or("default"));
        let name = pod.metadata.name.clone().unwrap_or_default();
        let patch = serde_json::json!({"metadata": {"uid": uid_of(pod)}, "status": {"nominatedNodeName": node}});
        let token = self.token.clone();
        self.tasks.spawn(async move {
            let params = PatchParams::default();
            let patch = Patch::Merge(patch);
            if let Some(Err(error)) = token.run_until_cancelled(api.patch_status(&name, &params, &patch)).await {
                tracing::warn!(%error, name, "the node was not nominated");
            }
        });
    }

    async fn choose(&mut self, pod: &Arc<Pod>) -> Result<String, Failure> {
        let view = PodView::of(pod);
        let used = self.used();
        let none = BTreeMap::new();
        let mut refusals: Vec<String> = Vec::new();
        let mut fits: Vec<String> = Vec::new();
        for (name, node) in &self.nodes {
            let reasons = reasons(&view, node, used.get(name).unwrap_or(&none));
            if reasons.is_empty() {
                fits.push(name.clone());
            }
            refusals.extend(reasons);
        }
        let extender = self.extender.clone().filter(|extender| extender.is_interested(pod));
        if let Some(extender) = extender.as_ref().filter(|_| !fits.is_empty()) {
            let filtered = extender.filter(pod, &fits).await.map_err(Failure::Error)?;
            refusals.extend(filtered.failed.into_values());
            fits = filtered.fits;
        }
        if fits.is_empty() {
            return Err(Failure::Unschedulable(refusal(self.nodes.len(), refusals)));
        }
        if fits.len() == 1 {
            return Ok(fits.remove(0));
        }
        let mut scores: BTreeMap<String, i64> = BTreeMap::new();
        for name in &fits {
            if let Some(node) = self.nodes.get(name) {
                scores.insert(name.clone(), least_allocated(&view, node, used.get(name).unwrap_or(&none)));
            }
        }
        if let (Some(extender), Some(verb)) = (&extender, &self.config.prioritize_verb) {
            // An error here is swallowed by kube-scheduler, too.
            match extender.prioritize(verb, pod, &fits).await {
                Ok(given) => {
                    for (name, score) in given {
                        if let Some(sum) = scores.get_mut(&name) {
                            *sum = sum.saturating_add(score.saturating_mul(self.config.weight).saturating_mul(10));
                        }
                    }
                }
                Err(error) => tracing::debug!(error, "prioritize failed"),
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
            .ok_or_else(|| Failure::Error("no node has a score".to_owned()))
    }

    fn bind(&self, pod: Arc<Pod>, node: String) {
        let (client, binds, token) = (self.client.clone(), self.binds.clone(), self.token.clone());
        let extender = self.extender.clone().filter(|extender| extender.is_interested(&pod));
        self.tasks.spawn(async move {
            let work = async {
                let meta = &pod.metadata;
                let (name, namespace) = (
                    meta.name.clone().unwrap_or_default(),
                    meta.namespace.clone().unwrap_or_default(),
                );
                let uid = uid_of(&pod);
                let result = match extender {
                    Some(extender) => extender.bind(&namespace, &name, &uid, &node).await,
                    None => bind_directly(client, &namespace, &name, &uid, &node).await,
                };
                // The loop is gone only when everything ends.
                let _ = binds.send(BindResult { pod, node, result });
            };
            let _ = token.run_until_cancelled(work).await;
        });
    }

    fn bind_ended(&mut self, ended: BindResult) {
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
                // It was bound after all, or is gone: nothing to try again.
                if let Some(pod) = self.pending.get(&uid).cloned() {
                    self.failed(&pod, Failure::Error(error));
                }
                self.queue.wake_all();
            }
        }
    }

    fn failed(&mut self, pod: &Arc<Pod>, failure: Failure) {
        let uid = uid_of(pod);
        let now = self.now_ms();
        let (reason, message) = match failure {
            Failure::Unschedulable(message) => {
                self.queue.failed(&uid, now, true);
                ("Unschedulable", message)
            }
            Failure::Error(message) => {
                self.queue.failed(&uid, now, false);
                ("SchedulerError", message)
            }
        };
        self.note(pod, true, "FailedScheduling", message.clone());
        let known = pod
            .status
            .as_ref()
            .and_then(|status| status.conditions.clone())
            .unwrap_or_default();
        let stands = |condition: &PodCondition| {
            condition.type_ == "PodScheduled"
                && condition.status == "False"
                && condition.reason.as_deref() == Some(reason)
                && condition.message.as_deref() == Some(message.as_str())
        };
        if known.iter().any(stands) {
            return;
        }
        let mut conditions: Vec<PodCondition> = known
            .into_iter()
            .filter(|condition| condition.type_ != "PodScheduled")
            .collect();
        conditions.push(PodCondition {
            type_: "PodScheduled".to_owned(),
            status: "False".to_owned(),
            reason: Some(reason.to_owned()),
            message: Some(message),
            last_transition_time: Some(Time(jiff::Timestamp::now())),
            ..PodCondition::default()
        });
        let api: Api<Pod> = Api::namespaced(self.client.clone(), pod.metadata.namespace.as_deref().unwrap_or("default"));
        let name = pod.metadata.name.clone().unwrap_or_default();
        let patch = serde_json::json!({"metadata": {"uid": uid}, "status": {"conditions": conditions}});
        let token = self.token.clone();
        self.tasks.spawn(async move {
            let params = PatchParams::default();
            let patch = Patch::Merge(patch);
            if let Some(Err(error)) = token.run_until_cancelled(api.patch_status(&name, &params, &patch)).await {
                tracing::warn!(%error, name, "condition was not written");
            }
        });
    }

    fn note(&self, pod: &Pod, warning: bool, reason: &str, message: String) {
        self.recorder.note(Note {
            namespace: pod.metadata.namespace.clone().unwrap_or_default(),
            pod: pod.metadata.name.clone().unwrap_or_default(),
            uid: uid_of(pod),
            warning,
            reason: reason.to_owned(),
            message,
        });
    }
}

async fn bind_directly(client: Client, namespace: &str, name: &str, uid: &str, node: &str) -> Result<(), String> {
    let api: Api<Pod> = Api::namespaced(client, namespace);
    let binding = Binding {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            namespace: Some(namespace.to_owned()),
            uid: Some(uid.to_owned()),
            ..ObjectMeta::default()
        },
        target: ObjectReference {
            kind: Some("Node".to_owned()),
            name: Some(node.to_owned()),
            ..ObjectReference::default()
        },
    };

    let sent: kube::Result<serde_json::Value> = api
        .create_subresource("binding", name, &PostParams::default(), &binding)
        .await;
    sent.map(|_| ()).map_err(|error| match error {
        kube::Error::Api(status) => status.message,
        other => other.to_string(),
    })
}
