//! A fake kubelet: it accepts registrations, dials back within the call, and watches the devices.

use std::fs;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use divvy_kubelet::api::v1beta1::device_plugin_client::DevicePluginClient;
use divvy_kubelet::api::v1beta1::registration_server::{Registration, RegistrationServer};
use divvy_kubelet::api::v1beta1::{Device, DevicePluginOptions, Empty, RegisterRequest};
use divvy_kubelet::api::{KUBELET_SOCKET, connect};
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Server};
use tonic::{Request, Response, Status};

use crate::DEADLINE;

/// How the fake kubelet reacts to its next registration.
#[derive(Debug, Clone)]
pub(crate) enum Next {
    Refuse(String),
    /// Accept the registration, but never open a stream (as when GetDevicePluginOptions fails after the answer).
    NeverListen,
}

/// What the fake kubelet has seen so far.
#[derive(Debug, Clone, Default)]
pub(crate) struct Record {
    pub(crate) asked: Vec<RegisterRequest>,
    pub(crate) taken: usize,
    pub(crate) options: Option<DevicePluginOptions>,
    pub(crate) lists: Vec<Vec<Device>>,
    pub(crate) open: usize,
    pub(crate) most_open: usize,
    pub(crate) stream_errors: Vec<Status>,
}

/// The state that survives a restart of the kubelet.
#[derive(Debug, Clone)]
pub(crate) struct Kubelet {
    pub(crate) directory: PathBuf,
    pub(crate) record: watch::Sender<Record>,
    next: Arc<Mutex<Vec<Next>>>,
    process: Arc<Mutex<Process>>,
}

/// The state that ends with the process.
#[derive(Debug, Default)]
struct Process {
    all: CancellationToken,
    streams: CancellationToken,
}

impl Kubelet {
    pub(crate) fn new(directory: &Path) -> Self {
        Self {
            directory: directory.to_owned(),
            record: watch::Sender::new(Record::default()),
            next: Arc::default(),
            process: Arc::default(),
        }
    }

    pub(crate) fn started(directory: &Path) -> Self {
        let kubelet = Self::new(directory);
        kubelet.start();
        kubelet
    }

    /// Start as a real kubelet does: remove all sockets (and only sockets), then create its own.
    pub(crate) fn start(&self) {
        for entry in fs::read_dir(&self.directory).expect("the directory is there").flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_socket()) {
                fs::remove_file(entry.path()).expect("removed");
            }
        }
        self.listen(&self.socket());
    }

    /// End the process, which closes its connections. As after SIGKILL, the socket's file stays.
    pub(crate) fn kill(&self) {
        let old = std::mem::take(&mut *self.process.lock().expect("not poisoned"));
        old.streams.cancel();
        old.all.cancel();
    }

    pub(crate) fn restart(&self) {
        self.kill();
        self.start();
    }

    /// Create a new socket while the process and its streams continue. With `by_rename`, it is renamed into place, so that the
    /// inode differs.
    pub(crate) fn replace_socket(&self, by_rename: bool) {
        self.process.lock().expect("not poisoned").all.cancel();
        self.process.lock().expect("not poisoned").all = CancellationToken::new();
        if by_rename {
            let other = self.directory.join("new.sock");
            self.listen(&other);
            fs::rename(other, self.socket()).expect("renamed");
        } else {
            fs::remove_file(self.socket()).expect("removed");
            self.listen(&self.socket());
        }
    }

    /// Close the kubelet's streams and keep everything else.
    pub(crate) fn drop_streams(&self) {
        let mut process = self.process.lock().expect("not poisoned");
        std::mem::take(&mut process.streams).cancel();
    }

    pub(crate) fn next(&self, what: impl IntoIterator<Item = Next>) {
        self.next.lock().expect("not poisoned").extend(what);
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.join(KUBELET_SOCKET)
    }

    /// Return the path of the plugin's socket, as named in the plugin's last registration.
    pub(crate) fn plugin_socket(&self) -> PathBuf {
        self.directory
            .join(&self.record.borrow().asked.last().expect("registered").endpoint)
    }

    /// Open a separate connection to the plugin.
    pub(crate) async fn dial(&self) -> DevicePluginClient<Channel> {
        let channel = connect(&self.plugin_socket(), DEADLINE).await.expect("the plugin listens");
        DevicePluginClient::new(channel)
            .max_decoding_message_size(16 << 20)
            .max_encoding_message_size(16 << 20)
    }

    pub(crate) async fn wait(&self, what: &str, condition: impl FnMut(&Record) -> bool) -> Record {
        let mut record = self.record.subscribe();
        let found = tokio::time::timeout(DEADLINE, record.wait_for(condition)).await;
        match found {
            Ok(record) => record.expect("the sender is here").clone(),
            Err(_) => panic!("not within {DEADLINE:?}: {what}; {:#?}", self.record.borrow()),
        }
    }

    /// Wait until registration number `times` was accepted and its stream is open.
    pub(crate) async fn wait_registered(&self, times: usize) -> Record {
        self.wait(&format!("registration {times}"), |record| {
            record.taken >= times && record.open > 0
        })
        .await
    }

    fn listen(&self, path: &Path) {
        let listener = UnixListener::bind(path).expect("bound");
        let end = self.process.lock().expect("not poisoned").all.clone();
        let service = RegistrationServer::new(self.clone());
        tokio::spawn(async move {
            let serve =
                Server::builder().serve_with_incoming_shutdown(service, UnixListenerStream::new(listener), end.cancelled());
            // Requests are short here, so a graceful end is quick.
            let _ = tokio::time::timeout(DEADLINE, serve).await;
        });
    }

    async fn hold_stream(self, mut plugin: DevicePluginClient<Channel>, end: CancellationToken) {
        let mut stream = match plugin.list_and_watch(Empty {}).await {
            Ok(stream) => stream.into_inner(),
            Err(status) => return self.record.send_modify(|record| record.stream_errors.push(status)),
        };
        self.record.send_modify(|record| {
            record.open += 1;
            record.most_open = record.most_open.max(record.open);
        });
        loop {
            let message = tokio::select! {
                () = end.cancelled() => break,
                message = stream.message() => message,
            };
            match message {
                Ok(Some(list)) => self.record.send_modify(|record| record.lists.push(list.devices)),
                Ok(None) => break,
                Err(status) => {
                    self.record.send_modify(|record| record.stream_errors.push(status));
                    break;
                }
            }
        }
        self.record.send_modify(|record| record.open -= 1);
    }
}

#[tonic::async_trait]
impl Registration for Kubelet {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let request = request.into_inner();
        let socket = self.directory.join(&request.endpoint);
        let next = {
            let mut next = self.next.lock().expect("not poisoned");
            if next.is_empty() { None } else { Some(next.remove(0)) }
        };
        let listen = !matches!(next, Some(Next::NeverListen));
        self.record.send_modify(|record| record.asked.push(request));
        if let Some(Next::Refuse(text)) = next {
            return Err(Status::unknown(text));
        }
        let failed = |error: &dyn std::fmt::Display| Status::unknown(format!("failed to dial device plugin: {error}"));
        let channel = connect(&socket, Duration::from_secs(10))
            .await
            .map_err(|error| failed(&error))?;
        let mut plugin = DevicePluginClient::new(channel);
        let options = plugin.get_device_plugin_options(Empty {}).await?.into_inner();
        self.record.send_modify(|record| {
            record.options = Some(options);
            record.taken += 1;
        });
        if listen {
            let end = self.process.lock().expect("not poisoned").streams.clone();
            tokio::spawn(self.clone().hold_stream(plugin, end));
        }
        Ok(Response::new(Empty {}))
    }
}
