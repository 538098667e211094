//! The ledger: which process holds how much memory of a GPU.
//!
//! A GPU has one file, `<directory>/<UUID>`. It begins with a header, and then has a slot for each process that ever used the GPU at the same time
//! as the others:
//!
//! | bytes | meaning |
//! |---|---|
//! | 0..8 | the magic number and the version of the layout |
//! | 8..16 | until when the GPU is busy: nanoseconds of the monotonic clock |
//! | 16 + 24·i | slot *i*: the PID, the bytes that the process holds, the nanoseconds of GPU time that it has used |
//!
//! A process owns slot *i* as long as it holds the write lock of the slot's first byte. The lock belongs to the open file description
//! (`fcntl(2)`, `F_OFD_SETLK`). So the kernel drops it when the last descriptor goes, however the process ends, and a forked child keeps the memory
//! of its parent. Both are what the real driver does. The lock of byte 0 makes a check and the change that follows it one step. Nothing has to be
//! repaired: a process writes only to its own slot, there is no total, and a slot without its lock counts as empty.
//!
//! A process in a container knows itself by another PID than the host does, and the real driver reports the host's. Therefore the process also has a
//! lock of its own on the slot's second byte (`F_SETLK`): the kernel tells the owner of such a lock by the PID that the reader knows (`F_GETLK`).

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

use crate::work::{self, Journal, Work};

const MAGIC: [u8; 8] = *b"dvGPUs01";
const BUSY_AT: u64 = 8;
const HEADER: u64 = 16;
const SLOT: u64 = 24;
/// More processes than a test starts. It bounds what is read from a broken file.
const MAX_SLOTS: u64 = 65536;

/// An error of the ledger.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// The file cannot be opened, read, or written.
    #[error("the ledger {path}: {source}; set DIVVY_NVML_SIM_LEDGER to a directory that this process can write to")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The file is not a ledger.
    #[error("the ledger {path} is not one of this version; remove it")]
    Malformed {
        /// The file.
        path: PathBuf,
    },
    /// There are too many processes.
    #[error("the ledger {path} has no slot left for another process")]
    Full {
        /// The file.
        path: PathBuf,
    },
}

/// Return the directory of the ledgers, if this machine has any. `DIVVY_NVML_SIM_LEDGER` names it.
pub fn directory() -> Option<PathBuf> {
    std::env::var_os("DIVVY_NVML_SIM_LEDGER").map(PathBuf::from)
}

/// The ledger of one GPU.
#[derive(Debug)]
pub struct GpuLedger {
    file: File,
    path: PathBuf,
}

/// What one process holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessUsage {
    /// The process.
    pub pid: u32,
    /// The memory that it holds.
    pub bytes: u64,
    /// The GPU time that it has used, in nanoseconds.
    pub busy_ns: u64,
}

impl GpuLedger {
    /// Open the ledger of a GPU. Create it if it does not exist.
    pub fn open(directory: &Path, uuid: &str) -> Result<GpuLedger, LedgerError> {
        let path = directory.join(uuid);
        let mut options = OpenOptions::new();
        let file = match options.read(true).write(true).create(true).truncate(false).open(&path) {
            Ok(file) => file,
            Err(source) => return Err(LedgerError::Io { path, source }),
        };
        let mut ledger = GpuLedger { file, path };
        ledger.locked(libc::F_WRLCK, |ledger| {
            if ledger.length()? == 0 {
                ledger.write(0, &[MAGIC, [0; 8]].concat())?;
            }
            match ledger.number::<8>(0)? {
                MAGIC => Ok(()),
                _ => Err(ledger.malformed()),
            }
        })?;
        Ok(ledger)
    }

    /// Take a slot for this process. It lasts as long as the value, or its copy in a forked child.
    pub fn claim(mut self) -> Result<LedgerSlot, LedgerError> {
        let index = self.locked(libc::F_WRLCK, |ledger| {
            for index in 0..MAX_SLOTS {
                if ledger.lock(libc::F_OFD_SETLK, libc::F_WRLCK, at(index))? {
                    let pid = u64::from(std::process::id()).to_le_bytes();
                    ledger.write(at(index), &[pid, [0; 8], [0; 8]].concat())?;
                    fcntl(&ledger.file, FcntlArg::F_SETLK(&byte(libc::F_WRLCK, at(index) + 1)))
                        .map_err(|error| ledger.failed(error.into()))?;
                    return Ok(index);
                }
            }
            Err(LedgerError::Full {
                path: ledger.path.clone(),
            })
        })?;
        let journal = self.locked(libc::F_WRLCK, |ledger| {
            Journal::begin(&ledger.path, index).map_err(|source| ledger.failed(source))
        })?;
        Ok(LedgerSlot {
            ledger: self,
            journal,
            index,
            held: 0,
            busy_ns: 0,
        })
    }

    /// Return what each living process holds at one moment.
    pub fn usage(&mut self) -> Result<Vec<ProcessUsage>, LedgerError> {
        self.locked(libc::F_RDLCK, |ledger| {
            Ok(ledger.living()?.into_iter().map(|(_, usage)| usage).collect())
        })
    }

    /// Return when each living process has kept the GPU busy, or will with what it has launched.
    pub fn work(&mut self) -> Result<Vec<Work>, LedgerError> {
        self.locked(libc::F_RDLCK, |ledger| {
            let living = ledger.living()?.into_iter().filter(|(_, usage)| usage.busy_ns > 0);
            let work = living.map(|(index, usage)| work::read(&ledger.path, index, usage.pid));
            work.collect::<Result<_, _>>().map_err(|source| ledger.failed(source))
        })
    }

    /// Return the slots of living processes, with their indices.
    fn living(&self) -> Result<Vec<(u64, ProcessUsage)>, LedgerError> {
        let mut living = Vec::new();
        for (index, usage) in self.slots()? {
            if self.is_held(index)? {
                let pid = self.pid_here(index)?.unwrap_or(usage.pid);
                living.push((index, ProcessUsage { pid, ..usage }));
            }
        }
        Ok(living)
    }

    fn length(&self) -> Result<u64, LedgerError> {
        Ok(self.file.metadata().map_err(|source| self.failed(source))?.len())
    }

    /// Return the slots that have ever been used, with their indices, also those of processes that have ended.
    fn slots(&self) -> Result<Vec<(u64, ProcessUsage)>, LedgerError> {
        let length = self.length()?;
        if length > at(MAX_SLOTS) || length < HEADER || !(length - HEADER).is_multiple_of(SLOT) {
            return Err(self.malformed());
        }
        let mut bytes = vec![0; (length - HEADER) as usize];
        self.file
            .read_exact_at(&mut bytes, HEADER)
            .map_err(|source| self.failed(source))?;
        let (numbers, _) = bytes.as_chunks::<8>();
        let numbers: Vec<u64> = numbers.iter().map(|number| u64::from_le_bytes(*number)).collect();
        let (slots, _) = numbers.as_chunks::<3>();
        let usage = |&[pid, bytes, busy_ns]: &[u64; 3]| ProcessUsage {
            pid: u32::try_from(pid).unwrap_or(u32::MAX),
            bytes,
            busy_ns,
        };
        Ok((0..).zip(slots.iter().map(usage)).collect())
    }

    fn number<const N: usize>(&self, offset: u64) -> Result<[u8; N], LedgerError> {
        let mut bytes = [0; N];
        match self.file.read_exact_at(&mut bytes, offset) {
            Ok(()) => Ok(bytes),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(self.malformed()),
            Err(error) => Err(self.failed(error)),
        }
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), LedgerError> {
        self.file.write_all_at(bytes, offset).map_err(|source| self.failed(source))
    }

    /// Do something while no other process changes the ledger. It is `&mut`, because the lock does not exclude other threads of this process.
    fn locked<T>(&mut self, kind: i32, body: impl FnOnce(&mut GpuLedger) -> Result<T, LedgerError>) -> Result<T, LedgerError> {
        self.lock(libc::F_OFD_SETLKW, kind, 0)?;
        let done = body(self);
        self.lock(libc::F_OFD_SETLK, libc::F_UNLCK, 0)?;
        done
    }

    /// Change the lock of one byte. Return false if another one has it.
    fn lock(&self, command: i32, kind: i32, offset: u64) -> Result<bool, LedgerError> {
        let flock = byte(kind, offset);
        loop {
            let argument = match command {
                libc::F_OFD_SETLKW => FcntlArg::F_OFD_SETLKW(&flock),
                _ => FcntlArg::F_OFD_SETLK(&flock),
            };
            match fcntl(&self.file, argument) {
                Ok(_) => return Ok(true),
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN | Errno::EACCES) => return Ok(false),
                Err(error) => return Err(self.failed(error.into())),
            }
        }
    }

    /// Report whether another open file description has the lock of this slot.
    fn is_held(&self, index: u64) -> Result<bool, LedgerError> {
        let mut flock = byte(libc::F_WRLCK, at(index));
        match fcntl(&self.file, FcntlArg::F_OFD_GETLK(&mut flock)) {
            Ok(_) => Ok(i32::from(flock.l_type) != libc::F_UNLCK),
            Err(error) => Err(self.failed(error.into())),
        }
    }

    /// Return the PID of a slot's process in the PID namespace of this process. `None` if it is this process, or if the process has closed another
    /// descriptor of the file, which ends its lock.
    fn pid_here(&self, index: u64) -> Result<Option<u32>, LedgerError> {
        let mut flock = byte(libc::F_WRLCK, at(index) + 1);
        match fcntl(&self.file, FcntlArg::F_GETLK(&mut flock)) {
            Ok(_) if i32::from(flock.l_type) == libc::F_UNLCK => Ok(None),
            Ok(_) => Ok(u32::try_from(flock.l_pid).ok().filter(|pid| *pid > 0)),
            Err(error) => Err(self.failed(error.into())),
        }
    }

    fn failed(&self, source: io::Error) -> LedgerError {
        LedgerError::Io {
            path: self.path.clone(),
            source,
        }
    }

    fn malformed(&self) -> LedgerError {
        LedgerError::Malformed { path: self.path.clone() }
    }
}

/// The place of a slot in the file.
fn at(index: u64) -> u64 {
    HEADER + index * SLOT
}

fn byte(kind: i32, offset: u64) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: offset.cast_signed(),
        l_len: 1,
        l_pid: 0,
    }
}

/// The slot of this process.
#[derive(Debug)]
pub struct LedgerSlot {
    ledger: GpuLedger,
    journal: Journal,
    index: u64,
    held: u64,
    busy_ns: u64,
}

impl LedgerSlot {
    /// Return how much the process holds.
    pub fn held(&self) -> u64 {
        self.held
    }

    /// Hold this many bytes instead of what is held now. Return false, and change nothing, if all processes together would then hold more than
    /// the capacity.
    pub fn hold(&mut self, bytes: u64, capacity: u64) -> Result<bool, LedgerError> {
        let (index, grows) = (self.index, bytes > self.held);
        let fits = self.ledger.locked(libc::F_WRLCK, |ledger| {
            if grows && bytes > capacity.saturating_sub(others(ledger, index, capacity.saturating_sub(bytes))?) {
                return Ok(false);
            }
            ledger.write(at(index) + 8, &bytes.to_le_bytes())?;
            Ok(true)
        })?;
        if fits {
            self.held = bytes;
        }
        Ok(fits)
    }

    /// Return how much of the capacity no process holds.
    pub fn free(&mut self, capacity: u64) -> Result<u64, LedgerError> {
        let (index, held) = (self.index, self.held);
        let others = self.ledger.locked(libc::F_WRLCK, |ledger| others(ledger, index, 0))?;
        Ok(capacity.saturating_sub(others).saturating_sub(held))
    }

    /// Put work of this length behind all other work of the GPU. Return when it ends, on the given clock.
    pub fn run(&mut self, now_ns: u64, length_ns: u64) -> Result<u64, LedgerError> {
        self.busy_ns = self.busy_ns.saturating_add(length_ns);
        let (index, busy_ns, journal) = (self.index, self.busy_ns, &mut self.journal);
        self.ledger.locked(libc::F_WRLCK, |ledger| {
            let start = u64::from_le_bytes(ledger.number(BUSY_AT)?).max(now_ns);
            let until = start.saturating_add(length_ns);
            ledger.write(BUSY_AT, &until.to_le_bytes())?;
            ledger.write(at(index) + 16, &busy_ns.to_le_bytes())?;
            journal.add(start, until).map_err(|source| ledger.failed(source))?;
            Ok(until)
        })
    }
}

/// Return the sum of what the other living processes hold. It may count processes that have ended as long as it is at most `enough`: whether a
/// process lives costs a call of the kernel.
fn others(ledger: &GpuLedger, own: u64, enough: u64) -> Result<u64, LedgerError> {
    let slots = ledger.slots()?;
    let all = || slots.iter().filter(|(index, usage)| *index != own && usage.bytes > 0);
    let sum = all().fold(0u64, |sum, (_, usage)| sum.saturating_add(usage.bytes));
    if sum <= enough {
        return Ok(sum);
    }
    let mut living = 0u64;
    for (index, usage) in all() {
        if ledger.is_held(*index)? {
            living = living.saturating_add(usage.bytes);
        } else {
            ledger.write(at(*index) + 8, &0u64.to_le_bytes())?;
        }
    }
    Ok(living)
}

#[cfg(test)]
mod tests;
