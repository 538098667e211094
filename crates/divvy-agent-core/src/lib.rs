//! What the agent decides: values in, values and [`Action`]s out. No clock, no file, no network, no randomness.
//!
//! [`Core`] holds what the agent knows (settings, GPUs, pods of this node, grant records, what the kubelet handed out);
//! its methods answer the kubelet's calls and reconcile. Everything is keyed by (pod UID, container), never by device id:
//! ids are fungible under late binding (DESIGN.md section 8) and come back with another owner.
//!
//! The caller performs the actions in their order and reports each that succeeded by [`Core::commit`]; a record is known to
//! the core only after its file is on disk, so that a crash in between leaves the core and the directory agreeing.

#![forbid(unsafe_code)]

mod allocate;
mod booking;
mod devices;
pub mod driver;
mod inventory;
mod prestart;
mod project;
mod reconcile;
mod steer;

use std::collections::{BTreeMap, BTreeSet};

use divvy_cdi as cdi;
use divvy_model::{Gpu, GrantRecord, Held, MemoryUnit, MiB, Pod, PodKey};

pub use allocate::Resource;
pub use devices::{Device, Devices, SizeWarning, TooManyIds};
pub use prestart::{OWN_VISIBLE_DEVICES, PreStart, Reason};
pub use project::{NodeFiles, SHARED_DEVICES};
pub use reconcile::{Class, Reconciled};

/// What an operator chose, and what identifies the node.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Memory of one unit of gpu-mem.
    pub unit: MemoryUnit,
    /// Kept back on each GPU.
    pub reserve: MiB,
    /// Key of the CDI device names.
    pub node_key: NodeKey,
    /// Resource name of shared memory.
    pub memory_resource: String,
    /// Resource name of the GPU count.
    pub count_resource: String,
    /// The agent's version, for the inventory.
    pub agent_version: String,
    /// `/proc/sys/kernel/random/boot_id`.
    pub boot_id: String,
}

/// The node's secret key. Its `Debug` does not show it.
#[derive(Clone)]
pub struct NodeKey(pub [u8; 32]);

impl std::fmt::Debug for NodeKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("NodeKey(..)")
    }
}

/// Which container of which pod. UIDs never come back, names do.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// The pod's UID.
    pub uid: String,
    /// The container's name.
    pub container: String,
}

/// What the kubelet's checkpoint says of one container and one resource: an entry of `PodDeviceEntries`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Handout {
    /// Which container.
    pub key: Key,
    /// Resource name.
    pub resource: String,
    /// Device ids, of all NUMA nodes together.
    pub ids: BTreeSet<String>,
    /// The grant's name in the recorded AllocateResponse, if it names one of ours.
    pub grant: Option<String>,
}

/// What was read from the node for one decision.
#[derive(Debug, Clone, Default)]
pub struct Facts {
    /// The checkpoint's entries. `None`: it could not be read.
    pub handouts: Option<Vec<Handout>>,
    /// UIDs of pods whose cgroup has processes, a sandbox's among them; cgroups that could not be read count as populated.
    pub populated: BTreeSet<String>,
    /// The list of this node's pods was complete at least once: a pod that is not known is gone.
    pub synced: bool,
    /// The list of pods was read after the call came in: a pod that is not known does not exist, and those that are known are there.
    pub fresh: bool,
    /// Driver files of the node.
    pub node: NodeFiles,
    /// Spec files of grants that are in the CDI directory, by grant name.
    pub specs: BTreeMap<String, String>,
    /// Memory that the processes of each pod use on each GPU, as the driver says: by UUID, then by the pod's UID; zero where
    /// the driver does not say how much. `None`: not asked now, or not answered.
    pub memory_in_use: Option<BTreeMap<String, BTreeMap<String, MiB>>>,
}

/// An effect that the caller performs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Write the record, replacing the one of the same key.
    WriteRecord(GrantRecord),
    /// Write the CDI spec.
    WriteSpec {
        /// Grant name.
        name: String,
        /// The file's text.
        text: String,
    },
    /// Remove the CDI spec if it still belongs to this pod: names return with ids, and the file may be another pod's by now.
    RemoveSpec {
        /// Grant name.
        name: String,
        /// UID of the pod that it must belong to; `None` removes what cannot be read.
        owner: Option<String>,
    },
    /// Remove the record.
    RemoveRecord(Key),
    /// Publish an event about a pod.
    Event {
        /// The pod.
        pod: PodKey,
        /// Its UID.
        uid: String,
        /// Reason, one word in CamelCase.
        reason: &'static str,
        /// In words.
        text: String,
    },
}

/// A list of this node's pods that is under way.
#[derive(Debug, PartialEq, Eq)]
pub struct Listing(u64);

/// A pod as the agent knows it.
#[derive(Debug, Clone)]
struct Known {
    /// Order in which pods were first seen, the guess at the kubelet's order.
    seq: u64,
    pod: Pod,
    /// The first allocation that was seen. What the annotation says later does not count.
    pin: Held,
    /// The annotation differed from `pin`, and that was said.
    change_reported: bool,
}

/// Ids given out by Allocate that the checkpoint does not show yet.
#[derive(Debug, Clone)]
struct InFlight {
    ids: BTreeSet<String>,
    /// The container that they were steered to.
    guess: Option<Key>,
    /// Checkpoints read since.
    age: u8,
}

/// The agent's knowledge and decisions.
#[derive(Debug, Clone)]
pub struct Core {
    settings: Settings,
    driver: String,
    /// In NVML's order; `units` and `reserve` are ours.
    gpus: Vec<Gpu>,
    pods: BTreeMap<String, Known>,
    /// Pods of this node that ask for none of our resources, by UID: no more than what to call them.
    others: BTreeMap<String, PodKey>,
    next_seq: u64,
    /// Lists of this node's pods that are under way, each with the pods of which the watch has told since it began; `None` once the watch
    /// itself began again.
    lists: BTreeMap<u64, Option<BTreeSet<String>>>,
    next_list: u64,
    records: BTreeMap<Key, GrantRecord>,
    handouts: Vec<Handout>,
    in_flight: Vec<InFlight>,
    /// The last answer of GetPreferredAllocation that was a guess at a pod.
    guess: Option<(BTreeSet<String>, Key)>,
    held: BTreeMap<String, MiB>,
    leaving: bool,
    /// Why containers get none of the driver's libraries, or wrong ones.
    driver_trouble: Option<driver::Trouble>,
    registered: bool,
    /// Events said already, by class and pod.
    reported: BTreeSet<(Class, String)>,
}

impl Core {
    /// A core that knows nothing yet.
    pub fn new(settings: Settings) -> Core {
        Core {
            settings,
            driver: String::new(),
            gpus: Vec::new(),
            pods: BTreeMap::new(),
            others: BTreeMap::new(),
            next_seq: 0,
            lists: BTreeMap::new(),
            next_list: 0,
            records: BTreeMap::new(),
            handouts: Vec::new(),
            in_flight: Vec::new(),
            guess: None,
            held: BTreeMap::new(),
            leaving: false,
            driver_trouble: None,
            registered: false,
            reported: BTreeSet::new(),
        }
    }

    /// What was chosen.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Takes over what the probe found. Units and reserve are computed here. Refused, and nothing changes, if the node
    /// would have more ids than the kubelet can take.
    pub fn set_hardware(&mut self, driver: &str, mut gpus: Vec<Gpu>) -> Result<Option<SizeWarning>, TooManyIds> {
        let warning = devices::check_size(&gpus, &self.settings)?;
        for gpu in &mut gpus {
            gpu.reserve = self.settings.reserve;
            gpu.units = devices::units(gpu, &self.settings);
            gpu.held = MiB::ZERO;
        }
        driver.clone_into(&mut self.driver);
        self.gpus = gpus;
        Ok(warning)
    }

    /// The version of the driver that the probe found; empty before it found one.
    pub fn driver(&self) -> &str {
        &self.driver
    }

    /// The GPUs as they are known, with units.
    pub fn gpus(&self) -> &[Gpu] {
        &self.gpus
    }

    /// Takes over the records that were found on disk, before any pod is known.
    pub fn load_records(&mut self, records: Vec<GrantRecord>) {
        self.records = records.into_iter().map(|record| (Key::of(&record), record)).collect();
    }

    /// The records, in order of their keys.
    pub fn records(&self) -> impl Iterator<Item = &GrantRecord> {
        self.records.values()
    }

    /// The pod with this UID, as it is known; `None` also for one that asks for none of our resources.
    pub fn pod(&self, uid: &str) -> Option<&Pod> {
        self.pods.get(uid).map(|known| &known.pod)
    }

    /// A pod of this node was created or changed.
    pub fn apply_pod(&mut self, mut pod: Pod) -> Vec<Action> {
        self.told_of(&pod.uid);
        // It has its GPUs: the rules by which they were chosen are not read here.
        pod.request.rules = None;
        let mut actions = Vec::new();
        match self.pods.get_mut(&pod.uid) {
            Some(known) => {
                let unset = matches!(known.pin, Held::Nothing | Held::Unreadable(_));
                if unset {
                    known.pin = pod.held.clone();
                } else if pod.held != known.pod.held && pod.held != known.pin && !known.change_reported {
                    known.change_reported = true;
                    actions.push(changed(&pod));
                }
                known.pod = pod;
            }
            None => {
                // A pod that asks for none of ours would only take memory.
                if !pod.request.wants_memory() && pod.held == Held::Nothing {
                    self.others.insert(pod.uid.clone(), pod.key());
                    return actions;
                }
                self.others.remove(&pod.uid);
                let (pin, differs) = self.pin_of(&pod);
                if differs {
                    actions.push(changed(&pod));
                }
                let seq = self.next_seq;
                self.next_seq = self.next_seq.saturating_add(1);
                self.pods.insert(
                    pod.uid.clone(),
                    Known {
                        seq,
                        pin,
                        pod,
                        change_reported: differs,
                    },
                );
            }
        }
        actions
    }

    /// A pod's object is gone. Its containers may still run: its records stay.
    pub fn delete_pod(&mut self, uid: &str) {
        self.told_of(uid);
        self.pods.remove(uid);
        self.others.remove(uid);
    }

    /// Exactly these pods are bound to this node: what a watch says that begins, or begins again.
    pub fn reset_pods(&mut self, pods: Vec<Pod>) -> Vec<Action> {
        // Pods that came and went between two watches have no events, so a list that shows them cannot be told from one that is newer.
        self.lists.values_mut().for_each(|told| *told = None);
        self.remove_all_but(&pods, &BTreeSet::new());
        pods.into_iter().flat_map(|pod| self.apply_pod(pod)).collect()
    }

    /// The pods of this node are being listed, beside the watch. To be ended by [`Core::listed`] or [`Core::list_failed`].
    pub fn begin_list(&mut self) -> Listing {
        let listing = Listing(self.next_list);
        self.next_list += 1;
        self.lists.insert(listing.0, Some(BTreeSet::new()));
        listing
    }

    /// A list has come. It shows the pods at some moment after it began, so it may be older than what the watch has told meanwhile: of pods that
    /// the watch spoke of since the list began only the watch is believed. Of the others the list is the newer one: what was known before it began
    /// and is not in it is gone.
    ///
    /// `None`: the watch began again meanwhile, and nothing was taken from the list.
    pub fn listed(&mut self, listing: Listing, pods: Vec<Pod>) -> Option<Vec<Action>> {
        let told = self.lists.remove(&listing.0)??;
        self.remove_all_but(&pods, &told);
        let newer = pods.into_iter().filter(|pod| !told.contains(&pod.uid));
        Some(newer.flat_map(|pod| self.apply_pod(pod)).collect())
    }

    /// The list will not come.
    pub fn list_failed(&mut self, listing: Listing) {
        self.lists.remove(&listing.0);
    }

    fn told_of(&mut self, uid: &str) {
        for told in self.lists.values_mut().flatten() {
            told.insert(uid.to_owned());
        }
    }

    /// Those that are neither present nor spared are gone.
    fn remove_all_but(&mut self, present: &[Pod], spared: &BTreeSet<String>) {
        let present: BTreeSet<&str> = present.iter().map(|pod| pod.uid.as_str()).collect();
        let known = self.pods.keys().chain(self.others.keys());
        let gone = known.filter(|uid| !present.contains(uid.as_str()) && !spared.contains(*uid));
        for uid in gone.cloned().collect::<Vec<String>>() {
            self.delete_pod(&uid);
        }
    }

    /// Whether containers of pods with a grant may run now, so that their cgroups must be there.
    pub fn expects_cgroups(&self) -> bool {
        !self.records.is_empty() || self.pods.values().any(|known| known.pod.container_running)
    }

    /// UIDs of the pods that count as running where the node does not show what runs: those with a grant, and those that the kubelet gave device ids,
    /// whose containers it may be about to start.
    pub fn all_that_may_run(&self, handouts: Option<&[Handout]>) -> BTreeSet<String> {
        let granted = self.records.keys().map(|key| &key.uid);
        let handed_out = handouts.unwrap_or_default().iter().map(|handout| &handout.key.uid);
        granted.chain(handed_out).cloned().collect()
    }

    /// Takes over the checkpoint's entries. Ids that Allocate gave out stay counted as handed out until two checkpoints in
    /// a row do not have them: the first may have been read while the kubelet was still writing.
    pub fn set_handouts(&mut self, handouts: Vec<Handout>) {
        self.handouts = handouts;
        let in_checkpoint: BTreeSet<&str> = self.handouts.iter().flat_map(|h| h.ids.iter().map(String::as_str)).collect();
        self.in_flight.retain_mut(|in_flight| {
            in_flight.age = in_flight.age.saturating_add(1);
            in_flight.age < 2 && !in_flight.ids.iter().all(|id| in_checkpoint.contains(id.as_str()))
        });
    }

    /// An action was performed.
    pub fn commit(&mut self, action: &Action) {
        match action {
            Action::WriteRecord(record) => {
                self.records.insert(Key::of(record), record.clone());
            }
            Action::RemoveRecord(key) => {
                self.records.remove(key);
            }
            Action::WriteSpec { .. } | Action::RemoveSpec { .. } | Action::Event { .. } => {}
        }
    }

    fn gpu(&self, uuid: &str) -> Option<&Gpu> {
        self.gpus.iter().find(|gpu| gpu.uuid == uuid)
    }

    /// Shared memory that a GPU has in all ([`divvy_model::Inventory::capacity`]).
    fn capacity(&self, gpu: &Gpu) -> MiB {
        let others = self.other_units().map(|unit| unit.memory(gpu.units_of(unit)));
        let most = others.chain([self.settings.unit.memory(gpu.units)]).flatten().max();
        most.unwrap_or(MiB::ZERO)
    }

    /// Units of grants that were made before `--memory-unit` was changed, the finest first.
    fn other_units(&self) -> impl Iterator<Item = MemoryUnit> + use<> {
        let units = self.records.values().map(|record| record.unit);
        let others: BTreeSet<MemoryUnit> = units.filter(|unit| *unit != self.settings.unit).collect();
        others.into_iter()
    }

    fn memory_handouts<'a>(&'a self, handouts: &'a [Handout]) -> impl Iterator<Item = &'a Handout> {
        handouts
            .iter()
            .filter(|handout| handout.resource == self.settings.memory_resource)
    }

    fn records_of<'a>(&'a self, uid: &'a str) -> impl Iterator<Item = &'a GrantRecord> {
        self.records
            .range(
                Key {
                    uid: uid.to_owned(),
                    container: String::new(),
                }..,
            )
            .take_while(move |(key, _)| key.uid == uid)
            .map(|(_, record)| record)
    }

    /// `namespace/name`, or the UID where nothing more is known.
    fn pod_name(&self, uid: &str) -> String {
        match self.pods.get(uid) {
            Some(known) => known.pod.key().to_string(),
            None => self
                .records_of(uid)
                .next()
                .map_or_else(|| format!("pod {uid}"), |record| record.pod().to_string()),
        }
    }

    /// Whether a pod may still have or get a running container: its object has not ended, or its cgroup has processes. A
    /// pod that is not known counts until the list of pods was complete once.
    fn may_run(&self, uid: &str, facts: &Facts) -> bool {
        facts.populated.contains(uid)
            || match self.pods.get(uid) {
                Some(known) => !known.pod.ended(),
                None => !facts.synced,
            }
    }
}

fn changed(pod: &Pod) -> Action {
    Action::Event {
        pod: pod.key(),
        uid: pod.uid.clone(),
        reason: "AllocationChanged",
        text: "the annotation divvy.dev/allocation was changed after the pod was bound; the first value stays in force. \
               Who may write it? An admission policy should keep users off it"
            .to_owned(),
    }
}

impl Key {
    /// The key of a record.
    pub fn of(record: &GrantRecord) -> Key {
        Key {
            uid: record.uid.clone(),
            container: record.container.clone(),
        }
    }
}

/// The record that a grant's spec carries, if it can be read.
fn record_in_spec(text: &str) -> Option<GrantRecord> {
    GrantRecord::parse(cdi::Spec::parse(text).ok()?.owner()?).ok()
}

/// UID of the pod that a grant's spec belongs to, if the spec says.
pub fn owner_of_spec(text: &str) -> Option<String> {
    record_in_spec(text).map(|record| record.uid)
}
