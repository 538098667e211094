use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use divvy_model::legacy::LegacyAllocation;
use divvy_model::limits::shortened;
use divvy_model::{
    Allocation, ContainerShare, Error, GpuRules, GpuShare, Health, Held, MemoryUnit, MiB, Pod, PodRequest, Vendor, WholeRequest,
};

use crate::products::{Product, Taste};
use crate::{Asker, GpuState, Ledger, NodeState, NodeView, Reservation, Source, Unusable, multi_gpu, whole};

/// A pod's request, as far as placement uses it: memory of one GPU, or the same amount of each of several, or whole GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ask {
    /// The vendor whose GPUs the pod requests as a whole; `None` for a pod that requests shared memory, or nothing.
    pub whole: Option<Vendor>,
    /// The number of units in total, by Kubernetes' formula for the effective request of a pod; 0 for whole GPUs.
    pub units: u64,
    /// The number of GPUs of one node; at least 1.
    pub gpus: usize,
    /// The memory of each GPU; `None` if it is more than can be counted; 0 for whole GPUs, where each GPU's size counts
    /// ([`Ask::needs`]).
    pub memory: Option<MiB>,
    /// The rules that say which GPUs the pod accepts; `None` if it accepts any.
    pub rules: Option<Arc<Result<GpuRules, Error>>>,
    /// The requesting pod; `None` if memory kept for nominated pods shall count as free.
    pub asker: Option<Arc<Asker>>,
}

impl Ask {
    /// Create a request for this many units of one GPU, in a cluster with this unit.
    pub fn new(units: u64, unit: MemoryUnit) -> Ask {
        Ask::spread(units, 1, unit)
    }

    /// Create a request as [`Ask::new`] does, spread evenly over this many GPUs; rounded up.
    fn spread(units: u64, gpus: usize, unit: MemoryUnit) -> Ask {
        let gpus = gpus.max(1);
        Ask {
            whole: None,
            units,
            gpus,
            memory: unit.memory(units.div_ceil(gpus as u64)),
            rules: None,
            asker: None,
        }
    }

    /// Create a request for this many whole GPUs of a vendor.
    pub fn whole(vendor: Vendor, gpus: u64) -> Ask {
        Ask {
            whole: Some(vendor),
            units: 0,
            gpus: usize::try_from(gpus).unwrap_or(usize::MAX).max(1),
            memory: Some(MiB::ZERO),
            rules: None,
            asker: None,
        }
    }

    /// Read the request of a pod. A request that is more than can be counted becomes `u64::MAX` units or GPUs, which fit nowhere.
    pub fn of(request: &PodRequest, unit: MemoryUnit) -> Ask {
        // A pod that requests both has rules that cannot be read, so it fits nowhere either way.
        if let Some(whole) = request.whole.as_deref().filter(|_| !request.wants_memory()) {
            return Ask {
                rules: request.rules.clone(),
                ..Ask::whole(whole.vendor, whole.gpus().unwrap_or(u64::MAX))
            };
        }
        let rules = request.rules.as_deref().and_then(|rules| rules.as_ref().ok());
        let gpus = rules.and_then(|rules| rules.gpus).unwrap_or(1);
        Ask {
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

    /// Report whether the pod requests no GPU at all.
    pub fn is_nothing(&self) -> bool {
        self.units == 0 && self.whole.is_none()
    }

    /// Report whether the GPU is offered in the way in which the pod requests GPUs: shared, or whole and of the requested vendor.
    pub fn is_for(&self, gpu: &GpuState) -> bool {
        self.whole == gpu.offered_as()
    }

    /// Return the memory that must be free on this GPU for the pod: all of it, if the pod requests whole GPUs. `None` if it is
    /// more than can be counted.
    pub fn needs(&self, gpu: &GpuState) -> Option<MiB> {
        match self.whole {
            Some(_) => Some(gpu.capacity),
            None => self.memory,
        }
    }

    /// Report whether the pod accepts this GPU, regardless of what is free on it.
    pub fn takes(&self, gpu: &GpuState) -> bool {
        if !self.is_for(gpu) {
            return false;
        }
        match self.rules.as_deref() {
            None => true,
            Some(Ok(rules)) => rules.allow_any_product(gpu.total, gpu.uuid.as_deref()) && self.takes_product_of(gpu),
            Some(Err(_)) => false,
        }
    }

    pub(crate) fn takes_product_of(&self, gpu: &GpuState) -> bool {
        let known = !gpu.product.is_some_and(Product::is_unknown);
        let product = if known { gpu.model.as_str() } else { "" };
        self.rules().is_none_or(|rules| rules.models.allows(product))
    }

    /// Format the amount: `3 units (3072 MiB)`, `8 units (2 GPUs with 4096 MiB each)`, `2 whole AMD GPUs`.
    pub fn amount(&self) -> String {
        if let Some(vendor) = self.whole {
            let s = if self.gpus == 1 { "" } else { "s" };
            return format!("{} whole {vendor} GPU{s}", self.gpus);
        }
        let s = if self.units == 1 { "" } else { "s" };
        match self.memory {
            Some(memory) if self.gpus > 1 => format!("{} unit{s} ({} GPUs with {memory} each)", self.units, self.gpus),
            Some(memory) => format!("{} unit{s} ({memory})", self.units),
            None => format!("{} unit{s} (more memory than can be counted)", self.units),
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
        if let Some(vendor) = self.whole {
            write!(f, " ({})", vendor.whole_resource())?;
        }
        match self.wanted() {
            Some(rules) if self.whole.is_some() => write!(f, " {rules}"),
            Some(rules) if self.gpus > 1 => write!(f, " on GPUs {rules}"),
            Some(rules) => write!(f, " on a GPU {rules}"),
            None => Ok(()),
        }
    }
}

/// The chosen GPUs of a node, and the memory that the pod gets there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// The node's name.
    pub node: String,
    /// The chosen GPUs, as many as requested, in ascending order of index.
    pub gpus: Vec<ChosenGpu>,
    /// The number of units that the pod gets in total.
    pub units: u64,
    /// The memory that the pod gets of each GPU; 0 for whole GPUs ([`ChosenGpu::whole`]).
    pub memory: MiB,
}

/// A GPU of a [`Choice`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChosenGpu {
    /// The GPU's UUID; `None` if it is not known.
    pub uuid: Option<String>,
    /// The index among the vendor's GPUs.
    pub index: u32,
    /// The GPU's memory if the pod gets the whole GPU; `None` for a share.
    pub whole: Option<MiB>,
}

/// Why a node does not take a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// There is no such node, or the extender has not seen it yet.
    UnknownNode,
    /// The node's GPUs are not offered to any pod.
    Unusable(Unusable),
    /// None of the GPUs that the pod accepts has enough memory free.
    NoGpuFits,
    /// Fewer GPUs than requested, among those that the pod accepts, have enough memory free.
    TooFewFit(Ask),
    /// The pod accepts none of the node's GPUs, or fewer than it requests, regardless of free memory.
    NoGpuTaken(Ask),
    /// The pod requests several GPUs, but the node is known only by gpushare's capacities, and gpushare's device plugin gives a
    /// container one GPU.
    OneGpuOnly,
    /// The pod's rules cannot be read.
    Unreadable(Error),
    /// The request is more MiB than can be counted.
    Uncountable(Ask),
    /// The pod requests whole GPUs of a vendor of which the node has none that are offered as a whole.
    NoneOfVendor(Vendor),
    /// Fewer whole GPUs of the vendor than requested are free, among those that the pod accepts.
    TooFewWhole(Ask),
}

/// The maximum length in bytes of a pod's rules in a refusal.
const WANTED_BYTES: usize = 100;

/// The maximum length in bytes of a refusal in filter's answer. The answer has one refusal per node, so kube-scheduler receives
/// less than 2 MB for 5,000 nodes, whatever the pod and the nodes contain.
const FILTER_TEXT_BYTES: usize = 300;

impl Refusal {
    /// Return the text for the extender's `FailedNodes`. Where gpushare would refuse, this is gpushare's own sentence, character
    /// for character, because people and tools search for it.
    pub fn filter_message(&self, node: &str) -> String {
        self.filter_text(node).into_owned()
    }

    /// Return the text of [`Refusal::filter_message`], without copying it if it does not name the node.
    pub fn filter_text(&self, node: &str) -> Cow<'static, str> {
        let text = self.whole_text(node);
        match text.len() > FILTER_TEXT_BYTES {
            true => Cow::Owned(shortened(&text, FILTER_TEXT_BYTES).into_owned()),
            false => text,
        }
    }

    fn whole_text(&self, node: &str) -> Cow<'static, str> {
        Cow::Owned(match self {
            Refusal::NoGpuFits => return Cow::Borrowed("Insufficient GPU Memory in one device"),
            Refusal::UnknownNode => format!("node {node:?} not found"),
            Refusal::Unusable(Unusable::NotShared) => format!("The node {node} is not for GPU share, need skip"),
            Refusal::Unusable(why) => format!("node {node} is not offered: {why}"),
            Refusal::Uncountable(ask) => format!("the pod asks for {ask}"),
            // The text is the same for all nodes, so that kube-scheduler counts them together.
            Refusal::NoGpuTaken(ask) if ask.gpus > 1 => {
                let wanted = ask.wanted().map(|rules| format!(" {rules}")).unwrap_or_default();
                format!("fewer than {} GPUs{wanted}", ask.gpus)
            }
            Refusal::NoGpuTaken(ask) => format!("no GPU {}", ask.wanted().unwrap_or_default()),
            Refusal::NoneOfVendor(vendor) => format!("no {vendor} GPUs that Divvy offers"),
            Refusal::TooFewWhole(ask) => {
                let vendor = ask.whole.unwrap_or_default();
                let rules = ask.wanted().map(|rules| format!(" {rules}")).unwrap_or_default();
                match ask.gpus {
                    1 => format!("no free {vendor} GPU{rules}"),
                    gpus => format!("fewer than {gpus} free {vendor} GPUs{rules}"),
                }
            }
            Refusal::TooFewFit(ask) => format!(
                "fewer than {} GPUs with {} free",
                ask.gpus,
                ask.memory.unwrap_or(MiB(u64::MAX))
            ),
            Refusal::OneGpuOnly => return Cow::Borrowed("several GPUs for a pod need Divvy's agent on the node"),
            Refusal::Unreadable(error) => format!("the pod's annotations: {error}"),
        })
    }
}

impl Ledger {
    /// Prepare to check many nodes for one pod.
    pub fn question<'a>(&'a self, ask: &'a Ask, uid: &'a str) -> Question<'a> {
        Question {
            ledger: self,
            ask,
            taste: Taste::of(ask),
            uid,
            bound: self.bound_to(uid),
            reserved: self.reservations_of(uid),
        }
    }

    /// Check one node with [`Question::fits`].
    pub fn fits(&self, node: &str, ask: &Ask, uid: &str) -> Result<(), Refusal> {
        self.question(ask, uid).fits(node)
    }

    /// Return what is reserved for a pod on a node, the most recent first, if the pod could get it now: the GPUs are there and
    /// healthy, and have room for it next to what other pods hold.
    pub fn reserved_and_good(&self, uid: &str, node: &str) -> Option<&Held> {
        let reservation = self.reservation(uid, node)?;
        let view = self.node(node)?;
        let state = view.state()?;
        let own: Vec<_> = reservation.possible().flat_map(|held| self.parts(state, held)).collect();
        let good = |held: &&Held| {
            let parts = self.parts(state, held);
            let mut rooms = parts.iter().map(|part| {
                let position = part.position?;
                let own = own.iter().filter(|own| own.position == Some(position));
                let own = own.fold(MiB::ZERO, |sum, own| sum.saturating_add(own.memory));
                let gpu = state.gpus.get(position)?;
                let well = gpu.health == Health::Ok && state.unusable(gpu.offered_as()).is_none();
                (well && view.free_beside(position, own) >= part.memory).then_some(())
            });
            !parts.is_empty() && rooms.all(|room| room.is_some())
        };
        reservation.possible().find(good)
    }

    /// Choose the GPU of a node: the one with the least memory left that is enough, on a tie the one with the lowest index, as
    /// gpushare does (`docs/compatibility/gpushare.md`). If several GPUs are requested, choose those that work best together. A
    /// GPU that failed or is lost is never chosen.
    pub fn choose(&self, node: &str, ask: &Ask) -> Result<Choice, Refusal> {
        let view = self.known(node)?;
        let taste = Taste::of(ask);
        let (state, memory) = offered(&view, &taste)?;
        let positions = best(&view, &taste)?;
        Ok(chosen(state, &positions, ask, memory))
    }

    /// Choose the GPUs at these positions of [`NodeState::gpus`], if they are as many as requested and each of them is healthy
    /// and has room.
    pub fn choose_at(&self, node: &str, positions: &[usize], ask: &Ask) -> Result<Choice, Refusal> {
        let view = self.known(node)?;
        let taste = Taste::of(ask);
        let (state, memory) = offered(&view, &taste)?;
        let mut positions = positions.to_vec();
        positions.sort_unstable();
        positions.dedup();
        let good = positions.iter().all(|position| view.liking(*position, &taste).is_some());
        if positions.len() != ask.gpus || !good || !whole::enough(&view, &taste) {
            return Err(short(ask));
        }
        Ok(chosen(state, &positions, ask, memory))
    }

    fn known<'a>(&'a self, node: &str) -> Result<NodeView<'a>, Refusal> {
        self.node(node)
            .filter(|view| view.state().is_some())
            .ok_or(Refusal::UnknownNode)
    }
}

/// A pod that needs a node. What is known about the pod is looked up once for all nodes.
#[derive(Debug, Clone)]
pub struct Question<'a> {
    ledger: &'a Ledger,
    ask: &'a Ask,
    taste: Taste<'a>,
    uid: &'a str,
    bound: Option<&'a str>,
    reserved: Option<&'a BTreeMap<String, Reservation>>,
}

impl Question<'_> {
    /// Report whether the pod may go to a node, for filter. The answer is advisory: nothing is reserved. What is already reserved
    /// or bound for the pod on this node is its own, and fits as long as it is good.
    ///
    /// A pod that requests no memory fits every known node. For a node that is offered, this mostly compares one number, which
    /// was counted when the node changed.
    pub fn fits(&self, node: &str) -> Result<(), Refusal> {
        let view = self.ledger.known(node)?;
        if self.ask.is_nothing() || self.bound == Some(node) {
            return Ok(());
        }
        if self.reserved.is_some_and(|nodes| nodes.contains_key(node)) && self.ledger.reserved_and_good(self.uid, node).is_some()
        {
            return Ok(());
        }
        let (state, memory) = offered(&view, &self.taste)?;
        if self.ask.whole.is_some() {
            return match whole::enough(&view, &self.taste) {
                true => Ok(()),
                false => Err(short(self.ask)),
            };
        }
        if view.most_free() < memory {
            return Err(short(self.ask));
        }
        if self.ask.rules.is_none() && !view.keeps_from(self.ask) {
            return Ok(());
        }
        let good = (0..state.gpus.len()).filter(|position| view.liking(*position, &self.taste).is_some());
        if good.take(self.ask.gpus).count() < self.ask.gpus {
            return Err(short(self.ask));
        }
        Ok(())
    }
}

/// Return the node's GPUs if those of the requested kind are offered at all, and the memory requested of each.
fn offered<'a>(view: &NodeView<'a>, taste: &Taste<'_>) -> Result<(&'a NodeState, MiB), Refusal> {
    let ask = taste.ask();
    let state = view.state().ok_or(Refusal::UnknownNode)?;
    if let Some(why) = state.unusable(ask.whole) {
        return Err(Refusal::Unusable(why.clone()));
    }
    if let Some(vendor) = ask.whole.filter(|_| !state.gpus.iter().any(|gpu| ask.is_for(gpu))) {
        return Err(Refusal::NoneOfVendor(vendor));
    }
    if let Some(Err(error)) = ask.rules.as_deref() {
        return Err(Refusal::Unreadable(error.clone()));
    }
    if ask.rules.is_some() && state.gpus.iter().filter(|gpu| taste.takes(gpu)).take(ask.gpus).count() < ask.gpus {
        return Err(Refusal::NoGpuTaken(ask.clone()));
    }
    if takes_one_at_most(state, ask) {
        return Err(Refusal::OneGpuOnly);
    }
    Ok((state, ask.memory.ok_or_else(|| Refusal::Uncountable(ask.clone()))?))
}

/// Report whether the pod requests more than one GPU of a node where a pod can only get one: gpushare's plugin gives no more.
pub(crate) fn takes_one_at_most(state: &NodeState, ask: &Ask) -> bool {
    ask.whole.is_none() && ask.gpus > 1 && state.source != Source::Inventory
}

/// Return the refusal for too few GPUs with room.
fn short(ask: &Ask) -> Refusal {
    match ask.gpus {
        _ if ask.whole.is_some() => Refusal::TooFewWhole(ask.clone()),
        1 => Refusal::NoGpuFits,
        _ => Refusal::TooFewFit(ask.clone()),
    }
}

/// Choose the GPUs of a node for a pod, as positions in ascending order.
pub(crate) fn best(view: &NodeView<'_>, taste: &Taste<'_>) -> Result<Vec<usize>, Refusal> {
    let (state, _) = offered(view, taste)?;
    let positions = match taste.ask().gpus {
        _ if !whole::enough(view, taste) => None,
        1 => best_fit(view, taste).map(|position| vec![position]),
        _ => multi_gpu::best(view, taste, 0..state.gpus.len()),
    };
    positions.ok_or_else(|| short(taste.ask()))
}

/// Choose, among the GPUs with room, the most preferred; on a tie the one with the least left, then the lowest index.
fn best_fit(view: &NodeView<'_>, taste: &Taste<'_>) -> Option<usize> {
    let gpus = view.state()?.gpus.iter().enumerate();
    gpus.filter_map(|(position, gpu)| {
        let liking = view.liking(position, taste)?;
        Some((Reverse(liking), view.free_for(position, taste.ask()), gpu.index, position))
    })
    .min()
    .map(|(.., position)| position)
}

impl NodeView<'_> {
    /// Return the GPUs of this node that fit best, in ascending order of position.
    ///
    /// # Errors
    /// Why the pod has no room here.
    pub fn best(&self, taste: &Taste<'_>) -> Result<Vec<usize>, Refusal> {
        best(self, taste)
    }

    /// Return as many of the GPUs at these positions as the pod asks for, those that work best together, in ascending order; `None` if too few of them
    /// have room.
    pub fn best_of(&self, taste: &Taste<'_>, positions: impl IntoIterator<Item = usize>) -> Option<Vec<usize>> {
        multi_gpu::best(self, taste, positions)
    }

    /// Return how much a pod likes the GPU at this position: higher is better. `None` if the pod does not accept the GPU, or if
    /// the GPU has no room.
    pub fn liking(&self, position: usize, taste: &Taste<'_>) -> Option<u64> {
        let ask = taste.ask();
        let state = self.state()?;
        let gpu = state.gpus.get(position)?;
        if takes_one_at_most(state, ask) {
            return None;
        }
        let good = gpu.health == Health::Ok && self.free_for(position, ask) >= ask.needs(gpu)? && taste.takes(gpu);
        good.then(|| gpu.preference(ask.rules().and_then(|rules| rules.prefer)))
    }
}

fn chosen(state: &NodeState, positions: &[usize], ask: &Ask, memory: MiB) -> Choice {
    let gpus = positions.iter().filter_map(|position| state.gpus.get(*position));
    let gpu = |gpu: &GpuState| ChosenGpu {
        uuid: gpu.uuid.clone(),
        index: gpu.index,
        whole: ask.whole.map(|_| gpu.capacity),
    };
    Choice {
        node: state.name.clone(),
        gpus: gpus.map(gpu).collect(),
        units: ask.units,
        memory,
    }
}

impl Choice {
    /// Return the allocation to write to the pod: the same amount of each GPU, for the pod and for each of its containers; or
    /// whole GPUs, divided among the containers ([`WholeRequest::gpus_of`]). On a
    /// node known only by gpushare's capacities, a GPU has no name other than its index, so gpushare's form is all that can be
    /// written truthfully. Either side can resolve the index later.
    pub fn held(&self, request: &PodRequest, unit: MemoryUnit) -> Held {
        let count = self.gpus.len().max(1) as u64;
        let uuids: Option<Vec<&String>> = self.gpus.iter().map(|gpu| gpu.uuid.as_ref()).collect();
        let Some(uuids) = uuids else {
            let gpus = self.gpus.iter().map(|gpu| (gpu.index, self.units / count));
            return Held::Legacy(LegacyAllocation { gpus: gpus.collect() });
        };
        if let Some(request) = request
            .whole
            .as_deref()
            .filter(|_| self.gpus.iter().any(|gpu| gpu.whole.is_some()))
        {
            return Held::Allocation(self.whole(request, &uuids));
        }
        let containers = request.memory_containers().map(|container| {
            // This is not more than the pod's share, which was countable.
            let memory = unit.memory(container.units.div_ceil(count)).unwrap_or(self.memory);
            let share = |uuid: &&String| ContainerShare {
                uuid: (*uuid).clone(),
                memory,
                cores: 0,
            };
            (container.name.clone(), uuids.iter().map(share).collect())
        });
        let share = |uuid: &&String| GpuShare {
            uuid: (*uuid).clone(),
            memory: self.memory,
            cores: 0,
            whole: false,
        };
        Held::Allocation(Allocation {
            v: 1,
            containers: containers.collect(),
            gpus: uuids.iter().map(share).collect(),
        })
    }

    fn whole(&self, request: &WholeRequest, uuids: &[&String]) -> Allocation {
        let memory = |at: usize| self.gpus.get(at).and_then(|gpu| gpu.whole).unwrap_or(self.memory);
        let containers = request.gpus_of().into_iter().map(|(container, range)| {
            let own = uuids.iter().enumerate().filter(|(at, _)| range.contains(&(*at as u64)));
            let share = |(at, uuid): (usize, &&String)| ContainerShare {
                uuid: (*uuid).clone(),
                memory: memory(at),
                cores: 0,
            };
            (container.name.clone(), own.map(share).collect())
        });
        let share = |(at, uuid): (usize, &&String)| GpuShare {
            uuid: (*uuid).clone(),
            memory: memory(at),
            cores: 0,
            whole: true,
        };
        Allocation {
            v: 1,
            containers: containers.collect(),
            gpus: uuids.iter().enumerate().map(share).collect(),
        }
    }
}
