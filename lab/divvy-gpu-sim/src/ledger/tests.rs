use std::os::unix::fs::MetadataExt;

use proptest::prelude::*;

use super::*;

const UUID: &str = "GPU-1";

fn slot(directory: &Path) -> LedgerSlot {
    GpuLedger::open(directory, UUID).expect("opened").claim().expect("claimed")
}

fn held(directory: &Path) -> Vec<u64> {
    let usage = GpuLedger::open(directory, UUID).expect("opened").usage().expect("read");
    usage.iter().map(|usage| usage.bytes).collect()
}

#[test]
fn what_ended_is_gone_and_its_memory_can_be_had() {
    let dir = tempfile::tempdir().expect("a directory");
    let (mut first, mut second) = (slot(dir.path()), slot(dir.path()));
    assert!(first.hold(60, 100).expect("held"));
    assert!(!second.hold(41, 100).expect("asked"), "more than there is");
    assert!(second.hold(40, 100).expect("held"), "all of it");
    assert_eq!(second.free(100).expect("read"), 0);
    assert_eq!(held(dir.path()), [60, 40]);
    drop(first);
    assert_eq!(held(dir.path()), [40]);
    assert_eq!(second.free(100).expect("read"), 60);
    assert!(second.hold(100, 100).expect("held"), "what the first one held");
    assert!(second.hold(10, 5).expect("held"), "to hold less is always possible");
    let third = slot(dir.path());
    assert_eq!((third.held(), held(dir.path())), (0, vec![0, 10]), "the slot is used again");
}

#[test]
fn work_waits_for_all_work_before_it() {
    let dir = tempfile::tempdir().expect("a directory");
    let (mut first, mut second) = (slot(dir.path()), slot(dir.path()));
    assert_eq!(first.run(1000, 50).expect("run"), 1050);
    assert_eq!(second.run(1010, 5).expect("run"), 1055, "behind the first one's");
    assert_eq!(first.run(2000, 1).expect("run"), 2001, "the GPU was idle");
    let usage = GpuLedger::open(dir.path(), UUID).expect("opened").usage().expect("read");
    assert_eq!(usage.iter().map(|usage| usage.busy_ns).collect::<Vec<_>>(), [51, 5]);
}

#[test]
fn only_work_that_runs_keeps_the_gpu_busy() {
    let dir = tempfile::tempdir().expect("a directory");
    let (mut first, mut second) = (slot(dir.path()), slot(dir.path()));
    first.run(1000, 100).expect("run");
    second.run(1000, 200).expect("run");
    first.run(1000, 50).expect("run");
    let _idle = slot(dir.path());
    let work = GpuLedger::open(dir.path(), UUID).expect("opened").work().expect("read");
    let busy = |from, to| work.iter().map(|of| of.between(from, to)).collect::<Vec<_>>();
    assert_eq!(busy(0, 2000), [150, 200], "the third has none");
    assert_eq!(busy(1150, 1250)[1], 100);
    drop(second);
    let mut third = slot(dir.path());
    third.run(1000, 1).expect("run");
    let work = GpuLedger::open(dir.path(), UUID).expect("opened").work().expect("read");
    let busy = work.iter().map(|of| of.between(0, 2000));
    assert_eq!(busy.collect::<Vec<_>>(), [150, 1], "the slot is used again");
}

#[test]
fn a_file_that_is_no_ledger_is_an_error() {
    let dir = tempfile::tempdir().expect("a directory");
    let valid = [MAGIC.as_slice(), &[0; 8]].concat();
    let cases: [(&[u8], &[u8]); 3] = [
        (b"short", b"short"),
        (&[0xff; 64], &[0xff; 64]),
        (&[valid.clone(), vec![1]].concat(), b"half a slot"),
    ];
    for (bytes, name) in cases {
        std::fs::write(dir.path().join(UUID), bytes).expect("written");
        let read = GpuLedger::open(dir.path(), UUID).and_then(|mut ledger| ledger.usage());
        assert!(matches!(read, Err(LedgerError::Malformed { .. })), "{name:?}: {read:?}");
    }
    assert!(matches!(
        GpuLedger::open(Path::new("/proc/none"), UUID),
        Err(LedgerError::Io { .. })
    ));
}

/// Report whether anybody waits for a lock of a file (`/proc/locks`, proc_locks(5)).
fn is_awaited(inode: u64) -> bool {
    let locks = std::fs::read_to_string("/proc/locks").expect("the locks");
    let file = format!(":{inode} ");
    locks.lines().any(|line| line.contains("-> ") && line.contains(&file))
}

#[test]
fn a_check_and_its_change_are_one_step_for_all_processes() {
    let dir = tempfile::tempdir().expect("a directory");
    let (mut first, second) = (slot(dir.path()), slot(dir.path()));
    let inode = std::fs::metadata(dir.path().join(UUID)).expect("the file").ino();
    let third = GpuLedger::open(dir.path(), UUID).expect("opened");
    assert!(third.lock(libc::F_OFD_SETLK, libc::F_WRLCK, 0).expect("locked"));
    let asking = std::thread::spawn(move || first.hold(60, 100).expect("asked"));
    while !is_awaited(inode) {
        assert!(!asking.is_finished(), "it did not wait");
        std::thread::yield_now();
    }
    third.write(at(second.index) + 8, &50u64.to_le_bytes()).expect("written");
    third.lock(libc::F_OFD_SETLK, libc::F_UNLCK, 0).expect("unlocked");
    assert!(!asking.join().expect("no panic"), "what was written meanwhile counts");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Each step is a process, and how much it asks for; it ends if it asks for nothing.
    #[test]
    fn the_ledger_is_the_sum_of_what_was_granted(steps in prop::collection::vec((0usize..6, 0u64..60), 1..80)) {
        const CAPACITY: u64 = 100;
        let dir = tempfile::tempdir().expect("a directory");
        let mut processes: Vec<Option<LedgerSlot>> = (0..6).map(|_| None).collect();
        let mut model = [0u64; 6];
        for (who, bytes) in steps {
            if bytes == 0 {
                processes[who] = None;
                model[who] = 0;
            } else {
                let process = processes[who].get_or_insert_with(|| slot(dir.path()));
                let after = model.iter().sum::<u64>() - model[who] + bytes;
                let fits = after <= CAPACITY || bytes <= model[who];
                prop_assert_eq!(process.hold(bytes, CAPACITY).expect("asked"), fits);
                if fits {
                    model[who] = bytes;
                }
                prop_assert_eq!(process.free(CAPACITY).expect("read"), CAPACITY - model.iter().sum::<u64>());
            }
            let mut found: Vec<u64> = held(dir.path()).into_iter().filter(|bytes| *bytes > 0).collect();
            let mut expected: Vec<u64> = model.into_iter().filter(|bytes| *bytes > 0).collect();
            found.sort_unstable();
            expected.sort_unstable();
            prop_assert_eq!(found, expected);
        }
    }
}
