//! What must come out alike on the embedded cluster and on a real one: the tutorial and its accidents.
//!
//! Each scene begins on a cluster without pods, and leaves it so. What is asserted is what the API server says, what `divvy` prints, and what
//! containers report of themselves.

mod doctor;
mod ends;
mod libraries;
mod outages;
mod placement;
mod pods;
mod restarts;
mod units;

pub(super) use pods::is_gpu;

use super::churn::{self, Churn};
use super::play::Seen;
use super::{Cluster, Machine, Play, Stop, tour};
use crate::builders::pod;

/// One scene.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scene {
    /// The tutorial, and a day on a small cluster.
    Tour,
    /// Pods that do not fit.
    TooLarge,
    /// Containers, init containers, sidecars.
    SeveralContainers,
    /// The driver's files.
    Libraries,
    /// Replicas.
    Deployment,
    /// `spec.nodeName` by a user.
    PastTheScheduler,
    /// Forty at once.
    Many,
    /// Which node and GPU.
    Packed,
    /// A pod does not take any GPU.
    Wanted,
    /// A pod's memory on two GPUs.
    Several,
    /// A pod of higher priority.
    Preempted,
    /// SIGTERM ignored.
    Stubborn,
    /// Deleted with a grace period of zero.
    Forced,
    /// The same, with a successor.
    ForcedWhileOneWaits,
    /// The same, unseen by the kubelet.
    ForcedWithoutKubelet,
    /// The agent ends.
    AgentRestarts,
    /// The kubelet ends.
    KubeletRestarts,
    /// containerd ends.
    RuntimeRestarts,
    /// The extender ends.
    ExtenderDies,
    /// kube-scheduler ends.
    SchedulerRestarts,
    /// No API server for a while.
    ApiServerAway,
    /// All that lives in memory is gone.
    NodeReboots,
    /// Cordoned, and its pods evicted.
    Drained,
    /// A new version of Divvy.
    RollingUpdate,
    /// Another `--memory-unit`.
    UnitChanges,
    /// All of it at random.
    Churn,
    /// How long a pod takes.
    Speed,
    /// What `divvy doctor` finds.
    Doctor,
}

impl Scene {
    /// All of them, in the order in which they are played.
    pub const ALL: [Scene; 28] = [
        Scene::Tour,
        Scene::TooLarge,
        Scene::SeveralContainers,
        Scene::Libraries,
        Scene::Deployment,
        Scene::PastTheScheduler,
        Scene::Many,
        Scene::Packed,
        Scene::Wanted,
        Scene::Several,
        Scene::Preempted,
        Scene::Stubborn,
        Scene::Forced,
        Scene::ForcedWhileOneWaits,
        Scene::ForcedWithoutKubelet,
        Scene::AgentRestarts,
        Scene::KubeletRestarts,
        Scene::RuntimeRestarts,
        Scene::ExtenderDies,
        Scene::SchedulerRestarts,
        Scene::ApiServerAway,
        Scene::NodeReboots,
        Scene::Drained,
        Scene::RollingUpdate,
        Scene::UnitChanges,
        Scene::Churn,
        Scene::Speed,
        Scene::Doctor,
    ];

    /// Its name on a command line, and a line about it.
    pub fn about(self) -> (&'static str, &'static str) {
        match self {
            Scene::Tour => (
                "tour",
                "two pods on one card (3/16, 8/16); mixed GPUs; a GPU that dies and comes back; restarts",
            ),
            Scene::TooLarge => (
                "too-large",
                "a pod asks for more than any GPU has, another for more than is free",
            ),
            Scene::SeveralContainers => (
                "several-containers",
                "containers, an init container and a sidecar of one pod share its GPU",
            ),
            Scene::Libraries => (
                "libraries",
                "the driver's libraries are mounted as NVIDIA's CDI spec says; the driver is updated",
            ),
            Scene::Deployment => ("deployment", "a Deployment is scaled up past what fits, and down"),
            Scene::PastTheScheduler => (
                "past-the-scheduler",
                "a pod names its node itself, and is not started without an allocation",
            ),
            Scene::Many => ("many", "40 pods at once"),
            Scene::Packed => (
                "packed",
                "small pods share one GPU though kube-scheduler alone would spread them",
            ),
            Scene::Wanted => ("wanted", "pods say which product they take, how large, and which they prefer"),
            Scene::Several => (
                "several",
                "a pod's memory lies on two GPUs, those with NVLinks to each other, and it sees exactly both",
            ),
            Scene::Preempted => (
                "preempted",
                "a pod of high priority evicts those that make room on one GPU; `why` when sums say that there is room",
            ),
            Scene::Stubborn => ("stubborn", "a container ignores SIGTERM; the newcomer waits for its end"),
            Scene::Forced => ("forced", "a pod is deleted by force; its container goes on for a while"),
            Scene::ForcedWhileOneWaits => ("forced-while-one-waits", "the same while another pod waits for the memory"),
            Scene::ForcedWithoutKubelet => ("forced-without-kubelet", "the same while the node's kubelet is away"),
            Scene::AgentRestarts => ("agent-restarts", "the agent is stopped, and killed; pods run on"),
            Scene::KubeletRestarts => ("kubelet-restarts", "the kubelet is restarted, and killed; pods run on"),
            Scene::RuntimeRestarts => ("runtime-restarts", "containerd is restarted, and killed; pods run on"),
            Scene::ExtenderDies => (
                "extender-dies",
                "the extender is killed; pods wait, and nothing is bound past it",
            ),
            Scene::SchedulerRestarts => ("scheduler-restarts", "kube-scheduler is killed and started again"),
            Scene::ApiServerAway => ("api-server-away", "the API server is away for 30 s; pods run on, and restart"),
            Scene::NodeReboots => (
                "node-reboots",
                "a node reboots, its kubelet back before the agent, and after it",
            ),
            Scene::Drained => ("drained", "a node is drained; its pods move, and come back"),
            Scene::RollingUpdate => ("rolling-update", "every program of Divvy is replaced while pods come and go"),
            Scene::UnitChanges => (
                "unit-changes",
                "the memory unit is made smaller and larger again while pods run; nothing is said to be wrong with them",
            ),
            Scene::Speed => (
                "speed",
                "how long a pod takes from its creation until it runs, with a GPU and without",
            ),
            Scene::Doctor => (
                "doctor",
                "divvy doctor --cluster reports nothing on a healthy cluster, and the right check after a fault",
            ),
            Scene::Churn => (
                "churn",
                "pods come and go while agent, extender, kubelet and containerd are killed",
            ),
        }
    }

    /// The scene of this name.
    pub fn named(name: &str) -> Option<Scene> {
        Self::ALL.into_iter().find(|scene| scene.about().0 == name)
    }

    /// The machines that it needs.
    pub fn needs(self) -> &'static [Machine] {
        match self {
            Scene::Tour | Scene::TooLarge | Scene::Many | Scene::Stubborn | Scene::Drained => &[Machine::Laptop, Machine::Mixed],
            Scene::Packed | Scene::Wanted => &[Machine::Laptop, Machine::Mixed],
            Scene::Libraries | Scene::Preempted | Scene::Several => &[Machine::Mixed],
            _ => &[Machine::Laptop],
        }
    }

    /// Plays it. An error is [`Stop`]: the play could not go on; checks that failed are counted in the play. The scene leaves no pod behind.
    pub async fn play<C: Cluster>(self, play: &mut Play<'_, C>, churn: Churn) -> Result<(), Stop> {
        match self {
            Scene::Tour => {
                tour::tutorial(play).await?;
                tour::day(play).await
            }
            Scene::TooLarge => pods::too_large(play).await,
            Scene::SeveralContainers => pods::several_containers(play).await,
            Scene::Libraries => libraries::play(play).await,
            Scene::Deployment => pods::deployment(play).await,
            Scene::PastTheScheduler => pods::past_the_scheduler(play).await,
            Scene::Many => pods::many(play).await,
            Scene::Packed => placement::packed(play).await,
            Scene::Wanted => placement::wanted(play).await,
            Scene::Several => placement::several(play).await,
            Scene::Preempted => placement::preempted(play).await,
            Scene::Stubborn => ends::stubborn(play).await,
            Scene::Forced => ends::forced(play).await,
            Scene::ForcedWhileOneWaits => ends::forced_while_one_waits(play).await,
            Scene::ForcedWithoutKubelet => ends::forced_without_kubelet(play).await,
            Scene::AgentRestarts => restarts::agent(play).await,
            Scene::KubeletRestarts => restarts::kubelet(play).await,
            Scene::RuntimeRestarts => restarts::runtime(play).await,
            Scene::ExtenderDies => restarts::extender(play).await,
            Scene::SchedulerRestarts => restarts::scheduler(play).await,
            Scene::ApiServerAway => outages::api_server_away(play).await,
            Scene::NodeReboots => outages::node_reboots(play).await,
            Scene::Drained => outages::drained(play).await,
            Scene::RollingUpdate => outages::rolling_update(play).await,
            Scene::UnitChanges => units::play(play).await,
            Scene::Churn => churn::play(play, churn).await,
            Scene::Speed => pods::speed(play).await,
            Scene::Doctor => doctor::play(play).await,
        }?;
        play.clear().await
    }
}

/// What most scenes begin with: a pod of 3 GiB runs on the laptop's node. Gives the node, and what runs there now.
async fn one_runs<C: Cluster>(play: &mut Play<'_, C>, name: &str) -> Result<(String, Vec<Seen>), Stop> {
    let node = play.ready(Machine::Laptop).await?;
    play.create(&pod(name).gpu_mem(3).select(&node), "asks for 3 GiB").await?;
    play.started("default", name).await?;
    let before = play.reports().await?;
    Ok((node, before))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_scene_is_found_by_its_name() {
        for scene in Scene::ALL {
            assert_eq!(Scene::named(scene.about().0), Some(scene));
        }
    }
}
