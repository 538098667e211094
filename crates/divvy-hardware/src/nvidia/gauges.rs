//! Reads what the driver measures and counts of GPUs.

mod gpm;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use divvy_model::Vendor;
use nvml_wrapper::enum_wrappers::device::{self as wrapped, Clock, EccCounter, MemoryError, MemoryLocation, TemperatureSensor};
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings::field_id::NVML_FI_DEV_MEMORY_TEMP;

use super::condition::known as returned;
use super::{failure, ffi, read};
use crate::backend::DriverCalls;
use crate::{ComputeMode, Failure, Gauges, Gpm, GpuGauges, GpuMemory, LastKnownGpus, Measure, PartGauges};

/// The latest sample of GPU Performance Monitoring of each GPU.
pub(super) type GpmSamples = gpm::LatestSamples<ffi::GpmSample>;

/// Read all GPUs. A GPU that is lost says why, and the others have their values.
pub(super) fn read(
    nvml: &Arc<Nvml>,
    calls: &DriverCalls,
    known: &LastKnownGpus,
    samples: &mut GpmSamples,
) -> Result<Vec<GpuGauges>, Failure> {
    let count = {
        let _call = calls.enter("counting GPUs");
        ffi::count(nvml).map_err(|error| failure(&error, "counting GPUs"))?
    };
    let mut all: Vec<GpuGauges> = Vec::new();
    for index in 0..count {
        let _call = calls.enter(format!("measuring GPU {index}"));
        let (uuid, reader, parts) = match read::identify(nvml, index) {
            Ok((device, uuid)) => {
                let mut reader = measure(&device);
                let mut gpm = |uuid: &str, instance| gpm_of(nvml, samples, &device, uuid, instance);
                let parts = gpm(&uuid, None).and_then(|of_gpu| {
                    reader.values.gpm = of_gpu;
                    parts(&device, gpm)
                });
                let parts = parts.unwrap_or_else(|error| {
                    reader.error.get_or_insert(error);
                    Vec::new()
                });
                (Some(uuid), reader, parts)
            }
            // A device without a UUID is only reported under its last known UUID.
            Err(error) => (
                known.at(Vendor::Nvidia, index).map(|gpu| gpu.uuid.clone()),
                GaugeReader {
                    error: Some(error),
                    ..GaugeReader::default()
                },
                Vec::new(),
            ),
        };
        // Only one GPU of a UUID can be offered.
        let Some(uuid) = uuid.filter(|uuid| all.iter().all(|gpu| gpu.uuid != *uuid)) else {
            continue;
        };
        all.push(GpuGauges {
            uuid,
            values: reader.values,
            parts,
            failed: reader.failed,
            error: reader.error.map(|error| error.to_string()),
        });
    }
    samples.keep(|uuid| {
        let is_it = |gpu: &GpuGauges| gpu.uuid == uuid || gpu.parts.iter().any(|part| part.uuid == uuid);
        all.iter().any(is_it)
    });
    Ok(all)
}

/// Read GPU Performance Monitoring of a GPU, or of one of its GPU instances, for the device with this UUID.
fn gpm_of(
    nvml: &Arc<Nvml>,
    samples: &mut GpmSamples,
    device: &Device<'_>,
    uuid: &str,
    instance: Option<u32>,
) -> Result<Option<Gpm>, NvmlError> {
    let take = || match returned(device.gpm_support())? {
        Some(true) => returned(match instance {
            None => ffi::GpmSample::take(nvml.clone(), device),
            Some(instance) => ffi::GpmSample::take_of_instance(nvml.clone(), device, instance),
        }),
        _ => Ok(None),
    };
    let compare = |before: &_, after: &_| Ok(returned(ffi::gpm_values(before, after, gpm::METRICS))?.map(gpm::of_values));
    samples.gpm(uuid, Instant::now(), take, compare)
}

/// Reads the values of one GPU.
#[derive(Debug, Default)]
struct GaugeReader {
    values: Gauges,
    failed: BTreeSet<Measure>,
    /// That the GPU is lost.
    error: Option<NvmlError>,
}

impl GaugeReader {
    /// Return a value, or `None` if the driver does not return it. The loss of the GPU is noted.
    fn read<T>(&mut self, answer: Result<T, NvmlError>) -> Option<T> {
        returned(answer).unwrap_or_else(|error| {
            self.error.get_or_insert(error);
            None
        })
    }

    /// The same for a value that nvidia-smi shows: that the driver could not read it is noted, unlike that the GPU or the driver does not have it.
    fn show<T>(&mut self, measure: Measure, answer: Result<T, NvmlError>) -> Option<T> {
        let is_absent = |error: &NvmlError| {
            matches!(
                error,
                NvmlError::NotSupported | NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound
            )
        };
        if answer.as_ref().is_err_and(|error| !is_absent(error)) {
            self.failed.insert(measure);
        }
        self.read(answer)
    }
}

/// Read the values of one GPU.
fn measure(device: &Device<'_>) -> GaugeReader {
    let mut reader = GaugeReader::default();
    let rates = reader.show(Measure::Utilization, device.utilization_rates());
    let mode = |mode| match mode {
        wrapped::ComputeMode::Default => ComputeMode::Default,
        wrapped::ComputeMode::ExclusiveThread => ComputeMode::ExclusiveThread,
        wrapped::ComputeMode::Prohibited => ComputeMode::Prohibited,
        wrapped::ComputeMode::ExclusiveProcess => ComputeMode::ExclusiveProcess,
    };
    // Older drivers have one limit.
    let limit = match device.enforced_power_limit() {
        Err(NvmlError::FailedToLoadSymbol(_)) => device.power_management_limit(),
        limit => limit,
    };
    reader.values = Gauges {
        memory: reader.show(Measure::Memory, memory(device)),
        gpu_percent: rates.as_ref().map(|rates| rates.gpu),
        memory_percent: rates.map(|rates| rates.memory),
        encoder_percent: reader.read(device.encoder_utilization()).map(|of| of.utilization),
        decoder_percent: reader.read(device.decoder_utilization()).map(|of| of.utilization),
        power_milliwatts: reader.show(Measure::Power, device.power_usage()).map(u64::from),
        energy_millijoules: reader.read(device.total_energy_consumption()),
        temperature_celsius: reader.show(Measure::Temperature, device.temperature(TemperatureSensor::Gpu)),
        memory_temperature_celsius: reader.read(memory_temperature(device)).flatten(),
        sm_clock_mhz: reader.read(device.clock_info(Clock::SM)),
        memory_clock_mhz: reader.read(device.clock_info(Clock::Memory)),
        pcie_replays: reader.read(device.pcie_replay_counter()).map(u64::from),
        corrected_ecc: reader.read(device.total_ecc_errors(MemoryError::Corrected, EccCounter::Volatile)),
        uncorrected_ecc: reader.show(
            Measure::Ecc,
            device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile),
        ),
        corrected_ecc_aggregate: reader.read(device.total_ecc_errors(MemoryError::Corrected, EccCounter::Aggregate)),
        uncorrected_ecc_aggregate: reader.read(device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Aggregate)),
        remapped_rows: reader.read(ffi::remapped_rows(device)),
        clocks_event_reasons: reader.read(ffi::clocks_event_reasons(device)),
        fan_percent: reader.show(Measure::Fan, device.fan_speed(0)),
        performance_state: reader.show(Measure::PerformanceState, ffi::performance_state(device)),
        power_limit_milliwatts: reader.show(Measure::PowerLimit, limit).map(u64::from),
        display_active: reader.show(Measure::Display, device.is_display_active()),
        ecc_enabled: reader
            .show(Measure::Ecc, device.is_ecc_enabled())
            .map(|mode| mode.currently_enabled),
        persistence: reader.show(Measure::Persistence, device.is_in_persistent_mode()),
        compute_mode: reader.show(Measure::ComputeMode, device.compute_mode()).map(mode),
        gpm: None,
    };
    // The snapshot has the mode.
    let _ = reader.show(Measure::Mig, device.mig_mode());
    reader
}

/// Read the MIG devices of a GPU. One that was destroyed a moment ago has no values. `gpm` reads the GPU instance of the device with a UUID.
fn parts(
    device: &Device<'_>,
    mut gpm: impl FnMut(&str, Option<u32>) -> Result<Option<Gpm>, NvmlError>,
) -> Result<Vec<PartGauges>, NvmlError> {
    let is_divided = returned(device.mig_mode())?.is_some_and(|mode| mode.current == 1);
    let count = if is_divided {
        returned(device.mig_device_count())?.unwrap_or(0)
    } else {
        0
    };
    let mut found: Vec<(Device<'_>, String, Option<u32>)> = Vec::new();
    for index in 0..count {
        let Some(part) = returned(device.mig_device_by_index(index))? else {
            continue;
        };
        let Some(uuid) = returned(part.uuid())?.filter(|uuid| found.iter().all(|(_, other, _)| other != uuid)) else {
            continue;
        };
        let instance = returned(ffi::mig_instances(&part))?.map(|(instance, _)| instance);
        found.push((part, uuid, instance));
    }
    let is_alone = |instance: &u32| found.iter().filter(|(.., other)| other == &Some(*instance)).count() == 1;
    let mut parts: Vec<PartGauges> = Vec::new();
    for (part, uuid, instance) in &found {
        parts.push(PartGauges {
            uuid: uuid.clone(),
            gpu_instance: *instance,
            memory: returned(memory(part))?,
            bar1: returned(part.bar1_memory_info())?.map(|bar1| GpuMemory {
                total: bar1.total,
                used: bar1.used,
                reserved: None,
                free: bar1.free,
            }),
            // nvidia-smi from 450 to 555 shows this counter for a MIG device (`cargo xtask real-driver`).
            uncorrected_ecc: returned(part.memory_error_counter(
                MemoryError::Uncorrected,
                EccCounter::Volatile,
                MemoryLocation::SRAM,
            ))?,
            gpm: match instance.filter(is_alone) {
                Some(instance) => gpm(uuid, Some(instance))?,
                None => None,
            },
        });
    }
    Ok(parts)
}

fn memory(device: &Device<'_>) -> Result<GpuMemory, NvmlError> {
    match device.memory_info() {
        Ok(info) => Ok(GpuMemory {
            total: info.total,
            used: info.used,
            reserved: Some(info.reserved),
            free: info.free,
        }),
        Err(NvmlError::GpuLost) => Err(NvmlError::GpuLost),
        // The driver does not know the second version.
        Err(_) => ffi::memory_info_v1(device),
    }
}

/// The driver answers as a whole, and for each field. A GPU without the sensor refuses only the field.
fn memory_temperature(device: &Device<'_>) -> Result<Option<u32>, NvmlError> {
    let fields = returned(device.field_values_for(&[FieldId(NVML_FI_DEV_MEMORY_TEMP)]))?;
    let Some(field) = fields.and_then(|fields| fields.into_iter().next()) else {
        return Ok(None);
    };
    let value = returned(field.and_then(|field| field.value))?;
    Ok(value.and_then(|value| match value {
        SampleValue::U32(celsius) => Some(celsius),
        SampleValue::U64(celsius) => celsius.try_into().ok(),
        SampleValue::I64(celsius) => celsius.try_into().ok(),
        SampleValue::F64(_) => None,
    }))
}
