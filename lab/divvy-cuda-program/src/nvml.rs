//! What NVML answers.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result};
use nvml_wrapper::enum_wrappers::device::{Clock, PcieUtilCounter, TemperatureSensor};
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use serde_json::{Value, json};

/// Load the library, and initialize it.
pub(crate) fn load(library: &str) -> Result<Nvml> {
    let nvml = Nvml::builder().lib_path(library.as_ref()).init();
    nvml.with_context(|| format!("NVML in {library} cannot be used"))
}

/// Return what the driver says about itself and about all GPUs.
pub(crate) fn describe(nvml: &Nvml) -> Result<Value> {
    let gpus = (0..nvml.device_count()?).map(|index| {
        let device = nvml.device_by_index(index)?;
        let mig = match device.mig_mode() {
            Ok(mode) => Some(mode.current != 0),
            Err(_) => None,
        };
        Ok(json!({
            "index": index,
            "uuid": device.uuid()?,
            "name": device.name()?,
            "minor": device.minor_number()?,
            "total": device.memory_info()?.total,
            "used": device.memory_info()?.used,
            "mig": mig,
        }))
    });
    Ok(json!({
        "driver": nvml.sys_driver_version()?,
        "cuda": nvml.sys_cuda_driver_version()?,
        "nvml": nvml.sys_nvml_version().unwrap_or_default(),
        "gpus": gpus.collect::<Result<Vec<Value>, NvmlError>>()?,
    }))
}

/// Return the memory of a GPU, and the processes that it lists with theirs.
pub(crate) fn state(nvml: &Nvml, uuid: &str) -> Result<Value> {
    let device = nvml.device_by_uuid(uuid)?;
    let memory = device.memory_info()?;
    let processes = device.running_compute_processes()?.into_iter().map(|of| {
        let bytes = match of.used_gpu_memory {
            UsedGpuMemory::Used(bytes) => Some(bytes),
            UsedGpuMemory::Unavailable => None,
        };
        json!({"pid": of.pid, "bytes": bytes})
    });
    Ok(json!({
        "total": memory.total,
        "used": memory.used,
        "processes": processes.collect::<Vec<Value>>(),
    }))
}

/// Call the functions that Divvy uses and a few that may need root. Return what each answers.
pub(crate) fn calls(nvml: &Nvml, uuid: &str) -> Result<Value> {
    type Call = (&'static str, fn(&Device<'_>) -> Result<String, NvmlError>);
    const CALLS: [Call; 12] = [
        ("nvmlDeviceGetMemoryInfo_v2", |device| {
            device.memory_info().map(|of| format!("{} bytes used", of.used))
        }),
        ("nvmlDeviceGetComputeRunningProcesses", |device| {
            device.running_compute_processes().map(|of| format!("{} processes", of.len()))
        }),
        ("nvmlDeviceGetGraphicsRunningProcesses", |device| {
            device
                .running_graphics_processes()
                .map(|of| format!("{} processes", of.len()))
        }),
        ("nvmlDeviceGetProcessUtilization", |device| {
            match device.process_utilization_stats(None) {
                // There are no samples.
                Err(NvmlError::NotFound) => Ok("no samples".to_owned()),
                samples => samples.map(|of| format!("{} samples", of.len())),
            }
        }),
        ("nvmlDeviceGetUtilizationRates", |device| {
            device.utilization_rates().map(|of| format!("{} %", of.gpu))
        }),
        ("nvmlDeviceGetMigMode", |device| {
            device.mig_mode().map(|of| format!("{}", of.current))
        }),
        ("nvmlDeviceGetTemperature", |device| {
            device.temperature(TemperatureSensor::Gpu).map(|of| format!("{of} °C"))
        }),
        ("nvmlDeviceGetClockInfo", |device| {
            device.clock_info(Clock::SM).map(|of| format!("{of} MHz"))
        }),
        ("nvmlDeviceGetPcieThroughput", |device| {
            device.pcie_throughput(PcieUtilCounter::Send).map(|of| format!("{of} KB/s"))
        }),
        ("nvmlDeviceGetAccountingMode", |device| {
            device.is_accounting_enabled().map(|of| format!("{of}"))
        }),
        ("nvmlDeviceGetComputeMode", |device| {
            device.compute_mode().map(|of| format!("{of:?}"))
        }),
        ("nvmlDeviceGetPersistenceMode", |device| {
            device.is_in_persistent_mode().map(|of| format!("{of}"))
        }),
    ];
    let device = nvml.device_by_uuid(uuid)?;
    let answers = CALLS.map(|(name, call)| match call(&device) {
        Ok(text) => json!({"name": name, "ok": true, "text": text}),
        Err(error) => json!({"name": name, "ok": false, "text": error.to_string()}),
    });
    Ok(Value::from(answers.to_vec()))
}

/// Ask for the processes' utilization again and again, each time for what came since the newest sample. Times are in microseconds since 1970.
pub(crate) fn samples(nvml: &Nvml, uuid: &str, every: Duration, length: Duration) -> Result<Value> {
    let device = nvml.device_by_uuid(uuid)?;
    let began = Instant::now();
    let (mut since, mut answers) = (micros()?, Vec::new());
    while began.elapsed() < length {
        let asked = micros()?;
        let (samples, error) = match device.process_utilization_stats(since) {
            Ok(samples) => (samples, None),
            // Nothing is newer, or more came between the two calls that the wrapper makes.
            Err(NvmlError::NotFound | NvmlError::InsufficientSize(_)) => (Vec::new(), None),
            Err(error) => (Vec::new(), Some(error.to_string())),
        };
        since = samples.iter().map(|of| of.timestamp).max().unwrap_or(since).max(since);
        if !samples.is_empty() || error.is_some() {
            let samples = samples
                .iter()
                .map(|of| json!([of.pid, of.timestamp, of.sm_util, of.mem_util]));
            answers.push(json!({"asked": asked, "samples": samples.collect::<Vec<Value>>(), "error": error}));
        }
        std::thread::sleep(every);
    }
    Ok(Value::from(answers))
}

fn micros() -> Result<u64> {
    Ok(u64::try_from(SystemTime::now().duration_since(UNIX_EPOCH)?.as_micros())?)
}
