//! Pods.

use std::collections::BTreeSet;

use divvy_model::names::{ALLOCATION, GPU_COUNT, GPU_MEM, VISIBLE_DEVICES};

use super::cluster::{objects, some};
use super::kubelet::is_gpu;
use crate::check::{Verdict, problem};
use crate::facts::Facts;
use crate::facts::cluster::Pod;

/// Images whose name says that they compute on GPUs.
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
/// Namespaces of what looks after GPUs, and has to see all of them.
const CARETAKERS: [&str; 5] = [
    "kube-system",
    "gpu-operator",
    "divvy-system",
    "nvidia-device-plugin",
    "nvidia-gpu-operator",
];

/// Whether a pod wants a GPU of Divvy's, and no extender has said which.
pub(super) fn is_unplaced(pod: &Pod) -> bool {
    let of_divvy = |name: &&str| {
        pod.spec
            .containers
            .iter()
            .any(|container| container.resources.limits.contains_key(name))
    };
    lives(&pod) && [GPU_MEM, GPU_COUNT].iter().any(of_divvy) && !pod.metadata.annotations.contains_key(ALLOCATION)
}

fn full_name(pod: &Pod) -> String {
    format!("{}/{}", pod.metadata.namespace, pod.metadata.name)
}

fn lives(pod: &&Pod) -> bool {
    !["Succeeded", "Failed"].contains(&pod.status.phase.as_str())
}

/// K13
pub(super) fn requests(facts: &Facts<'_>) -> Verdict {
    let cluster = objects(facts)?;
    let mut wrong = Vec::new();
    let mut looked = 0;
    for pod in cluster.pods.iter().filter(lives).filter(|pod| pod.spec.wants_gpu()) {
        looked += 1;
        let has = |resource: &str| {
            pod.spec
                .containers
                .iter()
                .any(|container| container.resources.limits.contains_key(resource))
        };
        if has(GPU_COUNT) && !has(GPU_MEM) {
            wrong.push(format!("{} asks for {GPU_COUNT} alone", full_name(pod)));
        }
        for container in &pod.spec.containers {
            let resources = &container.resources;
            for (name, request) in resources.requests.iter().filter(|(name, _)| is_gpu(name)) {
                if resources.limits.get(name) != Some(request) {
                    wrong.push(format!(
                        "{} requests {name}: {request}, and has another limit",
                        full_name(pod)
                    ));
                }
            }
            for (name, limit) in resources.limits.iter().filter(|(name, _)| is_gpu(name)) {
                if limit.parse::<u64>().is_err() && divvy_model::parse_quantity(limit).is_none() {
                    wrong.push(format!("{} has {name}: {limit}, which is no whole number", full_name(pod)));
                }
            }
        }
    }
    match wrong.is_empty() {
        true => Ok(format!("{looked} pods with GPUs")),
        false => problem(
            some(&wrong),
            "gpu-count has no effect (nobody gets K GPUs by it); GPUs are asked for in limits, in whole numbers, and requests may only say the same",
            format!("limits: {{{GPU_MEM}: 4}} for 4 units of one GPU; docs/pods.md has the rest"),
        ),
    }
}

/// K14
pub(super) fn visible_devices(facts: &Facts<'_>) -> Verdict {
    let cluster = objects(facts)?;
    let mut wrong = Vec::new();
    for pod in cluster.pods.iter().filter(lives) {
        // A grant of Divvy's wins over the pod's own value.
        let granted = pod.metadata.annotations.contains_key(ALLOCATION);
        if granted || CARETAKERS.contains(&pod.metadata.namespace.as_str()) {
            continue;
        }
        for container in &pod.spec.containers {
            let variables = container.env.iter().filter(|variable| variable.name == VISIBLE_DEVICES);
            for value in variables.filter_map(|variable| variable.value.as_deref()) {
                if !["", "void", "none"].contains(&value) {
                    wrong.push(format!("{} ({value})", full_name(pod)));
                }
            }
        }
    }
    match wrong.is_empty() {
        true => Ok(format!("{} pods looked at", cluster.pods.len())),
        false => problem(
            format!("{VISIBLE_DEVICES} is set by {}", some(&wrong)),
            "what a pod sets itself comes after what a device plugin sets: on a node whose default runtime is NVIDIA's it sees all GPUs, past all sharing",
            "take the variable out of the pod; on the node: divvy-runtime, or CDI without a default runtime for GPUs; a pod that gets its GPU from Divvy is safe from it",
        ),
    }
}

/// K15
pub(super) fn silent(facts: &Facts<'_>) -> Verdict {
    let cluster = objects(facts)?;
    let with_gpus: BTreeSet<&str> = cluster
        .nodes
        .iter()
        .filter(|node| node.status.capacity.keys().any(is_gpu))
        .map(|node| node.metadata.name.as_str())
        .collect();
    let silent: Vec<String> = cluster
        .pods
        .iter()
        .filter(lives)
        .filter(|pod| pod.spec.node_name.as_deref().is_some_and(|node| with_gpus.contains(node)))
        .filter(|pod| !CARETAKERS.contains(&pod.metadata.namespace.as_str()) && !pod.spec.wants_gpu())
        .filter(|pod| {
            let mut images = pod.spec.containers.iter().map(|container| &container.image);
            images.any(|image| IMAGES.iter().any(|part| image.contains(part)))
        })
        .map(full_name)
        .collect();
    match silent.is_empty() {
        true => Ok(format!("{} nodes with GPUs looked at", with_gpus.len())),
        false => problem(
            format!(
                "on nodes with GPUs, with an image for GPUs, and asking for none: {}",
                some(&silent)
            ),
            "where the node's default runtime is NVIDIA's, the image's own NVIDIA_VISIBLE_DEVICES=all gives such a pod every GPU, and nobody counts its memory",
            format!(
                "limits: {{{GPU_MEM}: N}} in the pod; on nodes: no default runtime for GPUs, or accept-nvidia-visible-devices-envvar-when-unprivileged = false"
            ),
        ),
    }
}

/// K16
pub(super) fn admission(facts: &Facts<'_>) -> Verdict {
    let cluster = objects(facts)?;
    let failed: Vec<String> = cluster
        .pods
        .iter()
        .filter(|pod| pod.status.phase == "Failed" && pod.status.reason == "UnexpectedAdmissionError")
        .map(full_name)
        .collect();
    match failed.first() {
        None => Ok(format!("{} pods looked at", cluster.pods.len())),
        Some(first) => {
            let (namespace, name) = first.split_once('/').unwrap_or(("default", first));
            problem(
                some(&failed),
                "the kubelet admitted them while the device plugin was away (\"requested number of devices unavailable\"); such a pod never starts again",
                format!("kubectl delete pod -n {namespace} {name}; its controller makes a new one"),
            )
        }
    }
}
