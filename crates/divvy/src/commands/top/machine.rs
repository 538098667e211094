//! `divvy top` on a node without a cluster: this machine's GPUs, and the processes on them.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use divvy_hardware::client::{ProbeClient, ProbeTiming, Update};
use divvy_hardware::{Failure, FailureCode, GpuGauges, GpuProcess, GpuProcesses, Snapshot};
use divvy_model::usage::{ContainerUsage, GpuUsage, Usage};
use divvy_model::{Enforcement, GrantRecord, Health, MemoryUnit, MiB, Vendor};
use divvy_view::{GpuView, NodeView, PodView, View};
use futures::FutureExt as _;
use tempfile::TempDir;

use crate::cli::smi::MachineArgs;
use crate::commands::{probe, smi};

/// The GPUs of this machine, which a probe reads.
pub(super) struct ProbedMachine {
    client: ProbeClient,
    snapshot: Snapshot,
    state_dir: PathBuf,
    /// The machine's name.
    name: String,
    /// The directory of a started probe's socket.
    _directory: TempDir,
}

/// What was read.
pub(super) struct MachineReading {
    pub(super) view: View,
    pub(super) usage: Usage,
    /// What could not be read, as sentences.
    pub(super) troubles: Vec<String>,
}

impl ProbedMachine {
    /// Start or find the probe, and wait until it has read the GPUs.
    pub(super) async fn find(args: &MachineArgs) -> anyhow::Result<ProbedMachine> {
        let directory = tempfile::tempdir()?;
        let mut client = ProbeClient::start(smi::which(args, directory.path())?, ProbeTiming::default());
        let first = async {
            loop {
                match client.next().await {
                    Some(Update::Snapshot(snapshot)) => return Ok(snapshot),
                    Some(Update::Fault(_)) => {}
                    Some(Update::Unavailable(failure)) => return Err(failure),
                    None => return Err(ended()),
                }
            }
        };
        let first = tokio::time::timeout(probe::PATIENCE, first).await;
        let snapshot = first
            .unwrap_or_else(|_| {
                let text = format!("the driver has not answered for {} s", probe::PATIENCE.as_secs());
                Err(Failure::new(FailureCode::Timeout, text))
            })
            .map_err(smi::unread)?;
        if snapshot.gpus.is_empty() && snapshot.unreadable.is_empty() {
            anyhow::bail!("the drivers of this machine list no GPU; type divvy doctor to find the cause");
        }
        Ok(ProbedMachine {
            client,
            snapshot,
            state_dir: args.state_dir.clone(),
            name: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            _directory: directory,
        })
    }

    /// Read what is used now.
    pub(super) async fn read(&mut self) -> Result<MachineReading, Failure> {
        // The client polls the probe. Its last word counts.
        let mut failure = None;
        while let Some(update) = self.client.next().now_or_never() {
            match update {
                Some(Update::Snapshot(snapshot)) => {
                    self.snapshot = snapshot;
                    failure = None;
                }
                Some(Update::Fault(_)) => {}
                Some(Update::Unavailable(why)) => failure = Some(why),
                None => return Err(ended()),
            }
        }
        if let Some(failure) = failure {
            return Err(failure);
        }
        let handle = self.client.handle();
        let (gauges, processes) = (handle.metrics().await?, handle.processes().await?);
        let (records, mut troubles) = smi::grants::records(&self.state_dir);
        // A machine on which Divvy is not installed has no records, and none are missing.
        if records.is_empty() && !self.state_dir.exists() {
            troubles.clear();
        }
        let failed = processes.iter().filter_map(|of| Some((&of.uuid, of.error.as_ref()?)));
        troubles.extend(failed.map(|(uuid, error)| format!("the processes of {uuid} could not be listed: {error}")));
        let (view, usage) = seen(&self.name, &self.snapshot, &gauges, &processes, &records);
        Ok(MachineReading { view, usage, troubles })
    }
}

fn ended() -> Failure {
    Failure::new(FailureCode::ProbeUnreachable, "the probe's client has ended")
}

/// Return the machine as a cluster with one node, and what is used on it.
fn seen(
    name: &str,
    snapshot: &Snapshot,
    gauges: &[GpuGauges],
    processes: &[GpuProcesses],
    records: &[GrantRecord],
) -> (View, Usage) {
    let unit = records.first().map_or(MemoryUnit::GIB, |record| record.unit);
    let mut usage = Usage {
        v: 1,
        gpus: gauges.iter().flat_map(measured).collect(),
        ..Usage::default()
    };
    let mut gpus = gpus(snapshot, unit);
    for gpu in &mut gpus {
        let Some(uuid) = gpu.uuid.clone() else { continue };
        gpu.pods = shares(&uuid, gpu.total, records, unit);
        let of_it = processes.iter().filter(|of| of.uuid == uuid).flat_map(|of| &of.processes);
        for process in of_it {
            let pod = process_pod(process, records);
            if !gpu.pods.iter().any(|known| known.uid == pod.uid) {
                gpu.pods.push(pod.clone());
            }
            usage.containers.push(used(process, &pod, &uuid));
        }
        gpu.pods.sort_by(|a, b| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
        gpu.allocated = gpu.pods.iter().fold(0, |sum, pod| sum.saturating_add(pod.units));
        let memory = gpu.pods.iter().fold(MiB::ZERO, |sum, pod| sum.saturating_add(pod.memory));
        let total = unit.memory(gpu.total).unwrap_or(MiB::ZERO);
        gpu.free = divvy_placement::parts::free(total, memory, MiB::ZERO, MiB::ZERO);
        gpu.cores = gpu.pods.iter().fold(0, |sum, pod| sum.saturating_add(pod.cores));
    }
    let sum = |of: fn(&GpuView) -> u64| gpus.iter().fold(0_u64, |sum, gpu| sum.saturating_add(of(gpu)));
    let node = NodeView {
        name: name.to_owned(),
        address: String::new(),
        unit,
        allocated: sum(|gpu| gpu.allocated),
        total: sum(|gpu| gpu.total),
        gpus,
        pending: Vec::new(),
        unnamed: Vec::new(),
        driver_trouble: None,
    };
    (View::of(vec![Arc::new(node)]), usage)
}

/// Return the GPUs without their pods. MIG devices take the place of a GPU that is divided into them, with the indices that they have in the cluster.
fn gpus(snapshot: &Snapshot, unit: MemoryUnit) -> Vec<GpuView> {
    let divided = snapshot.divided();
    let mut gpus: Vec<GpuView> = divided
        .gpus
        .iter()
        .map(|facts| {
            let (health, message) = match (facts.lost, &facts.error) {
                (true, error) => (Health::Lost, Some(error.clone().unwrap_or_else(|| "lost".to_owned()))),
                (false, Some(error)) => (Health::Failed, Some(error.clone())),
                (false, None) => (Health::Ok, None),
            };
            GpuView {
                uuid: Some(facts.uuid.clone()),
                partition: facts.partition.clone(),
                model: Some(facts.model.clone()).filter(|model| !model.is_empty()),
                total: unit.units_in(facts.total),
                ..gpu(facts.vendor, facts.index, health, message)
            }
        })
        .collect();
    gpus.extend(snapshot.unreadable.iter().map(|device| {
        let health = if device.lost { Health::Lost } else { Health::Failed };
        gpu(device.vendor, device.index, health, Some(device.error.clone()))
    }));
    gpus
}

fn gpu(vendor: Vendor, index: u32, health: Health, message: Option<String>) -> GpuView {
    GpuView {
        vendor: Some(vendor),
        whole: None,
        index,
        uuid: None,
        partition: None,
        model: None,
        health: Some(health),
        reason: None,
        enforcement: None,
        offered: true,
        message,
        held_mib: 0,
        free: MiB::ZERO,
        allocated: 0,
        cores: 0,
        total: 0,
        pods: Vec::new(),
    }
}

/// Return the pods that have a share of a GPU according to the agent's records. Each container has a record with the shares of its pod.
fn shares(uuid: &str, total: u64, records: &[GrantRecord], unit: MemoryUnit) -> Vec<PodView> {
    let mut pods: BTreeMap<&str, PodView> = BTreeMap::new();
    for record in records {
        let Some(share) = record.gpus.iter().find(|share| share.uuid == uuid) else {
            continue;
        };
        pods.entry(&record.uid).or_insert_with(|| PodView {
            units: if share.whole {
                total
            } else {
                share.memory.0.div_ceil(unit.mib())
            },
            memory: if share.whole {
                unit.memory(total).unwrap_or(MiB::ZERO)
            } else {
                share.memory
            },
            whole: share.whole,
            cores: share.cores,
            enforcement: share.enforcement.map(Enforcement::name),
            ..pod(&record.uid, &record.namespace, &record.name)
        });
    }
    pods.into_values().collect()
}

fn pod(uid: &str, namespace: &str, name: &str) -> PodView {
    PodView {
        uid: uid.to_owned(),
        name: name.to_owned(),
        namespace: namespace.to_owned(),
        units: 0,
        memory: MiB::ZERO,
        whole: false,
        cores: 0,
        enforcement: None,
        requested: None,
        created_s: None,
    }
}

/// Return the pod of a process, without a share. A pod without a record has its UID in place of its name, and a process of the host is shown in place of a pod.
fn process_pod(process: &GpuProcess, records: &[GrantRecord]) -> PodView {
    match &process.pod {
        Some(uid) => match records.iter().find(|record| record.uid == *uid) {
            Some(record) => pod(uid, &record.namespace, &record.name),
            None => pod(uid, "", &format!("pod {uid}")),
        },
        None => pod(&format!("pid {}", process.pid), "", &program(process)),
    }
}

fn program(process: &GpuProcess) -> String {
    let name = process.program.as_deref().unwrap_or("process");
    let file = name.rsplit('/').next().filter(|file| !file.is_empty());
    format!("{} ({})", file.unwrap_or(name), process.pid)
}

fn used(process: &GpuProcess, pod: &PodView, uuid: &str) -> ContainerUsage {
    ContainerUsage {
        namespace: pod.namespace.clone(),
        pod: pod.name.clone(),
        uid: pod.uid.clone(),
        container: Some(program(process)),
        gpu: uuid.to_owned(),
        // The driver does not report it for some processes.
        used_bytes: Some(process.used.0.saturating_mul(1 << 20)).filter(|bytes| *bytes > 0),
        ..ContainerUsage::default()
    }
}

/// Return what the driver measures of a GPU and of its MIG devices.
fn measured(gauges: &GpuGauges) -> Vec<GpuUsage> {
    let values = gauges.values;
    let gpu = GpuUsage {
        uuid: gauges.uuid.clone(),
        memory_bytes: values.memory.map(|memory| memory.total),
        used_bytes: values.memory.map(|memory| memory.used),
        busy_percent: values.busy_percent(),
        power_milliwatts: values.power_milliwatts,
        temperature_celsius: values.temperature_celsius,
        sm_clock_mhz: values.sm_clock_mhz,
        error: gauges.error.clone().filter(|error| !error.is_empty()),
        ..GpuUsage::default()
    };
    let parts = gauges.parts.iter().map(|part| GpuUsage {
        uuid: part.uuid.clone(),
        memory_bytes: part.memory.map(|memory| memory.total),
        used_bytes: part.memory.map(|memory| memory.used),
        busy_percent: part.gpm.and_then(|gpm| gpm.busy_percent()),
        ..GpuUsage::default()
    });
    [gpu].into_iter().chain(parts).collect()
}
