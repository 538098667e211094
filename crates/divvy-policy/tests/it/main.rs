//! Tests of the policies, and of the fleet against the ledger.

mod allocations;
mod fixture;
mod fleet;
mod mapping;
mod multi_gpu;
mod nominated;
mod policies;
mod rules;
