//! From the probe's answers to the values of the table.

use std::collections::BTreeMap;

use divvy_hardware::{Gauges, GpuFacts, GpuGauges, GpuMemory, Measure, ProcessKind, UnreadableDevice};
use divvy_model::Vendor;
use divvy_smi::{
    Ecc, Instances, LOST, MigEngines, ProcessPod, ProcessType, Reading, Smi, SmiComputeMode, SmiGpu, SmiMemory, SmiMigDevice,
    SmiProcess,
};

use super::ProbeAnswers;
use super::grants::GrantedPod;

/// What nvidia-smi shows in place of the name of a process that has ended.
const NOT_FOUND: &str = "[Not Found]";

pub(super) fn of(time: String, answers: &ProbeAnswers, pods: &BTreeMap<String, GrantedPod>) -> Smi {
    let ProbeAnswers { snapshot, gauges, .. } = answers;
    let measured = |uuid: &str| gauges.iter().find(|of| of.uuid == uuid);
    let readable = snapshot.gpus.iter().map(|facts| gpu(facts, measured(&facts.uuid)));
    let unreadable = snapshot.unreadable.iter().map(unreadable);
    let mut gpus: Vec<SmiGpu> = readable.chain(unreadable).collect();
    gpus.sort_by_key(|gpu| gpu.index);
    let driver = snapshot.drivers.get(&Vendor::Nvidia);
    Smi {
        time,
        driver: driver.map(|driver| driver.version.clone()).unwrap_or_default(),
        cuda: driver.map(|driver| driver.cuda.clone()).filter(|cuda| !cuda.is_empty()),
        processes: processes(&gpus, answers, pods),
        gpus,
    }
}

fn gpu(facts: &GpuFacts, measured: Option<&GpuGauges>) -> SmiGpu {
    let gauges = measured.map(|of| of.values).unwrap_or_default();
    let error = measured.and_then(|of| of.error.clone()).or_else(|| facts.error.clone());
    let is_divided = facts.mig.is_some_and(|(is_on, _)| is_on);
    let known = SmiGpu {
        index: facts.index,
        uuid: facts.uuid.clone(),
        name: match facts.model.as_str() {
            "" if error.is_some() => Reading::Failed,
            "" => Reading::Absent,
            model => Reading::Value(model.to_owned()),
        },
        bus: bus(&facts.pci),
        ..SmiGpu::default()
    };
    let parts = measured.map_or(&[][..], |of| &of.parts);
    let failed = |measure: Measure| measured.is_some_and(|of| of.failed.contains(&measure));
    let watts = |milliwatts: Option<u64>| milliwatts.and_then(|of| u32::try_from(of / 1000).ok());
    SmiGpu {
        persistence: reading(gauges.persistence, failed(Measure::Persistence)),
        display: reading(gauges.display_active, failed(Measure::Display)),
        ecc: reading(ecc(&gauges, is_divided), failed(Measure::Ecc)),
        fan: reading(gauges.fan_percent, failed(Measure::Fan)),
        temperature: reading(gauges.temperature_celsius, failed(Measure::Temperature)),
        performance: reading(gauges.performance_state, failed(Measure::PerformanceState)),
        power: reading(watts(gauges.power_milliwatts), failed(Measure::Power)),
        power_limit: reading(watts(gauges.power_limit_milliwatts), failed(Measure::PowerLimit)),
        memory: reading(gauges.memory.map(mib), failed(Measure::Memory)),
        // The driver does not measure it for a GPU with MIG devices.
        utilization: reading(gauges.gpu_percent, failed(Measure::Utilization)),
        compute_mode: reading(gauges.compute_mode, failed(Measure::ComputeMode)).map(|mode| match mode {
            divvy_hardware::ComputeMode::Default => SmiComputeMode::Default,
            divvy_hardware::ComputeMode::ExclusiveThread => SmiComputeMode::ExclusiveThread,
            divvy_hardware::ComputeMode::Prohibited => SmiComputeMode::Prohibited,
            divvy_hardware::ComputeMode::ExclusiveProcess => SmiComputeMode::ExclusiveProcess,
        }),
        mig: if failed(Measure::Mig) {
            Reading::Failed
        } else {
            facts.mig.map(|(is_on, _)| is_on).into()
        },
        mig_devices: facts.mig_devices.iter().map(|device| part(device, parts)).collect(),
        error,
        ..known
    }
}

/// Return a GPU of which the driver says nothing, not even its UUID.
fn unreadable(device: &UnreadableDevice) -> SmiGpu {
    let why = if device.lost { LOST } else { &device.error };
    SmiGpu {
        index: device.index,
        error: Some(device.error.clone()),
        no_handle: Some(why.to_owned()),
        ..SmiGpu::default()
    }
}

/// Return a value, or why there is none.
fn reading<T>(value: Option<T>, failed: bool) -> Reading<T> {
    match value {
        Some(value) => Reading::Value(value),
        None if failed => Reading::Failed,
        None => Reading::Absent,
    }
}

fn ecc(gauges: &Gauges, is_divided: bool) -> Option<Ecc> {
    match gauges.ecc_enabled? {
        false => Some(Ecc::Off),
        true if is_divided => Some(Ecc::On),
        true => gauges.uncorrected_ecc.map(Ecc::Uncorrected),
    }
}

fn mib(memory: GpuMemory) -> SmiMemory {
    SmiMemory {
        used: memory.used >> 20,
        total: memory.total >> 20,
    }
}

fn part(device: &divvy_model::MigDevice, parts: &[divvy_hardware::PartGauges]) -> SmiMigDevice {
    let measured = parts.iter().find(|of| of.uuid == device.uuid);
    let engines = device.parts.map(|of| MigEngines {
        copy: of.copy_engines,
        encoders: of.encoders,
        decoders: of.decoders,
        ofa: of.ofa,
        jpeg: of.jpeg,
    });
    SmiMigDevice {
        index: device.index,
        uuid: device.uuid.clone(),
        gi: device.gi,
        ci: device.ci,
        memory: measured.and_then(|of| of.memory).map(mib).into(),
        bar1: measured.and_then(|of| of.bar1).map(mib).into(),
        multiprocessors: device.parts.map(|of| of.multiprocessors).into(),
        uncorrected_ecc: measured.and_then(|of| of.uncorrected_ecc).into(),
        engines: engines.into(),
    }
}

/// Return the bus id in NVML's form: the domain has eight digits, and letters are capital.
fn bus(pci: &str) -> String {
    match pci.split_once(':') {
        Some((domain, rest)) => format!("{domain:0>8}:{rest}").to_ascii_uppercase(),
        None => pci.to_ascii_uppercase(),
    }
}

/// Return the processes, ordered by GPU, instances, and PID.
fn processes(gpus: &[SmiGpu], answers: &ProbeAnswers, pods: &BTreeMap<String, GrantedPod>) -> Vec<SmiProcess> {
    let mut found = Vec::new();
    for list in &answers.processes {
        let place = gpus.iter().find_map(|gpu| {
            let part = gpu.mig_devices.iter().find(|device| device.uuid == list.uuid);
            (gpu.uuid == list.uuid || part.is_some()).then(|| {
                (
                    gpu.index,
                    part.map(|part| Instances {
                        gi: part.gi,
                        ci: part.ci,
                    }),
                )
            })
        });
        // The GPU of another vendor, or a MIG device that was made a moment ago.
        let Some((gpu, instances)) = place else { continue };
        found.extend(list.processes.iter().map(|process| SmiProcess {
            gpu,
            instances,
            pid: process.pid,
            kind: kind(process.kind),
            name: process.program.clone().unwrap_or_else(|| NOT_FOUND.to_owned()),
            memory: Some(process.used.0).filter(|mib| *mib > 0),
            pod: process.pod.as_ref().map(|uid| owner(uid, pods)),
        }));
    }
    found.sort_by_key(|process| (process.gpu, process.instances, process.pid));
    found
}

fn kind(kind: Option<ProcessKind>) -> ProcessType {
    match kind {
        Some(ProcessKind::Compute) | None => ProcessType::Compute,
        Some(ProcessKind::Graphics) => ProcessType::Graphics,
        Some(ProcessKind::ComputeAndGraphics) => ProcessType::Both,
        Some(ProcessKind::MpsClient) => ProcessType::Mps,
    }
}

fn owner(uid: &str, pods: &BTreeMap<String, GrantedPod>) -> ProcessPod {
    let pod = pods.get(uid);
    ProcessPod {
        uid: uid.to_owned(),
        namespace: pod.map(|pod| pod.namespace.clone()),
        name: pod.map(|pod| pod.name.clone()),
        containers: pod.map(|pod| pod.containers.clone()).unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bus_ids_are_written_as_nvml_does() {
        for (kernel, nvml) in [
            ("0000:81:00.0", "00000000:81:00.0"),
            ("10000:3b:00.0", "00010000:3B:00.0"),
            ("", ""),
        ] {
            assert_eq!(bus(kernel), nvml);
        }
    }
}
