use std::cell::Cell;
use std::collections::HashMap;
use std::hash::BuildHasherDefault;

use super::rule::Noted;
use super::state::PolicyNodeState;
use crate::mixer::Mixer;

/// The current states of the nodes. Each state has a slot, which holds all nodes in that state. A pod costs the same on all of
/// them, so what is computed for a state is valid for all its nodes.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    slots: Vec<StateSlot>,
    /// Slots that have no nodes and can be reused.
    unused: Vec<u32>,
    by_state: HashMap<PolicyNodeState, u32, BuildHasherDefault<Mixer>>,
    /// The slots that got another state or lost their state, in the order of these changes. Changes before `log_start` are
    /// forgotten.
    log: Vec<u32>,
    log_start: u64,
}

#[derive(Debug)]
pub(crate) struct StateSlot {
    /// The state; `None` while no node is in the slot.
    pub(crate) state: Option<PolicyNodeState>,
    /// The number of changes of the slot's state so far.
    pub(crate) version: u32,
    /// What the rule has noted about the state.
    pub(crate) noted: Cell<Noted>,
    /// The nodes as (rank, number), in descending order, so that the lowest can be popped off the end.
    nodes: Vec<(u64, u32)>,
}

impl StateSlot {
    /// Return the nodes as (rank, number), in ascending order.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = (u64, u32)> {
        self.nodes.iter().rev().copied()
    }
}

impl Slots {
    /// Return the number of slots, used or not.
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    pub(crate) fn get(&self, slot: usize) -> &StateSlot {
        &self.slots[slot]
    }

    /// Add a node to the slot of its state, and return the slot's number.
    pub(crate) fn insert(&mut self, state: PolicyNodeState, rank: u64, node: u32) -> u32 {
        let slot = match self.by_state.get(&state) {
            Some(slot) => *slot,
            None => self.open(state),
        };
        let nodes = &mut self.slots[slot as usize].nodes;
        let at = nodes.partition_point(|other| *other > (rank, node));
        nodes.insert(at, (rank, node));
        slot
    }

    /// Remove a node from its slot.
    pub(crate) fn remove(&mut self, slot: u32, rank: u64, node: u32) {
        let there = &mut self.slots[slot as usize];
        let at = there.nodes.partition_point(|other| *other > (rank, node));
        if there.nodes.get(at) != Some(&(rank, node)) {
            return;
        }
        there.nodes.remove(at);
        if there.nodes.is_empty() {
            if let Some(state) = there.state.take() {
                self.by_state.remove(&state);
            }
            there.version = there.version.wrapping_add(1);
            self.unused.push(slot);
            self.log(slot);
        }
    }

    fn open(&mut self, state: PolicyNodeState) -> u32 {
        let slot = self.unused.pop().unwrap_or_else(|| {
            self.slots.push(StateSlot {
                state: None,
                version: 0,
                noted: Cell::default(),
                nodes: Vec::new(),
            });
            // No cluster has four billion nodes, and there are no more slots than nodes.
            u32::try_from(self.slots.len() - 1).unwrap_or(u32::MAX)
        });
        let there = &mut self.slots[slot as usize];
        there.state = Some(state);
        there.noted.set(Noted::default());
        there.version = there.version.wrapping_add(1);
        self.by_state.insert(state, slot);
        self.log(slot);
        slot
    }

    fn log(&mut self, slot: u32) {
        let most = 4 * self.slots.len() + 1024;
        if self.log.len() >= most {
            self.log.drain(..most / 2);
            self.log_start += (most / 2) as u64;
        }
        self.log.push(slot);
    }

    /// Return the total number of changes so far.
    pub(crate) fn changes(&self) -> u64 {
        self.log_start + self.log.len() as u64
    }

    /// Return the slots that changed after the first `changes` changes, with repetitions. The result is `None` if the log does
    /// not reach back that far.
    pub(crate) fn changed_since(&self, changes: u64) -> Option<&[u32]> {
        let from = changes.checked_sub(self.log_start)?;
        self.log.get(usize::try_from(from).ok()?..)
    }

    /// Return the states of the nodes, and the number of nodes in each.
    pub(crate) fn states(&self) -> impl Iterator<Item = (&PolicyNodeState, usize)> {
        self.slots
            .iter()
            .filter_map(|slot| Some((slot.state.as_ref()?, slot.nodes.len())))
    }
}
