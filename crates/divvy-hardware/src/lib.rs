//! GPU drivers behind a small trait, and the probe, which is the only process that reads them.
//!
//! A driver's library, and a driver's file in `/sys`, can hang or crash the process that uses it. Therefore only `divvy-probe`
//! ([`probe`]) uses them. All other processes read the probe's Unix socket ([`protocol`]) through a [`client`] that validates
//! everything it receives.
//!
//! ```text
//! libnvidia-ml.so ── nvidia::Nvidia ─┐ Backend
//!                                    ├─ probe (threads, no runtime) ══ socket ══ client::ProbeClient (tokio) ── agent
//! /sys (amdgpu) ───────── amd::Amd ──┤                                           Update::{Snapshot, Fault, Unavailable}
//! /sys, /proc (xe) ── intel::Intel ──┘
//! ```
//!
//! The GPU of a Tegra is described once, through `libcuda.so` (`divvy-probe --once --cuda`, [`client::cuda_snapshot`]).
//!
//! What differs between vendors is in [`nvidia`], [`amd`], and [`intel`]: which GPUs exist, and which errors mean that a GPU is broken ([`Fault`]).
//! [`health`] turns observations into a verdict for each GPU, without side effects.

mod address;
pub mod amd;
pub mod backend;
pub mod client;
mod divided;
mod dmem;
mod error;
mod facts;
mod fault;
mod gauges;
pub mod health;
pub mod intel;
mod kernel_files;
pub mod nvidia;
pub mod probe;
pub mod protocol;
mod sysfs;
mod utilization;
mod vendors;

pub use divided::gpu_of_mig_index;
pub use error::{Error, Failure, FailureCode};
pub use facts::{
    DriverVersions, Fabric, GpuFacts, GpuProcess, GpuProcesses, LastKnownGpus, NoEvents, ProcessKind, RemappedRows,
    SNAPSHOT_VERSION, Snapshot, UnreadableDevice,
};
pub use fault::Fault;
pub use gauges::{ComputeMode, Gauges, Gpm, GpuGauges, GpuMemory, Measure, PartGauges};
pub use utilization::{GpuSamples, SamplesSince, UtilizationSample};
