//! Converts slim Kubernetes objects into values of `divvy-model`.

mod read_pod;

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;

use divvy_model::limits::{NODE_GPUS, QUOTED_BYTES, shortened};
use divvy_model::out_of_service::GpusOutOfService;
use divvy_model::{
    ContainerKind, ContainerRequest, GpuRules, Held, Inventory, Node, Phase, Pod, PodRequest, WholeContainer, WholeKind,
    WholeRequest, legacy, names, quantity_milli, quantity_value,
};
use k8s_openapi::api::core::v1::ConfigMap;

use crate::objects::{Container, ContainerResources, NodeObject, NodeStatus, PodObject, QuantityText, ResourceAmounts};

pub use read_pod::ReadPod;

/// Convert a pod.
///
/// # Errors
/// Fails if a quantity cannot be read. The error names the container and the resource. The caller must refuse such a pod with a
/// message and not treat it as a pod without requests.
pub fn pod(object: &PodObject) -> Result<Pod, divvy_model::Error> {
    let meta = &object.metadata;
    let status = object.status.as_ref();
    let request = request(object)?;
    let cpu = effective(object, "cpu", quantity_milli)?;
    let memory = effective(object, "memory", quantity_value)?;
    let running = status.is_some_and(|status| {
        let mut containers = status.init_container_statuses.iter().chain(&status.container_statuses);
        containers.any(|container| container.state.running.is_some())
    });
    Ok(Pod {
        uid: meta.uid.clone().unwrap_or_default(),
        namespace: meta.namespace.clone().unwrap_or_default(),
        name: meta.name.clone().unwrap_or_default(),
        created_s: meta.creation_timestamp.as_ref().and_then(|time| {
            let seconds = u32::try_from(time.0.as_second()).ok()?;
            NonZeroU32::new(seconds)
        }),
        node: object.spec.node_name.clone().filter(|name| !name.is_empty()),
        phase: phase(status.and_then(|status| status.phase.as_deref())),
        deleting: meta.deletion_timestamp.is_some(),
        container_running: running,
        cpu_milli: u32::try_from(cpu.saturating_add(overhead(object, "cpu", quantity_milli)?)).unwrap_or(u32::MAX),
        memory_bytes: memory.saturating_add(overhead(object, "memory", quantity_value)?),
        priority: object.spec.priority.unwrap_or(0),
        nominated: nominated(object),
        held: meta.annotations.as_ref().map(Held::from_annotations).unwrap_or_default(),
        own_visible: own_visible(object),
        request,
    })
}

/// Return the nominated node of a pod that is not bound.
fn nominated(object: &PodObject) -> Option<Box<str>> {
    let node = object.status.as_ref()?.nominated_node_name.as_deref()?;
    let is_bound = object.spec.node_name.as_deref().is_some_and(|name| !name.is_empty());
    (!is_bound && !node.is_empty() && node.len() <= names::MOST_NAME_BYTES).then(|| Box::from(node))
}

/// Return an error text if one of the node's quantities that Divvy reads is not a valid quantity.
pub fn unreadable_quantity(object: &NodeObject) -> Option<String> {
    let status = object.status.as_ref()?;
    let is_read = |name: &str| {
        let known = [names::GPU_MEM, names::GPU_COUNT, "cpu", "memory", "pods"];
        known.contains(&name) || WholeKind::of_resource(name).is_some()
    };
    for (map, what) in [(&status.capacity, "capacity"), (&status.allocatable, "allocatable")] {
        for (name, amount) in map.iter().filter(|(name, _)| is_read(name)) {
            if let Err(error) = quantity_value(&amount.0) {
                return Some(format!("status.{what}, {name}: {error}"));
            }
        }
    }
    None
}

/// Return what a node offers as a whole, and how much of it. After a device plugin has ended, the kubelet still lists the capacity for
/// some minutes, but 0 as allocatable.
fn whole_of(status: &NodeStatus) -> BTreeMap<WholeKind, u64> {
    let listed = status.allocatable.iter().chain(status.capacity.iter());
    let mut kinds = BTreeMap::new();
    for (kind, amount) in listed.filter_map(|(name, amount)| Some((WholeKind::of_resource(name)?, amount))) {
        if kinds.len() < NODE_GPUS {
            kinds.entry(kind).or_insert_with(|| quantity_value(&amount.0).unwrap_or(0));
        }
    }
    kinds.retain(|_, devices| *devices > 0);
    kinds
}

/// Convert a node. Quantities that cannot be read count as zero; lists and watches skip such nodes ([`unreadable_quantity`]).
pub fn node(object: &NodeObject) -> Node {
    let meta = &object.metadata;
    let none = NodeStatus::default();
    let status = object.status.as_ref().unwrap_or(&none);
    let value = |map: &ResourceAmounts, key: &str| map.get(key).and_then(|amount| quantity_value(&amount.0).ok()).unwrap_or(0);
    let annotations = meta.annotations.as_ref();
    let inventory = annotations.and_then(|annotations| annotations.get(names::INVENTORY));
    Node {
        uid: meta.uid.clone().unwrap_or_default(),
        name: meta.name.clone().unwrap_or_default(),
        address: status
            .addresses
            .iter()
            .find(|address| address.kind == "InternalIP")
            .map(|address| address.address.clone()),
        capacity_units: value(&status.capacity, names::GPU_MEM),
        capacity_gpus: value(&status.capacity, names::GPU_COUNT),
        whole: whole_of(status),
        runtime: status
            .node_info
            .as_ref()
            .map(|info| info.container_runtime_version.clone())
            .filter(|version| !version.is_empty()),
        allocatable_units: value(&status.allocatable, names::GPU_MEM),
        allocatable_gpus: value(&status.allocatable, names::GPU_COUNT),
        cpu_milli: status
            .allocatable
            .get("cpu")
            .and_then(|amount| quantity_milli(&amount.0).ok())
            .unwrap_or(0),
        memory_bytes: value(&status.allocatable, "memory"),
        pods: value(&status.allocatable, "pods"),
        unschedulable: object.spec.unschedulable,
        out_of_service: GpusOutOfService::read(annotations.unwrap_or(&BTreeMap::new())),
        inventory: inventory.map(|text| Inventory::parse(text)),
    }
}

/// Return a pod's request: its containers in the kubelet's order, without the containers that request none of Divvy's resources.
///
/// Most pods of a cluster request none of these resources. Their request is empty, and their annotations are not read.
///
/// # Errors
/// Fails if a quantity of gpu-mem, gpu-count, whole GPUs, or MIG devices cannot be read.
pub fn request(object: &PodObject) -> Result<PodRequest, divvy_model::Error> {
    let units: Vec<u64> = amounts(object, names::GPU_MEM, quantity_value)?;
    let counts: Vec<u64> = amounts(object, names::GPU_COUNT, quantity_value)?;
    let mut containers: Vec<ContainerRequest> = in_order(object)
        .zip(units.into_iter().zip(counts))
        .filter(|(_, asked)| *asked != (0, 0))
        .map(|((kind, container), (units, gpu_count))| ContainerRequest {
            name: container.name.clone(),
            kind,
            units,
            gpu_count,
        })
        .collect();
    // A Vec reserves room for four elements when it gets the first, and there are tens of thousands of pods.
    containers.shrink_to_fit();
    let whole = whole(object)?;
    if whole.is_empty() && containers.iter().all(|container| container.units == 0) {
        return Ok(PodRequest::new(containers, None));
    }
    let annotations = object.metadata.annotations.as_ref();
    let rules = annotations.and_then(|annotations| GpuRules::from_annotations(annotations).transpose());
    Ok(PodRequest::with_whole(containers, whole, rules))
}

/// Return the pod's requests for whole GPUs and MIG devices, one for each kind.
fn whole(object: &PodObject) -> Result<Vec<WholeRequest>, divvy_model::Error> {
    let mut found: BTreeMap<WholeKind, Vec<WholeContainer>> = BTreeMap::new();
    for (order, container) in in_order(object) {
        let ContainerResources { requests, limits } = &container.resources;
        let implied = limits.iter().filter(|(name, _)| !requests.contains_key(name));
        for (name, amount) in requests.iter().chain(implied) {
            let Some(kind) = WholeKind::of_resource(name) else { continue };
            let gpus = quantity_value(&amount.0).map_err(|error| in_container(object, container, name, &error))?;
            if gpus > 0 {
                found.entry(kind).or_default().push(WholeContainer {
                    name: container.name.clone(),
                    kind: order,
                    gpus,
                });
            }
        }
    }
    let requests = found.into_iter().map(|(kind, mut containers)| {
        containers.shrink_to_fit();
        WholeRequest { kind, containers }
    });
    Ok(requests.collect())
}

/// Return the first container that requests GPU memory but also chooses GPUs with its own `NVIDIA_VISIBLE_DEVICES`, and the value.
fn own_visible(object: &PodObject) -> Option<Box<(String, String)>> {
    let asks = |container: &Container| {
        let units = amount_of(container, names::GPU_MEM).and_then(|amount| quantity_value(&amount.0).ok());
        units.is_some_and(|units| units > 0)
    };
    let both = in_order(object)
        .map(|(_, container)| container)
        .filter(|container| asks(container));
    both.filter_map(|container| Some((container, container.visible_devices.as_deref()?)))
        .find(|(_, value)| !matches!(*value, "" | "none" | names::VISIBLE_NONE))
        .map(|(container, value)| Box::new((container.name.clone(), shortened(value, QUOTED_BYTES).into_owned())))
}

fn in_order(object: &PodObject) -> impl Iterator<Item = (ContainerKind, &Container)> {
    let init = object
        .spec
        .init_containers
        .iter()
        .map(|container| match container.restart_policy.as_deref() {
            Some("Always") => (ContainerKind::Sidecar, container),
            _ => (ContainerKind::Init, container),
        });
    init.chain(object.spec.containers.iter().map(|container| (ContainerKind::App, container)))
}

/// Return each container's request for a resource, in the kubelet's order. If a container has no request, its limit counts, as in
/// the API server's defaulting.
fn amounts(
    object: &PodObject,
    resource: &str,
    read: impl Fn(&str) -> Result<u64, divvy_model::Error>,
) -> Result<Vec<u64>, divvy_model::Error> {
    in_order(object)
        .map(|(_, container)| match amount_of(container, resource) {
            None => Ok(0),
            Some(amount) => read(&amount.0).map_err(|error| in_container(object, container, resource, &error)),
        })
        .collect()
}

fn in_container(object: &PodObject, container: &Container, resource: &str, error: &divvy_model::Error) -> divvy_model::Error {
    divvy_model::Error::Invalid {
        what: resource.to_owned().into(),
        text: format!(
            "in container {} of pod {}: {error}",
            shortened(&container.name, QUOTED_BYTES),
            shortened(object.metadata.name.as_deref().unwrap_or("?"), QUOTED_BYTES)
        ),
    }
}

fn amount_of<'a>(container: &'a Container, resource: &str) -> Option<&'a QuantityText> {
    let ContainerResources { requests, limits } = &container.resources;
    requests.get(resource).or_else(|| limits.get(resource))
}

fn overhead(
    object: &PodObject,
    resource: &str,
    read: impl Fn(&str) -> Result<u64, divvy_model::Error>,
) -> Result<u64, divvy_model::Error> {
    object.spec.overhead.get(resource).map_or(Ok(0), |amount| read(&amount.0))
}

/// Compute a pod's effective request for CPU or main memory, by Kubernetes' formula ([`PodRequest::effective`]).
fn effective(
    object: &PodObject,
    resource: &str,
    read: impl Fn(&str) -> Result<u64, divvy_model::Error>,
) -> Result<u64, divvy_model::Error> {
    let kinds = in_order(object).map(|(kind, _)| kind);
    let containers = kinds
        .zip(amounts(object, resource, read)?)
        .map(|(kind, amount)| ContainerRequest {
            name: String::new(),
            kind,
            units: amount,
            gpu_count: 0,
        });
    let request = PodRequest {
        containers: containers.collect(),
        ..PodRequest::default()
    };
    Ok(request.effective_units().unwrap_or(u64::MAX))
}

fn phase(text: Option<&str>) -> Phase {
    match text {
        Some("Running") => Phase::Running,
        Some("Succeeded") => Phase::Succeeded,
        Some("Failed") => Phase::Failed,
        Some("Unknown") => Phase::Unknown,
        _ => Phase::Pending,
    }
}

/// The GPUs of a node that an administrator or a problem detector has declared unhealthy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnhealthyGpus {
    /// The node's name.
    pub node: String,
    /// The indices of the unhealthy GPUs.
    pub gpus: BTreeSet<u32>,
}

/// Parse gpushare's ConfigMap `unhealthy-gpu-<node>`; `None` for any other ConfigMap.
pub fn unhealthy_gpus(object: &ConfigMap) -> Option<UnhealthyGpus> {
    let node = legacy::unhealthy_gpus_node(object.metadata.name.as_deref()?)?.to_owned();
    let text = object.data.as_ref().and_then(|data| data.get("gpus"));
    let gpus = text.map(|text| legacy::unhealthy_gpus(text)).unwrap_or_default();
    Some(UnhealthyGpus { node, gpus })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod_of(value: serde_json::Value) -> Result<Pod, divvy_model::Error> {
        pod(&serde_json::from_value(value).expect("a pod"))
    }

    #[test]
    fn containers_come_in_the_kubelets_order_with_their_kinds() {
        let pod = pod_of(json!({
            "metadata": {"name": "p", "namespace": "ns", "uid": "u", "deletionTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {
                "nodeName": "n1",
                "initContainers": [
                    {"name": "i", "resources": {"limits": {"aliyun.com/gpu-mem": "2"}}},
                    {"name": "s", "restartPolicy": "Always", "resources": {"limits": {"aliyun.com/gpu-mem": 1}}}
                ],
                "containers": [
                    {"name": "a", "resources": {"limits": {"aliyun.com/gpu-mem": "3", "cpu": "1500m"}, "requests": {"cpu": "250m"}}},
                    {"name": "b", "resources": null}
                ]
            },
            "status": {"phase": "Failed", "containerStatuses": [{"name": "a", "state": {"running": {"startedAt": "x"}}}]}
        }))
        .expect("readable");
        let kinds: Vec<_> = pod
            .request
            .containers
            .iter()
            .map(|c| (c.name.as_str(), c.kind, c.units))
            .collect();
        assert_eq!(
            kinds,
            [
                ("i", ContainerKind::Init, 2),
                ("s", ContainerKind::Sidecar, 1),
                ("a", ContainerKind::App, 3)
            ]
        );
        assert_eq!(pod.request.effective_units(), Some(4));
        assert_eq!(pod.cpu_milli, 250);
        assert!(pod.deleting);
        assert!(!pod.ended(), "a container still runs, whatever the phase is");
    }

    /// A size in bytes just below what an API server accepts in an annotation.
    const HUGE: usize = 250_000;

    #[test]
    fn of_a_pod_that_asks_for_none_of_our_resources_no_rule_is_read() {
        let pod = |limits: serde_json::Value, value: &str| {
            pod_of(json!({
                "metadata": {"name": "p", "annotations": {"divvy.dev/gpu-model": value}},
                "spec": {"containers": [{"name": "a", "resources": {"limits": limits}}, {"name": "b"}]}
            }))
            .expect("readable")
        };
        for value in ["A100*", "!!", &"a,".repeat(HUGE / 2)] {
            assert_eq!(pod(json!({"cpu": "1"}), value).request, PodRequest::default());
            assert_eq!(pod(json!({"aliyun.com/gpu-mem": "0"}), value).request, PodRequest::default());
            assert_eq!(pod(json!({"aliyun.com/gpu-count": "1"}), value).request.rules, None);
        }
        let asks = pod(json!({"aliyun.com/gpu-mem": "1"}), "A100*");
        assert!(matches!(asks.request.rules.as_deref(), Some(Ok(_))));
    }

    #[test]
    fn what_is_kept_of_a_pod_is_short_whatever_it_says() {
        let long = "x".repeat(HUGE);
        for key in [
            "divvy.dev/allocation",
            "ALIYUN_COM_GPU_MEM_IDX",
            "scheduler.framework.gpushare.allocation",
            "divvy.dev/gpu-uuid",
        ] {
            let pod = pod_of(json!({
                "metadata": {"name": "p", "annotations": {key: long}},
                "spec": {"containers": [{"name": "a", "resources": {"limits": {"aliyun.com/gpu-mem": "1"}},
                    "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": long}]}]}
            }))
            .expect("readable");
            let kept = format!("{pod:?}");
            assert!(kept.len() < 3_000, "{key}: {} bytes: {kept}", kept.len());
            assert!(pod.own_visible.is_some());
        }
        let error = pod_of(json!({"metadata": {"name": "p"}, "spec": {"containers": [
            {"name": "a", "resources": {"limits": {"aliyun.com/gpu-mem": long}}}]}}))
        .expect_err("no quantity");
        assert!(error.to_string().len() < 500, "{error}");
    }

    #[test]
    fn a_quantity_that_cannot_be_read_is_an_error_with_its_place() {
        let error = pod_of(json!({"metadata": {"name": "p"}, "spec": {"containers": [
            {"name": "a", "resources": {"limits": {"aliyun.com/gpu-mem": "3 GiB"}}}]}}))
        .expect_err("wrong quantity")
        .to_string();
        assert_eq!(
            error,
            "aliyun.com/gpu-mem: in container a of pod p: quantity: \"3 GiB\" has an unknown suffix"
        );
    }

    #[test]
    fn a_node_with_a_broken_inventory_says_so() {
        let node = node(
            &serde_json::from_value(json!({
                "metadata": {"name": "n1", "annotations": {"divvy.dev/inventory": "{}"}},
                "spec": {},
                "status": {"capacity": {"aliyun.com/gpu-mem": "16", "cpu": "4"}, "allocatable": {"cpu": "3500m", "memory": "1Ki"},
                           "addresses": [{"type": "Hostname", "address": "h"}, {"type": "InternalIP", "address": "10.0.0.1"}]}
            }))
            .expect("a node"),
        );
        assert_eq!((node.capacity_units, node.cpu_milli, node.memory_bytes), (16, 3500, 1024));
        assert_eq!(node.address.as_deref(), Some("10.0.0.1"));
        assert!(matches!(node.inventory, Some(Err(_))));
    }
}
