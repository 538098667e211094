//! Ranks the nodes for a pod under a policy, with the same functions as the extender, on the current state of the cluster.

use std::fmt::Write as _;

use divvy_host::plain;
use divvy_model::{Held, Pod};
use divvy_placement::{Ask, GpuState, Ledger, gpu_list};
use divvy_policy::{CacheLimits, Fleet, PlacementOffer, Policy};
use divvy_why::{GpuRequest, amount, request_text};
use serde::Serialize;

use crate::printer::columns;

/// The number of nodes to show.
const SHOWN: usize = 6;

/// The ranking of the nodes for a pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Placement {
    /// The pod, as `namespace/name`.
    pub pod: String,
    /// The name of the policy.
    pub policy: &'static str,
    /// The pod's request.
    pub request: GpuRequest,
    /// The pod's request as text, such as `3 GiB`.
    #[serde(skip)]
    pub asks: String,
    /// The node to which the pod is already bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// The number of nodes with room for the pod.
    pub nodes: usize,
    /// The best nodes with room for the pod, at most six, starting with the best.
    pub best: Vec<NodeCandidate>,
}

/// A node with room for the pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeCandidate {
    /// The node's name.
    pub node: String,
    /// The GPUs that the pod would get.
    pub gpus: Vec<GpuName>,
    /// The GPUs as text: `GPU 0 (NVIDIA …)`, or for several `GPUs 0 and 2 (NVIDIA …)`.
    #[serde(skip)]
    pub gpu: String,
    /// The cost by which the policy compares nodes; lower is better.
    pub cost: i64,
    /// The terms of the cost, in thousandths of a GPU. Empty for a policy whose cost has no terms.
    pub terms: Vec<TermAnswer>,
}

/// The index and the model of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GpuName {
    /// The GPU's index on its node.
    pub index: u32,
    /// The GPU's product name; empty if unknown.
    pub model: String,
}

/// A term of a cost.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TermAnswer {
    /// The name of the term: `stranding`, `scarcity`, or `slot pressure`.
    pub name: &'static str,
    /// The value of the term, in thousandths of a GPU.
    #[serde(rename = "milliGPU")]
    pub milli: i64,
}

/// Rank the nodes for a pod as if the pod were not placed yet. From the pods in the ledger, the policy learns which requests
/// are usual.
pub fn placement(ledger: &Ledger, pod: &Pod, policy: Policy) -> Placement {
    let mut fleet = Fleet::new(policy, CacheLimits::default());
    fleet.learn(ledger);
    let mut without = ledger.clone();
    without.apply_pod(Pod {
        node: None,
        held: Held::Nothing,
        ..pod.clone()
    });
    fleet.follow(&without);
    let ask = Ask::of_pod(pod, ledger.unit());
    let offers = fleet.offers(pod, &ask, &without);
    let candidate = |offer: &PlacementOffer| {
        let view = without.node(&offer.node);
        let state = view.and_then(|view| view.state());
        let gpus: Vec<&GpuState> = state
            .iter()
            .flat_map(|state| offer.gpus.iter().filter_map(|at| state.gpus.get(*at)))
            .collect();
        let terms = offer.terms.iter().map(|term| TermAnswer {
            name: term.name,
            milli: term.milli,
        });
        NodeCandidate {
            node: offer.node.clone(),
            gpu: names_of(&gpus),
            gpus: gpus
                .iter()
                .map(|gpu| GpuName {
                    index: gpu.index,
                    model: gpu.model.clone(),
                })
                .collect(),
            cost: offer.cost,
            terms: terms.collect(),
        }
    };
    Placement {
        pod: pod.key().to_string(),
        policy: policy.name(),
        request: GpuRequest {
            units: ask.units,
            memory: ledger.unit().memory(ask.units),
            gpus: ask.gpus,
            whole: ask.whole,
            rules: ask.wanted(),
        },
        asks: match (ask.gpus, ask.memory) {
            (1, Some(memory)) if ask.whole.is_none() => amount(memory, ledger.unit()),
            _ => request_text(&ask, ledger.unit()),
        },
        node: pod.node.clone(),
        nodes: offers.len(),
        best: offers.iter().take(SHOWN).map(candidate).collect(),
    }
}

fn named(index: u32, model: &str) -> String {
    match model {
        "" => format!("GPU {index}"),
        model => format!("GPU {index} ({model})"),
    }
}

fn names_of(gpus: &[&GpuState]) -> String {
    let indices: Vec<u32> = gpus.iter().map(|gpu| gpu.index).collect();
    match gpus {
        [] => "-".to_owned(),
        [gpu] => named(gpu.index, &gpu.model),
        [first, others @ ..] if others.iter().all(|gpu| gpu.model == first.model) && !first.model.is_empty() => {
            format!("{} ({})", gpu_list(&indices), first.model)
        }
        _ => gpu_list(&indices),
    }
}

/// Return the ranking as text for people.
pub fn placement_text(placement: &Placement) -> String {
    plain(&in_words(placement)).into_owned()
}

fn in_words(placement: &Placement) -> String {
    let Placement {
        pod,
        policy,
        asks,
        nodes,
        ..
    } = placement;
    let Some(best) = placement.best.first() else {
        return format!(
            "Pod {pod} asks for {asks}, and policy {policy} sees no node with room for it.\n`divvy why` without --placement explains the reasons.\n"
        );
    };
    let mut text = format!(
        "Pod {pod} asks for {asks}. Policy {policy} prefers node {}, {}",
        best.node, best.gpu
    );
    let _ = writeln!(text, ", of {nodes} with room.");
    if let Some(node) = &placement.node {
        let _ = writeln!(text, "The pod is already bound to node {node}; the ranking ignores that.");
    }
    let names: Vec<&str> = best.terms.iter().map(|term| term.name).collect();
    let titles: String = names.iter().map(|name| format!("\t{}", name.to_uppercase())).collect();
    let mut raw = format!("NODE\tGPU\tCOST{titles}\n");
    for candidate in &placement.best {
        let terms: String = candidate.terms.iter().map(|term| format!("\t{}", term.milli)).collect();
        let _ = writeln!(raw, "{}\t{}\t{}{terms}", candidate.node, candidate.gpu, candidate.cost);
    }
    let _ = write!(text, "\n{}", columns(&raw));
    if !names.is_empty() {
        text.push_str(
            "\nLower is better; on a tie, a hash of the node's name decides. Terms are in thousandths of a GPU:\n  stranding      GPU capacity that the usual pods could no \
             longer use\n  scarcity       value of the GPU model to pods that can use no other model\n  slot pressure  room for large and selective \
             pods that this pod takes\n  cost           three times the sum of the terms, rounded to tens; plus one if the GPU, and plus one \
             if the node is not in use yet, unless the cluster only fills up\n",
        );
    }
    text.push_str("\nComputed from the current pods. The extender has also learned from earlier pods, and ranks only the nodes that kube-scheduler allows.\n");
    text
}
