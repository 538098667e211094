//! Diagnosis of everything between the GPU driver and a running pod: the checks of `divvy doctor`.
//!
//! - [`Facts`]: the input of the checks: a machine's files (a [`Tree`](divvy_host::Tree)), the answers of running programs, and
//!   the cluster's objects. Each fact is known, absent, or unreadable for a stated reason.
//! - [`Check`]: an id, a title, and a function of the facts. [`checks::ALL`] lists the checks in the order of the chain from the
//!   driver to the pods.
//! - [`DoctorReport`]: the results of the checks as text, as JSON, and as an exit status.
//! - [`explain`]: error texts in logs, and the check to which each text belongs.
//!
//! This crate opens no file and no socket. The caller collects the facts (`crates/divvy/src/commands/doctor`), so tests can
//! describe any machine.

#![forbid(unsafe_code)]

mod check;
pub mod checks;
pub mod explain;
pub mod facts;
mod gpu_resource;
mod report;
mod verdict;

pub use check::{Check, CheckFinding, CheckGroup, CheckStop, CheckVerdict, Needs, Repair, Severity};
pub use facts::{Asked, Facts};
pub use report::{CheckStatus, DoctorReport, ReportLine, ReportStyle, Skipped};
