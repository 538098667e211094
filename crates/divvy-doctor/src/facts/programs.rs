//! Answers of running programs.

use std::collections::BTreeMap;

use divvy_model::Vendor;
use serde::Deserialize;
use serde::de::IgnoredAny;

/// What NVIDIA's driver reports: the part of the output of `divvy-probe --once` that checks use.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(from = "ProbeOutput")]
pub struct Probed {
    /// The driver version that NVML reports.
    pub driver: String,
    /// The GPUs, in the order of NVML's indices.
    pub gpus: Vec<ProbedGpu>,
    /// The devices whose UUID could not be read.
    pub unreadable: Vec<UnreadableGpu>,
}

/// The output of `divvy-probe --once`, which covers the GPUs of all vendors.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ProbeOutput {
    drivers: BTreeMap<Vendor, ProbedDriver>,
    gpus: Vec<OfVendor<ProbedGpu>>,
    unreadable: Vec<OfVendor<UnreadableGpu>>,
}

#[derive(Debug, Deserialize)]
struct ProbedDriver {
    version: String,
}

/// A value about a GPU, with the GPU's vendor.
#[derive(Debug, Deserialize)]
struct OfVendor<T> {
    #[serde(default)]
    vendor: Vendor,
    #[serde(flatten)]
    value: T,
}

impl From<ProbeOutput> for Probed {
    fn from(mut output: ProbeOutput) -> Probed {
        fn of_nvidia<T>(all: Vec<OfVendor<T>>) -> Vec<T> {
            let all = all.into_iter().filter(|one| one.vendor == Vendor::Nvidia);
            all.map(|one| one.value).collect()
        }
        let driver = output.drivers.remove(&Vendor::Nvidia);
        Probed {
            driver: driver.map(|driver| driver.version).unwrap_or_default(),
            gpus: of_nvidia(output.gpus),
            unreadable: of_nvidia(output.unreadable),
        }
    }
}

/// One GPU as NVML reports it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ProbedGpu {
    /// The UUID, `GPU-…`.
    pub uuid: String,
    /// The NVML index.
    pub index: u32,
    /// The product name.
    pub model: String,
    /// The compute capability, such as `8.0`. It is empty if it is unknown.
    pub cc: String,
    /// Whether the driver reports "GPU is lost".
    pub lost: bool,
    /// The error, if a value could not be read.
    pub error: Option<String>,
    /// The compute mode: `default`, `exclusive-process`, `prohibited`, or `exclusive-thread`. `None` if the driver does not report it.
    pub compute_mode: Option<String>,
    /// Whether the driver stays initialized while no client uses it (persistence mode). `None` if the driver does not report it.
    pub persistence: Option<bool>,
    /// Whether MIG is enabled now, and whether it will be enabled after the next reset. `None` if the GPU does not support MIG.
    pub mig: Option<(bool, bool)>,
}

/// A device whose UUID could not be read.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct UnreadableGpu {
    /// The NVML index.
    pub index: u32,
    /// The error from the driver.
    pub error: String,
}

/// Docker's answers to `/version` and `/info`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Docker {
    /// The version, such as `24.0.7`.
    pub version: String,
    /// The default runtime of the running dockerd.
    pub default_runtime: String,
    /// The names of the runtimes of the running dockerd, sorted.
    pub runtimes: Vec<String>,
}

impl Docker {
    /// Parse the JSON texts of the two answers.
    pub fn parse(version: &str, info: &str) -> Result<Docker, serde_json::Error> {
        #[derive(Deserialize)]
        #[serde(rename_all = "PascalCase")]
        struct DockerVersion {
            version: String,
        }
        #[derive(Deserialize)]
        #[serde(rename_all = "PascalCase")]
        struct DockerInfo {
            #[serde(default)]
            default_runtime: String,
            #[serde(default)]
            runtimes: BTreeMap<String, IgnoredAny>,
        }
        let version: DockerVersion = serde_json::from_str(version)?;
        let info: DockerInfo = serde_json::from_str(info)?;
        Ok(Docker {
            version: version.version,
            default_runtime: info.default_runtime,
            runtimes: info.runtimes.into_keys().collect(),
        })
    }
}

/// A Unix socket, and the result of a connection to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Socket {
    /// The path of the socket.
    pub path: String,
    /// The system's error at a connection. `None` if a process listens.
    pub error: Option<String>,
}

/// The result of a test in which `divvy-runtime` prepares a container that requests all GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuntimeTest {
    /// The path of divvy-runtime.
    pub program: String,
    /// What it did.
    pub outcome: RuntimeOutcome,
}

/// What `divvy-runtime` did in a test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RuntimeOutcome {
    /// The container would get these device nodes.
    Devices(Vec<String>),
    /// It failed with this error.
    Failed(String),
}

/// What `divvy scheduler-config --merge` finds in kube-scheduler's configuration on this machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SchedulerFile {
    /// The reasons why kube-scheduler does not start with the file.
    pub stops: Vec<String>,
    /// What keeps kube-scheduler from placing pods with GPUs well.
    pub misplaces: Vec<String>,
}

/// The answers of the scheduler extender to the queries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExtenderFacts {
    /// The URL that was queried.
    pub url: String,
    /// The answer to the query for the version.
    pub version: ExtenderVersion,
    /// The number of filter calls since the extender's start. `None` if the extender does not report it.
    pub filter_calls: Option<u64>,
    /// The replicas that were not queried, each with the reason.
    pub left_out: Vec<String>,
}

/// The answer to a query for an extender's version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExtenderVersion {
    /// The version.
    Known(String),
    /// There was no answer, for this reason.
    Unknown(String),
}

/// The extender's metric that counts filter calls.
const CALLS: &str = "divvy_extender_request_duration_seconds_count{verb=\"filter\"}";

/// Return the number of filter calls in the extender's metrics. It is 0 if the metric is missing.
pub fn filter_calls(metrics: &str) -> u64 {
    let line = metrics.lines().find_map(|line| line.strip_prefix(CALLS));
    line.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
}

/// Return the last line that is not blank from a failed program's standard error.
pub fn last_line(errors: &[u8]) -> String {
    let text = String::from_utf8_lossy(errors);
    let last = text.lines().rev().find(|line| !line.trim().is_empty());
    last.unwrap_or("no error message").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_probes_output_only_what_nvidias_driver_says_is_kept() {
        let output = r#"{"v":2,"drivers":{"nvidia":{"version":"550.54.15","cuda":"12.4"},"amd":{"version":"6.10.5"}},"gpus":[
            {"vendor":"nvidia","uuid":"GPU-a","index":0,"computeMode":"default"},{"uuid":"GPU-b","index":1,"lost":true},
            {"vendor":"amd","uuid":"0x1","index":0,"cc":"gfx90a"}],
            "unreadable":[{"vendor":"amd","index":1,"error":"x"},{"vendor":"nvidia","index":2,"error":"y"}]}"#;
        let probed: Probed = serde_json::from_str(output).expect("an output");
        assert_eq!(probed.driver, "550.54.15");
        let gpus: Vec<_> = probed.gpus.iter().map(|gpu| (gpu.uuid.as_str(), gpu.lost)).collect();
        assert_eq!(gpus, [("GPU-a", false), ("GPU-b", true)]);
        assert_eq!(probed.gpus[0].compute_mode.as_deref(), Some("default"));
        assert_eq!((probed.unreadable.len(), probed.unreadable[0].index), (1, 2));
    }

    #[test]
    fn docker_is_read_whatever_else_it_says() {
        let version = r#"{"Version":"24.0.7","Components":[{}],"ApiVersion":1}"#;
        let info = r#"{"DefaultRuntime":"nvidia","Runtimes":{"runc":{"path":"runc"},"nvidia":null},"Containers":[1]}"#;
        let read = Docker::parse(version, info).expect("both are answers");
        assert_eq!((read.version.as_str(), read.default_runtime.as_str()), ("24.0.7", "nvidia"));
        assert_eq!(read.runtimes, ["nvidia", "runc"]);
        assert_eq!(Docker::parse(version, "{}").expect("an old Docker").runtimes, [""; 0]);
        for (version, info) in [
            ("{}", info),
            (version, r#"{"Runtimes":[]}"#),
            ("not found\n", info),
            (version, ""),
        ] {
            assert!(Docker::parse(version, info).is_err(), "{version} {info}");
        }
    }

    #[test]
    fn calls_of_filter_are_counted_and_no_others() {
        let metrics = "divvy_extender_request_duration_seconds_count{verb=\"bind\"} 3\n\
                       divvy_extender_request_duration_seconds_count{verb=\"filter\"} 41\n# EOF\n";
        assert_eq!(filter_calls(metrics), 41);
        assert_eq!(filter_calls("# EOF\n"), 0);
    }
}
