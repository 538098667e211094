//! The metrics of `/metrics`.

use std::fmt;

use axum::http::StatusCode;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Code {
    code: u16,
}

pub(crate) struct Metrics {
    questions: Family<Code, Counter>,
    looks: Counter,
    registry: Registry,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Metrics {
    pub(crate) fn new() -> Metrics {
        let (questions, looks) = (Family::<Code, Counter>::default(), Counter::default());
        let mut registry = Registry::default();
        registry.register(
            "divvy_explainer_questions",
            "Questions that were answered, by HTTP status of the answer",
            questions.clone(),
        );
        registry.register(
            "divvy_explainer_cluster_reads",
            "Times that all nodes and pods were listed to answer questions",
            looks.clone(),
        );
        Metrics {
            questions,
            looks,
            registry,
        }
    }

    pub(crate) fn answered(&self, status: StatusCode) {
        self.questions.get_or_create(&Code { code: status.as_u16() }).inc();
    }

    pub(crate) fn looked(&self) {
        self.looks.inc();
    }

    /// Return the text of `/metrics`, in the OpenMetrics format.
    pub(crate) fn text(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}
