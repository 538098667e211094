//! Which GPUs are tried.

use std::sync::Arc;

use divvy_model::out_of_service::{found_by_smoke, is_out_of_service, out_of_service_key, whole_out_of_service};
use divvy_model::{
    ContainerKind, ContainerRequest, GpuRules, Health, MemoryUnit, MiB, PodRequest, Vendor, WholeContainer, WholeKind,
    WholeRequest,
};
use divvy_placement::{GpuState, Ledger, LedgerNode, NodeRefusal};
use divvy_why::{ClusterSnapshot, NodeSite};

use crate::GpuVerdict;

/// The memory that a test needs, in MiB: a context of CUDA, which takes up to about 600 MiB, and room for the patterns and the matrices.
const NEEDED: MiB = MiB(1024);
/// How the agent's reason begins that a GPU in MIG mode is not offered (`divvy_hardware::GpuFacts::unfit`).
const MIG_MODE: &str = "MIG mode is on";

/// Which GPUs the user wants to try.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TargetChoice {
    /// The names of nodes; all nodes if there are none.
    pub nodes: Vec<String>,
    /// A UUID, a prefix that only one GPU has, or an index.
    pub gpu: Option<String>,
    /// The units of each test.
    pub share: Option<u64>,
    /// Whether the whole GPU is requested.
    pub whole: bool,
    /// Whether the GPUs are tested again that an earlier run took out of service.
    pub report: bool,
}

/// What a test requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TestAsk {
    /// Units of shared memory.
    Units(u64),
    /// The whole GPU, or a MIG device.
    Whole(WholeKind),
}

/// A GPU of the cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TestTarget {
    /// The node.
    pub node: String,
    /// The node's label `kubernetes.io/hostname`.
    pub hostname: String,
    /// The index among the GPUs of the vendor. `None` if the node's GPUs are not known.
    pub index: Option<u32>,
    /// The UUID.
    pub uuid: String,
    /// The product.
    pub model: String,
    /// What an earlier run found, because of which the GPU is out of service and is tested again.
    pub failed_before: Option<String>,
}

/// A GPU, and what is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Planned {
    /// The GPU.
    pub target: TestTarget,
    /// What the test requests, or why there is no test.
    pub ask: Result<TestAsk, GpuVerdict>,
}

/// The reason why there is no plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TargetError {
    /// There is no such node.
    #[error("there is no node {0}; kubectl get nodes lists the nodes")]
    NoNode(String),
    /// The node has no GPUs that Divvy knows.
    #[error(
        "node {0} has no GPUs that Divvy knows: it has no annotation divvy.dev/inventory, which Divvy's agent writes; divvy doctor --cluster finds out why"
    )]
    NoGpus(String),
    /// No node has GPUs that Divvy knows.
    #[error(
        "no node has GPUs that Divvy knows: none has the annotation divvy.dev/inventory, which Divvy's agent writes; divvy doctor --cluster finds out why"
    )]
    Nothing,
    /// No GPU has this name.
    #[error("--gpu {given}: no GPU has this UUID or index; there are {known}")]
    NoGpu {
        /// What was given.
        given: String,
        /// Some that exist.
        known: String,
    },
    /// Several GPUs have UUIDs that begin so.
    #[error("--gpu {given}: {count} GPUs have UUIDs that begin so ({known}); write more of the UUID")]
    Ambiguous {
        /// What was given.
        given: String,
        /// How many.
        count: usize,
        /// Some of them.
        known: String,
    },
}

/// Choose the GPUs, and decide for each whether and with what it is tried.
///
/// # Errors
/// Fails if a node or GPU that the user named does not exist, or if there is no GPU at all.
pub fn plan(snapshot: &ClusterSnapshot, choice: &TargetChoice) -> Result<Vec<Planned>, TargetError> {
    let ledger = &snapshot.ledger;
    if let Some(name) = choice.nodes.iter().find(|name| snapshot.site(name).is_none()) {
        return Err(TargetError::NoNode(name.clone()));
    }
    let mut planned = Vec::new();
    for site in snapshot.sites() {
        let named = choice.nodes.contains(&site.name);
        if !(named || choice.nodes.is_empty()) {
            continue;
        }
        let before = planned.len();
        of_node(ledger, site, choice, &mut planned);
        if named && planned.len() == before {
            return Err(TargetError::NoGpus(site.name.clone()));
        }
    }
    if planned.is_empty() {
        return Err(TargetError::Nothing);
    }
    match &choice.gpu {
        None => Ok(planned),
        Some(given) => only(planned, given),
    }
}

/// Add the GPUs of one node.
fn of_node(ledger: &Ledger, site: &NodeSite, choice: &TargetChoice, planned: &mut Vec<Planned>) {
    let target = |gpu: Option<(&GpuState, &str)>| TestTarget {
        node: site.name.clone(),
        hostname: site.labels.get("kubernetes.io/hostname").unwrap_or(&site.name).clone(),
        index: gpu.map(|(gpu, _)| gpu.index),
        uuid: gpu.map_or_else(String::new, |(_, uuid)| uuid.to_owned()),
        model: gpu.map_or_else(String::new, |(gpu, _)| gpu.model.clone()),
        failed_before: gpu.and_then(|(gpu, _)| Some(found_by_smoke(gpu.reason.as_deref()?)?.to_owned())),
    };
    let view = ledger.node(&site.name);
    let state = view.as_ref().and_then(LedgerNode::state);
    let gpus = state.map_or(&[][..], |state| &state.gpus);
    let named = gpus
        .iter()
        .enumerate()
        .filter_map(|(at, gpu)| Some((at, gpu, gpu.uuid.as_deref()?)));
    let before = planned.len();
    for (at, gpu, uuid) in named {
        let free = view.as_ref().map_or(MiB::ZERO, |view| view.free(at));
        planned.push(Planned {
            target: target(Some((gpu, uuid))),
            ask: ask(ledger, site, choice, gpu, uuid, free),
        });
    }
    if planned.len() == before && site.has_inventory {
        let nothing = TestAsk::Units(1).request("");
        let refusal = ledger
            .fits(&site.name, &divvy_placement::Ask::of(&nothing, ledger.unit()), "")
            .err();
        let reason = refusal.map_or_else(
            || "its inventory lists no GPU".to_owned(),
            |refusal| refusal.filter_message(&site.name),
        );
        planned.push(Planned {
            target: target(None),
            ask: Err(GpuVerdict::untried(reason)),
        });
    }
}

/// Decide what to request of one GPU.
fn ask(
    ledger: &Ledger,
    site: &NodeSite,
    choice: &TargetChoice,
    gpu: &GpuState,
    uuid: &str,
    free: MiB,
) -> Result<TestAsk, GpuVerdict> {
    let skipped = |reason: String| Err(GpuVerdict::Skipped(reason));
    if gpu.vendor != Vendor::Nvidia {
        return skipped(format!(
            "there are no steps for {} GPUs: their drivers compile no text without a toolchain",
            gpu.vendor
        ));
    }
    if let Some(reason) = divided(gpu) {
        return skipped(format!(
            "the GPU is in MIG mode, and none of its MIG devices is offered: {reason}"
        ));
    }
    let reason = gpu.reason.as_deref().unwrap_or("it gives no reason");
    let is_tested_again = choice.report && found_by_smoke(reason).is_some();
    if gpu.health != Health::Ok && !is_tested_again {
        let fix = match is_out_of_service(reason) {
            true if found_by_smoke(reason).is_some() => format!(
                "repair or reset the GPU; then divvy smoke --node {} --gpu {} --report tests it, and puts it back into service if it passes",
                site.name, gpu.index
            ),
            true => {
                let marked = whole_out_of_service(reason).filter(|_| gpu.is_part).unwrap_or(uuid);
                return skipped(format!(
                    "{reason}; kubectl annotate node {} {}- puts it back into service",
                    site.name,
                    out_of_service_key(marked)
                ));
            }
            false => "divvy doctor, on the node, names the cause and what to type".to_owned(),
        };
        return Err(GpuVerdict::Broken {
            found: format!("Divvy's agent does not offer the GPU: {reason}"),
            why: "no pod gets it".to_owned(),
            fix,
        });
    }
    if site.cordoned {
        return skipped(format!("the node is cordoned; kubectl uncordon {}", site.name));
    }
    if !site.ready {
        return skipped(format!("the node is not ready; kubectl describe node {} says why", site.name));
    }
    let is_shared = gpu.is_shared() && gpu.units > 0;
    let is_free = |kind: WholeKind| {
        let asked = divvy_placement::Ask::of(&TestAsk::Whole(kind).request(uuid), ledger.unit());
        ledger.fits(&site.name, &asked, "").is_ok()
    };
    let ask = match (gpu.whole, choice.share) {
        (Some(kind), _) if choice.whole || !is_shared => TestAsk::Whole(kind),
        // While pods share a MIG device, no pod gets it through its own resource.
        (Some(kind), None) if gpu.is_part && is_free(kind) => TestAsk::Whole(kind),
        (None, _) if choice.whole => {
            return skipped("the GPU is not offered as a whole (the agent's --whole-gpus)".to_owned());
        }
        (_, Some(units)) if units > gpu.units => {
            return skipped(format!("it offers {} units, and --share requests {units}", gpu.units));
        }
        (_, Some(units)) => TestAsk::Units(units),
        (_, None) => TestAsk::Units(needed(ledger.unit()).min(gpu.units.max(1))),
    };
    let asked = divvy_placement::Ask::of(&ask.request(uuid), ledger.unit());
    // Until it is tested, the GPU fits no pod.
    let fits = match is_tested_again {
        true if asked.whole.is_some() => Some(free >= gpu.capacity),
        true => asked.memory.map(|memory| memory <= free),
        false => None,
    };
    let fits = match fits {
        Some(true) => Ok(()),
        Some(false) => Err(NodeRefusal::NoGpuFits),
        None => ledger.fits(&site.name, &asked, ""),
    };
    match fits {
        Ok(()) => Ok(ask),
        Err(NodeRefusal::NoGpuFits | NodeRefusal::TooFewFit(_)) => skipped(format!(
            "full: {free} of {} are free, and the test requests {}",
            gpu.capacity,
            asked.memory.unwrap_or(MiB(u64::MAX))
        )),
        Err(NodeRefusal::TooFewWhole(_)) => skipped(format!(
            "full: pods hold {} of it",
            MiB(gpu.capacity.0.saturating_sub(free.0))
        )),
        Err(other) => Err(GpuVerdict::untried(other.filter_message(&site.name))),
    }
}

/// Return why the agent offers nothing of a GPU in MIG mode. `None` for other GPUs.
fn divided(gpu: &GpuState) -> Option<&str> {
    let reason = gpu.reason.as_deref().filter(|reason| reason.starts_with(MIG_MODE))?;
    (gpu.health == Health::Failed).then_some(reason)
}

/// Return how many units a test needs.
fn needed(unit: MemoryUnit) -> u64 {
    let of_one = unit.memory(1).map_or(1, |memory| memory.0).max(1);
    NEEDED.0.div_ceil(of_one)
}

impl TestAsk {
    /// Return the request of a pod that accepts only this GPU.
    fn request(self, uuid: &str) -> PodRequest {
        let container = "smoke".to_owned();
        let kind = ContainerKind::App;
        let uuids = if uuid.is_empty() { Vec::new() } else { vec![uuid.to_owned()] };
        let rules = GpuRules {
            uuids,
            ..GpuRules::default()
        };
        let request = PodRequest {
            rules: Some(Arc::new(Ok(rules))),
            ..PodRequest::default()
        };
        match self {
            TestAsk::Units(units) => PodRequest {
                containers: vec![ContainerRequest {
                    name: container,
                    kind,
                    units,
                    gpu_count: 0,
                }],
                ..request
            },
            TestAsk::Whole(whole) => PodRequest {
                whole: Some(Box::new(WholeRequest {
                    kind: whole,
                    containers: vec![WholeContainer {
                        name: container,
                        kind,
                        gpus: 1,
                    }],
                })),
                ..request
            },
        }
    }
}

/// Keep the GPUs that `--gpu` names.
fn only(planned: Vec<Planned>, given: &str) -> Result<Vec<Planned>, TargetError> {
    let known = |of: &[&Planned]| {
        let names: Vec<String> = of.iter().take(4).map(|one| one.target.to_string()).collect();
        let more = of.len().saturating_sub(names.len());
        let more = if more > 0 {
            format!(", and {more} more")
        } else {
            String::new()
        };
        format!("{}{more}", names.join(", "))
    };
    if let Ok(index) = given.parse::<u32>() {
        let chosen: Vec<Planned> = planned
            .iter()
            .filter(|one| one.target.index == Some(index))
            .cloned()
            .collect();
        return if chosen.is_empty() {
            Err(TargetError::NoGpu {
                given: given.to_owned(),
                known: known(&planned.iter().collect::<Vec<_>>()),
            })
        } else {
            Ok(chosen)
        };
    }
    if let Some(exact) = planned.iter().find(|one| one.target.uuid == given) {
        return Ok(vec![exact.clone()]);
    }
    let begin: Vec<&Planned> = planned
        .iter()
        .filter(|one| !given.is_empty() && one.target.uuid.starts_with(given))
        .collect();
    match begin.as_slice() {
        [one] => Ok(vec![(*one).clone()]),
        [] => Err(TargetError::NoGpu {
            given: given.to_owned(),
            known: known(&planned.iter().collect::<Vec<_>>()),
        }),
        several => Err(TargetError::Ambiguous {
            given: given.to_owned(),
            count: several.len(),
            known: known(several),
        }),
    }
}

impl std::fmt::Display for TestTarget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.index {
            Some(index) => write!(f, "{} GPU {index} ({})", self.node, self.uuid),
            None => f.write_str(&self.node),
        }
    }
}
