//! Contexts of the driver.

use super::SimulatedDriver;
use crate::card::{CudaCard, THREADS_PER_SM};
use crate::codes::{CONTEXT_IS_DESTROYED, CuCode, INVALID_CONTEXT, PRIMARY_CONTEXT_ACTIVE, UNSUPPORTED_LIMIT};
use crate::context::{ContextLimits, DeviceContext, pop, top};
use crate::memory::{AllocationKind, MemoryAllocation};
use crate::slab::Slabs;

impl SimulatedDriver {
    /// Make a context that is no primary context. Its memory is taken at once.
    pub(crate) fn create_context(&mut self, device: usize, flags: u32, api_version: u32) -> Result<usize, CuCode> {
        let handle = self.new_handle();
        self.open_context(handle, device, flags, api_version)?;
        Ok(handle)
    }

    fn open_context(&mut self, handle: usize, device: usize, flags: u32, api_version: u32) -> Result<(), CuCode> {
        let bytes = self.devices[device].card.context;
        self.take(device, bytes)?;
        let context = DeviceContext {
            device,
            flags,
            api_version,
            slabs: Slabs::default(),
            limits: ContextLimits::default(),
            fault: None,
        };
        self.contexts.insert(handle, context);
        Ok(())
    }

    /// Return the context with this handle.
    pub(crate) fn context(&self, handle: usize) -> Result<&DeviceContext, CuCode> {
        self.contexts.get(&handle).ok_or(INVALID_CONTEXT)
    }

    /// Report whether the handle is that of a primary context.
    fn is_primary(&self, handle: usize) -> bool {
        self.devices.iter().any(|device| device.primary.handle == handle)
    }

    /// Destroy a context that is no primary context.
    pub(crate) fn destroy_context(&mut self, handle: usize) -> Result<(), CuCode> {
        self.context(handle)?;
        if self.is_primary(handle) {
            return Err(INVALID_CONTEXT);
        }
        if top() == Some(handle) {
            pop()?;
        }
        self.close_context(handle)
    }

    /// Free all that a context has.
    fn close_context(&mut self, handle: usize) -> Result<(), CuCode> {
        let Some(context) = self.contexts.remove(&handle) else {
            return Ok(());
        };
        let freed = self.memory.forget_context(handle);
        let device = &mut self.devices[context.device];
        device.give(device.card.context + context.slabs.bytes() + context.limits.extra(threads(&device.card)))?;
        freed
            .into_iter()
            .try_for_each(|(bytes, common)| self.give_common(context.device, bytes, common))?;
        if self.contexts.values().any(|other| other.device == context.device) {
            Ok(())
        } else {
            self.end_of_device(context.device)
        }
    }

    /// Free what outlives contexts, but not the last one of a device: the memory of its pools and graphs.
    fn end_of_device(&mut self, device: usize) -> Result<(), CuCode> {
        let outlives = |allocation: &MemoryAllocation| {
            allocation.device == device && matches!(allocation.kind, AllocationKind::Pool(_) | AllocationKind::Graph)
        };
        let mine = self.memory.allocations.iter().filter(|(_, allocation)| outlives(allocation));
        let mine: Vec<u64> = mine.map(|(address, _)| *address).collect();
        mine.into_iter().try_for_each(|address| self.release(address))?;
        self.squeeze_pools(device)?;
        self.trim_graphs(device)
    }

    /// Retain a device's primary context. Make it if it does not exist.
    pub(crate) fn retain_primary(&mut self, device: usize) -> Result<usize, CuCode> {
        if self.devices[device].primary.handle == 0 {
            self.devices[device].primary.handle = self.new_handle();
        }
        let (handle, flags) = (self.devices[device].primary.handle, self.devices[device].primary.flags);
        if !self.contexts.contains_key(&handle) {
            self.open_context(handle, device, flags, 3020)?;
        }
        self.devices[device].primary.retained += 1;
        Ok(handle)
    }

    /// Release a device's primary context. The last release destroys it.
    pub(crate) fn release_primary(&mut self, device: usize) -> Result<(), CuCode> {
        let primary = &mut self.devices[device].primary;
        primary.retained = primary.retained.checked_sub(1).ok_or(INVALID_CONTEXT)?;
        match (primary.retained, primary.handle) {
            (0, handle) => self.close_context(handle),
            _ => Ok(()),
        }
    }

    /// Destroy a device's primary context, even if it is retained.
    pub(crate) fn reset_primary(&mut self, device: usize) -> Result<(), CuCode> {
        self.close_context(self.devices[device].primary.handle)
    }

    /// Set the flags with which a primary context is made. Before CUDA 11 this was an error while the context existed.
    pub(crate) fn set_primary_flags(&mut self, device: usize, flags: u32, while_active: bool) -> Result<(), CuCode> {
        let primary = &mut self.devices[device].primary;
        if let Some(context) = self.contexts.get_mut(&primary.handle) {
            if !while_active {
                return Err(PRIMARY_CONTEXT_ACTIVE);
            }
            context.flags = flags;
        }
        primary.flags = flags;
        Ok(())
    }

    /// Set a limit of the current context.
    pub(crate) fn set_limit(&mut self, which: usize, value: u64) -> Result<(), CuCode> {
        let handle = self.current()?;
        let DeviceContext { device, limits, .. } = self.contexts[&handle];
        let mut new = limits;
        *new.0.get_mut(which).ok_or(UNSUPPORTED_LIMIT)? = value;
        let threads = threads(&self.devices[device].card);
        let (before, now) = (limits.extra(threads), new.extra(threads));
        self.take(device, now.saturating_sub(before))?;
        self.devices[device].give(before.saturating_sub(now))?;
        if let Some(context) = self.contexts.get_mut(&handle) {
            context.limits = new;
        }
        Ok(())
    }

    /// Return the context with this handle, or the current one for 0.
    pub(crate) fn context_or_current(&self, handle: usize) -> Result<&DeviceContext, CuCode> {
        let handle = match handle {
            0 => self.current()?,
            handle => handle,
        };
        self.contexts.get(&handle).ok_or(CONTEXT_IS_DESTROYED)
    }
}

/// Return how many threads can run on a GPU at the same time.
fn threads(card: &CudaCard) -> u64 {
    u64::from(card.described.sms) * THREADS_PER_SM
}
