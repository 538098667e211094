//! The ledger, and the decisions that are based on it, through the public interface.

mod allocations;
mod audit;
mod decisions;
mod events;
mod fixture;
mod fleet;
mod mapping;
mod nominated;
mod policies;
mod recount;
mod rules;
mod several;
mod speed;
mod topology;
mod units;
mod victims;
