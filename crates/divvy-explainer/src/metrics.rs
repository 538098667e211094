//! The metrics of `/metrics`.

use std::fmt;

use axum::http::StatusCode;
use divvy_exposition::Format;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Code {
    code: u16,
}

/// The metrics of one explainer. docs/reference/metrics.md is generated from them.
pub struct Metrics {
    questions: Family<Code, Counter>,
    cluster_reads: Counter,
    registry: Registry,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Default for Metrics {
    /// Return metrics that have counted nothing.
    fn default() -> Metrics {
        let (questions, cluster_reads) = (Family::<Code, Counter>::default(), Counter::default());
        let mut registry = Registry::default();
        registry.register(
            "divvy_explainer_questions",
            "Questions that were answered, by HTTP status of the answer",
            questions.clone(),
        );
        registry.register(
            "divvy_explainer_cluster_reads",
            "Times that all nodes and pods were listed to answer questions",
            cluster_reads.clone(),
        );
        Metrics {
            questions,
            cluster_reads,
            registry,
        }
    }
}

impl Metrics {
    /// Count one answered question.
    pub fn answered(&self, status: StatusCode) {
        self.questions.get_or_create(&Code { code: status.as_u16() }).inc();
    }

    /// Count one list of all nodes and pods.
    pub fn cluster_read(&self) {
        self.cluster_reads.inc();
    }

    /// Return the text of `/metrics`.
    ///
    /// # Errors
    /// A value cannot be formatted.
    pub fn text(&self, format: Format) -> Result<String, fmt::Error> {
        divvy_exposition::encode(&[&self.registry], format)
    }
}
