//! CDI specs from outside, specs that are made from machines which exist as values, and what a container's configuration becomes.

mod bundle;
mod documents;
mod generated;
mod ldcache;
mod machine;
mod plan;
mod properties;
mod registry;
