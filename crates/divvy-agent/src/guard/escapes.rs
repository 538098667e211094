//! Signs that programs of guarded pods are not held to their share.

use std::collections::{BTreeMap, BTreeSet};

use divvy_agent_core::Escape;
use divvy_hardware::GpuProcesses;
use divvy_hardware::protocol::Kill;
use divvy_model::MiB;

use super::compute::timed;
use super::{Damage, Known, Said, Share, Shares, in_bytes, limits_in};
use crate::memory_in_use::memory_in_use;

/// A sign counts if this many measurements in a row show it. A process that starts or ends can look like one that avoids the guard.
const LASTING: u8 = 3;

/// What the measurements have shown so far.
#[derive(Debug, Default)]
pub(super) struct Signs {
    /// Processes without a slot, by pod, GPU, and PID on the host: in how many measurements. The pod may have no share of this GPU.
    unguarded: BTreeMap<(Share, u32), u8>,
    /// Shares of which the pod has too much: in how many measurements, how much in bytes, and the share in bytes.
    exceeded: BTreeMap<Share, (u8, u64, u64)>,
    /// Shares whose file was changed: in how many measurements, and what is wrong with the file.
    changed: BTreeMap<Share, (u8, String)>,
    /// Shares with processes that got no slot.
    crowded: BTreeSet<Share>,
    /// GPUs whose driver does not report the busy time of processes, and what it says.
    untimed: BTreeMap<String, String>,
}

impl Signs {
    /// Take the result of reading a share's file.
    pub(super) fn changed(&mut self, share: &Share, damage: Option<&Damage>) {
        match damage {
            Some(Damage::Changed(text)) => {
                let (times, last) = self.changed.entry(share.clone()).or_default();
                *times = times.saturating_add(1);
                last.clone_from(text);
            }
            // What has lasted is still reported when the file looks right again: its content may be wrong.
            None if self.changed.get(share).is_some_and(|(times, _)| *times < LASTING) => drop(self.changed.remove(share)),
            Some(Damage::Other(_)) | None => {}
        }
    }

    /// A container of the pod starts, and the file is as it should be.
    pub(super) fn starts(&mut self, share: &Share) {
        self.changed.remove(share);
    }

    pub(super) fn forget(&mut self, uid: &str) {
        self.unguarded.retain(|((of, _), _), _| of != uid);
        self.exceeded.retain(|(of, _), _| of != uid);
        self.changed.retain(|(of, _), _| of != uid);
        self.crowded.retain(|(of, _)| of != uid);
    }
}

impl Shares {
    /// Compare the driver's processes with the slots. `before` and `after` were read before and after the driver was asked.
    pub(crate) fn watch(&self, gpus: &[GpuProcesses], before: &Said, after: &Said) {
        let mut known = self.known();
        let pods: BTreeSet<String> = known.shares.keys().map(|(uid, _)| uid.clone()).collect();
        let mut unguarded = BTreeMap::new();
        for gpu in gpus.iter().filter(|gpu| gpu.error.is_none()) {
            for process in gpu.processes.iter().filter(|process| process.used > MiB::ZERO) {
                let (Some(uid), Some(own_pid)) = (&process.pod, process.own_pid) else {
                    continue;
                };
                let share = (uid.clone(), gpu.uuid.clone());
                let slots = [before.get(&share), after.get(&share)];
                let is_known = match known.shares.contains_key(&share) {
                    true => slots.iter().all(Option::is_some),
                    false => pods.contains(uid),
                };
                if is_known && !slots.iter().flatten().any(|slots| slots.pids.contains(&u64::from(own_pid))) {
                    let key = (share, process.pid);
                    let times = known.signs.unguarded.get(&key).copied().unwrap_or(0).saturating_add(1);
                    unguarded.insert(key, times);
                }
            }
        }
        known.signs.unguarded = unguarded;
        known.signs.exceeded = self.exceeded(&known, gpus, after);
        let crowded = after.iter().filter(|(_, slots)| slots.is_crowded);
        known.signs.crowded = crowded.map(|(share, _)| share.clone()).collect();
    }

    /// Return the shares of which pods have more than a twentieth too much. What processes may have taken for contexts before the agent knew how much
    /// that is does not count.
    fn exceeded(&self, known: &Known, gpus: &[GpuProcesses], after: &Said) -> BTreeMap<Share, (u8, u64, u64)> {
        let mut exceeded = BTreeMap::new();
        for (uuid, pods) in memory_in_use(gpus) {
            // Without one, what a context takes is not known, and a single process may just have made one.
            let Some(context) = known.contexts.get(&uuid) else { continue };
            for (uid, used) in pods {
                let share = (uid, uuid.clone());
                let Some(limits) = known.shares.get(&share).and_then(|_| limits_in(&self.directory(&share))) else {
                    continue;
                };
                let processes = after.get(&share).map_or(1, |slots| slots.processes.max(1)) as u64;
                let not_charged = context.saturating_sub(limits.context).saturating_mul(processes);
                let most = limits.bytes.saturating_add(limits.bytes / 20).saturating_add(not_charged);
                let used = in_bytes(used);
                if used > most {
                    let times = known.signs.exceeded.get(&share).map_or(0, |(times, ..)| *times);
                    exceeded.insert(share, (times.saturating_add(1), used, limits.bytes));
                }
            }
        }
        exceeded
    }

    /// Take whether the driver reports the busy time of processes on a GPU; if not, what it says.
    pub(crate) fn timed(&self, uuid: &str, refusal: Option<String>) {
        let untimed = &mut self.known().signs.untimed;
        match refusal {
            Some(text) => drop(untimed.insert(uuid.to_owned(), text)),
            None => drop(untimed.remove(uuid)),
        }
    }

    /// Return the signs that have lasted, by pod UID.
    pub(crate) fn escapes(&self) -> BTreeMap<String, Vec<Escape>> {
        let known = self.known();
        let unguarded = known.signs.unguarded.iter().filter(|(_, times)| **times >= LASTING);
        let unguarded = unguarded.map(|(((uid, uuid), pid), _)| {
            let is_share = known.shares.contains_key(&(uid.clone(), uuid.clone()));
            let (uuid, pid) = (uuid.clone(), *pid);
            let escape = match is_share {
                true => Escape::Unguarded { uuid, pid },
                false => Escape::NotGranted { uuid, pid },
            };
            (uid, escape)
        });
        let exceeded = known.signs.exceeded.iter().filter(|(_, (times, ..))| *times >= LASTING);
        let exceeded = exceeded.map(|((uid, uuid), (_, used, share))| {
            let [used, share] = [used, share].map(|bytes| MiB(bytes >> 20));
            let uuid = uuid.clone();
            (uid, Escape::Exceeded { uuid, used, share })
        });
        let changed = known.signs.changed.iter().filter(|(_, (times, _))| *times >= LASTING);
        let changed = changed.map(|((uid, uuid), (_, text))| {
            let (uuid, text) = (uuid.clone(), text.clone());
            (uid, Escape::Tampered { uuid, text })
        });
        let crowded = known.signs.crowded.iter();
        let crowded = crowded.map(|(uid, uuid)| (uid, Escape::Crowded { uuid: uuid.clone() }));
        let untimed = known.shares.keys().filter_map(|share| {
            let (uid, uuid) = share;
            let text = known.signs.untimed.get(uuid)?;
            timed(&self.directory(share))?;
            let (uuid, text) = (uuid.clone(), text.clone());
            Some((uid, Escape::Untimed { uuid, text }))
        });
        let mut by_pod: BTreeMap<String, Vec<Escape>> = BTreeMap::new();
        for (uid, escape) in unguarded.chain(exceeded).chain(changed).chain(crowded).chain(untimed) {
            by_pod.entry(uid.clone()).or_default().push(escape);
        }
        by_pod
    }
}

/// Return the pods of which a program uses more than it was granted, or can, by their UIDs.
pub(crate) fn escaped(escapes: &BTreeMap<String, Vec<Escape>>) -> BTreeSet<String> {
    let serious = escapes.iter().filter(|(_, all)| all.iter().any(Escape::is_serious));
    serious.map(|(uid, _)| uid.clone()).collect()
}

/// Return the processes that do this: those without a slot, and on the GPU all processes of a pod that changed its file or has too much memory.
pub(crate) fn processes_of(escapes: &BTreeMap<String, Vec<Escape>>, gpus: &[GpuProcesses]) -> Vec<Kill> {
    let is_meant = |escape: &Escape, pid: u32| match escape {
        Escape::Unguarded { pid: unguarded, .. } | Escape::NotGranted { pid: unguarded, .. } => pid == *unguarded,
        Escape::Tampered { .. } | Escape::Exceeded { .. } => true,
        Escape::Crowded { .. } | Escape::Untimed { .. } => false,
    };
    let mut pids: BTreeSet<(&str, u32)> = BTreeSet::new();
    for (uid, all) in escapes {
        for escape in all {
            let gpus = gpus.iter().filter(|gpu| gpu.uuid == escape.uuid());
            let processes = gpus.flat_map(|gpu| &gpu.processes);
            let own = processes.filter(|process| process.pod.as_ref() == Some(uid) && is_meant(escape, process.pid));
            pids.extend(own.map(|process| (uid.as_str(), process.pid)));
        }
    }
    let kill = |(pod, pid): (&str, u32)| Kill {
        pid,
        pod: pod.to_owned(),
    };
    pids.into_iter().map(kill).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;

    use divvy_hardware::Process;

    use super::super::tests::{Bed, GPU, share_of};
    use super::*;

    impl Bed {
        /// Measure once. The driver lists these processes of the pod: PID on the host, PID in the container.
        fn watch(&self, processes: &[(u32, u32)]) -> Vec<Escape> {
            let said = self.shares.said();
            self.shares.watch(&[Self::listed(processes)], &said, &said);
            self.shares.escapes().remove("a").unwrap_or_default()
        }

        fn killed(&self, processes: &[(u32, u32)]) -> Vec<u32> {
            let killed = processes_of(&self.shares.escapes(), &[Self::listed(processes)]);
            assert!(killed.iter().all(|kill| kill.pod == "a"), "{killed:?}");
            killed.into_iter().map(|kill| kill.pid).collect()
        }

        fn listed(processes: &[(u32, u32)]) -> GpuProcesses {
            let process = |(pid, own_pid): &(u32, u32)| Process {
                pid: *pid,
                used: MiB(300),
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
    }

    fn unguarded(pid: u32) -> Escape {
        Escape::Unguarded {
            uuid: GPU.to_owned(),
            pid,
        }
    }

    #[test]
    fn a_process_that_uses_the_gpu_without_a_slot_is_named_if_it_stays() {
        let bed = Bed::new();
        let slot = bed.process(2, 100);
        slot.write_all_at(&7_u64.to_ne_bytes(), 64 + 2 * 64 + 16).expect("its PID");
        for _ in 0..9 {
            assert_eq!(bed.watch(&[(4007, 7)]), [], "it has a slot");
        }
        for expected in [vec![], vec![], vec![unguarded(4008)], vec![unguarded(4008)]] {
            assert_eq!(bed.watch(&[(4007, 7), (4008, 8)]), expected);
        }
        assert_eq!(bed.killed(&[(4007, 7), (4008, 8)]), [4008]);
        assert_eq!(bed.watch(&[(4007, 7)]), [], "it has ended");
        assert_eq!(bed.watch(&[(4007, 7), (4008, 8)]), [], "another one");
        // The owner of the slot has ended, and a process with its PID avoids the guard.
        drop(slot);
        for _ in 0..2 {
            bed.watch(&[(4009, 7)]);
        }
        assert_eq!(bed.watch(&[(4009, 7)]), [unguarded(4009)]);
        bed.shares.clear(&["a".to_owned()].into());
        assert_eq!(bed.shares.escapes(), BTreeMap::new());
    }

    #[test]
    fn a_process_on_a_gpu_of_which_its_pod_has_no_share_is_named_and_one_of_a_pod_without_shares_is_not() {
        let bed = Bed::new();
        let elsewhere = |pod: &str| GpuProcesses {
            uuid: "GPU-2".to_owned(),
            processes: vec![Process {
                pid: 4711,
                used: MiB(300),
                pod: Some(pod.to_owned()),
                container: None,
                own_pid: Some(7),
                kind: None,
                program: None,
            }],
            error: None,
        };
        let said = bed.shares.said();
        for _ in 0..3 {
            bed.shares.watch(&[elsewhere("a"), elsewhere("monitoring")], &said, &said);
        }
        let not_granted = Escape::NotGranted {
            uuid: "GPU-2".to_owned(),
            pid: 4711,
        };
        let escapes = bed.shares.escapes();
        assert_eq!(escapes, BTreeMap::from([("a".to_owned(), vec![not_granted])]));
        assert_eq!(escaped(&escapes), ["a".to_owned()].into());
        assert_eq!(processes_of(&escapes, &[elsewhere("a")]).len(), 1);
    }

    /// Pods have 1,000 MiB, of which a context takes 300. At most a quarter of the share is charged for it.
    #[test]
    fn a_pod_has_too_much_if_its_contexts_do_not_explain_it() {
        for (known, processes, used, named) in [
            (true, 1, 1100, false),
            (true, 1, 1101, true),
            (true, 2, 1150, false),
            (true, 2, 1151, true),
            (false, 1, 9000, false),
        ] {
            let bed = Bed::new();
            if known {
                bed.shares.known().contexts.insert(GPU.to_owned(), 300 << 20);
                bed.shares.hold("a", &share_of(1000)).expect("written");
            }
            let slots: Vec<_> = (0..processes).map(|slot| bed.process(slot, 100)).collect();
            let mut of = Bed::listed(&[(4007, 0)]);
            of.processes[0].used = MiB(used);
            let said = bed.shares.said();
            let mut times = 0;
            for _ in 0..4 {
                bed.shares.watch(std::slice::from_ref(&of), &said, &said);
                let escapes = bed.shares.escapes();
                times += u32::from(!escapes.is_empty());
                for escape in escapes.values().flatten() {
                    let (used, share) = (MiB(used), MiB(1000));
                    let uuid = GPU.to_owned();
                    assert_eq!(*escape, Escape::Exceeded { uuid, used, share });
                }
            }
            assert_eq!(times, if named { 2 } else { 0 }, "{known} {processes} {used}");
            assert_eq!(bed.killed(&[(4007, 0)]), if named { vec![4007] } else { vec![] });
            // It has less.
            of.processes[0].used = MiB(1000);
            bed.shares.watch(&[of], &said, &said);
            assert_eq!(bed.shares.escapes(), BTreeMap::new());
            drop(slots);
        }
    }

    #[test]
    fn a_pod_with_more_processes_than_slots_and_one_whose_compute_time_the_driver_does_not_report_are_named() {
        let bed = Bed::new();
        let uuid = GPU.to_owned();
        let mut file = divvy_share::usage::file();
        file[16..24].copy_from_slice(&1_u64.to_ne_bytes());
        std::fs::write(bed.path(divvy_share::USAGE), file).expect("written");
        assert_eq!(bed.watch(&[]), [Escape::Crowded { uuid: uuid.clone() }]);
        std::fs::write(bed.path(divvy_share::USAGE), divvy_share::usage::file()).expect("written");

        bed.shares.timed(GPU, Some("not supported".to_owned()));
        assert_eq!(bed.watch(&[]), [], "the pod has no share of the compute time");
        let [share] = share_of(1000);
        bed.shares
            .hold("a", &[divvy_agent_core::Guarded { cores: 30, ..share }])
            .expect("written");
        let text = "not supported".to_owned();
        assert_eq!(bed.watch(&[]), [Escape::Untimed { uuid, text }]);
        bed.shares.timed(GPU, None);
        assert_eq!(bed.watch(&[]), []);
    }

    #[test]
    fn a_file_that_a_program_has_changed_is_named_and_one_of_a_later_agent_is_not() {
        let bed = Bed::new();
        let path = bed.path(divvy_share::USAGE);
        let whole = std::fs::read(&path).expect("read");
        std::fs::write(&path, [0; 7]).expect("changed");
        assert_eq!((bed.watch(&[]), bed.watch(&[])), (vec![], vec![]));
        let [Escape::Tampered { text, .. }] = &bed.watch(&[(4007, 7)])[..] else {
            panic!("it is reported, and no process, because the slots cannot be read");
        };
        assert!(text.contains("a program in the pod changed it"), "{text}");
        assert_eq!(bed.killed(&[(4007, 7), (4008, 8)]), [4007, 4008]);
        std::fs::write(&path, &whole).expect("written");
        assert_eq!(bed.watch(&[]).len(), 1, "its numbers may be wrong");
        std::fs::write(&path, [0; 7]).expect("changed");
        bed.shares.hold("a", &share_of(1000)).expect("the container starts again");
        assert_eq!(std::fs::read(&path).expect("read"), whole);
        for _ in 0..9 {
            assert_eq!(bed.watch(&[]), []);
        }

        let bed = Bed::new();
        let mut later = whole;
        later[8] = 9;
        std::fs::write(bed.path(divvy_share::USAGE), later).expect("written");
        for _ in 0..9 {
            assert_eq!(bed.watch(&[(4007, 7)]), []);
        }
    }
}
