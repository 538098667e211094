use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Error, MiB};

/// What the extender gave to a pod: pod annotation [`crate::names::ALLOCATION`], carried by the Binding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Allocation {
    /// Format version, 1.
    pub v: u32,
    /// The pod's effective total per GPU: what is booked on the node.
    pub gpus: Vec<GpuShare>,
    /// What each container may use, init containers among them.
    pub containers: BTreeMap<String, Vec<ContainerShare>>,
}

/// A pod's share of one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuShare {
    /// The GPU.
    pub uuid: String,
    /// Memory in MiB.
    #[serde(rename = "memMiB")]
    pub memory: MiB,
    /// Compute share in percent; 0 is "no limit asked for".
    #[serde(default)]
    pub cores: u32,
    /// The whole GPU, exclusively.
    #[serde(default)]
    pub whole: bool,
}

/// A container's share of one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerShare {
    /// The GPU.
    pub uuid: String,
    /// Memory in MiB.
    #[serde(rename = "memMiB")]
    pub memory: MiB,
    /// Compute share in percent; 0 is "no limit asked for".
    #[serde(default)]
    pub cores: u32,
}

impl Allocation {
    /// Reads the annotation. A container's share must lie on one of the pod's GPUs and not exceed the
    /// pod's share there, since the pod's share is what was booked.
    pub fn parse(text: &str) -> Result<Allocation, Error> {
        const WHAT: &str = "allocation (pod annotation divvy.dev/allocation)";
        let allocation: Allocation = crate::parse_versioned(WHAT, text)?;
        for (i, share) in allocation.gpus.iter().enumerate() {
            if allocation.gpus[..i].iter().any(|other| other.uuid == share.uuid) {
                return Err(Error::invalid(WHAT, format!("GPU {} is there twice", share.uuid)));
            }
        }
        for (container, shares) in &allocation.containers {
            for share in shares {
                match allocation.share(&share.uuid) {
                    Some(pod) if share.memory <= pod.memory => {}
                    Some(pod) => {
                        return Err(Error::invalid(
                            WHAT,
                            format!(
                                "container {container} has {} of GPU {}, its pod only {}",
                                share.memory, share.uuid, pod.memory
                            ),
                        ));
                    }
                    None => {
                        return Err(Error::invalid(
                            WHAT,
                            format!("container {container} has GPU {}, which its pod has not", share.uuid),
                        ));
                    }
                }
            }
        }
        Ok(allocation)
    }

    /// The annotation's text: one line of JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("an allocation has only string keys and numbers")
    }

    /// The pod's share of this GPU.
    pub fn share(&self, uuid: &str) -> Option<&GpuShare> {
        self.gpus.iter().find(|share| share.uuid == uuid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"{"v":1,"gpus":[{"uuid":"GPU-1","memMiB":4096,"cores":0,"whole":false}],"containers":{"main":[{"uuid":"GPU-1","memMiB":3072,"cores":0}]}}"#;

    #[test]
    fn the_documented_form_is_read_and_written_to_the_byte() {
        assert_eq!(Allocation::parse(TEXT).expect("documented form").to_json(), TEXT);
    }

    #[test]
    fn garbage_and_overflow_are_refused_in_words() {
        for text in [
            "",
            "x",
            "{}",
            "[]",
            r#"{"v":2,"gpus":[],"containers":{}}"#,
            r#"{"v":1,"gpus":[{"uuid":"a","memMiB":-1}],"containers":{}}"#,
            r#"{"v":1,"gpus":[{"uuid":"a","memMiB":18446744073709551616}],"containers":{}}"#,
            r#"{"v":1,"gpus":[{"uuid":"a","memMiB":1},{"uuid":"a","memMiB":1}],"containers":{}}"#,
            r#"{"v":1,"gpus":[{"uuid":"a","memMiB":1}],"containers":{"c":[{"uuid":"b","memMiB":1}]}}"#,
            r#"{"v":1,"gpus":[{"uuid":"a","memMiB":1}],"containers":{"c":[{"uuid":"a","memMiB":2}]}}"#,
        ] {
            let error = Allocation::parse(text).expect_err(text).to_string();
            assert!(
                error.starts_with("allocation (pod annotation divvy.dev/allocation)"),
                "{error}"
            );
        }
    }
}
