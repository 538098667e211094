//! Input from the cluster: annotations, objects of the API server, and kubectl's output.

use std::collections::BTreeMap;

use divvy::simulate::dump;
use divvy_kube::convert;
use divvy_kube::objects::{NodeObject, PodObject};
use divvy_model::{Allocation, DeviceId, GpuRules, GrantRecord, Held, Inventory, MemoryUnit, MiB, names};

use super::{FuzzTarget, text};

pub(crate) fn targets() -> Vec<FuzzTarget> {
    vec![
        FuzzTarget::new("a node's inventory", inventory, &[INVENTORY]),
        FuzzTarget::new("a pod's allocation", allocation, &[ALLOCATION]),
        FuzzTarget::new("a grant's record", record, &[RECORD]),
        FuzzTarget::new("a pod's annotations", annotations, &[ANNOTATIONS, SPREAD, GPUSHARE]).refusing(&[UNREADABLE, MISSPELT]),
        FuzzTarget::new(
            "a device's id or an amount",
            words,
            &["GPU-0::m17", "GPU-0::c", "16GiB", "1048576", "2Gi"],
        ),
        FuzzTarget::new("a pod", pod, &[POD, ENDED]).refusing(&[UNCOUNTED]),
        FuzzTarget::new("a node", node, &[NODE]).refusing(&[BARE]),
        FuzzTarget::new("kubectl's output", output, &[OUTPUT]),
    ]
}

const INVENTORY: &str = r#"{"v":1,"agent":"0.1.0","driver":"550.54.15","unitMiB":1024,"gpus":[{"index":0,"uuid":"GPU-0","minor":0,"model":"T4","totalMiB":15360,"units":15,"health":"ok","heldMiB":1024,"links":[["GPU-1","nvlink",12]]},{"index":1,"uuid":"GPU-1","minor":1,"model":"T4","totalMiB":15360,"units":15,"health":"failed"}]}"#;
const ALLOCATION: &str =
    r#"{"v":1,"gpus":[{"uuid":"GPU-0","memMiB":4096,"cores":30}],"containers":{"c":[{"uuid":"GPU-0","memMiB":2048}]}}"#;
const RECORD: &str = r#"{"v":1,"namespace":"d","name":"p","uid":"0f-1","container":"c","cdi":"0123456789abcdef0123456789abcdef","unitMiB":1024,"gpus":[{"uuid":"GPU-0","memMiB":4096,"cores":30}],"containerGpus":[{"uuid":"GPU-0","memMiB":2048}],"bootId":"b"}"#;
const ANNOTATIONS: &str = r#"{"divvy.dev/allocation":"{\"v\":1,\"gpus\":[{\"uuid\":\"GPU-0\",\"memMiB\":4096}],\"containers\":{\"c\":[{\"uuid\":\"GPU-0\",\"memMiB\":4096}]}}","divvy.dev/gpu-model":"T4,A100*,!*40GB","divvy.dev/gpu-memory":">=16Gi","divvy.dev/gpu-prefer":"most-memory"}"#;
const SPREAD: &str = r#"{"divvy.dev/gpus":"2","divvy.dev/gpu-uuid":"GPU-0,GPU-1","divvy.dev/allocation":"{\"v\":1,\"gpus\":[{\"uuid\":\"GPU-0\",\"memMiB\":2048},{\"uuid\":\"GPU-1\",\"memMiB\":2048}],\"containers\":{}}"}"#;
const UNREADABLE: &str = r#"{"divvy.dev/allocation":"{\"v\":2,\"gpus\":[]}","divvy.dev/gpu-model":"T4"}"#;
const MISSPELT: &str = r#"{"divvy.dev/gpu-memory":">=16GiB"}"#;
const GPUSHARE: &str = r#"{"ALIYUN_COM_GPU_MEM_IDX":"0","ALIYUN_COM_GPU_MEM_POD":"4","ALIYUN_COM_GPU_MEM_DEV":"15","scheduler.framework.gpushare.allocation":"{\"c\":{\"0\":4}}"}"#;
const POD: &str = r#"{"metadata":{"name":"p","namespace":"d","uid":"u","annotations":{"a":"b","divvy.dev/gpu-model":"A100*","divvy.dev/allocation":"{\"v\":1,\"gpus\":[{\"uuid\":\"GPU-0\",\"memMiB\":4096}],\"containers\":{}}"}},"spec":{"nodeName":"n","priority":5,"containers":[{"name":"c","resources":{"limits":{"aliyun.com/gpu-mem":"4","cpu":"1500m","memory":"1Gi"}}}],"initContainers":[{"name":"i","restartPolicy":"Always"}],"overhead":{"cpu":"10m"}},"status":{"phase":"Running","containerStatuses":[{"name":"c","state":{"running":{"startedAt":"2026-01-01T00:00:00Z"}}}]}}"#;
const ENDED: &str = r#"{"metadata":{"name":"p","namespace":"d","uid":"u","deletionTimestamp":"2026-01-01T00:00:00Z"},"spec":{"containers":[{"name":"c","env":[{"name":"NVIDIA_VISIBLE_DEVICES","value":"all"}],"resources":{"requests":{"aliyun.com/gpu-mem":"4"}}}]},"status":{"phase":"Failed","nominatedNodeName":"n"}}"#;
const UNCOUNTED: &str =
    r#"{"metadata":{"name":"p"},"spec":{"containers":[{"name":"c","resources":{"limits":{"aliyun.com/gpu-mem":"four"}}}]}}"#;
const NODE: &str = r#"{"metadata":{"name":"n","uid":"u","annotations":{"divvy.dev/inventory":"{\"v\":1,\"agent\":\"0.1.0\",\"driver\":\"550\",\"unitMiB\":1024,\"gpus\":[{\"index\":0,\"uuid\":\"GPU-0\",\"minor\":0,\"totalMiB\":16384,\"units\":16,\"health\":\"ok\"}]}"}},"spec":{"unschedulable":true},"status":{"capacity":{"aliyun.com/gpu-mem":"32","aliyun.com/gpu-count":"2","cpu":"64","memory":"256Gi"},"allocatable":{"cpu":"63500m"},"addresses":[{"type":"InternalIP","address":"10.0.0.1"}]}}"#;
const BARE: &str =
    r#"{"metadata":{"name":"n","annotations":{"divvy.dev/inventory":"{}"}},"spec":{},"status":{"capacity":{"cpu":"64"}}}"#;
const OUTPUT: &str = r#"{"apiVersion":"v1","kind":"List","items":[{"kind":"Node","metadata":{"name":"n"},"spec":{}},{"kind":"Pod","metadata":{"name":"p"},"spec":{"containers":[]}}]}{"kind":"PodList","items":[{"metadata":{"name":"q"},"spec":{"containers":[]}}]}"#;

/// Rules: an accepted inventory is printed so that it reads back the same, and it offers no more than there is.
fn inventory(bytes: &[u8]) -> bool {
    let Some(inventory) = text(bytes).and_then(|text| Inventory::parse(text).ok()) else {
        return false;
    };
    assert_eq!(Inventory::parse(&inventory.to_json()).as_ref(), Ok(&inventory));
    for gpu in &inventory.gpus {
        assert!(inventory.unit.memory(gpu.units).is_some_and(|offered| offered <= gpu.total));
    }
    true
}

fn allocation(bytes: &[u8]) -> bool {
    let Some(allocation) = text(bytes).and_then(|text| Allocation::parse(text).ok()) else {
        return false;
    };
    assert_eq!(Allocation::parse(&allocation.to_json()).as_ref(), Ok(&allocation));
    true
}

/// Rule: the record's file name never leads out of its directory.
fn record(bytes: &[u8]) -> bool {
    let Some(record) = text(bytes).and_then(|text| GrantRecord::parse(text).ok()) else {
        return false;
    };
    assert_eq!(GrantRecord::parse(&record.to_json()).as_ref(), Ok(&record));
    let name = record.file_name();
    assert!(!name.contains('/') && !name.starts_with('.'), "{name}");
    true
}

/// Accepted: the allocation and all rules in the annotations are valid.
fn annotations(bytes: &[u8]) -> bool {
    let Ok(annotations) = serde_json::from_slice::<BTreeMap<String, String>>(bytes) else {
        return false;
    };
    let ours = annotations
        .get(names::ALLOCATION)
        .is_some_and(|text| Allocation::parse(text).is_ok());
    let held = Held::from_annotations(&annotations);
    assert_eq!(matches!(held, Held::Allocation(_)), ours);
    let rules = GpuRules::from_annotations(&annotations);
    matches!(held, Held::Allocation(_) | Held::Legacy(_)) && rules.is_ok()
}

fn words(bytes: &[u8]) -> bool {
    let Some(text) = text(bytes) else { return false };
    let id = text.parse::<DeviceId>();
    if let Ok(id) = &id {
        assert_eq!(id.to_string().parse::<DeviceId>().as_ref(), Ok(id));
    }
    let unit = text.parse::<MemoryUnit>();
    if let Ok(unit) = &unit {
        assert_eq!(unit.to_string().parse::<MemoryUnit>().as_ref(), Ok(unit));
    }
    let value = divvy_model::quantity_value(text);
    if let (Ok(value), Ok(milli)) = (&value, divvy_model::quantity_milli(text)) {
        assert!(
            milli >= *value || milli == u64::MAX,
            "{text}: {value} and {milli} thousandths"
        );
    }
    id.is_ok() | unit.is_ok() | value.is_ok() | text.parse::<MiB>().is_ok()
}

/// Accepted: the pod asks for memory or whole GPUs, and everything that it says is valid.
fn pod(bytes: &[u8]) -> bool {
    let Ok(object) = serde_json::from_slice::<PodObject>(bytes) else {
        return false;
    };
    let Ok(pod) = convert::pod(&object) else { return false };
    let annotations = object.metadata.annotations.unwrap_or_default();
    pod.request.wants_gpus() && !matches!(pod.held, Held::Unreadable(_)) && GpuRules::from_annotations(&annotations).is_ok()
}

/// Accepted: the node offers GPU memory, and its inventory is valid.
fn node(bytes: &[u8]) -> bool {
    let Ok(object) = serde_json::from_slice::<NodeObject>(bytes) else {
        return false;
    };
    let node = convert::node(&object);
    node.capacity_units > 0 && node.inventory.is_some_and(|inventory| inventory.is_ok())
}

fn output(bytes: &[u8]) -> bool {
    dump::read(bytes).is_ok_and(|dump| !dump.nodes.is_empty() && !dump.pods.is_empty())
}
