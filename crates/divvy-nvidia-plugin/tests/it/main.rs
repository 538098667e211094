//! Tests of what the plugin offers and answers, case by case. The numbers in the tests' names are those of the cases in
//! docs/compatibility/device-plugin.md.

mod allocation;
mod build;
mod choice;
mod machines;
mod mps;
mod resources;
mod tegra;
