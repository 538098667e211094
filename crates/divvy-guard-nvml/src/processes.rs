//! The processes on the GPU, as a program in a container sees them: the container's own processes, with their PIDs in the container.
//!
//! A process is listed if its slot has an owner and memory, and if the program that asks can see the process under its PID: it has the same root directory
//! (`divvy_share::usage::Slot`), or `/proc` shows a process with this PID and the root directory that the slot says. So the processes of the pod's other
//! containers are listed only if the pod shares one PID namespace. The memory of processes that are not listed still counts as used.
//!
//! A slot says that a process uses CUDA. So the processes are in the list of compute processes, also if they use the GPU through MPS, and the lists of
//! graphics processes and of clients of MPS are empty: the driver's own lists have the ids and the memory of other pods' processes.

use divvy_share::usage::{SLOTS, UsageFile};

use crate::nvml::{
    INSUFFICIENT_SIZE, INVALID_ARGUMENT, NO_INSTANCE, NvmlDevice, NvmlProcess, NvmlReturn, NvmlUint, Process2, Process3, SUCCESS,
};
use crate::share::{GpuUser, OwnShare};

/// Which processes a function lists.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Which {
    Compute,
    Graphics,
    Mps,
}

/// One process as a function writes it.
pub(crate) trait ProcessLayout: Copy {
    fn of(user: &GpuUser) -> Self;
}

impl ProcessLayout for NvmlProcess {
    fn of(user: &GpuUser) -> Self {
        Self {
            pid: user.pid,
            used: user.bytes,
        }
    }
}

impl ProcessLayout for Process2 {
    fn of(user: &GpuUser) -> Self {
        Self {
            process: NvmlProcess::of(user),
            gpu_instance: NO_INSTANCE,
            compute_instance: NO_INSTANCE,
        }
    }
}

impl ProcessLayout for Process3 {
    fn of(user: &GpuUser) -> Self {
        Self {
            process: Process2::of(user),
            protected: 0,
        }
    }
}

/// List processes. `call` gives the driver the program's arguments, and `ask` gives it a count and no array.
///
/// # Safety
///
/// `count` is null or valid, and `infos` is null or has room for `*count` values, as the driver demands.
pub(crate) unsafe fn list<T: ProcessLayout>(
    which: Which,
    device: NvmlDevice,
    count: *mut NvmlUint,
    infos: *mut T,
    call: impl FnOnce() -> NvmlReturn,
    ask: impl FnOnce(*mut NvmlUint) -> NvmlReturn,
) -> NvmlReturn {
    let mut usage = UsageFile::default();
    let Some(users) = (!count.is_null()).then(|| OwnShare::of(device)?.users(&mut usage)).flatten() else {
        return call();
    };
    // The driver's processes are other pods' as well, so they are not written to the program's array, not even for a moment.
    let mut theirs = 0;
    match ask(&raw mut theirs) {
        SUCCESS | INSUFFICIENT_SIZE => {}
        error => return error,
    }
    let mut list = [GpuUser::default(); SLOTS];
    let shown = match which {
        Which::Compute => users.of_container(&mut list),
        Which::Graphics | Which::Mps => 0,
    };
    // SAFETY: not null, and valid by this function's contract. A program may have given an unaligned pointer.
    let room = unsafe { count.read_unaligned() };
    let needed = shown as NvmlUint;
    // SAFETY: as above.
    unsafe { count.write_unaligned(needed) };
    if needed > room {
        return INSUFFICIENT_SIZE;
    }
    if infos.is_null() && needed > 0 {
        return INVALID_ARGUMENT;
    }
    for (index, user) in (0..shown).zip(&list) {
        // SAFETY: the index is below the room, which this function's contract promises.
        unsafe { infos.add(index).write_unaligned(T::of(user)) };
    }
    SUCCESS
}
