//! CDI specs from outside, and specs that are made from machines which exist as values.

mod documents;
mod generated;
mod ldcache;
mod moved;
mod properties;
mod registry;
mod schema;
