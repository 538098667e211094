//! Small allocations: the driver cuts them from pages of 2 MiB.

use std::collections::BTreeMap;

/// The size of a page, which is what the driver takes from the GPU at least.
pub(crate) const PAGE: u64 = 2 << 20;
/// An allocation of at least this size has pages of its own.
pub(crate) const LARGE: u64 = 1 << 20;
/// The alignment of allocations. cuda.h promises alignment for any kind of variable; the drivers align to 512.
const ALIGN: u64 = 512;

/// Round up to whole pages. `None` if the result does not exist.
pub(crate) fn pages(bytes: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(PAGE)
}

/// The pages of one context, by address.
#[derive(Debug, Default)]
pub(crate) struct Slabs {
    pages: BTreeMap<u64, Slab>,
}

/// The allocations in a page: their offsets and lengths.
#[derive(Debug, Default)]
struct Slab {
    taken: BTreeMap<u64, u64>,
}

impl Slab {
    /// Return the first gap of this length.
    fn gap(&self, length: u64) -> Option<u64> {
        let mut from = 0;
        for (offset, taken) in &self.taken {
            if offset - from >= length {
                return Some(from);
            }
            from = offset + taken;
        }
        (PAGE - from >= length).then_some(from)
    }
}

impl Slabs {
    /// Allocate in a page that has room. Return the address.
    pub(crate) fn allocate(&mut self, bytes: u64) -> Option<u64> {
        let length = bytes.next_multiple_of(ALIGN);
        self.pages.iter_mut().find_map(|(address, slab)| {
            let offset = slab.gap(length)?;
            slab.taken.insert(offset, length);
            Some(address + offset)
        })
    }

    /// Add an empty page.
    pub(crate) fn add(&mut self, address: u64) {
        self.pages.insert(address, Slab::default());
    }

    /// Free an allocation. Return true if its page is empty now and has been removed.
    pub(crate) fn free(&mut self, address: u64) -> bool {
        let page = address - address % PAGE;
        let Some(slab) = self.pages.get_mut(&page) else { return false };
        slab.taken.remove(&(address - page));
        let empty = slab.taken.is_empty();
        if empty {
            self.pages.remove(&page);
        }
        empty
    }

    /// Return the memory of the pages.
    pub(crate) fn bytes(&self) -> u64 {
        self.pages.len() as u64 * PAGE
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn small_allocations_never_overlap_and_leave_no_page(sizes in prop::collection::vec((1..LARGE, any::<prop::sample::Index>()), 1..40)) {
            let mut slabs = Slabs::default();
            let mut next = 7 * PAGE;
            let mut live: Vec<(u64, u64)> = Vec::new();
            for (bytes, victim) in sizes {
                let address = slabs.allocate(bytes).unwrap_or_else(|| {
                    slabs.add(next);
                    next += PAGE;
                    slabs.allocate(bytes).expect("an empty page has room")
                });
                prop_assert_eq!(address % ALIGN, 0);
                prop_assert!(address / PAGE == (address + bytes - 1) / PAGE, "within one page");
                prop_assert!(live.iter().all(|(from, length)| address + bytes <= *from || from + length <= address));
                live.push((address, bytes));
                if bytes % 3 == 0 {
                    let (address, _) = live.swap_remove(victim.index(live.len()));
                    slabs.free(address);
                }
                let mut pages: Vec<u64> = live.iter().map(|(address, _)| address / PAGE).collect();
                pages.sort_unstable();
                pages.dedup();
                prop_assert_eq!(slabs.bytes(), pages.len() as u64 * PAGE);
            }
        }
    }
}
