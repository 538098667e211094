//! Tests of how a container's configuration changes.

mod assumed;
mod bundle;
mod edit;
mod legacy;
mod live;
mod plan;
mod require;
mod rules;
