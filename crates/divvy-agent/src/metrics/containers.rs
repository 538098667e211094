//! The metrics about containers: what each of them may use of a GPU, and what it uses.

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
    for (container, uuid, account) in &measured.containers {
        let labels = [
            ("namespace", account.namespace.clone()),
            ("pod", account.pod.clone()),
            ("container", container.clone()),
            ("uuid", uuid.clone()),
        ];
        limit.set(labels.clone(), account.limit as f64);
        allocated.set(labels.clone(), account.allocated as f64 / 1000.0);
        if let Some(bytes) = account.used {
            used.set(labels.clone(), bytes as f64);
            peak.set(labels.clone(), account.peak as f64);
        }
        if let Some(ns) = account.busy {
            busy.set(labels.clone(), ns as f64 / 1e9);
        }
        if let Some(seconds) = account.last_busy {
            last_busy.set(labels, seconds as f64);
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
        "When the container's processes kept the GPU busy last, in Unix time; absent until they do",
    );
    allocated.counter(
        registry,
        "divvy_container_gpu_allocated_byte_seconds",
        "Granted memory times the time for which it was granted",
    );
}
