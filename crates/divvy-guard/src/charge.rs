//! What all allocations have in common: reserve, ask the driver, note.

use crate::cuda::{Code, Device, OUT_OF_MEMORY, SUCCESS};
use crate::driver;
use crate::gpu::{Allowed, Gpu, Reserved, Share};
use crate::ledger::{Entry, Kind};
use crate::process::{Process, process};

/// A GPU that is held to a share.
pub(crate) struct Held {
    pub(crate) process: &'static Process,
    pub(crate) gpu: &'static Gpu,
    pub(crate) device: Device,
    pub(crate) allowed: Allowed,
}

/// Whether and how a GPU is held. `Err`: the call ends with this code, or, without one, passes.
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

/// Charge an allocation: ask the driver with `call`, and note under `key` what it gave.
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
        if self.process.ledger.room().is_err() {
            return OUT_OF_MEMORY;
        }
        let charge = match self.gpu.reserve(bytes, &self.allowed) {
            Reserved::Refused => return OUT_OF_MEMORY,
            Reserved::Free => return call(),
            Reserved::Charged(charge) => charge,
        };
        let code = call();
        if code == SUCCESS {
            self.gpu.commit(charge);
            note(self.process, Entry::new(kind, key(), self.device.unsigned_abs(), bytes, of));
        } else {
            self.gpu.cancel(bytes, charge);
        }
        code
    }
}

/// Note a handle that was charged.
pub(crate) fn note(process: &Process, entry: Entry) {
    // Without room, which was made before, the memory stays charged until the process ends: that is too much, and never too little.
    if let Ok(Some(gone)) = process.ledger.insert(entry) {
        give_back(process, &gone);
    }
}

/// Give back what a handle was charged with.
pub(crate) fn give_back(process: &Process, entry: &Entry) {
    if entry.is(Kind::Mapping) {
        return;
    }
    if let Some(gpu) = Device::try_from(entry.gpu).ok().and_then(|device| process.gpu(device)) {
        gpu.free(entry.size);
    }
}

/// Free something: ask the driver with `call`, and give back what was noted under `key`. What was not noted was not charged.
pub(crate) fn free(kind: Kind, key: u64, call: impl FnOnce() -> Code) -> Code {
    let Some(process) = process() else { return call() };
    // Forgotten before the driver is asked: after that, another thread can get the same handle.
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

/// Give back everything that died with a context.
pub(crate) fn sweep(process: &Process, context: u64) {
    process.ledger.sweep(
        |entry| (entry.is(Kind::Linear) || entry.is(Kind::Array)) && entry.of == context,
        |entry| give_back(process, entry),
    );
}
