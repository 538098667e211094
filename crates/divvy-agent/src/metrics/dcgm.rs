//! Metrics under the names of NVIDIA's dcgm-exporter (<https://github.com/NVIDIA/dcgm-exporter>, `etc/default-counters.csv`), for dashboards that use them.
//!
//! What dcgm-exporter gets from DCGM's profiling module comes from NVML here, from Hopper on. On older GPUs these metrics are absent.
//!
//! Of a GPU that is divided by MIG, dcgm-exporter shows each GPU instance, with the GPU's UUID and the labels `GPU_I_PROFILE` and `GPU_I_ID`
//! (`internal/pkg/collector/gpu_collector.go`, `toMetric`). Their place among the labels is in `internal/pkg/rendermetrics/render_metrics.go`,
//! `gpuMetricsFormat`. It repeats the GPU's temperature, clocks, and the like for each GPU instance; here they are shown once, for the GPU. NVML and DCGM
//! have no utilization of a GPU instance (<https://github.com/NVIDIA/dcgm-exporter/issues/216>), so `DCGM_FI_DEV_GPU_UTIL` is absent.

use std::collections::BTreeMap;

use divvy_agent_core::AccountedContainer;
use divvy_exposition::{Decimal, Metric, MetricKind, MetricsPage};
use divvy_hardware::{Gauges, GpuGauges, gpu_of_mig_index};
use divvy_model::{Inventory, Vendor};

use super::{MeasuredMetrics, Xids};

/// A metric of a GPU.
struct OfGpu {
    metric: Metric,
    value: fn(&Gauges) -> Option<Decimal>,
}

const fn of_gpu(kind: MetricKind, name: &'static str, help: &'static str, value: fn(&Gauges) -> Option<Decimal>) -> OfGpu {
    let metric = Metric { name, kind, help };
    OfGpu { metric, value }
}

const fn gauge(name: &'static str, help: &'static str, value: fn(&Gauges) -> Option<Decimal>) -> OfGpu {
    of_gpu(MetricKind::Gauge, name, help, value)
}

const fn counter(name: &'static str, help: &'static str, value: fn(&Gauges) -> Option<Decimal>) -> OfGpu {
    of_gpu(MetricKind::Counter, name, help, value)
}

/// The metrics of whole GPUs in dcgm-exporter's order. Those of memory and utilization that are shown for pods are elsewhere.
const METRICS: &[OfGpu] = &[
    gauge("DCGM_FI_DEV_SM_CLOCK", "SM clock frequency (in MHz).", |of| {
        whole(of.sm_clock_mhz)
    }),
    gauge("DCGM_FI_DEV_MEM_CLOCK", "Memory clock frequency (in MHz).", |of| {
        whole(of.memory_clock_mhz)
    }),
    gauge("DCGM_FI_DEV_MEMORY_TEMP", "Memory temperature (in C).", |of| {
        whole(of.memory_temperature_celsius)
    }),
    gauge("DCGM_FI_DEV_GPU_TEMP", "GPU temperature (in C).", |of| {
        whole(of.temperature_celsius)
    }),
    gauge("DCGM_FI_DEV_POWER_USAGE", "Power draw (in W).", |of| {
        thousandths(of.power_milliwatts)
    }),
    counter(
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
        "Total energy consumption since boot (in mJ).",
        |of| whole(of.energy_millijoules),
    ),
    counter("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "Total number of PCIe retries.", |of| {
        whole(of.pcie_replays)
    }),
    gauge("DCGM_FI_DEV_MEM_COPY_UTIL", "Memory utilization (in %).", |of| {
        whole(of.memory_percent)
    }),
    gauge("DCGM_FI_DEV_ENC_UTIL", "Encoder utilization (in %).", |of| {
        whole(of.encoder_percent)
    }),
    gauge("DCGM_FI_DEV_DEC_UTIL", "Decoder utilization (in %).", |of| {
        whole(of.decoder_percent)
    }),
    gauge("DCGM_FI_DEV_FB_FREE", "Framebuffer memory free (in MiB).", |of| {
        mebibytes(of.memory.map(|memory| memory.free))
    }),
    gauge("DCGM_FI_DEV_FB_RESERVED", "Framebuffer memory reserved (in MiB).", |of| {
        mebibytes(of.memory.and_then(|memory| memory.reserved))
    }),
    counter(
        "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL",
        "Total number of single-bit volatile ECC errors.",
        |of| whole(of.corrected_ecc),
    ),
    counter(
        "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL",
        "Total number of double-bit volatile ECC errors.",
        |of| whole(of.uncorrected_ecc),
    ),
    counter(
        "DCGM_FI_DEV_ECC_SBE_AGG_TOTAL",
        "Total number of single-bit persistent ECC errors.",
        |of| whole(of.corrected_ecc_aggregate),
    ),
    counter(
        "DCGM_FI_DEV_ECC_DBE_AGG_TOTAL",
        "Total number of double-bit persistent ECC errors.",
        |of| whole(of.uncorrected_ecc_aggregate),
    ),
    counter(
        "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS",
        "Number of remapped rows for uncorrectable errors",
        |of| whole(of.remapped_rows.map(|rows| rows.uncorrectable)),
    ),
    counter(
        "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS",
        "Number of remapped rows for correctable errors",
        |of| whole(of.remapped_rows.map(|rows| rows.correctable)),
    ),
    gauge(
        "DCGM_FI_DEV_ROW_REMAP_FAILURE",
        "Whether remapping of rows has failed",
        |of| whole(of.remapped_rows.map(|rows| u8::from(rows.failure))),
    ),
    gauge(
        "DCGM_FI_PROF_GR_ENGINE_ACTIVE",
        "Ratio of time the graphics engine is active.",
        |of| ratio(of.gpm?.graphics_active),
    ),
    gauge("DCGM_FI_PROF_SM_ACTIVE", "Ratio of time an SM has at least one warp.", |of| {
        ratio(of.gpm?.sm_active)
    }),
    gauge("DCGM_FI_PROF_SM_OCCUPANCY", "Ratio of warps resident on an SM.", |of| {
        ratio(of.gpm?.sm_occupancy)
    }),
    gauge(
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
        "Ratio of cycles the tensor (HMMA) pipe is active.",
        |of| ratio(of.gpm?.tensor_active),
    ),
    gauge(
        "DCGM_FI_PROF_DRAM_ACTIVE",
        "Ratio of cycles the device memory interface is active sending or receiving data.",
        |of| ratio(of.gpm?.dram_active),
    ),
    gauge(
        "DCGM_FI_PROF_PIPE_FP64_ACTIVE",
        "Ratio of cycles the fp64 pipes are active.",
        |of| ratio(of.gpm?.fp64_active),
    ),
    gauge(
        "DCGM_FI_PROF_PIPE_FP32_ACTIVE",
        "Ratio of cycles the fp32 pipes are active.",
        |of| ratio(of.gpm?.fp32_active),
    ),
    gauge(
        "DCGM_FI_PROF_PCIE_TX_BYTES",
        "The rate of data transmitted over the PCIe bus - including both protocol headers and data payloads - in bytes per second.",
        |of| whole(of.gpm?.pcie_tx_bytes),
    ),
    gauge(
        "DCGM_FI_PROF_PCIE_RX_BYTES",
        "The rate of data received over the PCIe bus - including both protocol headers and data payloads - in bytes per second.",
        |of| whole(of.gpm?.pcie_rx_bytes),
    ),
];

divvy_exposition::metrics! {
    OTHERS;
    XID_ERRORS: Gauge = "DCGM_FI_DEV_XID_ERRORS", "Value of the last XID error encountered.";
    FB_USED: Gauge = "DCGM_FI_DEV_FB_USED", "Framebuffer memory used (in MiB).";
    GPU_UTIL: Gauge = "DCGM_FI_DEV_GPU_UTIL", "GPU utilization (in %).";
}

/// Return the names of all metrics.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    let of_gpus = METRICS.iter().map(|of| &of.metric);
    of_gpus.chain(OTHERS).map(|metric| metric.name)
}

fn whole<N: Into<i128>>(value: Option<N>) -> Option<Decimal> {
    value.map(Decimal::from)
}

fn thousandths(value: Option<u64>) -> Option<Decimal> {
    value.map(|value| Decimal {
        digits: value.into(),
        decimals: 3,
    })
}

fn ratio(millionths: Option<u32>) -> Option<Decimal> {
    millionths.map(|parts| Decimal {
        digits: parts.into(),
        decimals: 6,
    })
}

fn mebibytes(bytes: Option<u64>) -> Option<Decimal> {
    whole(bytes.map(|bytes| bytes >> 20))
}

type DcgmLabels = Vec<(&'static str, String)>;
type DcgmSample = (DcgmLabels, Decimal);

/// A GPU or a GPU instance, as the metrics show it.
struct Entity<'a> {
    labels: DcgmLabels,
    values: Gauges,
    /// The UUID of the GPU, or the UUIDs of the MIG devices in the GPU instance.
    uuids: Vec<&'a str>,
}

/// A GPU, and its GPU instances.
struct DcgmGpu<'a> {
    whole: Entity<'a>,
    instances: Vec<Entity<'a>>,
}

impl<'a> DcgmGpu<'a> {
    /// Return a GPU and the GPU instances of which the driver measures something. `None` if the inventory does not have the GPU.
    fn of(node: &str, inventory: &Inventory, gpu: &'a GpuGauges) -> Option<DcgmGpu<'a>> {
        let mut instances: BTreeMap<u32, Entity<'a>> = BTreeMap::new();
        for part in &gpu.parts {
            let of_instance = |number: u32| Some((number, instance_labels(node, inventory, &part.uuid, number)?));
            let Some((number, labels)) = part.gpu_instance.and_then(of_instance) else {
                continue;
            };
            // The driver reports the memory of the GPU instance for each MIG device in it.
            let entity = instances.entry(number).or_insert_with(|| Entity {
                labels,
                values: part.as_of_gpu(),
                uuids: Vec::new(),
            });
            entity.uuids.push(&part.uuid);
        }
        Some(DcgmGpu {
            whole: Entity {
                labels: labels(node, inventory, &gpu.uuid)?,
                values: gpu.values,
                uuids: vec![&gpu.uuid],
            },
            instances: instances.into_values().collect(),
        })
    }

    /// Return the samples of the GPU instances that have some, and otherwise those of the GPU. So a sum counts nothing twice.
    fn samples(&self, of: impl Fn(&Entity<'a>) -> Vec<DcgmSample>) -> Vec<DcgmSample> {
        let of_instances: Vec<DcgmSample> = self.instances.iter().flat_map(&of).collect();
        if of_instances.is_empty() {
            of(&self.whole)
        } else {
            of_instances
        }
    }
}

/// Write the metrics of the node's NVIDIA GPUs to a page, and return its text. Where containers have a grant, the memory in use and the utilization are shown
/// for each of them and not for the GPU or GPU instance, so that a sum counts nothing twice.
pub(super) fn text(
    node: &str,
    inventory: &Inventory,
    measured: &MeasuredMetrics,
    xids: &Xids,
    mut page: MetricsPage<'_>,
) -> String {
    let gpus = measured.gpus.iter().filter_map(|gpu| DcgmGpu::of(node, inventory, gpu));
    let gpus: Vec<DcgmGpu<'_>> = gpus.collect();
    for OfGpu { metric, value } in METRICS {
        let sample = |of: &Entity<'_>| {
            let value = value(&of.values);
            value.map(|value| (of.labels.clone(), value)).into_iter().collect()
        };
        page.write(metric, gpus.iter().flat_map(|gpu| gpu.samples(sample)));
    }
    let last_xids = gpus.iter().map(|DcgmGpu { whole, .. }| {
        let last = whole.uuids.first().map_or(0, |uuid| xids.last(uuid));
        (whole.labels.clone(), Decimal::from(last))
    });
    page.write(&XID_ERRORS, last_xids);
    let of_containers = |value: fn(&divvy_agent_core::UsageAccount) -> Option<Decimal>,
                         of_gpu: fn(&Gauges) -> Option<Decimal>| {
        let samples = move |of: &Entity<'_>| {
            let mut samples = Vec::new();
            let mut is_shared = false;
            for AccountedContainer { container, account, .. } in measured
                .containers
                .iter()
                .filter(|used| of.uuids.contains(&used.uuid.as_str()))
            {
                is_shared = true;
                let Some(value) = value(account) else { continue };
                let mut labels = of.labels.clone();
                labels.push(("container", container.clone()));
                labels.push(("namespace", account.namespace.clone()));
                labels.push(("pod", account.pod.clone()));
                samples.push((labels, value));
            }
            if let (false, Some(value)) = (is_shared, of_gpu(&of.values)) {
                samples.push((of.labels.clone(), value));
            }
            samples
        };
        gpus.iter().flat_map(move |gpu| gpu.samples(samples))
    };
    let used = of_containers(
        |account| mebibytes(account.used),
        |of| mebibytes(of.memory.map(|memory| memory.used)),
    );
    page.write(&FB_USED, used);
    let percent = of_containers(|account| whole(account.percent), |of| whole(of.gpu_percent));
    page.write(&GPU_UTIL, percent);
    page.finish()
}

/// Return dcgm-exporter's labels of a GPU in its order. The host's name has two labels: dcgm-exporter has renamed it. `None` if the inventory has neither
/// the GPU nor a MIG device of it, and for GPUs of other vendors.
fn labels(node: &str, inventory: &Inventory, uuid: &str) -> Option<DcgmLabels> {
    let mut gpus = inventory.gpus.iter().filter(|gpu| gpu.vendor == Vendor::Nvidia);
    let gpu = gpus.find(|gpu| gpu.uuid == uuid || gpu.partition.as_ref().is_some_and(|part| part.parent == uuid))?;
    // The inventory has the MIG devices of a GPU in its place.
    let (index, model) = match &gpu.partition {
        Some(part) => {
            let suffix = format!(" MIG {}", part.profile);
            (
                gpu_of_mig_index(gpu.index),
                gpu.model.strip_suffix(&suffix).unwrap_or(&gpu.model),
            )
        }
        None => (gpu.index, gpu.model.as_str()),
    };
    let device = gpu.nodes.first().map_or("", String::as_str);
    let driver = inventory.drivers.get(&Vendor::Nvidia).map_or("", String::as_str);
    Some(vec![
        ("gpu", index.to_string()),
        ("UUID", uuid.to_owned()),
        ("pci_bus_id", bus_id(&gpu.pci)),
        ("device", device.to_owned()),
        ("modelName", model.to_owned()),
        ("Hostname", node.to_owned()),
        ("hostname", node.to_owned()),
        ("DCGM_FI_DRIVER_VERSION", driver.to_owned()),
    ])
}

/// Return the labels of the GPU instance with this number, in which the MIG device with this UUID is. `None` if the inventory does not have the MIG device.
fn instance_labels(node: &str, inventory: &Inventory, uuid: &str, number: u32) -> Option<DcgmLabels> {
    let part = inventory.gpu(uuid)?.partition.as_ref()?;
    let mut labels = labels(node, inventory, &part.parent)?;
    // The profile of a MIG device that does not have all of its GPU instance begins with that of the compute instance: `1c.3g.20gb`.
    let profile = match part.profile.split_once('.') {
        Some((compute, of_instance)) if compute.ends_with('c') => of_instance,
        _ => &part.profile,
    };
    let at = labels
        .iter()
        .position(|(name, _)| *name == "Hostname")
        .unwrap_or(labels.len());
    labels.splice(
        at..at,
        [("GPU_I_PROFILE", profile.to_owned()), ("GPU_I_ID", number.to_string())],
    );
    Some(labels)
}

/// Return a PCI address as NVML writes it: with eight digits for the domain, and in upper case.
fn bus_id(pci: &str) -> String {
    match pci.split_once(':') {
        Some((domain, rest)) if domain.len() < 8 => format!("{domain:0>8}:{rest}").to_uppercase(),
        _ => pci.to_uppercase(),
    }
}

#[cfg(test)]
mod tests {
    use divvy_exposition::MetricsFormat;
    use serde_json::json;

    use super::*;

    #[test]
    fn a_gpu_in_mig_mode_keeps_index_and_name() {
        let gpu = |uuid: &str, index: u32, model: &str, partition: serde_json::Value| {
            json!({"vendor": "nvidia", "uuid": uuid, "index": index, "nodes": ["nvidia1"], "pci": "0000:0a:00.0", "model": model, "cc": "8.0", "totalMiB": 4864,
                "reserveMiB": 0, "units": 4, "heldMiB": 0, "numa": null, "health": "ok", "reason": null, "links": [], "partition": partition})
        };
        let parts = json!({"parent": "GPU-b", "profile": "1g.5gb"});
        let gpus = [
            gpu("GPU-a", 0, "NVIDIA T4", json!(null)),
            gpu("MIG-b", 201, "NVIDIA A100 MIG 1g.5gb", parts),
        ];
        let text = json!({"v": 2, "agent": "0", "drivers": {"nvidia": "550"}, "unitMiB": 1024, "gpus": gpus}).to_string();
        let inventory = Inventory::parse(&text).expect("an inventory");
        for (uuid, index, model) in [("GPU-a", "0", "NVIDIA T4"), ("GPU-b", "1", "NVIDIA A100")] {
            let labels = labels("n", &inventory, uuid).expect("known");
            let of = |name: &str| labels.iter().find(|(of, _)| *of == name).map(|(_, value)| value.as_str());
            let found = [of("gpu"), of("UUID"), of("modelName"), of("pci_bus_id")];
            assert_eq!(found, [Some(index), Some(uuid), Some(model), Some("00000000:0A:00.0")]);
        }
        assert_eq!(labels("n", &inventory, "GPU-c"), None);
    }

    /// Measurements of the whole GPU are a separate series.
    #[test]
    fn a_divided_gpu_has_a_series_for_each_gpu_instance() {
        let gpu = |uuid: &str, index: u32, profile: &str| {
            json!({"vendor": "nvidia", "uuid": uuid, "index": index, "nodes": ["nvidia0"], "pci": "0000:0a:00.0", "model": format!("NVIDIA H100 MIG {profile}"),
                "cc": "9.0", "totalMiB": 4864, "reserveMiB": 0, "units": 4, "heldMiB": 0, "numa": null, "health": "ok", "reason": null, "links": [],
                "partition": {"parent": "GPU-a", "profile": profile}})
        };
        let gpus = [
            gpu("MIG-3", 100, "1g.10gb"),
            gpu("MIG-4", 101, "1g.10gb"),
            gpu("MIG-5-0", 102, "1c.3g.40gb"),
            gpu("MIG-5-1", 103, "1c.3g.40gb"),
        ];
        let text = json!({"v": 2, "agent": "0", "drivers": {"nvidia": "550"}, "unitMiB": 1024, "gpus": gpus}).to_string();
        let inventory = Inventory::parse(&text).expect("an inventory");
        let memory = |used: u64| json!({"total": 10_u64 << 30, "used": used << 20, "free": (10 << 30) - (used << 20)});
        let part = |uuid: &str, instance: u32, used: u64| json!({"uuid": uuid, "gpuInstance": instance, "memory": memory(used)});
        let mut busy = part("MIG-3", 3, 100);
        busy["gpm"] = json!({"graphicsActive": 250_000});
        let gauges = json!({
            "uuid": "GPU-a",
            "values": {"memory": memory(900), "temperatureCelsius": 40, "gpm": {"graphicsActive": 500_000, "smActive": 125_000}},
            "parts": [busy, part("MIG-4", 4, 300), part("MIG-5-0", 5, 500), part("MIG-5-1", 5, 500), {"uuid": "MIG-6", "gpuInstance": 6, "memory": memory(1)}],
        });
        let used = AccountedContainer {
            uid: "u".to_owned(),
            container: "main".to_owned(),
            uuid: "MIG-4".to_owned(),
            account: divvy_agent_core::UsageAccount {
                namespace: "ns".to_owned(),
                pod: "a".to_owned(),
                used: Some(200 << 20),
                ..Default::default()
            },
        };
        let measured = MeasuredMetrics {
            gpus: vec![serde_json::from_value(gauges).expect("gauges")],
            containers: vec![used],
            ..MeasuredMetrics::default()
        };
        let text = super::text(
            "n",
            &inventory,
            &measured,
            &Xids::default(),
            MetricsPage::new(MetricsFormat::Text),
        );
        let head = r#"gpu="0",UUID="GPU-a",pci_bus_id="00000000:0A:00.0",device="nvidia0",modelName="NVIDIA H100","#;
        let tail = r#"Hostname="n",hostname="n",DCGM_FI_DRIVER_VERSION="550""#;
        let whole = |name: &str, value: &str| format!("DCGM_FI_{name}{{{head}{tail}}} {value}");
        let part = |name: &str, profile: &str, id: u32, of_pod: &str, value: &str| {
            format!(r#"DCGM_FI_{name}{{{head}GPU_I_PROFILE="{profile}",GPU_I_ID="{id}",{tail}{of_pod}}} {value}"#)
        };
        let of_pod = r#",container="main",namespace="ns",pod="a""#;
        let expected = [
            whole("DEV_GPU_TEMP", "40"),
            part("DEV_FB_FREE", "1g.10gb", 3, "", "10140"),
            part("DEV_FB_FREE", "1g.10gb", 4, "", "9940"),
            // Two MIG devices in one GPU instance have the same memory.
            part("DEV_FB_FREE", "3g.40gb", 5, "", "9740"),
            part("PROF_GR_ENGINE_ACTIVE", "1g.10gb", 3, "", "0.250000"),
            // Of no GPU instance was this measured.
            whole("PROF_SM_ACTIVE", "0.125000"),
            whole("DEV_XID_ERRORS", "0"),
            part("DEV_FB_USED", "1g.10gb", 3, "", "100"),
            part("DEV_FB_USED", "1g.10gb", 4, of_pod, "200"),
            part("DEV_FB_USED", "3g.40gb", 5, "", "500"),
        ];
        let found: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(found, expected, "{text}");
    }
}
