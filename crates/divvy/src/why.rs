//! Why a pod waits, or where it runs: [`answer`] makes a value of what the ledger knows, [`text`] prints it.

mod placement;
mod preemption;

use std::collections::BTreeMap;
use std::fmt::Write as _;

use divvy_cluster::objects::{PodObject, PodStatus};
use divvy_container::{plain, plain_line};
use divvy_model::{Health, Held, MiB, Node, Pod, runtime};
use divvy_placement::{Ask, GpuReport, HolderKind, Ledger, NodeReport, Refusal, gpu_list};
use serde::Serialize;

pub use placement::{Placement, placement, placement_text};

use crate::printer::columns;
use crate::sums::{Sum, sums};

/// The answer about one pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Answer {
    /// `namespace/name`
    pub pod: String,
    /// `waiting`, `bound`, `ended`, `no-gpu-memory`
    pub state: &'static str,
    /// The answer in a sentence.
    pub summary: String,
    /// Units asked for.
    pub units: u64,
    /// The same in MiB; `null` if it is more than can be counted.
    #[serde(rename = "memoryMiB")]
    pub memory: Option<MiB>,
    /// What the scheduler or the kubelet says, in its own words.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub reported: Vec<String>,
    /// For a bound pod: its GPUs.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub holds: Vec<Share>,
    /// For a waiting pod: each node.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<NodeAnswer>,
    /// What to do, most helpful first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub hints: Vec<String>,
}

/// A bound pod's share of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Share {
    /// The node.
    pub node: String,
    /// The GPU as a person names it: `GPU 0 (NVIDIA …)`.
    pub gpu: String,
    /// Its UUID, where known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// Its memory there, in MiB.
    #[serde(rename = "memoryMiB")]
    pub memory: MiB,
}

/// What one node has to say.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeAnswer {
    /// The node.
    pub node: String,
    /// Whether the pod would fit now.
    pub fits: bool,
    /// The reason in a sentence.
    pub reason: String,
    /// Its GPUs.
    pub gpus: Vec<GpuAnswer>,
}

/// What one GPU has to say.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuAnswer {
    /// Its index.
    pub index: u32,
    /// Its product name.
    pub model: String,
    /// `ok`, `failed (XID 79)`, `lost`.
    pub health: String,
    /// Free, in MiB.
    #[serde(rename = "freeMiB")]
    pub free: MiB,
    /// In all, in MiB.
    #[serde(rename = "totalMiB")]
    pub total: MiB,
    /// Whether the pod would fit now.
    pub fits: bool,
    /// Who holds the rest, largest first, `namespace/name 30 GiB`.
    pub held_by: Vec<String>,
}

/// What else than its GPUs kube-scheduler looks at on a node: the part of it that keeps pods off GPU nodes most often.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Site {
    labels: Labels,
    cordoned: bool,
    sum: Sum,
    /// Whole GPUs that another device plugin offers there.
    whole_gpus: u64,
    runtime: Option<String>,
}

/// Labels by name.
pub type Labels = BTreeMap<String, String>;

/// The sites of these nodes, whose labels stand in the same order, with these pods.
pub fn sites(labels: Vec<Labels>, nodes: &[Node], pods: &[Pod]) -> BTreeMap<String, Site> {
    let sums = sums(nodes, pods);
    let site = |(labels, node): (Labels, &Node)| Site {
        labels,
        cordoned: node.unschedulable,
        sum: sums.get(&node.name).copied().unwrap_or_default(),
        whole_gpus: node.whole_gpus,
        runtime: node.runtime.clone(),
    };
    let both = labels.into_iter().zip(nodes);
    both.map(|both| (both.1.name.clone(), site(both))).collect()
}

/// Why kube-scheduler would not let the pod on to a node whose GPUs have room, and what would help.
fn obstacle(site: &Site, name: &str, ask: &Ask, object: &PodObject) -> Option<(String, String)> {
    for (key, value) in &object.spec.node_selector {
        let has = site.labels.get(key);
        if has != Some(value) {
            let has = has.map_or_else(|| "no such label".to_owned(), |has| format!("{key}={has}"));
            return Some((
                format!("the pod's nodeSelector asks for {key}={value}, and the node has {has}"),
                format!("label the node if the pod may run there: kubectl label node {name} {key}={value} --overwrite"),
            ));
        }
    }
    if site.cordoned {
        return Some((
            "the node is cordoned".to_owned(),
            format!("let pods on to it again: kubectl uncordon {name}"),
        ));
    }
    let free = site.sum.free();
    if free >= ask.units {
        return None;
    }
    let Sum { capacity, offered, .. } = site.sum;
    let without_cdi = site.runtime.as_deref().and_then(runtime::without_cdi);
    Some(match offered {
        0 if without_cdi.is_some() => (
            without_cdi.unwrap_or_default(),
            "the agent offers the GPUs again when that is done".to_owned(),
        ),
        0 => (
            format!("its kubelet offers 0 of {capacity} units: the device plugin is away"),
            is_it_running(name),
        ),
        _ => (
            format!("kube-scheduler counts {free} of the {offered} units that the kubelet offers as free"),
            "units of failed GPUs are not offered, and pods count until they are gone".to_owned(),
        ),
    })
}

/// Explains a pod.
pub fn answer(ledger: &Ledger, pod: &Pod, object: &PodObject, sites: &BTreeMap<String, Site>) -> Answer {
    let ask = Ask::of_pod(pod, ledger.unit());
    let status = object.status.clone().unwrap_or_default();
    let mut answer = Answer {
        pod: pod.key().to_string(),
        state: "waiting",
        summary: String::new(),
        units: ask.units,
        memory: ledger.unit().memory(ask.units),
        reported: reported(&status),
        holds: Vec::new(),
        nodes: Vec::new(),
        hints: Vec::new(),
    };
    if pod.ended() {
        answer.state = "ended";
        answer.summary = format!(
            "has ended ({}); it holds no GPU memory",
            status.phase.as_deref().unwrap_or("no phase")
        );
    } else if ask.units == 0 {
        answer.state = "no-gpu-memory";
        answer.summary = "asks for no GPU memory; Divvy has no part in where it runs".to_owned();
        answer.hints.push(format!(
            "to share a GPU, ask for its memory: resources: {{limits: {{{}: 3}}}}",
            divvy_model::names::GPU_MEM
        ));
    } else if pod.node.is_some() {
        bound(&mut answer, ledger, pod, &status);
    } else if sites.values().all(|site| site.sum.capacity == 0) {
        nobody_offers(&mut answer, sites, &asked_where(&ask));
    } else {
        waiting(&mut answer, ledger, &ask, pod, &|node| {
            obstacle(sites.get(node)?, node, &ask, object)
        });
        answer
            .hints
            .splice(0..0, preemption::by_sums_there_is_room(ledger, &ask, pod, sites));
        if let Some(name) = unheard(object, &answer) {
            let hint = format!(
                "no scheduler has looked at it yet, and its schedulerName is {name:?}: does a scheduler of that name run? \
                 `divvy scheduler-config --as-second-scheduler` makes divvy-scheduler"
            );
            answer.hints.insert(0, hint);
        }
    }
    beside(&mut answer, pod, sites);
    answer
}

fn is_it_running(node: &str) -> String {
    format!("is the Divvy agent running there? kubectl get pods -A -o wide --field-selector spec.nodeName={node}")
}

/// No node has a unit to give: Divvy is not there, or not ready anywhere.
fn nobody_offers(answer: &mut Answer, sites: &BTreeMap<String, Site>, asked: &str) {
    answer.summary = format!(
        "waits; it asks for {asked}, and no node of the cluster offers any {}: Divvy's agent is not installed, or not ready",
        divvy_model::names::GPU_MEM
    );
    for (name, site) in sites {
        if let Some(text) = site.runtime.as_deref().and_then(runtime::without_cdi) {
            answer.hints.push(format!("node {name}: {text}"));
        }
    }
    answer.hints.push(
        "is it installed, and does an agent run on the GPU nodes? kubectl get daemonsets,pods -A -o wide | grep divvy".to_owned(),
    );
    answer
        .hints
        .push("if it is not: divvy manifests | kubectl apply -f -; if it is, its pods say what they wait for: kubectl describe pod, and kubectl logs".to_owned());
}

/// What stands beside Divvy on the nodes that matter to a pod, and in the pod itself.
fn beside(answer: &mut Answer, pod: &Pod, sites: &BTreeMap<String, Site>) {
    if answer.units == 0 || pod.ended() {
        return;
    }
    let matters = |name: &str| pod.node.as_deref().is_none_or(|node| node == name);
    for (name, site) in sites
        .iter()
        .filter(|(name, site)| matters(name) && site.sum.capacity > 0 && site.whole_gpus > 0)
    {
        answer.hints.push(format!(
            "node {name}: another device plugin offers {} {} there, and neither knows of the other: the same GPU can be given out twice. Keep \
             NVIDIA's plugin off this node (a nodeSelector or an affinity of its DaemonSet)",
            site.whole_gpus,
            divvy_model::names::WHOLE_GPU
        ));
    }
    let away = sites
        .iter()
        .filter(|(_, site)| site.sum.capacity > 0 && site.sum.offered == 0);
    for (name, _) in away.filter(|_| pod.node.is_none()) {
        let hint = is_it_running(name);
        if !answer.hints.iter().any(|known| known.contains(&hint)) {
            answer.hints.push(format!("node {name}: {hint}"));
        }
    }
    let starts = pod.node.is_none() || !matches!(pod.held, Held::Nothing | Held::Unreadable(_));
    if let Some((container, value)) = pod.own_visible.as_deref().filter(|_| starts) {
        answer.hints.push(format!(
            "container {container} sets {}={value} itself; that has no effect, it sees its own GPU and no other: take the variable out of the pod",
            divvy_model::names::VISIBLE_DEVICES
        ));
    }
    if pod.node.is_none() && matches!(pod.held, Held::Allocation(_) | Held::Legacy(_)) {
        answer.hints.push(
            "the pod carries an allocation though it is bound to no node; it has no effect, and the binding replaces it. The admission policies \
             refuse such pods in words: divvy manifests"
                .to_owned(),
        );
    }
}

fn bound(answer: &mut Answer, ledger: &Ledger, pod: &Pod, status: &PodStatus) {
    answer.state = "bound";
    let report = ledger.whereabouts(pod);
    let node = pod.node.as_deref().unwrap_or_default();
    answer.holds = report
        .into_iter()
        .flat_map(|report| {
            let node = report.node;
            report.shares.into_iter().map(move |share| match share.known {
                Some((uuid, index, model)) => Share {
                    node: node.clone(),
                    gpu: named(index, &model),
                    uuid,
                    memory: share.memory,
                },
                None => Share {
                    node: node.clone(),
                    gpu: format!("{}, which the node has not", share.gpu),
                    uuid: None,
                    memory: share.memory,
                },
            })
        })
        .collect();
    let phase = status.phase.as_deref().unwrap_or("no phase");
    let deleting = if pod.deleting {
        "; it is being deleted and holds its memory until its containers have ended"
    } else {
        ""
    };
    answer.summary = match &pod.held {
        Held::Nothing => format!(
            "is bound to node {node} ({phase}) without an allocation: kube-scheduler did not ask Divvy's extender, and its containers will not start"
        ),
        Held::Unreadable(error) => format!("is bound to node {node} ({phase}), and its allocation cannot be read: {error}"),
        Held::Allocation(_) | Held::Legacy(_) => format!("is bound to node {node} ({phase}){deleting}"),
    };
    if matches!(pod.held, Held::Nothing | Held::Unreadable(_)) {
        answer.hints.push("check that kube-scheduler's configuration names the extender with bindVerb, and that the pod sets neither nodeName nor another schedulerName".to_owned());
        answer.hints.push(format!(
            "then delete the pod: kubectl delete pod -n {} {}",
            pod.namespace, pod.name
        ));
    }
}

fn waiting(answer: &mut Answer, ledger: &Ledger, ask: &Ask, pod: &Pod, obstacle: &dyn Fn(&str) -> Option<(String, String)>) {
    let reports = ledger.explain_all(ask);
    let (room, closed): (Vec<_>, Vec<_>) = reports
        .iter()
        .filter(|report| has_room(report))
        .map(|report| (report, obstacle(&report.node)))
        .partition(|(_, obstacle)| obstacle.is_none());
    let asked = asked_where(ask);
    answer.summary = if let Some(Err(error)) = ask.rules.as_deref() {
        format!("waits; it goes nowhere: {error}")
    } else if let Some((report, _)) = room.first() {
        format!("waits; it asks for {asked}, and node {} has room for that now", report.node)
    } else if let Some((report, Some((reason, _)))) = closed.first() {
        let what = if ask.gpus == 1 { "a GPU" } else { "as many GPUs" };
        format!(
            "waits; it asks for {asked}. Node {} has {what} with that much free, but {reason}",
            report.node
        )
    } else if ask.gpus > 1 {
        let most = reports
            .iter()
            .max_by_key(|report| (report.fitting(), std::cmp::Reverse(&report.node)));
        match most.map(|report| (report, report.fitting())) {
            Some((report, (fit, taken))) if taken > 0 => format!(
                "waits; it asks for {asked}. No node has as many with that much free; on node {} it is {fit} of {taken}",
                report.node
            ),
            _ => format!("waits; it asks for {asked}, and the cluster has none"),
        }
    } else if let Some(report) = reports
        .iter()
        .filter(|report| ask.memory.is_some_and(|memory| report.sum_free() >= memory))
        .max_by_key(|report| report.largest_free())
    {
        format!(
            "waits; it asks for {asked}. Node {} has {} free in all, but at most {} on one GPU",
            report.node,
            amount(report.sum_free()),
            amount(report.largest_free())
        )
    } else if !reports.iter().flat_map(|report| &report.gpus).any(|gpu| gpu.taken) {
        format!("waits; it asks for {asked}, and the cluster has none")
    } else {
        format!("waits; it asks for {asked}, and none has that much free")
    };
    if pod.deleting {
        answer.summary.push_str(" (it is being deleted)");
    }
    for report in &reports {
        answer
            .hints
            .extend(report.hints.iter().map(|hint| format!("node {}: {hint}", report.node)));
    }
    for (report, obstacle) in &closed {
        if let Some((_, hint)) = obstacle {
            answer.hints.push(format!("node {}: {hint}", report.node));
        }
    }
    if answer.reported.iter().any(|line| extender_unreachable(line)) {
        answer.hints.insert(
            0,
            "kube-scheduler does not reach Divvy's extender: is it running, and is the urlPrefix in kube-scheduler's configuration its address?"
                .to_owned(),
        );
    } else if !room.is_empty() {
        answer.hints.push(
            "what kube-scheduler reports is in the way then, or it has not tried again yet: see `kubectl describe pod`"
                .to_owned(),
        );
    }
    answer.nodes = reports
        .iter()
        .map(|report| match closed.iter().find(|(closed, _)| closed.node == report.node) {
            Some((_, Some((reason, _)))) => NodeAnswer {
                fits: false,
                reason: reason.clone(),
                ..node_answer(report)
            },
            _ => node_answer(report),
        })
        .collect();
}

/// Whether kube-scheduler's words are those of its HTTP client: `Post "http://…/filter": dial tcp …: connect: connection refused`.
fn extender_unreachable(line: &str) -> bool {
    line.contains("kube-scheduler") && line.contains("Post \"") && (line.contains("/filter\"") || line.contains("/bind\""))
}

/// kube-scheduler goes on about preemption, which has no part in this.
fn without_preemption(line: &str) -> &str {
    let line = line.split(" preemption: ").next().unwrap_or(line);
    line.strip_suffix(" no new claims to deallocate,").unwrap_or(line)
}

fn has_room(report: &NodeReport) -> bool {
    report.verdict.as_ref().is_ok_and(|gpus| !gpus.is_empty())
}

fn node_answer(report: &NodeReport) -> NodeAnswer {
    let reason = match &report.verdict {
        Ok(gpus) if gpus.is_empty() => "no GPU memory was asked for".to_owned(),
        Ok(gpus) => format!("{} {} room", gpu_list(gpus), if gpus.len() == 1 { "has" } else { "have" }),
        Err(Refusal::TooFewFit(ask)) => {
            let (fit, taken) = report.fitting();
            format!("{fit} of {taken} GPUs have {} free, {} are needed", asked(ask), ask.gpus)
        }
        Err(Refusal::NoGpuFits) => {
            format!(
                "at most {} free on one GPU, {} in all",
                amount(report.largest_free()),
                amount(report.sum_free())
            )
        }
        Err(refusal) => refusal.filter_message(&report.node),
    };
    NodeAnswer {
        node: report.node.clone(),
        fits: has_room(report),
        reason,
        gpus: report.gpus.iter().map(gpu_answer).collect(),
    }
}

fn gpu_answer(gpu: &GpuReport) -> GpuAnswer {
    let mut held_by: Vec<String> = gpu
        .holders
        .iter()
        .map(|holder| {
            let note = match holder.kind {
                HolderKind::Bound => "",
                HolderKind::Deleting => " (being deleted)",
                HolderKind::Reserved => " (being bound)",
            };
            format!("{} {}{note}", holder.pod, amount(holder.memory))
        })
        .collect();
    if gpu.held > MiB::ZERO {
        held_by.push(format!("containers of deleted pods {}", amount(gpu.held)));
    }
    GpuAnswer {
        index: gpu.index,
        model: gpu.model.clone(),
        health: health(gpu.health, gpu.reason.as_deref()),
        free: gpu.free,
        total: gpu.capacity,
        fits: gpu.fits,
        held_by,
    }
}

fn health(health: Health, reason: Option<&str>) -> String {
    let word = match health {
        Health::Ok => "ok",
        Health::Failed => "failed",
        Health::Lost => "lost",
    };
    reason.map_or_else(|| word.to_owned(), |reason| format!("{word} ({reason})"))
}

fn named(index: u32, model: &str) -> String {
    if model.is_empty() {
        format!("GPU {index}")
    } else {
        format!("GPU {index} ({model})")
    }
}

/// How much of each GPU.
fn asked(ask: &Ask) -> String {
    match ask.memory {
        Some(memory) => amount(memory),
        None => ask.amount(),
    }
}

/// `3 GiB on one GPU`, `3 GiB on a GPU of a product like a100*`, `4 GiB on each of 2 GPUs`
fn asked_where(ask: &Ask) -> String {
    let size = asked(ask);
    match (ask.wanted(), ask.gpus) {
        (None, 1) => format!("{size} on one GPU"),
        (Some(rules), 1) => format!("{size} on a GPU {rules}"),
        (None, gpus) => format!("{size} on each of {gpus} GPUs"),
        (Some(rules), gpus) => format!("{size} on each of {gpus} GPUs {rules}"),
    }
}

/// `20 GiB`, or `1500 MiB` where that is no whole number of GiB.
fn amount(memory: MiB) -> String {
    if memory.0.is_multiple_of(1024) {
        format!("{} GiB", memory.0 / 1024)
    } else {
        memory.to_string()
    }
}

/// What others say in a pod's status: conditions that are false, containers that wait, the pod's own reason.
/// The pod's own choice of a scheduler, if none has said anything of it.
fn unheard<'a>(object: &'a PodObject, answer: &Answer) -> Option<&'a str> {
    let name = object.spec.scheduler_name.as_deref()?;
    (name != "default-scheduler" && answer.reported.is_empty()).then_some(name)
}

fn reported(status: &PodStatus) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(reason) = &status.reason {
        lines.push(format!("{reason}: {}", status.message.as_deref().unwrap_or_default()));
    }
    for condition in status
        .conditions
        .iter()
        .filter(|condition| condition.kind == "PodScheduled" && condition.status == "False")
    {
        let (reason, message) = (
            condition.reason.as_deref().unwrap_or_default(),
            condition.message.as_deref().unwrap_or_default(),
        );
        lines.push(format!("kube-scheduler ({reason}): {message}"));
    }
    for container in status.init_container_statuses.iter().chain(&status.container_statuses) {
        if let Some(waiting) = &container.state.waiting {
            let (reason, message) = (
                waiting.reason.as_deref().unwrap_or_default(),
                waiting.message.as_deref().unwrap_or_default(),
            );
            lines.push(format!("container {} ({reason}): {message}", container.name));
        }
    }
    lines
}

/// The answer as a person reads it. What the pod's author wrote moves no cursor, and makes no line of its own.
pub fn text(answer: &Answer) -> String {
    plain(&in_words(answer)).into_owned()
}

fn in_words(answer: &Answer) -> String {
    let mut text = format!("Pod {} {}.\n", answer.pod, plain_line(answer.summary.chars()));
    for line in &answer.reported {
        let _ = writeln!(text, "  {}", without_preemption(line));
    }
    for share in &answer.holds {
        let uuid = share.uuid.as_deref().map(|uuid| format!("  {uuid}")).unwrap_or_default();
        let _ = writeln!(
            text,
            "  holds {} of {} on node {}{uuid}",
            amount(share.memory),
            share.gpu,
            share.node
        );
    }
    if !answer.nodes.is_empty() {
        let mut raw = String::from("NODE\tGPU\tMODEL\tFREE\tOF\tHEALTH\tHELD BY\n");
        for node in &answer.nodes {
            if node.gpus.is_empty() {
                // Every row has every column: a shorter one would end the columns above it.
                let _ = writeln!(raw, "{}\t-\t-\t-\t-\t-\t{}", node.node, node.reason);
            }
            let closed = !node.fits && node.gpus.iter().any(|gpu| gpu.fits);
            if closed {
                let _ = writeln!(raw, "{}\t-\t-\t-\t-\t-\t{}", node.node, node.reason);
            }
            for gpu in &node.gpus {
                let model = if gpu.model.is_empty() { "-" } else { &gpu.model };
                let held = if gpu.held_by.is_empty() {
                    "-".to_owned()
                } else {
                    gpu.held_by.join(", ")
                };
                let (free, total) = (amount(gpu.free), amount(gpu.total));
                let _ = writeln!(
                    raw,
                    "{}\t{}\t{model}\t{free}\t{total}\t{}\t{held}",
                    node.node, gpu.index, gpu.health
                );
            }
        }
        let _ = write!(text, "\n{}", columns(&raw));
    }
    if !answer.hints.is_empty() {
        text.push_str("\nWhat would help:\n");
        for hint in &answer.hints {
            let _ = writeln!(text, "  {hint}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use divvy_cluster::convert;
    use divvy_cluster::objects::NodeObject;
    use divvy_model::MemoryUnit;
    use divvy_placement::policy::Policy;
    use serde_json::{Value, json};

    use super::*;

    fn node(change: impl Fn(&mut Value)) -> NodeObject {
        let amounts = json!({"aliyun.com/gpu-mem": "16", "aliyun.com/gpu-count": "1"});
        let mut node = json!({
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1", "labels": {"disk": "hdd"}}, "spec": {},
            "status": {"capacity": amounts, "allocatable": amounts},
        });
        change(&mut node);
        serde_json::from_value(node).expect("a node")
    }

    fn pod(units: u64, change: impl Fn(&mut Value)) -> PodObject {
        let mut pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "q", "namespace": "default", "uid": "u-q"},
            "spec": {"containers": [{"name": "main", "resources": {"limits": {"aliyun.com/gpu-mem": units}}}]},
        });
        change(&mut pod);
        serde_json::from_value(pod).expect("a pod")
    }

    fn explained(node: &NodeObject, object: &PodObject, others: &[Pod]) -> Answer {
        let nodes = [convert::node(node)];
        let asked = convert::pod(object).expect("readable");
        let mut ledger = Ledger::new(MemoryUnit::GIB);
        ledger.replace_nodes(&nodes);
        ledger.replace_pods(others.iter().cloned().chain([asked.clone()]));
        let labels = node.metadata.labels.clone().unwrap_or_default();
        answer(&ledger, &asked, object, &sites(vec![labels], &nodes, others))
    }

    #[test]
    fn what_a_pod_asks_for_moves_no_cursor() {
        for (model, shown) in [
            ("x\u{202e}y", "like x\\u{202e}y,"),
            ("x\n\u{1b}[2J", "\"x\\n\\u{1b}[2J\" is no pattern"),
        ] {
            let wants = |pod: &mut Value| pod["metadata"]["annotations"] = json!({"divvy.dev/gpu-model": model});
            let text = text(&explained(&node(|_| ()), &pod(4, wants), &[]));
            assert!(text.starts_with("Pod default/q waits") && text.contains(shown), "{text}");
            assert_eq!(plain(&text), text);
        }
    }

    /// A GPU with room is no help where kube-scheduler sees something else in the way, and `why` says what it is.
    #[test]
    fn a_node_that_the_scheduler_excludes_is_not_called_room() {
        type Case = (&'static str, fn(&mut Value), fn(&mut Value), bool, &'static str, &'static str);
        let cases: [Case; 6] = [
            (
                "nothing in the way",
                |_| (),
                |_| (),
                true,
                "has room for that now",
                "or it has not tried again yet",
            ),
            (
                "a label that the node has",
                |_| (),
                |pod| pod["spec"]["nodeSelector"] = json!({"disk": "hdd"}),
                true,
                "has room for that now",
                "or it has not tried again yet",
            ),
            (
                "another label",
                |_| (),
                |pod| pod["spec"]["nodeSelector"] = json!({"disk": "ssd"}),
                false,
                "nodeSelector asks for disk=ssd, and the node has disk=hdd",
                "kubectl label node n1 disk=ssd",
            ),
            (
                "no such label",
                |_| (),
                |pod| pod["spec"]["nodeSelector"] = json!({"zone": "a"}),
                false,
                "the node has no such label",
                "kubectl label node n1 zone=a",
            ),
            (
                "cordoned",
                |node| node["spec"]["unschedulable"] = json!(true),
                |_| (),
                false,
                "the node is cordoned",
                "kubectl uncordon n1",
            ),
            (
                "the agent is away",
                |node| node["status"]["allocatable"]["aliyun.com/gpu-mem"] = json!("0"),
                |_| (),
                false,
                "offers 0 of 16 units",
                "is the Divvy agent running there?",
            ),
        ];
        for (name, of_node, of_pod, fits, summary, hint) in cases {
            let answer = explained(&node(of_node), &pod(8, of_pod), &[]);
            assert_eq!(answer.nodes[0].fits, fits, "{name}");
            assert!(answer.summary.contains(summary), "{name}: {}", answer.summary);
            assert!(
                answer.hints.iter().any(|text| text.contains(hint)),
                "{name}: {:?}",
                answer.hints
            );
            assert_eq!(
                text(&answer).contains(&answer.nodes[0].reason),
                !fits,
                "{name}: {}",
                text(&answer)
            );
        }
    }

    #[test]
    fn units_that_the_kubelet_does_not_offer_are_not_free_whatever_the_gpus_have() {
        // A GPU failed: 8 of 16 units are offered, and 4 are asked for by a pod whose allocation nobody sees.
        let node = node(|node| node["status"]["allocatable"]["aliyun.com/gpu-mem"] = json!("8"));
        let other = pod(4, |pod| {
            pod["metadata"]["name"] = json!("other");
            pod["metadata"]["uid"] = json!("u-other");
            pod["spec"]["nodeName"] = json!("n1");
        });
        let other = convert::pod(&other).expect("readable");
        let answer = explained(&node, &pod(6, |_| ()), std::slice::from_ref(&other));
        assert!(!answer.nodes[0].fits);
        assert!(answer.summary.contains("counts 4 of the 8 units"), "{}", answer.summary);
        assert!(explained(&node, &pod(4, |_| ()), &[other]).nodes[0].fits);
    }

    #[test]
    fn a_pod_that_names_a_scheduler_which_never_looked_at_it_is_told_so() {
        let told = |name: &'static str, status: Value| {
            let object = pod(8, move |pod| {
                pod["spec"]["schedulerName"] = json!(name);
                pod["status"] = status.clone();
            });
            text(&explained(&node(|_| ()), &object, &[])).contains(&format!("its schedulerName is {name:?}"))
        };
        assert!(told("divvy-scheduler", json!({})));
        assert!(!told("default-scheduler", json!({})));
        let refused = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no"});
        assert!(!told("divvy-scheduler", json!({"conditions": [refused]})));
    }

    #[test]
    fn where_the_sum_is_enough_but_no_gpu_has_room_the_pods_in_the_way_are_named_to_a_pod_that_matters_more() {
        let node = node(|node| {
            node["status"]["capacity"] = json!({"aliyun.com/gpu-mem": "32", "aliyun.com/gpu-count": "2"});
            node["status"]["allocatable"] = node["status"]["capacity"].clone();
        });
        let low = |name: &'static str, index: &'static str, units: u64| {
            let object = pod(units, move |pod| {
                pod["metadata"]["name"] = json!(name);
                pod["metadata"]["uid"] = json!(format!("u-{name}"));
                pod["metadata"]["annotations"] = json!({"ALIYUN_COM_GPU_MEM_IDX": index, "ALIYUN_COM_GPU_MEM_POD": units.to_string(), "ALIYUN_COM_GPU_MEM_ASSUME_TIME": "1"});
                pod["spec"]["nodeName"] = json!("n1");
            });
            convert::pod(&object).expect("readable")
        };
        let others = [low("a", "0", 10), low("b", "1", 9)];
        let hints = |priority: i64, units: u64| {
            let object = pod(units, move |pod| pod["spec"]["priority"] = json!(priority));
            explained(&node, &object, &others).hints
        };
        let found = hints(100, 12);
        assert!(
            found[0]
                .contains("GPU 1 would have 12 GiB free without default/b (priority 0); but kube-scheduler evicts nobody for it")
                && found[0].ends_with("13 units free already. If it matters that much: kubectl delete pod -n default b"),
            "{found:?}"
        );
        for (priority, units) in [(0, 12), (100, 14), (100, 6), (100, 17)] {
            let found = hints(priority, units);
            assert!(
                !found.iter().any(|hint| hint.contains("evicts nobody")),
                "{priority}, {units}: {found:?}"
            );
        }
    }

    #[test]
    fn what_the_policy_thinks_of_each_node_is_shown_with_its_terms() {
        let named = |name: &'static str, units: &'static str, gpus: &'static str| {
            convert::node(&node(move |node| {
                node["metadata"]["name"] = json!(name);
                node["status"]["capacity"] = json!({"aliyun.com/gpu-mem": units, "aliyun.com/gpu-count": gpus});
                node["status"]["allocatable"] = json!({"aliyun.com/gpu-mem": units, "cpu": "8", "memory": "64Gi", "pods": "110"});
            }))
        };
        let mut ledger = Ledger::new(MemoryUnit::GIB);
        ledger.replace_nodes(&[
            named("n1", "32", "2"),
            named("n2", "32", "2"),
            named("n3", "8", "1"),
            named("n4", "3", "1"),
        ]);
        let other = |number: u64, index: &'static str, units: u64| {
            let object = pod(units, move |pod| {
                pod["metadata"]["name"] = json!(format!("p{number}"));
                pod["metadata"]["uid"] = json!(format!("u-p{number}"));
                pod["metadata"]["annotations"] = json!({"ALIYUN_COM_GPU_MEM_IDX": index, "ALIYUN_COM_GPU_MEM_POD": units.to_string(), "ALIYUN_COM_GPU_MEM_ASSUME_TIME": "1"});
                pod["spec"]["nodeName"] = json!("n1");
            });
            convert::pod(&object).expect("readable")
        };
        let bound = other(1, "0", 10);
        ledger.replace_pods([bound.clone(), other(2, "1", 6), other(3, "1", 6)]);
        let asking = convert::pod(&pod(6, |_| ())).expect("readable");
        ledger.apply_pod(asking.clone());
        let found = placement(&ledger, &asking, Policy::Divvy);
        insta::assert_snapshot!(placement_text(&found));
        assert_eq!(found.nodes, 3, "n4 is too small");
        let json = serde_json::to_value(&found).expect("JSON");
        assert_eq!(json["best"][0]["terms"][0]["name"], "stranding");
        assert!(json["best"][0]["terms"][0]["milliGPU"].is_i64());
        // One that is bound is asked about as if it were not.
        let found = placement(&ledger, &bound, Policy::BestFit);
        assert_eq!((found.node.as_deref(), found.best.len()), (Some("n1"), 2));
        insta::assert_snapshot!(placement_text(&found));
        let large = convert::pod(&pod(17, |_| ())).expect("readable");
        assert!(placement_text(&placement(&ledger, &large, Policy::Divvy)).contains("sees no node with room"));
    }

    #[test]
    fn an_extender_that_is_away_is_named_and_preemption_is_not() {
        let says = |message: &str| {
            let message = message.to_owned();
            let object = pod(8, move |pod| {
                pod["status"] = json!({"conditions": [
                    {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message},
                ]});
            });
            explained(&node(|_| ()), &object, &[])
        };
        let away =
            says(r#"Post "http://127.0.0.1:9/gpushare-scheduler/filter": dial tcp 127.0.0.1:9: connect: connection refused"#);
        assert!(away.hints[0].contains("does not reach Divvy's extender"), "{:?}", away.hints);
        let full = says(
            "0/1 nodes are available: 1 Insufficient aliyun.com/gpu-mem. no new claims to deallocate, preemption: 0/1 nodes are \
             available: 1 Preemption is not helpful for scheduling.",
        );
        assert!(!full.hints[0].contains("does not reach"), "{:?}", full.hints);
        let text = text(&full);
        assert!(
            text.contains("1 Insufficient aliyun.com/gpu-mem.\n") && !text.contains("reemption"),
            "{text}"
        );
    }
}
