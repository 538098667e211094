//! Checks of nodes and DaemonSets.

use std::collections::BTreeSet;

use divvy_model::names::{ALLOCATION, GPU_COUNT, GPU_MEM, INVENTORY, WHOLE_GPU};
use divvy_model::{Gpu, Inventory, Vendor, WholeKind, parse_quantity};

use super::objects;
use super::objects::{listed, listed_or_this_machine, some, some_lines};
use crate::check::{CheckStop, CheckVerdict, Severity, count, milder, problem, skip};
use crate::facts::cluster::{CheckedNode, CheckedPodSpec, ClusterFacts, DaemonSet, Taint, Texts, Toleration};
use crate::facts::{Facts, version_at_least};
use crate::gpu_resource::is_gpu;

/// Substrings by which the images of GPU device plugins are recognized.
const PLUGINS: [&str; 7] = [
    "k8s-device-plugin",
    "gpushare-device-plugin",
    "k8s-gpushare-plugin",
    "projecthami/hami",
    "volcano-vgpu-device-plugin",
    "intel-gpu-plugin",
    "nvidia-gpu-device-plugin",
];

fn amount(resources: &Texts, name: &str) -> u64 {
    resources.get(name).and_then(parse_quantity).unwrap_or(0)
}

/// Report whether a node has a resource, even if nothing of it is allocatable now.
pub(super) fn offers(node: &CheckedNode, resource: &str) -> bool {
    amount(&node.status.capacity, resource) > 0 || amount(&node.status.allocatable, resource) > 0
}

fn name(node: &CheckedNode) -> &str {
    &node.metadata.name
}

/// Judge check K01.
pub(super) fn versions(facts: &Facts<'_>) -> CheckVerdict {
    let cluster = listed(facts, &["nodes"])?;
    let of = |node: &CheckedNode| format!("{} ({})", node.metadata.name, node.status.node_info.kubelet_version);
    let (silent, known): (Vec<&CheckedNode>, Vec<&CheckedNode>) = cluster
        .nodes
        .iter()
        .partition(|node| node.status.node_info.kubelet_version.is_empty());
    let older = |least: &[u32]| -> Vec<String> {
        let nodes = known.iter();
        nodes
            .filter(|node| !version_at_least(&node.status.node_info.kubelet_version, least))
            .map(|node| of(node))
            .collect()
    };
    if known.is_empty() {
        return skip("no node publishes its kubelet version");
    }
    let fix = "upgrade Kubernetes; Divvy is fully tested with 1.32 and later";
    let ancient = older(&[1, 26]);
    if !ancient.is_empty() {
        return problem(
            some(&ancient),
            "device plugins are stable since Kubernetes 1.26; a kubelet before 1.10 does not support them",
            fix,
        );
    }
    let without_cdi = older(&[1, 29]);
    if !without_cdi.is_empty() {
        return milder(
            Severity::Info,
            some(&without_cdi),
            "before Kubernetes 1.29 a device plugin cannot name CDI devices, so Divvy needs divvy-runtime on these nodes",
            fix,
        );
    }
    let left_out = if silent.is_empty() {
        String::new()
    } else {
        let names: Vec<&str> = silent.into_iter().map(name).collect();
        format!("; not checked: {} (no version published)", some(&names))
    };
    Ok(format!("{}{left_out}", count(known.len(), "node")))
}

/// Return the DaemonSets that run a device plugin for GPUs, including Divvy's.
fn plugins(cluster: &ClusterFacts) -> impl Iterator<Item = &DaemonSet> {
    cluster.daemon_sets.iter().filter(|set| is_divvys(set) || is_foreign(set))
}

fn is_divvys(set: &DaemonSet) -> bool {
    set.metadata
        .labels
        .get("app.kubernetes.io/name")
        .is_some_and(|name| name == "divvy")
}

fn is_foreign(set: &DaemonSet) -> bool {
    let mut images = set.spec.template.spec.containers.iter().map(|container| &container.image);
    images.any(|image| PLUGINS.iter().any(|plugin| image.contains(plugin)))
}

/// Report whether the DaemonSet's plugin offers [`GPU_MEM`].
fn shares_memory(set: &DaemonSet) -> bool {
    let mut images = set.spec.template.spec.containers.iter().map(|container| &container.image);
    is_divvys(set) || images.any(|image| image.contains("gpushare"))
}

fn full_name(set: &DaemonSet) -> String {
    format!("{}/{}", set.metadata.namespace, set.metadata.name)
}

/// Return the commands that remove the device plugins that are not Divvy's.
fn without(foreign: &[&DaemonSet]) -> String {
    let commands: Vec<String> = foreign
        .iter()
        .take(5)
        .map(|set| format!("kubectl delete ds -n {} {}", set.metadata.namespace, set.metadata.name))
        .collect();
    if commands.is_empty() {
        "find the other plugin (kubectl get ds,pods -A -o wide) and delete it, or keep one of the two off these nodes with labels"
            .to_owned()
    } else {
        format!("{}; or keep one of the two off these nodes with labels", commands.join("; "))
    }
}

/// Return the GPUs and MIG devices whose memory Divvy's agent shares on a node, or `None` if the node has no readable inventory.
fn shared_gpus(node: &CheckedNode) -> Option<Vec<Gpu>> {
    let mut gpus = Inventory::parse(node.metadata.annotations.get(INVENTORY)?).ok()?.gpus;
    gpus.retain(Gpu::is_shared);
    Some(gpus)
}

/// Report whether Divvy's agent offers the node's shared GPUs as a whole as well, as [`WHOLE_GPU`].
fn offers_whole(node: &CheckedNode) -> bool {
    shared_gpus(node).is_some_and(|gpus| gpus.iter().any(|gpu| gpu.whole == Some(Vendor::Nvidia.into())))
}

/// Return the resources through which another plugin offers the GPUs that a node shares. NVIDIA's plugin appends `.shared` to the name of a
/// resource of which each device stands for a part of a GPU (`renameByDefault`); Divvy never does.
fn of_another_plugin(node: &CheckedNode) -> Vec<&str> {
    let allocatable = &node.status.allocatable;
    if amount(allocatable, GPU_MEM) == 0 {
        return Vec::new();
    }
    let shared = shared_gpus(node);
    let is_shared = |kind: WholeKind| match (kind, &shared) {
        // Without a MIG strategy, the agent does not share GPUs in MIG mode.
        (WholeKind::Mig(_), Some(gpus)) => gpus.iter().any(|gpu| gpu.partition.is_some()),
        _ => kind.vendor().is_shared_by_default(),
    };
    let is_ours = |name: &str| {
        let mut kinds = shared.iter().flatten().filter_map(|gpu| gpu.whole);
        kinds.any(|kind| kind.resource() == name)
    };
    let is_theirs = |name: &str| {
        let kind = WholeKind::of_resource(name.strip_suffix(".shared").unwrap_or(name));
        kind.is_some_and(is_shared) && !is_ours(name)
    };
    let names = allocatable.keys().filter(|name| amount(allocatable, name) > 0);
    names.filter(|name| is_theirs(name)).collect()
}

/// Judge check K04.
pub(super) fn one_plugin(facts: &Facts<'_>) -> CheckVerdict {
    let why = "two device plugins offer the same GPUs, so pods take each other's GPU memory";
    if let Some(cluster) = listed_or_this_machine(facts, &["nodes", "daemonsets"])? {
        let nodes = cluster.nodes.iter().map(|node| (name(node), of_another_plugin(node)));
        let (both, theirs): (Vec<&str>, Vec<Vec<&str>>) = nodes.filter(|(_, theirs)| !theirs.is_empty()).unzip();
        let runs = |set: &&DaemonSet| set.status.desired_number_scheduled > 0;
        let foreign: Vec<&DaemonSet> = cluster
            .daemon_sets
            .iter()
            .filter(|set| is_foreign(set))
            .filter(runs)
            .collect();
        let names: Vec<String> = foreign.iter().map(|set| full_name(set)).collect();
        let noun = if names.len() == 1 { "DaemonSet" } else { "DaemonSets" };
        let ours = cluster.daemon_sets.iter().filter(|set| is_divvys(set)).any(|set| runs(&set));
        if !both.is_empty() {
            let (node, verb) = if both.len() == 1 {
                ("node", "offers")
            } else {
                ("nodes", "offer")
            };
            let resources: BTreeSet<&str> = theirs.into_iter().flatten().collect();
            let resources: Vec<&str> = resources.into_iter().collect();
            let sets = if names.is_empty() {
                String::new()
            } else {
                format!("; {noun} {}", some(&names))
            };
            return problem(
                format!("{node} {} {verb} {GPU_MEM} and {}{sets}", some(&both), some(&resources)),
                why,
                without(&foreign),
            );
        }
        if ours && !foreign.is_empty() {
            let verb = if names.len() == 1 { "runs" } else { "run" };
            let whole: Vec<&str> = cluster.nodes.iter().filter(|node| offers_whole(node)).map(name).collect();
            let now = if whole.is_empty() {
                "no node offers the GPUs of both now".to_owned()
            } else {
                format!(
                    "where both run, {WHOLE_GPU} is of the one that registered last (Divvy offers it on {})",
                    some(&whole)
                )
            };
            return milder(
                Severity::Warning,
                format!("{noun} {} {verb} in addition to Divvy's; {now}", some(&names)),
                why,
                "give the DaemonSets nodeSelectors that select different nodes",
            );
        }
        return match foreign.len() + usize::from(ours) {
            0 => skip("no device plugin for GPUs runs as a DaemonSet"),
            _ => Ok("no node offers the resources of two plugins".to_owned()),
        };
    }
    let kubelet = facts.kubelet().ok_or_else(|| CheckStop::Skip("no kubelet here".to_owned()))?;
    let directory = format!("{}/device-plugins", kubelet.dir);
    let dead = |path: &str| {
        let sockets = facts.sockets.answer().map_or(&[][..], Vec::as_slice);
        sockets.iter().any(|socket| socket.path == path && socket.error.is_some())
    };
    // The plugins choose these names: divvy-gpu-mem-….sock and divvy-gpu-count-….sock, aliyungpushare.sock, nvidia-gpu.sock.
    let named = |part: &str| {
        let names = facts.root.names(&directory).into_iter();
        let mut names =
            names.filter(|name| name.ends_with(".sock") && name.contains(part) && !dead(&format!("{directory}/{name}")));
        names.next()
    };
    let mut found: Vec<String> = Vec::new();
    found.extend(["divvy", "aliyun", "nvidia", "hami"].into_iter().filter_map(named));
    match found.as_slice() {
        [] => skip("no device plugin for GPUs has a socket here"),
        [one] => Ok(one.clone()),
        several => problem(format!("{directory} has {}", several.join(" and ")), why, without(&[])),
    }
}

/// Judge check K05.
pub(super) fn leftovers(facts: &Facts<'_>) -> CheckVerdict {
    let cluster = listed(facts, &["nodes"])?;
    let mut found = Vec::new();
    let mut fix = None;
    for node in &cluster.nodes {
        let offers = node
            .status
            .capacity
            .keys()
            .any(|name| is_gpu(name) && amount(&node.status.capacity, name) > 0);
        for name in node.status.capacity.keys().filter(|name| is_gpu(name)) {
            if offers && amount(&node.status.capacity, name) == 0 {
                found.push(format!("{} has {name}: 0", node.metadata.name));
                fix.get_or_insert_with(|| forget(node, name));
            }
        }
    }
    match fix {
        None => Ok(format!("{} checked", count(cluster.nodes.len(), "node"))),
        Some(fix) => problem(
            some(&found),
            "a removed device plugin has left its resource behind: kubectl describe node still shows it, which looks like a fault",
            fix,
        ),
    }
}

/// Return the command that removes a resource from a node's status.
fn forget(node: &CheckedNode, resource: &str) -> String {
    format!(
        "kubectl patch node {} --subresource=status --type=json -p '[{{\"op\":\"remove\",\"path\":\"/status/capacity/{}\"}}]'",
        node.metadata.name,
        resource.replace('/', "~1")
    )
}

fn has_labels(node: &CheckedNode, selector: &Texts) -> bool {
    selector
        .iter()
        .all(|(key, value)| node.metadata.labels.get(key) == Some(value))
}

fn written(selector: &Texts) -> String {
    let labels: Vec<String> = selector.iter().map(|(key, value)| format!("{key}={value}")).collect();
    labels.join(",")
}

/// Return the evidence that the node once had an agent: a resource of shared memory (its amount is 0 once the agent is gone), an
/// inventory, or a pod with an allocation.
fn had_an_agent(node: &CheckedNode, with_allocations: &BTreeSet<&str>) -> Option<String> {
    let capacity = &node.status.capacity;
    let resource = [GPU_MEM, GPU_COUNT]
        .into_iter()
        .find(|resource| capacity.contains_key(resource));
    if let Some(resource) = resource {
        let amount = capacity.get(resource).unwrap_or_default();
        return Some(format!("its capacity has {resource}: {amount}"));
    }
    if node.metadata.annotations.contains_key(INVENTORY) {
        return Some(format!("it has the annotation {INVENTORY}"));
    }
    with_allocations
        .contains(name(node))
        .then(|| "pods with a Divvy allocation are bound to it".to_owned())
}

/// Judge check K19.
pub(super) fn libraries(facts: &Facts<'_>) -> CheckVerdict {
    let cluster = listed(facts, &["nodes"])?;
    let mut looked = 0;
    let mut unreadable: Vec<&str> = Vec::new();
    let mut found: Vec<String> = Vec::new();
    for node in &cluster.nodes {
        match node.metadata.annotations.get(INVENTORY).map(Inventory::parse) {
            Some(Ok(inventory)) => {
                looked += 1;
                found.extend(inventory.driver_trouble.map(|text| format!("node {}: {text}", name(node))));
            }
            Some(Err(_)) => unreadable.push(name(node)),
            None => {}
        }
    }
    if !found.is_empty() {
        let found: Vec<&str> = found.iter().map(String::as_str).collect();
        return problem(
            some_lines(&found),
            "programs that use CUDA end with \"libcuda.so.1: cannot open shared object file\", or do not start",
            "run the command that is shown for each node, then wait 10 s",
        );
    }
    if looked == 0 && unreadable.is_empty() {
        return skip("no node has the inventory of a Divvy agent");
    }
    let left_out = if unreadable.is_empty() {
        String::new()
    } else {
        format!("; not checked: {} (its inventory cannot be read)", some(&unreadable))
    };
    Ok(format!("{}{left_out}", count(looked, "node")))
}

/// Judge check K07.
pub(super) fn labels(facts: &Facts<'_>) -> CheckVerdict {
    let cluster = listed(facts, &["nodes", "daemonsets", "pods"])?;
    let mut looked = 0;
    let mut anywhere: Vec<String> = Vec::new();
    for set in plugins(cluster) {
        looked += 1;
        let selector = &set.spec.template.spec.node_selector;
        if selector.is_empty() {
            anywhere.push(full_name(set));
            continue;
        }
        if cluster.nodes.iter().any(|node| has_labels(node, selector)) {
            continue;
        }
        return problem(
            format!(
                "DaemonSet {} selects nodes with {}, but there is none",
                full_name(set),
                written(selector)
            ),
            "the DaemonSet has no pods (desired 0), so no node offers GPUs",
            format!("kubectl label node NODE {}", written(selector).replace(',', " ")),
        );
    }
    if looked == 0 {
        return skip("no device plugin for GPUs runs as a DaemonSet");
    }
    // A node that is deleted and registers again loses the labels that an administrator gave it.
    let agents: Vec<&DaemonSet> = plugins(cluster).filter(|set| shares_memory(set)).collect();
    let bound = cluster
        .pods
        .iter()
        .filter(|pod| pod.metadata.annotations.contains_key(ALLOCATION));
    let with_allocations: BTreeSet<&str> = bound
        .filter(objects::lives)
        .filter_map(|pod| pod.spec.node_name.as_deref())
        .collect();
    let mut lost: Vec<(String, String, &CheckedNode)> = Vec::new();
    for node in &cluster.nodes {
        let selected = agents
            .iter()
            .any(|set| has_labels(node, &set.spec.template.spec.node_selector));
        let Some(set) = agents.first().filter(|_| !selected) else {
            continue;
        };
        let Some(sign) = had_an_agent(node, &with_allocations) else {
            continue;
        };
        let missing: Texts = set
            .spec
            .template
            .spec
            .node_selector
            .iter()
            .filter(|(key, value)| node.metadata.labels.get(key) != Some(value))
            .collect();
        let found = format!(
            "node {} lacks the label {} that DaemonSet {} selects, so no agent runs there, although {sign}",
            name(node),
            written(&missing),
            full_name(set)
        );
        lost.push((
            found,
            format!("kubectl label node {} {}", name(node), written(&missing).replace(',', " ")),
            node,
        ));
    }
    if let Some((_, _, first)) = lost.first() {
        let found: Vec<&str> = lost.iter().map(|(found, _, _)| found.as_str()).collect();
        let fix: Vec<&str> = lost.iter().map(|(_, fix, _)| fix.as_str()).collect();
        let leftover = if first.status.capacity.contains_key(GPU_MEM) {
            format!(
                "; if the node should no longer share GPUs, remove the leftover resource instead: {}",
                forget(first, GPU_MEM)
            )
        } else {
            String::new()
        };
        return milder(
            Severity::Warning,
            some_lines(&found),
            "a node that is deleted and registers again loses its labels; without an agent it offers no GPU memory, so new pods are not scheduled there",
            format!("{}{leftover}", some_lines(&fix)),
        );
    }
    let anywhere = if anywhere.is_empty() {
        String::new()
    } else {
        format!(
            "; not checked: {} (no nodeSelector; affinity is not evaluated)",
            some(&anywhere)
        )
    };
    Ok(format!("{}{anywhere}", count(looked, "DaemonSet")))
}

/// Judge check K08.
pub(super) fn extender_node(facts: &Facts<'_>) -> CheckVerdict {
    let cluster = listed(facts, &["nodes", "pods"])?;
    let mut looked = 0;
    for pod in &cluster.pods {
        let is_extender = pod.metadata.name.contains("extender") || pod.metadata.name.contains("gpushare-schd");
        if !is_extender {
            continue;
        }
        looked += 1;
        let selector = &pod.spec.node_selector;
        let nowhere = pod.spec.node_name.is_none() && pod.status.phase == "Pending";
        if nowhere && !cluster.nodes.iter().any(|node| has_labels(node, selector)) {
            let master = "node-role.kubernetes.io/master";
            let hint = if selector.contains_key(master) {
                format!("; current Kubernetes uses node-role.kubernetes.io/control-plane instead of {master}")
            } else {
                String::new()
            };
            return problem(
                format!(
                    "pod {} selects a node with {}, but there is none{hint}",
                    pod.metadata.name,
                    written(selector)
                ),
                "the extender does not run, and pods with GPUs stay Pending: \"node(s) didn't match node selector\"",
                format!(
                    "kubectl label node CONTROL-PLANE {}, or remove the nodeSelector from the Deployment",
                    written(selector).replace(',', " ")
                ),
            );
        }
    }
    match looked {
        0 => skip("no extender runs as a pod"),
        looked => Ok(count(looked, "pod")),
    }
}

fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let key = toleration.key.is_empty() && toleration.operator == "Exists" || toleration.key == taint.key;
    let value = toleration.operator == "Exists" || toleration.value == taint.value;
    key && value && (toleration.effect.is_empty() || toleration.effect == taint.effect)
}

/// Return the first taint of a node that a pod with this spec does not tolerate. Taints of the node controller
/// (`node.kubernetes.io/…`) are ignored, because they are temporary.
fn in_the_way<'n>(node: &'n CheckedNode, spec: &CheckedPodSpec) -> Option<&'n Taint> {
    node.spec.taints.iter().find(|taint| {
        taint.effect != "PreferNoSchedule"
            && !taint.key.starts_with("node.kubernetes.io/")
            && !spec.tolerations.iter().any(|toleration| tolerates(toleration, taint))
    })
}

fn shown(taint: &Taint) -> String {
    if taint.value.is_empty() {
        format!("{}:{}", taint.key, taint.effect)
    } else {
        format!("{}={}:{}", taint.key, taint.value, taint.effect)
    }
}

fn toleration(taint: &Taint) -> String {
    format!(
        "tolerations: [{{key: {}, operator: Exists, effect: {}}}]",
        taint.key, taint.effect
    )
}

/// Report whether a DaemonSet is intended to run on a node. If it selects every node, it is not intended for control planes, and
/// therefore needs no toleration for them.
fn is_meant(set: &DaemonSet, node: &CheckedNode) -> bool {
    let selector = &set.spec.template.spec.node_selector;
    let is_chosen = selector.keys().any(|key| !key.starts_with("kubernetes.io/"));
    let is_control_plane = node
        .spec
        .taints
        .iter()
        .any(|taint| taint.key.starts_with("node-role.kubernetes.io/"));
    has_labels(node, selector) && (is_chosen || !is_control_plane)
}

/// Judge check K09.
pub(super) fn taints(facts: &Facts<'_>) -> CheckVerdict {
    let cluster = listed(facts, &["nodes", "daemonsets", "pods"])?;
    for set in plugins(cluster) {
        let spec = &set.spec.template.spec;
        for node in cluster.nodes.iter().filter(|node| is_meant(set, node)) {
            if let Some(taint) = in_the_way(node, spec) {
                return problem(
                    format!(
                        "node {} has the taint {}, but DaemonSet {} does not tolerate it",
                        name(node),
                        shown(taint),
                        full_name(set)
                    ),
                    "the device plugin does not run there, so the node offers no GPUs",
                    format!(
                        "add {} to the DaemonSet (in Divvy's chart gpuNodes.tolerations)",
                        toleration(taint)
                    ),
                );
            }
        }
    }
    let with_gpus = cluster.nodes.iter().filter(|node| {
        let mut resources = node.status.allocatable.keys();
        resources.any(|name| is_gpu(name) && offers(node, name))
    });
    let with_gpus = with_gpus.count();
    let tainted: Vec<&CheckedNode> = cluster.nodes.iter().filter(|node| !node.spec.taints.is_empty()).collect();
    let mut waiting = 0;
    let (mut barred, mut taints) = (Vec::new(), Vec::new());
    let mut nowhere = false;
    for pod in &cluster.pods {
        let waits = pod.status.phase == "Pending" && pod.spec.node_name.is_none();
        if !waits || !pod.spec.wants_gpu() {
            continue;
        }
        waiting += 1;
        // Report whether a node has as much of each resource as a container of the pod requests, and the labels that the pod selects.
        let fits = |node: &CheckedNode| {
            let amount = |text: &str| parse_quantity(text).unwrap_or(0);
            let has = |name: &str| node.status.allocatable.get(name).map_or(0, amount);
            let mut limits = pod
                .spec
                .all_containers()
                .flat_map(|container| container.resources.limits.iter());
            has_labels(node, &pod.spec.node_selector)
                && limits.all(|(name, wanted)| !is_gpu(name) || has(name) >= amount(wanted).max(1))
        };
        let in_way = tainted.iter().filter_map(|node| Some((*node, in_the_way(node, &pod.spec)?)));
        let ways: Vec<(&CheckedNode, &Taint)> = in_way.filter(|(node, _)| fits(node)).collect();
        if ways.is_empty() {
            continue;
        }
        let each: Vec<String> = ways
            .iter()
            .map(|(node, taint)| format!("{} ({})", name(node), shown(taint)))
            .collect();
        let is_open = |node: &CheckedNode| in_the_way(node, &pod.spec).is_none() && fits(node);
        let pod = objects::full_name(pod);
        if cluster.nodes.iter().any(is_open) {
            barred.push(format!("pod {pod} waits and does not tolerate the taint of {}", some(&each)));
        } else {
            nowhere = true;
            barred.push(format!(
                "pod {pod} requests a GPU but does not tolerate the taint of any node that has one: {}",
                some(&each)
            ));
        }
        for (_, taint) in ways {
            let toleration = toleration(taint);
            if !taints.contains(&toleration) {
                taints.push(toleration);
            }
        }
    }
    if barred.is_empty() {
        return Ok(format!(
            "{}, {with_gpus} with GPUs; {} for a GPU",
            count(cluster.nodes.len(), "node"),
            match waiting {
                1 => "1 pod waits".to_owned(),
                n => format!("{n} pods wait"),
            }
        ));
    }
    let barred: Vec<&str> = barred.iter().map(String::as_str).collect();
    let (found, fix) = (
        some_lines(&barred),
        format!("add to the pod, if it may run there: {}", some(&taints)),
    );
    if nowhere {
        problem(found, "these pods stay Pending: \"had untolerated taint\"", fix)
    } else {
        milder(
            Severity::Warning,
            found,
            "the scheduler skips these nodes for the pod, even if GPUs are free there: \"had untolerated taint\"",
            fix,
        )
    }
}
