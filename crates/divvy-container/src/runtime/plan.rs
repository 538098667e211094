//! From what a container asks for to the CDI devices that it gets.

use std::collections::BTreeMap;

use divvy_model::GrantRecord;
use thiserror::Error as ThisError;

use super::request::{Container, Request, Wanted};
use super::settings::{Mode, Settings};
use crate::cdi::{self, Edits, QualifiedName, Registry, Unresolved};

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
    /// A mode that needs NVIDIA's own programs.
    #[error(
        "nvidia-container-runtime.mode is {0:?}, which this version of divvy-runtime does not do; set it to \"auto\", which takes the devices \
         from CDI specs, and write one: divvy cdi generate --output /etc/cdi/nvidia.yaml"
    )]
    Mode(&'static str),
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
    decides: Decides,
    /// In sentences for a log.
    pub ignored: Vec<String>,
}

/// What decides about its devices.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Decides {
    /// Itself.
    Request(Plan),
    /// The allocation of its pod.
    Allocation { uid: String, container: String },
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
    /// [`Error::Name`], [`Error::Mode`].
    pub fn of(container: &Container, settings: &Settings) -> Result<Asked, Error> {
        let request = Request::of(container, settings);
        let request = match settings.mode {
            Mode::Divvy => return Ok(Asked::by_allocation(container, &request)),
            Mode::Cdi => request,
            // As NVIDIA's: annotations count only where all that is asked for is a CDI name.
            Mode::Auto | Mode::JitCdi | Mode::Legacy => match &request.wanted {
                Wanted::Devices(names) if names.iter().all(|name| is_qualified(name)) => request,
                _ => Request::of(
                    container,
                    &Settings {
                        annotation_prefixes: Vec::new(),
                        ..settings.clone()
                    },
                ),
            },
        };
        if request.wanted != Wanted::Nothing {
            match settings.mode {
                Mode::Legacy => return Err(Error::Mode("legacy")),
                Mode::JitCdi => return Err(Error::Mode("jit-cdi")),
                Mode::Auto | Mode::Cdi | Mode::Divvy => {}
            }
        }
        let kind = &settings.default_kind;
        let (devices, driver_of) = match request.wanted {
            Wanted::Nothing => {
                return Ok(Asked {
                    decides: Decides::Request(Plan::LeaveAlone),
                    ignored: request.ignored,
                });
            }
            Wanted::All => (vec![format!("{kind}=all")], None),
            Wanted::DriverOnly => (Vec::new(), Some(kind.clone())),
            Wanted::Devices(names) => (
                names.iter().map(|name| full_name(name, kind)).collect::<Result<_, _>>()?,
                None,
            ),
        };
        Ok(Asked {
            decides: Decides::Request(Plan::Inject { devices, driver_of }),
            ignored: request.ignored,
        })
    }

    fn by_allocation(container: &Container, request: &Request) -> Asked {
        let annotations: &BTreeMap<String, String> = &container.annotations;
        let pod = OWNERS.iter().find_map(|(uid, name)| {
            Some(Decides::Allocation {
                uid: annotations.get(*uid)?.clone(),
                container: annotations.get(*name)?.clone(),
            })
        });
        let mut ignored = request.ignored.clone();
        if request.wanted != Wanted::Nothing {
            ignored.push(
                "What the container asks for by itself is not looked at: in mode \"divvy\" it gets what its pod was allocated"
                    .to_owned(),
            );
        }
        Asked {
            decides: pod.unwrap_or(Decides::Request(Plan::LeaveAlone)),
            ignored,
        }
    }

    /// Whether that is known without a look at the machine's CDI specs.
    pub fn leaves_alone(&self) -> bool {
        self.decides == Decides::Request(Plan::LeaveAlone)
    }

    /// What the container gets, once the specs are known.
    ///
    /// # Errors
    /// [`Error::Grants`] if several grants are described for it.
    pub fn plan(&self, registry: &Registry) -> Result<Plan, Error> {
        let (uid, container) = match &self.decides {
            Decides::Request(plan) => return Ok(plan.clone()),
            Decides::Allocation { uid, container } => (uid, container),
        };
        let specs = registry
            .files()
            .iter()
            .filter_map(|file| file.usable())
            .filter(|spec| spec.kind == divvy_model::names::CDI_KIND);
        let of_it = |spec: &&cdi::Spec| {
            let record = spec.owner().and_then(|text| GrantRecord::parse(text).ok());
            record.is_some_and(|record| record.uid == *uid && record.container == *container)
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
                uid: uid.clone(),
                container: container.clone(),
            }),
        }
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
    } else if devices.is_empty() {
        "no CDI spec on this machine describes a device: divvy cdi generate --output /etc/cdi/nvidia.yaml".to_owned()
    } else {
        let mut names: Vec<&str> = devices.iter().map(|device| device.name.as_str()).collect();
        names.dedup();
        let more = names.len().saturating_sub(8);
        names.truncate(8);
        let more = if more > 0 {
            format!(" and {more} more")
        } else {
            String::new()
        };
        format!(
            "this machine's CDI specs have {}{more}; divvy cdi list shows where from",
            names.join(", ")
        )
    };
    Error::Unresolved { unresolved, hint }
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
