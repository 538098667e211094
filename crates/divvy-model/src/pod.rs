use std::collections::BTreeMap;
use std::num::NonZeroU32;

use crate::legacy::LegacyAllocation;
use crate::{Allocation, Error, PodRequest};

/// A pod's namespace and name, for messages and API calls. Divvy keys all state by [`Pod::uid`], because names are reused.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodKey {
    pub namespace: String,
    pub name: String,
}

impl std::fmt::Display for PodKey {
    /// Format as `namespace/name`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A pod's phase: a summary of the states of its containers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Phase {
    /// Not all containers have started, or the pod is not bound.
    #[default]
    Pending,
    /// At least one container is running or restarting.
    Running,
    /// Every container ended with exit code 0.
    Succeeded,
    /// Every container ended, at least one of them with an error.
    Failed,
    /// The node does not report the pod's state.
    Unknown,
}

/// The fields of a Kubernetes pod that Divvy reads.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pod {
    /// `metadata.uid`.
    pub uid: String,
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
    /// `metadata.creationTimestamp` in Unix seconds, from which the extender counts how long the pod waits. `None` if it is missing, or not between 1970
    /// and 2106. Every pod of a cluster has this field, so it is small.
    pub created_s: Option<NonZeroU32>,
    /// `spec.nodeName`; `None` if the pod is not bound.
    pub node: Option<String>,
    /// `status.phase`.
    pub phase: Phase,
    /// Whether `metadata.deletionTimestamp` is set. Even then, the pod's containers may still run.
    pub deleting: bool,
    /// Whether the status of at least one container is `running`. This can be true even in a terminal phase, if the control plane
    /// has given up on the node.
    pub container_running: bool,
    /// The pod's request for GPU memory.
    pub request: PodRequest,
    /// Effective CPU request in thousandths of a core. No machine has so many cores that more would make a difference.
    pub cpu_milli: u32,
    /// Effective request for main memory in bytes.
    pub memory_bytes: u64,
    /// `spec.priority`: kube-scheduler may evict pods with a lower priority to make room for this pod.
    pub priority: i32,
    /// `status.nominatedNodeName` of a pod that is not bound. kube-scheduler has preempted pods on this node, and this pod waits
    /// until those pods have ended.
    pub nominated: Option<Box<str>>,
    /// What the pod holds according to its annotations.
    pub held: Held,
    /// The name of a container that requests GPU memory but sets `NVIDIA_VISIBLE_DEVICES` in its own spec, and the variable's
    /// value. The variable has no effect.
    pub own_visible: Option<Box<(String, String)>>,
}

/// What a pod holds according to its annotations.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Held {
    /// The pod has no annotation of Divvy or gpushare.
    #[default]
    Nothing,
    /// The pod has Divvy's annotation `divvy.dev/allocation`.
    Allocation(Allocation),
    /// The pod has only gpushare's annotations, with GPU indices and units. The caller maps the indices to the node's GPUs.
    Legacy(LegacyAllocation),
    /// The pod has an annotation of Divvy or gpushare, but none that is readable. The pod holds nothing, the agent refuses its
    /// containers at PreStartContainer, and an event reports the error.
    Unreadable(Error),
}

impl Held {
    /// Read a pod's annotations. Divvy's annotation is used if it is readable, and otherwise gpushare's.
    pub fn from_annotations(annotations: &BTreeMap<String, String>) -> Held {
        let ours = annotations.get(crate::names::ALLOCATION).map(|text| Allocation::parse(text));
        let error = match ours {
            Some(Ok(allocation)) => return Held::Allocation(allocation),
            Some(Err(error)) => Some(error),
            None => None,
        };
        match (LegacyAllocation::from_annotations(annotations), error) {
            (Ok(Some(legacy)), _) => Held::Legacy(legacy),
            (_, Some(error)) => Held::Unreadable(error),
            (Ok(None), None) => Held::Nothing,
            (Err(error), None) => Held::Unreadable(error),
        }
    }
}

impl Pod {
    /// Return the pod's namespace and name.
    pub fn key(&self) -> PodKey {
        PodKey {
            namespace: self.namespace.clone(),
            name: self.name.clone(),
        }
    }

    /// Report whether the pod's containers have ended permanently. Only then is the pod's memory free again. A deletion timestamp
    /// is not enough, because the processes keep running until the kubelet has killed them (R5 in `docs/compatibility/races.md`).
    pub fn ended(&self) -> bool {
        matches!(self.phase, Phase::Succeeded | Phase::Failed) && !self.container_running
    }
}
