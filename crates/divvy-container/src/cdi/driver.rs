//! What the CDI spec of NVIDIA's driver depends on, and the spec itself: for the process that sees the driver's files.
//!
//! On a node that is `divvy-probe`; the agent decides by what it is told, and writes the file.

use std::collections::BTreeSet;

use divvy_model::MigDevice;
use serde::{Deserialize, Serialize};

use super::generate::nvidia::{self, Gpu, Mig, SHARED};
use super::generate::{Generated, Options, Root, Tree, proc};
use super::{NVIDIA_KIND, Spec, stale};

/// What `ldconfig` writes when a driver is installed.
const CACHE: &str = "/etc/ld.so.cache";
/// Where the driver's libraries usually are. A root that has none of these, and no cache, is none.
const FOLDERS: [&str; 6] = [
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/lib64",
    "/usr/local/nvidia/lib64",
    "/usr/lib",
];

/// A GPU as the driver's library names it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Place {
    /// NVML's index.
    pub index: u32,
    /// `GPU-…`
    pub uuid: String,
    /// `/dev/nvidia<minor>`; not the index.
    pub minor: u32,
    /// `0000:81:00.0`
    pub pci: String,
    /// Its MIG devices; none where MIG is off.
    #[serde(default)]
    pub mig: Option<Vec<MigDevice>>,
}

/// What a driver's spec depends on. While it is the same, the same spec would be made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Basis {
    /// The version of the driver that is loaded.
    pub driver: String,
    /// The GPUs that are there, with their MIG devices.
    pub gpus: Vec<Gpu>,
    /// The directory on the machine in which the driver is installed: `/`, or the root of a driver container.
    pub driver_root: String,
    /// The state of that directory; `None`: no driver's files are to be seen there.
    pub root: Option<RootState>,
}

/// What is cheap to look at in a driver's root and changes when the driver does.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RootState {
    /// `ld.so.cache`, else the folders in which libraries usually lie: path, time of the last change in ns, size.
    pub stamps: Vec<(String, i64, u64)>,
    /// The driver's device nodes that are there.
    pub nodes: BTreeSet<String>,
}

impl Basis {
    /// Looks at a machine. `told` is the driver's version as its library says; `None` if that is no version and the kernel says none either.
    pub fn look(tree: &dyn Tree, driver_root: &str, told: &str, gpus: &[Place]) -> Option<Basis> {
        let driver = proc::loaded_driver(tree).or_else(|| stale::is_version(told).then(|| told.to_owned()))?;
        let gpus: Vec<Gpu> = gpus
            .iter()
            .map(|gpu| Gpu {
                index: gpu.index,
                uuid: Some(gpu.uuid.clone()),
                minor: gpu.minor,
                pci: gpu.pci.clone(),
                mig: proc::mig_of(tree, gpu.minor, gpu.mig.as_deref()),
            })
            .collect();
        Some(Basis {
            driver,
            root: RootState::look(tree, driver_root, &gpus),
            gpus,
            driver_root: driver_root.to_owned(),
        })
    }

    /// The spec, and what somebody should know about it.
    ///
    /// # Errors
    /// In words: there is no driver or no GPU, or the libraries are of another driver than the loaded one, before the reboot.
    pub fn spec(&self, tree: &dyn Tree) -> Result<(Spec, Vec<String>), String> {
        let (vendor, class) = NVIDIA_KIND.split_once('/').unwrap_or((NVIDIA_KIND, "gpu"));
        let options = Options {
            class: class.to_owned(),
            driver_root: self.driver_root.clone(),
            ..Options::new(vendor)
        };
        let Generated { spec, notes } =
            nvidia::generate(tree, &self.gpus, Some(&self.driver), &options).map_err(|error| error.to_string())?;
        let found = stale::driver_version(&spec);
        if found != Some(&self.driver) {
            return Err(format!(
                "driver {} is loaded, but the libraries at {} are of {}: load the new module, or reboot",
                self.driver,
                self.driver_root,
                found.unwrap_or("an unknown version")
            ));
        }
        Ok((spec, notes.into_iter().chain(tree.troubles()).collect()))
    }
}

impl RootState {
    fn look(tree: &dyn Tree, driver_root: &str, gpus: &[Gpu]) -> Option<RootState> {
        let (root, machine) = (Root::open(tree, driver_root)?, Root::open(tree, "/")?);
        let stamp = |path: &str| {
            let (real, _) = root.resolve(path)?;
            let (real, _) = machine.resolve(&root.host(&real))?;
            let (modified, size) = tree.stamp(&real)?;
            Some((path.to_owned(), modified, size))
        };
        let stamps: Vec<_> = match stamp(CACHE) {
            Some(cache) => vec![cache],
            None => FOLDERS.iter().filter_map(|folder| stamp(folder)).collect(),
        };
        let own = gpus.iter().map(|gpu| format!("/dev/nvidia{}", gpu.minor));
        // The driver divides a GPU before anybody makes these.
        let parts = gpus
            .iter()
            .flat_map(|gpu| gpu.mig.iter().flatten())
            .filter_map(Mig::nodes)
            .flatten();
        let shared = SHARED.iter().map(|path| (*path).to_owned());
        let names: Vec<String> = own.chain(parts).chain(shared).chain(["/dev/nvidiactl".to_owned()]).collect();
        let there = |root: &Root<'_>, path: &String| root.resolve(path).is_some().then(|| root.host(path));
        let nodes: BTreeSet<String> = names
            .iter()
            .flat_map(|path| [there(&root, path), there(&machine, path)])
            .flatten()
            .collect();
        (!stamps.is_empty()).then_some(RootState { stamps, nodes })
    }
}

/// Which of these paths of the machine are not there.
pub fn missing(tree: &dyn Tree, paths: &[String]) -> Vec<String> {
    let Some(root) = Root::open(tree, "/") else {
        return Vec::new();
    };
    paths.iter().filter(|path| root.resolve(path).is_none()).cloned().collect()
}
