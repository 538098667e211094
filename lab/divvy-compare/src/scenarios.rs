//! The scenarios, each file with those of one subject. Their numbers are those of docs/compatibility/device-plugin.md.

mod arguments;
mod choices;
mod labels;
mod mps;
mod plugin;
mod tegra;

use crate::scenario::PluginScenario;

/// Return all scenarios.
pub(crate) fn all() -> Vec<PluginScenario> {
    [
        plugin::plugin(),
        mps::mps(),
        arguments::wrong_arguments(),
        arguments::unusual_files(),
        choices::choices(),
        labels::labels(),
        tegra::tegra(),
    ]
    .concat()
}
