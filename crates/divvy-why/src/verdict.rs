//! The answer in a sentence.

use std::borrow::Cow;
use std::cmp::Reverse;

use divvy_model::{GpuRules, MiB, WholeKind, names};
use divvy_placement::{Ask, Room};

use crate::evaluate::SnapshotQuestion;
use crate::obstacle::ObstacleWords;
use crate::offers;
use crate::quantity::{amount, thousands};
use crate::{ClaimState, Hold, Obstacle, Wants};

/// Format the request: `3 GiB on one GPU`, `3 GiB on a GPU of a product like A100*`, `4 GiB on each of 2 GPUs`, `2 whole AMD GPUs (amd.com/gpu)`.
pub fn request_text(ask: &Ask, unit: divvy_model::MemoryUnit) -> String {
    if ask.whole.is_some() {
        return ask.to_string();
    }
    let size = amount_text(ask, unit);
    match (ask.wanted(), ask.gpus) {
        (None, 1) => format!("{size} on one GPU"),
        (Some(rules), 1) => format!("{size} on a GPU {rules}"),
        (None, gpus) => format!("{size} on each of {gpus} GPUs"),
        (Some(rules), gpus) => format!("{size} on each of {gpus} GPUs {rules}"),
    }
}

/// Format the amount that is requested of each GPU.
pub(crate) fn amount_text(ask: &Ask, unit: divvy_model::MemoryUnit) -> String {
    match ask.memory {
        _ if ask.whole.is_some() => ask.amount(),
        Some(memory) => amount(memory, unit),
        None => format!("{} units of {}", ask.units, names::GPU_MEM),
    }
}

impl SnapshotQuestion<'_> {
    /// Return what keeps the pod from every node, or keeps Divvy from giving an answer.
    pub(crate) fn holds(&self) -> Vec<Hold> {
        let wants = &*self.wants;
        let mut holds = Vec::new();
        if let Some(written) = &wants.with_suffix {
            holds.push(Hold::Suffix {
                written: written.clone(),
                write: self.instead_of(written),
            });
        }
        if wants.pod.deleting {
            holds.push(Hold::Deleting);
        }
        if !wants.gates.is_empty() {
            holds.push(Hold::Gates {
                gates: wants.gates.clone(),
            });
        }
        let rules: Option<&Result<GpuRules, _>> = self.ask.rules.as_deref();
        if let Some(Err(error)) = rules {
            holds.push(Hold::Annotations {
                error: error.to_string(),
            });
        }
        if self.ask.memory.is_none() && wants.with_suffix.is_none() {
            holds.push(Hold::Uncountable);
        }
        holds.extend(wants.claims.iter().filter_map(|claim| {
            let certain = |exists| Hold::Claim {
                claim: claim.name.clone(),
                exists,
            };
            match &claim.state {
                ClaimState::Missing => Some(certain(false)),
                ClaimState::Unbound => Some(certain(true)),
                ClaimState::Unseen(reason) => Some(Hold::NotLookedAt {
                    what: format!("the volume of claim {}", claim.name),
                    reason: reason.clone(),
                }),
                ClaimState::BoundLater | ClaimState::Bound(_) => None,
            }
        }));
        holds.extend(self.snapshot.unseen.iter().map(|what| Hold::NotLookedAt {
            what: format!("the {what} of the cluster"),
            reason: format!("you may not list {what}"),
        }));
        if wants.resource_claims {
            holds.push(Hold::NotLookedAt {
                what: "the pod's resource claims".to_owned(),
                reason: "Divvy does not read them yet".to_owned(),
            });
        }
        if self.snapshot.namespaces.is_none() && self.snapshot.unseen.is_empty() && selects_namespaces(wants) {
            holds.push(Hold::NotLookedAt {
                what: "the pod's affinity to pods of other namespaces".to_owned(),
                reason: "the namespaces could not be listed".to_owned(),
            });
        }
        if wants.extender_is_away() {
            holds.push(Hold::ExtenderAway);
        } else if !wants.was_looked_at() && !matches!(wants.scheduler.as_str(), "" | "default-scheduler") {
            holds.push(Hold::Unheard {
                scheduler: wants.scheduler.clone(),
            });
        }
        holds
    }

    /// Return the number of units that was meant by a quantity in bytes, rounded up: `3Gi` means 3 units of 1 GiB.
    fn instead_of(&self, written: &str) -> Option<u64> {
        const MIB: u64 = 1 << 20;
        let bytes = divvy_model::quantity_value(written).ok()?;
        let unit = self.snapshot.ledger.unit().mib().checked_mul(MIB)?;
        Some(bytes.div_ceil(unit)).filter(|units| *units > 0)
    }

    /// Return the answer in a sentence, for a pod that waits. `order` holds the nodes, the closest first.
    pub(crate) fn verdict(&self, holds: &[Hold], looks: &[Vec<Obstacle>], order: &[usize]) -> String {
        let unit = self.snapshot.ledger.unit();
        let certain = holds.iter().find(|hold| hold.is_certain());
        if let Some(hold) = certain {
            return format!("waits: {}.", hold.message(unit).trim_end_matches('.'));
        }
        let asked = request_text(&self.ask, unit);
        let room = looks.iter().filter(|look| look.is_empty()).count();
        if !self.snapshot.unseen.is_empty() {
            return format!("waits: it asks for {asked}. Divvy could not check which nodes have that much free.");
        }
        let closest = order.first().map(|position| (&self.site(*position).name, &looks[*position]));
        let Some((name, look)) = closest else {
            return format!("waits: it asks for {asked}, and the cluster has no node.");
        };
        if room > 0 {
            let others = match room {
                1 => String::new(),
                2 => ", and so has 1 other".to_owned(),
                _ => format!(", and so have {} others", thousands(room - 1)),
            };
            return format!(
                "waits: it asks for {asked}, and node {name} has room for that{others}.{}",
                self.not_tried(holds)
            );
        }
        if looks.iter().all(|look| look.first().is_some_and(Obstacle::is_of_no_offer)) {
            let resource = self.ask.whole.map_or(Cow::Borrowed(names::GPU_MEM), WholeKind::resource);
            return match offers::instead(self.snapshot, &self.wants) {
                Some(instead) => format!("waits: it asks for {asked}. {instead}"),
                None => format!(
                    "waits: it asks for {asked}, and no node of the cluster offers any {resource}: Divvy's agent is not installed, or it is not ready."
                ),
            };
        }
        if !look.iter().any(Obstacle::is_of_gpus) {
            return format!("waits: it asks for {asked}. {}.", self.but(name, look));
        }
        if let Some(lacking) = self.lacking(looks) {
            return format!("waits: it asks for {asked}, and {lacking}.");
        }
        // Most nodes lack GPUs. Another node has them, but more than one other obstacle is there.
        let with_room = order
            .iter()
            .find(|position| !looks[**position].iter().any(Obstacle::is_of_gpus));
        match with_room {
            Some(position) => format!(
                "waits: it asks for {asked}. {}.",
                self.but(&self.site(*position).name, &looks[*position])
            ),
            None => format!("waits: it asks for {asked}, and no node that it can use now offers it a GPU."),
        }
    }

    /// Describe what else is in the way on a node that has room on its GPUs. One or two obstacles are described; of three or
    /// more, only the first one is, followed by the number of the others.
    fn but(&self, node: &str, look: &[Obstacle]) -> String {
        let unit = self.snapshot.ledger.unit();
        let what = match (self.ask.whole, self.ask.gpus) {
            (Some(kind), 1) => format!("a free {kind}"),
            (Some(kind), _) => format!("as many free {kind}s"),
            (None, 1) => "a GPU with that much free".to_owned(),
            (None, _) => "as many GPUs with that much free".to_owned(),
        };
        let size = self::amount_text(&self.ask, unit);
        let words = ObstacleWords {
            unit,
            asked: &size,
            rules: self.ask.wanted().is_some(),
        };
        let message = |one: &Obstacle| one.message(node, words);
        let but = match look {
            [one, two] => format!("{}, and {}", message(one), message(two)),
            [one, others @ ..] if !others.is_empty() => {
                format!("{}, and {} more things are in the way", message(one), others.len())
            }
            look => look.iter().map(message).collect(),
        };
        format!("Node {node} has {what}, but {but}")
    }

    fn not_tried(&self, holds: &[Hold]) -> &'static str {
        let unsure = holds.iter().any(|hold| !hold.is_certain());
        match (unsure, self.wants.was_looked_at()) {
            (true, _) => " Divvy could not check everything that decides where it may run.",
            (false, true) => " kube-scheduler has not tried again yet, or sees another obstacle (below).",
            (false, false) => " No scheduler has tried to place it yet.",
        }
    }

    /// Describe what the usable nodes lack: none of them has GPUs that the pod accepts and that have enough free memory. Return
    /// `None` if no usable node offers the pod a GPU at all.
    fn lacking(&self, looks: &[Vec<Obstacle>]) -> Option<String> {
        let unit = self.snapshot.ledger.unit();
        // Other nodes may have GPUs with room, or their GPUs are not known.
        let elsewhere = looks.iter().any(|look| {
            let shown = |one: &Obstacle| one.is_of_offer() && !one.is_of_no_offer();
            !look.iter().any(Obstacle::is_of_gpus) || look.iter().any(shown)
        });
        let usable = |look: &&Vec<Obstacle>| {
            if elsewhere {
                look.iter().all(Obstacle::is_of_gpus)
            } else {
                true
            }
        };
        let lacks = |look: &&Vec<Obstacle>| {
            look.iter().any(|one| {
                matches!(
                    one,
                    Obstacle::GpuMemory { .. }
                        | Obstacle::GpuCores { .. }
                        | Obstacle::TooSmall { .. }
                        | Obstacle::WholeGpus { .. }
                )
            })
        };
        let nodes = looks.iter().enumerate().filter(|(_, look)| usable(look) && lacks(look));
        let rooms: Vec<_> = nodes
            .map(|(position, _)| {
                let name = &self.site(position).name;
                let mut room = self.ledger(position).room(name, &self.ask);
                if self.ask.whole.is_some() {
                    room.fitting = self.free_whole(position, room.fitting);
                }
                (name, room)
            })
            .collect();
        let is_of_other = |one: &Obstacle| matches!(one, Obstacle::OtherVendor { .. });
        let has_others = looks.iter().flatten().any(is_of_other);
        let gpu = if has_others {
            format!("{} GPU", self.ask.vendor())
        } else {
            "GPU".to_owned()
        };
        let no_gpu = if elsewhere {
            format!("no {gpu} that it can use now")
        } else {
            format!("no {gpu}")
        };
        let no_node = if elsewhere { "no node that it can use now" } else { "no node" };
        let best = |room: &Room| (room.fitting.min(self.ask.gpus), room.free);
        let Some((name, most)) = rooms.iter().max_by_key(|(name, room)| (best(room), Reverse(*name))) else {
            let such = looks.iter().flatten().any(|one| matches!(one, Obstacle::Rules { .. }));
            let has_rules = self.ask.wanted().is_some();
            let what = match (self.ask.gpus, has_rules) {
                (1, _) => "such a GPU",
                (_, true) => "as many such GPUs",
                (_, false) => "as many GPUs",
            };
            return if such {
                Some(format!("{no_node} has {what}"))
            } else {
                has_others.then(|| format!("{no_node} shares {gpu}s"))
            };
        };
        if let Some(kind) = self.ask.whole {
            return Some(match self.ask.gpus {
                1 => format!("{no_node} has a free {kind}"),
                _ => format!(
                    "{no_node} has as many free {kind}s; node {name} has {} of {}",
                    most.fitting, most.taken
                ),
            });
        }
        let memory = self.ask.memory.unwrap_or(MiB(u64::MAX));
        if rooms.iter().all(|(_, room)| room.size < memory) {
            return Some(match self.ask.gpus {
                1 => format!("{no_gpu} is that large, even empty"),
                _ => format!("{no_node} has as many GPUs that large, even empty"),
            });
        }
        let with_memory = rooms.iter().filter(|(_, room)| room.with_memory >= self.ask.gpus);
        if self.ask.cores > 0
            && let Some((name, room)) = with_memory.max_by_key(|(name, room)| (room.free_cores, Reverse(*name)))
        {
            let (cores, free) = (self.ask.cores, room.free_cores);
            return Some(match self.ask.gpus {
                1 => format!(
                    "{no_gpu} has that much memory and {cores} % of its compute time free; the most is {free} %, on node {name}"
                ),
                _ => format!(
                    "{no_node} has as many GPUs with that much memory and {cores} % of their compute time free; node {name} has {} of {}",
                    room.fitting, room.taken
                ),
            });
        }
        if self.ask.gpus > 1 {
            return Some(format!(
                "{no_node} has as many GPUs with that much free; node {name} has {} of {}",
                most.fitting, most.taken
            ));
        }
        let in_sum = rooms.iter().filter(|(_, room)| room.sum >= memory);
        Some(match in_sum.max_by_key(|(name, room)| (room.free, Reverse(*name))) {
            Some((name, room)) => format!(
                "{no_gpu} has that much free; node {name} has {} free in all, but at most {} on one GPU",
                amount(room.sum, unit),
                amount(room.free, unit)
            ),
            None if most.free == MiB::ZERO => format!("{no_gpu} has any memory free"),
            None => format!(
                "{no_gpu} has that much free; the most is {}, on node {name}",
                amount(most.free, unit)
            ),
        })
    }
}

fn selects_namespaces(wants: &Wants) -> bool {
    let affinity = &wants.affinity;
    let with = affinity
        .pod_affinity
        .as_ref()
        .and_then(|with| with.required_during_scheduling_ignored_during_execution.as_ref());
    let apart = affinity
        .pod_anti_affinity
        .as_ref()
        .and_then(|apart| apart.required_during_scheduling_ignored_during_execution.as_ref());
    with.into_iter()
        .chain(apart)
        .flatten()
        .any(|term| term.namespace_selector.is_some())
}
