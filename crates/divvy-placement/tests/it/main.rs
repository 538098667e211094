//! The ledger and the decisions on it, from outside.

mod audit;
mod decisions;
mod events;
mod fixture;
mod mapping;
mod policies;
mod recount;
