//! How pods ask for GPUs.

use std::collections::{BTreeMap, BTreeSet};

use divvy_model::names::{GPU_COUNT, GPU_MEM, INVENTORY};
use divvy_model::{Inventory, MemoryUnit, parse_quantity, quantity_milli};

use super::super::cluster::{listed, offers, some, some_lines};
use super::{LeftOut, asks_for, full_name, is_gpu, lives};
use crate::check::{Verdict, count, problem};
use crate::facts::Facts;
use crate::facts::cluster::{Cluster, Pod};

/// The unit of `aliyun.com/gpu-mem`, as the agents publish it.
struct Unit(BTreeSet<u64>);

impl Unit {
    fn of(cluster: &Cluster) -> Unit {
        let inventories = cluster
            .nodes
            .iter()
            .filter_map(|node| node.metadata.annotations.get(INVENTORY));
        Unit(
            inventories
                .filter_map(|text| Inventory::parse(text).ok())
                .map(|inventory| inventory.unit.mib())
                .collect(),
        )
    }

    /// The one unit of the cluster; GiB, which is the default, where no agent or more than one says something.
    fn one(&self) -> MemoryUnit {
        match self.0.len() {
            1 => self.0.first().copied().and_then(MemoryUnit::new).unwrap_or_default(),
            _ => MemoryUnit::default(),
        }
    }

    /// What a number of units means, behind the number.
    fn said(&self) -> String {
        let one = self.one();
        match self.0.len() {
            0 => format!("if one unit is 1 {one}, the default; no agent has published the unit"),
            1 if one.mib() == 1 || one.mib() == 1024 => format!("one unit is 1 {one} in this cluster"),
            1 => format!("one unit is {one} in this cluster"),
            _ => "if one unit is 1 GiB; the nodes of this cluster do not agree on the unit".to_owned(),
        }
    }

    /// How many units this many bytes are.
    fn units(&self, bytes: u64) -> u64 {
        bytes.div_ceil(self.one().mib().saturating_mul(1 << 20))
    }
}

/// What is wrong with how pods ask.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Wrong {
    /// An amount of bytes where a number of units is meant, and the number to write.
    Bytes { resource: String, amount: String, units: u64 },
    /// A resource that no node has.
    NotOffered { resource: String },
    /// The number of GPUs alone.
    CountAlone,
    /// A request that is not the limit.
    OtherRequest { resource: String, request: String },
    /// Not a whole number.
    Fraction { resource: String, amount: String },
}

/// Whether an amount is one of bytes: the API server writes large plain numbers with k, and no others.
fn is_of_bytes(amount: &str) -> bool {
    amount.ends_with(['i', 'M', 'G', 'T', 'P', 'E'])
}

fn wrongs(pod: &Pod, offered: &BTreeSet<&str>, unit: &Unit) -> BTreeSet<Wrong> {
    let mut wrong = BTreeSet::new();
    let has = |resource: &str| pod.spec.all_containers().any(|container| asks_for(container, resource));
    if has(GPU_COUNT) && !has(GPU_MEM) {
        wrong.insert(Wrong::CountAlone);
    }
    let waits = pod.spec.node_name.is_none();
    for container in pod.spec.all_containers() {
        let resources = &container.resources;
        for (name, request) in resources.requests.iter().filter(|(name, _)| is_gpu(name)) {
            if resources.limits.get(name) != Some(request) {
                wrong.insert(Wrong::OtherRequest {
                    resource: name.to_owned(),
                    request: request.to_owned(),
                });
            }
        }
        for (name, limit) in resources.limits.iter().filter(|(name, _)| is_gpu(name)) {
            let (resource, amount) = (name.to_owned(), limit.to_owned());
            let whole = match quantity_milli(limit) {
                Ok(milli) => milli % 1000 == 0,
                // Too large to be counted in thousandths, or no quantity at all.
                Err(_) => parse_quantity(limit).is_some(),
            };
            if name == GPU_MEM && is_of_bytes(limit) && whole {
                let units = unit.units(parse_quantity(limit).unwrap_or(u64::MAX));
                wrong.insert(Wrong::Bytes { resource, amount, units });
            } else if !whole {
                wrong.insert(Wrong::Fraction { resource, amount });
            } else if waits && ![GPU_MEM, GPU_COUNT].contains(&name) && !offered.contains(name) {
                wrong.insert(Wrong::NotOffered { resource });
            }
        }
    }
    wrong
}

impl Wrong {
    /// What was found, why it matters, what to write instead.
    fn said(&self, pods: &[String], unit: &Unit) -> [String; 3] {
        let (names, verb) = (some(pods), if pods.len() == 1 { "asks" } else { "ask" });
        let unit = unit.said();
        match self {
            Wrong::Bytes { resource, amount, units } => [
                format!("{names} {verb} for {resource}: {amount}; write {units} ({unit})"),
                format!(
                    "{resource} counts units and takes no unit of bytes: {amount} means {} units, more than any GPU has, and the pod stays Pending",
                    parse_quantity(amount).unwrap_or(u64::MAX)
                ),
                format!("in the pod's manifest write limits: {{{resource}: {units}}} in place of {amount}"),
            ],
            Wrong::NotOffered { resource } => [
                format!("{names} {verb} for {resource}, which no node offers"),
                format!("no node has {resource}, so such a pod stays Pending; Divvy offers shares of GPUs as {GPU_MEM}"),
                format!(
                    "in place of {resource} write limits: {{{GPU_MEM}: N}}, with N units of GPU memory ({unit}); or run the device plugin of {resource} on nodes that Divvy does not serve"
                ),
            ],
            Wrong::CountAlone => [
                format!("{names} {verb} for {GPU_COUNT} alone"),
                format!("{GPU_COUNT} has no effect: nobody gets a GPU by it"),
                format!(
                    "in the pod's manifest write limits: {{{GPU_MEM}: N}}, with N units of GPU memory ({unit}); the annotation divvy.dev/gpus: \"K\" spreads them over K GPUs"
                ),
            ],
            Wrong::OtherRequest { resource, request } => [
                format!(
                    "{names} {} {resource}: {request}, and another limit",
                    if pods.len() == 1 { "requests" } else { "request" }
                ),
                "GPUs are asked for in limits; requests may only say the same".to_owned(),
                format!("write {resource} in limits alone"),
            ],
            Wrong::Fraction { resource, amount } => [
                format!("{names} {verb} for {resource}: {amount}, which is no whole number"),
                format!("{resource} comes in whole numbers only"),
                format!("write a whole number of {resource}"),
            ],
        }
    }
}

/// K13
pub(in super::super) fn requests(facts: &Facts<'_>) -> Verdict {
    let cluster = listed(facts, &["nodes", "pods"])?;
    let unit = Unit::of(cluster);
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
    let mut wrong: BTreeMap<Wrong, Vec<String>> = BTreeMap::new();
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
    left_out.add(&ended, "they have ended");
    let left_out = left_out.said();
    if wrong.is_empty() {
        return Ok(format!("{} with GPUs{left_out}", count(looked, "pod")));
    }
    let said: Vec<[String; 3]> = wrong.iter().map(|(wrong, pods)| wrong.said(pods, &unit)).collect();
    let lines = |part: usize| {
        let mut lines: Vec<&str> = said.iter().map(|parts| parts[part].as_str()).collect();
        lines.dedup();
        some_lines(&lines)
    };
    problem(format!("{}{left_out}", lines(0)), lines(1), lines(2))
}
