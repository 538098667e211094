//! A verdict on each GPU's health, from observations. The code has no side effects; `now` is a parameter in ms from any monotonic clock.
//!
//! A bad GPU becomes good again only after several good snapshots in a row over some time. Otherwise a GPU with an intermittent fault would
//! be offered to a pod each time that it reappears. If a GPU fails again soon after its recovery, the waiting time doubles.

use std::collections::BTreeMap;

use divvy_model::{Health, Vendor};

use crate::vendors::is_fault_name;
use crate::{Fault, NoEvents, Snapshot};

/// The conditions under which a failed GPU counts as recovered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecoverySettings {
    /// The number of consecutive good snapshots that a recovery requires.
    pub snapshots: u32,
    /// The time in ms that these snapshots must span.
    pub wait_ms: u64,
    /// The upper bound of the required time in ms, however often the GPU failed.
    pub longest_wait_ms: u64,
    /// The time in ms after which the earlier failures of a good GPU are forgotten.
    pub forget_ms: u64,
}

impl Default for RecoverySettings {
    fn default() -> RecoverySettings {
        RecoverySettings {
            snapshots: 3,
            wait_ms: 30_000,
            longest_wait_ms: 15 * 60_000,
            forget_ms: 60 * 60_000,
        }
    }
}

/// The time in ms after which a GPU fails whose errors cannot be received. A shorter interruption is normal: the probe makes a new event set
/// when waiting for events fails.
const NO_EVENTS_MS: u64 = 60_000;

/// An observation of one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Observation {
    /// A snapshot in which all calls about the GPU succeeded.
    Good,
    /// The driver reports the GPU as lost, or no longer lists it.
    Lost,
    /// The GPU is present, but a call about it failed with this text, or its errors cannot be received.
    Unreadable(String),
    /// A fatal fault with this name.
    Fault(String),
    /// No snapshot could be taken, or the driver's events have not arrived for a short time. This says nothing about the GPU, but it
    /// interrupts a series of good snapshots.
    Unknown,
}

/// The published health of a GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HealthVerdict {
    /// Whether pods may be placed on the GPU.
    pub health: Health,
    /// The reason for a bad state, such as `XID 79`. `None` while the GPU is good.
    pub reason: Option<String>,
}

/// The health state of one GPU.
#[derive(Debug, Clone, Default)]
pub struct GpuHealth {
    verdict: HealthVerdict,
    /// Whether the reason is the name of a fault. If it is, the reason stays when the GPU then becomes lost or
    /// unreadable, because the fault explains this.
    is_fault: bool,
    /// The number of consecutive good snapshots since the GPU went bad. `good_since` is the time of the first of them.
    good: u32,
    good_since: u64,
    /// The number of failures that followed too soon after a recovery.
    relapses: u32,
    recovered_at: Option<u64>,
}

impl GpuHealth {
    /// Return the current verdict.
    pub fn verdict(&self) -> &HealthVerdict {
        &self.verdict
    }

    /// Return the time in ms for which the GPU must stay good before it counts as recovered.
    pub fn wait_ms(&self, settings: &RecoverySettings) -> u64 {
        let factor = 1u64.checked_shl(self.relapses).unwrap_or(u64::MAX);
        let wait = settings.wait_ms.saturating_mul(factor);
        wait.min(settings.longest_wait_ms.max(settings.wait_ms))
    }

    /// Process an observation. Return whether the verdict changed.
    pub fn observe(&mut self, now: u64, observation: &Observation, settings: &RecoverySettings) -> bool {
        let bad = |health, reason: String| HealthVerdict {
            health,
            reason: Some(reason),
        };
        let verdict = match observation {
            Observation::Good => return self.good(now, settings),
            Observation::Unknown => {
                self.good = 0;
                return false;
            }
            // "Lost" says more than the fault that accompanies it.
            Observation::Fault(_) if self.verdict.health == Health::Lost => self.verdict.clone(),
            Observation::Fault(name) => {
                self.is_fault = true;
                bad(Health::Failed, name.clone())
            }
            Observation::Lost => {
                let fault = self.verdict.reason.as_ref().filter(|_| self.is_fault);
                let reason = fault.cloned().unwrap_or_else(|| "the driver no longer finds it".to_owned());
                bad(Health::Lost, reason)
            }
            // An earlier fault explains why the calls fail, so its reason stays.
            Observation::Unreadable(_) if self.verdict.health != Health::Ok => HealthVerdict {
                health: Health::Failed,
                ..self.verdict.clone()
            },
            Observation::Unreadable(text) => bad(Health::Failed, text.clone()),
        };
        if self.verdict.health == Health::Ok {
            let soon = |at: u64| now.saturating_sub(at) < settings.forget_ms;
            self.relapses = match self.recovered_at {
                Some(at) if soon(at) => self.relapses.saturating_add(1),
                _ => 0,
            };
        }
        self.good = 0;
        let changed = self.verdict != verdict;
        self.verdict = verdict;
        changed
    }

    fn good(&mut self, now: u64, settings: &RecoverySettings) -> bool {
        if self.verdict.health == Health::Ok {
            return false;
        }
        if self.good == 0 {
            self.good_since = now;
        }
        self.good = self.good.saturating_add(1);
        let lasted = now.saturating_sub(self.good_since);
        if self.good < settings.snapshots || lasted < self.wait_ms(settings) {
            return false;
        }
        self.verdict = HealthVerdict::default();
        self.is_fault = false;
        self.good = 0;
        self.recovered_at = Some(now);
        true
    }
}

/// All GPUs of a node, by UUID. If a known GPU is missing from a snapshot, it counts as lost until [`Tracker::forget`].
#[derive(Debug, Clone, Default)]
pub struct Tracker {
    settings: RecoverySettings,
    gpus: BTreeMap<String, Tracked>,
}

/// A GPU of the node. The vendor is stored because a fault can affect all GPUs of a vendor.
#[derive(Debug, Clone, Default)]
struct Tracked {
    vendor: Vendor,
    health: GpuHealth,
}

impl Tracker {
    /// Create a tracker without GPUs.
    pub fn new(settings: RecoverySettings) -> Tracker {
        Tracker {
            settings,
            gpus: BTreeMap::new(),
        }
    }

    /// Add a GPU and its verdict from an earlier run, as the node's inventory recorded them. As a result, a restart forgets neither a failure
    /// nor a missing GPU.
    pub fn recall(&mut self, vendor: Vendor, uuid: &str, verdict: HealthVerdict) {
        let gpu = self.gpus.entry(uuid.to_owned()).or_default();
        gpu.vendor = vendor;
        let gpu = &mut gpu.health;
        if gpu.verdict.health == Health::Ok {
            gpu.is_fault = verdict.reason.as_deref().is_some_and(|reason| is_fault_name(vendor, reason));
            gpu.verdict = verdict;
        }
    }

    /// Process a snapshot. Return the UUIDs of the GPUs whose verdict changed.
    pub fn snapshot(&mut self, now: u64, snapshot: &Snapshot) -> Vec<String> {
        for gpu in &snapshot.gpus {
            self.gpus.entry(gpu.uuid.clone()).or_default().vendor = gpu.vendor;
        }
        let mut seen: BTreeMap<&str, Observation> = self.gpus.keys().map(|uuid| (uuid.as_str(), Observation::Lost)).collect();
        for gpu in &snapshot.gpus {
            let observation = match (&gpu.error, gpu.lost) {
                (_, true) => Observation::Lost,
                (Some(error), false) => Observation::Unreadable(error.clone()),
                (None, false) => match &gpu.no_events {
                    None => Observation::Good,
                    Some(NoEvents { ms, .. }) if *ms < NO_EVENTS_MS => Observation::Unknown,
                    Some(NoEvents { error, .. }) => {
                        Observation::Unreadable(format!("errors of this GPU cannot be received ({error})"))
                    }
                },
            };
            seen.insert(&gpu.uuid, observation);
        }
        let seen: Vec<_> = seen
            .into_iter()
            .map(|(uuid, observation)| (uuid.to_owned(), observation))
            .collect();
        seen.into_iter()
            .filter_map(|(uuid, what)| self.observe(now, uuid, &what))
            .collect()
    }

    /// Process a fault of one GPU, or of all GPUs of its vendor. Return the UUIDs of the GPUs whose verdict changed.
    pub fn fault(&mut self, now: u64, fault: &Fault) -> Vec<String> {
        if !fault.fatal {
            return Vec::new();
        }
        let hit: Vec<String> = match &fault.uuid {
            Some(uuid) => {
                self.gpus.entry(uuid.clone()).or_default().vendor = fault.vendor;
                vec![uuid.clone()]
            }
            None => {
                let of_vendor = self.gpus.iter().filter(|(_, gpu)| gpu.vendor == fault.vendor);
                of_vendor.map(|(uuid, _)| uuid.clone()).collect()
            }
        };
        let what = Observation::Fault(fault.name.clone());
        hit.into_iter().filter_map(|uuid| self.observe(now, uuid, &what)).collect()
    }

    /// Process a failed snapshot.
    pub fn unavailable(&mut self, now: u64) {
        for gpu in self.gpus.values_mut() {
            gpu.health.observe(now, &Observation::Unknown, &self.settings);
        }
    }

    /// Forget a GPU that is not a GPU any more, such as a MIG device that was destroyed.
    pub fn forget(&mut self, uuid: &str) {
        self.gpus.remove(uuid);
    }

    /// Return the verdict on a GPU, or `None` if the GPU is unknown.
    pub fn verdict(&self, uuid: &str) -> Option<&HealthVerdict> {
        self.gpus.get(uuid).map(|gpu| gpu.health.verdict())
    }

    /// Return all verdicts, by UUID.
    pub fn verdicts(&self) -> impl Iterator<Item = (&str, &HealthVerdict)> {
        self.gpus.iter().map(|(uuid, gpu)| (uuid.as_str(), gpu.health.verdict()))
    }

    fn observe(&mut self, now: u64, uuid: String, observation: &Observation) -> Option<String> {
        let settings = self.settings;
        let gpu = self.gpus.entry(uuid.clone()).or_default();
        gpu.health.observe(now, observation, &settings).then_some(uuid)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{GpuFacts, NoEvents, SNAPSHOT_VERSION};

    const SETTINGS: RecoverySettings = RecoverySettings {
        snapshots: 3,
        wait_ms: 30_000,
        longest_wait_ms: 200_000,
        forget_ms: 3_600_000,
    };

    fn xid(number: u64) -> Observation {
        Observation::Fault(format!("XID {number}"))
    }

    fn health(gpu: &GpuHealth) -> (Health, Option<&str>) {
        (gpu.verdict.health, gpu.verdict.reason.as_deref())
    }

    /// Observe good snapshots every 5 s until the GPU recovers. Return the time from `from` to the recovery.
    fn recover(gpu: &mut GpuHealth, from: u64) -> u64 {
        let times = (from..).step_by(5000);
        times
            .take(1000)
            .find(|now| gpu.observe(*now, &Observation::Good, &SETTINGS))
            .expect("recovery")
            - from
    }

    /// The GPU recovers if all snapshots during the whole wait are good.
    #[test]
    fn a_fatal_fault_fails_a_gpu_at_once() {
        let mut gpu = GpuHealth::default();
        assert!(gpu.observe(0, &xid(79), &SETTINGS));
        assert_eq!(health(&gpu), (Health::Failed, Some("XID 79")));
        assert_eq!(recover(&mut gpu, 1000), 30_000);
        assert_eq!(health(&gpu), (Health::Ok, None));
    }

    fn fault(vendor: Vendor, uuid: Option<&str>, fatal: bool, name: &str) -> Fault {
        Fault {
            vendor,
            uuid: uuid.map(str::to_owned),
            code: 1,
            fatal,
            name: name.to_owned(),
            partition: None,
        }
    }

    #[test]
    fn a_harmless_fault_changes_nothing() {
        let mut tracker = Tracker::new(SETTINGS);
        tracker.snapshot(0, &snapshot(&[("GPU-a", false)]));
        for uuid in [None, Some("GPU-a"), Some("GPU-b")] {
            assert_eq!(tracker.fault(1, &fault(Vendor::Nvidia, uuid, false, "XID 31")), [""; 0]);
        }
        let verdicts: Vec<_> = tracker.verdicts().collect();
        assert_eq!(verdicts, [("GPU-a", &HealthVerdict::default())]);
    }

    #[test]
    fn a_fault_without_a_gpu_hits_the_gpus_of_its_vendor_alone() {
        let mut both = snapshot(&[("GPU-a", false), ("0x1", false)]);
        both.gpus[1].vendor = Vendor::Amd;
        let mut tracker = Tracker::new(SETTINGS);
        tracker.snapshot(0, &both);
        let all = |vendor, name| fault(vendor, None, true, name);
        assert_eq!(tracker.fault(1, &all(Vendor::Amd, "uncorrectable memory error")), ["0x1"]);
        assert_eq!(tracker.fault(2, &all(Vendor::Nvidia, "XID 79")), ["GPU-a"]);
        let reason = |uuid| tracker.verdict(uuid).and_then(|verdict| verdict.reason.as_deref());
        assert_eq!(
            (reason("0x1"), reason("GPU-a")),
            (Some("uncorrectable memory error"), Some("XID 79"))
        );
    }

    /// If the GPU is lost later, only the name of the fault stays as the reason.
    #[test]
    fn only_a_faults_name_outlasts_the_gpus_loss() {
        for (vendor, before, after) in [
            (Vendor::Nvidia, "XID 79", "XID 79"),
            (Vendor::Nvidia, "MIG mode is on", "the driver no longer finds it"),
            (Vendor::Amd, "uncorrectable memory error", "uncorrectable memory error"),
            (Vendor::Amd, "XID 79", "the driver no longer finds it"),
        ] {
            let mut tracker = Tracker::new(SETTINGS);
            let failed = HealthVerdict {
                health: Health::Failed,
                reason: Some(before.to_owned()),
            };
            tracker.recall(vendor, "GPU-a", failed);
            assert_eq!(tracker.snapshot(0, &snapshot(&[])), ["GPU-a"]);
            let verdict = tracker.verdict("GPU-a").expect("known");
            assert_eq!(
                (verdict.health, verdict.reason.as_deref()),
                (Health::Lost, Some(after)),
                "{vendor}: {before}"
            );
        }
    }

    #[test]
    fn a_lost_gpu_keeps_the_fault_that_it_was_lost_with() {
        let mut gpu = GpuHealth::default();
        gpu.observe(0, &xid(79), &SETTINGS);
        gpu.observe(1, &Observation::Lost, &SETTINGS);
        assert_eq!(health(&gpu), (Health::Lost, Some("XID 79")));
        gpu.observe(2, &xid(119), &SETTINGS);
        assert_eq!(gpu.verdict.health, Health::Lost);
        let mut other = GpuHealth::default();
        other.observe(0, &Observation::Lost, &SETTINGS);
        assert_eq!(health(&other), (Health::Lost, Some("the driver no longer finds it")));
    }

    #[test]
    fn recovery_takes_enough_snapshots_and_enough_time() {
        let mut gpu = GpuHealth::default();
        gpu.observe(0, &Observation::Lost, &SETTINGS);
        for now in 1..100 {
            assert!(!gpu.observe(now, &Observation::Good, &SETTINGS));
        }
        let mut gpu = GpuHealth::default();
        gpu.observe(0, &Observation::Lost, &SETTINGS);
        assert!(!gpu.observe(1, &Observation::Good, &SETTINGS));
        assert!(!gpu.observe(100_000, &Observation::Good, &SETTINGS));
        assert!(gpu.observe(100_001, &Observation::Good, &SETTINGS));
    }

    #[test]
    fn a_gap_or_another_error_starts_the_wait_anew() {
        for interruption in [Observation::Unknown, xid(48), Observation::Unreadable("x".to_owned())] {
            let mut gpu = GpuHealth::default();
            gpu.observe(0, &xid(79), &SETTINGS);
            for now in [0, 10_000, 29_000] {
                assert!(!gpu.observe(now, &Observation::Good, &SETTINGS));
            }
            gpu.observe(29_500, &interruption, &SETTINGS);
            assert_eq!(recover(&mut gpu, 30_000), 30_000, "{interruption:?}");
        }
    }

    /// The wait has an upper limit, and after a quiet time it is short again.
    #[test]
    fn a_flapping_gpu_waits_twice_as_long_each_time() {
        let mut gpu = GpuHealth::default();
        let mut now = 0;
        let mut waits = Vec::new();
        for _ in 0..5 {
            gpu.observe(now, &xid(79), &SETTINGS);
            let wait = recover(&mut gpu, now);
            waits.push(wait);
            now += wait + 1000;
        }
        assert_eq!(waits, [30_000, 60_000, 120_000, 200_000, 200_000]);
        now += SETTINGS.forget_ms;
        gpu.observe(now, &xid(79), &SETTINGS);
        assert_eq!(recover(&mut gpu, now), 30_000);
    }

    fn snapshot(gpus: &[(&str, bool)]) -> Snapshot {
        let gpus = gpus.iter().map(|(uuid, lost)| GpuFacts {
            uuid: (*uuid).to_owned(),
            lost: *lost,
            error: lost.then(|| "lost".to_owned()),
            ..GpuFacts::default()
        });
        Snapshot {
            v: SNAPSHOT_VERSION,
            drivers: BTreeMap::new(),
            gpus: gpus.collect(),
            unreadable: Vec::new(),
        }
    }

    /// The GPU fails after a minute, and recovers like any other GPU.
    #[test]
    fn a_gpu_whose_errors_cannot_arrive_fails() {
        let mut tracker = Tracker::new(SETTINGS);
        let all = |no_events: Option<u64>| {
            let mut all = snapshot(&[("GPU-a", false), ("GPU-b", false)]);
            let error = "cannot create an event set".to_owned();
            all.gpus[0].no_events = no_events.map(|ms| NoEvents { error, ms });
            all
        };
        let none = Vec::<String>::new();
        tracker.snapshot(0, &all(None));
        for ms in [1, 30_000, 59_999] {
            assert_eq!(tracker.snapshot(ms, &all(Some(ms))), none, "a short interruption");
        }
        assert_eq!(tracker.snapshot(60_000, &all(Some(60_000))), ["GPU-a"]);
        let failed = HealthVerdict {
            health: Health::Failed,
            reason: Some("errors of this GPU cannot be received (cannot create an event set)".to_owned()),
        };
        assert_eq!(tracker.verdict("GPU-a"), Some(&failed));
        assert_eq!(tracker.snapshot(90_000, &all(Some(90_000))), none, "it is said once");
        for now in [100_000, 115_000] {
            assert_eq!(tracker.snapshot(now, &all(None)), none);
        }
        // Another short interruption starts the wait again.
        assert_eq!(tracker.snapshot(130_000, &all(Some(1))), none);
        for now in [140_000, 155_000] {
            assert_eq!(tracker.snapshot(now, &all(None)), none);
        }
        assert_eq!(tracker.snapshot(170_000, &all(None)), ["GPU-a"]);
        assert_eq!(tracker.verdict("GPU-a"), Some(&HealthVerdict::default()));
    }

    #[test]
    fn only_a_gpu_missing_in_the_list_is_lost() {
        let mut tracker = Tracker::new(SETTINGS);
        assert!(
            tracker
                .snapshot(0, &snapshot(&[("GPU-a", false), ("GPU-b", false)]))
                .is_empty()
        );
        assert_eq!(tracker.snapshot(1, &snapshot(&[("GPU-b", false)])), ["GPU-a"]);
        assert_eq!(tracker.verdict("GPU-a").expect("known").health, Health::Lost);
        assert_eq!(tracker.verdict("GPU-b").expect("known").health, Health::Ok);
        assert_eq!(
            tracker.fault(2, &fault(Vendor::Nvidia, None, true, "XID 79")),
            ["GPU-b"],
            "of all, and GPU-a is lost already"
        );
    }

    #[test]
    fn a_failure_of_an_earlier_run_is_not_forgotten() {
        let mut tracker = Tracker::new(SETTINGS);
        let failed = HealthVerdict {
            health: Health::Failed,
            reason: Some("XID 79".to_owned()),
        };
        tracker.recall(Vendor::Nvidia, "GPU-a", failed.clone());
        tracker.snapshot(0, &snapshot(&[("GPU-a", false)]));
        assert_eq!(tracker.verdict("GPU-a"), Some(&failed));
        tracker.snapshot(15_000, &snapshot(&[("GPU-a", false)]));
        assert_eq!(tracker.snapshot(30_000, &snapshot(&[("GPU-a", false)])), ["GPU-a"]);
    }

    fn observation() -> impl Strategy<Value = Observation> {
        prop_oneof![
            4 => Just(Observation::Good),
            1 => Just(Observation::Lost),
            1 => Just(Observation::Unreadable("x".to_owned())),
            1 => Just(xid(79)),
            1 => Just(Observation::Unknown),
        ]
    }

    proptest! {
        /// The GPU is never ok while the last observation is bad, and always ok after enough good ones.
        #[test]
        fn a_gpu_is_ok_only_after_enough_good_observations(
            steps in proptest::collection::vec((observation(), 0u64..100_000), 0..200),
        ) {
            let mut gpu = GpuHealth::default();
            let mut now = 0;
            let mut last_bad = false;
            let mut streak = (0, 0);
            for (observation, step) in steps {
                now += step;
                let before = gpu.verdict.clone();
                let changed = gpu.observe(now, &observation, &SETTINGS);
                prop_assert_eq!(changed, before != gpu.verdict);
                match observation {
                    Observation::Good => {
                        last_bad = false;
                        streak = if streak.0 == 0 { (1, now) } else { (streak.0 + 1, streak.1) };
                    }
                    Observation::Unknown => streak = (0, 0),
                    _ => { last_bad = true; streak = (0, 0); }
                }
                if last_bad {
                    prop_assert_ne!(gpu.verdict.health, Health::Ok);
                }
                if before.health != Health::Ok && gpu.verdict.health == Health::Ok {
                    prop_assert!(streak.0 >= SETTINGS.snapshots && now - streak.1 >= SETTINGS.wait_ms);
                }
                prop_assert_eq!(gpu.verdict.reason.is_some(), gpu.verdict.health != Health::Ok);
            }
            for _ in 0..4 {
                now += SETTINGS.longest_wait_ms / 3 + 1;
                gpu.observe(now, &Observation::Good, &SETTINGS);
            }
            prop_assert_eq!(gpu.verdict.health, Health::Ok);
        }
    }
}
