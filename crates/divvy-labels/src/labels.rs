use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use divvy_model::{MiB, MigDevice, MigParts};
use divvy_nvidia_config::{NvidiaConfig, NvidiaMigStrategy, SharingStrategy};
use divvy_nvidia_plugin::{first_match, has_uniform_mig_devices};

use crate::family::family;
use crate::text::{cut, key, value};
use crate::{Error, vgpu};

/// What the driver and the kernel report about a node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LabeledMachine {
    /// The driver's version, such as `550.54.15`.
    pub driver: String,
    /// The newest CUDA version that the driver supports, as major and minor numbers.
    pub cuda: Option<(u32, u32)>,
    /// The machine's type.
    pub machine_type: Option<String>,
    /// The GPUs.
    pub gpus: Vec<LabeledGpu>,
    /// NVIDIA's PCI devices in the kernel's list.
    pub pci: Vec<PciDevice>,
    /// The start time of the program in seconds since 1970.
    pub timestamp: u64,
}

/// A GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LabeledGpu {
    /// The product name.
    pub model: String,
    /// The total memory; 0 if the driver does not report it.
    pub memory: MiB,
    /// The compute capability.
    pub cc: Option<(u32, u32)>,
    /// The PCI class, such as `0x030200`. `None` if the kernel does not know the device.
    pub pci_class: Option<u32>,
    /// Whether MIG is enabled; `None` if the GPU is not capable of MIG.
    pub mig: Option<bool>,
    /// The MIG devices.
    pub mig_devices: Vec<MigDevice>,
    /// The part of an NVLink fabric to which the GPU belongs. `None` if it belongs to none.
    pub fabric: Option<LabeledFabric>,
}

/// The part of an NVLink fabric to which a GPU belongs.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct LabeledFabric {
    /// The UUID of the cluster.
    pub cluster: String,
    /// The number of the clique.
    pub clique: u32,
}

/// A PCI device of NVIDIA.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PciDevice {
    /// The beginning of the device's configuration space: 256 bytes, unless only a part can be read.
    pub config: Vec<u8>,
}

/// The labels of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Labels {
    /// The values by key.
    pub labels: BTreeMap<String, String>,
    /// Warnings for the operator.
    pub warnings: Vec<String>,
}

const COMPUTE: u32 = 0x03_02_00;
const GRAPHICS: u32 = 0x03_00_00;

/// Return the labels of a node. They do not depend on the order of its GPUs.
///
/// # Errors
/// Fails if the driver's version is malformed, or if the configuration shares MIG devices through MPS.
pub fn labels(machine: &LabeledMachine, config: &NvidiaConfig) -> Result<Labels, Error> {
    let mut found = Labels::default();
    if !config.feature_discovery.no_timestamp {
        found.set("gfd.timestamp", machine.timestamp.to_string());
    }
    virtual_gpus(machine, &mut found);
    if machine.gpus.is_empty() {
        return Ok(found);
    }
    let mut gpus: Vec<&LabeledGpu> = machine.gpus.iter().collect();
    gpus.sort_by_cached_key(|gpu| rank(gpu));
    let divided = machine.gpus.iter().any(|gpu| gpu.mig == Some(true));
    let is_mps = config.sharing.strategy == SharingStrategy::Mps;
    if is_mps && divided && config.mig_strategy != NvidiaMigStrategy::None {
        return Err(Error::MpsWithMig);
    }
    versions(machine, &mut found)?;
    let machine_type = machine.machine_type.as_deref().map(value);
    found.set("gpu.machine", machine_type.unwrap_or_else(|| "unknown".to_owned()));
    found.set("mig.capable", machine.gpus.iter().any(|gpu| gpu.mig.is_some()).to_string());
    found.set("mps.capable", is_mps.to_string());
    found.set("gpu.mode", mode(&machine.gpus).to_owned());
    match config.mig_strategy {
        NvidiaMigStrategy::None => {}
        NvidiaMigStrategy::Single => found.set("mig.strategy", "single".to_owned()),
        NvidiaMigStrategy::Mixed => found.set("mig.strategy", "mixed".to_owned()),
    }
    let fabrics: BTreeSet<&LabeledFabric> = machine.gpus.iter().filter_map(|gpu| gpu.fabric.as_ref()).collect();
    if let (Some(fabric), 1) = (fabrics.first(), fabrics.len()) {
        found.set("gpu.clique", value(&format!("{}.{}", fabric.cluster, fabric.clique)));
    }
    models(&gpus, config, &mut found);
    if config.mig_strategy == NvidiaMigStrategy::Mixed {
        profiles(&gpus, config, &mut found);
    }
    Ok(found)
}

/// Return the place of a GPU among those of the node. Where a label describes one of several GPUs, it describes the first one. GPUs
/// of the same rank have the same labels.
fn rank(gpu: &LabeledGpu) -> impl Ord + use<> {
    let devices = gpu.mig_devices.iter().map(|device| device.parts);
    let devices: Vec<_> = devices
        .map(|parts| parts.map(|parts| (parts.gi_profile, numbers(&parts))))
        .collect();
    (Reverse((gpu.memory, gpu.cc)), gpu.model.clone(), gpu.mig, devices)
}

impl Labels {
    fn set(&mut self, name: &str, value: String) {
        self.labels.insert(format!("nvidia.com/{name}"), cut(&value, 63));
    }

    /// Add the label of the product: the model's name, cut as far as necessary, and the suffix. A model whose name cannot be read has none.
    fn set_product(&mut self, name: &str, model: &ModelGpus<'_>, suffix: &str) {
        if !model.name.is_empty() {
            let room = 63_usize.saturating_sub(suffix.len());
            self.set(&format!("{name}.product"), format!("{}{suffix}", cut(&model.name, room)));
        }
    }
}

fn virtual_gpus(machine: &LabeledMachine, found: &mut Labels) {
    let mut drivers = machine.pci.iter().filter_map(|device| vgpu::host_driver(&device.config));
    let driver = drivers.next();
    found.set("vgpu.present", driver.is_some().to_string());
    let driver = driver.unwrap_or_default();
    for (name, text) in [("version", &driver.version), ("branch", &driver.branch)] {
        if !text.is_empty() {
            found.set(&format!("vgpu.host-driver-{name}"), value(text));
        }
    }
}

fn versions(machine: &LabeledMachine, found: &mut Labels) -> Result<(), Error> {
    let parts: Vec<&str> = machine.driver.split('.').collect();
    let (major, minor, revision) = match parts[..] {
        [major, minor] => (major, minor, ""),
        [major, minor, revision] => (major, minor, revision),
        _ => return Err(Error::DriverVersion(machine.driver.clone())),
    };
    for (name, text) in [
        ("cuda.driver-version.full", machine.driver.as_str()),
        ("cuda.driver-version.major", major),
        ("cuda.driver-version.minor", minor),
        ("cuda.driver-version.revision", revision),
        ("cuda.driver.major", major),
        ("cuda.driver.minor", minor),
        ("cuda.driver.rev", revision),
    ] {
        found.set(name, value(text));
    }
    if let Some((major, minor)) = machine.cuda {
        found.set("cuda.runtime-version.full", format!("{major}.{minor}"));
        for name in ["cuda.runtime-version", "cuda.runtime"] {
            found.set(&format!("{name}.major"), major.to_string());
            found.set(&format!("{name}.minor"), minor.to_string());
        }
    }
    Ok(())
}

fn mode(gpus: &[LabeledGpu]) -> &'static str {
    let all = |class| gpus.iter().all(|gpu| gpu.pci_class == Some(class));
    match (all(COMPUTE), all(GRAPHICS)) {
        (true, _) => "compute",
        (_, true) => "graphics",
        _ => "unknown",
    }
}

/// How a resource is shared.
struct ResourceSharing {
    replicas: u32,
    is_renamed: bool,
    strategy: &'static str,
}

impl ResourceSharing {
    fn of(config: &NvidiaConfig, resource: &str) -> ResourceSharing {
        let strategy = match config.sharing.strategy {
            SharingStrategy::None => "none",
            SharingStrategy::TimeSlicing => "time-slicing",
            SharingStrategy::Mps => "mps",
        };
        let mut resources = config.sharing.resources.iter();
        match resources.find(|shared| shared.name == resource) {
            Some(shared) => ResourceSharing {
                replicas: shared.replicas,
                is_renamed: shared.rename.as_ref().is_some_and(|name| *name != shared.name),
                strategy,
            },
            None => ResourceSharing::none(),
        }
    }

    fn none() -> ResourceSharing {
        ResourceSharing {
            replicas: 1,
            is_renamed: false,
            strategy: "none",
        }
    }

    fn suffix(&self) -> &'static str {
        if self.replicas > 1 && !self.is_renamed {
            "-SHARED"
        } else {
            ""
        }
    }

    fn describe(&self, name: &str, found: &mut Labels) {
        found.set(&format!("{name}.replicas"), self.replicas.to_string());
        found.set(&format!("{name}.sharing-strategy"), self.strategy.to_owned());
    }
}

/// The GPUs of one model.
struct ModelGpus<'m> {
    name: String,
    gpus: Vec<&'m LabeledGpu>,
}

impl ModelGpus<'_> {
    fn memory(&self) -> u64 {
        self.gpus.iter().map(|gpu| gpu.memory.0).max().unwrap_or(0)
    }
}

/// Add the labels of all GPU models. The labels that do not name a model describe the first one.
fn models(gpus: &[&LabeledGpu], config: &NvidiaConfig, found: &mut Labels) {
    let mut by_name: BTreeMap<String, Vec<&LabeledGpu>> = BTreeMap::new();
    for gpu in gpus {
        by_name.entry(value(&gpu.model)).or_default().push(gpu);
    }
    let mut models: Vec<ModelGpus<'_>> = by_name.into_iter().map(|(name, gpus)| ModelGpus { name, gpus }).collect();
    models.sort_by(|a, b| {
        let rank = |model: &ModelGpus<'_>| (model.memory(), model.gpus.len());
        rank(b).cmp(&rank(a)).then_with(|| a.name.cmp(&b.name))
    });
    let unnamed: usize = models
        .iter()
        .filter(|model| model.name.is_empty())
        .map(|model| model.gpus.len())
        .sum();
    if unnamed > 0 {
        found.warnings.push(format!(
            "the name of {unnamed} GPUs cannot be read, so no label names their model; nvidia-smi -q shows what the driver reports"
        ));
    }
    if let [first, _, ..] = &models[..] {
        found.warnings.push(format!(
            "the node has GPUs of {} models; the labels that name no model describe {}",
            models.len(),
            first.name
        ));
        for model in models.iter().filter(|model| !model.name.is_empty()) {
            let set = [("count", model.gpus.len() as u64), ("memory", model.memory())];
            for (what, number) in set {
                let key = key("model.", &model.name, &format!(".{what}"));
                found.labels.insert(key, number.to_string());
            }
        }
    }
    let Some(first) = models.first() else { return };
    if let Some(cc) = first.gpus.iter().find_map(|gpu| gpu.cc).filter(|cc| cc.0 > 0) {
        found.set("gpu.family", family(cc).to_owned());
        found.set("gpu.compute.major", cc.0.to_string());
        found.set("gpu.compute.minor", cc.1.to_string());
    }
    let divided = gpus.iter().any(|gpu| gpu.mig == Some(true));
    if config.mig_strategy == NvidiaMigStrategy::Single && divided {
        single(gpus, config, first, found)
    } else {
        whole(config, first, found)
    }
}

fn whole(config: &NvidiaConfig, model: &ModelGpus<'_>, found: &mut Labels) {
    let raw = model.gpus.first().map_or("", |gpu| gpu.model.as_str());
    let resource = first_match(&config.resources.gpus, raw).unwrap_or_default();
    // GPUs in MIG mode are not shared as such (`NewGPUResourceLabelerWithoutSharing` of NVIDIA's GPU feature discovery).
    let shared = if model.gpus.iter().all(|gpu| gpu.mig == Some(true)) {
        ResourceSharing {
            replicas: 0,
            ..ResourceSharing::none()
        }
    } else {
        ResourceSharing::of(config, &resource)
    };
    found.set_product("gpu", model, shared.suffix());
    found.set("gpu.count", model.gpus.len().to_string());
    if model.memory() > 0 {
        found.set("gpu.memory", model.memory().to_string());
    }
    shared.describe("gpu", found);
}

/// Add the labels of MIG devices that are offered as GPUs (the MIG strategy `single`).
fn single(gpus: &[&LabeledGpu], config: &NvidiaConfig, model: &ModelGpus<'_>, found: &mut Labels) {
    let devices: Vec<(&LabeledGpu, &MigDevice)> = (gpus.iter())
        .flat_map(|gpu| gpu.mig_devices.iter().map(move |device| (*gpu, device)))
        .collect();
    let facts = gpus
        .iter()
        .map(|gpu| (gpu.mig == Some(true), gpu.memory, gpu.mig_devices.as_slice()));
    let first = devices.first().filter(|_| has_uniform_mig_devices(facts));
    let described = first.and_then(|(gpu, device)| Some((device.parts?, device.profile(gpu.memory)?)));
    let Some((parts, profile)) = described else {
        found.warnings.push(
            "the GPUs are not divided into MIG devices of one profile, so the MIG strategy single does not apply".to_owned(),
        );
        found.set_product("gpu", model, "-MIG-INVALID");
        for name in ["count", "replicas", "memory"] {
            found.set(&format!("gpu.{name}"), "0".to_owned());
        }
        found.set("gpu.sharing-strategy", String::new());
        return;
    };
    let resource = first_match(&config.resources.mig, &profile).unwrap_or_default();
    let shared = ResourceSharing::of(config, &resource);
    found.set_product("gpu", model, &suffix(&profile, &shared));
    found.set("gpu.count", devices.len().to_string());
    shared.describe("gpu", found);
    attributes("gpu", &parts, found);
}

/// Return `-MIG-PROFILE[-SHARED]`, which follows the model's name.
fn suffix(profile: &str, shared: &ResourceSharing) -> String {
    format!("-MIG-{}{}", profile.replace('+', "."), shared.suffix())
}

fn attributes(name: &str, parts: &MigParts, found: &mut Labels) {
    for (what, number) in numbers(parts) {
        found.set(&format!("{name}.{what}"), number.to_string());
    }
}

fn numbers(parts: &MigParts) -> [(&'static str, u64); 9] {
    [
        ("memory", parts.memory),
        ("multiprocessors", parts.multiprocessors.into()),
        ("slices.gi", parts.gi_slices.into()),
        ("slices.ci", parts.ci_slices.into()),
        ("engines.copy", parts.copy_engines.into()),
        ("engines.decoder", parts.decoders.into()),
        ("engines.encoder", parts.encoders.into()),
        ("engines.jpeg", parts.jpeg.into()),
        ("engines.ofa", parts.ofa.into()),
    ]
}

/// Add the labels of the MIG devices of each profile.
fn profiles(gpus: &[&LabeledGpu], config: &NvidiaConfig, found: &mut Labels) {
    let mut by_profile: BTreeMap<String, Vec<(&LabeledGpu, MigParts)>> = BTreeMap::new();
    for gpu in gpus.iter().filter(|gpu| gpu.mig == Some(true)) {
        for device in &gpu.mig_devices {
            if let (Some(profile), Some(parts)) = (device.profile(gpu.memory), device.parts) {
                by_profile.entry(profile).or_default().push((*gpu, parts));
            }
        }
    }
    for (profile, devices) in by_profile {
        let name = format!("mig-{}", profile.replace('+', "."));
        let resource = first_match(&config.resources.mig, &profile).unwrap_or_else(|| format!("nvidia.com/{name}"));
        let shared = ResourceSharing::of(config, &resource);
        let Some((gpu, parts)) = devices.first() else { continue };
        let model = ModelGpus {
            name: value(&gpu.model),
            gpus: Vec::new(),
        };
        let name = cut(&name, 40);
        found.set_product(&name, &model, &suffix(&profile, &shared));
        found.set(&format!("{name}.count"), devices.len().to_string());
        shared.describe(&name, found);
        attributes(&name, parts, found);
    }
}
