//! Who has what on which GPU, and where there is room: pure functions of values.
//!
//! - [`NodeState`]: one node's GPUs as its inventory or its capacity describes them
//! - [`Ledger`]: nodes, pods and allocations in flight, updated event by event; what each GPU has left
//! - [`Ask`], [`Choice`], [`Refusal`]: does it fit, on which GPUs, and why not
//! - `speed`: how fast a GPU is, by an estimate (`divvy.dev/gpu-prefer: fastest`)
//! - [`Topology`]: how a node's GPUs are connected, and which of them work best together
//! - [`NodeReport`]: a refusal in full, for `divvy why`, events and error messages
//! - [`Anomaly`]: what in the ledger should not be; [`Overbooked`]: a GPU that was promised twice, and to whom
//! - [`Departed`]: a pod that vanished while its container ran, whose memory is not given again at once
//! - [`Nominated`]: a pod that preempted others, and the GPUs that are kept for it
//! - [`Victims`]: who would have to go so that a GPU has room
//! - [`Totals`]: numbers of the whole ledger, for metrics
//! - [`Taste`]: a pod's rules, compared with each product once
//! - [`hash`]: hashes that are the same everywhere, for ties
//!
//! Nothing here does I/O, reads a clock or draws a random number. All amounts are integers (MiB); sums saturate towards
//! "taken", differences towards "nothing free", so that no input can make memory appear.

#![forbid(unsafe_code)]

mod anomaly;
mod choose;
mod departed;
mod explain;
pub mod hash;
mod ledger;
mod multi_gpu;
mod node;
mod nominated;
mod overbooked;
mod pods;
mod products;
mod speed;
mod topology;
mod totals;
mod victims;
mod view;
mod what_if;

pub use anomaly::Anomaly;
pub use choose::{Ask, Choice, ChosenGpu, Question, Refusal};
pub use departed::{Departed, KeptFor};
pub use explain::{DepartedHolder, GpuReport, Holder, HolderKind, NodeReport, NominatedHolder, PodReport, PodShare, gpu_list};
pub use ledger::{Ledger, Part, Reservation, Standing};
pub use node::{GpuState, NodeState, Source, Unusable};
pub use nominated::{Asker, Nominated};
pub use overbooked::{Overbooked, Promise};
pub use products::Taste;
pub use topology::{Candidate, Topology};
pub use totals::Totals;
pub use victims::Victims;
pub use view::NodeView;
pub use what_if::Room;
