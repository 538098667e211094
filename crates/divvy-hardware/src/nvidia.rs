//! NVIDIA GPUs through NVML. Only `divvy-probe` uses this module, because the library can hang or crash its process.

mod capabilities;
mod condition;
pub(crate) mod cuda;
mod events;
mod ffi;
mod gauges;
mod library;
mod limits;
mod read;
mod reception;
mod utilization;

use std::ffi::{CString, OsStr};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

pub use library::{driver_root, has_library};
use limits::LimitFunctions;
pub(crate) use reception::Reception;

use crate::backend::{Backend, Cgroup, DriverCalls, EventSink};
use crate::protocol::LimitAnswer;
use crate::{Failure, FailureCode, Fault, GpuFacts, GpuGauges, GpuProcesses, LastKnownGpus, Snapshot, UtilizationSample};
use divvy_model::nvidia::xid;
use divvy_model::{MiB, MigDevice, Vendor};

/// Where to find the driver.
#[derive(Debug, Clone)]
pub struct NvidiaOptions {
    /// The driver's library. `None` searches for it.
    pub library: Option<PathBuf>,
    /// The root directory of the driver's files: `/`, or the path at which the host's or a driver container's root is mounted.
    pub driver_root: PathBuf,
    /// The host's `/proc`.
    pub proc_root: PathBuf,
}

/// An initialized NVML library.
#[derive(Debug)]
pub struct Nvidia {
    nvml: Arc<Nvml>,
    /// The functions that limit a cgroup's memory, if the library has them.
    limits: Option<LimitFunctions>,
    calls: DriverCalls,
    /// The constant facts of each GPU, which are read only once.
    known: LastKnownGpus,
    proc_root: PathBuf,
    events: Option<events::EventListener>,
    reception: Reception,
    samples: gauges::GpmSamples,
}

impl Nvidia {
    /// Find, load, and initialize the library. The failure says which of these steps failed, and what to do. `reception` is that of the
    /// earlier openings.
    pub(crate) fn open(options: &NvidiaOptions, calls: &DriverCalls, reception: Reception) -> Result<Nvidia, Failure> {
        let candidates = library::candidates(options);
        let mut not_loaded = Vec::new();
        for candidate in &candidates {
            let call = calls.enter_init(format!("loading and initializing {}", candidate.display()));
            match Nvml::builder().lib_path(candidate.as_os_str()).init() {
                Ok(nvml) => {
                    drop(call);
                    if let Err(error) = &nvml.lib().nvmlShutdown {
                        let error = text_of(candidate.as_os_str(), error);
                        // Dropping it would call the function that is missing, and panic.
                        std::mem::forget(nvml);
                        return Err(Failure::new(
                            FailureCode::DriverFiles,
                            format!("NVML cannot be used: {error}; {INCOMPLETE}"),
                        ));
                    }
                    return Ok(Nvidia {
                        nvml: Arc::new(nvml),
                        limits: LimitFunctions::find(candidate),
                        calls: calls.clone(),
                        known: LastKnownGpus::default(),
                        proc_root: options.proc_root.clone(),
                        events: None,
                        reception,
                        samples: gauges::GpmSamples::default(),
                    });
                }
                Err(NvmlError::LibloadingError(error)) => not_loaded.push(text_of(candidate.as_os_str(), &error)),
                Err(error) => return Err(failure(&error, "initializing NVML")),
            }
        }
        Err(Failure::new(
            FailureCode::LibraryNotFound,
            library::not_found(options, &not_loaded),
        ))
    }
}

fn text_of(path: &OsStr, error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    if text.contains(&*path.to_string_lossy()) {
        text
    } else {
        format!("{}: {text}", path.to_string_lossy())
    }
}

impl Nvidia {
    /// Report whether the driver has the functions that limit a pod's memory on a GPU. They refuse GPUs in MIG mode.
    fn can_limit(&self, gpu: &GpuFacts) -> bool {
        let Some(limits) = self.limits.as_ref().filter(|_| !matches!(gpu.mig, Some((true, _)))) else {
            return false;
        };
        let device = self.nvml.device_by_uuid(gpu.uuid.as_str());
        device.is_ok_and(|device| !matches!(limits.get(&device, c"/sys/fs/cgroup"), Err(NvmlError::FunctionNotFound)))
    }
}

impl Backend for Nvidia {
    fn snapshot(&mut self) -> Result<Snapshot, Failure> {
        let mut snapshot = read::snapshot(&self.nvml, &self.calls, &self.known)?;
        capabilities::add(&self.proc_root, &mut snapshot.gpus);
        for gpu in &mut snapshot.gpus {
            gpu.memory_limit = self.can_limit(gpu);
        }
        self.reception.add(Instant::now(), &mut snapshot.gpus);
        Ok(self.known.complete(snapshot))
    }

    fn examine(&mut self, gpu: &mut GpuFacts) {
        let _call = self.calls.enter(format!("reading the health of GPU {}", gpu.index));
        condition::add(&self.nvml, gpu);
    }

    fn processes(&mut self) -> Result<Vec<GpuProcesses>, Failure> {
        read::processes(&self.nvml, &self.calls, &self.known)
    }

    fn gauges(&mut self) -> Result<Vec<GpuGauges>, Failure> {
        gauges::read(&self.nvml, &self.calls, &self.known, &mut self.samples)
    }

    fn utilization(&mut self, uuid: &str, since: u64) -> Result<Vec<UtilizationSample>, Failure> {
        let _call = self.calls.enter(format!("reading how busy processes keep GPU {uuid}"));
        utilization::samples(&self.nvml, uuid, since)
    }

    fn limit(&mut self, uuid: &str, cgroup: &Cgroup, hard: MiB) -> Result<LimitAnswer, Failure> {
        let _call = self.calls.enter(format!("limiting the memory of GPU {uuid} for a pod"));
        let Some(limits) = &self.limits else {
            let text = "NVIDIA's driver limits the GPU memory of pods from version 615 on";
            return Err(Failure::new(FailureCode::NotSupported, text));
        };
        let directory = &cgroup.directory;
        let fail = |error: NvmlError| {
            let text = format!(
                "the driver does not limit the memory of GPU {uuid} for {}: {error}",
                directory.display()
            );
            let code = match error {
                NvmlError::NotSupported | NvmlError::FunctionNotFound | NvmlError::NotFound => FailureCode::NotSupported,
                NvmlError::GpuLost => FailureCode::GpuLost,
                NvmlError::NoPermission => FailureCode::NoPermission,
                _ => FailureCode::Unknown,
            };
            Failure::new(code, text)
        };
        let path = |of: &Path| CString::new(of.as_os_str().as_bytes()).map_err(|_| fail(NvmlError::InvalidArg));
        let device = self.nvml.device_by_uuid(uuid).map_err(fail)?;
        let get = |of: &Path| limits.get(&device, &path(of)?).map_err(fail);
        let bytes = hard.0.saturating_mul(MIB);
        let is_wanted = |found: u64| found.div_ceil(MIB) == hard.0;
        let named = |found: u64| match found {
            u64::MAX => "unlimited".to_owned(),
            _ => MiB(found.div_ceil(MIB)).to_string(),
        };
        let refuse = |text: String| Err(Failure::new(FailureCode::NotSupported, text));
        if let Some(pod) = &cgroup.pod {
            let (found, used) = get(&pod.directory)?;
            if !is_wanted(found) {
                return refuse(format!(
                    "the pod's memory on GPU {uuid} is {} and not {hard}, so {} gets no limit",
                    named(found),
                    directory.display()
                ));
            }
            let bus = device.pci_info().map_err(fail)?.bus_id;
            if !pod.alone && !limits::nest(&pod.directory, &bus, bytes) {
                let used = MiB(used / MIB);
                return Ok(LimitAnswer { used, left_out: true });
            }
        }
        limits.set(&device, &path(directory)?, bytes).map_err(fail)?;
        // The driver may accept a limit and ignore it, so only what it says afterwards counts.
        let (found, used) = get(directory)?;
        if is_wanted(found) {
            Ok(LimitAnswer {
                used: MiB(used / MIB),
                left_out: false,
            })
        } else {
            refuse(format!(
                "the driver accepted a limit of {hard} on GPU {uuid} for {}, and says afterwards that it is {}",
                directory.display(),
                named(found)
            ))
        }
    }

    fn events(&mut self, sink: EventSink) {
        self.events = Some(events::listen(
            self.nvml.clone(),
            self.calls.clone(),
            self.reception.clone(),
            sink,
        ));
    }

    fn keeps_lost(&self) -> bool {
        // NVML remembers that a GPU is lost until it is initialized again.
        true
    }
}

const MIB: u64 = 1 << 20;

/// What to do if the library lacks a function.
const INCOMPLETE: &str = "the library is not a complete NVML; check that the driver is R450 or newer";

/// The prefix of a fault's name. The XID's number follows.
const XID: &str = "XID ";

/// Return the fault that an XID reports. NVML reports the number alone.
fn fault(uuid: Option<String>, number: u64, partition: Option<(u32, u32)>) -> Fault {
    Fault {
        vendor: Vendor::Nvidia,
        uuid,
        code: number,
        fatal: xid::is_fatal(number, ""),
        name: format!("{XID}{number}"),
        partition,
    }
}

/// Report whether a text is the name of an XID.
pub(crate) fn is_fault_name(text: &str) -> bool {
    text.starts_with(XID)
}

impl GpuFacts {
    /// Return why no part of the GPU can be allocated, even if the GPU is healthy. Return `None` if parts can be allocated.
    pub fn unfit(&self) -> Option<String> {
        // Some GPUs, such as that of a DGX Spark, have no own memory and use the machine's.
        if self.total == MiB::ZERO {
            return Some("the driver reports no memory of this GPU, so no part of it can be allocated".to_owned());
        }
        // CUDA cannot use the whole GPU in MIG mode.
        MigDevice::of(self.mig, &self.mig_devices)?;
        Some(format!(
            "MIG mode is on, so nothing can run on the whole GPU; switch it off with nvidia-smi -i {} -mig 0{}",
            self.index,
            if self.divisions().is_empty() {
                ""
            } else {
                ", or let the agent offer its MIG devices (--mig-strategy)"
            }
        ))
    }
}

/// Convert an error of the whole driver to a failure with a hint.
fn failure(error: &NvmlError, doing: &str) -> Failure {
    let (code, hint) = match error {
        NvmlError::DriverNotLoaded => (
            FailureCode::DriverNotLoaded,
            "the kernel module nvidia is not loaded; load it (modprobe nvidia) or install the driver, and the probe continues automatically",
        ),
        NvmlError::LibraryNotFound | NvmlError::LibloadingError(_) => (
            FailureCode::LibraryNotFound,
            "a library that NVML needs is missing; reinstall the driver",
        ),
        NvmlError::FunctionNotFound | NvmlError::FailedToLoadSymbol(_) => (FailureCode::DriverFiles, INCOMPLETE),
        NvmlError::NoPermission | NvmlError::OperatingSystem => (
            FailureCode::NoPermission,
            "the probe must be privileged: it needs /dev/nvidiactl and the GPUs' device nodes",
        ),
        NvmlError::Timeout => (FailureCode::Timeout, "the driver did not answer within its own time limit"),
        NvmlError::GpuLost => (
            FailureCode::GpuLost,
            "a GPU fell off the bus and blocks the whole driver; reboot the node",
        ),
        NvmlError::LibRmVersionMismatch => (
            FailureCode::Unknown,
            "the driver was updated, but the old kernel module is still loaded; reload the module or reboot the node",
        ),
        _ => (
            FailureCode::Unknown,
            "run nvidia-smi on the node to see whether the driver works at all",
        ),
    };
    Failure::new(code, format!("{doing} failed: {error}; {hint}"))
}
