//! What makes a refusal a fact.

use std::cell::Cell;

use divvy_share::reserve::{ReserveRefusal, SlotTable, Word, reserve};

/// A word that says what the test wants.
struct Told<'a> {
    tell: &'a dyn Fn() -> u64,
    own: Cell<u64>,
}

impl Word for Told<'_> {
    fn load(&self) -> u64 {
        (self.tell)() + self.own.get()
    }

    fn add(&self, bytes: u64) {
        self.own.set(self.own.get() + bytes);
    }

    fn sub(&self, bytes: u64) {
        self.own.set(self.own.get() - bytes);
    }
}

struct Told3<'a> {
    used: [Told<'a>; 3],
    pending: [Told<'a>; 3],
}

impl<'a> SlotTable for Told3<'a> {
    type Word = Told<'a>;

    fn slots(&self) -> usize {
        3
    }

    fn pending(&self, slot: usize) -> &Told<'a> {
        &self.pending[slot]
    }

    fn used(&self, slot: usize) -> &Told<'a> {
        &self.used[slot]
    }

    fn held(&mut self, _slot: usize) -> bool {
        true
    }

    fn fence(&self) {}

    fn pause(&mut self) -> bool {
        true
    }
}

/// Slot 0 has a byte until the given sum, and slot 2 has it always: to these sums it seems to move while they are taken. The caller is slot 1.
fn third_of_two_bytes(sums_that_see_both: u32) -> Result<(), ReserveRefusal> {
    let sums = Cell::new(0);
    let nothing = || 0;
    let first = || {
        sums.set(sums.get() + 1);
        u64::from(sums.get() <= sums_that_see_both)
    };
    // A byte that comes and goes with each sum, so that no two sums see the same.
    let last = || {
        if sums.get() <= sums_that_see_both {
            u64::from(sums.get())
        } else {
            1
        }
    };
    let told = |tell| Told { tell, own: Cell::new(0) };
    let mut table = Told3 {
        used: [told(&first), told(&nothing), told(&last)],
        pending: [told(&nothing), told(&nothing), told(&nothing)],
    };
    reserve(&mut table, 1, 1, 2)
}

#[test]
fn a_sum_that_saw_moving_memory_twice_refuses_nothing() {
    for sums in 0..6 {
        assert_eq!(third_of_two_bytes(sums), Ok(()), "{sums} sums saw the memory in two slots");
    }
}
