//! Runs a kernel.

use crate::instruction::{Instruction, InstructionEffect, Kernel, MemoryOperand, PlaceNumber, Space, Special};
use crate::mma::{Fragment, WARP, multiply};

/// The memory of a GPU.
pub trait DeviceMemory {
    /// Read bytes. `None` if they are not all in memory that the kernel may use.
    fn load(&mut self, address: u64, to: &mut [u8]) -> Option<()>;

    /// Write bytes. `None` as with `load`, and then nothing is written.
    fn store(&mut self, address: u64, from: &[u8]) -> Option<()>;
}

/// The order in which the threads of a block run between two barriers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ThreadOrder {
    /// The first thread first.
    Forward,
    /// The last thread first.
    Backward,
}

impl ThreadOrder {
    /// What registers and shared memory contain that were not written. It differs, so that a kernel that reads them gives another result in one order.
    fn pattern(self) -> u8 {
        match self {
            ThreadOrder::Forward => 0x5a,
            ThreadOrder::Backward => 0,
        }
    }
}

/// How a kernel is launched.
#[derive(Debug, Clone)]
pub struct KernelLaunch {
    /// The number of blocks in each dimension.
    pub grid: [u32; 3],
    /// The only block that runs, for tests of grids that are too large to run; all blocks if it is none.
    pub only: Option<[u32; 3]>,
    /// The number of threads of a block in each dimension.
    pub block: [u32; 3],
    /// The bytes of the parameters, as [`Kernel::parameters`] says.
    pub parameters: Vec<u8>,
    /// The order of the threads.
    pub order: ThreadOrder,
    /// The time at the start, in nanoseconds.
    pub timer: u64,
    /// After how many instructions a kernel counts as one that never ends.
    pub limit: u64,
}

/// How a kernel ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelOutcome {
    /// How many instructions were executed.
    pub instructions: u64,
    /// How long the thread waited that waited longest, by `%globaltimer`.
    pub nanoseconds: u64,
}

/// Why a kernel did not end as it should.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum KernelFault {
    /// The kernel uses memory that is not its own.
    #[error("line {line}: there is no memory at {address:#x}")]
    IllegalAddress {
        /// The line of the instruction.
        line: usize,
        /// The address.
        address: u64,
    },
    /// An address is not a multiple of the size of what is there.
    #[error("line {line}: the address {address:#x} is not aligned")]
    Misaligned {
        /// The line of the instruction.
        line: usize,
        /// The address.
        address: u64,
    },
    /// The kernel executed more instructions than it may.
    #[error("line {line}: the kernel does not end")]
    Endless {
        /// The line of the instruction.
        line: usize,
    },
    /// Threads wait at different places for each other.
    #[error("line {line}: not all threads of a warp get here")]
    Diverged {
        /// The line of the instruction.
        line: usize,
    },
    /// The launch does not fit the kernel.
    #[error("the grid, the block, or the parameters do not fit the kernel")]
    Launch,
}

impl KernelFault {
    /// Return the `CUresult`; `None` for a kernel that does not end.
    pub fn code(self) -> Option<i32> {
        match self {
            KernelFault::IllegalAddress { .. } => Some(700),
            KernelFault::Misaligned { .. } => Some(716),
            KernelFault::Diverged { .. } => Some(719),
            KernelFault::Launch => Some(1),
            KernelFault::Endless { .. } => None,
        }
    }
}

/// Where a thread is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ThreadState {
    Ready,
    /// At a barrier.
    Waits,
    /// At an instruction of the whole warp.
    Warp,
    Ended,
}

#[derive(Debug, Clone, Copy)]
struct Thread {
    state: ThreadState,
    /// The index of the next instruction.
    next: usize,
    index: [u32; 3],
    waited: u64,
}

/// A block that runs.
struct Block<'k> {
    kernel: &'k Kernel,
    launch: &'k KernelLaunch,
    index: [u32; 3],
    /// What the places of a thread contain at its start.
    initial: Vec<u64>,
    threads: Vec<Thread>,
    /// The places of all threads.
    places: Vec<u64>,
    shared: Vec<u8>,
    instructions: u64,
}

impl Kernel {
    /// Run the kernel to its end.
    pub fn run(&self, launch: &KernelLaunch, memory: &mut dyn DeviceMemory) -> Result<KernelOutcome, KernelFault> {
        let threads = launch.block.iter().try_fold(1u32, |product, edge| product.checked_mul(*edge));
        let threads = threads
            .filter(|threads| (1..=1024).contains(threads))
            .ok_or(KernelFault::Launch)? as usize;
        if launch.grid.contains(&0) || launch.parameters.len() != self.parameter_bytes() {
            return Err(KernelFault::Launch);
        }
        let pattern = u64::from_ne_bytes([launch.order.pattern(); 8]);
        let registers = self.masks.iter().map(|mask| pattern & mask);
        let mut block = Block {
            kernel: self,
            launch,
            index: [0; 3],
            initial: registers.chain(self.constants.iter().copied()).collect(),
            threads: Vec::with_capacity(threads),
            places: Vec::new(),
            shared: Vec::new(),
            instructions: 0,
        };
        let all = || {
            let [width, height, depth] = launch.grid;
            (0..depth).flat_map(move |z| (0..height).flat_map(move |y| (0..width).map(move |x| [x, y, z])))
        };
        let mut nanoseconds = 0;
        let mut run = |index: [u32; 3], block: &mut Block<'_>| {
            block.begin(index, threads);
            block.run(memory)?;
            nanoseconds = block.threads.iter().map(|thread| thread.waited).fold(nanoseconds, u64::max);
            Ok(())
        };
        match launch.only {
            Some(index) => run(index, &mut block)?,
            None => all().try_for_each(|index| run(index, &mut block))?,
        }
        Ok(KernelOutcome {
            instructions: block.instructions,
            nanoseconds,
        })
    }
}

impl Block<'_> {
    fn begin(&mut self, index: [u32; 3], threads: usize) {
        self.index = index;
        let [width, height, _] = self.launch.block.map(|edge| edge as usize);
        self.threads.clear();
        self.places.clear();
        for thread in 0..threads {
            let place = [thread % width, thread / width % height, thread / (width * height)];
            self.threads.push(Thread {
                state: ThreadState::Ready,
                next: 0,
                index: place.map(|edge| edge as u32),
                waited: 0,
            });
            self.places.extend_from_slice(&self.initial);
        }
        self.shared.clear();
        self.shared.resize(self.kernel.shared as usize, self.launch.order.pattern());
    }

    fn run(&mut self, memory: &mut dyn DeviceMemory) -> Result<(), KernelFault> {
        let count = self.threads.len();
        loop {
            for step in 0..count {
                let thread = match self.launch.order {
                    ThreadOrder::Forward => step,
                    ThreadOrder::Backward => count - 1 - step,
                };
                if self.threads[thread].state == ThreadState::Ready {
                    self.run_thread(thread, memory)?;
                }
            }
            if self.run_warps()? {
                continue;
            }
            // All threads have ended or wait.
            let mut open = false;
            for thread in self.threads.iter_mut().filter(|thread| thread.state == ThreadState::Waits) {
                thread.state = ThreadState::Ready;
                open = true;
            }
            if !open {
                return Ok(());
            }
        }
    }

    /// Do what whole warps wait for. Return whether there was anything.
    fn run_warps(&mut self) -> Result<bool, KernelFault> {
        let mut any = false;
        for first in (0..self.threads.len()).step_by(WARP) {
            let last = self.threads.len().min(first + WARP);
            let Some(waiting) = self.threads[first..last]
                .iter()
                .find(|thread| thread.state == ThreadState::Warp)
            else {
                continue;
            };
            let at = waiting.next;
            let Instruction { what, line, .. } = &self.kernel.code[at];
            let together = |thread: &Thread| thread.state == ThreadState::Warp && thread.next == at;
            if last - first != WARP || !self.threads[first..last].iter().all(together) {
                return Err(KernelFault::Diverged { line: *line });
            }
            let InstructionEffect::Multiply { d, a, b, c } = what else {
                return Err(KernelFault::Diverged { line: *line });
            };
            let stride = self.initial.len();
            let mut lanes = [Fragment::default(); WARP];
            for (lane, of) in lanes.iter_mut().enumerate() {
                let places = &self.places[(first + lane) * stride..];
                let at = |place: &PlaceNumber| places[*place as usize];
                *of = Fragment {
                    a: [at(&a[0]), at(&a[1]), at(&a[2]), at(&a[3])],
                    b: [at(&b[0]), at(&b[1])],
                    c: [at(&c[0]), at(&c[1]), at(&c[2]), at(&c[3])],
                };
            }
            for (lane, values) in multiply(&lanes).into_iter().enumerate() {
                let places = &mut self.places[(first + lane) * stride..];
                for (place, value) in d.iter().zip(values) {
                    places[*place as usize] = value;
                }
            }
            for thread in &mut self.threads[first..last] {
                thread.state = ThreadState::Ready;
                thread.next += 1;
            }
            any = true;
        }
        Ok(any)
    }

    /// Run a thread until it waits or ends.
    fn run_thread(&mut self, number: usize, memory: &mut dyn DeviceMemory) -> Result<(), KernelFault> {
        let code = self.kernel.code.as_slice();
        let stride = self.initial.len();
        let places = &mut self.places[number * stride..(number + 1) * stride];
        let thread = &mut self.threads[number];
        let mut next = thread.next;
        let mut left = self.launch.limit.saturating_sub(self.instructions);
        let before = left;
        let state = loop {
            let Instruction { guard, what, line } = &code[next];
            if left == 0 {
                return Err(KernelFault::Endless { line: *line });
            }
            left -= 1;
            next += 1;
            if let Some((place, wanted)) = guard
                && places[*place as usize] & 1 != *wanted
            {
                continue;
            }
            match what {
                InstructionEffect::One(function, to, a) => places[*to as usize] = function(places[*a as usize]),
                InstructionEffect::Two(function, to, a, b) => {
                    places[*to as usize] = function(places[*a as usize], places[*b as usize])
                }
                InstructionEffect::Three(function, to, a, b, c) => {
                    places[*to as usize] = function(places[*a as usize], places[*b as usize], places[*c as usize]);
                }
                InstructionEffect::Branch(target) => next = *target,
                InstructionEffect::Load { from, to, sign, mask } => {
                    let mut bytes = [0; 32];
                    let bytes = &mut bytes[..from.bytes as usize * from.count];
                    load(*from, places, &self.shared, memory, bytes, *line)?;
                    for (place, value) in to.iter().zip(bytes.chunks_exact(from.bytes as usize)) {
                        let value = number_of(value);
                        places[*place as usize] = ((value << sign) as i64 >> sign) as u64 & mask;
                    }
                }
                InstructionEffect::Store { to, from } => {
                    let mut bytes = [0; 32];
                    let bytes = &mut bytes[..to.bytes as usize * to.count];
                    for (place, value) in from.iter().zip(bytes.chunks_exact_mut(to.bytes as usize)) {
                        copy(value, &places[*place as usize].to_le_bytes()[..to.bytes as usize]);
                    }
                    store(*to, places, &mut self.shared, memory, bytes, *line)?;
                }
                InstructionEffect::Atomic {
                    at,
                    function,
                    operand,
                    to,
                } => {
                    let mut bytes = [0; 8];
                    let bytes = &mut bytes[..at.bytes as usize];
                    load(*at, places, &self.shared, memory, bytes, *line)?;
                    let old = number_of(bytes);
                    let new = function(old, places[*operand as usize]);
                    store(
                        *at,
                        places,
                        &mut self.shared,
                        memory,
                        &new.to_le_bytes()[..at.bytes as usize],
                        *line,
                    )?;
                    if let Some(to) = to {
                        places[*to as usize] = old;
                    }
                }
                InstructionEffect::Swap { at, compare, new, to } => {
                    let mut bytes = [0; 8];
                    let bytes = &mut bytes[..at.bytes as usize];
                    load(*at, places, &self.shared, memory, bytes, *line)?;
                    let old = number_of(bytes);
                    if old == places[*compare as usize] {
                        let new = places[*new as usize].to_le_bytes();
                        store(*at, places, &mut self.shared, memory, &new[..at.bytes as usize], *line)?;
                    }
                    places[*to as usize] = old;
                }
                InstructionEffect::Parameter { to, offset, bytes } => {
                    places[*to as usize] = number_of(&self.launch.parameters[*offset..offset + bytes]);
                }
                InstructionEffect::Special(special, to) => {
                    places[*to as usize] = match special {
                        Special::Thread(dimension) => thread.index[*dimension].into(),
                        Special::Block(dimension) => self.index[*dimension].into(),
                        Special::BlockSize(dimension) => self.launch.block[*dimension].into(),
                        Special::GridSize(dimension) => self.launch.grid[*dimension].into(),
                        Special::Lane => (number % WARP) as u64,
                        Special::Warp => (number / WARP) as u64,
                        Special::Multiprocessor => 0,
                        Special::Timer => {
                            let now = self.launch.timer.wrapping_add(thread.waited);
                            thread.waited += 1000;
                            now
                        }
                        Special::Clock32 => (self.instructions + before - left) & 0xffff_ffff,
                        Special::Clock64 => self.instructions + before - left,
                    };
                }
                InstructionEffect::Barrier => break ThreadState::Waits,
                InstructionEffect::Multiply { .. } => {
                    // Done when the whole warp is here.
                    next -= 1;
                    break ThreadState::Warp;
                }
                InstructionEffect::Return => break ThreadState::Ended,
                InstructionEffect::Nothing => {}
            }
        };
        self.instructions += before - left;
        thread.next = next;
        thread.state = state;
        Ok(())
    }
}

/// Read a number of 1, 2, 4, or 8 bytes. The usual sizes come first, and are read by one instruction of the processor.
#[inline]
fn number_of(bytes: &[u8]) -> u64 {
    if let Ok(bytes) = bytes.try_into() {
        return u64::from(u32::from_le_bytes(bytes));
    }
    if let Ok(bytes) = bytes.try_into() {
        return u64::from_le_bytes(bytes);
    }
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// Copy bytes, of which there are as many on both sides.
#[inline]
fn copy(to: &mut [u8], from: &[u8]) {
    match (<&mut [u8; 4]>::try_from(&mut *to), <&[u8; 4]>::try_from(from)) {
        (Ok(to), Ok(from)) => *to = *from,
        _ => to.copy_from_slice(from),
    }
}

/// Return the address, which must be aligned to all that is loaded or stored there.
fn address_of(of: MemoryOperand, places: &[u64], line: usize) -> Result<u64, KernelFault> {
    let address = places[of.base as usize].wrapping_add(of.offset);
    // Both are powers of two.
    if address & (of.bytes * of.count as u64 - 1) == 0 {
        Ok(address)
    } else {
        Err(KernelFault::Misaligned { line, address })
    }
}

fn load(
    from: MemoryOperand,
    places: &[u64],
    shared: &[u8],
    memory: &mut dyn DeviceMemory,
    bytes: &mut [u8],
    line: usize,
) -> Result<(), KernelFault> {
    let address = address_of(from, places, line)?;
    let loaded = match from.space {
        Space::Global => memory.load(address, bytes),
        Space::Shared => range(address, bytes.len())
            .and_then(|range| shared.get(range))
            .map(|found| copy(bytes, found)),
    };
    loaded.ok_or(KernelFault::IllegalAddress { line, address })
}

fn store(
    to: MemoryOperand,
    places: &[u64],
    shared: &mut [u8],
    memory: &mut dyn DeviceMemory,
    bytes: &[u8],
    line: usize,
) -> Result<(), KernelFault> {
    let address = address_of(to, places, line)?;
    let stored = match to.space {
        Space::Global => memory.store(address, bytes),
        Space::Shared => range(address, bytes.len())
            .and_then(|range| shared.get_mut(range))
            .map(|found| copy(found, bytes)),
    };
    stored.ok_or(KernelFault::IllegalAddress { line, address })
}

fn range(address: u64, length: usize) -> Option<std::ops::Range<usize>> {
    let start = usize::try_from(address).ok()?;
    Some(start..start.checked_add(length)?)
}
