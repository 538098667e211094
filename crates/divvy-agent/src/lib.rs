//! The node agent: device plugin, arbiter of GPU memory, publisher of the inventory.
//!
//! ```text
//! divvy-probe ─ hardware ─┐                     ┌─ plugin ── kubelet: ListAndWatch, preferred, Allocate
//! API server ─ cluster ───┼─► divvy_agent_core::Core ─────┤
//! checkpoint, cgroups ────┘   (pure)            └─ agent ─── PreStart, reconcile: facts → actions → files, events
//! ```
//!
//! [`divvy_agent_core`] holds every decision and touches nothing; `agent` reads facts, asks it, and performs its actions under one lock;
//! the other modules move values in and out.

#![forbid(unsafe_code)]

mod agent;
mod cgroups;
mod cluster;
pub mod config;
mod driver;
mod error;
mod files;
mod hardware;
mod http;
mod metrics;
mod plugin;
mod ready;
mod registered;
mod run;
mod store;

pub use config::{Config, FileConfig};
pub use error::Error;
pub use files::FileError;
pub use run::run;
