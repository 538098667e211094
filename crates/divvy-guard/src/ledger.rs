//! What this process has allocated, by the driver's handles. When a handle ends, the guard finds its charge here.
//!
//! The driver could be asked for the size of an allocation when it is freed. But `cuMemFree` also frees buffers of imported memory and of pools,
//! which are charged in another way, and the driver does not tell them apart from linear memory in all versions.

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicBool, Ordering};

use crate::sys::{self, Mutex};

/// The kind of a handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum HandleKind {
    /// Memory that `cuMemFree` frees. `of` is its context.
    Linear = 1,
    /// A context. `of` is unused.
    Context,
    /// Physical memory (`cuMemCreate`). `of` counts its handles and mappings, which keep it alive.
    Physical,
    /// A mapping of physical memory. `of` is its handle; nothing is charged for the mapping.
    Mapping,
    /// An array. `of` is its context.
    Array,
    /// A memory pool. `of` is unused.
    Pool,
    /// What graphs have of a GPU. The key is the GPU's ordinal, and `of` is unused.
    Graphs,
    /// Memory imported from another interface. `of` is unused.
    External,
    /// Memory of another process, by its address here. `of` counts how often it was opened.
    Opened,
    /// What a limit of a context takes. `of` is the context.
    Limit,
    /// A green context. Nothing is charged for it but its primary context, and `of` is unused.
    Green,
    /// A page that small allocations share. The key is its number, and `of` counts them.
    Slab,
}

/// One handle. Zeros are an empty place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct HandleEntry {
    kind: u32,
    pub(crate) gpu: u32,
    pub(crate) key: u64,
    pub(crate) size: u64,
    pub(crate) of: u64,
}

impl HandleEntry {
    const EMPTY: Self = Self {
        kind: 0,
        gpu: 0,
        key: 0,
        size: 0,
        of: 0,
    };

    pub(crate) fn new(kind: HandleKind, key: u64, gpu: u32, size: u64, of: u64) -> Self {
        Self {
            kind: kind as u32,
            gpu,
            key,
            size,
            of,
        }
    }

    pub(crate) fn is(&self, kind: HandleKind) -> bool {
        self.kind == kind as u32
    }

    fn hash(&self) -> usize {
        let mixed = (self.key ^ u64::from(self.kind) << 60).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed >> 32) as usize
    }
}

/// A hash table with linear probing. The number of places is a power of two, and at least one is empty.
pub(crate) struct LedgerTable<'a> {
    places: &'a mut [HandleEntry],
}

impl LedgerTable<'_> {
    fn wrap(&self, index: usize) -> usize {
        index & self.places.len().wrapping_sub(1)
    }

    fn at(&self, index: usize) -> HandleEntry {
        self.places.get(index).copied().unwrap_or(HandleEntry::EMPTY)
    }

    fn set(&mut self, index: usize, entry: HandleEntry) {
        if let Some(place) = self.places.get_mut(index) {
            *place = entry;
        }
    }

    /// Report whether a handle has a record.
    pub(crate) fn has(&self, kind: HandleKind, key: u64) -> bool {
        self.at(self.place(&HandleEntry::new(kind, key, 0, 0, 0))).kind != 0
    }

    /// Where the entry is, or the empty place where it would be.
    fn place(&self, wanted: &HandleEntry) -> usize {
        let mut index = self.wrap(wanted.hash());
        loop {
            let entry = self.at(index);
            if entry.kind == 0 || (entry.kind == wanted.kind && entry.key == wanted.key) {
                return index;
            }
            index = self.wrap(index.wrapping_add(1));
        }
    }

    /// Empty a place, and move what would not be found behind it any more.
    fn clear(&mut self, mut hole: usize) {
        let mut index = hole;
        loop {
            index = self.wrap(index.wrapping_add(1));
            let entry = self.at(index);
            if entry.kind == 0 {
                break;
            }
            let away = self.wrap(index.wrapping_sub(entry.hash()));
            if away >= self.wrap(index.wrapping_sub(hole)) {
                self.set(hole, entry);
                hole = index;
            }
        }
        self.set(hole, HandleEntry::EMPTY);
    }
}

/// The table of this process. Zeros are an empty one.
pub(crate) struct HandleLedger {
    lock: Mutex,
    /// Whether at least half of the places are empty.
    has_room: AtomicBool,
    inner: UnsafeCell<HandlePlaces>,
}

struct HandlePlaces {
    places: *mut HandleEntry,
    capacity: usize,
    len: usize,
}

// SAFETY: `inner` is only used in `with`, which holds the lock.
unsafe impl Sync for HandleLedger {}

/// The error if the kernel gives no memory for the table.
#[derive(Debug)]
pub(crate) struct NoRoom;

impl HandleLedger {
    fn with<R>(&self, body: impl FnOnce(&mut HandlePlaces) -> R) -> R {
        let _locked = self.lock.lock();
        // SAFETY: the lock is held, so this is the only reference.
        let inner = unsafe { &mut *self.inner.get() };
        let result = body(inner);
        self.has_room.store(inner.has_room(), Ordering::Relaxed);
        result
    }

    /// Make room for a handle before the driver is asked for it.
    pub(crate) fn room(&self) -> Result<(), NoRoom> {
        if self.has_room.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.with(HandlePlaces::room)
    }

    /// Record a handle. Return its earlier record, if any: the driver has reused the handle, so the earlier allocation has ended.
    pub(crate) fn insert(&self, entry: HandleEntry) -> Result<Option<HandleEntry>, NoRoom> {
        self.with(|inner| inner.insert(entry))
    }

    /// Record a handle, unless it has a record already.
    pub(crate) fn insert_new(&self, entry: HandleEntry) -> Result<(), NoRoom> {
        self.with(|inner| {
            let known = inner.table().is_some_and(|table| table.at(table.place(&entry)).kind != 0);
            if known { Ok(()) } else { inner.insert(entry).map(|_| ()) }
        })
    }

    /// Return the record of a handle.
    pub(crate) fn get(&self, kind: HandleKind, key: u64) -> Option<HandleEntry> {
        self.change(kind, key, &mut |_| false)
    }

    /// Return the first handle at or after a place, and its place. Handles that are added or removed meanwhile may be missed.
    pub(crate) fn next(&self, from: usize) -> Option<(usize, HandleEntry)> {
        self.with(|inner| {
            let rest = inner.table()?.places.get(from..)?;
            let skipped = rest.iter().position(|entry| entry.kind != 0)?;
            Some((from.wrapping_add(skipped), *rest.get(skipped)?))
        })
    }

    /// Remove the record of a handle.
    pub(crate) fn take(&self, kind: HandleKind, key: u64) -> Option<HandleEntry> {
        self.with(|inner| inner.take(kind, key))
    }

    /// Record small memory, and count it in its page. Return whether it is the first there, and the handle's earlier record as [`HandleLedger::insert`] does.
    pub(crate) fn insert_in_page(&self, entry: HandleEntry, page: u64) -> Result<(bool, Option<HandleEntry>), NoRoom> {
        self.with(|inner| {
            let is_first = inner.enter(HandleEntry::new(HandleKind::Slab, page, entry.gpu, 0, 1))?;
            inner.insert(entry).map(|before| (is_first, before))
        })
    }

    /// Count a handle once more, or record it. Return whether it is new.
    pub(crate) fn enter(&self, new: HandleEntry) -> Result<bool, NoRoom> {
        self.with(|inner| inner.enter(new))
    }

    /// Count a handle once less. Return whether that was the last time.
    pub(crate) fn leave(&self, kind: HandleKind, key: u64) -> bool {
        self.with(|inner| inner.leave(kind, key))
    }

    /// Change a record. If `change` returns true, remove it afterwards.
    #[inline(never)]
    pub(crate) fn change(
        &self,
        kind: HandleKind,
        key: u64,
        change: &mut dyn FnMut(&mut HandleEntry) -> bool,
    ) -> Option<HandleEntry> {
        self.with(|inner| {
            let mut table = inner.table()?;
            let index = table.place(&HandleEntry::new(kind, key, 0, 0, 0));
            let mut entry = table.at(index);
            if entry.kind == 0 {
                return None;
            }
            if change(&mut entry) {
                table.clear(index);
                inner.len = inner.len.saturating_sub(1);
            } else {
                table.set(index, entry);
            }
            Some(entry)
        })
    }

    /// Remove the first handle at or after a place for which `which` returns true. Return it, and the place from which to continue. Handles that are added
    /// meanwhile may be missed.
    #[inline(never)]
    pub(crate) fn take_from(
        &self,
        from: usize,
        which: &dyn Fn(&HandleEntry, &LedgerTable<'_>) -> bool,
    ) -> Option<(usize, HandleEntry)> {
        self.with(|inner| {
            let mut table = inner.table()?;
            let mut place = from;
            loop {
                let entry = *table.places.get(place)?;
                if entry.kind != 0 && which(&entry, &table) {
                    // What lay behind it may be there now.
                    table.clear(place);
                    inner.len = inner.len.saturating_sub(1);
                    return Some((place, entry));
                }
                place = place.wrapping_add(1);
            }
        })
    }
}

/// The first table has one page of memory.
const FIRST: usize = 4096 / size_of::<HandleEntry>();

impl HandlePlaces {
    fn table(&mut self) -> Option<LedgerTable<'_>> {
        if self.places.is_null() {
            return None;
        }
        // SAFETY: the pointer is of `sys::memory` for this many entries, and zeros and all that is written there are entries. `self` is borrowed
        // for as long as the slice.
        let places = unsafe { core::slice::from_raw_parts_mut(self.places, self.capacity) };
        Some(LedgerTable { places })
    }

    fn has_room(&self) -> bool {
        self.len.saturating_mul(2) < self.capacity
    }

    fn room(&mut self) -> Result<(), NoRoom> {
        if self.has_room() {
            return Ok(());
        }
        let capacity = self.capacity.saturating_mul(2).max(FIRST);
        // Not wiped in a child: the pointer to it is, which is enough.
        let places = sys::memory::<HandleEntry>(capacity, false).map_err(|_| NoRoom)?;
        let (old, old_capacity) = (self.places, self.capacity);
        let mut grown = Self {
            places,
            capacity,
            len: self.len,
        };
        if let (Some(from), Some(mut to)) = (self.table(), grown.table()) {
            for entry in from.places.iter().filter(|entry| entry.kind != 0) {
                let index = to.place(entry);
                to.set(index, *entry);
            }
        }
        *self = grown;
        if !old.is_null() {
            sys::forget(old, old_capacity);
        }
        Ok(())
    }

    fn take(&mut self, kind: HandleKind, key: u64) -> Option<HandleEntry> {
        let mut table = self.table()?;
        let index = table.place(&HandleEntry::new(kind, key, 0, 0, 0));
        let entry = table.at(index);
        if entry.kind == 0 {
            return None;
        }
        table.clear(index);
        self.len = self.len.saturating_sub(1);
        Some(entry)
    }

    fn enter(&mut self, new: HandleEntry) -> Result<bool, NoRoom> {
        if let Some(mut table) = self.table() {
            let index = table.place(&new);
            let mut known = table.at(index);
            if known.kind != 0 {
                known.of = known.of.wrapping_add(1);
                table.set(index, known);
                return Ok(false);
            }
        }
        self.insert(new).map(|_| true)
    }

    fn leave(&mut self, kind: HandleKind, key: u64) -> bool {
        let Some(mut table) = self.table() else { return false };
        let index = table.place(&HandleEntry::new(kind, key, 0, 0, 0));
        let mut known = table.at(index);
        if known.kind == 0 {
            return false;
        }
        known.of = known.of.saturating_sub(1);
        if known.of > 0 {
            table.set(index, known);
            return false;
        }
        table.clear(index);
        self.len = self.len.saturating_sub(1);
        true
    }

    fn insert(&mut self, entry: HandleEntry) -> Result<Option<HandleEntry>, NoRoom> {
        // One place stays empty forever, so that each search ends.
        if self.room().is_err() && self.len.saturating_add(1) >= self.capacity {
            return Err(NoRoom);
        }
        let mut table = self.table().ok_or(NoRoom)?;
        let index = table.place(&entry);
        let before = table.at(index);
        table.set(index, entry);
        if before.kind != 0 {
            return Ok(Some(before));
        }
        self.len = self.len.saturating_add(1);
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Copy, Debug)]
    enum Call {
        Insert(u64),
        InsertNew(u64),
        Enter(u64),
        Take(u64),
        Leave(u64),
        Sweep(u64),
    }

    fn call() -> impl Strategy<Value = Call> {
        // Few keys, so that they meet; their hashes differ.
        let key = 0..400_u64;
        prop_oneof![
            6 => key.clone().prop_map(Call::Insert),
            1 => key.clone().prop_map(Call::InsertNew),
            2 => key.clone().prop_map(Call::Enter),
            4 => key.clone().prop_map(Call::Take),
            4 => key.prop_map(Call::Leave),
            1 => (2..9_u64).prop_map(Call::Sweep),
        ]
    }

    /// Several keys share a page.
    fn page(key: u64) -> u64 {
        key / 4
    }

    fn leave(pages: &mut HashMap<u64, u64>, page: u64) -> bool {
        let Some(count) = pages.get_mut(&page) else { return false };
        *count -= 1;
        let was_last = *count == 0;
        pages.retain(|_, count| *count > 0);
        was_last
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        /// Compared with the standard library's map. Two sets of keys are in the table, of two kinds.
        #[test]
        fn it_knows_what_was_noted_and_not_forgotten(calls in prop::collection::vec(call(), 0..3000)) {
            let ledger = sys::memory::<HandleLedger>(1, false).expect("memory");
            // SAFETY: zeros are an empty ledger.
            let ledger = unsafe { &*ledger };
            let (mut linear, mut slabs) = (HashMap::new(), HashMap::new());
            for (step, call) in calls.into_iter().enumerate() {
                let step = step as u64;
                let entry = |key| HandleEntry::new(HandleKind::Linear, key, 3, step, key);
                match call {
                    // What was noted under the same handle comes back, so that it is not charged forever.
                    Call::Insert(key) => prop_assert_eq!(ledger.insert(entry(key)).expect("room"), linear.insert(key, entry(key))),
                    Call::InsertNew(key) => {
                        ledger.insert_new(entry(key)).expect("room");
                        linear.entry(key).or_insert(entry(key));
                    }
                    Call::Enter(key) => {
                        let count: &mut u64 = slabs.entry(page(key)).or_default();
                        *count += 1;
                        let expected = (*count == 1, linear.insert(key, entry(key)));
                        prop_assert_eq!(ledger.insert_in_page(entry(key), page(key)).expect("room"), expected);
                    }
                    Call::Take(key) => prop_assert_eq!(ledger.take(HandleKind::Linear, key), linear.remove(&key)),
                    Call::Leave(key) => prop_assert_eq!(ledger.leave(HandleKind::Slab, page(key)), leave(&mut slabs, page(key))),
                    Call::Sweep(divisor) => {
                        let (mut place, mut gone) = (0, 0);
                        while let Some((next, entry)) = ledger.take_from(place, &|entry, _| entry.is(HandleKind::Linear) && entry.key % divisor == 0) {
                            (place, gone) = (next, gone + 1);
                            prop_assert_eq!(linear.remove(&entry.key), Some(entry));
                        }
                        prop_assert!(linear.keys().all(|key| key % divisor != 0), "{} gone", gone);
                    }
                }
            }
            for key in 0..400 {
                prop_assert_eq!(ledger.get(HandleKind::Linear, key), linear.get(&key).copied());
                prop_assert_eq!(ledger.get(HandleKind::Slab, key).map(|entry| entry.of), slabs.get(&key).copied());
            }
            let mut place = 0;
            let mut found = 0;
            while let Some((at, _)) = ledger.next(place) {
                (place, found) = (at + 1, found + 1);
            }
            prop_assert_eq!(found, linear.len() + slabs.len());
        }
    }
}
