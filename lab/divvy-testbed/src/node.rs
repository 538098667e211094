//! A node of the embedded cluster: an emulated kubelet and container runtime on real paths and Unix sockets.
//!
//! What is true to a real node (Kubernetes 1.36, containerd 2.3; research/reliability.md section 1 and measurements on a
//! real one): the device manager's order of calls, reuse of init containers' ids, checkpoint, rejection texts, random order
//! of ids, the wipe of sockets at a start, retries of PreStartContainer; serial admission; graceful and forced deletion;
//! resolution of CDI names and the precedence of variables; the layout of cgroups.
//!
//! What is simpler than on a real node:
//! - Containers are rows, not processes. `sleep N` ends with 0 after N seconds, `env` at once, `fail` ends with 1, anything else runs until
//!   it is ended; with `--ignore-term` anywhere only SIGKILL ends it. There are no images, probes, hooks, volumes, logs,
//!   exec, init-container restarts by probes, ephemeral containers or static pods.
//! - Topology policy is `none`; there is no CPU, memory or DRA manager, and no eviction or preemption.
//! - A pod that is being deleted before the kubelet first saw it is not admitted. The 2 s minimum of a grace period exists
//!   only for pods whose object is gone ([`Timings::forced_grace`]).
//! - A runtime that is away ([`Node::set_runtime_away`]) starts nothing; containers still end when they are told to.
//! - No Lease and no heartbeats: a node whose kubelet is stopped stays Ready.
//! - See [`checkpoint`], [`runtime`] and the other modules for theirs.

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
pub(crate) mod podresources;
pub mod runtime;
pub(crate) mod seed;
pub(crate) mod status;
pub(crate) mod status_writer;
pub(crate) mod worker;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use kube::Client;
use tokio::sync::broadcast;

pub use self::cgroups::CgroupVersion;
use self::cgroups::Cgroups;
pub use self::devices::{Bugs, Holder};
use self::kubelet::{Kubelet, Parts};
use self::runtime::Runtime;
pub use self::runtime::{ContainerState, ContainerView, MountView};
use self::seed::Seed;

/// Pods that a node takes, whatever they ask for.
pub(crate) const MAX_PODS: u64 = 110;

/// Longest path of a Unix socket, in bytes.
const SOCKET_PATH_LIMIT: usize = 107;

/// Why a node does not start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A path is too long to listen on.
    #[error(
        "the socket path {path} has {length} bytes and a Unix socket's path has at most 107: give the node a shorter directory than {root}"
    )]
    SocketPath {
        /// The socket.
        path: PathBuf,
        /// Its length.
        length: usize,
        /// The node's directory.
        root: PathBuf,
    },
    /// A file or socket could not be made.
    #[error("could not {what} {path}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// On what.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
}

impl From<Error> for std::io::Error {
    fn from(error: Error) -> std::io::Error {
        let kind = match &error {
            Error::SocketPath { .. } => std::io::ErrorKind::InvalidFilename,
            Error::Io { source, .. } => source.kind(),
        };
        std::io::Error::new(kind, error)
    }
}

impl Error {
    pub(crate) fn io(what: &'static str, path: &Path, source: std::io::Error) -> Error {
        Error::Io {
            what,
            path: path.to_owned(),
            source,
        }
    }
}

/// A waiting time that doubles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff {
    /// The first wait.
    pub first: Duration,
    /// The longest.
    pub max: Duration,
}

impl Backoff {
    /// The wait after `failures` earlier ones.
    pub fn delay(&self, failures: u32) -> Duration {
        self.first
            .saturating_mul(1u32.checked_shl(failures).unwrap_or(u32::MAX))
            .min(self.max)
    }
}

/// How long things take. The defaults are a real kubelet's where no test would have to wait for them.
#[derive(Debug, Clone)]
pub struct Timings {
    /// Between looks at the node's status (a real kubelet: 1 s for devices).
    pub status_period: Duration,
    /// From the end of a plugin's stream until its resource is removed.
    pub endpoint_grace: Duration,
    /// After a start that failed: PreStartContainer or the runtime refused (measured on a real kubelet: 0.6 s, then 14 s).
    pub start_retry: Backoff,
    /// After the second and later end of a container (a real kubelet: 10 s to 5 min). The first restart is at once.
    pub restart_backoff: Backoff,
    /// Grace period of a pod that does not say.
    pub default_grace: Duration,
    /// No grace period is longer than this.
    pub max_grace: Option<Duration>,
    /// Grace period of containers whose pod's object is gone, by a forced deletion, whatever the pod says (measured on a kubelet
    /// 1.36.3: 2 s, 17 of 17; those that ignore SIGTERM end 2.2 to 2.9 s after the object went).
    pub forced_grace: Duration,
    /// From the end of the object of a pod that was not being deleted until SIGTERM (measured: up to 1.5 s).
    pub forced_after: Duration,
    /// Grace period of containers whose pod was deleted while no kubelet ran.
    pub orphan_grace: Duration,
    /// Each start of a container takes this long (pulling, the runtime).
    pub container_start: Duration,
    /// Allocate's way to the plugin, once ids are chosen: the window of bug B1 and of all that happens in mid-admission.
    pub allocate: Duration,
    /// For PreStartContainer.
    pub pre_start: Duration,
    /// For the kubelet's connection back to a plugin that registers.
    pub dial: Duration,
    /// Before a failed write or watch is tried again.
    pub api_retry: Duration,
    /// From the kubelet's start until it asks for its pods: who is first after a reboot, pods or plugins. A plugin that waits for the
    /// kubelet's socket is first on a real one.
    pub pods_after: Duration,
}

impl Default for Timings {
    fn default() -> Timings {
        let backoff = Backoff {
            first: Duration::from_millis(300),
            max: Duration::from_secs(2),
        };
        Timings {
            status_period: Duration::from_millis(100),
            endpoint_grace: Duration::from_secs(300),
            start_retry: backoff,
            restart_backoff: backoff,
            default_grace: Duration::from_secs(30),
            max_grace: None,
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

/// In which order the pods of one batch are admitted. They are always admitted one at a time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AdmissionOrder {
    /// By creationTimestamp, which counts whole seconds, then as they came.
    #[default]
    Creation,
    /// At random: what arrives within the window is one batch.
    Shuffled {
        /// Length of the window, from the batch's first pod on.
        window: Duration,
    },
}

/// What a node is.
#[derive(Debug, Clone)]
pub struct NodeSpec {
    /// The node's name.
    pub name: String,
    /// Its InternalIP.
    pub address: String,
    /// CPU cores that pods can ask for.
    pub cpus: u32,
    /// Memory that pods can ask for, in MiB.
    pub memory_mib: u64,
    /// Minor numbers of its GPUs: each is a file `dev/nvidia<minor>`. With none there are no NVIDIA files at all.
    pub gpu_minors: Vec<u32>,
    /// Its directory. Made if absent, left when the node is gone.
    pub root: PathBuf,
    /// Labels besides hostname, os and arch.
    pub labels: BTreeMap<String, String>,
    /// Where its random choices come from.
    pub seed: u64,
    /// How long things take.
    pub timings: Timings,
    /// The cgroup hierarchy that it shows.
    pub cgroup: CgroupVersion,
    /// Order of admission.
    pub admission: AdmissionOrder,
    /// Kubelet bugs to play; none by default.
    pub bugs: Bugs,
}

impl NodeSpec {
    /// A node of 16 cores and 64 GiB without GPUs.
    pub fn new(name: impl Into<String>, root: impl Into<PathBuf>) -> NodeSpec {
        NodeSpec {
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

    /// The node's paths.
    pub fn paths(&self) -> NodePaths {
        NodePaths {
            root: self.root.clone(),
            kubelet_dir: self.root.join("kubelet"),
            cdi_dir: self.root.join("cdi"),
            sys_root: self.root.join("sys"),
        }
    }
}

/// Where a node's files are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodePaths {
    /// All of it.
    pub root: PathBuf,
    /// The agent's `--kubelet-dir`.
    pub kubelet_dir: PathBuf,
    /// The agent's `--cdi-dir`.
    pub cdi_dir: PathBuf,
    /// The agent's `--sys-root`: holds `dev`, `proc` and `sys`.
    pub sys_root: PathBuf,
}

impl NodePaths {
    /// Where plugins' sockets are.
    pub fn device_plugins(&self) -> PathBuf {
        self.kubelet_dir.join("device-plugins")
    }

    /// Where plugins register.
    pub fn kubelet_socket(&self) -> PathBuf {
        self.device_plugins().join("kubelet.sock")
    }

    /// The podresources service.
    pub fn pod_resources_socket(&self) -> PathBuf {
        self.kubelet_dir.join("pod-resources/kubelet.sock")
    }

    /// The device manager's checkpoint.
    pub fn checkpoint(&self) -> PathBuf {
        self.device_plugins().join(checkpoint::FILE)
    }

    /// Root of the cgroup hierarchy.
    pub fn cgroups(&self) -> PathBuf {
        self.sys_root.join("sys/fs/cgroup")
    }

    /// The kernel's boot id.
    pub fn boot_id(&self) -> PathBuf {
        self.sys_root.join("proc/sys/kernel/random/boot_id")
    }
}

/// What happened on a node, as it happens.
#[derive(Debug, Clone)]
pub enum NodeEvent {
    /// A container's process runs.
    ContainerStarted(ContainerView),
    /// A container's process ended.
    ContainerEnded(ContainerView),
    /// A pod was refused for good.
    AdmissionRefused {
        /// UID of the pod.
        pod_uid: String,
        /// Its namespace.
        namespace: String,
        /// Its name.
        pod: String,
        /// `UnexpectedAdmissionError` or `OutOf<resource>`.
        reason: String,
        /// The kubelet's words.
        message: String,
    },
    /// A plugin refused a container's start; it will be tried again.
    PreStartRefused {
        /// UID of the pod.
        pod_uid: String,
        /// Its namespace.
        namespace: String,
        /// Its name.
        pod: String,
        /// The container.
        container: String,
        /// The gRPC error as the kubelet prints it.
        message: String,
    },
}

/// What the device manager knows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceManagerView {
    /// Ids by holder.
    pub holders: BTreeMap<Holder, BTreeSet<String>>,
    /// Capacity and allocatable by resource.
    pub resources: BTreeMap<String, (usize, usize)>,
}

/// A node. Ends with everything that belongs to it when it is dropped; [`Node::shutdown`] also waits for that.
pub struct Node {
    spec: NodeSpec,
    client: Client,
    runtime: Runtime,
    events: broadcast::Sender<NodeEvent>,
    /// One change of the kubelet's state at a time.
    changing: tokio::sync::Mutex<()>,
    kubelet: Mutex<Option<Kubelet>>,
    bugs: Mutex<Bugs>,
    seed: Mutex<Seed>,
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node")
            .field("name", &self.spec.name)
            .field("root", &self.spec.root)
            .finish_non_exhaustive()
    }
}

impl Node {
    /// Lays out the node's files and starts its kubelet.
    pub async fn start(client: Client, spec: NodeSpec) -> Result<Node, Error> {
        let paths = spec.paths();
        for path in [paths.kubelet_socket(), paths.pod_resources_socket()] {
            let length = path.as_os_str().len();
            if length > SOCKET_PATH_LIMIT {
                return Err(Error::SocketPath {
                    path,
                    length,
                    root: spec.root,
                });
            }
        }
        let mut seed = Seed::named(spec.seed, &spec.name);
        lay_out(&spec, &paths)?;
        write_boot_id(&paths, &mut seed)?;
        let scratch = paths.root.join("cgroup.new");
        let cgroups = Cgroups::new(spec.cgroup, paths.cgroups(), scratch)
            .map_err(|source| Error::io("lay out", &paths.cgroups(), source))?;
        let events = broadcast::Sender::new(1024);
        let runtime = Runtime::new(paths, cgroups, seed.fork(), events.clone());
        let node = Node {
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

    /// Its name.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// Where its files are.
    pub fn paths(&self) -> NodePaths {
        self.spec.paths()
    }

    /// Its containers, oldest first; those that ended stay until their pod is gone.
    pub fn containers(&self) -> Vec<ContainerView> {
        self.runtime.all()
    }

    /// What happens from now on. A listener that lags loses the oldest events.
    pub fn events(&self) -> broadcast::Receiver<NodeEvent> {
        self.events.subscribe()
    }

    /// What the device manager knows; nothing while no kubelet runs.
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

    /// Which bugs are played from now on.
    pub fn set_bugs(&self, bugs: Bugs) {
        *lock(&self.bugs) = bugs;
        if let Some(kubelet) = lock(&self.kubelet).as_ref() {
            kubelet.shared.manager.set_bugs(bugs);
        }
    }

    /// Ends the kubelet; containers run on. `hard` as by SIGKILL, else calls to plugins under way are waited for.
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

    /// Starts the kubelet unless it runs: sockets in the device plugin directory are wiped, `kubelet.sock` is made anew.
    pub async fn start_kubelet(&self) -> Result<(), Error> {
        let _changing = self.changing.lock().await;
        self.start_again().await
    }

    async fn start_again(&self) -> Result<(), Error> {
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

    /// Stops and starts the kubelet; `hard` as in [`Node::stop_kubelet`].
    pub async fn restart_kubelet(&self, hard: bool) -> Result<(), Error> {
        let _changing = self.changing.lock().await;
        self.stop(hard).await;
        self.start_again().await
    }

    /// The machine restarts: processes, cgroups and what lay on tmpfs (the CDI directory) are gone, the boot id is another
    /// one; the kubelet's checkpoint is still there. The agent is not part of the node: who runs it restarts it.
    pub async fn reboot(&self) -> Result<(), Error> {
        let _changing = self.changing.lock().await;
        self.switch_off().await?;
        self.start_again().await
    }

    /// The first half of a reboot: the kubelet stays away until [`Node::start_kubelet`].
    pub async fn power_off(&self) -> Result<(), Error> {
        let _changing = self.changing.lock().await;
        self.switch_off().await
    }

    async fn switch_off(&self) -> Result<(), Error> {
        self.stop(true).await;
        self.runtime.reboot();
        let paths = self.paths();
        for entry in std::fs::read_dir(&paths.cdi_dir)
            .map_err(|source| Error::io("read", &paths.cdi_dir, source))?
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
                Err(source) if source.kind() != std::io::ErrorKind::NotFound => return Err(Error::io("remove", &path, source)),
                _ => {}
            }
        }
        write_boot_id(&paths, &mut lock(&self.seed))
    }

    /// Looks at the containers that run, from any thread, also after the node is gone.
    pub fn running(&self) -> impl Fn() -> Vec<ContainerView> + Send + 'static {
        let runtime = self.runtime.clone();
        move || runtime.all().into_iter().filter(ContainerView::is_running).collect()
    }

    /// The container runtime ends, or is there again. Containers run on; while it is away none is started.
    pub fn set_runtime_away(&self, away: bool) {
        self.runtime.set_away(away);
    }

    /// The device plugin directory is removed and made again, checkpoint and all else but sockets kept, and the kubelet
    /// started in it: a watch on the old directory is lost.
    pub async fn replace_device_plugin_dir(&self) -> Result<(), Error> {
        let _changing = self.changing.lock().await;
        self.stop(true).await;
        let directory = self.paths().device_plugins();
        let checkpoint = std::fs::read(self.paths().checkpoint()).ok();
        std::fs::remove_dir_all(&directory).map_err(|source| Error::io("remove", &directory, source))?;
        std::fs::create_dir_all(&directory).map_err(|source| Error::io("create", &directory, source))?;
        if let Some(checkpoint) = checkpoint {
            let path = self.paths().checkpoint();
            std::fs::write(&path, checkpoint).map_err(|source| Error::io("write", &path, source))?;
        }
        self.start_again().await
    }

    /// Cuts the kubelet's connections to plugins, nothing else.
    pub fn drop_streams(&self) {
        if let Some(kubelet) = lock(&self.kubelet).as_ref() {
            kubelet.shared.manager.drop_streams();
        }
    }

    /// Ends everything and waits until it has. The node's files stay; its directory is the caller's.
    pub async fn shutdown(self) {
        self.stop_kubelet(true).await;
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some(kubelet) = lock(&self.kubelet).take() {
            kubelet.shared.tasks.token().cancel();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn lay_out(spec: &NodeSpec, paths: &NodePaths) -> Result<(), Error> {
    let dev = paths.sys_root.join("dev");
    for directory in [&paths.kubelet_dir, &paths.cdi_dir, &paths.sys_root.join("etc/cdi"), &dev] {
        std::fs::create_dir_all(directory).map_err(|source| Error::io("create", directory, source))?;
    }
    if spec.gpu_minors.is_empty() {
        return Ok(());
    }
    let gpus = spec.gpu_minors.iter().map(|minor| format!("nvidia{minor}"));
    let control = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"].map(str::to_owned);
    for name in gpus.chain(control) {
        let path = dev.join(name);
        std::fs::write(&path, "").map_err(|source| Error::io("write", &path, source))?;
    }
    Ok(())
}

fn write_boot_id(paths: &NodePaths, seed: &mut Seed) -> Result<(), Error> {
    let path = paths.boot_id();
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory).map_err(|source| Error::io("create", directory, source))?;
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
    std::fs::write(&path, text).map_err(|source| Error::io("write", &path, source))
}
