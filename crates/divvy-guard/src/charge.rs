//! The steps of every allocation: reserve the memory, call the driver, and record the allocation.

use crate::cuda::{Code, Device, OUT_OF_MEMORY, SUCCESS};
use crate::driver;
use crate::gpu::{Allowed, Gpu, PAGE, Reserved, Share, pages};
use crate::ledger::{Entry, Kind, NoRoom};
use crate::process::{Process, process};

/// Linear memory of at least this size has its own pages. Smaller allocations share pages, and a page is charged as long as it contains one of them. The
/// address says which page this is. It is not known in advance whether the driver will need another page, so there must be room for one.
const LARGE: u64 = 1 << 20;
/// The size that is recorded for memory in a shared page. All other sizes are whole pages.
const SHARED: u64 = 1;

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
    // The driver knows what is wrong with a negative ordinal; no process has as many GPUs as the last one would need.
    let gpu = process.gpu(device).ok_or((device >= 0).then_some(OUT_OF_MEMORY))?;
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
pub(crate) fn allocate(
    device: Device,
    kind: Kind,
    of: u64,
    bytes: u64,
    call: impl FnOnce() -> Code,
    key: impl FnOnce() -> u64,
) -> Code {
    let held = match held(device) {
        Ok(held) => held,
        Err(Some(code)) => return code,
        Err(None) => return call(),
    };
    held.allocate(kind, of, bytes, call, key)
}

impl Held {
    pub(crate) fn allocate(
        &self,
        kind: Kind,
        of: u64,
        bytes: u64,
        call: impl FnOnce() -> Code,
        key: impl FnOnce() -> u64,
    ) -> Code {
        let is_small = kind == Kind::Linear && (1..LARGE).contains(&bytes);
        let size = if is_small { SHARED } else { pages(bytes) };
        match self.reserve(size) {
            Reserved::Refused => return OUT_OF_MEMORY,
            Reserved::Free => return call(),
            Reserved::Charged => {}
        }
        let code = call();
        let key = if code == SUCCESS { key() } else { 0 };
        self.end(code, Entry::new(kind, key, self.device.unsigned_abs(), size, of));
        code
    }

    // This and the next one are not part of the function above, of which there is one for each function of the driver.
    #[inline(never)]
    fn reserve(&self, size: u64) -> Reserved {
        match self.process.ledger.room() {
            Ok(()) => self.gpu.reserve(charge_of(size), &self.allowed),
            Err(NoRoom) => Reserved::Refused,
        }
    }

    /// Record what the driver has allocated, or that it has not.
    #[inline(never)]
    fn end(&self, code: Code, entry: Entry) {
        let charge = charge_of(entry.size);
        if code != SUCCESS {
            return self.gpu.cancel(charge);
        }
        // Its page may have been charged for another one. Without room to note the page, it stays charged.
        let is_charged = entry.size == SHARED && matches!(self.process.ledger.enter(entry.key / PAGE, entry.gpu), Ok(false));
        if is_charged {
            self.gpu.cancel(charge);
        } else {
            self.gpu.commit(charge);
        }
        note(self.process, entry);
    }
}

/// What is charged for memory of a recorded size.
fn charge_of(size: u64) -> u64 {
    if size == SHARED { PAGE } else { size }
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

/// Return the charge of a handle.
pub(crate) fn give_back(process: &Process, entry: &Entry) {
    let charge = match entry.size {
        _ if entry.is(Kind::Mapping) => 0,
        SHARED => leave(process, entry.key / PAGE),
        charge => charge,
    };
    if let Some(gpu) = Device::try_from(entry.gpu).ok().and_then(|device| process.gpu(device)) {
        gpu.free(charge);
    }
}

/// Remove one small allocation from its page. Return the charge that this frees.
fn leave(process: &Process, slab: u64) -> u64 {
    let entry = process.ledger.change(Kind::Slab, slab, |entry| {
        entry.of = entry.of.saturating_sub(1);
        entry.of == 0
    });
    if entry.is_some_and(|entry| entry.of == 0) { PAGE } else { 0 }
}

/// Free something: call the driver with `call`, and return the charge that was recorded under `key`. An allocation without a record was not charged.
pub(crate) fn free(kind: Kind, key: u64, call: impl FnOnce() -> Code) -> Code {
    let Some(process) = process() else { return call() };
    // Removed before the driver is called, because another thread can get the same handle right afterwards.
    let Some(entry) = process.ledger.take(kind, key) else {
        return call();
    };
    let code = call();
    if code == SUCCESS {
        give_back(process, &entry);
    } else {
        note(process, entry);
    }
    code
}

/// Return the charges of everything that ended with a context.
pub(crate) fn sweep(process: &Process, context: u64) {
    let dead = |entry: &Entry| (entry.is(Kind::Linear) || entry.is(Kind::Array)) && entry.of == context;
    let mut place = 0;
    while let Some((next, entry)) = process.ledger.take_from(place, dead) {
        place = next;
        give_back(process, &entry);
    }
}
