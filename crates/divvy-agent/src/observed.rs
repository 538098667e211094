//! What a program that serves device plugins shows at `/readyz`, `/metrics`, and `/v1/usage`.

use std::borrow::Cow;
use std::sync::Arc;

use divvy_exposition::MetricsFormat;
use divvy_kubelet::plugin::PluginStatus;
use divvy_model::usage::Usage;
use futures::future::BoxFuture;
use tokio::sync::watch;

use crate::metrics::PluginCounts;
use crate::readiness::Readiness;

pub(crate) const NOT_REGISTERED: &str = "not registered yet";

/// What the node's GPUs and containers use, and a tag that stays the same while that does.
pub(crate) struct ShownUsage {
    pub(crate) tag: String,
    pub(crate) usage: Usage,
}

/// A program whose readiness and metrics can be asked for.
pub(crate) trait Observed: Send + Sync {
    fn ready(&self) -> &Readiness;

    fn counts(&self) -> &PluginCounts;

    /// Measure what the metrics show.
    fn measure(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }

    /// Return the text of `/metrics/dcgm`. `None` if it is not served.
    fn dcgm(&self) -> Option<String> {
        None
    }

    /// Return what `/v1/usage` says. `None` if it is not served.
    fn usage(&self) -> Option<ShownUsage> {
        None
    }

    /// Return the text of `/metrics`.
    fn metrics(&self, format: MetricsFormat) -> String;
}

/// Follow a resource's registration for readiness and metrics, until the resource's server ends. `part` stands for it in `/readyz`.
pub(crate) async fn follow_registration(
    observed: Arc<dyn Observed>,
    resource: Cow<'static, str>,
    part: Cow<'static, str>,
    mut status: watch::Receiver<PluginStatus>,
) {
    loop {
        let now = status.borrow_and_update().clone();
        observed.counts().registration(&resource, now.is_ready(), now.registrations);
        if now.is_ready() {
            observed.ready().clear(&part)
        } else {
            let text = now.last_error.as_deref().unwrap_or(NOT_REGISTERED);
            observed.ready().set(part.clone(), format!("{resource}: {text}"));
        }
        if status.changed().await.is_err() {
            // The server has ended. If the node no longer offers the resource, nothing waits for it.
            observed.counts().registration(&resource, false, now.registrations);
            observed.ready().clear(&part);
            return;
        }
    }
}
