//! Builders that the tests of several crates share.
//!
//! - [`machine`]: machines as trees of files, from a laptop with one GPU to a server with partitions
//! - [`nodes`]: nodes and pods as values of `divvy-model`

pub mod machine;
pub mod nodes;
