//! How memory goes from one process to another: descriptors of files in memory, and handles of 64 bytes. Both name the memory and carry none.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{IntoRawFd, RawFd};

use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::codes::{Code, INVALID_VALUE, OPERATING_SYSTEM};
use crate::driver::Driver;
use crate::machine::uuid_bytes;

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
pub(crate) struct Shared {
    pub(crate) thing: Thing,
    pub(crate) pid: u32,
    pub(crate) gpu: [u8; 16],
    pub(crate) bytes: u64,
}

impl Shared {
    /// Write as 64 bytes.
    pub(crate) fn encode(self) -> [u8; LENGTH] {
        let gpu = u128::from_be_bytes(self.gpu).to_be_bytes();
        let numbers = [MAGIC, self.thing as u64, u64::from(self.pid), self.bytes];
        let mut bytes = [0; LENGTH];
        let all = numbers.iter().flat_map(|number| number.to_le_bytes()).chain(gpu);
        bytes.iter_mut().zip(all).for_each(|(to, from)| *to = from);
        bytes
    }

    /// Read what `encode` has written. Anyone can have written it.
    pub(crate) fn decode(bytes: &[u8; LENGTH], thing: Thing) -> Result<Shared, Code> {
        let (numbers, _) = bytes.as_chunks::<8>();
        let number = |index: usize| u64::from_le_bytes(numbers[index]);
        let mut gpu = [0; 16];
        gpu.copy_from_slice(&bytes[32..48]);
        let pid = u32::try_from(number(2));
        match (number(0), number(1), pid) {
            (MAGIC, kind, Ok(pid)) if kind == thing as u64 => Ok(Shared {
                thing,
                pid,
                gpu,
                bytes: number(3),
            }),
            _ => Err(INVALID_VALUE),
        }
    }

    /// Return a descriptor, which the program owns.
    pub(crate) fn descriptor(self) -> Result<RawFd, Code> {
        let file = memfd_create(c"divvy-cuda-sim", MFdFlags::MFD_CLOEXEC).map_err(|_| OPERATING_SYSTEM)?;
        let mut file = File::from(file);
        file.write_all(&self.encode()).map_err(|_| OPERATING_SYSTEM)?;
        Ok(file.into_raw_fd())
    }

    /// Read a descriptor, which the program keeps.
    pub(crate) fn of_descriptor(descriptor: usize, thing: Thing) -> Result<Shared, Code> {
        // Opening it again needs no trust in the number, and reads from the beginning.
        let file = File::open(format!("/proc/self/fd/{descriptor}")).map_err(|_| INVALID_VALUE)?;
        if !file
            .metadata()
            .is_ok_and(|data| data.is_file() && data.len() == LENGTH as u64)
        {
            return Err(INVALID_VALUE);
        }
        let mut bytes = [0; LENGTH];
        (&file).read_exact(&mut bytes).map_err(|_| INVALID_VALUE)?;
        Shared::decode(&bytes, thing)
    }
}

impl Driver {
    /// Describe memory of a device for another process.
    pub(crate) fn share(&self, thing: Thing, device: usize, bytes: u64) -> Shared {
        Shared {
            thing,
            pid: std::process::id(),
            gpu: uuid_bytes(&self.devices[device].card.uuid),
            bytes,
        }
    }

    /// Return the device of shared memory.
    pub(crate) fn device_of(&self, shared: &Shared) -> Result<usize, Code> {
        let found = self
            .devices
            .iter()
            .position(|device| uuid_bytes(&device.card.uuid) == shared.gpu);
        found.ok_or(INVALID_VALUE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_shared_arrives_and_anything_else_is_refused() {
        let shared = Shared {
            thing: Thing::Pool,
            pid: 7,
            gpu: *b"0123456789abcdef",
            bytes: 1 << 40,
        };
        let bytes = shared.encode();
        assert_eq!(Shared::decode(&bytes, Thing::Pool), Ok(shared));
        assert_eq!(Shared::decode(&bytes, Thing::Pointer), Err(INVALID_VALUE));
        assert_eq!(Shared::decode(&[0xff; LENGTH], Thing::Pool), Err(INVALID_VALUE));
        let descriptor = shared.descriptor().expect("a descriptor");
        let number = usize::try_from(descriptor).expect("not negative");
        assert_eq!(Shared::of_descriptor(number, Thing::Pool), Ok(shared));
        assert_eq!(Shared::of_descriptor(number, Thing::Physical), Err(INVALID_VALUE));
        for wrong in [0, usize::MAX, 1 << 20] {
            assert_eq!(Shared::of_descriptor(wrong, Thing::Pool), Err(INVALID_VALUE), "{wrong}");
        }
    }
}
