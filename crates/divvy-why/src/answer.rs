use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use divvy_model::{Held, MemoryUnit, MiB, Pod, WholeKind, limits, names, runtime};
use divvy_placement::{Ask, NodeGpus as _};
use serde::{Deserialize, Serialize};

use crate::evaluate::SnapshotQuestion;
use crate::obstacle::ObstacleWords;
use crate::offers;
use crate::quantity::{amount, list};
use crate::suggest::suggestions;
use crate::verdict::amount_text;
use crate::{
    Change, ClusterSnapshot, GpuAnswer, Hold, NamedPods, Obstacle, PodController, PodName, Reported, Spoken, Suggestion, Wants,
    gpus,
};

/// The state of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum PodState {
    /// The pod has no node yet.
    Waiting,
    /// The pod has a node.
    Bound,
    /// The pod has ended.
    Ended,
    /// The pod requests no GPU memory.
    NoGpuMemory,
}

/// What an answer is about: one pod, or several pods of one controller with the same request.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Subject {
    /// The pods; at least one.
    pub pods: Vec<PodName>,
    /// The controller of the pods; `None` if they have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<PodController>,
}

/// A request for GPU memory, or for whole GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuRequest {
    /// The number of units of gpu-mem in total.
    pub units: u64,
    /// The same amount in MiB; `null` if it is more than can be counted.
    #[serde(rename = "memoryMiB")]
    pub memory: Option<MiB>,
    /// The number of GPUs of one node.
    pub gpus: usize,
    /// The resource through which the pod requests whole GPUs or MIG devices, such as `nvidia.com/gpu`; omitted for a request for GPU memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub whole: Option<WholeKind>,
    /// The rules in the pod's annotations, in words that follow "a GPU".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rules: Option<String>,
}

/// Nodes with the same first obstacle.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObstacleGroup {
    /// The number of nodes.
    pub nodes: usize,
    /// What the nodes have in common, in words that follow "3 nodes: ".
    pub message: String,
}

/// The obstacles between the pod and one node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeAnswer {
    /// The node's name.
    pub node: String,
    /// Whether the pod could go to the node now.
    pub fits: bool,
    /// What keeps the pod from the node, the most important first.
    pub obstacles: Vec<Spoken<Obstacle>>,
    /// The node's GPUs.
    pub gpus: Vec<GpuAnswer>,
}

/// A bound pod's share of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BoundShare {
    /// The node's name.
    pub node: String,
    /// The GPU's NVML index; `null` if it is not known, or if the node has no such GPU.
    pub index: Option<u32>,
    /// Whether the node has the GPU; `null` if the node could not be read.
    pub there: Option<bool>,
    /// The product name; empty if unknown.
    pub model: String,
    /// The GPU's UUID if it is known; otherwise the name that the pod's annotations use.
    pub uuid: Option<String>,
    /// The memory of this GPU that the pod has, in MiB.
    #[serde(rename = "memoryMiB")]
    pub memory: MiB,
}

/// The answer about a pod, or about several equal pods.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Answer {
    /// The pods that the answer is about.
    #[serde(flatten)]
    pub subject: Subject,
    /// The state of the pods.
    pub state: PodState,
    /// The answer in a sentence that follows the pod's name.
    pub message: String,
    /// The request of each pod; `null` if it requests no GPU memory.
    pub request: Option<GpuRequest>,
    /// The size of one unit of gpu-mem in MiB.
    #[serde(rename = "unitMiB")]
    pub unit: u64,
    /// What other programs report in the pod's status.
    pub reported: Vec<Reported>,
    /// What keeps the pod from every node, or keeps Divvy from giving an answer.
    pub holds: Vec<Spoken<Hold>>,
    /// For a bound pod: its shares.
    pub shares: Vec<BoundShare>,
    /// For a waiting pod: all nodes, grouped by their first obstacle, the largest group first.
    pub groups: Vec<ObstacleGroup>,
    /// For a waiting pod: the nodes that have room, or those that come closest.
    pub closest: Vec<NodeAnswer>,
    /// For a waiting pod, if requested: all nodes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<NodeAnswer>,
    /// Changes, each of which is enough to let one of the pods start.
    pub suggestions: Vec<Suggestion>,
    /// Further notes.
    pub notes: Vec<String>,
    /// How long ago the explainer read the cluster, in seconds; absent if the cluster was read for this answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub age_seconds: Option<u64>,
}

impl Answer {
    /// Add another running pod of the same controller about which there is nothing else to report.
    pub fn join(&mut self, other: Answer) {
        self.subject.pods.extend(other.subject.pods);
        self.shares.extend(other.shares);
        let nodes: BTreeSet<&str> = self.shares.iter().map(|share| share.node.as_str()).collect();
        self.message = match nodes.len() {
            1 => format!("is running on node {}.", nodes.iter().copied().collect::<String>()),
            count => format!("is running; they are on {count} nodes."),
        };
    }
}

/// The number of nodes that are shown in detail.
const CLOSEST: usize = 3;

/// Explain a pod. With `all_nodes`, include the obstacles on every node.
pub fn answer(snapshot: &ClusterSnapshot, wants: &Wants, all_nodes: bool) -> Answer {
    answer_naming(snapshot, wants, all_nodes, &NamedPods::All)
}

/// Explain a pod as [`answer`] does, for a user who may not see the names of all pods. Nothing in the answer reveals them: no
/// name, no namespace, no UID, no controller.
pub fn answer_naming(snapshot: &ClusterSnapshot, wants: &Wants, all_nodes: bool, named: &NamedPods) -> Answer {
    let question = SnapshotQuestion::new(snapshot, wants, named);
    let mut answer = Answer {
        subject: Subject {
            pods: vec![PodName {
                namespace: wants.pod.namespace.clone(),
                name: wants.pod.name.clone(),
            }],
            owner: wants.owner.clone(),
        },
        state: PodState::Waiting,
        message: String::new(),
        request: Some(GpuRequest {
            units: question.ask.units,
            memory: snapshot.ledger.unit().memory(question.ask.units),
            gpus: question.ask.gpus,
            whole: question.ask.whole,
            rules: question.ask.wanted(),
        }),
        unit: snapshot.ledger.unit().mib(),
        reported: wants.reported.clone(),
        holds: Vec::new(),
        shares: Vec::new(),
        groups: Vec::new(),
        closest: Vec::new(),
        nodes: Vec::new(),
        suggestions: Vec::new(),
        notes: Vec::new(),
        age_seconds: None,
    };
    if wants.pod.ended() {
        answer.state = PodState::Ended;
        answer.message = format!("has ended ({}); it holds no GPU memory.", wants.phase);
    } else if question.ask.is_nothing() {
        answer.state = PodState::NoGpuMemory;
        answer.request = None;
        answer.message = no_gpu_memory(snapshot, wants);
    } else if wants.pod.node.is_some() {
        bound(&mut answer, snapshot, wants);
    } else {
        waiting(&mut answer, &question, all_nodes);
    }
    beside(&mut answer, &question);
    if snapshot.simplified > 0 {
        answer.notes.push(format!(
            "{} of the cluster's pods have more than {} KiB of labels, rules about other pods and host ports. Divvy did not read these.",
            snapshot.simplified,
            limits::POD_RULES_BYTES >> 10
        ));
    }
    if hides_names(&answer) {
        answer.notes.push(match named {
            NamedPods::None => "Other pods are shown without their names, because you may not list pods.".to_owned(),
            NamedPods::All | NamedPods::Of(_) => {
                "Pods of other namespaces are shown without their names, because you may not list the pods of all namespaces."
                    .to_owned()
            }
        });
    }
    answer
}

/// Report whether a pod appears in the answer without its name.
fn hides_names(answer: &Answer) -> bool {
    let nodes = || answer.closest.iter().chain(&answer.nodes);
    let holder = nodes()
        .flat_map(|node| &node.gpus)
        .flat_map(|gpu| &gpu.held_by)
        .any(|holder| holder.hidden);
    let peer = |obstacle: &Spoken<Obstacle>| {
        matches!(
            obstacle.what,
            Obstacle::PodAntiAffinity { pod: None, .. } | Obstacle::AvoidedBy { pod: None, .. }
        )
    };
    let ends = |found: &Suggestion| matches!(found.change, Change::PodEnds { pod: None, .. });
    holder || nodes().flat_map(|node| &node.obstacles).any(peer) || answer.suggestions.iter().any(ends)
}

fn no_gpu_memory(snapshot: &ClusterSnapshot, wants: &Wants) -> String {
    let instead = offers::instead(snapshot, wants).map_or_else(String::new, |instead| format!(" {instead}"));
    format!(
        "asks for no GPU memory, so Divvy has no part in where it runs.{instead} To share a GPU, set {} in the limits of its container.",
        names::GPU_MEM
    )
}

fn bound(answer: &mut Answer, snapshot: &ClusterSnapshot, wants: &Wants) {
    answer.state = PodState::Bound;
    let pod = &wants.pod;
    let node = pod.node.as_deref().unwrap_or_default();
    let report = snapshot.ledger.whereabouts(pod);
    let shares = report.into_iter().flat_map(|report| report.shares);
    answer.shares = shares
        .map(|share| {
            let there = Some(share.known.is_some());
            let (uuid, index, model) = match share.known {
                Some((uuid, index, model)) => (uuid, Some(index), model),
                None => (Some(share.gpu), None, String::new()),
            };
            BoundShare {
                node: node.to_owned(),
                index,
                there,
                model,
                uuid,
                memory: share.memory,
            }
        })
        .collect();
    let former = snapshot.ledger.node(node).and_then(|view| view.state()?.former_unit(pod));
    if let (Some(former), Held::Allocation(allocation), Some(request)) = (former, &pod.held, &mut answer.request) {
        let now = snapshot.ledger.unit();
        request.memory = Some(allocation.total());
        answer.notes.push(format!(
            "When it was bound, a unit of {} was {}, and it asked for {} units. A unit is {} now; it holds {} of these units.",
            names::GPU_MEM,
            amount(MiB(former.mib()), former),
            request.units,
            amount(MiB(now.mib()), now),
            allocation.total().0.div_ceil(now.mib()),
        ));
    }
    if !snapshot.unseen.is_empty() {
        answer.shares = written(pod, node, snapshot.ledger.unit());
    }
    let phase = &wants.phase;
    let deleting = if pod.deleting {
        "; it is being deleted, and holds its memory until its containers have ended"
    } else {
        ""
    };
    answer.message = match &pod.held {
        Held::Nothing if snapshot.unseen.is_empty() && snapshot.site(node).is_none() => {
            format!("names node {node} ({phase}), which does not exist.")
        }
        Held::Nothing if is_of_another_plugin(snapshot, pod, node) => format!(
            "is bound to node {node} ({phase}){deleting}. Another device plugin offers {} there and chose its GPUs.",
            pod.request
                .whole
                .as_deref()
                .map_or(Cow::Borrowed(names::WHOLE_GPU), |whole| whole.kind.resource())
        ),
        Held::Nothing if kubelet_chose(pod) => format!(
            "is bound to node {node} ({phase}) without an allocation: Divvy's extender was not called, and the kubelet chose its GPUs{deleting}."
        ),
        Held::Nothing => format!(
            "is bound to node {node} ({phase}) without an allocation: Divvy's extender was not called, so its containers will not start."
        ),
        Held::Unreadable(error) => format!("is bound to node {node} ({phase}), and its allocation cannot be read: {error}"),
        Held::Allocation(_) | Held::Legacy(_) => format!("is bound to node {node} ({phase}){deleting}."),
    };
    if matches!(pod.held, Held::Nothing | Held::Unreadable(_)) && !kubelet_chose(pod) {
        answer.notes.push(
            "kube-scheduler calls the extender if its configuration names the extender with bindVerb, and if the pod sets neither nodeName nor \
             another schedulerName."
                .to_owned(),
        );
        answer.notes.push(format!(
            "Only a new pod gets an allocation. Delete this one, and create another if its controller does not: kubectl delete pod -n {} {}",
            pod.namespace, pod.name
        ));
    }
}

/// Report whether a bound pod has whole GPUs of another device plugin.
fn is_of_another_plugin(snapshot: &ClusterSnapshot, pod: &Pod, node: &str) -> bool {
    let view = snapshot.ledger.node(node);
    let ask = Ask::of(&pod.request, snapshot.ledger.unit());
    view.and_then(|view| view.state())
        .is_some_and(|state| ask.is_left_to_another_plugin(state))
}

/// Report whether a bound pod has whole GPUs that the kubelet chose, because no extender did.
fn kubelet_chose(pod: &Pod) -> bool {
    pod.held == Held::Nothing && pod.request.whole.is_some() && !pod.request.wants_memory()
}

/// Return the shares that the pod's annotations name.
fn written(pod: &Pod, node: &str, unit: MemoryUnit) -> Vec<BoundShare> {
    let share = |index: Option<u32>, uuid: Option<String>, memory: MiB| BoundShare {
        node: node.to_owned(),
        index,
        there: None,
        model: String::new(),
        uuid,
        memory,
    };
    match &pod.held {
        Held::Allocation(allocation) => {
            let gpus = allocation.gpus.iter();
            gpus.map(|gpu| share(None, Some(gpu.uuid.clone()), gpu.memory)).collect()
        }
        Held::Legacy(legacy) => {
            let gpus = legacy.gpus.iter();
            gpus.map(|(index, units)| share(Some(*index), None, unit.memory(*units).unwrap_or(MiB::ZERO)))
                .collect()
        }
        Held::Nothing | Held::Unreadable(_) => Vec::new(),
    }
}

fn waiting(answer: &mut Answer, question: &SnapshotQuestion<'_>, all_nodes: bool) {
    let unit = question.snapshot.ledger.unit();
    let size = amount_text(&question.ask, unit);
    let words = ObstacleWords {
        unit,
        asked: &size,
        rules: question.ask.wanted().is_some(),
    };
    let looks: Vec<Vec<Obstacle>> = (0..question.snapshot.sites.len())
        .map(|position| question.obstacles(position))
        .collect();
    let order = closest_first(question, &looks);
    let holds = question.holds();
    answer.message = question.verdict(&holds, &looks, &order);
    if let Some(node) = &question.wants.pod.nominated {
        answer.message.push_str(&format!(
            " kube-scheduler has evicted pods for it on node {node}, and waits until they have ended."
        ));
    }
    let detail = |position: &usize| node_answer(question, *position, &looks[*position], words);
    // If the request itself is wrong, the nodes do not matter.
    let readable = !holds
        .iter()
        .any(|hold| matches!(hold, Hold::Suffix { .. } | Hold::Uncountable | Hold::Annotations { .. }));
    if readable {
        answer.groups = groups(&looks, words);
        let room = looks.iter().any(Vec::is_empty);
        let worth = |look: &Vec<Obstacle>| {
            if room {
                look.is_empty()
            } else {
                !look.first().is_some_and(Obstacle::is_of_no_offer)
            }
        };
        answer.closest = order
            .iter()
            .filter(|position| worth(&looks[**position]))
            .take(CLOSEST)
            .map(detail)
            .collect();
    }
    if all_nodes && readable {
        answer.nodes = (0..looks.len()).map(|position| detail(&position)).collect();
    }
    if looks.iter().all(|look| !look.is_empty()) {
        answer.suggestions = suggestions(question, &holds, &looks, &order);
        answer.notes.extend(preemption(question, &looks, &order));
    }
    let spoken = |hold: Hold| Spoken {
        message: hold.message(unit),
        what: hold,
    };
    answer.holds = holds.into_iter().map(spoken).collect();
    if question.snapshot.unseen.is_empty() && looks.iter().all(|look| look.first().is_some_and(Obstacle::is_of_no_offer)) {
        if offers::instead(question.snapshot, &question.wants).is_some() {
            answer.notes.extend(offers::how_to_ask(question.snapshot));
            return;
        }
        let mut sites = question.snapshot.sites.iter();
        let no_cdi = sites.find_map(|site| Some((&site.name, runtime::without_cdi(site.runtime.as_deref()?)?)));
        answer
            .notes
            .extend(no_cdi.map(|(node, text)| format!("Node {node}: {text}.")));
        answer.notes.push(
            "Check that Divvy is installed and that an agent runs on the GPU nodes: kubectl get daemonsets,pods -A -o wide | grep divvy"
                .to_owned(),
        );
        answer
            .notes
            .push("To install it, in Divvy's source tree: helm install divvy deploy/helm/divvy -n divvy-system --create-namespace. If it is installed, see what its pods wait for: kubectl describe pod".to_owned());
    }
}

/// Order the nodes by how much the pod lacks on each, the least first.
fn closest_first(question: &SnapshotQuestion<'_>, looks: &[Vec<Obstacle>]) -> Vec<usize> {
    let memory = question.ask.memory.unwrap_or(MiB(u64::MAX));
    let price = |obstacle: &Obstacle| match obstacle {
        Obstacle::NoGpuMemory | Obstacle::NoWholeGpus { .. } => 1000,
        Obstacle::TooSmall { .. }
        | Obstacle::Rules { .. }
        | Obstacle::OtherVendor { .. }
        | Obstacle::OneGpuOnly
        | Obstacle::OnlyMigDevices => 30,
        Obstacle::NotChosen { .. } | Obstacle::Runtime { .. } | Obstacle::AgentAway { .. } | Obstacle::NotOffered { .. } => 20,
        Obstacle::NotReady | Obstacle::Volume { .. } => 15,
        Obstacle::NodeSelector { .. } | Obstacle::NodeAffinity { .. } | Obstacle::Taint { .. } => 12,
        _ => 10,
    };
    let missing = |obstacle: &Obstacle| match obstacle {
        Obstacle::GpuMemory { free, .. } | Obstacle::TooSmall { largest: free } => memory.saturating_sub(*free),
        // Whole GPUs that are missing. No request is for memory and for whole GPUs.
        Obstacle::WholeGpus { needed, free, .. } => MiB(needed.saturating_sub(*free) as u64),
        // Percent, so a node that has the memory is closer than one that lacks some.
        Obstacle::GpuCores { asked, free, .. } => MiB(u64::from(asked.saturating_sub(*free))),
        _ => MiB::ZERO,
    };
    let closeness = |position: &usize| {
        let look = &looks[*position];
        let price: u32 = look.iter().map(price).sum();
        (price, look.iter().map(missing).max(), *position)
    };
    let mut order: Vec<usize> = (0..looks.len()).collect();
    order.sort_by_cached_key(closeness);
    order
}

fn groups(looks: &[Vec<Obstacle>], words: ObstacleWords<'_>) -> Vec<ObstacleGroup> {
    let mut counts: BTreeMap<Option<String>, usize> = BTreeMap::new();
    for look in looks {
        *counts.entry(look.first().map(|first| first.group(words))).or_default() += 1;
    }
    let mut groups: Vec<ObstacleGroup> = counts
        .into_iter()
        .map(|(message, nodes)| ObstacleGroup {
            nodes,
            message: message.unwrap_or_else(|| "room for it".to_owned()),
        })
        .collect();
    groups.sort_by(|a, b| (b.nodes, &a.message).cmp(&(a.nodes, &b.message)));
    groups
}

fn node_answer(question: &SnapshotQuestion<'_>, position: usize, look: &[Obstacle], words: ObstacleWords<'_>) -> NodeAnswer {
    let node = question.site(position).name.clone();
    let report = question.ledger(position).explain(&node, &question.ask);
    let spoken = |obstacle: &Obstacle| Spoken {
        message: obstacle.message(&node, words),
        what: obstacle.clone(),
    };
    NodeAnswer {
        fits: look.is_empty(),
        obstacles: look.iter().map(spoken).collect(),
        gpus: report.gpus.iter().map(|report| gpus::gpu(report, question.named)).collect(),
        node,
    }
}

/// Explain why kube-scheduler does not evict the pods of lower priority that are in the way. Return `None` if there are none, or
/// if kube-scheduler may evict them.
fn preemption(question: &SnapshotQuestion<'_>, looks: &[Vec<Obstacle>], order: &[usize]) -> Option<String> {
    let pod = &question.wants.pod;
    let lacks_cores = |position: usize| matches!(looks[position].as_slice(), [Obstacle::GpuCores { .. }]);
    let lacks_memory = |position: usize| matches!(looks[position].as_slice(), [Obstacle::GpuMemory { .. }]);
    let mut near = order
        .iter()
        .filter(|position| lacks_memory(**position) || lacks_cores(**position))
        .take(CLOSEST);
    near.find_map(|position| {
        let site = question.site(*position);
        let victims = question.snapshot.ledger.in_the_way(&site.name, pod)?;
        let name = |victim: &&Pod| {
            if question.named.shows(&victim.namespace) {
                format!("{} (priority {})", victim.key(), victim.priority)
            } else {
                question.named.stranger().to_owned()
            }
        };
        let names: Vec<String> = victims.pods.iter().map(name).collect();
        if names.is_empty() {
            return None;
        }
        let free = site.free(names::GPU_MEM);
        let reason = if question.wants.never_preempts {
            "its PriorityClass says preemptionPolicy: Never".to_owned()
        } else if lacks_cores(*position) && free >= question.ask.units {
            "it knows nothing of the compute time of GPUs".to_owned()
        } else if free >= question.ask.units {
            format!("it counts sums, and node {} has {free} units free in all", site.name)
        } else {
            return None;
        };
        Some(format!(
            "The pod has priority {}, and on node {} it would have room without {}. kube-scheduler evicts no pod for it: {reason}.",
            pod.priority,
            site.name,
            list(&names)
        ))
    })
}

/// Add notes about other GPU software on the nodes that matter to the pod, and about settings in the pod itself.
fn beside(answer: &mut Answer, question: &SnapshotQuestion<'_>) {
    let pod = &question.wants.pod;
    if question.ask.whole.is_some() || answer.request.is_none() || pod.ended() {
        return;
    }
    let matters = |name: &str| pod.node.as_deref().is_none_or(|node| node == name);
    let sites = question.snapshot.sites.iter().filter(|site| matters(&site.name));
    let both: Vec<&str> = sites
        .filter(|site| site.capacity_units > 0 && site.whole_gpus > 0)
        .map(|site| site.name.as_str())
        .collect();
    if let Some(first) = both.first() {
        let others = match both.len() {
            1 => String::new(),
            count => format!(" and {} others", count - 1),
        };
        answer.notes.push(format!(
            "On node {first}{others}, another device plugin offers {}. Neither plugin knows of the other, so the same GPU can be granted twice. Keep \
             NVIDIA's plugin off these nodes (by a nodeSelector or an affinity of its DaemonSet).",
            names::WHOLE_GPU
        ));
    }
    let own = pod.node.as_deref().and_then(|node| question.snapshot.site(node));
    if let Some((node, trouble)) = own.and_then(|site| Some((&site.name, site.driver_trouble.as_ref()?))) {
        answer.notes.push(format!("On node {node}, {trouble}."));
    }
    let starts = pod.node.is_none() || !matches!(pod.held, Held::Nothing | Held::Unreadable(_));
    if let Some((container, value)) = pod.own_visible.as_deref().filter(|_| starts) {
        answer.notes.push(format!(
            "Container {container} sets {}={value} itself. That has no effect: the container sees only its own GPU. Remove the variable from the pod.",
            names::VISIBLE_DEVICES
        ));
    }
    if pod.node.is_none() && matches!(pod.held, Held::Allocation(_) | Held::Legacy(_)) {
        answer.notes.push(
            "The pod has an allocation although it has no node. That has no effect: its binding replaces it. The admission policies refuse such \
             pods (Helm: policies.enabled=true)."
                .to_owned(),
        );
    }
}
