//! Why the core does not answer with nodes, or does not bind. The texts are for users: kube-scheduler shows them in events of the pod.

use divvy_model::PodKey;
use divvy_model::limits::shortened;
use divvy_placement::{KeptFor, NodeReport};

/// The maximum size in bytes of the text of a refused bind. The report about a node with many GPUs may be longer. Little is
/// lost if it is cut: kube-scheduler puts the text into an event, which holds only 1 KiB.
const REFUSAL_BYTES: usize = 4 << 10;

/// The pods and nodes have not been listed yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the extender is starting: it has not listed the cluster's {missing} yet, so it does not know which GPU memory is free")]
pub struct NotSynced {
    pub(super) missing: &'static str,
}

/// Why filter answers with an error, after which kube-scheduler tries the pod again without an event.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FilterError {
    /// The extender is starting.
    #[error(transparent)]
    NotSynced(#[from] NotSynced),
    /// No node has room, but a watch is behind.
    #[error(
        "as far as the extender knows, no node has room (node {node}: {refusal}); but its watch of {what} was interrupted ({why}), so this \
         may be out of date; kube-scheduler will try again"
    )]
    OutOfDate {
        /// A node that was refused.
        node: String,
        /// Why it was refused.
        refusal: String,
        /// What is watched.
        what: &'static str,
        /// What happened to the watch.
        why: String,
    },
    /// No node has room, because memory is held for a departed pod.
    #[error(
        "no node has room yet: node {node} keeps {} of GPU {} for pod {} (deleted, container was running) until its agent reports \
         that the container has ended, or for at most {most_s} s; kube-scheduler will try again",
        kept.memory, kept.index, kept.pod
    )]
    Kept {
        /// The node that would have room.
        node: String,
        /// The memory that is in the way.
        kept: KeptFor,
        /// The longest time in seconds that memory is held for a departed pod.
        most_s: u64,
    },
}

/// Why a pod was not bound, or is not known to be bound.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BindError {
    /// The extender is starting.
    #[error(transparent)]
    NotSynced(#[from] NotSynced),
    /// The extender ends before the bind does.
    #[error("the extender is stopping; the bind will be tried again")]
    Stopping,
    /// Another replica leads, or none does.
    #[error("this replica of Divvy's extender is not the leader, and only the leader binds pods; try again in a moment")]
    NotLeading,
    /// This replica leads, but has not listed the pods since its election.
    #[error(
        "this replica of Divvy's extender has just become the leader and is still reading which pods are bound; try again in a moment"
    )]
    JustElected,
    /// Binds that came earlier took too long.
    #[error("pod {pod} could not be bound in time: earlier binds of this pod or on node {node} have not finished")]
    Late {
        /// The pod.
        pod: PodKey,
        /// The requested node.
        node: String,
    },
    /// The pod was deleted before the bind.
    #[error("pod {pod} is gone: {answer}")]
    Gone {
        /// The pod.
        pod: PodKey,
        /// How the extender knows.
        answer: String,
    },
    /// The pod was deleted after the Binding was sent.
    #[error("pod {0} was deleted during the bind")]
    Deleted(PodKey),
    /// The pod is being deleted.
    #[error("pod {0} is being deleted")]
    Deleting(PodKey),
    /// Another pod has the name. The text is that of gpushare's extender, byte for byte (`pkg/scheduler/gpushare-bind.go`).
    #[error("The pod {} in ns {}'s uid is {found}, and it's not equal with expected {expected}", pod.name, pod.namespace)]
    OtherUid {
        /// The pod.
        pod: PodKey,
        /// The UID of the pod that has the name.
        found: String,
        /// The UID of the pod that was to be bound.
        expected: String,
    },
    /// The pod was bound to another node earlier.
    #[error("pod {pod} is bound to node {bound} already and cannot be bound to node {node}")]
    BoundElsewhere {
        /// The pod.
        pod: PodKey,
        /// The node that the pod has.
        bound: String,
        /// The requested node.
        node: String,
    },
    /// Another program bound the pod to the node meanwhile, and allocated it other memory.
    #[error("pod {pod} is already bound to node {node}, with a different allocation")]
    OtherAllocation {
        /// The pod.
        pod: PodKey,
        /// The requested node, which the pod has.
        node: String,
    },
    /// The pod's request cannot be read.
    #[error("pod {pod} cannot be placed: {why}")]
    Unreadable {
        /// The pod.
        pod: PodKey,
        /// What is wrong with the request.
        why: String,
    },
    /// The extender does not know the pod, and could not read it.
    #[error("pod {pod} is not known yet and could not be read: {answer}")]
    Unknown {
        /// The pod.
        pod: PodKey,
        /// The API server's answer.
        answer: String,
    },
    /// A bind that was sent earlier may have been carried out, and the pod could not be read.
    #[error("pod {pod} could not be read, and an earlier bind of it may have been carried out: {answer}")]
    MayBeBound {
        /// The pod.
        pod: PodKey,
        /// The API server's answer.
        answer: String,
    },
    /// Another replica may have bound the pod, and the pod could not be read.
    #[error(
        "pod {pod} could not be read, and the extender, which has just listed the pods, must first check whether another replica has bound it; \
         nothing was sent, and the bind can be tried again: {answer}"
    )]
    MayBeBoundByOther {
        /// The pod.
        pod: PodKey,
        /// The API server's answer.
        answer: String,
    },
    /// The extender does not know the requested node.
    #[error("pod {pod}: the extender does not know node {node}")]
    UnknownNode {
        /// The pod.
        pod: PodKey,
        /// The requested node.
        node: String,
    },
    /// The pod does not fit on the requested node.
    #[error("pod {pod}: {report}")]
    DoesNotFit {
        /// The pod.
        pod: PodKey,
        /// What the node has.
        report: Box<NodeReport>,
    },
    /// The Binding was not sent.
    #[error("pod {pod} is not bound: {why}")]
    NotSent {
        /// The pod.
        pod: PodKey,
        /// Why the Binding was not sent.
        why: String,
    },
    /// The API server will not carry the Binding out.
    #[error("the API server refused to bind pod {pod} to node {node}: {answer}")]
    Refused {
        /// The pod.
        pod: PodKey,
        /// The requested node.
        node: String,
        /// The API server's answer.
        answer: String,
    },
    /// The Binding got no usable answer. It has not been carried out so far.
    #[error(
        "the API server gave no usable answer to the Binding of pod {pod} to node {node} ({answer}); the pod is not bound so far; its \
         reservation is kept, so that the bind can be tried again"
    )]
    UnboundSoFar {
        /// The pod.
        pod: PodKey,
        /// The requested node.
        node: String,
        /// The answer, or why there is none.
        answer: String,
    },
    /// Neither the Binding nor the read of the pod got a usable answer.
    #[error(
        "the API server gave no usable answer to the Binding of pod {pod} to node {node} ({answer}); it is not known whether the pod is \
         bound; its reservation is kept until that is known"
    )]
    InDoubt {
        /// The pod.
        pod: PodKey,
        /// The requested node.
        node: String,
        /// The answer, or why there is none.
        answer: String,
    },
}

impl BindError {
    /// Return the text for kube-scheduler, which is shortened if it is long.
    pub fn message(&self) -> String {
        shortened(&self.to_string(), REFUSAL_BYTES).into_owned()
    }
}
