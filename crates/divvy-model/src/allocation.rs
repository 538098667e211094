use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::limits::{ALLOCATION_BYTES, ALLOCATION_SHARES, DEVICE_TEXT_BYTES, NODE_GPUS, quoted};
use crate::{ALL_CORES, Enforcement, Error, MemoryUnit, MiB, PodRequest};

/// The extender's decision for a pod, in the pod annotation [`crate::names::ALLOCATION`]. The Binding writes the annotation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Allocation {
    /// Format version, 1.
    pub v: u32,
    /// The pod's effective total on each GPU. This amount counts as used on the node.
    pub gpus: Vec<GpuShare>,
    /// The shares that each container may use, by container name. Init containers are included.
    pub containers: BTreeMap<String, Vec<ContainerShare>>,
}

/// A pod's share of one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Hash)]
pub struct GpuShare {
    /// The GPU's UUID.
    pub uuid: String,
    /// Memory in MiB.
    #[serde(rename = "memMiB")]
    pub memory: MiB,
    /// Compute share in percent. 0 means that no limit was requested.
    #[serde(default)]
    pub cores: u32,
    /// Whether the pod has the whole GPU exclusively.
    #[serde(default)]
    pub whole: bool,
    /// What holds the pod to its share, by [`Enforcement::name`]. `None` if nothing does, or if it was not known when the pod was placed.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "by_name")]
    pub enforcement: Option<Enforcement>,
}

/// An [`Enforcement`] by its name. A name that only a newer version knows is read as `None`.
mod by_name {
    use serde::{Deserialize, Deserializer, Serializer};

    use crate::Enforcement;

    #[expect(clippy::ref_option, reason = "serde passes the field by reference")]
    pub(super) fn serialize<S: Serializer>(value: &Option<Enforcement>, serializer: S) -> Result<S::Ok, S::Error> {
        match value {
            Some(value) => serializer.serialize_str(value.name()),
            None => serializer.serialize_none(),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Enforcement>, D::Error> {
        let name = Option::<String>::deserialize(deserializer)?;
        Ok(name.as_deref().and_then(Enforcement::of_name))
    }
}

/// A container's share of one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Hash)]
pub struct ContainerShare {
    /// The GPU's UUID.
    pub uuid: String,
    /// Memory in MiB.
    #[serde(rename = "memMiB")]
    pub memory: MiB,
    /// Compute share in percent. 0 means that no limit was requested.
    #[serde(default)]
    pub cores: u32,
}

impl Allocation {
    /// Parse the annotation. Because only the pod's shares count as used, each container's share must be on one of the pod's GPUs
    /// and must not exceed the pod's share of that GPU.
    ///
    /// # Errors
    /// Fails if the text is not an allocation of version 1, exceeds [`crate::limits`], names a GPU twice, or breaks the rule
    /// above.
    pub fn parse(text: &str) -> Result<Allocation, Error> {
        const WHAT: &str = "allocation (pod annotation divvy.dev/allocation)";
        let mut allocation: Allocation = crate::parse_versioned(WHAT, text, ALLOCATION_BYTES)?;
        // The extender keeps one allocation per pod of the cluster, and a Vec reserves room for four elements when it gets the first.
        allocation.gpus.shrink_to_fit();
        allocation.containers.values_mut().for_each(Vec::shrink_to_fit);
        let shares = allocation.containers.values().map(Vec::len).sum::<usize>();
        if shares > ALLOCATION_SHARES || allocation.gpus.len() > NODE_GPUS {
            return Err(Error::invalid(
                WHAT,
                format!(
                    "it has {} GPUs and {shares} shares of containers; at most {NODE_GPUS} GPUs and {ALLOCATION_SHARES} shares are read",
                    allocation.gpus.len()
                ),
            ));
        }
        if let Some(share) = allocation.gpus.iter().find(|share| share.uuid.len() > DEVICE_TEXT_BYTES) {
            return Err(Error::invalid(
                WHAT,
                format!(
                    "{} has {} bytes; the UUID of a GPU has at most {DEVICE_TEXT_BYTES}",
                    quoted(&share.uuid),
                    share.uuid.len()
                ),
            ));
        }
        for (i, share) in allocation.gpus.iter().enumerate() {
            if allocation.gpus[..i].iter().any(|other| other.uuid == share.uuid) {
                return Err(Error::invalid(WHAT, format!("GPU {} is listed twice", quoted(&share.uuid))));
            }
        }
        if let Some(share) = allocation.gpus.iter().find(|share| share.cores > ALL_CORES) {
            let text = format!(
                "it has {} % of the compute time of GPU {}; at most {ALL_CORES} are possible",
                share.cores,
                quoted(&share.uuid)
            );
            return Err(Error::invalid(WHAT, text));
        }
        for (container, shares) in &allocation.containers {
            for share in shares {
                match allocation.share(&share.uuid) {
                    Some(pod) if share.memory <= pod.memory => {}
                    Some(pod) => {
                        return Err(Error::invalid(
                            WHAT,
                            format!(
                                "container {} has {} of GPU {}, but its pod has only {}",
                                quoted(container),
                                share.memory,
                                quoted(&share.uuid),
                                pod.memory
                            ),
                        ));
                    }
                    None => {
                        return Err(Error::invalid(
                            WHAT,
                            format!(
                                "container {} has a share of GPU {}, but its pod does not",
                                quoted(container),
                                quoted(&share.uuid)
                            ),
                        ));
                    }
                }
            }
        }
        Ok(allocation)
    }

    /// Return the text of the annotation, which is one line of JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("an allocation has only string keys and numbers")
    }

    /// Return the sum of the pod's memory on all GPUs.
    pub fn total(&self) -> MiB {
        self.gpus
            .iter()
            .fold(MiB::ZERO, |sum, share| sum.saturating_add(share.memory))
    }

    /// Report whether the allocation matches a pod's request, in total and for each container, if `aliyun.com/gpu-mem` is counted
    /// in `unit`.
    pub fn is_in(&self, unit: MemoryUnit, request: &PodRequest) -> bool {
        self.differs(unit, request).next().is_none()
    }

    /// Return the differences between the allocation and the request. Each consists of the container (`None` for the whole pod),
    /// the requested memory, and the allocated memory. An allocation with a whole GPU never differs, because the size of a whole
    /// GPU is not counted in units.
    pub fn differs<'a>(&'a self, unit: MemoryUnit, request: &'a PodRequest) -> impl Iterator<Item = (Option<&'a str>, MiB, MiB)> {
        let memory = move |units: u64| unit.memory(units).unwrap_or(MiB(u64::MAX));
        let containers = &request.containers;
        let asking = containers.iter().map(|container| (container.name.as_str(), container.units));
        let others = self.containers.keys().map(|name| (name.as_str(), 0));
        let others = others.filter(|(name, _)| !containers.iter().any(|container| container.name == *name));
        let parts = asking.chain(others).map(move |(name, units)| {
            let shares = self.containers.get(name).into_iter().flatten();
            let has = shares.fold(MiB::ZERO, |sum, share| sum.saturating_add(share.memory));
            (Some(name), memory(units), has)
        });
        let whole = (None, memory(request.effective_units().unwrap_or(u64::MAX)), self.total());
        let counted = self.gpus.iter().all(|share| !share.whole);
        parts.chain([whole]).filter(move |(_, asked, has)| counted && asked != has)
    }

    /// Return the pod's share of the GPU with this UUID.
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
        let enforced = TEXT
            .replace(r#""cores":0"#, r#""cores":30"#)
            .replace(r#""whole":false"#, r#""whole":false,"enforcement":"guard""#);
        let allocation = Allocation::parse(&enforced).expect("documented form");
        assert_eq!(allocation.gpus[0].enforcement, Some(Enforcement::GUARD));
        assert_eq!(allocation.to_json(), enforced);
    }

    #[test]
    fn a_mechanism_of_a_newer_version_is_read_as_unknown() {
        let newer = TEXT.replace(r#""whole":false"#, r#""whole":false,"enforcement":"magic""#);
        assert_eq!(Allocation::parse(&newer).expect("readable").to_json(), TEXT);
    }

    /// The largest allocations that the extender writes: 1 GPU or 16 GPUs, in each case with as many containers as are allowed,
    /// and with the longest names.
    /// A larger allocation is refused.
    #[test]
    fn the_largest_written_allocation_can_be_read() {
        let gpus: Vec<GpuShare> = (0..16)
            .map(|gpu| GpuShare {
                uuid: format!("{gpu:x>DEVICE_TEXT_BYTES$}"),
                memory: MiB(u64::from(u32::MAX)),
                cores: 100,
                whole: false,
                enforcement: Some(Enforcement::CGROUP),
            })
            .collect();
        let shares = |gpus: &[GpuShare]| -> Vec<ContainerShare> {
            let share = |gpu: &GpuShare| ContainerShare {
                uuid: gpu.uuid.clone(),
                memory: gpu.memory,
                cores: 0,
            };
            gpus.iter().map(share).collect()
        };
        let of = |containers: usize, gpus: &[GpuShare]| Allocation {
            v: 1,
            gpus: gpus.to_vec(),
            containers: (0..containers).map(|at| (format!("{at:c>63}"), shares(gpus))).collect(),
        };
        for (containers, gpus) in [(ALLOCATION_SHARES, &gpus[..1]), (ALLOCATION_SHARES / 16, &gpus[..])] {
            let allocation = of(containers, gpus);
            let text = allocation.to_json();
            assert_eq!(Allocation::parse(&text).as_ref(), Ok(&allocation), "{} bytes", text.len());
            let error = Allocation::parse(&of(containers + 1, gpus).to_json())
                .expect_err("too many")
                .to_string();
            assert!(error.contains("at most 128 GPUs and 256 shares are read"), "{error}");
        }
        let error = Allocation::parse(&"x".repeat(ALLOCATION_BYTES + 1))
            .expect_err("too long")
            .to_string();
        assert!(error.ends_with("it has 65537 bytes; at most 65536 are read"), "{error}");
    }

    #[test]
    fn no_error_repeats_more_than_the_beginning_of_what_was_found() {
        let long = "a".repeat(60_000);
        for text in [
            format!(r#"{{"v":"{long}"}}"#),
            format!(r#"{{"v":1,"gpus":"{long}","containers":{{}}}}"#),
            format!(r#"{{"v":1,"gpus":[{{"uuid":"{long}","memMiB":1}}],"containers":{{}}}}"#),
            format!(r#"{{"v":1,"gpus":[{{"uuid":"a","memMiB":"{long}"}}],"containers":{{}}}}"#),
            format!(r#"{{"v":1,"gpus":[{{"uuid":"a","memMiB":1}}],"containers":{{"{long}":[{{"uuid":"b","memMiB":1}}]}}}}"#),
            format!(r#"{{"v":1,"gpus":[{{"uuid":"a","memMiB":1}}],"containers":{{"c":[{{"uuid":"{long}","memMiB":1}}]}}}}"#),
            format!(r#"{{"v":1,"gpus":[{{"uuid":"a","memMiB":1}}],"containers":{{"{long}":[{{"uuid":"a","memMiB":2}}]}}}}"#),
        ] {
            let error = Allocation::parse(&text).expect_err("garbage").to_string();
            assert!(error.len() < 800, "{} bytes: {error}", error.len());
        }
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
            r#"{"v":1,"gpus":[{"uuid":"a","memMiB":1,"cores":101}],"containers":{}}"#,
            r#"{"v":1,"gpus":[{"uuid":"a","memMiB":1,"enforcement":7}],"containers":{}}"#,
        ] {
            let error = Allocation::parse(text).expect_err(text).to_string();
            assert!(
                error.starts_with("allocation (pod annotation divvy.dev/allocation)"),
                "{error}"
            );
        }
    }
}
