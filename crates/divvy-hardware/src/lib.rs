//! GPU drivers behind a small trait, and the probe, which is the only process that loads them.
//!
//! A driver's library can hang or crash the process that loads it. Therefore only `divvy-probe` ([`probe`]) loads it. All other processes
//! read the probe's Unix socket ([`protocol`]) through a [`client`] that validates everything it receives.
//!
//! ```text
//! libnvidia-ml.so ── nvidia::Nvidia: Backend ── probe (threads, no runtime) ══ socket ══ client::ProbeClient (tokio) ── agent
//!                                                                                          Update::{Snapshot, Xid, Unavailable}
//! ```
//!
//! [`health`] turns observations into a verdict for each GPU, without side effects.

pub mod backend;
pub mod client;
mod error;
mod facts;
pub mod health;
pub mod nvidia;
pub mod probe;
pub mod protocol;

pub use divvy_model::xid_is_fatal;
pub use error::{Code, Error, Failure};
pub use facts::{GpuFacts, GpuProcesses, Known, Process, Snapshot, Unreadable};
