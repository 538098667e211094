//! Virtual memory management of the driver.

use super::SimulatedDriver;
use crate::codes::{CuCode, INVALID_DEVICE, INVALID_VALUE, OUT_OF_MEMORY};
use crate::share::Common;
use crate::slab::PAGE;
use crate::vmm::{MemoryPlace, Physical, granular};

impl SimulatedDriver {
    /// Return the place of a CUmemLocation.
    pub(crate) fn place_of(&self, kind: i32, id: i32) -> Result<MemoryPlace, CuCode> {
        match kind {
            1 => self.device(id).map(MemoryPlace::Device).map_err(|_| INVALID_DEVICE),
            // CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN of CUDA 13.5: the lowest byte is the device.
            6 if self.version >= 13050 => self.device(id & 0xff).map(MemoryPlace::Device).map_err(|_| INVALID_DEVICE),
            // CU_MEM_LOCATION_TYPE_HOST, HOST_NUMA, and HOST_NUMA_CURRENT appeared in CUDA 12.2.
            2..=4 if self.version >= 12020 => Ok(MemoryPlace::Host),
            _ => Err(INVALID_VALUE),
        }
    }

    /// Create physical memory, or have what another process has created.
    pub(crate) fn create_physical(&mut self, place: MemoryPlace, bytes: u64, common: Option<Common>) -> Result<usize, CuCode> {
        granular(bytes)?;
        if let (MemoryPlace::Device(device), true) = (place, common.as_ref().is_none_or(|common| common.pays)) {
            self.take(device, bytes)?;
        }
        let handle = self.new_handle();
        let physical = Physical {
            place,
            bytes,
            common,
            handles: 1,
            mappings: 0,
            contents: None,
        };
        self.vmm.physical.insert(handle, physical);
        Ok(handle)
    }

    /// Give a handle up.
    pub(crate) fn release_physical(&mut self, handle: usize) -> Result<(), CuCode> {
        self.vmm.known(handle)?.handles -= 1;
        self.collect(handle)
    }

    /// Free physical memory that nothing refers to.
    fn collect(&mut self, handle: usize) -> Result<(), CuCode> {
        let unused = |physical: &Physical| physical.handles == 0 && physical.mappings == 0;
        if !self.vmm.physical.get(&handle).is_some_and(unused) {
            return Ok(());
        }
        match self.vmm.physical.remove(&handle) {
            Some(Physical {
                place: MemoryPlace::Device(device),
                bytes,
                common,
                ..
            }) => self.give_common(device, bytes, common),
            _ => Ok(()),
        }
    }

    /// Return another handle of the memory that is mapped at an address.
    pub(crate) fn retain_physical(&mut self, address: u64) -> Result<usize, CuCode> {
        let (_, handle) = self.vmm.mapping_at(address).ok_or(INVALID_VALUE)?;
        let physical = self.vmm.physical.get_mut(&handle).ok_or(INVALID_VALUE)?;
        physical.handles += 1;
        Ok(handle)
    }

    /// Reserve addresses.
    pub(crate) fn reserve(&mut self, bytes: u64, align: u64) -> Result<u64, CuCode> {
        granular(bytes)?;
        let align = match align {
            0 => PAGE,
            align if align.is_power_of_two() => align.max(PAGE),
            _ => return Err(INVALID_VALUE),
        };
        let address = self.memory.addresses(bytes, align).map_err(|_| OUT_OF_MEMORY)?;
        self.vmm.reserved.insert(address, bytes);
        Ok(address)
    }

    /// Give a whole reserved range back, in which nothing is mapped.
    pub(crate) fn unreserve(&mut self, address: u64, bytes: u64) -> Result<(), CuCode> {
        let matches = self.vmm.reserved.get(&address) == Some(&bytes);
        if !matches || self.vmm.mapped.range(address..address + bytes).next().is_some() {
            return Err(INVALID_VALUE);
        }
        self.vmm.reserved.remove(&address);
        Ok(())
    }

    /// Map the beginning of physical memory into a reserved range.
    pub(crate) fn map(&mut self, address: u64, bytes: u64, offset: u64, handle: usize) -> Result<(), CuCode> {
        granular(bytes)?;
        let end = address.checked_add(bytes).ok_or(INVALID_VALUE)?;
        let inside = self.vmm.reserved.range(..=address).next_back();
        let inside = inside.is_some_and(|(start, length)| end <= start + length);
        let last = self.vmm.mapped.range(..end).next_back();
        let overlaps = last.is_some_and(|(start, (length, _))| start + length > address);
        let physical = self.vmm.known(handle)?;
        // The offset "currently must be zero" (cuda.h, cuMemMap).
        if !inside || overlaps || !address.is_multiple_of(PAGE) || offset != 0 || bytes > physical.bytes {
            return Err(INVALID_VALUE);
        }
        physical.mappings += 1;
        self.vmm.mapped.insert(address, (bytes, handle));
        Ok(())
    }

    /// Remove all mappings of a range, which must be whole ones.
    pub(crate) fn unmap(&mut self, address: u64, bytes: u64) -> Result<(), CuCode> {
        for start in self.vmm.whole(address, bytes)? {
            let Some((_, handle)) = self.vmm.mapped.remove(&start) else {
                continue;
            };
            if let Some(physical) = self.vmm.physical.get_mut(&handle) {
                physical.mappings -= 1;
            }
            self.collect(handle)?;
        }
        Ok(())
    }

    /// Check that a range is mapped, as a change of its access needs it.
    pub(crate) fn is_mapped(&self, address: u64, bytes: u64) -> Result<(), CuCode> {
        self.vmm.whole(address, bytes).map(drop)
    }

    /// Return the mapping that contains an address, with its length.
    pub(crate) fn mapping(&self, address: u64) -> Option<(u64, u64)> {
        let (start, _) = self.vmm.mapping_at(address)?;
        Some((start, self.vmm.mapped[&start].0))
    }
}
