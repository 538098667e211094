//! The metrics about containers: what each of them may use of a GPU, and what it uses.

use std::collections::BTreeMap;
use std::sync::Arc;

use divvy_agent_core::{Account, Escape, Used};
use prometheus_client::registry::Registry;

use super::{Floats, Measured};

/// Describe what containers use. A value that the driver does not return has no series.
#[expect(
    clippy::cast_precision_loss,
    reason = "these are exact up to 2^53, and a sum over years loses less than a byte in 10^15"
)]
pub(super) fn describe(registry: &mut Registry, measured: &Measured) {
    let (mut limit, mut used, mut peak) = (Floats::default(), Floats::default(), Floats::default());
    let (mut busy, mut last_busy, mut allocated) = (Floats::default(), Floats::default(), Floats::default());
    for Used {
        container,
        uuid,
        account,
        ..
    } in &measured.containers
    {
        let labels = Arc::new(labels(account, container, uuid).into());
        limit.set_shared(&labels, account.limit as f64);
        allocated.set_shared(&labels, account.allocated as f64 / 1000.0);
        if let Some(bytes) = account.used {
            used.set_shared(&labels, bytes as f64);
            peak.set_shared(&labels, account.peak as f64);
        }
        if let Some(ns) = account.busy {
            busy.set_shared(&labels, ns as f64 / 1e9);
        }
        if let Some(seconds) = account.last_busy {
            last_busy.set_shared(&labels, seconds as f64);
        }
    }
    limit.gauge(
        registry,
        "divvy_container_gpu_memory_limit_bytes",
        "Memory of the GPU that the container was granted",
    );
    used.gauge(
        registry,
        "divvy_container_gpu_memory_used_bytes",
        "Memory of the GPU that the container's processes have, as the driver reports it",
    );
    peak.gauge(
        registry,
        "divvy_container_gpu_memory_peak_bytes",
        "The most memory that was measured since the container's grant, or since the agent started",
    );
    busy.counter(
        registry,
        "divvy_container_gpu_busy_seconds",
        "Time for which the container's processes kept the GPU busy; on a shared GPU, the containers' times add up to that of the GPU",
    );
    last_busy.gauge(
        registry,
        "divvy_container_gpu_last_busy_timestamp_seconds",
        "When the container's processes kept the GPU busy last, in Unix time; as long as they have not, when the measurement began",
    );
    allocated.counter(
        registry,
        "divvy_container_gpu_allocated_byte_seconds",
        "Granted memory times the time for which it was granted",
    );
    describe_pods(registry, measured);
}

/// Describe what is known of pods and not of their containers. If a pod has one container on the GPU, it is that container's.
#[expect(clippy::cast_precision_loss, reason = "no program makes so many allocations")]
fn describe_pods(registry: &mut Registry, measured: &Measured) {
    let mut pods: BTreeMap<(&str, &str), (&Account, Vec<&str>)> = BTreeMap::new();
    for of in &measured.containers {
        let (_, names) = pods.entry((&of.uid, &of.uuid)).or_insert_with(|| (&of.account, Vec::new()));
        names.push(&of.container);
    }
    let (mut denied, mut escapes) = (Floats::default(), Floats::default());
    for ((uid, uuid), (account, names)) in &pods {
        let name = if let [name] = names[..] { name } else { "" };
        let labels = labels(account, name, uuid);
        if let Some(count) = measured.denied.get(&((*uid).to_owned(), (*uuid).to_owned())) {
            denied.set(labels, *count as f64);
        }
    }
    for (uid, all) in &measured.escapes {
        // Any of the pod's accounts has its name, also for a GPU that was not granted to it.
        let Some((_, (account, names))) = pods.range((uid.as_str(), "")..).find(|((of, _), _)| of == uid) else {
            continue;
        };
        let name = if let [name] = names[..] { name } else { "" };
        for escape in all {
            let (kind, uuid) = match escape {
                Escape::Unguarded { uuid, .. } => ("unguarded", uuid),
                Escape::NotGranted { uuid, .. } => ("foreign_gpu", uuid),
                Escape::Exceeded { uuid, .. } => ("over", uuid),
                Escape::Tampered { uuid, .. } => ("tampered", uuid),
                // No program avoids anything: the limit itself does not work.
                Escape::Crowded { .. } | Escape::Untimed { .. } => continue,
            };
            let [namespace, pod, container, uuid] = labels(account, name, uuid);
            escapes.set([namespace, pod, container, uuid, ("kind", kind.to_owned())], 1.0);
        }
    }
    denied.counter(
        registry,
        "divvy_container_gpu_denied_allocations",
        "Allocations that the guard refused because of the limit; of a pod with several containers on the GPU, the label container is empty",
    );
    escapes.gauge(
        registry,
        "divvy_container_gpu_escape",
        "1 while a program does not keep to its share: over (it has more memory), unguarded (it avoids the guard), foreign_gpu (it uses a GPU that \
         was not granted), tampered (it changed the guard's file)",
    );
}

fn labels(account: &Account, container: &str, uuid: &str) -> [(&'static str, String); 4] {
    [
        ("namespace", account.namespace.clone()),
        ("pod", account.pod.clone()),
        ("container", container.to_owned()),
        ("uuid", uuid.to_owned()),
    ]
}
