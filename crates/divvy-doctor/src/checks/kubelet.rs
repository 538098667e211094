//! Checks of the kubelet, and of the device plugins that are registered with it.

use std::collections::BTreeMap;

use divvy_model::parse_quantity;
use serde::Deserialize;

use super::objects::{listed_or_this_machine, some};
use crate::check::{CheckStop, CheckVerdict, Severity, blind, count, milder, problem, skip};
use crate::facts::cluster::ClusterFacts;
use crate::facts::programs::{RuntimeOutcome, Socket};
use crate::facts::{Asked, Facts, KubeletSettings};
use crate::gpu_resource::is_gpu;

/// The largest ListAndWatch message that a kubelet accepts, in bytes (gRPC's default).
const LARGEST_MESSAGE: u64 = 4 * 1024 * 1024;
/// The size of one device id in that message, in tenths of a byte, for ids that look like gpushare's. Two reports from users
/// agree on this value.
const TENTHS_PER_ID: u64 = 609;

fn kubelet(facts: &Facts<'_>) -> Result<KubeletSettings, CheckStop> {
    facts.kubelet().ok_or_else(|| CheckStop::Skip("no kubelet here".to_owned()))
}

/// The suffix for a socket that exists, but to which no connection was tried.
const UNTRIED: &str = " (not tried whether a process listens)";

/// Return the socket at a path. `None` if no connection was tried.
fn tried<'f>(facts: &'f Facts<'_>, path: &str) -> Option<&'f Socket> {
    facts.sockets.answer()?.iter().find(|socket| socket.path == path)
}

/// Judge check K02.
pub(super) fn socket(facts: &Facts<'_>) -> CheckVerdict {
    let kubelet = kubelet(facts)?;
    let path = format!("{}/device-plugins/kubelet.sock", kubelet.dir);
    let why = "device plugins cannot register, and the node offers no GPU: \"kubelet.sock: connect: no such file or directory\"";
    if !facts.exists(&path) {
        return problem(
            format!("there is no {path}"),
            why,
            "systemctl status kubelet; if the kubelet has another --root-dir (k0s: /var/lib/k0s/kubelet), pass it to the agent with --kubelet-dir, in the chart \
             gpuNodes.kubeletDir",
        );
    }
    match tried(facts, &path) {
        Some(Socket { error: Some(reason), .. }) => problem(
            format!("{path} exists, but no process listens: {reason}"),
            why,
            "systemctl restart kubelet; journalctl -u kubelet -n 50 shows why the kubelet does not run",
        ),
        Some(_) => Ok(format!("{path} answers")),
        None => Ok(format!("{path}{UNTRIED}")),
    }
}

/// The part of the kubelet's checkpoint that lists the registered devices.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct CheckpointPart {
    data: CheckpointDevices,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct CheckpointDevices {
    registered_devices: Option<BTreeMap<String, Option<Vec<String>>>>,
}

/// Return the number of devices by resource from the kubelet's checkpoint, or `None` if there is no checkpoint.
fn registered(facts: &Facts<'_>, kubelet: &KubeletSettings) -> Result<Option<BTreeMap<String, usize>>, CheckStop> {
    let path = format!("{}/device-plugins/kubelet_internal_checkpoint", kubelet.dir);
    let Some(bytes) = facts.root.read(&path, 16 << 20) else {
        return Ok(None);
    };
    let checkpoint: CheckpointPart = match serde_json::from_slice(&bytes) {
        Ok(checkpoint) => checkpoint,
        Err(error) => return blind(format!("{path} is not a kubelet checkpoint: {error}")),
    };
    let devices = checkpoint.data.registered_devices.unwrap_or_default().into_iter();
    let counted = devices.map(|(name, ids)| (name, ids.unwrap_or_default().len()));
    Ok(Some(counted.filter(|(name, _)| is_gpu(name)).collect()))
}

/// Judge check K03.
pub(super) fn plugin(facts: &Facts<'_>) -> CheckVerdict {
    if let Some(cluster) = listed_or_this_machine(facts, &["nodes"])? {
        return offered(cluster);
    }
    facts.any_gpu()?;
    let kubelet = kubelet(facts)?;
    let Some(registered) = registered(facts, &kubelet)? else {
        return skip("the kubelet has not written a device checkpoint; with --cluster the API server shows what the node offers");
    };
    let why = "pods that request a GPU stay Pending: kube-scheduler reports \"Insufficient aliyun.com/gpu-mem\"";
    let fix = "kubectl get pods -A -o wide | grep agent shows the agent of this node, kubectl logs shows what it waits for; if there is no agent, kubectl label \
               node NODE with the label that its DaemonSet selects (K07)";
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
        if plugins.iter().all(|socket| socket.error.is_some()) {
            let paths: Vec<&str> = plugins.iter().map(|socket| socket.path.as_str()).collect();
            return problem(
                format!(
                    "the kubelet knows {}, but no device plugin listens{}",
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

/// Judge check K03 by the capacities in the Node objects.
fn offered(cluster: &ClusterFacts) -> CheckVerdict {
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
    // A zero next to another GPU resource of the same node is a leftover, which K05 reports.
    none.retain(|(name, _)| !good.contains(name));
    let nodes = good.iter().collect::<std::collections::BTreeSet<_>>().len();
    let why = "pods that request a GPU stay Pending: kube-scheduler reports \"Insufficient aliyun.com/gpu-mem\"";
    if nodes == 0 && ill.is_empty() {
        let found = match none.first() {
            Some((name, resource)) => format!("{name} has {resource}: 0, and no other node offers GPUs"),
            None => "no node offers a GPU".to_owned(),
        };
        return problem(
            found,
            why,
            "kubectl get ds -A shows whether an agent runs on the nodes with GPUs; divvy doctor on a node shows what is missing there",
        );
    }
    for (name, resource) in none {
        ill.push(format!("{name} {resource}: 0"));
    }
    if !ill.is_empty() {
        return milder(
            Severity::Warning,
            some(&ill),
            "new pods cannot use these devices: 0 means that the device plugin stopped (the kubelet keeps the resource for a while); a lower number means that the \
             plugin reports the rest as unhealthy, because a GPU failed or is lost",
            "kubectl get pods -A -o wide | grep agent shows whether the agent of that node runs; kubectl inspect gpushare -o wide names the GPU; divvy doctor --only \
             D11 on that node shows details",
        );
    }
    Ok(match nodes {
        1 => "1 node offers GPUs".to_owned(),
        nodes => format!("{nodes} nodes offer GPUs"),
    })
}

/// Judge check K06.
pub(super) fn message(facts: &Facts<'_>) -> CheckVerdict {
    let mut counts: Vec<(String, u64)> = Vec::new();
    let mut unreadable: Vec<&str> = Vec::new();
    if let Some(cluster) = listed_or_this_machine(facts, &["nodes"])? {
        for node in &cluster.nodes {
            for (resource, capacity) in node.status.capacity.iter().filter(|(name, _)| is_gpu(name)) {
                let place = format!("{resource} of {}", node.metadata.name);
                counts.push((place, parse_quantity(capacity).unwrap_or(0)));
            }
            // The units that the agent would offer. The capacity does not show them if the kubelet rejected the message.
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
    let left_out = if unreadable.is_empty() {
        String::new()
    } else {
        format!("; not checked: {} (its inventory cannot be read)", some(&unreadable))
    };
    if bytes < LARGEST_MESSAGE {
        Ok(format!("{} at most ({place}){left_out}", count_ids(*most)))
    } else {
        problem(
            format!("{place} has {most} device ids, about {bytes} bytes"),
            "the kubelet accepts at most 4194304 bytes in one message: \"grpc: received message larger than max\", and the node offers 0",
            "use a larger unit, the same on all agents and the extender: --memory-unit GiB, or 256MiB",
        )
    }
}

fn count_ids(number: u64) -> String {
    count(usize::try_from(number).unwrap_or(usize::MAX), "device id")
}

/// Judge check K17.
pub(super) fn pod_resources(facts: &Facts<'_>) -> CheckVerdict {
    facts.any_gpu()?;
    let kubelet = kubelet(facts)?;
    let path = format!("{}/pod-resources/kubelet.sock", kubelet.dir);
    let why = "metrics exporters (dcgm-exporter) cannot name the pod that uses a GPU: the labels pod and namespace stay empty";
    let fix = "mount that directory into the exporter, and set NVIDIA_RESOURCE_NAMES=aliyun.com/gpu-mem there";
    if !facts.exists(&path) {
        return problem(
            format!("there is no {path}"),
            why,
            format!(
                "every kubelet since 1.13 creates this socket: check that the kubelet runs and uses this directory; then {fix}"
            ),
        );
    }
    match tried(facts, &path) {
        Some(Socket { error: Some(reason), .. }) => problem(format!("{path}: {reason}"), why, fix),
        Some(_) => Ok(path),
        None => Ok(format!("{path}{UNTRIED}")),
    }
}

/// Judge check K18.
pub(super) fn test_container(facts: &Facts<'_>) -> CheckVerdict {
    facts.nvidia()?;
    let test = match &facts.runtime_test {
        Asked::Answer(test) => test,
        Asked::Failed(reason) => {
            return problem(
                reason.clone(),
                "a container that requests a GPU would hang or fail in the same way",
                "run the program by hand: divvy-runtime --version",
            );
        }
        Asked::Blocked(reason) => return blind(reason.clone()),
        Asked::Absent(reason) | Asked::Not(reason) => return skip(reason.clone()),
    };
    let why = "every container that requests a GPU gets the same result";
    match &test.outcome {
        RuntimeOutcome::Devices(devices)
            if devices
                .iter()
                .any(|path| path.starts_with("/dev/nvidia") || path == "/dev/dxg") =>
        {
            Ok(format!("{} gives a container {}", test.program, devices.join(" ")))
        }
        RuntimeOutcome::Devices(devices) => problem(
            format!(
                "{} gives a container that requests all GPUs {:?}",
                test.program,
                devices.join(" ")
            ),
            why,
            "divvy cdi list shows the CDI devices of this machine; divvy cdi generate -o /var/run/cdi/nvidia.yaml writes a spec",
        ),
        RuntimeOutcome::Failed(text) => problem(
            format!("{} fails: {text}", test.program),
            why,
            "divvy cdi list shows the CDI devices of this machine; divvy cdi generate -o /var/run/cdi/nvidia.yaml writes a spec",
        ),
    }
}
