//! A driver in memory. Its kernels are plain Rust, written independently of what the steps expect.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use divvy_smoke::driver::{
    CallFailure, CudaCode, Driver, DriverHandle, GpuAddress, Grid, Hooked, KernelArgument, ModuleText, Pinned, Result, agrees,
};
use divvy_smoke::run::{Message, SmokePlan, SmokeWorld, run};
use divvy_smoke::sizes::Sizes;
use divvy_smoke::steps::StepProblem;
use divvy_smoke::steps::accounting::{HeldMemory, SecondProcess};
use divvy_smoke::steps::open::{AskedGpu, NoLimits};
use divvy_smoke::steps::share::{GivenShare, GuardLimit};
use divvy_smoke_report::{SmokeReport, SmokeStep, StepId, TestedGpu};

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const UUID: &str = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f";

/// The smallest sizes with which each step still proves something.
pub(crate) const SMALL: Sizes = Sizes {
    elements: 300,
    bytes: 4 << 10,
    rows: 32,
    rows64: 16,
    loops: 3,
    warps: 1,
    copies: 1,
};

/// What a machine and a test's faults are like.
#[derive(Debug, Clone)]
pub(crate) struct Machine {
    pub(crate) count: i32,
    pub(crate) name: &'static str,
    pub(crate) cuda: i32,
    pub(crate) capability: [i32; 2],
    pub(crate) mode: i32,
    pub(crate) total: u64,
    pub(crate) context: u64,
    /// The call with this number does nothing, and says that all is well.
    pub(crate) silent: Option<usize>,
    /// The copy with this number does not do its first half, and says that all is well.
    pub(crate) half: Option<usize>,
    /// After the launch with this number, one bit of the largest allocation is another one.
    pub(crate) flip: Option<usize>,
    /// Whether more than the memory can be allocated.
    pub(crate) unlimited: bool,
}

impl Default for Machine {
    fn default() -> Machine {
        Machine {
            count: 1,
            name: "NVIDIA H100 80GB HBM3",
            cuda: 13_000,
            capability: [9, 0],
            mode: 0,
            total: 2048 * MIB,
            context: 512 * MIB,
            silent: None,
            half: None,
            flip: None,
            unlimited: false,
        }
    }
}

#[derive(Debug, Default)]
struct State {
    /// The memory's contents. What is not touched costs nothing.
    memory: BTreeMap<GpuAddress, (u64, Vec<u8>)>,
    next: GpuAddress,
    functions: Vec<(ModuleText, &'static str)>,
    has_context: bool,
    calls: usize,
    launches: usize,
}

#[derive(Debug)]
pub(crate) struct Fake<'f> {
    machine: Machine,
    state: RefCell<State>,
    /// What the second process holds.
    others: &'f Cell<u64>,
}

fn fail<T>(call: &'static str, code: i32) -> Result<T> {
    Err(CallFailure::new(call, CudaCode(code)))
}

impl Fake<'_> {
    /// Count a call, and report whether it is to do nothing.
    fn is_silent(&self) -> bool {
        let mut state = self.state.borrow_mut();
        state.calls += 1;
        self.machine.silent == Some(state.calls)
    }

    /// Return how many bytes the copy that was counted last leaves out.
    fn left_out(&self, bytes: usize) -> usize {
        if self.machine.half == Some(self.state.borrow().calls) {
            bytes / 2
        } else {
            0
        }
    }

    fn used(&self) -> u64 {
        let state = self.state.borrow();
        let context = if state.has_context { self.machine.context } else { 0 };
        context + self.others.get() + state.memory.values().map(|(size, _)| size).sum::<u64>()
    }

    /// Do something with the bytes from an address on.
    fn at<T>(&self, address: GpuAddress, bytes: usize, work: impl FnOnce(&mut [u8]) -> T) -> Result<T> {
        let mut state = self.state.borrow_mut();
        let Some((start, (size, content))) = state.memory.range_mut(..=address).next_back() else {
            return fail("memory", 700);
        };
        let from = (address - start) as usize;
        if from + bytes > *size as usize {
            return fail("memory", 700);
        }
        content.resize(*size as usize, 0);
        Ok(work(&mut content[from..from + bytes]))
    }

    fn read(&self, address: GpuAddress, bytes: usize) -> Result<Vec<u8>> {
        self.at(address, bytes, |place| place.to_vec())
    }

    fn write(&self, address: GpuAddress, bytes: &[u8]) -> Result<()> {
        self.at(address, bytes.len(), |place| place.copy_from_slice(bytes))
    }

    fn f32s(&self, address: u64, count: usize) -> Result<Vec<f32>> {
        let bytes = self.read(address, 4 * count)?;
        Ok(bytes
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect())
    }

    fn f64s(&self, address: u64, count: usize) -> Result<Vec<f64>> {
        let bytes = self.read(address, 8 * count)?;
        Ok(bytes
            .chunks_exact(8)
            .map(|b| f64::from_le_bytes(b.try_into().expect("eight")))
            .collect())
    }

    fn execute(&self, kernel: &str, grid: Grid, arguments: &[u64]) -> Result<()> {
        let threads = u64::from(grid.blocks.0) * u64::from(grid.blocks.1) * u64::from(grid.threads.0) * u64::from(grid.threads.1);
        match (kernel, arguments) {
            ("vector_add", &[a, b, c, n]) => {
                assert!(threads >= n && threads < n + 256, "one thread for each element");
                let n = n as usize;
                let sums: Vec<u8> = self
                    .f32s(a, n)?
                    .into_iter()
                    .zip(self.f32s(b, n)?)
                    .flat_map(|(a, b)| (a + b).to_le_bytes())
                    .collect();
                self.write(c, &sums)
            }
            ("fill", &[to, words, kind, seed]) => {
                let content: Vec<u8> = (0..words).flat_map(|i| word(i, kind, seed).to_le_bytes()).collect();
                self.write(to, &content)
            }
            ("check", &[from, words, kind, seed, result]) => {
                let content = self.read(from, 4 * words as usize)?;
                let wrong = |i: &u64| content[4 * *i as usize..][..4] != word(*i, kind, seed).to_le_bytes();
                let old = self.read(result, 24)?;
                let old = |index: usize| u64::from_le_bytes(old[8 * index..][..8].try_into().expect("eight"));
                let new = [
                    old(0) + (0..words).filter(wrong).count() as u64,
                    (0..words).find(wrong).unwrap_or(u64::MAX).min(old(1)),
                    old(2) + words,
                ];
                self.write(result, &new.map(u64::to_le_bytes).concat())
            }
            ("matmul_f32", &[a, b, c, n]) => {
                assert_eq!((threads, grid.threads), (n * n, (16, 16)));
                let n = n as usize;
                let (a, b) = (self.f32s(a, n * n)?, self.f32s(b, n * n)?);
                let product = product(n, |i, k| a[i * n + k], |k, j| b[k * n + j]);
                self.write(c, &product.into_iter().flat_map(f32::to_le_bytes).collect::<Vec<_>>())
            }
            ("matmul_f64", &[a, b, c, n]) => {
                let n = n as usize;
                let (a, b) = (self.f64s(a, n * n)?, self.f64s(b, n * n)?);
                let product = product(n, |i, k| a[i * n + k], |k, j| b[k * n + j]);
                self.write(c, &product.into_iter().flat_map(f64::to_le_bytes).collect::<Vec<_>>())
            }
            ("tensor", &[a, b, c, loops]) => {
                assert_eq!(grid.threads, (32, 1));
                let numbers = |bytes: Vec<u8>| -> Vec<f32> {
                    bytes
                        .chunks_exact(2)
                        .map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16))
                        .collect()
                };
                let (a, b) = (numbers(self.read(a, 512)?), numbers(self.read(b, 256)?));
                for block in 0..u64::from(grid.blocks.0) {
                    let mut result = Vec::new();
                    for (i, j) in (0..16).flat_map(|i| (0..8).map(move |j| (i, j))) {
                        let sum: f32 = (0..16).map(|k| a[16 * i + k] * b[16 * j + k]).sum();
                        result.extend((sum * loops as f32).to_le_bytes());
                    }
                    self.write(c + 512 * block, &result)?;
                }
                Ok(())
            }
            other => panic!("{other:?}"),
        }
    }
}

fn product<T: Copy + std::ops::Mul<Output = T> + std::iter::Sum>(
    n: usize,
    a: impl Fn(usize, usize) -> T,
    b: impl Fn(usize, usize) -> T,
) -> Vec<T> {
    let indices = (0..n).flat_map(|i| (0..n).map(move |j| (i, j)));
    indices.map(|(i, j)| (0..n).map(|k| a(i, k) * b(k, j)).sum()).collect()
}

fn word(i: u64, kind: u64, seed: u64) -> u32 {
    let (low, seed) = (i as u32, seed as u32);
    match kind {
        0 => seed,
        1 => low ^ (i >> 32) as u32 ^ seed,
        2 => {
            let mut x = low.wrapping_add(seed);
            if x == 0 {
                x = 0x9E37_79B9;
            }
            x ^= x << 13;
            x ^= x >> 17;
            x ^ (x << 5)
        }
        kind => panic!("kind {kind}"),
    }
}

impl Driver for Fake<'_> {
    fn init(&self) -> Result<()> {
        self.is_silent();
        Ok(())
    }

    fn version(&self) -> Result<i32> {
        self.is_silent();
        Ok(self.machine.cuda)
    }

    fn count(&self) -> Result<i32> {
        self.is_silent();
        Ok(self.machine.count)
    }

    fn device(&self, index: i32) -> Result<i32> {
        self.is_silent();
        Ok(index)
    }

    fn name(&self, _: i32) -> Result<String> {
        self.is_silent();
        Ok(self.machine.name.to_owned())
    }

    fn uuid(&self, device: i32) -> Result<[u8; 16]> {
        self.is_silent();
        Ok(std::array::from_fn(|index| index as u8 + device as u8))
    }

    fn attribute(&self, attribute: i32, _: i32) -> Result<i32> {
        self.is_silent();
        Ok(match attribute {
            16 => 2,
            20 => self.machine.mode,
            75 => self.machine.capability[0],
            76 => self.machine.capability[1],
            other => panic!("attribute {other}"),
        })
    }

    fn total(&self, _: i32) -> Result<u64> {
        self.is_silent();
        Ok(self.machine.total)
    }

    fn retain(&self, _: i32) -> Result<DriverHandle> {
        self.is_silent();
        if self.used() + self.machine.context > self.machine.total {
            return fail("cuDevicePrimaryCtxRetain", 2);
        }
        self.state.borrow_mut().has_context = true;
        Ok(DriverHandle(1))
    }

    fn release(&self, _: i32) -> Result<()> {
        self.is_silent();
        let mut state = self.state.borrow_mut();
        assert!(state.memory.is_empty(), "everything was freed");
        state.has_context = false;
        Ok(())
    }

    fn enter(&self, context: DriverHandle) -> Result<()> {
        self.is_silent();
        assert_eq!(context, DriverHandle(1));
        Ok(())
    }

    fn memory(&self) -> Result<(u64, u64)> {
        self.is_silent();
        Ok((self.machine.total.saturating_sub(self.used()), self.machine.total))
    }

    fn allocate(&self, bytes: u64) -> Result<GpuAddress> {
        self.is_silent();
        if self.used() + bytes > self.machine.total && !self.machine.unlimited {
            return fail("cuMemAlloc_v2", 2);
        }
        let mut state = self.state.borrow_mut();
        state.next += 1 << 40;
        let address = state.next;
        state.memory.insert(address, (bytes, Vec::new()));
        Ok(address)
    }

    fn free(&self, address: GpuAddress) -> Result<()> {
        self.is_silent();
        match self.state.borrow_mut().memory.remove(&address) {
            Some(_) => Ok(()),
            None => fail("cuMemFree_v2", 1),
        }
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<Pinned> {
        self.is_silent();
        Ok(Box::new(vec![0; bytes]))
    }

    fn free_pinned(&self, _: Pinned) -> Result<()> {
        self.is_silent();
        Ok(())
    }

    fn upload(&self, to: GpuAddress, from: &[u8]) -> Result<()> {
        if self.is_silent() {
            return Ok(());
        }
        let left_out = self.left_out(from.len());
        self.write(to + left_out as u64, &from[left_out..])
    }

    fn download(&self, to: &mut [u8], from: GpuAddress) -> Result<()> {
        if !self.is_silent() {
            let left_out = self.left_out(to.len());
            let to = &mut to[left_out..];
            to.copy_from_slice(&self.read(from + left_out as u64, to.len())?);
        }
        Ok(())
    }

    fn copy(&self, to: GpuAddress, from: GpuAddress, bytes: u64, _: DriverHandle) -> Result<()> {
        if self.is_silent() {
            return Ok(());
        }
        let left_out = self.left_out(bytes as usize) as u64;
        self.write(to + left_out, &self.read(from + left_out, (bytes - left_out) as usize)?)
    }

    fn set(&self, to: GpuAddress, value: u8, bytes: u64) -> Result<()> {
        self.is_silent();
        self.write(to, &vec![value; bytes as usize])
    }

    fn load(&self, text: ModuleText) -> Result<DriverHandle> {
        self.is_silent();
        Ok(DriverHandle(if text == ModuleText::Smoke { 10 } else { 11 }))
    }

    fn function(&self, module: DriverHandle, name: &'static str) -> Result<DriverHandle> {
        self.is_silent();
        let text = if module == DriverHandle(10) {
            ModuleText::Smoke
        } else {
            ModuleText::Tensor
        };
        let functions = &mut self.state.borrow_mut().functions;
        functions.push((text, name));
        Ok(DriverHandle(100 + functions.len() - 1))
    }

    fn unload(&self, _: DriverHandle) -> Result<()> {
        self.is_silent();
        Ok(())
    }

    fn launch(&self, function: DriverHandle, grid: Grid, arguments: &[KernelArgument], _: DriverHandle) -> Result<()> {
        let (text, name) = self.state.borrow().functions[function.0 - 100];
        assert!(agrees(text.ptx(), name, arguments), "{name}: {arguments:?}");
        if self.is_silent() {
            return Ok(());
        }
        let numbers: Vec<u64> = arguments
            .iter()
            .map(|argument| match *argument {
                KernelArgument::U32(number) => number.into(),
                KernelArgument::U64(number) => number,
            })
            .collect();
        self.execute(name, grid, &numbers)?;
        let mut state = self.state.borrow_mut();
        state.launches += 1;
        if self.machine.flip == Some(state.launches) {
            let last = state
                .memory
                .values_mut()
                .filter(|(_, content)| !content.is_empty())
                .max_by_key(|(size, _)| *size);
            let (size, content) = last.expect("memory");
            content[*size as usize / 2 + 1] ^= 0x40;
        }
        Ok(())
    }

    fn stream(&self) -> Result<DriverHandle> {
        self.is_silent();
        Ok(DriverHandle(2))
    }

    fn wait(&self, _: DriverHandle) -> Result<()> {
        self.is_silent();
        Ok(())
    }

    fn event(&self) -> Result<DriverHandle> {
        self.is_silent();
        Ok(DriverHandle(3))
    }

    fn record(&self, _: DriverHandle, _: DriverHandle) -> Result<()> {
        self.is_silent();
        Ok(())
    }

    fn elapsed(&self, _: DriverHandle, _: DriverHandle) -> Result<f32> {
        self.is_silent();
        Ok(0.5)
    }

    fn synchronize(&self) -> Result<()> {
        self.is_silent();
        Ok(())
    }
}

/// The second process of S09: it holds what is free, but for some MiB.
pub(crate) struct Neighbour<'n> {
    pub(crate) machine: Machine,
    pub(crate) others: &'n Cell<u64>,
    /// What it says, if it is not the truth.
    pub(crate) says: Option<HeldOrNot>,
    /// Whether its memory is part of what the driver shows to the first process.
    pub(crate) is_seen: bool,
    pub(crate) first_holds: u64,
}

pub(crate) type HeldOrNot = std::result::Result<HeldMemory, StepProblem>;
pub(crate) type LimitOrNot = std::result::Result<Option<GuardLimit>, NoLimits>;

impl SecondProcess for Neighbour<'_> {
    fn hold(&mut self) -> HeldOrNot {
        let held = (self.machine.total - self.machine.context * 2 - self.first_holds) / MIB / 16 * 16 * MIB;
        if self.is_seen {
            self.others.set(held + self.machine.context);
        }
        self.says.clone().unwrap_or(Ok(HeldMemory {
            bytes: held,
            refused: Some(2),
        }))
    }

    fn end(&mut self) -> std::result::Result<(), StepProblem> {
        self.others.set(0);
        Ok(())
    }
}

/// What a run on the driver in memory does.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) machine: Machine,
    pub(crate) steps: Vec<StepId>,
    pub(crate) isolation: bool,
    pub(crate) tensor: bool,
    pub(crate) all_memory: bool,
    pub(crate) sample: bool,
    pub(crate) asked: AskedGpu,
    pub(crate) limit: LimitOrNot,
    pub(crate) sizes: Option<Sizes>,
    /// The call with this number returns this code.
    pub(crate) fault: Option<(usize, i32)>,
    pub(crate) second: Option<HeldOrNot>,
    pub(crate) second_is_seen: bool,
}

impl Default for Case {
    fn default() -> Case {
        Case {
            machine: Machine::default(),
            steps: StepId::ALL.to_vec(),
            isolation: false,
            tensor: false,
            all_memory: false,
            sample: false,
            asked: AskedGpu::default(),
            limit: Ok(None),
            sizes: Some(SMALL),
            fault: None,
            second: None,
            second_is_seen: true,
        }
    }
}

/// What a run said, and which calls it made in which steps.
#[derive(Debug, Default)]
pub(crate) struct Ran {
    pub(crate) gpu: Option<TestedGpu>,
    pub(crate) steps: Vec<SmokeStep>,
    pub(crate) lines: Vec<String>,
    pub(crate) calls: Vec<(StepId, &'static str)>,
}

impl Ran {
    pub(crate) fn report(&self) -> SmokeReport {
        SmokeReport::new(self.gpu.clone(), self.steps.clone())
    }

    /// Return the ids of the steps that failed.
    pub(crate) fn failed(&self) -> Vec<StepId> {
        let failed = |step: &&SmokeStep| step.status == divvy_smoke_report::StepStatus::Fail;
        self.steps.iter().filter(failed).map(|step| step.id).collect()
    }
}

impl Case {
    pub(crate) fn of(machine: Machine) -> Case {
        Case {
            machine,
            ..Case::default()
        }
    }

    /// A container with all steps: a share that the guard limits.
    pub(crate) fn isolated() -> Case {
        let machine = Machine::default();
        Case {
            isolation: true,
            tensor: true,
            limit: Ok(Some(GuardLimit {
                bytes: machine.total,
                context: machine.context,
            })),
            asked: AskedGpu {
                grant: GivenShare {
                    uuids: vec![UUID.to_owned()],
                    units: Some((2, 80)),
                },
                ..AskedGpu::default()
            },
            ..Case::of(machine)
        }
    }

    pub(crate) fn run(&self) -> Ran {
        let (others, current, calls) = (Cell::new(0), Cell::new(StepId::S01), RefCell::new(Vec::new()));
        let driver = Hooked {
            driver: Fake {
                machine: self.machine.clone(),
                state: RefCell::default(),
                others: &others,
            },
            before: |call: &'static str| {
                calls.borrow_mut().push((current.get(), call));
                match self.fault {
                    Some((number, code)) if number == calls.borrow().len() => fail(call, code),
                    _ => Ok(()),
                }
            },
        };
        let free = self.machine.total.saturating_sub(self.machine.context);
        let mut second = Neighbour {
            machine: self.machine.clone(),
            others: &others,
            says: self.second.clone(),
            is_seen: self.second_is_seen,
            first_holds: free / 4,
        };
        let plan = SmokePlan {
            steps: self.steps.clone(),
            isolation: self.isolation,
            tensor: self.tensor,
            all_memory: self.all_memory,
            sample: self.sample,
            asked: self.asked.clone(),
            sizes: self.sizes,
        };
        let mut ran = Ran::default();
        run(
            &driver,
            &plan,
            &mut SmokeWorld {
                library: "/usr/lib64/libcuda.so.1",
                limit: &|_| self.limit.clone(),
                begin: &|id| current.set(id),
                second: &mut second,
                tell: &mut |message| match message {
                    Message::Gpu(gpu) => ran.gpu = Some(gpu),
                    Message::Step(step) => ran.steps.push(SmokeStep { ms: 0, ..step }),
                    Message::Line(line) => ran.lines.push(line),
                    Message::Error(line) => ran.lines.push(format!("stderr: {line}")),
                    Message::Held(held) => panic!("{held:?}"),
                },
            },
        );
        drop(driver);
        ran.calls = calls.into_inner();
        ran
    }
}
