use std::collections::HashMap;
use std::hash::BuildHasherDefault;
use std::ops::{Index, IndexMut};

use super::super::Demand;
use super::super::rule::Kept;
use super::costs::Costs;
use crate::mixer::Mixer;

/// What one class of pods would cost in each slot.
#[derive(Debug, Default)]
pub(super) struct Row {
    /// By number of the shape; `None` if it may not go there.
    pub(super) amounts: Vec<Option<u32>>,
    /// Costs that are right; [`NO_FIT`](super::costs::NO_FIT) where that is not known, or where it does not fit.
    pub(super) exact: Costs,
    /// Costs that are guessed or were right once; [`NO_FIT`](super::costs::NO_FIT) where there is none.
    pub(super) guessed: Costs,
    pub(super) kept: Vec<Kept>,
    /// The slot's version when it was looked at.
    pub(super) versions: Vec<u32>,
    /// How many are guessed.
    pub(super) guesses: usize,
    /// Where to go on with replacing guesses that do not look promising.
    pub(super) cursor: usize,
    /// The rule's when the costs were right.
    pub(super) epoch: u32,
    /// Changes of slots that were taken in.
    pub(super) changes: u64,
    /// When it was last asked for, in requests.
    used: u64,
    class: Option<Demand>,
}

/// Rows by class of pods. When all together would hold more than so many costs, the one that was not asked for the longest makes room.
#[derive(Debug)]
pub(super) struct Rows {
    rows: Vec<Row>,
    numbers: HashMap<Demand, usize, BuildHasherDefault<Mixer>>,
    most_costs: usize,
    requests: u64,
}

impl Rows {
    /// So few classes are always remembered.
    const FEW: usize = 8;

    pub(super) fn new(most_costs: usize) -> Rows {
        Rows {
            rows: Vec::new(),
            numbers: HashMap::default(),
            most_costs,
            requests: 0,
        }
    }

    /// As many may be remembered.
    pub(super) fn emptied(&self) -> Rows {
        Rows::new(self.most_costs)
    }

    /// The number of the row of a class, each of which has a cost for so many slots.
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
                self.rows[number] = Row::default();
                number
            }
            None => {
                self.rows.push(Row::default());
                self.rows.len() - 1
            }
        };
        self.rows[number].class = Some(*class);
        self.numbers.insert(*class, number);
        number
    }
}

impl Index<usize> for Rows {
    type Output = Row;

    fn index(&self, number: usize) -> &Row {
        &self.rows[number]
    }
}

impl IndexMut<usize> for Rows {
    fn index_mut(&mut self, number: usize) -> &mut Row {
        &mut self.rows[number]
    }
}
