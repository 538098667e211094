//! The node agent: device plugin, arbiter of GPU memory, publisher of the inventory.

#![forbid(unsafe_code)]

mod cgroups;
pub mod config;
pub mod decide;
mod error;
mod files;
mod store;

pub use config::{Config, FileConfig};
pub use error::Error;
pub use files::FileError;
