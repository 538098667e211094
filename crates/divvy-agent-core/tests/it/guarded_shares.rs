//! What the agent decides about the shares of guarded pods, from their files and from the driver's numbers.

use std::collections::{BTreeMap, BTreeSet};

use divvy_agent_core::{
    DriverReport, Escape, FileChange, FileStatus, GuardCounts, GuardedShares, InSlots, PodProcess, Readings, ShareFound, ShareId,
    USAGE_MODE, UsageCounts, UsageReading,
};
use divvy_model::MiB;
use divvy_share::limits::{ComputeAccount, ShareLimits, UnreadableLimits, WHOLE};
use divvy_share::usage::{self, UsageTotals};

const GPU: &str = "GPU-1";
const MEBIBYTE: u64 = 1 << 20;
const SECOND: u64 = 1_000_000_000;
const MS: u64 = 1_000_000;

fn id(pod: &str) -> ShareId {
    on(pod, GPU)
}

fn on(pod: &str, gpu: &str) -> ShareId {
    ShareId::new(pod, gpu)
}

/// A process with a context: its PID, also in its container, what the driver says that it has, and what it has allocated according to its slot, in MiB.
#[derive(Clone, Copy, Debug)]
struct Runs {
    pid: u32,
    used: u64,
    says: Option<u64>,
}

fn runs(pid: u32, used: u64, says: u64) -> Runs {
    Runs {
        pid,
        used,
        says: Some(says),
    }
}

/// Files of limits, as they are written.
struct Node {
    shares: GuardedShares,
    files: BTreeMap<ShareId, ShareLimits>,
    now: u64,
}

impl Node {
    /// One pod with a share of 1,000 MiB.
    fn new() -> Node {
        let mut node = Node::empty(false);
        node.hold("a", 1000);
        node
    }

    fn empty(may_stop: bool) -> Node {
        Node {
            shares: GuardedShares::new(may_stop),
            files: BTreeMap::new(),
            now: 1000 * SECOND,
        }
    }

    fn found(&self, id: &ShareId, usage: UsageReading) -> ShareFound {
        let limits = self.files.get(id).copied().ok_or(UnreadableLimits::Foreign);
        ShareFound { limits, usage }
    }

    fn hold(&mut self, pod: &str, mib: u64) {
        self.hold_at(pod, mib, 0, said(&[]));
    }

    fn hold_at(&mut self, pod: &str, mib: u64, cores: u32, usage: UsageReading) {
        let found = self.found(&id(pod), usage);
        let written = self
            .shares
            .hold(id(pod), MiB(mib), cores, &found, self.now)
            .expect("of this version");
        self.files.insert(id(pod), written.limits);
        self.shares.wrote(&id(pod), written.limits);
    }

    fn write(&mut self) {
        for (id, written) in self.shares.unwritten() {
            self.files.insert(id.clone(), written.limits);
            self.shares.wrote(&id, written.limits);
        }
    }

    fn limits(&self, pod: &str) -> ShareLimits {
        self.files[&id(pod)]
    }

    fn context(&self, pod: &str) -> u64 {
        self.limits(pod).context / MEBIBYTE
    }

    /// Measure once, with the files the same before and after. Return the overhead of the first pod in MiB.
    fn measure(&mut self, pods: &[(&str, &[Runs])]) -> u64 {
        let readings: Readings = pods.iter().map(|(pod, processes)| (id(pod), said(processes))).collect();
        self.measure_files(pods, &readings, &readings);
        self.limits(pods[0].0).overhead / MEBIBYTE
    }

    fn measure_files(&mut self, pods: &[(&str, &[Runs])], before: &Readings, after: &Readings) {
        self.now += SECOND;
        self.shares.measured(&report(pods), before, after, self.now);
        self.write();
    }

    fn escapes(&self, pod: &str) -> Vec<Escape> {
        self.shares.escapes().remove(pod).unwrap_or_default()
    }
}

fn report(pods: &[(&str, &[Runs])]) -> DriverReport {
    let processes = pods.iter().flat_map(|(pod, processes)| {
        processes.iter().map(|process| PodProcess {
            share: id(pod),
            pid: 4000 + process.pid,
            own_pid: Some(process.pid),
            used: MiB(process.used),
        })
    });
    DriverReport {
        gpus: [GPU.to_owned()].into(),
        processes: processes.collect(),
    }
}

/// What the file of these processes says.
fn said(processes: &[Runs]) -> UsageReading {
    let mut slots = InSlots::default();
    for (process, says) in processes.iter().filter_map(|process| Some((process, process.says?))) {
        slots.bytes += says * MEBIBYTE;
        slots.contexts += 1;
        slots.pids.push(u64::from(process.pid));
    }
    UsageReading {
        change: None,
        slots: Some(slots),
        counts: Some(UsageCounts::default()),
    }
}

fn changed(change: FileChange) -> UsageReading {
    UsageReading::unreadable(change)
}

fn unguarded(pid: u32) -> Escape {
    Escape::Unguarded {
        uuid: GPU.to_owned(),
        pid: 4000 + pid,
    }
}

/// A guard of an earlier version does not say how many contexts there are.
#[test]
fn unaccounted_memory_is_overhead_once_two_measurements_agree() {
    let mut node = Node::new();
    let by_earlier = |processes: &[Runs]| {
        let mut usage = said(processes);
        usage.slots.as_mut().expect("readable").contexts = 0;
        Readings::from_iter([(id("a"), usage)])
    };
    let overhead = |node: &mut Node, processes: &[Runs]| {
        let files = by_earlier(processes);
        node.measure_files(&[("a", processes)], &files, &files);
        node.limits("a").overhead / MEBIBYTE
    };
    let both = [runs(1, 200, 100), runs(2, 220, 200)];
    assert_eq!(overhead(&mut node, &both), 0);
    assert_eq!(overhead(&mut node, &both), 120);
    // A process frees 100 MiB after the driver was asked. The difference of one moment is not overhead.
    assert_eq!(overhead(&mut node, &[runs(1, 200, 0), runs(2, 220, 200)]), 120);
    assert_eq!(overhead(&mut node, &[runs(2, 320, 200)]), 120);
    assert_eq!(overhead(&mut node, &[]), 0);
    // Without the driver's numbers nothing changes.
    overhead(&mut node, &both);
    overhead(&mut node, &both);
    let files = by_earlier(&both);
    node.shares.measured(&DriverReport::default(), &files, &files, node.now);
    node.write();
    assert_eq!(node.limits("a").overhead / MEBIBYTE, 120);
}

#[test]
fn contexts_are_charged_their_size_once_two_measurements_agree() {
    let mut node = Node::new();
    node.hold("a", 8000);
    assert_eq!(node.context("a"), 512, "before anything is known");
    // Two contexts of 150 MiB each.
    let two = [runs(1, 250, 100), runs(2, 350, 200)];
    assert_eq!((node.measure(&[("a", &two)]), node.context("a")), (0, 512));
    assert_eq!(
        (node.measure(&[("a", &two)]), node.context("a")),
        (0, 150),
        "also for those that run"
    );
    // Code is not part of a context.
    for overhead in [0, 60, 60] {
        assert_eq!(node.measure(&[("a", &[runs(2, 410, 200)])]), overhead);
        assert_eq!(node.context("a"), 150);
    }
    node.measure(&[("a", &[])]);
    assert_eq!((node.measure(&[("a", &[])]), node.context("a")), (0, 150));
    // The charge is a quarter of the share at most. What contexts take beyond it is overhead.
    node.hold("a", 400);
    assert_eq!(node.context("a"), 100);
    for _ in 0..2 {
        node.measure(&[("a", &[runs(3, 220, 0)])]);
    }
    assert_eq!((node.context("a"), node.limits("a").overhead / MEBIBYTE), (100, 120));
    node.hold("b", 4000);
    assert_eq!(node.context("b"), 512, "another pod does not know it");
}

#[test]
fn a_context_larger_than_its_charge_is_learned_too() {
    let mut node = Node::new();
    node.hold("a", 8000);
    for _ in 0..3 {
        assert_eq!(node.measure(&[("a", &[runs(7, 650, 50)])]), 0);
    }
    assert_eq!(node.context("a"), 600);
    // A pod that avoids the guard shows a context of 60 GiB.
    node.hold("b", 8000);
    for _ in 0..3 {
        node.measure(&[("b", &[runs(8, 60_000, 0)])]);
    }
    assert_eq!(node.context("b"), 640);
}

#[test]
fn refused_allocations_are_counted_over_all_owners_of_a_slot() {
    let mut node = Node::new();
    for (slots, denied) in [
        (vec![3], 3),
        (vec![3, 2], 5),
        (vec![4, 2], 6),
        (vec![1, 2], 7),
        (vec![0, 0, 9], 16),
        (vec![1], 17),
        (vec![1, u64::MAX], u64::MAX),
    ] {
        let mut usage = said(&[]);
        usage.counts = Some(UsageCounts {
            denied: slots,
            ..UsageCounts::default()
        });
        let files: Readings = [(id("a"), usage)].into_iter().collect();
        for _ in 0..2 {
            node.measure_files(&[], &files, &files);
            let counts = GuardCounts {
                denied,
                ..GuardCounts::default()
            };
            assert_eq!(node.shares.counted(), BTreeMap::from([(id("a"), counts)]));
        }
    }
    // A damaged file says nothing, and what was counted stays until the pod is gone.
    let files: Readings = [(id("a"), changed(FileChange::Head))].into_iter().collect();
    node.measure_files(&[], &files, &files);
    assert_eq!(node.shares.counted()[&id("a")].denied, u64::MAX);
    node.shares.forget("a");
    assert_eq!(node.shares.counted(), BTreeMap::new());
}

/// The wait that is counted for a pod is never longer than its processes can have waited.
#[test]
fn guard_counts_only_grow_and_waits_are_bounded() {
    let mut node = Node::new();
    let mut says = |counts: Option<(u64, u64)>| {
        let mut usage = said(&[]);
        usage.counts = Some(UsageCounts {
            totals: UsageTotals {
                crowded: 0,
                denied_bytes: counts.map(|(bytes, _)| bytes),
                throttled_ns: counts.map(|(_, ns)| ns),
            },
            ..UsageCounts::default()
        });
        let files: Readings = [(id("a"), usage)].into_iter().collect();
        node.measure_files(&[], &files, &files);
        let counted = node.shares.counted().into_values().next().expect("a share");
        (counted.denied_bytes, counted.throttled_ns)
    };
    assert_eq!(says(None), (None, None), "a guard of an earlier version counts nothing");
    assert_eq!(says(Some((0, 0))), (Some(0), Some(0)));
    assert_eq!(says(Some((10, 7))), (Some(10), Some(7)));
    assert_eq!(says(Some((15, 9))), (Some(15), Some(9)));
    // The pod, or an agent that restores a damaged file, sets them back.
    assert_eq!(says(Some((4, 3))), (Some(19), Some(12)));
    assert_eq!(says(None), (Some(19), Some(12)), "what was counted stays");
    let most = 12 + 256 * SECOND;
    assert_eq!(says(Some((0, 0))), (Some(19), Some(12)));
    assert_eq!(says(Some((u64::MAX, u64::MAX))), (Some(u64::MAX), Some(most)));
}

/// Only an agent that stops pods does this, and the pod continues once the agent no longer names it.
#[test]
fn a_named_pod_is_stopped_on_all_its_gpus() {
    for may_stop in [true, false] {
        let mut node = Node::empty(may_stop);
        let second = on("a", "GPU-2");
        node.hold("a", 1000);
        node.hold("b", 1000);
        let found = node.found(&second, said(&[]));
        node.shares
            .hold(second.clone(), MiB(1000), 0, &found, node.now)
            .expect("of this version");
        node.write();
        assert!(node.files.values().all(|limits| limits.may_stop == may_stop));
        let stopped = |node: &Node| [id("a"), second.clone(), id("b")].map(|id| node.files[&id].is_stopped);
        node.shares.stop(&["a".to_owned()].into());
        node.write();
        assert_eq!(stopped(&node), [may_stop, may_stop, false]);
        node.shares.stop(&BTreeSet::new());
        node.write();
        assert_eq!(stopped(&node), [false; 3]);
    }
}

#[test]
fn a_process_without_a_slot_is_named_if_it_stays() {
    let mut node = Node::new();
    let has_slot = runs(7, 300, 100);
    let none = |pid| Runs {
        pid,
        used: 300,
        says: None,
    };
    for _ in 0..9 {
        node.measure(&[("a", &[has_slot])]);
        assert_eq!(node.escapes("a"), [], "it has a slot");
    }
    for expected in [vec![], vec![], vec![unguarded(8)], vec![unguarded(8)]] {
        node.measure(&[("a", &[has_slot, none(8)])]);
        assert_eq!(node.escapes("a"), expected);
    }
    node.measure(&[("a", &[has_slot])]);
    assert_eq!(node.escapes("a"), [], "it has ended");
    node.measure(&[("a", &[has_slot, none(8)])]);
    assert_eq!(node.escapes("a"), [], "another one");
    // The owner of the slot has ended, and a process with its PID avoids the guard.
    for _ in 0..3 {
        node.measure(&[("a", &[none(7)])]);
    }
    assert_eq!(node.escapes("a"), [unguarded(7)]);
    node.shares.forget("a");
    assert_eq!(node.shares.escapes(), BTreeMap::new());
}

#[test]
fn no_file_hides_a_process_without_a_slot() {
    let process = [runs(7, 300, 100)];
    for change in [
        FileChange::Size(7),
        FileChange::Head,
        FileChange::Version(9),
        FileChange::Leased,
        FileChange::Forbidden,
        FileChange::Locks,
    ] {
        let mut node = Node::new();
        let files: Readings = [(id("a"), changed(change.clone()))].into_iter().collect();
        for _ in 0..3 {
            node.measure_files(&[("a", &process)], &files, &files);
        }
        let tampered = Escape::Tampered {
            uuid: GPU.to_owned(),
            change,
        };
        assert_eq!(node.escapes("a"), [unguarded(7), tampered]);
    }
}

/// The agent names the changed file at once.
#[test]
fn a_changed_file_is_named_until_a_container_starts() {
    let mut node = Node::new();
    let tampered = [Escape::Tampered {
        uuid: GPU.to_owned(),
        change: FileChange::Version(9),
    }];
    let good: Readings = [(id("a"), said(&[]))].into_iter().collect();
    let bad: Readings = [(id("a"), changed(FileChange::Version(9)))].into_iter().collect();
    node.measure_files(&[], &bad, &good);
    assert_eq!(node.escapes("a"), tampered);
    node.measure_files(&[], &good, &good);
    assert_eq!(node.escapes("a"), tampered, "its numbers may be wrong");
    node.hold_at("a", 1000, 0, changed(FileChange::Owner(1000, 1000)));
    assert_eq!(node.escapes("a").len(), 1, "what cannot be repaired is still there");
    node.hold("a", 1000);
    assert_eq!(node.escapes("a"), []);
    // An agent that starts finds it, too.
    let found = node.found(&id("a"), changed(FileChange::Leased));
    let mut later = Node::empty(false);
    later.shares.adopt(id("a"), &found, later.now);
    assert_eq!(later.escapes("a").len(), 1);
}

/// The agent names a file that it could not read in time in several measurements.
#[test]
fn an_unreadable_file_is_named_and_changes_nothing() {
    let mut node = Node::new();
    let process = [runs(7, 300, 100)];
    node.measure(&[("a", &process)]);
    node.measure(&[("a", &process)]);
    let before = node.limits("a");
    let busy = [Escape::Busy { uuid: GPU.to_owned() }];
    for expected in [&[][..], &[], &busy] {
        node.measure_files(&[("a", &process)], &Readings::default(), &Readings::default());
        assert_eq!(node.escapes("a"), expected);
    }
    assert_eq!(node.limits("a"), before);
    node.measure(&[("a", &process)]);
    assert_eq!(node.escapes("a"), []);
}

/// A process of a pod that has no shares at all is not named.
#[test]
fn a_process_outside_its_pods_shares_is_named() {
    let mut node = Node::new();
    let process = |pod: &str| PodProcess {
        share: on(pod, "GPU-2"),
        pid: 4711,
        own_pid: Some(7),
        used: MiB(300),
    };
    let report = DriverReport {
        gpus: ["GPU-2".to_owned()].into(),
        processes: vec![process("a"), process("monitoring")],
    };
    let files: Readings = [(id("a"), said(&[]))].into_iter().collect();
    for _ in 0..3 {
        node.shares.measured(&report, &files, &files, node.now);
    }
    let not_granted = Escape::NotGranted {
        uuid: "GPU-2".to_owned(),
        pid: 4711,
    };
    assert_eq!(node.shares.escapes(), BTreeMap::from([("a".to_owned(), vec![not_granted])]));
}

/// A context can take 1,024 MiB. Pods with 1,000 MiB are charged with a quarter of it.
#[test]
fn memory_beyond_shares_and_contexts_is_too_much() {
    for (learned, processes, used, named) in [
        (false, 1, 1050 + 390, false),
        (false, 1, 1050 + 391, true),
        (false, 2, 1050 + 2 * 390, false),
        (false, 2, 1050 + 2 * 391, true),
        (true, 1, 1050, false),
        (true, 1, 1051, true),
    ] {
        let mut node = Node::new();
        if learned {
            for _ in 0..2 {
                node.measure(&[("a", &[runs(1, 300, 100)])]);
            }
            node.measure(&[("a", &[])]);
            assert_eq!(node.context("a"), 200);
        }
        let mut all: Vec<Runs> = (1..processes).map(|pid| runs(pid, 1, 0)).collect();
        all.push(runs(9, used - u64::from(processes - 1), 100));
        // A pod can say that it has any number of contexts.
        let mut usage = said(&all);
        if let Some(slots) = &mut usage.slots {
            slots.contexts = 1 << 40;
        }
        let files: Readings = [(id("a"), usage)].into_iter().collect();
        for measurement in 1..5 {
            node.measure_files(&[("a", &all)], &files, &files);
            let exceeded = Escape::Exceeded {
                uuid: GPU.to_owned(),
                used: MiB(used),
                share: MiB(1000),
            };
            let expected = if named && measurement >= 3 { vec![exceeded] } else { vec![] };
            assert_eq!(node.escapes("a"), expected, "{learned} {processes} {used}");
        }
        node.measure(&[("a", &[runs(9, 1000, 100)])]);
        assert_eq!(node.escapes("a"), [], "it has less");
    }
}

/// The pod has more processes than slots, or the driver does not report its compute time.
#[test]
fn too_many_processes_or_unreported_time_is_named() {
    let mut node = Node::new();
    let uuid = GPU.to_owned();
    let mut crowded = said(&[]);
    if let Some(counts) = &mut crowded.counts {
        counts.totals.crowded = 1;
    }
    let files: Readings = [(id("a"), crowded)].into_iter().collect();
    node.measure_files(&[], &files, &files);
    assert_eq!(node.escapes("a"), [Escape::Crowded { uuid: uuid.clone() }]);
    node.measure(&[("a", &[])]);
    node.shares.timed(GPU, Some("not supported".to_owned()));
    assert_eq!(node.escapes("a"), [], "the pod has no share of the compute time");
    node.hold_at("a", 1000, 30, said(&[]));
    let text = "not supported".to_owned();
    assert_eq!(node.escapes("a"), [Escape::Untimed { uuid, text }]);
    node.shares.timed(GPU, None);
    assert_eq!(node.escapes("a"), []);
}

fn launched(launches: u64) -> Readings {
    let mut usage = said(&[]);
    usage.counts = Some(UsageCounts {
        launches,
        ..UsageCounts::default()
    });
    [(id("a"), usage)].into_iter().collect()
}

#[test]
fn only_a_pod_with_a_rate_is_measured() {
    let mut node = Node::new();
    node.hold("b", 1000);
    node.hold_at("a", 1000, 30, said(&[]));
    assert_eq!(node.limits("a").rate, 3 * WHOLE / 10);
    assert_eq!(node.shares.timed_gpus(), [GPU.to_owned()].into());
    assert_eq!(node.shares.timed_shares(&[GPU.to_owned()].into()), [id("a")]);
    assert_eq!(node.shares.timed_shares(&["GPU-2".to_owned()].into()), []);
    let busy = BTreeMap::from([("a".to_owned(), 10 * MS), ("b".to_owned(), 70 * MS)]);
    node.shares.kept_busy(GPU, &busy, &launched(7), node.now);
    node.shares.kept_busy("GPU-2", &busy, &launched(9), node.now + 5);
    node.write();
    assert_eq!(node.limits("b").account, ComputeAccount::default());
    let before = node.limits("a").account;
    assert_eq!((before.launches, before.at), (7, node.now));
    for cores in [0, 100] {
        node.hold_at("a", 1000, cores, said(&[]));
        node.shares.kept_busy(GPU, &busy, &launched(8), node.now + SECOND);
        node.write();
        assert_eq!(node.limits("a").account, before, "{cores}");
        assert_eq!(node.shares.timed_gpus(), BTreeSet::new(), "{cores}");
    }
}

/// Earlier measurements do not count when the share has a rate again.
#[test]
fn a_share_that_lost_its_rate_forgets_measurements() {
    let launch_ns = |loses_its_rate| {
        let mut node = Node::new();
        node.hold_at("a", 1000, 30, said(&[]));
        let measure = |node: &mut Node, ms, launches| {
            node.now += 100 * MS;
            let busy = BTreeMap::from([("a".to_owned(), ms * MS)]);
            node.shares.kept_busy(GPU, &busy, &launched(launches), node.now);
            node.write();
        };
        for ms in [10, 90] {
            measure(&mut node, ms, 7);
        }
        if loses_its_rate {
            node.hold_at("a", 1000, 0, said(&[]));
            node.hold_at("a", 1000, 30, said(&[]));
        }
        measure(&mut node, 10, 8);
        node.limits("a").account.launch_ns
    };
    assert_eq!([false, true].map(launch_ns), [110 * MS, 10 * MS]);
}

#[test]
fn the_account_of_time_and_launches_outlives_the_agent() {
    let mut node = Node::new();
    node.hold_at("a", 1000, 30, said(&[]));
    let busy = |ms: u64| BTreeMap::from([("a".to_owned(), ms * MS)]);
    node.shares.kept_busy(GPU, &busy(10), &launched(7), 1000 * MS);
    node.write();
    let first = ComputeAccount {
        balance: -10 * MS as i64,
        at: 1000 * MS,
        launches: 7,
        launch_ns: 0,
    };
    assert_eq!(node.limits("a").account, first, "the launches were before the measurement");
    node.shares.kept_busy(GPU, &busy(100), &launched(27), 1100 * MS);
    node.write();
    let second = ComputeAccount {
        balance: (-10 + 30 - 100) * MS as i64,
        at: 1100 * MS,
        launches: 27,
        launch_ns: 110 * MS / 20,
    };
    assert_eq!(node.limits("a").account, second);
    // A file that cannot be read does not change what a launch takes.
    let mut later = Node::empty(false);
    later.now = 1150 * MS;
    later.shares.adopt(id("a"), &node.found(&id("a"), said(&[])), later.now);
    later.shares.kept_busy(GPU, &busy(80), &Readings::default(), 1200 * MS);
    later.write();
    let third = later.limits("a").account;
    assert_eq!((third.balance, third.launches), ((-80 + 30 - 80) * MS as i64, 27));
    later.hold_at("a", 500, 30, said(&[]));
    assert_eq!(later.limits("a").account, third, "another container of the pod starts");
}

#[test]
fn a_debt_of_an_earlier_boot_of_the_machine_is_forgotten() {
    let mut node = Node::new();
    node.hold_at("a", 1000, 30, said(&[]));
    let busy = BTreeMap::from([("a".to_owned(), 3 * SECOND)]);
    node.shares.kept_busy(GPU, &busy, &launched(7), node.now);
    node.write();
    let found = node.found(&id("a"), said(&[]));
    let mut after = Node::empty(false);
    after.shares.adopt(id("a"), &found, 5 * SECOND);
    after.write();
    assert_eq!(
        after.limits("a").account,
        ComputeAccount {
            launches: 7,
            ..ComputeAccount::default()
        }
    );
}

/// The pod of such a file gets no share.
#[test]
fn files_of_a_later_version_stay_as_they_are() {
    let mut node = Node::empty(false);
    let found = ShareFound {
        limits: Err(UnreadableLimits::Newer(2)),
        usage: UsageReading::default(),
    };
    let error = node
        .shares
        .hold(id("a"), MiB(1000), 0, &found, node.now)
        .expect_err("refused")
        .to_string();
    assert!(
        error.contains("layout version 2") && error.contains("Delete the pod"),
        "{error}"
    );
    assert_eq!(node.shares.unwritten(), []);
    node.shares.adopt(id("a"), &found, node.now);
    assert_eq!(node.escapes("a"), []);
    assert_eq!(node.shares.unwritten(), []);
}

const OWNER: (u32, u32) = (0, 0);
/// While the overhead of the pod stays the same, a measurement reads the file once, not twice.
#[test]
fn a_file_is_read_once_while_overhead_is_stable() {
    let mut node = Node::new();
    let measure = |node: &mut Node, used, before: Option<u64>, after| {
        let read = |says| Readings::from_iter([(id("a"), said(&[runs(1, 0, says)]))]);
        assert_eq!(node.shares.read_twice().count(), usize::from(before.is_some()));
        node.measure_files(
            &[("a", &[runs(1, used, 0)])],
            &before.map(read).unwrap_or_default(),
            &read(after),
        );
        (node.limits("a").overhead + node.limits("a").context) / MEBIBYTE
    };
    for _ in 0..2 {
        measure(&mut node, 300, Some(100), 100);
    }
    // It allocates and frees memory between the measurements.
    for says in [100, 500, 0, 300] {
        assert_eq!(measure(&mut node, 200 + says, None, says), 200);
    }
    // It has a library more. Perhaps it has just freed memory.
    assert_eq!(measure(&mut node, 350, None, 100), 200);
    for expected in [200, 250] {
        assert_eq!(measure(&mut node, 350, Some(100), 100), expected);
    }
    // It frees memory after the driver was asked.
    assert_eq!(measure(&mut node, 350, None, 50), 250);
    for _ in 0..2 {
        assert_eq!(measure(&mut node, 350, Some(100), 50), 250);
    }
    // It has a library less.
    assert_eq!(measure(&mut node, 300, Some(100), 100), 200);
}

#[test]
fn one_reading_still_finds_a_process_without_a_slot() {
    let mut node = Node::new();
    let guarded = Readings::from_iter([(id("a"), said(&[runs(1, 0, 100)]))]);
    let mut measure = |processes: &[Runs]| {
        let read_twice = node.shares.read_twice().count() > 0;
        let before = if read_twice { guarded.clone() } else { Readings::default() };
        node.measure_files(&[("a", processes)], &before, &guarded);
        (read_twice, node.escapes("a").len())
    };
    let alone = [runs(1, 300, 100)];
    assert_eq!([(); 3].map(|()| measure(&alone)), [(true, 0), (true, 0), (false, 0)]);
    let unguarded = Runs {
        pid: 2,
        used: 50,
        says: None,
    };
    let two = [runs(1, 300, 100), unguarded];
    let found = [(); 4].map(|()| measure(&two));
    assert_eq!(found, [(false, 0), (true, 0), (true, 0), (true, 1)]);
}

#[test]
fn without_a_process_list_a_gpus_file_is_read_once() {
    let mut node = Node::new();
    node.shares
        .measured(&DriverReport::default(), &Readings::default(), &Readings::default(), node.now);
    assert_eq!(node.shares.read_twice().count(), 0);
}

const STATUS: FileStatus = FileStatus {
    size: usage::SIZE as u64,
    mode: USAGE_MODE,
    owner: OWNER,
};

fn read(status: FileStatus, bytes: &[u8]) -> UsageReading {
    UsageReading::of(status, bytes, OWNER, |_| Ok(()))
}

/// A file whose slots have all had an owner.
fn used() -> Vec<u8> {
    let mut bytes = usage::file().to_vec();
    bytes[24..32].copy_from_slice(&(usage::SLOTS as u64).to_ne_bytes());
    bytes
}

fn with(at: usize, word: u64) -> Vec<u8> {
    let mut bytes = used();
    bytes[at..at + 8].copy_from_slice(&word.to_ne_bytes());
    bytes
}

#[test]
fn a_file_no_agent_or_guard_makes_counts_as_changed() {
    let good = usage::file();
    assert_eq!(read(STATUS, &good).change, None);
    assert_eq!(read(STATUS, &with(64 + 16, 7)).change, None);
    for (status, bytes, change) in [
        (FileStatus { size: 7, ..STATUS }, good[..7].to_vec(), FileChange::Size(7)),
        (
            FileStatus { size: 1 << 40, ..STATUS },
            good.to_vec(),
            FileChange::Size(1 << 40),
        ),
        (FileStatus { mode: 0, ..STATUS }, good.to_vec(), FileChange::Mode(0)),
        (FileStatus { mode: 0o4666, ..STATUS }, good.to_vec(), FileChange::Mode(0o4666)),
        (
            FileStatus {
                owner: (1000, 0),
                ..STATUS
            },
            good.to_vec(),
            FileChange::Owner(1000, 0),
        ),
        (FileStatus { owner: (0, 5), ..STATUS }, good.to_vec(), FileChange::Owner(0, 5)),
        (STATUS, with(0, 1), FileChange::Head),
        (STATUS, with(8, 0), FileChange::Head),
        (STATUS, with(8, 9), FileChange::Version(9)),
        (STATUS, with(64 + 16, 1 << 40), FileChange::Number(1 << 40, 1 << 22)),
        (STATUS, with(24, 257), FileChange::Number(257, 256)),
    ] {
        assert_eq!(read(status, &bytes).change, Some(change));
    }
    // A larger file can be read nevertheless.
    let larger = FileStatus { size: 1 << 40, ..STATUS };
    assert!(read(larger, &good).slots.is_some());
}

#[test]
fn only_slots_with_an_owner_count() {
    let mut bytes = used();
    for (slot, used, pid) in [(0, 5_u64, 1_u64), (3, 7, 2), (7, 0, 4), (255, 11, 3)] {
        bytes[64 + slot * 64..][..8].copy_from_slice(&used.to_ne_bytes());
        bytes[64 + slot * 64 + 16..][..8].copy_from_slice(&pid.to_ne_bytes());
    }
    // One of them has nothing. The last one has a context, and so has a slot without an owner.
    for slot in [255, 100] {
        bytes[64 + slot * 64 + 48..][..8].copy_from_slice(&1_u64.to_ne_bytes());
    }
    let reading = UsageReading::of(STATUS, &bytes, OWNER, |slots| {
        assert_eq!(*slots, [0, 3, 7, 100, 255]);
        slots.retain(|slot| [3, 7, 255].contains(slot));
        Ok(())
    });
    let expected = InSlots {
        bytes: 18,
        contexts: 1,
        pids: [2, 3].into(),
    };
    assert_eq!(reading.slots, Some(expected));
    let reading = UsageReading::of(STATUS, &bytes, OWNER, |_| Err(FileChange::Locks));
    assert_eq!((reading.change, reading.slots), (Some(FileChange::Locks), None));
}

#[test]
fn slots_that_never_had_an_owner_are_not_looked_at() {
    let mut bytes = with(64 + 3 * 64 + 16, 7);
    bytes[24..32].copy_from_slice(&3_u64.to_ne_bytes());
    let looked_at = |bytes: &[u8]| {
        let mut looked_at: Vec<usize> = Vec::new();
        UsageReading::of(STATUS, bytes, OWNER, |slots| {
            looked_at.append(slots);
            Ok(())
        });
        looked_at
    };
    assert_eq!(looked_at(&bytes), [0; 0]);
    bytes[24] = 4;
    assert_eq!(looked_at(&bytes), [3]);
}
