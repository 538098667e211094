//! Tests that compare the labels with the output of NVIDIA's gpu-feature-discovery, and tests of properties that hold for any
//! machine.

mod build;
mod machines;
mod recorded;
