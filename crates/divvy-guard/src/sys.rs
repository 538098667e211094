//! System calls that do not go through a libc, and what is built of them.

use core::ffi::CStr;
use core::sync::atomic::{AtomicU32, Ordering};

use divvy_share::claim::Locks;
use rustix::fd::{AsRawFd as _, OwnedFd};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use rustix::thread::futex;

/// Open a regular file of exactly this size, and no link to one.
pub(crate) fn open(path: &CStr, write: bool, size: usize) -> Result<OwnedFd, Errno> {
    let access = if write { OFlags::RDWR } else { OFlags::RDONLY };
    // NONBLOCK: a pipe under this name must not stop the program.
    let flags = access | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = rustix::fs::open(path, flags, Mode::empty())?;
    let stat = rustix::fs::fstat(&file)?;
    let fits = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile && u64::try_from(stat.st_size) == Ok(size as u64);
    if fits { Ok(file) } else { Err(Errno::INVAL) }
}

/// Whether something is there.
pub(crate) fn exists(path: &CStr) -> bool {
    rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).is_ok()
}

/// Map the start of a file as it is and will be. A `T` may have any bytes and must be made of atomics, because other processes write it.
///
/// The mapping stays for the life of the process.
pub(crate) fn map<T>(file: &OwnedFd, write: bool) -> Result<&'static T, Errno> {
    let access = if write { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
    // SAFETY: the kernel chooses an address range that nothing else uses, and it is never unmapped. Its start has the alignment of a page.
    let address = unsafe { rustix::mm::mmap(core::ptr::null_mut(), size_of::<T>(), access, MapFlags::SHARED, file, 0) }?;
    // SAFETY: the range has the size of a `T`. By the contract of this function any bytes are a `T`, and others may write to it.
    Ok(unsafe { &*address.cast::<T>() })
}

/// Remove a mapping of [`map`] that nothing uses any more.
pub(crate) fn unmap<T>(mapped: &'static T) {
    // SAFETY: by the contract nothing uses the range any more. A failure leaves it mapped, which harms nobody.
    let _ = unsafe { rustix::mm::munmap(core::ptr::from_ref(mapped).cast_mut().cast(), size_of::<T>()) };
}

/// Memory for a `T` for which zeros are a valid value.
///
/// With `wipe`, a child finds zeros again after fork(2).
pub(crate) fn memory<T>(count: usize, wipe: bool) -> Result<*mut T, Errno> {
    let size = size_of::<T>().checked_mul(count).ok_or(Errno::NOMEM)?;
    // SAFETY: the kernel chooses an address range that nothing else uses.
    let address = unsafe { rustix::mm::mmap_anonymous(core::ptr::null_mut(), size, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) }?;
    // SAFETY: the range is the one just mapped; the advice changes nothing in this process.
    if wipe && let Err(error) = unsafe { rustix::mm::madvise(address, size, Advice::LinuxWipeOnFork) } {
        forget::<T>(address.cast(), count);
        return Err(error);
    }
    Ok(address.cast())
}

/// Give back what [`memory`] returned. Nothing may use it any more.
pub(crate) fn forget<T>(memory: *mut T, count: usize) {
    // SAFETY: by the contract the range is one of `memory`, and unused. A failure leaves it mapped, which harms nobody.
    let _ = unsafe { rustix::mm::munmap(memory.cast(), size_of::<T>().saturating_mul(count)) };
}

/// Let others go on for about 100 microseconds: the timer adds its slack of 50.
pub(crate) fn nap() {
    let time = rustix::thread::Timespec {
        tv_sec: 0,
        tv_nsec: 50_000,
    };
    let _ = rustix::thread::nanosleep(&time);
}

/// A mutex between the threads of this process. Zero is unlocked.
pub(crate) struct Mutex(AtomicU32);

const FREE: u32 = 0;
const TAKEN: u32 = 1;
/// Taken, and somebody may sleep until it is free.
const AWAITED: u32 = 2;

impl Mutex {
    /// Lock until the guard is dropped.
    pub(crate) fn lock(&self) -> Locked<'_> {
        if self.0.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_err() {
            while self.0.swap(AWAITED, Ordering::Acquire) != FREE {
                // Returns at once if the value changed meanwhile; a signal also ends it.
                let _ = futex::wait(&self.0, futex::Flags::PRIVATE, AWAITED, None);
            }
        }
        Locked(self)
    }
}

pub(crate) struct Locked<'a>(&'a Mutex);

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        if self.0.0.swap(FREE, Ordering::Release) == AWAITED {
            let _ = futex::wake(&self.0.0, futex::Flags::PRIVATE, 1);
        }
    }
}

/// `struct flock` of 64-bit Linux.
#[repr(C)]
struct Flock {
    kind: i16,
    whence: i16,
    start: i64,
    len: i64,
    pid: i32,
}

const F_OFD_GETLK: usize = 36;
const F_OFD_SETLK: usize = 37;
const F_WRLCK: i16 = 1;
const F_UNLCK: i16 = 2;

/// The locks of a file's open description.
pub(crate) struct FileLocks<'a>(pub(crate) &'a OwnedFd);

impl FileLocks<'_> {
    fn call(&self, command: usize, kind: i16, byte: u64) -> Option<Flock> {
        let mut lock = Flock {
            kind,
            whence: 0,
            start: i64::try_from(byte).ok()?,
            len: 1,
            pid: 0,
        };
        (fcntl(self.0.as_raw_fd(), command, &mut lock) == 0).then_some(lock)
    }
}

impl Locks for FileLocks<'_> {
    /// A question that fails counts as yes: what may be somebody's is not taken and not forgotten.
    fn held(&self, byte: u64) -> bool {
        self.call(F_OFD_GETLK, F_WRLCK, byte).is_none_or(|lock| lock.kind != F_UNLCK)
    }

    fn take(&self, byte: u64) -> bool {
        self.call(F_OFD_SETLK, F_WRLCK, byte).is_some()
    }

    fn release(&self, byte: u64) {
        // Cannot fail for a lock that is held; otherwise the end of the process releases it.
        let _ = self.call(F_OFD_SETLK, F_UNLCK, byte);
    }
}

/// fcntl(2): rustix has no locks of open file descriptions.
#[cfg(target_arch = "x86_64")]
fn fcntl(file: i32, command: usize, lock: &mut Flock) -> isize {
    let result;
    // SAFETY: the commands read and write one `struct flock`, which the reference gives. The kernel changes rcx and r11 besides the result.
    unsafe {
        core::arch::asm!(
            "syscall",
            inlateout("rax") 72_isize => result,
            in("rdi") file as isize,
            in("rsi") command,
            in("rdx") core::ptr::from_mut(lock),
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack, preserves_flags),
        );
    }
    result
}

/// fcntl(2): rustix has no locks of open file descriptions.
#[cfg(target_arch = "aarch64")]
fn fcntl(file: i32, command: usize, lock: &mut Flock) -> isize {
    let result;
    // SAFETY: the commands read and write one `struct flock`, which the reference gives. The kernel changes only the result's register.
    unsafe {
        core::arch::asm!(
            "svc 0",
            in("x8") 25_usize,
            inlateout("x0") file as isize => result,
            in("x1") command,
            in("x2") core::ptr::from_mut(lock),
            options(nostack),
        );
    }
    result
}
