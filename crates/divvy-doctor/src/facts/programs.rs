//! What running programs answer.

use serde::Deserialize;

/// `divvy-probe --once`: only what checks look at.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Probed {
    /// The driver's version, by NVML.
    pub driver: String,
    /// By index.
    pub gpus: Vec<ProbedGpu>,
    /// Devices that do not even tell their UUID.
    pub unreadable: Vec<Unreadable>,
}

/// One GPU, as NVML says.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ProbedGpu {
    /// `GPU-…`
    pub uuid: String,
    /// NVML's index.
    pub index: u32,
    /// Product.
    pub model: String,
    /// Compute capability, `8.0`; empty if unknown.
    pub cc: String,
    /// The driver answers "GPU is lost".
    pub lost: bool,
    /// Why something could not be read.
    pub error: Option<String>,
    /// `default`, `exclusive-process`, `prohibited`, `exclusive-thread`; none if the driver does not say.
    pub compute_mode: Option<String>,
    /// Whether the driver stays initialised without clients; none if the driver does not say.
    pub persistence: Option<bool>,
    /// Whether MIG is on now, and after the next reset; none where there is no MIG.
    pub mig: Option<(bool, bool)>,
}

/// A device without a name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Unreadable {
    /// NVML's index.
    pub index: u32,
    /// What the driver answers.
    pub error: String,
}

/// What Docker's socket answers to `/version` and `/info`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Docker {
    /// `24.0.7`
    pub version: String,
    /// The default runtime with which it runs now.
    pub default_runtime: String,
    /// The runtimes that it has now.
    pub runtimes: Vec<String>,
}

/// A Unix socket, and what came of connecting to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Socket {
    /// Where.
    pub path: String,
    /// The system's reason when nobody listens.
    pub answers: Result<(), String>,
}

/// What `divvy-runtime` made of a container that asks for all GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuntimeTest {
    /// The runtime.
    pub program: String,
    /// Device nodes that the container would have; the runtime's own error where it refused.
    pub outcome: Result<Vec<String>, String>,
}

/// The scheduler extender.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extender {
    /// Whom the question went to.
    pub url: String,
    /// Its version, or what went wrong.
    pub version: Result<String, String>,
    /// How often kube-scheduler has called its filter, if it says.
    pub filter_calls: Option<u64>,
}
