//! Arrays, imported memory, and green contexts of the driver.

use super::SimulatedDriver;
use crate::codes::{CuCode, INVALID_HANDLE, INVALID_VALUE};
use crate::memory::AllocationKind;
use crate::objects::{SimArrayShape, WITHOUT_MEMORY};

impl SimulatedDriver {
    /// Make an array in the current context.
    pub(crate) fn create_array(&mut self, shape: SimArrayShape, levels: u32) -> Result<usize, CuCode> {
        self.current()?;
        let bytes = shape.bytes(levels)?;
        let address = match shape.flags & WITHOUT_MEMORY {
            0 => Some(self.allocate(bytes)?),
            _ => None,
        };
        let handle = self.new_handle();
        self.objects.arrays.insert(handle, address);
        Ok(handle)
    }

    /// Return an array that is a level of another one, and has no memory of its own.
    pub(crate) fn level_of(&mut self, array: usize) -> Result<usize, CuCode> {
        self.objects.arrays.get(&array).ok_or(INVALID_HANDLE)?;
        let handle = self.new_handle();
        self.objects.arrays.insert(handle, None);
        Ok(handle)
    }

    pub(crate) fn destroy_array(&mut self, handle: usize) -> Result<(), CuCode> {
        match self.objects.arrays.remove(&handle) {
            // A context that has ended has taken the memory with it.
            Some(Some(address)) if self.memory.allocations.contains_key(&address) => self.release(address),
            Some(_) => Ok(()),
            None => Err(INVALID_HANDLE),
        }
    }

    /// Import memory that another API, such as Vulkan, allocated in this process. It counts here, because no library simulates
    /// that API.
    pub(crate) fn import_external(&mut self, bytes: u64) -> Result<usize, CuCode> {
        let address = self.allocate_pages(bytes)?;
        let handle = self.new_handle();
        self.objects.external.insert(handle, (address, bytes));
        Ok(handle)
    }

    pub(crate) fn destroy_external(&mut self, handle: usize) -> Result<(), CuCode> {
        let (address, _) = self.objects.external.remove(&handle).ok_or(INVALID_HANDLE)?;
        match self.memory.allocations.get(&address).map(|allocation| &allocation.kind) {
            Some(AllocationKind::Pages(_)) => self.release(address),
            _ => Ok(()),
        }
    }

    /// Give a part of imported memory an address.
    pub(crate) fn map_external(&mut self, handle: usize, offset: u64, bytes: u64) -> Result<u64, CuCode> {
        let (address, whole) = *self.objects.external.get(&handle).ok_or(INVALID_HANDLE)?;
        if bytes == 0 || offset.checked_add(bytes).is_none_or(|end| end > whole) {
            return Err(INVALID_VALUE);
        }
        let device = self.memory.allocations.get(&address).ok_or(INVALID_HANDLE)?.device;
        self.borrow(device, bytes, None)
    }

    /// Make a green context. It is a part of the device's primary context, which it retains.
    pub(crate) fn create_green(&mut self, device: usize) -> Result<usize, CuCode> {
        self.retain_primary(device)?;
        let handle = self.new_handle();
        self.objects.green.insert(handle, device);
        Ok(handle)
    }

    pub(crate) fn destroy_green(&mut self, handle: usize) -> Result<(), CuCode> {
        let device = self.objects.green.remove(&handle).ok_or(INVALID_HANDLE)?;
        self.release_primary(device)
    }

    /// Return the context of a green context, which is the primary one in the simulation.
    pub(crate) fn context_of_green(&self, handle: usize) -> Result<usize, CuCode> {
        let device = self.objects.green.get(&handle).ok_or(INVALID_HANDLE)?;
        Ok(self.devices[*device].primary.handle)
    }
}
