//! Tests of the built library. Each simulated CUDA process is a process: this program, started again.

mod bad_input;
mod bed;
mod memory;
mod mig;
mod nvml;
mod processes;
mod ptx;
mod versions;
mod work;
mod worker;
