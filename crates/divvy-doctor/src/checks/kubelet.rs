//! The kubelet, and what is registered with it.

use std::collections::BTreeMap;

use divvy_model::names::{GPU_COUNT, GPU_MEM};
use divvy_model::parse_quantity;
use serde::Deserialize;

use super::cluster::{listed_or_this_machine, some};
use crate::check::{Severity, Stop, Verdict, blind, count, milder, problem, skip};
use crate::facts::cluster::Cluster;
use crate::facts::{Asked, Facts, Kubelet};

/// The most that a kubelet takes in one message of ListAndWatch, in bytes (gRPC's default).
const LARGEST_MESSAGE: u64 = 4 * 1024 * 1024;
/// What one id of gpushare's kind takes in it, in tenths of a byte; two reports agree (research/vendors-ux.md, K06).
const TENTHS_PER_ID: u64 = 609;

/// Resources of GPUs: those of vendors' plugins and gpushare's.
pub(crate) fn is_gpu(resource: &str) -> bool {
    [GPU_MEM, GPU_COUNT, "nvidia.com/", "amd.com/gpu", "gpu.intel.com/"]
        .iter()
        .any(|name| resource.starts_with(name))
}

fn kubelet(facts: &Facts<'_>) -> Result<Kubelet, Stop> {
    facts.kubelet().ok_or_else(|| Stop::Skip("no kubelet here".to_owned()))
}

/// Behind a socket that is there.
const UNTRIED: &str = " (whether anybody listens was not tried)";

/// Whether somebody listens at a socket: `None` where nobody was asked.
fn listens(facts: &Facts<'_>, path: &str) -> Option<Result<(), String>> {
    let sockets = facts.sockets.answer()?;
    Some(sockets.iter().find(|socket| socket.path == path)?.answers.clone())
}

/// K02
pub(super) fn socket(facts: &Facts<'_>) -> Verdict {
    let kubelet = kubelet(facts)?;
    let path = format!("{}/device-plugins/kubelet.sock", kubelet.dir);
    let why = "device plugins cannot register, and the node offers no GPU: \"kubelet.sock: connect: no such file or directory\"";
    if !facts.exists(&path) {
        return problem(
            format!("there is no {path}"),
            why,
            "systemctl status kubelet; where the kubelet has another --root-dir (k0s: /var/lib/k0s/kubelet), tell it to the agent: --kubelet-dir, in the chart \
             gpuNodes.kubeletDir",
        );
    }
    match listens(facts, &path) {
        Some(Err(reason)) => problem(
            format!("{path} is there, and nobody listens: {reason}"),
            why,
            "systemctl restart kubelet; journalctl -u kubelet -n 50 says why it does not run",
        ),
        Some(Ok(())) => Ok(format!("{path} answers")),
        None => Ok(format!("{path}{UNTRIED}")),
    }
}

/// The part of the kubelet's checkpoint that says what is registered.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct Checkpoint {
    data: Data,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct Data {
    registered_devices: Option<BTreeMap<String, Option<Vec<String>>>>,
}

/// Devices by resource, as the kubelet wrote them down; none if it wrote nothing.
fn registered(facts: &Facts<'_>, kubelet: &Kubelet) -> Result<Option<BTreeMap<String, usize>>, Stop> {
    let path = format!("{}/device-plugins/kubelet_internal_checkpoint", kubelet.dir);
    let Some(bytes) = facts.root.read(&path, 16 << 20) else {
        return Ok(None);
    };
    let checkpoint: Checkpoint = match serde_json::from_slice(&bytes) {
        Ok(checkpoint) => checkpoint,
        Err(error) => return blind(format!("{path} is not what kubelets write: {error}")),
    };
    let devices = checkpoint.data.registered_devices.unwrap_or_default().into_iter();
    let counted = devices.map(|(name, ids)| (name, ids.unwrap_or_default().len()));
    Ok(Some(counted.filter(|(name, _)| is_gpu(name)).collect()))
}

/// K03
pub(super) fn plugin(facts: &Facts<'_>) -> Verdict {
    if let Some(cluster) = listed_or_this_machine(facts, &["nodes"])? {
        return offered(cluster);
    }
    facts.any_gpu()?;
    let kubelet = kubelet(facts)?;
    let Some(registered) = registered(facts, &kubelet)? else {
        return skip("the kubelet has written no checkpoint of devices; --cluster asks the API server what the node offers");
    };
    let why = "pods that want a GPU stay Pending: kube-scheduler says \"Insufficient aliyun.com/gpu-mem\"";
    let fix = "kubectl get pods -A -o wide | grep agent shows the agent of this node, kubectl logs what it waits for; if there is none: kubectl label node NODE \
               with what its DaemonSet selects (K07)";
    let offered: Vec<String> = registered
        .iter()
        .filter(|(_, count)| **count > 0)
        .map(|(name, count)| format!("{name} ({count} ids)"))
        .collect();
    if offered.is_empty() {
        return problem("no device plugin for GPUs is registered with the kubelet", why, fix);
    }
    if let Some(sockets) = facts.sockets.answer() {
        let plugins: Vec<_> = sockets
            .iter()
            .filter(|socket| socket.path.contains("/device-plugins/") && !socket.path.ends_with("/kubelet.sock"))
            .collect();
        if plugins.iter().all(|socket| socket.answers.is_err()) {
            let paths: Vec<&str> = plugins.iter().map(|socket| socket.path.as_str()).collect();
            return problem(
                format!(
                    "the kubelet knows {}, and no plugin listens{}",
                    offered.join(", "),
                    match paths.as_slice() {
                        [] => String::new(),
                        paths => format!(" at {}", paths.join(", ")),
                    }
                ),
                why,
                fix,
            );
        }
    }
    Ok(offered.join(", "))
}

/// The same, by what nodes say of themselves.
fn offered(cluster: &Cluster) -> Verdict {
    let mut good = Vec::new();
    let (mut none, mut ill) = (Vec::new(), Vec::new());
    for node in &cluster.nodes {
        for (resource, capacity) in node.status.capacity.iter().filter(|(name, _)| is_gpu(name)) {
            let amount = |text: Option<&str>| text.and_then(parse_quantity).unwrap_or(0);
            let (capacity, allocatable) = (amount(Some(capacity)), amount(node.status.allocatable.get(resource)));
            let name = &node.metadata.name;
            if capacity == 0 {
                none.push((name, resource));
            } else if allocatable < capacity {
                ill.push(format!("{name} {resource}: {allocatable} of {capacity} healthy"));
            } else {
                good.push(name);
            }
        }
    }
    // Of a node that has other GPUs, what is gone is a leftover (K05).
    none.retain(|(name, _)| !good.contains(name));
    let nodes = good.iter().collect::<std::collections::BTreeSet<_>>().len();
    let why = "pods that want a GPU stay Pending: kube-scheduler says \"Insufficient aliyun.com/gpu-mem\"";
    if nodes == 0 && ill.is_empty() {
        let found = match none.first() {
            Some((name, resource)) => format!("{name} says {resource}: 0, and no other node offers GPUs"),
            None => "no node offers a GPU".to_owned(),
        };
        return problem(
            found,
            why,
            "kubectl get ds -A shows whether an agent runs on the nodes with GPUs; divvy doctor on such a node says what it lacks",
        );
    }
    for (name, resource) in none {
        ill.push(format!("{name} {resource}: 0"));
    }
    if !ill.is_empty() {
        return milder(
            Severity::Warning,
            some(&ill),
            "new pods do not go there: on a node with none the device plugin is away (the kubelet keeps the resource for a while); otherwise the plugin calls the rest \
             unhealthy, since a GPU failed or is lost",
            "kubectl get pods -A -o wide | grep agent shows whether the agent of that node runs; kubectl inspect gpushare -o wide names the GPU, and divvy doctor --only \
             D11 on that node says more of it",
        );
    }
    Ok(match nodes {
        1 => "1 node offers GPUs".to_owned(),
        nodes => format!("{nodes} nodes offer GPUs"),
    })
}

/// K06
pub(super) fn message(facts: &Facts<'_>) -> Verdict {
    let mut counts: Vec<(String, u64)> = Vec::new();
    let mut unreadable: Vec<&str> = Vec::new();
    if let Some(cluster) = listed_or_this_machine(facts, &["nodes"])? {
        for node in &cluster.nodes {
            for (resource, capacity) in node.status.capacity.iter().filter(|(name, _)| is_gpu(name)) {
                let place = format!("{resource} of {}", node.metadata.name);
                counts.push((place, parse_quantity(capacity).unwrap_or(0)));
            }
            // What the agent would offer, even if the kubelet refused it.
            let inventory = node.metadata.annotations.get(divvy_model::names::INVENTORY);
            match inventory.map(divvy_model::Inventory::parse) {
                Some(Ok(inventory)) => counts.push((format!("the inventory of {}", node.metadata.name), inventory.total_units())),
                Some(Err(_)) => unreadable.push(&node.metadata.name),
                None => {}
            }
        }
    } else {
        let kubelet = kubelet(facts)?;
        let registered = registered(facts, &kubelet)?.unwrap_or_default();
        counts.extend(registered.into_iter().map(|(name, count)| (name, count as u64)));
    }
    let Some((place, most)) = counts.iter().max_by_key(|(_, count)| *count) else {
        return skip("no device plugin for GPUs is registered");
    };
    let bytes = most.saturating_mul(TENTHS_PER_ID) / 10;
    let left_out = match unreadable.is_empty() {
        true => String::new(),
        false => format!("; left out: {} (its inventory cannot be read)", some(&unreadable)),
    };
    match bytes < LARGEST_MESSAGE {
        true => Ok(format!("{} at most ({place}){left_out}", count_ids(*most))),
        false => problem(
            format!("{place} has {most} ids, which are about {bytes} bytes"),
            "the kubelet takes no more than 4194304 in one message: \"grpc: received message larger than max\", and the node offers 0",
            "a coarser unit, the same on agents and extender: --memory-unit GiB, or 256MiB",
        ),
    }
}

fn count_ids(number: u64) -> String {
    count(usize::try_from(number).unwrap_or(usize::MAX), "id")
}

/// K17
pub(super) fn pod_resources(facts: &Facts<'_>) -> Verdict {
    facts.any_gpu()?;
    let kubelet = kubelet(facts)?;
    let path = format!("{}/pod-resources/kubelet.sock", kubelet.dir);
    let why = "exporters of metrics (dcgm-exporter) cannot say which pod uses a GPU: the labels pod and namespace stay empty";
    let fix = "mount that folder into the exporter, and name Divvy's resources to it: NVIDIA_RESOURCE_NAMES=aliyun.com/gpu-mem";
    if !facts.exists(&path) {
        return problem(
            format!("there is no {path}"),
            why,
            format!("a kubelet since 1.13 has it: is it running, and is this its folder? Then {fix}"),
        );
    }
    match listens(facts, &path) {
        Some(Err(reason)) => problem(format!("{path}: {reason}"), why, fix),
        Some(Ok(())) => Ok(path),
        None => Ok(format!("{path}{UNTRIED}")),
    }
}

/// K18
pub(super) fn test_container(facts: &Facts<'_>) -> Verdict {
    facts.nvidia()?;
    let test = match &facts.runtime_test {
        Asked::Answer(test) => test,
        Asked::Failed(reason) => {
            return problem(
                reason.clone(),
                "a container that asks for a GPU would wait or fail at the same place",
                "run it by hand: divvy-runtime --version",
            );
        }
        Asked::Blocked(reason) => return blind(reason.clone()),
        Asked::Absent(reason) | Asked::Not(reason) => return skip(reason.clone()),
    };
    let why = "every container that asks for a GPU is given the same answer";
    match &test.outcome {
        Ok(devices)
            if devices
                .iter()
                .any(|path| path.starts_with("/dev/nvidia") || path == "/dev/dxg") =>
        {
            Ok(format!("{} gives a container {}", test.program, devices.join(" ")))
        }
        Ok(devices) => problem(
            format!(
                "{} gives a container that asks for all GPUs {:?}",
                test.program,
                devices.join(" ")
            ),
            why,
            "divvy cdi list shows what there is; divvy cdi generate -o /var/run/cdi/nvidia.yaml makes it",
        ),
        Err(text) => problem(
            format!("{} refuses: {text}", test.program),
            why,
            "divvy cdi list shows what there is; divvy cdi generate -o /var/run/cdi/nvidia.yaml makes it",
        ),
    }
}
