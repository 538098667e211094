//! The metrics of the daemons.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::time::Duration;

use anyhow::Result;
use axum::http::StatusCode;
use divvy_agent::MeasuredMetrics;
use divvy_agent_core::{AccountedContainer, CoreSettings, Escape, GuardCounts, NodeKey, UsageAccount};
use divvy_exposition::MetricsFormat;
use divvy_hardware::{Fault, Gauges, Gpm, GpuGauges, GpuMemory, PartGauges};
use divvy_model::{Enforcement, Gpu, Health, MemoryUnit, MiB, Vendor, names};

use crate::cell;

const INTRODUCTION: &str = "\
<!-- Made by `cargo xtask reference` from the metrics.rs of divvy-agent, divvy-extender, and divvy-explainer. Do not edit. -->

# Metrics

Each program serves `/metrics` to every client and without a token. The client chooses the format by its `Accept` header: OpenMetrics 1.0.0, or the
Prometheus text format 0.0.4, which a client without that header gets. Prometheus itself prefers OpenMetrics. Only the agent's metrics about containers name pods.
A label's values are listed where all of them always exist. Memory is in the unit that the name says.

[metrics.md](../metrics.md) says how to let Prometheus and Grafana show them.
";

/// Return docs/reference/metrics.md.
///
/// # Errors
/// The agent refuses the GPU of which it is to have metrics.
pub fn markdown() -> Result<String> {
    let mut text = INTRODUCTION.to_owned();
    let [agent, plugin, extender, explainer] = scrapes(MetricsFormat::OpenMetrics)?;
    let programs = [
        (
            "Agent",
            "`divvy agent` serves them on the address of `--metrics`; the chart sets port 9400.",
            agent,
        ),
        (
            "Device plugin under NVIDIA's name",
            "`nvidia-device-plugin` serves them on the address in the variable `DIVVY_METRICS`, and otherwise not at all. They mean what they mean for the \
             agent.",
            plugin,
        ),
        (
            "Extender",
            "`divvy extender` serves them on the port on which kube-scheduler calls it, 32766.",
            extender,
        ),
        (
            "Explainer",
            "`divvy explainer` serves them on the port that its users call, 32767.",
            explainer,
        ),
    ];
    for (program, place, scrape) in programs {
        write!(
            text,
            "\n## {program}\n\n{place}\n\n| metric | type | labels | meaning |\n|---|---|---|---|\n"
        )?;
        for (name, family) in families(&scrape) {
            let labels: Vec<String> = family.labels.iter().map(|(label, values)| described(label, values)).collect();
            let suffix = if family.kind == "counter" { "_total" } else { "" };
            let (kind, labels, help) = (family.kind, labels.join("; "), cell(family.help));
            writeln!(text, "| `{name}{suffix}` | {kind} | {labels} | {help} |")?;
        }
    }
    Ok(text)
}

/// Return a scrape of each program: the agent, the device plugin under NVIDIA's name, the extender, and the explainer. Each metric has a sample.
///
/// # Errors
/// The agent refuses the GPU of which it is to have metrics.
pub fn scrapes(format: MetricsFormat) -> Result<[String; 4]> {
    Ok([agent(format)?, plugin(format), extender(format), explainer(format)])
}

/// Return the metrics of an agent with one GPU, on which each metric has a sample.
fn agent(format: MetricsFormat) -> Result<String> {
    let mut core = divvy_agent_core::AgentCore::new(CoreSettings {
        unit: MemoryUnit::GIB,
        reserve: MiB::ZERO,
        whole: false,
        mig: divvy_agent_core::MigStrategy::None,
        also_shared: BTreeSet::new(),
        node_key: NodeKey([0; 32]),
        agent_version: String::new(),
        boot_id: String::new(),
        guard: None,
        mps: None,
    });
    let node = divvy_testkit::nodes::divvy_node("n", &[16]);
    let gpus = node.inventory.into_iter().flatten().flat_map(|inventory| inventory.gpus);
    let gpus = gpus.map(|gpu| Gpu {
        enforcement: Some(Enforcement::GUARD),
        ..gpu
    });
    core.set_hardware(BTreeMap::new(), gpus.collect())?;
    let metrics = divvy_agent::AgentMetrics::default();
    metrics.pre_start("granted", Duration::ZERO);
    metrics.limited(true);
    metrics.limited_container(true);
    metrics.counts().registration(names::GPU_MEM, true, 1);
    metrics.counts().fault(&fault());
    Ok(metrics.text(&core, &measured(), format))
}

fn fault() -> Fault {
    Fault {
        vendor: Vendor::Nvidia,
        uuid: Some("GPU-0".to_owned()),
        code: 79,
        fatal: true,
        name: "XID 79".to_owned(),
        partition: None,
    }
}

/// Return a measurement in which each metric has a sample.
fn measured() -> MeasuredMetrics {
    let gpm = Gpm {
        graphics_active: Some(0),
        sm_active: Some(0),
        tensor_active: Some(0),
        dram_active: Some(0),
        ..Gpm::default()
    };
    let values = Gauges {
        memory: Some(GpuMemory::default()),
        gpu_percent: Some(0),
        power_milliwatts: Some(0),
        energy_millijoules: Some(0),
        temperature_celsius: Some(0),
        memory_temperature_celsius: Some(0),
        sm_clock_mhz: Some(0),
        memory_clock_mhz: Some(0),
        clocks_event_reasons: Some(0),
        gpm: Some(gpm),
        ..Gauges::default()
    };
    let part = PartGauges {
        uuid: "MIG-0".to_owned(),
        memory: Some(GpuMemory::default()),
        gpm: Some(gpm),
        ..PartGauges::default()
    };
    let gpu = GpuGauges {
        uuid: "GPU-0".to_owned(),
        values,
        // A MIG device has a label more.
        parts: vec![part],
        failed: Default::default(),
        error: None,
    };
    let account = UsageAccount {
        used: Some(0),
        busy: Some(0),
        last_busy: Some(0),
        ..UsageAccount::default()
    };
    let [uid, uuid] = ["uid", "GPU-0"].map(str::to_owned);
    let escape = Escape::Unguarded {
        uuid: uuid.clone(),
        pid: 1,
    };
    let counts = GuardCounts {
        denied: 0,
        denied_bytes: Some(0),
        throttled_ns: Some(0),
    };
    MeasuredMetrics {
        gpus: vec![gpu],
        counted: [((uid.clone(), uuid.clone()), counts)].into(),
        escapes: [(uid.clone(), vec![escape])].into(),
        containers: vec![AccountedContainer {
            uid,
            container: "main".to_owned(),
            uuid,
            account,
        }],
    }
}

/// Return the metrics of a device plugin with one GPU.
fn plugin(format: MetricsFormat) -> String {
    let resource = Vendor::Nvidia.whole_resource();
    let metrics = divvy_agent::PluginMetrics::default();
    metrics.counts().registration(resource, true, 1);
    metrics.counts().fault(&fault());
    let gpus = [("GPU-0".to_owned(), Health::Ok)];
    metrics.text(&gpus.into(), &[(resource.to_owned(), [1, 0])].into(), format)
}

fn extender(format: MetricsFormat) -> String {
    use divvy_extender::CoreTiming;
    use divvy_extender::core::ExtenderCore;
    use divvy_extender::metrics::{ExtenderMetrics, Scrape};

    let metrics = ExtenderMetrics::default();
    metrics.answered("filter", Duration::ZERO);
    let core = ExtenderCore::new(MemoryUnit::GIB, CoreTiming::default());
    metrics.text(&Scrape::of(&core, Some(0), true), format)
}

fn explainer(format: MetricsFormat) -> String {
    let metrics = divvy_explainer::ExplainerMetrics::default();
    metrics.answered(StatusCode::OK);
    metrics.text(format)
}

#[derive(Default)]
struct Family<'a> {
    kind: &'a str,
    help: &'a str,
    labels: BTreeMap<&'a str, BTreeSet<&'a str>>,
}

/// Read a scrape: <https://prometheus.io/docs/specs/om/open_metrics_spec/>.
fn families(scrape: &str) -> BTreeMap<&str, Family<'_>> {
    let mut families: BTreeMap<&str, Family<'_>> = BTreeMap::new();
    // The samples of a family follow its description.
    let mut current = "";
    for line in scrape.lines() {
        if let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
            current = name;
            families.entry(name).or_default().help = help;
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
            families.entry(name).or_default().kind = kind;
        } else if let Some((_, labels)) = line.split_once('{') {
            let labels = labels.split_once('}').map_or("", |(labels, _)| labels).split(',');
            let family = families.entry(current).or_default();
            for (label, value) in labels.filter_map(|label| label.split_once('=')) {
                family.labels.entry(label).or_default().insert(value.trim_matches('"'));
            }
        }
    }
    // The label of a histogram's buckets.
    families.values_mut().for_each(|family| drop(family.labels.remove("le")));
    families
}

/// Return a label with its values. A label with one value has others on a real node.
fn described(label: &str, values: &BTreeSet<&str>) -> String {
    match values.len() {
        0 | 1 => format!("`{label}`"),
        _ => {
            let values: Vec<String> = values.iter().map(|value| format!("`{value}`")).collect();
            format!("`{label}`: {}", values.join(", "))
        }
    }
}
