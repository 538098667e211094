//! Suggestions: single changes that are enough to let the pod start. Each one is tried on the snapshot before it is shown.

use std::cell::Cell;
use std::sync::Arc;

use divvy_model::{ContainerKind, ContainerRequest, GpuRules, MiB, names};
use k8s_openapi::api::core::v1::Toleration;
use serde::{Deserialize, Serialize};

use crate::evaluate::SnapshotQuestion;
use crate::quantity::{amount, quantity};
use crate::{Change, Hold, NamedPods, Obstacle, PodName, Tenant};

/// A single change that is enough to let the pod start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Suggestion {
    /// The change.
    #[serde(flatten)]
    pub change: Change,
    /// A node that has room after the change.
    pub then: String,
    /// The command that makes the change, as arguments; empty if there is none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    /// The suggestion in words.
    pub message: String,
}

/// The maximum number of suggestions.
const MOST: usize = 3;
/// The limits of a search. `NODES`: a change is tried on at most this many nodes, the closest ones. `PODS`: on each of these
/// nodes, the end of at most this many pods is tried.
const NODES: usize = 16;
const PODS: usize = 128;

impl Change {
    /// Apply the change to a question. Return `None` if the change is about something that does not exist.
    pub(crate) fn apply(&self, question: &mut SnapshotQuestion<'_>) -> Option<()> {
        match self {
            Change::AskFor { units } => {
                let wants = question.wants.to_mut();
                wants.with_suffix = None;
                wants.pod.request.containers = vec![ContainerRequest {
                    name: String::new(),
                    kind: ContainerKind::App,
                    units: *units,
                    gpu_count: 0,
                }];
                Some(())
            }
            Change::AskForCores { cores } => {
                let rules = &mut question.wants.to_mut().pod.request.rules;
                let Some(Ok(known)) = rules.as_deref() else { return None };
                let cores = Some(*cores);
                *rules = Some(Arc::new(Ok(GpuRules { cores, ..known.clone() })));
                Some(())
            }
            Change::PodEnds { node, uid, .. } => question.end(node, uid),
            Change::LeftoversEnd { node } => question.alter_ledger(node, |ledger| ledger.end_leftovers(node)),
            Change::Uncordon { node } => question.alter_site(node, |site| {
                site.cordoned = false;
                site.taints.retain(|taint| taint.key != "node.kubernetes.io/unschedulable");
            }),
            Change::DropSelector { label, .. } => question.wants.to_mut().node_selector.remove(label).map(|_| ()),
            Change::Tolerate { key, value, effect } => {
                question.wants.to_mut().tolerations.push(toleration(key, value, effect));
                Some(())
            }
            Change::Label { node, label, value } => question.alter_site(node, |site| {
                site.labels.insert(label.clone(), value.clone());
            }),
            Change::AskForLess { resource, amount } => {
                let mut requests = question.wants.to_mut().requests.iter_mut();
                requests.find(|(name, _)| name == resource)?.1 = *amount;
                Some(())
            }
        }
    }

    fn command(&self) -> Vec<String> {
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        match self {
            Change::Uncordon { node } => words(&["kubectl", "uncordon", node]),
            Change::Label { node, label, value } => words(&["kubectl", "label", "node", node, &format!("{label}={value}")]),
            Change::PodEnds {
                pod: Some(pod),
                deleting: false,
                owner: None,
                more_important: false,
                ..
            } => words(&["kubectl", "delete", "pod", "-n", &pod.namespace, &pod.name]),
            _ => Vec::new(),
        }
    }

    /// Remove the pod's name if the user may not see it.
    fn shown_to(self, named: &NamedPods) -> Change {
        match self {
            Change::PodEnds {
                node,
                pod: Some(pod),
                deleting,
                more_important,
                memory,
                ..
            } if !named.shows(&pod.namespace) => Change::PodEnds {
                node,
                pod: None,
                uid: String::new(),
                deleting,
                owner: None,
                more_important,
                memory,
            },
            change => change,
        }
    }

    fn message(&self, question: &SnapshotQuestion<'_>, then: &str) -> String {
        let unit = question.snapshot.ledger.unit();
        let key = names::GPU_MEM;
        match self {
            Change::AskFor { units } if question.wants.with_suffix.is_some() => {
                format!("Write {units} ({key}: {units}). Node {then} has room for that.")
            }
            Change::AskFor { units } => {
                let gpus = question.ask.gpus.max(1) as u64;
                let memory = unit
                    .memory(units / gpus)
                    .map(|memory| amount(memory, unit))
                    .unwrap_or_default();
                let memory = match gpus {
                    1 => format!("{memory} or less"),
                    gpus => format!("{memory} on each of the {gpus} GPUs"),
                };
                format!("Ask for {memory} ({key}: {units}). Node {then} has room for that now.")
            }
            Change::AskForCores { cores } => format!(
                "Ask for {cores} % of the compute time or less ({}: \"{cores}\"). Node {then} has that much free now.",
                names::GPU_CORES
            ),
            Change::PodEnds {
                node,
                pod,
                deleting: true,
                ..
            } => {
                let which = match pod {
                    Some(pod) => format!("Pod {pod}"),
                    None => capital(question.named.stranger()),
                };
                format!("Wait. {which} is being deleted, and node {node} has room when its containers have ended.")
            }
            Change::PodEnds {
                node,
                pod,
                owner,
                memory,
                more_important,
                ..
            } => {
                let held = match *memory {
                    MiB::ZERO => String::new(),
                    memory => format!(" ({})", amount(memory, unit)),
                };
                let pod = match pod {
                    Some(pod) => format!("pod {pod}"),
                    None => {
                        let stranger = question.named.stranger();
                        return format!("Wait until {stranger}{held} on node {node} has ended.");
                    }
                };
                match owner {
                    _ if *more_important => {
                        format!("Wait until {pod}{held} on node {node} has ended. It has a higher priority than this pod.")
                    }
                    None => {
                        format!("Wait until {pod}{held} on node {node} has ended. If it is no longer needed, delete it:")
                    }
                    Some(owner) if owner.runs_for_ever() => format!(
                        "{}{held} on node {node} is in the way. {owner} would replace it if it were deleted; scale {} down so that this pod ends.",
                        capital(&pod),
                        owner.name
                    ),
                    Some(owner) => {
                        format!("Wait until {pod}{held} on node {node} has ended. {owner} would replace it if it were deleted.")
                    }
                }
            }
            Change::LeftoversEnd { node } => {
                format!("Wait. Containers of deleted pods still run on node {node}, which has room when they have ended.")
            }
            Change::Uncordon { node } => format!("If the maintenance of node {node} is finished, allow pods on it again:"),
            Change::DropSelector { label, value } => {
                format!("Remove {label}={value} from the pod's nodeSelector. Node {then} has room.")
            }
            Change::Tolerate { key, value, effect } => {
                let value = match value.as_str() {
                    "" => "operator: Exists".to_owned(),
                    value => format!("value: {value:?}"),
                };
                format!(
                    "If the pod may run on nodes with this taint, add a toleration to it: {{key: {key}, {value}, effect: {effect}}}. Node {then} \
                     has room."
                )
            }
            Change::Label { node, .. } => format!("If the pod may run on node {node}, give the node the label:"),
            Change::AskForLess { resource, amount } => {
                format!(
                    "Ask for {} {resource} or less. Node {then} has that much free now.",
                    quantity(resource, *amount)
                )
            }
        }
    }
}

fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters
        .next()
        .map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

fn toleration(key: &str, value: &str, effect: &str) -> Toleration {
    Toleration {
        key: Some(key.to_owned()),
        operator: Some(if value.is_empty() { "Exists" } else { "Equal" }.to_owned()),
        value: (!value.is_empty()).then(|| value.to_owned()),
        effect: Some(effect.to_owned()),
        ..Toleration::default()
    }
}

/// Report whether a pod is work that comes to an end. Pods of DaemonSets, static pods, and the cluster's own pods are not such
/// work.
fn may_end(tenant: &Tenant) -> bool {
    let kind = tenant.owner.as_ref().map(|owner| owner.kind.as_str());
    !matches!(kind, Some("DaemonSet" | "Node")) && &*tenant.namespace != "kube-system"
}

/// Report whether a label or taint belongs to Kubernetes, so that other programs rely on it.
fn is_kubernetes_own(key: &str) -> bool {
    let domain = key.split_once('/').map_or("", |(domain, _)| domain);
    ["kubernetes.io", "k8s.io"]
        .iter()
        .any(|own| domain == *own || domain.ends_with(&format!(".{own}")))
}

/// Find what would let the pod start, the best first. `looks` holds the obstacles of each node; every node has at least one.
/// `order` holds the nodes, the closest first.
pub(crate) fn suggestions(
    question: &SnapshotQuestion<'_>,
    holds: &[Hold],
    looks: &[Vec<Obstacle>],
    order: &[usize],
) -> Vec<Suggestion> {
    let only_suffix = holds.iter().all(|hold| matches!(hold, Hold::Suffix { .. }));
    if !only_suffix {
        return Vec::new();
    }
    let search = SuggestionSearch {
        question,
        looks,
        order,
        work: Cell::new(MOST_WORK),
        each: work(question),
    };
    if let Some(Hold::Suffix { write, .. }) = holds.first() {
        return write
            .and_then(|units| search.anywhere(Change::AskFor { units }))
            .into_iter()
            .collect();
    }
    let found = [
        search.ending(),
        search.leftovers(),
        search.uncordon(),
        search.drop_selector(),
        search.tolerate(),
        search.label(),
        search.ask_for(),
        search.ask_for_cores(),
        search.ask_for_less(),
        search.pod_ends(),
    ];
    found.into_iter().flatten().take(MOST).collect()
}

struct SuggestionSearch<'q, 's> {
    question: &'q SnapshotQuestion<'s>,
    looks: &'q [Vec<Obstacle>],
    order: &'q [usize],
    /// The work that may still be spent on trying changes, and the work for each try.
    work: Cell<u64>,
    each: u64,
}

/// The maximum work for trying changes. Its unit is one comparison with one pod of the cluster, and the maximum takes about a
/// second. Users write the rules that are compared with each pod, so the work must be bounded.
const MOST_WORK: u64 = 100_000_000;

/// Return the work for trying one change: [`Peers`](crate::evaluate::peers::Peers) reads each pod, and compares each
/// term with each pod. A comparison takes about eight times as long as reading a pod.
fn work(question: &SnapshotQuestion<'_>) -> u64 {
    let (snapshot, wants) = (question.snapshot, &question.wants);
    let with = wants
        .affinity
        .pod_affinity
        .iter()
        .flat_map(|with| &with.required_during_scheduling_ignored_during_execution);
    let apart = wants
        .affinity
        .pod_anti_affinity
        .iter()
        .flat_map(|apart| &apart.required_during_scheduling_ignored_during_execution);
    let terms = with.chain(apart).map(Vec::len).sum::<usize>() + wants.spread.len();
    let avoids: usize = snapshot
        .avoiders
        .iter()
        .map(|tenant| snapshot.tenants[*tenant].avoids.len())
        .sum();
    let pods = snapshot.tenants.len() as u64;
    pods.saturating_mul(1 + 8 * terms as u64).saturating_add(8 * avoids as u64)
}

impl SuggestionSearch<'_, '_> {
    /// Return the nodes with exactly one obstacle, the closest first.
    fn single(&self) -> impl Iterator<Item = (usize, &Obstacle)> {
        self.order
            .iter()
            .filter_map(|position| match self.looks[*position].as_slice() {
                [one] => Some((*position, one)),
                _ => None,
            })
    }

    fn name(&self, position: usize) -> String {
        self.question.site(position).name.clone()
    }

    /// Return the question after the change; `None` if the work for another try would be too much.
    fn after(&self, change: &Change) -> Option<SnapshotQuestion<'_>> {
        self.work.set(self.work.get().checked_sub(self.each)?);
        self.question.after(change)
    }

    /// Return the change as a suggestion, if the pod could start on the node after it.
    fn tried(&self, change: Change, position: usize) -> Option<Suggestion> {
        let after = self.after(&change)?;
        let starts = after.holds().is_empty() && after.obstacles(position).is_empty();
        let then = self.name(position);
        let change = change.shown_to(self.question.named);
        starts.then(|| Suggestion {
            message: change.message(self.question, &then),
            command: change.command(),
            then,
            change,
        })
    }

    /// Return the change as a suggestion, if the pod could start on any node after it.
    fn anywhere(&self, change: Change) -> Option<Suggestion> {
        let after = self.after(&change)?;
        let position = self.order.iter().find(|position| after.obstacles(**position).is_empty())?;
        self.tried(change, *position)
    }

    fn first(&self, change: impl Fn(String, &Obstacle) -> Option<Change>) -> Option<Suggestion> {
        self.single()
            .find_map(|(position, obstacle)| self.tried(change(self.name(position), obstacle)?, position))
    }

    fn uncordon(&self) -> Option<Suggestion> {
        self.first(|node, obstacle| matches!(obstacle, Obstacle::Cordoned).then_some(Change::Uncordon { node }))
    }

    fn drop_selector(&self) -> Option<Suggestion> {
        self.first(|_, obstacle| match obstacle {
            Obstacle::NodeSelector { label, value, .. } => Some(Change::DropSelector {
                label: label.clone(),
                value: value.clone(),
            }),
            _ => None,
        })
    }

    fn tolerate(&self) -> Option<Suggestion> {
        self.first(|_, obstacle| match obstacle {
            Obstacle::Taint { key, value, effect } if !is_kubernetes_own(key) || key.starts_with("node-role.kubernetes.io/") => {
                Some(Change::Tolerate {
                    key: key.clone(),
                    value: value.clone(),
                    effect: effect.clone(),
                })
            }
            _ => None,
        })
    }

    /// Suggest a label for a node only if the node lacks it: a label with another value says something about the node. Never
    /// suggest a label with a domain, such as `nvidia.com/gpu.product` or `kubernetes.io/hostname`. It states a fact about the
    /// node, and only the programs of that domain should write it.
    fn label(&self) -> Option<Suggestion> {
        self.first(|node, obstacle| match obstacle {
            Obstacle::NodeSelector {
                label,
                value,
                found: None,
            } if !label.contains('/') => Some(Change::Label {
                node,
                label: label.clone(),
                value: value.clone(),
            }),
            _ => None,
        })
    }

    /// Find the largest request for GPU memory that fits on a node now.
    fn ask_for(&self) -> Option<Suggestion> {
        let unit = self.question.snapshot.ledger.unit();
        let gpus = self.question.ask.gpus as u64;
        let units = |(position, obstacle): (usize, &Obstacle)| {
            let units = match obstacle {
                Obstacle::GpuMemory { .. } | Obstacle::TooSmall { .. } => {
                    let name = &self.question.site(position).name;
                    let free = self.question.ledger(position).room(name, &self.question.ask).free;
                    unit.units_in(free).saturating_mul(gpus)
                }
                Obstacle::Counted { free, .. } => free - free % gpus,
                _ => 0,
            };
            (units > 0).then_some((units, position))
        };
        let mut found: Vec<(u64, usize)> = self.single().filter_map(units).collect();
        found.sort_by_key(|(units, _)| std::cmp::Reverse(*units));
        let fits = |(units, position): &(u64, usize)| {
            let site = self.question.site(*position);
            // kube-scheduler's sums do not allow more.
            let counted = site.free(names::GPU_MEM);
            let units = (*units).min(counted - counted % gpus);
            (units > 0).then(|| self.tried(Change::AskFor { units }, *position)).flatten()
        };
        found
            .iter()
            .take(NODES)
            .filter_map(fits)
            .max_by_key(|found| match found.change {
                Change::AskFor { units } => units,
                _ => 0,
            })
    }

    /// Find the largest share of the compute time that is free on a node now.
    fn ask_for_cores(&self) -> Option<Suggestion> {
        let free = |(position, obstacle): (usize, &Obstacle)| match obstacle {
            Obstacle::GpuCores { free, .. } if *free > 0 => Some((*free, position)),
            _ => None,
        };
        let mut found: Vec<(u32, usize)> = self.single().filter_map(free).collect();
        found.sort_by_key(|(free, _)| std::cmp::Reverse(*free));
        let mut closest = found.into_iter().take(NODES);
        closest.find_map(|(cores, position)| self.tried(Change::AskForCores { cores }, position))
    }

    fn ask_for_less(&self) -> Option<Suggestion> {
        const MIB: u64 = 1 << 20;
        self.first(|_, obstacle| match obstacle {
            Obstacle::Resource { resource, free, .. } if matches!(resource.as_str(), "cpu" | "memory") => {
                let amount = if resource == "memory" { free - free % MIB } else { *free };
                (amount > 0).then(|| Change::AskForLess {
                    resource: resource.clone(),
                    amount,
                })
            }
            _ => None,
        })
    }

    fn leftovers(&self) -> Option<Suggestion> {
        let held = |position: usize| {
            let state = self.question.snapshot.ledger.node(&self.question.site(position).name);
            let gpus = state
                .and_then(|view| view.state())
                .map(|state| state.gpus.as_slice())
                .unwrap_or_default();
            gpus.iter().any(|gpu| gpu.held > MiB::ZERO)
        };
        let on = self
            .single()
            .filter(|(_, obstacle)| matches!(obstacle, Obstacle::GpuMemory { .. } | Obstacle::WholeGpus { .. }));
        let mut on = on.filter(|(position, _)| held(*position));
        on.find_map(|(position, _)| {
            self.tried(
                Change::LeftoversEnd {
                    node: self.name(position),
                },
                position,
            )
        })
    }

    fn ending(&self) -> Option<Suggestion> {
        self.ends(true)
    }

    fn pod_ends(&self) -> Option<Suggestion> {
        self.ends(false)
    }

    /// Find one pod whose end is enough to let the waiting pod start. A pod that no controller would replace is preferred, then
    /// the pod with the least memory.
    fn ends(&self, deleting: bool) -> Option<Suggestion> {
        let frees = |obstacle: &Obstacle| {
            matches!(
                obstacle,
                Obstacle::GpuMemory { .. }
                    | Obstacle::GpuCores { .. }
                    | Obstacle::WholeGpus { .. }
                    | Obstacle::Counted { .. }
                    | Obstacle::Resource { .. }
                    | Obstacle::HostPort { .. }
                    | Obstacle::AvoidedBy { .. }
                    | Obstacle::PodAntiAffinity { .. }
            )
        };
        let nodes = self.single().filter(|(_, obstacle)| frees(obstacle)).take(NODES);
        let price = |change: &Change| match change {
            Change::PodEnds {
                owner,
                memory,
                pod,
                more_important,
                ..
            } => (*more_important, owner.is_some(), *memory, pod.clone()),
            _ => (true, true, MiB(u64::MAX), None),
        };
        let on_node = |(position, _): (usize, &Obstacle)| {
            let mut changes: Vec<Change> = self.tenants(position, deleting).collect();
            changes.sort_by_key(price);
            changes.into_iter().take(PODS).find_map(|change| self.tried(change, position))
        };
        nodes.filter_map(on_node).min_by_key(|found| price(&found.change))
    }

    fn tenants(&self, position: usize, deleting: bool) -> impl Iterator<Item = Change> {
        let snapshot = self.question.snapshot;
        let unit = snapshot.ledger.unit();
        let priority = self.question.wants.pod.priority;
        let tenants = snapshot.on[position].iter().map(|tenant| &snapshot.tenants[*tenant]);
        tenants
            .filter(move |tenant| tenant.deleting == deleting && (deleting || may_end(tenant)))
            .map(move |tenant| {
                let units = tenant
                    .requests
                    .iter()
                    .find(|(name, _)| name == names::GPU_MEM)
                    .map_or(0, |(_, units)| *units);
                Change::PodEnds {
                    node: tenant.node.to_string(),
                    pod: Some(PodName {
                        namespace: tenant.namespace.to_string(),
                        name: tenant.name.to_string(),
                    }),
                    uid: tenant.uid.to_string(),
                    deleting,
                    owner: tenant.owner.as_deref().cloned(),
                    more_important: snapshot.ledger.pod(&tenant.uid).is_some_and(|pod| pod.priority > priority),
                    memory: unit.memory(units).unwrap_or(MiB::ZERO),
                }
            })
    }
}
