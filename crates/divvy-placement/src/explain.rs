use std::borrow::Cow;
use std::fmt;

use divvy_model::{Health, MemoryUnit, MiB, Pod, PodKey, Vendor, WholeKind, names};

use crate::amount::Amount;
use crate::ask::Ask;
use crate::ledger::Ledger;
use crate::node::GpuSource;
use crate::node_view::LedgerNode;
use crate::parts::{self, HeldShare};
use crate::refusal::NodeRefusal;

/// What one node answers to one request: every number that the decision was made from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeReport {
    /// The node's name.
    pub node: String,
    /// The request.
    pub ask: Ask,
    /// The decision. On success, the indices of the GPUs that would be chosen now; empty for a pod that requests no GPU memory.
    pub verdict: Result<Vec<u32>, NodeRefusal>,
    /// Where the description of the node's GPUs comes from; `None` if the node is not known.
    pub source: Option<GpuSource>,
    /// The cluster's unit of gpu-mem.
    pub unit: MemoryUnit,
    /// The GPUs of the requested kind in ascending order of index: the shared ones, or those that are offered as a whole.
    pub gpus: Vec<GpuReport>,
    /// The number of GPUs that look free here but are in use, because pods hold whole GPUs without an allocation
    /// ([`LedgerNode::unlocated_whole`]).
    pub unnamed: u64,
}

/// One GPU of a [`NodeReport`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuReport {
    /// The driver's UUID; `None` if it is not known.
    pub uuid: Option<String>,
    /// The index among the vendor's GPUs.
    pub index: u32,
    /// Whether the pod requests whole GPUs.
    pub whole: bool,
    /// Product name; empty if unknown.
    pub model: String,
    /// The memory that the GPU offers to pods.
    pub capacity: MiB,
    /// The memory that the GPU has in total.
    pub total: MiB,
    /// The memory that is free for this pod, regardless of the GPU's health. Memory kept for nominated pods is not included.
    pub free: MiB,
    /// The compute time that is free for this pod, in percent; `None` if the pod does not limit its compute time.
    pub free_cores: Option<u32>,
    /// The memory that containers still hold although their pod object is gone.
    pub held: MiB,
    /// The GPU's health: pods are placed only on a healthy GPU.
    pub health: Health,
    /// Why the GPU is not healthy, for example `XID 79`.
    pub reason: Option<String>,
    /// Whether the rules in the pod's annotations allow this GPU, regardless of its free memory.
    pub taken: bool,
    /// Whether the request fits on this GPU.
    pub fits: bool,
    /// The pods that hold memory: largest share first, then by name.
    pub holders: Vec<Holder>,
    /// The departed pods whose memory is still kept, in the same order. The memory in [`held`](GpuReport::held) may be theirs, so
    /// only the larger of the two amounts counts.
    pub departed: Vec<DepartedHolder>,
    /// The pods nominated to the node for which memory of this GPU is kept from the requesting pod; highest priority first.
    pub nominated: Vec<NominatedHolder>,
}

/// A nominated pod: it waits until its victims have ended ([`crate::Nominated`]).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NominatedHolder {
    pub pod: PodKey,
    /// The priority of the pod.
    pub priority: i32,
    /// The memory that is kept for the pod on this GPU.
    pub memory: MiB,
}

impl fmt::Display for NominatedHolder {
    /// `12288 MiB for pod ml/train, which has priority 1000 and is nominated to this node`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NominatedHolder { pod, priority, memory } = self;
        write!(
            f,
            "{memory} for pod {pod}, which has priority {priority} and is nominated to this node"
        )
    }
}

/// A departed pod: its object is gone, and its container was last seen running ([`crate::Departed`]).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DepartedHolder {
    pub pod: PodKey,
    pub uid: String,
    /// The memory that is kept for the pod on this GPU.
    pub memory: MiB,
}

impl fmt::Display for DepartedHolder {
    /// `default/a 3072 MiB (deleted, container was running)`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} (deleted, container was running)", self.pod, self.memory)
    }
}

/// A pod that holds memory of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    pub pod: PodKey,
    pub uid: String,
    /// The memory that the pod holds on this GPU.
    pub memory: MiB,
    /// The pod's share of the compute time in percent; 0 if it has no limit.
    pub cores: u32,
    /// Why the pod holds the memory.
    pub kind: HolderKind,
}

/// Why a pod holds memory of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum HolderKind {
    /// The pod is bound to the node.
    Bound,
    /// The pod is being deleted, and its containers have not ended yet.
    Deleting,
    /// The memory is reserved: the pod's Binding is not confirmed yet.
    Reserved,
}

fn unwell(health: Health, reason: Option<&str>) -> String {
    let word = match health {
        Health::Ok => return "is healthy".to_owned(),
        Health::Failed => "failed",
        Health::Lost => "is lost",
        Health::Testing => "is being tested",
    };
    reason.map_or_else(|| word.to_owned(), |reason| format!("{word} ({reason})"))
}

impl fmt::Display for GpuReport {
    /// Format the GPU's state, for example `GPU 1 has 4096 of 16384 MiB free` or `GPU 2 failed (XID 79)`, followed by the memory
    /// kept for departed and nominated pods.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.taken {
            let product = if self.model.is_empty() {
                "of an unknown product"
            } else {
                &self.model
            };
            return write!(
                f,
                "GPU {} ({product}, {} in all) does not match the pod's rules",
                self.index, self.total
            );
        }
        if self.health == Health::Ok {
            match (self.whole, self.holders.first()) {
                (false, _) => {
                    write!(f, "GPU {} has {} of {}", self.index, self.free.0, self.capacity)?;
                    if let Some(cores) = self.free_cores {
                        write!(f, " and {cores} % of its compute time")?;
                    }
                    f.write_str(" free")?;
                }
                (true, Some(holder)) => write!(f, "GPU {} is in use by {}", self.index, holder.pod)?,
                (true, None) if self.fits => write!(f, "GPU {} is not allocated", self.index)?,
                (true, None) => write!(f, "GPU {} is in use", self.index)?,
            }
            for (i, departed) in self.departed.iter().enumerate() {
                write!(f, "{}{departed}", if i == 0 { " and still counts " } else { " and " })?;
            }
            for nominated in &self.nominated {
                write!(f, " and keeps {nominated}")?;
            }
            Ok(())
        } else {
            write!(f, "GPU {} {}", self.index, unwell(self.health, self.reason.as_deref()))
        }
    }
}

impl fmt::Display for Holder {
    /// Format the holder, for example `default/a 10240 MiB` or `default/b 4096 MiB (being deleted)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.pod, self.memory)?;
        match self.kind {
            HolderKind::Bound => Ok(()),
            HolderKind::Deleting => f.write_str(" (being deleted)"),
            HolderKind::Reserved => f.write_str(" (being bound)"),
        }
    }
}

impl fmt::Display for NodeReport {
    /// Format the answer in one line: `node n1 has no GPU with 8 units (8192 MiB) free: GPU 0 has …, GPU 1 has …`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let node = &self.node;
        match &self.verdict {
            Ok(gpus) if gpus.is_empty() && self.ask.is_nothing() => write!(f, "node {node} has room: the pod asks for no GPU"),
            Ok(gpus) if gpus.is_empty() => write!(
                f,
                "node {node} is left to kube-scheduler: another device plugin offers {} there",
                self.ask
                    .whole
                    .map_or(Cow::Borrowed("the requested GPUs"), WholeKind::resource)
            ),
            Ok(gpus) => write!(f, "node {node} has room for {} on {}", self.ask, gpu_list(gpus)),
            Err(NodeRefusal::UnknownNode) => write!(f, "node {node} is not known"),
            Err(NodeRefusal::Unusable(why)) => write!(f, "node {node} is not offered: {why}"),
            Err(NodeRefusal::Uncountable(ask)) => write!(f, "{ask} is not a request that any GPU could meet"),
            Err(NodeRefusal::Unreadable(error)) => write!(f, "the pod's annotations: {error}"),
            Err(NodeRefusal::OnlyMigDevices) => write!(
                f,
                "node {node} has only MIG devices, and a CUDA process uses only one of them; several GPUs need GPUs that are not divided"
            ),
            Err(NodeRefusal::OneGpuOnly) => write!(
                f,
                "node {node} is served by gpushare's device plugin, which gives a container one GPU; several GPUs need Divvy's agent"
            ),
            Err(NodeRefusal::OtherVendor(wanted)) => write!(
                f,
                "node {node} shares no {wanted} GPU, but GPUs of another vendor; the annotation {} selects the vendor ({} without it)",
                names::GPU_VENDOR,
                Vendor::default()
            ),
            Err(NodeRefusal::NoneOfKind(kind)) => write!(f, "node {node} has no {} that Divvy offers", kind.plural()),
            Err(NodeRefusal::TooFewWhole(_)) => self.fmt_whole(f),
            Err(NodeRefusal::NoGpuFits | NodeRefusal::NoGpuTaken(_) | NodeRefusal::TooFewFit(_)) => {
                match self.ask.wanted() {
                    rules if self.ask.gpus > 1 => {
                        let (fit, taken) = self.fitting();
                        let rules = rules.map(|rules| format!(" {rules}")).unwrap_or_default();
                        let memory = self.ask.memory.unwrap_or(MiB(u64::MAX));
                        write!(
                            f,
                            "node {node}: {fit} of {taken} GPUs{rules} have {memory}{} free, but {} are needed: ",
                            self.ask.and_cores(),
                            self.ask.gpus
                        )?;
                    }
                    Some(rules) => write!(f, "node {node} has no GPU {rules} that has {} free: ", self.ask.amount())?,
                    None => write!(f, "node {node} has no GPU with {} free: ", self.ask)?,
                }
                for (i, gpu) in self.gpus.iter().enumerate() {
                    write!(f, "{}{gpu}", if i == 0 { "" } else { ", " })?;
                }
                Ok(())
            }
        }
    }
}

/// Format a list of GPU indices: `GPU 1`, `GPUs 0 and 1`, `GPUs 0, 1 and 2`.
pub fn gpu_list(indices: &[u32]) -> String {
    let names: Vec<String> = indices.iter().map(u32::to_string).collect();
    match names.as_slice() {
        [one] => format!("GPU {one}"),
        [others @ .., last] => format!("GPUs {} and {last}", others.join(", ")),
        [] => "no GPU".to_owned(),
    }
}

impl NodeReport {
    /// Format a refusal of whole GPUs: `node n1: 1 of 2 AMD GPUs are not allocated; 2 are needed: GPU 0 is not allocated, GPU 1
    /// is in use by …`.
    fn fmt_whole(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (fit, taken) = self.fitting();
        let (node, needed) = (&self.node, self.ask.gpus);
        let rules = self.ask.wanted().map(|rules| format!(" {rules}")).unwrap_or_default();
        let are = if needed == 1 { "is" } else { "are" };
        write!(
            f,
            "node {node}: {fit} of {taken} {}{rules} are not allocated",
            self.ask.plural()
        )?;
        if self.unnamed > 0 {
            write!(f, ", but pods without an allocation use {} of them", self.unnamed)?;
        }
        write!(f, "; {needed} {are} needed: ")?;
        for (i, gpu) in self.gpus.iter().enumerate() {
            write!(f, "{}{gpu}", if i == 0 { "" } else { ", " })?;
        }
        Ok(())
    }

    /// Return the number of GPUs with room, and the number of GPUs that the pod's rules allow.
    pub fn fitting(&self) -> (usize, usize) {
        let taken = self.gpus.iter().filter(|gpu| gpu.taken);
        (taken.clone().filter(|gpu| gpu.fits).count(), taken.count())
    }
}

/// The node of a bound pod, and the memory that the pod holds there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodReport {
    /// The name of the pod's node.
    pub node: String,
    /// The pod's shares; empty if the pod holds nothing that Divvy can read.
    pub shares: Vec<PodShare>,
}

/// A bound pod's share of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodShare {
    /// The GPU as the pod's annotations name it: a UUID, or an index where only that is written.
    pub gpu: String,
    /// UUID, index, and product of the node's GPU; `None` if the node has no such GPU.
    pub known: Option<(Option<String>, u32, String)>,
    /// The memory that the pod holds on this GPU.
    pub memory: MiB,
}

impl Ledger {
    /// Explain what a node answers to a request.
    pub fn explain(&self, node: &str, ask: &Ask) -> NodeReport {
        let verdict = match self.choose(node, ask) {
            Err(refusal) if refusal == NodeRefusal::UnknownNode || !ask.is_nothing() => Err(refusal),
            Ok(choice) if !ask.is_nothing() => Ok(choice.gpus.iter().map(|gpu| gpu.index).collect()),
            _ => Ok(Vec::new()),
        };
        let view = self.node(node).filter(|view| view.state().is_some());
        let gpus = view.map(|view| reports(&view, ask)).unwrap_or_default();
        NodeReport {
            node: node.to_owned(),
            ask: ask.clone(),
            verdict,
            source: view.and_then(|view| view.state()).map(|state| state.source.clone()),
            unit: self.unit(),
            gpus,
            unnamed: view.zip(ask.whole).map_or(0, |(view, kind)| view.unlocated_whole(kind)),
        }
    }

    /// Return where a pod is bound and what it holds there; `None` while the pod is not bound.
    pub fn whereabouts(&self, pod: &Pod) -> Option<PodReport> {
        let node = pod.node.clone()?;
        let shares = self
            .node(&node)
            .and_then(|view| view.state())
            .map(|state| {
                parts::of_pod(pod, state, self.unit())
                    .into_iter()
                    .map(|part| PodShare {
                        known: part
                            .position
                            .and_then(|position| state.gpus.get(position))
                            .map(|gpu| (gpu.uuid.clone(), gpu.index, gpu.model.clone())),
                        gpu: part.gpu,
                        memory: part.memory,
                    })
                    .collect()
            })
            .unwrap_or_default();
        Some(PodReport { node, shares })
    }
}

impl LedgerNode<'_> {
    /// List the pods that hold memory of the GPU at this position: largest share first, then by name. Shares of GPUs that the
    /// node does not have are not included (see [`crate::Anomaly`]).
    pub fn holders(&self, position: usize) -> Vec<Holder> {
        let Some(state) = self.state() else {
            return Vec::new();
        };
        let here = |parts: Vec<HeldShare>| {
            let here = parts.into_iter().filter(|part| part.position == Some(position));
            here.fold(Amount::NONE, |sum, part| sum.plus(part.amount()))
        };
        let bound = self.pods().map(|pod| {
            let Amount { memory, cores } = here(self.parts(pod));
            Holder {
                pod: pod.key(),
                uid: pod.uid.clone(),
                memory,
                cores,
                kind: if pod.deleting {
                    HolderKind::Deleting
                } else {
                    HolderKind::Bound
                },
            }
        });
        let reserved = self.reserved().map(|(uid, reservation)| {
            let possible = reservation
                .possible()
                .map(|held| here(parts::of_held(held, state, self.unit)));
            let Amount { memory, cores } = possible.fold(Amount::NONE, Amount::plus);
            Holder {
                pod: reservation.pod.clone(),
                uid: uid.to_owned(),
                memory,
                cores,
                kind: HolderKind::Reserved,
            }
        });
        let mut holders: Vec<Holder> = bound.chain(reserved).filter(|holder| holder.memory > MiB::ZERO).collect();
        holders.sort_by(|a, b| (b.memory, &a.pod, &a.uid).cmp(&(a.memory, &b.pod, &b.uid)));
        holders
    }
}

fn reports(view: &LedgerNode<'_>, ask: &Ask) -> Vec<GpuReport> {
    let gpus = view.state().map(|state| state.gpus.as_slice()).unwrap_or_default();
    gpus.iter()
        .enumerate()
        .filter(|(_, gpu)| ask.is_for(gpu))
        .map(|(position, gpu)| {
            let free = view.entry.free_for(position, ask);
            let nominated = view.nominated(position, ask).map(|nominated| NominatedHolder {
                pod: nominated.pod.clone(),
                priority: nominated.priority,
                memory: nominated.memory,
            });
            GpuReport {
                nominated: nominated.collect(),
                uuid: gpu.uuid.clone(),
                index: gpu.index,
                whole: ask.whole.is_some(),
                model: gpu.model.clone(),
                capacity: gpu.capacity,
                total: gpu.total,
                free,
                free_cores: (ask.cores > 0).then(|| view.entry.free_cores_for(position, ask)),
                held: gpu.held,
                health: gpu.health,
                reason: gpu.reason.clone(),
                taken: ask.takes(gpu),
                fits: ask.is_well(gpu) && ask.takes(gpu) && view.entry.has_room(position, gpu, ask),
                holders: view.holders(position),
                departed: view
                    .departed(position)
                    .into_iter()
                    .map(|(uid, pod, memory)| DepartedHolder { pod, uid, memory })
                    .collect(),
            }
        })
        .collect()
}
