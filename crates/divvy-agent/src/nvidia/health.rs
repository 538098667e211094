//! The health of GPUs and MIG devices.

use divvy_hardware::health::{Settings, Tracker};
use divvy_hardware::{Fault, GpuFacts, Snapshot};
use divvy_model::Vendor;
use divvy_nvidia_config::Config;
use divvy_nvidia_plugin::HealthChecks;

/// The verdicts so far. A MIG device can fail alone; if its GPU fails, it fails too.
#[derive(Debug)]
pub(super) struct Health {
    checks: HealthChecks,
    gpus: Tracker,
    mig_devices: Tracker,
}

impl Health {
    /// Return no verdicts, and the words of the configuration that are not understood.
    pub(super) fn new(config: &Config) -> (Health, Vec<String>) {
        let (checks, unknown) = HealthChecks::parse(&config.plugin.disabled_health_checks, &config.plugin.enabled_health_checks);
        let health = Health {
            checks,
            gpus: Tracker::new(Settings::default()),
            mig_devices: Tracker::new(Settings::default()),
        };
        (health, unknown)
    }

    /// Process a snapshot. Return the UUIDs of the GPUs and MIG devices whose verdict changed.
    pub(super) fn snapshot(&mut self, now: u64, snapshot: &Snapshot) -> Vec<String> {
        let part_of = |gpu: &GpuFacts, uuid: &String| GpuFacts {
            vendor: Vendor::Nvidia,
            uuid: uuid.clone(),
            error: gpu.error.clone(),
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
        let mut changed = self.gpus.snapshot(now, snapshot);
        changed.extend(self.mig_devices.snapshot(now, &parts));
        changed
    }

    /// Process a fault. Return whether a verdict changed. `mig_device` is the UUID of the MIG device that the driver names; then only this one
    /// fails.
    pub(super) fn fault(&mut self, now: u64, fault: &Fault, mig_device: Option<&str>) -> bool {
        let fault = Fault {
            fatal: self.checks.is_fatal(fault.code),
            ..fault.clone()
        };
        let changed = match mig_device {
            Some(uuid) => self.mig_devices.fault(
                now,
                &Fault {
                    uuid: Some(uuid.to_owned()),
                    ..fault
                },
            ),
            None => self.gpus.fault(now, &fault),
        };
        !changed.is_empty()
    }

    /// Process a failed snapshot.
    pub(super) fn unavailable(&mut self, now: u64) {
        self.gpus.unavailable(now);
        self.mig_devices.unavailable(now);
    }

    /// Return why a GPU or a MIG device is unhealthy; `None` if it is healthy or unknown.
    pub(super) fn reason(&self, uuid: &str) -> Option<&str> {
        let verdict = self.gpus.verdict(uuid).or_else(|| self.mig_devices.verdict(uuid));
        verdict.and_then(|verdict| verdict.reason.as_deref())
    }
}
