//! The API server: objects, their history, and watches that are late.

use std::collections::BTreeMap;

use divvy_extender::core::BindingRequest;
use divvy_model::{Allocation, Held, Inventory, MiB, Node, Phase, Pod, PodKey, PodRequest};

/// What changed.
#[derive(Debug, Clone)]
pub(crate) enum PodEvent {
    Applied(Pod),
    Deleted(Pod),
}

/// What was written by the Binding of a pod; stays known when the pod is gone.
#[derive(Debug, Clone)]
pub(crate) struct Bound {
    pub(crate) node: String,
    pub(crate) allocation: Allocation,
}

/// Objects as they are, and how they came to be.
#[derive(Debug, Default)]
pub(crate) struct Api {
    pub(crate) pods: BTreeMap<PodKey, Pod>,
    pub(crate) nodes: BTreeMap<String, Node>,
    pub(crate) pod_log: Vec<PodEvent>,
    pub(crate) node_log: Vec<Node>,
    /// By UID.
    pub(crate) bound: BTreeMap<String, Bound>,
    /// The most that a GPU was ever said to share.
    pub(crate) most: BTreeMap<String, MiB>,
    created: u32,
}

/// The API server's word on a Binding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    Created,
    Conflict(String),
    NotFound,
}

impl Api {
    pub(crate) fn create(&mut self, name: &str, request: PodRequest) -> Option<String> {
        let key = key(name);
        if self.pods.contains_key(&key) {
            return None;
        }
        self.created += 1;
        let uid = format!("{name}{}", self.created);
        let pod = Pod {
            uid: uid.clone(),
            namespace: key.namespace.clone(),
            name: key.name.clone(),
            request,
            ..Pod::default()
        };
        self.pod_log.push(PodEvent::Applied(pod.clone()));
        self.pods.insert(key, pod);
        Some(uid)
    }

    pub(crate) fn pod(&self, uid: &str) -> Option<&Pod> {
        self.pods.values().find(|pod| pod.uid == uid)
    }

    /// Changes the pod with this UID, if it is there.
    pub(crate) fn update(&mut self, uid: &str, change: impl FnOnce(&mut Pod)) {
        if let Some(pod) = self.pods.values_mut().find(|pod| pod.uid == uid) {
            let before = pod.clone();
            change(pod);
            if *pod != before {
                self.pod_log.push(PodEvent::Applied(pod.clone()));
            }
        }
    }

    /// What `kubectl delete` asks for: a pod that no kubelet has goes at once.
    pub(crate) fn delete(&mut self, uid: &str) {
        match self.pod(uid) {
            Some(pod) if pod.node.is_none() => self.remove(uid),
            Some(_) => self.update(uid, |pod| pod.deleting = true),
            None => {}
        }
    }

    /// The object goes.
    pub(crate) fn remove(&mut self, uid: &str) {
        let key = self.pod(uid).map(Pod::key);
        if let Some(pod) = key.and_then(|key| self.pods.remove(&key)) {
            self.pod_log.push(PodEvent::Deleted(pod));
        }
    }

    /// `BindingREST.Create` (research/reliability.md section 2.1): node and annotations in one transaction.
    pub(crate) fn bind(&mut self, binding: &BindingRequest) -> Result<Verdict, String> {
        let key = PodKey {
            namespace: binding.namespace.clone(),
            name: binding.name.clone(),
        };
        let Some(pod) = self.pods.get_mut(&key) else {
            return Ok(Verdict::NotFound);
        };
        let refused = if pod.uid != binding.uid {
            Some("the UID in the precondition is another one")
        } else if pod.deleting {
            Some("pod is being deleted, cannot be assigned to a host")
        } else if pod.node.is_some() {
            Some("pod is already assigned to a node")
        } else {
            None
        };
        if let Some(text) = refused {
            return Ok(Verdict::Conflict(text.to_owned()));
        }
        let held = Held::from_annotations(&binding.annotations);
        let Held::Allocation(allocation) = &held else {
            return Err(format!("the Binding of {} carries no allocation: {held:?}", binding.uid));
        };
        self.bound.insert(
            binding.uid.clone(),
            Bound {
                node: binding.node.clone(),
                allocation: allocation.clone(),
            },
        );
        pod.node = Some(binding.node.clone());
        pod.held = held;
        self.pod_log.push(PodEvent::Applied(pod.clone()));
        Ok(Verdict::Created)
    }

    /// A status write by a kubelet: refused if the object is gone, or another one.
    pub(crate) fn status(&mut self, uid: &str, phase: Phase, container_running: bool) {
        self.update(uid, |pod| {
            // Terminal phases are final.
            if !matches!(pod.phase, Phase::Succeeded | Phase::Failed) {
                pod.phase = phase;
            }
            pod.container_running = container_running;
        });
    }

    pub(crate) fn update_node(&mut self, name: &str, change: impl FnOnce(&mut Node)) {
        let node = self.nodes.entry(name.to_owned()).or_insert_with(|| Node {
            uid: name.to_owned(),
            name: name.to_owned(),
            ..Node::default()
        });
        let before = node.clone();
        change(node);
        if *node != before {
            if let Some(Ok(inventory)) = &node.inventory {
                for gpu in &inventory.gpus {
                    let offered = inventory.unit.memory(gpu.units).unwrap();
                    let most = self.most.entry(gpu.uuid.clone()).or_default();
                    *most = offered.max(*most);
                }
            }
            self.node_log.push(node.clone());
        }
    }

    /// The agent's patch, through its text.
    pub(crate) fn publish(&mut self, node: &str, inventory: &Inventory) {
        let same = self
            .nodes
            .get(node)
            .is_some_and(|node| node.inventory.as_ref().is_some_and(|have| have.as_ref() == Ok(inventory)));
        if !same {
            self.update_node(node, |node| node.inventory = Some(Inventory::parse(&inventory.to_json())));
        }
    }

    /// What pods that have not ended hold of a GPU by their annotations.
    pub(crate) fn ledger(&self, uuid: &str) -> MiB {
        booked(self.pods.values(), uuid)
    }
}

pub(crate) fn key(name: &str) -> PodKey {
    PodKey {
        namespace: "default".to_owned(),
        name: name.to_owned(),
    }
}

/// The naive count: every pod that has a node and has not ended, by its annotation.
pub(crate) fn booked<'a>(pods: impl Iterator<Item = &'a Pod>, uuid: &str) -> MiB {
    pods.filter(|pod| pod.node.is_some() && !pod.ended())
        .filter_map(|pod| share(&pod.held, uuid))
        .fold(MiB::ZERO, MiB::saturating_add)
}

/// What is held of a GPU.
pub(crate) fn share(held: &Held, uuid: &str) -> Option<MiB> {
    match held {
        Held::Allocation(allocation) => allocation.share(uuid).map(|share| share.memory),
        Held::Legacy(_) => panic!("every node has an inventory, so nobody writes gpushare's form alone"),
        Held::Nothing | Held::Unreadable(_) => None,
    }
}

/// A watch of pods: the history in order, from where it is, and what it has shown so far.
#[derive(Debug, Clone, Default)]
pub(crate) struct PodWatch {
    node: Option<String>,
    at: usize,
    pub(crate) view: BTreeMap<String, Pod>,
}

/// What a watcher is told.
#[derive(Debug, Clone)]
pub(crate) enum Seen {
    Applied(Pod),
    Deleted(String),
}

impl PodWatch {
    /// Of all pods, or of one node's (field selector `spec.nodeName`).
    pub(crate) fn new(node: Option<&str>) -> PodWatch {
        PodWatch {
            node: node.map(str::to_owned),
            ..PodWatch::default()
        }
    }

    fn selects(&self, pod: &Pod) -> bool {
        self.node.is_none() || pod.node == self.node
    }

    /// The next event that concerns this watch.
    pub(crate) fn next(&mut self, api: &Api) -> Option<Seen> {
        while let Some(event) = api.pod_log.get(self.at) {
            self.at += 1;
            match event {
                PodEvent::Applied(pod) if self.selects(pod) => {
                    self.view.insert(pod.uid.clone(), pod.clone());
                    return Some(Seen::Applied(pod.clone()));
                }
                PodEvent::Deleted(pod) if self.view.remove(&pod.uid).is_some() => return Some(Seen::Deleted(pod.uid.clone())),
                PodEvent::Applied(_) | PodEvent::Deleted(_) => {}
            }
        }
        None
    }

    /// A list as of now; the watch goes on from there.
    pub(crate) fn list(&mut self, api: &Api) -> Vec<Pod> {
        self.at = api.pod_log.len();
        self.look(api)
    }

    /// A list as of now beside the watch, which goes on from where it was: what comes next is older.
    pub(crate) fn look(&mut self, api: &Api) -> Vec<Pod> {
        let pods: Vec<Pod> = api.pods.values().filter(|pod| self.selects(pod)).cloned().collect();
        self.view = pods.iter().map(|pod| (pod.uid.clone(), pod.clone())).collect();
        pods
    }
}
