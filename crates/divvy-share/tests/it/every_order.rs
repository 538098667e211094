//! The protocol in every order in which the processor can carry it out, by loom.

use divvy_share::claim::{Locks, claim, owner};
use divvy_share::reserve::{ReserveRefusal, SlotTable, Word, commit, free, reserve};
use divvy_share::usage::UsageFile;
use loom::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use loom::sync::{Arc, Mutex};

#[derive(Debug)]
struct Cell(AtomicU64);

impl Word for Cell {
    fn load(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    fn add(&self, bytes: u64) {
        self.0.fetch_add(bytes, Ordering::AcqRel);
    }

    fn sub(&self, bytes: u64) {
        self.0.fetch_sub(bytes, Ordering::AcqRel);
    }
}

#[derive(Debug)]
struct Slot {
    used: Cell,
    pending: Cell,
    held: AtomicBool,
}

#[derive(Clone, Debug)]
struct Slots(Arc<Vec<Slot>>, Arc<AtomicUsize>);

impl Slots {
    fn new(count: usize) -> Self {
        let slot = |_| Slot {
            used: Cell(AtomicU64::new(0)),
            pending: Cell(AtomicU64::new(0)),
            held: AtomicBool::new(true),
        };
        Self(Arc::new((0..count).map(slot).collect()), Arc::new(AtomicUsize::new(count)))
    }
}

impl SlotTable for Slots {
    type Word = Cell;

    fn slots(&self) -> usize {
        self.1.load(Ordering::Acquire)
    }

    fn pending(&self, slot: usize) -> &Cell {
        &self.0[slot].pending
    }

    fn used(&self, slot: usize) -> &Cell {
        &self.0[slot].used
    }

    fn held(&mut self, slot: usize) -> bool {
        self.0[slot].held.load(Ordering::Acquire)
    }

    fn fence(&self) {
        fence(Ordering::SeqCst);
    }

    fn pause(&mut self) -> bool {
        loom::thread::yield_now();
        true
    }
}

fn explore(preemptions: usize, test: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(test);
}

/// Each of the two takes its slot just before it reserves.
#[test]
fn of_two_new_processes_that_want_all_exactly_one_gets_it() {
    explore(3, || {
        let slots = Slots::new(2);
        slots.1.store(0, Ordering::Release);
        let want = |own: usize| {
            let mut slots = slots.clone();
            loom::thread::spawn(move || {
                slots.1.fetch_max(own + 1, Ordering::AcqRel);
                let got = reserve(&mut slots, own, 2, 2);
                if got.is_ok() {
                    commit(&slots, own, 2);
                }
                got.is_ok()
            })
        };
        let got: Vec<_> = [want(0), want(1)].into_iter().map(|thread| thread.join().unwrap()).collect();
        assert_eq!(got.iter().filter(|got| **got).count(), 1);
    });
}

#[test]
fn of_two_that_want_all_exactly_one_gets_it() {
    explore(3, || {
        let slots = Slots::new(2);
        let want = |own: usize| {
            let mut slots = slots.clone();
            loom::thread::spawn(move || {
                let got = reserve(&mut slots, own, 2, 2);
                if got.is_ok() {
                    commit(&slots, own, 2);
                }
                got
            })
        };
        let got: Vec<_> = [want(0), want(1)].into_iter().map(|thread| thread.join().unwrap()).collect();
        assert!(
            got == [Ok(()), Err(ReserveRefusal::Full)] || got == [Err(ReserveRefusal::Full), Ok(())],
            "{got:?}"
        );
    });
}

#[test]
fn what_fits_together_is_granted_together() {
    explore(3, || {
        let slots = Slots::new(2);
        let want = |own: usize| {
            let mut slots = slots.clone();
            loom::thread::spawn(move || reserve(&mut slots, own, 1, 2))
        };
        let got: Vec<_> = [want(0), want(1)].into_iter().map(|thread| thread.join().unwrap()).collect();
        assert_eq!(got, [Ok(()), Ok(())]);
    });
}

/// One process gives back what it has before another one gets as much. A third one that wants the rest must get it, although a sum that is not taken
/// at one moment can see both.
#[test]
fn memory_that_moves_from_one_to_another_is_not_counted_twice() {
    explore(2, || {
        let slots = Slots::new(3);
        slots.0[0].used.add(1);
        let mover = {
            let mut slots = slots.clone();
            loom::thread::spawn(move || {
                free(&slots, 0, 1);
                let got = reserve(&mut slots, 2, 1, 2);
                if got.is_ok() {
                    commit(&slots, 2, 1);
                }
                got
            })
        };
        let mut third = slots.clone();
        let got = reserve(&mut third, 1, 1, 2);
        assert_eq!((got, mover.join().unwrap()), (Ok(()), Ok(())));
    });
}

/// The threads of a process free and commit while another one of its threads reserves.
#[test]
fn the_numbers_of_a_slot_stay_right_under_several_threads() {
    explore(3, || {
        let slots = Slots::new(1);
        slots.0[0].used.add(2);
        let other = {
            let slots = slots.clone();
            loom::thread::spawn(move || free(&slots, 0, 2))
        };
        let mut own = slots.clone();
        if reserve(&mut own, 0, 3, 3).is_ok() {
            commit(&own, 0, 3);
        }
        other.join().unwrap();
        let (used, pending) = (slots.used(0).load(), slots.pending(0).load());
        assert!((used == 3 || used == 0) && pending == 0, "{used} {pending}");
    });
}

#[test]
fn a_process_that_dies_in_the_middle_stops_nobody() {
    explore(3, || {
        let slots = Slots::new(2);
        let dying = {
            let slots = slots.clone();
            loom::thread::spawn(move || {
                slots.pending(0).add(2);
                slots.fence();
                slots.0[0].held.store(false, Ordering::Release);
            })
        };
        let mut other = slots.clone();
        assert_eq!(reserve(&mut other, 1, 2, 2), Ok(()));
        dying.join().unwrap();
    });
}

/// The locks of a file, and which description has each.
#[derive(Clone)]
struct Shared {
    owners: Arc<Mutex<Vec<Option<usize>>>>,
    description: usize,
}

impl Locks for Shared {
    fn held(&self, byte: u64) -> bool {
        let owner = self.owners.lock().unwrap()[byte as usize];
        owner.is_some_and(|owner| owner != self.description)
    }

    fn take(&self, byte: u64) -> bool {
        let taken = *self.owners.lock().unwrap()[byte as usize].get_or_insert(self.description) == self.description;
        // Loom changes threads only where one of its own types is used, and what follows a call of this is not.
        drop(self.owners.lock().unwrap());
        taken
    }

    fn release(&self, byte: u64) {
        self.owners.lock().unwrap()[byte as usize].take_if(|owner| *owner == self.description);
    }
}

/// Killed processes left their numbers in the first two slots. Two new processes take slots while a third one looks: it must not find an owner with
/// the numbers of a dead one, or it would refuse memory that is free.
#[test]
fn a_slot_with_an_owner_never_has_the_numbers_of_a_dead_one() {
    // Too large for the stacks of loom's threads, so there is one for all orders.
    let usage = std::sync::Arc::new(UsageFile::default());
    explore(3, move || {
        for slot in &usage.slots[..2] {
            slot.used.store(7, Ordering::Relaxed);
        }
        let owners = Arc::new(Mutex::new(vec![None; 512]));
        let locks = |description| Shared {
            owners: owners.clone(),
            description,
        };
        let claimers: Vec<_> = (1..3)
            .map(|description| {
                let (locks, usage) = (locks(description), usage.clone());
                loom::thread::spawn(move || claim(&locks, &usage, 1))
            })
            .collect();
        let looking = locks(0);
        for slot in 0..2 {
            let held = looking.held(owner(slot));
            let used = usage.slots[slot].used.load(Ordering::Relaxed);
            assert!(!held || used == 0, "slot {slot}: {used}");
        }
        let mut taken: Vec<_> = claimers.into_iter().map(|thread| thread.join().unwrap()).collect();
        taken.sort_unstable();
        assert_eq!(taken, [Some(0), Some(1)]);
    });
}
