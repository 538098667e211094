//! The ledger, and the decisions that are based on it, through the public interface.

mod both_ways;
mod both_ways_cases;
mod cores;
mod decisions;
mod events;
mod fixture;
mod mig_whole;
mod recount;
mod speed;
mod topology;
mod vendors;
mod victims;
mod whole;
