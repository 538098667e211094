//! Allocations of the driver: linear, pitched, managed, and main memory.

use super::SimulatedDriver;
use crate::codes::{CuCode, INVALID_VALUE, OUT_OF_MEMORY};
use crate::memory::{AllocationKind, Mapping, MemoryAllocation, rows};
use crate::share::Common;
use crate::slab::{LARGE, PAGE, pages};

impl SimulatedDriver {
    /// Allocate linear memory in the current context.
    pub(crate) fn allocate(&mut self, bytes: u64) -> Result<u64, CuCode> {
        let (context, device) = self.place(bytes)?;
        if bytes < LARGE {
            self.allocate_small(context, device, bytes)
        } else {
            self.allocate_pages(bytes)
        }
    }

    /// Allocate linear memory in the current context that has pages of its own.
    pub(crate) fn allocate_pages(&mut self, bytes: u64) -> Result<u64, CuCode> {
        let (context, device) = self.place(bytes)?;
        let taken = pages(bytes).ok_or(OUT_OF_MEMORY)?;
        let address = self.memory.addresses(taken, PAGE)?;
        self.take(device, taken)?;
        self.record(address, device, context, bytes, AllocationKind::Pages(taken));
        Ok(address)
    }

    /// Allocate linear memory with an address of 32 bits, which always has pages of its own.
    pub(crate) fn allocate_low(&mut self, bytes: u64) -> Result<u64, CuCode> {
        let (context, device) = self.place(bytes)?;
        let taken = pages(bytes).ok_or(OUT_OF_MEMORY)?;
        let address = self.memory.low_addresses(taken)?;
        self.take(device, taken)?;
        self.record(address, device, context, bytes, AllocationKind::Pages(taken));
        Ok(address)
    }

    fn allocate_small(&mut self, handle: usize, device: usize, bytes: u64) -> Result<u64, CuCode> {
        let slabs = |driver: &mut SimulatedDriver| {
            driver
                .contexts
                .get_mut(&handle)
                .and_then(|context| context.slabs.allocate(bytes))
        };
        let address = match slabs(self) {
            Some(address) => address,
            None => {
                let page = self.memory.addresses(PAGE, PAGE)?;
                self.take(device, PAGE)?;
                if let Some(context) = self.contexts.get_mut(&handle) {
                    context.slabs.add(page);
                }
                slabs(self).ok_or(OUT_OF_MEMORY)?
            }
        };
        self.record(address, device, handle, bytes, AllocationKind::Small);
        Ok(address)
    }

    /// Allocate rows. Return the address and the distance of two rows.
    pub(crate) fn allocate_pitch(&mut self, width: u64, height: u64, element: u32) -> Result<(u64, u64), CuCode> {
        self.current()?;
        let pitch = rows(width, height, element)?;
        let bytes = pitch.checked_mul(height).ok_or(OUT_OF_MEMORY)?;
        Ok((self.allocate(bytes)?, pitch))
    }

    /// Allocate managed memory in the current context.
    pub(crate) fn allocate_managed(&mut self, bytes: u64) -> Result<u64, CuCode> {
        let (context, device) = self.place(bytes)?;
        let taken = pages(bytes).ok_or(OUT_OF_MEMORY)?;
        self.take(device, taken)?;
        let Some(mapping) = Mapping::new(taken) else {
            self.devices[device].give(taken)?;
            return Err(OUT_OF_MEMORY);
        };
        let address = mapping.address();
        self.record(address, device, context, bytes, AllocationKind::Managed(mapping, taken));
        Ok(address)
    }

    /// Free an allocation. NULL is allowed, as with the real driver (measured: <https://github.com/lupinemachines/lupine/pull/858>).
    pub(crate) fn free(&mut self, address: u64) -> Result<(), CuCode> {
        let device = self.current_device()?;
        match self.memory.allocations.get(&address).map(|allocation| &allocation.kind) {
            _ if address == 0 => Ok(()),
            Some(AllocationKind::Host(_)) | None => Err(INVALID_VALUE),
            Some(AllocationKind::Pool(_)) => {
                self.release(address)?;
                // cuMemFree synchronizes, cuMemFreeAsync does not.
                self.settle_pools(device)
            }
            Some(_) => self.release(address),
        }
    }

    /// Free an allocation of any kind.
    pub(crate) fn release(&mut self, address: u64) -> Result<(), CuCode> {
        let allocation = self.memory.allocations.remove(&address).ok_or(INVALID_VALUE)?;
        let device = &mut self.devices[allocation.device];
        match allocation.kind {
            AllocationKind::Pages(bytes) | AllocationKind::Managed(_, bytes) => {
                self.give_common(allocation.device, bytes, allocation.common)
            }
            AllocationKind::Small => {
                let context = allocation.context.and_then(|handle| self.contexts.get_mut(&handle));
                if context.is_some_and(|context| context.slabs.free(address)) {
                    device.give(PAGE)
                } else {
                    Ok(())
                }
            }
            AllocationKind::Pool(pool) => self.free_to_pool(pool, allocation.bytes),
            AllocationKind::Graph => {
                device.graphs.used -= allocation.bytes;
                Ok(())
            }
            AllocationKind::Borrowed => match (allocation.common, pages(allocation.bytes)) {
                (Some(common), Some(bytes)) => self.give_common(allocation.device, bytes, Some(common)),
                _ => Ok(()),
            },
            AllocationKind::Host(_) => Ok(()),
        }
    }

    /// Give memory an address that another process or another handle has, too.
    pub(crate) fn borrow(&mut self, device: usize, bytes: u64, common: Option<Common>) -> Result<u64, CuCode> {
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        let taken = pages(bytes).ok_or(OUT_OF_MEMORY)?;
        let address = self.memory.addresses(taken, PAGE)?;
        if common.as_ref().is_some_and(|common| common.pays) {
            self.take(device, taken)?;
        }
        let mut allocation = MemoryAllocation::new(device, None, bytes, AllocationKind::Borrowed);
        allocation.common = common;
        self.memory.allocations.insert(address, allocation);
        Ok(address)
    }

    /// Allocate main memory.
    pub(crate) fn allocate_host(&mut self, bytes: u64) -> Result<u64, CuCode> {
        let (context, device) = self.place(bytes)?;
        let mapping = Mapping::new(bytes).ok_or(OUT_OF_MEMORY)?;
        let address = mapping.address();
        self.record(address, device, context, bytes, AllocationKind::Host(mapping));
        Ok(address)
    }

    /// Free main memory. NULL is allowed, as with the real driver.
    pub(crate) fn free_host(&mut self, address: u64) -> Result<(), CuCode> {
        self.current()?;
        match self.memory.allocations.get(&address).map(|allocation| &allocation.kind) {
            _ if address == 0 => Ok(()),
            Some(AllocationKind::Host(_)) => self.release(address),
            _ => Err(INVALID_VALUE),
        }
    }

    /// Return the current context and its device, if the size can be allocated at all.
    fn place(&self, bytes: u64) -> Result<(usize, usize), CuCode> {
        let context = self.current()?;
        match bytes {
            0 => Err(INVALID_VALUE),
            _ => Ok((context, self.contexts[&context].device)),
        }
    }

    fn record(&mut self, address: u64, device: usize, context: usize, bytes: u64, kind: AllocationKind) {
        let allocation = MemoryAllocation::new(device, Some(context), bytes, kind);
        self.memory.allocations.insert(address, allocation);
    }
}
