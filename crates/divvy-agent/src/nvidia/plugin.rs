//! The device plugin of one resource, which answers the kubelet's calls.

use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use divvy_kubelet::plugin::{AllocateAnswer, CallRefusal, Plugin, PluginDevice, PluginDeviceNode, PluginMount, PluginOptions};
use divvy_nvidia_config::NvidiaConfig;
use divvy_nvidia_plugin::{Access, OfferedResource, PluginMachine};
use tokio::sync::watch;

use super::{MpsSurroundings, mps};

/// The data from which the plugins of all resources answer.
#[derive(Debug)]
pub(super) struct ServedData {
    config: NvidiaConfig,
    offered: Mutex<Offered>,
}

#[derive(Debug, Default)]
struct Offered {
    machine: PluginMachine,
    resources: BTreeMap<String, OfferedResource>,
}

impl ServedData {
    pub(super) fn new(config: NvidiaConfig) -> ServedData {
        ServedData {
            config,
            offered: Mutex::default(),
        }
    }

    pub(super) fn replace(&self, machine: PluginMachine, resources: Vec<OfferedResource>) {
        let resources = resources.into_iter().map(|resource| (resource.name().to_owned(), resource));
        *self.offered() = Offered {
            machine,
            resources: resources.collect(),
        };
    }

    fn offered(&self) -> MutexGuard<'_, Offered> {
        // A panic leaves the value as it was: it is only replaced as a whole.
        self.offered.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The device plugin of one resource.
#[derive(Debug)]
pub(super) struct NvidiaPlugin {
    pub(super) name: String,
    pub(super) devices: watch::Sender<Arc<Vec<PluginDevice>>>,
    pub(super) served: Arc<ServedData>,
    pub(super) mps: MpsSurroundings,
}

impl NvidiaPlugin {
    fn uses_mps(&self) -> bool {
        self.served
            .offered()
            .resources
            .get(&self.name)
            .is_some_and(OfferedResource::uses_mps)
    }
}

impl Plugin for NvidiaPlugin {
    fn resource_name(&self) -> &str {
        &self.name
    }

    fn options(&self) -> PluginOptions {
        PluginOptions {
            pre_start_required: self.uses_mps(),
            preferred_allocation: true,
        }
    }

    fn devices(&self) -> watch::Receiver<Arc<Vec<PluginDevice>>> {
        self.devices.subscribe()
    }

    async fn preferred(&self, available: &[String], must_include: &[String], size: usize) -> Vec<String> {
        let policy = self.served.config.plugin.shared_devices_policy;
        let offered = self.served.offered();
        let resource = offered.resources.get(&self.name);
        resource.map_or_else(Vec::new, |resource| resource.preferred(policy, available, must_include, size))
    }

    fn allocate(&self, ids: &[String]) -> Result<AllocateAnswer, CallRefusal> {
        let offered = self.served.offered();
        let resource = offered
            .resources
            .get(&self.name)
            .ok_or_else(|| CallRefusal::unknown(format!("{} is no longer offered on this node", self.name)))?;
        let access = resource.allocate(&self.served.config, &offered.machine, ids, &unique());
        access.map(answer).map_err(|error| CallRefusal::unknown(error.to_string()))
    }

    /// Wait until the MPS control daemon serves. A container that starts earlier would fail, or use the GPU without limits.
    async fn pre_start(&self, _: Vec<String>) -> Result<(), CallRefusal> {
        if !self.uses_mps() {
            return Ok(());
        }
        let served = mps::served(&self.mps, &self.name).await;
        served.map_err(|reason| {
            CallRefusal::not_yet(format!(
                "the MPS control daemon of {} does not serve: {reason}; the kubelet tries again",
                self.name
            ))
        })
    }
}

/// Return a unique text, in the form of a random UUID.
fn unique() -> String {
    // Each `RandomState` has other keys. The standard library takes the first ones from the system's random numbers.
    let random = || RandomState::new().hash_one(std::process::id());
    let (high, low) = (random(), random());
    format!(
        "{:08x}-{:04x}-4{:03x}-{:04x}-{:012x}",
        high >> 32,
        high >> 16 & 0xffff,
        high & 0xfff,
        0x8000 | (low >> 48 & 0x3fff),
        low & 0xffff_ffff_ffff
    )
}

fn answer(access: Access) -> AllocateAnswer {
    let mount = |mount: divvy_nvidia_plugin::HostMount| PluginMount {
        container_path: mount.container_path,
        host_path: mount.host_path,
        read_only: false,
    };
    let node = |node: divvy_nvidia_plugin::AccessDeviceNode| PluginDeviceNode {
        container_path: node.container_path,
        host_path: node.host_path,
        permissions: "rw".to_owned(),
    };
    AllocateAnswer {
        envs: access.envs,
        mounts: access.mounts.into_iter().map(mount).collect(),
        devices: access.devices.into_iter().map(node).collect(),
        annotations: access.annotations,
        cdi_devices: access.cdi_devices,
    }
}

/// Return a resource's devices for the kubelet.
pub(super) fn devices(resource: &OfferedResource) -> Vec<PluginDevice> {
    let device = |device: divvy_nvidia_plugin::OfferedDevice| PluginDevice {
        id: device.id,
        healthy: device.healthy,
        numa: device.numa.map(i64::from),
    };
    resource.devices().map(device).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unique_texts_are_random_uuids_of_version_4() {
        let all: std::collections::BTreeSet<String> = (0..1000).map(|_| unique()).collect();
        assert_eq!(all.len(), 1000);
        for text in all {
            let lengths: Vec<usize> = text.split('-').map(str::len).collect();
            assert_eq!(lengths, [8, 4, 4, 4, 12], "{text}");
            assert!(
                text.as_bytes()[14] == b'4' && "89ab".contains(char::from(text.as_bytes()[19])),
                "{text}"
            );
        }
    }
}
