//! Fuzz targets: everything in Divvy that parses input from outside, the rules for each, and how inputs are changed.
//!
//! - [`targets`]: one [`targets::FuzzTarget`] for each parser, with its seeds and its limits on time and memory
//! - [`chance`]: random changes of bytes
//!
//! Two programs share these: `divvy-fuzz`, which needs nothing but a Rust compiler, and `divvy-fuzz-guided`, in which libFuzzer chooses inputs by the
//! code that they reach. docs/fuzzing.md lists the targets and says how to add one.

pub mod chance;
pub mod targets;
