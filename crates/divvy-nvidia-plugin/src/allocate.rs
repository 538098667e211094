//! What a container gets together with its devices.

use std::collections::{BTreeMap, BTreeSet};

use divvy_nvidia_config::{DeviceIdStrategy, DeviceListStrategy, NvidiaConfig};

use crate::offer::{Unit, imex_node};
use crate::{Error, OfferedResource, PluginMachine};

/// What a container gets together with its devices.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Access {
    /// Environment variables.
    pub envs: BTreeMap<String, String>,
    /// Mounts.
    pub mounts: Vec<HostMount>,
    /// Device nodes.
    pub devices: Vec<AccessDeviceNode>,
    /// Annotations of the container in the container runtime.
    pub annotations: BTreeMap<String, String>,
    /// Fully qualified names of CDI devices.
    pub cdi_devices: Vec<String>,
}

/// A directory or file of the host that is mounted into the container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostMount {
    /// The path in the container.
    pub container_path: String,
    /// The path on the host.
    pub host_path: String,
}

/// A device node, which the container may read and write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AccessDeviceNode {
    /// The path in the container.
    pub container_path: String,
    /// The path on the host.
    pub host_path: String,
}

const VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";
/// The directory for mounts that name devices. NVIDIA's container runtime takes the names of the files in it as device ids.
const VISIBLE_MOUNTS: &str = "/var/run/nvidia-container-devices";
/// The vendor in the names of the CDI devices.
const CDI_VENDOR: &str = "k8s.device-plugin.nvidia.com";
/// Device nodes that belong to the driver and not to one GPU.
pub const CONTROL_NODES: [&str; 4] = [
    "/dev/nvidiactl",
    "/dev/nvidia-uvm",
    "/dev/nvidia-uvm-tools",
    "/dev/nvidia-modeset",
];

impl OfferedResource {
    /// Return what a container with these device ids gets. `unique` is a text that makes the key of the CDI annotation unique.
    ///
    /// # Errors
    /// Fails if an id does not belong to this resource, or if there are too many ids.
    pub fn allocate(
        &self,
        config: &NvidiaConfig,
        machine: &PluginMachine,
        ids: &[String],
        unique: &str,
    ) -> Result<Access, Error> {
        if self.one_per_request && ids.len() > 1 {
            return Err(Error::TooManyShared {
                resource: self.name.clone(),
                found: ids.len(),
            });
        }
        let units = self.units_of(ids)?;
        let strategies = &config.plugin.device_list_strategies;
        let uses = |strategy| strategies.contains(&strategy);
        let is_index = config.plugin.device_id_strategy == DeviceIdStrategy::Index;
        let names: Vec<&str> = (units.iter())
            .map(|unit| if is_index { unit.index.as_str() } else { unit.uuid.as_str() })
            .collect();
        let mut access = Access::default();
        if uses(DeviceListStrategy::Envvar) {
            access.envs.insert(VISIBLE_DEVICES.to_owned(), names.join(","));
            self.imex_variable(&mut access);
        }
        if uses(DeviceListStrategy::VolumeMounts) {
            self.mount_names(&names, &mut access);
        }
        let cdi = || self.cdi_devices(config, machine, &names);
        if uses(DeviceListStrategy::CdiAnnotations) && !names.is_empty() {
            let key = format!("{}nvidia-device-plugin_{unique}", config.plugin.cdi_annotation_prefix);
            access.annotations.insert(key, cdi().join(","));
        }
        if uses(DeviceListStrategy::CdiCri) {
            access.cdi_devices = cdi();
        }
        let by_name = uses(DeviceListStrategy::Envvar) || uses(DeviceListStrategy::VolumeMounts);
        if config.plugin.pass_device_specs && by_name {
            access.devices = self.device_nodes(config, machine, &units);
        }
        for (is_on, name) in [
            (config.gds, "NVIDIA_GDS"),
            (config.mofed, "NVIDIA_MOFED"),
            (config.gdrcopy, "NVIDIA_GDRCOPY"),
        ] {
            if is_on {
                access.envs.insert(name.to_owned(), "enabled".to_owned());
            }
        }
        if self.mps {
            self.connect_to_mps(config, &mut access);
        }
        Ok(access)
    }

    /// Return the units for which these ids stand, without duplicates, in the order of the ids.
    fn units_of(&self, ids: &[String]) -> Result<Vec<&Unit>, Error> {
        let mut units: Vec<&Unit> = Vec::new();
        let mut known = BTreeSet::new();
        for id in ids {
            let unit = self.unit(id).ok_or_else(|| Error::NotOffered {
                resource: self.name.clone(),
                device: id.clone(),
            })?;
            if known.insert(&unit.uuid) {
                units.push(unit);
            }
        }
        Ok(units)
    }

    fn imex_variable(&self, access: &mut Access) {
        if self.imex_channels.is_empty() {
            return;
        }
        let channels: Vec<String> = self.imex_channels.iter().map(u32::to_string).collect();
        access.envs.insert("NVIDIA_IMEX_CHANNELS".to_owned(), channels.join(","));
    }

    fn mount_names(&self, names: &[&str], access: &mut Access) {
        access.envs.insert(VISIBLE_DEVICES.to_owned(), VISIBLE_MOUNTS.to_owned());
        let channels = self.imex_channels.iter().map(|channel| format!("imex/{channel}"));
        let names = names.iter().map(|name| (*name).to_owned()).chain(channels);
        access.mounts.extend(names.map(|name| HostMount {
            container_path: format!("{VISIBLE_MOUNTS}/{name}"),
            host_path: "/dev/null".to_owned(),
        }));
    }

    fn cdi_devices(&self, config: &NvidiaConfig, machine: &PluginMachine, names: &[&str]) -> Vec<String> {
        let device = |class: &str, name: &str| format!("{CDI_VENDOR}/{class}={name}");
        let mut devices: Vec<String> = names.iter().map(|name| device("gpu", name)).collect();
        if names.is_empty() {
            return devices;
        }
        let has = |class: &str| machine.cdi_classes.contains(class);
        if has("imex-channel") {
            devices.extend(
                self.imex_channels
                    .iter()
                    .map(|channel| device("imex-channel", &channel.to_string())),
            );
        }
        for (is_on, class) in [(config.gdrcopy, "gdrcopy"), (config.gds, "gds"), (config.mofed, "mofed")] {
            if is_on && has(class) {
                devices.push(device(class, "all"));
            }
        }
        devices
    }

    fn device_nodes(&self, config: &NvidiaConfig, machine: &PluginMachine, units: &[&Unit]) -> Vec<AccessDeviceNode> {
        let control = CONTROL_NODES.into_iter().filter(|node| machine.device_nodes.contains(*node));
        let control = control.map(str::to_owned);
        let own = units.iter().flat_map(|unit| unit.nodes.iter().cloned());
        let channels = self.imex_channels.iter().map(|channel| imex_node(*channel));
        let mut known = BTreeSet::new();
        let nodes = control.chain(own).chain(channels);
        let dev_root = config.dev_root.trim_end_matches('/');
        nodes
            .filter(|node| known.insert(node.clone()))
            .map(|node| AccessDeviceNode {
                host_path: format!("{dev_root}{node}"),
                container_path: node,
            })
            .collect()
    }

    /// Add what the container needs to reach the MPS daemon of this resource.
    fn connect_to_mps(&self, config: &NvidiaConfig, access: &mut Access) {
        let pipe = format!("/mps/{}/pipe", self.name);
        let root = config.mps_root.trim_end_matches('/');
        access.mounts.push(HostMount {
            host_path: format!("{root}/{}/pipe", self.name),
            container_path: pipe.clone(),
        });
        access.mounts.push(HostMount {
            host_path: format!("{root}/shm"),
            container_path: "/dev/shm".to_owned(),
        });
        access.envs.insert("CUDA_MPS_PIPE_DIRECTORY".to_owned(), pipe);
    }
}
