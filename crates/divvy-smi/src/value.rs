//! What was read.

use serde::{Serialize, Serializer};

/// What was read from a machine's driver and GPUs at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Smi {
    /// The time, as asctime(3) writes it: `Fri Mar 11 12:53:49 2022`.
    pub time: String,
    /// The driver's version, such as `550.54.15`. It selects the edition of the table.
    pub driver: String,
    /// The newest CUDA version that the driver supports, such as `12.4`. `None` if it is unknown.
    pub cuda: Option<String>,
    /// The GPUs, ordered by index.
    pub gpus: Vec<SmiGpu>,
    /// The processes, ordered by GPU.
    pub processes: Vec<SmiProcess>,
}

impl Smi {
    /// Report whether there are GPUs, and the driver gives a handle of none.
    pub fn is_without_handles(&self) -> bool {
        !self.gpus.is_empty() && self.gpus.iter().all(|gpu| gpu.no_handle.is_some())
    }
}

/// A value that the driver returned or refused. In JSON, it is the value or null.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Reading<T> {
    /// The value.
    Value(T),
    /// The GPU or the driver does not have the value: `N/A`.
    #[default]
    Absent,
    /// The driver could not read the value: `ERR!`.
    Failed,
}

impl<T> Reading<T> {
    /// Apply a function to the value.
    pub fn map<U>(self, change: impl FnOnce(T) -> U) -> Reading<U> {
        match self {
            Reading::Value(value) => Reading::Value(change(value)),
            Reading::Absent => Reading::Absent,
            Reading::Failed => Reading::Failed,
        }
    }
}

impl<T> From<Option<T>> for Reading<T> {
    fn from(value: Option<T>) -> Reading<T> {
        value.map_or(Reading::Absent, Reading::Value)
    }
}

impl<T: Serialize> Serialize for Reading<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Reading::Value(value) => serializer.serialize_some(value),
            Reading::Absent | Reading::Failed => serializer.serialize_none(),
        }
    }
}

/// What nvidia-smi says of a GPU that has fallen off the bus (NVML_ERROR_GPU_IS_LOST), with two spaces. It is published in
/// <https://github.com/AlexeyAB/darknet/issues/86>, for example.
pub const LOST: &str = "GPU is lost.  Reboot the system to recover this GPU";

/// A GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SmiGpu {
    /// NVML's index.
    pub index: u32,
    /// The GPU's UUID, which the table does not show.
    pub uuid: String,
    /// The product name.
    pub name: Reading<String>,
    /// Whether the driver stays initialized without clients.
    pub persistence: Reading<bool>,
    /// The PCI bus id in NVML's form, such as `00000000:81:00.0`.
    pub bus: String,
    /// Whether a display is initialized on the GPU.
    pub display: Reading<bool>,
    /// The state of ECC.
    pub ecc: Reading<Ecc>,
    /// The speed of the fan in percent.
    pub fan: Reading<u32>,
    /// The temperature in °C.
    pub temperature: Reading<u32>,
    /// The performance state, from 0 to 15.
    pub performance: Reading<u32>,
    /// The power draw in watts.
    pub power: Reading<u32>,
    /// The limit of the power draw in watts.
    pub power_limit: Reading<u32>,
    /// The memory.
    pub memory: Reading<SmiMemory>,
    /// Percent of the last sample period in which a kernel was running.
    pub utilization: Reading<u32>,
    /// Which processes may use the GPU.
    pub compute_mode: Reading<SmiComputeMode>,
    /// Whether MIG is enabled.
    pub mig: Reading<bool>,
    /// The MIG devices.
    pub mig_devices: Vec<SmiMigDevice>,
    /// Why values could not be read.
    pub error: Option<String>,
    /// Why the driver gives no handle of the GPU, in nvidia-smi's words, such as [`LOST`]. The GPU then has a line above the table, and no rows in it.
    #[serde(skip)]
    pub no_handle: Option<String>,
}

/// Whether the memory has ECC, and its errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Ecc {
    /// ECC is switched off.
    Off,
    /// ECC is switched on, and the driver does not count the errors of the whole GPU, because MIG is enabled.
    On,
    /// The number of errors since the driver was loaded that could not be corrected.
    Uncorrected(u64),
}

/// Memory in MiB.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct SmiMemory {
    /// What is used.
    #[serde(rename = "usedMiB")]
    pub used: u64,
    /// All memory.
    #[serde(rename = "totalMiB")]
    pub total: u64,
}

/// Which processes may use a GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SmiComputeMode {
    /// Any number of processes.
    #[default]
    Default,
    /// One thread of one process.
    ExclusiveThread,
    /// No process.
    Prohibited,
    /// One process.
    ExclusiveProcess,
}

/// A MIG device of a GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SmiMigDevice {
    /// NVML's index of the MIG device on its GPU.
    pub index: u32,
    /// The UUID, which the table does not show.
    pub uuid: String,
    /// The number of the GPU instance.
    pub gi: u32,
    /// The number of the compute instance.
    pub ci: u32,
    /// The memory.
    pub memory: Reading<SmiMemory>,
    /// The memory that is mapped into the PCI address space (BAR1).
    pub bar1: Reading<SmiMemory>,
    /// The number of streaming multiprocessors.
    pub multiprocessors: Reading<u32>,
    /// The number of errors of the memory that could not be corrected.
    pub uncorrected_ecc: Reading<u64>,
    /// The engines, which the MIG devices of a GPU instance share.
    pub engines: Reading<MigEngines>,
}

/// The numbers of the engines of a MIG device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MigEngines {
    /// Copy engines.
    pub copy: u32,
    /// Video encoders.
    pub encoders: u32,
    /// Video decoders.
    pub decoders: u32,
    /// Optical flow accelerators.
    pub ofa: u32,
    /// JPEG decoders.
    pub jpeg: u32,
}

/// The numbers of a GPU instance and of a compute instance in it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Instances {
    /// The GPU instance.
    pub gi: u32,
    /// The compute instance.
    pub ci: u32,
}

/// A process on a GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SmiProcess {
    /// The index of the GPU.
    pub gpu: u32,
    /// The MIG device, if the process runs on one.
    pub instances: Option<Instances>,
    /// The PID on the machine.
    pub pid: u32,
    /// What the process uses the GPU for.
    pub kind: ProcessType,
    /// The program's name.
    pub name: String,
    /// The memory in MiB. `None` if the driver does not report it.
    #[serde(rename = "usedMiB")]
    pub memory: Option<u64>,
    /// The pod of the process. `None` for a process of the machine.
    pub pod: Option<ProcessPod>,
}

/// What a process uses a GPU for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub enum ProcessType {
    /// Computing.
    #[default]
    #[serde(rename = "C")]
    Compute,
    /// Rendering.
    #[serde(rename = "G")]
    Graphics,
    /// Both.
    #[serde(rename = "C+G")]
    Both,
    /// Computing as a client of CUDA's Multi-Process Service (MPS).
    #[serde(rename = "M+C")]
    Mps,
}

/// The pod of a process.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ProcessPod {
    /// The pod's UID.
    pub uid: String,
    /// The pod's namespace. `None` if the machine has no record of the pod.
    pub namespace: Option<String>,
    /// The pod's name. `None` if the machine has no record of the pod.
    pub name: Option<String>,
    /// The names of the pod's containers that have a share of a GPU. The process may belong to any container of the pod.
    pub containers: Vec<String>,
}
