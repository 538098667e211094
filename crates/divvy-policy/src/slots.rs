use std::cell::Cell;
use std::collections::HashMap;
use std::hash::BuildHasherDefault;

use super::rule::Noted;
use super::state::State;
use crate::mixer::Mixer;

/// The states in which nodes are now, each with its nodes: what is known of a state is known of all of them.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    slots: Vec<Slot>,
    /// Slots without nodes.
    unused: Vec<u32>,
    by_state: HashMap<State, u32, BuildHasherDefault<Mixer>>,
    /// Slots that got another state or lost theirs, in order; what came before `log_start` is forgotten.
    log: Vec<u32>,
    log_start: u64,
}

#[derive(Debug)]
pub(crate) struct Slot {
    /// `None`: no node is in it.
    pub(crate) state: Option<State>,
    /// How often it got another state.
    pub(crate) version: u32,
    /// The rule's.
    pub(crate) noted: Cell<Noted>,
    /// The highest rank first, so that the lowest can be taken off the end.
    nodes: Vec<(u64, u32)>,
}

impl Slot {
    /// The nodes, the lowest rank first.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = (u64, u32)> {
        self.nodes.iter().rev().copied()
    }
}

impl Slots {
    /// How many slots there are, used or not.
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    pub(crate) fn get(&self, slot: usize) -> &Slot {
        &self.slots[slot]
    }

    /// Puts a node where its state is. Which slot that is.
    pub(crate) fn insert(&mut self, state: State, rank: u64, node: u32) -> u32 {
        let slot = match self.by_state.get(&state) {
            Some(slot) => *slot,
            None => self.open(state),
        };
        let nodes = &mut self.slots[slot as usize].nodes;
        let at = nodes.partition_point(|other| *other > (rank, node));
        nodes.insert(at, (rank, node));
        slot
    }

    /// Takes a node out of the slot in which it is.
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

    fn open(&mut self, state: State) -> u32 {
        let slot = self.unused.pop().unwrap_or_else(|| {
            self.slots.push(Slot {
                state: None,
                version: 0,
                noted: Cell::default(),
                nodes: Vec::new(),
            });
            // No cluster has four thousand million nodes, and there are no more slots than nodes.
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

    /// How many changes there were in all.
    pub(crate) fn changes(&self) -> u64 {
        self.log_start + self.log.len() as u64
    }

    /// Slots that changed after so many changes, some of them several times; `None` if that is too long ago.
    pub(crate) fn changed_since(&self, changes: u64) -> Option<&[u32]> {
        let from = changes.checked_sub(self.log_start)?;
        self.log.get(usize::try_from(from).ok()?..)
    }

    /// The states of the nodes, and how many nodes are in each.
    pub(crate) fn states(&self) -> impl Iterator<Item = (&State, usize)> {
        self.slots
            .iter()
            .filter_map(|slot| Some((slot.state.as_ref()?, slot.nodes.len())))
    }
}
