//! Generates the spec of NVIDIA GPUs under WSL 2. There is one device node, `/dev/dxg`, for all GPUs, and Windows provides the driver's files in
//! `/usr/lib/wsl`.

use super::files::{FILE, mount};
use super::libraries::loader_directories;
use super::{DeviceNodeTree, Draft, DraftDevice, GenerateError, GenerateOptions, Generated, Tree, open_root};
use crate::Edits;
use divvy_host::Root;

const NODE: &str = "/dev/dxg";
const LIBRARIES: &str = "/usr/lib/wsl/lib";
const STORE: &str = "/usr/lib/wsl/drivers";
/// The driver's library in a directory of [`STORE`].
const CUDA: &str = "libcuda.so.1.1";

/// Report whether this machine is WSL 2 with a GPU.
pub fn is_there(tree: &dyn Tree) -> bool {
    Root::open(tree, "/")
        .is_some_and(|root| root.resolve(NODE).is_some() && root.file(&format!("{LIBRARIES}/libdxcore.so")).is_some())
}

/// Generate the spec. It has only the device `all`, because under WSL a container cannot be limited to one GPU. `driver` is the version that NVML
/// reports.
///
/// # Errors
/// Fails if there is no `/dev/dxg`, or if Windows provides no NVIDIA driver.
pub fn generate(tree: &dyn Tree, driver: Option<&str>, options: &GenerateOptions) -> Result<Generated, GenerateError> {
    let root = open_root(tree, &options.driver_root, "--driver-root", "where the driver is installed")?;
    let nodes = DeviceNodeTree::find(tree, options, NODE)?;
    let mut draft = Draft {
        driver: driver.map(str::to_owned),
        ..Draft::default()
    };
    let mut device = Edits::default();
    if !nodes.add_with_group(&mut device, NODE) {
        return Err(GenerateError::NoDriver(format!(
            "there is no {}: this is not WSL 2, or Windows shares no GPU",
            nodes.root.host(NODE)
        )));
    }
    let stores: Vec<String> = root
        .names(STORE)
        .iter()
        .map(|name| format!("{STORE}/{name}"))
        .filter(|directory| root.file(&format!("{directory}/{CUDA}")).is_some())
        .collect();
    let Some(first) = stores.first() else {
        return Err(GenerateError::NoDriver(format!(
            "no directory in {} has {CUDA}: install NVIDIA's driver in Windows (not in WSL), then run wsl --shutdown",
            root.host(STORE)
        )));
    };
    let searched = loader_directories(&root, &format!("{first}/{CUDA}"));
    let mounts = &mut draft.common.mounts;
    let mut add = |file: &str, path: String| mounts.push(mount(root.host(file), path, &FILE));
    for directory in &stores {
        for name in root.names(directory) {
            let wanted = name.contains(".so") || name.ends_with(".bin") || name.ends_with(".dll") || name == "nvidia-smi";
            let path = format!("{directory}/{name}");
            if wanted && let Some(file) = root.file(&path) {
                add(&file, path);
            }
        }
    }
    for name in root.names(LIBRARIES) {
        let path = format!("{LIBRARIES}/{name}");
        let Some(file) = root.file(&path) else { continue };
        // Direct3D's libraries are left out: they are not NVIDIA's, and they are useless without Mesa's.
        let own = ["libcuda.so", "libnvidia-", "libdxcore.so", "libnvcuvid.so", "libnvoptix"];
        if own.iter().any(|own| name.starts_with(own)) {
            for directory in searched {
                add(&file, format!("{directory}/{name}"));
            }
            add(&file, path);
        }
        if name == "nvidia-smi" {
            add(&file, "/usr/bin/nvidia-smi".to_owned());
        }
    }
    draft.common.env.push("NVIDIA_VISIBLE_DEVICES=void".to_owned());
    draft.items.push(DraftDevice {
        index: "all".to_owned(),
        uuid: None,
        edits: device,
        in_all: false,
    });
    draft.finish(options)
}
