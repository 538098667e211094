//! Generates a CDI spec from a machine's files and GPUs.
//!
//! This module runs no program and loads no library: [`Tree`] provides the files, and [`nvidia::NvidiaGpu`] has what the driver reports about a GPU.
//!
//! A spec has no hooks, unless [`GenerateOptions::hook`] requests one. Mounts do what NVIDIA's hooks do in a container: each library is mounted under every
//! name that programs load it by, and in the directories that the loaders of Debian and of Red Hat search. Therefore a loader finds the library
//! without an update of `ld.so.cache`.
//!
//! A spec does not have the numbers and modes of device nodes, because the major numbers of `nvidia-uvm` and `nvidia-caps` may change with a reboot.
//! The container runtime reads them from the node when a container starts.

pub mod amd;
mod extras;
mod files;
pub mod intel;
pub mod ldcache;
mod libraries;
pub mod nvidia;
mod nvidia_gpu;
pub mod parts;
pub mod proc;
pub mod wsl;

use std::collections::BTreeMap;

use thiserror::Error as ThisError;

use super::name::{check_class, check_device, check_vendor};
use super::{CdiSpecDevice, CdiVersion, DeviceNode, Edits, NameError, Spec, SpecProblem};

use divvy_host::{FileKind, Root, Tree};
pub use extras::{Channels, Extras};

/// A naming scheme for devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Naming {
    /// By index: `0`, or `0:1` for a MIG device.
    Index,
    /// By UUID: `GPU-…` or `MIG-…`.
    Uuid,
    /// By type and index: `gpu0` or `mig0:1`.
    TypeIndex,
}

/// Options for the generated spec.
#[derive(Debug, Clone)]
pub struct GenerateOptions {
    /// The vendor of the kind, such as `nvidia.com`.
    pub vendor: String,
    /// The class of the kind, such as `gpu`.
    pub class: String,
    /// The naming schemes. Each device has one name of each scheme.
    pub naming: Vec<Naming>,
    /// The devices to include, by index or UUID. Empty or `all` includes all devices. `none` yields one device `none`, which has only the driver's
    /// files.
    pub only: Vec<String>,
    /// Whether to add the device `all`, which has the edits of all devices.
    pub all: bool,
    /// Whether a container joins the group of each device node that only members of this group may open.
    pub groups: bool,
    /// The newest CDI version that readers understand. Features of later versions are left out.
    pub newest: CdiVersion,
    /// The directory in which the driver is installed: `/`, or the mounted root of a driver container.
    pub driver_root: String,
    /// The directory that contains `dev`; `None` selects the driver's root if it has device nodes, otherwise `/`.
    pub dev_root: Option<String>,
    /// The absolute path of `divvy-hook` on the machine, for a hook that adds the libraries to the container's own `ld.so.cache`. It is for images
    /// whose loader does not search the usual directories. Only for NVIDIA's specs.
    pub hook: Option<String>,
    /// What containers get in addition to GPUs. Only for NVIDIA's specs.
    pub extras: Extras,
}

impl GenerateOptions {
    /// Return the default options for a vendor.
    pub fn new(vendor: &str) -> GenerateOptions {
        GenerateOptions {
            vendor: vendor.to_owned(),
            class: "gpu".to_owned(),
            naming: vec![Naming::Index, Naming::Uuid],
            only: Vec::new(),
            all: true,
            groups: true,
            newest: CdiVersion::V1_1_0,
            driver_root: "/".to_owned(),
            dev_root: None,
            hook: None,
            extras: Extras::default(),
        }
    }
}

/// A generated spec with its notes.
#[derive(Debug, Clone, PartialEq)]
pub struct Generated {
    /// The spec. It is valid, and has the lowest CDI version that it needs.
    pub spec: Spec,
    /// Messages for the administrator about what was left out or looks wrong, one sentence each.
    pub notes: Vec<String>,
}

/// Why a spec cannot be generated.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
pub enum GenerateError {
    /// The directory of an option does not exist on the machine.
    #[error("there is no directory {path} on this machine; {flag} specifies {what}")]
    NoRoot {
        /// The path that was given.
        path: String,
        /// The command-line flag for it.
        flag: &'static str,
        /// The meaning of the flag.
        what: &'static str,
    },
    /// The driver is not installed, or it is in another directory.
    #[error("{0}")]
    NoDriver(String),
    /// There is no GPU that a container can use.
    #[error("{0}")]
    NoGpu(String),
    /// A requested IMEX channel does not exist. Contains the path of its device node.
    #[error(
        "the requested IMEX channel {0} does not exist; create it with nvidia-modprobe, which works once /proc/devices has its major number \
         (nvidia-caps-imex-channels, from driver 550 on), or request an existing channel"
    )]
    NoChannel(String),
    /// The vendor or the class is not valid.
    #[error(transparent)]
    Name(#[from] NameError),
    /// [`GenerateOptions::newest`] lacks a feature that the spec cannot do without.
    #[error("CDI {wanted} cannot express this spec: {field} has {what}, which is new in {needed}; allow at least {needed}")]
    Version {
        /// The newest version that is allowed.
        wanted: CdiVersion,
        /// The version that is needed.
        needed: CdiVersion,
        /// The field that uses the feature.
        field: String,
        /// The feature.
        what: &'static str,
    },
    /// The libraries are of another version than the loaded driver: a new driver was installed, and the machine was not yet rebooted.
    #[error("driver {driver} is loaded, but the libraries at {driver_root} are of {found}: load the new module, or reboot")]
    OtherDriver {
        /// The version of the loaded driver.
        driver: String,
        /// Where the libraries are.
        driver_root: String,
        /// The version of the libraries.
        found: String,
    },
    /// The spec would be invalid, for example because a file has a name that CDI cannot express.
    #[error("the generated spec is not valid: {0}")]
    Invalid(String),
}

/// A device of the spec under construction.
#[derive(Debug, Clone, Default)]
struct DraftDevice {
    /// The device's name by index.
    index: String,
    /// The device's name that stays the same when the order of GPUs changes.
    uuid: Option<String>,
    edits: Edits,
    /// Whether the device `all` includes this device.
    in_all: bool,
}

/// The result of a vendor's module: everything that becomes the spec.
#[derive(Debug, Clone, Default)]
struct Draft {
    common: Edits,
    items: Vec<DraftDevice>,
    driver: Option<String>,
    notes: Vec<String>,
}

/// The only edit of the device `none`, as in NVIDIA's specs: CDI does not allow a device without edits.
const NONE: &str = "NVCT_EMPTY_DEVICE=";

impl Draft {
    /// Keep only the requested devices, see [`GenerateOptions::only`].
    fn keep(&mut self, only: &[String]) -> Result<(), GenerateError> {
        if only.iter().any(|id| id == "none") {
            let mut none = DraftDevice {
                index: "none".to_owned(),
                ..DraftDevice::default()
            };
            none.edits.env.push(NONE.to_owned());
            self.items = vec![none];
            return Ok(());
        }
        if only.is_empty() || only.iter().any(|id| id == "all") {
            return Ok(());
        }
        let is = |item: &DraftDevice, id: &String| item.index == *id || item.uuid.as_ref() == Some(id);
        if let Some(id) = only.iter().find(|id| !self.items.iter().any(|item| is(item, id))) {
            let there: Vec<&str> = self.items.iter().map(|item| item.index.as_str()).collect();
            return Err(GenerateError::NoGpu(format!(
                "there is no device {id:?} on this machine; the indices are {}, and the UUID of a GPU works as well",
                there.join(", ")
            )));
        }
        self.items.retain(|item| only.iter().any(|id| is(item, id)));
        Ok(())
    }

    /// Assemble, shrink, and validate the spec.
    fn finish(mut self, options: &GenerateOptions) -> Result<Generated, GenerateError> {
        check_vendor(&options.vendor)?;
        check_class(&options.class)?;
        self.keep(&options.only)?;
        tidy(&mut self.common);
        let mut devices: Vec<CdiSpecDevice> = Vec::new();
        let mut all = Edits::default();
        for item in &mut self.items {
            tidy(&mut item.edits);
            without(&mut item.edits, &self.common);
            if item.in_all {
                all.merge(&item.edits);
            }
            for name in names(item, &options.naming) {
                if check_device(&name).is_err() {
                    self.notes
                        .push(format!("the device {name:?} is left out: CDI does not allow this name"));
                    continue;
                }
                // Partitions of one card share the card's ID: the device of this name has all partitions.
                match devices.iter_mut().find(|device| device.name == name) {
                    Some(device) => device.container_edits.merge(&item.edits),
                    None => devices.push(CdiSpecDevice {
                        name,
                        container_edits: item.edits.clone(),
                        ..CdiSpecDevice::default()
                    }),
                }
            }
        }
        tidy(&mut all);
        if options.all && !all.is_empty() && devices.iter().all(|device| device.name != "all") {
            devices.push(CdiSpecDevice {
                name: "all".to_owned(),
                container_edits: all,
                ..CdiSpecDevice::default()
            });
        }
        if !options.groups {
            let edits = devices.iter_mut().map(|device| &mut device.container_edits);
            edits
                .chain([&mut self.common])
                .for_each(|edits| edits.additional_gids.clear());
        }
        let annotations = self
            .driver
            .map(|version| (crate::driver_version::DRIVER_VERSION.to_owned(), version));
        let mut spec = Spec {
            kind: format!("{}/{}", options.vendor, options.class),
            annotations: BTreeMap::from_iter(annotations),
            devices,
            container_edits: self.common,
            ..Spec::default()
        };
        fit(&mut spec, options.newest, &mut self.notes)?;
        spec.cdi_version = CdiVersion::least_for(&spec).to_string();
        match spec.problems().iter().map(SpecProblem::to_string).next() {
            Some(problem) => Err(GenerateError::Invalid(problem)),
            None => Ok(Generated { spec, notes: self.notes }),
        }
    }
}

fn names(item: &DraftDevice, naming: &[Naming]) -> Vec<String> {
    let name = |naming: &Naming| match naming {
        Naming::Index => Some(item.index.clone()),
        Naming::Uuid => item.uuid.clone(),
        Naming::TypeIndex if item.index.contains(':') => Some(format!("mig{}", item.index)),
        Naming::TypeIndex => Some(format!("gpu{}", item.index)),
    };
    let mut names: Vec<String> = naming.iter().filter_map(name).collect();
    names.dedup();
    // With naming by UUID only, a device without a UUID keeps its index as its name.
    if names.is_empty() {
        names.push(item.index.clone());
    }
    names
}

/// Sort the lists and remove duplicates, so that the same machine always has the same spec.
fn tidy(edits: &mut Edits) {
    edits.env.sort();
    edits.env.dedup();
    edits.device_nodes.sort_by(|a, b| a.path.cmp(&b.path));
    edits.device_nodes.dedup_by(|a, b| a.path == b.path);
    edits.mounts.sort_by(|a, b| a.container_path.cmp(&b.container_path));
    edits.mounts.dedup_by(|a, b| a.container_path == b.container_path);
    edits.additional_gids.sort_unstable();
    edits.additional_gids.dedup();
}

/// Remove the edits that the spec already has for all devices.
fn without(edits: &mut Edits, common: &Edits) {
    edits.device_nodes.retain(|node| !common.device_nodes.contains(node));
    edits.mounts.retain(|mount| !common.mounts.contains(mount));
    edits.additional_gids.retain(|gid| !common.additional_gids.contains(gid));
}

/// Remove what the newest allowed version cannot express, and add a note about it.
fn fit(spec: &mut Spec, newest: CdiVersion, notes: &mut Vec<String>) -> Result<(), GenerateError> {
    if newest < CdiVersion::V0_7_0 {
        let mut edits: Vec<&mut Edits> = spec.devices.iter_mut().map(|device| &mut device.container_edits).collect();
        edits.push(&mut spec.container_edits);
        let dropped = edits.iter().any(|edits| !edits.additional_gids.is_empty());
        for edits in edits {
            edits.additional_gids.clear();
            // Without a group, readers give the node to the process's own group.
            edits.device_nodes.iter_mut().for_each(|node| node.gid = None);
        }
        if dropped {
            notes.push(format!(
                "CDI {newest} has no additional groups: a container that does not run as root cannot open the device nodes"
            ));
        }
    }
    if newest < CdiVersion::V0_6_0 && !spec.annotations.is_empty() {
        spec.annotations.clear();
        notes.push(format!(
            "CDI {newest} has no annotations: only the file names in the spec show which driver it was made for"
        ));
    }
    match super::version::needs(spec).into_iter().find(|need| need.version > newest) {
        Some(need) => Err(GenerateError::Version {
            wanted: newest,
            needed: need.version,
            field: need.field,
            what: need.what,
        }),
        None => Ok(()),
    }
}

/// The machine's device nodes, below the directory that has `/dev`.
struct DeviceNodeTree<'t> {
    root: Root<'t>,
}

impl<'t> DeviceNodeTree<'t> {
    /// Select the directory that has `/dev`: `--dev-root` if it is given, otherwise the driver's root if it has the device node `sign` (as in a
    /// driver container), otherwise the machine's root.
    fn find(tree: &'t dyn Tree, options: &GenerateOptions, sign: &str) -> Result<DeviceNodeTree<'t>, GenerateError> {
        if let Some(path) = &options.dev_root {
            return Ok(DeviceNodeTree {
                root: open_root(tree, path, "--dev-root", "where /dev is")?,
            });
        }
        let driver = Root::open(tree, &options.driver_root).filter(|root| root.resolve(sign).is_some());
        let root = driver.or_else(|| Root::open(tree, "/"));
        root.map(|root| DeviceNodeTree { root }).ok_or_else(|| GenerateError::NoRoot {
            path: "/".to_owned(),
            flag: "--dev-root",
            what: "where /dev is",
        })
    }

    fn has(&self, path: &str) -> bool {
        self.root
            .resolve(path)
            .is_some_and(|(_, entry)| entry.kind != FileKind::Directory)
    }

    /// Add a device node to the edits if it exists, and report whether it does.
    fn add(&self, edits: &mut Edits, path: &str) -> bool {
        let there = self.has(path);
        if there {
            let host = self.root.host(path);
            edits.device_nodes.push(DeviceNode {
                host_path: (host != path).then_some(host),
                ..DeviceNode::of_node(path)
            });
        }
        there
    }

    /// Add a device node that compute programs open, as [`DeviceNodeTree::add`] does. If only the node's group may open it, the container
    /// also joins that group.
    fn add_with_group(&self, edits: &mut Edits, path: &str) -> bool {
        let there = self.add(edits, path);
        if let Some((_, entry)) = self.root.resolve(path)
            && there
            && entry.gid != 0
            && entry.mode & 0o006 != 0o006
        {
            // The container's node gets the same group and mode. If it belonged to root's group, a process that is not root could not open it.
            if let Some(node) = edits.device_nodes.last_mut() {
                (node.file_mode, node.gid) = (Some(entry.mode & 0o777), Some(entry.gid));
            }
            edits.additional_gids.push(entry.gid);
        }
        there
    }
}

fn open_root<'t>(tree: &'t dyn Tree, path: &str, flag: &'static str, what: &'static str) -> Result<Root<'t>, GenerateError> {
    Root::open(tree, path).ok_or_else(|| GenerateError::NoRoot {
        path: path.to_owned(),
        flag,
        what,
    })
}
