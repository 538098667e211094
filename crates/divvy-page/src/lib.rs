//! The web pages about the GPUs of a cluster, as pure functions: a [`Scene`] in, HTML out. `divvy web` and the extender serve the same pages
//! (`divvy-web`).
//!
//! - [`Scene`]: what is known of the cluster, and [`History`]: what was measured in the last hour
//! - [`Address`]: the path and the query of a page
//!
//! All amounts come from [`divvy_view::amounts`]. All text goes through maud, which escapes it; no HTML is made by `format!`.

#![forbid(unsafe_code)]

mod history;
mod scene;

pub use history::{History, Point};
pub use scene::{Measured, Recorded, RecordedPoint, Scene};
