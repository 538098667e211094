use divvy_model::MiB;

use crate::ledger::Ledger;
use crate::node::GpuSource;

/// Numbers of the whole ledger, for metrics.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Nodes whose GPUs are read from an inventory.
    pub inventory: u64,
    /// Nodes whose GPUs are read from gpushare's capacities.
    pub division: u64,
    /// Nodes whose GPUs are not offered to any pod.
    pub unusable: u64,
    /// Nodes known only because pods say that they are on them.
    pub unknown: u64,
    /// The number of [`Anomaly::Overcommitted`](crate::Anomaly::Overcommitted).
    pub overcommitted: u64,
    /// The number of [`Anomaly::UnknownGpu`](crate::Anomaly::UnknownGpu).
    pub unknown_gpu: u64,
    /// The number of [`Anomaly::Unreadable`](crate::Anomaly::Unreadable).
    pub unreadable: u64,
    /// The number of [`Anomaly::NotAllocated`](crate::Anomaly::NotAllocated).
    pub not_allocated: u64,
    /// Memory promised beyond what the GPUs have.
    pub overcommit: MiB,
}

impl Ledger {
    /// Sum up the nodes. What each node contributes is counted when the node changes; no pod is read here.
    pub fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        for view in self.nodes_in_any_order() {
            let kind = match view.state().map(|state| &state.source) {
                Some(GpuSource::Inventory) => &mut totals.inventory,
                Some(GpuSource::Division) => &mut totals.division,
                Some(GpuSource::Unusable(_)) => &mut totals.unusable,
                None => &mut totals.unknown,
            };
            *kind = kind.saturating_add(1);
            for (position, gpu) in view.state().iter().flat_map(|state| state.gpus.iter().enumerate()) {
                let beyond = view.used(position).saturating_sub(gpu.capacity.saturating_sub(gpu.held));
                totals.overcommitted = totals.overcommitted.saturating_add(u64::from(beyond > MiB::ZERO));
            }
            let anomalies = view.entry.usage.anomalies;
            totals.unknown_gpu = totals.unknown_gpu.saturating_add(anomalies.unknown_gpu);
            totals.unreadable = totals.unreadable.saturating_add(anomalies.unreadable);
            totals.not_allocated = totals.not_allocated.saturating_add(anomalies.not_allocated);
            totals.overcommit = totals.overcommit.saturating_add(view.overcommitted());
        }
        totals
    }
}
