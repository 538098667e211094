//! The two formats in which Divvy's programs show their metrics:
//!
//! - OpenMetrics 1.0.0 (<https://prometheus.io/docs/specs/om/open_metrics_spec/>)
//! - Prometheus's text format 0.0.4 (<https://prometheus.io/docs/instrumenting/exposition_formats/>)
//!
//! The client chooses by its `Accept` header ([`Format::negotiate`]). The samples are the same lines in both formats. A program declares each metric once
//! ([`metrics!`]), and writes the samples of one after another to a [`Page`].

#![forbid(unsafe_code)]

mod declare;
mod format;
mod page;
mod values;

pub use declare::{Kind, Metric};
pub use format::Format;
pub use page::Page;
pub use values::{Decimal, Float, Histogram};
