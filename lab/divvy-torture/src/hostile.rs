//! Guarded pods on one GPU, of which one is hostile: it writes anything into its file of usage, changes the file, keeps it from being read, and uses the GPU
//! without the guard. The same history is played with it and without it, and what the agent says about the other pods must be the same.

use std::collections::{BTreeMap, BTreeSet};

use divvy_agent_core::{
    DriverReport, Escape, FileChange, FileStatus, GuardCounts, GuardedShares, PodProcess, Readings, ShareFound, ShareId,
    USAGE_MODE, UsageReading,
};
use divvy_model::MiB;
use divvy_share::limits::{ShareLimits, UnreadableLimits};
use divvy_share::usage;
use divvy_testkit::dice::Dice;

use crate::chance;
use crate::{BrokenInvariant, Violation};

const GPU: &str = "GPU-0";
const HOSTILE: &str = "hostile";
const HONEST: [&str; 3] = ["a", "b", "c"];
const SECOND: u64 = 1_000_000_000;
const MEBIBYTE: u64 = 1 << 20;
const OWNER: (u32, u32) = (0, 0);

/// What is seen of one pod in one second.
#[derive(Debug, Clone)]
struct SeenPod {
    before: Option<UsageReading>,
    after: Option<UsageReading>,
    processes: Vec<PodProcess>,
    busy: u64,
    /// A container of the pod starts, with this share in MiB and in percent.
    starts: Option<(u64, u32)>,
    /// The pod is gone afterwards.
    is_gone: bool,
}

/// What the agent says about pods.
type Says = (
    BTreeMap<ShareId, ShareLimits>,
    BTreeMap<String, Vec<Escape>>,
    BTreeMap<ShareId, GuardCounts>,
);

/// Play a history.
///
/// # Errors
/// The hostile pod changed what the agent says about another pod, or the agent accuses a pod that keeps to its share.
pub fn play(seed: u64) -> Result<(), BrokenInvariant> {
    let broken = |what: String| {
        let what = Violation(what);
        Err(BrokenInvariant { what, story: Vec::new() })
    };
    let mut chance = chance::of_history(seed ^ 0x5eed);
    // In some histories the honest pods keep what they have for so long that the agent reads their files less often.
    let quiet = if chance.one_in(4) { 2..16 } else { 0..0 };
    let seconds = 3 + chance.below(12) + quiet.len();
    let mut honest: Vec<Honest> = HONEST.iter().map(|pod| Honest::new(pod, &mut chance)).collect();
    let mut history: Vec<BTreeMap<String, SeenPod>> = Vec::new();
    for second in 0..seconds {
        history.push(
            honest
                .iter_mut()
                .map(|pod| (pod.name.clone(), pod.second(quiet.contains(&second), &mut chance)))
                .collect(),
        );
    }
    let may_stop = chance.one_in(2);
    let without = says(&history, &honest, may_stop);
    for second in &mut history {
        second.insert(HOSTILE.to_owned(), hostile(&mut chance));
    }
    let with = says(&history, &honest, may_stop);
    for (second, (with, without)) in with.iter().zip(&without).enumerate() {
        if with != without {
            return broken(format!(
                "a hostile pod changed what the agent says about others in second {second}: {with:?} instead of {without:?}"
            ));
        }
        if let Some((pod, escapes)) = with.1.iter().find(|(_, all)| all.iter().any(Escape::is_serious)) {
            return broken(format!(
                "pod {pod} keeps to its share, and the agent says in second {second}: {escapes:?}"
            ));
        }
        if let Some(pod) = honest.iter().find(|pod| with.0[&id(&pod.name)].bytes != pod.share * MEBIBYTE) {
            return broken(format!("pod {} does not have its share in second {second}", pod.name));
        }
    }
    Ok(())
}

fn says(history: &[BTreeMap<String, SeenPod>], honest: &[Honest], may_stop: bool) -> Vec<Says> {
    let mut shares = GuardedShares::new(may_stop);
    let mut files: BTreeMap<ShareId, ShareLimits> = BTreeMap::new();
    let mut now = 1000 * SECOND;
    let mut says = Vec::new();
    let hold = |shares: &mut GuardedShares,
                files: &mut BTreeMap<ShareId, ShareLimits>,
                pod: &str,
                (mib, cores),
                usage: UsageReading,
                now| {
        let id = id(pod);
        let limits = files.get(&id).copied().ok_or(UnreadableLimits::Foreign);
        let found = ShareFound { limits, usage };
        if let Ok(written) = shares.hold(id.clone(), MiB(mib), cores, &found, now) {
            shares.wrote(&id, written.limits);
            files.insert(id, written.limits);
        }
    };
    for pod in honest {
        hold(
            &mut shares,
            &mut files,
            &pod.name,
            (pod.share, pod.cores),
            UsageReading::default(),
            now,
        );
    }
    for second in history {
        now += SECOND;
        for (pod, seen) in second {
            if let Some(share) = seen.starts {
                hold(
                    &mut shares,
                    &mut files,
                    pod,
                    share,
                    seen.before.clone().unwrap_or_default(),
                    now,
                );
            }
        }
        let read_twice: BTreeSet<ShareId> = shares.read_twice().cloned().collect();
        let before = second.iter().map(|(pod, seen)| (id(pod), &seen.before));
        let before = before.filter(|(id, _)| read_twice.contains(id));
        let before: Readings = before.filter_map(|(id, reading)| Some((id, reading.clone()?))).collect();
        let after = second.iter().filter_map(|(pod, seen)| Some((id(pod), seen.after.clone()?)));
        let after: Readings = after.collect();
        let report = DriverReport {
            gpus: [GPU.to_owned()].into(),
            processes: second.values().flat_map(|seen| seen.processes.clone()).collect(),
        };
        shares.measured(&report, &before, &after, now);
        let busy = second.iter().map(|(pod, seen)| (pod.clone(), seen.busy)).collect();
        shares.kept_busy(GPU, &busy, &after, now);
        let mut escapes = shares.escapes();
        shares.stop(&escapes.keys().cloned().collect());
        for (id, written) in shares.unwritten() {
            shares.wrote(&id, written.limits);
            files.insert(id, written.limits);
        }
        for (pod, _) in second.iter().filter(|(_, seen)| seen.is_gone) {
            shares.forget(pod);
            files.remove(&id(pod));
        }
        let (mut written, mut counted) = (files.clone(), shares.counted());
        written.remove(&id(HOSTILE));
        escapes.remove(HOSTILE);
        counted.remove(&id(HOSTILE));
        says.push((written, escapes, counted));
    }
    says
}

/// A pod that keeps to its share: its processes make a context each, allocate, free, and end.
#[derive(Debug)]
struct Honest {
    name: String,
    share: u64,
    cores: u32,
    /// What a context takes.
    context: u64,
    /// Each process: its PID, its slot, and what it has allocated in MiB.
    processes: BTreeMap<u32, (usize, u64)>,
    next: u32,
}

impl Honest {
    fn new(name: &str, chance: &mut Dice) -> Honest {
        Honest {
            name: name.to_owned(),
            share: 2000 + chance.below(30_000) as u64,
            cores: [0, 30, 100][chance.below(3)],
            context: 100 + chance.below(400) as u64,
            processes: BTreeMap::new(),
            next: 1,
        }
    }

    fn second(&mut self, is_quiet: bool, chance: &mut Dice) -> SeenPod {
        let allocated: u64 = self.processes.values().map(|(_, mib)| mib).sum();
        // What is charged for a context, 512 MiB, or what it takes.
        let contexts = (self.processes.len() as u64 + 1) * self.context.max(512);
        let left = self.share.saturating_sub(allocated + contexts);
        match chance.below(4) {
            _ if is_quiet => {}
            0 if self.processes.len() < 3 && left > 0 => {
                // Any slots, but no slot twice: 7 and their number have no common divisor.
                let slot = usize::try_from(self.next).unwrap_or(0) * 7 % usage::SLOTS;
                self.processes.insert(self.next, (slot, 0));
                self.next += 1;
            }
            1 => {
                if let Some(mut process) = self.processes.first_entry() {
                    process.get_mut().1 += chance.below(usize::try_from(left).unwrap_or(0)) as u64;
                }
            }
            2 if chance.one_in(3) => drop(self.processes.pop_first()),
            _ => {}
        }
        let mut file = HostileFile::new();
        let mut processes = Vec::new();
        for (pid, (slot, mib)) in &self.processes {
            file.slot(*slot, mib * MEBIBYTE, u64::from(*pid));
            processes.push(process(&self.name, *pid, self.context + mib));
        }
        SeenPod {
            before: Some(file.read()),
            after: Some(file.read()),
            processes,
            busy: chance.number() % SECOND,
            starts: chance.one_in(8).then_some((self.share, self.cores)),
            is_gone: false,
        }
    }
}

/// A file of usage, and the slots that are locked.
struct HostileFile {
    bytes: Vec<u8>,
    status: FileStatus,
    locked: Vec<usize>,
}

impl HostileFile {
    /// A file whose slots have all had an owner.
    fn new() -> HostileFile {
        let mut bytes = usage::file().to_vec();
        bytes[24..32].copy_from_slice(&(usage::SLOTS as u64).to_ne_bytes());
        HostileFile {
            bytes,
            status: FileStatus {
                size: usage::SIZE as u64,
                mode: USAGE_MODE,
                owner: OWNER,
            },
            locked: Vec::new(),
        }
    }

    fn word(&mut self, index: usize, value: u64) {
        self.bytes[index * 8..][..8].copy_from_slice(&value.to_ne_bytes());
    }

    fn slot(&mut self, slot: usize, used: u64, pid: u64) {
        self.word(8 + slot * 8, used);
        self.word(8 + slot * 8 + 2, pid);
        self.word(8 + slot * 8 + 6, 1);
        self.locked.push(slot);
    }

    fn read(&self) -> UsageReading {
        UsageReading::of(self.status, &self.bytes, OWNER, |slots| {
            slots.retain(|slot| self.locked.contains(slot));
            Ok(())
        })
    }
}

fn hostile(chance: &mut Dice) -> SeenPod {
    let reading = |chance: &mut Dice| {
        let mut file = HostileFile::new();
        for _ in 0..chance.below(40) {
            let numbers = [0, 1, 7, 9, 1 << 22, 1 << 29, u64::MAX, chance.number()];
            file.word(chance.below(usage::SIZE / 8), numbers[chance.below(numbers.len())]);
        }
        if chance.one_in(3) {
            // The head as it was.
            file.bytes[..16].copy_from_slice(&usage::file()[..16]);
        }
        file.locked = (0..usage::SLOTS).filter(|_| chance.one_in(2)).collect();
        match chance.below(12) {
            0 => file.status.size = chance.number(),
            1 => file.status.mode = u32::try_from(chance.below(0o10000)).unwrap_or(0),
            2 => file.status.owner = (1000, 0),
            3 => file.bytes.truncate(chance.below(usage::SIZE)),
            4 => {
                return Some(UsageReading::unreadable(
                    [FileChange::Leased, FileChange::Locks, FileChange::Forbidden][chance.below(3)].clone(),
                ));
            }
            // It cannot be read in time.
            5 => return None,
            _ => {}
        }
        Some(file.read())
    };
    let processes = (0..chance.below(4)).map(|_| {
        let used = [0, 1, 500, 80_000, u64::MAX >> 20][chance.below(5)];
        process(HOSTILE, u32::try_from(1 + chance.below(40)).unwrap_or(1), used)
    });
    let processes = processes.collect();
    SeenPod {
        before: reading(chance),
        after: reading(chance),
        processes,
        busy: chance.number() % (5 * SECOND),
        starts: chance
            .one_in(3)
            .then(|| (chance.number() % 100_000, u32::try_from(chance.below(101)).unwrap_or(0))),
        is_gone: chance.one_in(20),
    }
}

fn process(pod: &str, pid: u32, used: u64) -> PodProcess {
    PodProcess {
        share: id(pod),
        pid: 4000 + pid,
        own_pid: Some(pid),
        used: MiB(used),
    }
}

fn id(pod: &str) -> ShareId {
    ShareId::new(pod, GPU)
}
