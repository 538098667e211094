//! The obstacles between a pod and one node. Every filter is evaluated, regardless of the results of the others.

mod peers;

use std::borrow::Cow;
use std::collections::BTreeMap;

use divvy_model::{MiB, WholeKind, names, runtime};
use divvy_placement::{Ask, Ledger, NodeRefusal, UnusableGpus};
use k8s_openapi::api::core::v1::{Taint, Toleration};

use crate::selector::{in_words, selects_node};
use crate::{Change, ClaimState, ClusterSnapshot, NamedPods, NodeSite, Obstacle, Tenant, Wants};
use peers::Peers;

/// The maximum number of obstacles that are kept per node. A pod may have thousands of rules.
const MOST: usize = 16;

/// A pod that needs a node in a snapshot. The snapshot may be changed in one place, to try a change.
#[derive(Debug)]
pub(crate) struct SnapshotQuestion<'a> {
    pub(crate) snapshot: &'a ClusterSnapshot,
    pub(crate) wants: Cow<'a, Wants>,
    pub(crate) ask: Ask,
    pub(crate) named: &'a NamedPods,
    /// The changed node, with its position.
    site: Option<(usize, NodeSite)>,
    /// The position of the pod that the change would end.
    gone: Option<usize>,
    /// The changed ledger of the changed node.
    ledger: Option<Ledger>,
    peers: Peers,
}

impl<'a> SnapshotQuestion<'a> {
    pub(crate) fn new(snapshot: &'a ClusterSnapshot, wants: &'a Wants, named: &'a NamedPods) -> SnapshotQuestion<'a> {
        let mut question = SnapshotQuestion {
            snapshot,
            ask: Ask::of_pod(&wants.pod, snapshot.ledger.unit()),
            wants: Cow::Borrowed(wants),
            named,
            site: None,
            gone: None,
            ledger: None,
            peers: Peers::default(),
        };
        question.peers = Peers::of(&question);
        question
    }

    /// Return the question as it is after a change; `None` if the change is about something that does not exist.
    pub(crate) fn after(&self, change: &Change) -> Option<SnapshotQuestion<'a>> {
        let mut question = SnapshotQuestion {
            snapshot: self.snapshot,
            ask: self.ask.clone(),
            wants: self.wants.clone(),
            named: self.named,
            site: None,
            gone: None,
            ledger: None,
            peers: Peers::default(),
        };
        change.apply(&mut question)?;
        question.ask = Ask::of_pod(&question.wants.pod, self.snapshot.ledger.unit());
        question.peers = Peers::of(&question);
        Some(question)
    }

    /// Change a node.
    pub(crate) fn alter_site(&mut self, node: &str, alter: impl FnOnce(&mut NodeSite)) -> Option<()> {
        let position = self.position(node)?;
        let mut site = self.snapshot.sites[position].clone();
        alter(&mut site);
        self.site = Some((position, site));
        Some(())
    }

    /// End a pod on a node: free what it requested, and the GPU memory that it held.
    pub(crate) fn end(&mut self, node: &str, uid: &str) -> Option<()> {
        let position = self.position(node)?;
        let tenant = self.snapshot.tenant(position, uid)?;
        self.gone = Some(tenant);
        self.alter_site(node, |site| {
            for (resource, amount) in self.snapshot.tenants[tenant].requests.iter() {
                if let Some(used) = site.used.get_mut(&**resource) {
                    *used = used.saturating_sub(*amount);
                }
            }
        })?;
        let mut ledger = self.snapshot.ledger.only(node);
        ledger.end_pod(uid);
        self.ledger = Some(ledger);
        Some(())
    }

    /// Change what the ledger knows about a node.
    pub(crate) fn alter_ledger(&mut self, node: &str, alter: impl FnOnce(&mut Ledger)) -> Option<()> {
        self.alter_site(node, |_| ())?;
        let mut ledger = self.snapshot.ledger.only(node);
        alter(&mut ledger);
        self.ledger = Some(ledger);
        Some(())
    }

    pub(crate) fn position(&self, node: &str) -> Option<usize> {
        self.snapshot.sites.binary_search_by(|site| site.name.as_str().cmp(node)).ok()
    }

    /// Return a node. If the question changes the node, return its changed state.
    pub(crate) fn site(&self, position: usize) -> &NodeSite {
        match &self.site {
            Some((changed, site)) if *changed == position => site,
            _ => &self.snapshot.sites[position],
        }
    }

    /// Report whether a pod would still exist after the change.
    pub(crate) fn counts(&self, tenant: usize) -> bool {
        self.gone != Some(tenant)
    }

    /// Return `namespace/name` of a pod, if the answer may name it.
    pub(crate) fn name(&self, tenant: &Tenant) -> Option<String> {
        let shown = self.named.shows(&tenant.namespace);
        shown.then(|| format!("{}/{}", tenant.namespace, tenant.name))
    }

    /// Return a label of a pod's node: the label's name and its value. `None` if the node lacks the label.
    pub(crate) fn place(&self, tenant: usize, label: &str) -> Option<(String, String)> {
        let value = self.site(self.snapshot.at[tenant]).labels.get(label)?;
        Some((label.to_owned(), value.clone()))
    }

    pub(crate) fn ledger(&self, position: usize) -> &Ledger {
        match (&self.ledger, &self.site) {
            (Some(ledger), Some((changed, _))) if *changed == position => ledger,
            _ => &self.snapshot.ledger,
        }
    }

    /// Return everything that keeps the pod from a node, the most important first. The list is empty if the pod could go there.
    pub(crate) fn obstacles(&self, position: usize) -> Vec<Obstacle> {
        let site = self.site(position);
        let mut found = Vec::new();
        self.of_gpus(position, &mut found);
        if found.first().is_some_and(Obstacle::is_of_no_offer) {
            return found;
        }
        of_labels(&self.wants, site, &mut found);
        of_state(&self.wants, site, &mut found);
        self.of_resources(position, &mut found);
        self.peers.obstacles(site, &mut found);
        found.sort();
        found.truncate(MOST);
        found
    }

    fn of_resources(&self, position: usize, found: &mut Vec<Obstacle>) {
        let site = self.site(position);
        // What the GPUs lack is said already. If they have room, the sums of kube-scheduler may still say that they have none.
        let said = self.ask.whole.filter(|_| found.iter().any(Obstacle::is_of_gpus));
        let said = [Some(Cow::Borrowed(names::GPU_MEM)), said.map(WholeKind::resource)];
        let others = self.wants.requests.iter();
        for (resource, asked) in others.filter(|(resource, _)| said.iter().flatten().all(|said| said != resource)) {
            let free = site.free(resource);
            if *asked > free {
                found.push(Obstacle::Resource {
                    resource: resource.clone().into_owned(),
                    asked: *asked,
                    free,
                    allocatable: site.allocatable.get(&**resource).copied().unwrap_or(0),
                });
            }
        }
        let tenants = self.snapshot.on[position].iter().filter(|tenant| self.counts(**tenant));
        let taken = tenants.flat_map(|tenant| &self.snapshot.tenants[*tenant].ports);
        let clash = |taken: &crate::HostPort| self.wants.ports.iter().find(|port| port.clashes(taken));
        if let Some(port) = (!self.wants.ports.is_empty())
            .then(|| taken.filter_map(clash).next())
            .flatten()
        {
            found.push(Obstacle::HostPort { port: port.port });
        }
    }

    /// Add the obstacles that keep a pod from a node whose whole GPUs it requests.
    fn of_whole_gpus(&self, position: usize, kind: WholeKind, found: &mut Vec<Obstacle>) {
        match self.ledger(position).choose(&self.site(position).name, &self.ask) {
            Ok(_) => {}
            Err(NodeRefusal::UnknownNode | NodeRefusal::NoneOfKind(_)) => found.push(Obstacle::NoWholeGpus { resource: kind }),
            Err(NodeRefusal::Unusable(why)) => found.push(Obstacle::NotOffered { reason: why.to_string() }),
            Err(refusal) => found.extend(self.too_little(position, &refusal)),
        }
    }

    fn of_gpus(&self, position: usize, found: &mut Vec<Obstacle>) {
        if let Some(kind) = self.ask.whole {
            return self.of_whole_gpus(position, kind, found);
        }
        let site = self.site(position);
        let refusal = self.ledger(position).choose(&site.name, &self.ask).err();
        let unmarked = self
            .snapshot
            .agent_selector
            .iter()
            .flatten()
            .find(|(key, value)| site.labels.get(*key) != Some(*value));
        let was_there = site.capacity_units > 0 || site.has_inventory;
        let offered = site.allocatable.get(names::GPU_MEM).copied().unwrap_or(0);
        let away = site.capacity_units > 0 && offered == 0;
        let not_offered = away || matches!(refusal, Some(NodeRefusal::UnknownNode | NodeRefusal::Unusable(_)));
        if let Some((label, value)) = unmarked.filter(|_| was_there && not_offered) {
            found.push(Obstacle::NotChosen {
                label: label.clone(),
                value: value.clone(),
            });
        }
        let no_cdi = site
            .runtime
            .as_deref()
            .and_then(runtime::without_cdi)
            .filter(|_| offered == 0 && was_there);
        match (refusal, no_cdi) {
            (_, Some(remedy)) => found.push(Obstacle::Runtime { remedy }),
            (Some(NodeRefusal::UnknownNode | NodeRefusal::Unusable(UnusableGpus::NotShared)), _) if found.is_empty() => {
                found.push(Obstacle::NoGpuMemory);
            }
            (Some(NodeRefusal::UnknownNode | NodeRefusal::Unusable(UnusableGpus::NotShared)), _) => {}
            // A missing agent is the reason for everything else.
            (Some(NodeRefusal::Unusable(_)), _) if !found.is_empty() => {}
            (Some(NodeRefusal::Unusable(UnusableGpus::Unschedulable)), _) if offered == 0 => found.push(Obstacle::AgentAway {
                capacity: site.capacity_units,
            }),
            (Some(NodeRefusal::Unusable(why)), _) => found.push(Obstacle::NotOffered { reason: why.to_string() }),
            (refusal, None) => {
                if away && found.is_empty() {
                    found.push(Obstacle::AgentAway {
                        capacity: site.capacity_units,
                    });
                }
                match refusal {
                    Some(refusal) => found.extend(self.too_little(position, &refusal)),
                    None => self.of_sums(site, away, found),
                }
            }
        }
    }

    /// Add an obstacle if GPUs have room, but the node has none according to kube-scheduler's sums.
    fn of_sums(&self, site: &NodeSite, away: bool, found: &mut Vec<Obstacle>) {
        let free = site.free(names::GPU_MEM);
        if self.ask.units > free && !away {
            found.push(Obstacle::Counted {
                free,
                offered: site.allocatable.get(names::GPU_MEM).copied().unwrap_or(0),
            });
        }
    }

    fn too_little(&self, position: usize, refusal: &NodeRefusal) -> Option<Obstacle> {
        let room = self.ledger(position).room(&self.site(position).name, &self.ask);
        Some(match refusal {
            NodeRefusal::NoGpuTaken(_) => Obstacle::Rules {
                rules: self.ask.wanted().unwrap_or_default(),
                allowed: room.taken,
                needed: self.ask.gpus,
                products: self.products(position),
            },
            NodeRefusal::OtherVendor(vendor) => Obstacle::OtherVendor { vendor: *vendor },
            NodeRefusal::OneGpuOnly => Obstacle::OneGpuOnly,
            NodeRefusal::OnlyMigDevices => Obstacle::OnlyMigDevices,
            NodeRefusal::TooFewWhole(ask) => Obstacle::WholeGpus {
                resource: ask.whole?,
                needed: self.ask.gpus,
                free: self.free_whole(position, room.fitting),
                taken: room.taken,
                unwell: room.unwell,
            },
            NodeRefusal::NoneOfKind(kind) => Obstacle::NoWholeGpus { resource: *kind },
            NodeRefusal::NoGpuFits | NodeRefusal::TooFewFit(_) if self.ask.memory.is_some_and(|memory| room.size < memory) => {
                Obstacle::TooSmall { largest: room.size }
            }
            NodeRefusal::TooFewFit(ask) if ask.cores > 0 && room.with_memory >= ask.gpus => Obstacle::GpuCores {
                asked: ask.cores,
                needed: ask.gpus,
                fitting: room.fitting,
                with_memory: room.with_memory,
                free: room.free_cores,
            },
            NodeRefusal::NoGpuFits | NodeRefusal::TooFewFit(_) => Obstacle::GpuMemory {
                needed: self.ask.gpus,
                fitting: room.fitting,
                taken: room.taken,
                unwell: room.unwell,
                free: room.free,
                sum: room.sum,
            },
            // This is reported for the pod, not for each node.
            NodeRefusal::Uncountable(_) | NodeRefusal::Unreadable(_) => Obstacle::TooSmall {
                largest: room.size.max(MiB::ZERO),
            },
            NodeRefusal::UnknownNode | NodeRefusal::Unusable(_) => return None,
        })
    }
}

impl SnapshotQuestion<'_> {
    /// Return how many whole GPUs of a node are free: `fitting`, minus the GPUs that are used by pods without an allocation.
    pub(crate) fn free_whole(&self, position: usize, fitting: usize) -> usize {
        let view = self.ledger(position).node(&self.site(position).name);
        let unnamed = view.zip(self.ask.whole).map_or(0, |(view, kind)| view.unlocated_whole(kind));
        fitting.saturating_sub(usize::try_from(unnamed).unwrap_or(usize::MAX))
    }

    /// List the products of a node's GPUs, each once with its count: `8 NVIDIA A100-SXM4-40GB`.
    fn products(&self, position: usize) -> Vec<String> {
        let view = self.ledger(position).node(&self.site(position).name);
        let gpus = view
            .and_then(|view| view.state())
            .map(|state| state.gpus.as_slice())
            .unwrap_or_default();
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for gpu in gpus.iter().filter(|gpu| self.ask.is_for(gpu)) {
            *counts
                .entry(if gpu.model.is_empty() {
                    "of an unknown product"
                } else {
                    &gpu.model
                })
                .or_default() += 1;
        }
        counts.into_iter().map(|(model, count)| format!("{count} {model}")).collect()
    }
}

fn of_labels(wants: &Wants, site: &NodeSite, found: &mut Vec<Obstacle>) {
    for (label, value) in &wants.node_selector {
        let has = site.labels.get(label);
        if has != Some(value) {
            found.push(Obstacle::NodeSelector {
                label: label.clone(),
                value: value.clone(),
                found: has.cloned(),
            });
        }
    }
    if let Some(affinity) = required(wants).filter(|affinity| !selects_node(affinity, site)) {
        found.push(Obstacle::NodeAffinity {
            affinity: in_words(affinity),
        });
    }
    for claim in &wants.claims {
        if let ClaimState::Bound(Some(reach)) = &claim.state
            && !selects_node(reach, site)
        {
            found.push(Obstacle::Volume {
                claim: claim.name.clone(),
            });
        }
    }
}

fn required(wants: &Wants) -> Option<&k8s_openapi::api::core::v1::NodeSelector> {
    let affinity = wants.affinity.node_affinity.as_ref()?;
    affinity.required_during_scheduling_ignored_during_execution.as_ref()
}

/// Report whether a node has the labels that the pod requires.
pub(crate) fn node_matches(wants: &Wants, site: &NodeSite) -> bool {
    wants
        .node_selector
        .iter()
        .all(|(label, value)| site.labels.get(label) == Some(value))
        && required(wants).is_none_or(|affinity| selects_node(affinity, site))
}

const CORDONED: &str = "node.kubernetes.io/unschedulable";
/// The taints with which Kubernetes marks a node that is not ready.
const NOT_READY: [&str; 2] = ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"];

fn of_state(wants: &Wants, site: &NodeSite, found: &mut Vec<Obstacle>) {
    let mut obstacles: Vec<Obstacle> = untolerated(wants, site)
        .map(|taint| match taint.key.as_str() {
            CORDONED => Obstacle::Cordoned,
            key if NOT_READY.contains(&key) => Obstacle::NotReady,
            _ => Obstacle::Taint {
                key: taint.key.clone(),
                value: taint.value.clone().unwrap_or_default(),
                effect: taint.effect.clone(),
            },
        })
        .collect();
    obstacles.sort();
    obstacles.dedup();
    found.extend(obstacles);
}

/// Return the taints of a node that keep out pods which do not tolerate them, including those that Kubernetes' node controller is
/// about to add.
fn taints(site: &NodeSite) -> impl Iterator<Item = Cow<'_, Taint>> {
    let has = |keys: &[&str]| site.taints.iter().any(|taint| keys.contains(&taint.key.as_str()));
    let cordoned = (site.cordoned && !has(&[CORDONED])).then_some(CORDONED);
    let not_ready = (!site.ready && !has(&NOT_READY)).then_some(NOT_READY[0]);
    let coming = cordoned.into_iter().chain(not_ready).map(|key| {
        Cow::Owned(Taint {
            key: key.to_owned(),
            effect: "NoSchedule".to_owned(),
            ..Taint::default()
        })
    });
    let keeps_out = |taint: &&Taint| matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute");
    site.taints.iter().filter(keeps_out).map(Cow::Borrowed).chain(coming)
}

fn untolerated<'s>(wants: &'s Wants, site: &'s NodeSite) -> impl Iterator<Item = Cow<'s, Taint>> {
    taints(site).filter(|taint| !tolerated(wants, taint))
}

/// Report whether the pod tolerates all taints of a node that keep pods out.
pub(crate) fn tolerates(wants: &Wants, site: &NodeSite) -> bool {
    untolerated(wants, site).next().is_none()
}

fn tolerated(wants: &Wants, taint: &Taint) -> bool {
    wants.tolerations.iter().any(|toleration| matches_taint(toleration, taint))
}

/// Report whether a toleration matches a taint, like `ToleratesTaint` in Kubernetes' `component-helpers/scheduling/corev1`.
fn matches_taint(toleration: &Toleration, taint: &Taint) -> bool {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let (key, effect) = (text(&toleration.key), text(&toleration.effect));
    let operator = text(&toleration.operator);
    let value = match operator.as_str() {
        "Exists" => true,
        "" | "Equal" => text(&toleration.value) == text(&taint.value),
        _ => false,
    };
    (effect.is_empty() || effect == taint.effect) && (key.is_empty() || key == taint.key) && value
}
