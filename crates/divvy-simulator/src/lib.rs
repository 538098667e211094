//! Simulation of placement policies: where would the pods of a recorded cluster run under each policy? It calls the same
//! functions as the extender.
//!
//! - [`Trace`]: nodes and pods, read from files with the columns of Alibaba's trace "openb" (`cluster-trace-gpu-v2023`), plain or
//!   gzip
//! - [`Order`]: the order in which the pods arrive, and the order among nodes of equal cost
//! - [`turn_over`], [`replay`]: pods arrive, run for a while, and end, either at random or at the times in the trace
//! - [`inflate`]: pods arrive until they request more than the cluster has, and none ends; the result is how much is in use on
//!   the way
//! - [`what_if`]: a cluster's own pods, placed again
//!
//! Nothing here opens a file, reads a clock, or draws random numbers without a seed.

#![forbid(unsafe_code)]

mod completions;
mod error;
mod inflation;
mod order;
mod random;
mod setting;
mod size;
mod text;
mod trace;
pub mod what_if;

pub use completions::{Completions, Lifetimes, Turnover, replay, turn_over};
pub use error::Error;
pub use inflation::{Inflation, Percent, inflate};
pub use order::Order;
pub use setting::{NodeChoice, Setting};
pub use size::{FitTally, Size};
pub use text::decompress;
pub use trace::{Trace, TraceNode, TracePod};
