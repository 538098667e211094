use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use divvy_agent_core::{Escape, FileChange, Guarded, InSlots, Readings, ShareId, UsageReading};
use divvy_hardware::{GpuProcess, GpuProcesses};
use divvy_model::MiB;
use divvy_shadow::sys;
use divvy_share::limits::{self, ShareLimits, WHOLE};
use divvy_share::{LIMITS, USAGE, claim, usage};
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

use super::share_files::{JobOutcome, OpenShareFiles, ShareJob};
use super::{GuardMode, Shares, escaped, install, processes_of, shares};
use crate::files;

const GPU: &str = "GPU-1";
const MEBIBYTE: u64 = 1 << 20;

fn id(pod: &str) -> ShareId {
    ShareId::new(pod, GPU)
}

fn share_of(mib: u64, cores: u32) -> [Guarded; 1] {
    [Guarded {
        uuid: GPU.to_owned(),
        memory: MiB(mib),
        cores,
    }]
}

struct Bed {
    state: tempfile::TempDir,
    shares: Shares,
}

impl Bed {
    /// One pod with a share of 1,000 MiB.
    async fn new() -> Bed {
        let state = tempfile::tempdir().expect("temp dir");
        let shares = Shares::open(&shares(state.path()), false).await.expect("opened");
        shares.hold("a", &share_of(1000, 0)).await.expect("made");
        Bed { state, shares }
    }

    /// Another agent begins.
    async fn restart(&mut self, may_stop: bool) {
        let root = shares(self.state.path());
        // The first one is gone, and its descriptors are closed.
        self.shares = Shares::open(&self.state.path().join("none"), false).await.expect("opened");
        self.shares = Shares::open(&root, may_stop).await.expect("opened");
    }

    fn path(&self, name: &str) -> PathBuf {
        self.path_of("a", name)
    }

    fn path_of(&self, pod: &str, name: &str) -> PathBuf {
        shares(self.state.path()).join(pod).join(GPU).join(name)
    }

    fn limits(&self, pod: &str) -> ShareLimits {
        let bytes = fs::read(self.path_of(pod, LIMITS)).expect("read");
        ShareLimits::from_bytes(&bytes).expect("readable").1
    }

    /// Open the file as a process of the pod does.
    fn usage(&self) -> File {
        let mut options = OpenOptions::new();
        options.read(true).write(true).open(self.path(USAGE)).expect("open")
    }

    /// Claim a slot as a process of the pod does, and say what it has. The slot has an owner as long as the file is open.
    fn process(&self, slot: usize, pid: u64, mib: u64) -> File {
        let file = self.usage();
        lock(&file, claim::owner(slot), 1);
        let mut bound = [0; 8];
        file.read_exact_at(&mut bound, 24).expect("read");
        let bound = u64::from_ne_bytes(bound).max(slot as u64 + 1);
        file.write_all_at(&bound.to_ne_bytes(), 24).expect("written");
        let at = 64 + slot as u64 * 64;
        file.write_all_at(&(mib * MEBIBYTE).to_ne_bytes(), at).expect("written");
        file.write_all_at(&pid.to_ne_bytes(), at + 16).expect("written");
        file
    }

    async fn read(&self) -> UsageReading {
        self.shares.check().await.get(&id("a")).cloned().expect("in time")
    }

    async fn change(&self) -> Option<FileChange> {
        self.read().await.change
    }

    /// Compare with what the driver lists: PID in the container, and memory in MiB.
    async fn measure(&self, processes: &[(u32, u64)]) -> Readings {
        let said = self.shares.check().await;
        self.shares.measured(&[listed(processes)], &said, &said).await;
        said
    }
}

fn lock(file: &File, start: u64, length: i64) {
    let lock = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: start.cast_signed(),
        l_len: length,
        l_pid: 0,
    };
    fcntl(file, FcntlArg::F_OFD_SETLK(&lock)).expect("locked");
}

fn listed(processes: &[(u32, u64)]) -> GpuProcesses {
    let process = |(own_pid, mib): &(u32, u64)| GpuProcess {
        pid: 4000 + own_pid,
        used: MiB(*mib),
        pod: Some("a".to_owned()),
        container: None,
        own_pid: Some(*own_pid),
        kind: None,
        program: None,
    };
    GpuProcesses {
        uuid: GPU.to_owned(),
        processes: processes.iter().map(process).collect(),
        error: None,
    }
}

/// A process that holds a lease on a file as long as its input is open, and takes it again when the kernel has taken it away. `None` if it gets none.
struct Lease(Child);

impl Lease {
    /// No crate has F_SETLEASE as a safe function.
    const PROGRAM: &str = "import fcntl, os, signal, sys
signal.signal(signal.SIGIO, signal.SIG_IGN)
kind = {'read': fcntl.F_RDLCK, 'write': fcntl.F_WRLCK}[sys.argv[2]]
file = os.open(sys.argv[1], os.O_NONBLOCK | (os.O_RDONLY if kind == fcntl.F_RDLCK else os.O_RDWR))
try:
    fcntl.fcntl(file, 1024, kind)
except BlockingIOError:
    print('refused', flush=True)
    sys.exit()
print('granted', flush=True)
sys.stdin.read()";

    fn take(path: &Path, kind: &str) -> Option<Lease> {
        let mut python = Command::new("python3");
        python.args(["-c", Lease::PROGRAM]).arg(path).arg(kind);
        let mut child = python.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("python3");
        let mut said = String::new();
        let output = child.stdout.take().expect("piped");
        BufReader::new(output).read_line(&mut said).expect("read");
        let lease = Lease(child);
        match said.trim() {
            "granted" => Some(lease),
            "refused" => None,
            other => panic!("{other}"),
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

#[tokio::test]
async fn a_changed_share_reaches_the_file_that_containers_have() {
    let bed = Bed::new().await;
    assert_eq!((bed.limits("a").bytes, bed.limits("a").rate), (1000 * MEBIBYTE, 0));
    let mounted = File::open(bed.path(LIMITS)).expect("open");
    let _process = bed.process(0, 7, 300);
    bed.shares.hold("a", &share_of(500, 30)).await.expect("changed");
    let mut bytes = [0; limits::SIZE];
    mounted.read_exact_at(&mut bytes, 0).expect("read");
    let limits = ShareLimits::from_bytes(&bytes).expect("readable").1;
    assert_eq!((limits.bytes, limits.rate), (500 * MEBIBYTE, 3 * WHOLE / 10));
    assert_eq!(limits.context, 126 * MEBIBYTE, "a quarter, in whole pages");
    let mode = |name| fs::metadata(bed.path(name)).expect("there").permissions().mode() & 0o777;
    // The agent has no capability to write a file that is read-only for its owner.
    assert_eq!((mode(LIMITS), mode(USAGE)), (0o644, 0o666));
}

#[tokio::test]
async fn only_slots_with_an_owner_are_compared_with_the_driver() {
    let bed = Bed::new().await;
    let first = bed.process(0, 7, 100);
    let _second = bed.process(200, 8, 200);
    let slots = bed.read().await.slots.expect("readable");
    assert_eq!((slots.bytes, slots.pids), (300 * MEBIBYTE, [7, 8].into()));
    for _ in 0..2 {
        bed.measure(&[(7, 200), (8, 220)]).await;
    }
    assert_eq!(bed.limits("a").overhead, 120 * MEBIBYTE);
    // A slot without an owner does not count, although its number is still there.
    drop(first);
    let slots = bed.read().await.slots.expect("readable");
    assert_eq!((slots.bytes, slots.pids), (200 * MEBIBYTE, [8].into()));
    assert_eq!(bed.read().await.change, None);
}

#[tokio::test]
async fn each_reading_restores_a_files_size_permissions_and_head() {
    let bed = Bed::new().await;
    let new = usage::file();
    let restored = || {
        let metadata = fs::metadata(bed.path(USAGE)).expect("there");
        assert_eq!(metadata.len(), usage::SIZE as u64);
        assert_eq!(metadata.permissions().mode() & 0o7777, 0o666);
        assert_eq!(fs::read(bed.path(USAGE)).expect("read")[..16], new[..16]);
    };
    for size in [1 << 40, 0, 100] {
        bed.usage().set_len(size).expect("changed");
        assert_eq!(bed.change().await, Some(FileChange::Size(size)));
        restored();
    }
    for size in [usage::SIZE, 3 * usage::SIZE] {
        // It says that a later version made it.
        let mut later = new.to_vec();
        later[8] = 9;
        later.resize(size, 5);
        fs::write(bed.path(USAGE), &later).expect("written");
        assert!(bed.change().await.is_some());
        restored();
    }
    for mode in [0, 0o777, 0o4666] {
        fs::set_permissions(bed.path(USAGE), fs::Permissions::from_mode(mode)).expect("changed");
        assert_eq!(bed.change().await, Some(FileChange::Mode(mode)));
        restored();
    }
    // Only root may give a file away.
    if chown(bed.path(USAGE), Some(1000), Some(1000)).is_ok() {
        assert_eq!(bed.change().await, Some(FileChange::Owner(1000, 1000)));
        restored();
    }
    assert_eq!(bed.change().await, None);
    let escapes = bed.shares.escapes();
    assert_eq!(escapes, BTreeMap::new(), "only measurements count");
}

#[tokio::test]
async fn a_container_start_renews_the_file_of_a_pod_without_processes() {
    let bed = Bed::new().await;
    fs::write(bed.path(USAGE), [7; 100]).expect("damaged");
    bed.measure(&[]).await;
    assert!(matches!(bed.shares.escapes()["a"][..], [Escape::Tampered { .. }]));
    fs::write(bed.path(USAGE), [7; 100]).expect("damaged");
    bed.shares.hold("a", &share_of(1000, 0)).await.expect("made");
    assert_eq!(fs::read(bed.path(USAGE)).expect("read"), usage::file());
    assert_eq!(bed.shares.escapes(), BTreeMap::new());
    // What a process says in the meantime stays.
    let _process = bed.process(0, 7, 100);
    bed.usage().set_len(3 * usage::SIZE as u64).expect("changed");
    bed.shares.hold("a", &share_of(1000, 0)).await.expect("made");
    assert_eq!(bed.read().await.slots.expect("readable").bytes, 100 * MEBIBYTE);
}

/// fcntl(2): a lease needs that no one else has the file open for writing.
#[tokio::test]
async fn no_process_gets_a_lease_on_the_files_of_a_share() {
    let mut bed = Bed::new().await;
    for _ in 0..2 {
        for name in [LIMITS, USAGE] {
            for kind in ["read", "write"] {
                assert!(Lease::take(&bed.path(name), kind).is_none(), "{name}: {kind}");
            }
        }
        bed.restart(false).await;
    }
}

#[tokio::test]
async fn an_agent_that_starts_does_not_wait_for_leases_and_names_them() {
    for (name, kind) in [(LIMITS, "read"), (LIMITS, "write"), (USAGE, "read"), (USAGE, "write")] {
        let mut bed = Bed::new().await;
        let root = shares(bed.state.path());
        bed.shares = Shares::open(&bed.state.path().join("none"), false).await.expect("opened");
        let leased = Lease::take(&bed.path(name), kind).expect("granted");
        let started = Instant::now();
        bed.shares = Shares::open(&root, false).await.expect("opened");
        assert!(started.elapsed() < Duration::from_secs(20), "lease-break-time is 45 s");
        assert_eq!(bed.change().await, Some(FileChange::Leased));
        let [Escape::Tampered { change, .. }] = &bed.shares.escapes()["a"][..] else {
            panic!("it is named");
        };
        assert_eq!(*change, FileChange::Leased);
        let error = bed
            .shares
            .hold("a", &share_of(1000, 0))
            .await
            .expect_err("not written")
            .to_string();
        assert!(error.contains(name) || error.contains("limits"), "{error}");
        // Other pods are not affected.
        bed.shares.hold("b", &share_of(1000, 0)).await.expect("made");
        drop(leased);
        assert_eq!(bed.change().await, None);
        bed.shares.hold("a", &share_of(1000, 0)).await.expect("made");
    }
}

/// Each question about a lock takes as long as the kernel's list of locks is, so a pod can make the search for owners as long as it wants.
/// The agent waits a while before it searches for the owners of this file again.
#[tokio::test]
async fn a_file_with_a_slow_search_for_owners_is_named() {
    let bed = Bed::new().await;
    let files = OpenShareFiles::searching(shares(bed.state.path()), Duration::ZERO);
    let read = async || match files.run(vec![(id("a"), ShareJob::Check)]).await.pop() {
        Some((_, Ok(JobOutcome::Read(reading)))) => reading,
        other => panic!("{other:?}"),
    };
    assert_eq!(read().await.change, None, "without slots there is nothing to search");
    let process = bed.process(0, 7, 100);
    let reading = read().await;
    assert_eq!((reading.change, reading.slots), (Some(FileChange::Locks), None));
    assert!(reading.counts.is_some());
    drop(process);
    assert_eq!(read().await.change, Some(FileChange::Locks), "the slot still has its number");
}

#[tokio::test]
async fn only_shares_with_busy_files_are_left_out() {
    let bed = Bed::new().await;
    bed.shares.hold("b", &share_of(1000, 0)).await.expect("made");
    let files = OpenShareFiles::new(shares(bed.state.path()));
    let jobs = || ["a", "b"].map(|pod| (id(pod), ShareJob::Check)).to_vec();
    assert_eq!(files.run(jobs()).await.len(), 2);
    files.occupy(&id("a"));
    let left: Vec<ShareId> = files.run(jobs()).await.into_iter().map(|(id, _)| id).collect();
    assert_eq!(left, [id("b")]);
    files.close("a");
    assert_eq!(files.run(jobs()).await.len(), 2);
    // What is late is not waited for again: the answer is there at once.
    files.hang(&id("a"));
    let late = tokio::time::timeout(Duration::ZERO, files.run(vec![(id("a"), ShareJob::Check)])).await;
    assert!(late.is_ok_and(|outcomes| outcomes.is_empty()));
    let left: Vec<ShareId> = files.run(jobs()).await.into_iter().map(|(id, _)| id).collect();
    assert_eq!(left, [id("b")]);
}

#[tokio::test]
async fn the_owners_of_slots_are_found_with_any_pattern_of_locks() {
    let bed = Bed::new().await;
    let claimed: Vec<File> = [3, 0, 255, 254, 100]
        .into_iter()
        .map(|slot| bed.process(slot, slot as u64 + 1, 1))
        .collect();
    let all = InSlots {
        bytes: 5 * MEBIBYTE,
        contexts: 0,
        pids: vec![1, 4, 101, 255, 256],
    };
    assert_eq!(bed.read().await.slots, Some(all.clone()));
    // A guard also locks a byte while it clears a slot. No guard locks others, which change nothing, but are named.
    lock(&claimed[0], 256, 256);
    assert_eq!(bed.change().await, None);
    lock(&claimed[0], 512, 1);
    assert_eq!(bed.change().await, Some(FileChange::ForeignLock));
    assert_eq!(bed.read().await.slots, Some(all.clone()));
    // A lock of all bytes is one of every slot.
    drop(claimed);
    assert_eq!(bed.read().await.slots, Some(InSlots::default()));
    let file = bed.usage();
    lock(&file, 0, 0);
    assert_eq!(bed.read().await.slots, Some(all));
}

/// A program could otherwise hide the slots of the others.
#[tokio::test]
async fn a_file_that_hides_slots_counts_as_changed_until_repaired() {
    let bed = Bed::new().await;
    let [first, last] = [0, 200].map(|slot| bed.process(slot, 7 + slot as u64, 100));
    assert_eq!(bed.read().await.slots.expect("readable").bytes, 200 * MEBIBYTE);
    first.write_all_at(&1_u64.to_ne_bytes(), 24).expect("written");
    for _ in 0..2 {
        assert_eq!(bed.change().await, Some(FileChange::FewerSlots));
        bed.shares.hold("a", &share_of(1000, 0)).await.expect("held");
    }
    drop((first, last));
    bed.shares.hold("a", &share_of(1000, 0)).await.expect("held");
    assert_eq!(bed.change().await, None);
}

/// What the pod writes as the version of its file does not count.
#[tokio::test]
async fn files_of_a_later_agent_stay_as_they_are() {
    let mut bed = Bed::new().await;
    let mut later = fs::read(bed.path(LIMITS)).expect("read");
    for copy in [0, limits::SIZE / 2] {
        later[copy + 8] = 2;
    }
    let mut usage = usage::file().to_vec();
    usage[8] = 2;
    fs::write(bed.path(LIMITS), &later).expect("written");
    fs::write(bed.path(USAGE), &usage).expect("written");
    bed.restart(false).await;
    for _ in 0..3 {
        bed.measure(&[(7, 5000)]).await;
    }
    let error = bed
        .shares
        .hold("a", &share_of(1000, 0))
        .await
        .expect_err("of a later version")
        .to_string();
    assert!(error.contains("layout version 2"), "{error}");
    assert_eq!(fs::read(bed.path(LIMITS)).expect("read"), later);
    assert_eq!(fs::read(bed.path(USAGE)).expect("read"), usage);
    bed.shares.clear(&["a".to_owned()].into(), None).await;
    bed.shares.hold("a", &share_of(1000, 0)).await.expect("made");
    assert_eq!(bed.limits("a").bytes, 1000 * MEBIBYTE);
}

#[tokio::test]
async fn a_container_start_repairs_a_damaged_file_of_limits() {
    let mut bed = Bed::new().await;
    fs::write(bed.path(LIMITS), [7; limits::SIZE]).expect("damaged");
    bed.restart(false).await;
    bed.measure(&[(7, 5000)]).await;
    assert_eq!(
        fs::read(bed.path(LIMITS)).expect("read"),
        [7; limits::SIZE],
        "no file without memory"
    );
    bed.shares.hold("a", &share_of(500, 0)).await.expect("written again");
    assert_eq!(bed.limits("a").bytes, 500 * MEBIBYTE);
}

/// An agent that does not stop pods lets them go on.
#[tokio::test]
async fn only_an_agent_that_stops_pods_marks_them_as_stopped() {
    let mut bed = Bed::new().await;
    bed.restart(true).await;
    bed.shares.hold("a", &share_of(1000, 0)).await.expect("made");
    bed.shares.hold("b", &share_of(1000, 0)).await.expect("made");
    bed.shares.stop(&["a".to_owned()].into()).await;
    assert!(bed.limits("a").is_stopped && !bed.limits("b").is_stopped);
    bed.restart(false).await;
    bed.shares.stop(&["a".to_owned()].into()).await;
    assert!(!bed.limits("a").is_stopped);
}

/// The process that waits is a thread here, which waits as a guard does.
#[tokio::test]
async fn a_measurement_wakes_what_waits_for_it() {
    const LONG: u64 = 20_000_000_000;
    let bed = Bed::new().await;
    bed.shares.hold("a", &share_of(1000, 30)).await.expect("made");
    let path = std::ffi::CString::new(bed.path(LIMITS).into_os_string().into_encoded_bytes()).expect("no zero");
    let file = sys::open(&path, false, limits::SIZE).expect("opened");
    let words: &'static [AtomicU64; limits::WORDS] = sys::map(&file, false).expect("mapped");
    for round in 1..3_u64 {
        let (started, thread_of) = std::sync::mpsc::channel();
        let waiting = std::thread::spawn(move || {
            let Ok((generation, _)) = ShareLimits::parse(&words.each_ref().map(|word| word.load(Ordering::Acquire))) else {
                panic!("the limits are readable");
            };
            let bell = limits::bell(generation + 1);
            let seen = words[bell / 8].load(Ordering::Acquire) as u32;
            let since = Instant::now();
            started
                .send(fs::read_link("/proc/thread-self").expect("its directory"))
                .expect("heard");
            sys::wait(words, bell, seen, LONG);
            since.elapsed()
        });
        let stat = std::path::Path::new("/proc")
            .join(thread_of.recv().expect("started"))
            .join("stat");
        let asleep = || fs::read_to_string(&stat).is_ok_and(|stat| stat.contains(") S "));
        while !asleep() {
            std::thread::yield_now();
        }
        let busy = BTreeMap::from([(GPU.to_owned(), BTreeMap::from([("a".to_owned(), 10_000_000)]))]);
        bed.shares.kept_busy(&busy, round * 100_000_000_000).await;
        let waited = waiting.join().expect("it ends");
        assert!(waited < Duration::from_nanos(LONG), "{waited:?}");
    }
}

/// An agent that starts finds the files of the pods that still exist.
#[tokio::test]
async fn only_the_files_of_a_gone_pod_are_removed() {
    let mut bed = Bed::new().await;
    bed.shares.hold("b", &share_of(10, 0)).await.expect("made");
    bed.restart(false).await;
    assert_eq!(bed.shares.pods().len(), 2);
    bed.shares.clear(&["a".to_owned()].into(), None).await;
    assert_eq!(bed.shares.pods(), BTreeSet::from(["b".to_owned()]));
    assert_eq!(files::names(&shares(bed.state.path())).expect("listed"), ["b"]);
}

/// Escaped processes are processes without a slot, and all processes of a pod that changed its file.
#[test]
fn only_escaped_processes_are_killed() {
    let uuid = || GPU.to_owned();
    let mut gpu = listed(&[(7, 300), (8, 300)]);
    gpu.processes[1].pod = Some("b".to_owned());
    let mut third = gpu.processes[0].clone();
    third.pid = 4009;
    gpu.processes.push(third);
    let killed = |escape: Escape| {
        let escapes = BTreeMap::from([("a".to_owned(), vec![escape])]);
        let kills = processes_of(&escapes, std::slice::from_ref(&gpu));
        let serious = escaped(&escapes);
        assert_eq!(serious.is_empty(), kills.is_empty());
        kills.into_iter().map(|kill| (kill.pod, kill.pid)).collect::<Vec<_>>()
    };
    let a = |pid| ("a".to_owned(), pid);
    assert_eq!(killed(Escape::Unguarded { uuid: uuid(), pid: 4007 }), [a(4007)]);
    assert_eq!(killed(Escape::NotGranted { uuid: uuid(), pid: 4009 }), [a(4009)]);
    let change = FileChange::Leased;
    assert_eq!(killed(Escape::Tampered { uuid: uuid(), change }), [a(4007), a(4009)]);
    let [used, share] = [MiB(2), MiB(1)];
    assert_eq!(
        killed(Escape::Exceeded {
            uuid: uuid(),
            used,
            share
        }),
        [a(4007), a(4009)]
    );
    assert_eq!(killed(Escape::Busy { uuid: uuid() }), []);
    assert_eq!(killed(Escape::Crowded { uuid: uuid() }), []);
}

/// The copies of earlier versions stay.
#[test]
fn each_version_of_the_libraries_has_its_copy() {
    let state = tempfile::tempdir().expect("temp dir");
    let libraries = tempfile::tempdir().expect("temp dir");
    let write = |name: &str, content: &[u8]| std::fs::write(libraries.path().join(name), content).expect("written");
    write("libdivvy-guard-nvml.so", b"nvml");
    let mut copies = Vec::new();
    for content in ["one", "two", "two"] {
        write("libdivvy-guard.so", content.as_bytes());
        let guard = install(state.path(), libraries.path(), GuardMode::Shadow).expect("installed");
        assert_eq!(guard.audit, None);
        assert_eq!(std::fs::read_to_string(&guard.cuda).expect("read"), content);
        assert_eq!(std::fs::read_to_string(&guard.nvml).expect("read"), "nvml");
        assert!(guard.cuda.ends_with("/libcuda.so.1") && guard.nvml.ends_with("/libnvidia-ml.so.1"));
        copies.push(guard.cuda);
    }
    assert_eq!(std::fs::read_to_string(&copies[0]).expect("still there"), "one");
    assert_eq!(copies[1], copies[2]);
    let both = || install(state.path(), libraries.path(), GuardMode::Both);
    let text = both().expect_err("one is missing").to_string();
    assert!(text.contains("libdivvy-guard-audit.so"), "{text}");
    write("libdivvy-guard-audit.so", b"audit");
    let guard = both().expect("installed");
    let audit = guard.audit.expect("it has one");
    assert_eq!(std::fs::read_to_string(&audit).expect("read"), "audit");
    assert!(
        guard.cuda != copies[2] && audit.ends_with("/libdivvy-guard-audit.so"),
        "{audit}"
    );
    write("libdivvy-guard.so", &vec![0; 2 << 20]);
    let text = install(state.path(), libraries.path(), GuardMode::Shadow)
        .expect_err("too large")
        .to_string();
    assert!(
        text.contains("libdivvy-guard.so") && text.contains("not Divvy's guard"),
        "{text}"
    );
}
