//! Labels compared with what NVIDIA's gpu-feature-discovery printed, and what holds for the labels of any machine.

mod build;
mod machines;
mod recorded;
