//! How much of one GPU is requested, held, or free.

use divvy_model::MiB;

/// A part of one GPU: memory, and compute time in percent. Sums saturate toward "everything", and differences toward "nothing".
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Amount {
    pub(crate) memory: MiB,
    pub(crate) cores: u32,
}

impl Amount {
    /// Nothing.
    pub(crate) const NONE: Amount = Amount {
        memory: MiB::ZERO,
        cores: 0,
    };

    /// Return the sum.
    pub(crate) fn plus(self, other: Amount) -> Amount {
        Amount {
            memory: self.memory.saturating_add(other.memory),
            cores: self.cores.saturating_add(other.cores),
        }
    }

    /// Return the difference.
    pub(crate) fn minus(self, other: Amount) -> Amount {
        Amount {
            memory: self.memory.saturating_sub(other.memory),
            cores: self.cores.saturating_sub(other.cores),
        }
    }

    /// Report whether this is at least as much of both.
    pub(crate) fn covers(self, needed: Amount) -> bool {
        self.memory >= needed.memory && self.cores >= needed.cores
    }
}
