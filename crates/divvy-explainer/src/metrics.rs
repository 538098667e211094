//! The metrics of `/metrics`.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use axum::http::StatusCode;
use divvy_exposition::{MetricsFormat, MetricsPage};

divvy_exposition::metrics! {
    QUESTIONS: Counter = "divvy_explainer_questions_total",
        "Questions that were answered, by HTTP status of the answer.";
    CLUSTER_READS: Counter = "divvy_explainer_cluster_reads_total",
        "Times that all nodes and pods were listed to answer questions.";
}

/// The metrics of one explainer. By default nothing is counted yet.
#[derive(Debug, Default)]
pub struct ExplainerMetrics {
    questions: Mutex<BTreeMap<u16, u64>>,
    cluster_reads: AtomicU64,
}

impl ExplainerMetrics {
    fn questions(&self) -> MutexGuard<'_, BTreeMap<u16, u64>> {
        self.questions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Count one answered question.
    pub fn answered(&self, status: StatusCode) {
        *self.questions().entry(status.as_u16()).or_default() += 1;
    }

    /// Count one list of all nodes and pods.
    pub fn cluster_read(&self) {
        self.cluster_reads.fetch_add(1, Ordering::Relaxed);
    }

    /// Return the text of `/metrics`.
    pub fn text(&self, format: MetricsFormat) -> String {
        let mut page = MetricsPage::new(format);
        let questions = self.questions();
        page.write_by(
            &QUESTIONS,
            "code",
            questions.iter().map(|(code, count)| (code.to_string(), count)),
        );
        page.write_one(&CLUSTER_READS, self.cluster_reads.load(Ordering::Relaxed));
        page.finish()
    }
}
