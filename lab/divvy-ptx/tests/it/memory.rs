//! Memory for kernels: a window of bytes at an address.

use divvy_ptx::{DeviceMemory, Kernel, KernelFault, KernelLaunch, KernelOutcome, Module, ThreadOrder};

/// The kernels of `divvy smoke`.
pub(crate) const SMOKE: &str = include_str!("../../../../crates/divvy-smoke/src/kernels/smoke.ptx");
pub(crate) const TENSOR: &str = include_str!("../../../../crates/divvy-smoke/src/kernels/tensor.ptx");

/// What no kernel of a test writes.
const UNWRITTEN: u8 = 0xee;

/// Bytes at an address. Everything else is no memory.
pub(crate) struct Window {
    start: u64,
    bytes: Vec<u8>,
    /// What another thread writes after the first load of an address.
    pub(crate) race: Option<(u64, u64)>,
}

impl Window {
    pub(crate) fn new(start: u64, length: usize) -> Window {
        Window {
            start,
            race: None,
            bytes: vec![UNWRITTEN; length],
        }
    }

    fn range(&self, address: u64, length: usize) -> Option<std::ops::Range<usize>> {
        let start = usize::try_from(address.checked_sub(self.start)?).ok()?;
        let end = start.checked_add(length).filter(|end| *end <= self.bytes.len())?;
        Some(start..end)
    }

    pub(crate) fn put(&mut self, address: u64, bytes: &[u8]) {
        self.store(address, bytes).expect("inside");
    }

    pub(crate) fn get(&mut self, address: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.load(address, &mut bytes).expect("inside");
        bytes
    }

    pub(crate) fn words(&mut self, address: u64, count: usize) -> Vec<u32> {
        let bytes = self.get(address, 4 * count);
        bytes
            .as_chunks::<4>()
            .0
            .iter()
            .map(|bytes| u32::from_le_bytes(*bytes))
            .collect()
    }

    /// Whether all bytes outside of a range are as they were.
    pub(crate) fn untouched_but(&self, address: u64, length: usize) -> bool {
        let range = self.range(address, length).expect("inside");
        let outside = self.bytes[..range.start].iter().chain(&self.bytes[range.end..]);
        outside.into_iter().all(|byte| *byte == UNWRITTEN)
    }
}

impl DeviceMemory for Window {
    fn load(&mut self, address: u64, to: &mut [u8]) -> Option<()> {
        to.copy_from_slice(&self.bytes[self.range(address, to.len())?]);
        if let Some((_, value)) = self.race.take_if(|(at, _)| *at == address) {
            self.put(address, &value.to_le_bytes());
        }
        Some(())
    }

    fn store(&mut self, address: u64, from: &[u8]) -> Option<()> {
        let range = self.range(address, from.len())?;
        self.bytes[range].copy_from_slice(from);
        Some(())
    }
}

/// An argument of a kernel.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Argument {
    U32(u32),
    U64(u64),
}
pub(crate) use Argument::{U32, U64};

/// Return the bytes of arguments as the kernel's parameters want them.
pub(crate) fn parameters(kernel: &Kernel, arguments: &[Argument]) -> Vec<u8> {
    assert_eq!(arguments.len(), kernel.parameters().len(), "{}", kernel.name());
    let mut bytes = vec![0; kernel.parameter_bytes()];
    for (parameter, argument) in kernel.parameters().iter().zip(arguments) {
        let value = match argument {
            U32(value) => value.to_le_bytes().to_vec(),
            U64(value) => value.to_le_bytes().to_vec(),
        };
        assert_eq!(value.len(), parameter.bytes, "{}", parameter.name);
        bytes[parameter.offset..parameter.offset + parameter.bytes].copy_from_slice(&value);
    }
    bytes
}

pub(crate) fn launch(
    kernel: &Kernel,
    grid: [u32; 2],
    block: [u32; 2],
    arguments: &[Argument],
    order: ThreadOrder,
) -> KernelLaunch {
    KernelLaunch {
        grid: [grid[0], grid[1], 1],
        only: None,
        block: [block[0], block[1], 1],
        parameters: parameters(kernel, arguments),
        order,
        timer: 1_000_000_000,
        limit: 100_000_000,
    }
}

/// Run a kernel of a module.
pub(crate) fn run(
    module: &Module,
    name: &str,
    grid: [u32; 2],
    block: [u32; 2],
    arguments: &[Argument],
    memory: &mut Window,
) -> Result<KernelOutcome, KernelFault> {
    let kernel = module.kernel(name).expect("the kernel");
    kernel.run(&launch(kernel, grid, block, arguments, ThreadOrder::Forward), memory)
}

pub(crate) fn module(text: &str) -> Module {
    Module::parse(text, |_| false).expect("a module")
}
