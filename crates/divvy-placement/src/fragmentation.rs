//! How much of the free memory lies in pieces that are too small: FGD's measure (Weng et al., "Beware of Fragmentation", USENIX ATC 2023), for
//! memory alone.
//!
//! The measure of that paper also counts CPU and models, and `divvy-policy` places pods by it. Here it is a number for people, kept up to date
//! event by event: it is computed from the distinct amounts and not from the GPUs.

use crate::ledger::Ledger;

impl Ledger {
    /// Return the part of the free memory of healthy, shared GPUs that a pod cannot use because too little is free on each single GPU, in
    /// millionths. It is the mean over the pods that ask for shared memory and have not ended, each with the amount that it asks of one GPU.
    /// Rules about GPUs, and CPU and main memory, do not count.
    pub fn fragmentation_ppm(&self) -> u32 {
        self.free_pieces.too_small_for(&self.asked)
    }
}
