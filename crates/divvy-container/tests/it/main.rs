//! CDI specs from outside, specs that are made from machines which exist as values, and what a container's configuration becomes.

mod assumed;
mod bundle;
mod documents;
mod edit;
mod engines;
mod generated;
mod ldcache;
mod legacy;
mod live;
#[expect(dead_code, reason = "some of it only the tests of divvy use")]
mod machine;
mod moved;
mod plan;
mod properties;
mod registry;
mod require;
mod rules;
mod schema;
