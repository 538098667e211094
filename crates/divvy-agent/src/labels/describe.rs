//! Describes a machine with facts from the driver and the kernel.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use divvy_hardware::{GpuFacts, Snapshot};
use divvy_labels::{LabeledFabric, LabeledGpu, LabeledMachine, Labels, PciDevice, labels};
use divvy_model::Vendor;
use divvy_nvidia_config::NvidiaConfig;

use crate::{Error, MigStrategyArg, files};

/// NVIDIA's PCI vendor id.
const NVIDIA: &str = "0x10de";
/// The maximum size in bytes of a kernel file that is read here.
const BYTES: u64 = 4096;

/// What the kernel says about a machine. It stays the same as long as the machine runs.
#[derive(Debug)]
pub struct DescribedHost {
    root: PathBuf,
    machine_type: Option<String>,
    pci: Vec<PciDevice>,
}

impl DescribedHost {
    /// Read the files below `root`, where the kernel's PCI devices are found below `/sys`, and the file with the machine's type. What
    /// cannot be read is unknown.
    pub fn read(root: &Path, machine_type_file: &Path) -> DescribedHost {
        DescribedHost {
            root: root.to_owned(),
            machine_type: text(machine_type_file),
            pci: pci_devices(root),
        }
    }

    /// Read the files of the machine on which this program runs. `root` has its `/sys`, unless only parts of it are mounted there:
    /// a container sees the machine's PCI devices in its own `/sys`.
    pub fn of_machine(root: &Path) -> DescribedHost {
        let has_devices = root.join("sys/bus/pci/devices").is_dir();
        let root = if has_devices { root } else { Path::new("/") };
        DescribedHost::read(root, &root.join("sys/class/dmi/id/product_name"))
    }

    /// Describe the machine with what its drivers report. `timestamp` is the start of the program in seconds since 1970.
    pub fn machine(&self, snapshot: Snapshot, timestamp: u64) -> LabeledMachine {
        let Snapshot { drivers, gpus, .. } = snapshot;
        let driver = drivers.get(&Vendor::Nvidia).cloned().unwrap_or_default();
        let gpus = gpus.into_iter().filter(|gpu| gpu.vendor == Vendor::Nvidia && !gpu.lost);
        LabeledMachine {
            driver: driver.version,
            cuda: numbers(&driver.cuda),
            gpus: gpus.map(|facts| gpu(facts, &self.root)).collect(),
            ..self.without_gpus(timestamp)
        }
    }

    /// Describe the machine if the driver does not answer.
    pub fn without_gpus(&self, timestamp: u64) -> LabeledMachine {
        LabeledMachine {
            machine_type: self.machine_type.clone(),
            pci: self.pci.clone(),
            timestamp,
            ..LabeledMachine::default()
        }
    }
}

/// Return the labels that NVIDIA's GPU feature discovery writes with this MIG strategy and else its default configuration, without the time of
/// the start. Where no MIG devices are offered (the strategy `none`), a machine with MIG devices has the labels of `mixed`, so that a
/// pod can select a node by their profile.
///
/// # Errors
/// The driver's version is malformed.
pub fn plain_labels(machine: &LabeledMachine, strategy: MigStrategyArg) -> Result<Labels, Error> {
    let mut config = NvidiaConfig::default();
    config.feature_discovery.no_timestamp = true;
    if machine.gpus.iter().any(|gpu| gpu.mig == Some(true)) {
        config.mig_strategy = match strategy {
            MigStrategyArg::None | MigStrategyArg::Mixed => divvy_nvidia_config::NvidiaMigStrategy::Mixed,
            MigStrategyArg::Single => divvy_nvidia_config::NvidiaMigStrategy::Single,
        };
    }
    labels(machine, &config).map_err(|error| Error::Labels(error.to_string()))
}

fn gpu(facts: GpuFacts, root: &Path) -> LabeledGpu {
    let device = root.join("sys/bus/pci/devices").join(&facts.pci);
    // A simulated GPU may have the address of another device.
    let is_nvidias = !facts.pci.is_empty() && text(&device.join("vendor")).is_some_and(|vendor| vendor.trim() == NVIDIA);
    LabeledGpu {
        memory: facts.total,
        cc: numbers(&facts.cc),
        pci_class: is_nvidias.then(|| class(&device)).flatten(),
        mig: facts.mig.map(|(is_on, _)| is_on),
        mig_devices: facts.mig_devices,
        fabric: facts.fabric.map(|fabric| LabeledFabric {
            cluster: fabric.cluster,
            clique: fabric.clique,
        }),
        model: facts.model,
    }
}

/// Parse a version such as `12.4`.
fn numbers(version: &str) -> Option<(u32, u32)> {
    let (major, minor) = version.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

fn class(device: &Path) -> Option<u32> {
    let text = text(&device.join("class"))?;
    u32::from_str_radix(text.trim().strip_prefix("0x")?, 16).ok()
}

/// Return NVIDIA's PCI devices in the kernel's list.
fn pci_devices(root: &Path) -> Vec<PciDevice> {
    let directory = root.join("sys/bus/pci/devices");
    let names = files::names(&directory).unwrap_or_default().into_iter();
    let devices = names.map(|name| directory.join(name));
    let nvidias = devices.filter(|device| text(&device.join("vendor")).is_some_and(|vendor| vendor.trim() == NVIDIA));
    nvidias
        .map(|device| PciDevice {
            config: bytes(&device.join("config")).unwrap_or_default(),
        })
        .collect()
}

fn bytes(path: &Path) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(BYTES).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

fn text(path: &Path) -> Option<String> {
    String::from_utf8(bytes(path)?).ok()
}

#[cfg(test)]
mod tests {
    use divvy_model::{MiB, MigDevice, MigParts};

    use super::*;

    #[test]
    fn labels_follow_the_strategy_for_mig_devices() {
        let device = |index| MigDevice {
            index,
            uuid: format!("MIG-{index}"),
            gi: index + 1,
            parts: Some(MigParts {
                gi_profile: Some(0),
                gi_slices: 1,
                ci_slices: 1,
                memory: 4864,
                ..MigParts::default()
            }),
            ..MigDevice::default()
        };
        let divided = LabeledMachine {
            driver: "550.54.15".to_owned(),
            gpus: vec![LabeledGpu {
                model: "NVIDIA A100-SXM4-40GB".to_owned(),
                memory: MiB(40960),
                mig: Some(true),
                mig_devices: vec![device(0), device(1)],
                ..LabeledGpu::default()
            }],
            ..LabeledMachine::default()
        };
        let mut whole = divided.clone();
        whole.gpus[0].mig = Some(false);
        whole.gpus[0].mig_devices.clear();
        let label = |machine: &LabeledMachine, strategy, name: &str| {
            let found = plain_labels(machine, strategy).expect("labels").labels;
            found.get(&format!("nvidia.com/{name}")).cloned()
        };
        for (strategy, expected) in [
            (MigStrategyArg::Single, ["single", "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb", "2"]),
            (MigStrategyArg::Mixed, ["mixed", "NVIDIA-A100-SXM4-40GB", "1"]),
            (MigStrategyArg::None, ["mixed", "NVIDIA-A100-SXM4-40GB", "1"]),
        ] {
            let found = ["mig.strategy", "gpu.product", "gpu.count"].map(|name| label(&divided, strategy, name));
            assert_eq!(found, expected.map(|text| Some(text.to_owned())), "{strategy:?}");
            assert_eq!(label(&whole, strategy, "mig.strategy"), None, "a machine without MIG devices");
        }
    }
}
