//! Why a node does not take a pod, in words for people and for kube-scheduler.

use std::borrow::Cow;

use divvy_model::limits::shortened;
use divvy_model::{Error, MiB, Vendor, WholeKind, names};

use crate::ask::Ask;
use crate::node::UnusableGpus;
use crate::waiting::WaitReason;

/// Why a node does not take a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeRefusal {
    /// There is no such node, or the extender has not seen it yet.
    UnknownNode,
    /// The node's GPUs are not offered to any pod.
    Unusable(UnusableGpus),
    /// None of the GPUs that the pod accepts has enough memory free.
    NoGpuFits,
    /// Fewer GPUs than requested, among those that the pod accepts, have enough memory and compute time free.
    TooFewFit(Ask),
    /// The pod accepts none of the node's GPUs, or fewer than it requests, regardless of free memory.
    NoGpuTaken(Ask),
    /// The pod gets shares of this vendor's GPUs, and the node shares only GPUs of other vendors.
    OtherVendor(Vendor),
    /// The pod requests several GPUs, but the node is known only by gpushare's capacities, and gpushare's device plugin gives a
    /// container one GPU.
    OneGpuOnly,
    /// The pod requests several GPUs, but the node has only MIG devices, and a CUDA process uses only one of them.
    OnlyMigDevices,
    /// The pod's rules cannot be read.
    Unreadable(Error),
    /// The request is more MiB than can be counted.
    Uncountable(Ask),
    /// The pod requests whole GPUs or MIG devices of a kind of which the node offers none.
    NoneOfKind(WholeKind),
    /// Fewer whole GPUs or MIG devices of the kind than requested are free, among those that the pod accepts.
    TooFewWhole(Ask),
}

/// The maximum length in bytes of a refusal in filter's answer. The answer has one refusal per node, so kube-scheduler receives
/// less than 2 MB for 5,000 nodes, whatever the pod and the nodes contain.
const FILTER_TEXT_BYTES: usize = 300;

impl NodeRefusal {
    /// Return what is in the way of a pod that waits, as far as one node is concerned.
    pub fn wait_reason(&self) -> WaitReason {
        match self {
            NodeRefusal::NoGpuFits | NodeRefusal::TooFewFit(_) | NodeRefusal::TooFewWhole(_) => WaitReason::NoRoom,
            NodeRefusal::NoGpuTaken(_) | NodeRefusal::OtherVendor(_) => WaitReason::Model,
            NodeRefusal::OneGpuOnly | NodeRefusal::OnlyMigDevices | NodeRefusal::Uncountable(_) | NodeRefusal::NoneOfKind(_) => {
                WaitReason::NoGpuFits
            }
            NodeRefusal::UnknownNode | NodeRefusal::Unusable(UnusableGpus::Unschedulable | UnusableGpus::Unreadable(_)) => {
                WaitReason::NodeNotReady
            }
            NodeRefusal::Unusable(UnusableGpus::NotShared) => WaitReason::NoGpuFits,
            NodeRefusal::Unusable(
                UnusableGpus::OtherUnit { .. } | UnusableGpus::UnitsDiffer { .. } | UnusableGpus::Uneven { .. },
            ) => WaitReason::Unit,
            NodeRefusal::Unreadable(_) => WaitReason::Other,
        }
    }

    /// Return the text for the extender's `FailedNodes`. Where gpushare would refuse, this is gpushare's own sentence, character
    /// for character, because people and tools search for it.
    pub fn filter_message(&self, node: &str) -> String {
        self.filter_text(node).into_owned()
    }

    /// Return the text of [`NodeRefusal::filter_message`], without copying it if it does not name the node.
    pub fn filter_text(&self, node: &str) -> Cow<'static, str> {
        let text = self.whole_text(node);
        if text.len() > FILTER_TEXT_BYTES {
            Cow::Owned(shortened(&text, FILTER_TEXT_BYTES).into_owned())
        } else {
            text
        }
    }

    fn whole_text(&self, node: &str) -> Cow<'static, str> {
        Cow::Owned(match self {
            NodeRefusal::NoGpuFits => return Cow::Borrowed("Insufficient GPU Memory in one device"),
            NodeRefusal::UnknownNode => format!("node {node:?} not found"),
            NodeRefusal::Unusable(UnusableGpus::NotShared) => format!("The node {node} is not for GPU share, need skip"),
            NodeRefusal::Unusable(why) => format!("node {node} is not offered: {why}"),
            NodeRefusal::Uncountable(ask) => format!("the pod asks for {ask}"),
            // The text is the same for all nodes, so that kube-scheduler counts them together.
            NodeRefusal::NoGpuTaken(ask) if ask.gpus > 1 => {
                let wanted = ask.wanted().map(|rules| format!(" {rules}")).unwrap_or_default();
                format!("fewer than {} GPUs{wanted}", ask.gpus)
            }
            NodeRefusal::NoGpuTaken(ask) => format!("no GPU {}", ask.wanted().unwrap_or_default()),
            NodeRefusal::OtherVendor(wanted) => format!("no shared {wanted} GPU ({})", names::GPU_VENDOR),
            NodeRefusal::NoneOfKind(kind) => format!("no {} that Divvy offers", kind.plural()),
            NodeRefusal::TooFewWhole(ask) => {
                let rules = ask.wanted().map(|rules| format!(" {rules}")).unwrap_or_default();
                match ask.gpus {
                    1 => format!("no free {}{rules}", ask.devices()),
                    gpus => format!("fewer than {gpus} free {}{rules}", ask.devices()),
                }
            }
            NodeRefusal::TooFewFit(ask) => {
                let (memory, and_cores) = (ask.memory.unwrap_or(MiB(u64::MAX)), ask.and_cores());
                match ask.gpus {
                    1 => format!("no GPU with {memory}{and_cores} free"),
                    gpus => format!("fewer than {gpus} GPUs with {memory}{and_cores} free"),
                }
            }
            NodeRefusal::OnlyMigDevices => return Cow::Borrowed("only MIG devices, of which a process can use one"),
            NodeRefusal::OneGpuOnly => return Cow::Borrowed("several GPUs for a pod need Divvy's agent on the node"),
            NodeRefusal::Unreadable(error) => format!("the pod's annotations: {error}"),
        })
    }
}
