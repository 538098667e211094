//! The step from a container's request to the CDI devices that the container gets.

use std::collections::BTreeMap;

use divvy_model::GrantRecord;
use thiserror::Error as ThisError;

pub use super::devices::DevicePlan;
use super::request::{DeviceRequest, RequestingContainer, WantedDevices};
use super::settings::{OciRuntimeSettings, RuntimeMode};
use super::{legacy, live};
use divvy_cdi::{self as cdi, Edits, FoundDevice, QualifiedName, Registry, Unresolved};

/// A reason why a container cannot get what it requests.
#[derive(Debug, ThisError)]
pub enum DevicePlanError {
    /// No CDI spec describes some of the devices. The text is NVIDIA's, with a hint added.
    #[error(
        "could not apply required modification to OCI specification: error modifying OCI spec: failed to inject CDI devices: {unresolved}; {hint}"
    )]
    Unresolved {
        /// The names of the missing devices.
        unresolved: Unresolved,
        /// Advice: which devices exist, or which command to run.
        hint: String,
    },
    /// A requested name cannot be the name of a device.
    #[error(
        "the container requests a device named {0:?}; use an index (0), a UUID (GPU-...), all, none, or a CDI name (nvidia.com/gpu=0)"
    )]
    Name(String),
    /// The request mixes devices that the driver reports now with devices from spec files.
    #[error(
        "requesting a CDI device with vendor 'runtime.nvidia.com' is not supported when requesting other CDI devices: the container requests {0}; \
         use CDI names for all of them, or for none"
    )]
    Mixed(String),
    /// `nvidia-container-cli` cannot be called for this request.
    #[error(transparent)]
    Legacy(#[from] legacy::LegacyError),
    /// NVIDIA's hook is called in a mode that must change the configuration before hooks run. The text up to the mode is NVIDIA's.
    #[error(
        "invoking the NVIDIA Container Runtime Hook directly (e.g. specifying the docker --gpus flag) is not supported in mode {mode:?}: a hook runs after \
         the container's configuration is final. Make divvy-runtime the engine's default runtime, which supports --gpus in every mode: sudo divvy configure \
         docker --set-default --restart (or, for one container: docker run --runtime nvidia ...)"
    )]
    Hook {
        /// The value of `nvidia-container-runtime.mode`, or the mode that `auto` selects for this container.
        mode: &'static str,
    },
    /// The CDI specs describe several grants for one container.
    #[error(
        "the CDI specs describe {grants} grants for container {container} of pod {uid}, but a container has one grant; find their files with divvy cdi list"
    )]
    Grants {
        /// The number of grants, at least 2.
        grants: usize,
        /// The pod's UID.
        uid: String,
        /// The container's name in the pod.
        container: String,
    },
}

/// What was decided about a container's request, and which parts of the request are ignored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DecidedRequest {
    /// The source of the container's devices.
    pub decides: Decides,
    /// Sentences for the log about ignored parts of the request.
    pub ignored: Vec<String>,
}

/// The source of a container's devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decides {
    /// No source. The configuration is not changed, and no spec needs to be read.
    Nobody,
    /// The container's request, resolved with the CDI specs in the spec directories.
    Specs(DevicePlan),
    /// The container's request, resolved with a spec that is generated now ([`super::live`]).
    Live(DevicePlan),
    /// The container's request, handled by `nvidia-container-cli` ([`legacy::words`]).
    Legacy(WantedDevices),
    /// The pod's grant, found in the CDI specs in the spec directories.
    Allocation {
        /// The pod's UID.
        uid: String,
        /// The container's name in the pod.
        container: String,
    },
}

/// The annotations in which containerd and CRI-O store the pod's UID and the container's name.
const OWNERS: [(&str, &str); 2] = [
    ("io.kubernetes.cri.sandbox-uid", "io.kubernetes.cri.container-name"),
    ("io.kubernetes.pod.uid", "io.kubernetes.container.name"),
];

impl DecidedRequest {
    /// Decide where a container's devices come from.
    ///
    /// # Errors
    /// Fails with [`DevicePlanError::Name`] or [`DevicePlanError::Mixed`].
    pub fn of(container: &RequestingContainer, settings: &OciRuntimeSettings) -> Result<DecidedRequest, DevicePlanError> {
        let DeviceRequest { wanted, mut ignored } = request(container, settings);
        let decides = match (settings.mode, wanted) {
            (RuntimeMode::Divvy, wanted) => {
                if wanted != WantedDevices::Nothing {
                    ignored.push(
                        "The container's own GPU request is ignored: in mode \"divvy\" it gets what its pod was allocated"
                            .to_owned(),
                    );
                }
                by_allocation(container)
            }
            (_, WantedDevices::Nothing) => Decides::Nobody,
            (RuntimeMode::Legacy, wanted) => Decides::Legacy(wanted),
            (RuntimeMode::Auto | RuntimeMode::Cdi | RuntimeMode::JitCdi, wanted) => live_or_specs(wanted, settings)?,
        };
        Ok(DecidedRequest { decides, ignored })
    }
}

/// Return what NVIDIA's program must do when an engine calls the hook directly, as Docker does with runc for `--gpus`. The result
/// is `None` if the container requests nothing. As in NVIDIA's hook, mode `auto` acts as `legacy` unless all devices have CDI
/// names.
///
/// # Errors
/// [`DevicePlanError::Hook`] if the mode does not allow a direct call.
pub fn by_hook(
    container: &RequestingContainer,
    settings: &OciRuntimeSettings,
) -> Result<(Option<WantedDevices>, Vec<String>), DevicePlanError> {
    let as_legacy = OciRuntimeSettings {
        mode: RuntimeMode::Legacy,
        ..settings.clone()
    };
    let DeviceRequest { wanted, ignored } = request(container, &as_legacy);
    let of_cdi = matches!(&wanted, WantedDevices::Devices(names) if names.iter().all(|name| is_qualified(name)));
    let mode = match settings.mode {
        _ if wanted == WantedDevices::Nothing => return Ok((None, ignored)),
        _ if settings.skip_mode_detection => None,
        RuntimeMode::Legacy => None,
        RuntimeMode::Auto if !of_cdi => None,
        RuntimeMode::Auto | RuntimeMode::Cdi => Some("cdi"),
        RuntimeMode::JitCdi => Some("jit-cdi"),
        RuntimeMode::Divvy => Some("divvy"),
    };
    match mode {
        Some(mode) => Err(DevicePlanError::Hook { mode }),
        None => Ok((Some(wanted), ignored)),
    }
}

fn request(container: &RequestingContainer, settings: &OciRuntimeSettings) -> DeviceRequest {
    let request = DeviceRequest::of(container, settings);
    // As in NVIDIA's runtime, annotations count only if every requested device has a CDI name.
    let annotations_count = match (settings.mode, &request.wanted) {
        (RuntimeMode::Divvy | RuntimeMode::Cdi, _) => true,
        (RuntimeMode::Auto | RuntimeMode::JitCdi, WantedDevices::Devices(names)) => names.iter().all(|name| is_qualified(name)),
        _ => false,
    };
    if annotations_count {
        return request;
    }
    let without = OciRuntimeSettings {
        annotation_prefixes: Vec::new(),
        ..settings.clone()
    };
    DeviceRequest::of(container, &without)
}

/// Decide between CDI specs and the driver, as NVIDIA's runtime does. Devices with CDI names come from CDI specs. Other devices
/// come from the driver, except in mode `cdi`, where they come from specs. If the default kind belongs to another vendor, its
/// devices always come from specs. Devices of kind [`live::KIND`] always come from the driver.
fn live_or_specs(wanted: WantedDevices, settings: &OciRuntimeSettings) -> Result<Decides, DevicePlanError> {
    let kind = settings.default_kind.as_str();
    let others_are_live = kind == live::KIND || settings.mode != RuntimeMode::Cdi && kind == cdi::NVIDIA_KIND;
    let WantedDevices::Devices(names) = &wanted else {
        return Ok(if others_are_live {
            Decides::Live(plan(wanted, live::KIND)?)
        } else {
            Decides::Specs(plan(wanted, kind)?)
        });
    };
    let of_kind = |name: &str, kind: &str| name.strip_prefix(kind).is_some_and(|rest| rest.starts_with('='));
    // In mode jit-cdi, nvidia.com/gpu=0 also means the GPU that the driver reports as 0 now, so a stale spec is never used.
    let is_live = |name: &str| {
        let by_kind = of_kind(name, live::KIND) || settings.mode == RuntimeMode::JitCdi && of_kind(name, cdi::NVIDIA_KIND);
        by_kind || others_are_live && !is_qualified(name)
    };
    let (now, written): (Vec<&String>, Vec<&String>) = names.iter().partition(|name| is_live(name));
    match (now.is_empty(), written.is_empty()) {
        (true, _) => Ok(Decides::Specs(plan(wanted, kind)?)),
        (false, false) => Err(DevicePlanError::Mixed(names.join(",").chars().take(200).collect())),
        (false, true) => {
            let own = |name: &String| match name.strip_prefix(cdi::NVIDIA_KIND) {
                Some(rest) if rest.starts_with('=') => format!("{}{rest}", live::KIND),
                _ => name.clone(),
            };
            Ok(Decides::Live(plan(
                WantedDevices::Devices(names.iter().map(own).collect()),
                live::KIND,
            )?))
        }
    }
}

fn plan(wanted: WantedDevices, kind: &str) -> Result<DevicePlan, DevicePlanError> {
    let (devices, driver_of) = match wanted {
        WantedDevices::Nothing => return Ok(DevicePlan::LeaveAlone),
        WantedDevices::All => (vec![format!("{kind}=all")], None),
        WantedDevices::DriverOnly => (Vec::new(), Some(kind.to_owned())),
        WantedDevices::Devices(names) => (
            names.iter().map(|name| full_name(name, kind)).collect::<Result<_, _>>()?,
            None,
        ),
    };
    Ok(DevicePlan::Inject { devices, driver_of })
}

fn by_allocation(container: &RequestingContainer) -> Decides {
    let annotations: &BTreeMap<String, String> = &container.annotations;
    let pod = OWNERS.iter().find_map(|(uid, name)| {
        Some(Decides::Allocation {
            uid: annotations.get(*uid)?.clone(),
            container: annotations.get(*name)?.clone(),
        })
    });
    pod.unwrap_or(Decides::Nobody)
}

/// Return the device that a pod's container was granted, according to the grant records in the CDI specs. A container without a
/// grant is left unchanged.
///
/// # Errors
/// [`DevicePlanError::Grants`] if the specs describe several grants for the container.
pub fn allocation(uid: &str, container: &str, registry: &Registry) -> Result<DevicePlan, DevicePlanError> {
    let specs = registry
        .files()
        .iter()
        .filter_map(|file| file.usable())
        .filter(|spec| spec.kind == divvy_model::names::CDI_KIND);
    let of_it = |spec: &&cdi::Spec| {
        let record = spec.owner().and_then(|text| GrantRecord::parse(text).ok());
        record.is_some_and(|record| record.uid == uid && record.container == container)
    };
    let names: Vec<String> = specs
        .filter(of_it)
        .flat_map(|spec| spec.devices.iter().map(|device| cdi::qualified_name(&device.name)))
        .collect();
    match names.len() {
        0 => Ok(DevicePlan::LeaveAlone),
        1 => Ok(DevicePlan::Inject {
            devices: names,
            driver_of: None,
        }),
        grants => Err(DevicePlanError::Grants {
            grants,
            uid: uid.to_owned(),
            container: container.to_owned(),
        }),
    }
}

/// Collect the edits of a plan in the order of injection.
///
/// # Errors
/// Fails with [`DevicePlanError::Unresolved`], which lists all devices that no spec describes.
pub fn edits(plan: &DevicePlan, registry: &Registry) -> Result<Edits, DevicePlanError> {
    let DevicePlan::Inject { devices, driver_of } = plan else {
        return Ok(Edits::default());
    };
    let mut devices = devices.clone();
    let mut all = Edits::default();
    if let Some(kind) = driver_of {
        let none = format!("{kind}=none");
        // NVIDIA's runtime requests a device of that name, although no generator writes it into a spec.
        if registry.spec_of(&none).is_some() {
            devices.push(none);
        } else {
            let of_kind = registry
                .files()
                .iter()
                .rev()
                .filter_map(|file| file.usable())
                .find(|spec| spec.kind == *kind);
            let Some(spec) = of_kind else {
                return Err(unresolved(Unresolved(vec![none]), registry));
            };
            join(&mut all, &spec.container_edits);
        }
    }
    let names: Vec<&str> = devices.iter().map(String::as_str).collect();
    for part in registry.edits(&names).map_err(|missing| unresolved(missing, registry))? {
        join(&mut all, part);
    }
    Ok(all)
}

/// Append later edits to earlier ones. Unlike [`Edits::merge`], later edits win, as they do in a container engine.
fn join(all: &mut Edits, later: &Edits) {
    all.env.extend(later.env.iter().cloned());
    all.device_nodes.extend(later.device_nodes.iter().cloned());
    all.net_devices.extend(later.net_devices.iter().cloned());
    all.hooks.extend(later.hooks.iter().cloned());
    all.mounts.extend(later.mounts.iter().cloned());
    all.additional_gids.extend(later.additional_gids.iter().copied());
    if later.intel_rdt.is_some() {
        all.intel_rdt.clone_from(&later.intel_rdt);
    }
}

/// Build the error for missing devices, with a hint that lists the devices that exist.
fn unresolved(unresolved: Unresolved, registry: &Registry) -> DevicePlanError {
    let devices = registry.devices();
    let conflict = devices
        .iter()
        .find(|device| unresolved.0.contains(&device.name) && !device.conflicts_with.is_empty());
    let hint = if let Some(device) = conflict {
        format!(
            "{} is described by both {} and {}: remove one",
            device.name,
            device.file.path,
            device.conflicts_with.join(", ")
        )
    } else if devices.iter().any(|device| device.name.starts_with(live::KIND)) {
        format!("this machine's GPUs are {}", shortened(&devices))
    } else if devices.is_empty() {
        "no CDI spec on this machine describes a device; run divvy cdi generate --output /etc/cdi/nvidia.yaml".to_owned()
    } else {
        format!(
            "this machine's CDI specs have {}; find their files with divvy cdi list",
            shortened(&devices)
        )
    };
    DevicePlanError::Unresolved { unresolved, hint }
}

fn shortened(devices: &[FoundDevice<'_>]) -> String {
    let mut names: Vec<&str> = devices.iter().map(|device| device.name.as_str()).collect();
    names.dedup();
    let more = names.len().saturating_sub(8);
    names.truncate(8);
    let more = if more > 0 {
        format!(" and {more} more")
    } else {
        String::new()
    };
    format!("{}{more}", names.join(", "))
}

fn is_qualified(name: &str) -> bool {
    name.parse::<QualifiedName>().is_ok()
}

fn full_name(name: &str, kind: &str) -> Result<String, DevicePlanError> {
    if is_qualified(name) {
        return Ok(name.to_owned());
    }
    let full = format!("{kind}={name}");
    if is_qualified(&full) {
        Ok(full)
    } else {
        Err(DevicePlanError::Name(name.chars().take(100).collect()))
    }
}
