//! gpushare's pod annotations, and its ConfigMaps that name unhealthy GPUs.
//!
//! Divvy writes gpushare's annotations in addition to its own, so that gpushare's scheduler extender, device plugin, and
//! `inspect` command can read Divvy's allocations. Divvy reads gpushare's annotations on pods that do not have Divvy's. Source:
//! AliyunContainerService/gpushare-scheduler-extender, `pkg/utils/const.go` and `pkg/utils/pod.go`; see
//! `docs/compatibility/gpushare.md`.

use std::collections::{BTreeMap, BTreeSet};

use crate::limits::{ALLOCATION_BYTES, NODE_GPUS, quoted};
use crate::{Error, names};

/// The allocation that gpushare's annotations on a pod describe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LegacyAllocation {
    /// The units on each GPU, by ascending GPU index. They come from `scheduler.framework.gpushare.allocation`, summed over
    /// containers. If that annotation is missing or has another form, they come from `ALIYUN_COM_GPU_MEM_IDX` and
    /// `ALIYUN_COM_GPU_MEM_POD`.
    pub gpus: BTreeMap<u32, u64>,
}

impl LegacyAllocation {
    /// Parse the annotations. `Ok(None)` means either that the pod has none of them, or that a negative index marks the pod as
    /// not placed.
    pub fn from_annotations(annotations: &BTreeMap<String, String>) -> Result<Option<LegacyAllocation>, Error> {
        if let Some(text) = annotations.get(names::GPUSHARE_ALLOCATION) {
            // Refuse a text that is too long instead of ignoring it: the pod may really hold that memory.
            if text.len() > ALLOCATION_BYTES {
                return Err(Error::too_long(names::GPUSHARE_ALLOCATION, text.len(), ALLOCATION_BYTES));
            }
            if let Some(gpus) = parse_allocation(text) {
                if gpus.len() > NODE_GPUS {
                    let text = format!("it names {} GPUs; at most {NODE_GPUS} are read", gpus.len());
                    return Err(Error::invalid(names::GPUSHARE_ALLOCATION, text));
                }
                return Ok(Some(LegacyAllocation { gpus }));
            }
        }
        let Some(index) = annotations.get(names::ALIYUN_IDX) else {
            return Ok(None);
        };
        if index.starts_with('-') {
            return Ok(None);
        }
        let number = |key: &'static str, text: &str| {
            text.parse::<u64>()
                .map_err(|_| Error::invalid(key, format!("{} is not a whole number", quoted(text))))
        };
        let index = number(names::ALIYUN_IDX, index)?;
        let index =
            u32::try_from(index).map_err(|_| Error::invalid(names::ALIYUN_IDX, format!("{index} is not a GPU's index")))?;
        let Some(units) = annotations.get(names::ALIYUN_POD) else {
            return Err(Error::invalid(
                names::ALIYUN_POD,
                "missing, although ALIYUN_COM_GPU_MEM_IDX is set",
            ));
        };
        Ok(Some(LegacyAllocation {
            gpus: BTreeMap::from([(index, number(names::ALIYUN_POD, units)?)]),
        }))
    }
}

/// Parse `{"<container>":{"<gpu>":<units>}}` and sum the units over containers. `None` if the text does not have this form or
/// names no GPU. gpushare's `inspect` also ignores such a text.
pub fn parse_allocation(text: &str) -> Option<BTreeMap<u32, u64>> {
    let containers: BTreeMap<String, BTreeMap<String, u64>> = serde_json::from_str(text).ok()?;
    let mut gpus = BTreeMap::new();
    for (index, units) in containers.values().flatten() {
        let sum: &mut u64 = gpus.entry(index.parse::<u32>().ok()?).or_default();
        *sum = sum.checked_add(*units)?;
    }
    (!gpus.is_empty()).then_some(gpus)
}

/// Return the five annotations that gpushare's extender writes when it binds a pod to one GPU.
///
/// `units_per_gpu` is the value of `ALIYUN_COM_GPU_MEM_DEV`: the number of units of the chosen GPU. `assume_time_ns` is in
/// nanoseconds since the Unix epoch.
pub fn bind_annotations(index: u32, units_per_gpu: u64, pod_units: u64, assume_time_ns: u64) -> BTreeMap<String, String> {
    BTreeMap::from([
        (names::ALIYUN_ASSIGNED.to_owned(), "false".to_owned()),
        (names::ALIYUN_ASSUME_TIME.to_owned(), assume_time_ns.to_string()),
        (names::ALIYUN_DEV.to_owned(), units_per_gpu.to_string()),
        (names::ALIYUN_IDX.to_owned(), index.to_string()),
        (names::ALIYUN_POD.to_owned(), pod_units.to_string()),
    ])
}

/// Format a pod's shares of several GPUs (a map from index to units) as [`names::GPUSHARE_ALLOCATION`]. Readers of this
/// annotation sum the units over containers, so the pod's total is written as that of the first container.
pub fn allocation_text(gpus: &BTreeMap<u32, u64>) -> String {
    let gpus: Vec<String> = gpus.iter().map(|(index, units)| format!("\"{index}\":{units}")).collect();
    format!("{{\"0\":{{{}}}}}", gpus.join(","))
}

/// The namespace of gpushare's ConfigMaps that name unhealthy GPUs.
pub const UNHEALTHY_NAMESPACE: &str = "kube-system";

/// Return the node that a ConfigMap describes, from the ConfigMap's name `unhealthy-gpu-<node>`. `None` for any other name.
pub fn unhealthy_gpus_node(config_map: &str) -> Option<&str> {
    config_map.strip_prefix("unhealthy-gpu-").filter(|node| !node.is_empty())
}

/// Parse the GPU indices in `data.gpus` of such a ConfigMap, as in `0,2`. Anything that is not an index is skipped, whereas
/// gpushare's own reader treats it as GPU 0.
pub fn unhealthy_gpus(text: &str) -> BTreeSet<u32> {
    text.split(',').filter_map(|index| index.trim().parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(annotations: &[(&str, &str)], expected: Result<Option<&[(u32, u64)]>, &str>) {
        let annotations = annotations.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let found = LegacyAllocation::from_annotations(&annotations)
            .map(|found| found.map(|legacy| legacy.gpus.into_iter().collect::<Vec<_>>()))
            .map_err(|error| error.to_string());
        assert_eq!(found, expected.map(|gpus| gpus.map(<[_]>::to_vec)).map_err(str::to_owned));
    }

    #[test]
    fn gpushares_annotations_are_read_as_gpushare_reads_them() {
        check(&[], Ok(None));
        check(&[(names::ALIYUN_IDX, "1"), (names::ALIYUN_POD, "3")], Ok(Some(&[(1, 3)])));
        check(&[(names::ALIYUN_IDX, "-1"), (names::ALIYUN_POD, "3")], Ok(None));
        check(
            &[
                (names::ALIYUN_IDX, "1"),
                (names::ALIYUN_POD, "3"),
                (names::GPUSHARE_ALLOCATION, r#"{"0":{"0":3,"1":3},"1":{"1":2}}"#),
            ],
            Ok(Some(&[(0, 3), (1, 5)])),
        );
        check(
            &[
                (names::ALIYUN_IDX, "1"),
                (names::ALIYUN_POD, "3"),
                (names::GPUSHARE_ALLOCATION, "garbage"),
            ],
            Ok(Some(&[(1, 3)])),
        );
    }

    #[test]
    fn a_too_long_allocation_is_refused_not_ignored() {
        let many: Vec<String> = (0..129).map(|gpu| format!("\"{gpu}\":1")).collect();
        check(
            &[(names::GPUSHARE_ALLOCATION, &format!("{{\"0\":{{{}}}}}", many.join(",")))],
            Err("scheduler.framework.gpushare.allocation: it names 129 GPUs; at most 128 are read"),
        );
        check(
            &[
                (names::ALIYUN_IDX, "0"),
                (names::ALIYUN_POD, "3"),
                (names::GPUSHARE_ALLOCATION, &" ".repeat(250_000)),
            ],
            Err("scheduler.framework.gpushare.allocation: it has 250000 bytes; at most 65536 are read"),
        );
        check(
            &[(names::ALIYUN_IDX, "0"), (names::ALIYUN_POD, &"9".repeat(250_000))],
            Err(&format!(
                "ALIYUN_COM_GPU_MEM_POD: \"{}…\" is not a whole number",
                "9".repeat(100)
            )),
        );
    }

    #[test]
    fn what_is_written_of_several_gpus_is_read_again() {
        let gpus = BTreeMap::from([(0, 3), (5, 3)]);
        let text = allocation_text(&gpus);
        assert_eq!(text, r#"{"0":{"0":3,"5":3}}"#);
        assert_eq!(parse_allocation(&text), Some(gpus));
    }

    #[test]
    fn garbage_is_an_error_and_not_gpu_zero() {
        check(
            &[(names::ALIYUN_IDX, "x"), (names::ALIYUN_POD, "3")],
            Err("ALIYUN_COM_GPU_MEM_IDX: \"x\" is not a whole number"),
        );
        check(
            &[(names::ALIYUN_IDX, "0"), (names::ALIYUN_POD, "18446744073709551616")],
            Err("ALIYUN_COM_GPU_MEM_POD: \"18446744073709551616\" is not a whole number"),
        );
        check(
            &[(names::ALIYUN_IDX, "0")],
            Err("ALIYUN_COM_GPU_MEM_POD: missing, although ALIYUN_COM_GPU_MEM_IDX is set"),
        );
        check(
            &[(names::ALIYUN_IDX, "4294967296"), (names::ALIYUN_POD, "1")],
            Err("ALIYUN_COM_GPU_MEM_IDX: 4294967296 is not a GPU's index"),
        );
    }

    #[test]
    fn a_config_map_names_the_unhealthy_gpus_of_a_node() {
        assert_eq!(unhealthy_gpus_node("unhealthy-gpu-n1"), Some("n1"));
        assert_eq!(unhealthy_gpus_node("unhealthy-gpu-"), None);
        assert_eq!(unhealthy_gpus_node("coredns"), None);
        let table: [(&str, &[u32]); 7] = [
            ("1", &[1]),
            ("0,2", &[0, 2]),
            ("", &[]),
            (" 1 , x", &[1]),
            ("x", &[]),
            ("-1,4294967296,1.0", &[]),
            ("3,3,\n2", &[2, 3]),
        ];
        for (text, expected) in table {
            assert_eq!(unhealthy_gpus(text).into_iter().collect::<Vec<_>>(), expected, "{text:?}");
        }
    }
}
