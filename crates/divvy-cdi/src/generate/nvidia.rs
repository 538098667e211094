//! Generates the spec of NVIDIA GPUs.

use super::{DeviceNodeTree, Draft, DraftDevice, GenerateError, GenerateOptions, Generated, Tree, files, libraries, open_root};
use crate::{Edits, Hook};
use divvy_host::Root;

pub use super::nvidia_gpu::{Mig, NvidiaGpu};

/// The device node that every container with a GPU needs.
const CONTROL: &str = "/dev/nvidiactl";
/// The device nodes that every container with a GPU gets if they exist.
pub const SHARED: [&str; 3] = ["/dev/nvidia-modeset", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"];

/// Generate the spec of a machine's NVIDIA GPUs. `driver` is the version that NVML reports; it is used if `/proc` and `/sys` have no version.
///
/// # Errors
/// Fails if there is no driver, or if no GPU has a device node.
pub fn generate(
    tree: &dyn Tree,
    gpus: &[NvidiaGpu],
    driver: Option<&str>,
    options: &GenerateOptions,
) -> Result<Generated, GenerateError> {
    let root = open_root(tree, &options.driver_root, "--driver-root", "where the driver is installed")?;
    let machine = open_root(tree, "/", "--sys-root", "the machine's root")?;
    let nodes = DeviceNodeTree::find(tree, options, CONTROL)?;
    let mut draft = Draft::default();
    let loaded = crate::driver_version::loaded_driver(tree).or_else(|| driver.map(str::to_owned));
    driver_files(&root, &machine, loaded.as_deref(), options, &mut draft)?;
    if !nodes.add_with_group(&mut draft.common, CONTROL) {
        return Err(GenerateError::NoDriver(format!(
            "there is no {}: the kernel module nvidia is not loaded, or its device nodes were not created. Load it and create them (modprobe \
             nvidia; nvidia-modprobe -c 0 -u), or say where /dev is with --dev-root",
            nodes.root.host(CONTROL)
        )));
    }
    for path in SHARED {
        nodes.add_with_group(&mut draft.common, path);
    }
    if !nodes.has("/dev/nvidia-uvm") {
        draft.notes.push(
            "there is no /dev/nvidia-uvm, and CUDA does not start without it; create it with nvidia-modprobe -c 0 -u, then generate the spec again"
                .to_owned(),
        );
    }
    draft.common.env.push("NVIDIA_VISIBLE_DEVICES=void".to_owned());
    for gpu in gpus {
        describe(gpu, &nodes, &machine, &mut draft);
    }
    if draft.items.is_empty() {
        return Err(no_gpu(gpus, &draft.notes));
    }
    options.extras.describe(&nodes, &root, &machine, &mut draft)?;
    draft.finish(options)
}

/// The installed libraries of the driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Installed {
    /// The version. If several versions are installed, this is the version of the loaded driver.
    pub version: String,
    /// The directories with the libraries, as paths below the driver's root without links.
    pub directories: Vec<String>,
}

/// Find the driver's libraries. Return `None` if neither libcuda nor libnvidia-ml exists.
pub fn installed(tree: &dyn Tree, driver_root: &str) -> Option<Installed> {
    let root = Root::open(tree, driver_root)?;
    let found = libraries::find(&root, crate::driver_version::loaded_driver(tree).as_deref(), &mut Vec::new())?;
    Some(Installed {
        version: found.version,
        directories: found.directories,
    })
}

/// The hook's timeout in seconds. The hook only reads a few ELF headers and writes one file.
const HOOK_TIMEOUT: i64 = 10;

pub(super) fn driver_files(
    root: &Root<'_>,
    machine: &Root<'_>,
    loaded: Option<&str>,
    options: &GenerateOptions,
    draft: &mut Draft,
) -> Result<(), GenerateError> {
    let Some(found) = libraries::find(root, loaded, &mut draft.notes) else {
        return Err(GenerateError::NoDriver(format!(
            "there is no libcuda.so.VERSION and no libnvidia-ml.so.VERSION below {}: the NVIDIA driver is not installed there. Install it, \
             or say where it is with --driver-root (a driver container's is /run/nvidia/driver)",
            root.host("/")
        )));
    };
    match loaded {
        Some(loaded) if loaded != found.version => draft.notes.push(format!(
            "the kernel has loaded driver {loaded}, but the libraries are of {}: no program that uses them will work; load the new module \
             or reboot, then generate the spec again",
            found.version
        )),
        _ => {}
    }
    let edits = &mut draft.common;
    edits.mounts.extend(found.mounts);
    edits.mounts.extend(files::programs(root));
    edits.mounts.extend(files::configuration(root));
    edits.mounts.extend(files::xorg(root, &found.directories, &found.version));
    edits.mounts.extend(files::firmware(root, machine, &found.version));
    edits.mounts.extend(files::sockets(root));
    // nvidia-ctk sets the same variable, for programs in the container that search for libcuda on their own.
    edits.env.push(format!("NVIDIA_CTK_LIBCUDA_DIR={}", found.cuda.join(":")));
    if let Some(program) = &options.hook {
        edits.hooks.push(hook(program, &found.searched));
    }
    draft.driver = Some(found.version);
    Ok(())
}

/// Make the createContainer hook. It runs in the container's namespaces before `pivot_root`, when everything is mounted.
fn hook(program: &str, directories: &[String]) -> Hook {
    let mut args = vec!["divvy-hook".to_owned(), "update-ldcache".to_owned()];
    args.extend(directories.iter().map(|directory| format!("--folder={directory}")));
    Hook {
        hook_name: "createContainer".to_owned(),
        path: program.to_owned(),
        args,
        // Without an environment, a runtime passes its own or the image's to the hook (CVE-2025-23266).
        env: vec!["PATH=/usr/sbin:/usr/bin:/sbin:/bin".to_owned()],
        timeout: Some(HOOK_TIMEOUT),
        ..Hook::default()
    }
}

fn describe(gpu: &NvidiaGpu, nodes: &DeviceNodeTree<'_>, machine: &Root<'_>, draft: &mut Draft) {
    let mut edits = Edits::default();
    let path = format!("/dev/nvidia{}", gpu.minor);
    if !nodes.add_with_group(&mut edits, &path) {
        draft.notes.push(format!(
            "GPU {} is left out: there is no {}; create it with nvidia-modprobe -c {}",
            gpu.index,
            nodes.root.host(&path),
            gpu.minor
        ));
        return;
    }
    let Some(mig) = &gpu.mig else {
        for path in drm_nodes(machine, &gpu.pci) {
            nodes.add(&mut edits, &path);
        }
        draft.items.push(DraftDevice {
            index: gpu.index.to_string(),
            uuid: gpu.uuid.clone(),
            edits,
            in_all: true,
        });
        return;
    };
    if mig.is_empty() {
        draft.notes.push(format!(
            "GPU {0} is left out: MIG is enabled, but the GPU has no MIG devices, so nothing can run on it; create MIG devices with \
             nvidia-smi mig -i {0} -cgi PROFILE -C, or disable MIG with nvidia-smi -i {0} -mig 0",
            gpu.index
        ));
    }
    for mig in mig {
        let name = format!("{}:{}", gpu.index, mig.index);
        let mut edits = edits.clone();
        let missing = match &mig.nodes() {
            None => Some("its capabilities are not in /proc/driver/nvidia-caps/mig-minors".to_owned()),
            Some(paths) => {
                let absent = paths.iter().find(|path| !nodes.add_with_group(&mut edits, path));
                absent.map(|path| format!("there is no {path}"))
            }
        };
        if let Some(missing) = missing {
            draft.notes.push(format!(
                "MIG device {name} (GPU instance {}, compute instance {}) is left out: {missing}; run nvidia-smi as root to create its device nodes",
                mig.gpu_instance, mig.compute_instance
            ));
            continue;
        }
        draft.items.push(DraftDevice {
            index: name,
            uuid: mig.uuid.clone(),
            edits,
            in_all: true,
        });
    }
}

/// Return the DRM device nodes of a PCI device, such as `/dev/dri/card0` and `/dev/dri/renderD128`.
pub(super) fn drm_nodes(machine: &Root<'_>, pci: &str) -> Vec<String> {
    let names = machine.names(&format!("/sys/bus/pci/devices/{}/drm", pci.to_ascii_lowercase()));
    let is_node = |name: &&String| {
        ["card", "renderD"].iter().any(|prefix| {
            name.strip_prefix(prefix)
                .is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|c| c.is_ascii_digit()))
        })
    };
    names.iter().filter(is_node).map(|name| format!("/dev/dri/{name}")).collect()
}

fn no_gpu(gpus: &[NvidiaGpu], notes: &[String]) -> GenerateError {
    GenerateError::NoGpu(match gpus {
        [] => "the driver reports no GPU: run nvidia-smi on this machine to check this, and dmesg to find out why".to_owned(),
        _ => format!(
            "none of {} GPUs can be given to a container: {}",
            gpus.len(),
            notes.join("; ")
        ),
    })
}
