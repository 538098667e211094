//! The metrics about containers: what each of them may use of a GPU, and what it uses.

use std::collections::BTreeMap;

use divvy_exposition::{Float, Metric, MetricsPage};
use divvy_model::usage::ContainerUsage;

use super::{MeasuredMetrics, usage};

divvy_exposition::metrics! {
    ALL;
    MEMORY_LIMIT: Gauge = "divvy_container_gpu_memory_limit_bytes",
        "Memory of the GPU that the container was granted.";
    MEMORY_USED: Gauge = "divvy_container_gpu_memory_used_bytes",
        "Memory of the GPU that the container's processes have, as the driver reports it.";
    MEMORY_PEAK: Gauge = "divvy_container_gpu_memory_peak_bytes",
        "The most memory that was measured since the container's grant, or since the agent started.";
    BUSY: Counter = "divvy_container_gpu_busy_seconds_total",
        "Time for which the container's processes kept the GPU busy; on a shared GPU, the containers' times add up to that of the GPU.";
    LAST_BUSY: Gauge = "divvy_container_gpu_last_busy_timestamp_seconds",
        "When the container's processes kept the GPU busy last, in Unix time; as long as they have not, when the measurement began.";
    ALLOCATED: Counter = "divvy_container_gpu_allocated_byte_seconds_total",
        "Granted memory times the time for which it was granted.";
    DENIED: Counter = "divvy_container_gpu_denied_allocations_total",
        "Allocations that the guard refused because of the limit; of a pod with several containers on the GPU, the label container is empty.";
    DENIED_BYTES: Counter = "divvy_container_gpu_denied_bytes_total",
        "Memory that the refused allocations would have taken, at most 1 TiB each; absent until a process of the pod has used the GPU with the guard.";
    THROTTLED: Counter = "divvy_container_gpu_throttled_seconds_total",
        "Time for which the guard let launches wait because the pod had used up its compute time or was stopped, as the sum of the times of the pod's \
         processes; absent until one of them has used the GPU with the guard.";
    ESCAPE: Gauge = "divvy_container_gpu_escape",
        "1 while a program does not keep to its share: over (it has more memory), unguarded (it avoids the guard), foreign_gpu (it uses a GPU that \
         was not granted), tampered (it changed the guard's file).";
}

/// Describe what containers use. A value that the driver does not return has no series.
#[expect(
    clippy::cast_precision_loss,
    reason = "these are exact up to 2^53, and a sum over years loses less than a byte in 10^15"
)]
pub(super) fn describe(page: &mut MetricsPage<'_>, measured: &MeasuredMetrics) {
    let all = usage::containers(measured);
    write(page, &MEMORY_LIMIT, &all, |of| of.limit_bytes.map(|bytes| bytes as f64));
    write(page, &MEMORY_USED, &all, |of| of.used_bytes.map(|bytes| bytes as f64));
    write(page, &MEMORY_PEAK, &all, |of| of.peak_bytes.map(|bytes| bytes as f64));
    write(page, &BUSY, &all, |of| of.busy_ns.map(|ns| ns as f64 / 1e9));
    write(page, &LAST_BUSY, &all, |of| of.last_busy.map(|seconds| seconds as f64));
    let allocated = measured.containers.iter().map(|of| {
        let labels = labels(&of.account.namespace, &of.account.pod, &of.container, &of.uuid);
        (labels, Float(of.account.allocated as f64 / 1000.0))
    });
    page.write(&ALLOCATED, allocated.collect::<BTreeMap<_, _>>());
    write(page, &DENIED, &all, |of| of.denied.map(|count| count as f64));
    write(page, &DENIED_BYTES, &all, |of| of.denied_bytes.map(|bytes| bytes as f64));
    write(page, &THROTTLED, &all, |of| of.throttled_ns.map(|ns| ns as f64 / 1e9));
    let escapes = all.iter().flat_map(|of| {
        let [namespace, pod, container, uuid] = labels_of(of);
        let kinds = of.escapes.iter().map(|kind| ("kind", kind.word()));
        kinds.map(move |kind| ([namespace, pod, container, uuid, kind], Float(1.0)))
    });
    page.write(&ESCAPE, escapes.collect::<BTreeMap<_, _>>());
}

/// Write a value of each container in the order of the labels.
fn write(page: &mut MetricsPage<'_>, metric: &Metric, all: &[ContainerUsage], value: fn(&ContainerUsage) -> Option<f64>) {
    let samples = all.iter().filter_map(|of| Some((labels_of(of), Float(value(of)?))));
    page.write(metric, samples.collect::<BTreeMap<_, _>>());
}

type Label<'a> = (&'static str, &'a str);

fn labels_of(of: &ContainerUsage) -> [Label<'_>; 4] {
    labels(&of.namespace, &of.pod, of.container.as_deref().unwrap_or_default(), &of.gpu)
}

fn labels<'a>(namespace: &'a str, pod: &'a str, container: &'a str, uuid: &'a str) -> [Label<'a>; 4] {
    [
        ("namespace", namespace),
        ("pod", pod),
        ("container", container),
        ("uuid", uuid),
    ]
}
