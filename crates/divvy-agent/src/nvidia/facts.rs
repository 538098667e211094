//! Combines what the probe and the node's files report into a [`PluginMachine`].

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use divvy_hardware::health::HealthVerdict;
use divvy_hardware::{Fault, GpuFacts, Snapshot};
use divvy_model::Vendor;
use divvy_nvidia_config::NvidiaConfig;
use divvy_nvidia_plugin::{CONTROL_NODES, PluginGpu, PluginMachine};

use super::health::NodeHealth;
use crate::health_change::HealthChange;

/// What the driver has reported about the node's GPUs.
#[derive(Debug, Default)]
pub(super) struct DriverFacts {
    /// The last report about each GPU, by UUID. GPUs that have disappeared are kept.
    seen: BTreeMap<String, GpuFacts>,
    /// The UUIDs of the GPUs that the last report lists.
    listed: BTreeSet<String>,
    /// The indices of the GPUs whose values could not be read.
    unreadable: Vec<u32>,
    /// The driver's version.
    pub(super) driver: String,
}

impl DriverFacts {
    /// Report whether the driver has not reported any GPU yet.
    pub(super) fn is_empty(&self) -> bool {
        self.seen.is_empty() && self.unreadable.is_empty()
    }

    /// Update the facts from a snapshot.
    pub(super) fn snapshot(&mut self, snapshot: Snapshot) {
        if let Some(driver) = snapshot.drivers.get(&Vendor::Nvidia) {
            self.driver.clone_from(&driver.version);
        }
        let mut current = BTreeSet::new();
        for gpu in snapshot.gpus.into_iter().filter(|gpu| gpu.vendor == Vendor::Nvidia) {
            current.insert(gpu.uuid.clone());
            self.seen.insert(gpu.uuid.clone(), gpu);
        }
        // A device that cannot be read may be a GPU that was read before.
        let gone: BTreeSet<u32> = self
            .seen
            .values()
            .filter(|gpu| !current.contains(&gpu.uuid))
            .map(|gpu| gpu.index)
            .collect();
        let unreadable = snapshot
            .unreadable
            .into_iter()
            .filter(|device| device.vendor == Vendor::Nvidia);
        let unreadable = unreadable.map(|device| device.index);
        self.unreadable = unreadable.filter(|index| !gone.contains(index)).collect();
        self.listed = current;
    }

    /// Return all GPUs that the driver has ever listed.
    pub(super) fn gpus(&self) -> impl Iterator<Item = &GpuFacts> {
        self.seen.values()
    }

    /// Describe the change to a verdict about a GPU or a MIG device, if the driver has ever listed it.
    pub(super) fn change(&self, uuid: &str, verdict: &HealthVerdict) -> Option<HealthChange> {
        if let Some(gpu) = self.seen.get(uuid) {
            return Some(HealthChange::new(&gpu.index.to_string(), &gpu.model, uuid, verdict));
        }
        let mut devices = self
            .seen
            .values()
            .flat_map(|gpu| gpu.mig_devices.iter().map(move |device| (gpu, device)));
        let (gpu, device) = devices.find(|(_, device)| device.uuid == uuid)?;
        let index = format!("{}:{}", gpu.index, device.index);
        let profile = device.profile(gpu.total).unwrap_or_default();
        let model = format!("{} MIG {profile}", gpu.model);
        Some(HealthChange::new(&index, model.trim(), uuid, verdict))
    }

    /// Return the UUID of the MIG device that a fault names.
    pub(super) fn mig_device(&self, fault: &Fault) -> Option<&str> {
        let named = fault.partition?;
        let mut devices = self.seen.get(fault.uuid.as_deref()?)?.mig_devices.iter();
        devices
            .find(|device| (device.gi, device.ci) == named)
            .map(|device| device.uuid.as_str())
    }

    /// Describe the machine. `root` is the directory that contains `/dev` and `/sys`.
    pub(super) fn machine(&self, health: &NodeHealth, config: &NvidiaConfig, root: &Path) -> PluginMachine {
        let known = self.seen.values().map(|facts| PluginGpu {
            lost: facts.lost || !self.listed.contains(&facts.uuid),
            // As NVIDIA's device plugin, name only a NUMA node that the kernel knows. NVML reports node 0 where there is none, such as on WSL.
            numa: facts.numa.filter(|_| is_known_to_the_kernel(facts, root)),
            ..gpu(facts, health)
        });
        let mut gpus: Vec<PluginGpu> = known
            .chain(self.unreadable.iter().map(|index| PluginMachine::unreadable(*index)))
            .collect();
        gpus.sort_by(|a, b| (a.index, &a.uuid).cmp(&(b.index, &b.uuid)));
        let below = |path: &str| root.join(path.trim_start_matches('/'));
        let channels = config.imex.channel_ids.iter();
        let channels = channels.map(|channel| format!("/dev/nvidia-caps-imex-channels/channel{channel}"));
        let mounted = Path::new(&config.plugin.container_driver_root);
        let has_channel = |node: &String| {
            [mounted, root]
                .iter()
                .any(|root| root.join(node.trim_start_matches('/')).exists())
        };
        let nodes = CONTROL_NODES
            .iter()
            .map(|node| (*node).to_owned())
            .filter(|node| below(node).exists());
        PluginMachine {
            gpus,
            device_nodes: nodes.chain(channels.filter(has_channel)).collect(),
            cdi_classes: BTreeSet::new(),
        }
    }
}

/// Report whether the kernel has a PCI device for a GPU.
fn is_known_to_the_kernel(facts: &GpuFacts, root: &Path) -> bool {
    !facts.pci.is_empty() && root.join("sys/bus/pci/devices").join(&facts.pci).exists()
}

fn gpu(facts: &GpuFacts, health: &NodeHealth) -> PluginGpu {
    let cc = facts.cc.split_once('.');
    let failed = facts.mig_devices.iter().map(|device| &device.uuid);
    PluginGpu {
        uuid: facts.uuid.clone(),
        unreadable: false,
        lost: facts.lost,
        index: facts.index,
        minor: facts.minor,
        model: facts.model.clone(),
        memory: facts.total,
        cc: cc.and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?))),
        numa: facts.numa,
        links: facts.links.clone(),
        mig: facts.mig.map(|(is_on, _)| is_on),
        mig_devices: facts.mig_devices.clone(),
        healthy: health.reason(&facts.uuid).is_none(),
        failed_mig_devices: failed.filter(|uuid| health.reason(uuid).is_some()).cloned().collect(),
    }
}

#[cfg(test)]
mod tests {
    use divvy_hardware::{SNAPSHOT_VERSION, UnreadableDevice};
    use divvy_model::{MiB, MigDevice, MigParts};
    use divvy_nvidia_config::{Environment, Invocation, NvidiaProgram};

    use super::super::Pace;
    use super::*;

    fn snapshot(gpus: &[(&str, u32)], unreadable: &[u32]) -> Snapshot {
        let gpu = |(uuid, index): &(&str, u32)| GpuFacts {
            uuid: (*uuid).to_owned(),
            index: *index,
            mig_devices: vec![MigDevice {
                uuid: format!("MIG-{index}"),
                gi: 7,
                ..MigDevice::default()
            }],
            ..GpuFacts::default()
        };
        let lost = |index: &u32| UnreadableDevice {
            vendor: Vendor::Nvidia,
            index: *index,
            lost: true,
            error: "GPU is lost".to_owned(),
        };
        Snapshot {
            v: SNAPSHOT_VERSION,
            drivers: BTreeMap::new(),
            gpus: gpus.iter().map(gpu).collect(),
            unreadable: unreadable.iter().map(lost).collect(),
        }
    }

    fn uuids(facts: &DriverFacts) -> Vec<String> {
        let invocation = Invocation::parse(NvidiaProgram::DevicePlugin, "1", &[], &Environment::new()).expect("no arguments");
        let (config, _) = invocation.config(None).expect("the defaults");
        let machine = facts.machine(
            &NodeHealth::new(&config, Pace::default()).0,
            &config,
            Path::new("/nonexistent"),
        );
        machine.gpus.into_iter().map(|gpu| gpu.uuid).collect()
    }

    /// A GPU keeps its UUID if it was read before it was lost.
    #[test]
    fn a_lost_gpu_keeps_its_uuid_or_gets_a_name() {
        let mut facts = DriverFacts::default();
        facts.snapshot(snapshot(&[("GPU-a", 0)], &[1]));
        assert_eq!(uuids(&facts), ["GPU-a", "GPU-unreadable-1"]);
        facts.snapshot(snapshot(&[("GPU-a", 0), ("GPU-b", 1)], &[]));
        assert_eq!(uuids(&facts), ["GPU-a", "GPU-b"]);
        facts.snapshot(snapshot(&[("GPU-a", 0)], &[1]));
        assert_eq!(uuids(&facts), ["GPU-a", "GPU-b"]);
    }

    #[test]
    fn a_gpu_is_on_a_numa_node_only_if_the_kernel_knows_the_gpu() {
        let root = tempfile::tempdir().expect("a directory");
        std::fs::create_dir_all(root.path().join("sys/bus/pci/devices/0000:81:00.0")).expect("created");
        let invocation = Invocation::parse(NvidiaProgram::DevicePlugin, "1", &[], &Environment::new()).expect("no arguments");
        let (config, _) = invocation.config(None).expect("the defaults");
        let numa = |pci: &str| {
            let mut found = snapshot(&[("GPU-a", 0)], &[]);
            (found.gpus[0].pci, found.gpus[0].numa) = (pci.to_owned(), Some(0));
            let mut facts = DriverFacts::default();
            facts.snapshot(found);
            facts
                .machine(&NodeHealth::new(&config, Pace::default()).0, &config, root.path())
                .gpus[0]
                .numa
        };
        assert_eq!((numa("0000:81:00.0"), numa("0000:82:00.0"), numa("")), (Some(0), None, None));
    }

    #[test]
    fn a_fault_names_a_mig_device_by_its_instances() {
        let mut facts = DriverFacts::default();
        facts.snapshot(snapshot(&[("GPU-a", 0)], &[]));
        let fault = |uuid: &str, partition| Fault {
            vendor: Vendor::Nvidia,
            uuid: Some(uuid.to_owned()),
            code: 79,
            fatal: true,
            name: "XID 79".to_owned(),
            partition,
        };
        assert_eq!(facts.mig_device(&fault("GPU-a", Some((7, 0)))), Some("MIG-0"));
        for other in [
            fault("GPU-a", Some((8, 0))),
            fault("GPU-a", None),
            fault("GPU-b", Some((7, 0))),
        ] {
            assert_eq!(facts.mig_device(&other), None);
        }
    }

    /// A change of an unknown GPU or MIG device is not reported.
    #[test]
    fn a_change_names_the_gpu_or_mig_device() {
        let mut found = snapshot(&[("GPU-a", 3)], &[]);
        (found.gpus[0].model, found.gpus[0].total) = ("NVIDIA A100".to_owned(), MiB(40960));
        found.gpus[0].mig_devices[0].parts = Some(MigParts {
            gi_slices: 1,
            ci_slices: 1,
            memory: 4864,
            ..MigParts::default()
        });
        let mut facts = DriverFacts::default();
        facts.snapshot(found);
        let failed = HealthVerdict {
            health: divvy_model::Health::Failed,
            reason: Some("XID 79".to_owned()),
        };
        let told = |uuid: &str| facts.change(uuid, &failed).map(|change| change.text);
        for (uuid, start) in [
            ("GPU-a", "GPU 3 (NVIDIA A100, GPU-a) failed: XID 79. "),
            ("MIG-3", "GPU 3:0 (NVIDIA A100 MIG 1g.5gb, MIG-3) failed: XID 79. "),
        ] {
            let text = told(uuid).expect("a change");
            assert!(text.starts_with(start), "{text}");
        }
        assert_eq!(told("GPU-b"), None);
    }
}
