//! Checks of pods.

mod requests;

use std::collections::{BTreeMap, BTreeSet};

use divvy_model::names::{ALLOCATION, GPU_COUNT, GPU_MEM, VISIBLE_DEVICES};

use super::objects::{full_name, listed, lives, some};
use crate::check::{CheckVerdict, count, problem};
use crate::facts::Facts;
use crate::facts::cluster::{CheckedPod, ContainerFacts};
use crate::gpu_resource::is_gpu;

/// Substrings of image names that indicate that an image runs GPU code.
const IMAGES: [&str; 8] = [
    "nvidia/cuda",
    "nvcr.io/",
    "-cuda",
    "cuda-",
    "rocm/",
    "vllm/",
    "tritonserver",
    "tensorflow-gpu",
];
/// The namespaces of components that manage GPUs. The pods in them must see all GPUs.
const CARETAKERS: [&str; 5] = [
    "kube-system",
    "gpu-operator",
    "divvy-system",
    "nvidia-device-plugin",
    "nvidia-gpu-operator",
];

pub(super) use requests::requests;

/// The largest number of failed pods that the suggested delete command names.
const MOST_DELETED: usize = 30;

fn asks_for(container: &ContainerFacts, resource: &str) -> bool {
    container.resources.limits.contains_key(resource)
}

/// Report whether a pod requests a GPU from Divvy but has no allocation.
pub(super) fn is_unplaced(pod: &CheckedPod) -> bool {
    let of_divvy = |resource: &&str| pod.spec.all_containers().any(|container| asks_for(container, resource));
    lives(&pod) && [GPU_MEM, GPU_COUNT].iter().any(of_divvy) && !pod.metadata.annotations.contains_key(ALLOCATION)
}

fn of_a_caretaker(pod: &CheckedPod) -> bool {
    CARETAKERS.contains(&pod.metadata.namespace.as_str())
}

/// The objects that a check did not judge, with the reasons.
#[derive(Default)]
struct LeftOut(Vec<String>);

impl LeftOut {
    fn add(&mut self, names: &BTreeSet<String>, why: &str) {
        if !names.is_empty() {
            let names: Vec<&String> = names.iter().collect();
            self.0.push(format!("{} ({why})", some(&names)));
        }
    }

    /// Return a suffix that names these objects. It is empty if there are none.
    fn text(&self) -> String {
        match self.0.as_slice() {
            [] => String::new(),
            all => format!("; not checked: {}", all.join("; ")),
        }
    }
}

/// Judge check K14.
pub(super) fn visible_devices(facts: &Facts<'_>) -> CheckVerdict {
    let cluster = listed(facts, &["pods"])?;
    let mut wrong = BTreeSet::new();
    let (mut granted, mut caretakers, mut unknown) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    let mut ended = BTreeSet::new();
    for pod in &cluster.pods {
        for container in pod.spec.all_containers() {
            for variable in container.env.iter().filter(|variable| variable.name == VISIBLE_DEVICES) {
                let value = variable.value.as_deref().unwrap_or_default();
                if !variable.from_elsewhere && ["", "void", "none"].contains(&value) {
                    continue;
                }
                let name = full_name(pod);
                if !lives(&pod) {
                    ended.insert(name);
                } else if of_a_caretaker(pod) {
                    caretakers.insert(name);
                } else if pod.metadata.annotations.contains_key(ALLOCATION) && asks_for(container, GPU_MEM) {
                    // A grant replaces the value, but only in containers that request GPU memory.
                    granted.insert(name);
                } else if variable.from_elsewhere {
                    unknown.insert(name);
                } else {
                    wrong.insert(format!("{name} ({value})"));
                }
            }
        }
    }
    let not_judged: BTreeSet<&String> = [&granted, &caretakers, &unknown, &ended].into_iter().flatten().collect();
    let looked = cluster.pods.len().saturating_sub(not_judged.len());
    let mut left_out = LeftOut::default();
    left_out.add(&granted, "Divvy granted the GPU, and the grant replaces the variable");
    left_out.add(&caretakers, "the namespace is for components that manage GPUs");
    left_out.add(
        &unknown,
        "the value comes from a ConfigMap, a Secret, or a field, which is not read",
    );
    left_out.add(&ended, "ended");
    let left_out = left_out.text();
    let wrong: Vec<String> = wrong.into_iter().collect();
    if wrong.is_empty() {
        Ok(format!("{} checked{left_out}", count(looked, "pod")))
    } else {
        problem(
            format!("{VISIBLE_DEVICES} is set by {}{left_out}", some(&wrong)),
            "on a node whose default runtime is NVIDIA's, this container sees the GPUs that the variable names, even without a request, and its memory is not counted",
            "remove the variable from the pod; or, on the node, use divvy-runtime, or use CDI without a default runtime for GPUs",
        )
    }
}

/// Judge check K15.
pub(super) fn silent(facts: &Facts<'_>) -> CheckVerdict {
    let cluster = listed(facts, &["nodes", "pods"])?;
    let with_gpus: BTreeSet<&str> = cluster
        .nodes
        .iter()
        .filter(|node| node.status.capacity.keys().any(is_gpu))
        .map(|node| node.metadata.name.as_str())
        .collect();
    let mut looked = 0;
    let (mut silent, mut caretakers) = (BTreeSet::new(), BTreeSet::new());
    for pod in cluster.pods.iter().filter(lives) {
        if !pod.spec.node_name.as_deref().is_some_and(|node| with_gpus.contains(node)) {
            continue;
        }
        looked += 1;
        let mut images = pod.spec.all_containers().map(|container| &container.image);
        if pod.spec.wants_gpu() || !images.any(|image| IMAGES.iter().any(|part| image.contains(part))) {
            continue;
        }
        if of_a_caretaker(pod) {
            caretakers.insert(full_name(pod))
        } else {
            silent.insert(full_name(pod))
        };
    }
    let mut left_out = LeftOut::default();
    left_out.add(&caretakers, "the namespace is for components that manage GPUs");
    let left_out = left_out.text();
    let silent: Vec<String> = silent.into_iter().collect();
    if silent.is_empty() {
        Ok(format!(
            "{} on {} with GPUs checked{left_out}",
            count(looked - caretakers.len(), "pod"),
            count(with_gpus.len(), "node")
        ))
    } else {
        problem(
            format!(
                "pods with an image for GPUs but no GPU request, on nodes with GPUs: {}{left_out}",
                some(&silent)
            ),
            "if the node's default runtime is NVIDIA's, NVIDIA_VISIBLE_DEVICES=all in the image gives the pod every GPU, and its memory is not counted",
            format!(
                "add limits: {{{GPU_MEM}: N}} to the pod; or, on the nodes, use no default runtime for GPUs, or set accept-nvidia-visible-devices-envvar-when-unprivileged = false"
            ),
        )
    }
}

/// Judge check K16.
pub(super) fn admission(facts: &Facts<'_>) -> CheckVerdict {
    let cluster = listed(facts, &["pods"])?;
    let failed: Vec<&CheckedPod> = cluster
        .pods
        .iter()
        .filter(|pod| pod.status.phase == "Failed" && pod.status.reason == "UnexpectedAdmissionError")
        .collect();
    if failed.is_empty() {
        return Ok(format!("{} checked", count(cluster.pods.len(), "pod")));
    }
    // Name only these pods: other failed pods may still be needed for their logs.
    let mut by_namespace: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for pod in failed.iter().take(MOST_DELETED) {
        let names = by_namespace.entry(&pod.metadata.namespace).or_default();
        names.push(&pod.metadata.name);
    }
    let commands: Vec<String> = by_namespace
        .iter()
        .map(|(namespace, names)| format!("kubectl delete pod -n {namespace} {}", names.join(" ")))
        .collect();
    let rest = match failed.len().saturating_sub(MOST_DELETED) {
        0 => String::new(),
        more => format!("; then run divvy doctor again for the other {more}"),
    };
    let names: Vec<String> = failed.iter().map(|pod| full_name(pod)).collect();
    problem(
        some(&names),
        "the kubelet rejected these pods at their start, usually because the device plugin was not registered (\"requested number of devices unavailable\"); a rejected pod never starts",
        format!(
            "{}{rest}. A Deployment or Job creates new pods automatically; create pods without a controller again yourself",
            commands.join("; ")
        ),
    )
}
