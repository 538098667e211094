//! System calls that do not go through a libc, and what is built of them. Only the clock is the libc's, if there is one.

use core::ffi::{CStr, c_int, c_void};
use core::mem::{ManuallyDrop, MaybeUninit};
use core::ptr::{null_mut, with_exposed_provenance_mut};
use core::sync::atomic::{AtomicU32, Ordering};

use divvy_share::claim::Locks;
use linux_raw_sys::errno::{EINVAL, ENOMEM};
use linux_raw_sys::general::{
    __NR_clock_gettime, __NR_close, __NR_fcntl, __NR_fstat, __NR_futex, __NR_getdents64, __NR_getpid, __NR_madvise, __NR_mmap,
    __NR_munmap, __NR_nanosleep, __NR_newfstatat, __NR_openat, __NR_pread64, __kernel_timespec, AT_FDCWD, CLOCK_MONOTONIC,
    F_OFD_GETLK, F_OFD_SETLK, F_UNLCK, F_WRLCK, FUTEX_PRIVATE_FLAG, FUTEX_WAIT, FUTEX_WAKE, MADV_WIPEONFORK, MAP_ANONYMOUS,
    MAP_PRIVATE, MAP_SHARED, O_CLOEXEC, O_DIRECTORY, O_NOCTTY, O_NOFOLLOW, O_NONBLOCK, O_PATH, O_RDONLY, O_RDWR, PROT_READ,
    PROT_WRITE, S_IFMT, S_IFREG, flock, stat,
};

use crate::RealFunction;

/// An error number of the kernel.
pub type Errno = u32;

/// A system call, which changes no memory but what its arguments point to.
///
/// # Safety
///
/// As the call with this number demands.
#[cfg(target_arch = "x86_64")]
unsafe fn syscall(number: u32, arguments: [usize; 6]) -> isize {
    let [a, b, c, d, e, f] = arguments;
    let result;
    // SAFETY: the arguments are in the registers of the kernel's convention. It changes rcx and r11 besides the result.
    unsafe {
        core::arch::asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _,
            options(nostack, preserves_flags),
        );
    }
    result
}

/// A system call, which changes no memory but what its arguments point to.
///
/// # Safety
///
/// As the call with this number demands.
#[cfg(target_arch = "aarch64")]
unsafe fn syscall(number: u32, arguments: [usize; 6]) -> isize {
    let [a, b, c, d, e, f] = arguments;
    let result;
    // SAFETY: the arguments are in the registers of the kernel's convention. It changes only the result's register.
    unsafe {
        core::arch::asm!(
            "svc 0",
            in("x8") number as usize,
            inlateout("x0") a as isize => result,
            in("x1") b, in("x2") c, in("x3") d, in("x4") e, in("x5") f,
            options(nostack),
        );
    }
    result
}

/// A system call's result, or its error number.
///
/// # Safety
///
/// As the call with this number demands.
unsafe fn call<const N: usize>(number: u32, arguments: [usize; N]) -> Result<usize, Errno> {
    let mut all = [0; 6];
    for (to, from) in all.iter_mut().zip(arguments) {
        *to = from;
    }
    // SAFETY: the caller's promise.
    let result = unsafe { syscall(number, all) };
    usize::try_from(result).map_err(|_| u32::try_from(result.wrapping_neg()).unwrap_or(EINVAL))
}

/// An open file.
#[derive(Debug)]
pub struct RawFile(i32);

impl Drop for RawFile {
    fn drop(&mut self) {
        // SAFETY: the descriptor is this value's own. A descriptor is gone also when closing it fails.
        let _ = unsafe { call(__NR_close, [self.0 as usize]) };
    }
}

fn open_any(path: &CStr, flags: u32) -> Result<RawFile, Errno> {
    // SAFETY: the path ends with 0.
    let file = unsafe {
        call(
            __NR_openat,
            [
                AT_FDCWD as usize,
                path.as_ptr().expose_provenance(),
                (flags | O_CLOEXEC) as usize,
                0,
            ],
        )
    }?;
    i32::try_from(file).map(RawFile).map_err(|_| EINVAL)
}

/// Read something from a file's status. The structure stays where it is: to move or clear it, the compiler would call the C library, which not every user has.
fn status<T>(file: &RawFile, read: impl FnOnce(&stat) -> T) -> Result<T, Errno> {
    let mut stat = MaybeUninit::<stat>::uninit();
    // SAFETY: the kernel writes one `struct stat`.
    unsafe { call(__NR_fstat, [file.0 as usize, stat.as_mut_ptr().expose_provenance()]) }?;
    // SAFETY: the call has succeeded, so the kernel has written all of it, which is numbers.
    Ok(read(unsafe { stat.assume_init_ref() }))
}

fn is_regular(stat: &stat) -> bool {
    stat.st_mode & S_IFMT == S_IFREG
}

/// Open a regular file of exactly this size, and no link to one.
pub fn open(path: &CStr, write: bool, size: usize) -> Result<RawFile, Errno> {
    // NONBLOCK: a pipe under this name must not stop the program.
    let file = open_any(
        path,
        if write { O_RDWR } else { O_RDONLY } | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY,
    )?;
    let fits = status(&file, |stat| {
        is_regular(stat) && u64::try_from(stat.st_size) == Ok(size as u64)
    });
    if fits? { Ok(file) } else { Err(EINVAL) }
}

/// Open a regular file for reading, also through links.
pub fn open_linked(path: &CStr) -> Result<RawFile, Errno> {
    // NONBLOCK: a pipe under this name must not stop the program.
    let file = open_any(path, O_RDONLY | O_NONBLOCK | O_NOCTTY)?;
    if status(&file, is_regular)? { Ok(file) } else { Err(EINVAL) }
}

/// What two open files have in common if they are the same file: the file system's number and the inode's.
pub fn identity(file: &RawFile) -> Result<(u64, u64), Errno> {
    status(file, |stat| (stat.st_dev, stat.st_ino))
}

/// Whether something is there.
pub fn exists(path: &CStr) -> bool {
    open_any(path, O_PATH).is_ok()
}

/// Whether `found` returns true for a name in a directory. If the directory cannot be read, it has none.
pub fn any_in(path: &CStr, found: impl Fn(&[u8]) -> bool) -> bool {
    let Ok(directory) = open_any(path, O_RDONLY | O_DIRECTORY) else {
        return false;
    };
    // Room for 8 names at a time; the alignment is that of `struct linux_dirent64`.
    let mut entries = [0_u64; 64];
    loop {
        // SAFETY: the kernel writes at most the given number of bytes.
        let read = unsafe {
            call(
                __NR_getdents64,
                [
                    directory.0 as usize,
                    entries.as_mut_ptr().expose_provenance(),
                    size_of_val(&entries),
                ],
            )
        };
        let Ok(length @ 1..) = read else { return false };
        // SAFETY: numbers are bytes, too.
        let bytes = unsafe { core::slice::from_raw_parts(entries.as_ptr().cast::<u8>(), size_of_val(&entries)) };
        let mut rest = bytes.get(..length).unwrap_or_default();
        // An entry: its inode, an offset, its length in 16 bits, its type, and its name, which ends with 0.
        while let [_, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, low, high, _, name @ ..] = rest {
            let name = CStr::from_bytes_until_nul(name).unwrap_or_default();
            if found(name.to_bytes()) {
                return true;
            }
            let size = u16::from_ne_bytes([*low, *high]);
            rest = rest.get(usize::from(size).max(1)..).unwrap_or_default();
        }
    }
}

/// This process's id, as its container sees it.
pub fn pid() -> u64 {
    // SAFETY: the call has no arguments, and cannot fail.
    unsafe { call(__NR_getpid, []) }.map_or(0, |pid| pid as u64)
}

/// The number by which a directory is recognized, made of its device and inode numbers. 0 if it cannot be found.
///
/// The number of `/` identifies the container, because containers have different root directories. The PID namespace would also identify it, but to look it up
/// in `/proc` takes a new process 15 to 30 microseconds, and a look at `/` takes less than one.
pub fn directory(path: &CStr) -> u64 {
    let mut stat = MaybeUninit::<stat>::uninit();
    // SAFETY: the path ends with 0, and the kernel writes one `struct stat`.
    let found = unsafe {
        call(
            __NR_newfstatat,
            [
                AT_FDCWD as usize,
                path.as_ptr().expose_provenance(),
                stat.as_mut_ptr().expose_provenance(),
                0,
            ],
        )
    };
    // SAFETY: if the call has succeeded, the kernel has written all of it, which is numbers.
    found.map_or(0, |_| number(unsafe { stat.assume_init_ref() }))
}

/// Inode numbers are often small, and so are device numbers.
fn number(stat: &stat) -> u64 {
    stat.st_dev.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ stat.st_ino
}

/// Read a `T` from the start of a file. It fails if the file is shorter.
///
/// # Safety
///
/// Any bytes are a `T`.
pub unsafe fn read<T>(file: &RawFile, to: &mut T) -> Result<(), Errno> {
    let (address, size) = (core::ptr::from_mut(to).expose_provenance(), size_of::<T>());
    // SAFETY: the kernel writes at most the size of a `T`, and the caller promises that what it writes is one.
    let got = unsafe { call(__NR_pread64, [file.0 as usize, address, size, 0]) }?;
    // The file has become shorter since it was opened.
    if got == size { Ok(()) } else { Err(EINVAL) }
}

fn map_bytes(size: usize, write: bool, flags: u32, file: Option<&RawFile>) -> Result<*mut c_void, Errno> {
    let access = if write { PROT_READ | PROT_WRITE } else { PROT_READ };
    let file = file.map_or(usize::MAX, |file| file.0 as usize);
    // SAFETY: the kernel chooses an address range that nothing else uses.
    let address = unsafe { call(__NR_mmap, [0, size, access as usize, flags as usize, file, 0]) }?;
    Ok(with_exposed_provenance_mut(address))
}

fn unmap_bytes(address: *mut c_void, size: usize) {
    // SAFETY: both callers promise that the range is a mapping of this module that nothing uses. A failure leaves it mapped, which harms nobody.
    let _ = unsafe { call(__NR_munmap, [address.addr(), size]) };
}

/// Map the start of a file as it is and will be. A `T` may have any bytes and must be made of atomics, because other processes write it.
pub fn map<T>(file: &RawFile, write: bool) -> Result<&'static T, Errno> {
    let address = map_bytes(size_of::<T>(), write, MAP_SHARED, Some(file))?;
    // SAFETY: the range has the size of a `T` and the alignment of a page. By the contract of this function any bytes are a `T`, and others may
    // write to it.
    Ok(unsafe { &*address.cast::<T>() })
}

/// Remove a mapping of [`map`] that nothing uses any more.
pub fn unmap<T>(mapped: &'static T) {
    unmap_bytes(core::ptr::from_ref(mapped).cast_mut().cast(), size_of::<T>());
}

/// Memory for some `T`, for which zeros are a valid value. With `wipe`, a child finds zeros again after fork(2).
pub fn memory<T>(count: usize, wipe: bool) -> Result<*mut T, Errno> {
    let size = size_of::<T>().checked_mul(count).ok_or(ENOMEM)?;
    let address = map_bytes(size, true, MAP_PRIVATE | MAP_ANONYMOUS, None)?;
    if wipe {
        // SAFETY: the range is the one just mapped; the advice changes nothing in this process.
        let advised = unsafe { call(__NR_madvise, [address.addr(), size, MADV_WIPEONFORK as usize]) };
        if let Err(error) = advised {
            unmap_bytes(address, size);
            return Err(error);
        }
    }
    Ok(address.cast())
}

/// Give back what [`memory`] returned. Nothing may use it any more.
pub fn forget<T>(memory: *mut T, count: usize) {
    unmap_bytes(memory.cast(), size_of::<T>().saturating_mul(count));
}

/// Let others go on for about 100 microseconds: the timer adds its slack of 50.
pub fn nap() {
    let time = __kernel_timespec {
        tv_sec: 0,
        tv_nsec: 50_000,
    };
    // SAFETY: the kernel reads one time, and writes no remainder to a null pointer. A signal may end it early.
    let _ = unsafe {
        call(
            __NR_nanosleep,
            [core::ptr::from_ref(&time).expose_provenance(), null_mut::<()>().addr()],
        )
    };
}

/// The time in nanoseconds on the clock that all processes of the machine share.
pub fn now() -> u64 {
    type Clock = unsafe extern "C" fn(c_int, *mut __kernel_timespec) -> c_int;
    /// The C library's, behind the driver: it makes no system call, which would take ten times as long.
    static CLOCK: RealFunction = RealFunction::new();
    let mut time = __kernel_timespec { tv_sec: 0, tv_nsec: 0 };
    match CLOCK.get(c"clock_gettime") {
        Some(found) => {
            // SAFETY: POSIX's function has these arguments; a C library for a 64-bit machine has the kernel's structure.
            let clock: Clock = unsafe { core::mem::transmute(found) };
            // SAFETY: it writes one time. This clock always exists.
            unsafe { clock(CLOCK_MONOTONIC.cast_signed(), &raw mut time) };
        }
        None => {
            let pointer = core::ptr::from_mut(&mut time).expose_provenance();
            // SAFETY: the kernel writes one time. This clock always exists.
            let _ = unsafe { call(__NR_clock_gettime, [CLOCK_MONOTONIC as usize, pointer]) };
        }
    }
    time.tv_sec
        .cast_unsigned()
        .saturating_mul(SECOND)
        .saturating_add(time.tv_nsec.cast_unsigned())
}

/// Nanoseconds of a second.
const SECOND: u64 = 1_000_000_000;

/// Wait for at most so many nanoseconds, and no longer than 32 bits at a distance in bytes from the start of a mapped file are `value` or until another process
/// wakes those that wait for them. A signal may end it early.
pub fn wait<T>(mapped: &'static T, distance: usize, value: u32, time: u64) {
    let time = __kernel_timespec {
        tv_sec: (time / SECOND).cast_signed(),
        tv_nsec: (time % SECOND).cast_signed(),
    };
    let word = core::ptr::from_ref(mapped).expose_provenance().wrapping_add(distance);
    // SAFETY: the kernel reads the time and the word, and answers with an error if the process may not. The key of the word is the file's, not the
    // process's, so that it is the same one for who writes the file. Whatever the call returns, the caller looks at the file again.
    let _ = unsafe {
        call(
            __NR_futex,
            [
                word,
                FUTEX_WAIT as usize,
                value as usize,
                core::ptr::from_ref(&time).expose_provenance(),
            ],
        )
    };
}

/// Wake all processes that [`wait`] for 32 bits at a distance in bytes from the start of a file of this size, which is open under this descriptor. Return how many
/// there were.
pub fn wake(descriptor: i32, size: usize, distance: usize) -> Result<usize, Errno> {
    // The descriptor stays the caller's.
    let file = ManuallyDrop::new(RawFile(descriptor));
    // The kernel finds those that wait by the file of a mapped word.
    let start = map_bytes(size, false, MAP_SHARED, Some(&file))?;
    let word = start.expose_provenance().wrapping_add(distance);
    // SAFETY: the call has no timeout, does not read the word, and answers with an error if no word is there.
    let woken = unsafe { call(__NR_futex, [word, FUTEX_WAKE as usize, i32::MAX as usize]) };
    unmap_bytes(start, size);
    woken
}

fn futex(word: &AtomicU32, operation: u32, value: u32) {
    // SAFETY: the word is valid, and the call has no timeout. Whatever the call returns, the caller reads the word again.
    let _ = unsafe {
        call(
            __NR_futex,
            [
                word.as_ptr().expose_provenance(),
                (operation | FUTEX_PRIVATE_FLAG) as usize,
                value as usize,
                0,
            ],
        )
    };
}

/// A mutex between the threads of this process. Zero is unlocked.
#[derive(Debug)]
pub struct Mutex(AtomicU32);

const FREE: u32 = 0;
const TAKEN: u32 = 1;
/// Taken, and a thread may sleep until it is free.
const AWAITED: u32 = 2;

impl Mutex {
    /// Lock until the guard is dropped.
    pub fn lock(&self) -> LockedMutex<'_> {
        if self
            .0
            .compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed)
            .is_err()
        {
            while self.0.swap(AWAITED, Ordering::Acquire) != FREE {
                // Returns at once if the value changed meanwhile; a signal also ends it.
                futex(&self.0, FUTEX_WAIT, AWAITED);
            }
        }
        LockedMutex(self)
    }
}

#[derive(Debug)]
pub struct LockedMutex<'a>(&'a Mutex);

impl Drop for LockedMutex<'_> {
    fn drop(&mut self) {
        if self.0.0.swap(FREE, Ordering::Release) == AWAITED {
            futex(&self.0.0, FUTEX_WAKE, 1);
        }
    }
}

/// The locks of a file's open description.
#[derive(Debug)]
pub struct FileLocks<'a>(pub &'a RawFile);

impl FileLocks<'_> {
    fn call(&self, command: u32, kind: u32, byte: u64) -> Option<flock> {
        let mut lock = flock {
            l_type: kind as i16,
            l_whence: 0,
            l_start: i64::try_from(byte).ok()?,
            l_len: 1,
            l_pid: 0,
        };
        let pointer = core::ptr::from_mut(&mut lock).expose_provenance();
        // SAFETY: the commands read and write one `struct flock`.
        unsafe { call(__NR_fcntl, [self.0.0 as usize, command as usize, pointer]) }.ok()?;
        Some(lock)
    }
}

impl Locks for FileLocks<'_> {
    /// If the call fails, the byte counts as locked, so that a slot that may have an owner is neither taken nor ignored.
    fn held(&self, byte: u64) -> bool {
        self.call(F_OFD_GETLK, F_WRLCK, byte)
            .is_none_or(|lock| lock.l_type != F_UNLCK as i16)
    }

    fn take(&self, byte: u64) -> bool {
        self.call(F_OFD_SETLK, F_WRLCK, byte).is_some()
    }

    fn release(&self, byte: u64) {
        // Cannot fail for a lock that is held; otherwise the end of the process releases it.
        let _ = self.call(F_OFD_SETLK, F_UNLCK, byte);
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt as _;

    use super::*;

    #[test]
    fn a_file_that_has_become_shorter_is_not_read() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), [1, 2, 3, 4]).expect("the file");
        let path = CString::new(file.path().as_os_str().as_bytes()).expect("a path");
        let opened = open(&path, false, 4).expect("its size is right");
        let mut bytes = [0_u8; 4];
        // SAFETY: any bytes are bytes.
        assert_eq!(unsafe { read(&opened, &mut bytes) }, Ok(()));
        assert_eq!(bytes, [1, 2, 3, 4]);
        file.as_file().set_len(3).expect("the file");
        // SAFETY: as above.
        assert_eq!(unsafe { read(&opened, &mut bytes) }, Err(EINVAL));
    }

    #[test]
    fn directories_have_different_numbers_and_each_always_the_same() {
        let names = ["/", "/proc", "/tmp", "/usr"].map(|name| CString::new(name).expect("no 0"));
        let numbers = names.each_ref().map(|name| directory(name));
        assert_eq!(numbers, names.each_ref().map(|name| directory(name)));
        let different: std::collections::BTreeSet<u64> = numbers.into();
        assert!(different.len() == numbers.len() && !different.contains(&0), "{numbers:?}");
        // A process's root directory, as others see it.
        assert_eq!(directory(c"/proc/self/root/"), directory(c"/"));
        assert_eq!(directory(c"/none"), 0);
    }
}
