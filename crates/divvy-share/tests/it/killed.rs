//! Histories in which processes are killed between any two of their steps.
//!
//! Each process is a thread that stops before each access to the table until the history lets it go on. The one that is killed unwinds there.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use divvy_share::reserve::{SlotTable, Word, charged, commit, free, reserve};
use proptest::prelude::*;

const ALLOWED: u64 = 10;
const PROCESSES: usize = 3;

#[derive(Default)]
struct Slot {
    used: AtomicU64,
    pending: AtomicU64,
    held: AtomicBool,
}

#[derive(Default)]
struct Machine {
    slots: [Slot; PROCESSES],
    /// What the driver has given to each process.
    driver: Mutex<[u64; PROCESSES]>,
}

enum Order {
    Step,
    Die,
}

/// A process's view of the table.
struct Process {
    machine: Arc<Machine>,
    words: Vec<(Stepped, Stepped)>,
    gate: Arc<Gate>,
}

struct Gate {
    orders: Mutex<Receiver<Order>>,
    stopped: Sender<bool>,
    passed: AtomicBool,
}

struct Killed;

impl Gate {
    /// Say that the last step is done, and wait for the order to do the next.
    fn pass(&self) {
        if self.passed.swap(true, Ordering::Relaxed) {
            self.stopped.send(true).unwrap();
        }
        match self.orders.lock().unwrap().recv() {
            Ok(Order::Step) => {}
            Ok(Order::Die) | Err(_) => resume_unwind(Box::new(Killed)),
        }
    }
}

struct Stepped {
    machine: Arc<Machine>,
    gate: Arc<Gate>,
    slot: usize,
    pending: bool,
}

impl Stepped {
    fn word(&self) -> &AtomicU64 {
        self.gate.pass();
        let slot = &self.machine.slots[self.slot];
        if self.pending { &slot.pending } else { &slot.used }
    }
}

impl Word for Stepped {
    fn load(&self) -> u64 {
        Word::load(self.word())
    }

    fn add(&self, bytes: u64) {
        Word::add(self.word(), bytes);
    }

    fn sub(&self, bytes: u64) {
        Word::sub(self.word(), bytes);
    }
}

impl SlotTable for Process {
    type Word = Stepped;

    fn slots(&self) -> usize {
        PROCESSES
    }

    fn pending(&self, slot: usize) -> &Stepped {
        &self.words[slot].1
    }

    fn used(&self, slot: usize) -> &Stepped {
        &self.words[slot].0
    }

    fn held(&mut self, slot: usize) -> bool {
        self.gate.pass();
        self.machine.slots[slot].held.load(Ordering::SeqCst)
    }

    fn fence(&self) {}

    fn pause(&mut self) -> bool {
        self.gate.pass();
        true
    }
}

/// What a process does: reserve and commit, or free.
#[derive(Clone, Copy, Debug)]
enum Call {
    Allocate(u64),
    Free,
}

fn run(mut process: Process, own: usize, calls: &[Call]) {
    let mut mine = Vec::new();
    for call in calls {
        match *call {
            Call::Allocate(bytes) => {
                if reserve(&mut process, own, bytes, ALLOWED).is_err() {
                    continue;
                }
                // A step of its own: the driver's call.
                process.gate.pass();
                process.machine.driver.lock().unwrap()[own] += bytes;
                commit(&process, own, bytes);
                mine.push(bytes);
            }
            Call::Free => {
                let Some(bytes) = mine.pop() else { continue };
                process.gate.pass();
                process.machine.driver.lock().unwrap()[own] -= bytes;
                free(&process, own, bytes);
            }
        }
    }
}

struct Handle {
    orders: Sender<Order>,
    stopped: Receiver<bool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Handle {
    /// Let the process do one step. `false`: it has ended.
    fn step(&mut self, order: Order) -> bool {
        self.thread.is_some() && self.orders.send(order).is_ok() && self.stopped.recv() == Ok(true)
    }
}

fn start(machine: &Arc<Machine>, own: usize, calls: Vec<Call>) -> Handle {
    let (orders, receiver) = channel();
    let (sender, stopped) = channel();
    let gate = Arc::new(Gate {
        orders: Mutex::new(receiver),
        stopped: sender,
        passed: AtomicBool::new(false),
    });
    let stepped = |slot, pending| Stepped {
        machine: machine.clone(),
        gate: gate.clone(),
        slot,
        pending,
    };
    let process = Process {
        machine: machine.clone(),
        words: (0..PROCESSES)
            .map(|slot| (stepped(slot, false), stepped(slot, true)))
            .collect(),
        gate: gate.clone(),
    };
    machine.slots[own].held.store(true, Ordering::SeqCst);
    let ending = machine.clone();
    let thread = std::thread::spawn(move || {
        let outcome = catch_unwind(AssertUnwindSafe(|| run(process, own, &calls)));
        if let Err(panic) = outcome {
            assert!(panic.is::<Killed>(), "only the history ends a process early");
            // What the kernel does with a killed process: its memory and its lock go at once.
            ending.driver.lock().unwrap()[own] = 0;
            ending.slots[own].held.store(false, Ordering::SeqCst);
        }
        // The gate may be gone: then no one waits.
        let _ = gate.stopped.send(false);
    });
    Handle {
        orders,
        stopped,
        thread: Some(thread),
    }
}

fn call() -> impl Strategy<Value = Call> {
    prop_oneof![3 => (1..=6_u64).prop_map(Call::Allocate), 1 => Just(Call::Free), 1 => Just(Call::Allocate(ALLOWED))]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// The counted numbers are right once all processes are at rest.
    #[test]
    fn the_driver_gives_no_more_than_allowed(
        calls in prop::collection::vec(prop::collection::vec(call(), 1..5), PROCESSES),
        history in prop::collection::vec((0..PROCESSES, 0..40_u8), 0..400),
    ) {
        let machine = Arc::new(Machine::default());
        let mut processes: Vec<Handle> = calls.into_iter().enumerate().map(|(own, calls)| start(&machine, own, calls)).collect();
        let within = |machine: &Machine| machine.driver.lock().unwrap().iter().sum::<u64>() <= ALLOWED;
        let mut alive = [true; PROCESSES];
        for (index, kind) in history {
            let order = if kind == 0 { Order::Die } else { Order::Step };
            alive[index] = alive[index] && processes[index].step(order);
            prop_assert!(within(&machine));
        }
        // Everybody gets to an end, in turn.
        let mut steps = 0;
        while alive.contains(&true) {
            for (index, process) in processes.iter_mut().enumerate() {
                alive[index] = alive[index] && process.step(Order::Step);
                prop_assert!(within(&machine));
            }
            steps += 1;
            prop_assert!(steps < 20_000, "no process goes on");
        }
        for process in &mut processes {
            process.thread.take().unwrap().join().unwrap();
        }
        let driver = *machine.driver.lock().unwrap();
        for (slot, bytes) in machine.slots.iter().zip(driver) {
            if slot.held.load(Ordering::SeqCst) {
                prop_assert_eq!((slot.used.load(Ordering::SeqCst), slot.pending.load(Ordering::SeqCst)), (bytes, 0));
            }
        }
        let free = ALLOWED - driver.iter().sum::<u64>();
        let mut plain = Plain(&machine);
        prop_assert_eq!(charged(&mut plain), ALLOWED - free);
        // What dead processes had is there for the next one.
        if let Some(dead) = machine.slots.iter().position(|slot| !slot.held.load(Ordering::SeqCst)) {
            machine.slots[dead].used.store(0, Ordering::SeqCst);
            machine.slots[dead].pending.store(0, Ordering::SeqCst);
            machine.slots[dead].held.store(true, Ordering::SeqCst);
            prop_assert!(reserve(&mut plain, dead, free, ALLOWED).is_ok());
            prop_assert!(reserve(&mut plain, dead, 1, ALLOWED).is_err());
        }
    }
}

/// The table at rest.
struct Plain<'a>(&'a Machine);

impl SlotTable for Plain<'_> {
    type Word = AtomicU64;

    fn slots(&self) -> usize {
        PROCESSES
    }

    fn pending(&self, slot: usize) -> &AtomicU64 {
        &self.0.slots[slot].pending
    }

    fn used(&self, slot: usize) -> &AtomicU64 {
        &self.0.slots[slot].used
    }

    fn held(&mut self, slot: usize) -> bool {
        self.0.slots[slot].held.load(Ordering::SeqCst)
    }

    fn fence(&self) {}

    fn pause(&mut self) -> bool {
        false
    }
}
