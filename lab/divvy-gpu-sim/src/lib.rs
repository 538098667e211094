//! What `divvy-nvml-sim` and `divvy-cuda-sim` have in common. Both are dynamic libraries, which cannot depend on each other.

mod clock;
pub mod description;
pub mod exports;
mod ledger;
pub mod mig;
mod versions;
mod work;

pub use clock::monotonic;
pub use ledger::{GpuLedger, LedgerError, LedgerSlot, ProcessUsage, directory};
pub use versions::{branch, cuda_version, parse_version};
pub use work::Work;
