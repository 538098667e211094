//! Generates a CDI spec of the GPUs that the driver reports now, for mode `jit-cdi`. The spec is kept only in memory.

use divvy_model::{MigDevice, Vendor};
use serde::Deserialize;
use thiserror::Error as ThisError;

use super::require::RequirementFacts;
use divvy_cdi::generate::{self, Extras, GenerateOptions, Generated, nvidia, proc, wsl};
use divvy_cdi::{FoundSpec, Registry};
use divvy_host::Tree;
use divvy_host::plain_line;

/// The CDI kind of the devices, with the same name as in NVIDIA's runtime. No spec file uses this kind, so a stale device is
/// never used by mistake.
pub const KIND: &str = "runtime.nvidia.com/gpu";
const VENDOR: &str = "runtime.nvidia.com";
/// The version of the probe's output.
const VERSION: u32 = 2;
/// The text that messages show in place of a spec file's path.
const PLACE: &str = "the GPUs that the driver reports now";

/// A reason why no spec could be made.
#[derive(Debug, ThisError)]
pub enum LiveSpecError {
    /// The probe's output is not a snapshot.
    #[error(
        "the output of divvy-probe is not a list of GPUs: {0}; check that divvy-probe and divvy-runtime have the same version"
    )]
    Snapshot(String),
    /// A spec cannot be generated from the driver's files and device nodes.
    #[error(transparent)]
    Generate(#[from] generate::GenerateError),
}

/// The part of the output of `divvy-probe --once` that a spec needs.
#[derive(Debug, Deserialize)]
struct LiveSnapshot {
    v: u32,
    #[serde(default)]
    drivers: LiveDrivers,
    gpus: Vec<LiveGpu>,
    #[serde(default)]
    unreadable: Vec<LiveUnreadable>,
}

/// The drivers by vendor. Only NVIDIA's driver is read, because the generated spec contains only NVIDIA's devices.
#[derive(Debug, Default, Deserialize)]
struct LiveDrivers {
    #[serde(default)]
    nvidia: LiveDriver,
}

#[derive(Debug, Default, Deserialize)]
struct LiveDriver {
    version: String,
    #[serde(default)]
    cuda: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct LiveGpu {
    #[serde(default)]
    vendor: Vendor,
    uuid: String,
    index: u32,
    #[serde(default)]
    minor: Option<u32>,
    #[serde(default)]
    pci: String,
    #[serde(default)]
    cc: String,
    #[serde(default)]
    brand: Option<String>,
    /// Whether MIG is enabled now, and whether it will be enabled after a reset.
    #[serde(default)]
    mig: Option<(bool, bool)>,
    #[serde(default)]
    mig_devices: Vec<MigInstance>,
    #[serde(default)]
    lost: bool,
}

/// A [`MigDevice`] without its `parts`. A spec does not need this field, and the code to parse it would make this program larger.
#[derive(Debug, Deserialize)]
struct MigInstance {
    index: u32,
    uuid: String,
    gi: u32,
    ci: u32,
}

impl From<MigInstance> for MigDevice {
    fn from(MigInstance { index, uuid, gi, ci }: MigInstance) -> MigDevice {
        MigDevice {
            index,
            uuid,
            gi,
            ci,
            ..MigDevice::default()
        }
    }
}

#[derive(Debug, Deserialize)]
struct LiveUnreadable {
    #[serde(default)]
    vendor: Vendor,
    index: u32,
    error: String,
}

/// The machine's current devices.
#[derive(Debug)]
pub struct Live {
    /// The devices, all of kind [`KIND`].
    pub registry: Registry,
    /// What is known about the driver and the GPUs.
    pub facts: RequirementFacts,
    /// Sentences for the log, for example about omitted GPUs.
    pub notes: Vec<String>,
}

/// Return the devices in a probe's output, and the facts about them. `driver_root` is `/`, or the directory where the root of a
/// driver container is mounted. Every device also gets the `extras`.
///
/// # Errors
/// See [`LiveSpecError`].
pub fn registry(tree: &dyn Tree, probe: &str, driver_root: &str, extras: Extras) -> Result<Live, LiveSpecError> {
    let refuse = |text: String| Err(LiveSpecError::Snapshot(text));
    let mut snapshot: LiveSnapshot = match serde_json::from_str(probe) {
        Ok(snapshot) => snapshot,
        Err(error) => return refuse(error.to_string()),
    };
    if snapshot.v != VERSION {
        return refuse(format!(
            "its version is {}, but only version {VERSION} is supported",
            snapshot.v
        ));
    }
    let driver = snapshot.drivers.nvidia;
    snapshot.gpus.retain(|gpu| gpu.vendor == Vendor::Nvidia);
    snapshot.unreadable.retain(|gpu| gpu.vendor == Vendor::Nvidia);
    let options = GenerateOptions {
        driver_root: driver_root.to_owned(),
        extras,
        ..GenerateOptions::new(VENDOR)
    };
    let mut left_out: Vec<String> = snapshot
        .unreadable
        .iter()
        .map(|gpu| format!("GPU {} is left out: the driver says {:?}", gpu.index, gpu.error))
        .collect();
    let (lost, there): (Vec<LiveGpu>, Vec<LiveGpu>) = snapshot.gpus.into_iter().partition(|gpu| gpu.lost);
    left_out.extend(
        lost.iter()
            .map(|gpu| format!("GPU {} ({}) is left out: it is lost", gpu.index, plain_line(gpu.uuid.chars()))),
    );
    let facts = facts(&driver.version, &driver.cuda, &there);
    let version = Some(driver.version.as_str());
    let Generated { spec, notes } = if wsl::is_there(tree) {
        wsl::generate(tree, version, &options)?
    } else {
        let mut gpus = Vec::new();
        for gpu in there {
            let Some(minor) = gpu.minor else {
                left_out.push(format!(
                    "GPU {} ({}) is left out: the driver does not report its minor number, which names its device node",
                    gpu.index,
                    plain_line(gpu.uuid.chars())
                ));
                continue;
            };
            let mig_devices: Vec<MigDevice> = gpu.mig_devices.into_iter().map(MigDevice::from).collect();
            gpus.push(nvidia::NvidiaGpu {
                index: gpu.index,
                mig: proc::mig_of(tree, minor, MigDevice::of(gpu.mig, &mig_devices)),
                uuid: Some(gpu.uuid),
                minor,
                pci: gpu.pci,
            });
        }
        nvidia::generate(tree, &gpus, version, &options)?
    };
    left_out.extend(notes);
    let found = FoundSpec {
        path: PLACE.to_owned(),
        priority: 0,
        spec: Ok(spec),
    };
    Ok(Live {
        registry: Registry::new(vec![found]),
        facts,
        notes: left_out,
    })
}

fn facts(driver: &str, cuda: &str, gpus: &[LiveGpu]) -> RequirementFacts {
    let mut facts = RequirementFacts::of_driver(driver);
    if !cuda.is_empty() {
        facts.cuda = Some(cuda.to_owned());
    }
    // The container may get any of the GPUs, so a property is known only if all GPUs share it.
    let alike = |what: fn(&LiveGpu) -> Option<&str>| {
        let first = what(gpus.first()?)?;
        gpus.iter().all(|gpu| what(gpu) == Some(first)).then(|| first.to_owned())
    };
    facts.arch = alike(|gpu| Some(gpu.cc.as_str()).filter(|cc| !cc.is_empty()));
    facts.brand = alike(|gpu| gpu.brand.as_deref());
    facts
}
