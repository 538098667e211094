use divvy_model::{MemoryUnit, MiB, Vendor, WholeKind, names};
use serde::{Deserialize, Serialize};

use crate::quantity::{amount, list, quantity};

/// A value, together with a sentence for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spoken<T> {
    /// The value.
    #[serde(flatten)]
    pub what: T,
    /// The value in words.
    pub message: String,
}

/// Why a node does not take the pod. The variants are ordered: the first one is the hardest to overcome. The first obstacle of a
/// node represents the node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Obstacle {
    /// The node offers no gpu-mem.
    NoGpuMemory,
    /// Divvy offers no whole GPUs or MIG devices of the requested kind on the node.
    NoWholeGpus {
        /// The requested resource.
        resource: WholeKind,
    },
    /// The node lacks a label by which the agent's DaemonSet selects its nodes, although an agent seems to have run there.
    NotChosen {
        /// The label's name.
        label: String,
        /// The label's required value.
        value: String,
    },
    /// The pod's nodeSelector requires another value of a label.
    NodeSelector {
        /// The label's name.
        label: String,
        /// The value that the pod requires.
        value: String,
        /// The node's value; `null` if the node lacks the label.
        found: Option<String>,
    },
    /// The node does not match the pod's required node affinity.
    NodeAffinity {
        /// The affinity in words.
        affinity: String,
    },
    /// The pod does not tolerate a taint.
    Taint {
        /// The taint's key.
        key: String,
        /// The taint's value; empty if it has none.
        value: String,
        /// `NoSchedule` or `NoExecute`
        effect: String,
    },
    /// The node is not ready.
    NotReady,
    /// The node's container runtime does not give GPUs to containers.
    Runtime {
        /// What to do about it, as a clause.
        remedy: String,
    },
    /// The node's agent does not run, so the kubelet offers none of the node's units.
    AgentAway {
        /// The number of units that the node has.
        capacity: u64,
    },
    /// The extender does not offer the node's GPUs.
    NotOffered {
        /// The reason, as a clause.
        reason: String,
    },
    /// The pod requests several GPUs, but gpushare's device plugin on the node gives a container only one.
    OneGpuOnly,
    /// The pod requests several GPUs, but the node has only MIG devices.
    OnlyMigDevices,
    /// The pod gets shares of one vendor's GPUs, and the node shares only those of another.
    OtherVendor {
        /// The vendor whose GPUs the pod gets.
        vendor: Vendor,
    },
    /// The rules in the pod's annotations allow none, or too few, of the node's GPUs.
    Rules {
        /// The rules in words that follow "a GPU".
        rules: String,
        /// The number of the node's GPUs that the rules allow.
        allowed: usize,
        /// The number of GPUs that the pod needs.
        needed: usize,
        /// The products of the node's GPUs, each with its count.
        products: Vec<String>,
    },
    /// No GPU of the node is large enough, even if it were empty.
    TooSmall {
        /// The size of the largest GPU; if the pod requests K GPUs, the size of the K-th largest GPU.
        #[serde(rename = "largestMiB")]
        largest: MiB,
    },
    /// A volume of the pod cannot be reached from the node.
    Volume {
        /// The name of the volume claim.
        claim: String,
    },
    /// The node is cordoned.
    Cordoned,
    /// The pod's podAffinity requires pods that do not run in the node's topology domain.
    PodAffinity {
        /// The topology key: the label whose value says which nodes belong together.
        topology: String,
    },
    /// The pod's podAntiAffinity forbids a pod that runs in the node's topology domain.
    PodAntiAffinity {
        /// The topology key: the label whose value says which nodes belong together.
        topology: String,
        /// The forbidden pod, as `namespace/name`; `null` if the user may not see its name.
        pod: Option<String>,
    },
    /// The podAntiAffinity of a pod in the node's topology domain forbids this pod.
    AvoidedBy {
        /// The topology key: the label whose value says which nodes belong together.
        topology: String,
        /// The pod with the podAntiAffinity, as `namespace/name`; `null` if the user may not see its name.
        pod: Option<String>,
    },
    /// The pod's topology spread constraint allows no more pods in the node's topology domain.
    Spread {
        /// The constraint's topology key.
        topology: String,
        /// `maxSkew`
        max_skew: i32,
        /// By how many pods the domain would exceed the domain with the fewest pods, if the pod ran there; `null` if the node
        /// lacks the label.
        skew: Option<i64>,
    },
    /// A host port of the pod is in use.
    HostPort {
        /// The port number.
        port: u16,
    },
    /// Too little of a resource is free: CPU in thousandths of a core, other resources in whole units (memory in bytes).
    Resource {
        /// The name of the resource.
        resource: String,
        /// The amount that the pod requests.
        asked: u64,
        /// The amount that is free.
        free: u64,
        /// The amount that the node has in total.
        allocatable: u64,
    },
    /// Too few GPUs, or none, have enough free memory.
    GpuMemory {
        /// The number of GPUs that the pod needs.
        needed: usize,
        /// The number of GPUs with enough memory free.
        fitting: usize,
        /// The number of GPUs that the pod accepts, including failed ones.
        taken: usize,
        /// The number of these GPUs that failed or are lost.
        unwell: usize,
        /// The largest amount of free memory on one GPU; if the pod requests K GPUs, the K-th largest amount.
        #[serde(rename = "freeMiB")]
        free: MiB,
        /// The sum of the free memory of all GPUs.
        #[serde(rename = "freeInAllMiB")]
        sum: MiB,
    },
    /// Too few GPUs, or none, have enough free compute time beside enough free memory.
    GpuCores {
        /// The compute time that the pod requests of each GPU, in percent.
        asked: u32,
        /// The number of GPUs that the pod needs.
        needed: usize,
        /// The number of GPUs with enough memory and compute time free.
        fitting: usize,
        /// The number of GPUs with enough memory free.
        with_memory: usize,
        /// The most compute time that is free on one of the GPUs with enough memory free, in percent; if the pod requests K GPUs, the K-th largest
        /// amount.
        free: u32,
    },
    /// Too few whole GPUs or MIG devices of the requested kind, or none, are free.
    WholeGpus {
        /// The requested resource.
        resource: WholeKind,
        /// The number of GPUs that the pod needs.
        needed: usize,
        /// The number of free GPUs that the pod accepts.
        free: usize,
        /// The number of GPUs that the pod accepts, including failed ones.
        taken: usize,
        /// The number of these GPUs that failed or are lost.
        unwell: usize,
    },
    /// A GPU has room, but according to kube-scheduler's sums, the node has too few units left.
    Counted {
        /// The number of units that kube-scheduler counts as free.
        free: u64,
        /// The number of units that the kubelet offers, without those of failed GPUs.
        offered: u64,
    },
}

/// Name a pod as `pod ml/a`, or `another pod` if its name is hidden.
fn that(pod: &Option<String>) -> String {
    pod.as_ref()
        .map_or_else(|| "another pod".to_owned(), |pod| format!("pod {pod}"))
}

/// What the text of an obstacle needs besides its fields.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ObstacleWords<'a> {
    pub(crate) unit: MemoryUnit,
    /// The amount that is requested of each GPU: `30 GiB`.
    pub(crate) asked: &'a str,
    /// Whether the pod has rules, so that it does not accept every GPU.
    pub(crate) rules: bool,
}

/// Put a space before a text, unless it is empty.
fn spaced(text: &str) -> String {
    match text {
        "" => String::new(),
        text => format!(" {text}"),
    }
}

impl Obstacle {
    /// Describe the obstacle in words that follow "node n1: ".
    pub(crate) fn message(&self, node: &str, words: ObstacleWords<'_>) -> String {
        let size = |memory: &MiB| amount(*memory, words.unit);
        match self {
            Obstacle::NoGpuMemory => format!("it offers no {}", names::GPU_MEM),
            Obstacle::NoWholeGpus { resource } => format!("it has no {resource}s that Divvy offers"),
            Obstacle::WholeGpus {
                resource: kind,
                needed,
                free,
                taken,
                unwell,
            } => {
                let used = taken.saturating_sub(unwell + free);
                let which = if words.rules { " that the pod's rules allow" } else { "" };
                let unwell = match unwell {
                    0 => String::new(),
                    count => format!(", {count} of {taken} not healthy"),
                };
                match needed {
                    1 => format!("no free {kind}{which} ({used} of {taken} in use{unwell})"),
                    _ => format!("{free} of {taken} {kind}s{which} are free{unwell}, and {needed} are needed"),
                }
            }
            Obstacle::NotChosen { label, value } => format!(
                "it lacks the label {label}={value}, by which the agent's DaemonSet chooses its nodes (to share its GPUs: kubectl label node {node} \
                 {label}={value})"
            ),
            Obstacle::NodeSelector { label, value, found } => {
                let found = found
                    .as_ref()
                    .map_or_else(|| "lacks that label".to_owned(), |found| format!("has {label}={found}"));
                format!("the pod's nodeSelector asks for {label}={value}, and the node {found}")
            }
            Obstacle::NodeAffinity { affinity } if affinity.is_empty() => {
                "the pod's node affinity has only empty terms, which match no node".to_owned()
            }
            Obstacle::NodeAffinity { affinity } => format!("it does not match the pod's node affinity ({affinity})"),
            Obstacle::Taint { .. } => format!("the pod does not tolerate its taint {}", self.taint()),
            Obstacle::NotReady => "it is not ready".to_owned(),
            Obstacle::Runtime { remedy } | Obstacle::NotOffered { reason: remedy } => remedy.clone(),
            Obstacle::AgentAway { capacity } => format!(
                "its kubelet offers {}, so no Divvy agent runs there, or none is ready (kubectl get pods -A -o wide \
                 --field-selector spec.nodeName={node})",
                match capacity {
                    0 => format!("no {}", names::GPU_MEM),
                    capacity => format!("0 of {capacity} units"),
                }
            ),
            Obstacle::OneGpuOnly => {
                "gpushare's device plugin serves it, which gives a container one GPU; several GPUs need Divvy's agent there"
                    .to_owned()
            }
            Obstacle::OnlyMigDevices => {
                "it has only MIG devices, and a CUDA process uses only one of them; several GPUs need GPUs that are not divided"
                    .to_owned()
            }
            Obstacle::OtherVendor { vendor } => format!(
                "it shares GPUs of another vendor, and the pod gets shares of {vendor} GPUs; the annotation {} selects the vendor",
                names::GPU_VENDOR
            ),
            Obstacle::Rules {
                rules,
                needed: 1,
                products,
                ..
            } => format!("it has no GPU {rules}; it has {}", list(products)),
            Obstacle::Rules {
                rules,
                allowed,
                needed,
                products,
            } => {
                let rules = spaced(rules);
                format!(
                    "the pod needs {needed} GPUs{rules}, and it has {allowed}; it has {}",
                    list(products)
                )
            }
            Obstacle::TooSmall { largest } => format!("its largest GPU has {}, even empty", size(largest)),
            Obstacle::Volume { claim } => format!("the volume of claim {claim} cannot be reached from it"),
            Obstacle::Cordoned => "it is cordoned".to_owned(),
            Obstacle::PodAffinity { topology } => {
                format!("the pod's podAffinity requires a pod that is not there (per {topology})")
            }
            Obstacle::PodAntiAffinity { topology, pod } => {
                format!(
                    "the pod's podAntiAffinity keeps it away from {}, which is there (per {topology})",
                    that(pod)
                )
            }
            Obstacle::AvoidedBy { topology, pod } => {
                format!(
                    "the podAntiAffinity of {}, which is there, keeps this pod away (per {topology})",
                    that(pod)
                )
            }
            Obstacle::Spread {
                topology, skew: None, ..
            } => {
                format!("the pod must be spread over {topology}, but the node lacks that label")
            }
            Obstacle::Spread {
                topology,
                max_skew,
                skew: Some(skew),
            } => format!(
                "the pod's spread constraint over {topology} allows at most {max_skew} more than elsewhere, and with this pod there would be {skew} more"
            ),
            Obstacle::HostPort { port } => format!("another pod there uses host port {port}"),
            Obstacle::Resource {
                resource,
                asked,
                free,
                allocatable,
            } if resource == "pods" && *asked == 1 => {
                format!(
                    "it has no place for another pod ({} of {allocatable} are taken)",
                    allocatable - free
                )
            }
            Obstacle::Resource {
                resource,
                asked,
                allocatable: 0,
                ..
            } => format!("it offers no {resource}, and the pod asks for {}", quantity(resource, *asked)),
            Obstacle::Resource {
                resource,
                asked,
                allocatable,
                ..
            } if asked > allocatable => format!(
                "it has {} {resource} in all, and the pod asks for {}",
                quantity(resource, *allocatable),
                quantity(resource, *asked)
            ),
            Obstacle::Resource {
                resource,
                asked,
                free,
                allocatable,
            } => format!(
                "{} of {} {resource} is free, and the pod asks for {}",
                quantity(resource, *free),
                quantity(resource, *allocatable),
                quantity(resource, *asked)
            ),
            Obstacle::GpuMemory {
                needed: 1,
                taken: 1,
                unwell: 1,
                ..
            } => "its GPU is not healthy".to_owned(),
            Obstacle::GpuMemory {
                needed: 1,
                taken,
                free,
                sum,
                unwell,
                ..
            } => {
                let unwell = match unwell {
                    0 => String::new(),
                    count => format!("; {count} of {taken} GPUs are not healthy"),
                };
                match (taken, words.rules) {
                    (1, false) => format!("{} free on its GPU{unwell}", size(free)),
                    (1, true) => format!("{} free on the one GPU that the pod's rules allow{unwell}", size(free)),
                    (_, false) => format!("at most {} free on one GPU, {} on all of them{unwell}", size(free), size(sum)),
                    (_, true) => format!(
                        "of the GPUs that the pod's rules allow, at most {} free on one, {} on all of them{unwell}",
                        size(free),
                        size(sum)
                    ),
                }
            }
            Obstacle::GpuMemory {
                needed, fitting, taken, ..
            } => {
                format!("{fitting} of {taken} GPUs have {} free, and {needed} are needed", words.asked)
            }
            Obstacle::GpuCores {
                asked, needed: 1, free, ..
            } => format!("{free} % of the compute time is free on a GPU with enough memory, and the pod asks for {asked} %"),
            Obstacle::GpuCores {
                asked,
                needed,
                fitting,
                with_memory,
                ..
            } => format!(
                "{fitting} of the {with_memory} GPUs with {} free have {asked} % of their compute time free, and {needed} are needed",
                words.asked
            ),
            Obstacle::Counted { free, offered } => format!(
                "kube-scheduler counts {free} of the {offered} units that its kubelet offers as free; units of failed GPUs are not offered, and a pod \
                 counts until it is gone"
            ),
        }
    }

    /// Describe what nodes with this obstacle have in common, in words that follow "3 nodes: ". The text contains nothing that
    /// belongs to a single node.
    pub(crate) fn group(&self, words: ObstacleWords<'_>) -> String {
        match self {
            Obstacle::NoGpuMemory => "no GPU memory offered".to_owned(),
            Obstacle::NoWholeGpus { resource } => format!("no {resource}s that Divvy offers"),
            Obstacle::WholeGpus { resource, needed: 1, .. } => format!("no free {resource}"),
            Obstacle::WholeGpus { resource, needed, .. } => format!("fewer than {needed} free {resource}s"),
            Obstacle::NotChosen { label, value } => format!("without the label {label}={value} of GPU nodes"),
            Obstacle::NodeSelector { label, value, .. } => format!("without the label {label}={value} (nodeSelector)"),
            Obstacle::NodeAffinity { .. } => "excluded by the pod's node affinity".to_owned(),
            Obstacle::Taint { .. } => format!("taint {} is not tolerated", self.taint()),
            Obstacle::NotReady => "not ready".to_owned(),
            Obstacle::Runtime { .. } => "container runtime without CDI".to_owned(),
            Obstacle::AgentAway { .. } => "no Divvy agent running".to_owned(),
            Obstacle::NotOffered { .. } => "GPUs not offered (--all-nodes says why)".to_owned(),
            Obstacle::OneGpuOnly => "gpushare's device plugin gives a container one GPU".to_owned(),
            Obstacle::OnlyMigDevices => "only MIG devices, of which a process can use one".to_owned(),
            Obstacle::OtherVendor { vendor } => format!("no shared {vendor} GPU ({})", names::GPU_VENDOR),
            Obstacle::Rules { rules, needed: 1, .. } => format!("no GPU {rules}"),
            Obstacle::Rules { rules, needed, .. } => format!("fewer than {needed} GPUs{}", spaced(rules)),
            Obstacle::TooSmall { .. } => format!("no GPU as large as {}, even empty", words.asked),
            Obstacle::Volume { claim } => format!("out of reach of the volume of claim {claim}"),
            Obstacle::Cordoned => "cordoned".to_owned(),
            Obstacle::PodAffinity { .. } => "excluded by the pod's podAffinity".to_owned(),
            Obstacle::PodAntiAffinity { .. } => "excluded by the pod's podAntiAffinity".to_owned(),
            Obstacle::AvoidedBy { .. } => "excluded by the podAntiAffinity of pods there".to_owned(),
            Obstacle::Spread { topology, .. } => format!("excluded by the pod's spread constraint over {topology}"),
            Obstacle::HostPort { port } => format!("host port {port} is in use"),
            Obstacle::Resource { resource, .. } if resource == "pods" => "no place for another pod".to_owned(),
            Obstacle::Resource {
                resource,
                allocatable: 0,
                ..
            } => format!("no {resource}"),
            Obstacle::Resource { resource, asked, .. } => format!("less than {} {resource} free", quantity(resource, *asked)),
            Obstacle::GpuMemory { needed: 1, .. } => format!("no GPU with {} free", words.asked),
            Obstacle::GpuMemory { needed, .. } => format!("fewer than {needed} GPUs with {} free", words.asked),
            Obstacle::GpuCores { asked, needed: 1, .. } => {
                format!("no GPU with {} and {asked} % of its compute time free", words.asked)
            }
            Obstacle::GpuCores { asked, needed, .. } => {
                format!(
                    "fewer than {needed} GPUs with {} and {asked} % of their compute time free",
                    words.asked
                )
            }
            Obstacle::Counted { .. } => "too few units left by kube-scheduler's sums".to_owned(),
        }
    }

    /// Report whether the obstacle is about the node's GPUs, or about the agent or device plugin that offers them.
    pub(crate) fn is_of_gpus(&self) -> bool {
        self.is_of_offer()
            || matches!(
                self,
                Obstacle::Rules { .. }
                    | Obstacle::OtherVendor { .. }
                    | Obstacle::TooSmall { .. }
                    | Obstacle::GpuMemory { .. }
                    | Obstacle::GpuCores { .. }
                    | Obstacle::WholeGpus { .. }
            )
    }

    /// Report whether the node has no GPUs of the requested kind at all, so that nothing else about it matters.
    pub fn is_of_no_offer(&self) -> bool {
        matches!(self, Obstacle::NoGpuMemory | Obstacle::NoWholeGpus { .. })
    }

    /// Report whether the node's GPUs are not offered at all, or not to this pod.
    pub(crate) fn is_of_offer(&self) -> bool {
        matches!(
            self,
            Obstacle::NoGpuMemory
                | Obstacle::NoWholeGpus { .. }
                | Obstacle::NotChosen { .. }
                | Obstacle::Runtime { .. }
                | Obstacle::AgentAway { .. }
                | Obstacle::NotOffered { .. }
                | Obstacle::OneGpuOnly
                | Obstacle::OnlyMigDevices
        )
    }

    /// Format a taint as `key=value:effect`; empty for other obstacles.
    pub(crate) fn taint(&self) -> String {
        match self {
            Obstacle::Taint { key, value, effect } if value.is_empty() => format!("{key}:{effect}"),
            Obstacle::Taint { key, value, effect } => format!("{key}={value}:{effect}"),
            _ => String::new(),
        }
    }
}

/// Why the pod cannot start, regardless of the nodes, or why Divvy cannot tell.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Hold {
    /// The pod is being deleted.
    Deleting,
    /// Schedulers wait until the pod's scheduling gates have been removed.
    Gates {
        /// The names of the gates.
        gates: Vec<String>,
    },
    /// The pod's quantity of gpu-mem has a suffix. It is read as a number of units, and that number is too large.
    Suffix {
        /// The quantity as it was written.
        written: String,
        /// The number of units to write instead; `null` if it cannot be computed.
        write: Option<u64>,
    },
    /// The pod requests more than can be counted.
    Uncountable,
    /// The pod's annotations cannot be read.
    Annotations {
        /// What is wrong with the annotations.
        error: String,
    },
    /// A volume claim does not exist, or has no volume.
    Claim {
        /// The name of the claim.
        claim: String,
        /// Whether the claim exists.
        exists: bool,
    },
    /// kube-scheduler cannot reach the extender.
    ExtenderAway,
    /// No scheduler has tried to place the pod, and the pod names a scheduler that is not Kubernetes' own.
    Unheard {
        /// `spec.schedulerName`
        scheduler: String,
    },
    /// Something that decides where the pod may run was not checked.
    NotLookedAt {
        /// What was not checked.
        what: String,
        /// Why it was not checked.
        reason: String,
    },
}

impl Hold {
    /// Describe the hold in words.
    pub(crate) fn message(&self, unit: MemoryUnit) -> String {
        let key = names::GPU_MEM;
        match self {
            Hold::Deleting => "the pod is being deleted".to_owned(),
            Hold::Gates { gates } => format!(
                "kube-scheduler does not try to place the pod until its scheduling gate{} {} been removed by the program that added {}",
                if gates.len() == 1 { "" } else { "s" },
                format_args!("{} {}", list(gates), if gates.len() == 1 { "has" } else { "have" }),
                if gates.len() == 1 { "it" } else { "them" },
            ),
            Hold::Suffix { written, write } => {
                let write = write.map(|write| format!("; write {write}")).unwrap_or_default();
                format!("{key} is a number of units of {unit} and takes no suffix: {written} is read as more units than any GPU has{write}")
            }
            Hold::Uncountable => format!("the pod asks for more {key} than can be counted"),
            Hold::Annotations { error } => error.clone(),
            Hold::Claim { claim, exists: false } => format!("there is no PersistentVolumeClaim {claim}"),
            Hold::Claim { claim, exists: true } => format!("PersistentVolumeClaim {claim} has no volume yet: kubectl describe pvc {claim}"),
            Hold::ExtenderAway => {
                "kube-scheduler cannot reach Divvy's extender. Either the extender is not running, or the urlPrefix in kube-scheduler's configuration is not its address"
                    .to_owned()
            }
            Hold::Unheard { scheduler } => format!(
                "no scheduler has tried to place the pod, and its schedulerName is {scheduler:?}; most likely no scheduler of that name runs \
                 (`divvy scheduler-config --as-second-scheduler` makes divvy-scheduler)"
            ),
            Hold::NotLookedAt { what, reason } => format!("{what} could not be checked: {reason}"),
        }
    }

    /// Report whether the pod certainly cannot start while this hold lasts. [`Hold::NotLookedAt`] is not certain, because what
    /// was not checked may be fine.
    pub(crate) fn is_certain(&self) -> bool {
        !matches!(self, Hold::NotLookedAt { .. })
    }
}
