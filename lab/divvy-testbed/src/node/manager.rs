//! The device manager's I/O: Registration on `kubelet.sock`, one stream per plugin, and the calls during admission and container start.
//! [`DeviceBooks`] makes the decisions; this module carries them out.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use divvy_kubelet::api::v1beta1::device_plugin_client::DevicePluginClient;
use divvy_kubelet::api::v1beta1::registration_server::Registration;
use divvy_kubelet::api::v1beta1::{
    AllocateRequest, ContainerAllocateRequest, ContainerPreferredAllocationRequest, Empty, PreStartContainerRequest,
    PreferredAllocationRequest, RegisterRequest,
};
use divvy_model::ContainerKind;
use divvy_testkit::dice::Dice;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic::{Code, Request, Response, Status};

use super::checkpoint;
use super::devices::{AllocationStep, Bugs, DeviceBooks, DeviceError, DeviceHolder, is_extended_resource};
use super::endpoint::{dial, go_error};
use super::plan::{ContainerPlan, PodPlan};
use super::runtime::{ContainerRuntime, DeviceOptions};
use super::tasks::Tasks;

/// A plugin's connection. The newest registration of a resource wins.
#[derive(Debug, Clone)]
struct PluginConnection {
    generation: u64,
    client: DevicePluginClient<Channel>,
    stop: CancellationToken,
}

#[derive(Debug)]
struct ManagerState {
    books: DeviceBooks,
    plugins: BTreeMap<String, PluginConnection>,
    generation: u64,
    seed: Dice,
    /// The UIDs of pods that count as active.
    active: BTreeSet<String>,
    /// True until the first list of pods has been handled.
    starting: bool,
    removed: BTreeSet<String>,
}

/// The device manager of one run of the kubelet.
#[derive(Debug)]
pub(crate) struct DeviceManager {
    directory: PathBuf,
    inner: Mutex<ManagerState>,
    changed: watch::Sender<u64>,
    began: Instant,
    dial_timeout: Duration,
    allocate_latency: Duration,
    pre_start_timeout: Duration,
    endpoint_grace: Duration,
    tasks: Tasks,
    /// Whether the checkpoint was missing at the start. The node then counts as newly created.
    pub(crate) checkpoint_was_missing: bool,
}

/// The durations of the device manager's calls, and their time limits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeviceTimings {
    pub(crate) dial: Duration,
    pub(crate) allocate: Duration,
    pub(crate) pre_start: Duration,
    pub(crate) endpoint_grace: Duration,
}

impl DeviceManager {
    pub(crate) fn start(directory: PathBuf, bugs: Bugs, timings: DeviceTimings, seed: Dice, tasks: Tasks) -> Arc<DeviceManager> {
        let path = directory.join(checkpoint::FILE);
        let text = std::fs::read_to_string(&path).ok();
        let restored = match text.as_deref().map(checkpoint::parse) {
            Some(Ok(restored)) => restored,
            Some(Err(error)) => {
                tracing::error!(
                    %error,
                    "could not read the checkpoint; the device manager starts without any allocation"
                );
                checkpoint::Restored::default()
            }
            None => checkpoint::Restored::default(),
        };
        let books = DeviceBooks::restore(bugs, 0, restored.held, restored.registered);
        let inner = ManagerState {
            books,
            plugins: BTreeMap::new(),
            generation: 0,
            seed,
            active: BTreeSet::new(),
            starting: true,
            removed: BTreeSet::new(),
        };
        Arc::new(DeviceManager {
            directory,
            inner: Mutex::new(inner),
            changed: watch::Sender::new(0),
            began: Instant::now(),
            dial_timeout: timings.dial,
            allocate_latency: timings.allocate,
            pre_start_timeout: timings.pre_start,
            endpoint_grace: timings.endpoint_grace,
            tasks,
            checkpoint_was_missing: text.is_none(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, ManagerState> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Read the books under the device manager's lock.
    pub(crate) fn read<T>(&self, look: impl FnOnce(&DeviceBooks) -> T) -> T {
        look(&self.lock().books)
    }

    /// Subscribe to a counter that changes with every change of a device list or stream.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    pub(crate) fn set_bugs(&self, bugs: Bugs) {
        self.lock().books.bugs = bugs;
    }

    /// Note that the first list of pods has been handled.
    pub(crate) fn sources_are_ready(&self) {
        self.lock().starting = false;
    }

    /// Set the pods that count as active from now on. The ids of other pods are forgotten at the next allocation or `List`.
    pub(crate) fn set_active(&self, active: BTreeSet<String>) {
        self.lock().active = active;
    }

    /// Return capacity and allocatable of each resource. A removed resource stays with 0, which shows that a plugin once managed it.
    pub(crate) fn capacity(&self) -> BTreeMap<String, (usize, usize)> {
        let grace = u64::try_from(self.endpoint_grace.as_millis()).unwrap_or(u64::MAX);
        let now = self.now_ms();
        let mut inner = self.lock();
        let (capacity, removed) = inner.books.capacity(now, grace);
        if !removed.is_empty() {
            self.write_checkpoint(&inner);
            inner.removed.extend(removed);
        }
        inner.removed.retain(|resource| !capacity.contains_key(resource));
        let removed = inner.removed.iter().map(|resource| (resource.clone(), (0, 0)));
        removed.chain(capacity).collect()
    }

    /// Note resources that the node object still shows from an earlier run of the kubelet.
    pub(crate) fn remember_as_removed(&self, resources: impl IntoIterator<Item = String>) {
        self.lock().removed.extend(resources);
    }

    /// Forget pods that have ended, so that their ids are free again. A client that lists the pod resources triggers this as well
    /// ([`Node::list_pod_resources`](super::Node::list_pod_resources)), which is how bug B1 happens.
    pub(crate) fn collect(&self) {
        let mut inner = self.lock();
        if inner.starting {
            return;
        }
        let active = inner.active.clone();
        inner.books.forget_all_but(&active);
    }

    fn write_checkpoint(&self, inner: &ManagerState) {
        let text = checkpoint::render(&inner.books);
        if let Err(error) = checkpoint::replace(&self.directory.join(checkpoint::FILE), &text) {
            tracing::error!(%error, "could not write the checkpoint");
        }
    }

    /// End every plugin's connection, as a fault between kubelet and plugin would.
    pub(crate) fn drop_streams(&self) {
        for plugin in self.lock().plugins.values() {
            plugin.stop.cancel();
        }
    }

    /// Allocate a container's devices, resource by resource, and write the checkpoint once. Calls are serial, because pods are admitted one at
    /// a time.
    pub(crate) async fn allocate(
        &self,
        pod: &PodPlan,
        container: &ContainerPlan,
        runtime: &ContainerRuntime,
    ) -> Result<(), DeviceError> {
        let mut wrote = false;
        let result = self.allocate_resources(pod, container, runtime, &mut wrote).await;
        let mut inner = self.lock();
        if result.is_ok() {
            let leaves_ids = container.kind == ContainerKind::Init;
            inner.books.settle(&pod.uid, &container.name, leaves_ids);
            if wrote {
                self.write_checkpoint(&inner);
            }
        }
        result
    }

    async fn allocate_resources(
        &self,
        pod: &PodPlan,
        container: &ContainerPlan,
        runtime: &ContainerRuntime,
        wrote: &mut bool,
    ) -> Result<(), DeviceError> {
        let mut resources: Vec<(&String, &u64)> = container.limits.iter().collect();
        // Go iterates over a map in random order, so the order of several resources is random.
        self.lock().seed.shuffle(&mut resources);
        for (resource, wanted) in resources {
            if !self.read(|books| books.knows(resource)) {
                continue;
            }
            self.collect();
            let rows = runtime.rows(&pod.uid);
            let runs = |name: &str| rows.iter().any(|row| row.view.container == name && row.view.is_running());
            let next = {
                let mut inner = self.lock();
                let ManagerState {
                    books, seed, starting, ..
                } = &mut *inner;
                // Without B3, an ended init container counts as running while the app container is running.
                let ended_init = container.kind == ContainerKind::Init
                    && rows.iter().any(|row| row.view.is_running())
                    && !books.bugs.ended_init_container_kills;
                let running = runs(&container.name) || ended_init;
                let holder = DeviceHolder {
                    pod: pod.uid.clone(),
                    container: container.name.clone(),
                    resource: resource.clone(),
                };
                let wanted = usize::try_from(*wanted).unwrap_or(usize::MAX);
                books.begin(holder, wanted, *starting, running, seed)
            };
            let result = match next {
                Ok(AllocationStep::Nothing) => continue,
                Ok(next) => self.call_plugin(resource, next).await,
                Err(error) => Err(error),
            };
            if let Err(error) = result {
                self.lock().books.give_up();
                return Err(error);
            }
            *wrote = true;
        }
        Ok(())
    }

    async fn call_plugin(&self, resource: &str, next: AllocationStep) -> Result<(), DeviceError> {
        let request = match next {
            AllocationStep::Nothing => return Ok(()),
            AllocationStep::Allocate(request) => request,
            AllocationStep::Ask { request, available } => {
                let mut client = self.client(resource)?;
                let must_include = self.in_random_order(&request.taken);
                let call = PreferredAllocationRequest {
                    container_requests: vec![ContainerPreferredAllocationRequest {
                        available_device_ids: available,
                        must_include_device_ids: must_include,
                        allocation_size: i32::try_from(request.wanted).unwrap_or(i32::MAX),
                    }],
                };
                let answer = client.get_preferred_allocation(call).await;
                let answer = answer.map_err(|status| DeviceError::Preferred(go_error(&status)))?;
                let first = answer.into_inner().container_responses.into_iter().next();
                let ids = first.map(|first| first.device_ids).unwrap_or_default();
                let mut inner = self.lock();
                let ManagerState { books, seed, .. } = &mut *inner;
                books.preferred(request, &ids, seed)?
            }
        };
        if !self.allocate_latency.is_zero() {
            tokio::time::sleep(self.allocate_latency).await;
        }
        let mut client = self.client(resource)?;
        let call = AllocateRequest {
            container_requests: vec![ContainerAllocateRequest {
                devices_ids: self.in_random_order(&request.taken),
            }],
        };
        // No timeout, as in the kubelet: a plugin that hangs here blocks the node's admission.
        let answer = client
            .allocate(call)
            .await
            .map_err(|status| DeviceError::Allocate(go_error(&status)))?;
        let response = answer
            .into_inner()
            .container_responses
            .into_iter()
            .next()
            .ok_or(DeviceError::EmptyResponse)?;
        self.lock().books.record(request, response);
        Ok(())
    }

    fn in_random_order(&self, ids: &BTreeSet<String>) -> Vec<String> {
        DeviceBooks::in_random_order(ids, &mut self.lock().seed)
    }

    fn client(&self, resource: &str) -> Result<DevicePluginClient<Channel>, DeviceError> {
        let inner = self.lock();
        match inner.plugins.get(resource) {
            Some(plugin) if inner.books.is_running(resource) => Ok(plugin.client.clone()),
            _ if inner.books.healthy().contains_key(resource) => Err(DeviceError::Stopped(resource.to_owned())),
            _ => Err(DeviceError::UnknownPlugin(resource.to_owned())),
        }
    }

    /// Prepare a start of a container: call PreStartContainer where the plugin wants it, then return what the cached responses contain.
    pub(crate) async fn run_options(
        &self,
        pod: &PodPlan,
        container: &ContainerPlan,
        runtime: &ContainerRuntime,
    ) -> Result<DeviceOptions, DeviceError> {
        let mut reallocate = false;
        for (resource, wanted) in &container.limits {
            if *wanted == 0 || !self.read(|books| books.knows(resource)) {
                continue;
            }
            let holder = DeviceHolder {
                pod: pod.uid.clone(),
                container: container.name.clone(),
                resource: resource.clone(),
            };
            let ids = self.read(|books| books.pre_start(&holder).map(Option::<&BTreeSet<String>>::cloned))?;
            if let Some(ids) = ids {
                let mut client = self.client(resource)?;
                let call = PreStartContainerRequest {
                    devices_ids: self.in_random_order(&ids),
                };
                let answer = tokio::time::timeout(self.pre_start_timeout, client.pre_start_container(call)).await;
                let error = match answer {
                    Ok(Ok(_)) => None,
                    Ok(Err(status)) => Some(go_error(&status)),
                    Err(_) => Some(go_error(&Status::new(Code::DeadlineExceeded, "context deadline exceeded"))),
                };
                if let Some(error) = error {
                    return Err(DeviceError::PreStart(error));
                }
            }
            reallocate |= self.read(|books| books.held(&holder.pod, &holder.container, resource).is_none());
        }
        if reallocate {
            self.allocate(pod, container, runtime).await?;
        }
        let mut options = DeviceOptions::default();
        self.read(|books| {
            for resource in container.limits.keys() {
                if let Some(held) = books.held(&pod.uid, &container.name, resource) {
                    options.merge(&held.response);
                }
            }
        });
        Ok(options)
    }

    /// Follow a plugin's device list until the stream ends.
    async fn follow(self: Arc<Self>, resource: String, plugin: PluginConnection) {
        let mut client = plugin.client.clone();
        let stream = plugin.stop.run_until_cancelled(client.list_and_watch(Empty {})).await;
        match stream {
            Some(Ok(response)) => {
                let mut stream = response.into_inner();
                while let Some(Ok(Some(message))) = plugin.stop.run_until_cancelled(stream.message()).await {
                    let mut inner = self.lock();
                    let current = inner
                        .plugins
                        .get(&resource)
                        .is_some_and(|now| now.generation == plugin.generation);
                    if !current && !inner.books.bugs.old_stream_disconnects_new {
                        continue;
                    }
                    inner.books.devices(&resource, &message.devices);
                    self.write_checkpoint(&inner);
                    drop(inner);
                    self.announce();
                }
            }
            Some(Err(status)) => tracing::warn!(resource, error = go_error(&status), "ListAndWatch failed"),
            None => {}
        }
        let mut inner = self.lock();
        let Some(now) = inner.plugins.get(&resource) else {
            return;
        };
        if now.generation != plugin.generation && !inner.books.bugs.old_stream_disconnects_new {
            return;
        }
        now.stop.cancel();
        inner.plugins.remove(&resource);
        let at = self.now_ms();
        inner.books.disconnected(&resource, at);
        drop(inner);
        self.announce();
    }

    fn announce(&self) {
        self.changed.send_modify(|generation| *generation += 1);
    }
}

/// The kubelet's Registration service.
#[derive(Debug)]
pub(crate) struct RegistrationService(pub(crate) Arc<DeviceManager>);

#[tonic::async_trait]
impl Registration for RegistrationService {
    /// Check the request, connect back, and query the plugin's options before answering. `RegisterRequest.options` is ignored.
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let manager = &self.0;
        let request = request.into_inner();
        if request.version != "v1beta1" {
            return Err(Status::unknown(format!(
                "requested API version {:?} is not supported by kubelet. Supported version is [\"v1beta1\"]",
                request.version
            )));
        }
        if !is_extended_resource(&request.resource_name) {
            return Err(Status::unknown(format!(
                "the ResourceName {:?} is invalid",
                request.resource_name
            )));
        }
        let socket = manager.directory.join(&request.endpoint);
        let mut client = dial(socket, manager.dial_timeout)
            .await
            .map_err(|error| Status::unknown(format!("failed to dial device plugin: {error}")))?;
        let options = client
            .get_device_plugin_options(Empty {})
            .await
            .map_err(|status| Status::unknown(format!("failed to get device plugin options: {}", go_error(&status))))?
            .into_inner();
        let mut inner = manager.lock();
        inner.generation += 1;
        let plugin = PluginConnection {
            generation: inner.generation,
            client,
            stop: manager.tasks.token().child_token(),
        };
        inner.books.connected(&request.resource_name, options);
        inner.plugins.insert(request.resource_name.clone(), plugin.clone());
        drop(inner);
        manager.tasks.spawn(manager.clone().follow(request.resource_name, plugin));
        Ok(Response::new(Empty {}))
    }
}
