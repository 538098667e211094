//! Why a pod waits, or where it runs: [`answer`] makes a value of what the ledger knows, [`text`] prints it.

use std::fmt::Write as _;

use divvy_cluster::objects::{PodObject, PodStatus};
use divvy_model::{Health, Held, MiB, Pod};
use divvy_placement::{Ask, GpuReport, HolderKind, Ledger, NodeReport, Refusal};
use serde::Serialize;

use crate::printer::columns;

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

/// Explains a pod.
pub fn answer(ledger: &Ledger, pod: &Pod, object: &PodObject) -> Answer {
    let ask = Ask::of(&pod.request, ledger.unit());
    let status = object.status.clone().unwrap_or_default();
    let mut answer = Answer {
        pod: pod.key().to_string(),
        state: "waiting",
        summary: String::new(),
        units: ask.units,
        memory: ask.memory,
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
    } else {
        waiting(&mut answer, ledger, &ask, pod);
    }
    answer
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

fn waiting(answer: &mut Answer, ledger: &Ledger, ask: &Ask, pod: &Pod) {
    let reports = ledger.explain_all(ask);
    let room: Vec<&NodeReport> = reports
        .iter()
        .filter(|report| matches!(report.verdict, Ok(Some(_))))
        .collect();
    let size = asked(ask);
    answer.summary = if let Some(report) = room.first() {
        format!(
            "waits; it asks for {size} on one GPU, and node {} has room for that now",
            report.node
        )
    } else if let Some(report) = reports
        .iter()
        .filter(|report| ask.memory.is_some_and(|memory| report.sum_free() >= memory))
        .max_by_key(|report| report.largest_free())
    {
        format!(
            "waits; it asks for {size} on one GPU. Node {} has {} free in all, but at most {} on one GPU",
            report.node,
            amount(report.sum_free()),
            amount(report.largest_free())
        )
    } else {
        format!("waits; it asks for {size} on one GPU, and no GPU has that much free")
    };
    if pod.deleting {
        answer.summary.push_str(" (it is being deleted)");
    }
    for report in &reports {
        answer
            .hints
            .extend(report.hints.iter().map(|hint| format!("node {}: {hint}", report.node)));
    }
    if !room.is_empty() {
        answer.hints.push(
            "what kube-scheduler reports is in the way then, or it has not tried again yet: see `kubectl describe pod`"
                .to_owned(),
        );
    }
    answer.nodes = reports.iter().map(node_answer).collect();
}

fn node_answer(report: &NodeReport) -> NodeAnswer {
    let reason = match &report.verdict {
        Ok(Some(index)) => format!("GPU {index} has room"),
        Ok(None) => "no GPU memory was asked for".to_owned(),
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
        fits: matches!(report.verdict, Ok(Some(_))),
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

fn asked(ask: &Ask) -> String {
    match ask.memory {
        Some(memory) => amount(memory),
        None => ask.to_string(),
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

/// The answer as a person reads it.
pub fn text(answer: &Answer) -> String {
    let mut text = format!("Pod {} {}.\n", answer.pod, answer.summary);
    for line in &answer.reported {
        let _ = writeln!(text, "  {line}");
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
