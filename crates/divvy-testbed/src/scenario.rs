//! Scenarios: what a person would do to a cluster, and what must come of it.
//!
//! They are written against [`Cluster`], which a real Kubernetes can be, too: they act through the API server and the
//! `divvy` program, look at what containers report of themselves, and wait for what must come, without internal hooks.

mod machines;
mod play;
mod tour;

use std::future::Future;
use std::io;

use divvy_model::machine::Machines;

pub use machines::BUILT_IN;
pub use play::{Play, Stop};

/// What a container says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// Names one start of the container: another after every restart.
    pub id: String,
    /// Its environment.
    pub env: std::collections::BTreeMap<String, String>,
    /// Its device nodes, in order.
    pub devices: Vec<String>,
    /// Whether it runs now.
    pub running: bool,
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

/// A cluster with Divvy on it, embedded or real.
pub trait Cluster {
    /// Its API.
    fn client(&self) -> kube::Client;
    /// Lets a node join, with the agent on it if it has GPUs. Returns once the node is known to the API server.
    fn join(&mut self, node: &str) -> impl Future<Output = io::Result<()>>;
    /// Whether this node's machine has GPUs.
    fn has_gpus(&self, node: &str) -> bool;
    /// What the newest start of a pod's container reports; `None` before the first.
    fn report(&self, pod_uid: &str, container: &str) -> impl Future<Output = io::Result<Option<Report>>>;
    /// Lets something happen to a GPU.
    fn fault(&mut self, node: &str, gpu: u32, fault: Fault) -> impl Future<Output = io::Result<()>>;
    /// kill -9 of a node's agent.
    fn kill_agent(&mut self, node: &str) -> impl Future<Output = io::Result<()>>;
    /// Starts a node's agent again.
    fn start_agent(&mut self, node: &str) -> impl Future<Output = io::Result<()>>;
    /// Stops and starts a node's kubelet.
    fn restart_kubelet(&mut self, node: &str) -> impl Future<Output = io::Result<()>>;
    /// kill -9 of the extender, and a new one.
    fn restart_extender(&mut self) -> impl Future<Output = io::Result<()>>;
    /// Runs `divvy` with these arguments against the cluster, and gives what it printed to standard output and standard error
    /// and whether its status was 0.
    fn divvy(&self, args: &[&str]) -> impl Future<Output = io::Result<(String, String, bool)>>;
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
