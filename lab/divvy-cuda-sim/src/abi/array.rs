//! Symbols for arrays.

use std::ffi::c_uint;

use super::pointer::{In, Out};
use super::symbols::symbols;
use crate::objects::SimArrayShape;

/// `CUDA_ARRAY_DESCRIPTOR_v1`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Flat32 {
    width: c_uint,
    height: c_uint,
    format: c_uint,
    channels: c_uint,
}

/// `CUDA_ARRAY_DESCRIPTOR`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct FlatDescriptor {
    width: u64,
    height: u64,
    format: c_uint,
    channels: c_uint,
}

/// `CUDA_ARRAY3D_DESCRIPTOR_v1`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Deep32 {
    width: c_uint,
    height: c_uint,
    depth: c_uint,
    format: c_uint,
    channels: c_uint,
    flags: c_uint,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct DeepDescriptor {
    width: u64,
    height: u64,
    depth: u64,
    format: c_uint,
    channels: c_uint,
    flags: c_uint,
}

impl From<Flat32> for SimArrayShape {
    fn from(of: Flat32) -> SimArrayShape {
        FlatDescriptor {
            width: of.width.into(),
            height: of.height.into(),
            format: of.format,
            channels: of.channels,
        }
        .into()
    }
}

impl From<FlatDescriptor> for SimArrayShape {
    fn from(of: FlatDescriptor) -> SimArrayShape {
        DeepDescriptor {
            width: of.width,
            height: of.height,
            depth: 0,
            format: of.format,
            channels: of.channels,
            flags: 0,
        }
        .into()
    }
}

impl From<Deep32> for SimArrayShape {
    fn from(of: Deep32) -> SimArrayShape {
        DeepDescriptor {
            width: of.width.into(),
            height: of.height.into(),
            depth: of.depth.into(),
            format: of.format,
            channels: of.channels,
            flags: of.flags,
        }
        .into()
    }
}

impl From<DeepDescriptor> for SimArrayShape {
    fn from(of: DeepDescriptor) -> SimArrayShape {
        SimArrayShape {
            width: of.width,
            height: of.height,
            depth: of.depth,
            format: of.format,
            channels: of.channels,
            flags: of.flags,
        }
    }
}

// The sizes in cuda.h.
const _: () = assert!(
    size_of::<Flat32>() == 16
        && size_of::<FlatDescriptor>() == 24
        && size_of::<Deep32>() == 24
        && size_of::<DeepDescriptor>() == 40
);

symbols! {
    // The symbol of CUDA 3.1 and before.
    call cuArrayCreate(array: Out<usize>, descriptor: In<Flat32>) |driver| {
        array.present()?;
        array.put(driver.create_array(descriptor.get()?.into(), 1)?)
    };

    call cuArrayCreate_v2(array: Out<usize>, descriptor: In<FlatDescriptor>) |driver| {
        array.present()?;
        array.put(driver.create_array(descriptor.get()?.into(), 1)?)
    };

    // The symbol of CUDA 3.1 and before.
    call cuArray3DCreate(array: Out<usize>, descriptor: In<Deep32>) |driver| {
        array.present()?;
        array.put(driver.create_array(descriptor.get()?.into(), 1)?)
    };

    call cuArray3DCreate_v2(array: Out<usize>, descriptor: In<DeepDescriptor>) |driver| {
        array.present()?;
        array.put(driver.create_array(descriptor.get()?.into(), 1)?)
    };

    call cuMipmappedArrayCreate(array: Out<usize>, descriptor: In<DeepDescriptor>, levels: c_uint) |driver| {
        array.present()?;
        array.put(driver.create_array(descriptor.get()?.into(), levels)?)
    };

    call cuMipmappedArrayGetLevel(level: Out<usize>, array: usize, _number: c_uint) |driver| {
        level.present()?;
        level.put(driver.level_of(array)?)
    };

    call [cuArrayDestroy, cuMipmappedArrayDestroy](array: usize) |driver| driver.destroy_array(array);
}
