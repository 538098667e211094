//! NVIDIA GPUs in MIG mode as what programs can use: one GPU for each MIG device.

use divvy_model::limits::DEVICE_TEXT_BYTES;
use divvy_model::{MiB, MigDevice, Partition};

use crate::facts::is_uuid;
use crate::{Fault, GpuFacts, Snapshot};

/// The distance between the indices of the MIG devices of two GPUs. NVML has fewer MIG devices per GPU.
const INDICES: u32 = 100;

/// Return the index of the GPU of which a MIG device with this index is a part, as [`Snapshot::divided`] numbers MIG devices.
pub fn gpu_of_mig_index(index: u32) -> u32 {
    (index / INDICES).saturating_sub(1)
}

impl Snapshot {
    /// Return the snapshot with each GPU that is divided by MIG replaced by its MIG devices. Each MIG device is described as a GPU:
    ///
    /// - Its UUID is that of the MIG device, and [`GpuFacts::partition`] names the GPU and the profile, such as `1g.5gb`.
    /// - Its index is 100 for the first MIG device of GPU 0, 203 for the fourth one of GPU 1, and so on. The indices of GPUs that
    ///   are not divided stay NVML's.
    /// - Its product name ends in the profile: `NVIDIA A100-SXM4-40GB MIG 1g.5gb`.
    /// - Its device nodes are the node of its GPU, and the two nodes that give access to its instances
    ///   ([`MigDevice::capabilities`]).
    ///
    /// A GPU in MIG mode without MIG devices stays as it is; nothing can run on it ([`GpuFacts::unfit`]).
    #[must_use]
    pub fn divided(&self) -> Snapshot {
        let gpus = self.gpus.iter().flat_map(|gpu| match gpu.divisions() {
            [] => vec![gpu.clone()],
            devices => devices.iter().map(|device| gpu.division(device)).collect(),
        });
        Snapshot {
            gpus: gpus.collect(),
            ..self.clone()
        }
    }
}

impl GpuFacts {
    /// Return the MIG devices into which the GPU is divided. The result is empty if MIG is off, and if the driver names MIG devices in
    /// the format of drivers before R470 (`MIG-GPU-…/1/0`), which cannot be the name of a CDI device.
    pub fn divisions(&self) -> &[MigDevice] {
        let devices = MigDevice::of(self.mig, &self.mig_devices).unwrap_or_default();
        let can_be_named = |device: &MigDevice| is_uuid(&device.uuid) && device.index < INDICES;
        if devices.iter().all(can_be_named) { devices } else { &[] }
    }

    fn division(&self, device: &MigDevice) -> GpuFacts {
        let parts = device.parts.unwrap_or_default();
        let profile = device.profile(self.total).unwrap_or_default();
        let memory = MiB(parts.memory);
        let share = |of: u32| match self.total {
            MiB(0) => 0,
            MiB(total) => u32::try_from(u64::from(of).saturating_mul(memory.0) / total).unwrap_or(of),
        };
        let capabilities = device.capabilities.into_iter().flat_map(|(gi, ci)| [gi, ci]);
        let nodes = capabilities.map(|minor| format!("nvidia-caps/nvidia-cap{minor}"));
        let (gi, ci) = (device.gi, device.ci);
        let is_alone = self.divisions().iter().filter(|other| other.gi == gi).count() == 1;
        let unusable = match device.parts {
            None => Some("the driver does not report the memory of this MIG device".to_owned()),
            // The driver reports the memory of the GPU instance for each of its compute instances.
            Some(_) if !is_alone => Some(format!(
                "GPU instance {gi} has several compute instances, which use the same memory; create one compute instance in each GPU instance"
            )),
            Some(_) if device.capabilities.is_none() => Some(format!(
                "/proc/driver/nvidia-caps/mig-minors does not list GPU instance {gi} with compute instance {ci}, so no container can use this MIG device"
            )),
            Some(_) => None,
        };
        GpuFacts {
            uuid: device.uuid.clone(),
            index: self
                .index
                .saturating_add(1)
                .saturating_mul(INDICES)
                .saturating_add(device.index),
            nodes: self.nodes.iter().cloned().chain(nodes).collect(),
            partition: Some(Partition {
                parent: self.uuid.clone(),
                profile: profile.clone(),
            }),
            model: product(&self.model, &profile),
            sms: parts.multiprocessors,
            bandwidth_gbs: share(self.bandwidth_gbs),
            total: memory,
            // The driver reports these for the GPU only.
            used: MiB::ZERO,
            utilization: None,
            links: Vec::new(),
            mig: None,
            mig_devices: Vec::new(),
            fabric: None,
            error: self.error.clone().or(unusable),
            ..self.clone()
        }
    }
}

/// Return the product name of a MIG device, in the length that an inventory can have.
fn product(model: &str, profile: &str) -> String {
    let part = format!("MIG {profile}");
    let room = DEVICE_TEXT_BYTES.saturating_sub(part.len() + 1);
    format!("{} {part}", &model[..model.floor_char_boundary(room)])
        .trim()
        .to_owned()
}

impl Fault {
    /// Return the fault as faults of the GPUs in [`Snapshot::divided`]. `gpu` is the GPU that the fault names. If the GPU is
    /// divided, the fault hits the MIG device that it names, or all MIG devices if it names none of them.
    #[must_use]
    pub fn divided(&self, gpu: Option<&GpuFacts>) -> Vec<Fault> {
        let devices = gpu.map(GpuFacts::divisions).unwrap_or_default();
        if devices.is_empty() {
            return vec![self.clone()];
        }
        let named: Vec<&MigDevice> = devices
            .iter()
            .filter(|device| self.partition == Some((device.gi, device.ci)))
            .collect();
        let hit = if named.is_empty() { devices.iter().collect() } else { named };
        hit.into_iter()
            .map(|device| Fault {
                uuid: Some(device.uuid.clone()),
                ..self.clone()
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use divvy_model::{MigParts, Vendor};
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::SNAPSHOT_VERSION;

    fn device(index: u32, gi: u32, ci: u32) -> MigDevice {
        MigDevice {
            index,
            uuid: format!("MIG-{gi}-{ci}"),
            gi,
            ci,
            capabilities: Some((30 + gi, 40 + gi)),
            parts: Some(MigParts {
                gi_slices: 1,
                ci_slices: 1,
                memory: 4864,
                multiprocessors: 14,
                ..MigParts::default()
            }),
        }
    }

    fn gpu(index: u32, mig: Option<(bool, bool)>, mig_devices: Vec<MigDevice>) -> GpuFacts {
        GpuFacts {
            uuid: format!("GPU-{index}"),
            index,
            minor: Some(index),
            nodes: vec![format!("nvidia{index}")],
            model: "NVIDIA A100-SXM4-40GB".to_owned(),
            sms: 108,
            bandwidth_gbs: 1555,
            total: MiB(40960),
            mig,
            mig_devices,
            ..GpuFacts::default()
        }
    }

    fn snapshot(gpus: Vec<GpuFacts>) -> Snapshot {
        Snapshot {
            v: SNAPSHOT_VERSION,
            drivers: BTreeMap::new(),
            gpus,
            unreadable: Vec::new(),
        }
    }

    /// A MIG device has its own memory and device nodes.
    #[test]
    fn each_mig_device_is_a_gpu_of_its_own() {
        let on = Some((true, true));
        let plain = gpu(0, Some((false, false)), Vec::new());
        let empty = gpu(2, on, Vec::new());
        let all = snapshot(vec![
            plain.clone(),
            gpu(1, on, vec![device(0, 1, 0), device(3, 9, 0)]),
            empty.clone(),
        ]);
        let divided = all.divided();
        assert_eq!(divided.validate().map_err(|error| error.to_string()), Ok(()));
        let [first, one, other, last] = divided.gpus.as_slice() else {
            panic!("{divided:?}")
        };
        assert_eq!((first, last), (&plain, &empty), "what is not divided stays as it is");
        assert!(last.unfit().is_some());
        assert_eq!(
            (one.uuid.as_str(), one.index, one.model.as_str()),
            ("MIG-1-0", 200, "NVIDIA A100-SXM4-40GB MIG 1g.5gb")
        );
        assert_eq!(one.nodes, ["nvidia1", "nvidia-caps/nvidia-cap31", "nvidia-caps/nvidia-cap41"]);
        let partition = Partition {
            parent: "GPU-1".to_owned(),
            profile: "1g.5gb".to_owned(),
        };
        assert_eq!((&one.partition, one.unfit(), &one.error), (&Some(partition), None, &None));
        assert_eq!((one.total, one.sms, one.bandwidth_gbs), (MiB(4864), 14, 184));
        assert_eq!((other.index, other.uuid.as_str()), (203, "MIG-9-0"));
        assert_eq!(divided.divided(), divided);
    }

    #[test]
    fn a_mig_device_that_no_container_could_use_says_why() {
        let of = |edit: &dyn Fn(&mut MigDevice)| {
            let mut device = device(0, 1, 0);
            edit(&mut device);
            let divided = snapshot(vec![gpu(0, Some((true, true)), vec![device])]).divided();
            divided.gpus[0].error.clone().unwrap_or_default()
        };
        assert_eq!(of(&|_| ()), "");
        assert!(of(&|device| device.parts = None).contains("does not report the memory"));
        assert!(of(&|device| device.capabilities = None).contains("mig-minors does not list GPU instance 1"));
        let two = vec![device(0, 1, 0), device(1, 1, 1)];
        let divided = snapshot(vec![gpu(0, Some((true, true)), two)]).divided();
        for part in divided.gpus {
            let error = part.error.unwrap_or_default();
            assert!(error.starts_with("GPU instance 1 has several compute instances"), "{error}");
        }
    }

    #[test]
    fn old_drivers_mig_names_leave_a_gpu_undivided() {
        let old = MigDevice {
            uuid: "MIG-GPU-0/1/0".to_owned(),
            ..device(0, 1, 0)
        };
        let all = snapshot(vec![gpu(0, Some((true, true)), vec![old, device(1, 2, 0)])]);
        assert_eq!(all.divided(), all);
        assert!(all.gpus[0].unfit().is_some());
    }

    #[test]
    fn a_fault_hits_the_mig_device_that_it_names_or_all_of_the_gpu() {
        let gpu = gpu(0, Some((true, true)), vec![device(0, 1, 0), device(1, 2, 0)]);
        let fault = |partition| Fault {
            vendor: Vendor::Nvidia,
            uuid: Some("GPU-0".to_owned()),
            code: 79,
            fatal: true,
            name: "XID 79".to_owned(),
            partition,
        };
        let hit = |fault: Fault, gpu: Option<&GpuFacts>| -> Vec<String> {
            fault.divided(gpu).into_iter().filter_map(|fault| fault.uuid).collect()
        };
        assert_eq!(hit(fault(Some((2, 0))), Some(&gpu)), ["MIG-2-0"]);
        assert_eq!(hit(fault(Some((3, 0))), Some(&gpu)), ["MIG-1-0", "MIG-2-0"]);
        assert_eq!(hit(fault(None), Some(&gpu)), ["MIG-1-0", "MIG-2-0"]);
        assert_eq!(hit(fault(None), None), ["GPU-0"]);
    }

    fn any_device() -> impl Strategy<Value = MigDevice> {
        let parts = proptest::option::of((any::<u64>(), 0_u32..9, 0_u32..9, any::<u32>()));
        let uuid = prop_oneof!["MIG-[0-9a-f]{0,99}", "GPU-[ab]", "MIG-GPU-a/1/0", ".{0,9}"];
        (uuid, 0_u32..200, 0_u32..4, 0_u32..3, parts).prop_map(|(uuid, index, gi, ci, parts)| MigDevice {
            index,
            uuid,
            gi,
            ci,
            capabilities: (gi > 0).then_some((gi, ci)),
            parts: parts.map(|(memory, gi_slices, ci_slices, multiprocessors)| MigParts {
                gi_slices,
                ci_slices,
                // Most of these are possible sizes.
                memory: if ci_slices == 8 { memory } else { memory % 200_000 },
                multiprocessors,
                ..MigParts::default()
            }),
        })
    }

    fn any_valid_snapshot() -> impl Strategy<Value = Snapshot> {
        let uuid = prop_oneof!["GPU-[abc]", "[a-z]{1,96}"];
        let gpu = (uuid, ".{0,40}", any::<bool>(), 0_u64..1 << 41, vec(any_device(), 0..8));
        let gpus = vec(gpu, 0..5).prop_map(|gpus| {
            let gpus = (0..).zip(gpus).map(|(index, (uuid, model, is_on, total, devices))| GpuFacts {
                uuid,
                model,
                total: MiB(total),
                ..super::tests::gpu(index, Some((is_on, is_on)), devices)
            });
            snapshot(gpus.collect())
        });
        gpus.prop_filter("a driver cannot report this", |all| all.validate().is_ok())
    }

    proptest! {
        #[test]
        fn what_a_driver_can_report_stays_so_when_it_is_divided(all in any_valid_snapshot()) {
            let divided = all.divided();
            prop_assert_eq!(divided.validate().map_err(|error| error.to_string()), Ok(()));
            for gpu in &divided.gpus {
                prop_assert!(gpu.model.len() <= DEVICE_TEXT_BYTES);
            }
            // The memory of a GPU instance is offered once.
            let devices = || all.gpus.iter().flat_map(|gpu| gpu.mig_devices.iter().map(move |device| (&gpu.uuid, device)));
            for gpu in divided.gpus.iter().filter(|gpu| gpu.partition.is_some() && gpu.error.is_none()) {
                let of = devices().find(|(_, device)| device.uuid == gpu.uuid).map(|(parent, device)| (parent, device.gi));
                prop_assert_eq!(devices().filter(|(parent, device)| Some((*parent, device.gi)) == of).count(), 1);
            }
        }
    }
}
