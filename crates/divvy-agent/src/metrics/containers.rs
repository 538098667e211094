//! The metrics about containers: what each of them may use of a GPU, and what it uses.

use std::sync::Arc;

use divvy_model::usage::ContainerUsage;

use super::{Floats, Measured, Sheet, usage};

/// Describe what containers use. A value that the driver does not return has no series.
#[expect(
    clippy::cast_precision_loss,
    reason = "these are exact up to 2^53, and a sum over years loses less than a byte in 10^15"
)]
pub(super) fn describe(sheet: &mut Sheet<'_>, measured: &Measured) {
    let (mut limit, mut used, mut peak) = (Floats::default(), Floats::default(), Floats::default());
    let (mut busy, mut last_busy, mut allocated) = (Floats::default(), Floats::default(), Floats::default());
    let (mut denied, mut denied_bytes) = (Floats::default(), Floats::default());
    let (mut throttled, mut escapes) = (Floats::default(), Floats::default());
    for of in usage::containers(measured) {
        let shared = Arc::new(labels(&of).into());
        let values = [
            (&mut limit, of.limit_bytes.map(|bytes| bytes as f64)),
            (&mut used, of.used_bytes.map(|bytes| bytes as f64)),
            (&mut peak, of.peak_bytes.map(|bytes| bytes as f64)),
            (&mut busy, of.busy_ns.map(|ns| ns as f64 / 1e9)),
            (&mut last_busy, of.last_busy.map(|seconds| seconds as f64)),
            (&mut denied, of.denied.map(|count| count as f64)),
            (&mut denied_bytes, of.denied_bytes.map(|bytes| bytes as f64)),
            (&mut throttled, of.throttled_ns.map(|ns| ns as f64 / 1e9)),
        ];
        for (floats, value) in values {
            if let Some(value) = value {
                floats.set_shared(&shared, value);
            }
        }
        for kind in &of.escapes {
            let [namespace, pod, container, uuid] = labels(&of);
            escapes.set([namespace, pod, container, uuid, ("kind", kind.word().to_owned())], 1.0);
        }
    }
    for of in &measured.containers {
        let labels = [
            ("namespace", of.account.namespace.clone()),
            ("pod", of.account.pod.clone()),
            ("container", of.container.clone()),
            ("uuid", of.uuid.clone()),
        ];
        allocated.set(labels, of.account.allocated as f64 / 1000.0);
    }
    limit.gauge(
        sheet,
        "divvy_container_gpu_memory_limit_bytes",
        "Memory of the GPU that the container was granted",
    );
    used.gauge(
        sheet,
        "divvy_container_gpu_memory_used_bytes",
        "Memory of the GPU that the container's processes have, as the driver reports it",
    );
    peak.gauge(
        sheet,
        "divvy_container_gpu_memory_peak_bytes",
        "The most memory that was measured since the container's grant, or since the agent started",
    );
    busy.counter(
        sheet,
        "divvy_container_gpu_busy_seconds",
        "Time for which the container's processes kept the GPU busy; on a shared GPU, the containers' times add up to that of the GPU",
    );
    last_busy.gauge(
        sheet,
        "divvy_container_gpu_last_busy_timestamp_seconds",
        "When the container's processes kept the GPU busy last, in Unix time; as long as they have not, when the measurement began",
    );
    allocated.counter(
        sheet,
        "divvy_container_gpu_allocated_byte_seconds",
        "Granted memory times the time for which it was granted",
    );
    denied.counter(
        sheet,
        "divvy_container_gpu_denied_allocations",
        "Allocations that the guard refused because of the limit; of a pod with several containers on the GPU, the label container is empty",
    );
    denied_bytes.counter(
        sheet,
        "divvy_container_gpu_denied_bytes",
        "Memory that the refused allocations would have taken, at most 1 TiB each; absent until a process of the pod has used the GPU with the guard",
    );
    throttled.counter(
        sheet,
        "divvy_container_gpu_throttled_seconds",
        "Time for which the guard let launches wait because the pod had used up its compute time or was stopped, as the sum of the times of the pod's \
         processes; absent until one of them has used the GPU with the guard",
    );
    escapes.gauge(
        sheet,
        "divvy_container_gpu_escape",
        "1 while a program does not keep to its share: over (it has more memory), unguarded (it avoids the guard), foreign_gpu (it uses a GPU that \
         was not granted), tampered (it changed the guard's file)",
    );
}

fn labels(of: &ContainerUsage) -> [(&'static str, String); 4] {
    [
        ("namespace", of.namespace.clone()),
        ("pod", of.pod.clone()),
        ("container", of.container.clone().unwrap_or_default()),
        ("uuid", of.gpu.clone()),
    ]
}
