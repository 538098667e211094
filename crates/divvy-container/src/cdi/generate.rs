//! From a machine's files and GPUs to a CDI spec.
//!
//! Nothing is run and nothing is loaded: [`Tree`] shows the files, [`nvidia::Gpu`] says what the driver says of its GPUs. A spec has no
//! hooks, unless one is asked for ([`Options::hook`]). What NVIDIA's hooks do in a container is done by mounts: each library is mounted under the names by which programs ask for it,
//! and in the folders that loaders of Debian's kind and of Red Hat's kind search, so that it is found without a new `ld.so.cache`.
//!
//! Numbers and modes of device nodes are left to the container runtime, which looks at the node when a container starts: majors of
//! `nvidia-uvm` and `nvidia-caps` change with a reboot.

pub mod amd;
mod extras;
mod files;
pub mod intel;
pub mod ldcache;
mod libraries;
pub mod nvidia;
pub mod parts;
pub mod proc;
mod tree;
pub mod wsl;

use std::collections::BTreeMap;

use thiserror::Error as ThisError;

use super::name::{check_class, check_device, check_vendor};
use super::{Device, DeviceNode, Edits, NameError, Problem, Spec, Version, stale};

pub use extras::{Channels, Extras};
pub use tree::{Entry, Kind, Root, Tree};

/// By what devices are called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Naming {
    /// `0`, `0:1` for a MIG device.
    Index,
    /// `GPU-…`, `MIG-…`.
    Uuid,
    /// `gpu0`, `mig0:1`.
    TypeIndex,
}

/// What the reader of the spec wants.
#[derive(Debug, Clone)]
pub struct Options {
    /// `nvidia.com`
    pub vendor: String,
    /// `gpu`
    pub class: String,
    /// By what devices are called; each has all these names.
    pub naming: Vec<Naming>,
    /// Which devices, by index or UUID; none of them: all. `none` is a device of its own, with the driver's files alone.
    pub only: Vec<String>,
    /// Whether `all` is there, a device that is all of them.
    pub all: bool,
    /// Whether a node that is open to its group alone brings the group along.
    pub groups: bool,
    /// The newest version that readers understand: what later ones added is left out.
    pub newest: Version,
    /// Where the driver's files are: `/`, or where a driver container's root is mounted.
    pub driver_root: String,
    /// Where `/dev` is; the driver's root if it has device nodes, else `/`.
    pub dev_root: Option<String>,
    /// The machine's `divvy-hook`, by its whole path: it writes the libraries into the container's own `ld.so.cache`, for images whose loader does not
    /// search the folders. NVIDIA's specs only.
    pub hook: Option<String>,
    /// What containers get beside the GPUs. NVIDIA's specs only.
    pub extras: Extras,
}

impl Options {
    /// Everything as it is usual for a vendor.
    pub fn new(vendor: &str) -> Options {
        Options {
            vendor: vendor.to_owned(),
            class: "gpu".to_owned(),
            naming: vec![Naming::Index, Naming::Uuid],
            only: Vec::new(),
            all: true,
            groups: true,
            newest: Version::V1_1_0,
            driver_root: "/".to_owned(),
            dev_root: None,
            hook: None,
            extras: Extras::default(),
        }
    }
}

/// A spec, and what somebody should know about it.
#[derive(Debug, Clone, PartialEq)]
pub struct Generated {
    /// Valid, in the least version that it needs.
    pub spec: Spec,
    /// What was left out or looks wrong, in sentences.
    pub notes: Vec<String>,
}

/// Why there is no spec.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
pub enum Error {
    /// A root is not on the machine.
    #[error("there is no directory {path} on this machine; set {what} with {flag}")]
    NoRoot {
        /// What was given.
        path: String,
        /// By which flag.
        flag: &'static str,
        /// What it is for.
        what: &'static str,
    },
    /// The driver is not installed, or elsewhere.
    #[error("{0}")]
    NoDriver(String),
    /// No GPU can be given to a container.
    #[error("{0}")]
    NoGpu(String),
    /// A channel that is asked for is not there.
    #[error(
        "the requested IMEX channel {0} does not exist; create it with nvidia-modprobe, which works once /proc/devices has its major number \
         (nvidia-caps-imex-channels, from driver 550 on), or request an existing channel"
    )]
    NoChannel(String),
    /// Vendor or class are none.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The wanted version has not what every spec of this kind needs.
    #[error("CDI {wanted} cannot express this spec: {field} has {what}, which is new in {needed}; allow at least {needed}")]
    Version {
        /// The newest that is allowed.
        wanted: Version,
        /// What is needed.
        needed: Version,
        /// Where.
        field: String,
        /// For what.
        what: &'static str,
    },
    /// A file has a name that CDI cannot say.
    #[error("the generated spec is not valid: {0}")]
    Invalid(String),
}

/// One device that is being described.
#[derive(Debug, Clone, Default)]
struct Item {
    /// By index.
    index: String,
    /// By what outlives a change of order.
    uuid: Option<String>,
    edits: Edits,
    /// Whether `all` has it.
    in_all: bool,
}

/// What a vendor's module found.
#[derive(Debug, Clone, Default)]
struct Draft {
    common: Edits,
    items: Vec<Item>,
    driver: Option<String>,
    notes: Vec<String>,
}

/// As NVIDIA's program says it: a device must not be empty.
const NONE: &str = "NVCT_EMPTY_DEVICE=";

impl Draft {
    /// Drops the devices that nobody wants.
    fn keep(&mut self, only: &[String]) -> Result<(), Error> {
        if only.iter().any(|id| id == "none") {
            let mut none = Item {
                index: "none".to_owned(),
                ..Item::default()
            };
            none.edits.env.push(NONE.to_owned());
            self.items = vec![none];
            return Ok(());
        }
        if only.is_empty() || only.iter().any(|id| id == "all") {
            return Ok(());
        }
        let is = |item: &Item, id: &String| item.index == *id || item.uuid.as_ref() == Some(id);
        if let Some(id) = only.iter().find(|id| !self.items.iter().any(|item| is(item, id))) {
            let there: Vec<&str> = self.items.iter().map(|item| item.index.as_str()).collect();
            return Err(Error::NoGpu(format!(
                "there is no device {id:?} on this machine; the indices are {}, and the UUID of a GPU works as well",
                there.join(", ")
            )));
        }
        self.items.retain(|item| only.iter().any(|id| is(item, id)));
        Ok(())
    }

    /// The spec.
    fn finish(mut self, options: &Options) -> Result<Generated, Error> {
        check_vendor(&options.vendor)?;
        check_class(&options.class)?;
        self.keep(&options.only)?;
        tidy(&mut self.common);
        let mut devices: Vec<Device> = Vec::new();
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
                // Parts of one card that share a UUID are one device under it.
                match devices.iter_mut().find(|device| device.name == name) {
                    Some(device) => device.container_edits.merge(&item.edits),
                    None => devices.push(Device {
                        name,
                        container_edits: item.edits.clone(),
                        ..Device::default()
                    }),
                }
            }
        }
        tidy(&mut all);
        if options.all && !all.is_empty() && devices.iter().all(|device| device.name != "all") {
            devices.push(Device {
                name: "all".to_owned(),
                container_edits: all,
                ..Device::default()
            });
        }
        if !options.groups {
            let edits = devices.iter_mut().map(|device| &mut device.container_edits);
            edits
                .chain([&mut self.common])
                .for_each(|edits| edits.additional_gids.clear());
        }
        let annotations = self.driver.map(|version| (stale::DRIVER_VERSION.to_owned(), version));
        let mut spec = Spec {
            kind: format!("{}/{}", options.vendor, options.class),
            annotations: BTreeMap::from_iter(annotations),
            devices,
            container_edits: self.common,
            ..Spec::default()
        };
        fit(&mut spec, options.newest, &mut self.notes)?;
        spec.cdi_version = Version::least_for(&spec).to_string();
        match spec.problems().iter().map(Problem::to_string).next() {
            Some(problem) => Err(Error::Invalid(problem)),
            None => Ok(Generated { spec, notes: self.notes }),
        }
    }
}

fn names(item: &Item, naming: &[Naming]) -> Vec<String> {
    let name = |naming: &Naming| match naming {
        Naming::Index => Some(item.index.clone()),
        Naming::Uuid => item.uuid.clone(),
        Naming::TypeIndex if item.index.contains(':') => Some(format!("mig{}", item.index)),
        Naming::TypeIndex => Some(format!("gpu{}", item.index)),
    };
    let mut names: Vec<String> = naming.iter().filter_map(name).collect();
    names.dedup();
    // Who asks for UUIDs alone still gets what has none.
    if names.is_empty() {
        names.push(item.index.clone());
    }
    names
}

/// Puts lists into an order that depends on nothing, each thing once.
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

/// Leaves out what every device of the spec has anyway.
fn without(edits: &mut Edits, common: &Edits) {
    edits.device_nodes.retain(|node| !common.device_nodes.contains(node));
    edits.mounts.retain(|mount| !common.mounts.contains(mount));
    edits.additional_gids.retain(|gid| !common.additional_gids.contains(gid));
}

/// Leaves out what the newest allowed version has not, and says so.
fn fit(spec: &mut Spec, newest: Version, notes: &mut Vec<String>) -> Result<(), Error> {
    if newest < Version::V0_7_0 {
        let mut edits: Vec<&mut Edits> = spec.devices.iter_mut().map(|device| &mut device.container_edits).collect();
        edits.push(&mut spec.container_edits);
        let dropped = edits.iter().any(|edits| !edits.additional_gids.is_empty());
        for edits in edits {
            edits.additional_gids.clear();
            // Readers give the node to the process's own group then.
            edits.device_nodes.iter_mut().for_each(|node| node.gid = None);
        }
        if dropped {
            notes.push(format!(
                "CDI {newest} has no additional groups: a container that does not run as root cannot open the device nodes"
            ));
        }
    }
    if newest < Version::V0_6_0 && !spec.annotations.is_empty() {
        spec.annotations.clear();
        notes.push(format!(
            "CDI {newest} has no annotations: only the file names in the spec show which driver it was made for"
        ));
    }
    match super::version::needs(spec).into_iter().find(|need| need.version > newest) {
        Some(need) => Err(Error::Version {
            wanted: newest,
            needed: need.version,
            field: need.field,
            what: need.what,
        }),
        None => Ok(()),
    }
}

/// The device nodes of a machine.
struct Nodes<'t> {
    root: Root<'t>,
}

impl<'t> Nodes<'t> {
    /// With `--dev-root`, else with a driver's root that has nodes of its own (a driver container), else with the machine's.
    fn find(tree: &'t dyn Tree, options: &Options, sign: &str) -> Result<Nodes<'t>, Error> {
        if let Some(path) = &options.dev_root {
            return Ok(Nodes {
                root: open_root(tree, path, "--dev-root", "where /dev is")?,
            });
        }
        let driver = Root::open(tree, &options.driver_root).filter(|root| root.resolve(sign).is_some());
        let root = driver.or_else(|| Root::open(tree, "/"));
        root.map(|root| Nodes { root }).ok_or_else(|| Error::NoRoot {
            path: "/".to_owned(),
            flag: "--dev-root",
            what: "where /dev is",
        })
    }

    fn has(&self, path: &str) -> bool {
        self.root.resolve(path).is_some_and(|(_, entry)| entry.kind != Kind::Folder)
    }

    /// Adds a node if it is there.
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

    /// Adds a node that programs which compute open; with its group, if it is open to that alone.
    fn add_with_group(&self, edits: &mut Edits, path: &str) -> bool {
        let there = self.add(edits, path);
        if let Some((_, entry)) = self.root.resolve(path)
            && there
            && entry.gid != 0
            && entry.mode & 0o006 != 0o006
        {
            // The container's node is of that group, too: a process that gives up root for it would be shut out of root's.
            if let Some(node) = edits.device_nodes.last_mut() {
                (node.file_mode, node.gid) = (Some(entry.mode & 0o777), Some(entry.gid));
            }
            edits.additional_gids.push(entry.gid);
        }
        there
    }
}

fn open_root<'t>(tree: &'t dyn Tree, path: &str, flag: &'static str, what: &'static str) -> Result<Root<'t>, Error> {
    Root::open(tree, path).ok_or_else(|| Error::NoRoot {
        path: path.to_owned(),
        flag,
        what,
    })
}
