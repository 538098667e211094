//! What a container's configuration becomes.

mod assumed;
mod bundle;
mod edit;
mod legacy;
mod live;
mod plan;
mod require;
mod rules;
