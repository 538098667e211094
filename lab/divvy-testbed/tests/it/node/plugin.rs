//! A device plugin that records the kubelet's calls.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use divvy_kubelet::api::v1beta1::device_plugin_server::{DevicePlugin, DevicePluginServer};
use divvy_kubelet::api::v1beta1::registration_client::RegistrationClient;
use divvy_kubelet::api::v1beta1::{
    AllocateRequest, AllocateResponse, CdiDevice, ContainerAllocateResponse, ContainerPreferredAllocationResponse, Device,
    DevicePluginOptions, DeviceSpec, Empty, ListAndWatchResponse, Mount, PreStartContainerRequest, PreStartContainerResponse,
    PreferredAllocationRequest, PreferredAllocationResponse, RegisterRequest,
};
use divvy_testbed::node::Node;
use futures::{Stream, StreamExt as _};
use tokio::net::UnixListener;
use tokio::sync::{Notify, watch};
use tokio_stream::wrappers::{UnixListenerStream, WatchStream};
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use super::RESOURCE;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Call {
    Options,
    ListAndWatch,
    Preferred {
        available: Vec<String>,
        must_include: Vec<String>,
        size: i32,
    },
    Allocate(Vec<String>),
    PreStart(Vec<String>),
}

/// The plugin's behavior, which tests change as they go.
#[derive(Default)]
pub(crate) struct State {
    pub(crate) calls: Vec<Call>,
    pub(crate) no_pre_start: bool,
    pub(crate) no_preferred: bool,
    pub(crate) options_error: Option<Status>,
    /// The responses of GetPreferredAllocation, in order; after the last one, the first available ids, with must_include first.
    pub(crate) preferred: Vec<Vec<String>>,
    pub(crate) allocate_error: Option<Status>,
    pub(crate) empty_allocate: bool,
    /// The errors of PreStartContainer, in order; after the last one, it succeeds.
    pub(crate) pre_start_errors: Vec<Status>,
    /// Whether PreStartContainer never answers.
    pub(crate) hang_pre_start: bool,
    /// The notification for which Allocate waits.
    pub(crate) hold_allocate: Option<Arc<Notify>>,
    pub(crate) response: ContainerAllocateResponse,
}

#[derive(Clone)]
struct Service {
    state: Arc<Mutex<State>>,
    devices: watch::Receiver<Vec<Device>>,
}

pub(crate) struct TestPlugin {
    pub(crate) state: Arc<Mutex<State>>,
    devices: watch::Sender<Vec<Device>>,
    directory: PathBuf,
    endpoint: String,
    stop: Option<watch::Sender<bool>>,
}

pub(crate) fn healthy(ids: impl IntoIterator<Item = String>) -> Vec<Device> {
    let device = |id| Device {
        id,
        health: "Healthy".to_owned(),
        topology: None,
    };
    ids.into_iter().map(device).collect()
}

pub(crate) fn ids(count: usize) -> Vec<String> {
    (0..count).map(|i| format!("u{i}")).collect()
}

impl TestPlugin {
    /// Serve and register as `RESOURCE` with the ids `u0`, `u1`, ….
    pub(crate) async fn start(node: &Node, count: usize) -> TestPlugin {
        let mut plugin = TestPlugin::serving(node, "test.sock", count);
        plugin.register().await.unwrap();
        plugin.stop.get_or_insert_with(|| watch::Sender::new(false));
        plugin
    }

    /// Serve without registering.
    pub(crate) fn serving(node: &Node, endpoint: &str, count: usize) -> TestPlugin {
        let response = ContainerAllocateResponse {
            envs: BTreeMap::from([
                ("FROM_PLUGIN".to_owned(), "1".to_owned()),
                ("BOTH".to_owned(), "plugin".to_owned()),
            ]),
            ..ContainerAllocateResponse::default()
        };
        let state = State {
            response,
            ..State::default()
        };
        let mut plugin = TestPlugin {
            state: Arc::new(Mutex::new(state)),
            devices: watch::Sender::new(healthy(ids(count))),
            directory: node.paths().device_plugins(),
            endpoint: endpoint.to_owned(),
            stop: None,
        };
        plugin.serve();
        plugin
    }

    /// Listen on a new socket.
    pub(crate) fn serve(&mut self) {
        let path = self.directory.join(&self.endpoint);
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        let stop = watch::Sender::new(false);
        let mut stopped = stop.subscribe();
        let service = Service {
            state: self.state.clone(),
            devices: self.devices.subscribe(),
        };
        self.stop = Some(stop);
        tokio::spawn(async move {
            let service = DevicePluginServer::new(service);
            let server = Server::builder().serve_with_incoming(service, UnixListenerStream::new(listener));
            tokio::select! {
                result = server => result.unwrap(),
                _ = stopped.changed() => {}
            }
        });
    }

    pub(crate) async fn register(&self) -> Result<(), Status> {
        self.register_as("v1beta1", RESOURCE, &self.endpoint).await
    }

    pub(crate) async fn register_as(&self, version: &str, resource: &str, endpoint: &str) -> Result<(), Status> {
        let socket = self.directory.join("kubelet.sock");
        let channel = divvy_kubelet::api::connect(&socket, std::time::Duration::from_secs(5))
            .await
            .unwrap();
        let request = RegisterRequest {
            version: version.to_owned(),
            endpoint: endpoint.to_owned(),
            resource_name: resource.to_owned(),
            options: None,
        };
        RegistrationClient::new(channel).register(request).await.map(|_| ())
    }

    /// Send another device list.
    pub(crate) fn set_devices(&self, devices: Vec<Device>) {
        self.devices.send_replace(devices);
    }

    /// End every stream, which the kubelet sees as the plugin's death.
    pub(crate) fn die(&mut self) {
        self.stop = None;
        let devices = self.devices.borrow().clone();
        // Streams end when their sender is dropped.
        self.devices = watch::Sender::new(devices);
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap());
    }

    /// Return the calls since the last time, without Options and ListAndWatch.
    pub(crate) fn take_calls(&self) -> Vec<Call> {
        let mut calls = std::mem::take(&mut self.state.lock().unwrap().calls);
        calls.retain(|call| !matches!(call, Call::Options | Call::ListAndWatch));
        calls
    }

    pub(crate) fn count(&self, of: impl Fn(&Call) -> bool) -> usize {
        self.state.lock().unwrap().calls.iter().filter(|call| of(call)).count()
    }

    pub(crate) fn respond(&self, change: impl FnOnce(&mut ContainerAllocateResponse)) {
        self.change(|state| change(&mut state.response));
    }
}

pub(crate) fn with_cdi(response: &mut ContainerAllocateResponse, name: &str) {
    response.cdi_devices.push(CdiDevice { name: name.to_owned() });
}

pub(crate) fn with_files(response: &mut ContainerAllocateResponse) {
    response.devices.push(DeviceSpec {
        container_path: "/dev/nvidiactl".to_owned(),
        host_path: "/dev/nvidiactl".to_owned(),
        permissions: "rw".to_owned(),
    });
    response.mounts.push(Mount {
        container_path: "/limits".to_owned(),
        host_path: "/var/limits".to_owned(),
        read_only: true,
    });
}

#[tonic::async_trait]
impl DevicePlugin for Service {
    async fn get_device_plugin_options(&self, _: Request<Empty>) -> Result<Response<DevicePluginOptions>, Status> {
        let mut state = self.state.lock().unwrap();
        state.calls.push(Call::Options);
        match state.options_error.take() {
            Some(error) => Err(error),
            None => Ok(Response::new(DevicePluginOptions {
                pre_start_required: !state.no_pre_start,
                get_preferred_allocation_available: !state.no_preferred,
            })),
        }
    }

    type ListAndWatchStream = Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        self.state.lock().unwrap().calls.push(Call::ListAndWatch);
        let lists = WatchStream::new(self.devices.clone()).map(|devices| Ok(ListAndWatchResponse { devices }));
        Ok(Response::new(Box::pin(lists)))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let request = request.into_inner().container_requests.remove(0);
        let mut state = self.state.lock().unwrap();
        let answer = if state.preferred.is_empty() {
            let mut ids = request.must_include_device_ids.clone();
            ids.extend(
                request
                    .available_device_ids
                    .iter()
                    .filter(|id| !request.must_include_device_ids.contains(id))
                    .cloned(),
            );
            ids.truncate(usize::try_from(request.allocation_size).unwrap());
            ids
        } else {
            state.preferred.remove(0)
        };
        state.calls.push(Call::Preferred {
            available: request.available_device_ids,
            must_include: request.must_include_device_ids,
            size: request.allocation_size,
        });
        Ok(Response::new(PreferredAllocationResponse {
            container_responses: vec![ContainerPreferredAllocationResponse { device_ids: answer }],
        }))
    }

    async fn allocate(&self, request: Request<AllocateRequest>) -> Result<Response<AllocateResponse>, Status> {
        let request = request.into_inner().container_requests.remove(0);
        let hold = {
            let mut state = self.state.lock().unwrap();
            state.calls.push(Call::Allocate(request.devices_ids));
            state.hold_allocate.clone()
        };
        if let Some(hold) = hold {
            hold.notified().await;
        }
        let mut state = self.state.lock().unwrap();
        if let Some(error) = state.allocate_error.take() {
            return Err(error);
        }
        let responses = if state.empty_allocate {
            vec![]
        } else {
            vec![state.response.clone()]
        };
        Ok(Response::new(AllocateResponse {
            container_responses: responses,
        }))
    }

    async fn pre_start_container(
        &self,
        request: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        if self.state.lock().unwrap().hang_pre_start {
            std::future::pending::<()>().await;
        }
        let mut state = self.state.lock().unwrap();
        state.calls.push(Call::PreStart(request.into_inner().devices_ids));
        if state.pre_start_errors.is_empty() {
            Ok(Response::new(PreStartContainerResponse {}))
        } else {
            Err(state.pre_start_errors.remove(0))
        }
    }
}
