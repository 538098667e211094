//! A simulated `libnvidia-ml.so` that needs no GPU, for tests and for `divvy demo`.
//!
//! The library has NVML's C ABI, so that the code for a real driver also runs against it: loading, enumeration, events, processes, and topology.
//! It exports the symbols that NVIDIA's device plugin (<https://github.com/NVIDIA/k8s-device-plugin>) and `nvml-wrapper` 0.13 call. It also has the
//! symbols of `libcuda.so.1` that describe the GPU of a Tegra.
//!
//! # Environment
//!
//! | variable | meaning |
//! |---|---|
//! | `DIVVY_NVML_SIM` | path of the machine description ([`divvy_model::machine`]), read at each `nvmlInit` that initializes the library |
//! | `DIVVY_NVML_SIM_NODE` | name of a node in the description; the first node if not set |
//! | `DIVVY_NVML_SIM_CONTROL` | path of the control socket (see below); no socket if not set |
//! | `DIVVY_NVML_SIM_LEDGER` | directory of the ledgers that `divvy-cuda-sim` writes; what its processes hold and run counts as theirs; no ledgers if not set |
//! | `DIVVY_NVML_SIM_CGROUP` | directory of the cgroup in which the process counts as running; that of `/proc/self/cgroup` below `/sys/fs/cgroup` if not set |
//! | `DIVVY_NVML_SIM_INIT_ERROR` | error code of `nvmlInit` until the control socket changes it |
//! | `DIVVY_NVML_SIM_HANG` | seconds for which calls block, from the first `nvmlInit` on, until the control socket changes it |
//!
//! # Control socket
//!
//! The library listens from the first `nvmlInit` on, even if that call fails. If several processes load the library with the same path, one of
//! them listens; another one takes over when it ends. Requests and answers are lines of JSON:
//!
//! ```text
//! {"op":"xid","gpu":0,"xid":79}                 {"ok":true,"delivered":1}
//! {"op":"xid","gpu":0,"xid":79,"instances":[1,0]}   the GPU instance and the compute instance that it concerns
//! {"op":"lost","gpu":0,"lost":true}             {"ok":true}
//! {"op":"memory","gpu":0,"pid":123,"used_mib":100}   0 removes the process
//! {"op":"memory","gpu":0,"pid":123,"used_mib":100,"mig":2}   the process uses the third MIG device of the GPU
//! {"op":"memory","gpu":0,"pid":123,"used_mib":100,"mps":true}   the process is a client of MPS
//! {"op":"temperature","gpu":0,"celsius":90}
//! {"op":"utilization","gpu":0,"percent":50}
//! {"op":"ecc","gpu":0,"corrected":7,"uncorrected":1}   the errors of the memory so far
//! {"op":"health","gpu":0,"health":{"clocks_event_reasons":8}}   instead of the described health ([`divvy_model::machine::MachineHealth`])
//! {"op":"gauges","gpu":0,"gauges":{"power_milliwatts":250000}}   values in place of the simulated ones (`Gauges` in `changes.rs`); those of earlier requests end
//! {"op":"init","error":9}                       0: nvmlInit works again
//! {"op":"events","create":999,"wait":999}       errors of nvmlEventSetCreate and nvmlEventSetWait; 0 or absent: none
//! {"op":"register","gpu":0,"error":999}         the error of nvmlDeviceRegisterEvents; 0: none
//! {"op":"hang","seconds":30}                    0: calls return
//! {"op":"mig","gpu":0,"devices":[{"gpu_instance":1,"compute_instance":0,"profile":0}]}   instead of the described ones; null: MIG is off
//! {"op":"mig_mode","gpu":0,"error":999}         the error of nvmlDeviceGetMigMode; 0: none
//! {"op":"limit_mode","mode":"dmem"}             where the driver keeps the limits of cgroups: "misc", "dmem", "forgotten", or "off"; null: as its version says
//! {"op":"limit","gpu":0,"error":4}              the error of nvmlDeviceSetMemoryLimits_v1; 0: none
//! {"op":"process_utilization","gpu":0,"error":3}   the error of nvmlDeviceGetProcessUtilization; 0: none
//! {"op":"describe"}                             reads the machine description again, for example with other MIG devices
//! {"op":"state"}                                {"ok":true,"state":{…}}; `gpm_samples` is how many samples of GPU Performance Monitoring the process has and ever had
//! ```
//!
//! The answer to a refused request is `{"err":"…"}`. An XID is delivered to every event set of the listening process that registered the GPU.
//! All other changes outlive the process: they are stored in `<control>.state`, which is replaced atomically. Every process that loads the
//! library reads the file again when it changes, so a lost GPU stays lost when the probe restarts. To set a state before a process listens,
//! write that file.
//!
//! # Simplifications
//!
//! A driver has the functions of its branch, as far as the library has them at all (`exports.rs`). The tables of `nvmlInternalGetExportTable` have functions that return NOT_SUPPORTED.
//!
//! A driver without a version, as on a Jetson, has `driver = ""` in the description; `nvmlSystemGetDriverVersion` then returns NOT_SUPPORTED.
//! The utilization of the whole GPU is the described one and does not depend on its processes. For processes, the driver takes a sample each 167 ms, or each
//! `sample_ms` of the description, and returns the latest one of each process that had at least half a percent. Real drivers take one each 1/6 s to
//! 1 s, depending on the GPU (nvml.h, nvmlUtilization_t). If there are several since the time that the caller names, they seem to return the mean. A process that has ended has no samples.
//! The limits of cgroups (`nvmlDeviceSetMemoryLimits_v1`, from driver 615 on) are stored, but nothing enforces them here. `nvmlDeviceGetMemoryInfo_v2` shows
//! the limit to a process whose own cgroup has one, and not the limit of a cgroup above. With `dmem`, the limit is also written into the
//! cgroup's file `dmem.max`, in whose place a test has a plain file.
//! A GPU supports MIG only if its description has `mig` or `mig_capable`; otherwise `nvmlDeviceGetMigMode` returns NOT_SUPPORTED. The power follows from the
//! utilization, and the energy is its integral since the machine was started. The current clock is the highest one, or 210 MHz without utilization. GPUs with HBM have
//! a temperature of their memory. GPU Performance Monitoring (from Hopper and driver 525 on) returns values of the moment, and not means. Fans,
//! displays, and the like are NOT_SUPPORTED, and settings cannot be changed. PCI device ids
//! are made up. `nvml-wrapper` reports a symbol that is missing here as it does for an old driver.

#![allow(
    unsafe_code,
    reason = "a C ABI: every symbol is unmangled and writes through the caller's pointers"
)]
#![allow(non_snake_case, reason = "the symbols' names are NVIDIA's")]

mod abi;
mod changes;
mod control;
mod exports;
mod gauges;
mod machine;
mod samples;
mod sim;
