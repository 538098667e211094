//! Where the files of a share are.

use core::ffi::CStr;

use divvy_share::DIRECTORY;

/// Where a container has the directories of its GPUs ([`DIRECTORY`]). The tests replace the bytes in a copy of the library.
pub static ROOT: ShareRoot = ShareRoot(match DIRECTORY.as_bytes().first_chunk() {
    Some(bytes) if DIRECTORY.len() == 16 => *bytes,
    _ => panic!("the directory has another length"),
});

#[derive(Debug)]
pub struct ShareRoot([u8; 16]);

impl ShareRoot {
    pub fn get(&self) -> [u8; 16] {
        // SAFETY: the reference is valid. Volatile, so that the compiler does not put the bytes it knows into the code.
        unsafe { core::ptr::read_volatile(&self.0) }
    }
}

/// A path, with room for the longest: `/run/divvy/share/GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx/limits`.
#[derive(Debug)]
pub struct FixedPath {
    bytes: [u8; 80],
    len: usize,
}

impl FixedPath {
    #[inline(never)]
    pub fn from(parts: &[&[u8]]) -> Self {
        let mut path = Self { bytes: [0; 80], len: 0 };
        for part in parts {
            path.add(part);
        }
        path
    }

    /// A file of the GPU with this UUID.
    pub fn of(uuid: [u8; 16], file: &[u8]) -> Self {
        let mut path = Self::from(&[&ROOT.get(), b"/GPU-"]);
        for (index, byte) in uuid.iter().enumerate() {
            if matches!(index, 4 | 6 | 8 | 10) {
                path.push(b'-');
            }
            path.push(digit(byte >> 4));
            path.push(digit(byte & 15));
        }
        path.add(file);
        path
    }

    #[inline(never)]
    fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.push(*byte);
        }
    }

    #[inline(never)]
    fn push(&mut self, byte: u8) {
        // The last byte stays 0.
        if self.len < 79
            && let Some(place) = self.bytes.get_mut(self.len)
        {
            *place = byte;
            self.len = self.len.wrapping_add(1);
        }
    }

    pub fn as_c_str(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.bytes).unwrap_or(c"")
    }
}

fn digit(value: u8) -> u8 {
    if value < 10 {
        value.wrapping_add(b'0')
    } else {
        value.wrapping_add(b'a' - 10)
    }
}
