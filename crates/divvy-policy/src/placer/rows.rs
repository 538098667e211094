use std::collections::HashMap;
use std::hash::BuildHasherDefault;
use std::ops::{Index, IndexMut};

use super::super::Demand;
use super::super::rule::KeptStates;
use super::costs::Costs;
use crate::mixer::Mixer;

/// The costs of one class of pods, by slot.
#[derive(Debug, Default)]
pub(super) struct CostRow {
    /// By shape number: what a pod of the class takes of one GPU, or `None` if it may not use this shape.
    pub(super) amounts: Vec<Option<u32>>,
    /// Exact costs. The entry is [`NO_FIT`](super::costs::NO_FIT) where the cost is not known, or where the pod does not fit.
    pub(super) exact: Costs,
    /// Guesses, and costs that were exact before the last change of prices. The entry is [`NO_FIT`](super::costs::NO_FIT) where
    /// there is neither.
    pub(super) guessed: Costs,
    pub(super) kept: Vec<KeptStates>,
    /// By slot: the slot's version when the row last read it.
    pub(super) versions: Vec<u32>,
    /// The number of guesses.
    pub(super) guesses: usize,
    /// The slot at which the replacement of guesses in turn continues.
    pub(super) cursor: usize,
    /// The epoch of the rule in which the exact costs are valid.
    pub(super) epoch: u32,
    /// The number of slot changes that the row has read.
    pub(super) changes: u64,
    /// The number of the request that last used the row.
    used: u64,
    class: Option<Demand>,
}

/// The rows, by class of pods. When all rows together would hold more than `most_costs` costs, the least recently used row is
/// dropped.
#[derive(Debug)]
pub(super) struct Rows {
    rows: Vec<CostRow>,
    numbers: HashMap<Demand, usize, BuildHasherDefault<Mixer>>,
    most_costs: usize,
    requests: u64,
}

impl Rows {
    /// The number of classes that are always kept.
    const FEW: usize = 8;

    pub(super) fn new(most_costs: usize) -> Rows {
        Rows {
            rows: Vec::new(),
            numbers: HashMap::default(),
            most_costs,
            requests: 0,
        }
    }

    /// Return an empty table with the same limit.
    pub(super) fn emptied(&self) -> Rows {
        Rows::new(self.most_costs)
    }

    /// Return the number of the row of a class, and create the row if necessary. `slots` is the number of costs in a row.
    pub(super) fn of(&mut self, class: &Demand, slots: usize) -> usize {
        self.requests += 1;
        let number = match self.numbers.get(class) {
            Some(number) => *number,
            None => self.make(class, slots),
        };
        self.rows[number].used = self.requests;
        number
    }

    fn make(&mut self, class: &Demand, slots: usize) -> usize {
        let most = (self.most_costs / slots.max(1)).max(Self::FEW);
        let oldest = self.rows.iter().enumerate().min_by_key(|(_, row)| row.used);
        let number = match oldest.map(|(number, _)| number).filter(|_| self.rows.len() >= most) {
            Some(number) => {
                if let Some(gone) = self.rows[number].class {
                    self.numbers.remove(&gone);
                }
                self.rows[number] = CostRow::default();
                number
            }
            None => {
                self.rows.push(CostRow::default());
                self.rows.len() - 1
            }
        };
        self.rows[number].class = Some(*class);
        self.numbers.insert(*class, number);
        number
    }
}

impl Index<usize> for Rows {
    type Output = CostRow;

    fn index(&self, number: usize) -> &CostRow {
        &self.rows[number]
    }
}

impl IndexMut<usize> for Rows {
    fn index_mut(&mut self, number: usize) -> &mut CostRow {
        &mut self.rows[number]
    }
}
