use std::cmp::Reverse;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::hash::BuildHasherDefault;

use divvy_model::{Pod, Vendor};

use super::divvy::mixture::Mixture;
use super::{
    CacheLimits, Cost, CostTerm, Decision, Demand, GpuGroup, Mix, Model, ModelSet, Models, NodeId, NodeShape, Placer, Policy,
    demand_of, from_ledger, rank,
};
use crate::mixer::Mixer;
use crate::ranking::Ranking;
use crate::whole;
use divvy_placement::{Ask, Choice, Ledger, LedgerNode, Taste};

/// A ledger's nodes, ranked by a policy.
///
/// The fleet follows the ledger: when a node changes, only that node is updated, and no request starts from scratch. A node with
/// GPUs of several products is several nodes in the [`Placer`], one for each group of identical GPUs. Its best group counts.
///
/// The fleet only ranks nodes. The ledger decides whether a pod fits.
#[derive(Debug)]
pub struct Fleet {
    placer: Placer,
    models: Models,
    /// The version of the ledger that the fleet read last.
    seen: u64,
    nodes: HashMap<String, Groups, BuildHasherDefault<Mixer>>,
    /// The mix of requests for FGD, which does not learn on its own.
    history: Mixture,
    /// The number of groups of each kind.
    kinds: BTreeMap<GroupKind, usize>,
    limits: CacheLimits,
    /// The number of nodes that also offer shared GPUs as a whole.
    offer_whole: usize,
}

/// A kind of group: GPU product, GPU size, and the base-2 logarithm of the CPU. A policy keeps tables for each kind. Nodes
/// publish their own products and sizes, so there could be as many kinds as GPUs.
type GroupKind = (Model, u32, u32);

fn kind_of(shape: &NodeShape) -> GroupKind {
    // Machines with about the same number of cores are alike.
    (shape.model, shape.gpu_size, shape.cpu_milli.checked_ilog2().unwrap_or(0))
}

/// The groups of a node.
#[derive(Debug)]
struct Groups {
    /// The number of the node's group, if it has only one, of the default vendor's GPUs, as almost all nodes have. A request names
    /// thousands of nodes, and reading the number from here avoids a cache miss for each of them.
    only: Option<NodeId>,
    all: Vec<IdenticalGpus>,
    /// Whether the node also offers its GPUs as a whole.
    whole: bool,
}

impl Groups {
    fn new(all: Vec<IdenticalGpus>, whole: bool) -> Groups {
        let only = match all.as_slice() {
            [group] if group.vendor == Vendor::default() => group.id,
            _ => None,
        };
        Groups { only, all, whole }
    }
}

/// A group of identical GPUs of a node.
#[derive(Debug)]
struct IdenticalGpus {
    /// The group's number in the placer. It is `None` if there are already [`CacheLimits::kinds`] other kinds; then the ledger's best
    /// fit applies.
    id: Option<NodeId>,
    vendor: Vendor,
    shape: NodeShape,
    positions: Vec<usize>,
}

/// The cost of a pod on a node in detail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacementOffer {
    /// The node's name.
    pub node: String,
    /// The GPUs that the pod would get, by their positions in [`divvy_placement::NodeState::gpus`].
    pub gpus: Vec<usize>,
    /// The cost in the policy's own unit: lower is better.
    pub cost: i64,
    /// The terms of the cost. The list is empty if the policy's cost is a single number.
    pub terms: Vec<CostTerm>,
}

impl Fleet {
    /// Create a fleet without nodes that has learned nothing.
    pub fn new(policy: Policy, limits: CacheLimits) -> Fleet {
        Fleet {
            placer: Placer::with_limits(policy, limits),
            models: Models::default(),
            seen: 0,
            nodes: HashMap::default(),
            history: Mixture::of_at_most(limits.classes),
            kinds: BTreeMap::new(),
            limits,
            offer_whole: 0,
        }
    }

    /// Return the policy.
    pub fn policy(&self) -> Policy {
        self.placer.policy()
    }

    /// Read what has changed in the ledger since the last call. All calls must pass the same ledger.
    pub fn follow(&mut self, ledger: &Ledger) {
        if self.seen == ledger.version() {
            return;
        }
        if ledger.last_gone() > self.seen {
            let gone = self.nodes.keys().filter(|name| ledger.node(name).is_none());
            for name in gone.cloned().collect::<Vec<String>>() {
                self.forget(&name);
            }
        }
        for view in ledger.changed_since(self.seen) {
            if self.models.is_full() {
                self.forget_unused_models();
            }
            self.take_in(&view);
        }
        self.seen = ledger.version();
        self.placer.forget_unused_shapes();
        self.placer.prepare();
    }

    fn forget(&mut self, name: &str) {
        let known = self.nodes.remove(name);
        self.offer_whole -= usize::from(known.as_ref().is_some_and(|groups| groups.whole));
        for group in known.into_iter().flat_map(|groups| groups.all) {
            let Some(id) = group.id else { continue };
            self.placer.remove(id);
            if let Entry::Occupied(mut count) = self.kinds.entry(kind_of(&group.shape)) {
                *count.get_mut() -= 1;
                if *count.get() == 0 {
                    count.remove();
                }
            }
        }
    }

    /// Forget products that no GPU has any longer. Nodes choose these names, and unused names must not exhaust the numbers for
    /// new ones.
    fn forget_unused_models(&mut self) {
        let groups = self.nodes.values().flat_map(|groups| &groups.all);
        self.models
            .retain(groups.fold(ModelSet::NONE, |used, group| used.with(group.shape.model)));
    }

    fn take_in(&mut self, view: &LedgerNode<'_>) {
        let groups = from_ledger(view, &mut self.models);
        let whole = offers_whole(view);
        if let Some(known) = self.nodes.get_mut(view.name()) {
            self.offer_whole = self.offer_whole + usize::from(whole) - usize::from(known.whole);
            known.whole = whole;
        }
        let same = |known: &IdenticalGpus, now: &GpuGroup| {
            (known.vendor, known.shape, &known.positions) == (now.vendor, now.shape, &now.positions)
        };
        let known = self.nodes.get(view.name()).map_or(&[][..], |groups| &groups.all);
        if known.len() == groups.len() && known.iter().zip(&groups).all(|(known, now)| same(known, now)) {
            for (known, now) in known.iter().zip(&groups) {
                if let Some(id) = known.id {
                    self.placer.moved(id, now.free);
                }
            }
            return;
        }
        self.forget(view.name());
        let name = view.name();
        let add = |(number, group): (usize, GpuGroup)| {
            let kind = kind_of(&group.shape);
            let known = self.kinds.contains_key(&kind) || self.kinds.len() < self.limits.kinds;
            IdenticalGpus {
                id: known.then(|| {
                    *self.kinds.entry(kind).or_default() += 1;
                    self.placer.add(group.shape, group.free, group_rank(name, number))
                }),
                vendor: group.vendor,
                shape: group.shape,
                positions: group.positions,
            }
        };
        let added: Vec<IdenticalGpus> = groups.into_iter().enumerate().map(add).collect();
        if !added.is_empty() {
            self.offer_whole += usize::from(whole);
            self.nodes.insert(name.to_owned(), Groups::new(added, whole));
        }
    }

    /// Learn from a pod that arrived. Call this once for each pod.
    pub fn arrived(&mut self, pod: &Pod, ledger: &Ledger) {
        let Some(demand) = self.learnt_from(pod, ledger) else { return };
        match self.policy() {
            Policy::Fgd => {
                if self.history.add(&demand) {
                    self.placer.set_mix(&self.history.fit().into_iter().collect());
                }
            }
            _ => self.placer.arrived(&demand),
        }
    }

    /// Learn from the pods that the ledger knows, and forget everything learned before.
    pub fn learn(&mut self, ledger: &Ledger) {
        let mix: Mix = ledger
            .pods()
            .filter_map(|pod| self.learnt_from(pod, ledger))
            .map(|demand| (demand, 1))
            .collect();
        let mix = mix.most_frequent(self.limits.classes);
        self.history.set(&mix);
        self.placer.set_mix(&mix);
    }

    /// Return the request that the fleet learns from a pod. Nothing is learned from a pod with whole GPUs if only other
    /// device plugins offer whole GPUs in the cluster.
    fn learnt_from(&self, pod: &Pod, ledger: &Ledger) -> Option<Demand> {
        let serves = pod.request.whole.is_none() || self.offer_whole > 0;
        serves.then(|| learnt_from(pod, ledger)).flatten()
    }

    /// Set by hand whether pods end; see [`Placer::set_pods_end`].
    pub fn set_pods_end(&mut self, said: Option<bool>) {
        self.placer.set_pods_end(said);
    }

    /// Read the current states of all nodes; see [`Placer::refresh`].
    pub fn refresh(&mut self) {
        self.placer.refresh();
    }

    /// Rank these nodes for a pod.
    ///
    /// If a pod has rules, only the GPUs that it accepts count. If it prefers some GPUs, only nodes with room on the most
    /// preferred ones get a cost. A pod that asks for several GPUs gets GPUs of one product and size, because the policies know
    /// no other sets. If no node has enough GPUs of one product and size, the best node is one where the pod can have different
    /// GPUs.
    ///
    /// The policies know only shared GPUs, of which a pod may also request all memory. For MIG devices, and for whole GPUs of a vendor whose GPUs are not shared
    /// by default, a node's cost is its number of free GPUs, so that free GPUs stay together for pods that need many.
    pub fn rank<'n, I>(&mut self, pod: &Pod, ask: &Ask, nodes: I, ledger: &Ledger) -> Ranking
    where
        I: IntoIterator<Item = &'n str> + Clone,
    {
        if ask.whole.is_some_and(|kind| !kind.is_of_shared_gpus()) {
            return whole::rank(pod, ask, nodes, ledger);
        }
        let mut ids: Vec<NodeId> = Vec::new();
        // For each id, the position of its node.
        let mut of: Vec<u32> = Vec::new();
        let mut count: u32 = 0;
        let mut most = 0;
        let taste = Taste::of(ask);
        for name in nodes.clone() {
            if ask.rules.is_none() {
                // Such a pod gets GPUs of the default vendor.
                let is_for = |group: &&IdenticalGpus| group.vendor == Vendor::default();
                match self.nodes.get(name) {
                    Some(Groups { only: Some(id), .. }) => ids.push(*id),
                    Some(Groups { all, .. }) => ids.extend(all.iter().filter(is_for).filter_map(|group| group.id)),
                    None => {}
                }
            } else if let (Some(view), Some(groups)) = (ledger.node(name), self.nodes.get(name)) {
                for group in &groups.all {
                    let (Some(liking), Some(id)) = (group.liking(&view, &taste), group.id) else {
                        continue;
                    };
                    if liking > most {
                        ids.clear();
                        of.clear();
                        most = liking;
                    }
                    if liking == most {
                        ids.push(id);
                    }
                }
            }
            of.resize(ids.len(), count);
            count += 1;
        }
        let mut costs = vec![None; count as usize];
        let Some(demand) = demand_of(pod, ask) else {
            return Ranking { costs, best: None };
        };
        let found = self.placer.costs_among(&demand, rank(&pod.uid), &ids);
        let best = self
            .placer
            .best_of(&ids, &found)
            .and_then(|at| of.get(at))
            .map(|at| *at as usize);
        let best = best.or_else(|| {
            let nodes = nodes.into_iter().enumerate().filter(|_| ask.gpus > 1);
            let question = ledger.question(ask, &pod.uid);
            let fits = nodes.filter(|(_, node)| question.fits(node).is_ok());
            fits.min_by_key(|(_, node)| (rank(node), *node)).map(|(at, _)| at)
        });
        for (at, cost) in of.iter().zip(found) {
            let known = &mut costs[*at as usize];
            *known = lower(*known, cost);
        }
        Ranking { costs, best }
    }

    /// Choose the GPUs for a pod on a node. The policy's choice is taken if the ledger agrees that the pod accepts these GPUs and
    /// that they have room; otherwise, the choice is the best fit. The result is `None` if the node has no room.
    pub fn choose(&mut self, pod: &Pod, ask: &Ask, node: &str, ledger: &Ledger) -> Option<Choice> {
        let positions = self.gpus(pod, ask, node, ledger);
        let chosen = positions.and_then(|positions| ledger.choose_at(node, &positions, ask).ok());
        chosen.or_else(|| ledger.choose(node, ask).ok())
    }

    /// Return the policy's choice of GPUs on a node, by their positions in [`divvy_placement::NodeState::gpus`]. The result is
    /// `None` if the policy sees no room.
    pub fn gpus(&mut self, pod: &Pod, ask: &Ask, node: &str, ledger: &Ledger) -> Option<Vec<usize>> {
        let demand = demand_of(pod, ask)?;
        let view = ledger.node(node)?;
        let taste = Taste::of(ask);
        let (_, ids) = self.liked(&view, &taste)?;
        let decision = self.placer.decide_among(&demand, rank(&pod.uid), &ids)?;
        self.positions(&view, &taste, decision)
    }

    /// List all nodes on which the policy sees room on a GPU that the pod accepts, best first: sorted by the pod's preference,
    /// then by cost. Each node is evaluated separately, so this is slow.
    pub fn offers(&mut self, pod: &Pod, ask: &Ask, ledger: &Ledger) -> Vec<PlacementOffer> {
        let Some(demand) = demand_of(pod, ask) else {
            return Vec::new();
        };
        let mut offers: Vec<(Reverse<u64>, i64, u64, PlacementOffer)> = Vec::new();
        let taste = Taste::of(ask);
        for view in ledger.nodes() {
            let Some((liking, ids)) = self.liked(&view, &taste) else {
                continue;
            };
            let costs = self.placer.costs_among(&demand, rank(&pod.uid), &ids);
            let best = self.placer.best_of(&ids, &costs);
            let cost = best.and_then(|at| costs.get(at).copied().flatten());
            let decision = self.placer.decide_among(&demand, rank(&pod.uid), &ids);
            let (Some(cost), Some(decision)) = (cost, decision) else {
                continue;
            };
            let Some(gpus) = self.positions(&view, &taste, decision) else {
                continue;
            };
            let offer = PlacementOffer {
                node: view.name().to_owned(),
                gpus,
                cost: cost.amount,
                terms: self.placer.terms(&demand, decision.node),
            };
            offers.push((Reverse(liking), cost.amount, rank(view.name()), offer));
        }
        // On a tie, the first by name, because the ledger lists the nodes by name.
        offers.sort_by_key(|(liking, cost, rank, _)| (*liking, *cost, *rank));
        offers.into_iter().map(|(.., offer)| offer).collect()
    }

    /// Among the GPUs with room on a node, return how much the pod likes the most preferred ones, and the groups that contain
    /// them. The result is `None` if no GPU has room.
    fn liked(&self, view: &LedgerNode<'_>, taste: &Taste<'_>) -> Option<(u64, Vec<NodeId>)> {
        let groups = &self.nodes.get(view.name())?.all;
        let likings = groups
            .iter()
            .filter_map(|group| Some((group.liking(view, taste)?, group.id?)));
        let likings: Vec<(u64, NodeId)> = likings.collect();
        let most = likings.iter().map(|(liking, _)| *liking).max()?;
        let ids = likings.into_iter().filter(|(liking, _)| *liking == most).map(|(_, id)| id);
        Some((most, ids.collect()))
    }

    /// Translate a decision to positions in [`divvy_placement::NodeState::gpus`].
    ///
    /// To the policy, the GPUs of a group are alike, but not always to the pod: if the pod prefers another GPU of the group, it
    /// gets that one. A pod with several GPUs gets those that work best together.
    fn positions(&self, view: &LedgerNode<'_>, taste: &Taste<'_>, decision: Decision) -> Option<Vec<usize>> {
        let ask = taste.ask();
        let mut groups = self.nodes.get(view.name())?.all.iter();
        let group = groups.find(|group| group.id == Some(decision.node))?;
        if ask.gpus > 1 {
            return view.best_of(taste, group.positions.iter().copied());
        }
        let position = group.positions.get(decision.gpus.positions().next()?).copied()?;
        if ask.rules.is_none() || view.liking(position, taste) == group.liking(view, taste) {
            return Some(vec![position]);
        }
        view.best(taste).ok()
    }
}

impl IdenticalGpus {
    /// Among the GPUs of the group that the pod accepts and that have room, return how much the pod likes the best one; for a pod
    /// that needs K GPUs, the K-th best. The result is `None` if there are fewer.
    fn liking(&self, view: &LedgerNode<'_>, taste: &Taste<'_>) -> Option<u64> {
        let ask = taste.ask();
        if ask.memory.is_none_or(|memory| view.most_free() < memory) {
            return None;
        }
        let mut likings = self.positions.iter().filter_map(|position| view.liking(*position, taste));
        if ask.rules().is_none_or(|rules| rules.prefer.is_none()) {
            // Without a preference, all GPUs are alike.
            return likings.nth(ask.gpus - 1);
        }
        if ask.gpus == 1 {
            return likings.max();
        }
        let mut likings: Vec<u64> = likings.collect();
        likings.sort_unstable_by_key(|liking| Reverse(*liking));
        likings.get(ask.gpus - 1).copied()
    }
}

fn group_rank(name: &str, number: usize) -> u64 {
    match number {
        0 => rank(name),
        // The name of a node never contains a slash.
        number => rank(&format!("{name}/{number}")),
    }
}

/// Return the better of two costs: an exact cost is better than a guess; otherwise, the lower amount is better.
fn lower(one: Option<Cost>, other: Option<Cost>) -> Option<Cost> {
    let key = |cost: &Cost| (!cost.exact, cost.amount);
    [one, other].into_iter().flatten().min_by_key(key)
}

/// Report whether a node offers shared GPUs as a whole as well.
fn offers_whole(view: &LedgerNode<'_>) -> bool {
    view.state()
        .is_some_and(|state| state.gpus.iter().any(|gpu| gpu.whole.is_some() && gpu.is_shared()))
}

/// Return the request from which the policy learns, to predict the pods to come. Nothing is learned from pods without a GPU: they
/// may belong to a DaemonSet on every node, or go to nodes without GPUs. CPU is rounded up to two significant digits, so that
/// there are few classes, however exactly users write their requests.
fn learnt_from(pod: &Pod, ledger: &Ledger) -> Option<Demand> {
    let ask = Ask::of(&pod.request, ledger.unit());
    let demand = demand_of(pod, &ask).filter(|demand| demand.gpus > 0)?;
    let digits = demand.cpu_milli.checked_ilog10().unwrap_or(0);
    let step = 10_u32.pow(digits.saturating_sub(1));
    let cpu_milli = demand.cpu_milli.div_ceil(step).saturating_mul(step);
    Some(Demand { cpu_milli, ..demand })
}
