//! The ledger and the decisions on it, from outside.

mod decisions;
mod events;
mod fixture;
mod recount;
mod speed;
mod topology;
mod victims;
