//! The facts that checks judge: files, answers of programs, and API objects.

pub mod cluster;
mod engine;
mod machine;
pub mod programs;
mod scheduler;

use std::sync::OnceLock;

use divvy_host::{Root, Tree};

use cluster::ClusterFacts;
use programs::{Docker, ExtenderFacts, Probed, RuntimeTest, SchedulerFile, Socket};

pub use engine::{EngineFacts, EngineKind};
pub(crate) use engine::{NEWEST, for_gpus};
pub use machine::{DRIVER_CONTAINER, KubeletSettings, PciGpu, version_at_least};
pub use scheduler::{CheckedScheduler, Extending};

/// The answer of a source other than the machine's files: a program, a socket, or the API server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Asked<T> {
    /// The answer.
    Answer(T),
    /// The query was sent and failed. The text is the error.
    Failed(String),
    /// The source does not exist, so it was not queried. The text is the reason.
    Absent(String),
    /// The source may exist but could not be queried, because a permission or a program is missing. The text is the reason.
    Blocked(String),
    /// The user did not request the query. The text is the reason.
    Not(String),
}

impl<T> Asked<T> {
    /// Return the answer, if there is one.
    pub fn answer(&self) -> Option<&T> {
        match self {
            Asked::Answer(answer) => Some(answer),
            _ => None,
        }
    }

    /// Return the reason why there is no answer. It is empty if there is an answer.
    pub fn reason(&self) -> &str {
        match self {
            Asked::Answer(_) => "",
            Asked::Failed(reason) | Asked::Absent(reason) | Asked::Blocked(reason) | Asked::Not(reason) => reason,
        }
    }
}

/// The complete input of the checks.
#[derive(Debug)]
pub struct Facts<'t> {
    /// The machine's files.
    pub tree: &'t dyn Tree,
    /// The root directory of the machine.
    pub root: Root<'t>,
    /// Whether the checks of this machine (`--node`) run.
    pub node: bool,
    /// The root directory of the driver's files: `/`, or the root directory of a driver container.
    pub driver_root: String,
    /// The processor architecture, as `uname -m` prints it.
    pub arch: Option<String>,
    /// The GPUs as the driver reports them.
    pub probe: Asked<Probed>,
    /// The kernel log.
    pub kernel_log: Asked<String>,
    /// The output of `containerd config dump`: the configuration that containerd uses.
    pub containerd: Asked<String>,
    /// Docker's version and runtimes.
    pub docker: Asked<Docker>,
    /// The devices that divvy-runtime gives a test container.
    pub runtime_test: Asked<RuntimeTest>,
    /// The sockets of device plugins, of the kubelet, and of its pod-resources service.
    pub sockets: Asked<Vec<Socket>>,
    /// The scheduler extender.
    pub extender: Asked<ExtenderFacts>,
    /// What the rules of `divvy scheduler-config` say about kube-scheduler's configuration.
    pub scheduler_file: Asked<SchedulerFile>,
    /// The objects of the API server.
    pub cluster: Asked<ClusterFacts>,
    /// The PIDs and names of all processes. They are read only when a check first needs them, and only once, because there may be
    /// hundreds.
    process_names: OnceLock<Vec<(u32, String)>>,
    /// The database of rpm, which is empty if there is none. It is read only once.
    rpm_database: OnceLock<Vec<u8>>,
}

impl<'t> Facts<'t> {
    /// Return facts with the machine's files, before any other source is queried. `None` if the root directory does not exist.
    pub fn of(tree: &'t dyn Tree) -> Option<Facts<'t>> {
        let root = Root::open(tree, "/")?;
        let not = |what: &str| format!("{what} was not queried");
        let mut facts = Facts {
            tree,
            root,
            node: true,
            driver_root: "/".to_owned(),
            arch: None,
            probe: Asked::Not(not("the driver")),
            kernel_log: Asked::Not(not("the kernel log")),
            containerd: Asked::Not(not("containerd")),
            docker: Asked::Not(not("Docker")),
            runtime_test: Asked::Not(not("divvy-runtime")),
            sockets: Asked::Not(not("the kubelet")),
            extender: Asked::Not(not("the extender")),
            scheduler_file: Asked::Not(not("kube-scheduler's configuration")),
            cluster: Asked::Not(not("the API server")),
            process_names: OnceLock::new(),
            rpm_database: OnceLock::new(),
        };
        facts.driver_root = facts.usual_driver_root();
        Some(facts)
    }
}
