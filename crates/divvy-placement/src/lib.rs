//! Which pod has how much memory of which GPU, and where there is room. Everything here is a pure function of values.
//!
//! - [`NodeState`]: one node's GPUs, as its inventory or its capacity describes them
//! - [`Ledger`]: nodes, pods, and allocations that are being written, updated event by event; what is free on each GPU
//! - [`Ask`], [`Choice`], [`Refusal`]: whether a request fits, on which GPUs, and why not
//! - `speed`: how fast a GPU is, as an estimate (`divvy.dev/gpu-prefer: fastest`)
//! - [`Topology`]: how a node's GPUs are connected, and which of them work best together
//! - [`NodeReport`]: a refusal with all its details, for `divvy why`, events, and error messages
//! - [`Anomaly`]: a contradiction in the ledger; [`Overbooked`]: a GPU whose memory was promised twice, and the pods that it was
//!   promised to
//! - [`Departed`]: a departed pod, whose memory is not granted again at once
//! - [`Nominated`]: a nominated pod, and the GPUs that are kept for it
//! - [`Victims`]: the pods that must be evicted so that a GPU has room
//! - [`Totals`]: numbers of the whole ledger, for metrics
//! - [`Taste`]: a pod's rules, compared with each product once
//! - [`hash`]: hashes that are the same everywhere, for ties
//!
//! Nothing here does I/O, reads a clock, or draws a random number. All amounts are integers (MiB). Sums saturate toward
//! "everything is taken", and differences toward "nothing is free", so that no input can make memory appear.

#![forbid(unsafe_code)]

mod anomaly;
mod choose;
mod departed;
mod explain;
pub mod hash;
mod ledger;
mod multi_gpu;
mod node;
mod node_view;
mod nominated;
mod overbooked;
mod pods;
mod products;
mod speed;
mod topology;
mod totals;
mod victims;
mod what_if;
mod whole;

pub use anomaly::Anomaly;
pub use choose::{Ask, Choice, ChosenGpu, Question, Refusal};
pub use departed::{Departed, KeptFor};
pub use explain::{DepartedHolder, GpuReport, Holder, HolderKind, NodeReport, NominatedHolder, PodReport, PodShare, gpu_list};
pub use ledger::{Ledger, Part, Reservation, Standing};
pub use node::{GpuState, NodeState, Source, Unusable};
pub use node_view::NodeView;
pub use nominated::{Asker, Nominated};
pub use overbooked::{Overbooked, Promise};
pub use products::Taste;
pub use topology::{Candidate, Topology};
pub use totals::Totals;
pub use victims::Victims;
pub use what_if::Room;
