//! Check K13: how pods request GPUs.

use std::collections::{BTreeMap, BTreeSet};

use divvy_model::names::{GPU_COUNT, GPU_MEM, INVENTORY};
use divvy_model::{Inventory, MemoryUnit, parse_quantity, quantity_milli};

use super::super::cluster::offers;
use super::super::objects::{full_name, lives};
use super::super::objects::{listed, some, some_lines};
use super::{LeftOut, asks_for};
use crate::check::{CheckVerdict, count, problem};
use crate::facts::Facts;
use crate::facts::cluster::{CheckedPod, ClusterFacts};
use crate::gpu_resource::is_gpu;

/// The unit sizes of `aliyun.com/gpu-mem`, in MiB, that the agents publish. A consistent cluster has only one.
struct UnitSizes(BTreeSet<u64>);

impl UnitSizes {
    fn of(cluster: &ClusterFacts) -> UnitSizes {
        let inventories = cluster
            .nodes
            .iter()
            .filter_map(|node| node.metadata.annotations.get(INVENTORY));
        UnitSizes(
            inventories
                .filter_map(|text| Inventory::parse(text).ok())
                .map(|inventory| inventory.unit.mib())
                .collect(),
        )
    }

    /// Return the unit of the cluster. If the agents publish no unit, or different units, return the default of 1 GiB.
    fn one(&self) -> MemoryUnit {
        match self.0.len() {
            1 => self.0.first().copied().and_then(MemoryUnit::new).unwrap_or_default(),
            _ => MemoryUnit::default(),
        }
    }

    /// Return a note about the size of the unit, to be appended to a number of units.
    fn text(&self) -> String {
        let one = self.one();
        match self.0.len() {
            0 => format!("if one unit is 1 {one}, the default; no agent has published its unit"),
            1 if one.mib() == 1 || one.mib() == 1024 => format!("one unit is 1 {one} in this cluster"),
            1 => format!("one unit is {one} in this cluster"),
            _ => "if one unit is 1 GiB; the nodes of this cluster use different units".to_owned(),
        }
    }

    /// Convert bytes to units, rounded up.
    fn units(&self, bytes: u64) -> u64 {
        bytes.div_ceil(self.one().mib().saturating_mul(1 << 20))
    }
}

/// A mistake in a pod's GPU request.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum WrongRequest {
    /// An amount in bytes where a number of units is expected, with the number to write instead.
    Bytes { resource: String, amount: String, units: u64 },
    /// A resource that no node offers.
    NotOffered { resource: String },
    /// A number of GPUs (`aliyun.com/gpu-count`) without GPU memory.
    CountAlone,
    /// A request that differs from the limit of the same resource.
    OtherRequest { resource: String, request: String },
    /// An amount that is not a whole number.
    Fraction { resource: String, amount: String },
}

/// Report whether an amount has a suffix for bytes. `k` does not count as one, because the API server shortens large plain
/// numbers with it (4000 becomes 4k).
fn is_of_bytes(amount: &str) -> bool {
    amount.ends_with(['i', 'M', 'G', 'T', 'P', 'E'])
}

fn wrongs(pod: &CheckedPod, offered: &BTreeSet<&str>, unit: &UnitSizes) -> BTreeSet<WrongRequest> {
    let mut wrong = BTreeSet::new();
    let has = |resource: &str| pod.spec.all_containers().any(|container| asks_for(container, resource));
    if has(GPU_COUNT) && !has(GPU_MEM) {
        wrong.insert(WrongRequest::CountAlone);
    }
    let waits = pod.spec.node_name.is_none();
    for container in pod.spec.all_containers() {
        let resources = &container.resources;
        for (name, request) in resources.requests.iter().filter(|(name, _)| is_gpu(name)) {
            if resources.limits.get(name) != Some(request) {
                wrong.insert(WrongRequest::OtherRequest {
                    resource: name.to_owned(),
                    request: request.to_owned(),
                });
            }
        }
        for (name, limit) in resources.limits.iter().filter(|(name, _)| is_gpu(name)) {
            let (resource, amount) = (name.to_owned(), limit.to_owned());
            let whole = match quantity_milli(limit) {
                Ok(milli) => milli % 1000 == 0,
                // The amount is too large to count in thousandths, or is not a quantity.
                Err(_) => parse_quantity(limit).is_some(),
            };
            if name == GPU_MEM && is_of_bytes(limit) && whole {
                let units = unit.units(parse_quantity(limit).unwrap_or(u64::MAX));
                wrong.insert(WrongRequest::Bytes { resource, amount, units });
            } else if !whole {
                wrong.insert(WrongRequest::Fraction { resource, amount });
            } else if waits && ![GPU_MEM, GPU_COUNT].contains(&name) && !offered.contains(name) {
                wrong.insert(WrongRequest::NotOffered { resource });
            }
        }
    }
    wrong
}

impl WrongRequest {
    /// Return the three parts of the finding: what was found, why it matters, and what to write instead.
    fn text(&self, pods: &[String], unit: &UnitSizes) -> [String; 3] {
        let (names, verb) = (some(pods), if pods.len() == 1 { "requests" } else { "request" });
        let unit = unit.text();
        match self {
            WrongRequest::Bytes { resource, amount, units } => [
                format!("{names} {verb} {resource}: {amount}; write {units} ({unit})"),
                format!(
                    "{resource} is a number of units, without a suffix: {amount} means {} units, more than any GPU has, so the pod stays Pending",
                    parse_quantity(amount).unwrap_or(u64::MAX)
                ),
                format!("in the pod's manifest write limits: {{{resource}: {units}}} instead of {amount}"),
            ],
            WrongRequest::NotOffered { resource } => [
                format!("{names} {verb} {resource}, which no node offers"),
                format!("no node has {resource}, so the pod stays Pending; Divvy offers shares of GPUs as {GPU_MEM}"),
                format!(
                    "instead of {resource} write limits: {{{GPU_MEM}: N}}, with N units of GPU memory ({unit}); or run the device plugin of {resource} on nodes that Divvy does not serve"
                ),
            ],
            WrongRequest::CountAlone => [
                format!("{names} {verb} only {GPU_COUNT}"),
                format!("{GPU_COUNT} has no effect: a pod does not get a GPU for it"),
                format!(
                    "in the pod's manifest write limits: {{{GPU_MEM}: N}}, with N units of GPU memory ({unit}); the annotation divvy.dev/gpus: \"K\" spreads the units over K GPUs"
                ),
            ],
            WrongRequest::OtherRequest { resource, request } => [
                format!(
                    "{names} {} the request {resource}: {request}, which differs from the limit",
                    if pods.len() == 1 { "has" } else { "have" }
                ),
                "GPUs are requested in limits; requests must be equal to limits or absent".to_owned(),
                format!("write {resource} only in limits"),
            ],
            WrongRequest::Fraction { resource, amount } => [
                format!("{names} {verb} {resource}: {amount}, which is not a whole number"),
                format!("{resource} must be a whole number"),
                format!("write a whole number for {resource}"),
            ],
        }
    }
}

/// Judge check K13.
pub(in super::super) fn requests(facts: &Facts<'_>) -> CheckVerdict {
    let cluster = listed(facts, &["nodes", "pods"])?;
    let unit = UnitSizes::of(cluster);
    let offered: BTreeSet<&str> = cluster
        .nodes
        .iter()
        .flat_map(|node| {
            node.status
                .capacity
                .keys()
                .chain(node.status.allocatable.keys())
                .filter(|name| offers(node, name))
        })
        .collect();
    let mut wrong: BTreeMap<WrongRequest, Vec<String>> = BTreeMap::new();
    let mut looked = 0;
    let mut ended = BTreeSet::new();
    for pod in cluster.pods.iter().filter(|pod| pod.spec.wants_gpu()) {
        if !lives(&pod) {
            ended.insert(full_name(pod));
            continue;
        }
        looked += 1;
        for one in wrongs(pod, &offered, &unit) {
            wrong.entry(one).or_default().push(full_name(pod));
        }
    }
    let mut left_out = LeftOut::default();
    left_out.add(&ended, "ended");
    let left_out = left_out.text();
    if wrong.is_empty() {
        return Ok(format!("{} with GPUs{left_out}", count(looked, "pod")));
    }
    let said: Vec<[String; 3]> = wrong.iter().map(|(wrong, pods)| wrong.text(pods, &unit)).collect();
    let lines = |part: usize| {
        let mut lines: Vec<&str> = said.iter().map(|parts| parts[part].as_str()).collect();
        lines.dedup();
        some_lines(&lines)
    };
    problem(format!("{}{left_out}", lines(0)), lines(1), lines(2))
}
