//! The content of `/metrics`. Counters are kept here; gauges that describe a state are computed from the core at each request.

mod allow;
mod containers;
mod dcgm;
mod gpus;
mod usage;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use divvy_exposition::{Float, Histogram, MetricsFormat, MetricsPage};
use divvy_hardware::{Fault, GpuGauges};
use divvy_model::{Enforcement, Health, Inventory, MiB, Vendor};

use divvy_agent_core::{AccountedContainer, AgentCore, DisagreementClass, Escape, GuardCounts, Reconciled};

pub use allow::{Allow, UnknownMetric};
pub(crate) use usage::usage;

divvy_exposition::metrics! {
    OWN;
    PRE_START: Histogram = "divvy_agent_pre_start_duration_seconds",
        "Time to answer PreStartContainer, by outcome.";
    STEERING_MISSES: Counter = "divvy_agent_steering_misses_total",
        "Containers whose device ids lie on a GPU other than the one that they were granted.";
    DOUBLE_HANDOUTS: Counter = "divvy_agent_double_handouts_total",
        "Container starts whose device ids are also held by another live pod (kubernetes#137534).";
    RECONCILE: Counter = "divvy_agent_reconcile_total",
        "Disagreements found between records, specs, checkpoint, pods, cgroups, and processes, by class.";
    DRIVER_SPEC_STALE: Gauge = "divvy_agent_driver_spec_stale",
        "1 while the CDI specs that provide the driver's libraries do not fit: made for another driver than the loaded one, naming missing files, or not \
         naming a GPU.";
    GUARDED_PODS: Gauge = "divvy_agent_guarded_pods",
        "Pods whose containers have Divvy's guard in the place of CUDA's driver library.";
    MEMORY_LIMITS: Counter = "divvy_agent_memory_limits_total",
        "Container starts at which the driver was to limit the GPU memory of the pod, by outcome: set, or failed.";
    CONTAINER_LIMITS: Counter = "divvy_agent_container_limits_total",
        "Containers and sandboxes of limited pods whose own cgroup was to get the limit as well, by outcome: set, or failed.";
    REGISTRATIONS: Gauge = "divvy_agent_registrations",
        "Registrations that the kubelet accepted since the program started.";
    REGISTERED: Gauge = "divvy_agent_registered",
        "1 while the kubelet watches the resource's devices.";
    PROBE_UP: Gauge = "divvy_agent_probe_up",
        "1 while the probe delivers snapshots of the GPUs.";
    FAULTS: Counter = "divvy_agent_faults_total",
        "Errors that the driver reported, by name; an XID that an application caused counts as well.";
    GPUS: Gauge = "divvy_agent_gpus",
        "GPUs of the node, by health.";
    GPU_HEALTHY: Gauge = "divvy_agent_gpu_healthy",
        "1 while the GPU or MIG device is healthy; 0 while it has failed or is lost.";
    DEVICE_IDS: Gauge = "divvy_agent_device_ids",
        "Device ids offered to the kubelet.";
    GRANTS: Gauge = "divvy_agent_grants",
        "Containers with a grant.";
    GPU_ENFORCEMENT: Gauge = "divvy_agent_gpu_enforcement",
        "1 for each mechanism that holds pods to their shares of the GPU; a GPU without such a mechanism has no series.";
}

/// The maximum number of faults that are counted by their names, which the driver makes. Further ones are counted as [`OTHER`].
const FAULT_NAMES: usize = 64;
const OTHER: &str = "other";

/// What every program that serves device plugins counts, under the same names: the agent, and the device plugin under NVIDIA's name.
#[derive(Debug, Default)]
pub struct PluginCounts {
    /// How often each resource was registered with the kubelet, and whether it is.
    resources: Mutex<BTreeMap<String, (u64, bool)>>,
    probe_up: AtomicBool,
    faults: Mutex<FaultCounts>,
}

#[derive(Debug, Default)]
struct FaultCounts {
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
pub struct MeasuredMetrics {
    /// What the driver measures of the GPUs. Empty if it was not asked, or did not answer in time.
    pub gpus: Vec<GpuGauges>,
    /// What containers use.
    pub containers: Vec<AccountedContainer>,
    /// What the guard has counted, by the pod's UID and the GPU's UUID.
    pub counted: BTreeMap<(String, String), GuardCounts>,
    /// The signs that programs do not keep to their shares, by the pod's UID.
    pub escapes: BTreeMap<String, Vec<Escape>>,
}

#[expect(clippy::cast_precision_loss, reason = "bytes of memory are exact up to 2^53")]
fn bytes(memory: MiB) -> Float {
    Float(memory.0.saturating_mul(1 << 20) as f64)
}

impl PluginCounts {
    /// Show whether the resource is registered with the kubelet, and how often it was.
    pub fn registration(&self, resource: &str, is_ready: bool, registrations: u64) {
        self.resources().insert(resource.to_owned(), (registrations, is_ready));
    }

    /// Show whether the probe delivers snapshots.
    pub fn probe(&self, up: bool) {
        self.probe_up.store(up, Ordering::Relaxed);
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

    fn resources(&self) -> MutexGuard<'_, BTreeMap<String, (u64, bool)>> {
        self.resources.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn faults(&self) -> MutexGuard<'_, FaultCounts> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn describe(&self, page: &mut MetricsPage<'_>) {
        let resources = self.resources();
        let registrations = resources.iter().map(|(resource, (count, _))| (resource, count));
        page.write_by(&REGISTRATIONS, "resource", registrations);
        let registered = resources
            .iter()
            .map(|(resource, (_, is_ready))| (resource, u8::from(*is_ready)));
        page.write_by(&REGISTERED, "resource", registered);
        page.write_one(&PROBE_UP, u8::from(self.probe_up.load(Ordering::Relaxed)));
        page.write_by(&FAULTS, "fault", &self.faults().by_name);
    }
}

/// The metrics of one agent. By default all are shown.
#[derive(Debug, Default)]
pub struct AgentMetrics {
    allow: Allow,
    counts: PluginCounts,
    counted: Mutex<AgentCounts>,
}

/// What only the agent counts.
#[derive(Debug, Default)]
struct AgentCounts {
    pre_start: BTreeMap<&'static str, Histogram>,
    steering_misses: u64,
    double_handouts: u64,
    reconcile: BTreeMap<DisagreementClass, u64>,
    driver_spec_is_stale: bool,
    guarded_pods: usize,
    limits: BTreeMap<&'static str, u64>,
    container_limits: BTreeMap<&'static str, u64>,
}

/// The classes of how long a start waits, in seconds. They reach up to 5 s, the time that a start waits for its pod's object.
const PRE_START_ENDS: [f64; 10] = [0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0];

impl AgentMetrics {
    /// Return metrics that have counted nothing, and of which only some are shown.
    pub fn showing(allow: Allow) -> AgentMetrics {
        AgentMetrics {
            allow,
            ..AgentMetrics::default()
        }
    }

    fn counted(&self) -> MutexGuard<'_, AgentCounts> {
        self.counted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Count one answer to PreStartContainer.
    pub fn pre_start(&self, outcome: &'static str, took: Duration) {
        let mut counted = self.counted();
        let times = counted.pre_start.entry(outcome);
        times
            .or_insert_with(|| Histogram::new(&PRE_START_ENDS))
            .observe(took.as_secs_f64());
    }

    /// Count one container start at which the driver was to limit the pod's memory.
    pub fn limited(&self, is_set: bool) {
        *self.counted().limits.entry(outcome(is_set)).or_default() += 1;
    }

    /// Count one cgroup of a container that was to be limited.
    pub fn limited_container(&self, is_set: bool) {
        *self.counted().container_limits.entry(outcome(is_set)).or_default() += 1;
    }

    pub(crate) fn granted(&self, steered_wrong: bool, shared_ids: bool) {
        let mut counted = self.counted();
        counted.steering_misses += u64::from(steered_wrong);
        counted.double_handouts += u64::from(shared_ids);
    }

    pub(crate) fn reconciled(&self, found: &Reconciled) {
        let mut counted = self.counted();
        for (class, count) in &found.classes {
            *counted.reconcile.entry(*class).or_default() += count;
        }
    }

    /// Return what is counted under the same names in every program that serves device plugins.
    pub fn counts(&self) -> &PluginCounts {
        &self.counts
    }

    pub(crate) fn guarded_pods(&self, pods: usize) {
        self.counted().guarded_pods = pods;
    }

    pub(crate) fn driver_spec(&self, stale: bool) {
        self.counted().driver_spec_is_stale = stale;
    }

    /// Return the text of `/metrics`.
    pub fn text(&self, core: &AgentCore, measured: &MeasuredMetrics, format: MetricsFormat) -> String {
        let mut page = self.allow.page(format);
        self.describe(&mut page);
        self.counts.describe(&mut page);
        let inventory = core.inventory();
        describe(&mut page, core, &inventory);
        let allocated = allocated(core, &inventory);
        gpus::describe(&mut page, &inventory, &allocated, measured, &self.counts.faults().xids);
        containers::describe(&mut page, measured);
        page.finish()
    }

    fn describe(&self, page: &mut MetricsPage<'_>) {
        let counted = self.counted();
        let times = counted
            .pre_start
            .iter()
            .map(|(outcome, times)| ([("outcome", outcome)], times));
        page.write_histograms(&PRE_START, times);
        page.write_one(&STEERING_MISSES, counted.steering_misses);
        page.write_one(&DOUBLE_HANDOUTS, counted.double_handouts);
        let found = DisagreementClass::ALL.map(|class| (class.label(), counted.reconcile.get(&class).copied().unwrap_or(0)));
        page.write_by(&RECONCILE, "class", found);
        page.write_one(&DRIVER_SPEC_STALE, u8::from(counted.driver_spec_is_stale));
        page.write_one(&GUARDED_PODS, counted.guarded_pods);
        page.write_by(&MEMORY_LIMITS, "outcome", &counted.limits);
        page.write_by(&CONTAINER_LIMITS, "outcome", &counted.container_limits);
    }

    /// Return the text of `/metrics/dcgm`, in the text format 0.0.4: dcgm-exporter's names do not fit into OpenMetrics.
    pub(crate) fn dcgm(&self, node: &str, core: &AgentCore, measured: &MeasuredMetrics) -> String {
        let page = self.allow.page(MetricsFormat::Text);
        dcgm::text(node, &core.inventory(), measured, &self.counts.faults().xids, page)
    }
}

fn outcome(is_set: bool) -> &'static str {
    if is_set { "set" } else { "failed" }
}

/// The metrics of the device plugin under NVIDIA's name.
#[derive(Debug, Default)]
pub struct PluginMetrics {
    counts: PluginCounts,
}

impl PluginMetrics {
    /// Return what is counted under the same names in every program that serves device plugins.
    pub fn counts(&self) -> &PluginCounts {
        &self.counts
    }

    /// Return the text of `/metrics`, with the health of these GPUs and MIG devices by UUID, and for each resource the number of devices that are
    /// healthy, and of those that are not.
    pub fn text(&self, gpus: &BTreeMap<String, Health>, offered: &BTreeMap<String, [u64; 2]>, format: MetricsFormat) -> String {
        let mut page = MetricsPage::new(format);
        self.counts.describe(&mut page);
        describe_health(&mut page, gpus, offered);
        page.finish()
    }
}

/// Describe the health of GPUs, and for each resource how many of its devices are healthy, and how many are not.
fn describe_health(page: &mut MetricsPage<'_>, gpus: &BTreeMap<String, Health>, offered: &BTreeMap<String, [u64; 2]>) {
    let by_health = Health::ALL.map(|health| (health.word(), gpus.values().filter(|of| **of == health).count()));
    page.write_by(&GPUS, "health", by_health);
    let healthy = gpus.iter().map(|(uuid, health)| (uuid, u8::from(*health == Health::Ok)));
    page.write_by(&GPU_HEALTHY, "gpu", healthy);
    let ids = offered.iter().flat_map(|(resource, [healthy, others])| {
        [("true", healthy), ("false", others)].map(|(word, count)| ([("resource", resource.as_str()), ("healthy", word)], count))
    });
    page.write(&DEVICE_IDS, ids);
}

/// Return the memory that pods with a grant have of each GPU, by UUID. A GPU without a grant has a value, too: a series that is absent looks like a lost
/// scrape.
fn allocated(core: &AgentCore, inventory: &Inventory) -> BTreeMap<String, MiB> {
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

fn describe(page: &mut MetricsPage<'_>, core: &AgentCore, inventory: &Inventory) {
    let offers = core.offers().into_iter().map(|spec| {
        let devices = core.devices(spec);
        let name = spec.name();
        let resource = name.strip_prefix("aliyun.com/").unwrap_or(&name).to_owned();
        let healthy = devices.iter().filter(|device| device.healthy).count() as u64;
        (resource, [healthy, devices.len() as u64 - healthy])
    });
    let gpus = inventory.gpus.iter().map(|gpu| (gpu.uuid.clone(), gpu.health));
    describe_health(page, &gpus.collect(), &offers.collect());
    page.write_one(&GRANTS, core.records().count());
    let enforced = inventory.gpus.iter().flat_map(|gpu| {
        let mechanisms = gpu.enforcement.into_iter().flat_map(Enforcement::names);
        mechanisms.map(move |mechanism| ([("gpu", gpu.uuid.as_str()), ("mechanism", mechanism)], 1))
    });
    page.write(&GPU_ENFORCEMENT, enforced);
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
        let text = metrics.text(&BTreeMap::new(), &BTreeMap::new(), MetricsFormat::Text);
        let series = text.lines().filter(|line| line.contains("_faults_total{")).count();
        assert_eq!(series, FAULT_NAMES + 1);
        for line in ["{fault=\"XID 0\"} 101", "{fault=\"XID 63\"} 1", "{fault=\"other\"} 36"] {
            assert!(text.contains(&format!("_faults_total{line}\n")), "{line}: {text}");
        }
    }
}
