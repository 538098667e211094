//! A kubelet for device plugins: it accepts registrations and follows the device lists.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result};
use divvy_kubelet::AnyAuthority;
use divvy_kubelet::api::v1beta1::device_plugin_client::DevicePluginClient;
use divvy_kubelet::api::v1beta1::registration_server::{Registration, RegistrationServer};
use divvy_kubelet::api::v1beta1::{DevicePluginOptions, Empty, ListAndWatchResponse, RegisterRequest};
use divvy_kubelet::api::{KUBELET_SOCKET, connect};
use serde::{Deserialize, Serialize};
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Channel, Server};
use tonic::{Request, Response, Status};

/// A device: its id, whether it is healthy, and its NUMA nodes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct ComparedDevice(pub(crate) String, pub(crate) bool, pub(crate) Vec<i64>);

/// A registration.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Registered {
    pub(crate) resource: String,
    pub(crate) endpoint: String,
    pub(crate) version: String,
    pub(crate) preferred_allocation: bool,
    pub(crate) pre_start: bool,
}

/// What the kubelet has received.
#[derive(Debug, Clone, Default)]
pub(crate) struct KubeletRecord {
    /// All registrations, in their order.
    pub(crate) registrations: Vec<Registered>,
    /// The last device list of each resource.
    pub(crate) devices: BTreeMap<String, Vec<ComparedDevice>>,
    /// The number of device lists so far.
    pub(crate) lists: usize,
}

#[derive(Debug, Clone)]
pub(crate) struct FakeKubelet {
    directory: PathBuf,
    seen: watch::Sender<KubeletRecord>,
    server: Arc<Mutex<Option<JoinHandle<()>>>>,
    /// The tasks that follow device lists.
    following: Arc<Mutex<Vec<JoinHandle<()>>>>,
}

const PATIENCE: Duration = Duration::from_secs(5);
/// How long a plugin may take to register again.
const REGISTRATION: Duration = Duration::from_secs(15);
const AGAIN: Duration = Duration::from_millis(50);

impl FakeKubelet {
    pub(crate) fn start(directory: &Path) -> Result<FakeKubelet> {
        let kubelet = FakeKubelet {
            directory: directory.to_owned(),
            seen: watch::Sender::default(),
            server: Arc::default(),
            following: Arc::default(),
        };
        kubelet.listen()?;
        Ok(kubelet)
    }

    /// Remove all sockets and listen again, as a kubelet does when it starts.
    pub(crate) fn restart(&self) -> Result<()> {
        for entry in std::fs::read_dir(&self.directory)? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "sock") {
                std::fs::remove_file(path)?;
            }
        }
        self.listen()
    }

    fn listen(&self) -> Result<()> {
        let path = self.directory.join(KUBELET_SOCKET);
        let listener = UnixListener::bind(&path).with_context(|| format!("cannot listen on {}", path.display()))?;
        let service = RegistrationServer::new(self.clone());
        let task = tokio::spawn(async move {
            // The server ends with this program.
            let connections = UnixListenerStream::new(listener).map(|stream| stream.map(AnyAuthority::new));
            let _ = Server::builder().serve_with_incoming(service, connections).await;
        });
        let mut server = self.server.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(before) = server.replace(task) {
            before.abort();
        }
        Ok(())
    }

    pub(crate) fn seen(&self) -> watch::Receiver<KubeletRecord> {
        self.seen.subscribe()
    }

    /// Connect to the plugin of a resource.
    pub(crate) async fn plugin(&self, resource: &str) -> Result<DevicePluginClient<Channel>> {
        let endpoint = {
            let seen = self.seen.borrow();
            let last = seen.registrations.iter().rfind(|registered| registered.resource == resource);
            last.with_context(|| format!("{resource} is not registered"))?
                .endpoint
                .clone()
        };
        let channel = connect(&self.directory.join(endpoint), PATIENCE).await?;
        Ok(DevicePluginClient::new(channel))
    }

    /// End the ListAndWatch streams, and return the first list of the next stream of a resource. A plugin may also register
    /// again.
    pub(crate) async fn watch_again(&self, resource: &str) -> Result<Vec<ComparedDevice>> {
        for task in self.following().drain(..) {
            task.abort();
        }
        let lists = self.seen.borrow().lists;
        let again = async {
            loop {
                let list = self.first_list(resource).await;
                if let Ok(Some(list)) = list {
                    return devices_of(list);
                }
                let seen = self.seen.borrow().clone();
                if seen.lists > lists {
                    return seen.devices.get(resource).cloned().unwrap_or_default();
                }
                sleep(AGAIN).await;
            }
        };
        timeout(REGISTRATION, again)
            .await
            .context("the plugin sends no devices again")
    }

    async fn first_list(&self, resource: &str) -> Result<Option<ListAndWatchResponse>> {
        let mut stream = self.plugin(resource).await?.list_and_watch(Empty {}).await?.into_inner();
        Ok(stream.message().await?)
    }

    fn following(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.following.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn follow(self, resource: String, mut plugin: DevicePluginClient<Channel>) {
        let Ok(stream) = plugin.list_and_watch(Empty {}).await else {
            return;
        };
        let mut stream = stream.into_inner();
        while let Ok(Some(list)) = stream.message().await {
            let devices = devices_of(list);
            self.seen.send_modify(|seen| {
                seen.devices.insert(resource.clone(), devices);
                seen.lists += 1;
            });
        }
    }
}

/// Return the devices of a list, sorted.
fn devices_of(list: ListAndWatchResponse) -> Vec<ComparedDevice> {
    let devices = list.devices.into_iter().map(|device| {
        let nodes = device.topology.into_iter().flat_map(|topology| topology.nodes);
        ComparedDevice(device.id, device.health == "Healthy", nodes.map(|node| node.id).collect())
    });
    let mut devices: Vec<ComparedDevice> = devices.collect();
    devices.sort();
    devices
}

#[tonic::async_trait]
impl Registration for FakeKubelet {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let request = request.into_inner();
        let socket = self.directory.join(&request.endpoint);
        let channel = connect(&socket, PATIENCE)
            .await
            .map_err(|error| Status::unknown(format!("failed to dial device plugin: {error}")))?;
        let DevicePluginOptions {
            pre_start_required,
            get_preferred_allocation_available,
        } = request.options.unwrap_or_default();
        self.seen.send_modify(|seen| {
            seen.registrations.push(Registered {
                resource: request.resource_name.clone(),
                endpoint: request.endpoint,
                version: request.version,
                preferred_allocation: get_preferred_allocation_available,
                pre_start: pre_start_required,
            });
        });
        let task = tokio::spawn(self.clone().follow(request.resource_name, DevicePluginClient::new(channel)));
        self.following().push(task);
        Ok(Response::new(Empty {}))
    }
}
