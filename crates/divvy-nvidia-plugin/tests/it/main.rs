//! What the plugin offers and answers, case by case. The numbers T1 to T31 are those of docs/compatibility/device-plugin.md.

mod allocation;
mod build;
mod choice;
mod machines;
mod resources;
