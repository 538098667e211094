//! The metrics about GPUs: what the driver measures, and what Divvy has allocated, in base units.

use std::collections::BTreeMap;

use divvy_exposition::{Float, Metric, MetricsPage};
use divvy_hardware::{Gauges, GpuGauges};
use divvy_model::{Inventory, MiB};

use super::{MeasuredMetrics, Xids, bytes};

divvy_exposition::metrics! {
    ALL;
    INFO: Gauge = "divvy_gpu_info",
        "1 for each GPU and MIG device, with what it is.";
    SHARED: Gauge = "divvy_gpu_shared_bytes",
        "Memory that the GPU offers for sharing.";
    ALLOCATED: Gauge = "divvy_gpu_allocated_bytes",
        "Memory on the GPU that pods with a grant have.";
    HELD: Gauge = "divvy_gpu_held_bytes",
        "Memory held by containers without an allocation: their pod object is gone or has ended, or the extender did not place the pod.";
    XID_ERRORS: Counter = "divvy_gpu_xid_errors_total",
        "Errors that NVIDIA's driver reported about the GPU since the agent started, by XID.";
    MEMORY: Gauge = "divvy_gpu_memory_bytes",
        "The GPU's memory, as the driver reports it.";
    MEMORY_USED: Gauge = "divvy_gpu_memory_used_bytes",
        "Memory in use on the GPU, as the driver reports it.";
    SM_ACTIVE: Gauge = "divvy_gpu_sm_active_ratio",
        "Part of the time in which the multiprocessors had work, as their mean since the last scrape; from Hopper on.";
    TENSOR_ACTIVE: Gauge = "divvy_gpu_tensor_active_ratio",
        "Part of the time in which the tensor cores were active, since the last scrape; from Hopper on.";
    MEMORY_BANDWIDTH: Gauge = "divvy_gpu_memory_bandwidth_ratio",
        "Part of the memory's bandwidth that was used, since the last scrape; from Hopper on.";
    POWER: Gauge = "divvy_gpu_power_watts",
        "Power draw of the GPU.";
    BUSY: Gauge = "divvy_gpu_busy_ratio",
        "Part of the driver's last sample period in which a kernel ran on the GPU; with source=\"gpm\", which MIG devices from Hopper on have, part of the \
         time since the last scrape.";
    ENERGY: Counter = "divvy_gpu_energy_joules_total",
        "Energy that the GPU has used since the driver was loaded.";
    TEMPERATURE: Gauge = "divvy_gpu_temperature_celsius",
        "Temperature of the GPU's chip and of its memory.";
    CLOCK: Gauge = "divvy_gpu_clock_hertz",
        "Clocks of the multiprocessors and of the memory.";
    THROTTLED: Gauge = "divvy_gpu_throttled",
        "1 while the GPU's clocks are reduced for this reason; an idle GPU does not count.";
}

/// Why a GPU's clocks are lower than possible (nvml.h, `nvmlClocksEventReason…`). That the GPU is idle is left out.
const REASONS: [(u64, &str); 7] = [
    (0x2, "clocks_setting"),
    (0x4, "power_cap"),
    (0x8, "hardware_slowdown"),
    (0x10, "sync_boost"),
    (0x20, "temperature"),
    (0x40, "hardware_temperature"),
    (0x80, "power_brake"),
];

/// Describe the GPUs. `allocated` is what pods with a grant have of each GPU.
pub(super) fn describe(
    page: &mut MetricsPage<'_>,
    inventory: &Inventory,
    allocated: &BTreeMap<String, MiB>,
    measured: &MeasuredMetrics,
    xids: &Xids,
) {
    let gpus = &inventory.gpus;
    let info = gpus.iter().map(|gpu| {
        let driver = inventory.drivers.get(&gpu.vendor).map_or("", String::as_str);
        let labels = [
            ("gpu", gpu.index.to_string()),
            ("uuid", gpu.uuid.clone()),
            ("pci", gpu.pci.clone()),
            ("model", gpu.model.clone()),
            ("driver", driver.to_owned()),
        ];
        (labels, Float(1.0))
    });
    page.write(&INFO, info.collect::<BTreeMap<_, _>>());
    let shared = gpus.iter().filter(|gpu| gpu.is_shared());
    let shared = shared.map(|gpu| (&*gpu.uuid, bytes(inventory.unit.memory(gpu.units).unwrap_or_default())));
    write(page, &SHARED, shared);
    write(
        page,
        &ALLOCATED,
        allocated.iter().map(|(uuid, memory)| (&**uuid, bytes(*memory))),
    );
    write(page, &HELD, gpus.iter().map(|gpu| (&*gpu.uuid, bytes(gpu.held))));
    let counts = xids.counts().iter().map(|((uuid, xid), count)| {
        #[expect(clippy::cast_precision_loss, reason = "no GPU reports so many errors")]
        let count = *count as f64;
        ([("uuid", uuid), ("xid", xid)], Float(count))
    });
    page.write(&XID_ERRORS, counts);
    describe_measured(page, measured);
}

/// Write a value of each GPU in the order of their UUIDs.
fn write<'a>(page: &mut MetricsPage<'_>, metric: &Metric, samples: impl Iterator<Item = (&'a str, Float)>) {
    page.write_by(metric, "uuid", samples.collect::<BTreeMap<_, _>>());
}

/// Write those values of each GPU that have a name of their own, in the order of the UUIDs and names.
fn write_named<const N: usize>(
    page: &mut MetricsPage<'_>,
    metric: &Metric,
    label: &'static str,
    measured: &MeasuredMetrics,
    values: impl Fn(&Gauges) -> [(&'static str, Option<f64>); N],
) {
    let mut samples = BTreeMap::new();
    for gpu in &measured.gpus {
        for (name, value) in values(&gpu.values) {
            if let Some(value) = value {
                samples.insert([("uuid", gpu.uuid.as_str()), (label, name)], Float(value));
            }
        }
    }
    page.write(metric, samples);
}

/// A value of a GPU in base units.
type GaugeFn = fn(&Gauges) -> Option<f64>;

/// A GPU's UUID and values, and those of its MIG devices.
type Divided<'a> = (&'a str, Gauges, Vec<(&'a str, Gauges)>);

fn divided(gpu: &GpuGauges) -> Divided<'_> {
    let parts = gpu.parts.iter().map(|of| (of.uuid.as_str(), of.as_of_gpu()));
    (&gpu.uuid, gpu.values, parts.collect())
}

/// Return a value of the MIG devices for which the driver measures it, and otherwise that of the GPU. So a sum counts nothing twice.
fn values<'a, T>((uuid, whole, parts): &Divided<'a>, value: fn(&Gauges) -> Option<T>) -> Vec<(&'a str, T)> {
    let of_parts = parts.iter().filter_map(|(uuid, of)| Some((*uuid, value(of)?)));
    let of_parts: Vec<(&str, T)> = of_parts.collect();
    if of_parts.is_empty() {
        return value(whole).map(|value| (*uuid, value)).into_iter().collect();
    }
    of_parts
}

/// Return for which part of the time a GPU was busy, and where this is from if it is not the driver's utilization, which no MIG device has.
fn busy_ratio(of: &Gauges) -> Option<(f64, Option<&'static str>)> {
    let utilization = of.gpu_percent.map(|percent| (f64::from(percent) / 100.0, None));
    let gpm = || Some((f64::from(of.gpm?.graphics_active?) / 1e6, Some("gpm")));
    utilization.or_else(gpm)
}

/// Describe what the driver measures. A value that it does not return has no series.
fn describe_measured(page: &mut MetricsPage<'_>, measured: &MeasuredMetrics) {
    let simple: [(&Metric, GaugeFn); 6] = [
        (&MEMORY, |of| of.memory.map(|memory| float(memory.total))),
        (&MEMORY_USED, |of| of.memory.map(|memory| float(memory.used))),
        (&SM_ACTIVE, |of| of.gpm?.sm_active.map(|parts| f64::from(parts) / 1e6)),
        (&TENSOR_ACTIVE, |of| of.gpm?.tensor_active.map(|parts| f64::from(parts) / 1e6)),
        (&MEMORY_BANDWIDTH, |of| {
            of.gpm?.dram_active.map(|parts| f64::from(parts) / 1e6)
        }),
        (&POWER, |of| of.power_milliwatts.map(|power| float(power) / 1000.0)),
    ];
    let gpus: Vec<Divided<'_>> = measured.gpus.iter().map(divided).collect();
    for (metric, value) in simple {
        let samples = gpus.iter().flat_map(|gpu| values(gpu, value));
        write(page, metric, samples.map(|(uuid, value)| (uuid, Float(value))));
    }
    let mut busy = BTreeMap::new();
    for (uuid, (ratio, source)) in gpus.iter().flat_map(|gpu| values(gpu, busy_ratio)) {
        let labels = std::iter::once(("uuid", uuid)).chain(source.map(|source| ("source", source)));
        busy.insert(labels.collect::<Vec<_>>(), Float(ratio));
    }
    page.write(&BUSY, busy);
    let energy = measured
        .gpus
        .iter()
        .filter_map(|gpu| Some((&*gpu.uuid, Float(float(gpu.values.energy_millijoules?) / 1000.0))));
    write(page, &ENERGY, energy);
    write_named(page, &TEMPERATURE, "sensor", measured, |of| {
        [
            ("gpu", of.temperature_celsius.map(f64::from)),
            ("memory", of.memory_temperature_celsius.map(f64::from)),
        ]
    });
    write_named(page, &CLOCK, "domain", measured, |of| {
        [("sm", of.sm_clock_mhz), ("memory", of.memory_clock_mhz)]
            .map(|(domain, mhz)| (domain, mhz.map(|mhz| f64::from(mhz) * 1e6)))
    });
    write_named(page, &THROTTLED, "reason", measured, |of| {
        let reasons = of.clocks_event_reasons;
        REASONS.map(|(bit, reason)| (reason, reasons.map(|reasons| f64::from(u8::from(reasons & bit != 0)))))
    });
}

#[expect(
    clippy::cast_precision_loss,
    reason = "bytes of memory and millijoules are exact up to 2^53"
)]
fn float(value: u64) -> f64 {
    value as f64
}
