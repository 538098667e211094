//! How much of a GPU a share counts for.

use divvy_model::{GpuShare, MiB};

/// The memory that a share books on a GPU: all of it if the pod has the whole GPU.
pub(crate) fn booked(share: &GpuShare, capacity: MiB) -> MiB {
    if share.whole {
        capacity.max(share.memory)
    } else {
        share.memory
    }
}
