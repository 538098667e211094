//! The whole agent on an emulated node, and the programs under NVIDIA's names.

mod config_manager;
mod exchange;
mod mps;
mod outlets;
mod shell;
mod tegra;
