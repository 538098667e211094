//! Which resources a node offers, and which devices each resource has.

use std::collections::BTreeMap;

use divvy_model::{MiB, MigDevice};
use divvy_nvidia_config::{
    DeviceReference, NvidiaConfig, NvidiaMigStrategy, ReplicatedDevices, ReplicatedResource, ResourcePattern, SharingStrategy,
};
use divvy_placement::Topology;

use crate::wildcard;
use crate::{Error, PluginGpu, PluginMachine};

/// The resources of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeOffer {
    /// The resources, ordered by name. Each has at least one device.
    pub resources: Vec<OfferedResource>,
    /// What an operator should know.
    pub warnings: Vec<String>,
}

/// An extended resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OfferedResource {
    pub(crate) name: String,
    pub(crate) units: Vec<Unit>,
    /// Whether a container may have only one device.
    pub(crate) one_per_request: bool,
    /// Whether the devices are shared through MPS.
    pub(crate) mps: bool,
    pub(crate) topology: Topology,
    /// The IMEX channels that containers get.
    pub(crate) imex_channels: Vec<u32>,
}

/// A GPU or a MIG device, with the device ids that stand for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Unit {
    pub(crate) uuid: String,
    /// The index, such as `2`, or `1:0` for a MIG device.
    pub(crate) index: String,
    /// The GPU's position in [`PluginMachine::gpus`].
    pub(crate) gpu: usize,
    pub(crate) is_mig: bool,
    /// The number of replicas, whose device ids are `UUID::N`. `None` if the device is not shared, so that its only id is the
    /// UUID.
    pub(crate) replicas: Option<u32>,
    healthy: bool,
    numa: Option<u32>,
    /// Device nodes, as paths below the directory that contains `/dev`.
    pub(crate) nodes: Vec<String>,
}

/// A device, as the kubelet sees it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct OfferedDevice {
    /// The id: a UUID, or `UUID::N` for a replica.
    pub id: String,
    /// Whether a container can use the device.
    pub healthy: bool,
    /// The NUMA node.
    pub numa: Option<u32>,
}

/// The product names of GPUs that cannot compute.
const DISPLAYS: [&str; 2] = ["DGX Display", "NVIDIA DGX Display"];

/// The maximum number of clients of CUDA's Multi-Process Service, from Volta on and before Volta (docs.nvidia.com/deploy/mps,
/// "Limitations").
const MPS_CLIENTS: u32 = 48;
const MPS_CLIENTS_BEFORE_VOLTA: u32 = 16;

/// Return the resources that a node with this configuration offers.
///
/// # Errors
/// Fails if the configuration does not suit the machine.
pub fn offer(config: &NvidiaConfig, machine: &PluginMachine) -> Result<NodeOffer, Error> {
    let mut warnings = Vec::new();
    let mut found = named_units(config, machine, &mut warnings)?;
    for shared in &config.sharing.resources {
        share(config, machine, shared, &mut found, &mut warnings)?;
    }
    let imex_channels = imex_channels(config, machine, &mut warnings)?;
    let topology = topology(&machine.gpus);
    let resources = found.into_iter().map(|(name, mut units)| {
        units.sort_by(|a, b| (a.gpu, &a.index, &a.uuid).cmp(&(b.gpu, &b.index, &b.uuid)));
        let is_shared = units.iter().any(|unit| unit.replicas.is_some());
        OfferedResource {
            name,
            one_per_request: is_shared && config.sharing.fail_requests_greater_than_one,
            mps: is_shared && config.sharing.strategy == SharingStrategy::Mps,
            topology: topology.clone(),
            imex_channels: imex_channels.clone(),
            units,
        }
    });
    Ok(NodeOffer {
        resources: resources.filter(|resource| !resource.units.is_empty()).collect(),
        warnings,
    })
}

fn topology(gpus: &[PluginGpu]) -> Topology {
    let links: Vec<(&str, &[divvy_model::GpuLink])> = gpus.iter().map(|gpu| (gpu.uuid.as_str(), gpu.links.as_slice())).collect();
    Topology::new(&links)
}

type FoundUnits = BTreeMap<String, Vec<Unit>>;

/// Find the GPUs and MIG devices of each resource, before sharing is applied.
fn named_units(config: &NvidiaConfig, machine: &PluginMachine, warnings: &mut Vec<String>) -> Result<FoundUnits, Error> {
    let computing = |gpu: &&(usize, &PluginGpu)| !DISPLAYS.contains(&gpu.1.model.as_str());
    let gpus: Vec<(usize, &PluginGpu)> = machine.gpus.iter().enumerate().collect();
    let gpus: Vec<(usize, &PluginGpu)> = gpus.iter().filter(computing).copied().collect();
    let strategy = match config.mig_strategy {
        NvidiaMigStrategy::Single if !gpus.iter().any(|(_, gpu)| gpu.is_divided()) => NvidiaMigStrategy::None,
        other => other,
    };
    if strategy == NvidiaMigStrategy::Single {
        check_single(&gpus)?;
    }
    let mut found = FoundUnits::new();
    for (position, gpu) in gpus {
        if strategy == NvidiaMigStrategy::None || !gpu.is_divided() {
            let mut unit = whole(position, gpu);
            if gpu.is_divided() {
                unit.healthy = false;
                warnings.push(format!(
                    "GPU {} ({}) is in MIG mode, so no container can use it as a whole; choose the MIG strategy single or mixed, or \
                     switch MIG off with nvidia-smi -i {} -mig 0",
                    gpu.index, gpu.model, gpu.index
                ));
            }
            match name_of_gpu(config, gpu) {
                Some(name) => found.entry(name).or_default().push(unit),
                None if gpu.unreadable => warnings.push(format!(
                    "GPU {} cannot be read, so it is not known which pattern of resources.gpus its name matches; it is left out until \
                     it can be read",
                    gpu.index
                )),
                None => warnings.push(format!(
                    "no resource pattern matches GPU {} ({:?}), so it is left out; add a pattern to resources.gpus, such as \"*\"",
                    gpu.index, gpu.model
                )),
            }
            continue;
        }
        if gpu.mig_devices.is_empty() {
            warnings.push(format!("GPU {} is in MIG mode and has no MIG devices", gpu.index));
        }
        for device in &gpu.mig_devices {
            match name_of_mig(config, strategy, gpu, device) {
                Some(name) => found.entry(name).or_default().push(part(position, gpu, device)),
                None => warnings.push(format!(
                    "the driver does not report the profile of the MIG device {}, so it is not offered",
                    device.uuid
                )),
            }
        }
    }
    Ok(found)
}

/// Return the name of a GPU's resource. The product name of an unreadable GPU is not known. So it has a resource only if all GPUs have the
/// same.
fn name_of_gpu(config: &NvidiaConfig, gpu: &PluginGpu) -> Option<String> {
    let patterns = &config.resources.gpus;
    match (gpu.unreadable, patterns.first()) {
        (true, Some(first)) => patterns
            .iter()
            .all(|pattern| pattern.name == first.name)
            .then(|| first.name.clone()),
        _ => first_match(patterns, &gpu.model),
    }
}

/// Return the name of a MIG device's resource. The result is `None` if the name depends on the profile and the driver does not
/// report it.
fn name_of_mig(config: &NvidiaConfig, strategy: NvidiaMigStrategy, gpu: &PluginGpu, device: &MigDevice) -> Option<String> {
    let profile = device.profile(gpu.memory);
    let matched = first_match(&config.resources.mig, profile.as_deref().unwrap_or_default());
    matched.or_else(|| match (strategy, profile) {
        (NvidiaMigStrategy::Mixed, Some(profile)) => Some(format!("nvidia.com/mig-{}", profile.replace('+', "."))),
        _ => None,
    })
}

/// Return the resource name of the first pattern that matches a text.
pub fn first_match(patterns: &[ResourcePattern], text: &str) -> Option<String> {
    let mut patterns = patterns.iter();
    let found = patterns.find(|pattern| wildcard::matches(&pattern.pattern, text));
    found.map(|pattern| pattern.name.clone())
}

/// Check the conditions of the MIG strategy `single`. Unreadable GPUs are left out.
fn check_single(gpus: &[(usize, &PluginGpu)]) -> Result<(), Error> {
    let known = || gpus.iter().map(|(_, gpu)| *gpu).filter(|gpu| !gpu.unreadable);
    if known().any(|gpu| !gpu.is_divided()) {
        return Err(Error::MigOnSomeGpus);
    }
    if let Some(gpu) = known().find(|gpu| gpu.mig_devices.is_empty()) {
        return Err(Error::NoMigDevices(gpu.index));
    }
    if has_uniform_mig_devices(known().map(|gpu| (gpu.is_divided(), gpu.memory, gpu.mig_devices.as_slice()))) {
        Ok(())
    } else {
        Err(Error::SeveralMigTypes)
    }
}

/// Report whether all GPUs are divided into MIG devices of the same profile. Each GPU is given as a tuple: whether MIG is
/// enabled, the GPU's memory, and its MIG devices.
pub fn has_uniform_mig_devices<'m>(gpus: impl Iterator<Item = (bool, MiB, &'m [MigDevice])> + Clone) -> bool {
    if gpus.clone().any(|(is_divided, _, devices)| !is_divided || devices.is_empty()) {
        return false;
    }
    let mut kinds =
        gpus.flat_map(|(_, memory, devices)| devices.iter().map(move |device| (device.parts, device.profile(memory))));
    let first = kinds.next();
    kinds.all(|kind| Some(kind) == first)
}

fn whole(position: usize, gpu: &PluginGpu) -> Unit {
    Unit {
        uuid: gpu.uuid.clone(),
        index: gpu.index.to_string(),
        gpu: position,
        is_mig: false,
        replicas: None,
        healthy: gpu.healthy && !gpu.unreadable,
        numa: gpu.numa,
        nodes: node_of(gpu).into_iter().collect(),
    }
}

fn node_of(gpu: &PluginGpu) -> Option<String> {
    gpu.minor.map(|minor| format!("/dev/nvidia{minor}"))
}

fn part(position: usize, gpu: &PluginGpu, device: &MigDevice) -> Unit {
    let capabilities = device.capabilities.into_iter().flat_map(|(gi, ci)| [gi, ci]);
    let capabilities = capabilities.map(|minor| format!("/dev/nvidia-caps/nvidia-cap{minor}"));
    Unit {
        uuid: device.uuid.clone(),
        index: format!("{}:{}", gpu.index, device.index),
        gpu: position,
        is_mig: true,
        replicas: None,
        healthy: gpu.healthy && !gpu.failed_mig_devices.contains(&device.uuid),
        numa: gpu.numa,
        nodes: node_of(gpu).into_iter().chain(capabilities).collect(),
    }
}

/// Replace devices of a resource with replicas, under the resource's own name or another one.
fn share(
    config: &NvidiaConfig,
    machine: &PluginMachine,
    shared: &ReplicatedResource,
    found: &mut FoundUnits,
    warnings: &mut Vec<String>,
) -> Result<(), Error> {
    let Some(units) = found.remove(&shared.name) else {
        warnings.push(format!(
            "the configuration shares {}, but this node has no such device",
            shared.name
        ));
        return Ok(());
    };
    let (mut chosen, rest) = select(shared, machine, units, warnings);
    for unit in &mut chosen {
        unit.replicas = Some(shared.replicas);
    }
    if config.sharing.strategy == SharingStrategy::Mps {
        check_mps(shared.replicas, machine, &chosen)?;
    }
    if !rest.is_empty() {
        found.entry(shared.name.clone()).or_default().extend(rest);
    }
    if !chosen.is_empty() {
        let name = shared.rename.as_ref().unwrap_or(&shared.name);
        found.entry(name.clone()).or_default().extend(chosen);
    }
    Ok(())
}

/// Divide the devices into those that are shared and the others. A device that is missing is reported, and the others are shared: NVIDIA's
/// plugin ignores `devices`, so such a configuration may be in use.
fn select(
    shared: &ReplicatedResource,
    machine: &PluginMachine,
    units: Vec<Unit>,
    warnings: &mut Vec<String>,
) -> (Vec<Unit>, Vec<Unit>) {
    let mut missing = |text: String| {
        let unreadable = machine.gpus.iter().find(|gpu| gpu.unreadable);
        let maybe = unreadable.map_or_else(String::new, |gpu| {
            format!("; it may be GPU {}, which cannot be read", gpu.index)
        });
        warnings.push(format!("{text}{maybe}"));
    };
    match &shared.devices {
        ReplicatedDevices::All => (units, Vec::new()),
        ReplicatedDevices::Count(count) => {
            let mut chosen = units;
            let wanted = usize::try_from(*count).unwrap_or(usize::MAX);
            if wanted > chosen.len() {
                missing(format!(
                    "requested {count} devices to be replicated, but only {} devices available of {}",
                    chosen.len(),
                    shared.name
                ));
            }
            let rest = chosen.split_off(wanted.min(chosen.len()));
            (chosen, rest)
        }
        ReplicatedDevices::List(list) => {
            let is_there = |device: &&DeviceReference| units.iter().any(|unit| is_named(device, machine, unit));
            for device in list.iter().filter(|device| !is_there(device)) {
                missing(format!(
                    "the configuration shares the device {:?} of {}, which does not exist on this node",
                    text_of(device),
                    shared.name
                ));
            }
            let is_chosen = |unit: &Unit| list.iter().any(|device| is_named(device, machine, unit));
            units.into_iter().partition(is_chosen)
        }
    }
}

fn text_of(device: &DeviceReference) -> String {
    match device {
        DeviceReference::Gpu(index) => index.to_string(),
        DeviceReference::Mig(gpu, index) => format!("{gpu}:{index}"),
        DeviceReference::Uuid(uuid) => uuid.clone(),
    }
}

fn is_named(device: &DeviceReference, machine: &PluginMachine, unit: &Unit) -> bool {
    match device {
        DeviceReference::Gpu(_) | DeviceReference::Mig(..) => unit.index == text_of(device),
        DeviceReference::Uuid(uuid) => {
            *uuid == unit.uuid || (unit.is_mig && old_uuid(machine, unit).is_some_and(|old| old == *uuid))
        }
    }
}

/// Return the UUID of a MIG device in the format of drivers before R470: `MIG-GPU-…/gi/ci`.
fn old_uuid(machine: &PluginMachine, unit: &Unit) -> Option<String> {
    let gpu = machine.gpus.get(unit.gpu)?;
    let device = gpu.mig_devices.iter().find(|device| device.uuid == unit.uuid)?;
    Some(format!("MIG-{}/{}/{}", gpu.uuid, device.gi, device.ci))
}

fn check_mps(replicas: u32, machine: &PluginMachine, units: &[Unit]) -> Result<(), Error> {
    if units.iter().any(|unit| unit.is_mig) {
        return Err(Error::MpsWithMig);
    }
    let limit = |unit: &Unit| {
        let cc = machine.gpus.get(unit.gpu).and_then(|gpu| gpu.cc);
        match cc {
            Some(cc) if cc < (7, 0) => MPS_CLIENTS_BEFORE_VOLTA,
            _ => MPS_CLIENTS,
        }
    };
    match units.iter().map(limit).min() {
        Some(most) if replicas > most => Err(Error::TooManyClients { replicas, most }),
        _ => Ok(()),
    }
}

fn imex_channels(config: &NvidiaConfig, machine: &PluginMachine, warnings: &mut Vec<String>) -> Result<Vec<u32>, Error> {
    let (present, missing): (Vec<u32>, Vec<u32>) = (config.imex.channel_ids.iter())
        .copied()
        .partition(|channel| machine.device_nodes.contains(&imex_node(*channel)));
    match missing.first() {
        Some(channel) if config.imex.required => return Err(Error::NoImexChannel(*channel)),
        Some(channel) => warnings.push(format!(
            "the IMEX channel {channel} does not exist, so containers start without it"
        )),
        None => {}
    }
    Ok(present)
}

/// Return the path of an IMEX channel's device node.
pub(crate) fn imex_node(channel: u32) -> String {
    format!("/dev/nvidia-caps-imex-channels/channel{channel}")
}

impl Unit {
    /// Return the device ids that stand for this unit.
    pub(crate) fn ids(&self) -> impl Iterator<Item = String> {
        let replicas = self.replicas.into_iter().flat_map(|count| 0..count);
        let plain = self.replicas.is_none().then(|| self.uuid.clone());
        plain
            .into_iter()
            .chain(replicas.map(|number| format!("{}::{number}", self.uuid)))
    }

    /// Report whether a device id stands for this unit.
    pub(crate) fn has(&self, id: &str) -> bool {
        match (self.replicas, id.split_once("::")) {
            (None, _) => id == self.uuid,
            (Some(count), Some((uuid, number))) => {
                uuid == self.uuid
                    && number
                        .parse()
                        .is_ok_and(|parsed: u32| parsed < count && parsed.to_string() == number)
            }
            (Some(_), None) => false,
        }
    }
}

impl OfferedResource {
    /// Return the name, such as `nvidia.com/gpu`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Return the file name of the plugin's socket, such as `nvidia-gpu.sock`.
    pub fn socket(&self) -> String {
        let (prefix, name) = self.name.split_once('/').unwrap_or(("nvidia.com", &self.name));
        match prefix {
            "nvidia.com" => format!("nvidia-{name}.sock"),
            // Two resources whose names differ only in the prefix must not have one socket.
            _ => format!("nvidia-{prefix}-{name}.sock"),
        }
    }

    /// Return the devices, always in the same order.
    pub fn devices(&self) -> impl Iterator<Item = OfferedDevice> {
        self.units.iter().flat_map(|unit| {
            unit.ids().map(|id| OfferedDevice {
                id,
                healthy: unit.healthy,
                numa: unit.numa,
            })
        })
    }

    /// Report whether the devices are shared through MPS.
    pub fn uses_mps(&self) -> bool {
        self.mps
    }

    pub(crate) fn unit(&self, id: &str) -> Option<&Unit> {
        self.units.iter().find(|unit| unit.has(id))
    }
}
