//! CUDA's symbols. Each call passes the gate of [`crate::driver`], and no panic leaves a symbol.

mod array;
mod context;
mod copy;
mod device;
mod entry;
mod graph;
mod library;
mod memory;
mod pointer;
mod pool;
mod proc_address;
mod share;
mod symbols;
mod vmm;
mod work;

pub(crate) use vmm::Location;
