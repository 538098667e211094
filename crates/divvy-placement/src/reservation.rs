//! What is reserved for a pod while its Binding is being written.

use divvy_model::{Held, PodKey};

/// An allocation that was promised to a pod and is not seen in the pod's annotations yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reservation {
    pub pod: PodKey,
    /// The allocation that is being written to the pod.
    pub held: Held,
    /// Allocations that were written for this node before, without an answer. One of them may still take effect instead of
    /// `held`. Each of them counts like `held`, so that whichever takes effect was not promised to another pod.
    pub earlier: Vec<Held>,
    /// The progress of the write.
    pub standing: Standing,
    /// When the allocation was last written, by the caller's clock in nanoseconds. The ledger itself does not use it.
    pub since_ns: u64,
}

impl Reservation {
    /// Return all allocations that may take effect, the most recent first.
    pub fn possible(&self) -> impl Iterator<Item = &Held> {
        std::iter::once(&self.held).chain(self.earlier.iter().rev())
    }
}

/// The progress of a reservation's write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// The Binding was sent, and there is no answer yet.
    InFlight,
    /// The Binding took effect; the pod's own event has not arrived yet.
    Bound,
    /// No answer arrived. The Binding may have taken effect, or may still do so.
    Doubt,
}
