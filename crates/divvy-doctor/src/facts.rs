//! What was read.

pub mod cluster;
mod engine;
mod machine;
pub mod programs;
mod scheduler;

use std::sync::OnceLock;

use divvy_host::{Root, Tree};

use cluster::Cluster;
use programs::{Docker, Extender, Probed, RuntimeTest, Socket};

pub(crate) use engine::for_gpus;
pub use engine::{Engine, Kind};
pub use machine::{DRIVER_CONTAINER, Kubelet, PciGpu, Vendor, version_at_least};
pub use scheduler::{Extending, Scheduler};

/// What was asked of somebody else than the machine's files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Asked<T> {
    /// The answer.
    Answer(T),
    /// It was asked, and this went wrong.
    Failed(String),
    /// It is not there, and so could not be asked: the reason.
    Absent(String),
    /// It may well be there, and could not be asked, for want of a right or of a program: the reason.
    Blocked(String),
    /// Nobody wanted to know: the reason.
    Not(String),
}

impl<T> Asked<T> {
    /// The answer, if there is one.
    pub fn answer(&self) -> Option<&T> {
        match self {
            Asked::Answer(answer) => Some(answer),
            _ => None,
        }
    }

    /// Why there is none.
    pub fn reason(&self) -> &str {
        match self {
            Asked::Answer(_) => "",
            Asked::Failed(reason) | Asked::Absent(reason) | Asked::Blocked(reason) | Asked::Not(reason) => reason,
        }
    }
}

/// All that checks look at.
#[derive(Debug)]
pub struct Facts<'t> {
    /// The machine's files.
    pub tree: &'t dyn Tree,
    /// Its root.
    pub root: Root<'t>,
    /// Whether this machine is to be looked at.
    pub node: bool,
    /// Where the driver's files are.
    pub driver_root: String,
    /// The processor, as `uname -m` says.
    pub arch: Option<String>,
    /// What the driver says of its GPUs.
    pub probe: Asked<Probed>,
    /// What the kernel logged.
    pub kernel_log: Asked<String>,
    /// containerd's configuration, as it reads it (`containerd config dump`).
    pub containerd: Asked<String>,
    /// What Docker says of itself.
    pub docker: Asked<Docker>,
    /// What a container that asks for a GPU would be given.
    pub runtime_test: Asked<RuntimeTest>,
    /// The sockets of device plugins, of the kubelet, and its pod-resources.
    pub sockets: Asked<Vec<Socket>>,
    /// The scheduler extender.
    pub extender: Asked<Extender>,
    /// The API server's objects.
    pub cluster: Asked<Cluster>,
    /// All processes, by number and name, once somebody has asked for one: there are hundreds.
    process_names: OnceLock<Vec<(u32, String)>>,
}

impl<'t> Facts<'t> {
    /// Of a machine's files, before anybody else was asked. None if there is no such folder.
    pub fn of(tree: &'t dyn Tree) -> Option<Facts<'t>> {
        let root = Root::open(tree, "/")?;
        let not = || "it was not asked".to_owned();
        let mut facts = Facts {
            tree,
            root,
            node: true,
            driver_root: "/".to_owned(),
            arch: None,
            probe: Asked::Not(not()),
            kernel_log: Asked::Not(not()),
            containerd: Asked::Not(not()),
            docker: Asked::Not(not()),
            runtime_test: Asked::Not(not()),
            sockets: Asked::Not(not()),
            extender: Asked::Not(not()),
            cluster: Asked::Not(not()),
            process_names: OnceLock::new(),
        };
        facts.driver_root = facts.usual_driver_root();
        Some(facts)
    }
}
