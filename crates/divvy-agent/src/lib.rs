//! The node agent: device plugin, arbiter of GPU memory, and publisher of the inventory.
//!
//! ```text
//! divvy-probe ─ hardware ─┐                     ┌─ plugin ── kubelet: ListAndWatch, preferred, Allocate
//! API server ─ cluster ───┼─► decide::Core ─────┤
//! checkpoint, cgroups ────┘   (pure)            └─ agent ─── PreStart, reconcile: facts → actions → files, events
//! ```
//!
//! [`decide`] makes every decision and has no side effects. `agent` reads facts, calls [`decide`], and performs its actions under one lock.
//! The other modules move values in and out.

#![forbid(unsafe_code)]

mod agent;
mod cgroups;
mod cluster;
pub mod config;
pub mod decide;
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
