//! What running programs answer.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde::de::IgnoredAny;

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

impl Docker {
    /// Reads the two answers.
    ///
    /// # Errors
    /// Why one of them is none, in words.
    pub fn parse(version: &str, info: &str) -> Result<Docker, String> {
        #[derive(Deserialize)]
        #[serde(rename_all = "PascalCase")]
        struct Version {
            version: String,
        }
        #[derive(Deserialize)]
        #[serde(rename_all = "PascalCase")]
        struct Info {
            #[serde(default)]
            default_runtime: String,
            #[serde(default)]
            runtimes: BTreeMap<String, IgnoredAny>,
        }
        let version: Version = serde_json::from_str(version).map_err(|error| error.to_string())?;
        let info: Info = serde_json::from_str(info).map_err(|error| error.to_string())?;
        Ok(Docker {
            version: version.version,
            default_runtime: info.default_runtime,
            runtimes: info.runtimes.into_keys().collect(),
        })
    }
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
    /// Replicas that were not asked, and why.
    pub left_out: Vec<String>,
}

/// A counter of the extender: calls of filter.
const CALLS: &str = "divvy_extender_request_duration_seconds_count{verb=\"filter\"}";

/// How often kube-scheduler has called filter, by the extender's metrics.
pub fn filter_calls(metrics: &str) -> u64 {
    let line = metrics.lines().find_map(|line| line.strip_prefix(CALLS));
    line.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
}

/// What a program said last, on standard error, of why it failed.
pub fn last_line(errors: &[u8]) -> String {
    let text = String::from_utf8_lossy(errors);
    let last = text.lines().rev().find(|line| !line.trim().is_empty());
    last.unwrap_or("without a word").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

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
