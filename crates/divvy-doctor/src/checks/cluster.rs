//! Nodes and DaemonSets.

use divvy_model::names::{GPU_MEM, WHOLE_GPU};
use divvy_model::parse_quantity;

use super::kubelet::is_gpu;
use crate::check::{Severity, Stop, Verdict, milder, problem, skip};
use crate::facts::cluster::{Cluster, DaemonSet, Node, PodSpec, Taint, Texts, Toleration};
use crate::facts::{Asked, Facts, version_at_least};

/// Images of device plugins, by a part of their names.
const PLUGINS: [&str; 7] = [
    "k8s-device-plugin",
    "gpushare-device-plugin",
    "k8s-gpushare-plugin",
    "projecthami/hami",
    "volcano-vgpu-device-plugin",
    "intel-gpu-plugin",
    "nvidia-gpu-device-plugin",
];

pub(super) fn objects<'f>(facts: &'f Facts<'_>) -> Result<&'f Cluster, Stop> {
    match &facts.cluster {
        Asked::Answer(cluster) => Ok(cluster),
        Asked::Failed(reason) | Asked::Absent(reason) | Asked::Not(reason) => skip(reason.clone()),
    }
}

/// Goes on if this machine is to be looked at in place of a cluster that does not answer.
pub(super) fn this_machine(facts: &Facts<'_>) -> Result<(), Stop> {
    match facts.node {
        true => Ok(()),
        false => objects(facts).map(drop),
    }
}

/// Names, no more than a few.
pub(super) fn some<S: AsRef<str>>(names: &[S]) -> String {
    let shown: Vec<&str> = names.iter().take(5).map(AsRef::as_ref).collect();
    match names.len() {
        0..=5 => shown.join(", "),
        n => format!("{} and {} more", shown.join(", "), n - 5),
    }
}

fn amount(resources: &Texts, name: &str) -> u64 {
    resources.get(name).and_then(parse_quantity).unwrap_or(0)
}

/// K01
pub(super) fn versions(facts: &Facts<'_>) -> Verdict {
    let cluster = objects(facts)?;
    let of = |node: &Node| format!("{} ({})", node.metadata.name, node.status.node_info.kubelet_version);
    let known = cluster
        .nodes
        .iter()
        .filter(|node| !node.status.node_info.kubelet_version.is_empty());
    let known: Vec<&Node> = known.collect();
    let older = |least: &[u32]| -> Vec<String> {
        let nodes = known.iter();
        nodes
            .filter(|node| !version_at_least(&node.status.node_info.kubelet_version, least))
            .map(|node| of(node))
            .collect()
    };
    if known.is_empty() {
        return skip("no node says its version");
    }
    let fix = "upgrade Kubernetes; 1.32 and later is what Divvy is tested with in full";
    let ancient = older(&[1, 26]);
    if !ancient.is_empty() {
        return problem(
            some(&ancient),
            "device plugins are stable since 1.26; before 1.10 a kubelet knows none",
            fix,
        );
    }
    let without_cdi = older(&[1, 29]);
    if !without_cdi.is_empty() {
        return milder(
            Severity::Info,
            some(&without_cdi),
            "below 1.29 a device plugin cannot name CDI devices: there Divvy needs divvy-runtime",
            fix,
        );
    }
    Ok(format!("{} nodes", known.len()))
}

/// DaemonSets that run a device plugin, Divvy's among them.
fn plugins(cluster: &Cluster) -> impl Iterator<Item = &DaemonSet> {
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

fn full_name(set: &DaemonSet) -> String {
    format!("{}/{}", set.metadata.namespace, set.metadata.name)
}

/// K04
pub(super) fn one_plugin(facts: &Facts<'_>) -> Verdict {
    let why = "two plugins promise the same GPUs: pods run out of memory on each other";
    if let Some(cluster) = facts.cluster.answer() {
        cluster.listed("daemonsets")?;
        let both: Vec<&str> = cluster
            .nodes
            .iter()
            .filter(|node| amount(&node.status.allocatable, GPU_MEM) > 0 && amount(&node.status.allocatable, WHOLE_GPU) > 0)
            .map(|node| node.metadata.name.as_str())
            .collect();
        let foreign: Vec<String> = cluster
            .daemon_sets
            .iter()
            .filter(|set| is_foreign(set) && set.status.desired_number_scheduled > 0)
            .map(full_name)
            .collect();
        let ours = cluster
            .daemon_sets
            .iter()
            .any(|set| is_divvys(set) && set.status.desired_number_scheduled > 0);
        if !both.is_empty() {
            return problem(
                format!(
                    "{} offer {GPU_MEM} and {WHOLE_GPU}{}",
                    some(&both),
                    match foreign.as_slice() {
                        [] => String::new(),
                        sets => format!("; DaemonSets {}", some(sets)),
                    }
                ),
                why,
                "kubectl delete ds -n kube-system nvidia-device-plugin-daemonset, or keep one of the two from these nodes by their labels",
            );
        }
        if ours && !foreign.is_empty() {
            return milder(
                Severity::Warning,
                format!("DaemonSets {} run beside Divvy's, on other nodes as it seems", some(&foreign)),
                why,
                "see that their nodeSelectors leave each other's nodes out",
            );
        }
        return match foreign.len() + usize::from(ours) {
            0 => skip("no device plugin for GPUs runs as a DaemonSet"),
            _ => Ok("no node offers two".to_owned()),
        };
    }
    this_machine(facts)?;
    let kubelet = facts.kubelet().ok_or_else(|| Stop::Skip("no kubelet here".to_owned()))?;
    let folder = format!("{}/device-plugins", kubelet.dir);
    let dead = |path: &str| {
        let sockets = facts.sockets.answer().map_or(&[][..], Vec::as_slice);
        sockets.iter().any(|socket| socket.path == path && socket.answers.is_err())
    };
    // Names as the plugins choose them: divvy-gpu-mem-….sock and divvy-gpu-count-….sock, aliyungpushare.sock, nvidia-gpu.sock.
    let named = |part: &str| {
        let names = facts.root.names(&folder).into_iter();
        let mut names = names.filter(|name| name.ends_with(".sock") && name.contains(part) && !dead(&format!("{folder}/{name}")));
        names.next()
    };
    let mut found: Vec<String> = Vec::new();
    found.extend(["divvy", "aliyun", "nvidia", "hami"].into_iter().filter_map(named));
    match found.as_slice() {
        [] => skip("no device plugin for GPUs has a socket here"),
        [one] => Ok(one.clone()),
        several => problem(
            format!("{folder} has {}", several.join(" and ")),
            why,
            "kubectl delete ds -n kube-system nvidia-device-plugin-daemonset, or keep one of the two from this node by its labels",
        ),
    }
}

/// K05
pub(super) fn leftovers(facts: &Facts<'_>) -> Verdict {
    let cluster = objects(facts)?;
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
                fix.get_or_insert_with(|| {
                    format!(
                        "kubectl patch node {} --subresource=status --type=json -p '[{{\"op\":\"remove\",\"path\":\"/status/capacity/{}\"}}]'",
                        node.metadata.name,
                        name.replace('/', "~1")
                    )
                });
            }
        }
    }
    match fix {
        None => Ok(format!("{} nodes looked at", cluster.nodes.len())),
        Some(fix) => problem(
            some(&found),
            "a device plugin that is gone has left its resource: describe confuses, and after a boot a scheduler may believe in it",
            fix,
        ),
    }
}

fn has_labels(node: &Node, selector: &Texts) -> bool {
    selector
        .iter()
        .all(|(key, value)| node.metadata.labels.get(key) == Some(value))
}

fn written(selector: &Texts) -> String {
    let labels: Vec<String> = selector.iter().map(|(key, value)| format!("{key}={value}")).collect();
    labels.join(",")
}

/// K07
pub(super) fn labels(facts: &Facts<'_>) -> Verdict {
    let cluster = objects(facts)?;
    cluster.listed("daemonsets")?;
    let mut looked = 0;
    for set in plugins(cluster) {
        looked += 1;
        let selector = &set.spec.template.spec.node_selector;
        if selector.is_empty() || cluster.nodes.iter().any(|node| has_labels(node, selector)) {
            continue;
        }
        return problem(
            format!(
                "DaemonSet {} wants nodes with {}, and there is none",
                full_name(set),
                written(selector)
            ),
            "it runs nowhere (desired 0), so no node offers GPUs",
            format!("kubectl label node NODE {}", written(selector).replace(',', " ")),
        );
    }
    match looked {
        0 => skip("no device plugin for GPUs runs as a DaemonSet"),
        looked => Ok(format!("{looked} DaemonSets")),
    }
}

/// K08
pub(super) fn extender_node(facts: &Facts<'_>) -> Verdict {
    let cluster = objects(facts)?;
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
            let hint = match selector.contains_key(master) {
                true => format!("; new clusters have node-role.kubernetes.io/control-plane and no {master}"),
                false => String::new(),
            };
            return problem(
                format!(
                    "pod {} wants a node with {}, and there is none{hint}",
                    pod.metadata.name,
                    written(selector)
                ),
                "the extender does not run, and pods with GPUs stay Pending: \"node(s) didn't match node selector\"",
                format!(
                    "kubectl label node CONTROL-PLANE {}, or take the nodeSelector out of the Deployment",
                    written(selector).replace(',', " ")
                ),
            );
        }
    }
    match looked {
        0 => skip("no extender runs as a pod"),
        looked => Ok(format!("{looked} pods")),
    }
}

fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let key = toleration.key.is_empty() && toleration.operator == "Exists" || toleration.key == taint.key;
    let value = toleration.operator == "Exists" || toleration.value == taint.value;
    key && value && (toleration.effect.is_empty() || toleration.effect == taint.effect)
}

/// The first taint that keeps pods like this off a node. The node controller's own come and go, and DaemonSets tolerate them.
fn in_the_way<'n>(node: &'n Node, spec: &PodSpec) -> Option<&'n Taint> {
    node.spec.taints.iter().find(|taint| {
        taint.effect != "PreferNoSchedule"
            && !taint.key.starts_with("node.kubernetes.io/")
            && !taint.key.starts_with("node-role.kubernetes.io/")
            && !spec.tolerations.iter().any(|toleration| tolerates(toleration, taint))
    })
}

fn shown(taint: &Taint) -> String {
    match taint.value.is_empty() {
        true => format!("{}:{}", taint.key, taint.effect),
        false => format!("{}={}:{}", taint.key, taint.value, taint.effect),
    }
}

/// K09
pub(super) fn taints(facts: &Facts<'_>) -> Verdict {
    let cluster = objects(facts)?;
    cluster.listed("daemonsets")?;
    let why = "they do not run there: DaemonSets have fewer pods than nodes, pods stay Pending with \"had untolerated taint\"";
    let fix = |taint: &Taint| {
        format!(
            "tolerations: [{{key: {}, operator: Exists, effect: {}}}] (in Divvy's chart gpuNodes.tolerations)",
            taint.key, taint.effect
        )
    };
    for set in plugins(cluster) {
        let spec = &set.spec.template.spec;
        for node in cluster.nodes.iter().filter(|node| has_labels(node, &spec.node_selector)) {
            if let Some(taint) = in_the_way(node, spec) {
                return problem(
                    format!(
                        "node {} has the taint {}, and DaemonSet {} does not tolerate it",
                        node.metadata.name,
                        shown(taint),
                        full_name(set)
                    ),
                    why,
                    fix(taint),
                );
            }
        }
    }
    let offering: Vec<&Node> = cluster
        .nodes
        .iter()
        .filter(|node| {
            node.status
                .allocatable
                .keys()
                .any(|name| is_gpu(name) && amount(&node.status.allocatable, name) > 0)
        })
        .collect();
    for pod in cluster
        .pods
        .iter()
        .filter(|pod| pod.status.phase == "Pending" && pod.spec.node_name.is_none())
    {
        if !pod.spec.wants_gpu() || offering.is_empty() {
            continue;
        }
        let ways: Vec<&Taint> = offering.iter().filter_map(|node| in_the_way(node, &pod.spec)).collect();
        if let (Some(taint), true) = (ways.first(), ways.len() == offering.len()) {
            return problem(
                format!(
                    "pod {}/{} wants a GPU, and tolerates the taint of no node that has one: {}",
                    pod.metadata.namespace,
                    pod.metadata.name,
                    shown(taint)
                ),
                why,
                fix(taint),
            );
        }
    }
    Ok(format!("{} nodes, {} with GPUs", cluster.nodes.len(), offering.len()))
}
