//! What the labels are made from.

use std::sync::Arc;

use divvy_hardware::Snapshot;
use divvy_labels::Labels;

use super::{DescribedHost, plain_labels};
use crate::{Error, MigStrategyArg};

/// What the agent has last seen of the node's GPUs.
#[derive(Debug, Clone, Default)]
pub(crate) enum SeenGpus {
    /// Nothing yet.
    #[default]
    Nothing,
    /// The drivers' answer.
    Snapshot(Arc<Snapshot>),
    /// The driver has been silent for so long that no GPU is offered.
    Silence,
}

impl SeenGpus {
    /// Return the labels, or `None` if nothing is known yet.
    pub(super) fn labels(&self, host: &DescribedHost, strategy: MigStrategyArg) -> Option<Result<Labels, Error>> {
        let machine = match self {
            SeenGpus::Nothing => return None,
            SeenGpus::Snapshot(snapshot) => host.machine(Snapshot::clone(snapshot), 0),
            SeenGpus::Silence => host.without_gpus(0),
        };
        Some(plain_labels(&machine, strategy))
    }
}
