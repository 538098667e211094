//! The agent's decisions as pure functions: values in, values and [`AgentAction`]s out. No clock, no files, no network, no randomness.
//!
//! [`AgentCore`] holds what the agent knows: its settings, the GPUs, this node's pods, the grant records, and the device ids that the kubelet
//! handed out. Its methods answer the kubelet's calls and reconcile. Everything is keyed by (pod UID, container) and never by device id.
//! A device id does not identify a pod: the kubelet picks any free ids and gives them to another pod later (`docs/design/allocation.md`).
//!
//! The caller performs the actions in order and reports each successful one with [`AgentCore::commit`]. The core learns of a record only after
//! its file is on disk, so the core and the directory agree even after a crash in between.

#![forbid(unsafe_code)]

mod accounts;
mod allocate;
mod another_plugin;
mod booking;
mod devices;
pub mod driver_spec;
mod guarded_shares;
mod inventory;
mod limited;
mod limits;
mod mps;
mod node_files;
mod prestart;
mod project;
mod reason;
mod reconcile;
mod resource;
mod steer;
mod under_test;
mod vendor;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use divvy_cdi as cdi;
use divvy_model::{Gpu, GrantRecord, Health, Held, MemoryUnit, MiB, Partition, Pod, PodKey, Vendor, WholeKind};

pub use accounts::{AccountOwner, AccountedContainer, Accounts, UsageAccount};
pub use allocate::AllocateError;
pub use devices::{AdvertisedDevice, SizeWarning, TooManyIds};
pub use guarded_shares::{
    DriverReport, FileChange, FileStatus, GuardCounts, GuardedShares, InSlots, LimitsToWrite, MadeLater, PodProcess, Readings,
    ShareFound, ShareId, USAGE_MODE, UsageCounts, UsageReading,
};
pub use limited::LimitedPod;
pub use limits::{Guarded, LimitError, LimitStep, NotLimited, Otherwise, WithoutLimit};
pub use mps::Mps;
pub use node_files::NodeFiles;
pub use prestart::{OWN_VISIBLE_DEVICES, PreStart};
pub use reason::{DisagreementClass, NOT_LIMITED, Reason};
pub use reconcile::Reconciled;
pub use resource::{GrantSource, Ids, ResourceSpec};
pub use under_test::Tests;

/// The maximum number of MIG profiles in a message.
const PROFILES_SHOWN: usize = 5;

/// The operator's choices, and what identifies the node.
#[derive(Debug, Clone)]
pub struct CoreSettings {
    /// The memory of one unit of gpu-mem.
    pub unit: MemoryUnit,
    /// The memory of each GPU that the node does not share.
    pub reserve: MiB,
    /// Whether the GPUs that are shared by default, and MIG devices, are also offered as a whole. GPUs of the other vendors always are.
    pub whole: bool,
    /// The vendors whose GPUs are shared although they are not by default. Partitions of such GPUs are offered only as a whole.
    pub also_shared: BTreeSet<Vendor>,
    /// Through which resources MIG devices are offered as a whole.
    pub mig: MigStrategy,
    /// The secret key from which the names of CDI devices are derived.
    pub node_key: NodeKey,
    /// The agent's version, as the inventory states it.
    pub agent_version: String,
    /// The content of `/proc/sys/kernel/random/boot_id`.
    pub boot_id: String,
    /// Where the guard's files are on the node. `None` if no container gets the guard.
    pub guard: Option<Guard>,
    /// Where the MPS control daemon's files are. `None` if containers use GPUs without it.
    pub mps: Option<Mps>,
}

/// Paths of the guard's files on the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Guard {
    /// The library that containers get in the place of CUDA's driver library.
    pub cuda: String,
    /// The library that containers get in the place of NVML.
    pub nvml: String,
    /// The library that has the loader take these for other copies of the driver's libraries. `None` if such copies are left alone.
    pub audit: Option<String>,
    /// The directory with the files of each pod and GPU: `<shares>/<pod's UID>/<GPU's UUID>/`.
    pub shares: String,
    /// What happens to a pod whose programs do not keep to its share.
    pub reaction: Reaction,
}

/// What happens to a pod whose programs do not keep to its share ([`Escape::is_serious`]). In any case it gets an event.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Reaction {
    /// Nothing else.
    #[default]
    Event,
    /// The launches of its programs that use the guard wait, as long as the sign is there.
    Throttle,
    /// The extender evicts it.
    Evict,
    /// The programs are killed.
    Kill,
}

/// The part of a GPU that the agent offers to pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuOffer {
    /// The memory that the agent does not offer.
    pub reserve: MiB,
    /// The number of units of shared memory.
    pub units: u64,
    /// As what the GPU is offered as a whole; `None` if it is not.
    pub whole: Option<WholeKind>,
}

impl CoreSettings {
    /// Return as what the agent offers such a GPU or partition as a whole. `None` if a MIG device has no profile that can be named.
    fn kind(&self, vendor: Vendor, partition: Option<&Partition>) -> Option<WholeKind> {
        match (self.mig, partition) {
            (MigStrategy::Mixed, Some(partition)) => partition.profile.parse().ok().map(WholeKind::Mig),
            // A device of former settings.
            (MigStrategy::None, Some(_)) => None,
            (MigStrategy::Single, Some(_)) | (_, None) => Some(WholeKind::Gpu(vendor)),
        }
    }

    /// Return why `--mig-strategy single` does not offer these GPUs as a whole, as one resource: they are not divided alike. The error text
    /// says what to do. `None` if they are, or if another strategy is used.
    pub fn unlike(&self, gpus: &[Gpu]) -> Option<String> {
        if !self.whole || self.mig != MigStrategy::Single {
            return None;
        }
        let profile = |gpu: &Gpu| gpu.partition.as_ref().map(|partition| partition.profile.clone());
        let named = |gpu: &Gpu| match profile(gpu) {
            Some(profile) => format!("GPU {} is a MIG device {profile}", gpu.index),
            None => format!("GPU {} is not divided", gpu.index),
        };
        let mut present = gpus
            .iter()
            .filter(|gpu| gpu.vendor.is_shared_by_default() && gpu.health != Health::Lost);
        let first = present.next()?;
        let other = present.find(|gpu| profile(gpu) != profile(first))?;
        Some(format!(
            "{}, but {}: with --mig-strategy single, GPUs are offered as a whole only if all GPUs of the node are divided alike. Their memory is still \
             shared. Divide all GPUs alike, or use --mig-strategy mixed",
            named(first),
            named(other)
        ))
    }

    /// Return which MIG devices `--mig-strategy mixed` does not offer as a whole because their profiles have no resource. The text says what
    /// to do. `None` if there are none, or if another strategy is used.
    pub fn unnamed(&self, gpus: &[Gpu]) -> Option<String> {
        if !self.whole || self.mig != MigStrategy::Mixed {
            return None;
        }
        let partitions = gpus.iter().filter_map(|gpu| gpu.partition.as_ref());
        // A device whose profile the driver does not report has failed for this reason.
        let named = partitions.filter(|partition| !partition.profile.is_empty());
        let unnamed: BTreeSet<&str> = named
            .filter(|partition| self.kind(Vendor::Nvidia, Some(partition)).is_none())
            .map(|partition| partition.profile.as_str())
            .collect();
        let profiles: Vec<&str> = unnamed.iter().take(PROFILES_SHOWN).copied().collect();
        let noun = if unnamed.len() == 1 { "profile" } else { "profiles" };
        (!unnamed.is_empty()).then(|| {
            format!(
                "MIG devices of the {noun} {} have no resource that this version knows, so no pod gets them as a whole. Their memory is still shared. \
                 Update Divvy, or divide the GPUs into other profiles: nvidia-smi mig -lgip lists them",
                profiles.join(", ")
            )
        })
    }

    /// Return what the agent offers of a vendor's GPU with this much memory, or of a partition of one.
    pub fn offer(&self, vendor: Vendor, total: MiB, partition: Option<&Partition>) -> GpuOffer {
        let (whole, is_shared) = if vendor.is_shared_by_default() {
            (self.kind(vendor, partition).filter(|_| self.whole), true)
        } else {
            (
                Some(WholeKind::Gpu(vendor)),
                partition.is_none() && self.also_shared.contains(&vendor),
            )
        };
        if is_shared {
            GpuOffer {
                reserve: self.reserve,
                units: self.unit.units_in(total.saturating_sub(self.reserve)),
                whole,
            }
        } else {
            GpuOffer {
                reserve: MiB::ZERO,
                units: 0,
                whole,
            }
        }
    }
}

/// Through which resources MIG devices are offered as a whole. The names are those of NVIDIA's device plugin (`MIG_STRATEGY`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum MigStrategy {
    /// MIG devices are not offered.
    #[default]
    None,
    /// As GPUs, through `nvidia.com/gpu`.
    Single,
    /// Through one resource for each profile, such as `nvidia.com/mig-1g.5gb`.
    Mixed,
}

/// The node's secret key. `Debug` does not print it.
#[derive(Clone)]
pub struct NodeKey(pub [u8; 32]);

impl std::fmt::Debug for NodeKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("NodeKey(..)")
    }
}

/// The key of a container: the pod's UID and the container's name. Unlike a pod's name, a UID is never reused.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ContainerKey {
    pub uid: String,
    pub container: String,
}

/// The devices of one container and one resource according to the kubelet's checkpoint: an entry of `PodDeviceEntries`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Handout {
    /// The container that has the devices.
    pub key: ContainerKey,
    /// The extended resource.
    pub resource: String,
    /// The device ids of all NUMA nodes together.
    pub ids: BTreeSet<String>,
    /// The grant's name in the recorded AllocateResponse, or `None` if the response does not name one of our grants.
    pub grant: Option<String>,
}

/// The state of the node that one decision needs.
#[derive(Debug, Clone, Default)]
pub struct DecisionFacts {
    /// The checkpoint's entries, or `None` if the checkpoint could not be read.
    pub handouts: Option<Vec<Handout>>,
    /// UIDs of pods whose cgroup has processes, including the sandbox's. A cgroup that could not be read counts as populated.
    pub populated: BTreeSet<String>,
    /// Whether the list of this node's pods was complete at least once. If so, an unknown pod is gone.
    pub synced: bool,
    /// Whether the list of pods was read after the kubelet's call arrived. If so, an unknown pod does not exist, and a known pod
    /// does.
    pub fresh: bool,
    /// The driver's files on the node.
    pub node: NodeFiles,
    /// The grants' specs in the CDI directory, by grant name.
    pub specs: BTreeMap<String, Arc<SpecOnNode>>,
    /// Memory that each pod's processes use on each GPU, as the driver reports it: by GPU UUID, then by pod UID. The amount is
    /// zero where the driver does not report it. `None` if the driver was not queried this time or did not answer.
    pub memory_in_use: Option<BTreeMap<String, BTreeMap<String, MiB>>>,
    /// Signs that guarded pods are not held to their shares, by pod UID.
    pub escapes: BTreeMap<String, Vec<Escape>>,
}

/// A sign that a guarded pod is not held to its share as it should be.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Escape {
    /// The driver lists a process on the GPU that has no slot in the pod's file of usage.
    Unguarded {
        /// The GPU's UUID.
        uuid: String,
        /// The process's PID on the host.
        pid: u32,
    },
    /// A program of the pod changed its file of usage in a way in which no guard changes it.
    Tampered {
        /// The GPU's UUID.
        uuid: String,
        /// What is wrong with the file.
        change: FileChange,
    },
    /// The pod's file of usage could not be read in time in several measurements in a row.
    Busy {
        /// The GPU's UUID.
        uuid: String,
    },
    /// The driver lists a process on a GPU that was not granted to the pod.
    NotGranted {
        /// The GPU's UUID.
        uuid: String,
        /// The process's PID on the host.
        pid: u32,
    },
    /// The pod's processes have more memory of the GPU than its share, and than their contexts explain.
    Exceeded {
        /// The GPU's UUID.
        uuid: String,
        /// The memory that the driver reports for the pod.
        used: MiB,
        /// The pod's share.
        share: MiB,
    },
    /// Processes got no memory because all slots of the file of usage have an owner.
    Crowded {
        /// The GPU's UUID.
        uuid: String,
    },
    /// The pod has a share of the compute time, but the driver does not report how long processes keep the GPU busy.
    Untimed {
        /// The GPU's UUID.
        uuid: String,
        /// The driver's answer.
        text: String,
    },
}

impl Escape {
    /// Report whether a program of the pod uses more than it was granted, or makes that possible. If not, the sign is a limit of Divvy's own.
    pub fn is_serious(&self) -> bool {
        match self {
            Escape::Unguarded { .. } | Escape::Tampered { .. } | Escape::NotGranted { .. } | Escape::Exceeded { .. } => true,
            Escape::Busy { .. } | Escape::Crowded { .. } | Escape::Untimed { .. } => false,
        }
    }

    /// Return the GPU's UUID.
    pub fn uuid(&self) -> &str {
        match self {
            Escape::Unguarded { uuid, .. }
            | Escape::Tampered { uuid, .. }
            | Escape::NotGranted { uuid, .. }
            | Escape::Exceeded { uuid, .. }
            | Escape::Busy { uuid }
            | Escape::Crowded { uuid }
            | Escape::Untimed { uuid, .. } => uuid,
        }
    }
}

/// An effect for the caller to perform.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AgentAction {
    /// Write the record, and replace the previous record of the same key.
    WriteRecord(GrantRecord),
    /// Write the CDI spec.
    WriteSpec {
        /// The grant's name.
        name: String,
        /// The file's text.
        text: String,
    },
    /// Remove the CDI spec if it still belongs to this pod. Grant names are reused together with device ids, so the file may belong to
    /// another pod by now.
    RemoveSpec {
        /// The grant's name.
        name: String,
        /// UID of the pod that the spec must belong to. `None` removes a spec that cannot be read.
        owner: Option<String>,
    },
    /// Remove the record.
    RemoveRecord(ContainerKey),
    /// Hold a pod to its share. This takes long enough that no lock is to be held meanwhile.
    Limit(LimitStep),
    /// Publish an event about a pod.
    Event {
        /// The pod's namespace and name.
        pod: PodKey,
        /// The pod's UID.
        uid: String,
        /// The event's reason: one word in CamelCase.
        reason: &'static str,
        /// The event's message.
        text: String,
    },
}

/// A list request for this node's pods that is in progress.
#[derive(Debug, PartialEq, Eq)]
pub struct Listing(u64);

/// A pod as the agent knows it.
#[derive(Debug, Clone)]
struct PodInCore {
    /// Position in the order in which the agent first saw its pods: a guess at the order in which the kubelet admits them.
    seq: u64,
    pod: Pod,
    /// The allocation that the agent saw first. Later values of the annotation do not count.
    pin: Held,
    /// Whether an event has reported that the annotation differs from `pin`.
    change_reported: bool,
}

/// Device ids of an Allocate call that the checkpoint does not show yet.
#[derive(Debug, Clone)]
struct InFlight {
    ids: BTreeSet<String>,
    /// The container for which GetPreferredAllocation chose these ids.
    guess: Option<ContainerKey>,
    /// The number of checkpoints that were read since the Allocate call.
    age: u8,
}

/// The agent's knowledge and its decisions.
#[derive(Debug, Clone)]
pub struct AgentCore {
    settings: CoreSettings,
    drivers: BTreeMap<Vendor, String>,
    /// GPUs in the order of the inventory.
    gpus: Vec<Gpu>,
    pods: BTreeMap<String, PodInCore>,
    /// Names of this node's pods that request none of our resources, by UID.
    others: BTreeMap<String, PodKey>,
    next_seq: u64,
    /// The list requests in progress, each with the UIDs of the pods that the watch reported since the request began. The UIDs
    /// are `None` if the watch has started again since then.
    lists: BTreeMap<u64, Option<BTreeSet<String>>>,
    next_list: u64,
    records: BTreeMap<ContainerKey, GrantRecord>,
    projected: project::Projected,
    handouts: Vec<Handout>,
    /// The containers to which another device plugin had given GPUs before this agent read the checkpoint for the first time.
    inherited: Option<BTreeSet<ContainerKey>>,
    in_flight: Vec<InFlight>,
    /// The last answer of GetPreferredAllocation, if it was meant for a particular container.
    guess: Option<(BTreeSet<String>, ContainerKey)>,
    held: BTreeMap<String, MiB>,
    /// The GPUs that pods have as a whole without an allocation that names them.
    held_by_pods: BTreeSet<String>,
    leaving: bool,
    /// Why containers get none of the driver's libraries, or the wrong ones.
    driver_trouble: Option<driver_spec::DriverSpecTrouble>,
    registered: bool,
    /// Whether the node's annotations were read, and the GPUs are those without the ones that are out of service.
    knows_service: bool,
    /// Events that were already posted, by class and pod.
    reported: BTreeSet<(DisagreementClass, String)>,
    /// UIDs of pods that the extender is to evict.
    evict: BTreeSet<String>,
    /// UIDs of pods with grants that have the driver's limits, as far as this agent knows: those of its start, and those that it has limited since.
    with_limits: BTreeSet<String>,
    /// Whether the guard's files of a share are known to lie on the node's disk.
    shares_on_disk: bool,
}

impl AgentCore {
    /// Return a core that knows only its settings.
    pub fn new(settings: CoreSettings) -> AgentCore {
        AgentCore {
            settings,
            drivers: BTreeMap::new(),
            gpus: Vec::new(),
            pods: BTreeMap::new(),
            others: BTreeMap::new(),
            next_seq: 0,
            lists: BTreeMap::new(),
            next_list: 0,
            records: BTreeMap::new(),
            projected: project::Projected::default(),
            handouts: Vec::new(),
            inherited: None,
            in_flight: Vec::new(),
            guess: None,
            held: BTreeMap::new(),
            held_by_pods: BTreeSet::new(),
            leaving: false,
            driver_trouble: None,
            registered: false,
            knows_service: false,
            reported: BTreeSet::new(),
            evict: BTreeSet::new(),
            with_limits: BTreeSet::new(),
            shares_on_disk: false,
        }
    }

    pub fn settings(&self) -> &CoreSettings {
        &self.settings
    }

    /// Store the driver versions and the GPUs that the probe found. Return an error and change nothing if the node would offer more device
    /// ids than the kubelet accepts.
    pub fn set_hardware(&mut self, drivers: BTreeMap<Vendor, String>, gpus: Vec<Gpu>) -> Result<Option<SizeWarning>, TooManyIds> {
        let warning = devices::check_size(&gpus, &self.settings)?;
        self.drivers = drivers;
        self.gpus = gpus;
        self.show_held();
        Ok(warning)
    }

    /// Take note that the GPUs that were stored last have the health that the node's annotations give them. Until then, no container starts: its GPU may
    /// be out of service.
    pub fn knows_service(&mut self) {
        self.knows_service = true;
    }

    /// Copy the memory that is held without an allocation to each GPU, so that the inventory shows it.
    fn show_held(&mut self) {
        for gpu in &mut self.gpus {
            gpu.held = self.held.get(&gpu.uuid).copied().unwrap_or(MiB::ZERO);
            gpu.held_by_pod = (gpu.held > MiB::ZERO).then(|| self.held_by_pods.contains(&gpu.uuid));
        }
    }

    /// Return the version of a vendor's driver that the probe found. It is empty before the first snapshot, and if the driver is
    /// not loaded.
    pub fn driver(&self, vendor: Vendor) -> &str {
        self.drivers.get(&vendor).map_or("", String::as_str)
    }

    /// Return the known GPUs in the order of the inventory.
    pub fn gpus(&self) -> &[Gpu] {
        &self.gpus
    }

    /// Store the records that were found on disk. Call this before the first pod is applied.
    pub fn load_records(&mut self, records: Vec<GrantRecord>) {
        self.with_limits = records.iter().map(|record| record.uid.clone()).collect();
        self.records = records
            .into_iter()
            .map(|record| (ContainerKey::of(&record), record))
            .collect();
    }

    /// Return the records, ordered by pod UID and container.
    pub fn records(&self) -> impl Iterator<Item = &GrantRecord> {
        self.records.values()
    }

    /// Return the known pod with this UID. A pod that requests none of our resources counts as unknown.
    pub fn pod(&self, uid: &str) -> Option<&Pod> {
        self.pods.get(uid).map(|known| &known.pod)
    }

    /// Store a pod of this node that was created or changed. If its allocation differs from the one that counts, the actions
    /// report this.
    pub fn apply_pod(&mut self, mut pod: Pod) -> Vec<AgentAction> {
        self.told_of(&pod.uid);
        // The pod has its GPUs already. The rules by which they were chosen do not matter any more.
        pod.request.keep_rules_of_start();
        let mut actions = Vec::new();
        match self.pods.get_mut(&pod.uid) {
            Some(known) => {
                // A pod that has GPUs by the kubelet's choice keeps them.
                let has_gpus = self.records.keys().any(|key| key.uid == pod.uid);
                let unset = matches!(known.pin, Held::Nothing | Held::Unreadable(_)) && !has_gpus;
                if unset {
                    known.pin = pod.held.clone();
                } else if pod.held != known.pod.held && pod.held != known.pin && !known.change_reported {
                    known.change_reported = true;
                    actions.push(changed(&pod));
                }
                known.pod = pod;
            }
            None => {
                // A pod that requests none of our resources would only use memory here.
                if !pod.request.wants_gpus() && pod.held == Held::Nothing {
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
                    PodInCore {
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

    /// Forget a pod whose object is gone. Its records stay, because its containers may still run.
    pub fn delete_pod(&mut self, uid: &str) {
        self.told_of(uid);
        self.pods.remove(uid);
        self.others.remove(uid);
    }

    /// Replace the known pods by the initial list of a watch that starts or restarts.
    pub fn reset_pods(&mut self, pods: Vec<Pod>) -> Vec<AgentAction> {
        // A pod that came and went between two watches produced no event. Nothing then tells whether a list that shows it is
        // older or newer than the watch, so the lists in progress do not count.
        self.lists.values_mut().for_each(|told| *told = None);
        self.remove_all_but(&pods, &BTreeSet::new());
        pods.into_iter().flat_map(|pod| self.apply_pod(pod)).collect()
    }

    /// Begin a list of this node's pods alongside the watch. End it with [`AgentCore::listed`] or [`AgentCore::list_failed`].
    pub fn begin_list(&mut self) -> Listing {
        let listing = Listing(self.next_list);
        self.next_list += 1;
        self.lists.insert(listing.0, Some(BTreeSet::new()));
        listing
    }

    /// Apply a finished list. The list shows the pods at some moment after it began, so it may be older than what the watch has reported
    /// meanwhile. For pods that the watch reported since the list began, only the watch counts. For all other pods the list is newer: a pod
    /// that was known before and is not in the list is gone.
    ///
    /// Return `None` and apply nothing if the watch started again meanwhile.
    pub fn listed(&mut self, listing: Listing, pods: Vec<Pod>) -> Option<Vec<AgentAction>> {
        let told = self.lists.remove(&listing.0)??;
        self.remove_all_but(&pods, &told);
        let newer = pods.into_iter().filter(|pod| !told.contains(&pod.uid));
        Some(newer.flat_map(|pod| self.apply_pod(pod)).collect())
    }

    /// Forget a list that failed.
    pub fn list_failed(&mut self, listing: Listing) {
        self.lists.remove(&listing.0);
    }

    fn told_of(&mut self, uid: &str) {
        for told in self.lists.values_mut().flatten() {
            told.insert(uid.to_owned());
        }
    }

    /// Delete every known pod that is neither present nor spared.
    fn remove_all_but(&mut self, present: &[Pod], spared: &BTreeSet<String>) {
        let present: BTreeSet<&str> = present.iter().map(|pod| pod.uid.as_str()).collect();
        let known = self.pods.keys().chain(self.others.keys());
        let gone = known.filter(|uid| !present.contains(uid.as_str()) && !spared.contains(*uid));
        for uid in gone.cloned().collect::<Vec<String>>() {
            self.delete_pod(&uid);
        }
    }

    /// Report whether containers of pods with a grant may be running now, so that their cgroups must exist.
    pub fn expects_cgroups(&self) -> bool {
        !self.records.is_empty() || self.pods.values().any(|known| known.pod.container_running)
    }

    /// Return the UIDs of the pods that count as running when the agent cannot see what runs on the node: pods with a grant, and
    /// pods with device ids from the kubelet, which may be about to start their containers.
    pub fn all_that_may_run(&self, handouts: Option<&[Handout]>) -> BTreeSet<String> {
        let granted = self.records.keys().map(|key| &key.uid);
        let handed_out = handouts.unwrap_or_default().iter().map(|handout| &handout.key.uid);
        granted.chain(handed_out).cloned().collect()
    }

    /// Store the checkpoint's entries. Ids from an Allocate call count as handed out until a second checkpoint lacks them,
    /// because the first may have been read while the kubelet was still writing.
    pub fn set_handouts(&mut self, handouts: Vec<Handout>) {
        self.handouts = handouts;
        if self.inherited.is_none() {
            self.inherited = Some(
                self.of_another_plugin(&self.handouts)
                    .map(|handout| handout.key.clone())
                    .collect(),
            );
        }
        let in_checkpoint: BTreeSet<&str> = self.handouts.iter().flat_map(|h| h.ids.iter().map(String::as_str)).collect();
        self.in_flight.retain_mut(|in_flight| {
            in_flight.age = in_flight.age.saturating_add(1);
            in_flight.age < 2 && !in_flight.ids.iter().all(|id| in_checkpoint.contains(id.as_str()))
        });
    }

    /// Record that the caller performed this action.
    pub fn commit(&mut self, action: &AgentAction) {
        match action {
            AgentAction::WriteRecord(record) => {
                self.records.insert(ContainerKey::of(record), record.clone());
                // The extender must not promise these GPUs until the next reconciliation.
                for (uuid, memory) in self.held_by_choice(record) {
                    self.held_by_pods.insert(uuid.clone());
                    let held = self.held.entry(uuid).or_default();
                    *held = memory.max(*held);
                }
                self.show_held();
            }
            AgentAction::RemoveRecord(key) => {
                self.records.remove(key);
                if self.records_of(&key.uid).next().is_none() {
                    self.with_limits.remove(&key.uid);
                }
            }
            AgentAction::Limit(LimitStep::Driver { uid, .. }) => {
                // The pod may have ended while the driver was asked.
                if self.records_of(uid).next().is_some() {
                    self.with_limits.insert(uid.clone());
                }
            }
            AgentAction::Limit(_)
            | AgentAction::WriteSpec { .. }
            | AgentAction::RemoveSpec { .. }
            | AgentAction::Event { .. } => {}
        }
    }

    /// Report whether a pod has no grant and certainly runs no more.
    pub fn is_gone(&self, uid: &str, facts: &DecisionFacts) -> bool {
        facts.synced && self.records_of(uid).next().is_none() && !self.may_run(uid, facts)
    }

    fn gpu(&self, uuid: &str) -> Option<&Gpu> {
        self.gpus.iter().find(|gpu| gpu.uuid == uuid)
    }

    /// Return the units of grants that were made before `--memory-unit` was changed, smallest first.
    fn other_units(&self) -> impl Iterator<Item = MemoryUnit> + use<> {
        let units = self.records.values().map(|record| record.unit);
        let others: BTreeSet<MemoryUnit> = units.filter(|unit| *unit != self.settings.unit).collect();
        others.into_iter()
    }

    /// Return each handout of a resource that grants GPUs, with the resource.
    fn granting<'a>(&self, handouts: &'a [Handout]) -> impl Iterator<Item = (ResourceSpec, &'a Handout)> + use<'a> {
        handouts.iter().filter_map(|handout| {
            let spec = ResourceSpec::named(&handout.resource)?;
            spec.grants().then_some((spec, handout))
        })
    }

    fn records_of<'a>(&'a self, uid: &'a str) -> impl Iterator<Item = &'a GrantRecord> {
        self.records
            .range(
                ContainerKey {
                    uid: uid.to_owned(),
                    container: String::new(),
                }..,
            )
            .take_while(move |(key, _)| key.uid == uid)
            .map(|(_, record)| record)
    }

    /// Return `namespace/name`, or the UID if the name is not known.
    fn pod_name(&self, uid: &str) -> String {
        match self.pods.get(uid) {
            Some(known) => known.pod.key().to_string(),
            None => self
                .records_of(uid)
                .next()
                .map_or_else(|| format!("pod {uid}"), |record| record.pod().to_string()),
        }
    }

    /// Report whether a pod may still have or get a running container: its object has not ended, or its cgroup has processes. An
    /// unknown pod counts as running until the list of pods was complete once.
    fn may_run(&self, uid: &str, facts: &DecisionFacts) -> bool {
        facts.populated.contains(uid)
            || match self.pods.get(uid) {
                Some(known) => !known.pod.ended(),
                None => !facts.synced,
            }
    }
}

fn changed(pod: &Pod) -> AgentAction {
    AgentAction::Event {
        pod: pod.key(),
        uid: pod.uid.clone(),
        reason: "AllocationChanged",
        text: "the annotation divvy.dev/allocation was changed after the pod was bound; the first value stays in force. \
               Only the Divvy extender should write this annotation: check that Divvy's admission policies are installed"
            .to_owned(),
    }
}

impl ContainerKey {
    /// Return the key of a record.
    pub fn of(record: &GrantRecord) -> ContainerKey {
        ContainerKey {
            uid: record.uid.clone(),
            container: record.container.clone(),
        }
    }
}

/// A grant's spec as it is on the node: what decisions need of its text, which is long.
#[derive(Debug, PartialEq, Eq)]
pub struct SpecOnNode {
    digest: u64,
    record: Option<GrantRecord>,
}

impl SpecOnNode {
    /// Read a spec. Any text is accepted.
    pub fn of(text: &str) -> SpecOnNode {
        let record = || GrantRecord::parse(cdi::Spec::parse(text).ok()?.owner()?).ok();
        SpecOnNode {
            digest: project::digest(text),
            record: record(),
        }
    }

    /// Return the UID of the pod that the spec belongs to, or `None` if the spec does not say.
    pub fn owner(&self) -> Option<&str> {
        self.record.as_ref().map(|record| record.uid.as_str())
    }
}
