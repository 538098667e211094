//! The facts of the node on which decisions rest: the kubelet's checkpoint, cgroups, and the driver's files.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use divvy_agent_core::{ContainerKey, DecisionFacts, Handout};
use divvy_cdi as cdi;
use divvy_kubelet::checkpoint::Checkpoint;
use tracing::warn;

use crate::cgroups;
use crate::own_pods::OwnPods;
use crate::reports::Reports;
use crate::shared_core::SharedCore;
use crate::store::Store;

/// Text for a node whose pods have grants although the kubelet makes no cgroups for pods.
const NO_POD_CGROUPS: &str = "pods with GPU memory run on this node, but the node has no cgroup named kubepods. The agent finds ended containers by \
     their cgroups, so it frees no GPU memory. Set cgroupsPerQOS: true in the kubelet's configuration (the default), or mount the host's \
cgroups for the agent";

/// Where the facts are.
pub(crate) struct NodeFacts {
    pub(crate) core: Arc<SharedCore>,
    pub(crate) pods: Arc<OwnPods>,
    pub(crate) reports: Arc<Reports>,
    pub(crate) store: Arc<Store>,
    pub(crate) sys_root: PathBuf,
    pub(crate) device_plugin_dir: PathBuf,
}

impl NodeFacts {
    /// Read the facts that a decision needs from the node. Blocks on files.
    pub(crate) fn read(&self, fresh: bool) -> DecisionFacts {
        let handouts = match Checkpoint::read(&self.device_plugin_dir) {
            Ok(checkpoint) => {
                self.reports.ready.clear("checkpoint");
                Some(checkpoint.map_or_else(Vec::new, handouts))
            }
            Err(error) => {
                warn!(%error, "cannot use the kubelet's checkpoint");
                self.reports.ready.set("checkpoint", error.to_string());
                None
            }
        };
        let (populated, trouble) = match cgroups::populated_pods(&self.sys_root) {
            Ok(Some(populated)) => (Some(populated), None),
            Ok(None) => (None, self.core.lock().expects_cgroups().then(|| NO_POD_CGROUPS.to_owned())),
            Err(error) => (None, Some(error.to_string())),
        };
        match trouble {
            Some(text) => {
                warn!("{text}");
                self.reports.ready.set("cgroups", text);
            }
            None => self.reports.ready.clear("cgroups"),
        }
        let device_paths = self.core.lock().device_paths();
        let populated = populated.unwrap_or_else(|| self.core.lock().all_that_may_run(handouts.as_deref()));
        DecisionFacts {
            handouts,
            populated,
            synced: self.pods.is_synced(),
            fresh,
            node: self.store.node_files(device_paths),
            specs: BTreeMap::new(),
            memory_in_use: None,
            escapes: BTreeMap::new(),
        }
    }
}

/// Convert the checkpoint's entries. An Allocate response with more than one grant did not come from this agent.
fn handouts(checkpoint: Checkpoint) -> Vec<Handout> {
    for text in &checkpoint.skipped {
        warn!("skipped an entry of the kubelet's checkpoint: {text}");
    }
    checkpoint
        .entries
        .into_iter()
        .map(|entry| {
            let mut grants = entry.cdi_devices().iter().filter_map(|name| cdi::grant_name(name));
            let grant = match (grants.next(), grants.next()) {
                (Some(name), None) => Some(name.to_owned()),
                _ => None,
            };
            Handout {
                key: ContainerKey {
                    uid: entry.pod_uid,
                    container: entry.container,
                },
                resource: entry.resource,
                ids: entry.ids,
                grant,
            }
        })
        .collect()
}
