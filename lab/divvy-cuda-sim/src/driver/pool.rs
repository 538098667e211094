//! Pools of the driver.

use super::SimulatedDriver;
use crate::abi::Location;
use crate::codes::{CuCode, INVALID_VALUE, OUT_OF_MEMORY};
use crate::memory::{AllocationKind, MemoryAllocation};
use crate::pool::{CHUNK, Pool, used_by};
use crate::slab::{PAGE, pages};

impl SimulatedDriver {
    /// Return a pool.
    pub(crate) fn pool(&mut self, handle: usize) -> Result<&mut Pool, CuCode> {
        let found = self.pools.all.get_mut(&handle).filter(|pool| !pool.destroyed);
        found.ok_or(INVALID_VALUE)
    }

    /// Make a pool.
    pub(crate) fn create_pool(&mut self, device: usize, max: u64, imported: bool) -> usize {
        let handle = self.new_handle();
        let mut pool = Pool::new(device, max);
        pool.imported = imported;
        self.pools.all.insert(handle, pool);
        handle
    }

    /// Return the default pool of a device.
    pub(crate) fn default_pool(&mut self, device: usize) -> usize {
        self.default_pool_of(device, false)
    }

    /// Return its default pool of managed memory.
    pub(crate) fn default_managed_pool(&mut self, device: usize) -> usize {
        self.default_pool_of(device, true)
    }

    fn default_pool_of(&mut self, device: usize, managed: bool) -> usize {
        let is_it = |pool: &Pool| pool.default && pool.device == device && pool.managed == managed;
        let found = self.pools.all.iter().find(|(_, pool)| is_it(pool));
        if let Some((handle, _)) = found {
            return *handle;
        }
        let handle = self.create_pool(device, 0, false);
        if let Some(pool) = self.pools.all.get_mut(&handle) {
            (pool.default, pool.managed) = (true, managed);
        }
        handle
    }

    /// Return the device on which managed memory is: the one that it prefers, or the current one.
    pub(crate) fn device_of_managed(&self, location: Location) -> Result<usize, CuCode> {
        match location.kind {
            1 => self.device(location.id),
            0 | 2..=4 => Ok(self.current_device().unwrap_or(0)),
            _ => Err(INVALID_VALUE),
        }
    }

    /// Return the pool from which a device's allocations come that name none.
    pub(crate) fn current_pool(&mut self, device: usize) -> usize {
        match self.devices[device].pool {
            Some(pool) => pool,
            None => self.default_pool(device),
        }
    }

    /// Destroy a pool. Its device uses its default pool again.
    pub(crate) fn destroy_pool(&mut self, handle: usize) -> Result<(), CuCode> {
        let pool = self.pool(handle)?;
        if pool.default {
            return Err(INVALID_VALUE);
        }
        pool.destroyed = true;
        for device in &mut self.devices {
            device.pool.take_if(|current| *current == handle);
        }
        self.shrink_pool(handle, 0)
    }

    /// Allocate from a pool.
    pub(crate) fn allocate_from_pool(&mut self, handle: usize, bytes: u64) -> Result<u64, CuCode> {
        let pool = self.pool(handle)?;
        if bytes == 0 || pool.imported {
            return Err(INVALID_VALUE);
        }
        let device = pool.device;
        let used = used_by(bytes)
            .and_then(|own| pool.used.checked_add(own))
            .ok_or(OUT_OF_MEMORY)?;
        self.grow_pool(handle, used)?;
        let address = self.memory.addresses(pages(bytes).ok_or(OUT_OF_MEMORY)?, PAGE)?;
        let pool = self.pool(handle)?;
        pool.used = used;
        pool.used_high = pool.used_high.max(used);
        let allocation = MemoryAllocation::new(device, None, bytes, AllocationKind::Pool(handle));
        self.memory.allocations.insert(address, allocation);
        Ok(address)
    }

    /// Have a pool reserve at least this much: whole chunks, or as little as possible on a GPU that is nearly full.
    fn grow_pool(&mut self, handle: usize, used: u64) -> Result<(), CuCode> {
        loop {
            let pool = self.pool(handle)?;
            let (device, reserved) = (pool.device, pool.reserved);
            let Some(missing) = used.checked_sub(reserved).filter(|missing| *missing > 0) else {
                return Ok(());
            };
            let limit = if pool.max == 0 { u64::MAX } else { pool.max };
            let chunks = missing
                .checked_next_multiple_of(CHUNK)
                .and_then(|missing| reserved.checked_add(missing));
            let tight = pages(used).filter(|tight| *tight <= limit).ok_or(OUT_OF_MEMORY)?;
            for wanted in [chunks.unwrap_or(u64::MAX).min(limit).max(tight), tight] {
                match self.devices[device].take(wanted - reserved) {
                    Err(OUT_OF_MEMORY) => {}
                    Err(error) => return Err(error),
                    Ok(()) => {
                        let pool = self.pool(handle)?;
                        pool.reserved = wanted;
                        pool.reserved_high = pool.reserved_high.max(wanted);
                        return Ok(());
                    }
                }
            }
            // This pool may give memory back as well, so the next round begins with what it has then.
            if !self.squeeze_pools(device)? {
                return Err(OUT_OF_MEMORY);
            }
        }
    }

    /// Give an allocation back to its pool.
    pub(crate) fn free_to_pool(&mut self, handle: usize, bytes: u64) -> Result<(), CuCode> {
        let Some(pool) = self.pools.all.get_mut(&handle) else {
            return Ok(());
        };
        pool.used = pool.used.saturating_sub(used_by(bytes).unwrap_or(0));
        if pool.destroyed { self.shrink_pool(handle, 0) } else { Ok(()) }
    }

    /// Have a pool give back what it does not use, down to a size. A destroyed pool that is empty ends.
    pub(crate) fn shrink_pool(&mut self, handle: usize, keep: u64) -> Result<(), CuCode> {
        let Some(pool) = self.pools.all.get_mut(&handle) else {
            return Ok(());
        };
        let needed = pool.used.max(keep).checked_next_multiple_of(PAGE).unwrap_or(u64::MAX);
        let given = pool.reserved.saturating_sub(needed);
        pool.reserved -= given;
        let (device, ended) = (pool.device, pool.destroyed && pool.used == 0);
        if ended {
            self.pools.all.remove(&handle);
        }
        match given {
            0 => Ok(()),
            given => self.devices[device].give(given),
        }
    }

    /// Do what a synchronization does: each pool of the device gives back what is above its threshold.
    pub(crate) fn settle_pools(&mut self, device: usize) -> Result<(), CuCode> {
        let mine = self.pools.all.iter().filter(|(_, pool)| pool.device == device);
        let mine: Vec<(usize, u64)> = mine.map(|(handle, pool)| (*handle, pool.threshold)).collect();
        mine.into_iter()
            .try_for_each(|(handle, threshold)| self.shrink_pool(handle, threshold))
    }

    /// Have the pools of a device give back all that they do not use. Return false if that is nothing.
    pub(crate) fn squeeze_pools(&mut self, device: usize) -> Result<bool, CuCode> {
        let reserved = |driver: &SimulatedDriver| -> u64 {
            let mine = driver.pools.all.values().filter(|pool| pool.device == device);
            mine.map(|pool| pool.reserved).sum()
        };
        let before = reserved(self);
        let mine = self.pools.all.iter().filter(|(_, pool)| pool.device == device);
        let mine: Vec<usize> = mine.map(|(handle, _)| *handle).collect();
        mine.into_iter().try_for_each(|handle| self.shrink_pool(handle, 0))?;
        Ok(reserved(self) < before)
    }
}
