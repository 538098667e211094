//! How a pod is held to its shares before one of its containers starts: which steps that takes, and what follows if one of them fails.

use divvy_model::{Enforcement, GpuShare, Isolation, MiB, PodKey, names};

use super::booking::Booking;
use super::guarded_shares::ShareId;
use super::reason::NOT_LIMITED;
use super::{AgentAction, AgentCore};

/// A step that holds a pod to its shares. The container may start once all of its steps are done. The caller reports a step that succeeded with
/// [`AgentCore::commit`], and one that failed with [`AgentCore::not_limited`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LimitStep {
    /// Give the guard's files of a share a file system of their own, so that the pod cannot fill the node's disk through them.
    Mount(ShareId),
    /// Make the files that tell the guard the pod's shares.
    Files {
        /// The pod's UID.
        uid: String,
        /// The GPUs of which the pod has a share.
        shares: Vec<Guarded>,
    },
    /// Have the driver limit the memory of the pod.
    Driver {
        /// The pod's namespace and name.
        pod: PodKey,
        /// The pod's UID.
        uid: String,
        /// The GPUs of which the pod has a share that the driver can enforce, and the share.
        gpus: Vec<(String, MiB)>,
        /// What follows if the driver does not do it.
        otherwise: Otherwise,
    },
}

/// A pod's share of one GPU, as the guard enforces it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Guarded {
    /// The GPU's UUID.
    pub uuid: String,
    /// The share of the memory.
    pub memory: MiB,
    /// The share of the compute time, in percent; 0 if the pod has no limit.
    pub cores: u32,
}

/// What follows if the driver does not limit a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Otherwise {
    /// The container does not start.
    Refuse,
    /// Only the guard limits the pod.
    GuardAlone,
    /// Nothing limits the pod, and an event tells the user.
    Nothing,
}

/// Why a step failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LimitError {
    /// Nothing was asked.
    #[error("the probe is not connected")]
    NoProbe,
    /// It is not known whether the step was done.
    #[error("{0}")]
    NoAnswer(String),
    /// The step was not done.
    #[error("{0}")]
    NotDone(String),
}

/// Why a container cannot start yet: its pod is not held to its share.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotLimited {
    /// Nothing can be asked.
    #[error("the probe is not connected")]
    NoProbe,
    /// It is not known on which file system the guard's files lie.
    #[error("the probe did not mount a file system for the files with the pod's share of the GPU: {0}")]
    NotMounted(LimitError),
    /// The container's CDI spec mounts files that are not there.
    #[error("the files with the pod's share of the GPU are not complete: {0}")]
    NoFiles(LimitError),
    /// The pod does not want to start without the driver's limit.
    #[error("the pod wants its share of the GPU to be enforced ({isolation}), and the driver does not do it: {0}", isolation = names::ISOLATION)]
    Required(LimitError),
}

/// What follows from a step that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WithoutLimit {
    /// The container does not start now, and the kubelet tries again.
    Refuse(NotLimited),
    /// The container starts, and the log of the agent says this about the pod.
    Warn(PodKey, String),
    /// The container starts, and its pod gets this event.
    TellPod(AgentAction),
    /// The container starts, and the node gets an event.
    TellNode {
        /// The event's reason.
        reason: &'static str,
        /// The event's message.
        text: String,
    },
    /// The container starts.
    GoOn,
}

/// What the processes of a pod can use of each GPU.
#[derive(Debug, Default)]
pub(super) struct PodLimits {
    /// The GPUs of which the pod has a share that the driver can enforce, and the share.
    pub(super) gpus: Vec<(String, MiB)>,
    /// The GPUs of which the pod has a share, if the guard enforces it on one of them.
    pub(super) guarded: Vec<Guarded>,
    /// Whether the container must not start if the driver does not enforce its part.
    pub(super) are_required: bool,
}

impl PodLimits {
    /// Return the steps by which they are set.
    pub(super) fn steps(self, pod: &PodKey, uid: &str) -> Vec<AgentAction> {
        let PodLimits {
            gpus,
            guarded,
            are_required,
        } = self;
        let otherwise = match (are_required, &guarded[..]) {
            (true, _) => Otherwise::Refuse,
            (false, []) => Otherwise::Nothing,
            (false, _) => Otherwise::GuardAlone,
        };
        let mounts = guarded.iter().map(|share| LimitStep::Mount(ShareId::new(uid, &share.uuid)));
        let mut steps: Vec<LimitStep> = mounts.collect();
        if !guarded.is_empty() {
            steps.push(LimitStep::Files {
                uid: uid.to_owned(),
                shares: guarded,
            });
        }
        if !gpus.is_empty() {
            steps.push(LimitStep::Driver {
                pod: pod.clone(),
                uid: uid.to_owned(),
                gpus,
                otherwise,
            });
        }
        steps.into_iter().map(AgentAction::Limit).collect()
    }
}

impl AgentCore {
    /// Return the limits of a pod. A pod that has a whole GPU needs none.
    pub(super) fn limits(&self, uid: &str, booking: &Booking) -> PodLimits {
        let isolation = self.isolation(uid);
        if isolation == Some(Isolation::None) {
            return PodLimits::default();
        }
        let shares = || booking.gpus.iter().filter(|share| !share.whole);
        let enforcement = |share: &GpuShare| self.gpu(&share.uuid)?.enforcement;
        let cgroup = shares().filter(|share| enforcement(share).is_some_and(Enforcement::has_cgroup));
        // A container has one library for all its GPUs, and the guard refuses a GPU of which it knows no share.
        let has_guard = shares().any(|share| enforcement(share).is_some_and(Enforcement::has_guard));
        let guarded = shares().filter(|_| has_guard).map(|share| Guarded {
            uuid: share.uuid.clone(),
            memory: share.memory,
            // What MPS limits, the guard does not limit a second time.
            cores: if self.uses_mps(&share.uuid) { 0 } else { share.cores },
        });
        PodLimits {
            gpus: cgroup.map(|share| (share.uuid.clone(), share.memory)).collect(),
            guarded: guarded.collect(),
            are_required: isolation == Some(Isolation::Hard) || (isolation.is_some() && !has_guard),
        }
    }

    /// Decide what follows from a step that failed.
    pub fn not_limited(&mut self, limit: &LimitStep, error: LimitError) -> WithoutLimit {
        match (limit, error) {
            (LimitStep::Mount(_), LimitError::NoProbe) => WithoutLimit::Refuse(NotLimited::NoProbe),
            (LimitStep::Mount(_), error @ LimitError::NoAnswer(_)) => WithoutLimit::Refuse(NotLimited::NotMounted(error)),
            // The node gets one event.
            (LimitStep::Mount(_), LimitError::NotDone(_)) if self.shares_on_disk => WithoutLimit::GoOn,
            (LimitStep::Mount(_), error @ LimitError::NotDone(_)) => {
                self.shares_on_disk = true;
                WithoutLimit::TellNode {
                    reason: "GuardFilesOnDisk",
                    text: format!(
                        "the files in which Divvy's guard counts what pods use lie on the disk of this node, so between two measurements a pod can fill the disk \
                         through them: {error}"
                    ),
                }
            }
            (LimitStep::Files { .. }, error) => WithoutLimit::Refuse(NotLimited::NoFiles(error)),
            (LimitStep::Driver { pod, uid, otherwise, .. }, error) => match otherwise {
                Otherwise::Refuse => WithoutLimit::Refuse(NotLimited::Required(error)),
                Otherwise::GuardAlone => WithoutLimit::Warn(
                    pod.clone(),
                    format!("only the guard limits the GPU memory of this pod, because the driver does not do it: {error}"),
                ),
                Otherwise::Nothing => WithoutLimit::TellPod(nothing_limits(pod, uid, &error)),
            },
        }
    }
}

/// Return the event about a pod that is not held to its share, for this reason.
pub(super) fn nothing_limits(pod: &PodKey, uid: &str, why: impl std::fmt::Display) -> AgentAction {
    AgentAction::Event {
        pod: pod.clone(),
        uid: uid.to_owned(),
        reason: NOT_LIMITED,
        text: format!(
            "nothing limits the GPU memory of this pod, which may use more than its share, and other pods may then find less than theirs: {why}"
        ),
    }
}
