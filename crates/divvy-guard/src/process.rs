//! The guard's state in this process.
//!
//! The state is in memory that the kernel fills with zeros in a child after fork(2) (`MADV_WIPEONFORK`, since Linux 4.14), and zeros are the state before
//! the first call. So a child that uses the GPU takes its own slot, and never writes to its parent's. The parent's slot stays held as long as the child has
//! the mapping, just as the driver keeps the parent's memory as long as the child has its descriptors.

use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use crate::cuda::CuDevice;
use crate::gpu::{Credit, GuardedGpu};
use crate::ledger::HandleLedger;
use crate::sys::{self, Errno, Mutex};

/// The largest number of GPUs that a process can see. No machine has more.
const GPUS: usize = 64;

/// The whole state in one piece. Zeros are a valid state.
#[repr(C)]
pub(crate) struct GuardedProcess {
    pub(crate) ledger: HandleLedger,
    /// The pools, and what graphs have of each GPU. They are few, and all of them are looked at in each synchronization.
    pub(crate) reserves: HandleLedger,
    /// How many GPUs the process sees; 0: not known yet.
    count: AtomicU32,
    /// 1 when the process has pools.
    pub(crate) pools: AtomicU32,
    /// 1 when the process has opened memory of another one.
    pub(crate) opened: AtomicU32,
    /// How many launches pass on any GPU of a process that sees several.
    pub(crate) credit: Credit,
    /// Held while a pool is charged with what the driver says.
    pub(crate) settling: Mutex,
    gpus: [GuardedGpu; GPUS],
}

static PROCESS: AtomicPtr<GuardedProcess> = AtomicPtr::new(null_mut());

/// Return the state of this process. Return `None` if the kernel gives no memory for it, or does not support `MADV_WIPEONFORK`.
pub(crate) fn process() -> Option<&'static GuardedProcess> {
    let mut process = PROCESS.load(Ordering::Acquire);
    if process.is_null() {
        process = make().ok()?;
    }
    // SAFETY: the memory is a `GuardedProcess` of zeros or what became of it, is never unmapped once it is in `PROCESS`, and is only changed through shared
    // references.
    Some(unsafe { &*process })
}

#[cold]
fn make() -> Result<*mut GuardedProcess, Errno> {
    let made = sys::memory::<GuardedProcess>(1, true)?;
    Ok(
        match PROCESS.compare_exchange(null_mut(), made, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => made,
            Err(other) => {
                sys::forget(made, 1);
                other
            }
        },
    )
}

impl GuardedProcess {
    /// The GPU of a process that sees one. Its ordinal is 0.
    ///
    /// `ask` asks the driver how many there are. It does not know before `cuInit`, and the number stays the same afterwards.
    pub(crate) fn only_gpu(&self, ask: impl FnOnce() -> Option<u32>) -> Option<&GuardedGpu> {
        let count = match self.count.load(Ordering::Relaxed) {
            0 => {
                let count = ask()?;
                self.count.store(count, Ordering::Relaxed);
                count
            }
            count => count,
        };
        if count == 1 { self.gpu(0) } else { None }
    }

    /// All GPUs that this process sees.
    pub(crate) fn seen(&self) -> impl Iterator<Item = &GuardedGpu> {
        self.gpus.iter().take(self.count.load(Ordering::Relaxed) as usize)
    }

    /// The GPU with an ordinal of this process.
    pub(crate) fn gpu(&self, device: CuDevice) -> Option<&GuardedGpu> {
        self.gpus.get(usize::try_from(device).ok()?)
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::wait::{WaitStatus, waitpid};
    use nix::unistd::{ForkResult, fork};

    use super::*;

    #[test]
    fn a_child_begins_with_nothing() {
        if divvy_skip::emulated("the emulator ignores madvise(MADV_WIPEONFORK)") {
            return;
        }
        let ours = process().expect("memory");
        ours.pools.store(7, Ordering::Relaxed);
        // SAFETY: the child only reads memory, and ends.
        let child = match unsafe { fork() }.expect("a child") {
            ForkResult::Parent { child } => child,
            ForkResult::Child => {
                let found = process().map_or(100, |process| process.pools.load(Ordering::Relaxed));
                // SAFETY: ends the process at once.
                unsafe { nix::libc::_exit(i32::try_from(found).unwrap_or(101)) }
            }
        };
        assert_eq!(waitpid(child, None), Ok(WaitStatus::Exited(child, 0)));
        assert_eq!(ours.pools.load(Ordering::Relaxed), 7);
    }
}
