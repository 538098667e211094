//! The metrics about GPUs: what the driver measures, and what Divvy has allocated, in base units.

use divvy_hardware::{Gauges, GpuGauges};
use divvy_model::{Inventory, MiB};

use super::{Floats, Measured, Sheet, Xids, bytes};

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
pub(super) fn describe<'a>(
    sheet: &mut Sheet<'_>,
    inventory: &Inventory,
    allocated: impl Iterator<Item = (&'a str, MiB)>,
    measured: &Measured,
    xids: &Xids,
) {
    let mut info = Floats::default();
    let (mut shared, mut held) = (Floats::default(), Floats::default());
    for gpu in &inventory.gpus {
        let driver = inventory.drivers.get(&gpu.vendor).map_or("", String::as_str);
        let labels = [
            ("gpu", gpu.index.to_string()),
            ("uuid", gpu.uuid.clone()),
            ("pci", gpu.pci.clone()),
            ("model", gpu.model.clone()),
            ("driver", driver.to_owned()),
        ];
        info.set(labels, 1.0);
        held.set(of(&gpu.uuid), bytes(gpu.held));
        if gpu.is_shared() {
            shared.set(of(&gpu.uuid), bytes(inventory.unit.memory(gpu.units).unwrap_or_default()));
        }
    }
    info.gauge(sheet, "divvy_gpu_info", "1 for each GPU and MIG device, with what it is");
    shared.gauge(sheet, "divvy_gpu_shared_bytes", "Memory that the GPU offers for sharing");
    let mut sums = Floats::default();
    for (uuid, memory) in allocated {
        sums.set(of(uuid), bytes(memory));
    }
    sums.gauge(
        sheet,
        "divvy_gpu_allocated_bytes",
        "Memory on the GPU that pods with a grant have",
    );
    held.gauge(
        sheet,
        "divvy_gpu_held_bytes",
        "Memory held by containers without an allocation: their pod object is gone or has ended, or the extender did not place the pod",
    );
    let mut counts = Floats::default();
    for ((uuid, xid), count) in xids.counts() {
        #[expect(clippy::cast_precision_loss, reason = "no GPU reports so many errors")]
        counts.set([("uuid", uuid.clone()), ("xid", xid.clone())], *count as f64);
    }
    counts.counter(
        sheet,
        "divvy_gpu_xid_errors",
        "Errors that NVIDIA's driver reported about the GPU since the agent started, by XID",
    );
    describe_measured(sheet, measured);
}

/// A value of a GPU in base units.
type Value = fn(&Gauges) -> Option<f64>;

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
fn describe_measured(sheet: &mut Sheet<'_>, measured: &Measured) {
    let simple: [(&'static str, &'static str, Value); 6] = [
        ("divvy_gpu_memory_bytes", "The GPU's memory, as the driver reports it", |of| {
            of.memory.map(|memory| float(memory.total))
        }),
        (
            "divvy_gpu_memory_used_bytes",
            "Memory in use on the GPU, as the driver reports it",
            |of| of.memory.map(|memory| float(memory.used)),
        ),
        (
            "divvy_gpu_sm_active_ratio",
            "Part of the time in which the multiprocessors had work, as their mean since the last scrape; from Hopper on",
            |of| of.gpm?.sm_active.map(|parts| f64::from(parts) / 1e6),
        ),
        (
            "divvy_gpu_tensor_active_ratio",
            "Part of the time in which the tensor cores were active, since the last scrape; from Hopper on",
            |of| of.gpm?.tensor_active.map(|parts| f64::from(parts) / 1e6),
        ),
        (
            "divvy_gpu_memory_bandwidth_ratio",
            "Part of the memory's bandwidth that was used, since the last scrape; from Hopper on",
            |of| of.gpm?.dram_active.map(|parts| f64::from(parts) / 1e6),
        ),
        ("divvy_gpu_power_watts", "Power draw of the GPU", |of| {
            of.power_milliwatts.map(|power| float(power) / 1000.0)
        }),
    ];
    let gpus: Vec<Divided<'_>> = measured.gpus.iter().map(divided).collect();
    for (name, help, value) in simple {
        let mut floats = Floats::default();
        for (uuid, value) in gpus.iter().flat_map(|gpu| values(gpu, value)) {
            floats.set(of(uuid), value);
        }
        floats.gauge(sheet, name, help);
    }
    let mut busy = Floats::default();
    for (uuid, (ratio, source)) in gpus.iter().flat_map(|gpu| values(gpu, busy_ratio)) {
        match source {
            None => busy.set(of(uuid), ratio),
            Some(source) => busy.set([("uuid", uuid.to_owned()), ("source", source.to_owned())], ratio),
        }
    }
    busy.gauge(
        sheet,
        "divvy_gpu_busy_ratio",
        "Part of the driver's last sample period in which a kernel ran on the GPU; with source=\"gpm\", which MIG devices from Hopper on have, part of the \
         time since the last scrape",
    );
    let (mut energy, mut temperature) = (Floats::default(), Floats::default());
    let (mut clock, mut throttled) = (Floats::default(), Floats::default());
    for gpu in &measured.gpus {
        let (uuid, values) = (&gpu.uuid, &gpu.values);
        let with = |label: &'static str, text: &str| [("uuid", uuid.clone()), (label, text.to_owned())];
        if let Some(millijoules) = values.energy_millijoules {
            energy.set(of(uuid), float(millijoules) / 1000.0);
        }
        for (sensor, celsius) in [
            ("gpu", values.temperature_celsius),
            ("memory", values.memory_temperature_celsius),
        ] {
            if let Some(celsius) = celsius {
                temperature.set(with("sensor", sensor), f64::from(celsius));
            }
        }
        for (domain, mhz) in [("sm", values.sm_clock_mhz), ("memory", values.memory_clock_mhz)] {
            if let Some(mhz) = mhz {
                clock.set(with("domain", domain), f64::from(mhz) * 1e6);
            }
        }
        if let Some(reasons) = values.clocks_event_reasons {
            for (bit, reason) in REASONS {
                throttled.set(with("reason", reason), f64::from(u8::from(reasons & bit != 0)));
            }
        }
    }
    energy.counter(
        sheet,
        "divvy_gpu_energy_joules",
        "Energy that the GPU has used since the driver was loaded",
    );
    temperature.gauge(
        sheet,
        "divvy_gpu_temperature_celsius",
        "Temperature of the GPU's chip and of its memory",
    );
    clock.gauge(
        sheet,
        "divvy_gpu_clock_hertz",
        "Clocks of the multiprocessors and of the memory",
    );
    throttled.gauge(
        sheet,
        "divvy_gpu_throttled",
        "1 while the GPU's clocks are reduced for this reason; an idle GPU does not count",
    );
}

fn of(uuid: &str) -> [(&'static str, String); 1] {
    [("uuid", uuid.to_owned())]
}

#[expect(
    clippy::cast_precision_loss,
    reason = "bytes of memory and millijoules are exact up to 2^53"
)]
fn float(value: u64) -> f64 {
    value as f64
}
