use std::collections::BTreeMap;

use crate::legacy::LegacyAllocation;
use crate::{Allocation, Error, PodRequest};

/// A pod's identity. Everything that Divvy keeps is keyed by [`Pod::uid`]; this is for messages and calls.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodKey {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
}

impl std::fmt::Display for PodKey {
    /// `namespace/name`
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A pod's phase.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Phase {
    /// Not started.
    #[default]
    Pending,
    /// At least one container runs or is restarting.
    Running,
    /// Every container ended well.
    Succeeded,
    /// Every container ended, at least one badly.
    Failed,
    /// The node does not answer.
    Unknown,
}

/// The few fields of a pod that Divvy reads.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pod {
    /// metadata.uid
    pub uid: String,
    /// metadata.namespace
    pub namespace: String,
    /// metadata.name
    pub name: String,
    /// spec.nodeName, if bound.
    pub node: Option<String>,
    /// status.phase
    pub phase: Phase,
    /// metadata.deletionTimestamp is set. Its containers may still run.
    pub deleting: bool,
    /// Some container's status says `running` (in a terminal phase, too: a node that was given up).
    pub container_running: bool,
    /// What it asks for.
    pub request: PodRequest,
    /// Its effective CPU request in thousandths of a core.
    pub cpu_milli: u64,
    /// Its effective memory request in bytes.
    pub memory_bytes: u64,
    /// spec.priority: pods with a lower one may be evicted for it.
    pub priority: i32,
    /// status.nominatedNodeName of a pod that is not bound: it has preempted pods there and waits until they have ended.
    pub nominated: Option<Box<str>>,
    /// What it holds, by its annotations.
    pub held: Held,
    /// A container that asks for GPU memory and sets `NVIDIA_VISIBLE_DEVICES` itself, and to what. It has no effect.
    pub own_visible: Option<Box<(String, String)>>,
}

/// What a pod holds, by its annotations.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Held {
    /// No allocation was written.
    #[default]
    Nothing,
    /// Divvy's annotation.
    Allocation(Allocation),
    /// Only gpushare's annotations: a GPU index and units, to be resolved against the node.
    Legacy(LegacyAllocation),
    /// There is an annotation that cannot be read, and no gpushare one beside it. It holds nothing; PreStart refuses; an
    /// event says so.
    Unreadable(Error),
}

impl Held {
    /// Reads a pod's annotations: ours first, else gpushare's (DESIGN.md section 8, "Inventory").
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
    /// Namespace and name.
    pub fn key(&self) -> PodKey {
        PodKey {
            namespace: self.namespace.clone(),
            name: self.name.clone(),
        }
    }

    /// Whether its containers have ended for good: only then is its memory free again. A deletion that
    /// was asked for is not an end (research/reliability.md R5).
    pub fn ended(&self) -> bool {
        matches!(self.phase, Phase::Succeeded | Phase::Failed) && !self.container_running
    }
}
