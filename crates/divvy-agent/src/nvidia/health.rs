//! The health of GPUs and MIG devices.

use std::collections::BTreeMap;
use std::time::Duration;

use divvy_hardware::health::{HealthVerdict, RecoverySettings, Tracker};
use divvy_hardware::{Fault, GpuFacts, Snapshot};
use divvy_model::Vendor;
use divvy_nvidia_config::NvidiaConfig;
use divvy_nvidia_plugin::HealthChecks;

use super::Pace;

/// The health of all GPUs and MIG devices so far. A MIG device can fail alone. If its GPU fails, it fails as well.
#[derive(Debug)]
pub(super) struct NodeHealth {
    checks: HealthChecks,
    gpus: Tracker,
    mig_devices: Tracker,
    /// The GPUs of the MIG devices, by the UUIDs of these.
    parents: BTreeMap<String, String>,
    /// The time in ms after which all GPUs become unhealthy if the driver does not answer. A container that starts later would hang as well.
    silence_ms: u64,
    /// The time since which the driver has not answered.
    silent_since: Option<u64>,
    /// Whether the driver has not answered for too long.
    is_silent: bool,
}

impl NodeHealth {
    /// Create the health checks of a configuration. Also return the words of the configuration that are not understood.
    pub(super) fn new(config: &NvidiaConfig, pace: Pace) -> (NodeHealth, Vec<String>) {
        let settings = settings(pace.recovery);
        let (checks, unknown) = HealthChecks::parse(&config.plugin.disabled_health_checks, &config.plugin.enabled_health_checks);
        let health = NodeHealth {
            checks,
            gpus: Tracker::new(settings),
            mig_devices: Tracker::new(settings),
            parents: BTreeMap::new(),
            silence_ms: u64::try_from(pace.silence.as_millis()).unwrap_or(u64::MAX),
            silent_since: None,
            is_silent: false,
        };
        (health, unknown)
    }

    /// Process a snapshot. Return the UUIDs of the GPUs and MIG devices whose health has changed. MIG devices that changed with their GPU are left out.
    pub(super) fn snapshot(&mut self, now: u64, snapshot: &Snapshot) -> Vec<String> {
        let mut snapshot = snapshot.clone();
        snapshot.gpus.retain(|gpu| gpu.vendor == Vendor::Nvidia);
        self.forget(&snapshot);
        if self.checks.are_off() {
            // It does not matter that XIDs cannot be received.
            snapshot.gpus.iter_mut().for_each(|gpu| gpu.no_events = None);
        }
        let part_of = |gpu: &GpuFacts, uuid: &String| GpuFacts {
            vendor: Vendor::Nvidia,
            uuid: uuid.clone(),
            error: gpu.error.clone(),
            no_events: gpu.no_events.clone(),
            lost: gpu.lost,
            ..GpuFacts::default()
        };
        let parts = snapshot
            .gpus
            .iter()
            .flat_map(|gpu| gpu.mig_devices.iter().map(move |device| part_of(gpu, &device.uuid)));
        let parts = Snapshot {
            gpus: parts.collect(),
            ..snapshot.clone()
        };
        (self.silent_since, self.is_silent) = (None, false);
        let mut changed = self.gpus.snapshot(now, &snapshot);
        let mut parts = self.mig_devices.snapshot(now, &parts);
        parts.retain(|device| self.parents.get(device).is_none_or(|gpu| !changed.contains(gpu)));
        changed.extend(parts);
        changed
    }

    /// Forget the MIG devices that were destroyed. They are not lost: their GPU is there.
    fn forget(&mut self, snapshot: &Snapshot) {
        let mut listed = BTreeMap::new();
        for gpu in &snapshot.gpus {
            let devices = gpu.mig_devices.iter();
            listed.extend(devices.map(|device| (device.uuid.clone(), gpu.uuid.clone())));
        }
        let is_there = |uuid: &String| {
            let gpu = snapshot.gpus.iter().find(|gpu| gpu.uuid == *uuid);
            gpu.is_some_and(|gpu| !gpu.lost && gpu.error.is_none())
        };
        self.parents.retain(|device, gpu| {
            let is_destroyed = !listed.contains_key(device) && is_there(gpu);
            if is_destroyed {
                self.mig_devices.forget(device);
            }
            !is_destroyed
        });
        self.parents.append(&mut listed);
    }

    /// Process a fault. Return the UUIDs of the GPUs and MIG devices whose health has changed. `mig_device` is the UUID of the MIG device that the
    /// driver names, if it names one; then only that MIG device fails.
    pub(super) fn fault(&mut self, now: u64, fault: &Fault, mig_device: Option<&str>) -> Vec<String> {
        if fault.vendor != Vendor::Nvidia {
            return Vec::new();
        }
        let fault = Fault {
            fatal: self.checks.is_fatal(fault.code),
            ..fault.clone()
        };
        match mig_device {
            Some(uuid) => self.mig_devices.fault(
                now,
                &Fault {
                    uuid: Some(uuid.to_owned()),
                    ..fault
                },
            ),
            None => self.gpus.fault(now, &fault),
        }
    }

    /// Process a failed snapshot. Return whether the driver has just become silent for too long.
    pub(super) fn unavailable(&mut self, now: u64) -> bool {
        self.gpus.unavailable(now);
        self.mig_devices.unavailable(now);
        let since = *self.silent_since.get_or_insert(now);
        let before = self.is_silent;
        self.is_silent = now.saturating_sub(since) >= self.silence_ms;
        self.is_silent && !before
    }

    /// Return why a GPU or a MIG device is unhealthy. The result is `None` if it is healthy or unknown.
    pub(super) fn reason(&self, uuid: &str) -> Option<&str> {
        if self.is_silent {
            return Some("the driver does not answer");
        }
        self.verdict(uuid).and_then(|verdict| verdict.reason.as_deref())
    }

    /// Return the verdict on a GPU or a MIG device. It does not say that the driver is silent.
    pub(super) fn verdict(&self, uuid: &str) -> Option<&HealthVerdict> {
        self.gpus.verdict(uuid).or_else(|| self.mig_devices.verdict(uuid))
    }
}

fn settings(recovery: Duration) -> RecoverySettings {
    let wait_ms = u64::try_from(recovery.as_millis()).unwrap_or(u64::MAX);
    RecoverySettings {
        wait_ms,
        longest_wait_ms: RecoverySettings::default().longest_wait_ms.max(wait_ms),
        ..RecoverySettings::default()
    }
}

#[cfg(test)]
mod tests {
    use divvy_hardware::{NoEvents, SNAPSHOT_VERSION};
    use divvy_model::MigDevice;
    use divvy_nvidia_config::{Environment, Invocation, NvidiaProgram};

    use super::*;

    fn health() -> NodeHealth {
        health_with(&Environment::new())
    }

    fn health_with(variables: &Environment) -> NodeHealth {
        let invocation = Invocation::parse(NvidiaProgram::DevicePlugin, "1", &[], variables).expect("no arguments");
        NodeHealth::new(&invocation.config(None).expect("the defaults").0, Pace::default()).0
    }

    fn snapshot() -> Snapshot {
        let device = |index: u32| MigDevice {
            index,
            uuid: format!("MIG-{index}"),
            gi: index + 1,
            ..MigDevice::default()
        };
        let gpu = |uuid: &str, mig_devices| GpuFacts {
            uuid: uuid.to_owned(),
            mig: Some((true, true)),
            mig_devices,
            ..GpuFacts::default()
        };
        Snapshot {
            v: SNAPSHOT_VERSION,
            drivers: BTreeMap::new(),
            gpus: vec![gpu("GPU-a", vec![device(0), device(1)]), gpu("GPU-b", Vec::new())],
            unreadable: Vec::new(),
        }
    }

    fn xid(vendor: Vendor, uuid: &str, xid: u64) -> Fault {
        Fault {
            vendor,
            uuid: Some(uuid.to_owned()),
            code: xid,
            // The probe's own opinion does not count here.
            fatal: false,
            name: format!("XID {xid}"),
            partition: None,
        }
    }

    /// An XID that names no MIG device hits the whole GPU; the GPU and the MIG device both recover.
    #[test]
    fn an_xid_hits_its_mig_device_or_the_gpu() {
        let mut health = health();
        health.snapshot(0, &snapshot());
        assert_eq!(health.fault(1, &xid(Vendor::Nvidia, "GPU-a", 79), Some("MIG-1")), ["MIG-1"]);
        assert_eq!(health.reason("MIG-1"), Some("XID 79"));
        assert_eq!(
            (health.reason("MIG-0"), health.reason("GPU-a"), health.reason("GPU-b")),
            (None, None, None)
        );
        let none: [&str; 0] = [];
        let of_application = health.fault(1, &xid(Vendor::Nvidia, "GPU-b", 13), None);
        assert_eq!(of_application, none);
        assert_eq!(health.fault(1, &xid(Vendor::Amd, "GPU-b", 79), None), none);
        assert_eq!(health.fault(1, &xid(Vendor::Nvidia, "GPU-b", 79), None), ["GPU-b"]);
        assert_eq!(health.reason("GPU-b"), Some("XID 79"));
        for seconds in 0..8 {
            health.snapshot(1_000 + seconds * 5_000, &snapshot());
        }
        assert_eq!((health.reason("MIG-1"), health.reason("GPU-b")), (None, None));
    }

    /// The MIG devices of the GPU fail, too; nothing fails if all XIDs are disabled.
    #[test]
    fn a_gpu_fails_when_xids_cannot_arrive_for_a_minute() {
        let mut without_events = snapshot();
        for gpu in &mut without_events.gpus {
            gpu.no_events = Some(NoEvents {
                error: "no event set".to_owned(),
                ms: 60_000,
            });
        }
        let reason = "errors of this GPU cannot be received (no event set)";
        for (disabled, expected) in [("", Some(reason)), ("13,79", Some(reason)), ("all", None)] {
            let variables = [("DP_DISABLE_HEALTHCHECKS".to_owned(), disabled.to_owned())];
            let mut health = health_with(&variables.into());
            health.snapshot(0, &without_events);
            for uuid in ["GPU-a", "GPU-b", "MIG-0", "MIG-1"] {
                assert_eq!(health.reason(uuid), expected, "{disabled:?} {uuid}");
            }
        }
    }

    /// A destroyed MIG device has not failed.
    #[test]
    fn a_mig_device_is_lost_with_its_gpu() {
        let mut health = health();
        health.snapshot(0, &snapshot());
        let mut divided = snapshot();
        divided.gpus[0].mig_devices.pop();
        assert_eq!(health.snapshot(1, &divided), Vec::<String>::new());
        assert_eq!(health.verdict("MIG-1"), None);
        let lost = Snapshot {
            gpus: vec![divided.gpus.pop().expect("GPU-b")],
            ..snapshot()
        };
        assert_eq!(health.snapshot(2, &lost), ["GPU-a"]);
        assert_eq!(
            health.verdict("MIG-0").map(|verdict| verdict.health),
            Some(divvy_model::Health::Lost)
        );
    }

    /// The driver is silent if it has not answered for a minute.
    #[test]
    fn a_silent_driver_fails_all_gpus_until_it_answers() {
        let mut health = health();
        health.snapshot(0, &snapshot());
        assert!(!health.unavailable(5_000) && !health.unavailable(64_000));
        assert_eq!(health.reason("GPU-a"), None);
        assert!(health.unavailable(65_000));
        assert!(!health.unavailable(70_000), "it is said once");
        assert_eq!(health.reason("GPU-a"), Some("the driver does not answer"));
        health.snapshot(75_000, &snapshot());
        assert_eq!(health.reason("GPU-a"), None);
    }
}
