//! The two formats in which Divvy's programs show their metrics:
//!
//! - OpenMetrics 1.0.0 (<https://prometheus.io/docs/specs/om/open_metrics_spec/>)
//! - Prometheus's text format 0.0.4 (<https://prometheus.io/docs/instrumenting/exposition_formats/>)
//!
//! The client chooses by its `Accept` header ([`MetricsFormat::negotiate`]). The samples are the same lines in both formats. A program declares each metric once
//! ([`metrics!`]), and writes the samples of one after another to a [`MetricsPage`].

#![forbid(unsafe_code)]

mod declare;
mod format;
mod page;
mod values;

pub use declare::{Metric, MetricKind};
pub use format::MetricsFormat;
pub use page::MetricsPage;
pub use values::{Decimal, Float, Histogram};
