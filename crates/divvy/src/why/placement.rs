//! What a policy thinks of the nodes for a pod: the same functions as in the extender, on the cluster as it is now.

use std::fmt::Write as _;

use divvy_host::plain;
use divvy_model::{Held, Pod};
use divvy_placement::{Ask, GpuState, Ledger, gpu_list};
use divvy_policy::{Fleet, Limits, Offer, Policy};
use divvy_why::{Request, amount, asked_where};
use serde::Serialize;

use crate::printer::columns;

/// So many nodes are shown.
const SHOWN: usize = 6;

/// Where a pod would go, and why not elsewhere.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Placement {
    /// `namespace/name`
    pub pod: String,
    /// The policy.
    pub policy: &'static str,
    /// What it asks for.
    pub request: Request,
    /// The same in words, `3 GiB`.
    #[serde(skip)]
    pub asks: String,
    /// The node that it is on already.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// How many nodes have room.
    pub nodes: usize,
    /// Of those the best ones, the best first.
    pub best: Vec<Candidate>,
}

/// A node that has room.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Candidate {
    /// Its name.
    pub node: String,
    /// The GPUs that the pod would get.
    pub gpus: Vec<GpuName>,
    /// The same in words: `GPU 0 (NVIDIA …)`; of several `GPUs 0 and 2 (NVIDIA …)`.
    #[serde(skip)]
    pub gpu: String,
    /// What the policy compares; lower is better.
    pub cost: i64,
    /// What that is made of, in thousandths of a GPU; empty for a policy that has one number only.
    pub terms: Vec<TermAnswer>,
}

/// Which GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GpuName {
    /// Its index.
    pub index: u32,
    /// Its product name; empty if unknown.
    pub model: String,
}

/// A part of a cost.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TermAnswer {
    /// `stranding`, `scarcity`, `slot pressure`
    pub name: &'static str,
    /// In thousandths of a GPU.
    #[serde(rename = "milliGPU")]
    pub milli: i64,
}

/// Asks the policy about a pod as if it were not placed. What pods ask for is learnt from the pods that are there.
pub fn placement(ledger: &Ledger, pod: &Pod, policy: Policy) -> Placement {
    let mut fleet = Fleet::new(policy, Limits::default());
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
    let candidate = |offer: &Offer| {
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
        Candidate {
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
        request: Request {
            units: ask.units,
            memory: ledger.unit().memory(ask.units),
            gpus: ask.gpus,
            rules: ask.wanted(),
        },
        asks: match (ask.gpus, ask.memory) {
            (1, Some(memory)) => amount(memory, ledger.unit()),
            _ => asked_where(&ask, ledger.unit()),
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

/// As a person reads it.
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
            "Pod {pod} asks for {asks}, and policy {policy} sees no node with room for it.\n`divvy why` without --placement says what is in the way.\n"
        );
    };
    let mut text = format!(
        "Pod {pod} asks for {asks}. Policy {policy} prefers node {}, {}",
        best.node, best.gpu
    );
    let _ = writeln!(text, ", of {nodes} with room.");
    if let Some(node) = &placement.node {
        let _ = writeln!(text, "It is on node {node}; this is as if it were not.");
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
            "\nLower is better; of equal costs a hash of the name decides. Terms are in thousandths of a GPU:\n  stranding      GPU that the usual pods could not \
             use any more after this one\n  scarcity       what the product is worth to pods that can use no other\n  slot pressure  places for large and choosy \
             pods that it takes away\n  cost           three times their sum, rounded to tens; one more if the GPU, and one more \
             if the node is not in use yet, unless the cluster only fills up\n",
        );
    }
    text.push_str("\nReckoned from the pods that are there now; the extender has learnt from those that went, too, and asks only about nodes that kube-scheduler allows.\n");
    text
}
