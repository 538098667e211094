//! Scenarios: what a person would do to a cluster, and what must come of it.
//!
//! They are written against [`Cluster`], which a real Kubernetes is, too (crate `divvy-e2e`): they act through the API server and the
//! `divvy` program, look at what containers report of themselves, and wait for what must come, without internal hooks. [`suite`] is what
//! must come out alike on both; the tour is for people.

mod churn;
mod machines;
mod play;
pub mod suite;
mod tour;

use std::future::Future;
use std::io;
use std::path::Path;

use divvy_model::MemoryUnit;
use divvy_model::machine::Machines;
use serde_json::json;
use tokio::process::Command;

use crate::driver;

pub use churn::Churn;
pub use machines::{BUILT_IN, Machine};
pub use play::{Play, Stop};

/// What a container says of itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Names one start of the container: another after every restart.
    pub id: String,
    /// Its environment.
    pub env: std::collections::BTreeMap<String, String>,
    /// Its device nodes of GPUs and drivers, in order.
    pub devices: Vec<String>,
    /// Where files of a driver are mounted, in order: all mounts below `/usr`, where nobody else mounts any.
    pub mounts: Vec<String>,
    /// Whether it runs now.
    pub running: bool,
}

/// What of a container's mount points is told in a [`Report`].
pub fn mounts_of_drivers(mount_points: impl Iterator<Item = String>) -> Vec<String> {
    let mut below: Vec<String> = mount_points.filter(|path| path.starts_with("/usr/")).collect();
    below.sort();
    below
}

/// What happens to a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The driver reports this XID, and the GPU does not answer any more.
    Dies {
        /// 79: "GPU has fallen off the bus".
        xid: u32,
    },
    /// It answers again.
    Recovers,
}

impl Fault {
    /// Lets it happen to a GPU of the machine whose simulated NVML library listens there.
    pub async fn happen(self, nvml: &Path, gpu: u32) -> io::Result<()> {
        let lost = |lost| json!({"op": "lost", "gpu": gpu, "lost": lost});
        match self {
            Fault::Dies { xid } => {
                driver::ask(nvml, &json!({"op": "xid", "gpu": gpu, "xid": xid})).await?;
                driver::ask(nvml, &lost(true)).await
            }
            Fault::Recovers => driver::ask(nvml, &lost(false)).await,
        }
    }
}

/// A container that lives on a machine, whatever the API server says of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Living {
    /// The node.
    pub node: String,
    /// UID of its pod.
    pub pod_uid: String,
    /// Its name in the pod.
    pub container: String,
    /// Names one start of it.
    pub id: String,
    /// Its device nodes of GPUs and drivers.
    pub devices: Vec<String>,
    /// Its environment.
    pub env: std::collections::BTreeMap<String, String>,
}

/// Looks at the machines: every container of a test program that lives now. Sandboxes are left out.
pub type Witness = Box<dyn FnMut() -> io::Result<Vec<Living>> + Send>;

/// A program of a cluster, Kubernetes' own or Divvy's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part<'a> {
    /// kube-apiserver. While it is away [`Cluster::client`] fails.
    ApiServer,
    /// kube-scheduler.
    Scheduler,
    /// `divvy extender`.
    Extender,
    /// `divvy agent` of this node, and its probe.
    Agent(&'a str),
    /// The kubelet of this node. Containers run on.
    Kubelet(&'a str),
    /// containerd of this node. Containers run on.
    Runtime(&'a str),
}

/// How a program ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// SIGTERM.
    Stopped,
    /// kill -9.
    Killed,
}

/// A cluster with Divvy on it, embedded or real.
pub trait Cluster {
    /// Its API.
    fn client(&self) -> kube::Client;
    /// The node that is this machine; none if the cluster has no such node.
    fn node_of(&self, machine: Machine) -> Option<String>;
    /// Lets a node join, with the agent on it if it has GPUs. Returns once the node is known to the API server; at once when it is.
    fn join(&mut self, node: &str) -> impl Future<Output = io::Result<()>>;
    /// Whether this node's machine has GPUs.
    fn has_gpus(&self, node: &str) -> bool;
    /// What the newest start of a pod's container reports; `None` before the first.
    fn report(&self, pod_uid: &str, container: &str) -> impl Future<Output = io::Result<Option<Report>>>;
    /// Writes a file of a node, as its administrator does, or removes it. Its folder is there: `/etc/cdi`.
    fn place(&self, node: &str, path: &str, text: Option<&str>) -> io::Result<()>;
    /// Lets something happen to a GPU.
    fn fault(&mut self, node: &str, gpu: u32, fault: Fault) -> impl Future<Output = io::Result<()>>;
    /// Whether agents are pods: then none is there before its kubelet, and one that is killed is started again by it.
    fn agents_are_pods(&self) -> bool;
    /// Ends a program, which stays away until [`start`](Self::start) (but see [`agents_are_pods`](Self::agents_are_pods)). One that has ended
    /// already is left so.
    fn stop(&mut self, part: Part<'_>, end: End) -> impl Future<Output = io::Result<()>>;
    /// Starts a program again; returns when it has begun, or answers. One that runs is left alone.
    fn start(&mut self, part: Part<'_>) -> impl Future<Output = io::Result<()>>;
    /// Switches a node off: processes, cgroups and all that lies in memory are gone, the boot id is another one. Agent, kubelet and runtime
    /// stay away until they are started.
    fn power_off(&mut self, node: &str) -> impl Future<Output = io::Result<()>>;
    /// Replaces every program of Divvy by a new one, as an update of its workloads does: one node's agent after another, then the extender.
    /// Returns when all are ready.
    fn roll(&mut self) -> impl Future<Output = io::Result<()>>;
    /// Gives the extender and every agent this `--memory-unit`, as an update of the installation does. Returns when all are ready.
    fn change_unit(&mut self, unit: MemoryUnit) -> impl Future<Output = io::Result<()>>;
    /// Looks at the nodes that have joined by now.
    fn witness(&self) -> Witness;
    /// Names of the files that a node keeps of grants: records and CDI specs.
    fn grants(&self, node: &str) -> io::Result<Vec<String>>;
    /// Where the extender is asked by whoever looks from outside of the cluster; none where it is a pod, which the API server passes questions on to.
    fn extender_url(&self) -> Option<String>;
    /// `divvy` with these arguments against the cluster, to be run: standard input is empty, and it does not outlive who waits for it.
    fn divvy(&self, args: &[&str]) -> Command;
}

/// A play.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scenario {
    /// Two pods on one card.
    Tutorial,
    /// The tutorial, then a day on a small cluster.
    Tour,
}

impl Scenario {
    /// Every scenario with its name and a line about it.
    pub const ALL: [(Scenario, &'static str, &'static str); 2] = [
        (Scenario::Tutorial, "tutorial", "two pods share one card: 3/16, then 8/16"),
        (
            Scenario::Tour,
            "tour",
            "the tutorial, then mixed GPUs, a pod that waits, a GPU that dies, restarts",
        ),
    ];

    /// The scenario of this name.
    pub fn named(name: &str) -> Option<Scenario> {
        Self::ALL
            .iter()
            .find(|(_, known, _)| *known == name)
            .map(|(scenario, ..)| *scenario)
    }

    /// Plays it. An error is [`Stop`]: the play could not go on; checks that failed are counted in the play.
    pub async fn play<C: Cluster>(self, play: &mut Play<'_, C>) -> Result<(), Stop> {
        tour::tutorial(play).await?;
        match self {
            Scenario::Tutorial => Ok(()),
            Scenario::Tour => tour::day(play).await,
        }
    }
}

/// The machines that the scenarios are written for.
pub fn machines() -> Machines {
    Machines::parse(BUILT_IN).expect("the built-in description is tested")
}
