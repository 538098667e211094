//! Memory of the driver that several processes have.

use super::SimulatedDriver;
use crate::codes::{CuCode, INVALID_VALUE};
use crate::machine::uuid_bytes;
use crate::memory::AllocationKind;
use crate::share::{Common, SharedMemory, Thing};
use crate::slab::pages;
use crate::vmm::MemoryPlace;

impl SimulatedDriver {
    /// Describe memory of a device for another process.
    pub(crate) fn share(&self, thing: Thing, device: usize, bytes: u64) -> SharedMemory {
        SharedMemory {
            thing,
            pid: std::process::id(),
            gpu: uuid_bytes(&self.devices[device].card.uuid),
            bytes,
            number: 0,
        }
    }

    /// Do what is due since the last call: give back what no process has any more, and take over what a process had in its ledger that has ended.
    pub(crate) fn settle_common(&mut self) -> Result<(), CuCode> {
        let (kept, gone): (Vec<_>, Vec<_>) = std::mem::take(&mut self.left)
            .into_iter()
            .partition(|left| left.2.has_others());
        self.left = kept;
        gone.into_iter()
            .try_for_each(|(device, bytes, _)| self.devices[device].give(bytes))?;
        let physical = self.vmm.physical.values_mut().filter_map(|physical| match physical.place {
            MemoryPlace::Device(device) => Some((device, physical.bytes, physical.common.as_mut()?)),
            MemoryPlace::Host => None,
        });
        let opened = self
            .memory
            .allocations
            .values_mut()
            .filter(|allocation| matches!(allocation.kind, AllocationKind::Borrowed));
        let opened =
            opened.filter_map(|allocation| Some((allocation.device, pages(allocation.bytes)?, allocation.common.as_mut()?)));
        for (device, bytes, common) in physical.chain(opened) {
            // If the GPU has no room for it, it is tried again in the next call.
            if !common.pays && common.take_over() && self.devices[device].take(bytes).is_err() {
                common.leave();
            }
        }
        Ok(())
    }

    /// Give back memory that this process does not have any more, as soon as no other one has it.
    pub(crate) fn give_common(&mut self, device: usize, bytes: u64, common: Option<Common>) -> Result<(), CuCode> {
        match common {
            Some(common) if !common.pays => Ok(()),
            Some(common) if common.has_others() => {
                self.left.push((device, bytes, common));
                Ok(())
            }
            _ => self.devices[device].give(bytes),
        }
    }

    /// Describe an allocation for another process, which keeps it.
    pub(crate) fn share_memory(&mut self, address: u64) -> Result<SharedMemory, CuCode> {
        let allocation = self.memory.allocations.get(&address).ok_or(INVALID_VALUE)?;
        let shared = self.share(Thing::Pointer, allocation.device, allocation.bytes);
        let allocation = self.memory.allocations.get_mut(&address).ok_or(INVALID_VALUE)?;
        let common = allocation.common.take().map_or_else(|| Common::begin(shared), Ok)?;
        Ok(allocation.common.insert(common).shared())
    }

    /// Return the device of shared memory.
    pub(crate) fn device_of(&self, shared: &SharedMemory) -> Result<usize, CuCode> {
        let found = self
            .devices
            .iter()
            .position(|device| uuid_bytes(&device.card.uuid) == shared.gpu);
        found.ok_or(INVALID_VALUE)
    }
}
