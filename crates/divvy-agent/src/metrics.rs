//! The content of `/metrics`. Counters are kept here; gauges that describe a state are computed from the core at each request.

mod allow;
mod containers;
mod dcgm;
mod gpus;
mod usage;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use divvy_exposition::Format;
use divvy_hardware::{Fault, GpuGauges};
use divvy_model::{Enforcement, Health, Inventory, MiB, Vendor};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use divvy_agent_core::{Class, Core, Escape, GuardCounts, Reconciled, Used};

pub use allow::Allow;
use allow::Sheet;
pub(crate) use usage::usage;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ClassLabel {
    class: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResourceLabel {
    resource: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DeviceLabel {
    resource: String,
    healthy: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct HealthLabel {
    health: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct GpuLabel {
    gpu: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct MechanismLabel {
    gpu: String,
    mechanism: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FaultLabel {
    fault: String,
}

/// The maximum number of faults that are counted by their names, which the driver makes. Further ones are counted as [`OTHER`].
const FAULT_NAMES: usize = 64;
const OTHER: &str = "other";

/// What every program that serves device plugins counts, under the same names: the agent, and the device plugin under NVIDIA's name.
#[derive(Debug, Default)]
pub struct Counts {
    registrations: Family<ResourceLabel, Gauge>,
    registered: Family<ResourceLabel, Gauge>,
    probe_up: Gauge,
    faults: Mutex<Faults>,
}

#[derive(Debug, Default)]
struct Faults {
    by_name: BTreeMap<String, u64>,
    xids: Xids,
}

/// The XIDs of each GPU.
#[derive(Debug, Clone, Default)]
struct Xids {
    /// By the GPU's UUID and the XID.
    counts: BTreeMap<(String, String), u64>,
    last: BTreeMap<String, u64>,
}

impl Xids {
    fn add(&mut self, uuid: &str, xid: u64) {
        let key = (uuid.to_owned(), xid.to_string());
        let of_gpu = self.counts.range((uuid.to_owned(), String::new())..);
        let is_known = self.counts.contains_key(&key) || of_gpu.take_while(|((of, _), _)| of == uuid).count() < FAULT_NAMES;
        let key = if is_known { key } else { (key.0, OTHER.to_owned()) };
        *self.counts.entry(key).or_default() += 1;
        self.last.insert(uuid.to_owned(), xid);
    }

    fn counts(&self) -> &BTreeMap<(String, String), u64> {
        &self.counts
    }

    /// Return the last XID of a GPU; 0 if there was none.
    fn last(&self, uuid: &str) -> u64 {
        self.last.get(uuid).copied().unwrap_or(0)
    }
}

/// What was measured for one answer.
#[derive(Debug, Clone, Default)]
pub struct Measured {
    /// What the driver measures of the GPUs. Empty if it was not asked, or did not answer in time.
    pub gpus: Vec<GpuGauges>,
    /// What containers use.
    pub containers: Vec<Used>,
    /// What the guard has counted, by the pod's UID and the GPU's UUID.
    pub counted: BTreeMap<(String, String), GuardCounts>,
    /// The signs that programs do not keep to their shares, by the pod's UID.
    pub escapes: BTreeMap<String, Vec<Escape>>,
}

/// A sample's labels. Many metrics have samples with the same ones.
type Labels = Arc<Vec<(&'static str, String)>>;

/// Samples of one metric with labels.
#[derive(Debug, Default)]
struct Floats {
    samples: BTreeMap<Labels, f64>,
}

impl Floats {
    fn set<const N: usize>(&mut self, labels: [(&'static str, String); N], value: f64) {
        self.samples.insert(Arc::new(labels.into()), value);
    }

    fn set_shared(&mut self, labels: &Labels, value: f64) {
        self.samples.insert(labels.clone(), value);
    }

    /// Register the samples as a gauge.
    fn gauge(self, sheet: &mut Sheet<'_>, name: &'static str, help: &'static str) {
        self.register(sheet, name, help, MetricType::Gauge);
    }

    /// Register the samples as a counter. Its name gets the suffix `_total`.
    fn counter(self, sheet: &mut Sheet<'_>, name: &'static str, help: &'static str) {
        self.register(sheet, name, help, MetricType::Counter);
    }

    fn register(self, sheet: &mut Sheet<'_>, name: &'static str, help: &'static str, kind: MetricType) {
        if !self.samples.is_empty() {
            let samples = self.samples;
            let described = Described {
                name,
                help,
                kind,
                samples,
            };
            sheet.collect(name, described);
        }
    }
}

/// A metric as it is written. A family of `prometheus-client` would be a copy of it.
#[derive(Debug)]
struct Described {
    name: &'static str,
    help: &'static str,
    kind: MetricType,
    samples: BTreeMap<Labels, f64>,
}

impl Collector for Described {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        // With a period, as `Registry::register` adds it.
        let help = format!("{}.", self.help);
        let mut family = encoder.encode_descriptor(self.name, &help, None, self.kind)?;
        for (labels, value) in &self.samples {
            let mut sample = family.encode_family(&**labels)?;
            match self.kind {
                MetricType::Counter => sample.encode_counter::<NoLabelSet, _, u64>(value, None)?,
                _ => sample.encode_gauge(value)?,
            }
        }
        Ok(())
    }
}

#[expect(clippy::cast_precision_loss, reason = "bytes of memory are exact up to 2^53")]
fn bytes(memory: MiB) -> f64 {
    memory.0.saturating_mul(1 << 20) as f64
}

impl Counts {
    /// Show whether the resource is registered with the kubelet, and how often it was.
    pub fn registration(&self, resource: &str, is_ready: bool, registrations: u64) {
        let label = ResourceLabel {
            resource: resource.to_owned(),
        };
        let count = i64::try_from(registrations).unwrap_or(i64::MAX);
        self.registrations.get_or_create(&label).set(count);
        self.registered.get_or_create(&label).set(i64::from(is_ready));
    }

    /// Show whether the probe delivers snapshots.
    pub fn probe(&self, up: bool) {
        self.probe_up.set(i64::from(up));
    }

    /// Count an error that the driver has reported.
    pub fn fault(&self, fault: &Fault) {
        let mut faults = self.faults();
        let names = &mut faults.by_name;
        let is_known = names.contains_key(&fault.name) || names.len() < FAULT_NAMES;
        let name = if is_known { &fault.name } else { OTHER };
        *names.entry(name.to_owned()).or_default() += 1;
        if let (Vendor::Nvidia, Some(uuid)) = (fault.vendor, &fault.uuid) {
            faults.xids.add(uuid, fault.code);
        }
    }

    fn faults(&self) -> MutexGuard<'_, Faults> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn describe(&self, sheet: &mut Sheet<'_>) {
        let faults: Family<FaultLabel, Counter> = Family::default();
        for (name, count) in &self.faults().by_name {
            faults.get_or_create(&FaultLabel { fault: name.clone() }).inc_by(*count);
        }
        sheet.register(
            "divvy_agent_registrations",
            "Registrations that the kubelet accepted since the program started",
            self.registrations.clone(),
        );
        sheet.register(
            "divvy_agent_registered",
            "1 while the kubelet watches the resource's devices",
            self.registered.clone(),
        );
        sheet.register(
            "divvy_agent_probe_up",
            "1 while the probe delivers snapshots of the GPUs",
            self.probe_up.clone(),
        );
        sheet.register(
            "divvy_agent_faults",
            "Errors that the driver reported, by name; an XID that an application caused counts as well",
            faults,
        );
    }
}

/// The metrics of one agent. docs/reference/metrics.md is generated from them.
pub struct Metrics {
    allow: Allow,
    registry: Mutex<Registry>,
    counts: Counts,
    pre_start: Family<Outcome, Histogram>,
    steering_misses: Counter,
    double_handouts: Counter,
    reconcile: Family<ClassLabel, Counter>,
    driver_spec_stale: Gauge,
    guarded_pods: Gauge,
    limits: Family<Outcome, Counter>,
    container_limits: Family<Outcome, Counter>,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Default for Metrics {
    /// Return metrics that have counted nothing, all of which are shown.
    fn default() -> Metrics {
        Metrics::showing(Allow::default())
    }
}

impl Metrics {
    /// Return metrics that have counted nothing, and of which only some are shown.
    pub fn showing(allow: Allow) -> Metrics {
        let metrics = Metrics {
            allow,
            registry: Mutex::new(Registry::default()),
            counts: Counts::default(),
            // The buckets reach up to 5 s, the time that a start waits for its pod's object.
            pre_start: Family::new_with_constructor(|| {
                Histogram::new([0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0])
            }),
            steering_misses: Counter::default(),
            double_handouts: Counter::default(),
            reconcile: Family::default(),
            driver_spec_stale: Gauge::default(),
            guarded_pods: Gauge::default(),
            limits: Family::default(),
            container_limits: Family::default(),
        };
        for class in Class::ALL {
            drop(metrics.reconcile.get_or_create(&ClassLabel { class: class.label() }));
        }
        let mut registry = metrics.registry.lock().unwrap_or_else(PoisonError::into_inner);
        let mut sheet = Sheet::new(&mut registry, &metrics.allow);
        sheet.register(
            "divvy_agent_pre_start_duration_seconds",
            "Time to answer PreStartContainer, by outcome",
            metrics.pre_start.clone(),
        );
        sheet.register(
            "divvy_agent_steering_misses",
            "Containers whose device ids lie on a GPU other than the one that they were granted",
            metrics.steering_misses.clone(),
        );
        sheet.register(
            "divvy_agent_double_handouts",
            "Container starts whose device ids are also held by another live pod (kubernetes#137534)",
            metrics.double_handouts.clone(),
        );
        sheet.register(
            "divvy_agent_reconcile",
            "Disagreements found between records, specs, checkpoint, pods, cgroups, and processes, by class",
            metrics.reconcile.clone(),
        );
        sheet.register(
            "divvy_agent_driver_spec_stale",
            "1 while the CDI specs that provide the driver's libraries do not fit: made for another driver than the loaded one, naming \
             missing files, or not naming a GPU",
            metrics.driver_spec_stale.clone(),
        );
        sheet.register(
            "divvy_agent_guarded_pods",
            "Pods whose containers have Divvy's guard in the place of CUDA's driver library",
            metrics.guarded_pods.clone(),
        );
        sheet.register(
            "divvy_agent_memory_limits",
            "Container starts at which the driver was to limit the GPU memory of the pod, by outcome: set, or failed",
            metrics.limits.clone(),
        );
        sheet.register(
            "divvy_agent_container_limits",
            "Containers and sandboxes of limited pods whose own cgroup was to get the limit as well, by outcome: set, or failed",
            metrics.container_limits.clone(),
        );
        drop(registry);
        metrics
    }

    /// Count one answer to PreStartContainer.
    pub fn pre_start(&self, outcome: &'static str, took: Duration) {
        self.pre_start.get_or_create(&Outcome { outcome }).observe(took.as_secs_f64());
    }

    /// Count one container start at which the driver was to limit the pod's memory.
    pub fn limited(&self, is_set: bool) {
        let outcome = if is_set { "set" } else { "failed" };
        self.limits.get_or_create(&Outcome { outcome }).inc();
    }

    /// Count one cgroup of a container that was to be limited.
    pub fn limited_container(&self, is_set: bool) {
        let outcome = if is_set { "set" } else { "failed" };
        self.container_limits.get_or_create(&Outcome { outcome }).inc();
    }

    pub(crate) fn granted(&self, steered_wrong: bool, shared_ids: bool) {
        if steered_wrong {
            self.steering_misses.inc();
        }
        if shared_ids {
            self.double_handouts.inc();
        }
    }

    pub(crate) fn reconciled(&self, found: &Reconciled) {
        for (class, count) in &found.classes {
            self.reconcile
                .get_or_create(&ClassLabel { class: class.label() })
                .inc_by(*count);
        }
    }

    /// Return what is counted under the same names in every program that serves device plugins.
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    pub(crate) fn guarded_pods(&self, pods: usize) {
        self.guarded_pods.set(i64::try_from(pods).unwrap_or(i64::MAX));
    }

    pub(crate) fn driver_spec(&self, stale: bool) {
        self.driver_spec_stale.set(i64::from(stale));
    }

    /// Return the text of `/metrics`.
    ///
    /// # Errors
    /// A value cannot be formatted.
    pub fn text(&self, core: &Core, measured: &Measured, format: Format) -> Result<String, fmt::Error> {
        let mut now = Registry::default();
        let mut sheet = Sheet::new(&mut now, &self.allow);
        self.counts.describe(&mut sheet);
        let inventory = core.inventory();
        describe(&mut sheet, core, &inventory);
        let allocated = allocated(core, &inventory);
        let allocated = allocated.iter().map(|(uuid, memory)| (uuid.as_str(), *memory));
        gpus::describe(&mut sheet, &inventory, allocated, measured, &self.counts.faults().xids);
        containers::describe(&mut sheet, measured);
        let registry = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        divvy_exposition::encode(&[&registry, &now], format)
    }

    /// Return the text of `/metrics/dcgm`, in the text format 0.0.4: dcgm-exporter's names do not fit into OpenMetrics.
    pub(crate) fn dcgm(&self, node: &str, core: &Core, measured: &Measured) -> String {
        dcgm::text(node, &core.inventory(), measured, &self.counts.faults().xids, &|name| {
            self.allow.has(name)
        })
    }
}

/// The metrics of the device plugin under NVIDIA's name. docs/reference/metrics.md is generated from them.
#[derive(Debug, Default)]
pub struct PluginMetrics {
    counts: Counts,
}

impl PluginMetrics {
    /// Return what is counted under the same names in every program that serves device plugins.
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Return the text of `/metrics`, with the health of these GPUs and MIG devices by UUID, and for each resource the number of devices that are
    /// healthy, and of those that are not.
    ///
    /// # Errors
    /// A value cannot be formatted.
    pub fn text(
        &self,
        gpus: &BTreeMap<String, Health>,
        offered: &BTreeMap<String, [u64; 2]>,
        format: Format,
    ) -> Result<String, fmt::Error> {
        let mut now = Registry::default();
        let all = Allow::default();
        let mut sheet = Sheet::new(&mut now, &all);
        self.counts.describe(&mut sheet);
        let gpus = gpus.iter().map(|(uuid, health)| (uuid.as_str(), *health));
        let offered = offered.iter().map(|(resource, counts)| (resource.clone(), *counts));
        describe_health(&mut sheet, gpus, offered);
        divvy_exposition::encode(&[&now], format)
    }
}

/// A device plugin's resource, with the number of its devices that are healthy, and of those that are not.
type Offered = (String, [u64; 2]);

/// Describe the health of GPUs, and the devices that are offered for them.
fn describe_health<'a>(
    sheet: &mut Sheet<'_>,
    gpus: impl Iterator<Item = (&'a str, Health)>,
    offered: impl Iterator<Item = Offered>,
) {
    let by_health: Family<HealthLabel, Gauge> = Family::default();
    for health in Health::ALL.map(Health::word) {
        drop(by_health.get_or_create(&HealthLabel { health }));
    }
    let healthy: Family<GpuLabel, Gauge> = Family::default();
    for (uuid, health) in gpus {
        by_health.get_or_create(&HealthLabel { health: health.word() }).inc();
        let label = GpuLabel { gpu: uuid.to_owned() };
        healthy.get_or_create(&label).set(i64::from(health == Health::Ok));
    }
    let ids: Family<DeviceLabel, Gauge> = Family::default();
    for (resource, counts) in offered {
        for (healthy, count) in ["true", "false"].into_iter().zip(counts) {
            let resource = resource.clone();
            ids.get_or_create(&DeviceLabel { resource, healthy }).set(gauge(count));
        }
    }
    sheet.register("divvy_agent_gpus", "GPUs of the node, by health", by_health);
    sheet.register(
        "divvy_agent_gpu_healthy",
        "1 while the GPU or MIG device is healthy; 0 while it has failed or is lost",
        healthy,
    );
    sheet.register("divvy_agent_device_ids", "Device ids offered to the kubelet", ids);
}

fn gauge(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// Return the memory that pods with a grant have of each GPU, by UUID. A GPU without a grant has a value, too: a series that is absent looks like a lost
/// scrape.
fn allocated(core: &Core, inventory: &Inventory) -> BTreeMap<String, MiB> {
    let mut pods: BTreeMap<(&str, &str), MiB> = BTreeMap::new();
    for record in core.records() {
        for share in &record.gpus {
            pods.insert((&record.uid, &share.uuid), share.memory);
        }
    }
    let gpus = inventory.gpus.iter();
    let mut sums: BTreeMap<String, MiB> = gpus.map(|gpu| (gpu.uuid.clone(), MiB::ZERO)).collect();
    for ((_, uuid), memory) in pods {
        let sum = sums.entry(uuid.to_owned()).or_default();
        *sum = sum.saturating_add(memory);
    }
    sums
}

fn describe(sheet: &mut Sheet<'_>, core: &Core, inventory: &Inventory) {
    let enforced: Family<MechanismLabel, Gauge> = Family::default();
    for gpu in &inventory.gpus {
        for mechanism in gpu.enforcement.into_iter().flat_map(Enforcement::names) {
            let gpu = gpu.uuid.clone();
            enforced.get_or_create(&MechanismLabel { gpu, mechanism }).set(1);
        }
    }
    let offers = core.offers().into_iter().map(|spec| {
        let devices = core.devices(spec);
        let name = spec.name();
        let resource = name.strip_prefix("aliyun.com/").unwrap_or(&name).to_owned();
        let healthy = devices.iter().filter(|device| device.healthy).count() as u64;
        (resource, [healthy, devices.len() as u64 - healthy])
    });
    let gpus = inventory.gpus.iter().map(|gpu| (gpu.uuid.as_str(), gpu.health));
    describe_health(sheet, gpus, offers);
    let grants: Gauge = Gauge::default();
    grants.set(gauge(core.records().count() as u64));
    sheet.register("divvy_agent_grants", "Containers with a grant", grants);
    sheet.register(
        "divvy_agent_gpu_enforcement",
        "1 for each mechanism that holds pods to their shares of the GPU; a GPU without such a mechanism has no series",
        enforced,
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn xid(uuid: &str, code: u64) -> Fault {
        Fault {
            vendor: Vendor::Nvidia,
            uuid: Some(uuid.to_owned()),
            code,
            fatal: false,
            name: format!("XID {code}"),
            partition: None,
        }
    }

    #[test]
    fn faults_of_more_names_than_a_driver_has_are_counted_together() {
        let metrics = PluginMetrics::default();
        for number in 0..FAULT_NAMES as u64 + 36 {
            metrics.counts().fault(&xid("GPU-1", number));
            metrics.counts().fault(&xid("GPU-1", 0));
        }
        let text = metrics
            .text(&BTreeMap::new(), &BTreeMap::new(), Format::Text)
            .expect("formatted");
        let series = text.lines().filter(|line| line.contains("_faults_total{")).count();
        assert_eq!(series, FAULT_NAMES + 1);
        for line in ["{fault=\"XID 0\"} 101", "{fault=\"XID 63\"} 1", "{fault=\"other\"} 36"] {
            assert!(text.contains(&format!("_faults_total{line}\n")), "{line}: {text}");
        }
    }
}
