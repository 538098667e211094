//! How memory goes from one process to another: descriptors of files, and handles of 64 bytes. Both name the memory and carry none.
//!
//! The file is in the directory of the ledgers. Each process that has the memory, and each descriptor, has locked its first byte for reading. One process, which
//! has locked the second byte, has the memory in its ledger; if that process ends, another one takes it over.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::fd::{AsRawFd, IntoRawFd, RawFd};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use divvy_gpu_sim::directory;
use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::codes::{CuCode, INVALID_VALUE, OPERATING_SYSTEM};

/// What is shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum Thing {
    Physical = 1,
    Pool = 2,
    Pointer = 3,
}

const MAGIC: u64 = u64::from_le_bytes(*b"dvShare1");
const LENGTH: usize = 64;

/// Shared memory: what it is, who shares it, its GPU, and its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SharedMemory {
    pub(crate) thing: Thing,
    pub(crate) pid: u32,
    pub(crate) gpu: [u8; 16],
    pub(crate) bytes: u64,
    /// What is in the name of the file, besides the PID; 0 if there is none that has a name.
    pub(crate) number: u32,
}

/// The locks of this process on the file of memory that other processes may have, too.
#[derive(Debug)]
pub(crate) struct Common {
    file: File,
    shared: SharedMemory,
    /// Whether this process has it in its ledger.
    pub(crate) pays: bool,
    /// How often the program has opened it.
    pub(crate) opened: u64,
}

/// The byte that all have locked who have the memory, or a descriptor of it.
const HELD: i64 = 0;
/// The byte that the process has locked that has it in its ledger.
const PAID: i64 = 1;

impl Common {
    /// Begin to share memory of this process.
    pub(crate) fn begin(mut shared: SharedMemory) -> Result<Common, CuCode> {
        static NUMBER: AtomicU32 = AtomicU32::new(1);
        let mut file = match directory() {
            Some(directory) => {
                shared.number = NUMBER.fetch_add(1, Ordering::Relaxed);
                File::create_new(directory.join(shared.name())).and_then(|_| open(&directory.join(shared.name())))
            }
            None => memfd_create(c"divvy-cuda-sim", MFdFlags::MFD_CLOEXEC)
                .map(File::from)
                .map_err(Into::into),
        }
        .map_err(|_| OPERATING_SYSTEM)?;
        file.write_all(&shared.encode()).map_err(|_| OPERATING_SYSTEM)?;
        Common::of(file, shared)
    }

    /// Have memory that another process shares. `None` if its file has no name.
    pub(crate) fn named(shared: SharedMemory) -> Result<Option<Common>, CuCode> {
        let Some(directory) = directory().filter(|_| shared.number != 0) else {
            return Ok(None);
        };
        let file = open(&directory.join(shared.name())).map_err(|_| INVALID_VALUE)?;
        Common::of(file, shared).map(Some)
    }

    fn of(file: File, shared: SharedMemory) -> Result<Common, CuCode> {
        lock(&file, libc::F_RDLCK, HELD).map_err(|_| OPERATING_SYSTEM)?;
        let pays = lock(&file, libc::F_WRLCK, PAID).is_ok();
        Ok(Common {
            file,
            shared,
            pays,
            opened: 1,
        })
    }

    pub(crate) fn is(&self, shared: &SharedMemory) -> bool {
        shared.number != 0 && (self.shared.pid, self.shared.number) == (shared.pid, shared.number)
    }

    pub(crate) fn shared(&self) -> SharedMemory {
        self.shared
    }

    /// Whether others have the memory, or a descriptor of it.
    pub(crate) fn has_others(&self) -> bool {
        let mut flock = byte(libc::F_WRLCK, HELD);
        fcntl(&self.file, FcntlArg::F_OFD_GETLK(&mut flock)).is_ok() && i32::from(flock.l_type) != libc::F_UNLCK
    }

    /// Have the memory in this process's ledger if no other process has it there.
    pub(crate) fn take_over(&mut self) -> bool {
        self.pays = lock(&self.file, libc::F_WRLCK, PAID).is_ok();
        self.pays
    }

    /// Leave that to another process again.
    pub(crate) fn leave(&mut self) {
        // It can only fail for a file that is not open.
        let _ = lock(&self.file, libc::F_UNLCK, PAID);
        self.pays = false;
    }

    /// Return a descriptor, which the program owns.
    pub(crate) fn descriptor(&self) -> Result<RawFd, CuCode> {
        let file = open(Path::new(&format!("/proc/self/fd/{}", self.file.as_raw_fd()))).map_err(|_| OPERATING_SYSTEM)?;
        lock(&file, libc::F_RDLCK, HELD).map_err(|_| OPERATING_SYSTEM)?;
        Ok(file.into_raw_fd())
    }

    /// Have what a descriptor names, which the program keeps.
    pub(crate) fn of_descriptor(descriptor: usize, thing: Thing) -> Result<Common, CuCode> {
        // Opening it again needs no trust in the number, and reads from the beginning.
        let mut file = open(Path::new(&format!("/proc/self/fd/{descriptor}"))).map_err(|_| INVALID_VALUE)?;
        if !file
            .metadata()
            .is_ok_and(|data| data.is_file() && data.len() == LENGTH as u64)
        {
            return Err(INVALID_VALUE);
        }
        let mut bytes = [0; LENGTH];
        file.read_exact(&mut bytes).map_err(|_| INVALID_VALUE)?;
        file.rewind().map_err(|_| INVALID_VALUE)?;
        Common::of(file, SharedMemory::decode(&bytes, thing)?)
    }
}

fn open(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().read(true).write(true).open(path)
}

/// Lock or unlock one byte for an open file description.
fn lock(file: &File, kind: i32, at: i64) -> nix::Result<()> {
    fcntl(file, FcntlArg::F_OFD_SETLK(&byte(kind, at))).map(drop)
}

fn byte(kind: i32, at: i64) -> libc::flock {
    libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: at,
        l_len: 1,
        l_pid: 0,
    }
}

impl SharedMemory {
    /// Write as 64 bytes.
    pub(crate) fn encode(self) -> [u8; LENGTH] {
        let gpu = u128::from_be_bytes(self.gpu).to_be_bytes();
        let numbers = [MAGIC, self.thing as u64, u64::from(self.pid), self.bytes];
        let mut bytes = [0; LENGTH];
        let all = numbers.iter().flat_map(|number| number.to_le_bytes()).chain(gpu);
        let all = all.chain(self.number.to_le_bytes());
        bytes.iter_mut().zip(all).for_each(|(to, from)| *to = from);
        bytes
    }

    /// Read what `encode` has written. Anyone can have written it.
    pub(crate) fn decode(bytes: &[u8; LENGTH], thing: Thing) -> Result<SharedMemory, CuCode> {
        let (numbers, _) = bytes.as_chunks::<8>();
        let number = |index: usize| u64::from_le_bytes(numbers[index]);
        let mut gpu = [0; 16];
        gpu.copy_from_slice(&bytes[32..48]);
        let pid = u32::try_from(number(2));
        match (number(0), number(1), pid) {
            (MAGIC, kind, Ok(pid)) if kind == thing as u64 => Ok(SharedMemory {
                thing,
                pid,
                gpu,
                bytes: number(3),
                number: number(6) as u32,
            }),
            _ => Err(INVALID_VALUE),
        }
    }

    fn name(self) -> String {
        format!("shared-{}-{}", self.pid, self.number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_shared_arrives_and_anything_else_is_refused() {
        let shared = SharedMemory {
            thing: Thing::Pool,
            pid: 7,
            gpu: *b"0123456789abcdef",
            bytes: 1 << 40,
            number: 0,
        };
        let bytes = shared.encode();
        assert_eq!(SharedMemory::decode(&bytes, Thing::Pool), Ok(shared));
        assert_eq!(SharedMemory::decode(&bytes, Thing::Pointer), Err(INVALID_VALUE));
        assert_eq!(SharedMemory::decode(&[0xff; LENGTH], Thing::Pool), Err(INVALID_VALUE));
        let common = Common::begin(shared).expect("a file");
        let descriptor = common.descriptor().expect("a descriptor");
        let number = usize::try_from(descriptor).expect("not negative");
        let of = |number, thing| Common::of_descriptor(number, thing).map(|common| common.shared());
        assert_eq!(of(number, Thing::Pool), Ok(shared));
        assert_eq!(of(number, Thing::Physical), Err(INVALID_VALUE));
        for wrong in [0, usize::MAX, 1 << 20] {
            assert_eq!(of(wrong, Thing::Pool), Err(INVALID_VALUE), "{wrong}");
        }
    }
}
