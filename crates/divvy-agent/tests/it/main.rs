//! The whole agent on an emulated node.

mod shell;
