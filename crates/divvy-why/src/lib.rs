//! Why a pod waits, and what would let it start: pure functions of a [`ClusterSnapshot`] of the cluster and of the pod ([`Wants`]).
//!
//! - [`ClusterSnapshot`]: the GPUs ([`divvy_placement::Ledger`]), the nodes ([`NodeSite`]), and the pods on them ([`Tenant`])
//! - [`Wants`]: what kube-scheduler and Divvy read about the waiting pod
//! - [`Obstacle`]: one reason why one node does not take the pod; [`Hold`]: one reason why no node takes it
//! - [`Suggestion`]: a single change that is enough to let the pod start. Each suggestion was tried on the snapshot, and left no
//!   obstacle.
//! - [`Answer`]: all of this for one pod or for several equal ones, short enough to read
//!
//! The obstacles are those of kube-scheduler's default filters (`pkg/scheduler/framework/plugins` in Kubernetes 1.36) and of
//! Divvy's extender. Unlike kube-scheduler, which stops at the first filter that refuses a node, this crate evaluates all of
//! them.

#![forbid(unsafe_code)]

mod answer;
mod answers;
mod change;
mod evaluate;
mod gpus;
mod named;
mod obstacle;
mod offers;
mod pod_name;
mod quantity;
mod selector;
mod snapshot;
mod suggest;
mod verdict;
mod wants;

pub use answer::{Answer, BoundShare, GpuRequest, NodeAnswer, ObstacleGroup, PodState, Subject, answer, answer_naming};
pub use answers::answers;
pub use change::Change;
pub use gpus::{GpuAnswer, HolderAnswer};
pub use named::NamedPods;
pub use obstacle::{Hold, Obstacle, Spoken};
pub use pod_name::PodName;
pub use quantity::{amount, quantity};
pub use snapshot::{ClusterSnapshot, HostPort, LabelMap, NodeSite, PodController, Requests, Tenant, Tenants};
pub use suggest::Suggestion;
pub use verdict::request_text;
pub use wants::{Claim, ClaimState, Reported, Wants};
