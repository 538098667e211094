//! The policies, and the fleet beside the ledger.

mod allocations;
mod fixture;
mod fleet;
mod mapping;
mod multi_gpu;
mod nominated;
mod policies;
mod rules;
