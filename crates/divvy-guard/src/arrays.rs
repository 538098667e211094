//! Arrays, which textures and surfaces read.

use crate::charge;
use crate::cuda::{CuResult, DriverCall, OutPointer, Uint};
use crate::current;
use crate::ledger::HandleKind;

/// The size of an array as a program describes it. The driver pads it as it likes.
#[derive(Clone, Copy)]
pub(crate) struct ArrayShape {
    width: u64,
    height: u64,
    depth: u64,
    format: u32,
    channels: u32,
    flags: u32,
}

/// `CUDA_ARRAY_DESCRIPTOR`, with `T` for `size_t`, or for the `unsigned int` of `CUDA_ARRAY_DESCRIPTOR_v1`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Flat<T> {
    width: T,
    height: T,
    format: Uint,
    channels: Uint,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`, with `T` for `size_t`, or for the `unsigned int` of `CUDA_ARRAY3D_DESCRIPTOR_v1`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Deep<T> {
    width: T,
    height: T,
    depth: T,
    format: Uint,
    channels: Uint,
    flags: Uint,
}

impl<T: Into<u64>> From<Flat<T>> for ArrayShape {
    fn from(flat: Flat<T>) -> Self {
        Self {
            width: flat.width.into(),
            height: flat.height.into(),
            depth: 0,
            format: flat.format,
            channels: flat.channels,
            flags: 0,
        }
    }
}

impl<T: Into<u64>> From<Deep<T>> for ArrayShape {
    fn from(deep: Deep<T>) -> Self {
        Self {
            width: deep.width.into(),
            height: deep.height.into(),
            depth: deep.depth.into(),
            format: deep.format,
            channels: deep.channels,
            flags: deep.flags,
        }
    }
}

/// `CUDA_ARRAY3D_LAYERED` and `CUDA_ARRAY3D_CUBEMAP`: the depth counts layers, which smaller levels have as well.
const LAYERS: u32 = 0x01 | 0x04;
/// `CUDA_ARRAY3D_SPARSE` and `CUDA_ARRAY3D_DEFERRED_MAPPING`: the array has no memory until physical memory is mapped to it.
const NO_MEMORY: u32 = 0x40 | 0x80;

impl ArrayShape {
    /// Bytes of one element (`CUarray_format`). A format that is not known counts as the largest.
    fn element(self) -> u64 {
        let channels = u64::from(self.channels);
        match self.format {
            // 8, 16, and 32 bits for each channel.
            0x01 | 0x08 => channels,
            0x02 | 0x09 | 0x10 => channels.saturating_mul(2),
            0x03 | 0x0a | 0x20 => channels.saturating_mul(4),
            // UNORM_INT8X1 and its like, which have the number of channels in the name.
            0xc0 | 0xc6 => 1,
            0xc1 | 0xc3 | 0xc7 | 0xc9 => 2,
            0xc2 | 0xc4 | 0xc8 | 0xca => 4,
            // BC1 to BC7: 8 or 16 bytes for a block of 4 x 4.
            0x91..=0x9e => 1,
            _ => 8,
        }
    }

    fn bytes(self, levels: u32) -> u64 {
        if self.flags & NO_MEMORY != 0 {
            return 0;
        }
        // The longest edge has 64 bits, so later levels have one element.
        (0..levels.min(64)).fold(0, |sum, level| {
            let edge = |edge: u64| edge.checked_shr(level).unwrap_or(0).max(1);
            let depth = if self.flags & LAYERS != 0 {
                self.depth.max(1)
            } else {
                edge(self.depth)
            };
            let elements = edge(self.width).saturating_mul(edge(self.height)).saturating_mul(depth);
            sum.saturating_add(elements.saturating_mul(self.element()))
        })
    }
}

/// `cuArrayCreate`, `cuArray3DCreate`, `cuMipmappedArrayCreate`. The driver says what is wrong with a missing shape.
#[inline(never)]
pub(crate) fn create(shape: Option<ArrayShape>, levels: u32, call: &DriverCall, array: OutPointer) -> CuResult {
    match (shape.map_or(0, |shape| shape.bytes(levels)), current::context()) {
        (0, _) | (_, None) => call.run(),
        (bytes, Some((device, context))) => charge::allocate(device, HandleKind::Array, context, bytes, call, array),
    }
}

/// `cuArrayDestroy`, `cuMipmappedArrayDestroy`.
pub(crate) fn destroy(array: u64, call: &DriverCall) -> CuResult {
    charge::free(HandleKind::Array, array, call)
}
