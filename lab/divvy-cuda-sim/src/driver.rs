//! The driver's state in this process, and the gate that every call passes.

mod context;
mod graph;
mod memory;
mod objects;
mod pool;
mod share;
mod vmm;
mod work;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::codes::{
    CONTEXT_IS_DESTROYED, CuCode, INVALID_CONTEXT, INVALID_DEVICE, NO_DEVICE, NOT_INITIALIZED, NOT_READY, OUT_OF_MEMORY, SUCCESS,
    UNKNOWN,
};
use crate::context::{DeviceContext, top};
use crate::device::SimulatedDevice;
use crate::graph::Graphs;
use crate::machine::CudaMachine;
use crate::memory::ProcessMemory;
use crate::objects::Objects;
use crate::pool::Pools;
use crate::share::Common;
use crate::trace;
use crate::vmm::Vmm;
use crate::work::{CudaWork, wait_until};

static DRIVER: Mutex<Option<SimulatedDriver>> = Mutex::new(None);
/// The process that called cuInit. It is read before the lock is taken: another thread may have held the lock when this process was forked.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// The driver of this process.
#[derive(Debug)]
pub(crate) struct SimulatedDriver {
    pub(crate) version: i32,
    pub(crate) devices: Vec<SimulatedDevice>,
    pub(crate) contexts: BTreeMap<usize, DeviceContext>,
    pub(crate) memory: ProcessMemory,
    pub(crate) vmm: Vmm,
    pub(crate) pools: Pools,
    pub(crate) graphs: Graphs,
    pub(crate) work: CudaWork,
    pub(crate) objects: Objects,
    /// Memory that this process does not have any more, but others: its device, its size, and what tells when they have not.
    pub(crate) left: Vec<(usize, u64, Common)>,
    last_handle: usize,
}

/// Run a symbol that needs no cuInit. A panic becomes CUDA_ERROR_UNKNOWN, because unwinding into C is undefined behavior.
pub(crate) fn bare(name: &'static str, body: impl FnOnce() -> Result<(), CuCode>) -> CuCode {
    if trace::hangs(name) {
        trace::log(name, NOT_READY);
        wait_until(u64::MAX);
    }
    let result = match trace::injected(name) {
        Some(code) => Err(code),
        None => catch_unwind(AssertUnwindSafe(body)).unwrap_or(Err(UNKNOWN)),
    };
    let code = result.err().unwrap_or(SUCCESS);
    trace::log(name, code);
    code
}

/// Run a symbol that needs cuInit.
pub(crate) fn call(name: &'static str, body: impl FnOnce(&mut SimulatedDriver) -> Result<(), CuCode>) -> CuCode {
    bare(name, || with(body))
}

/// Run a symbol that needs cuInit, and that waits until a time that it finds out. Other threads can use the driver meanwhile.
pub(crate) fn wait(name: &'static str, body: impl FnOnce(&mut SimulatedDriver) -> Result<u64, CuCode>) -> CuCode {
    bare(name, || with(body).map(wait_until))
}

fn with<T>(body: impl FnOnce(&mut SimulatedDriver) -> Result<T, CuCode>) -> Result<T, CuCode> {
    if OWNER.load(Ordering::Acquire) != std::process::id() {
        return Err(NOT_INITIALIZED);
    }
    // After a panic in one call the values are still consistent: what a call takes is in the ledger before it is in a table.
    let mut driver = DRIVER.lock().unwrap_or_else(PoisonError::into_inner);
    let driver = driver.as_mut().ok_or(NOT_INITIALIZED)?;
    driver.settle_common()?;
    let result = body(driver);
    driver.settle_common()?;
    result
}

/// Handle cuInit. A child of a process that has called it cannot use CUDA before it calls exec, as with the real driver.
pub(crate) fn init() -> Result<(), CuCode> {
    let me = std::process::id();
    match OWNER.load(Ordering::Acquire) {
        0 => {}
        owner if owner == me => return Ok(()),
        _ => return Err(NOT_INITIALIZED),
    }
    let mut driver = DRIVER.lock().unwrap_or_else(PoisonError::into_inner);
    if driver.is_none() {
        let machine = CudaMachine::load().map_err(|error| {
            trace::complain(&error.to_string());
            NO_DEVICE
        })?;
        if machine.cards.is_empty() {
            return Err(NO_DEVICE);
        }
        *driver = Some(SimulatedDriver::new(machine));
    }
    OWNER.store(me, Ordering::Release);
    Ok(())
}

/// Return the version of the driver, which programs may ask for without cuInit.
pub(crate) fn version() -> Result<i32, CuCode> {
    if OWNER.load(Ordering::Acquire) == std::process::id() {
        let driver = DRIVER.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(driver) = driver.as_ref() {
            return Ok(driver.version);
        }
    }
    CudaMachine::load().map(|machine| machine.version).map_err(|error| {
        trace::complain(&error.to_string());
        UNKNOWN
    })
}

impl SimulatedDriver {
    fn new(machine: CudaMachine) -> SimulatedDriver {
        SimulatedDriver {
            version: machine.version,
            devices: machine.cards.into_iter().map(SimulatedDevice::new).collect(),
            contexts: BTreeMap::new(),
            memory: ProcessMemory::default(),
            vmm: Vmm::default(),
            pools: Pools::default(),
            graphs: Graphs::default(),
            work: CudaWork::default(),
            objects: Objects::default(),
            left: Vec::new(),
            last_handle: 0x1000,
        }
    }

    /// Return a handle that no object has had. It looks like a pointer, and is never dereferenced.
    pub(crate) fn new_handle(&mut self) -> usize {
        self.last_handle += 16;
        self.last_handle
    }

    /// Return the index of a device.
    pub(crate) fn device(&self, device: i32) -> Result<usize, CuCode> {
        let index = usize::try_from(device).ok();
        index.filter(|index| *index < self.devices.len()).ok_or(INVALID_DEVICE)
    }

    /// Return the handle of this thread's current context.
    pub(crate) fn current(&self) -> Result<usize, CuCode> {
        let handle = top().ok_or(INVALID_CONTEXT)?;
        match self.contexts.get(&handle) {
            Some(DeviceContext { fault: Some(code), .. }) => Err(*code),
            Some(_) => Ok(handle),
            None => Err(CONTEXT_IS_DESTROYED),
        }
    }

    /// Return the device of this thread's current context.
    pub(crate) fn current_device(&self) -> Result<usize, CuCode> {
        let handle = self.current()?;
        Ok(self.contexts[&handle].device)
    }

    /// Take memory of a device. If it has too little, its pools give back what they do not use.
    pub(crate) fn take(&mut self, device: usize, bytes: u64) -> Result<(), CuCode> {
        match self.devices[device].take(bytes) {
            Err(OUT_OF_MEMORY) if self.squeeze_pools(device)? => self.devices[device].take(bytes),
            taken => taken,
        }
    }
}
