//! The whole agent on an emulated node.

mod mps;
mod shell;
