//! The node agent: device plugin, arbiter of GPU memory, and publisher of the inventory.
//!
//! ```text
//! divvy-probe ─ hardware ─┐                     ┌─ plugin ── kubelet: ListAndWatch, preferred, Allocate
//! API server ─ cluster ───┼─► divvy_agent_core::Core ─────┤
//! checkpoint, cgroups ────┘   (pure)            └─ grants ── PreStart, reconcile: facts → actions → files, events, limits
//! ```
//!
//! [`divvy_agent_core`] makes every decision and has no side effects. `grants` reads facts, calls [`divvy_agent_core`], and performs its actions under one lock.
//! The other modules move values in and out. `agent` lists the owners of state, and `run` the tasks.

#![forbid(unsafe_code)]

mod accounting;
mod agent;
mod args;
mod busy;
mod cgroups;
mod clock;
mod cluster;
mod config;
mod config_files;
mod driver_check;
mod driver_spec;
mod error;
mod files;
mod grants;
mod guard;
mod hardware;
mod health_change;
mod http;
pub mod labels;
mod limiting;
mod limits;
mod measuring;
mod memory_in_use;
mod metering;
mod metrics;
mod mps;
mod node_config;
mod node_facts;
mod notice;
pub mod nvidia;
mod observed;
mod own_node;
mod own_pods;
mod pages;
mod pending_event;
mod plugin;
mod probe_access;
mod publishing;
mod readiness;
mod registration;
mod reports;
mod run;
mod shared_core;
mod store;
mod usage;

pub use args::{
    AgentSettings, Args, DeviceDelivery, DriverSpecMode, GuardMode, LabelsMode, MigStrategyArg, NotAProbe, OnEscape, ProbeChoice,
};
pub use config::AgentConfig;
pub use error::Error;
pub use files::FileError;
pub use metrics::{AgentMetrics, Allow, MeasuredMetrics, PluginCounts, PluginMetrics, UnknownMetric};
pub use run::run;

/// Run the agent with the flags of `divvy agent` until it is told to stop.
///
/// # Errors
/// A setting is wrong, or a part of the agent ended.
pub async fn main(args: Args) -> Result<(), Error> {
    let file = args
        .config
        .as_deref()
        .map(AgentSettings::read)
        .transpose()?
        .unwrap_or_default();
    let stopped = divvy_program::until_stopped(args.exit_with_stdin).map_err(|error| Error::Ended {
        part: "the wait for signals",
        text: error.to_string(),
    })?;
    let settings = args.settings.or(file);
    if let Some(directory) = args.node_configs {
        return node_config::run(settings, directory, stopped).await;
    }
    let config = AgentConfig::merged(settings, AgentSettings::default());
    node_config::forget(&config.state_dir())?;
    run(config, stopped).await
}
