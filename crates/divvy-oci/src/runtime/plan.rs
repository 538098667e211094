//! From what a container asks for to the CDI devices that it gets.

use std::collections::BTreeMap;

use divvy_model::GrantRecord;
use thiserror::Error as ThisError;

use super::request::{Container, Request, Wanted};
use super::settings::{Mode, Settings};
use super::{legacy, live};
use divvy_cdi::{self as cdi, Edits, FoundDevice, QualifiedName, Registry, Unresolved};

/// Why a container cannot have what it asks for.
#[derive(Debug, ThisError)]
pub enum Error {
    /// No spec has them.
    #[error(
        "could not apply required modification to OCI specification: error modifying OCI spec: failed to inject CDI devices: {unresolved}; {hint}"
    )]
    Unresolved {
        /// Which.
        unresolved: Unresolved,
        /// What to do.
        hint: String,
    },
    /// It cannot be the name of a device.
    #[error(
        "the container asks for a device by the name {0:?}; an index (0), a UUID (GPU-...), all, none or a CDI name (nvidia.com/gpu=0) is one"
    )]
    Name(String),
    /// Devices of this moment and devices of files.
    #[error(
        "requesting a CDI device with vendor 'runtime.nvidia.com' is not supported when requesting other CDI devices: the container asks for {0}; \
         ask for all of them by CDI names, or for none"
    )]
    Mixed(String),
    /// What `nvidia-container-cli` cannot be called for.
    #[error(transparent)]
    Legacy(#[from] legacy::Error),
    /// NVIDIA's hook is called where a hook is too late; its own sentence, with the mode.
    #[error(
        "invoking the NVIDIA Container Runtime Hook directly (e.g. specifying the docker --gpus flag) is not supported in mode {mode:?}: a hook comes when \
         the container's configuration is settled. Make divvy-runtime the engine's default runtime, which gives --gpus in every mode: sudo divvy configure \
         docker --set-default --restart (or, once: docker run --runtime nvidia ...)"
    )]
    Hook {
        /// `nvidia-container-runtime.mode`, or what `auto` is for this container.
        mode: &'static str,
    },
    /// Several grants for one container.
    #[error(
        "{grants} grants are described for container {container} of pod {uid}, and one is meant to be: divvy cdi list shows their files"
    )]
    Grants {
        /// How many.
        grants: usize,
        /// UID.
        uid: String,
        /// Its name.
        container: String,
    },
}

/// What becomes of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Plan {
    /// Its configuration is not touched.
    LeaveAlone,
    /// It gets these devices; with none of them, the driver's files alone.
    Inject {
        /// CDI names, in order.
        devices: Vec<String>,
        /// Kind of which the edits that are common to all devices are applied though no device is asked for.
        driver_of: Option<String>,
    },
}

/// What a container asks for, and what of it was not taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asked {
    /// What decides about its devices.
    pub decides: Decides,
    /// In sentences for a log.
    pub ignored: Vec<String>,
}

/// What decides about a container's devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decides {
    /// Nobody: its configuration is not touched, and nothing has to be looked at.
    Nobody,
    /// Itself: devices of the CDI specs in the spec folders.
    Specs(Plan),
    /// Itself: devices of a spec that is made now ([`super::live`]).
    Live(Plan),
    /// Itself: `nvidia-container-cli` is called for it ([`legacy::words`]).
    Legacy(Wanted),
    /// The allocation of its pod, by the CDI specs in the spec folders.
    Allocation {
        /// The pod's UID.
        uid: String,
        /// The container's name in it.
        container: String,
    },
}

/// Annotations by which containerd and CRI-O name a pod's container: UID of the pod, name of the container.
const OWNERS: [(&str, &str); 2] = [
    ("io.kubernetes.cri.sandbox-uid", "io.kubernetes.cri.container-name"),
    ("io.kubernetes.pod.uid", "io.kubernetes.container.name"),
];

impl Asked {
    /// Reads a container's request.
    ///
    /// # Errors
    /// [`Error::Name`], [`Error::Mixed`].
    pub fn of(container: &Container, settings: &Settings) -> Result<Asked, Error> {
        let Request { wanted, mut ignored } = request(container, settings);
        let decides = match (settings.mode, wanted) {
            (Mode::Divvy, wanted) => {
                if wanted != Wanted::Nothing {
                    ignored.push(
                        "What the container asks for by itself is not looked at: in mode \"divvy\" it gets what its pod was allocated"
                            .to_owned(),
                    );
                }
                by_allocation(container)
            }
            (_, Wanted::Nothing) => Decides::Nobody,
            (Mode::Legacy, wanted) => Decides::Legacy(wanted),
            (Mode::Auto | Mode::Cdi | Mode::JitCdi, wanted) => live_or_specs(wanted, settings)?,
        };
        Ok(Asked { decides, ignored })
    }
}

/// What NVIDIA's program is to be called for where its hook is called by itself, as by Docker's `--gpus` in front of runc; none if nothing is asked for.
/// In mode `auto` this is `legacy` but for CDI names, as NVIDIA's hook has it.
///
/// # Errors
/// [`Error::Hook`]
pub fn by_hook(container: &Container, settings: &Settings) -> Result<(Option<Wanted>, Vec<String>), Error> {
    let as_legacy = Settings {
        mode: Mode::Legacy,
        ..settings.clone()
    };
    let Request { wanted, ignored } = request(container, &as_legacy);
    let of_cdi = matches!(&wanted, Wanted::Devices(names) if names.iter().all(|name| is_qualified(name)));
    let mode = match settings.mode {
        _ if wanted == Wanted::Nothing => return Ok((None, ignored)),
        _ if settings.skip_mode_detection => None,
        Mode::Legacy => None,
        Mode::Auto if !of_cdi => None,
        Mode::Auto | Mode::Cdi => Some("cdi"),
        Mode::JitCdi => Some("jit-cdi"),
        Mode::Divvy => Some("divvy"),
    };
    match mode {
        Some(mode) => Err(Error::Hook { mode }),
        None => Ok((Some(wanted), ignored)),
    }
}

fn request(container: &Container, settings: &Settings) -> Request {
    let request = Request::of(container, settings);
    // As NVIDIA's: annotations count only where all that is asked for is a CDI name.
    let annotations_count = match (settings.mode, &request.wanted) {
        (Mode::Divvy | Mode::Cdi, _) => true,
        (Mode::Auto | Mode::JitCdi, Wanted::Devices(names)) => names.iter().all(|name| is_qualified(name)),
        _ => false,
    };
    if annotations_count {
        return request;
    }
    let without = Settings {
        annotation_prefixes: Vec::new(),
        ..settings.clone()
    };
    Request::of(container, &without)
}

/// As NVIDIA's runtime decides: what is asked for by CDI names comes from CDI specs, the rest from the driver, now; in mode cdi the rest comes from
/// specs, too. A default kind of another vendor is in specs only. What goes by the driver's own kind is of now in each mode.
fn live_or_specs(wanted: Wanted, settings: &Settings) -> Result<Decides, Error> {
    let kind = settings.default_kind.as_str();
    let others_are_live = kind == live::KIND || settings.mode != Mode::Cdi && kind == cdi::NVIDIA_KIND;
    let Wanted::Devices(names) = &wanted else {
        return Ok(match others_are_live {
            true => Decides::Live(plan(wanted, live::KIND)?),
            false => Decides::Specs(plan(wanted, kind)?),
        });
    };
    let of_kind = |name: &str, kind: &str| name.strip_prefix(kind).is_some_and(|rest| rest.starts_with('='));
    // In mode jit-cdi nvidia.com/gpu=0 is the GPU 0 of now, too, so that nothing stale is ever taken.
    let is_live = |name: &str| {
        let by_kind = of_kind(name, live::KIND) || settings.mode == Mode::JitCdi && of_kind(name, cdi::NVIDIA_KIND);
        by_kind || others_are_live && !is_qualified(name)
    };
    let (now, written): (Vec<&String>, Vec<&String>) = names.iter().partition(|name| is_live(name));
    match (now.is_empty(), written.is_empty()) {
        (true, _) => Ok(Decides::Specs(plan(wanted, kind)?)),
        (false, false) => Err(Error::Mixed(names.join(",").chars().take(200).collect())),
        (false, true) => {
            let own = |name: &String| match name.strip_prefix(cdi::NVIDIA_KIND) {
                Some(rest) if rest.starts_with('=') => format!("{}{rest}", live::KIND),
                _ => name.clone(),
            };
            Ok(Decides::Live(plan(
                Wanted::Devices(names.iter().map(own).collect()),
                live::KIND,
            )?))
        }
    }
}

fn plan(wanted: Wanted, kind: &str) -> Result<Plan, Error> {
    let (devices, driver_of) = match wanted {
        Wanted::Nothing => return Ok(Plan::LeaveAlone),
        Wanted::All => (vec![format!("{kind}=all")], None),
        Wanted::DriverOnly => (Vec::new(), Some(kind.to_owned())),
        Wanted::Devices(names) => (
            names.iter().map(|name| full_name(name, kind)).collect::<Result<_, _>>()?,
            None,
        ),
    };
    Ok(Plan::Inject { devices, driver_of })
}

fn by_allocation(container: &Container) -> Decides {
    let annotations: &BTreeMap<String, String> = &container.annotations;
    let pod = OWNERS.iter().find_map(|(uid, name)| {
        Some(Decides::Allocation {
            uid: annotations.get(*uid)?.clone(),
            container: annotations.get(*name)?.clone(),
        })
    });
    pod.unwrap_or(Decides::Nobody)
}

/// What a pod's container was allocated, by the specs of grants.
///
/// # Errors
/// [`Error::Grants`] if several grants are described for it.
pub fn allocation(uid: &str, container: &str, registry: &Registry) -> Result<Plan, Error> {
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
        0 => Ok(Plan::LeaveAlone),
        1 => Ok(Plan::Inject {
            devices: names,
            driver_of: None,
        }),
        grants => Err(Error::Grants {
            grants,
            uid: uid.to_owned(),
            container: container.to_owned(),
        }),
    }
}

/// The edits of a plan, in the order of injection.
///
/// # Errors
/// [`Error::Unresolved`] names all devices that no spec has.
pub fn edits(plan: &Plan, registry: &Registry) -> Result<Edits, Error> {
    let Plan::Inject { devices, driver_of } = plan else {
        return Ok(Edits::default());
    };
    let mut devices = devices.clone();
    let mut all = Edits::default();
    if let Some(kind) = driver_of {
        let none = format!("{kind}=none");
        // NVIDIA's own runtime asks for a device of that name, which no generator writes.
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

/// One list of edits after another: unlike [`Edits::merge`], the later wins, as it does in an engine.
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

/// With what is there in place of it.
fn unresolved(unresolved: Unresolved, registry: &Registry) -> Error {
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
        "no CDI spec on this machine describes a device: divvy cdi generate --output /etc/cdi/nvidia.yaml".to_owned()
    } else {
        format!(
            "this machine's CDI specs have {}; divvy cdi list shows where from",
            shortened(&devices)
        )
    };
    Error::Unresolved { unresolved, hint }
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

fn full_name(name: &str, kind: &str) -> Result<String, Error> {
    if is_qualified(name) {
        return Ok(name.to_owned());
    }
    let full = format!("{kind}={name}");
    match is_qualified(&full) {
        true => Ok(full),
        false => Err(Error::Name(name.chars().take(100).collect())),
    }
}
