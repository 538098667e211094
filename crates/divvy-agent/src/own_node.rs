//! This node's object in the API server: what it says about the container runtime, other device plugins, labels, and GPUs out of service.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use divvy_agent_core::MigStrategy;
use divvy_model::out_of_service::GpusOutOfService;
use divvy_model::{Node, WholeKind, runtime};
use tokio::sync::watch;
use tracing::warn;

use crate::reports::Reports;
use crate::shared_core::SharedCore;

/// What follows from the node's object.
pub(crate) struct OwnNode {
    core: Arc<SharedCore>,
    reports: Arc<Reports>,
    /// The labels that the node has, or `None` until it was seen.
    pub(crate) labels: watch::Sender<Option<BTreeMap<String, String>>>,
    /// The GPUs that the node's annotations take out of service.
    pub(crate) out_of_service: watch::Sender<GpusOutOfService>,
    /// `--device-list-strategy cdi`: the operator states that the container runtime supports CDI.
    cdi_declared: bool,
    /// True if the node's container runtime is known not to support CDI. Then the agent offers nothing.
    pub(crate) without_cdi: watch::Sender<bool>,
    /// Whether another device plugin offers whole GPUs on this node.
    other_plugin: AtomicBool,
}

impl OwnNode {
    pub(crate) fn new(core: Arc<SharedCore>, reports: Arc<Reports>, cdi_declared: bool) -> OwnNode {
        OwnNode {
            core,
            reports,
            labels: watch::Sender::default(),
            out_of_service: watch::Sender::default(),
            cdi_declared,
            without_cdi: watch::Sender::new(false),
            other_plugin: AtomicBool::new(false),
        }
    }

    /// Check the current Node object: the container runtime and other device plugins on the node determine whether containers can
    /// get their GPUs, and annotations take GPUs out of service.
    pub(crate) fn check(&self, node: &Node) {
        self.out_of_service.send_if_modified(|known| {
            let changed = *known != node.out_of_service;
            known.clone_from(&node.out_of_service);
            changed
        });
        let refused = node
            .runtime
            .as_deref()
            .filter(|_| !self.cdi_declared)
            .and_then(runtime::without_cdi);
        match &refused {
            None => self.reports.ready.clear("runtime"),
            Some(text) => {
                self.reports.ready.set("runtime", text.clone());
                if !*self.without_cdi.borrow() {
                    let text = format!("this node offers no GPU memory: {text}");
                    warn!("{text}");
                    self.reports.post_on_node(true, "NoCDI", text);
                }
            }
        }
        self.without_cdi.send_replace(refused.is_some());
        let settings = self.core.lock().settings().clone();
        // Without a MIG strategy, the agent does not offer a GPU in MIG mode.
        let is_shared = |kind: &WholeKind| kind.is_of_shared_gpus() || settings.mig != MigStrategy::None;
        let shared = node
            .whole
            .iter()
            .find(|(kind, _)| kind.vendor().is_shared_by_default() && is_shared(kind));
        let theirs = shared.filter(|_| !settings.whole);
        if let Some((kind, offered)) = theirs
            && !self.other_plugin.swap(true, Ordering::Relaxed)
        {
            let text = format!(
                "another device plugin offers {offered} {} on this node, while Divvy shares the memory of the same GPUs: a pod of either plugin may get \
                 a GPU that pods of the other use. Keep NVIDIA's plugin off this node: give its DaemonSet a nodeSelector or an affinity that \
                 excludes the node. With --whole-gpus, Divvy's agent offers {0} itself",
                kind.resource()
            );
            warn!("{text}");
            self.reports.post_on_node(true, "TwoDevicePlugins", text);
        }
        self.other_plugin.store(theirs.is_some(), Ordering::Relaxed);
    }
}
