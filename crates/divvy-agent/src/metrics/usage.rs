//! What `/v1/usage` says, from the same values as the metrics.

use std::collections::{BTreeMap, BTreeSet};

use divvy_agent_core::{AccountedContainer, Escape, UsageAccount};
use divvy_hardware::{GpuGauges, PartGauges};
use divvy_model::limits::{NODE_GPUS, USAGE_CONTAINERS};
use divvy_model::usage::{ContainerUsage, EscapeKind, GpuUsage, Usage};

use super::MeasuredMetrics;

/// Return what was measured in the format of `/v1/usage`, as the sample with the number 0. Entries above the format's limits are left out.
pub(crate) fn usage(measured: &MeasuredMetrics) -> Usage {
    let part = |part: &PartGauges| GpuUsage {
        uuid: part.uuid.clone(),
        memory_bytes: part.memory.map(|memory| memory.total),
        used_bytes: part.memory.map(|memory| memory.used),
        busy_percent: part.gpm.and_then(|gpm| gpm.busy_percent()),
        sm_active_millionths: part.gpm.and_then(|gpm| gpm.sm_active),
        ..GpuUsage::default()
    };
    let whole = |gpu: &GpuGauges| GpuUsage {
        uuid: gpu.uuid.clone(),
        memory_bytes: gpu.values.memory.map(|memory| memory.total),
        used_bytes: gpu.values.memory.map(|memory| memory.used),
        busy_percent: gpu.values.busy_percent(),
        sm_active_millionths: gpu.values.gpm.and_then(|gpm| gpm.sm_active),
        power_milliwatts: gpu.values.power_milliwatts,
        temperature_celsius: gpu.values.temperature_celsius,
        sm_clock_mhz: gpu.values.sm_clock_mhz,
        error: gpu.error.clone().filter(|error| !error.is_empty()),
    };
    let gpus = measured
        .gpus
        .iter()
        .flat_map(|gpu| std::iter::once(whole(gpu)).chain(gpu.parts.iter().map(part)));
    Usage {
        v: 1,
        sample: 0,
        gpus: gpus.take(NODE_GPUS).collect(),
        containers: containers(measured).into_iter().take(USAGE_CONTAINERS).collect(),
    }
}

/// Return what containers use. What is known of a pod and not of its containers is in the entry of its container if it has one on the GPU, and otherwise
/// in an entry without a container.
pub(super) fn containers(measured: &MeasuredMetrics) -> Vec<ContainerUsage> {
    let mut entries: BTreeMap<(&str, Option<&str>, &str), ContainerUsage> = BTreeMap::new();
    let mut pods: BTreeMap<(&str, &str), (&UsageAccount, BTreeSet<&str>)> = BTreeMap::new();
    for used in &measured.containers {
        let AccountedContainer {
            uid,
            container,
            uuid,
            account,
        } = used;
        let (_, names) = pods.entry((uid, uuid)).or_insert_with(|| (account, BTreeSet::new()));
        names.insert(container);
        let entry = ContainerUsage {
            limit_bytes: Some(account.limit),
            used_bytes: account.used,
            peak_bytes: account.used.map(|_| account.peak),
            busy_ns: account.busy,
            busy_percent: account.percent,
            last_busy: account.last_busy,
            ..empty(uid, account, Some(container), uuid)
        };
        entries.insert((uid, Some(container), uuid), entry);
    }
    for ((uid, uuid), counts) in &measured.counted {
        let Some((account, names)) = pods.get(&(uid.as_str(), uuid.as_str())) else {
            continue;
        };
        let name = names.first().filter(|_| names.len() == 1).copied();
        let entry = entries
            .entry((uid, name, uuid))
            .or_insert_with(|| empty(uid, account, name, uuid));
        entry.denied = Some(counts.denied);
        entry.denied_bytes = counts.denied_bytes;
        entry.throttled_ns = counts.throttled_ns;
    }
    for (uid, escapes) in &measured.escapes {
        // Any of the pod's accounts has its name, also for a GPU that was not granted to it.
        let mut of_pod = pods.range((uid.as_str(), "")..).take_while(|((of, _), _)| of == uid);
        let Some((_, (account, names))) = of_pod.next() else {
            continue;
        };
        let name = names.first().filter(|_| names.len() == 1).copied();
        for escape in escapes {
            let Some(kind) = kind(escape) else { continue };
            let uuid = escape.uuid();
            let entry = entries
                .entry((uid, name, uuid))
                .or_insert_with(|| empty(uid, account, name, uuid));
            entry.escapes.insert(kind);
        }
    }
    entries.into_values().collect()
}

fn empty(uid: &str, account: &UsageAccount, container: Option<&str>, uuid: &str) -> ContainerUsage {
    ContainerUsage {
        namespace: account.namespace.clone(),
        pod: account.pod.clone(),
        uid: uid.to_owned(),
        container: container.map(str::to_owned),
        gpu: uuid.to_owned(),
        ..ContainerUsage::default()
    }
}

fn kind(escape: &Escape) -> Option<EscapeKind> {
    match escape {
        Escape::Unguarded { .. } => Some(EscapeKind::Unguarded),
        Escape::NotGranted { .. } => Some(EscapeKind::ForeignGpu),
        Escape::Exceeded { .. } => Some(EscapeKind::Over),
        Escape::Tampered { .. } => Some(EscapeKind::Tampered),
        // No program avoids anything: the limit itself does not work.
        Escape::Busy { .. } | Escape::Crowded { .. } | Escape::Untimed { .. } => None,
    }
}
