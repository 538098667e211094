//! The agent's shell in the simulation: the real decisions, with a disk in memory.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use divvy_agent_core::{
    AgentAction, AgentCore, AllocateError, ContainerKey, CoreSettings, DecisionFacts, GpuOffer, Handout, MigStrategy, NodeFiles,
    NodeKey, PreStart, Reason, Reconciled, ResourceSpec, SpecOnNode,
};
use divvy_cdi as cdi;
use divvy_model::{Gpu, GrantRecord, Health, Held, MemoryUnit, MiB, Pod};

use crate::Violation;
use crate::api::{ApiModel, ListInFlight, PodWatch, WatcherEvent, at_index};
use crate::story::{Story, ensure};
use crate::whole::WHOLE;

/// The agent's files and the kernel's state, which is everything that survives the end of the agent's process.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Disk {
    pub records: BTreeMap<ContainerKey, GrantRecord>,
    /// The text of each spec, and what the agent reads in it.
    pub specs: BTreeMap<String, (String, Arc<SpecOnNode>)>,
}

impl Disk {
    /// Perform an action, as `Store::perform` does.
    fn perform(&mut self, action: &AgentAction) -> Result<(), Violation> {
        match action {
            AgentAction::WriteRecord(record) => {
                let read = GrantRecord::parse(&record.to_json()).map_err(|error| error.to_string())?;
                ensure!(
                    read == *record,
                    "a record differs from what is read from its file: {record:?}"
                );
                self.records.insert(ContainerKey::of(record), read);
            }
            AgentAction::RemoveRecord(key) => drop(self.records.remove(key)),
            AgentAction::WriteSpec { name, text } => {
                let read = Arc::new(SpecOnNode::of(text));
                self.specs.insert(name.clone(), (text.clone(), read));
            }
            AgentAction::RemoveSpec { name, owner } => {
                if self.specs.get(name).is_some_and(|(_, spec)| spec.owner() == owner.as_deref()) {
                    self.specs.remove(name);
                }
            }
            AgentAction::Limit(_) | AgentAction::Event { .. } => {}
        }
        Ok(())
    }
}

/// The state that a node shows to an agent that reads it now.
#[derive(Debug, Clone, Copy)]
pub struct Sight<'a> {
    pub gpus: &'a [Gpu],
    /// The kubelet's checkpoint.
    pub handouts: &'a [Handout],
    /// The UIDs of the pods that have processes. `None` if the kubelet creates no cgroups for pods.
    pub populated: Option<&'a BTreeSet<String>>,
}

/// One run of the agent's process, from its start to its end.
#[derive(Debug, Clone)]
pub struct AgentRun {
    pub core: AgentCore,
    settings: CoreSettings,
    pub pods: PodWatch,
    pub synced: bool,
    /// Whether the watch has received its first list.
    followed: bool,
    /// A list that is on its way, because the watch was cut.
    pub listing: Option<ListInFlight>,
    /// Whether a list outside the watch has arrived and the watch has not caught up since. If so, the agent's knowledge of pods
    /// is a mixture of several moments.
    muddled: bool,
    /// The number of actions until the process is killed.
    pub dies_after: Option<u8>,
    /// The inputs of the last comparison of what this agent and a restarted one would reconcile.
    compared: Option<ComparedState>,
}

type ComparedState = (Disk, Vec<Gpu>, Vec<Handout>, Option<BTreeSet<String>>, BTreeMap<String, Pod>);

/// The reason why the agent's work stopped: its process was killed, so requests to it get no response, or an invariant is broken.
#[derive(Debug)]
pub enum AgentStop {
    Killed,
    Broken(Violation),
}

impl From<Violation> for AgentStop {
    fn from(violation: Violation) -> AgentStop {
        AgentStop::Broken(violation)
    }
}

/// A list of pods outside the watch, in the core's representation.
pub type BegunListing = divvy_agent_core::Listing;

/// The result of PreStartContainer.
#[derive(Debug)]
pub enum PreStartResult {
    /// The start is granted to this container.
    Granted(ContainerKey),
    /// The start is refused for this reason.
    Refused(Reason),
    /// Something is unknown, so the agent lists the pods before it decides.
    Lists(BegunListing),
}

impl AgentRun {
    /// Start a process that knows only what is on the disk and what the node shows.
    pub fn new(node: &str, boot: u32, reserve: MiB, whole: bool, disk: &Disk, sight: Sight<'_>) -> AgentRun {
        let settings = CoreSettings {
            unit: MemoryUnit::GIB,
            reserve,
            whole,
            mig: MigStrategy::None,
            also_shared: BTreeSet::new(),
            node_key: NodeKey([7; 32]),
            agent_version: "test".to_owned(),
            boot_id: format!("{node}-{boot}"),
            guard: None,
            mps: None,
        };
        let core = new_core(&settings, disk, sight);
        AgentRun {
            core,
            settings,
            pods: PodWatch::new(Some(node)),
            synced: false,
            followed: false,
            listing: None,
            muddled: false,
            dies_after: None,
            compared: None,
        }
    }

    /// Return the core of a new process that has read the disk and received the same events.
    pub fn rebuilt(&self, disk: &Disk, sight: Sight<'_>) -> AgentCore {
        let mut core = new_core(&self.settings, disk, sight);
        if self.synced {
            core.reset_pods(self.pods.view.values().cloned().collect());
        }
        core
    }

    /// Return how much memory of a GPU the agent currently shares.
    pub fn capacity(&self, uuid: &str) -> MiB {
        let units = self
            .core
            .gpus()
            .iter()
            .find(|gpu| gpu.uuid == uuid)
            .map_or(0, |gpu| gpu.units);
        self.settings.unit.memory(units).unwrap()
    }

    /// List the pods of this node, and deliver the list immediately.
    pub fn list(&mut self, api: &ApiModel, disk: &mut Disk) -> Result<(), AgentStop> {
        self.listing = Some(self.pods.ask(api));
        self.list_arrives(disk)
    }

    /// Cut the watch. The API server takes a list, which arrives later.
    pub fn ask(&mut self, api: &ApiModel) {
        self.listing = Some(self.pods.ask(api));
    }

    /// Deliver the list of the watch.
    pub fn list_arrives(&mut self, disk: &mut Disk) -> Result<(), AgentStop> {
        let Some(listing) = self.listing.take() else {
            return Ok(());
        };
        let pods = self.pods.arrive(listing);
        self.synced = true;
        self.followed = true;
        self.muddled = false;
        let actions = self.core.reset_pods(pods);
        self.perform(&actions, disk)
    }

    /// Deliver up to `events` events. A list that is on its way is delivered first. If the watch has received no list yet, only
    /// list the pods.
    pub fn watch(&mut self, api: &ApiModel, disk: &mut Disk, events: usize) -> Result<(), AgentStop> {
        if self.listing.is_some() {
            self.list_arrives(disk)?;
        } else if !self.followed {
            return self.list(api, disk);
        }
        for _ in 0..events {
            match self.pods.next(api) {
                None => break,
                Some(WatcherEvent::Applied(pod)) => {
                    let actions = self.core.apply_pod(pod);
                    self.perform(&actions, disk)?;
                }
                Some(WatcherEvent::Deleted(uid)) => self.core.delete_pod(&uid),
            }
        }
        self.muddled &= !self.pods.is_current(api);
        Ok(())
    }

    pub fn facts(&self, disk: &Disk, sight: Sight<'_>, fresh: bool) -> DecisionFacts {
        DecisionFacts {
            handouts: Some(sight.handouts.to_vec()),
            populated: sight
                .populated
                .cloned()
                .unwrap_or_else(|| self.core.all_that_may_run(Some(sight.handouts))),
            synced: self.synced,
            fresh,
            node: NodeFiles::default(),
            specs: disk
                .specs
                .iter()
                .map(|(name, (_, spec))| (name.clone(), spec.clone()))
                .collect(),
            memory_in_use: None,
            escapes: BTreeMap::new(),
        }
    }

    /// Perform actions in order. An action takes effect only once it is complete.
    fn perform(&mut self, actions: &[AgentAction], disk: &mut Disk) -> Result<(), AgentStop> {
        for action in actions {
            if let Some(left) = &mut self.dies_after {
                if *left == 0 {
                    return Err(AgentStop::Killed);
                }
                *left -= 1;
            }
            disk.perform(action)?;
            self.core.commit(action);
        }
        Ok(())
    }

    /// Handle PreStartContainer. If something is unknown, begin a list of the pods. `events` events arrive after the agent has
    /// read the node and before it decides.
    #[expect(clippy::too_many_arguments, reason = "the whole world, part by part")]
    pub fn pre_start(
        &mut self,
        spec: ResourceSpec,
        ids: &[String],
        events: usize,
        api: &ApiModel,
        disk: &mut Disk,
        sight: Sight<'_>,
        story: &mut Story,
    ) -> Result<PreStartResult, AgentStop> {
        let facts = self.facts(disk, sight, false);
        if self.followed && self.listing.is_none() {
            self.watch(api, disk, events)?;
        }
        self.core.set_handouts(sight.handouts.to_vec());
        let same = self.rebuilt(disk, sight).pre_start(spec, ids, &facts);
        let answer = self.core.pre_start(spec, ids, &facts);
        if !self.muddled && !self.is_moved(sight) && outcome(&answer) != outcome(&same) {
            let text = format!("a restarted agent would answer PreStartContainer with\n{same:?}\ninstead of\n{answer:?}");
            return Err(AgentStop::Broken(Violation(text)));
        }
        if let PreStart::Wait(reason, text) = &answer {
            story.tell(|| format!("  not known yet ({}): {text}; the agent lists the pods", reason.label()));
            return Ok(PreStartResult::Lists(self.core.begin_list()));
        }
        self.answer(answer, disk, story)
    }

    /// Deliver the list for which PreStartContainer waits. The watch may be ahead of this list or behind it.
    #[expect(clippy::too_many_arguments, reason = "the whole world, part by part")]
    pub fn pre_start_listed(
        &mut self,
        spec: ResourceSpec,
        ids: &[String],
        begun: BegunListing,
        listing: ListInFlight,
        api: &ApiModel,
        disk: &mut Disk,
        sight: Sight<'_>,
        story: &mut Story,
    ) -> Result<PreStartResult, AgentStop> {
        story.tell(|| {
            let (at, seen) = (listing.at, self.pods.at());
            let age = match seen.cmp(&at) {
                std::cmp::Ordering::Less => "newer than what the watch has shown",
                std::cmp::Ordering::Equal => "as new as what the watch has shown",
                std::cmp::Ordering::Greater => "overtaken by the watch",
            };
            format!("  the agent's list of pods arrives, {age}")
        });
        let Some(actions) = self.core.listed(begun, listing.pods) else {
            story.tell(|| "  the watch has started again in the meantime, so the list is discarded".to_owned());
            return Ok(PreStartResult::Refused(Reason::UnknownPod));
        };
        self.perform(&actions, disk)?;
        self.muddled = true;
        self.synced = true;
        self.core.set_handouts(sight.handouts.to_vec());
        let answer = self.core.pre_start(spec, ids, &self.facts(disk, sight, true));
        self.muddled &= !(self.followed && self.pods.is_current(api));
        self.answer(answer, disk, story)
    }

    fn answer(&mut self, answer: PreStart, disk: &mut Disk, story: &mut Story) -> Result<PreStartResult, AgentStop> {
        match answer {
            PreStart::Granted { actions, key, .. } => {
                self.perform(&actions, disk)?;
                Ok(PreStartResult::Granted(key))
            }
            PreStart::Refused { reason, text, actions } => {
                story.tell(|| format!("  refused ({}): {text}", reason.label()));
                self.perform(&actions, disk)?;
                Ok(PreStartResult::Refused(reason))
            }
            PreStart::Wait(reason, text) => {
                story.tell(|| format!("  not known yet ({}): {text}", reason.label()));
                Ok(PreStartResult::Refused(reason))
            }
        }
    }

    /// Handle GetPreferredAllocation.
    pub fn preferred(&mut self, spec: ResourceSpec, available: &[String], must: &[String], size: usize) -> Vec<String> {
        self.core.preferred(spec, available, must, size)
    }

    /// Handle Allocate. Return the name of the grant's CDI device.
    pub fn allocate(&mut self, spec: ResourceSpec, ids: &[String]) -> Result<String, AllocateError> {
        let names = self.core.allocate(spec, ids)?;
        let [name] = names.as_slice() else {
            panic!("one container, one CDI device: {names:?}");
        };
        Ok(cdi::grant_name(name).unwrap().to_owned())
    }

    /// Reconcile once. `events` events arrive after the agent has read the node and before it decides.
    pub fn reconcile(
        &mut self,
        api: &ApiModel,
        disk: &mut Disk,
        sight: Sight<'_>,
        events: usize,
    ) -> Result<Reconciled, AgentStop> {
        let facts = self.facts(disk, sight, false);
        if self.followed && self.listing.is_none() {
            self.watch(api, disk, events)?;
        }
        self.core.set_handouts(sight.handouts.to_vec());
        let found = self.core.reconcile(&facts);
        self.perform(&found.actions, disk)?;
        Ok(found)
    }

    /// Check that this agent knows the same as an agent that starts now (invariant 6).
    pub fn check_rebuilt(&mut self, api: &ApiModel, disk: &Disk, sight: Sight<'_>) -> Result<(), Violation> {
        let rebuilt = self.rebuilt(disk, sight);
        ensure!(
            rebuilt.records().eq(self.core.records()),
            "the agent's records differ from those on its disk: {:?} instead of {:?}",
            self.core.records().collect::<Vec<_>>(),
            rebuilt.records().collect::<Vec<_>>()
        );
        if self.muddled || self.is_moved(sight) {
            return Ok(());
        }
        for (uid, pod) in self.pods.view.iter().filter(|_| self.synced) {
            let known = self.core.pod(uid);
            ensure!(known.is_some(), "the agent has forgotten {uid}, which its watch has shown");
            // The agent does not keep the rules of a bound pod.
            let mut pod = pod.clone();
            pod.request.rules = None;
            ensure!(
                known == Some(&pod),
                "the agent knows {uid} as {known:?}, but its watch has shown {pod:?}"
            );
        }
        for uid in api.bound.keys() {
            let is_known = self.core.pod(uid).is_some() && !self.pods.view.contains_key(uid);
            ensure!(!is_known, "the agent still knows {uid}, which its watch has shown to be gone");
        }
        for (spec, expected) in [
            (ResourceSpec::MEMORY, self.expected_healthy()),
            (WHOLE, Some(self.expected_whole(disk))),
        ] {
            let (ours, theirs) = (healthy(&self.core, spec), healthy(&rebuilt, spec));
            ensure!(
                ours == theirs,
                "the agent offers {ours} ids of {}, after a restart it would offer {theirs}",
                spec.name()
            );
            if let Some(expected) = expected {
                ensure!(
                    ours == expected,
                    "the agent offers {ours} ids of {}, but by pods and health it must offer {expected}",
                    spec.name()
                );
            }
        }
        let compared = (
            disk.clone(),
            sight.gpus.to_vec(),
            sight.handouts.to_vec(),
            sight.populated.cloned(),
            self.pods.view.clone(),
        );
        if self.compared.as_ref() == Some(&compared) {
            return Ok(());
        }
        self.compared = Some(compared);
        let facts = self.facts(disk, sight, false);
        let (ours, theirs) = (self.core.clone().reconcile(&facts), rebuilt.clone().reconcile(&facts));
        // A process that has not reconciled yet keeps what was published; a new one measures.
        ensure!(
            files(&ours.actions).eq(files(&theirs.actions)) && (ours.held == theirs.held || !self.synced),
            "the agent would reconcile with\n{ours:?}\nand after a restart with\n{theirs:?}"
        );
        Ok(())
    }

    /// Report whether a GPU was replaced while a pod with gpushare's annotations is on the node. The index in these annotations
    /// may now mean another GPU than when the pod started. A running agent uses the index, whereas an agent that starts uses its
    /// records.
    fn is_moved(&self, sight: Sight<'_>) -> bool {
        let lost = sight.gpus.iter().any(|gpu| gpu.health == Health::Lost);
        lost && self.pods.view.values().any(|pod| matches!(pod.held, Held::Legacy(_)))
    }

    /// Return the expected number of ids that are healthy: all ids of healthy GPUs, and as many ids of failed GPUs as pods hold
    /// there, because kube-scheduler subtracts what those pods request. Return `None` if there are pods that no extender placed.
    fn expected_healthy(&self) -> Option<usize> {
        let foreign = |pod: &Pod| match &pod.held {
            Held::Allocation(allocation) => {
                let sum = allocation
                    .gpus
                    .iter()
                    .fold(MiB::ZERO, |sum, share| sum.saturating_add(share.memory));
                self.settings.unit.units_in(sum) != pod.request.effective_units().unwrap()
            }
            _ => true,
        };
        let mut shares = self.pods.view.values().filter(|pod| pod.request.whole.is_none());
        if shares.any(foreign) {
            return None;
        }
        let held = |uuid: &str| {
            let pods = self.pods.view.values();
            let pods = pods.filter(|pod: &&Pod| !pod.ended() && pod.request.whole.is_none());
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
        Some(usize::try_from(units.sum::<u64>()).unwrap())
    }

    /// Return the expected number of healthy ids of whole GPUs: one for each healthy GPU, and one for each failed GPU that a pod
    /// has as a whole, by its annotation or by its records. gpushare's annotations count here as well, although the pod gets the GPUs
    /// that its ids name.
    fn expected_whole(&self, disk: &Disk) -> usize {
        let pods = self.pods.view.values();
        let pods: Vec<&Pod> = pods.filter(|pod| !pod.ended() && pod.request.whole.is_some()).collect();
        let has = |pod: &Pod, uuid: &str| {
            let named = match &pod.held {
                Held::Allocation(allocation) => allocation.share(uuid).is_some(),
                Held::Legacy(legacy) => {
                    let mut indices = legacy.gpus.keys();
                    indices.any(|index| at_index(self.core.gpus(), *index) == Some(uuid))
                }
                Held::Nothing | Held::Unreadable(_) => false,
            };
            let mut records = disk.records.values().filter(|record| record.uid == pod.uid);
            named || records.any(|record| record.gpus.iter().any(|share| share.uuid == uuid))
        };
        let offered = self.core.gpus().iter().filter(|gpu| gpu.whole.is_some());
        offered
            .filter(|gpu| gpu.health == Health::Ok || pods.iter().any(|pod| has(pod, &gpu.uuid)))
            .count()
    }
}

fn new_core(settings: &CoreSettings, disk: &Disk, sight: Sight<'_>) -> AgentCore {
    let mut core = AgentCore::new(settings.clone());
    core.load_records(disk.records.values().cloned().collect());
    set_hardware(&mut core, sight.gpus);
    core.set_handouts(sight.handouts.to_vec());
    core
}

/// Pass these GPUs to the core, with what the agent offers of each.
pub(crate) fn set_hardware(core: &mut AgentCore, gpus: &[Gpu]) {
    let settings = core.settings();
    let complete = |gpu: &Gpu| {
        let GpuOffer { reserve, units, whole } = settings.offer(gpu.vendor, gpu.total, gpu.partition.as_ref());
        Gpu {
            reserve,
            units,
            whole,
            ..gpu.clone()
        }
    };
    let gpus: Vec<Gpu> = gpus.iter().map(complete).collect();
    let drivers = gpus.iter().map(|gpu| (gpu.vendor, "550.54.15".to_owned())).collect();
    core.set_hardware(drivers, gpus).unwrap();
    core.knows_service();
}

fn healthy(core: &AgentCore, spec: ResourceSpec) -> usize {
    core.devices(spec).iter().filter(|device| device.healthy).count()
}

fn files(actions: &[AgentAction]) -> impl Iterator<Item = &AgentAction> {
    actions.iter().filter(|action| !matches!(action, AgentAction::Event { .. }))
}

/// Return the part of a response that must not depend on how long the agent has been running. Events are excluded, because each
/// is sent only once.
fn outcome(answer: &PreStart) -> String {
    match answer {
        PreStart::Granted { actions, key, .. } => format!("{key:?} {:?}", files(actions).collect::<Vec<_>>()),
        PreStart::Wait(reason, text) => format!("{reason:?} {text}"),
        PreStart::Refused { reason, text, .. } => format!("{reason:?} {text}"),
    }
}
