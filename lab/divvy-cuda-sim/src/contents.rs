//! What is in the memory of the GPU. It takes no main memory before something is written there, and is zero until then.

use std::ptr::NonNull;

use crate::driver::SimulatedDriver;
use crate::memory::{AllocationKind, Mapping, ProcessMemory};
use crate::vmm::Vmm;

/// A range of addresses that belong together.
#[derive(Debug, Clone, Copy)]
struct AddressSpan {
    start: u64,
    bytes: u64,
    /// What is there; `None` for zeros. It is valid as long as the allocation.
    data: Option<NonNull<u8>>,
}

impl AddressSpan {
    /// Return a pointer to this many bytes at an address. `None` if they are not all inside, or were never written.
    fn at(&self, address: u64, bytes: u64) -> Option<NonNull<u8>> {
        let offset = address.checked_sub(self.start)?;
        let end = offset.checked_add(bytes)?;
        let inside = (end <= self.bytes).then_some(offset)?;
        // SAFETY: the offset is inside the mapping, which has at least as many bytes as the span.
        Some(unsafe { self.data?.add(usize::try_from(inside).ok()?) })
    }
}

/// Find the memory that contains an address. `write`: give it contents if it has none.
fn span(memory: &mut ProcessMemory, vmm: &mut Vmm, address: u64, write: bool) -> Option<AddressSpan> {
    let (start, bytes, contents) = match memory.containing_mut(address) {
        Some((start, allocation)) => match &allocation.kind {
            AllocationKind::Managed(mapping, _) | AllocationKind::Host(mapping) => {
                return Some(AddressSpan {
                    start,
                    bytes: allocation.bytes,
                    data: Some(mapping.pointer()),
                });
            }
            _ => (start, allocation.bytes, &mut allocation.contents),
        },
        None => {
            let (start, handle) = vmm.mapping_at(address)?;
            let (bytes, _) = vmm.mapped[&start];
            let physical = vmm.physical.get_mut(&handle)?;
            // A mapping is the beginning of the physical memory, and may be less than all of it.
            if write && physical.contents.is_none() {
                physical.contents = Some(Mapping::new(physical.bytes)?);
            }
            (start, bytes, &mut physical.contents)
        }
    };
    if write && contents.is_none() {
        *contents = Some(Mapping::new(bytes)?);
    }
    Some(AddressSpan {
        start,
        bytes,
        data: contents.as_ref().map(Mapping::pointer),
    })
}

impl SimulatedDriver {
    /// Return a pointer to memory that is written. `None` if this is not all in one allocation or mapping, or there is no main memory for it.
    pub(crate) fn writable(&mut self, address: u64, bytes: u64) -> Option<NonNull<u8>> {
        span(&mut self.memory, &mut self.vmm, address, true)?.at(address, bytes)
    }

    /// Return a pointer to memory that is read. `None` for zeros, if nothing was ever written there.
    pub(crate) fn readable(&mut self, address: u64, bytes: u64) -> Option<NonNull<u8>> {
        span(&mut self.memory, &mut self.vmm, address, false)?.at(address, bytes)
    }

    /// Invert a byte, as memory that is broken does.
    pub(crate) fn corrupt(&mut self, address: u64) {
        match self.writable(address, 1) {
            // SAFETY: one byte is there, and nothing else uses the memory: the driver is locked, and a program may not use it during a call.
            Some(byte) => unsafe { *byte.as_ptr() ^= 0xff },
            None => crate::trace::complain(&format!("DIVVY_CUDA_SIM_WRONG: there is no memory at {address:#x}")),
        }
    }
}

/// The memory of the GPU as a kernel sees it.
#[derive(Debug)]
pub(crate) struct KernelMemory<'d> {
    memory: &'d mut ProcessMemory,
    vmm: &'d mut Vmm,
    /// The spans that were used last, because a search for each access takes too long.
    last: [AddressSpan; 4],
    next: usize,
}

impl<'d> KernelMemory<'d> {
    pub(crate) fn new(memory: &'d mut ProcessMemory, vmm: &'d mut Vmm) -> KernelMemory<'d> {
        let none = AddressSpan {
            start: 0,
            bytes: 0,
            data: None,
        };
        KernelMemory {
            memory,
            vmm,
            last: [none; 4],
            next: 0,
        }
    }

    fn at(&mut self, address: u64, bytes: u64) -> Option<NonNull<u8>> {
        if let Some(found) = self.last.iter().find_map(|span| span.at(address, bytes)) {
            return Some(found);
        }
        let span = span(self.memory, self.vmm, address, true)?;
        self.last[self.next] = span;
        self.next = (self.next + 1) % self.last.len();
        span.at(address, bytes)
    }
}

impl divvy_ptx::DeviceMemory for KernelMemory<'_> {
    fn load(&mut self, address: u64, to: &mut [u8]) -> Option<()> {
        let from = self.at(address, to.len() as u64)?;
        // SAFETY: this many bytes are there. They do not overlap `to`, which is the interpreter's own.
        unsafe { from.as_ptr().copy_to_nonoverlapping(to.as_mut_ptr(), to.len()) };
        Some(())
    }

    fn store(&mut self, address: u64, from: &[u8]) -> Option<()> {
        let to = self.at(address, from.len() as u64)?;
        // SAFETY: as in `load`.
        unsafe { to.as_ptr().copy_from_nonoverlapping(from.as_ptr(), from.len()) };
        Some(())
    }
}
