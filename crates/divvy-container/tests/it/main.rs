//! Tests of parsing CDI specs, generating specs for simulated machines, configuring container engines, and editing a container's configuration.

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
