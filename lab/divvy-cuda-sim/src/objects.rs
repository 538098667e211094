//! Objects that have memory and are no linear memory: arrays, imported memory, and green contexts.

use std::collections::BTreeMap;

use crate::codes::{CuCode, INVALID_VALUE, OUT_OF_MEMORY};

/// The objects of this process, by handle.
#[derive(Debug, Default)]
pub(crate) struct Objects {
    /// The memory of each array and mipmapped array; `None` if it has none of its own.
    pub(crate) arrays: BTreeMap<usize, Option<u64>>,
    /// The address and the size of each imported memory.
    pub(crate) external: BTreeMap<usize, (u64, u64)>,
    /// The device of each green context.
    pub(crate) green: BTreeMap<usize, usize>,
    /// Descriptors of resources for green contexts.
    pub(crate) descriptors: BTreeMap<usize, ()>,
}

/// The shape of an array (`CUDA_ARRAY3D_DESCRIPTOR`).
#[derive(Debug, Clone, Copy)]
pub(crate) struct SimArrayShape {
    pub(crate) width: u64,
    pub(crate) height: u64,
    pub(crate) depth: u64,
    pub(crate) format: u32,
    pub(crate) channels: u32,
    pub(crate) flags: u32,
}

/// CUDA_ARRAY3D_SPARSE and CUDA_ARRAY3D_DEFERRED_MAPPING: the program brings the memory.
pub(crate) const WITHOUT_MEMORY: u32 = 0x40 | 0x80;

impl SimArrayShape {
    /// Return the size of an element in bytes (`CUarray_format`). Formats of video and of compressed textures are not simulated.
    fn element(self) -> Result<u64, CuCode> {
        let bytes = match self.format {
            // UNSIGNED_INT8, SIGNED_INT8
            0x01 | 0x08 => 1,
            // UNSIGNED_INT16, SIGNED_INT16, HALF
            0x02 | 0x09 | 0x10 => 2,
            // UNSIGNED_INT32, SIGNED_INT32, FLOAT
            0x03 | 0x0a | 0x20 => 4,
            _ => return Err(INVALID_VALUE),
        };
        match self.channels {
            1 | 2 | 4 => Ok(bytes * u64::from(self.channels)),
            _ => Err(INVALID_VALUE),
        }
    }

    /// Return the size in bytes of the array, with this many levels of which each has half the edges of the one before.
    pub(crate) fn bytes(self, levels: u32) -> Result<u64, CuCode> {
        let element = self.element()?;
        let longest = self.width.max(self.height).max(self.depth);
        if self.width == 0 || levels == 0 || levels > u64::BITS - longest.leading_zeros() {
            return Err(INVALID_VALUE);
        }
        let level = |level: u32| {
            let edge = |edge: u64| (edge >> level).max(1);
            let area = edge(self.width).checked_mul(edge(self.height))?;
            area.checked_mul(edge(self.depth))?.checked_mul(element)
        };
        (0..levels)
            .try_fold(0u64, |sum, of| sum.checked_add(level(of)?))
            .ok_or(OUT_OF_MEMORY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_of_an_array_is_that_of_its_elements_and_levels() {
        let shape = |width, height, depth, format, channels| SimArrayShape {
            width,
            height,
            depth,
            format,
            channels,
            flags: 0,
        };
        let cases = [
            (shape(64, 0, 0, 0x01, 1), 1, Ok(64)),
            (shape(64, 32, 0, 0x20, 4), 1, Ok(64 * 32 * 16)),
            (shape(4, 4, 4, 0x10, 2), 3, Ok((64 + 8 + 1) * 4)),
            (shape(4, 4, 4, 0x10, 2), 4, Err(INVALID_VALUE)),
            (shape(4, 4, 4, 0x10, 2), 0, Err(INVALID_VALUE)),
            (shape(0, 0, 0, 0x01, 1), 1, Err(INVALID_VALUE)),
            (shape(1, 1, 1, 0x01, 3), 1, Err(INVALID_VALUE)),
            (shape(1, 1, 1, 0x99, 1), 1, Err(INVALID_VALUE)),
            (shape(u64::MAX, u64::MAX, 1, 0x01, 1), 1, Err(OUT_OF_MEMORY)),
        ];
        for (shape, levels, bytes) in cases {
            assert_eq!(shape.bytes(levels), bytes, "{shape:?}, {levels} levels");
        }
    }
}
