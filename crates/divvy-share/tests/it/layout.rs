//! What is read from the files, with any content.

use std::sync::atomic::Ordering;

use divvy_share::claim::{Locks, claim};
use divvy_share::limits::ComputeAccount;
use divvy_share::limits::{self, ShareLimits, UnreadableLimits};
use divvy_share::usage::{self, SLOTS, SlotUsage, UnusableFile, UsageFile, UsageTotals};
use proptest::prelude::*;

fn limits_of(bytes: u64) -> ShareLimits {
    ShareLimits {
        bytes,
        overhead: 3 << 20,
        context: 300 << 20,
        rate: 500_000_000,
        priority: 7,
        refuse_managed: true,
        may_stop: false,
        is_stopped: true,
        account: ComputeAccount {
            balance: -5,
            at: 6,
            launches: 8,
            launch_ns: 9,
        },
    }
}

fn put(file: &mut [u8], limits: &ShareLimits, generation: u64) {
    let (offset, copy) = limits.copy(generation);
    let offset = offset as usize;
    file[offset..offset + copy.len()].copy_from_slice(&copy);
}

#[test]
fn limits_are_read_as_they_were_written() {
    let mut file = limits_of(1 << 30).file();
    assert_eq!(ShareLimits::from_bytes(&file), Ok((1, limits_of(1 << 30))));
    put(&mut file, &limits_of(2 << 30), 2);
    assert_eq!(ShareLimits::from_bytes(&file), Ok((2, limits_of(2 << 30))));
    put(&mut file, &ShareLimits::default(), 3);
    assert_eq!(ShareLimits::from_bytes(&file), Ok((3, ShareLimits::default())));
    for flag in 0..3 {
        let limits = ShareLimits {
            refuse_managed: flag == 0,
            may_stop: flag == 1,
            is_stopped: flag == 2,
            ..limits_of(1)
        };
        assert_eq!(ShareLimits::from_bytes(&limits.file()), Ok((1, limits)));
    }
}

/// The limits are the old or the new ones, no matter at which byte the writer was killed.
#[test]
fn a_killed_writer_leaves_whole_limits() {
    let (old, new) = (limits_of(1 << 30), limits_of(5 << 30));
    let before = old.file();
    let (offset, copy) = new.copy(2);
    for written in 0..=copy.len() {
        let mut file = before;
        file[offset as usize..offset as usize + written].copy_from_slice(&copy[..written]);
        let (_, seen) = ShareLimits::from_bytes(&file).unwrap();
        assert!(seen == old || seen == new, "{written} bytes written: {seen:?}");
    }
}

/// A reader that sees the mark of its last reading need not read the rest. So there is none while a copy is replaced, and each content has its own.
#[test]
fn only_complete_limits_have_a_mark_and_any_change_changes_it() {
    let words = |file: &[u8]| {
        let mut words = [0; limits::WORDS];
        for (word, bytes) in words.iter_mut().zip(file.as_chunks().0) {
            *word = u64::from_ne_bytes(*bytes);
        }
        words
    };
    let mark = |file: &[u8]| ShareLimits::parse_marked(&words(file)).unwrap().1;
    let before = limits_of(1 << 30).file();
    let at_mark = |file: &[u8]| limits::MARK.map(|at| words(file)[at]);
    assert_eq!(mark(&before), Some(at_mark(&before)));
    for generation in [2, 3] {
        // Also a copy with the same limits has another mark.
        for new in [limits_of(5 << 30), limits_of(1 << 30)] {
            let (offset, copy) = new.copy(generation);
            let mut file = before;
            let place = &mut file[offset as usize..][..copy.len()];
            place.copy_from_slice(&copy);
            assert_eq!(mark(&file), Some(at_mark(&file)));
            assert_ne!(mark(&file), mark(&before));
            for missing in 0..copy.len() / 8 {
                let mut torn = file;
                let word = offset as usize + missing * 8..offset as usize + missing * 8 + 8;
                if torn[word.clone()] != before[word.clone()] {
                    torn[word.clone()].copy_from_slice(&before[word]);
                    assert_eq!(mark(&torn), None, "word {missing} is not written yet");
                }
            }
        }
    }
}

/// What a waiting process has read there is something else after the next write, and a later write at the other copy has its own place.
#[test]
fn a_write_changes_the_bits_for_which_others_wait() {
    let mut file = limits_of(1).file();
    let at = |file: &[u8], generation| u32::from_ne_bytes(*file[limits::bell(generation)..].first_chunk().unwrap());
    for generation in 2..6 {
        let before = [at(&file, generation), at(&file, generation + 1)];
        put(&mut file, &limits_of(1), generation);
        assert_eq!(at(&file, generation), generation as u32);
        assert_eq!(before, [generation as u32 - 2, generation as u32 - 1]);
    }
}

#[test]
fn limits_that_are_not_ours_are_told_apart() {
    let file = limits_of(1).file();
    assert_eq!(
        ShareLimits::from_bytes(&file[..limits::SIZE - 1]),
        Err(UnreadableLimits::Foreign)
    );
    assert_eq!(ShareLimits::from_bytes(&[0xff; limits::SIZE]), Err(UnreadableLimits::Foreign));
    let mut newer = file;
    newer[8] = 9;
    assert_eq!(ShareLimits::from_bytes(&newer), Err(UnreadableLimits::Newer(9)));
    let mut torn = file;
    torn[24] ^= 1;
    torn[limits::SIZE / 2 + 24] ^= 1;
    assert_eq!(ShareLimits::from_bytes(&torn), Err(UnreadableLimits::Torn));
}

#[test]
fn an_overhead_above_the_share_allows_nothing() {
    let limits = ShareLimits {
        bytes: 1,
        overhead: 2,
        ..ShareLimits::default()
    };
    assert_eq!(limits.allowed(), 0);
}

#[test]
fn usage_that_somebody_changed_is_not_used() {
    let file = usage::file();
    assert_eq!(
        usage::parse(&file[..64]).unwrap().slots().count(),
        0,
        "no slot has had an owner"
    );
    assert_eq!(usage::parse(&file[..63]).unwrap_err(), UnusableFile::Size(63));
    let mut used = file;
    used[24] = 2;
    assert_eq!(usage::length(&used), 64 + 2 * 64);
    assert_eq!(usage::parse(&used[..191]).unwrap_err(), UnusableFile::Size(191));
    assert_eq!(usage::parse(&used[..192]).unwrap().slots().count(), 2);
    used[24..32].fill(0xff);
    assert_eq!(usage::length(&used), usage::SIZE);
    assert_eq!(usage::parse(&used).unwrap().bound, u64::MAX);
    assert_eq!(usage::parse(&[0xff; usage::SIZE]).unwrap_err(), UnusableFile::Foreign);
    let mut newer = file;
    newer[8] = 2;
    assert_eq!(usage::parse(&newer).unwrap_err(), UnusableFile::Newer(2));
}

#[test]
fn a_slot_is_read_from_where_processes_write_it() {
    let mut file = usage::file();
    file[16..24].copy_from_slice(&4_u64.to_ne_bytes());
    file[24..32].copy_from_slice(&256_u64.to_ne_bytes());
    for word in 0..7_u64 {
        let first = 64 + 255 * 64 + word as usize * 8;
        file[first..first + 8].copy_from_slice(&(word + 10).to_ne_bytes());
    }
    let content = usage::parse(&file).unwrap();
    let slots: Vec<SlotUsage> = content.slots().collect();
    let last = SlotUsage {
        used: 10,
        pending: 11,
        pid: 12,
        peak: 13,
        denied: 14,
        launches: 15,
        contexts: 16,
    };
    let totals_of_an_earlier_guard = UsageTotals {
        crowded: 4,
        ..UsageTotals::default()
    };
    assert_eq!(
        (slots[255], slots[254], content.totals),
        (last, SlotUsage::default(), totals_of_an_earlier_guard)
    );
}

/// An earlier guard knows neither word, and an earlier agent reads neither. So the version is the same, and the words count only if a guard says so.
#[test]
fn refused_bytes_and_waits_are_absent_until_counted() {
    let mut file = usage::file();
    for (says, counted) in [(0_u64, None), (1, Some(())), (u64::MAX, Some(()))] {
        for (index, word) in [says, 20, 30].into_iter().enumerate() {
            file[32 + index * 8..40 + index * 8].copy_from_slice(&word.to_ne_bytes());
        }
        let totals = usage::parse(&file).unwrap().totals;
        let expected = UsageTotals {
            crowded: 0,
            denied_bytes: counted.map(|()| 20),
            throttled_ns: counted.map(|()| 30),
        };
        assert_eq!(totals, expected, "{says}");
    }
}

/// A single request never counts for more memory than a GPU can have.
#[test]
fn counts_of_all_guards_add_up() {
    let usage = UsageFile::default();
    let words = || [&usage.counts, &usage.denied_bytes, &usage.throttled_ns].map(|word| word.load(Ordering::Relaxed));
    assert_eq!(words(), [0, 0, 0]);
    usage.count();
    usage.deny(3, 5 << 20);
    usage.deny(4, u64::MAX);
    usage.throttle(7);
    usage.throttle(8);
    // Another guard of the pod starts.
    usage.count();
    assert_eq!(words(), [1, (5 << 20) + (1 << 40), 15]);
    assert_eq!(
        [2, 3, 4].map(|slot| usage.slots[slot].denied.load(Ordering::Relaxed)),
        [0, 1, 1]
    );
}

/// Bytes that another description has locked.
struct Others(Vec<u64>);

impl Locks for Others {
    fn held(&self, byte: u64) -> bool {
        self.0.contains(&byte)
    }

    fn take(&self, byte: u64) -> bool {
        !self.held(byte)
    }

    fn release(&self, _byte: u64) {}
}

fn left_behind(bytes: u64) -> UsageFile {
    let usage = UsageFile::default();
    for slot in &usage.slots {
        slot.used.store(bytes, Ordering::Relaxed);
        slot.root.store(bytes, Ordering::Relaxed);
    }
    usage
}

#[test]
fn the_first_slot_without_an_owner_is_taken_and_cleared() {
    let usage = left_behind(5);
    // The owner of slot 0 lives, and slot 1 is being cleared by another process.
    assert_eq!(claim(&Others(vec![0, 257]), &usage, 42), Some(2));
    let words: Vec<_> = usage.slots[..4]
        .iter()
        .map(|slot| [&slot.used, &slot.pid, &slot.root].map(|word| word.load(Ordering::Relaxed)))
        .collect();
    assert_eq!(words, [[5, 0, 5], [5, 0, 5], [0, 42, 0], [5, 0, 5]]);
    assert_eq!(usage.bound(), 3);
    // The bound stays when an earlier slot is taken.
    assert_eq!(claim(&Others(vec![2]), &usage, 43), Some(0));
    assert_eq!(usage.bound(), 3);
}

#[test]
fn without_a_free_slot_none_is_taken() {
    let usage = left_behind(5);
    assert_eq!(claim(&Others((0..SLOTS as u64).collect()), &usage, 42), None);
    assert!(usage.slots.iter().all(|slot| slot.pid.load(Ordering::Relaxed) == 0));
    assert_eq!(usage.bound(), 0);
}

proptest! {
    #[test]
    fn any_bytes_are_limits_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..600), whole in any::<bool>()) {
        let mut file = limits_of(1 << 30).file();
        if whole {
            let changed = bytes.len().min(file.len());
            file[..changed].copy_from_slice(&bytes[..changed]);
            let read = ShareLimits::from_bytes(&file);
            prop_assert!(read.is_err() || read.unwrap().1 == limits_of(1 << 30));
        } else {
            prop_assert!(ShareLimits::from_bytes(&bytes).is_err());
        }
    }
}
