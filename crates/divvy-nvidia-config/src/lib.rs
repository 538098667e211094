//! The configuration of NVIDIA's device plugin, GPU feature discovery, MPS control daemon, and config-manager: flags, environment variables,
//! and the configuration file, version v1 (<https://github.com/NVIDIA/k8s-device-plugin>, README.md and api/config/v1).
//!
//! ```text
//! arguments, environment ─► Invocation ─┐
//! text of the file ─────────────────────┴─► Config, warnings
//! ```
//!
//! [`select`] is the decision of `config-manager`, which chooses the file for a node.
//!
//! Flags have priority over environment variables, those over the file, and the file over the defaults.
//!
//! There are two intended differences from NVIDIA's programs. An unknown key in the file causes a warning, as does a key that occurs twice
//! and a second YAML document. And `resources.gpus`, `resources.mig`, `rename`, and `devices` take effect; NVIDIA's programs read them and ignore them.

mod duration;
mod error;
mod file;
mod flags;
mod manager;
mod merge;
mod place;
mod select;
mod value;

use std::collections::BTreeMap;

pub use error::Error;
pub use flags::{EarlyExit, Invocation, NvidiaProgram};
pub use manager::{ConfigManager, SignalTo};
pub use select::{Available, Chosen, Fallback, Selection, Unlabelled, select};
pub use value::{
    DeviceIdStrategy, DeviceListStrategy, DevicePlugin, DeviceReference, Discovery, FeatureDiscovery, Imex, NvidiaConfig,
    NvidiaMigStrategy, ReplicatedDevices, ReplicatedResource, ResourcePattern, Resources, SharedDevicesPolicy, Sharing,
    SharingStrategy, SleepInterval,
};

/// The environment variables of a program.
pub type Environment = BTreeMap<String, String>;
