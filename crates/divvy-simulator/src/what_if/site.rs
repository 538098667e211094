use std::collections::{BTreeMap, HashMap};

use divvy_placement::policy::{
    Decision, Demand, Free, GpuGroup, MOST_GPUS, Mix, Models, NodeId, Placer, Policy, from_ledger, rank,
};
use divvy_placement::{Ask, Ledger, NodeView};

use super::{ClusterNode, Placed};

/// Labels that a node must have.
type Selector = BTreeMap<String, String>;

/// Which nodes, and which of their GPUs, a pod takes: its nodeSelector, and its rules as text.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Kind {
    selector: Selector,
    rules: Option<String>,
}

impl Kind {
    fn of(selector: &Selector, ask: &Ask) -> Kind {
        Kind {
            selector: selector.clone(),
            rules: ask.wanted(),
        }
    }
}

/// The ledger's nodes as policies see them: for each kind of pods a placer that knows the nodes and GPUs that they take.
pub(super) struct Sites {
    policy: Policy,
    mix: Mix,
    models: Models,
    nodes: Vec<Site>,
    numbers: HashMap<String, usize>,
    kinds: BTreeMap<Kind, usize>,
    placers: Vec<Known>,
}

struct Site {
    name: String,
    labels: Selector,
    /// Its GPUs by kind, as they are now. All groups of a node share its CPU and main memory, and each is told all that is left: a pod
    /// on one of them changes what the others are told.
    groups: Vec<GpuGroup>,
    /// Where it is known: placer, group, number there.
    known: Vec<(usize, usize, NodeId)>,
}

struct Known {
    placer: Placer,
    /// By the placer's numbers: node and group.
    places: HashMap<NodeId, (usize, usize)>,
}

impl Sites {
    pub(super) fn new(policy: Policy, mix: &Mix, ledger: &Ledger, nodes: &[ClusterNode]) -> Sites {
        let mut models = Models::default();
        let mut sites: Vec<Site> = nodes
            .iter()
            .filter(|node| !node.node.unschedulable)
            .filter_map(|node| {
                let groups = groups(&ledger.node(&node.node.name)?, &mut models);
                Some(Site {
                    name: node.node.name.clone(),
                    labels: node.labels.clone(),
                    groups,
                    known: Vec::new(),
                })
            })
            .collect();
        sites.sort_by(|a, b| a.name.cmp(&b.name));
        let numbers = sites.iter().enumerate().map(|(number, site)| (site.name.clone(), number));
        Sites {
            policy,
            mix: mix.clone(),
            models,
            numbers: numbers.collect(),
            nodes: sites,
            kinds: BTreeMap::new(),
            placers: Vec::new(),
        }
    }

    /// The best place for a pod with this nodeSelector; it is also learnt that it came. What it prefers is not looked at.
    pub(super) fn decide(
        &mut self,
        ledger: &Ledger,
        selector: &Selector,
        ask: &Ask,
        demand: &Demand,
        number: u64,
    ) -> Option<Placed> {
        let which = self.placer(ledger, Kind::of(selector, ask), ask);
        let Known { placer, places } = &mut self.placers[which];
        placer.arrived(demand);
        let decision = placer.decide(demand, number)?;
        let (node, group) = *places.get(&decision.node)?;
        let site = &self.nodes[node];
        let position = decision.gpus.positions().next()?;
        let position = *site.groups[group].positions.get(position)?;
        Some((site.name.clone(), position, (which, decision)))
    }

    /// A pod is there from now on: policies that watch how much is taken hear of it.
    pub(super) fn took(&mut self, demand: &Demand, (which, decision): (usize, Decision)) {
        self.placers[which].placer.take(demand, decision);
    }

    /// A node is as the ledger has it now.
    pub(super) fn update(&mut self, ledger: &Ledger, name: &str) {
        let (Some(view), Some(number)) = (ledger.node(name), self.numbers.get(name)) else {
            return;
        };
        let site = &mut self.nodes[*number];
        site.groups = groups(&view, &mut self.models);
        for (placer, group, id) in &site.known {
            if let Some(group) = site.groups.get(*group) {
                self.placers[*placer].placer.set(*id, group.free);
            }
        }
    }

    fn placer(&mut self, ledger: &Ledger, kind: Kind, ask: &Ask) -> usize {
        if let Some(known) = self.kinds.get(&kind) {
            return *known;
        }
        let which = self.placers.len();
        let mut known = Known {
            placer: Placer::new(self.policy),
            places: HashMap::new(),
        };
        for (number, site) in self.nodes.iter_mut().enumerate() {
            if !kind.selector.iter().all(|(key, value)| site.labels.get(key) == Some(value)) {
                continue;
            }
            let view = ledger.node(&site.name);
            let all = view.as_ref().and_then(NodeView::state).map_or(&[][..], |state| &state.gpus);
            for (group, gpus) in site.groups.iter().enumerate() {
                let mut own = gpus.positions.iter().filter_map(|position| all.get(*position));
                if !own.any(|gpu| ask.takes(gpu)) {
                    continue;
                }
                let rank = match group {
                    0 => rank(&site.name),
                    _ => rank(&format!("{}#{group}", site.name)),
                };
                let id = known.placer.add(gpus.shape, gpus.free, rank);
                known.places.insert(id, (number, group));
                site.known.push((which, group, id));
            }
        }
        if self.policy == Policy::Fgd {
            known.placer.set_mix(&self.mix);
        }
        self.kinds.insert(kind, which);
        self.placers.push(known);
        which
    }
}

/// The node's GPUs by kind. A node that has all the pods that it may have offers nothing.
fn groups(view: &NodeView<'_>, models: &mut Models) -> Vec<GpuGroup> {
    let mut groups = from_ledger(view, models);
    let (_, _, pods) = view.requested();
    if view.state().is_some_and(|state| state.pods > 0 && pods >= state.pods) {
        for group in &mut groups {
            group.free = Free {
                gpus: [0; MOST_GPUS],
                ..group.free
            };
        }
    }
    groups
}
