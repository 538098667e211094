//! The owners of the agent's state. Each task gets those that it needs.
//!
//! ```text
//! SharedCore, ProbeAccess, Reports      the decisions; questions to the driver; events and metrics
//! OwnPods, OwnNode                      this node's objects in the API server
//! Publishing                            devices, inventory, and labels that the node offers
//! Limiting ─► Accounting                limits of pods; the GPU memory that pods use
//! Grants                                PreStart and reconciliation: facts → actions → files, events, limits
//! ```

use std::path::PathBuf;
use std::sync::Arc;

use crate::accounting::Accounting;
use crate::driver_check::DriverCheck;
use crate::driver_spec::DriverSpecKeeper;
use crate::grants::Grants;
use crate::guard::Shares;
use crate::limiting::Limiting;
use crate::node_facts::NodeFacts;
use crate::own_node::OwnNode;
use crate::own_pods::OwnPods;
use crate::probe_access::ProbeAccess;
use crate::publishing::Publishing;
use crate::reports::Reports;
use crate::shared_core::SharedCore;
use crate::store::Store;

/// The owners of the agent's state, as handles.
pub(crate) struct Agent {
    pub(crate) reports: Arc<Reports>,
    pub(crate) pods: Arc<OwnPods>,
    pub(crate) node: Arc<OwnNode>,
    pub(crate) publishing: Arc<Publishing>,
    pub(crate) limiting: Arc<Limiting>,
    pub(crate) accounting: Arc<Accounting>,
    pub(crate) grants: Arc<Grants>,
}

/// From what an agent is made.
pub(crate) struct AgentParts {
    pub(crate) core: Arc<SharedCore>,
    pub(crate) probe: Arc<ProbeAccess>,
    pub(crate) reports: Reports,
    pub(crate) store: Store,
    pub(crate) shares: Shares,
    pub(crate) driver_spec: DriverSpecKeeper,
    pub(crate) client: kube::Client,
    pub(crate) node_name: String,
    pub(crate) sys_root: PathBuf,
    pub(crate) device_plugin_dir: PathBuf,
    /// `--device-list-strategy cdi`.
    pub(crate) cdi_declared: bool,
}

impl Agent {
    pub(crate) fn new(parts: AgentParts) -> Agent {
        let (core, probe) = (parts.core, parts.probe);
        let (reports, store) = (Arc::new(parts.reports), Arc::new(parts.store));
        let pods = Arc::new(OwnPods::new(core.clone(), reports.clone(), parts.client, &parts.node_name));
        let publishing = Arc::new(Publishing::new(core.clone()));
        let limiting = Arc::new(Limiting::new(
            core.clone(),
            probe.clone(),
            reports.clone(),
            parts.sys_root.clone(),
            parts.shares,
        ));
        let facts = NodeFacts {
            core: core.clone(),
            pods: pods.clone(),
            reports: reports.clone(),
            store: store.clone(),
            sys_root: parts.sys_root,
            device_plugin_dir: parts.device_plugin_dir,
        };
        let driver = DriverCheck {
            core: core.clone(),
            probe: probe.clone(),
            reports: reports.clone(),
            store,
            spec: parts.driver_spec,
        };
        Agent {
            node: Arc::new(OwnNode::new(core.clone(), reports.clone(), parts.cdi_declared)),
            accounting: Arc::new(Accounting::new(core, probe, limiting.clone())),
            grants: Arc::new(Grants::new(facts, driver, publishing.clone(), limiting.clone())),
            reports,
            pods,
            publishing,
            limiting,
        }
    }
}
