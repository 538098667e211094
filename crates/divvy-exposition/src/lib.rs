//! The two formats in which Divvy's programs show their metrics:
//!
//! - OpenMetrics 1.0.0 (<https://prometheus.io/docs/specs/om/open_metrics_spec/>)
//! - Prometheus's text format 0.0.4 (<https://prometheus.io/docs/instrumenting/exposition_formats/>)
//!
//! The client chooses by its `Accept` header ([`Format::negotiate`]). `prometheus-client` only writes OpenMetrics; the text format is made from its
//! output. [`family`] writes single families in the text format whose names OpenMetrics does not allow.

#![forbid(unsafe_code)]

mod convert;
mod format;
mod write;

use std::fmt;

use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::registry::Registry;

pub use format::Format;
pub use write::{Decimal, Family, Kind, family};

/// Return all metrics of the registries in one of the formats. No metric may have exemplars, which only OpenMetrics has.
///
/// # Errors
/// A value cannot be formatted.
pub fn encode(registries: &[&Registry], format: Format) -> Result<String, fmt::Error> {
    match format {
        Format::Text => {
            let mut text = convert::ToText::default();
            for registry in registries {
                encode_registry(&mut text, registry)?;
            }
            Ok(text.finish())
        }
        Format::OpenMetrics => {
            let mut text = String::new();
            for registry in registries {
                encode_registry(&mut text, registry)?;
            }
            encode_eof(&mut text)?;
            Ok(text)
        }
    }
}
