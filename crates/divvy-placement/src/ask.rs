//! What a pod requests of a node's GPUs.

use std::fmt;
use std::sync::Arc;

use divvy_model::limits::shortened;
use divvy_model::{Error, GpuRules, Health, Isolation, MemoryUnit, MiB, Pod, PodRequest, Vendor, WholeKind};

use crate::amount::Amount;
use crate::node::{GpuSource, GpuState, NodeState};
use crate::products::Product;

/// The maximum length in bytes of a pod's rules when they are repeated in a text.
const WANTED_BYTES: usize = 100;

/// A pod's request, as far as placement uses it: memory of one GPU, or the same amount of each of several, or whole GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ask {
    /// What the pod requests as a whole; `None` for a pod that requests shared memory, or nothing.
    pub whole: Option<WholeKind>,
    /// The number of units in total, by Kubernetes' formula for the effective request of a pod; 0 for whole GPUs.
    pub units: u64,
    /// The number of GPUs, all on one node; at least 1.
    pub gpus: usize,
    /// The memory of each GPU; `None` if it is more than can be counted; 0 for whole GPUs, where each GPU's size counts
    /// ([`Ask::needs`]).
    pub memory: Option<MiB>,
    /// The compute time of each GPU, in percent; 0 if the pod sets no limit.
    pub cores: u32,
    /// The rules that say which GPUs the pod accepts; `None` if it accepts any.
    pub rules: Option<Arc<Result<GpuRules, Error>>>,
    /// The requesting pod; `None` if memory kept for nominated pods shall count as free.
    pub asker: Option<Arc<Asker>>,
}

impl Ask {
    /// Create a request for this many units of one GPU. `unit` is the cluster's unit.
    pub fn new(units: u64, unit: MemoryUnit) -> Ask {
        Ask::spread(units, 1, unit)
    }

    /// Create a request as [`Ask::new`] does, but spread evenly over this many GPUs. The memory of each GPU is rounded up.
    fn spread(units: u64, gpus: usize, unit: MemoryUnit) -> Ask {
        let gpus = gpus.max(1);
        Ask {
            whole: None,
            units,
            gpus,
            memory: unit.memory(units.div_ceil(gpus as u64)),
            cores: 0,
            rules: None,
            asker: None,
        }
    }

    /// Create a request for this many whole GPUs or MIG devices of a kind.
    pub fn whole(kind: impl Into<WholeKind>, gpus: u64) -> Ask {
        Ask {
            whole: Some(kind.into()),
            units: 0,
            gpus: usize::try_from(gpus).unwrap_or(usize::MAX).max(1),
            memory: Some(MiB::ZERO),
            cores: 0,
            rules: None,
            asker: None,
        }
    }

    /// Return the shared memory that a pod asks of each of its GPUs. `None` if it has ended, or asks for none or for more than can be counted.
    pub(crate) fn of_one_gpu(pod: &Pod, unit: MemoryUnit) -> Option<MiB> {
        let asks = pod.request.wants_memory() && !pod.ended();
        asks.then(|| Ask::of(&pod.request, unit).memory).flatten()
    }

    /// Read the request of a pod. A request that is more than can be counted becomes `u64::MAX` units or GPUs, which fit nowhere.
    pub fn of(request: &PodRequest, unit: MemoryUnit) -> Ask {
        // A pod that requests both has rules that cannot be read, so it fits nowhere either way.
        if let Some(whole) = request.whole.as_deref().filter(|_| !request.wants_memory()) {
            return Ask {
                rules: request.rules.clone(),
                ..Ask::whole(whole.kind, whole.gpus().unwrap_or(u64::MAX))
            };
        }
        let rules = request.rules.as_deref().and_then(|rules| rules.as_ref().ok());
        let gpus = rules.and_then(|rules| rules.gpus).unwrap_or(1);
        Ask {
            cores: rules.and_then(|rules| rules.cores).unwrap_or(0),
            rules: request.rules.clone(),
            ..Ask::spread(request.effective_units().unwrap_or(u64::MAX), gpus as usize, unit)
        }
    }

    /// Read the request of a pod as [`Ask::of`] does. Memory kept for nominated pods ([`crate::Nominated`]) is not free for this
    /// pod, unless its priority is higher.
    pub fn of_pod(pod: &Pod, unit: MemoryUnit) -> Ask {
        Ask {
            asker: Some(Arc::new(Asker {
                uid: pod.uid.clone(),
                priority: pod.priority,
            })),
            ..Ask::of(&pod.request, unit)
        }
    }

    /// Return the pod's rules, if it has any that can be read.
    pub fn rules(&self) -> Option<&GpuRules> {
        self.rules.as_deref()?.as_ref().ok()
    }

    /// Return the vendor whose GPUs the pod gets.
    pub fn vendor(&self) -> Vendor {
        match self.whole {
            Some(kind) => kind.vendor(),
            None => self.rules().map_or_else(Vendor::default, GpuRules::vendor_of_shares),
        }
    }

    /// Report whether the pod requests no GPU at all.
    pub fn is_nothing(&self) -> bool {
        self.units == 0 && self.whole.is_none()
    }

    /// Report whether the GPU is offered in the way in which the pod requests GPUs: shared and of the pod's vendor, or as a whole of the requested kind.
    /// Memory of several GPUs is not on parts of GPUs, because a CUDA process uses only one MIG device (NVIDIA's MIG User Guide).
    pub fn is_for(&self, gpu: &GpuState) -> bool {
        match self.whole {
            Some(_) => gpu.whole == self.whole,
            None => self.is_of_vendor(gpu) && (self.gpus == 1 || !gpu.is_part),
        }
    }

    /// Report whether the GPU is shared and of the vendor whose GPUs the pod gets.
    pub(crate) fn is_of_vendor(&self, gpu: &GpuState) -> bool {
        gpu.is_shared() && gpu.vendor == self.vendor()
    }

    /// Return the memory that must be free on this GPU for the pod: all of it, if the pod requests whole GPUs. `None` if it is
    /// more than can be counted.
    pub fn needs(&self, gpu: &GpuState) -> Option<MiB> {
        match self.whole {
            Some(_) => Some(gpu.capacity),
            None => self.memory,
        }
    }

    /// Return what must be free on this GPU for the pod. `None` if it is more than can be counted.
    pub(crate) fn amount_on(&self, gpu: &GpuState) -> Option<Amount> {
        let cores = self.cores;
        self.needs(gpu).map(|memory| Amount { memory, cores })
    }

    /// Report whether the pod is one of a test of the GPUs that it names.
    pub(crate) fn tests(&self) -> bool {
        self.rules()
            .is_some_and(|rules| rules.test.is_some() && !rules.uuids.is_empty())
    }

    /// Report whether the GPU is well enough for the pod: it is healthy, or the pod is that of its test.
    pub fn is_well(&self, gpu: &GpuState) -> bool {
        let accepts = |rules: &GpuRules| self.tests() && rules.accept_health(gpu.health, gpu.test.as_ref());
        gpu.health == Health::Ok || self.rules().is_some_and(accepts)
    }

    /// Report whether the pod accepts this GPU, regardless of what is free on it.
    pub fn takes(&self, gpu: &GpuState) -> bool {
        if !self.is_for(gpu) {
            return false;
        }
        match self.rules.as_deref() {
            None => true,
            Some(Ok(rules)) => {
                rules.allow_any_product(gpu.total, gpu.uuid.as_deref())
                    && self.is_isolated_on(gpu, rules)
                    && self.takes_product_of(gpu)
            }
            Some(Err(_)) => false,
        }
    }

    /// Report whether the pod would be as isolated on this GPU as its rules want. A pod with whole GPUs has no neighbors.
    pub(crate) fn is_isolated_on(&self, gpu: &GpuState, rules: &GpuRules) -> bool {
        self.whole.is_some() || rules.accept_share(gpu.enforcement)
    }

    /// Report whether the pod is held to its share where the node can do that. A pod with whole GPUs has no share.
    pub(crate) fn wants_enforcement(&self) -> bool {
        let isolation = self.rules().and_then(|rules| rules.isolation);
        self.whole.is_none() && isolation != Some(Isolation::None)
    }

    /// Report whether the extender leaves this pod to kube-scheduler on this node, because another device plugin offers the whole GPUs that
    /// the pod requests there. The products of these GPUs are not known, so a pod with rules cannot use them.
    pub fn is_left_to_another_plugin(&self, state: &NodeState) -> bool {
        self.rules.is_none() && self.whole.is_some_and(|kind| state.elsewhere.contains(&kind))
    }

    /// Report whether the pod requests several GPUs on a node where a pod can get only one: gpushare's device plugin gives no
    /// more.
    pub(crate) fn is_too_wide_for(&self, state: &NodeState) -> bool {
        self.whole.is_none() && self.gpus > 1 && state.source != GpuSource::Inventory
    }

    /// Report whether the pod requests several GPUs on a node whose shared GPUs are all parts of GPUs ([`Ask::is_for`]).
    pub(crate) fn is_too_wide_for_parts_of(&self, state: &NodeState) -> bool {
        let mut shared = state.gpus.iter().filter(|gpu| self.is_of_vendor(gpu)).peekable();
        self.whole.is_none() && self.gpus > 1 && shared.peek().is_some() && shared.all(|gpu| gpu.is_part)
    }

    /// Report whether the pod's rules accept the GPU's product.
    pub(crate) fn takes_product_of(&self, gpu: &GpuState) -> bool {
        let known = !gpu.product.is_some_and(Product::is_unknown);
        let product = if known { gpu.model.as_str() } else { "" };
        self.rules().is_none_or(|rules| rules.models.allows(product))
    }

    /// Return what the pod requests, in the number in which it requests it: `MIG 1g.5gb device`, `AMD GPUs`.
    pub(crate) fn devices(&self) -> String {
        match (self.whole, self.gpus) {
            (None, 1) => "GPU".to_owned(),
            (Some(kind), 1) => kind.to_string(),
            _ => self.plural(),
        }
    }

    /// Return the plural of what the pod requests: `GPUs`, `MIG 1g.5gb devices`.
    pub(crate) fn plural(&self) -> String {
        self.whole.map_or_else(|| "GPUs".to_owned(), WholeKind::plural)
    }

    /// Format the amount: `3 units (3072 MiB)`, `3 units (3072 MiB) and 30 % of the compute time`, `8 units (2 GPUs with 4096 MiB each)`,
    /// `2 whole AMD GPUs`, `1 whole MIG 1g.5gb device`.
    pub fn amount(&self) -> String {
        if self.whole.is_some() {
            return format!("{} whole {}", self.gpus, self.devices());
        }
        let s = if self.units == 1 { "" } else { "s" };
        let memory = match self.memory {
            Some(memory) if self.gpus > 1 => format!("{} unit{s} ({} GPUs with {memory} each)", self.units, self.gpus),
            Some(memory) => format!("{} unit{s} ({memory})", self.units),
            None => format!("{} unit{s} (more memory than can be counted)", self.units),
        };
        format!("{memory}{}", self.and_cores())
    }

    /// Format the compute time as words that follow the memory; empty if the pod sets no limit.
    pub(crate) fn and_cores(&self) -> String {
        match (self.cores, self.gpus) {
            (0, _) => String::new(),
            (cores, 1) => format!(" and {cores} % of the compute time"),
            (cores, _) => format!(" and {cores} % of the compute time of each"),
        }
    }

    /// Describe the rules in words that follow "a GPU"; `None` if the pod accepts any GPU. Long texts are shortened, because the
    /// text is repeated for each node that does not match.
    pub fn wanted(&self) -> Option<String> {
        let text = self.rules()?.to_string();
        (!text.is_empty()).then(|| shortened(&text, WANTED_BYTES).into_owned())
    }
}

impl fmt::Display for Ask {
    /// Format the request: `3 units (3072 MiB)`, `3 units (3072 MiB) on a GPU of a product like A100*`, `2 whole AMD GPUs (amd.com/gpu)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.amount())?;
        if let Some(kind) = self.whole {
            write!(f, " ({})", kind.resource())?;
        }
        match self.wanted() {
            Some(rules) if self.whole.is_some() => write!(f, " {rules}"),
            Some(rules) if self.gpus > 1 => write!(f, " on GPUs {rules}"),
            Some(rules) => write!(f, " on a GPU {rules}"),
            None => Ok(()),
        }
    }
}

/// The requesting pod, for which room is searched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asker {
    /// The pod's UID.
    pub uid: String,
    /// The pod's priority.
    pub priority: i32,
}
