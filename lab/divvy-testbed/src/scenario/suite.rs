//! The scenes that must have the same results on the embedded cluster and on a real one: the tutorial, and everything that can go
//! wrong after it.
//!
//! Each scene begins on a cluster without pods. The checks use what the API server reports, what `divvy`
//! prints, and what containers report about themselves.

mod attacks;
mod doctor;
mod ends;
mod guard;
mod libraries;
mod limits;
mod mig;
mod mig_strategies;
mod migration;
mod mps;
mod node_configs;
mod outages;
mod placement;
mod pods;
mod programs;
mod restarts;
mod time_slicing;
mod units;
mod vendor_shares;
mod vendors;
mod whole;

use super::churn::{self, Churn};
use super::play::Seen;
use super::{Cluster, Machine, Play, RunsGpuPrograms, Stop, tour};
use crate::builders::pod;

/// A scene of the suite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scene {
    /// The tutorial, then a day on a small cluster.
    Tour,
    /// Pods that do not fit.
    TooLarge,
    /// Containers, an init container, and a sidecar in one pod.
    SeveralContainers,
    /// The driver's libraries in containers.
    Libraries,
    /// The replicas of a Deployment.
    Deployment,
    /// A pod whose manifest sets `spec.nodeName`, so that no scheduler sees it.
    PastTheScheduler,
    /// Forty pods created at once.
    Many,
    /// The choice of node and GPU for small pods.
    Packed,
    /// Pods with rules about the GPU's product and memory.
    Wanted,
    /// A pod whose memory is on two GPUs.
    Several,
    /// A pod of higher priority that evicts others.
    Preempted,
    /// A deleted container that ignores SIGTERM.
    Stubborn,
    /// A pod deleted with a grace period of zero.
    Forced,
    /// [`Forced`](Self::Forced) while another pod waits for the memory.
    ForcedWhileOneWaits,
    /// [`Forced`](Self::Forced) while the kubelet is down.
    ForcedWithoutKubelet,
    /// The agent is stopped, then killed.
    AgentRestarts,
    /// The kubelet is stopped, then killed.
    KubeletRestarts,
    /// containerd is stopped, then killed.
    RuntimeRestarts,
    /// The extender is killed.
    ExtenderDies,
    /// kube-scheduler is killed.
    SchedulerRestarts,
    /// The API server is down for a while.
    ApiServerAway,
    /// A node reboots, so everything in its memory is gone.
    NodeReboots,
    /// A node is cordoned and its pods are evicted.
    Drained,
    /// A rolling update to a new version of Divvy.
    RollingUpdate,
    /// A change of `--memory-unit`.
    UnitChanges,
    /// Random pods and random kills.
    Churn,
    /// The time that a pod takes to start.
    Speed,
    /// Shares of NVIDIA's GPUs and whole GPUs of AMD.
    Vendors,
    /// Shares of AMD's GPUs, and whole ones on the same node.
    AmdShares,
    /// The same of Intel's GPUs.
    IntelShares,
    /// Shares of MIG devices.
    Mig,
    /// Whole GPUs of NVIDIA and shares on one node.
    Whole,
    /// [`Churn`](Self::Churn) of whole GPUs and shares on one node.
    WholeChurn,
    /// The findings of `divvy doctor`.
    Doctor,
    /// The replicas of GPUs that `nvidia-device-plugin` offers.
    TimeSlicing,
    /// MIG devices that `nvidia-device-plugin` offers.
    MigStrategies,
    /// GPUs that `nvidia-device-plugin` shares through MPS.
    Mps,
    /// Two nodes move from `nvidia-device-plugin` to the agent, and one back.
    Migration,
    /// Settings of single nodes, which a node label chooses.
    NodeConfigs,
    /// The driver limits the memory of pods.
    Limits,
    /// The guard takes the place of CUDA's driver library.
    Guard,
    /// Programs in containers are held to their shares by the guard.
    Programs,
    /// Hostile programs in containers attack the guard and the agent.
    Attacks,
}

impl Scene {
    /// Every scene, in the order in which the suite plays them.
    pub const ALL: [Scene; 43] = [
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
        Scene::Vendors,
        Scene::Mig,
        Scene::Doctor,
        // The last ones: the kubelet lists a resource for minutes after the agents no longer offer it, and doctor reports that.
        Scene::AmdShares,
        Scene::IntelShares,
        Scene::Whole,
        Scene::WholeChurn,
        Scene::TimeSlicing,
        Scene::MigStrategies,
        Scene::Mps,
        Scene::Migration,
        Scene::NodeConfigs,
        Scene::Limits,
        Scene::Guard,
        Scene::Programs,
        Scene::Attacks,
    ];

    /// Return the scene's name on the command line and a one-line description.
    pub fn about(self) -> (&'static str, &'static str) {
        match self {
            Scene::Tour => (
                "tour",
                "two pods on one GPU (3/16, 8/16); mixed GPUs; a GPU that fails and recovers; restarts",
            ),
            Scene::TooLarge => (
                "too-large",
                "a pod asks for more memory than any GPU has, another for more than is free",
            ),
            Scene::SeveralContainers => (
                "several-containers",
                "containers, an init container and a sidecar of one pod share its GPU",
            ),
            Scene::Libraries => (
                "libraries",
                "the driver's libraries are mounted as NVIDIA's CDI spec says; the driver is updated",
            ),
            Scene::Deployment => ("deployment", "a Deployment is scaled up beyond what fits, then down"),
            Scene::PastTheScheduler => (
                "past-the-scheduler",
                "a pod sets spec.nodeName itself and is not started without an allocation",
            ),
            Scene::Many => ("many", "40 pods at once"),
            Scene::Packed => (
                "packed",
                "small pods share one GPU, although kube-scheduler on its own would spread them",
            ),
            Scene::Wanted => ("wanted", "pods choose their GPU by product, memory size, and preference"),
            Scene::Several => (
                "several",
                "a pod's memory is on two GPUs connected by NVLink, and the pod sees exactly these two",
            ),
            Scene::Preempted => (
                "preempted",
                "a pod of high priority evicts pods to make room on one GPU; `why` explains a pod that fits only by the node's total",
            ),
            Scene::Stubborn => ("stubborn", "a container ignores SIGTERM; the next pod waits until it ends"),
            Scene::Forced => ("forced", "a pod is deleted by force; its container runs on for a while"),
            Scene::ForcedWhileOneWaits => (
                "forced-while-one-waits",
                "a pod is deleted by force while another pod waits for its memory",
            ),
            Scene::ForcedWithoutKubelet => (
                "forced-without-kubelet",
                "a pod is deleted by force while the node's kubelet is down",
            ),
            Scene::AgentRestarts => ("agent-restarts", "the agent is stopped, then killed; pods keep running"),
            Scene::KubeletRestarts => ("kubelet-restarts", "the kubelet is restarted, then killed; pods keep running"),
            Scene::RuntimeRestarts => ("runtime-restarts", "containerd is restarted, then killed; pods keep running"),
            Scene::ExtenderDies => (
                "extender-dies",
                "the extender is killed; pods wait, and no pod is bound without it",
            ),
            Scene::SchedulerRestarts => ("scheduler-restarts", "kube-scheduler is killed and started again"),
            Scene::ApiServerAway => (
                "api-server-away",
                "the API server is down for 30 s; pods keep running, and new pods start afterwards",
            ),
            Scene::NodeReboots => (
                "node-reboots",
                "a node reboots; its kubelet starts before the agent, then after it",
            ),
            Scene::Drained => (
                "drained",
                "a node is drained; its pods move to another node, and the node is used again",
            ),
            Scene::RollingUpdate => ("rolling-update", "every program of Divvy is replaced while pods come and go"),
            Scene::UnitChanges => (
                "unit-changes",
                "the memory unit is made smaller, then larger, while pods run; no check and no event reports a problem with them",
            ),
            Scene::Speed => (
                "speed",
                "the time from a pod's creation until it runs, with and without a GPU",
            ),
            Scene::Mig => (
                "mig",
                "a GPU is divided by MIG, its parts are shared, and MIG is switched off",
            ),
            Scene::Vendors => (
                "vendors",
                "shares of an NVIDIA GPU and whole AMD GPUs in one cluster; an AMD GPU fails and recovers",
            ),
            Scene::AmdShares => (
                "amd-shares",
                "shares of AMD GPUs and whole ones on one node, beside shares of an NVIDIA GPU; each pod gets GPUs of its vendor",
            ),
            Scene::IntelShares => (
                "intel-shares",
                "the same with Intel GPUs, on a node that has AMD GPUs as well",
            ),
            Scene::Whole => (
                "whole",
                "whole NVIDIA GPUs and shares on one node: each waits for the other; a pod without an allocation",
            ),
            Scene::WholeChurn => (
                "whole-churn",
                "pods with shares and with whole GPUs are created and deleted at random on one node while programs are killed",
            ),
            Scene::Doctor => (
                "doctor",
                "divvy doctor --cluster finds nothing on a healthy cluster, and finds the right problem after a fault",
            ),
            Scene::TimeSlicing => (
                "time-slicing",
                "nvidia-device-plugin offers replicas of GPUs; a GPU fails, the configuration changes, and the plugin is killed while pods run",
            ),
            Scene::MigStrategies => (
                "mig-strategies",
                "nvidia-device-plugin offers MIG devices; the strategy and the MIG devices change while it runs, and it is killed",
            ),
            Scene::Mps => (
                "mps",
                "nvidia-device-plugin shares a GPU through MPS; its limits are set before the first pod; mps-control-daemon is killed",
            ),
            Scene::Migration => (
                "migration",
                "two nodes move from nvidia-device-plugin to the agent with --whole-gpus, and one back, while pods run",
            ),
            Scene::NodeConfigs => (
                "node-configs",
                "a label chooses the settings of one node's agent; the label, the settings, and a mistake in them while pods run",
            ),
            Scene::Limits => (
                "limits",
                "the driver holds pods to their shares; pods with and without divvy.dev/isolation; the driver refuses",
            ),
            Scene::Guard => (
                "guard",
                "containers get the guard in the place of CUDA's driver library; shares of the compute time; another version of the guard; the agent is killed",
            ),
            Scene::Programs => (
                "programs",
                "the guard holds programs to their shares while the agent is killed and the guard replaced; one avoids it and is killed, another is evicted",
            ),
            Scene::Attacks => (
                "attacks",
                "hostile pods with leases, locks, large writes, and forged numbers on their shares' files, each next to an honest pod; a pod that says that it tests a GPU",
            ),
            Scene::Churn => (
                "churn",
                "pods come and go while agent, extender, kubelet and containerd are killed",
            ),
        }
    }

    /// Return the scene with this name.
    pub fn named(name: &str) -> Option<Scene> {
        Self::ALL.into_iter().find(|scene| scene.about().0 == name)
    }

    /// Return the machines that the scene needs.
    pub fn needs(self) -> &'static [Machine] {
        match self {
            Scene::Tour | Scene::TooLarge | Scene::Many | Scene::Stubborn | Scene::Drained => &[Machine::Laptop, Machine::Mixed],
            Scene::Packed | Scene::Wanted => &[Machine::Laptop, Machine::Mixed],
            Scene::Libraries | Scene::Preempted | Scene::Several | Scene::TimeSlicing | Scene::MigStrategies => &[Machine::Mixed],
            Scene::Migration | Scene::NodeConfigs | Scene::Attacks => &[Machine::Laptop, Machine::Mixed],
            _ => &[Machine::Laptop],
        }
    }

    /// Report whether programs in containers use the simulated driver.
    pub fn runs_programs(self) -> bool {
        matches!(self, Scene::Programs | Scene::Attacks)
    }

    /// Report whether a node of the scene runs `nvidia-device-plugin`.
    pub fn runs_plugin(self) -> bool {
        matches!(
            self,
            Scene::TimeSlicing | Scene::MigStrategies | Scene::Mps | Scene::Migration
        )
    }

    /// Play the scene. The error [`Stop`] means that the scene could not go on; the play counts the checks that failed. The scene may leave pods
    /// behind, which people can look at.
    pub async fn play<C: RunsGpuPrograms>(self, play: &mut Play<'_, C>, churn: Churn) -> Result<(), Stop> {
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
            Scene::Churn => churn::shares(play, churn).await,
            Scene::WholeChurn => churn::whole(play, churn).await,
            Scene::Speed => pods::speed(play).await,
            Scene::Vendors => vendors::vendors(play).await,
            Scene::AmdShares => vendor_shares::vendor_shares(play, vendor_shares::AMD).await,
            Scene::IntelShares => vendor_shares::vendor_shares(play, vendor_shares::INTEL).await,
            Scene::Mig => mig::mig(play).await,
            Scene::Whole => whole::whole(play).await,
            Scene::Doctor => doctor::play(play).await,
            Scene::TimeSlicing => time_slicing::time_slicing(play).await,
            Scene::MigStrategies => mig_strategies::mig_strategies(play).await,
            Scene::Mps => mps::mps(play).await,
            Scene::Migration => migration::migration(play).await,
            Scene::NodeConfigs => node_configs::node_configs(play).await,
            Scene::Limits => limits::play(play).await,
            Scene::Guard => guard::play(play).await,
            Scene::Programs => programs::play(play).await,
            Scene::Attacks => attacks::play(play).await,
        }
    }
}

/// Start a pod of 3 GiB on the laptop's node, as most scenes begin. Return the node's name and the reports of what runs there.
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
