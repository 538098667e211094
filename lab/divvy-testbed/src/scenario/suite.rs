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
use super::play::SeenReport;
use super::{Cluster, Play, PlayStop, RunsGpuPrograms, TestbedMachine, tour};
use crate::builders::pod;

const LAPTOP: &[TestbedMachine] = &[TestbedMachine::Laptop];
const MIXED: &[TestbedMachine] = &[TestbedMachine::Mixed];
const BOTH: &[TestbedMachine] = &[TestbedMachine::Laptop, TestbedMachine::Mixed];

/// Declares the scenes in the order in which the suite plays them: each with its name on the command line, the machines that it needs, its play,
/// and a description in one line.
macro_rules! scenes {
    ($($scene:ident($name:literal, $machines:expr, |$play:ident, $churn:pat_param| $played:expr): $about:literal;)*) => {
        /// A scene of the suite.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Scene {
            $(#[doc = $about] $scene,)*
        }

        impl Scene {
            /// Every scene, in the order in which the suite plays them.
            pub const ALL: [Scene; [$(Scene::$scene),*].len()] = [$(Scene::$scene),*];

            /// Return the scene's name on the command line and a one-line description.
            pub fn about(self) -> (&'static str, &'static str) {
                match self {
                    $(Scene::$scene => ($name, $about),)*
                }
            }

            /// Return the machines that the scene needs.
            pub fn needs(self) -> &'static [TestbedMachine] {
                match self {
                    $(Scene::$scene => $machines,)*
                }
            }

            /// Play the scene. The error [`PlayStop`] means that the scene could not go on; the play counts the checks that failed. The scene may
            /// leave pods behind, which people can look at.
            pub async fn play<C: RunsGpuPrograms>(self, play: &mut Play<'_, C>, churn: Churn) -> Result<(), PlayStop> {
                match self {
                    $(Scene::$scene => {
                        let ($play, $churn) = (play, churn);
                        $played
                    })*
                }
            }
        }
    };
}

scenes! {
    Tour("tour", BOTH, |play, _| tour::play(play).await):
        "two pods on one GPU (3/16, 8/16); mixed GPUs; a GPU that fails and recovers; restarts";
    TooLarge("too-large", BOTH, |play, _| pods::too_large(play).await):
        "a pod asks for more memory than any GPU has, another for more than is free";
    SeveralContainers("several-containers", LAPTOP, |play, _| pods::several_containers(play).await):
        "containers, an init container and a sidecar of one pod share its GPU";
    Libraries("libraries", MIXED, |play, _| libraries::play(play).await):
        "the driver's libraries are mounted as NVIDIA's CDI spec says; the driver is updated";
    Deployment("deployment", LAPTOP, |play, _| pods::deployment(play).await):
        "a Deployment is scaled up beyond what fits, then down";
    PastTheScheduler("past-the-scheduler", LAPTOP, |play, _| pods::past_the_scheduler(play).await):
        "a pod sets spec.nodeName itself and is not started without an allocation";
    Many("many", BOTH, |play, _| pods::many(play).await):
        "40 pods at once";
    Packed("packed", BOTH, |play, _| placement::packed(play).await):
        "small pods share one GPU, although kube-scheduler on its own would spread them";
    Wanted("wanted", BOTH, |play, _| placement::wanted(play).await):
        "pods choose their GPU by product, memory size, and preference";
    Several("several", MIXED, |play, _| placement::several(play).await):
        "a pod's memory is on two GPUs connected by NVLink, and the pod sees exactly these two";
    Preempted("preempted", MIXED, |play, _| placement::preempted(play).await):
        "a pod of high priority evicts pods to make room on one GPU; `why` explains a pod that fits only by the node's total";
    Stubborn("stubborn", BOTH, |play, _| ends::stubborn(play).await):
        "a container ignores SIGTERM; the next pod waits until it ends";
    Forced("forced", LAPTOP, |play, _| ends::forced(play).await):
        "a pod is deleted by force; its container runs on for a while";
    ForcedWhileOneWaits("forced-while-one-waits", LAPTOP, |play, _| ends::forced_while_one_waits(play).await):
        "a pod is deleted by force while another pod waits for its memory";
    ForcedWithoutKubelet("forced-without-kubelet", LAPTOP, |play, _| ends::forced_without_kubelet(play).await):
        "a pod is deleted by force while the node's kubelet is down";
    AgentRestarts("agent-restarts", LAPTOP, |play, _| restarts::agent(play).await):
        "the agent is stopped, then killed; pods keep running";
    KubeletRestarts("kubelet-restarts", LAPTOP, |play, _| restarts::kubelet(play).await):
        "the kubelet is restarted, then killed; pods keep running";
    RuntimeRestarts("runtime-restarts", LAPTOP, |play, _| restarts::runtime(play).await):
        "containerd is restarted, then killed; pods keep running";
    ExtenderDies("extender-dies", LAPTOP, |play, _| restarts::extender(play).await):
        "the extender is killed; pods wait, and no pod is bound without it";
    SchedulerRestarts("scheduler-restarts", LAPTOP, |play, _| restarts::scheduler(play).await):
        "kube-scheduler is killed and started again";
    ApiServerAway("api-server-away", LAPTOP, |play, _| outages::api_server_away(play).await):
        "the API server is down for 30 s; pods keep running, and new pods start afterwards";
    NodeReboots("node-reboots", LAPTOP, |play, _| outages::node_reboots(play).await):
        "a node reboots; its kubelet starts before the agent, then after it";
    Drained("drained", BOTH, |play, _| outages::drained(play).await):
        "a node is drained; its pods move to another node, and the node is used again";
    RollingUpdate("rolling-update", LAPTOP, |play, _| outages::rolling_update(play).await):
        "every program of Divvy is replaced while pods come and go";
    UnitChanges("unit-changes", LAPTOP, |play, _| units::play(play).await):
        "the memory unit is made smaller, then larger, while pods run; no check and no event reports a problem with them";
    Churn("churn", LAPTOP, |play, churn| churn::shares(play, churn).await):
        "pods come and go while agent, extender, kubelet and containerd are killed";
    Speed("speed", LAPTOP, |play, _| pods::speed(play).await):
        "the time from a pod's creation until it runs, with and without a GPU";
    Vendors("vendors", LAPTOP, |play, _| vendors::vendors(play).await):
        "shares of an NVIDIA GPU and whole AMD GPUs in one cluster; an AMD GPU fails and recovers";
    Mig("mig", LAPTOP, |play, _| mig::mig(play).await):
        "a GPU is divided by MIG, its parts are shared, and MIG is switched off";
    Doctor("doctor", LAPTOP, |play, _| doctor::play(play).await):
        "divvy doctor --cluster finds nothing on a healthy cluster, and finds the right problem after a fault";
    // The last ones: the kubelet lists a resource for minutes after the agents no longer offer it, and doctor reports that.
    AmdShares("amd-shares", LAPTOP, |play, _| vendor_shares::vendor_shares(play, vendor_shares::AMD).await):
        "shares of AMD GPUs and whole ones on one node, beside shares of an NVIDIA GPU; each pod gets GPUs of its vendor";
    IntelShares("intel-shares", LAPTOP, |play, _| vendor_shares::vendor_shares(play, vendor_shares::INTEL).await):
        "the same with Intel GPUs, on a node that has AMD GPUs as well";
    Whole("whole", LAPTOP, |play, _| whole::whole(play).await):
        "whole NVIDIA GPUs and shares on one node: each waits for the other; a pod without an allocation";
    WholeChurn("whole-churn", LAPTOP, |play, churn| churn::whole(play, churn).await):
        "pods with shares and with whole GPUs are created and deleted at random on one node while programs are killed";
    TimeSlicing("time-slicing", MIXED, |play, _| time_slicing::time_slicing(play).await):
        "nvidia-device-plugin offers replicas of GPUs; a GPU fails, the configuration changes, and the plugin is killed while pods run";
    MigStrategies("mig-strategies", MIXED, |play, _| mig_strategies::mig_strategies(play).await):
        "nvidia-device-plugin offers MIG devices; the strategy and the MIG devices change while it runs, and it is killed";
    Mps("mps", LAPTOP, |play, _| mps::mps(play).await):
        "nvidia-device-plugin shares a GPU through MPS; its limits are set before the first pod; mps-control-daemon is killed";
    Migration("migration", BOTH, |play, _| migration::migration(play).await):
        "two nodes move from nvidia-device-plugin to the agent with --whole-gpus, and one back, while pods run";
    NodeConfigs("node-configs", BOTH, |play, _| node_configs::node_configs(play).await):
        "a label chooses the settings of one node's agent; the label, the settings, and a mistake in them while pods run";
    Limits("limits", LAPTOP, |play, _| limits::play(play).await):
        "the driver holds pods to their shares; pods with and without divvy.dev/isolation; the driver refuses";
    Guard("guard", LAPTOP, |play, _| guard::play(play).await):
        "containers get the guard in the place of CUDA's driver library; shares of the compute time; another version of the guard; the agent is killed";
    Programs("programs", LAPTOP, |play, _| programs::play(play).await):
        "the guard holds programs to their shares while the agent is killed and the guard replaced; one avoids it and is killed, another is evicted";
    Attacks("attacks", BOTH, |play, _| attacks::play(play).await):
        "hostile pods with leases, locks, large writes, and forged numbers on their shares' files, each next to an honest pod; a pod that says that it tests a GPU";
}

impl Scene {
    /// Return the scene with this name.
    pub fn named(name: &str) -> Option<Scene> {
        Self::ALL.into_iter().find(|scene| scene.about().0 == name)
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
}

/// Start a pod of 3 GiB on the laptop's node, as most scenes begin. Return the node's name and the reports of what runs there.
async fn one_runs<C: Cluster>(play: &mut Play<'_, C>, name: &str) -> Result<(String, Vec<SeenReport>), PlayStop> {
    let node = play.ready(TestbedMachine::Laptop).await?;
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
