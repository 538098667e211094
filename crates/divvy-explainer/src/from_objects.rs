//! Converts slim Kubernetes objects into values of `divvy-why`.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use divvy_model::kept;
use divvy_model::{ContainerKind, ContainerRequest, Node, PodRequest, WholeKind, names, quantity_milli, quantity_value};
use divvy_why::{Claim, ClaimState, HostPort, NodeSite, PodController, Reported, Tenant, Wants};
use kube::core::ObjectMeta;

use divvy_kube::convert;
use divvy_kube::objects::{
    Container, ContainerResources, NodeObject, PodObject, PodSpec, PodStatus, QuantityText, ResourceAmounts,
};

/// Convert a node, leaving out its GPUs. Quantities that cannot be read count as zero.
pub fn site(object: &NodeObject) -> NodeSite {
    let node = convert::node(object);
    let status = object.status.clone().unwrap_or_default();
    let amount = |(name, amount): (&Cow<'static, str>, &QuantityText)| Some((name.to_string(), value(name, amount)?));
    NodeSite {
        labels: object.metadata.labels.clone().unwrap_or_default(),
        taints: object.spec.taints.clone(),
        cordoned: node.unschedulable,
        ready: !status
            .conditions
            .iter()
            .any(|condition| condition.kind == "Ready" && condition.status != "True"),
        capacity_units: node.capacity_units,
        whole_gpus: elsewhere(&node),
        has_inventory: node.inventory.is_some(),
        driver_trouble: node
            .inventory
            .and_then(Result::ok)
            .and_then(|inventory| inventory.driver_trouble),
        runtime: node.runtime,
        allocatable: status.allocatable.iter().filter_map(amount).collect(),
        name: node.name,
        ..NodeSite::default()
    }
}

/// Return how many whole GPUs another device plugin offers on this node. Only the vendors whose GPUs Divvy shares by default count.
fn elsewhere(node: &Node) -> u64 {
    let inventory = node.inventory.as_ref().and_then(|inventory| inventory.as_ref().ok());
    let gpus = inventory.map_or(&[][..], |inventory| &inventory.gpus);
    let ours = |kind: WholeKind| gpus.iter().any(|gpu| gpu.whole == Some(kind));
    let theirs = node
        .whole
        .iter()
        .filter(|(kind, _)| kind.is_of_shared_gpus() && !ours(**kind));
    theirs.fold(0, |sum, (_, gpus)| sum.saturating_add(*gpus))
}

/// Convert a pod that kube-scheduler counts on its node; `None` for a pod without a node or in phase Succeeded or Failed.
pub fn tenant(object: PodObject) -> Option<Tenant> {
    let (meta, spec) = (object.metadata, object.spec);
    let phase = object.status.as_ref().and_then(|status| status.phase.as_deref());
    if matches!(phase, Some("Succeeded" | "Failed")) {
        return None;
    }
    let owner = owner(&meta).map(Arc::new);
    let (requests, ports) = (requests(&spec), ports(&spec));
    let apart = spec.affinity.and_then(|affinity| affinity.pod_anti_affinity);
    let avoids = apart.and_then(|apart| apart.required_during_scheduling_ignored_during_execution);
    Some(Tenant {
        uid: meta.uid.unwrap_or_default().into(),
        namespace: meta.namespace.unwrap_or_default().into(),
        name: meta.name.unwrap_or_default().into(),
        node: spec.node_name.filter(|node| !node.is_empty())?.into(),
        labels: Arc::new(meta.labels.unwrap_or_default()),
        deleting: meta.deletion_timestamp.is_some(),
        requests: requests.into(),
        ports: ports.into(),
        avoids: avoids.unwrap_or_default().into(),
        owner,
    })
}

/// Convert the pod for which `divvy why` is called. Its volume claims have not been read yet ([`ClaimState::Unseen`]).
///
/// # Errors
/// Fails if a quantity cannot be read.
pub fn wants(object: &PodObject) -> Result<Wants, divvy_model::Error> {
    let pod = kept(convert::pod(object)?);
    let spec = &object.spec;
    let status = object.status.clone().unwrap_or_default();
    Ok(Wants {
        labels: object.metadata.labels.clone().unwrap_or_default(),
        owner: owner(&object.metadata),
        requests: requests(spec),
        with_suffix: with_suffix(spec),
        ports: ports(spec),
        node_selector: spec.node_selector.clone(),
        affinity: spec.affinity.as_deref().cloned().unwrap_or_default(),
        spread: spec.topology_spread_constraints.clone(),
        tolerations: spec.tolerations.clone(),
        gates: spec.scheduling_gates.iter().map(|gate| gate.name.clone()).collect(),
        never_preempts: spec.preemption_policy.as_deref() == Some("Never"),
        scheduler: spec.scheduler_name.clone().unwrap_or_default(),
        claims: claims(&pod.name, spec),
        resource_claims: !spec.resource_claims.is_empty(),
        phase: status.phase.clone().unwrap_or_else(|| "Pending".to_owned()),
        reported: reported(&status),
        pod,
    })
}

/// Return the controller that recreates the pod after it is deleted.
pub fn owner(meta: &ObjectMeta) -> Option<PodController> {
    let mut owners = meta.owner_references.iter().flatten();
    let controller = owners.find(|owner| owner.controller == Some(true))?;
    Some(PodController {
        kind: controller.kind.clone(),
        name: controller.name.clone(),
    })
}

fn claims(pod: &str, spec: &PodSpec) -> Vec<Claim> {
    let names = spec
        .volumes
        .iter()
        .filter_map(|volume| match (&volume.persistent_volume_claim, &volume.ephemeral) {
            (Some(claim), _) => Some(claim.claim_name.clone()),
            (None, Some(_)) => Some(format!("{pod}-{}", volume.name)),
            (None, None) => None,
        });
    let unseen = |name| Claim {
        name,
        state: ClaimState::Unseen("it was not read".to_owned()),
    };
    names.map(unseen).collect()
}

fn ports(spec: &PodSpec) -> Vec<HostPort> {
    let containers = spec
        .init_containers
        .iter()
        .filter(|container| container.restart_policy.as_deref() == Some("Always"));
    let ports = containers.chain(&spec.containers).flat_map(|container| &container.ports);
    let port = |port: &divvy_kube::objects::Port| HostPort {
        port: port.host_port,
        protocol: match port.protocol.as_str() {
            "" | "TCP" => Cow::Borrowed("TCP"),
            "UDP" => Cow::Borrowed("UDP"),
            other => Cow::Owned(other.to_owned()),
        },
        address: port.host_ip.clone(),
    };
    ports.filter(|port| port.host_port > 0).map(port).collect()
}

fn value(resource: &str, amount: &QuantityText) -> Option<u64> {
    match resource {
        "cpu" => quantity_milli(&amount.0),
        _ => quantity_value(&amount.0),
    }
    .ok()
}

/// Compute a pod's effective requests by Kubernetes' formula. If a container has a limit but no request for a resource, the limit
/// counts. Quantities that cannot be read count as zero.
fn requests(spec: &PodSpec) -> Vec<(Cow<'static, str>, u64)> {
    let init = spec
        .init_containers
        .iter()
        .map(|container| match container.restart_policy.as_deref() {
            Some("Always") => (ContainerKind::Sidecar, container),
            _ => (ContainerKind::Init, container),
        });
    if let ([], [container]) = (spec.init_containers.as_slice(), spec.containers.as_slice()) {
        return requests_of_one(container, &spec.overhead);
    }
    let containers: Vec<_> = init
        .chain(spec.containers.iter().map(|container| (ContainerKind::App, container)))
        .collect();
    let maps = containers
        .iter()
        .flat_map(|(_, container)| [&container.resources.requests, &container.resources.limits]);
    let resources: BTreeSet<&Cow<'static, str>> = maps
        .chain([&spec.overhead])
        .flat_map(|amounts| amounts.iter().map(|(name, _)| name))
        .collect();
    let of = |resource: &Cow<'static, str>| {
        let one = |(kind, container): &(ContainerKind, &Container)| {
            let asked = container
                .resources
                .requests
                .get(resource)
                .or_else(|| container.resources.limits.get(resource));
            ContainerRequest {
                name: String::new(),
                kind: *kind,
                units: asked.and_then(|amount| value(resource, amount)).unwrap_or(0),
                gpu_count: 0,
            }
        };
        let request = PodRequest {
            containers: containers.iter().map(one).collect(),
            ..PodRequest::default()
        };
        let overhead = spec
            .overhead
            .get(resource)
            .and_then(|amount| value(resource, amount))
            .unwrap_or(0);
        (
            resource.clone(),
            request.effective_units().unwrap_or(u64::MAX).saturating_add(overhead),
        )
    };
    let mut found: Vec<(Cow<'static, str>, u64)> = resources.into_iter().map(of).filter(|(_, amount)| *amount > 0).collect();
    found.push((Cow::Borrowed("pods"), 1));
    found
}

/// Compute what [`requests`] computes, for a pod with one container, which is the most common case.
fn requests_of_one(container: &Container, overhead: &ResourceAmounts) -> Vec<(Cow<'static, str>, u64)> {
    let ContainerResources { requests, limits } = &container.resources;
    let defaulted = limits.iter().filter(|(name, _)| !requests.contains_key(name));
    let asked = requests.iter().chain(defaulted);
    let amount = |(name, amount): (&Cow<'static, str>, &QuantityText)| (name.clone(), value(name, amount).unwrap_or(0));
    let mut found: Vec<(Cow<'static, str>, u64)> = asked.map(amount).collect();
    for (name, more) in overhead.iter().map(amount) {
        match found.iter_mut().find(|(known, _)| *known == name) {
            Some((_, amount)) => *amount = amount.saturating_add(more),
            None => found.push((name, more)),
        }
    }
    found.retain(|(_, amount)| *amount > 0);
    found.sort();
    found.push((Cow::Borrowed("pods"), 1));
    found
}

/// Return the first quantity of gpu-mem with a suffix, such as `3Gi`, which is meant in bytes. `4k` does not count as one: the
/// API server writes 4000 in this form.
fn with_suffix(spec: &PodSpec) -> Option<String> {
    let containers = spec.init_containers.iter().chain(&spec.containers);
    let amounts = containers.flat_map(|container| [&container.resources.limits, &container.resources.requests]);
    let mut amounts = amounts.filter_map(|amounts| amounts.get(names::GPU_MEM));
    let plain = |amount: &&QuantityText| {
        let digits = amount.0.strip_suffix('k').unwrap_or(&amount.0);
        !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())
    };
    amounts.find(|amount| !plain(amount)).map(|amount| amount.0.clone())
}

/// Collect the reasons in a pod's status: why it failed, why it is not scheduled, and why containers wait.
fn reported(status: &PodStatus) -> Vec<Reported> {
    let one = |by: &str, reason: &Option<String>, message: &Option<String>| Reported {
        by: by.to_owned(),
        reason: reason.clone().unwrap_or_default(),
        message: message.clone().unwrap_or_default(),
    };
    let mut found = Vec::new();
    if status.reason.is_some() {
        found.push(one("kubelet", &status.reason, &status.message));
    }
    let unscheduled = status
        .conditions
        .iter()
        .filter(|condition| condition.kind == "PodScheduled" && condition.status == "False");
    found.extend(unscheduled.map(|condition| one("kube-scheduler", &condition.reason, &condition.message)));
    for container in status.init_container_statuses.iter().chain(&status.container_statuses) {
        if let Some(waiting) = &container.state.waiting {
            found.push(one(
                &format!("container {}", container.name),
                &waiting.reason,
                &waiting.message,
            ));
        }
    }
    found
}

/// Return the labels of namespaces, by the namespace's name.
pub fn labels(metas: impl IntoIterator<Item = ObjectMeta>) -> BTreeMap<String, divvy_why::LabelMap> {
    let one = |meta: ObjectMeta| Some((meta.name?, meta.labels.unwrap_or_default()));
    metas.into_iter().filter_map(one).collect()
}
