//! The pod's share of a GPU, and what each process uses of it. Both are read again in each call.

use core::sync::atomic::{AtomicU64, Ordering};

use divvy_shadow::path::FixedPath;
use divvy_shadow::sys::{self, FileLocks, RawFile};
use divvy_share::claim::{Locks as _, owner};
use divvy_share::limits::{self, ShareLimits, UnreadableLimits};
use divvy_share::usage::{self, SLOTS, UsageFile, UsageSlot};

use crate::driver;
use crate::nvml::{NvmlDevice, NvmlUint};

/// The share of the pod, if it has one that can be read.
pub(crate) struct OwnShare {
    uuid: [u8; 16],
    pub(crate) limits: ShareLimits,
}

/// The processes of the pod that use the GPU. The numbers are those that the processes have written, and may be any.
pub(crate) struct Users<'a> {
    usage: &'a UsageFile,
    file: RawFile,
    limits: ShareLimits,
}

impl OwnShare {
    /// The share of a GPU. `None`: the driver's own answer applies.
    pub(crate) fn of(device: NvmlDevice) -> Option<Self> {
        let uuid = driver::uuid(device)?;
        let file = sys::open(FixedPath::of(uuid, b"/limits").as_c_str(), false, limits::SIZE).ok()?;
        // The agent may be writing, so that neither copy is whole for a moment.
        let mut limits = Err(UnreadableLimits::Torn);
        for _ in 0..4 {
            let mut bytes = [0_u8; limits::SIZE];
            // SAFETY: any bytes are bytes.
            unsafe { sys::read(&file, &mut bytes) }.ok()?;
            limits = ShareLimits::from_bytes(&bytes);
            if limits != Err(UnreadableLimits::Torn) {
                break;
            }
        }
        let (_, limits) = limits.ok()?;
        Some(Self { uuid, limits })
    }

    /// The processes that use it. `None` if the file cannot be used: anybody in the pod can write it. The caller has the place for the file's content, so
    /// that it is on a thread's stack only once.
    pub(crate) fn users<'a>(&self, usage: &'a mut UsageFile) -> Option<Users<'a>> {
        // Read and not mapped: a file that is shortened meanwhile would end the program (SIGBUS).
        let file = sys::open(FixedPath::of(self.uuid, b"/usage").as_c_str(), false, usage::SIZE).ok()?;
        // SAFETY: it is made of numbers.
        unsafe { sys::read(&file, usage) }.ok()?;
        usage.check().ok()?;
        Some(Users {
            usage,
            file,
            limits: self.limits,
        })
    }
}

fn number(word: &AtomicU64) -> u64 {
    word.load(Ordering::Relaxed)
}

/// Whether a slot's PID is that of a process which this one can see. `root` is the root directory of the slot's owner, and `own` that of this process.
///
/// In another PID namespace, the PID belongs to another process, or to none. Containers of a pod can also share a PID namespace: there, the process has the
/// root directory that the slot says.
fn is_here(pid: NvmlUint, root: u64, own: u64) -> bool {
    root != 0 && (root == own || root == sys::directory(root_of(pid).as_c_str()))
}

/// The path that leads to the root directory of a process (proc_pid_root(5)).
fn root_of(pid: NvmlUint) -> FixedPath {
    let (mut digits, mut rest) = ([b'0'; 10], pid);
    for digit in digits.iter_mut().rev() {
        *digit = b'0'.wrapping_add((rest % 10) as u8);
        rest /= 10;
    }
    let leading = digits.iter().take_while(|digit| **digit == b'0').count();
    FixedPath::from(&[b"/proc/", digits.get(leading..).unwrap_or_default(), b"/root/"])
}

/// One process of this container.
#[derive(Clone, Copy, Default)]
pub(crate) struct GpuUser {
    pub(crate) pid: NvmlUint,
    pub(crate) bytes: u64,
}

impl Users<'_> {
    /// The slots with memory whose owners live.
    fn slots(&self) -> impl Iterator<Item = &UsageSlot> {
        (0..self.usage.bound()).filter_map(|index| {
            let slot = self.usage.slots.get(index)?;
            let counts = (number(&slot.pending) != 0 || self.has(slot) != 0) && FileLocks(&self.file).held(owner(index));
            counts.then_some(slot)
        })
    }

    /// What the owner of a slot has allocated, and with what its contexts are charged.
    fn has(&self, slot: &UsageSlot) -> u64 {
        number(&slot.used).saturating_add(self.limits.contexts(number(&slot.contexts)))
    }

    /// What all processes of the pod have or have reserved, as `cuMemGetInfo` counts it.
    pub(crate) fn charged(&self) -> u64 {
        self.slots().fold(0, |sum, slot| {
            sum.saturating_add(number(&slot.pending)).saturating_add(self.has(slot))
        })
    }

    /// Write the processes of this container that have memory, each once. Returns how many they are.
    pub(crate) fn of_container(&self, users: &mut [GpuUser; SLOTS]) -> usize {
        let mut count = 0_usize;
        let own = sys::directory(c"/");
        for slot in self.slots() {
            let (pid, bytes) = (NvmlUint::try_from(number(&slot.pid)).unwrap_or(0), self.has(slot));
            if pid == 0 || bytes == 0 || !is_here(pid, number(&slot.root), own) {
                continue;
            }
            // A process that has loaded CUDA's library twice has two slots.
            if let Some(user) = users.iter_mut().take(count).find(|user| user.pid == pid) {
                user.bytes = user.bytes.saturating_add(bytes);
            } else if let Some(user) = users.get_mut(count) {
                *user = GpuUser { pid, bytes };
                count = count.saturating_add(1);
            }
        }
        count
    }
}
