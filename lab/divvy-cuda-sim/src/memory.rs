//! Allocations by address: linear, pitched, and managed.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::ptr::NonNull;

use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::codes::{CuCode, INVALID_VALUE, OUT_OF_MEMORY};
use crate::share::Common;

/// Where the addresses of device memory begin, as with the real driver.
const FIRST_ADDRESS: u64 = 0x3_0200_0000;
/// Where the addresses begin that the 32-bit symbols of CUDA 3.1 and before return.
const FIRST_LOW_ADDRESS: u64 = 0x1000_0000;
/// The alignment of rows. The drivers return a pitch that is a multiple of 512.
const PITCH: u64 = 512;

/// The allocations of this process.
#[derive(Debug)]
pub(crate) struct ProcessMemory {
    pub(crate) allocations: BTreeMap<u64, MemoryAllocation>,
    next_address: u64,
    next_low_address: u64,
}

/// An allocation.
#[derive(Debug)]
pub(crate) struct MemoryAllocation {
    pub(crate) device: usize,
    /// The context with which it ends; `None` if it does not.
    pub(crate) context: Option<usize>,
    /// The size that was asked for.
    pub(crate) bytes: u64,
    pub(crate) kind: AllocationKind,
    /// If other processes may have it, too.
    pub(crate) common: Option<Common>,
    /// What is in it, since something was first written there.
    pub(crate) contents: Option<Mapping>,
}

impl MemoryAllocation {
    pub(crate) fn new(device: usize, context: Option<usize>, bytes: u64, kind: AllocationKind) -> MemoryAllocation {
        MemoryAllocation {
            device,
            context,
            bytes,
            kind,
            common: None,
            contents: None,
        }
    }
}

/// What an allocation takes of the GPU.
#[derive(Debug)]
pub(crate) enum AllocationKind {
    /// Pages of its own: how many bytes.
    Pages(u64),
    /// A part of a page that it shares.
    Small,
    /// Memory that the processor can use, too; in the simulation all of it counts as the GPU's.
    Managed(Mapping, u64),
    /// A part of what a pool has reserved.
    Pool(usize),
    /// A part of what the graphs of the device have reserved.
    Graph,
    /// Memory of another process, or of another handle: it costs nothing here.
    Borrowed,
    /// Main memory that the GPU can use.
    Host(Mapping),
}

impl Default for ProcessMemory {
    fn default() -> ProcessMemory {
        ProcessMemory {
            allocations: BTreeMap::new(),
            next_address: FIRST_ADDRESS,
            next_low_address: FIRST_LOW_ADDRESS,
        }
    }
}

impl ProcessMemory {
    /// Reserve addresses for whole pages. They are never used again, so that a pointer that was freed stays unknown.
    pub(crate) fn addresses(&mut self, bytes: u64, align: u64) -> Result<u64, CuCode> {
        let address = self.next_address.checked_next_multiple_of(align).ok_or(OUT_OF_MEMORY)?;
        // The addresses of a 64-bit program have 47 bits.
        let next = address
            .checked_add(bytes)
            .filter(|next| *next < 1 << 47)
            .ok_or(OUT_OF_MEMORY)?;
        self.next_address = next;
        Ok(address)
    }

    /// Reserve addresses below 4 GiB for whole pages.
    pub(crate) fn low_addresses(&mut self, bytes: u64) -> Result<u64, CuCode> {
        let address = self.next_low_address;
        let next = address.checked_add(bytes).filter(|next| *next <= u64::from(u32::MAX));
        self.next_low_address = next.ok_or(OUT_OF_MEMORY)?;
        Ok(address)
    }

    /// Return the allocation that contains the address, with its beginning.
    pub(crate) fn containing(&self, address: u64) -> Option<(u64, &MemoryAllocation)> {
        let (start, allocation) = self.allocations.range(..=address).next_back()?;
        (address - start < allocation.bytes).then_some((*start, allocation))
    }

    /// Return the same, to change it.
    pub(crate) fn containing_mut(&mut self, address: u64) -> Option<(u64, &mut MemoryAllocation)> {
        let (start, allocation) = self.allocations.range_mut(..=address).next_back()?;
        (address - start < allocation.bytes).then_some((*start, allocation))
    }

    /// Remove what ends with a context. Return what of it had pages of its own.
    pub(crate) fn forget_context(&mut self, handle: usize) -> Vec<(u64, Option<Common>)> {
        let ended = self
            .allocations
            .extract_if(.., |_, allocation| allocation.context == Some(handle));
        ended
            .filter_map(|(_, allocation)| match allocation.kind {
                AllocationKind::Pages(bytes) | AllocationKind::Managed(_, bytes) => Some((bytes, allocation.common)),
                AllocationKind::Small
                | AllocationKind::Pool(_)
                | AllocationKind::Graph
                | AllocationKind::Borrowed
                | AllocationKind::Host(_) => None,
            })
            .collect()
    }
}

/// Return the distance of two rows of this width.
pub(crate) fn rows(width: u64, height: u64, element: u32) -> Result<u64, CuCode> {
    if !matches!(element, 4 | 8 | 16) || width == 0 || height == 0 {
        return Err(INVALID_VALUE);
    }
    width.checked_next_multiple_of(PITCH).ok_or(OUT_OF_MEMORY)
}

/// Main memory behind an allocation.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<std::ffi::c_void>,
    bytes: usize,
}

// SAFETY: the memory is only mapped and unmapped here, which any thread may do.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Map memory that takes no space before it is used. `None` if there is none.
    pub(crate) fn new(bytes: u64) -> Option<Mapping> {
        let bytes = NonZeroUsize::new(usize::try_from(bytes).ok()?)?;
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses touches no memory of this process.
        let start = unsafe { mmap_anonymous(None, bytes, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, flags) };
        start.ok().map(|start| Mapping {
            start,
            bytes: bytes.get(),
        })
    }

    /// Return a pointer to the memory. It is valid as long as the mapping.
    pub(crate) fn pointer(&self) -> NonNull<u8> {
        self.start.cast()
    }

    /// Return the address.
    pub(crate) fn address(&self) -> u64 {
        self.start.addr().get() as u64
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this is the whole mapping that `new` made; the program has freed it, so nothing uses it any more.
        // It can only fail for an invalid range, and then nothing is left to undo.
        let _ = unsafe { munmap(self.start, self.bytes) };
    }
}
