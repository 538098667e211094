//! Tests of what the plugin offers and answers, case by case. docs/compatibility/device-plugin.md lists the cases T1 to T31.

mod allocation;
mod build;
mod choice;
mod machines;
mod resources;
