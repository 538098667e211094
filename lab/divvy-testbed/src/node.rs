//! A node of the embedded cluster: an emulated kubelet and container runtime on real paths and Unix sockets.
//!
//! What matches a real node (Kubernetes 1.36, containerd 2.3; `docs/compatibility/kubelet.md`, and measurements on a real node): the
//! device manager's order of calls, its reuse of init containers' ids, its checkpoint, its rejection texts, its random order of ids, its
//! removal of sockets at a start, and its retries of PreStartContainer; serial admission; graceful and forced deletion; the resolution of
//! CDI names and the precedence of variables; the layout of cgroups.
//!
//! What is simpler than on a real node:
//! - Containers are rows, not processes. `sleep N` ends with status 0 after N seconds, `env` ends at once, `fail` ends with status 1, and
//!   anything else runs until it is ended ([`TestbedNode::end_container`]). With `--ignore-term` among its arguments, only SIGKILL ends a container. There are no images,
//!   probes, hooks, volumes, logs, exec, init-container restarts by probes, ephemeral containers, or static pods.
//! - The topology policy is `none`. There is no CPU manager, memory manager, or DRA manager, and no eviction or preemption.
//! - A pod whose deletion began before the kubelet first saw it is not admitted. The minimum grace period of 2 s exists only for pods whose
//!   object is gone ([`Timings::forced_grace`]).
//! - A runtime that is down ([`TestbedNode::set_runtime_away`]) starts nothing, but running containers can still be ended.
//! - There is no renewed Lease and there are no heartbeats: a node whose kubelet is stopped stays Ready.
//! - See [`checkpoint`], [`runtime`] and the other modules for their simplifications.

pub(crate) mod cdi;
pub(crate) mod cgroups;
pub mod checkpoint;
pub mod devices;
pub(crate) mod endpoint;
pub(crate) mod events;
pub(crate) mod kubelet;
pub(crate) mod lifecycle;
pub(crate) mod manager;
pub(crate) mod node_status;
pub(crate) mod plan;
pub mod runtime;
pub(crate) mod shared;
pub(crate) mod status;
pub(crate) mod status_writer;
pub(crate) mod tasks;
pub(crate) mod worker;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use divvy_testkit::dice::Dice;
use kube::Client;
use tokio::sync::broadcast;

pub use self::cgroups::CgroupVersion;
use self::cgroups::Cgroups;
pub use self::devices::{Bugs, DeviceHolder};
use self::kubelet::{Kubelet, Parts};
use self::runtime::ContainerRuntime;
pub use self::runtime::{ContainerView, MountView, RuntimeContainerState};

/// The number of pods that a node accepts, whatever they ask for.
pub(crate) const MAX_PODS: u64 = 110;

/// The greatest length of a Unix socket's path, in bytes.
const SOCKET_PATH_LIMIT: usize = 107;

/// The reason why a node does not start.
#[derive(Debug, thiserror::Error)]
pub enum NodeStartError {
    /// A socket's path is too long.
    #[error(
        "the socket path {path} has {length} bytes, but a Unix socket's path has at most 107: give the node a shorter directory than {root}"
    )]
    SocketPath {
        /// The socket's path.
        path: PathBuf,
        /// The path's length in bytes.
        length: usize,
        /// The node's directory.
        root: PathBuf,
    },
    /// A file or socket could not be created.
    #[error("could not {what} {path}: {source}")]
    Io {
        /// The action that failed, as a verb.
        what: &'static str,
        /// The path on which the action failed.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
}

impl From<NodeStartError> for std::io::Error {
    fn from(error: NodeStartError) -> std::io::Error {
        let kind = match &error {
            NodeStartError::SocketPath { .. } => std::io::ErrorKind::InvalidFilename,
            NodeStartError::Io { source, .. } => source.kind(),
        };
        std::io::Error::new(kind, error)
    }
}

impl NodeStartError {
    pub(crate) fn io(what: &'static str, path: &Path, source: std::io::Error) -> NodeStartError {
        NodeStartError::Io {
            what,
            path: path.to_owned(),
            source,
        }
    }
}

/// A wait that doubles after each failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackoffRange {
    /// The first wait.
    pub first: Duration,
    /// The longest wait.
    pub max: Duration,
}

impl BackoffRange {
    /// Return the wait after `failures` earlier failures.
    pub fn delay(&self, failures: u32) -> Duration {
        self.first
            .saturating_mul(1u32.checked_shl(failures).unwrap_or(u32::MAX))
            .min(self.max)
    }
}

/// The durations on a node. The defaults are a real kubelet's, except where a test would have to wait for them.
#[derive(Debug, Clone)]
pub struct Timings {
    /// The interval between two checks of the node's status (a real kubelet: 1 s for devices).
    pub status_period: Duration,
    /// The time from the end of a plugin's stream until its resource is removed.
    pub endpoint_grace: Duration,
    /// The wait before a container is started again after PreStartContainer or the runtime refused the start (measured on a real
    /// kubelet: 0.6 s, then 14 s).
    pub start_retry: BackoffRange,
    /// The wait after the second and each later end of a container (a real kubelet: 10 s to 5 min). The first restart has no wait.
    pub restart_backoff: BackoffRange,
    /// The grace period of a pod that does not set one.
    pub default_grace: Duration,
    /// The grace period of containers whose pod's object is gone because of a forced deletion. It replaces the pod's own grace
    /// period (measured on kubelet 1.36.3: 2 s in 17 of 17 cases; containers that ignore SIGTERM end 2.2 to 2.9 s after the
    /// object is gone).
    pub forced_grace: Duration,
    /// The time between the removal of a pod object and SIGTERM (measured: up to 1.5 s), if the pod was not already being
    /// deleted.
    pub forced_after: Duration,
    /// The grace period of containers whose pod was deleted while no kubelet was running.
    pub orphan_grace: Duration,
    /// The duration of each container start (image pull and runtime).
    pub container_start: Duration,
    /// The duration of an Allocate call after the ids are chosen. In this time, bug B1 and everything else that can happen during
    /// an admission can occur.
    pub allocate: Duration,
    /// The time limit of PreStartContainer.
    pub pre_start: Duration,
    /// The time limit of the kubelet's connection back to a plugin that registers.
    pub dial: Duration,
    /// The wait before a failed write or watch is retried.
    pub api_retry: Duration,
    /// The time from the kubelet's start until it lists its pods. It decides whether pods or plugins come first after a reboot. On a real
    /// node, a plugin that waits for the kubelet's socket comes first.
    pub pods_after: Duration,
}

impl Default for Timings {
    fn default() -> Timings {
        let backoff = BackoffRange {
            first: Duration::from_millis(300),
            max: Duration::from_secs(2),
        };
        Timings {
            status_period: Duration::from_millis(100),
            endpoint_grace: Duration::from_secs(300),
            start_retry: backoff,
            restart_backoff: backoff,
            default_grace: Duration::from_secs(30),
            forced_grace: Duration::from_secs(2),
            forced_after: Duration::from_millis(300),
            orphan_grace: Duration::from_secs(1),
            container_start: Duration::ZERO,
            allocate: Duration::ZERO,
            pre_start: Duration::from_secs(30),
            dial: Duration::from_secs(10),
            api_retry: Duration::from_millis(100),
            pods_after: Duration::from_millis(200),
        }
    }
}

/// The order in which the pods of one batch are admitted. Pods are always admitted one at a time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AdmissionOrder {
    /// By creationTimestamp, which counts whole seconds, then by arrival.
    #[default]
    Creation,
    /// At random. The pods that arrive within the window form one batch.
    Shuffled {
        /// The length of the window, counted from the batch's first pod.
        window: Duration,
    },
}

/// The description of a node.
#[derive(Debug, Clone)]
pub struct NodeDescription {
    /// The node's name.
    pub name: String,
    /// The node's InternalIP.
    pub address: String,
    /// The number of CPU cores that pods can request.
    pub cpus: u32,
    /// The memory that pods can request, in MiB.
    pub memory_mib: u64,
    /// The minor numbers of the node's GPUs. Each becomes a file `dev/nvidia<minor>`. Without GPUs there are no NVIDIA files at all.
    pub gpu_minors: Vec<u32>,
    /// The node's directory. It is created if absent, and is kept when the node is gone.
    pub root: PathBuf,
    /// Labels in addition to hostname, os, and arch.
    pub labels: BTreeMap<String, String>,
    /// The seed of the node's random choices.
    pub seed: u64,
    /// The durations on the node.
    pub timings: Timings,
    /// The version of the cgroup hierarchy that the node shows.
    pub cgroup: CgroupVersion,
    /// The order in which pods are admitted.
    pub admission: AdmissionOrder,
    /// The kubelet bugs to imitate; none by default.
    pub bugs: Bugs,
}

impl NodeDescription {
    /// Return a node with 16 cores and 64 GiB and without GPUs.
    pub fn new(name: impl Into<String>, root: impl Into<PathBuf>) -> NodeDescription {
        NodeDescription {
            name: name.into(),
            address: "192.168.8.100".to_owned(),
            cpus: 16,
            memory_mib: 65536,
            gpu_minors: Vec::new(),
            root: root.into(),
            labels: BTreeMap::new(),
            seed: 0,
            timings: Timings::default(),
            cgroup: CgroupVersion::default(),
            admission: AdmissionOrder::default(),
            bugs: Bugs::default(),
        }
    }

    /// Return the node's paths.
    pub fn paths(&self) -> NodePaths {
        NodePaths {
            root: self.root.clone(),
            kubelet_dir: self.root.join("kubelet"),
            cdi_dir: self.root.join("cdi"),
            sys_root: self.root.join("sys"),
        }
    }
}

/// The paths of a node's files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodePaths {
    /// The node's directory.
    pub root: PathBuf,
    /// The directory for the agent's `--kubelet-dir`.
    pub kubelet_dir: PathBuf,
    /// The directory for the agent's `--cdi-dir`.
    pub cdi_dir: PathBuf,
    /// The directory for the agent's `--sys-root`, which contains `dev`, `proc`, and `sys`.
    pub sys_root: PathBuf,
}

impl NodePaths {
    /// Return where a path of the node is on this machine. The agent names its own files by their real paths, and all others as they are below the node's
    /// root.
    pub fn on_this_machine(&self, path: &str) -> PathBuf {
        if std::path::Path::new(path).starts_with(&self.root) {
            PathBuf::from(path)
        } else {
            self.sys_root.join(path.trim_start_matches('/'))
        }
    }

    /// Return the directory of the device plugins' sockets.
    pub fn device_plugins(&self) -> PathBuf {
        self.kubelet_dir.join("device-plugins")
    }

    /// Return the socket at which plugins register.
    pub fn kubelet_socket(&self) -> PathBuf {
        self.device_plugins().join("kubelet.sock")
    }

    /// Return the socket of the podresources service, at which nothing answers.
    pub fn pod_resources_socket(&self) -> PathBuf {
        self.kubelet_dir.join("pod-resources/kubelet.sock")
    }

    /// Return the path of the device manager's checkpoint.
    pub fn checkpoint(&self) -> PathBuf {
        self.device_plugins().join(checkpoint::FILE)
    }

    /// Return the root of the cgroup hierarchy.
    pub fn cgroups(&self) -> PathBuf {
        self.sys_root.join("sys/fs/cgroup")
    }

    /// Return the path of the file with the kernel's boot id.
    pub fn boot_id(&self) -> PathBuf {
        self.sys_root.join("proc/sys/kernel/random/boot_id")
    }
}

/// Something that happened on a node.
#[derive(Debug, Clone)]
pub enum NodeEvent {
    /// A container's process started.
    ContainerStarted(ContainerView),
    /// A container's process ended.
    ContainerEnded(ContainerView),
    /// The kubelet rejected a pod for good.
    AdmissionRefused {
        /// The pod's UID.
        pod_uid: String,
        /// The pod's namespace.
        namespace: String,
        /// The pod's name.
        pod: String,
        /// The reason: `UnexpectedAdmissionError` or `OutOf<resource>`.
        reason: String,
        /// The kubelet's message.
        message: String,
    },
    /// A plugin refused a container's start, which the kubelet retries.
    PreStartRefused {
        /// The pod's UID.
        pod_uid: String,
        /// The pod's namespace.
        namespace: String,
        /// The pod's name.
        pod: String,
        /// The container's name.
        container: String,
        /// The gRPC error as the kubelet prints it.
        message: String,
    },
}

/// The state of the device manager.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceManagerView {
    /// The device ids that each holder has.
    pub holders: BTreeMap<DeviceHolder, BTreeSet<String>>,
    /// Capacity and allocatable of each resource, in device ids.
    pub resources: BTreeMap<String, (usize, usize)>,
}

/// A node. On drop it ends with everything that belongs to it; [`TestbedNode::shutdown`] also waits until all has ended.
pub struct TestbedNode {
    spec: NodeDescription,
    client: Client,
    runtime: ContainerRuntime,
    events: broadcast::Sender<NodeEvent>,
    /// Serializes the changes of the kubelet's state.
    changing: tokio::sync::Mutex<()>,
    kubelet: Mutex<Option<Kubelet>>,
    bugs: Mutex<Bugs>,
    seed: Mutex<Dice>,
}

impl std::fmt::Debug for TestbedNode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node")
            .field("name", &self.spec.name)
            .field("root", &self.spec.root)
            .finish_non_exhaustive()
    }
}

impl TestbedNode {
    /// Create the node's files and start its kubelet.
    pub async fn start(client: Client, spec: NodeDescription) -> Result<TestbedNode, NodeStartError> {
        let paths = spec.paths();
        for path in [paths.kubelet_socket(), paths.pod_resources_socket()] {
            let length = path.as_os_str().len();
            if length > SOCKET_PATH_LIMIT {
                return Err(NodeStartError::SocketPath {
                    path,
                    length,
                    root: spec.root,
                });
            }
        }
        let mut seed = Dice::named(spec.seed, &spec.name);
        lay_out(&spec, &paths)?;
        write_boot_id(&paths, &mut seed)?;
        let scratch = paths.root.join("cgroup.new");
        let cgroups = Cgroups::new(spec.cgroup, paths.cgroups(), scratch)
            .map_err(|source| NodeStartError::io("lay out", &paths.cgroups(), source))?;
        let events = broadcast::Sender::new(1024);
        let runtime = ContainerRuntime::new(paths, cgroups, seed.fork(), events.clone());
        let node = TestbedNode {
            client,
            runtime,
            events,
            changing: tokio::sync::Mutex::new(()),
            kubelet: Mutex::new(None),
            bugs: Mutex::new(spec.bugs),
            seed: Mutex::new(seed),
            spec,
        };
        node.start_kubelet().await?;
        Ok(node)
    }

    /// Return the node's name.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// Return the paths of the node's files.
    pub fn paths(&self) -> NodePaths {
        self.spec.paths()
    }

    /// Return the node's containers, oldest first. Ended containers are included until their pod is gone.
    pub fn containers(&self) -> Vec<ContainerView> {
        self.runtime.all()
    }

    /// Let a running container end with this status, after its process has written a termination message. Report whether it was running.
    pub fn end_container(&self, id: &str, code: i32, message: Option<String>) -> bool {
        self.runtime.end(id, code, message)
    }

    /// Subscribe to the node's events from now on. A receiver that lags loses the oldest events.
    pub fn events(&self) -> broadcast::Receiver<NodeEvent> {
        self.events.subscribe()
    }

    /// Return the state of the device manager, which is empty while no kubelet is running.
    pub fn device_manager(&self) -> DeviceManagerView {
        let kubelet = lock(&self.kubelet);
        let Some(kubelet) = kubelet.as_ref() else {
            return DeviceManagerView::default();
        };
        let resources = kubelet.shared.manager.capacity();
        let holders = kubelet.shared.manager.read(|books| {
            let holders = books.holders().iter();
            holders.map(|(holder, held)| (holder.clone(), held.ids.clone())).collect()
        });
        DeviceManagerView { holders, resources }
    }

    /// Let the kubelet forget the ids of pods that have ended, as it does when a client lists the pod resources. Do this during an Allocate call to
    /// provoke [`Bugs::double_hand_out`]. The service itself is not simulated: Divvy does not call it.
    pub fn list_pod_resources(&self) {
        if let Some(kubelet) = lock(&self.kubelet).as_ref() {
            kubelet.shared.manager.collect();
        }
    }

    /// Set the kubelet bugs to imitate from now on.
    pub fn set_bugs(&self, bugs: Bugs) {
        *lock(&self.bugs) = bugs;
        if let Some(kubelet) = lock(&self.kubelet).as_ref() {
            kubelet.shared.manager.set_bugs(bugs);
        }
    }

    /// Stop the kubelet; containers keep running. If `hard`, it ends as by SIGKILL; otherwise it first waits for its calls to
    /// plugins that are in progress.
    pub async fn stop_kubelet(&self, hard: bool) {
        let _changing = self.changing.lock().await;
        self.stop(hard).await;
    }

    async fn stop(&self, hard: bool) {
        let kubelet = lock(&self.kubelet).take();
        if let Some(kubelet) = kubelet {
            kubelet.stop(hard).await;
        }
    }

    /// Start the kubelet unless it is running. It removes the sockets in the device plugin directory and creates a new `kubelet.sock`.
    pub async fn start_kubelet(&self) -> Result<(), NodeStartError> {
        let _changing = self.changing.lock().await;
        self.start_again().await
    }

    async fn start_again(&self) -> Result<(), NodeStartError> {
        if lock(&self.kubelet).is_some() {
            return Ok(());
        }
        let parts = Parts {
            client: self.client.clone(),
            paths: self.paths(),
            runtime: self.runtime.clone(),
            events: self.events.clone(),
            bugs: *lock(&self.bugs),
            seed: lock(&self.seed).fork(),
        };
        let kubelet = Kubelet::start(&self.spec, parts).await?;
        *lock(&self.kubelet) = Some(kubelet);
        Ok(())
    }

    /// Stop the kubelet and start it again; see [`TestbedNode::stop_kubelet`] for `hard`.
    pub async fn restart_kubelet(&self, hard: bool) -> Result<(), NodeStartError> {
        let _changing = self.changing.lock().await;
        self.stop(hard).await;
        self.start_again().await
    }

    /// Reboot the machine. Its processes, its cgroups, and everything on tmpfs (the CDI directory) are gone, and its boot id is new; the
    /// kubelet's checkpoint remains. The agent is not part of the node, so the caller must restart it.
    pub async fn reboot(&self) -> Result<(), NodeStartError> {
        let _changing = self.changing.lock().await;
        self.switch_off().await?;
        self.start_again().await
    }

    /// Do the first half of a reboot. The kubelet stays down until [`TestbedNode::start_kubelet`].
    pub async fn power_off(&self) -> Result<(), NodeStartError> {
        let _changing = self.changing.lock().await;
        self.switch_off().await
    }

    async fn switch_off(&self) -> Result<(), NodeStartError> {
        self.stop(true).await;
        self.runtime.reboot();
        let paths = self.paths();
        for entry in std::fs::read_dir(&paths.cdi_dir)
            .map_err(|source| NodeStartError::io("read", &paths.cdi_dir, source))?
            .flatten()
        {
            let path = entry.path();
            let removed = if path.is_dir() {
                std::fs::remove_dir_all(&path)
            } else {
                std::fs::remove_file(&path)
            };
            match removed {
                // An agent that is starting may just have renamed its temporary file.
                Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
                    return Err(NodeStartError::io("remove", &path, source));
                }
                _ => {}
            }
        }
        write_boot_id(&paths, &mut lock(&self.seed))
    }

    /// Return a function that lists the running containers. It can be called from any thread, even after the node is gone.
    pub fn running(&self) -> impl Fn() -> Vec<ContainerView> + Send + 'static {
        let runtime = self.runtime.clone();
        move || runtime.all().into_iter().filter(ContainerView::is_running).collect()
    }

    /// Add a process of this machine to a running container, by the container's id: it is in the container's cgroup until the container ends.
    ///
    /// # Errors
    /// The container does not run, or a file of the node cannot be written.
    pub fn attach(&self, container: &str, pid: u32) -> std::io::Result<()> {
        self.runtime.attach(container, pid)
    }

    /// Stop the container runtime, or start it again. Containers keep running. While the runtime is down, no container starts.
    pub fn set_runtime_away(&self, away: bool) {
        self.runtime.set_away(away);
    }

    /// Remove the device plugin directory, create it again with the checkpoint and all files except sockets, and start the kubelet in it. A
    /// watch on the old directory is lost.
    pub async fn replace_device_plugin_dir(&self) -> Result<(), NodeStartError> {
        let _changing = self.changing.lock().await;
        self.stop(true).await;
        let directory = self.paths().device_plugins();
        let checkpoint = std::fs::read(self.paths().checkpoint()).ok();
        std::fs::remove_dir_all(&directory).map_err(|source| NodeStartError::io("remove", &directory, source))?;
        std::fs::create_dir_all(&directory).map_err(|source| NodeStartError::io("create", &directory, source))?;
        if let Some(checkpoint) = checkpoint {
            let path = self.paths().checkpoint();
            std::fs::write(&path, checkpoint).map_err(|source| NodeStartError::io("write", &path, source))?;
        }
        self.start_again().await
    }

    /// Cut the kubelet's connections to plugins and nothing else.
    pub fn drop_streams(&self) {
        if let Some(kubelet) = lock(&self.kubelet).as_ref() {
            kubelet.shared.manager.drop_streams();
        }
    }

    /// End everything and wait until it has ended. The node's files remain, because its directory belongs to the caller.
    pub async fn shutdown(self) {
        self.stop_kubelet(true).await;
    }
}

impl Drop for TestbedNode {
    fn drop(&mut self) {
        if let Some(kubelet) = lock(&self.kubelet).take() {
            kubelet.shared.tasks.token().cancel();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn lay_out(spec: &NodeDescription, paths: &NodePaths) -> Result<(), NodeStartError> {
    let dev = paths.sys_root.join("dev");
    for directory in [&paths.kubelet_dir, &paths.cdi_dir, &paths.sys_root.join("etc/cdi"), &dev] {
        std::fs::create_dir_all(directory).map_err(|source| NodeStartError::io("create", directory, source))?;
    }
    if spec.gpu_minors.is_empty() {
        return Ok(());
    }
    let gpus = spec.gpu_minors.iter().map(|minor| format!("nvidia{minor}"));
    let control = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"].map(str::to_owned);
    for name in gpus.chain(control) {
        let path = dev.join(name);
        std::fs::write(&path, "").map_err(|source| NodeStartError::io("write", &path, source))?;
    }
    Ok(())
}

fn write_boot_id(paths: &NodePaths, seed: &mut Dice) -> Result<(), NodeStartError> {
    let path = paths.boot_id();
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory).map_err(|source| NodeStartError::io("create", directory, source))?;
    }
    let digits = seed.hex(32);
    let text = format!(
        "{}-{}-4{}-8{}-{}\n",
        &digits[..8],
        &digits[8..12],
        &digits[13..16],
        &digits[17..20],
        &digits[20..]
    );
    std::fs::write(&path, text).map_err(|source| NodeStartError::io("write", &path, source))
}
