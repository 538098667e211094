//! One run of the kubelet: sockets, the pod watch, serial admission, and a worker per pod. The node starts and stops it. State that must
//! survive the kubelet (containers, the checkpoint) is not kept here.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use divvy_kubelet::api::v1beta1::registration_server::RegistrationServer;
use divvy_testkit::dice::Dice;
use futures::{FutureExt as _, StreamExt as _};
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::watcher;
use kube::{Api, Client};
use tokio::net::UnixListener;
use tokio::sync::{broadcast, mpsc, watch};
use tokio::time::Instant;
use tokio_stream::wrappers::UnixListenerStream;

use super::events::{RecordedEvent, Recorder};
use super::manager::{DeviceManager, DeviceTimings, RegistrationService};
use super::plan::{PodPlan, effective_requests};
use super::runtime::ContainerRuntime;
use super::shared::{KnownPod, KubeletState};
use super::tasks::Tasks;
use super::worker::{Begin, PodUpdate, Worker};
use super::{AdmissionOrder, Bugs, NodeDescription, NodeEvent, NodePaths, NodeStartError, node_status};

pub(crate) struct Kubelet {
    pub(crate) shared: Arc<KubeletState>,
    /// A socket that listens, as checks expect it.
    _pod_resources: UnixListener,
}

/// The parts from which a kubelet is built, in addition to the node's description.
pub(crate) struct Parts {
    pub(crate) client: Client,
    pub(crate) paths: NodePaths,
    pub(crate) runtime: ContainerRuntime,
    pub(crate) events: broadcast::Sender<NodeEvent>,
    pub(crate) bugs: Bugs,
    pub(crate) seed: Dice,
}

impl Kubelet {
    /// Remove the sockets in the device plugin directory, listen, and begin to manage the node's pods.
    pub(crate) async fn start(spec: &NodeDescription, mut parts: Parts) -> Result<Kubelet, NodeStartError> {
        let directory = parts.paths.device_plugins();
        let pod_resources = parts.paths.pod_resources_socket();
        for path in [directory.as_path(), pod_resources.parent().unwrap_or(Path::new("/"))] {
            std::fs::create_dir_all(path).map_err(|source| NodeStartError::io("create", path, source))?;
        }
        wipe_sockets(&directory)?;
        let tasks = Tasks::default();
        let timings = DeviceTimings {
            dial: spec.timings.dial,
            allocate: spec.timings.allocate,
            pre_start: spec.timings.pre_start,
            endpoint_grace: spec.timings.endpoint_grace,
        };
        let manager = DeviceManager::start(directory, parts.bugs, timings, parts.seed.fork(), tasks.clone());
        let (recorder, write_events) = Recorder::new(parts.client.clone(), "kubelet", Some(spec.name.clone()), parts.seed.fork());
        let shared = Arc::new(KubeletState {
            client: parts.client,
            name: spec.name.clone(),
            address: spec.address.clone(),
            timings: spec.timings.clone(),
            runtime: parts.runtime,
            manager: manager.clone(),
            recorder,
            tasks: tasks.clone(),
            busy: Arc::default(),
            known: Mutex::default(),
            events: parts.events,
            pod_net: spec
                .name
                .bytes()
                .fold(0u8, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte)),
        });
        let registration = RegistrationServer::new(RegistrationService(manager));
        let listener = bind(&parts.paths.kubelet_socket())?;
        serve(&tasks, listener, registration);
        let pod_resources = bind(&pod_resources)?;
        tasks.spawn(write_events);
        tasks.spawn(node_status::keep(shared.clone(), spec.clone()));
        tasks.spawn(
            SyncLoop {
                shared: shared.clone(),
                spec: spec.clone(),
                seed: parts.seed,
                workers: BTreeMap::new(),
            }
            .run(),
        );
        Ok(Kubelet {
            shared,
            _pod_resources: pod_resources,
        })
    }

    /// Stop everything. A soft stop waits at most 2 s for calls to plugins that are in progress. The socket files remain, as
    /// after the end of a real kubelet.
    pub(crate) async fn stop(self, hard: bool) {
        if !hard {
            let _ = tokio::time::timeout(Duration::from_secs(2), self.shared.busy.write()).await;
        }
        self.shared.tasks.stop().await;
    }
}

/// Remove the sockets from the device plugin directory, and nothing else.
fn wipe_sockets(directory: &Path) -> Result<(), NodeStartError> {
    let entries = std::fs::read_dir(directory).map_err(|source| NodeStartError::io("read", directory, source))?;
    for entry in entries.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_socket()) {
            let path = entry.path();
            match std::fs::remove_file(&path) {
                Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
                    return Err(NodeStartError::io("remove", &path, source));
                }
                _ => {}
            }
        }
    }
    Ok(())
}

fn bind(path: &Path) -> Result<UnixListener, NodeStartError> {
    match std::fs::remove_file(path) {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => return Err(NodeStartError::io("remove", path, source)),
        _ => {}
    }
    UnixListener::bind(path).map_err(|source| NodeStartError::io("listen on", path, source))
}

type GrpcRequest = http::Request<tonic::body::Body>;

fn serve<S>(tasks: &Tasks, listener: UnixListener, service: S)
where
    S: tower::Service<GrpcRequest, Response = http::Response<tonic::body::Body>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
{
    let token = tasks.token().clone();
    tasks.spawn_to_its_end(async move {
        let shutdown = token.clone().cancelled_owned();
        let incoming = UnixListenerStream::new(listener);
        let server = tonic::transport::Server::builder().serve_with_incoming_shutdown(service, incoming, shutdown);
        // A client that keeps its connection open must not block the kubelet's end.
        let too_late = async {
            token.cancelled().await;
            tokio::time::sleep(Duration::from_millis(100)).await;
        };
        tokio::select! {
            result = server => if let Err(error) = result {
                tracing::error!(%error, "the kubelet's socket failed");
            },
            () = too_late => {}
        }
    });
}

struct SyncLoop {
    shared: Arc<KubeletState>,
    spec: NodeDescription,
    seed: Dice,
    workers: BTreeMap<String, watch::Sender<PodUpdate>>,
}

fn uid_of(pod: &Pod) -> String {
    pod.metadata.uid.clone().unwrap_or_default()
}

fn is_terminal(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

impl SyncLoop {
    async fn run(mut self) {
        let api: Api<Pod> = Api::all(self.shared.client.clone());
        let config = watcher::Config::default().fields(&format!("spec.nodeName={}", self.shared.name));
        tokio::time::sleep(self.shared.timings.pods_after).await;
        let mut events = watcher(api, config).boxed();
        let (done, mut ended) = mpsc::unbounded_channel::<String>();
        let mut listing: Option<BTreeMap<String, Pod>> = None;
        let mut first_list = true;
        loop {
            let event = tokio::select! {
                event = events.next() => event,
                Some(uid) = ended.recv() => {
                    self.workers.remove(&uid);
                    self.shared.with_known(|known| known.remove(&uid));
                    continue;
                }
            };
            let mut batch: Vec<Pod> = Vec::new();
            let mut next = event;
            let mut window: Option<Instant> = None;
            // The pods that are already queued, or that arrive within the window, form one batch.
            loop {
                match next {
                    None => return,
                    Some(Ok(event)) => {
                        if self.take(event, &mut batch, &mut listing) && first_list {
                            first_list = false;
                            self.clean_up_orphans(&batch);
                            self.admit_batch(std::mem::take(&mut batch), &done).await;
                            self.shared.manager.sources_are_ready();
                        }
                    }
                    Some(Err(error)) => {
                        tracing::warn!(%error, node = self.shared.name, "pod watch failed; it will be retried");
                        tokio::time::sleep(self.shared.timings.api_retry).await;
                    }
                }
                let until = match self.spec.admission {
                    AdmissionOrder::Shuffled { window: length } if !batch.is_empty() => {
                        Some(*window.get_or_insert_with(|| Instant::now() + length))
                    }
                    _ => None,
                };
                next = match (events.next().now_or_never(), until) {
                    (Some(event), _) => event,
                    (None, Some(at)) => match tokio::time::timeout_at(at, events.next()).await {
                        Ok(event) => event,
                        Err(_) => break,
                    },
                    (None, None) => break,
                };
            }
            self.admit_batch(batch, &done).await;
        }
    }

    /// Handle one event. New pods are added to the batch. Return true at the end of a list.
    fn take(&mut self, event: watcher::Event<Pod>, batch: &mut Vec<Pod>, listing: &mut Option<BTreeMap<String, Pod>>) -> bool {
        match event {
            watcher::Event::Init => *listing = Some(BTreeMap::new()),
            watcher::Event::InitApply(pod) => {
                if let Some(listing) = listing {
                    listing.insert(uid_of(&pod), pod);
                }
            }
            watcher::Event::InitDone => {
                let listed = listing.take().unwrap_or_default();
                let gone: Vec<String> = self
                    .workers
                    .keys()
                    .filter(|uid| !listed.contains_key(*uid))
                    .cloned()
                    .collect();
                for uid in gone {
                    self.gone(&uid);
                }
                for pod in listed.into_values() {
                    self.seen(pod, batch);
                }
                return true;
            }
            watcher::Event::Apply(pod) => self.seen(pod, batch),
            watcher::Event::Delete(pod) => {
                let uid = uid_of(&pod);
                batch.retain(|waiting| uid_of(waiting) != uid);
                self.gone(&uid);
            }
        }
        false
    }

    fn seen(&mut self, pod: Pod, batch: &mut Vec<Pod>) {
        let uid = uid_of(&pod);
        if let Some(worker) = self.workers.get(&uid) {
            let update = PodUpdate {
                pod: Arc::new(pod),
                gone: false,
            };
            worker.send_replace(update);
            return;
        }
        batch.retain(|waiting| uid_of(waiting) != uid);
        batch.push(pod);
    }

    /// Handle a removed object. For the kubelet, its devices and requests are free at once; its containers get their grace period.
    fn gone(&mut self, uid: &str) {
        if let Some(worker) = self.workers.get(uid) {
            self.shared.with_known(|known| known.remove(uid));
            worker.send_modify(|update| update.gone = true);
        }
    }

    async fn admit_batch(&mut self, mut batch: Vec<Pod>, done: &mpsc::UnboundedSender<String>) {
        match self.spec.admission {
            AdmissionOrder::Creation => {
                batch.sort_by_key(|pod| pod.metadata.creation_timestamp.as_ref().map(|time| time.0));
            }
            AdmissionOrder::Shuffled { .. } => self.seed.shuffle(&mut batch),
        }
        for pod in batch {
            let plan = PodPlan::of(&pod);
            let uid = plan.uid.clone();
            let known = KnownPod {
                requests: effective_requests(&pod),
                active: !is_terminal(&pod),
            };
            self.shared.with_known(|all| all.insert(uid.clone(), known));
            let begin = if is_terminal(&pod) {
                Begin::Terminal
            } else if plan.deleting {
                Begin::Admitted
            } else {
                self.admit(&plan).await
            };
            let (sender, updates) = watch::channel(PodUpdate {
                pod: Arc::new(pod),
                gone: false,
            });
            self.workers.insert(uid.clone(), sender);
            let worker = Worker::new(self.shared.clone(), begin, updates).run();
            let done = done.clone();
            self.shared.tasks.spawn(async move {
                worker.await;
                // The receiver ends before its workers only when the whole kubelet ends.
                let _ = done.send(uid);
            });
        }
    }

    /// Admit a pod: first allocate its devices, then check its requests against what the node has left. A rejected pod does not
    /// return the ids that its containers already got; they are collected later.
    async fn admit(&self, plan: &PodPlan) -> Begin {
        let _busy = self.shared.busy.clone().read_owned().await;
        for container in &plan.containers {
            if let Err(error) = self.shared.manager.allocate(plan, container, &self.shared.runtime).await {
                let message = format!("Allocate failed due to {error}, which is unexpected");
                return self.reject(plan, "UnexpectedAdmissionError", message);
            }
        }
        if let Some((resource, requested, used, capacity)) = self.too_much(plan) {
            let message = format!(
                "Node didn't have enough resource: {resource}, requested: {requested}, used: {used}, capacity: {capacity}"
            );
            return self.reject(plan, &format!("OutOf{resource}"), message);
        }
        Begin::Admitted
    }

    /// Return the first resource of which the pod requests more than the node has left. The kubelet ignores a resource that the
    /// node does not have at all. If pods hold more ids of a resource than are healthy, the number of ids that they hold is used
    /// as the node's allocatable.
    fn too_much(&self, plan: &PodPlan) -> Option<(String, u64, u64, u64)> {
        let devices = self.shared.manager.capacity();
        let held = self.shared.manager.read(|books| books.allocated_counts());
        let mut allocatable = BTreeMap::from([
            ("cpu".to_owned(), u64::from(self.spec.cpus) * 1000),
            ("memory".to_owned(), self.spec.memory_mib << 20),
            ("pods".to_owned(), super::MAX_PODS),
        ]);
        for (resource, (_, healthy)) in devices {
            let count = healthy.max(held.get(&resource).copied().unwrap_or(0));
            allocatable.insert(resource, count as u64);
        }
        self.shared.with_known(|known| {
            let requests = &known.get(&plan.uid)?.requests;
            let mut failing = requests.iter().filter_map(|(resource, requested)| {
                let capacity = *allocatable.get(resource)?;
                let others = known.iter().filter(|(uid, pod)| **uid != plan.uid && pod.active);
                let used = others.fold(0u64, |sum, (_, pod)| {
                    sum.saturating_add(pod.requests.get(resource).copied().unwrap_or(0))
                });
                (*requested > 0 && requested.saturating_add(used) > capacity)
                    .then(|| (resource.clone(), *requested, used, capacity))
            });
            failing.next()
        })
    }

    fn reject(&self, plan: &PodPlan, reason: &str, message: String) -> Begin {
        self.shared.recorder.note(RecordedEvent {
            namespace: plan.namespace.clone(),
            pod: plan.name.clone(),
            uid: plan.uid.clone(),
            warning: true,
            reason: reason.to_owned(),
            message: message.clone(),
        });
        self.shared.tell(NodeEvent::AdmissionRefused {
            pod_uid: plan.uid.clone(),
            namespace: plan.namespace.clone(),
            pod: plan.name.clone(),
            reason: reason.to_owned(),
            message: message.clone(),
        });
        self.shared.set_inactive(&plan.uid);
        Begin::Rejected(reason.to_owned(), message)
    }

    /// End the containers of pods that were deleted while no kubelet was running, with the short grace period of orphans.
    fn clean_up_orphans(&self, listed: &[Pod]) {
        let listed: BTreeSet<String> = listed.iter().map(uid_of).collect();
        for (uid, ..) in self.shared.runtime.pods() {
            if listed.contains(&uid) || self.workers.contains_key(&uid) {
                continue;
            }
            let (runtime, grace) = (self.shared.runtime.clone(), self.shared.timings.orphan_grace);
            self.shared.tasks.spawn(async move {
                let running = |runtime: &ContainerRuntime| -> Vec<String> {
                    let rows = runtime.rows(&uid).into_iter();
                    rows.filter(|row| row.view.is_running()).map(|row| row.view.id).collect()
                };
                running(&runtime).iter().for_each(|id| runtime.terminate(id));
                if !running(&runtime).is_empty() {
                    tokio::time::sleep(grace).await;
                    running(&runtime).iter().for_each(|id| runtime.kill(id));
                }
                runtime.stop_sandbox(&uid);
                runtime.remove_cgroup(&uid);
                runtime.forget(&uid);
            });
        }
    }
}
