//! The configuration of NVIDIA's device plugin and of the programs that belong to it: flags, environment variables, and the configuration
//! file, version v1 (<https://github.com/NVIDIA/k8s-device-plugin>, README.md and api/config/v1).

mod value;

pub use value::{
    Config, DeviceIdStrategy, DeviceListStrategy, DevicePlugin, DeviceReference, Discovery, FeatureDiscovery, Imex, MigStrategy,
    ReplicatedDevices, ReplicatedResource, ResourcePattern, Resources, SharedDevicesPolicy, Sharing, SharingStrategy,
    SleepInterval,
};
