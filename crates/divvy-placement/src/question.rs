//! Whether a pod fits on the nodes of the ledger, and which GPUs it gets.

use std::collections::BTreeMap;

use divvy_model::{Health, Held, Pod, WholeKind};

use crate::amount::Amount;
use crate::ask::Ask;
use crate::choice::Choice;
use crate::ledger::Ledger;
use crate::node_view::LedgerNode;
use crate::refusal::NodeRefusal;
use crate::reservation::Reservation;
use crate::taste::Taste;
use crate::waiting::WaitReason;
use crate::{choose, parts, whole};

impl Ledger {
    /// Prepare to check many nodes for one pod.
    pub fn question<'a>(&'a self, ask: &'a Ask, uid: &'a str) -> PlacementQuestion<'a> {
        PlacementQuestion {
            ledger: self,
            ask,
            taste: Taste::of(ask),
            uid,
            bound: self.bound_to(uid),
            reserved: self.reservations_of(uid),
        }
    }

    /// Return what is in a pod's way on all nodes together ([`PlacementQuestion::wait_reason`]).
    pub fn wait_reason(&self, pod: &Pod) -> WaitReason {
        let ask = Ask::of_pod(pod, self.unit());
        self.question(&ask, &pod.uid)
            .wait_reason(self.nodes.keys().map(String::as_str))
    }

    /// Check one node with [`PlacementQuestion::fits`].
    pub fn fits(&self, node: &str, ask: &Ask, uid: &str) -> Result<(), NodeRefusal> {
        self.question(ask, uid).fits(node)
    }

    /// Return the most recent allocation that is reserved for a pod on a node and that the pod could get now: its GPUs are
    /// there and healthy, and have room for it in addition to what other pods hold.
    pub fn reserved_and_good(&self, uid: &str, node: &str) -> Option<&Held> {
        let reservation = self.reservation(uid, node)?;
        let view = self.node(node)?;
        let state = view.state()?;
        let own: Vec<_> = reservation
            .possible()
            .flat_map(|held| parts::of_held(held, state, self.unit()))
            .collect();
        let good = |held: &&Held| {
            let is_whole = matches!(held, Held::Allocation(allocation) if allocation.gpus.iter().any(|share| share.whole));
            let parts = parts::of_held(held, state, self.unit());
            let mut rooms = parts.iter().map(|part| {
                let position = part.position?;
                let own = own.iter().filter(|own| own.position == Some(position));
                let own = own.fold(Amount::NONE, |sum, own| sum.plus(own.amount()));
                let gpu = state.gpus.get(position)?;
                let way = is_whole.then_some(WholeKind::Gpu(gpu.vendor));
                let is_offered = !is_whole || gpu.whole.is_some();
                let well = gpu.health == Health::Ok && is_offered && state.unusable(way).is_none();
                (well && view.entry.beside(position, own).covers(part.amount())).then_some(())
            });
            !parts.is_empty() && rooms.all(|room| room.is_some())
        };
        reservation.possible().find(good)
    }

    /// Choose the GPU of a node by best fit, as gpushare does (`docs/compatibility/gpushare.md`): the GPU with the least free
    /// memory that still suffices; on a tie, the one with the lowest index. If several GPUs are requested, choose the set that
    /// works best together. A GPU that failed or is lost is never chosen.
    pub fn choose(&self, node: &str, ask: &Ask) -> Result<Choice, NodeRefusal> {
        let view = self.known(node)?;
        let taste = Taste::of(ask);
        let (state, memory) = choose::offered(view.entry, &taste)?;
        let positions = choose::best(view.entry, &taste)?;
        Ok(Choice::of(state, &positions, ask, memory))
    }

    /// Choose the GPUs at these positions of [`crate::NodeState::gpus`], if they are as many as requested and each of them is healthy
    /// and has room.
    pub fn choose_at(&self, node: &str, positions: &[usize], ask: &Ask) -> Result<Choice, NodeRefusal> {
        let view = self.known(node)?;
        let taste = Taste::of(ask);
        let (state, memory) = choose::offered(view.entry, &taste)?;
        let mut positions = positions.to_vec();
        positions.sort_unstable();
        positions.dedup();
        let good = positions.iter().all(|position| view.liking(*position, &taste).is_some());
        let good = good && view.entry.spared(positions.iter().copied(), ask).len() == positions.len();
        if positions.len() != ask.gpus || !good || !whole::enough(view.entry, &taste) {
            return Err(choose::short(ask));
        }
        Ok(Choice::of(state, &positions, ask, memory))
    }

    fn known<'a>(&'a self, node: &str) -> Result<LedgerNode<'a>, NodeRefusal> {
        self.node(node)
            .filter(|view| view.state().is_some())
            .ok_or(NodeRefusal::UnknownNode)
    }
}

/// A pod that needs a node. What is known about the pod is looked up once for all nodes.
#[derive(Debug, Clone)]
pub struct PlacementQuestion<'a> {
    ledger: &'a Ledger,
    ask: &'a Ask,
    taste: Taste<'a>,
    uid: &'a str,
    bound: Option<&'a str>,
    reserved: Option<&'a BTreeMap<String, Reservation>>,
}

impl PlacementQuestion<'_> {
    /// Return what is in the pod's way on any of these nodes: what may change soonest. [`WaitReason::Other`] if a node has room, or if there is no
    /// node.
    pub fn wait_reason<'n>(&self, nodes: impl IntoIterator<Item = &'n str>) -> WaitReason {
        let mut nearest = WaitReason::Other;
        for node in nodes {
            match self.fits(node) {
                Ok(()) => return WaitReason::Other,
                Err(refusal) if nearest > WaitReason::NoRoom => nearest = nearest.min(self.wait_reason_on(node, &refusal)),
                Err(_) => {}
            }
        }
        nearest
    }

    /// Return what is in the pod's way on a node that refuses it.
    pub fn wait_reason_on(&self, node: &str, refusal: &NodeRefusal) -> WaitReason {
        match refusal.wait_reason() {
            WaitReason::NoRoom if !self.is_large_enough(node) => WaitReason::NoGpuFits,
            reason => reason,
        }
    }

    /// Report whether a node has as many GPUs that the pod accepts as it requests, each large enough for it if nothing were taken.
    fn is_large_enough(&self, node: &str) -> bool {
        let state = self.ledger.node(node).and_then(|view| view.state());
        let gpus = state.iter().flat_map(|state| &state.gpus);
        let large = gpus.filter(|gpu| self.ask.takes(gpu) && self.ask.needs(gpu).is_some_and(|memory| memory <= gpu.capacity));
        large.take(self.ask.gpus).count() == self.ask.gpus
    }

    /// Report whether the pod may go to a node, for filter. The answer is advisory: nothing is reserved. A pod that is already
    /// bound to this node fits. So does a pod with a reservation here, as long as it could still get the reserved GPUs.
    ///
    /// A pod that requests no memory fits every known node. For most nodes whose GPUs are offered, this compares only one number,
    /// which was computed when the node changed.
    pub fn fits(&self, node: &str) -> Result<(), NodeRefusal> {
        let view = self.ledger.known(node)?;
        if self.ask.is_nothing() || self.bound == Some(node) {
            return Ok(());
        }
        if self.reserved.is_some_and(|nodes| nodes.contains_key(node)) && self.ledger.reserved_and_good(self.uid, node).is_some()
        {
            return Ok(());
        }
        let (state, memory) = choose::offered(view.entry, &self.taste)?;
        if self.ask.is_left_to_another_plugin(state) {
            return Ok(());
        }
        if self.ask.whole.is_some() {
            return if whole::enough(view.entry, &self.taste) {
                Ok(())
            } else {
                Err(choose::short(self.ask))
            };
        }
        // What is free on GPUs under test counts only for the pods that test them.
        if view.most_free() < memory && !self.ask.tests() {
            return Err(choose::short(self.ask));
        }
        // The number is the most of any vendor's GPUs.
        if self.ask.rules.is_none() && !state.shares_other_vendors() && !view.entry.keeps_from(self.ask) {
            return Ok(());
        }
        let good = (0..state.gpus.len()).filter(|position| view.liking(*position, &self.taste).is_some());
        if view.entry.spared(good, self.ask).len() < self.ask.gpus {
            return Err(choose::short(self.ask));
        }
        Ok(())
    }
}
