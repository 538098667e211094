//! Virtual memory management: physical memory, ranges of addresses, and mappings between them.

use std::collections::BTreeMap;

use crate::codes::{CuCode, INVALID_VALUE};
use crate::memory::Mapping;
use crate::share::Common;
use crate::slab::PAGE;

/// Physical memory, ranges, and mappings of this process.
#[derive(Debug, Default)]
pub(crate) struct Vmm {
    pub(crate) physical: BTreeMap<usize, Physical>,
    /// The length of each reserved range, by its beginning.
    pub(crate) reserved: BTreeMap<u64, u64>,
    /// The length and the physical memory of each mapping, by its beginning.
    pub(crate) mapped: BTreeMap<u64, (u64, usize)>,
}

/// Memory that cuMemCreate made. It lasts until its last handle and its last mapping are gone (cuda.h, cuMemRelease).
#[derive(Debug)]
pub(crate) struct Physical {
    pub(crate) place: MemoryPlace,
    pub(crate) bytes: u64,
    /// If other processes may have it, too.
    pub(crate) common: Option<Common>,
    pub(crate) handles: u64,
    pub(crate) mappings: u64,
    /// What is in it, since something was first written there.
    pub(crate) contents: Option<Mapping>,
}

/// Where memory lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MemoryPlace {
    Device(usize),
    Host,
}

impl Vmm {
    pub(crate) fn known(&mut self, handle: usize) -> Result<&mut Physical, CuCode> {
        // A handle that was released is invalid, even if a mapping keeps the memory.
        let found = self.physical.get_mut(&handle).filter(|physical| physical.handles > 0);
        found.ok_or(INVALID_VALUE)
    }

    /// Return the place and the size of memory.
    pub(crate) fn of(&mut self, handle: usize) -> Result<(MemoryPlace, u64), CuCode> {
        let physical = self.known(handle)?;
        Ok((physical.place, physical.bytes))
    }

    /// Return the mapping that contains an address.
    pub(crate) fn mapping_at(&self, address: u64) -> Option<(u64, usize)> {
        let (start, (bytes, handle)) = self.mapped.range(..=address).next_back()?;
        (address - start < *bytes).then_some((*start, *handle))
    }

    /// Return the mappings of a range, if they cover it exactly.
    pub(crate) fn whole(&self, address: u64, bytes: u64) -> Result<Vec<u64>, CuCode> {
        let end = address.checked_add(bytes).ok_or(INVALID_VALUE)?;
        let mut next = address;
        let mut found = Vec::new();
        while next < end {
            let (length, _) = self.mapped.get(&next).ok_or(INVALID_VALUE)?;
            found.push(next);
            next += length;
        }
        if next == end && bytes > 0 {
            Ok(found)
        } else {
            Err(INVALID_VALUE)
        }
    }
}

/// Check that a size is whole pages.
pub(crate) fn granular(bytes: u64) -> Result<(), CuCode> {
    if bytes > 0 && bytes.is_multiple_of(PAGE) {
        Ok(())
    } else {
        Err(INVALID_VALUE)
    }
}
