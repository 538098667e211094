//! Why a container may not start, and the classes of disagreement that reconciliation reports.

/// Reason of the event about a pod whose share is not enforced although the node enforces shares.
pub const NOT_LIMITED: &str = "NotLimited";

/// Why a start was refused, for metrics and events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// The checkpoint cannot be read, or does not contain these ids.
    Identity,
    /// Two live pods have exactly these ids, or the ids belong to the grant of another pod that has not ended.
    DoubleHandout,
    /// The agent has not seen the pod's object.
    UnknownPod,
    /// The pod has no readable allocation.
    NoAllocation,
    /// The allocated GPU is missing, failed, or lost.
    GpuUnavailable,
    /// Other containers still hold the memory.
    MemoryHeld,
    /// The MPS control daemon does not serve.
    MpsAbsent,
    /// The agent has not read the node's annotations.
    UnknownNode,
}

impl Reason {
    /// Return the value of the metric's label.
    pub fn label(self) -> &'static str {
        match self {
            Reason::Identity => "identity",
            Reason::DoubleHandout => "double-handout",
            Reason::UnknownPod => "unknown-pod",
            Reason::NoAllocation => "no-allocation",
            Reason::GpuUnavailable => "gpu-unavailable",
            Reason::MemoryHeld => "memory-held",
            Reason::MpsAbsent => "mps-absent",
            Reason::UnknownNode => "unknown-node",
        }
    }
}

/// A class of disagreement. `divvy_agent_reconcile_total` counts each occurrence, and each pod gets one event per class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DisagreementClass {
    /// A pod that requests memory is bound here without a readable allocation.
    NoAllocation,
    /// A pod's GPU is missing or failed.
    GpuUnavailable,
    /// A running container had no record. The record was restored from the spec, or from checkpoint and allocation.
    RecordRebuilt,
    /// A record had no spec, or the spec had other content. The spec was written.
    SpecRebuilt,
    /// A spec belonged to no record. The spec was removed.
    SpecOrphan,
    /// A record whose pod has ended was removed: the ordinary end of a grant.
    GrantEnded,
    /// A container is running although its pod's object is gone or has ended.
    HeldWithoutPod,
    /// A running container is not in the kubelet's checkpoint, so it cannot be restarted.
    CheckpointLost,
    /// Two live pods have a device id in common.
    DoubleHandout,
    /// The grants of live pods exceed a GPU's capacity, because the GPU's size or the reserve changed.
    Overcommitted,
    /// Another device plugin gave a container its GPUs while this agent offers the same resource.
    AnotherPlugin,
    /// A pod's process runs on a GPU that Divvy did not grant to the pod.
    NotGranted,
    /// A pod's processes use more of a GPU's memory than was granted.
    MemoryExceeded,
    /// A process of a guarded pod uses a GPU without the guard.
    Unguarded,
    /// A program changed the file in which the guard counts what its pod uses.
    Tampered,
    /// The file in which the guard counts what its pod uses cannot be read in time.
    Busy,
    /// More processes of a pod use a GPU than the guard can count.
    Crowded,
    /// Nothing limits the compute time of a pod that has a share of it.
    Untimed,
}

impl DisagreementClass {
    /// Every class. The metrics start with all of them at zero.
    pub const ALL: [DisagreementClass; 18] = [
        DisagreementClass::NoAllocation,
        DisagreementClass::GpuUnavailable,
        DisagreementClass::RecordRebuilt,
        DisagreementClass::SpecRebuilt,
        DisagreementClass::SpecOrphan,
        DisagreementClass::GrantEnded,
        DisagreementClass::HeldWithoutPod,
        DisagreementClass::CheckpointLost,
        DisagreementClass::DoubleHandout,
        DisagreementClass::Overcommitted,
        DisagreementClass::AnotherPlugin,
        DisagreementClass::NotGranted,
        DisagreementClass::MemoryExceeded,
        DisagreementClass::Unguarded,
        DisagreementClass::Tampered,
        DisagreementClass::Busy,
        DisagreementClass::Crowded,
        DisagreementClass::Untimed,
    ];

    /// Return the value of the metric's label.
    pub fn label(self) -> &'static str {
        match self {
            DisagreementClass::NoAllocation => "no-allocation",
            DisagreementClass::GpuUnavailable => "gpu-unavailable",
            DisagreementClass::RecordRebuilt => "record-rebuilt",
            DisagreementClass::SpecRebuilt => "spec-rebuilt",
            DisagreementClass::SpecOrphan => "spec-orphan",
            DisagreementClass::GrantEnded => "grant-ended",
            DisagreementClass::HeldWithoutPod => "held-without-pod",
            DisagreementClass::CheckpointLost => "checkpoint-lost",
            DisagreementClass::DoubleHandout => "double-handout",
            DisagreementClass::Overcommitted => "overcommitted",
            DisagreementClass::AnotherPlugin => "another-plugin",
            DisagreementClass::NotGranted => "not-granted",
            DisagreementClass::MemoryExceeded => "memory-exceeded",
            DisagreementClass::Unguarded => "unguarded",
            DisagreementClass::Tampered => "tampered",
            DisagreementClass::Busy => "guard-file-busy",
            DisagreementClass::Crowded => "crowded",
            DisagreementClass::Untimed => "untimed",
        }
    }

    /// Return the event's reason.
    pub fn event_reason(self) -> &'static str {
        match self {
            DisagreementClass::NoAllocation => "NoAllocation",
            DisagreementClass::GpuUnavailable => "GpuUnavailable",
            DisagreementClass::RecordRebuilt => "GrantRebuilt",
            DisagreementClass::SpecRebuilt => "SpecRebuilt",
            DisagreementClass::SpecOrphan => "SpecOrphan",
            DisagreementClass::GrantEnded => "GrantEnded",
            DisagreementClass::HeldWithoutPod => "MemoryHeldWithoutPod",
            DisagreementClass::CheckpointLost => "CheckpointLost",
            DisagreementClass::DoubleHandout => "DoubleHandout",
            DisagreementClass::Overcommitted => "Overcommitted",
            DisagreementClass::AnotherPlugin => "TwoDevicePlugins",
            DisagreementClass::NotGranted => "GpuNotGranted",
            DisagreementClass::MemoryExceeded => "GpuMemoryExceeded",
            DisagreementClass::Unguarded => "GuardAvoided",
            DisagreementClass::Tampered => "GuardFileChanged",
            DisagreementClass::Busy => "GuardFileBusy",
            DisagreementClass::Crowded => "TooManyGpuProcesses",
            DisagreementClass::Untimed => NOT_LIMITED,
        }
    }
}
