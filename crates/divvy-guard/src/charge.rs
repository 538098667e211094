//! The steps of every allocation: reserve the memory, call the driver, and record the allocation.

use crate::cuda::{CuDevice, CuResult, DriverCall, OUT_OF_MEMORY, OutPointer, SUCCESS};
use crate::driver;
use crate::gpu::{Allowed, GuardedGpu, PAGE, ShareExceeded, ShareHold, pages};
use crate::ledger::{HandleEntry, HandleKind, LedgerTable, NoRoom};
use crate::process::{GuardedProcess, process};

/// Linear memory of at least this size has its own pages. Smaller allocations share pages, and a page is charged as long as it contains one of them. The
/// address says which page this is. It is not known in advance whether the driver will need another page, so there must be room for one.
const LARGE: u64 = 1 << 20;
/// The size that is recorded for memory in a shared page. All other sizes are whole pages.
const SHARED: u64 = 1;
/// The numbers of pages are below this power of two: addresses have at most 57 bits, and pages have 2 MiB.
const PAGE_BITS: u32 = 57 - 21;

/// A GPU that is held to a share.
pub(crate) struct HeldGpu {
    pub(crate) process: &'static GuardedProcess,
    pub(crate) gpu: &'static GuardedGpu,
    pub(crate) device: CuDevice,
    pub(crate) allowed: Allowed,
}

/// Return how a GPU is held to a share. `Err(Some(code))`: the call fails with this code. `Err(None)`: the call is not limited.
pub(crate) fn held(device: CuDevice) -> Result<HeldGpu, Option<CuResult>> {
    let process = process().ok_or(None)?;
    let is_there = || driver::gpus() > Some(device.cast_unsigned());
    // The driver refuses the ordinal of a GPU that is not there.
    let gpu = process.gpu(device).ok_or_else(|| is_there().then_some(OUT_OF_MEMORY))?;
    match gpu.share(|| driver::uuid(device)) {
        ShareHold::Free => Err(None),
        ShareHold::Nothing => Err(Some(OUT_OF_MEMORY)),
        ShareHold::Held(allowed) => Ok(HeldGpu {
            process,
            gpu,
            device,
            allowed,
        }),
    }
}

/// Charge an allocation: call the driver with `call`, and record the result under `key`.
pub(crate) fn allocate(device: CuDevice, kind: HandleKind, of: u64, bytes: u64, call: &DriverCall, key: OutPointer) -> CuResult {
    let held = match held(device) {
        Ok(held) => held,
        Err(Some(code)) => return code,
        Err(None) => return call.run(),
    };
    held.allocate(kind, of, bytes, call, key)
}

impl HeldGpu {
    pub(crate) fn allocate(&self, kind: HandleKind, of: u64, bytes: u64, call: &DriverCall, key: OutPointer) -> CuResult {
        let is_small = kind == HandleKind::Linear && (1..LARGE).contains(&bytes);
        let size = if is_small { SHARED } else { pages(bytes) };
        if self.reserve(size).is_err() {
            return OUT_OF_MEMORY;
        }
        let code = call.run();
        let key = if code == SUCCESS { key.get() } else { 0 };
        self.end(code, HandleEntry::new(kind, key, self.device.unsigned_abs(), size, of));
        code
    }

    // This and the next one are not part of the function above, of which there is one for each function of the driver.
    #[inline(never)]
    fn reserve(&self, size: u64) -> Result<(), ShareExceeded> {
        self.process.ledger.room().map_err(|NoRoom| ShareExceeded)?;
        self.gpu.reserve(charge_of(size), &self.allowed)
    }

    /// Record what the driver has allocated, or that it has not.
    #[inline(never)]
    fn end(&self, code: CuResult, entry: HandleEntry) {
        let charge = charge_of(entry.size);
        if code != SUCCESS {
            return self.gpu.cancel(charge);
        }
        if entry.size != SHARED {
            if entry.is(HandleKind::Context) {
                self.gpu.context_made(charge);
            } else {
                self.gpu.commit(charge);
            }
            return note(self.process, entry);
        }
        match self.process.ledger.insert_in_page(entry, page_of(&entry)) {
            Ok((is_first, gone)) => {
                if is_first {
                    self.gpu.commit(charge);
                } else {
                    // The page was charged for another one.
                    self.gpu.cancel(charge);
                }
                gone.iter().for_each(|gone| give_back(self.process, gone));
            }
            // The page stays charged until the process ends.
            Err(NoRoom) => self.gpu.commit(charge),
        }
    }
}

/// What is charged for memory of a recorded size.
fn charge_of(size: u64) -> u64 {
    if size == SHARED { PAGE } else { size }
}

/// The page of memory that shares it with others. Right after memory of one GPU is free, the driver may give its address to memory of another GPU.
fn page_of(entry: &HandleEntry) -> u64 {
    (entry.key / PAGE) | u64::from(entry.gpu) << PAGE_BITS
}

/// Record a handle that was charged.
pub(crate) fn note(process: &GuardedProcess, entry: HandleEntry) {
    // Room was made before. Without it, the memory stays charged until the process ends, which charges too much and never too little.
    let ledger = if entry.is(HandleKind::Pool) {
        &process.reserves
    } else {
        &process.ledger
    };
    if let Ok(Some(gone)) = ledger.insert(entry) {
        give_back(process, &gone);
    }
}

/// Return the charge of a handle that the driver does not have any more.
pub(crate) fn give_back(process: &GuardedProcess, entry: &HandleEntry) {
    let charge = match entry.size {
        _ if entry.is(HandleKind::Mapping) => 0,
        SHARED if process.ledger.leave(HandleKind::Slab, page_of(entry)) => PAGE,
        SHARED => 0,
        charge => charge,
    };
    match gpu_of(process, entry) {
        Some(gpu) if entry.is(HandleKind::Context) => gpu.context_ended(),
        Some(gpu) => gpu.free(charge),
        None => {}
    }
}

pub(crate) fn gpu_of<'a>(process: &'a GuardedProcess, entry: &HandleEntry) -> Option<&'a GuardedGpu> {
    process.gpu(CuDevice::try_from(entry.gpu).ok()?)
}

/// Free something: call the driver with `call`, and return the charge that was recorded under `key`. An allocation without a record was not charged.
#[inline(never)]
pub(crate) fn free(kind: HandleKind, key: u64, call: &DriverCall) -> CuResult {
    free_by(kind, key, || call.run())
}

/// The same for a call by the guard.
pub(crate) fn free_by(kind: HandleKind, key: u64, call: impl FnOnce() -> CuResult) -> CuResult {
    let Some(process) = process() else { return call() };
    // Removed before the driver is called, because another thread can get the same handle right afterwards. It counts in its page until the driver has freed
    // it: until then, the driver has the page.
    let Some(entry) = process.ledger.take(kind, key) else {
        return call();
    };
    let code = call();
    freed(process, entry, code);
    code
}

/// Return the charge of what the driver has freed, or record it again if the driver has not.
#[inline(never)]
fn freed(process: &GuardedProcess, entry: HandleEntry, code: CuResult) {
    if code == SUCCESS {
        give_back(process, &entry);
    } else {
        note(process, entry);
    }
}

/// Return the charges of the memory for which `has_ended` returns true, because it ended with its context.
#[inline(never)]
pub(crate) fn sweep(process: &GuardedProcess, has_ended: &dyn Fn(&HandleEntry, &LedgerTable<'_>) -> bool) {
    let is_memory = |entry: &HandleEntry| {
        [HandleKind::Linear, HandleKind::Array, HandleKind::Limit]
            .iter()
            .any(|kind| entry.is(*kind))
    };
    let mut place = 0;
    while let Some((next, entry)) = process
        .ledger
        .take_from(place, &|entry, table| is_memory(entry) && has_ended(entry, table))
    {
        place = next;
        give_back(process, &entry);
    }
}
