//! The ledger and the decisions on it, from outside.

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
