//! Tests of the agent's decisions: tables of cases, the races of docs/compatibility/races.md, and random runs.

mod amounts;
mod both_ways;
mod both_ways_cases;
mod calls;
mod devices;
mod driver_spec;
mod guarded_shares;
mod limited;
mod limits;
mod lists;
mod mps;
mod multi_gpu;
mod node;
mod races;
mod reconcile;
mod under_test;
mod vendor_shares;
mod whole;
