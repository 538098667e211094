//! GPU drivers behind a small trait, and the probe: the one process that loads them.
//!
//! A driver's library can hang or crash whoever loads it. Therefore only `divvy-probe` ([`probe`]) does; everybody else
//! reads its Unix socket ([`protocol`]) through a [`client`] that takes what comes as outside input.
//!
//! ```text
//! libnvidia-ml.so ── nvidia::Nvidia: Backend ── probe (threads, no runtime) ══ socket ══ client::ProbeClient (tokio) ── agent
//!                                                                                          Update::{Snapshot, Xid, Unavailable}
//! ```
//!
//! [`health`] turns what is observed into a verdict for each GPU; it is pure.

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
