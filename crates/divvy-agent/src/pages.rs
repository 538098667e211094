//! What the agent shows over HTTP.

use std::sync::Arc;

use futures::future::BoxFuture;

use crate::accounting::Accounting;
use crate::limiting::Limiting;
use crate::metrics::{MeasuredMetrics, PluginCounts};
use crate::observed::{Observed, ShownUsage};
use crate::readiness::Readiness;
use crate::reports::Reports;
use crate::shared_core::SharedCore;

/// From where the pages have their values.
pub(crate) struct PageSources {
    pub(crate) core: Arc<SharedCore>,
    pub(crate) reports: Arc<Reports>,
    pub(crate) limiting: Arc<Limiting>,
    pub(crate) accounting: Arc<Accounting>,
    /// The node's name, if metrics are served under dcgm-exporter's names.
    pub(crate) dcgm_names_of: Option<String>,
}

impl PageSources {
    /// Add what the guard has found.
    fn with_signs(&self, measured: MeasuredMetrics) -> MeasuredMetrics {
        MeasuredMetrics {
            counted: self.limiting.shares.counted(),
            escapes: self.limiting.escapes(),
            ..measured
        }
    }
}

impl Observed for PageSources {
    fn ready(&self) -> &Readiness {
        &self.reports.ready
    }

    fn counts(&self) -> &PluginCounts {
        self.reports.metrics.counts()
    }

    fn metrics(&self, format: divvy_exposition::MetricsFormat) -> String {
        let measured = self.with_signs(self.accounting.usage().measured());
        self.reports.metrics.text(&self.core.lock(), &measured, format)
    }

    fn usage(&self) -> Option<ShownUsage> {
        let usage = self.accounting.usage();
        let (usage, tag) = usage.sample(&self.with_signs(usage.measured_now()));
        Some(ShownUsage { tag, usage })
    }

    fn measure(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.accounting.measure_for_metrics())
    }

    fn dcgm(&self) -> Option<String> {
        let node = self.dcgm_names_of.as_deref()?;
        let measured = self.accounting.usage().measured();
        Some(self.reports.metrics.dcgm(node, &self.core.lock(), &measured))
    }
}
