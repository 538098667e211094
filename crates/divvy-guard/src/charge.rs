//! The steps of every allocation: reserve the memory, call the driver, and record the allocation.

use crate::cuda::{Call, Code, Device, OUT_OF_MEMORY, Out, SUCCESS};
use crate::driver;
use crate::gpu::{Allowed, Gpu, PAGE, Refused, Share, pages};
use crate::ledger::{Entry, Kind, NoRoom, Table};
use crate::process::{Process, process};

/// Linear memory of at least this size has its own pages. Smaller allocations share pages, and a page is charged as long as it contains one of them. The
/// address says which page this is. It is not known in advance whether the driver will need another page, so there must be room for one.
const LARGE: u64 = 1 << 20;
/// The size that is recorded for memory in a shared page. All other sizes are whole pages.
const SHARED: u64 = 1;
/// The numbers of pages are below this power of two: addresses have at most 57 bits, and pages have 2 MiB.
const PAGE_BITS: u32 = 57 - 21;

/// A GPU that is held to a share.
pub(crate) struct Held {
    pub(crate) process: &'static Process,
    pub(crate) gpu: &'static Gpu,
    pub(crate) device: Device,
    pub(crate) allowed: Allowed,
}

/// Return how a GPU is held to a share. `Err(Some(code))`: the call fails with this code. `Err(None)`: the call is not limited.
pub(crate) fn held(device: Device) -> Result<Held, Option<Code>> {
    let process = process().ok_or(None)?;
    let is_there = || driver::gpus() > Some(device.cast_unsigned());
    // The driver refuses the ordinal of a GPU that is not there.
    let gpu = process.gpu(device).ok_or_else(|| is_there().then_some(OUT_OF_MEMORY))?;
    match gpu.share(|| driver::uuid(device)) {
        Share::Free => Err(None),
        Share::Nothing => Err(Some(OUT_OF_MEMORY)),
        Share::Held(allowed) => Ok(Held {
            process,
            gpu,
            device,
            allowed,
        }),
    }
}

/// Charge an allocation: call the driver with `call`, and record the result under `key`.
pub(crate) fn allocate(device: Device, kind: Kind, of: u64, bytes: u64, call: &Call, key: Out) -> Code {
    let held = match held(device) {
        Ok(held) => held,
        Err(Some(code)) => return code,
        Err(None) => return call.run(),
    };
    held.allocate(kind, of, bytes, call, key)
}

impl Held {
    pub(crate) fn allocate(&self, kind: Kind, of: u64, bytes: u64, call: &Call, key: Out) -> Code {
        let is_small = kind == Kind::Linear && (1..LARGE).contains(&bytes);
        let size = if is_small { SHARED } else { pages(bytes) };
        if self.reserve(size).is_err() {
            return OUT_OF_MEMORY;
        }
        let code = call.run();
        let key = if code == SUCCESS { key.get() } else { 0 };
        self.end(code, Entry::new(kind, key, self.device.unsigned_abs(), size, of));
        code
    }

    // This and the next one are not part of the function above, of which there is one for each function of the driver.
    #[inline(never)]
    fn reserve(&self, size: u64) -> Result<(), Refused> {
        self.process.ledger.room().map_err(|NoRoom| Refused)?;
        self.gpu.reserve(charge_of(size), &self.allowed)
    }

    /// Record what the driver has allocated, or that it has not.
    #[inline(never)]
    fn end(&self, code: Code, entry: Entry) {
        let charge = charge_of(entry.size);
        if code != SUCCESS {
            return self.gpu.cancel(charge);
        }
        if entry.size != SHARED {
            if entry.is(Kind::Context) {
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
fn page_of(entry: &Entry) -> u64 {
    (entry.key / PAGE) | u64::from(entry.gpu) << PAGE_BITS
}

/// Record a handle that was charged.
pub(crate) fn note(process: &Process, entry: Entry) {
    // Room was made before. Without it, the memory stays charged until the process ends, which charges too much and never too little.
    let ledger = if entry.is(Kind::Pool) {
        &process.reserves
    } else {
        &process.ledger
    };
    if let Ok(Some(gone)) = ledger.insert(entry) {
        give_back(process, &gone);
    }
}

/// Return the charge of a handle that the driver does not have any more.
pub(crate) fn give_back(process: &Process, entry: &Entry) {
    let charge = match entry.size {
        _ if entry.is(Kind::Mapping) => 0,
        SHARED if process.ledger.leave(Kind::Slab, page_of(entry)) => PAGE,
        SHARED => 0,
        charge => charge,
    };
    match gpu_of(process, entry) {
        Some(gpu) if entry.is(Kind::Context) => gpu.context_ended(),
        Some(gpu) => gpu.free(charge),
        None => {}
    }
}

pub(crate) fn gpu_of<'a>(process: &'a Process, entry: &Entry) -> Option<&'a Gpu> {
    process.gpu(Device::try_from(entry.gpu).ok()?)
}

/// Free something: call the driver with `call`, and return the charge that was recorded under `key`. An allocation without a record was not charged.
#[inline(never)]
pub(crate) fn free(kind: Kind, key: u64, call: &Call) -> Code {
    free_by(kind, key, || call.run())
}

/// The same for a call by the guard.
pub(crate) fn free_by(kind: Kind, key: u64, call: impl FnOnce() -> Code) -> Code {
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
fn freed(process: &Process, entry: Entry, code: Code) {
    if code == SUCCESS {
        give_back(process, &entry);
    } else {
        note(process, entry);
    }
}

/// Return the charges of the memory for which `has_ended` returns true, because it ended with its context.
#[inline(never)]
pub(crate) fn sweep(process: &Process, has_ended: &dyn Fn(&Entry, &Table<'_>) -> bool) {
    let is_memory = |entry: &Entry| [Kind::Linear, Kind::Array, Kind::Limit].iter().any(|kind| entry.is(*kind));
    let mut place = 0;
    while let Some((next, entry)) = process
        .ledger
        .take_from(place, &|entry, table| is_memory(entry) && has_ended(entry, table))
    {
        place = next;
        give_back(process, &entry);
    }
}
