//! What the labels are made from.

use std::sync::Arc;

use divvy_hardware::Snapshot;
use divvy_labels::Labels;

use super::{Host, plain_labels};
use crate::{Error, MigStrategy};

/// What the agent has last seen of the node's GPUs.
#[derive(Debug, Clone, Default)]
pub(crate) enum Seen {
    /// Nothing yet.
    #[default]
    Nothing,
    /// The drivers' answer.
    Snapshot(Arc<Snapshot>),
    /// The driver has been silent for so long that no GPU is offered.
    Silence,
}

impl Seen {
    /// Return the labels, or `None` if nothing is known yet.
    pub(super) fn labels(&self, host: &Host, strategy: MigStrategy) -> Option<Result<Labels, Error>> {
        let machine = match self {
            Seen::Nothing => return None,
            Seen::Snapshot(snapshot) => host.machine(Snapshot::clone(snapshot), 0),
            Seen::Silence => host.without_gpus(0),
        };
        Some(plain_labels(&machine, strategy))
    }
}
