//! This node's pods, as the API server tells of them: through a watch, and through lists when the kubelet is ahead of the watch.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use divvy_agent_core::{AgentAction, Listing};
use divvy_kube::list;
use divvy_model::Pod;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use tracing::debug;

use crate::reports::Reports;
use crate::shared_core::SharedCore;

/// The part in `/readyz`.
const PART: &str = "pods";
/// The timeout of a list of the node's pods while the kubelet admits one. The kubelet admits no other pod in the meantime.
const ADMISSION_TIMEOUT: Duration = Duration::from_secs(1);

/// Why there is no list of this node's pods.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ListError {
    #[error(transparent)]
    Failed(#[from] divvy_kube::Error),
    #[error("the API server does not answer")]
    Late,
}

/// Tells the core of this node's pods.
pub(crate) struct OwnPods {
    core: Arc<SharedCore>,
    reports: Arc<Reports>,
    client: kube::Client,
    /// The field selector of this node's pods.
    selector: String,
    /// True once the list of pods was complete.
    is_synced: AtomicBool,
    /// Notified when a pod was created, changed, or deleted.
    changed: Notify,
}

impl OwnPods {
    pub(crate) fn new(core: Arc<SharedCore>, reports: Arc<Reports>, client: kube::Client, node: &str) -> OwnPods {
        OwnPods {
            core,
            reports,
            client,
            selector: format!("spec.nodeName={node}"),
            is_synced: AtomicBool::new(false),
            changed: Notify::new(),
        }
    }

    pub(crate) fn client(&self) -> kube::Client {
        self.client.clone()
    }

    pub(crate) fn selector(&self) -> &str {
        &self.selector
    }

    /// Report whether the list of pods was complete once.
    pub(crate) fn is_synced(&self) -> bool {
        self.is_synced.load(Ordering::Acquire)
    }

    /// Wait until the watch tells of a pod.
    pub(crate) fn changed(&self) -> Notified<'_> {
        self.changed.notified()
    }

    /// Wake those who wait for [`OwnPods::changed`].
    pub(crate) fn notify(&self) {
        self.changed.notify_waiters();
    }

    /// Set whether the watch tells of changes; if not, why.
    pub(crate) fn set_watched(&self, interruption: Option<&str>) {
        match interruption {
            None => self.reports.ready.clear(PART),
            Some(text) => {
                let text = format!("the watch of this node's pods was interrupted: {text}");
                self.reports.ready.set(PART, text);
            }
        }
    }

    /// Take a pod that was created or changed.
    pub(crate) fn apply(&self, pod: Pod) {
        let actions = self.core.lock().apply_pod(pod);
        self.reports.post_events(actions);
    }

    /// Forget a pod whose object is gone.
    pub(crate) fn delete(&self, uid: &str) {
        self.core.lock().delete_pod(uid);
    }

    /// Take the list with which a watch begins.
    pub(crate) fn reset(&self, pods: Vec<Pod>) {
        let actions = self.core.lock().reset_pods(pods);
        self.set_synced();
        self.reports.post_events(actions);
    }

    fn set_synced(&self) {
        self.is_synced.store(true, Ordering::Release);
    }

    /// Return the number of pods that are bound to this node and have not got their devices yet.
    pub(crate) fn on_their_way(&self) -> usize {
        self.core.lock().on_their_way()
    }

    /// Ask the API server for the pods of this node, because the kubelet is admitting one of which the watch has not told yet.
    pub(crate) async fn look(&self) {
        if let Err(error) = self.list(ADMISSION_TIMEOUT).await {
            debug!("the kubelet admits a pod that is not known yet: {error}");
        }
    }

    /// List the pods of this node. Return false if the core did not take it over, because the watch started again meanwhile.
    pub(crate) async fn list(&self, limit: Duration) -> Result<bool, ListError> {
        let listing = BegunList::new(&self.core);
        let listed = tokio::time::timeout(limit, list::pods(&self.client, Some(&self.selector)));
        let pods = listed.await.map_err(|_| ListError::Late)??;
        let taken = listing.ended(pods.pods);
        let is_taken = taken.is_some();
        if let Some(actions) = taken {
            self.reports.post_events(actions);
            self.set_synced();
        }
        Ok(is_taken)
    }
}

/// A running request for the list of this node's pods. It is abandoned if it fails or if the kubelet cancels the call.
struct BegunList<'a> {
    core: &'a SharedCore,
    listing: Option<Listing>,
}

impl<'a> BegunList<'a> {
    fn new(core: &'a SharedCore) -> BegunList<'a> {
        let listing = Some(core.lock().begin_list());
        BegunList { core, listing }
    }

    fn ended(mut self, pods: Vec<Pod>) -> Option<Vec<AgentAction>> {
        let listing = self.listing.take()?;
        self.core.lock().listed(listing, pods)
    }
}

impl Drop for BegunList<'_> {
    fn drop(&mut self) {
        if let Some(listing) = self.listing.take() {
            self.core.lock().list_failed(listing);
        }
    }
}
