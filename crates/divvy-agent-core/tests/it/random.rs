//! Random pods on a node, with an extender that sees only the API's objects. In every run, running containers together never have
//! more memory of a GPU than the GPU has, each container runs on the GPU of its allocation, and nothing is left at the end.

use std::collections::BTreeMap;

use divvy_agent_core::ResourceSpec;
use divvy_model::ContainerKind::{App, Init, Sidecar};
use divvy_model::{ContainerKind, Health, Held, Phase};
use proptest::prelude::*;

use crate::node::{GIB, Node, pod};

const GPUS: [u64; 2] = [6, 4];

#[derive(Debug, Clone)]
enum Step {
    /// The extender binds a pod if its ledger has room.
    Create {
        gpu: u32,
        shape: usize,
    },
    Admit(usize),
    Start(usize),
    /// All containers end and will not restart. The object is removed if it was being deleted.
    End(usize, bool),
    Delete(usize),
    ForceDelete {
        pod: usize,
        kubelet_forgets: bool,
    },
    KillGhosts,
    Reconcile,
    RestartAgent,
    /// The records are lost, but the specs are not.
    LoseState,
    Reboot,
    Health(usize, bool),
}

fn shapes() -> Vec<Vec<(&'static str, ContainerKind, u64)>> {
    vec![
        vec![("m", App, 1)],
        vec![("m", App, 2)],
        vec![("m", App, 4)],
        vec![("m", App, 1), ("n", App, 2)],
        vec![("i", Init, 3), ("m", App, 1)],
        vec![("i", Init, 1), ("s", Sidecar, 1), ("m", App, 1)],
    ]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..2_u32, 0..6_usize).prop_map(|(gpu, shape)| Step::Create { gpu, shape }),
        8 => (0..8_usize).prop_map(Step::Admit),
        8 => (0..8_usize).prop_map(Step::Start),
        3 => (0..8_usize, any::<bool>()).prop_map(|(pod, well)| Step::End(pod, well)),
        2 => (0..8_usize).prop_map(Step::Delete),
        2 => (0..8_usize, any::<bool>()).prop_map(|(pod, kubelet_forgets)| Step::ForceDelete { pod, kubelet_forgets }),
        1 => Just(Step::KillGhosts),
        3 => Just(Step::Reconcile),
        2 => Just(Step::RestartAgent),
        1 => Just(Step::LoseState),
        1 => Just(Step::Reboot),
        1 => (0..2_usize, any::<bool>()).prop_map(|(gpu, ok)| Step::Health(gpu, ok)),
    ]
}

struct World {
    node: Node,
    /// The test's own records: for each pod ever created, its GPU and the amount that it takes.
    totals: BTreeMap<String, (String, u64)>,
    created: usize,
    /// Pods whose container got a grant since the pod's processes last ended.
    started: std::collections::BTreeSet<String>,
}

impl World {
    fn nth(&self, n: usize) -> Option<String> {
        let uids: Vec<&String> = self.node.pods.keys().collect();
        (!uids.is_empty()).then(|| uids[n % uids.len()].clone())
    }

    fn apply(&mut self, step: &Step) {
        let node = &mut self.node;
        match step {
            Step::Create { gpu, shape } => {
                let uid = format!("{:03}", self.created);
                let pod = pod(&uid, *gpu, &shapes()[*shape]);
                let units = pod.request.effective_units().expect("small");
                let uuid = format!("GPU-{gpu}");
                let booked: u64 = node
                    .pods
                    .values()
                    .filter(|pod| !pod.ended())
                    .filter_map(|pod| match &pod.held {
                        Held::Allocation(allocation) => allocation.share(&uuid).map(|share| share.memory.0),
                        _ => None,
                    })
                    .sum();
                if booked + units * GIB <= GPUS[*gpu as usize] * GIB {
                    self.created += 1;
                    self.totals.insert(uid, (uuid, units * GIB));
                    node.see(pod);
                }
            }
            Step::Admit(n) => {
                if let Some(uid) = self.nth(*n)
                    && self.node.handouts.iter().all(|handout| handout.key.uid != uid)
                    && !self.node.pods[&uid].deleting
                    && !self.node.pods[&uid].ended()
                {
                    // The kubelet rejects a pod for which it has no ids. Its own records are then unchanged.
                    if self.node.admit(&uid).is_err() {
                        self.node.kubelet_forgets(&uid);
                        self.node.change(&uid, |pod| pod.phase = Phase::Failed);
                    }
                }
            }
            Step::Start(n) => {
                if let Some(uid) = self.nth(*n)
                    && self.node.handouts.iter().any(|handout| handout.key.uid == uid)
                    && !self.node.pods[&uid].deleting
                    && !self.node.pods[&uid].ended()
                {
                    let containers = self.node.pods[&uid].request.containers.clone();
                    for container in containers {
                        let Ok(running) = self.node.start(&uid, &container.name) else {
                            continue;
                        };
                        self.started.insert(uid.clone());
                        let device = self.totals[&uid].0.replace("GPU-", "/dev/nvidia");
                        assert!(running.devices.contains(&device), "{uid} runs on {running:?}");
                        let units = format!("ALIYUN_COM_GPU_MEM_CONTAINER={}", container.units);
                        assert!(running.env.contains(&units), "{uid} {container:?}: {running:?}");
                    }
                }
            }
            Step::End(n, well) => {
                if let Some(uid) = self.nth(*n) {
                    self.started.remove(&uid);
                    self.node.processes_end(&uid);
                    if self.node.pods[&uid].deleting {
                        self.node.kubelet_forgets(&uid);
                        self.node.object_gone(&uid);
                    } else {
                        let phase = if *well { Phase::Succeeded } else { Phase::Failed };
                        self.node.change(&uid, |pod| pod.phase = phase);
                        self.node.kubelet_forgets(&uid);
                    }
                }
            }
            Step::Delete(n) => {
                if let Some(uid) = self.nth(*n) {
                    self.node.change(&uid, |pod| pod.deleting = true);
                }
            }
            Step::ForceDelete { pod, kubelet_forgets } => {
                if let Some(uid) = self.nth(*pod) {
                    self.node.object_gone(&uid);
                    if *kubelet_forgets {
                        self.node.kubelet_forgets(&uid);
                    }
                }
            }
            Step::KillGhosts => self.kill_ghosts(),
            Step::Reconcile => drop(self.node.reconcile()),
            Step::RestartAgent => {
                self.node.restart_agent();
            }
            Step::LoseState => {
                // Of a container whose pod the API server and the kubelet have both forgotten, the record was the only trace.
                let is_traceless = |uid: &String| {
                    let has_handout = node.handouts.iter().any(|handout| handout.key.uid == *uid);
                    !has_handout && !node.pods.contains_key(uid)
                };
                let traceless: Vec<String> = node.populated.iter().filter(|uid| is_traceless(uid)).cloned().collect();
                for uid in traceless {
                    self.started.remove(&uid);
                    node.processes_end(&uid);
                }
                node.records.clear();
                node.restart_agent();
                // The agent does this at its start, before the kubelet can call.
                node.reconcile();
            }
            Step::Reboot => {
                node.populated.clear();
                node.specs.clear();
                self.started.clear();
                let uids: Vec<String> = node.pods.keys().cloned().collect();
                for uid in uids {
                    node.change(&uid, |pod| pod.container_running = false);
                }
                node.restart_agent();
                node.reconcile();
            }
            Step::Health(gpu, ok) => {
                let health = if *ok { Health::Ok } else { Health::Failed };
                self.node.set_health(*gpu, health, None);
            }
        }
    }

    fn kill_ghosts(&mut self) {
        let ghosts: Vec<String> = self
            .node
            .populated
            .iter()
            .filter(|uid| !self.node.pods.contains_key(*uid))
            .cloned()
            .collect();
        for uid in ghosts {
            self.started.remove(&uid);
            self.node.processes_end(&uid);
            self.node.kubelet_forgets(&uid);
        }
    }

    /// Check invariant 1 (`crates/divvy/tests/it/invariants.rs`) with the test's own records.
    fn check(&self) {
        let started: BTreeMap<String, (String, u64)> = self
            .totals
            .iter()
            .filter(|(uid, _)| self.started.contains(*uid))
            .map(|(uid, total)| (uid.clone(), total.clone()))
            .collect();
        for (gpu, used) in self.node.used(&started) {
            let index: usize = gpu.trim_start_matches("GPU-").parse().expect("a number");
            assert!(used <= GPUS[index] * GIB, "{gpu}: {used} MiB are in use");
        }
        // The core always agrees with the disk.
        let known: Vec<_> = self.node.core.records().cloned().collect();
        assert_eq!(known, self.node.records.values().cloned().collect::<Vec<_>>());
        // kube-scheduler may count on healthy ids: all ids of good GPUs, and the ids that pods hold on failed GPUs.
        let healthy = self
            .node
            .core
            .devices(ResourceSpec::MEMORY)
            .iter()
            .filter(|device| device.healthy)
            .count() as u64;
        let expected: u64 = self
            .node
            .core
            .gpus()
            .iter()
            .map(|gpu| {
                let held: u64 = self
                    .node
                    .pods
                    .values()
                    .filter(|pod| !pod.ended() && self.totals[&pod.uid].0 == gpu.uuid)
                    .map(|pod| self.totals[&pod.uid].1 / GIB)
                    .sum();
                if gpu.health == Health::Ok {
                    gpu.units
                } else {
                    held.min(gpu.units)
                }
            })
            .sum();
        assert_eq!(healthy, expected);
    }

    /// Let everything end, and check that nothing is left.
    fn quiet(&mut self) {
        let before: Vec<_> = {
            self.node.reconcile();
            self.node.core.records().cloned().collect()
        };
        let (inventory, devices) = (self.node.core.inventory(), self.node.core.devices(ResourceSpec::MEMORY));
        self.node.restart_agent();
        self.node.reconcile();
        assert_eq!(
            self.node.core.records().cloned().collect::<Vec<_>>(),
            before,
            "a restarted agent knows the same"
        );
        assert_eq!(self.node.core.inventory(), inventory);
        let healthy = |devices: &[divvy_agent_core::Device]| devices.iter().filter(|device| device.healthy).count();
        assert_eq!(healthy(&self.node.core.devices(ResourceSpec::MEMORY)), healthy(&devices));
        let uids: Vec<String> = self.node.pods.keys().cloned().collect();
        for uid in uids {
            self.node.object_gone(&uid);
        }
        self.kill_ghosts();
        self.node.populated.clear();
        self.node.reconcile();
        assert!(self.node.records.is_empty(), "{:?}", self.node.records);
        assert!(self.node.specs.is_empty(), "{:?}", self.node.specs.keys());
        assert!(self.node.core.inventory().gpus.iter().all(|gpu| gpu.held.0 == 0));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn containers_never_have_more_of_a_gpu_than_it_has(steps in proptest::collection::vec(step(), 1..60)) {
        let mut world = World {
            node: Node::new(&GPUS.map(|units| units * GIB)),
            totals: BTreeMap::new(),
            created: 0,
            started: std::collections::BTreeSet::new(),
        };
        for step in &steps {
            world.apply(step);
            world.check();
        }
        world.quiet();
    }
}
