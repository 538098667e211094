//! What the requests, the watches, and the election of one replica share: the core behind one lock, and what this replica knows about the leader.

use crate::clock::boot_ns;
use crate::core::{
    BindArgs, BindError, BindingRequest, ExtenderAction, ExtenderCore, Got, Now, Posted, Ticket, answer, eviction,
};
use crate::error::AskError;
use crate::forward::Forward;
use crate::metrics::ExtenderMetrics;
use crate::recheck::SecondLook;
use crate::tls::Current;
use bytes::Bytes;
use divvy_kube::convert::ReadPod;
use divvy_kube::events::{EventNote, Events, pod_reference};
use divvy_kube::{convert, watch};
use divvy_model::PodKey;
use futures::{Stream, StreamExt};
use http_body_util::{BodyExt, Limited};
use kube::client::Body;
use serde_json::Value;
use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::{oneshot, watch as signal};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// What one of several replicas knows about the leader.
#[derive(Debug)]
pub(crate) struct Leadership {
    /// The identity that this replica writes into the lease.
    pub(crate) identity: String,
    /// The client that forwards binds to the leader.
    pub(crate) forward: Forward,
    /// The time until which this replica leads ([`boot_ns`]).
    held_until_ns: AtomicU64,
    holder: Mutex<Option<String>>,
    /// Why the last attempt to read or write the lease failed; `None` if it succeeded.
    trouble: Mutex<Option<String>>,
    /// Counts the elections of this replica, and signals each one.
    terms: signal::Sender<u64>,
}

impl Leadership {
    pub(crate) fn new(identity: String, forward: Forward) -> Leadership {
        Leadership {
            identity,
            forward,
            held_until_ns: AtomicU64::new(0),
            holder: Mutex::new(None),
            trouble: Mutex::new(None),
            terms: signal::Sender::new(0),
        }
    }
}

/// State that the request handlers and the tasks share.
pub(crate) struct ExtenderState {
    pub(crate) core: Mutex<ExtenderCore>,
    pub(crate) answers: Mutex<BTreeMap<Ticket, oneshot::Sender<Result<(), BindError>>>>,
    pub(crate) metrics: Arc<ExtenderMetrics>,
    /// The current certificates; `None` without TLS.
    pub(crate) credentials: Option<Current>,
    /// The state of the leader election; `None` if this is the only replica.
    pub(crate) leadership: Option<Leadership>,
    pub(crate) second_look: SecondLook,
    pub(crate) client: kube::Client,
    pub(crate) events: Events,
    pub(crate) limits: ExtenderLimits,
    pub(crate) started: Instant,
    pub(crate) tasks: TaskTracker,
    pub(crate) ended: CancellationToken,
}

impl std::fmt::Debug for ExtenderState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("limits", &self.limits).finish_non_exhaustive()
    }
}

impl ExtenderState {
    /// Lock the core. The lock must never be held across an `await`.
    pub(crate) fn core(&self) -> MutexGuard<'_, ExtenderCore> {
        // A panic inside the core would be a bug in one decision; each later event recomputes the state, so go on.
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn now(&self) -> Now {
        let nanos = |duration: Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        Now {
            monotonic_ns: nanos(self.started.elapsed()),
            unix_ns: nanos(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()),
        }
    }

    /// Bind a pod and wait for the answer. The bind goes on even if the caller disconnects.
    pub(crate) async fn bind(self: &Arc<Self>, args: BindArgs) -> Result<(), BindError> {
        let (sender, receiver) = oneshot::channel();
        let actions = {
            let mut core = self.core();
            let (ticket, actions) = core.begin_bind(args, self.now());
            // Insert before the core is unlocked: an equal bind that ends now also answers this ticket.
            self.waiting().insert(ticket, sender);
            actions
        };
        self.perform(actions);
        receiver.await.unwrap_or(Err(BindError::Stopping))
    }

    pub(crate) fn client(&self) -> kube::Client {
        self.client.clone()
    }

    /// Report whether this replica leads now, and so may bind.
    pub(crate) fn leads(&self) -> bool {
        self.leadership
            .as_ref()
            .is_none_or(|leadership| boot_ns() < leadership.held_until_ns.load(Ordering::Acquire))
    }

    /// Record that this replica holds the lease until this time ([`boot_ns`]).
    pub(crate) fn lead_until(&self, until_ns: u64) {
        let Some(leadership) = &self.leadership else { return };
        leadership.held_until_ns.store(until_ns, Ordering::Release);
        if self.core().elected() {
            tracing::info!(lease = %leadership.identity, "this replica is the leader; it lists the pods first, and then binds");
            leadership.terms.send_modify(|term| *term += 1);
        }
    }

    /// Stop binding until this replica has been elected and has listed the pods again.
    pub(crate) fn stand_by(self: &Arc<Self>) {
        let actions = self.core().stand_by();
        self.perform(actions);
    }

    /// Record who holds the lease now.
    pub(crate) fn follow(self: &Arc<Self>, holder: Option<&str>) {
        let Some(leadership) = &self.leadership else { return };
        let before = {
            let mut known = leadership.holder.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *known, holder.map(str::to_owned))
        };
        if !self.leads() {
            self.stand_by();
            if before.as_deref() != holder {
                tracing::info!(leader = holder.unwrap_or("none"), "this replica is not the leader");
            }
        }
    }

    /// Record why the lease cannot be read or written; `None` if it can.
    pub(crate) fn set_lease_trouble(&self, trouble: Option<String>) {
        if let Some(leadership) = &self.leadership {
            *leadership.trouble.lock().unwrap_or_else(PoisonError::into_inner) = trouble;
        }
    }

    /// Return why the lease cannot be read or written; `None` if it can.
    pub(crate) fn lease_trouble(&self) -> Option<String> {
        let leadership = self.leadership.as_ref()?;
        leadership.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Return the identity of the lease's holder as last seen.
    pub(crate) fn holder(&self) -> Option<String> {
        let leadership = self.leadership.as_ref()?;
        leadership.holder.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn waiting(&self) -> MutexGuard<'_, BTreeMap<Ticket, oneshot::Sender<Result<(), BindError>>>> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn perform(self: &Arc<Self>, actions: Vec<ExtenderAction>) {
        for action in actions {
            match action {
                ExtenderAction::Answer { ticket, result } => {
                    if let Some(sender) = self.waiting().remove(&ticket) {
                        // The send fails if the caller has disconnected. Then no answer is needed.
                        let _ = sender.send(result);
                    }
                }
                ExtenderAction::Post { op, binding } => {
                    let (shared, span) = (self.clone(), tracing::Span::current());
                    self.tasks.spawn(async move {
                        let outcome = shared.post(&binding).await;
                        let _entered = span.entered();
                        tracing::info!(
                            pod = %format!("{}/{}", binding.namespace, binding.name),
                            node = %binding.node,
                            ?outcome,
                            "bind"
                        );
                        let actions = shared.core().posted(op, outcome, shared.now());
                        shared.perform(actions);
                    });
                }
                ExtenderAction::Get { op, pod, after_ns } => {
                    let (shared, span) = (self.clone(), tracing::Span::current());
                    self.tasks.spawn(async move {
                        tokio::time::sleep(Duration::from_nanos(after_ns)).await;
                        let outcome = shared.get(&pod).await;
                        let _entered = span.entered();
                        let actions = shared.core().got(op, outcome, shared.now());
                        shared.perform(actions);
                    });
                }
                // Every replica finds the problem, but only the leader publishes the event.
                ExtenderAction::Warn { pod, reason, .. } if !self.leads() => {
                    tracing::debug!(%pod, reason, "the leader publishes the event")
                }
                ExtenderAction::Warn {
                    pod,
                    uid,
                    action,
                    reason,
                    text,
                } => {
                    tracing::warn!(%pod, uid, reason, %text, "publishing an event about the pod");
                    let shared = self.clone();
                    self.tasks.spawn(async move {
                        let note = EventNote {
                            warning: true,
                            reason: reason.to_owned(),
                            action: action.to_owned(),
                            text,
                        };
                        let regarding = pod_reference(&pod.namespace, &pod.name, &uid);
                        // The pod does not depend on the event, so a failure is only logged.
                        match tokio::time::timeout(shared.limits.post, shared.events.publish(&regarding, note)).await {
                            Ok(Ok(())) => {}
                            Ok(Err(error)) => tracing::warn!(%pod, uid, %error, reason, "the event could not be published"),
                            Err(_elapsed) => tracing::warn!(%pod, uid, reason, "the event could not be published: the API server did not answer in time"),
                        }
                    });
                }
                ExtenderAction::Evict { uid, pod } => {
                    let shared = self.clone();
                    self.tasks.spawn(async move {
                        let outcome = shared.evict(&pod, &uid).await;
                        tracing::info!(%pod, uid, ?outcome, "eviction of a pod that does not keep to its share");
                        let actions = shared.core().evicted(&uid, outcome);
                        shared.perform(actions);
                    });
                }
                ExtenderAction::Check { uid, node, pod } => {
                    let shared = self.clone();
                    self.tasks.spawn(async move {
                        let outcome = shared.get(&pod).await;
                        shared.core().checked(&uid, &node, outcome, shared.now());
                        shared.second_look.changed();
                    });
                }
            }
        }
    }

    pub(crate) async fn post(&self, binding: &BindingRequest) -> Posted {
        let pod = PodKey {
            namespace: binding.namespace.clone(),
            name: binding.name.clone(),
        };
        self.post_to(&pod, "binding", &binding.to_json()).await
    }

    async fn evict(&self, pod: &PodKey, uid: &str) -> Posted {
        self.post_to(pod, "eviction", &eviction(pod, uid)).await
    }

    /// Create a subresource of a pod, if this replica leads.
    async fn post_to(&self, pod: &PodKey, subresource: &str, body: &Value) -> Posted {
        let path = match answer::path(pod) {
            Ok(path) => format!("{path}/{subresource}"),
            Err(error) => return Posted::NotSent(error.to_string()),
        };
        let body = body.to_string().into_bytes();
        // Check the lease as late as possible before the request is sent.
        if !self.leads() {
            return Posted::NotSent("this replica of Divvy's extender is no longer the leader".to_owned());
        }
        let request = http::Request::post(path).header(http::header::CONTENT_TYPE, "application/json");
        match self.ask(request.body(body.into()), self.limits.post).await {
            Ok((code, body)) => answer::posted(code, &body, pod),
            Err(error) => Posted::Unknown(error.to_string()),
        }
    }

    pub(crate) async fn get(&self, pod: &PodKey) -> Got {
        let path = match answer::path(pod) {
            Ok(path) => path,
            Err(error) => return Got::Failed(error.to_string()),
        };
        match self.ask(http::Request::get(path).body(Body::empty()), self.limits.get).await {
            Ok((code, body)) => answer::got(code, &body, pod),
            Err(error) => Got::Failed(error.to_string()),
        }
    }

    /// Send a request and read the whole answer, which may have at most [`answer::MOST_BYTES`] bytes.
    pub(crate) async fn ask(
        &self,
        request: http::Result<http::Request<Body>>,
        within: Duration,
    ) -> Result<(u16, Bytes), AskError> {
        let request = request.map_err(AskError::Request)?;
        let ask = async {
            let response = self.client.send(request).await?;
            let code = response.status().as_u16();
            let body = Limited::new(response.into_body(), answer::MOST_BYTES).collect().await;
            body.map(|body| (code, body.to_bytes()))
                .map_err(|error| AskError::Body { code, error })
        };
        match tokio::time::timeout(within, ask).await {
            Ok(answer) => answer,
            Err(_elapsed) => Err(AskError::Late(within)),
        }
    }

    /// Watch the pods, and list them again each time that this replica is elected. A watch may be behind or broken, and before
    /// this replica allocates memory, it must know which pods another replica has bound.
    pub(crate) fn watch_pods(self: &Arc<Self>, stop: CancellationToken) {
        let shared = self.clone();
        let mut terms = self.leadership.as_ref().map(|leadership| leadership.terms.subscribe());
        self.tasks.spawn(async move {
            let list = || {
                // A list is collected before it is applied, so drop the parts that the ledger does not keep right here.
                let pod = |object| ReadPod::from(object).as_kept();
                watch::read(shared.client.clone(), pod, |object| convert::node(&object))
                    .0
                    .boxed()
            };
            let mut pods = list();
            loop {
                let elected = async {
                    match &mut terms {
                        // The sender lives as long as `shared`.
                        Some(terms) => terms.changed().await.is_ok(),
                        None => std::future::pending().await,
                    }
                };
                let change = tokio::select! {
                    () = stop.cancelled() => return,
                    _ = elected => {
                        // The order matters: a list that was begun before the election must not count.
                        pods = list();
                        shared.core().await_list();
                        continue;
                    }
                    change = pods.next() => change,
                };
                let Some(change) = change else {
                    shared.ended.cancel();
                    return;
                };
                let actions = shared.core().pod_change(change, shared.now());
                shared.perform(actions);
                shared.second_look.changed();
            }
        });
    }

    pub(crate) fn watch<T: Send + 'static>(
        self: &Arc<Self>,
        changes: impl Stream<Item = watch::WatchChange<T>> + Send + 'static,
        stop: CancellationToken,
        take: impl Fn(&mut ExtenderCore, watch::WatchChange<T>, Now) -> Vec<ExtenderAction> + Send + 'static,
    ) {
        let shared = self.clone();
        self.tasks.spawn(async move {
            let mut changes = pin!(changes);
            loop {
                tokio::select! {
                    () = stop.cancelled() => return,
                    change = changes.next() => match change {
                        Some(change) => {
                            let actions = take(&mut shared.core(), change, shared.now());
                            shared.perform(actions);
                            shared.second_look.changed();
                        }
                        None => {
                            shared.ended.cancel();
                            return;
                        }
                    }
                }
            }
        });
    }

    pub(crate) fn sweep(self: &Arc<Self>, stop: CancellationToken) {
        let shared = self.clone();
        self.tasks.spawn(async move {
            loop {
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = tokio::time::sleep(shared.limits.sweep) => {}
                }
                let actions = shared.core().sweep(shared.now());
                shared.perform(actions);
            }
        });
    }
}

/// Timeouts of requests to the API server, and the interval of the sweep.
#[derive(Debug, Clone, Copy)]
pub struct ExtenderLimits {
    /// Timeout of the POST of a Binding. After it, the outcome is unknown.
    pub post: Duration,
    /// Timeout of the GET of a pod.
    pub get: Duration,
    /// Pause between two sweeps ([`ExtenderCore::sweep`]).
    pub sweep: Duration,
}
