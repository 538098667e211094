//! Two audits that share nothing with the code under test but the annotation's format: what was booked at every commit of the
//! API server, and what the containers that ran say they held, at every moment.

use std::collections::{BTreeMap, BTreeSet};

use divvy_model::machine::{MachineNode, Machines};
use divvy_model::{Allocation, names};
use divvy_testbed::api::{Event, EventKind};
use divvy_testbed::node::ContainerView;
use jiff::Timestamp;
use serde_json::Value;

const UNIT_MIB: u64 = 1024;

/// A pod as its object said last.
#[derive(Debug)]
struct Booked {
    name: String,
    object: Value,
    node: Option<String>,
    allocation: Option<Allocation>,
}

impl Booked {
    /// Units that a container asks for.
    fn asks_for(&self, container: &str) -> u64 {
        let lists = ["initContainers", "containers"].into_iter();
        let containers = lists.filter_map(|list| self.object["spec"][list].as_array()).flatten();
        let mut named = containers.filter(|spec| spec["name"] == container);
        let limit = named.next().map(|spec| spec["resources"]["limits"][names::GPU_MEM].clone());
        match limit {
            Some(Value::String(text)) => text.parse().expect("whole units"),
            _ => 0,
        }
    }

    /// Its phase is terminal and no container of it runs.
    fn ended(&self) -> bool {
        let status = &self.object["status"];
        let lists = ["initContainerStatuses", "containerStatuses"].into_iter();
        let mut statuses = lists.filter_map(|list| status[list].as_array()).flatten();
        let running = statuses.any(|status| !status["state"]["running"].is_null());
        matches!(status["phase"].as_str(), Some("Succeeded" | "Failed")) && !running
    }
}

/// What every pod held, by UID.
pub(super) struct Bookings(BTreeMap<String, Booked>);

impl Bookings {
    /// Reads the history; panics at the first commit that books a GPU beyond its memory, that gives an allocation to a pod
    /// without binding it, or that changes one.
    pub(super) fn of(history: &[Event], machines: &Machines) -> Bookings {
        assert!(!history.is_empty(), "there is a history");
        let mut pods: BTreeMap<String, Booked> = BTreeMap::new();
        let mut live: BTreeSet<String> = BTreeSet::new();
        for event in history.iter().filter(|event| &*event.resource == "pods") {
            let object = (*event.object).clone();
            let meta = &object["metadata"];
            let uid = meta["uid"].as_str().expect("a UID").to_owned();
            let text = meta["annotations"][names::ALLOCATION].as_str();
            let now = Booked {
                name: meta["name"].as_str().expect("a name").to_owned(),
                node: object["spec"]["nodeName"].as_str().map(str::to_owned),
                allocation: text.map(|text| Allocation::parse(text).expect("a legal allocation")),
                object,
            };
            let at = event.revision;
            assert!(
                now.allocation.is_none() || now.node.is_some(),
                "{} has an allocation and is bound nowhere, at revision {at}",
                now.name
            );
            if let Some(before) = pods.get(&uid).filter(|before| before.node.is_some()) {
                assert_eq!(before.allocation, now.allocation, "{} at revision {at}", now.name);
            }
            match event.kind {
                EventKind::Deleted => live.remove(&uid),
                _ => live.insert(uid.clone()),
            };
            pods.insert(uid, now);
            check_sums(pods.iter().filter(|(uid, _)| live.contains(*uid)), machines, at);
        }
        Bookings(pods)
    }
}

fn check_sums<'a>(pods: impl Iterator<Item = (&'a String, &'a Booked)>, machines: &Machines, revision: u64) {
    let mut booked: BTreeMap<&str, (u64, Vec<&str>)> = BTreeMap::new();
    for (_, pod) in pods.filter(|(_, pod)| !pod.ended()) {
        for share in pod.allocation.iter().flat_map(|allocation| &allocation.gpus) {
            let (sum, who) = booked.entry(&share.uuid).or_default();
            *sum += share.memory.0;
            who.push(&pod.name);
        }
    }
    for (uuid, (sum, who)) in booked {
        let capacity = machines.nodes.iter().find_map(|node| {
            let index = (0..node.gpus.len()).find(|index| node.gpu_uuid(*index) == uuid)?;
            Some(node.gpus[index].memory_mib)
        });
        let capacity = capacity.expect("a GPU of the cluster");
        assert!(
            sum <= capacity,
            "revision {revision}: {sum} of {capacity} MiB of {uuid} are booked, by {who:?}"
        );
    }
}

/// Panics if a container ran with another GPU, or with another size, than its pod's allocation says, or if the containers on
/// a GPU ever had more than it has.
pub(super) fn containers<'a>(runs: impl Iterator<Item = &'a (String, ContainerView)>, bookings: &Bookings, machines: &Machines) {
    let mut held: Vec<(String, u64, &ContainerView)> = Vec::new();
    for (node, view) in runs {
        let machine = machines.node(node).expect("a machine");
        let pod = bookings.0.get(&view.pod_uid).expect("a pod that was in the API server");
        let cards: Vec<&String> = view.devices.iter().filter(|path| is_card(path)).collect();
        let asked = pod.asks_for(&view.container);
        if asked == 0 {
            assert!(cards.is_empty(), "{} has {cards:?} without having asked", view.container);
            continue;
        }
        let [card] = cards.as_slice() else {
            panic!("container {} of {} has {:?}", view.container, view.pod, view.devices);
        };
        let (index, uuid) = gpu_at(machine, card);
        let allocation = pod.allocation.as_ref();
        let allocation = allocation.unwrap_or_else(|| panic!("{} ran without an allocation", view.pod));
        let share = allocation.containers.get(&view.container).expect("a share of each container");
        let [share] = share.as_slice() else {
            panic!("one GPU expected: {share:?}");
        };
        let who = format!("container {} of {} ({})", view.container, view.pod, view.id);
        assert_eq!(share.uuid, uuid, "{who} has {card}; allocated: {allocation:?}");
        let units = share.memory.0 / UNIT_MIB;
        assert_eq!(units, asked, "{who}");
        for (name, expected) in [
            (names::ALIYUN_IDX, index.to_string()),
            (names::ALIYUN_POD, units.to_string()),
            (names::ALIYUN_CONTAINER, units.to_string()),
            (names::ALIYUN_DEV, (machine.gpus[index].memory_mib / UNIT_MIB).to_string()),
            (names::VISIBLE_DEVICES, names::VISIBLE_NONE.to_owned()),
        ] {
            assert_eq!(view.env.get(name), Some(&expected), "{name} of {who}");
        }
        held.push((uuid, units, view));
    }
    for (uuid, _, started) in &held {
        let at = started.started_at;
        let runs_at = |view: &ContainerView| view.started_at <= at && view.finished_at.unwrap_or(Timestamp::MAX) > at;
        let beside = held.iter().filter(|(other, _, view)| other == uuid && runs_at(view));
        let (mut sum, mut who) = (0, Vec::new());
        for (_, units, view) in beside {
            sum += units;
            who.push(format!("{}/{}: {units}", view.pod, view.container));
        }
        let mut nodes = machines.nodes.iter();
        let capacity = nodes.find_map(|node| {
            let index = (0..node.gpus.len()).find(|index| node.gpu_uuid(*index) == *uuid)?;
            Some(node.gpus[index].memory_mib / UNIT_MIB)
        });
        assert!(
            Some(sum) <= capacity,
            "{sum} units of {capacity:?} of {uuid} were in use at {at}: {who:?}"
        );
    }
}

/// `/dev/nvidia0`, not `/dev/nvidiactl`.
fn is_card(path: &str) -> bool {
    let minor = path.strip_prefix("/dev/nvidia");
    minor.is_some_and(|minor| !minor.is_empty() && minor.bytes().all(|byte| byte.is_ascii_digit()))
}

fn gpu_at(machine: &MachineNode, path: &str) -> (usize, String) {
    let index = (0..machine.gpus.len()).find(|index| path == format!("/dev/nvidia{}", machine.gpu_minor(*index)));
    let index = index.unwrap_or_else(|| panic!("{path} is no GPU of {}", machine.name));
    (index, machine.gpu_uuid(index))
}
