//! The agent's shell: the real decisions over a disk in memory.

use std::collections::{BTreeMap, BTreeSet};

use divvy_agent::decide::{
    Action, Core, Facts, Handout, Key, NodeFiles, NodeKey, PreStart, Reconciled, Resource, Settings, owner_of_spec,
};
use divvy_container::cdi;
use divvy_model::{Gpu, GrantRecord, Held, MemoryUnit, MiB, Pod, names};

use super::api::{Api, PodWatch, Seen};
use super::story::{Story, ensure};

/// The agent's files, and what the kernel says: what outlives the process.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Disk {
    pub(crate) records: BTreeMap<Key, GrantRecord>,
    pub(crate) specs: BTreeMap<String, String>,
}

impl Disk {
    /// As `Store::perform`.
    fn perform(&mut self, action: &Action) -> Result<(), String> {
        match action {
            Action::WriteRecord(record) => {
                let read = GrantRecord::parse(&record.to_json()).map_err(|error| error.to_string())?;
                ensure!(read == *record, "a record is not what is read from its file: {record:?}");
                self.records.insert(Key::of(record), read);
            }
            Action::RemoveRecord(key) => drop(self.records.remove(key)),
            Action::WriteSpec { name, text } => drop(self.specs.insert(name.clone(), text.clone())),
            Action::RemoveSpec { name, owner } => {
                if self.specs.get(name).is_some_and(|text| owner_of_spec(text) == *owner) {
                    self.specs.remove(name);
                }
            }
            Action::Event { .. } => {}
        }
        Ok(())
    }
}

/// What the node shows to an agent that asks now.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sight<'a> {
    pub(crate) gpus: &'a [Gpu],
    /// The kubelet's checkpoint.
    pub(crate) handouts: &'a [Handout],
    /// UIDs of pods with processes.
    pub(crate) populated: &'a BTreeSet<String>,
}

/// One life of an agent process.
#[derive(Debug, Clone)]
pub(crate) struct Agent {
    pub(crate) core: Core,
    settings: Settings,
    pub(crate) pods: PodWatch,
    pub(crate) synced: bool,
    /// Actions until the process is killed.
    pub(crate) dies_after: Option<u8>,
    /// What there was to see when reconciling was last compared.
    compared: Option<Compared>,
}

type Compared = (Disk, Vec<Gpu>, Vec<Handout>, BTreeSet<String>, BTreeMap<String, Pod>);

/// The process is gone: nothing that it was asked for gets an answer.
#[derive(Debug)]
pub(crate) enum Stop {
    Killed,
    Broken(String),
}

impl From<String> for Stop {
    fn from(text: String) -> Stop {
        Stop::Broken(text)
    }
}

/// What PreStartContainer came to.
#[derive(Debug)]
pub(crate) enum Start {
    /// For this container.
    Granted(Key),
    /// Not now.
    Refused,
}

impl Agent {
    /// A new process: everything that it knows comes from the disk.
    pub(crate) fn new(node: &str, boot: u32, reserve: MiB, disk: &Disk, sight: Sight<'_>) -> Agent {
        let settings = Settings {
            unit: MemoryUnit::GIB,
            reserve,
            node_key: NodeKey([7; 32]),
            memory_resource: names::GPU_MEM.to_owned(),
            count_resource: names::GPU_COUNT.to_owned(),
            agent_version: "test".to_owned(),
            boot_id: format!("{node}-{boot}"),
        };
        let core = new_core(&settings, disk, sight);
        Agent {
            core,
            settings,
            pods: PodWatch::new(Some(node)),
            synced: false,
            dies_after: None,
            compared: None,
        }
    }

    /// What a new process would be that has read the disk and the same events.
    pub(crate) fn rebuilt(&self, disk: &Disk, sight: Sight<'_>) -> Core {
        let mut core = new_core(&self.settings, disk, sight);
        if self.synced {
            core.reset_pods(self.pods.view.values().cloned().collect());
        }
        core
    }

    /// Memory of a GPU that is shared now.
    pub(crate) fn capacity(&self, uuid: &str) -> MiB {
        let units = self
            .core
            .gpus()
            .iter()
            .find(|gpu| gpu.uuid == uuid)
            .map_or(0, |gpu| gpu.units);
        self.settings.unit.memory(units).unwrap()
    }

    /// The pods of this node as of now.
    pub(crate) fn list(&mut self, api: &Api, disk: &mut Disk) -> Result<(), Stop> {
        let pods = self.pods.list(api);
        self.synced = true;
        let actions = self.core.reset_pods(pods);
        self.perform(&actions, disk)
    }

    /// Up to `events` events, or the first list.
    pub(crate) fn watch(&mut self, api: &Api, disk: &mut Disk, events: usize) -> Result<(), Stop> {
        if !self.synced {
            return self.list(api, disk);
        }
        for _ in 0..events {
            match self.pods.next(api) {
                None => break,
                Some(Seen::Applied(pod)) => {
                    let actions = self.core.apply_pod(pod);
                    self.perform(&actions, disk)?;
                }
                Some(Seen::Deleted(uid)) => self.core.delete_pod(&uid),
            }
        }
        Ok(())
    }

    pub(crate) fn facts(&self, disk: &Disk, sight: Sight<'_>, fresh: bool) -> Facts {
        Facts {
            handouts: Some(sight.handouts.to_vec()),
            populated: sight.populated.clone(),
            synced: self.synced,
            fresh,
            node: NodeFiles::default(),
            specs: disk.specs.clone(),
            memory_in_use: None,
        }
    }

    /// Performs actions in their order; each counts only once it is done.
    fn perform(&mut self, actions: &[Action], disk: &mut Disk) -> Result<(), Stop> {
        for action in actions {
            if let Some(left) = &mut self.dies_after {
                if *left == 0 {
                    return Err(Stop::Killed);
                }
                *left -= 1;
            }
            disk.perform(action)?;
            self.core.commit(action);
        }
        Ok(())
    }

    /// PreStartContainer. What is not known yet is read again, once. Between the look at the node and the decision come so many
    /// events.
    pub(crate) fn pre_start(
        &mut self,
        ids: &[String],
        events: usize,
        api: &Api,
        disk: &mut Disk,
        sight: Sight<'_>,
        story: &mut Story,
    ) -> Result<Start, Stop> {
        let facts = self.facts(disk, sight, false);
        if self.synced {
            self.watch(api, disk, events)?;
        }
        self.core.set_handouts(sight.handouts.to_vec());
        let same = self.rebuilt(disk, sight).pre_start(ids, &facts);
        let mut answer = self.core.pre_start(ids, &facts);
        if outcome(&answer) != outcome(&same) {
            let text = format!("a restarted agent would answer PreStartContainer with\n{same:?}\nand not with\n{answer:?}");
            return Err(Stop::Broken(text));
        }
        if matches!(answer, PreStart::Wait(..)) {
            story.tell(|| "  the agent lists the pods again".to_owned());
            let actions = self.core.reset_pods(self.pods.look(api));
            self.perform(&actions, disk)?;
            self.synced = true;
            answer = self.core.pre_start(ids, &self.facts(disk, sight, true));
        }
        match answer {
            PreStart::Granted { actions, key, .. } => {
                self.perform(&actions, disk)?;
                Ok(Start::Granted(key))
            }
            PreStart::Refused { reason, text, actions } => {
                story.tell(|| format!("  refused ({}): {text}", reason.label()));
                self.perform(&actions, disk)?;
                Ok(Start::Refused)
            }
            PreStart::Wait(reason, text) => {
                story.tell(|| format!("  not known yet ({}): {text}", reason.label()));
                Ok(Start::Refused)
            }
        }
    }

    /// GetPreferredAllocation.
    pub(crate) fn preferred(&mut self, available: &[String], must: &[String], size: usize) -> Vec<String> {
        self.core.preferred(available, must, size)
    }

    /// Allocate: the grant's name.
    pub(crate) fn allocate(&mut self, ids: &[String]) -> Result<String, String> {
        let names = self.core.allocate(Resource::Memory, ids)?;
        let [name] = names.as_slice() else {
            panic!("one container, one CDI device: {names:?}");
        };
        Ok(cdi::grant_name(name).unwrap().to_owned())
    }

    /// One pass. Between the look at the node and the decision come so many events.
    pub(crate) fn reconcile(&mut self, api: &Api, disk: &mut Disk, sight: Sight<'_>, events: usize) -> Result<Reconciled, Stop> {
        let facts = self.facts(disk, sight, false);
        if self.synced {
            self.watch(api, disk, events)?;
        }
        self.core.set_handouts(sight.handouts.to_vec());
        let found = self.core.reconcile(&facts);
        self.perform(&found.actions, disk)?;
        Ok(found)
    }

    /// What this agent knows is what another would know that started now (invariant 6).
    pub(crate) fn check_rebuilt(&mut self, disk: &Disk, sight: Sight<'_>) -> Result<(), String> {
        let rebuilt = self.rebuilt(disk, sight);
        ensure!(
            rebuilt.records().eq(self.core.records()),
            "the agent knows other records than are on its disk: {:?} and not {:?}",
            self.core.records().collect::<Vec<_>>(),
            rebuilt.records().collect::<Vec<_>>()
        );
        let (ours, theirs) = (healthy(&self.core), healthy(&rebuilt));
        ensure!(
            ours == theirs,
            "the agent offers {ours} ids, restarted it would offer {theirs}"
        );
        let expected = self.expected_healthy();
        ensure!(
            ours == expected,
            "the agent offers {ours} ids, where pods and health say {expected}"
        );
        let compared = (
            disk.clone(),
            sight.gpus.to_vec(),
            sight.handouts.to_vec(),
            sight.populated.clone(),
            self.pods.view.clone(),
        );
        if self.compared.as_ref() == Some(&compared) {
            return Ok(());
        }
        self.compared = Some(compared);
        let facts = self.facts(disk, sight, false);
        let (ours, theirs) = (self.core.clone().reconcile(&facts), rebuilt.clone().reconcile(&facts));
        // The process that did not reconcile yet keeps what it published; a new one measures.
        ensure!(
            files(&ours.actions).eq(files(&theirs.actions)) && (ours.held == theirs.held || !self.synced),
            "the agent would reconcile with\n{ours:?}\nand restarted with\n{theirs:?}"
        );
        Ok(())
    }

    /// Ids of good GPUs, and of failed ones as many as pods hold there: what kube-scheduler subtracts.
    fn expected_healthy(&self) -> usize {
        let held = |uuid: &str| {
            let pods = self.pods.view.values().filter(|pod: &&Pod| !pod.ended());
            pods.filter_map(|pod| match &pod.held {
                Held::Allocation(allocation) => allocation.share(uuid).map(|share| self.settings.unit.units_in(share.memory)),
                _ => None,
            })
            .sum::<u64>()
        };
        let units = self.core.gpus().iter().map(|gpu| match gpu.health {
            divvy_model::Health::Ok => gpu.units,
            _ => gpu.units.min(held(&gpu.uuid)),
        });
        usize::try_from(units.sum::<u64>()).unwrap()
    }
}

fn new_core(settings: &Settings, disk: &Disk, sight: Sight<'_>) -> Core {
    let mut core = Core::new(settings.clone());
    core.load_records(disk.records.values().cloned().collect());
    core.set_hardware("550.54.15", sight.gpus.to_vec()).unwrap();
    core.set_handouts(sight.handouts.to_vec());
    core
}

fn healthy(core: &Core) -> usize {
    core.devices().memory.iter().filter(|device| device.healthy).count()
}

fn files(actions: &[Action]) -> impl Iterator<Item = &Action> {
    actions.iter().filter(|action| !matches!(action, Action::Event { .. }))
}

/// What of an answer must not depend on how long the agent lived: not the events, which are said once.
fn outcome(answer: &PreStart) -> String {
    match answer {
        PreStart::Granted { actions, key, .. } => format!("{key:?} {:?}", files(actions).collect::<Vec<_>>()),
        PreStart::Wait(reason, text) => format!("{reason:?} {text}"),
        PreStart::Refused { reason, text, .. } => format!("{reason:?} {text}"),
    }
}
