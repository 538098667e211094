//! What the GPUs of a node and the containers on them use: the answer of an agent's `/v1/usage`.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::limits::{DEVICE_TEXT_BYTES, ERROR_BYTES, NODE_GPUS, USAGE_BYTES, USAGE_CONTAINERS};
use crate::{Error, limits};

/// The newest version that this program knows.
const NEWEST: u64 = 1;
/// The format's name in errors.
const WHAT: &str = "the usage of a node";
/// The maximum size in bytes of the name of a namespace, pod, or container, and of a UID. Kubernetes allows at most 253.
const NAME_BYTES: usize = 253;

/// What the GPUs of a node and the containers on them use. A value that was not measured is absent, and never 0 in its place.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Usage {
    /// The version of the format.
    pub v: u64,
    /// The number of this sample. While it stays the same, so does everything else, unless the agent was started again.
    pub sample: u64,
    /// The GPUs that were measured.
    #[serde(default)]
    pub gpus: Vec<GpuUsage>,
    /// The containers with a grant: an entry for each of their GPUs.
    #[serde(default)]
    pub containers: Vec<ContainerUsage>,
}

/// What the driver measures of one GPU, or of one MIG device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuUsage {
    /// The UUID of the GPU or MIG device. A GPU that is divided has an entry, too.
    pub uuid: String,
    /// The memory in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// The memory in use, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_bytes: Option<u64>,
    /// Percent of the driver's last sample period in which a kernel was running. Of a MIG device, and of a GPU that is divided: percent of the last 1 to 60 s,
    /// from Hopper on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy_percent: Option<u32>,
    /// The part of the time in which the multiprocessors had work, in parts per million. From Hopper on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sm_active_millionths: Option<u32>,
    /// The power draw.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_milliwatts: Option<u64>,
    /// The temperature of the GPU's chip.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temperature_celsius: Option<u32>,
    /// The current clock of the streaming multiprocessors.
    #[serde(default, rename = "smClockMHz", skip_serializing_if = "Option::is_none")]
    pub sm_clock_mhz: Option<u32>,
    /// Why the driver measures nothing, for example because the GPU is lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// What one container uses of one GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerUsage {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The pod's UID.
    pub uid: String,
    /// The container's name. Absent in an entry about a whole pod: it has several containers on the GPU, and the values are not known for each of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
    /// The GPU's UUID.
    pub gpu: String,
    /// The memory in bytes that the container was granted. Absent if the GPU was not granted to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
    /// The memory in bytes that its processes have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_bytes: Option<u64>,
    /// The most memory in bytes that was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak_bytes: Option<u64>,
    /// For how many nanoseconds its processes have kept the GPU busy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy_ns: Option<u64>,
    /// For which part of the time they kept it busy when that was measured last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy_percent: Option<u32>,
    /// When they did last, in seconds since 1970; before that, when the measurement began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_busy: Option<u64>,
    /// How many allocations the guard has refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub denied: Option<u64>,
    /// The bytes that these would have taken, at most 1 TiB each. Absent until a process has used the GPU with the guard.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub denied_bytes: Option<u64>,
    /// For how many nanoseconds the guard let launches wait, as the sum of the times of the processes. Absent until a process has used the GPU with the guard.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub throttled_ns: Option<u64>,
    /// The signs that the container's programs do not keep to its share.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub escapes: BTreeSet<EscapeKind>,
}

/// A sign that a program does not keep to its share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EscapeKind {
    /// It has more memory.
    Over,
    /// It avoids the guard.
    Unguarded,
    /// It uses a GPU that was not granted.
    ForeignGpu,
    /// It changed the guard's file.
    Tampered,
    /// A sign that this version does not know.
    #[serde(other)]
    Other,
}

impl EscapeKind {
    /// Return the word for it, in JSON and in metrics.
    pub fn word(self) -> &'static str {
        match self {
            EscapeKind::Over => "over",
            EscapeKind::Unguarded => "unguarded",
            EscapeKind::ForeignGpu => "foreign_gpu",
            EscapeKind::Tampered => "tampered",
            EscapeKind::Other => "other",
        }
    }
}

impl Usage {
    /// Parse an agent's answer. A newer version is read as far as it is known: people look at the values, and no program decides by them. See
    /// [`Usage::note`].
    ///
    /// # Errors
    /// The text is too long, not of this format, or has values that cannot be.
    pub fn parse(text: &str) -> Result<Usage, Error> {
        let usage: Usage = crate::parse_versions(WHAT, text, USAGE_BYTES, u64::MAX)?;
        usage.check()?;
        Ok(usage)
    }

    /// Return a sentence for people if the usage was written by a newer version.
    pub fn note(&self) -> Option<String> {
        (self.v > NEWEST).then(|| {
            format!(
                "the agent writes version {} of the usage; this Divvy reads version {NEWEST} and shows what it knows",
                self.v
            )
        })
    }

    /// Return the entry of a GPU.
    pub fn gpu(&self, uuid: &str) -> Option<&GpuUsage> {
        self.gpus.iter().find(|gpu| gpu.uuid == uuid)
    }

    fn check(&self) -> Result<(), Error> {
        let refuse = |text: String| Err(Error::invalid(WHAT, text));
        if self.gpus.len() > NODE_GPUS {
            return refuse(format!("it has {} GPUs; at most {NODE_GPUS} are read", self.gpus.len()));
        }
        if self.containers.len() > USAGE_CONTAINERS {
            return refuse(format!(
                "it has {} entries of containers; at most {USAGE_CONTAINERS} are read",
                self.containers.len()
            ));
        }
        let mut uuids = BTreeSet::new();
        for gpu in &self.gpus {
            if !is_text(&gpu.uuid, DEVICE_TEXT_BYTES) || !uuids.insert(&gpu.uuid) {
                return refuse(format!(
                    "the UUID {} is malformed or appears twice",
                    limits::quoted(&gpu.uuid)
                ));
            }
            if gpu.error.as_ref().is_some_and(|text| !is_text(text, ERROR_BYTES)) {
                return refuse(format!("the error of GPU {} is not printable text", gpu.uuid));
            }
            if gpu.busy_percent.is_some_and(|percent| percent > 100) {
                return refuse(format!("GPU {} is busy for more than 100 percent of the time", gpu.uuid));
            }
        }
        let mut keys = BTreeSet::new();
        for of in &self.containers {
            let names = [Some(&of.namespace), Some(&of.pod), Some(&of.uid), of.container.as_ref()];
            if names.into_iter().flatten().any(|name| !is_text(name, NAME_BYTES)) || !is_text(&of.gpu, DEVICE_TEXT_BYTES) {
                return refuse("a container's entry has a malformed name".to_owned());
            }
            if !keys.insert((&of.uid, &of.container, &of.gpu)) {
                return refuse(format!("pod {}/{} has the same entry twice", of.namespace, of.pod));
            }
            if of.busy_percent.is_some_and(|percent| percent > 100) {
                return refuse(format!(
                    "pod {}/{} is busy for more than 100 percent of the time",
                    of.namespace, of.pod
                ));
            }
        }
        Ok(())
    }
}

/// Report whether a text is not empty, not too long, and without control characters.
fn is_text(text: &str, most: usize) -> bool {
    !text.is_empty() && text.len() <= most && !text.chars().any(char::is_control)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn gpu() -> Value {
        json!({"uuid": "GPU-1", "usedBytes": 5, "busyPercent": 100})
    }

    fn container() -> Value {
        json!({"namespace": "ns", "pod": "a", "uid": "u", "container": "main", "gpu": "GPU-1", "limitBytes": 7})
    }

    fn with(value: Value, key: &str, to: Value) -> Value {
        let mut value = value;
        value[key] = to;
        value
    }

    fn read(v: u64, gpus: Vec<Value>, containers: Vec<Value>) -> Result<Usage, Error> {
        let text = json!({"v": v, "sample": 3, "gpus": gpus, "containers": containers}).to_string();
        Usage::parse(&text)
    }

    #[test]
    fn what_cannot_be_is_refused_with_a_sentence() {
        assert!(read(1, vec![gpu()], vec![container()]).is_ok());
        let many = |count: usize, of: fn() -> Value, key: &str| -> Vec<Value> {
            (0..count)
                .map(|number| with(of(), key, json!(format!("n{number}"))))
                .collect()
        };
        assert!(read(1, many(NODE_GPUS, gpu, "uuid"), many(USAGE_CONTAINERS, container, "uid")).is_ok());
        for (gpus, containers, expected) in [
            (vec![gpu(), gpu()], vec![], "appears twice"),
            (vec![with(gpu(), "uuid", json!(""))], vec![], "malformed"),
            (vec![with(gpu(), "uuid", json!("a\u{1b}[2J"))], vec![], "malformed"),
            (vec![with(gpu(), "busyPercent", json!(101))], vec![], "more than 100 percent"),
            (vec![with(gpu(), "usedBytes", json!(-1))], vec![], "cannot be read"),
            (
                vec![with(gpu(), "error", json!("e".repeat(ERROR_BYTES + 1)))],
                vec![],
                "not printable",
            ),
            (many(NODE_GPUS + 1, gpu, "uuid"), vec![], "at most 128"),
            (vec![], many(USAGE_CONTAINERS + 1, container, "uid"), "at most 2048"),
            (vec![], vec![container(), container()], "the same entry twice"),
            (
                vec![],
                vec![with(container(), "pod", json!("p".repeat(254)))],
                "malformed name",
            ),
            (
                vec![],
                vec![with(container(), "busyPercent", json!(101))],
                "more than 100 percent",
            ),
        ] {
            let error = read(1, gpus, containers).expect_err(expected).to_string();
            assert!(error.contains(expected) && error.len() < 800, "{expected}: {error}");
        }
        let long = format!("{{\"v\":1,\"sample\":1{}}}", " ".repeat(USAGE_BYTES));
        let error = Usage::parse(&long).expect_err("too long").to_string();
        assert!(error.contains("at most 1048576"), "{error}");
        assert!(read(0, vec![], vec![]).is_err());
    }

    #[test]
    fn a_newer_version_is_read_as_far_as_it_is_known_and_has_a_note() {
        let newer = with(
            with(container(), "colour", json!("red")),
            "escapes",
            json!(["over", "sideways"]),
        );
        let usage = read(2, vec![gpu()], vec![newer]).expect("read");
        assert!(usage.note().is_some_and(|note| note.contains("version 2")));
        assert_eq!(usage.containers[0].escapes, [EscapeKind::Over, EscapeKind::Other].into());
        assert_eq!(usage.gpu("GPU-1").and_then(|gpu| gpu.used_bytes), Some(5));
        assert_eq!(read(1, vec![], vec![]).expect("read").note(), None);
    }

    #[test]
    fn a_value_that_was_not_measured_is_absent() {
        let usage = Usage {
            v: 1,
            gpus: vec![GpuUsage::default()],
            containers: vec![ContainerUsage::default()],
            ..Usage::default()
        };
        let text = serde_json::to_string(&usage).expect("JSON");
        let expected = r#"{"v":1,"sample":0,"gpus":[{"uuid":""}],"containers":[{"namespace":"","pod":"","uid":"","gpu":""}]}"#;
        assert_eq!(text, expected);
    }

    proptest! {
        #[test]
        fn what_was_written_is_read_again(
            sample in any::<u64>(), used in any::<Option<u64>>(), busy in proptest::option::of(0..=100_u32), container in proptest::option::of("[a-z]{1,9}"),
        ) {
            let escapes = [EscapeKind::Over, EscapeKind::Unguarded, EscapeKind::ForeignGpu, EscapeKind::Tampered].into();
            let usage = Usage {
                v: 1,
                sample,
                gpus: vec![GpuUsage { uuid: "GPU-1".to_owned(), used_bytes: used, busy_percent: busy, ..GpuUsage::default() }],
                containers: vec![ContainerUsage {
                    namespace: "ns".to_owned(), pod: "a".to_owned(), uid: "u".to_owned(), container, gpu: "GPU-1".to_owned(),
                    used_bytes: used, busy_percent: busy, denied_bytes: used, throttled_ns: used, escapes, ..ContainerUsage::default()
                }],
            };
            let text = serde_json::to_string(&usage).expect("JSON");
            prop_assert_eq!(Usage::parse(&text), Ok(usage));
        }
    }
}
