//! Builders that the tests of several crates share.
//!
//! - [`amd`]: recorded machines with AMD GPUs, written to a directory
//! - [`dice`]: random numbers that a seed determines
//! - [`machine`]: machines as trees of files, from a laptop with one GPU to a server with partitions
//! - [`mps`]: scripts in place of the driver's programs that MPS needs
//! - [`nodes`]: nodes and pods as values of `divvy-model`

pub mod amd;
pub mod dice;
pub mod machine;
pub mod mps;
pub mod nodes;
