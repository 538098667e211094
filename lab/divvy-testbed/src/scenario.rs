//! Scenarios: the actions of a person on a cluster, and the results that they must have.
//!
//! The scenarios are written against [`Cluster`], which the embedded cluster and a real Kubernetes (crate `divvy-e2e`) both implement.
//! They act through the API server and the `divvy` program, read the reports that containers write about themselves, and wait for the
//! required results. They use no internal hooks. The scenes of [`suite`] must have the same results on both clusters.

mod churn;
mod devices;
mod history;
mod isolation;
mod machines;
mod play;
pub mod suite;
mod tour;

use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use divvy_model::MemoryUnit;
use divvy_model::machine::Machines;
use serde_json::json;
use tokio::process::Command;

use crate::builders::PodBuilder;
use crate::cuda_program::CudaProgram;
use crate::simulated_driver;

use self::suite::Scene;

pub use churn::Churn;
pub use machines::{BUILT_IN, TestbedMachine};
pub use play::{Play, PlayStop};

/// The state of a container, as the container itself reports it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SelfReport {
    /// An identifier of this start of the container. It changes with every restart.
    pub id: String,
    /// The container's environment variables.
    pub env: std::collections::BTreeMap<String, String>,
    /// The device nodes of GPUs and drivers in the container, sorted.
    pub devices: Vec<String>,
    /// The mount points of driver files, sorted: all mounts below `/usr`, where nothing but the driver's files is mounted, below `/mps`, and below
    /// `/run/divvy`.
    pub mounts: Vec<String>,
    /// Whether the container is running now.
    pub running: bool,
}

/// Return the mount points of a container that belong in a [`SelfReport`], sorted.
pub fn mounts_of_drivers(mount_points: impl Iterator<Item = String>) -> Vec<String> {
    let of_driver = |path: &String| {
        ["/usr/", "/mps/", "/run/divvy/"]
            .iter()
            .any(|prefix| path.starts_with(prefix))
    };
    let mut below: Vec<String> = mount_points.filter(of_driver).collect();
    below.sort();
    below
}

/// Report whether a path in a container is a device node of a GPU or of its driver.
pub fn is_of_a_gpu(path: &str) -> bool {
    ["/dev/nvidia", "/dev/dri/"].iter().any(|prefix| path.starts_with(prefix)) || path == "/dev/kfd"
}

/// A change of a GPU's condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuFault {
    /// The driver reports this XID, and the GPU stops answering.
    Dies {
        /// The XID, for example 79: "GPU has fallen off the bus".
        xid: u32,
    },
    /// The GPU answers again.
    Recovers,
}

impl GpuFault {
    /// Apply the fault to GPU `gpu` of the machine whose simulated NVML library listens on the socket `nvml`.
    pub async fn happen(self, nvml: &Path, gpu: u32) -> io::Result<()> {
        let lost = |lost| json!({"op": "lost", "gpu": gpu, "lost": lost});
        match self {
            GpuFault::Dies { xid } => {
                simulated_driver::ask(nvml, &json!({"op": "xid", "gpu": gpu, "xid": xid})).await?;
                simulated_driver::ask(nvml, &lost(true)).await
            }
            GpuFault::Recovers => simulated_driver::ask(nvml, &lost(false)).await,
        }
    }
}

/// A container that is running on a machine, whether or not the API server knows about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Living {
    /// The name of the node.
    pub node: String,
    /// The UID of the container's pod.
    pub pod_uid: String,
    /// The container's name in the pod.
    pub container: String,
    /// An identifier of this start of the container.
    pub id: String,
    /// The device nodes of GPUs and drivers in the container.
    pub devices: Vec<String>,
    /// The container's environment variables.
    pub env: std::collections::BTreeMap<String, String>,
}

/// A function that inspects the machines. It returns every running container of a test program, but no sandbox containers.
pub type Witness = Box<dyn FnMut() -> io::Result<Vec<Living>> + Send>;

/// A program of a cluster: one of Kubernetes or one of Divvy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClusterProgram<'a> {
    /// kube-apiserver. While it is down, requests through [`Cluster::client`] fail.
    ApiServer,
    /// kube-scheduler.
    Scheduler,
    /// `divvy extender`.
    Extender,
    /// `divvy agent` on this node, and its probe.
    Agent(&'a str),
    /// `nvidia-device-plugin` on this node, after [`Cluster::run_plugin`]. It starts with the configuration that it had.
    Plugin(&'a str),
    /// `mps-control-daemon` on this node, after [`Cluster::run_plugin`].
    MpsControlDaemon(&'a str),
    /// The kubelet of this node. Containers keep running without it.
    Kubelet(&'a str),
    /// containerd on this node. Containers keep running without it.
    Runtime(&'a str),
}

/// What runs in place of `divvy agent` on a node: Divvy's program under the name of NVIDIA's device plugin.
#[derive(Debug, Clone, Copy)]
pub struct PluginSetup<'a> {
    /// The text of NVIDIA's configuration file.
    pub config: &'a str,
    /// Whether `mps-control-daemon` runs as well, with the same configuration.
    pub with_mps: bool,
}

/// How a program is ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// SIGTERM.
    Stopped,
    /// kill -9.
    Killed,
}

/// What the agents offer as a whole. They always share the memory of GPUs and of MIG devices.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum WholeOffer {
    /// Nothing.
    #[default]
    Nothing,
    /// GPUs, and MIG devices through one resource for each profile (`--mig-strategy mixed`).
    Mixed,
    /// GPUs; or MIG devices as GPUs, if all GPUs of a node are divided alike (`--mig-strategy single`).
    Single,
}

impl WholeOffer {
    /// Report whether anything is offered as a whole: the value of `--whole-gpus`.
    pub const fn is_offered(self) -> bool {
        !matches!(self, WholeOffer::Nothing)
    }

    /// Return the value of `--mig-strategy`.
    pub const fn mig_strategy(self) -> &'static str {
        match self {
            WholeOffer::Nothing | WholeOffer::Mixed => "mixed",
            WholeOffer::Single => "single",
        }
    }
}

/// Settings of single nodes, by the name of their file: the keys and values of `divvy agent --config`.
pub type NodeConfigs = BTreeMap<String, serde_json::Map<String, serde_json::Value>>;

/// Write the files of `--node-configs` into a directory, which exists afterwards and contains no other files.
///
/// # Errors
/// Fails with the system's error.
pub fn write_node_configs(directory: &Path, configs: &NodeConfigs) -> io::Result<()> {
    std::fs::create_dir_all(directory)?;
    for (name, settings) in configs {
        let text = toml::to_string(settings).map_err(io::Error::other)?;
        // Replaced at once, as the kubelet does it.
        let next = directory.join(format!("..{name}"));
        std::fs::write(&next, text)?;
        std::fs::rename(&next, directory.join(name))?;
    }
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        if !configs.contains_key(entry.file_name().to_string_lossy().as_ref()) {
            std::fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// A cluster with Divvy installed, embedded or real.
pub trait Cluster {
    /// Return a client for the cluster's API server.
    fn client(&self) -> kube::Client;
    /// Return the name of the node that stands for this machine, or `None` if the cluster has no such node.
    fn node_of(&self, machine: TestbedMachine) -> Option<String>;
    /// Let a node join, with the agent on it if it has GPUs. Return once the API server knows the node; immediately if it already does.
    fn join(&mut self, node: &str) -> impl Future<Output = io::Result<()>>;
    /// Report whether this node's machine has GPUs.
    fn has_gpus(&self, node: &str) -> bool;
    /// Fail with the last words of a node's agent if it has ended and nothing starts it again.
    fn agent_runs(&self, _node: &str) -> io::Result<()> {
        Ok(())
    }
    /// Return the report of the newest start of a pod's container, or `None` before the container's first start.
    fn report(&self, pod_uid: &str, container: &str) -> impl Future<Output = io::Result<Option<SelfReport>>>;
    /// Write a file on a node, as its administrator would, or remove it if `content` is `None`. The file's directory must exist: `/etc/cdi` does.
    fn place(&self, node: &str, path: &str, content: Option<&[u8]>) -> io::Result<()>;
    /// Return the path by which the node's agent finds `/etc/cdi` of the node, or a file in it.
    fn agents_path(&self, node: &str, path: &str) -> String;
    /// Report whether the nodes have cgroups of version 2, as most machines do. Drivers cannot limit those of version 1.
    fn has_cgroups_v2(&self) -> bool;
    /// Return where a node's agent answers `/healthz` and `/metrics`.
    fn agents_address(&self, node: &str) -> impl Future<Output = io::Result<SocketAddr>>;
    /// Return the control socket of a node's simulated NVML library.
    fn nvml(&self, node: &str) -> PathBuf;
    /// Apply a fault to a GPU.
    fn fault(&mut self, node: &str, gpu: u32, fault: GpuFault) -> impl Future<Output = io::Result<()>> {
        let nvml = self.nvml(node);
        async move { fault.happen(&nvml, gpu).await }
    }
    /// Divide each of these GPUs into MIG devices of these profiles (`NVML_GPU_INSTANCE_PROFILE_…`), or switch MIG off. No other GPU of the
    /// node is divided.
    fn divide(&mut self, node: &str, gpus: &[u32], profiles: Option<&[u32]>) -> impl Future<Output = io::Result<()>>;
    /// Run `nvidia-device-plugin` on a node in place of the agent, and return when the kubelet knows its resources; or, with `None`, the agent
    /// again, and return when the kubelet knows its resources. If the node already runs `nvidia-device-plugin`, only the content of its
    /// configuration file changes, and the call returns at once. `None` does nothing where the agent runs.
    fn run_plugin(&mut self, node: &str, plugin: Option<PluginSetup<'_>>) -> impl Future<Output = io::Result<()>>;
    /// Report whether [`run_plugin`](Self::run_plugin) is possible. On a real cluster, only Divvy's image has the program.
    fn has_plugin(&self) -> bool;
    /// Return what the driver's programs for MPS were told on a node, one call a line, without the questions.
    fn mps_calls(&self, node: &str) -> io::Result<Vec<String>>;
    /// Report whether agents, and the programs under NVIDIA's names, run as pods. If so, an agent cannot start before its kubelet, and the kubelet restarts an agent that is killed.
    fn agents_are_pods(&self) -> bool;
    /// End a program, which stays down until [`start`](Self::start) (but see [`agents_are_pods`](Self::agents_are_pods)). Do nothing if
    /// it has already ended.
    fn stop(&mut self, part: ClusterProgram<'_>, end: End) -> impl Future<Output = io::Result<()>>;
    /// Start a program, and return when it has started or answers. Do nothing if it is running.
    fn start(&mut self, part: ClusterProgram<'_>) -> impl Future<Output = io::Result<()>>;
    /// Power a node off: its processes, its cgroups and everything in memory are gone, and its next boot has another boot id. The agent,
    /// the kubelet and the container runtime stay down until they are started.
    fn power_off(&mut self, node: &str) -> impl Future<Output = io::Result<()>>;
    /// Replace every program of Divvy by a new one, as an update of its workloads does: the agents node by node, then the extender.
    /// Return when all are ready.
    fn roll(&mut self) -> impl Future<Output = io::Result<()>>;
    /// Set `--memory-unit` of the extender and of every agent, as an update of the installation does. Return when all are ready.
    fn change_unit(&mut self, unit: MemoryUnit) -> impl Future<Output = io::Result<()>>;
    /// Set `--whole-gpus` and `--mig-strategy` of every agent, as an update of the installation does. No GPU is divided. Return when all
    /// are ready.
    fn offer_whole(&mut self, whole: WholeOffer) -> impl Future<Output = io::Result<()>>;
    /// Let the pods of all agents use GPUs through MPS, or no longer, as an update of the installation does: `mps-control-daemon` runs on each node, and the
    /// agents have `--mps`. Return when all are ready. The driver's programs record what they are told ([`mps_calls`](Self::mps_calls)).
    fn use_mps(&mut self, mps: bool) -> impl Future<Output = io::Result<()>>;
    /// Give the agents these settings of single nodes (`--node-configs`) in place of all earlier ones: an object per name. An empty object stands for
    /// agents without them. Where the agents have such settings already, only the files change, and the call returns at once.
    fn configure_nodes(&mut self, configs: &NodeConfigs) -> impl Future<Output = io::Result<()>>;
    /// Return a [`Witness`] of the nodes that have joined so far.
    fn witness(&self) -> Witness;
    /// Return the names of the files that a node keeps for grants: records and CDI specs.
    fn grants(&self, node: &str) -> io::Result<Vec<String>>;
    /// Return the address at which a client outside the cluster reaches the extender; `None` if the extender is a pod, to which the API server
    /// forwards requests.
    fn extender_url(&self) -> Option<String>;
    /// Return the command `divvy` with these arguments, set up for this cluster. Its standard input is empty, and it is killed when dropped.
    fn divvy(&self, args: &[&str]) -> Command;
}

/// Where a container has what the simulated driver has in the place of a kernel module.
pub const DRIVER_STATE: &str = "/run/divvy-sim";

/// The environment variables by which the simulated driver's libraries find it in a container on this node.
pub fn driver_variables(node: &str) -> [(&'static str, String); 3] {
    [
        ("DIVVY_NVML_SIM", format!("{DRIVER_STATE}/machines.toml")),
        ("DIVVY_NVML_SIM_NODE", node.to_owned()),
        ("DIVVY_NVML_SIM_LEDGER", format!("{DRIVER_STATE}/ledger")),
    ]
}

/// A cluster whose containers can run programs that use a GPU. The embedded cluster needs
/// [`EmbeddedSettings::gpu_programs`](crate::embedded::EmbeddedSettings::gpu_programs) for it.
pub trait RunsGpuPrograms: Cluster {
    /// Install the simulated driver's libraries on a node, or what the node had before. Call this while no pod uses a GPU there.
    ///
    /// # Errors
    /// A file cannot be written.
    fn provide_cuda(&self, node: &str, provide: bool) -> io::Result<()>;
    /// Return the manifest with what a pod on this node needs so that a program can be started in it.
    fn for_programs(&self, pod: PodBuilder, node: &str) -> PodBuilder;
    /// Return the directory, on this machine, of the guard's libraries that agents have by default.
    ///
    /// # Errors
    /// The cluster runs no programs.
    fn guard_libraries(&self) -> io::Result<PathBuf>;
    /// Start a program in a running container, which loads CUDA's driver library by this name.
    ///
    /// # Errors
    /// The container does not run, or the program cannot be started.
    fn start_cuda_program(&self, pod_uid: &str, container: &str, library: &str) -> impl Future<Output = io::Result<CudaProgram>>;
    /// Return how many bytes of a GPU's memory each process has, as the driver says, by PID.
    ///
    /// # Errors
    /// The driver cannot be asked.
    fn held(&self, gpu: &str) -> io::Result<BTreeMap<u32, u64>>;
    /// Return the name of the first machine, and its GPUs' memory in units of 1 GiB.
    fn gpu_machine(&self) -> io::Result<(String, u64)>;
    /// Return how many MiB the driver's numbers may differ from the guard's: what it gives in addition for an allocation or for a context need not be a
    /// whole number of pages.
    fn rounding_mib(&self) -> u64;
    /// Report whether containers have the seccomp profile that their pod asks for.
    fn has_seccomp(&self) -> bool;
}

/// A scenario that `divvy demo` can play.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scenario {
    /// Two pods on one GPU: the first part of the tour.
    Tutorial,
    /// The guard holds programs to their shares: the first part of the scene `programs`.
    Isolation,
    /// A scene of the suite.
    Scene(Scene),
}

impl Scenario {
    /// The scenario that is played unless another one is chosen.
    pub const DEFAULT: Scenario = Scenario::Scene(Scene::Tour);

    /// Return every scenario.
    pub fn all() -> impl Iterator<Item = Scenario> {
        [Scenario::Tutorial, Scenario::Isolation]
            .into_iter()
            .chain(Scene::ALL.map(Scenario::Scene))
    }

    /// Return the scenario's name on the command line and a one-line description.
    pub fn about(self) -> (&'static str, &'static str) {
        match self {
            Scenario::Tutorial => ("tutorial", "two pods share one GPU: 3/16, then 8/16"),
            Scenario::Isolation => (
                "isolation",
                "a program asks for more than its share and is refused; another one avoids the guard, and the agent reports it",
            ),
            Scenario::Scene(scene) => scene.about(),
        }
    }

    /// Return the scenario with this name.
    pub fn named(name: &str) -> Option<Scenario> {
        Self::all().find(|scenario| scenario.about().0 == name)
    }

    /// Play the scenario. The error [`PlayStop`] means that the play could not go on; the play counts the checks that failed.
    pub async fn play<C: RunsGpuPrograms>(self, play: &mut Play<'_, C>, churn: Churn) -> Result<(), PlayStop> {
        match self {
            Scenario::Tutorial => tour::tutorial(play).await,
            Scenario::Isolation => isolation::play(play).await,
            Scenario::Scene(scene) => scene.play(play, churn).await,
        }
    }
}

/// Return the machines that the scenarios are written for.
pub fn machines() -> Machines {
    Machines::parse(BUILT_IN).expect("the built-in description is tested")
}
