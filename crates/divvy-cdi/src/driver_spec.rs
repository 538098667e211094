//! The CDI spec of a node's NVIDIA driver, and the state of the machine that this spec depends on.
//!
//! This code runs in the process that can see the driver's files: on a node, that is `divvy-probe`. The probe reports the [`Basis`] and the spec to
//! the agent, and the agent decides whether to write the spec's file.

use std::collections::BTreeSet;

use divvy_model::MigDevice;
use serde::{Deserialize, Serialize};

use super::generate::nvidia::{self, Mig, NvidiaGpu, SHARED};
use divvy_host::{Root, Tree};

use super::generate::{GenerateError, GenerateOptions, Generated, proc};
use super::{NVIDIA_KIND, Spec, stale};

/// The file that `ldconfig` rewrites whenever a driver is installed.
const CACHE: &str = "/etc/ld.so.cache";
/// The usual directories of the driver's libraries. A directory that has neither these nor [`CACHE`] is not a driver root.
const DIRECTORIES: [&str; 6] = [
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/lib64",
    "/usr/local/nvidia/lib64",
    "/usr/lib",
];

/// A GPU as NVML, the driver's library, describes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NvmlGpu {
    /// NVML's index, from 0.
    pub index: u32,
    /// The UUID, in the form `GPU-…`.
    pub uuid: String,
    /// The minor number of `/dev/nvidia<minor>`, which may differ from the index.
    pub minor: u32,
    /// The PCI address, such as `0000:81:00.0`.
    pub pci: String,
    /// The MIG devices; `None` if MIG is disabled.
    #[serde(default)]
    pub mig: Option<Vec<MigDevice>>,
}

/// Everything that the spec of a driver depends on. If two values are equal, they produce the same spec.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Basis {
    /// The version of the driver that is loaded.
    pub driver: String,
    /// The machine's GPUs, with their MIG devices.
    pub gpus: Vec<NvidiaGpu>,
    /// The directory on the machine in which the driver is installed: `/`, or the root of a driver container.
    pub driver_root: String,
    /// The state of `driver_root`; `None` if it has no files of a driver.
    pub root: Option<RootState>,
}

/// A fingerprint of a driver's root: cheap to read, and different after the driver changes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RootState {
    /// `/etc/ld.so.cache`, or if it is missing, the usual library directories. Each entry has the path, the modification time in ns since 1970,
    /// and the size in bytes.
    pub stamps: Vec<(String, i64, u64)>,
    /// The paths of the driver's existing device nodes.
    pub nodes: BTreeSet<String>,
}

impl Basis {
    /// Read a machine's state. `told` is the driver version that NVML reports; the version that the kernel reports takes
    /// precedence. Return `None` if neither is a valid version.
    pub fn read(tree: &dyn Tree, driver_root: &str, told: &str, gpus: &[NvmlGpu]) -> Option<Basis> {
        let driver = crate::driver_version::loaded_driver(tree)
            .or_else(|| crate::driver_version::is_version(told).then(|| told.to_owned()))?;
        let gpus: Vec<NvidiaGpu> = gpus
            .iter()
            .map(|gpu| NvidiaGpu {
                index: gpu.index,
                uuid: Some(gpu.uuid.clone()),
                minor: gpu.minor,
                pci: gpu.pci.clone(),
                mig: proc::mig_of(tree, gpu.minor, gpu.mig.as_deref()),
            })
            .collect();
        Some(Basis {
            driver,
            root: RootState::read(tree, driver_root, &gpus),
            gpus,
            driver_root: driver_root.to_owned(),
        })
    }

    /// Generate the spec, and return it with notes for the administrator.
    ///
    /// # Errors
    /// Fails if there is no driver or no GPU, or if the libraries do not match the loaded driver.
    pub fn spec(&self, tree: &dyn Tree) -> Result<(Spec, Vec<String>), GenerateError> {
        let (vendor, class) = NVIDIA_KIND.split_once('/').unwrap_or((NVIDIA_KIND, "gpu"));
        let options = GenerateOptions {
            class: class.to_owned(),
            driver_root: self.driver_root.clone(),
            ..GenerateOptions::new(vendor)
        };
        let Generated { spec, notes } = nvidia::generate(tree, &self.gpus, Some(&self.driver), &options)?;
        let found = stale::driver_version(&spec);
        if found != Some(&self.driver) {
            return Err(GenerateError::OtherDriver {
                driver: self.driver.clone(),
                driver_root: self.driver_root.clone(),
                found: found.unwrap_or("an unknown version").to_owned(),
            });
        }
        Ok((spec, notes.into_iter().chain(tree.troubles()).collect()))
    }
}

impl RootState {
    fn read(tree: &dyn Tree, driver_root: &str, gpus: &[NvidiaGpu]) -> Option<RootState> {
        let (root, machine) = (Root::open(tree, driver_root)?, Root::open(tree, "/")?);
        let stamp = |path: &str| {
            let (real, _) = root.resolve(path)?;
            let (real, _) = machine.resolve(&root.host(&real))?;
            let (modified, size) = tree.stamp(&real)?;
            Some((path.to_owned(), modified, size))
        };
        let stamps: Vec<_> = match stamp(CACHE) {
            Some(cache) => vec![cache],
            None => DIRECTORIES.iter().filter_map(|directory| stamp(directory)).collect(),
        };
        let own = gpus.iter().map(|gpu| format!("/dev/nvidia{}", gpu.minor));
        // After the driver creates a MIG device, its capability nodes are still missing until a program such as nvidia-smi creates them.
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

/// Return the paths that do not exist on the machine.
pub fn missing(tree: &dyn Tree, paths: &[String]) -> Vec<String> {
    let Some(root) = Root::open(tree, "/") else {
        return Vec::new();
    };
    paths.iter().filter(|path| root.resolve(path).is_none()).cloned().collect()
}
