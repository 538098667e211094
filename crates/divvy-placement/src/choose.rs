use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use divvy_model::legacy::LegacyAllocation;
use divvy_model::{Allocation, ContainerShare, Error, GpuRules, GpuShare, Health, Held, MemoryUnit, MiB, PodRequest};

use crate::{GpuState, Ledger, NodeState, NodeView, Reservation, Source, Unusable};

/// What a pod asks for, as far as placement goes: memory on one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ask {
    /// Units of gpu-mem, by Kubernetes' effective formula.
    pub units: u64,
    /// The same in MiB; `None` if that is more than can be counted.
    pub memory: Option<MiB>,
    /// Which GPUs it takes; `None`: any.
    pub rules: Option<Arc<Result<GpuRules, Error>>>,
}

impl Ask {
    /// This many units in a cluster with this unit.
    pub fn new(units: u64, unit: MemoryUnit) -> Ask {
        Ask {
            units,
            memory: unit.memory(units),
            rules: None,
        }
    }

    /// What a pod asks for. More than can be counted is `u64::MAX` units, which fit nowhere.
    pub fn of(request: &PodRequest, unit: MemoryUnit) -> Ask {
        Ask {
            rules: request.rules.clone(),
            ..Ask::new(request.effective_units().unwrap_or(u64::MAX), unit)
        }
    }

    /// Its rules, if it has any that can be read.
    pub fn rules(&self) -> Option<&GpuRules> {
        self.rules.as_deref()?.as_ref().ok()
    }

    /// Whether it takes this GPU, whatever is free on it.
    pub fn takes(&self, gpu: &GpuState) -> bool {
        match self.rules.as_deref() {
            None => true,
            Some(Ok(rules)) => rules.allow(&gpu.model, gpu.total, gpu.uuid.as_deref()),
            Some(Err(_)) => false,
        }
    }

    /// How much: `3 units (3072 MiB)`.
    pub fn amount(&self) -> String {
        let s = if self.units == 1 { "" } else { "s" };
        match self.memory {
            Some(memory) => format!("{} unit{s} ({memory})", self.units),
            None => format!("{} unit{s} (more memory than can be counted)", self.units),
        }
    }

    /// The rules in words, to be read after "a GPU"; `None` if any is taken.
    pub fn wanted(&self) -> Option<String> {
        self.rules().map(GpuRules::to_string).filter(|text| !text.is_empty())
    }
}

impl fmt::Display for Ask {
    /// `3 units (3072 MiB)`, `3 units (3072 MiB) on a GPU of a product like a100*`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.amount())?;
        match self.wanted() {
            Some(rules) => write!(f, " on a GPU {rules}"),
            None => Ok(()),
        }
    }
}

/// A GPU that was chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// The node.
    pub node: String,
    /// The GPU's UUID, where it is known.
    pub uuid: Option<String>,
    /// Its index.
    pub index: u32,
    /// Units that it offers in all.
    pub gpu_units: u64,
    /// Units that the pod gets.
    pub units: u64,
    /// The same in MiB.
    pub memory: MiB,
}

/// Why a node does not take a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// There is no such node, or it has not been seen yet.
    UnknownNode,
    /// The node's GPUs are offered to nobody.
    Unusable(Unusable),
    /// No single GPU that it takes has that much left.
    NoGpuFits,
    /// It takes none of the node's GPUs, whatever is free there.
    NoGpuTaken(Ask),
    /// Which GPUs it takes cannot be read.
    Unreadable(Error),
    /// The request is larger than any number of MiB that can be written.
    Uncountable(Ask),
}

impl Refusal {
    /// The text for the extender's `FailedNodes`: gpushare's own two sentences where gpushare would refuse, to the letter,
    /// since people and tools look for them.
    pub fn filter_message(&self, node: &str) -> String {
        self.filter_text(node).into_owned()
    }

    /// As [`Refusal::filter_message`], without a copy where the text does not name the node.
    pub fn filter_text(&self, node: &str) -> Cow<'static, str> {
        Cow::Owned(match self {
            Refusal::NoGpuFits => return Cow::Borrowed("Insufficient GPU Memory in one device"),
            Refusal::UnknownNode => format!("node {node:?} not found"),
            Refusal::Unusable(Unusable::NotShared) => format!("The node {node} is not for GPU share, need skip"),
            Refusal::Unusable(why) => format!("node {node} is not offered: {why}"),
            Refusal::Uncountable(ask) => format!("the pod asks for {ask}"),
            // The same for all nodes: kube-scheduler counts them.
            Refusal::NoGpuTaken(ask) => format!("no GPU {}", ask.wanted().unwrap_or_default()),
            Refusal::Unreadable(error) => format!("the pod's annotations: {error}"),
        })
    }
}

impl Ledger {
    /// To ask of many nodes whether this pod may go there.
    pub fn question<'a>(&'a self, ask: Ask, uid: &'a str) -> Question<'a> {
        Question {
            ledger: self,
            ask,
            uid,
            bound: self.bound_to(uid),
            reserved: self.reservations_of(uid),
        }
    }

    /// [`Question::fits`] of one node.
    pub fn fits(&self, node: &str, ask: &Ask, uid: &str) -> Result<(), Refusal> {
        self.question(ask.clone(), uid).fits(node)
    }

    /// What is reserved for a pod on a node, the last first, if it could be given to the pod now: its GPUs are there, are well, and
    /// have room for it beside what others hold.
    pub fn reserved_and_good(&self, uid: &str, node: &str) -> Option<&Held> {
        let reservation = self.reservation(uid, node)?;
        let view = self.node(node)?;
        let state = view.state().filter(|state| !matches!(state.source, Source::Unusable(_)))?;
        let own: Vec<_> = reservation.possible().flat_map(|held| self.parts(state, held)).collect();
        let good = |held: &&Held| {
            let parts = self.parts(state, held);
            let mut rooms = parts.iter().map(|part| {
                let position = part.position?;
                let own = own.iter().filter(|own| own.position == Some(position));
                let own = own.fold(MiB::ZERO, |sum, own| sum.saturating_add(own.memory));
                let well = state.gpus.get(position)?.health == Health::Ok;
                (well && view.free_beside(position, own) >= part.memory).then_some(())
            });
            !parts.is_empty() && rooms.all(|room| room.is_some())
        };
        reservation.possible().find(good)
    }

    /// Chooses the GPU of a node: the one with the least left that is enough, of equals the lowest index; as
    /// gpushare does (research/gpushare.md 3.4). A GPU that failed or is lost is never chosen.
    pub fn choose(&self, node: &str, ask: &Ask) -> Result<Choice, Refusal> {
        let view = self.known(node)?;
        let (position, memory) = best_fit(&view, ask)?;
        chosen(&view, position, ask, memory)
    }

    /// As [`Ledger::choose`], but the GPU at this position of [`NodeState::gpus`], if it has room and is well.
    pub fn choose_at(&self, node: &str, position: usize, ask: &Ask) -> Result<Choice, Refusal> {
        let view = self.known(node)?;
        let (_, memory) = offered(&view, ask)?;
        view.liking(position, ask).ok_or(Refusal::NoGpuFits)?;
        chosen(&view, position, ask, memory)
    }

    fn known<'a>(&'a self, node: &str) -> Result<NodeView<'a>, Refusal> {
        self.node(node)
            .filter(|view| view.state().is_some())
            .ok_or(Refusal::UnknownNode)
    }
}

/// A pod that looks for a node: what is known of it is looked up once.
#[derive(Debug, Clone)]
pub struct Question<'a> {
    ledger: &'a Ledger,
    ask: Ask,
    uid: &'a str,
    bound: Option<&'a str>,
    reserved: Option<&'a BTreeMap<String, Reservation>>,
}

impl Question<'_> {
    /// Whether the pod may go to a node, for filter: advisory, nothing is reserved. What is already reserved or bound for it on
    /// this node is its own, and fits while it is good.
    ///
    /// A pod that asks for no memory fits every node that there is. Of a node that is offered one number is looked at, which was
    /// counted when the node changed.
    pub fn fits(&self, node: &str) -> Result<(), Refusal> {
        let view = self.ledger.known(node)?;
        if self.ask.units == 0 || self.bound == Some(node) {
            return Ok(());
        }
        if self.reserved.is_some_and(|nodes| nodes.contains_key(node)) && self.ledger.reserved_and_good(self.uid, node).is_some()
        {
            return Ok(());
        }
        let (_, memory) = offered(&view, &self.ask)?;
        if view.most_free() < memory {
            return Err(Refusal::NoGpuFits);
        }
        match self.ask.rules {
            None => Ok(()),
            Some(_) => best_fit(&view, &self.ask).map(drop),
        }
    }
}

/// The node's GPUs if they are offered at all, and what is asked of one.
fn offered<'a>(view: &NodeView<'a>, ask: &Ask) -> Result<(&'a NodeState, MiB), Refusal> {
    let state = view.state().ok_or(Refusal::UnknownNode)?;
    if let Source::Unusable(why) = &state.source {
        return Err(Refusal::Unusable(why.clone()));
    }
    if let Some(Err(error)) = ask.rules.as_deref() {
        return Err(Refusal::Unreadable(error.clone()));
    }
    if ask.rules.is_some() && !state.gpus.iter().any(|gpu| ask.takes(gpu)) {
        return Err(Refusal::NoGpuTaken(ask.clone()));
    }
    Ok((state, ask.memory.ok_or_else(|| Refusal::Uncountable(ask.clone()))?))
}

/// Of the GPUs with room those that are preferred, of these the one with the least left, of equals the lowest index.
pub(crate) fn best_fit(view: &NodeView<'_>, ask: &Ask) -> Result<(usize, MiB), Refusal> {
    let (state, memory) = offered(view, ask)?;
    state
        .gpus
        .iter()
        .enumerate()
        .filter_map(|(position, gpu)| {
            let liking = view.liking(position, ask)?;
            Some((Reverse(liking), view.free(position), gpu.index, position))
        })
        .min()
        .map(|(_, _, _, position)| (position, memory))
        .ok_or(Refusal::NoGpuFits)
}

impl NodeView<'_> {
    /// How much a pod likes the GPU at this position, the higher the more; `None` if it does not take it, or finds no room there.
    pub(crate) fn liking(&self, position: usize, ask: &Ask) -> Option<u64> {
        let gpu = self.state()?.gpus.get(position)?;
        let good = gpu.health == Health::Ok && ask.takes(gpu) && self.free(position) >= ask.memory?;
        good.then(|| gpu.preference(ask.rules().and_then(|rules| rules.prefer)))
    }
}

fn chosen(view: &NodeView<'_>, position: usize, ask: &Ask, memory: MiB) -> Result<Choice, Refusal> {
    let gpu = view
        .state()
        .and_then(|state| state.gpus.get(position))
        .ok_or(Refusal::NoGpuFits)?;
    Ok(Choice {
        node: view.name().to_owned(),
        uuid: gpu.uuid.clone(),
        index: gpu.index,
        gpu_units: gpu.units,
        units: ask.units,
        memory,
    })
}

impl Choice {
    /// What is to be written on the pod. On a node that is known only by gpushare's capacities the GPU has no name but its
    /// index, so gpushare's form is all that can be said truthfully; either side can resolve that later.
    pub fn held(&self, request: &PodRequest, unit: MemoryUnit) -> Held {
        let Some(uuid) = &self.uuid else {
            return Held::Legacy(LegacyAllocation {
                gpus: BTreeMap::from([(self.index, self.units)]),
            });
        };
        let containers = request
            .memory_containers()
            .map(|container| {
                let share = ContainerShare {
                    uuid: uuid.clone(),
                    // Not more than the pod's, which was countable.
                    memory: unit.memory(container.units).unwrap_or(self.memory),
                    cores: 0,
                };
                (container.name.clone(), vec![share])
            })
            .collect();
        Held::Allocation(Allocation {
            v: 1,
            gpus: vec![GpuShare {
                uuid: uuid.clone(),
                memory: self.memory,
                cores: 0,
                whole: false,
            }],
            containers,
        })
    }
}
