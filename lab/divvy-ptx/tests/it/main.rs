//! Tests of the reader, of each instruction, and of the kernels of `divvy smoke`.

mod errors;
mod instructions;
mod kernels;
mod memory;
mod mutations;
mod threads;
