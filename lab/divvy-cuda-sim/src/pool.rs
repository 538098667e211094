//! Memory pools of stream-ordered allocation. A pool reserves memory of the GPU in chunks, and keeps what is freed until a synchronization.

use std::collections::BTreeMap;

use crate::codes::{CuCode, INVALID_VALUE};

/// How much a pool reserves at once, if the GPU has it.
pub(crate) const CHUNK: u64 = 32 << 20;
/// The unit of allocations from a pool.
const UNIT: u64 = 512;

/// The pools of this process, by handle.
#[derive(Debug, Default)]
pub(crate) struct Pools {
    pub(crate) all: BTreeMap<usize, Pool>,
}

/// A pool.
#[derive(Debug)]
pub(crate) struct Pool {
    pub(crate) device: usize,
    /// Whether it is the default pool of its device, which cannot be destroyed.
    pub(crate) default: bool,
    /// Whether it is a default pool of managed memory.
    pub(crate) managed: bool,
    /// Whether another process pays for it.
    pub(crate) imported: bool,
    /// Whether the program has destroyed it. It lasts until its last allocation is freed.
    pub(crate) destroyed: bool,
    /// The most that it may reserve; 0 for no limit.
    pub(crate) max: u64,
    pub(crate) threshold: u64,
    pub(crate) reserved: u64,
    pub(crate) reserved_high: u64,
    pub(crate) used: u64,
    pub(crate) used_high: u64,
    /// The first three attributes, which say when memory may be used again.
    pub(crate) reuse: [i32; 3],
}

/// The attributes of pools that are numbers of bytes (`CUmemPool_attribute`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PoolAttribute {
    Threshold,
    Reserved,
    ReservedHigh,
    Used,
    UsedHigh,
}

impl PoolAttribute {
    pub(crate) fn of(attribute: i32) -> Option<PoolAttribute> {
        Some(match attribute {
            4 => PoolAttribute::Threshold,
            5 => PoolAttribute::Reserved,
            6 => PoolAttribute::ReservedHigh,
            7 => PoolAttribute::Used,
            8 => PoolAttribute::UsedHigh,
            _ => return None,
        })
    }
}

impl Pool {
    pub(crate) fn new(device: usize, max: u64) -> Pool {
        Pool {
            device,
            default: false,
            managed: false,
            imported: false,
            destroyed: false,
            max,
            threshold: 0,
            reserved: 0,
            reserved_high: 0,
            used: 0,
            used_high: 0,
            reuse: [1; 3],
        }
    }

    pub(crate) fn get(&self, attribute: PoolAttribute) -> u64 {
        match attribute {
            PoolAttribute::Threshold => self.threshold,
            PoolAttribute::Reserved => self.reserved,
            PoolAttribute::ReservedHigh => self.reserved_high,
            PoolAttribute::Used => self.used,
            PoolAttribute::UsedHigh => self.used_high,
        }
    }

    /// Set an attribute. The high marks can only be reset to zero (cuda.h).
    pub(crate) fn set(&mut self, attribute: PoolAttribute, value: u64) -> Result<(), CuCode> {
        match (attribute, value) {
            (PoolAttribute::Threshold, value) => self.threshold = value,
            (PoolAttribute::ReservedHigh, 0) => self.reserved_high = self.reserved,
            (PoolAttribute::UsedHigh, 0) => self.used_high = self.used,
            _ => return Err(INVALID_VALUE),
        }
        Ok(())
    }

    /// Return one of the attributes 1 to 3.
    pub(crate) fn reuse(&mut self, attribute: i32) -> Option<&mut i32> {
        self.reuse.get_mut(usize::try_from(attribute).ok()?.checked_sub(1)?)
    }
}

/// What an allocation of this size uses of a pool.
pub(crate) fn used_by(bytes: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(UNIT)
}
