//! Which pod has how much memory of which GPU, and where there is room. Everything here is a pure function of values.
//!
//! - [`NodeState`]: one node's GPUs, as its inventory or its capacity describes them
//! - [`Ledger`]: nodes, pods, and allocations that are being written, updated event by event; what is free on each GPU
//! - [`parts`]: what a pod holds of a node's GPUs, and what is free on a GPU; for everything that shows allocations, too
//! - [`Ask`], [`Choice`], [`NodeRefusal`]: whether a request fits, on which GPUs, and why not
//! - `speed`: how fast a GPU is, as an estimate (`divvy.dev/gpu-prefer: fastest`)
//! - [`Topology`]: how a node's GPUs are connected, and which of them work best together
//! - [`NodeReport`]: a refusal with all its details, for `divvy why`, events, and error messages
//! - [`Anomaly`]: a contradiction in the ledger; [`Overbooked`]: a GPU whose memory was promised twice, and the pods that it was
//!   promised to
//! - [`Departed`]: a departed pod, whose memory is not granted again at once
//! - [`Nominated`]: a nominated pod, and the GPUs that are kept for it
//! - [`Victims`]: the pods that must be evicted so that a GPU has room
//! - [`Totals`]: numbers of the whole ledger, for metrics; `fragmentation`: free memory in pieces that are too small
//! - [`WaitReason`]: what is in the way of a pod that waits for GPUs
//! - [`Taste`]: a pod's rules, compared with each product once
//! - [`hash`]: hashes that are the same everywhere, to break ties
//!
//! The modules form layers. A module uses only layers below its own, and within its layer only modules that are listed before it:
//!
//! 1. values that know nothing of the others: `hash`, `speed`, `topology`, `products`, `pods`, `departed`, `reservation`, `amount`,
//!    `amounts`, `waiting`, `node_gpus`
//! 2. a node's GPUs (`node`), a pod's request (`ask`, `taste`), and what a node answers to it (`refusal`, `choice`)
//! 3. what is taken on one node: `parts` (what a pod holds there, and how what is free is computed), `usage` (the sums), `node_account` (what is left)
//! 4. what fits on one node: `one_gpu`, `multi_gpu`, `whole`, `choose`; which pods must go to make room: `fewest`; what is kept
//!    for pods that wait for this room: `nominated`
//! 5. the ledger: `node_view` (what it says of one node) and `ledger` (all nodes and pods, and the updates)
//! 6. questions to the ledger: `question`, `kept_for`, `explain`, `victims`, `what_if`, `anomaly`, `overbooked`, `totals`,
//!    `fragmentation`
//!
//! Nothing here does I/O, reads a clock, or draws a random number. All amounts are integers (MiB). Sums saturate toward
//! "everything is taken", and differences toward "nothing is free", so that no input can make memory appear.

#![forbid(unsafe_code)]

mod amount;
mod amounts;
mod anomaly;
mod ask;
mod choice;
mod choose;
mod departed;
mod explain;
mod fewest;
mod fragmentation;
pub mod hash;
mod kept_for;
mod ledger;
mod multi_gpu;
mod node;
mod node_account;
mod node_gpus;
mod node_view;
mod nominated;
mod one_gpu;
mod overbooked;
pub mod parts;
mod pods;
mod products;
mod question;
mod refusal;
mod reservation;
mod speed;
mod taste;
mod topology;
mod totals;
mod usage;
mod victims;
mod waiting;
mod what_if;
mod whole;

pub use anomaly::Anomaly;
pub use ask::{Ask, Asker};
pub use choice::{Choice, ChosenGpu};
pub use departed::Departed;
pub use explain::{DepartedHolder, GpuReport, Holder, HolderKind, NodeReport, NominatedHolder, PodReport, PodShare, gpu_list};
pub use fewest::Victims;
pub use kept_for::KeptFor;
pub use ledger::Ledger;
pub use node::{GpuSource, GpuState, NodeState, UnusableGpus};
pub use node_account::Nominated;
pub use node_gpus::{GpuRef, NodeGpus};
pub use node_view::LedgerNode;
pub use overbooked::{Overbooked, Promise};
pub use parts::HeldShare;
pub use question::PlacementQuestion;
pub use refusal::NodeRefusal;
pub use reservation::{Reservation, Standing};
pub use taste::Taste;
pub use topology::{GpuCandidate, Topology};
pub use totals::Totals;
pub use waiting::WaitReason;
pub use what_if::Room;
