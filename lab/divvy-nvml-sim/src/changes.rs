//! Changes that are made at run time, and the file that stores them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use divvy_model::machine::MachineHealth;
use serde::{Deserialize, Serialize};

/// Changes to the described machine. A missing field means that the description applies.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct MachineChanges {
    /// The error code of nvmlInit; 0 means success.
    pub(crate) init_error: u32,
    /// The time until which calls block, in milliseconds since 1970. It is wall-clock time, because it must outlive the process.
    pub(crate) hang_until_ms: u64,
    /// How often the machine description has been replaced.
    pub(crate) descriptions: u64,
    /// The errors of calls for events.
    pub(crate) events: EventErrors,
    /// Where the driver keeps the limits of cgroups. `None` is `misc` for a driver that is new enough, and an older one has no limits.
    pub(crate) limit_mode: Option<LimitMode>,
    /// The changes to GPUs, by GPU index.
    pub(crate) gpus: BTreeMap<u32, GpuChanges>,
}

/// The error codes of calls that concern an event set; 0 means success.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct EventErrors {
    pub(crate) create: u32,
    pub(crate) wait: u32,
}

/// Changes to one GPU.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct GpuChanges {
    /// Whether the GPU has fallen off the bus.
    pub(crate) lost: bool,
    /// The memory of processes in MiB, by PID. 0 means that a described process has ended.
    pub(crate) processes: BTreeMap<u32, u64>,
    /// The MIG devices that processes use, by PID: the position among the GPU's MIG devices.
    pub(crate) mig_of: BTreeMap<u32, u32>,
    /// The PIDs of processes that are clients of MPS.
    pub(crate) mps: BTreeSet<u32>,
    /// The PIDs of processes that render, and whether they compute as well.
    pub(crate) graphics: BTreeMap<u32, bool>,
    /// The temperature in °C.
    pub(crate) temperature: Option<u32>,
    /// The utilization in percent.
    pub(crate) utilization: Option<u32>,
    /// What the driver counts and reports about the GPU's health, instead of what is described.
    pub(crate) health: Option<MachineHealth>,
    /// What the driver measures, in place of the simulated values.
    pub(crate) gauges: GaugeChanges,
    /// The energy that was used up to the latest change of the power.
    pub(crate) energy: Energy,
    /// The MIG devices, if they are not the described ones.
    pub(crate) mig: Option<Division>,
    /// The error code of nvmlDeviceGetMigMode; 0 means success.
    pub(crate) mig_mode_error: u32,
    /// The error codes of nvmlDeviceGetMemoryInfo, by its version, which is 1 or 2. They are set only by writing the state file.
    pub(crate) memory_errors: BTreeMap<u32, u32>,
    /// The error code of calls that register the GPU for events; 0 means success.
    pub(crate) register: u32,
    /// The error code of nvmlDeviceSetMemoryLimits_v1; 0 means success.
    pub(crate) limit_error: u32,
    /// The error code of nvmlDeviceGetProcessUtilization; 0 means success.
    pub(crate) utilization_error: u32,
    /// The limits of cgroups, by the full path of the cgroup's directory.
    pub(crate) limits: BTreeMap<String, CgroupLimit>,
}

/// Measurements in place of the simulated ones.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct GaugeChanges {
    /// What the driver reserves of the memory, in MiB.
    pub(crate) reserved_mib: u64,
    pub(crate) memory_percent: Option<u32>,
    pub(crate) encoder_percent: Option<u32>,
    pub(crate) decoder_percent: Option<u32>,
    pub(crate) power_milliwatts: Option<u32>,
    /// In place of the integral of the power. It does not grow.
    pub(crate) energy_millijoules: Option<u64>,
    pub(crate) memory_celsius: Option<u32>,
    pub(crate) sm_clock_mhz: Option<u32>,
    pub(crate) memory_clock_mhz: Option<u32>,
    pub(crate) pcie_replays: u32,
    /// Without a value, the GPU has no fan.
    pub(crate) fan_percent: Option<u32>,
    pub(crate) performance_state: Option<u32>,
    pub(crate) power_limit_milliwatts: Option<u32>,
    pub(crate) display_active: bool,
    pub(crate) ecc_off: bool,
    pub(crate) persistence_off: bool,
    /// `NVML_COMPUTEMODE_…`.
    pub(crate) compute_mode: u32,
    /// Errors of the memory over the GPU's lifetime: those that ECC corrected, and the others.
    pub(crate) ecc_aggregate: Option<(u64, u64)>,
    /// Values of GPU Performance Monitoring in percent or MiB/s, by the number of the metric. `None` is not a number (NaN).
    pub(crate) gpm: BTreeMap<String, Option<f64>>,
    /// The same of GPU instances, by their number.
    pub(crate) instance_gpm: BTreeMap<String, BTreeMap<String, Option<f64>>>,
    /// The error codes of the functions of `abi::gauges` and `abi::gpm`, by the function's name.
    pub(crate) errors: BTreeMap<String, u32>,
}

/// The energy that a GPU had used at a time of the monotonic clock.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Energy {
    pub(crate) millijoules: u64,
    pub(crate) at_ms: u64,
}

/// Where a driver keeps the limits of cgroups (the module option `RmMemacctMode`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LimitMode {
    /// The driver limits nothing.
    Off,
    /// In the driver, on kernels before 6.14.
    Misc,
    /// In the kernel's controller `dmem`.
    Dmem,
    /// The driver accepts limits and forgets them.
    Forgotten,
}

/// The limits of a cgroup on one GPU, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CgroupLimit {
    pub(crate) soft: u64,
    pub(crate) hard: u64,
}

/// The MIG devices into which a GPU is divided; `None` if MIG is off.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Division(pub(crate) Option<Vec<Instance>>);

/// A MIG device, in the form of the machine description.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Instance {
    pub(crate) gpu_instance: u32,
    pub(crate) compute_instance: u32,
    pub(crate) profile: u32,
}

/// The version of the file: its inode, and its modification time in seconds and nanoseconds. A replaced file has another inode.
pub(crate) type Stamp = (u64, i64, i64);

/// Return the path of the state file, `<control>.state`.
pub(crate) fn state_file(control: &Path) -> PathBuf {
    let mut name = control.as_os_str().to_owned();
    name.push(".state");
    PathBuf::from(name)
}

/// Return the file's stamp; `None` if the file does not exist.
pub(crate) fn stamp(path: &Path) -> Option<Stamp> {
    let data = fs::metadata(path).ok()?;
    Some((data.ino(), data.mtime(), data.mtime_nsec()))
}

/// Read the state file.
pub(crate) fn read(path: &Path) -> io::Result<MachineChanges> {
    serde_json::from_slice(&fs::read(path)?).map_err(io::Error::other)
}

/// Replace the state file atomically.
pub(crate) fn write(path: &Path, changes: &MachineChanges) -> io::Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(format!(".{}", std::process::id()));
    fs::write(&temporary, serde_json::to_vec(changes).map_err(io::Error::other)?)?;
    fs::rename(&temporary, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reading the file gives the changes that were written.
    #[test]
    fn a_replaced_file_has_another_stamp() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = state_file(&dir.path().join("control"));
        assert_eq!(path, dir.path().join("control.state"));
        assert_eq!(stamp(&path), None);
        let mut changes = MachineChanges::default();
        let mut stamps = Vec::new();
        for lost in [true, false] {
            changes.gpus.entry(1).or_default().lost = lost;
            write(&path, &changes).expect("write");
            assert_eq!(read(&path).expect("read"), changes);
            stamps.push(stamp(&path));
        }
        assert_ne!(stamps[0], stamps[1]);
        std::fs::write(&path, "{\"initError\":9}").expect("by hand");
        assert_eq!(read(&path).expect("partial").init_error, 9);
    }
}
