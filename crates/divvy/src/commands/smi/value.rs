//! From the probe's answers to the values of the table.

use std::collections::BTreeMap;

use divvy_hardware::{Gauges, GpuFacts, GpuGauges, GpuMemory, ProcessKind, Unreadable};
use divvy_model::Vendor;
use divvy_smi::{ComputeMode, Ecc, Engines, Gpu, Instances, Kind, LOST, Memory, MigDevice, Owner, Process, Reading, Smi};

use super::Answers;
use super::grants::Pod;

/// What nvidia-smi shows in place of the name of a process that has ended.
const NOT_FOUND: &str = "[Not Found]";

pub(super) fn of(time: String, answers: &Answers, pods: &BTreeMap<String, Pod>) -> Smi {
    let Answers { snapshot, gauges, .. } = answers;
    let measured = |uuid: &str| gauges.iter().find(|of| of.uuid == uuid);
    let readable = snapshot.gpus.iter().map(|facts| gpu(facts, measured(&facts.uuid)));
    let unreadable = snapshot.unreadable.iter().map(unreadable);
    let mut gpus: Vec<Gpu> = readable.chain(unreadable).collect();
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

fn gpu(facts: &GpuFacts, measured: Option<&GpuGauges>) -> Gpu {
    let gauges = measured.map(|of| of.values).unwrap_or_default();
    let error = measured.and_then(|of| of.error.clone()).or_else(|| facts.error.clone());
    let is_divided = facts.mig.is_some_and(|(is_on, _)| is_on);
    let known = Gpu {
        index: facts.index,
        uuid: facts.uuid.clone(),
        name: match facts.model.as_str() {
            "" if error.is_some() => Reading::Failed,
            "" => Reading::Absent,
            model => Reading::Value(model.to_owned()),
        },
        bus: bus(&facts.pci),
        ..Gpu::default()
    };
    if facts.lost || measured.is_some_and(|of| of.error.is_some()) {
        return Gpu {
            error,
            no_handle: Some(LOST.to_owned()),
            ..known
        };
    }
    let parts = measured.map_or(&[][..], |of| &of.parts);
    let watts = |milliwatts: Option<u64>| milliwatts.and_then(|of| u32::try_from(of / 1000).ok());
    Gpu {
        persistence: gauges.persistence.into(),
        display: gauges.display_active.into(),
        ecc: ecc(&gauges, is_divided),
        fan: gauges.fan_percent.into(),
        temperature: gauges.temperature_celsius.into(),
        performance: gauges.performance_state.into(),
        power: watts(gauges.power_milliwatts).into(),
        power_limit: watts(gauges.power_limit_milliwatts).into(),
        memory: memory(gauges.memory),
        // The driver does not measure it for a GPU with MIG devices.
        utilization: gauges.gpu_percent.into(),
        compute_mode: Reading::from(gauges.compute_mode).map(|mode| match mode {
            divvy_hardware::ComputeMode::Default => ComputeMode::Default,
            divvy_hardware::ComputeMode::ExclusiveThread => ComputeMode::ExclusiveThread,
            divvy_hardware::ComputeMode::Prohibited => ComputeMode::Prohibited,
            divvy_hardware::ComputeMode::ExclusiveProcess => ComputeMode::ExclusiveProcess,
        }),
        mig: facts.mig.map(|(is_on, _)| is_on).into(),
        mig_devices: facts.mig_devices.iter().map(|device| part(device, parts)).collect(),
        error,
        ..known
    }
}

/// Return a GPU of which the driver says nothing, not even its UUID.
fn unreadable(device: &Unreadable) -> Gpu {
    let why = if device.lost { LOST } else { &device.error };
    Gpu {
        index: device.index,
        error: Some(device.error.clone()),
        no_handle: Some(why.to_owned()),
        ..Gpu::default()
    }
}

fn ecc(gauges: &Gauges, is_divided: bool) -> Reading<Ecc> {
    let state = match gauges.ecc_enabled {
        Some(false) => Some(Ecc::Off),
        Some(true) if is_divided => Some(Ecc::On),
        Some(true) => gauges.uncorrected_ecc.map(Ecc::Uncorrected),
        None => None,
    };
    state.into()
}

fn memory(memory: Option<GpuMemory>) -> Reading<Memory> {
    Reading::from(memory).map(|of| Memory {
        used: of.used >> 20,
        total: of.total >> 20,
    })
}

fn part(device: &divvy_model::MigDevice, parts: &[divvy_hardware::PartGauges]) -> MigDevice {
    let measured = parts.iter().find(|of| of.uuid == device.uuid);
    let engines = device.parts.map(|of| Engines {
        copy: of.copy_engines,
        encoders: of.encoders,
        decoders: of.decoders,
        ofa: of.ofa,
        jpeg: of.jpeg,
    });
    MigDevice {
        index: device.index,
        uuid: device.uuid.clone(),
        gi: device.gi,
        ci: device.ci,
        memory: memory(measured.and_then(|of| of.memory)),
        bar1: memory(measured.and_then(|of| of.bar1)),
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
fn processes(gpus: &[Gpu], answers: &Answers, pods: &BTreeMap<String, Pod>) -> Vec<Process> {
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
        found.extend(list.processes.iter().map(|process| Process {
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

fn kind(kind: Option<ProcessKind>) -> Kind {
    match kind {
        Some(ProcessKind::Compute) | None => Kind::Compute,
        Some(ProcessKind::Graphics) => Kind::Graphics,
        Some(ProcessKind::ComputeAndGraphics) => Kind::Both,
        Some(ProcessKind::MpsClient) => Kind::Mps,
    }
}

fn owner(uid: &str, pods: &BTreeMap<String, Pod>) -> Owner {
    let pod = pods.get(uid);
    Owner {
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
