//! What is wrong between the GPU driver and a running pod.
//!
//! - [`Facts`]: what was read: a machine's files (a [`Tree`](divvy_host::Tree)), what running programs answered,
//!   the cluster's objects; each known, absent or unreadable with the reason
//! - [`Check`]: an id, a title, and a function of the facts; [`checks::ALL`] has them in the order of the chain from the driver to the pods
//! - [`Report`]: what the checks said, as text, as JSON, and as an exit status
//! - [`explain`]: error texts in logs, and which check each belongs to
//!
//! Nothing here opens a file or a socket: whoever collects the facts does.

#![forbid(unsafe_code)]

mod check;
pub mod checks;
pub mod explain;
pub mod facts;
mod report;

pub use check::{Check, Finding, Group, Needs, Repair, Severity, Stop, Verdict};
pub use facts::{Asked, Facts};
pub use report::{Line, Report, Skipped, Status, Style};
