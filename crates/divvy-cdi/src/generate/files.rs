//! Mounts for the driver's files other than libraries: programs, configuration, firmware, and sockets.

use crate::CdiMount;
use divvy_host::{FileKind, Root};

/// Mount options for files. The mounts are private, because shared ones would multiply the host's mounts (nvidia-container-toolkit#697).
pub(super) const FILE: [&str; 5] = ["ro", "nosuid", "nodev", "rbind", "rprivate"];
/// Mount options for sockets. They are not read-only, because connecting to a socket needs write access.
const SOCKET: [&str; 5] = ["nosuid", "nodev", "noexec", "rbind", "rprivate"];

const PROGRAM_DIRECTORIES: [&str; 6] = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];
const PROGRAMS: [&str; 8] = [
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
    "nvidia-imex",
    "nvidia-imex-ctl",
    "nvidia-xconfig",
];

/// The directories that are searched for configuration files.
const CONFIG_DIRECTORIES: [&str; 3] = ["/etc", "/usr/local/share", "/usr/share"];
/// Configuration files that containers get below `/usr/share`.
const SHARED_FILES: [&str; 9] = [
    "glvnd/egl_vendor.d/10_nvidia.json",
    "egl/egl_external_platform.d/15_nvidia_gbm.json",
    "egl/egl_external_platform.d/10_nvidia_wayland.json",
    "egl/egl_external_platform.d/09_nvidia_wayland2.json",
    "egl/egl_external_platform.d/20_nvidia_xcb.json",
    "egl/egl_external_platform.d/20_nvidia_xlib.json",
    "nvidia/nvoptix.bin",
    "X11/xorg.conf.d/10-nvidia.conf",
    "X11/xorg.conf.d/nvidia-drm-outputclass.conf",
];
/// Configuration files that containers get below `/etc`.
const CONFIG_FILES: [&str; 6] = [
    "OpenCL/vendors/nvidia.icd",
    "vulkan/icd.d/nvidia_icd.json",
    "vulkan/icd.d/nvidia_icd.x86_64.json",
    "vulkan/icd.d/nvidia_icd.aarch64.json",
    "vulkan/icd.d/nvidia_layers.json",
    "vulkan/implicit_layer.d/nvidia_layers.json",
];

const SOCKETS: [&str; 2] = ["nvidia-persistenced/socket", "nvidia-fabricmanager/socket"];
const MPS: &str = "/tmp/nvidia-mps";

pub(super) fn mount(host_path: String, container_path: String, options: &[&str]) -> CdiMount {
    CdiMount {
        host_path,
        container_path,
        options: options.iter().map(|option| (*option).to_owned()).collect(),
        ..CdiMount::default()
    }
}

/// Mount a file of the root at a path in the container. Links in the root are followed, so the container gets a plain file.
fn at(root: &Root<'_>, path: &str, container_path: String) -> Option<CdiMount> {
    Some(mount(root.host(&root.file(path)?), container_path, &FILE))
}

pub(super) fn programs(root: &Root<'_>) -> Vec<CdiMount> {
    let find = |program: &&str| {
        PROGRAM_DIRECTORIES.iter().find_map(|directory| {
            let path = format!("{directory}/{program}");
            at(root, &path, path.clone())
        })
    };
    PROGRAMS.iter().filter_map(find).collect()
}

pub(super) fn configuration(root: &Root<'_>) -> Vec<CdiMount> {
    let mut mounts = Vec::new();
    for (files, into) in [(&SHARED_FILES[..], "/usr/share"), (&CONFIG_FILES[..], "/etc")] {
        for file in files {
            // On GKE, vulkan/ is at the top level of the driver's root.
            let top = file.starts_with("vulkan/").then_some("");
            let directories = CONFIG_DIRECTORIES.into_iter().chain(top);
            mounts.extend(
                directories
                    .map(|directory| format!("{directory}/{file}"))
                    .find_map(|path| at(root, &path, format!("{into}/{file}"))),
            );
        }
    }
    mounts
}

/// Mount the modules of the X server, which are in subdirectories of the library directories.
pub(super) fn xorg(root: &Root<'_>, directories: &[String], version: &str) -> Vec<CdiMount> {
    let mut places: Vec<String> = Vec::new();
    for directory in
        directories
            .iter()
            .map(String::as_str)
            .chain(["/usr/lib", "/usr/lib64", "/usr/X11R6/lib", "/usr/X11R6/lib64"])
    {
        places.push(format!("{directory}/nvidia/xorg"));
        for modules in ["xorg/modules", "xorg/modules/updates"] {
            places.push(format!("{directory}/{modules}/drivers"));
            places.push(format!("{directory}/{modules}/extensions"));
        }
    }
    let first = |name: &str, file: &str| {
        places
            .iter()
            .find_map(|place| at(root, &format!("{place}/{file}"), format!("{place}/{name}")))
    };
    let server = format!("libglxserver_nvidia.so.{version}");
    [
        first("nvidia_drv.so", "nvidia_drv.so"),
        first(&server, &server),
        // The X server loads the module by this name.
        first("libglxserver_nvidia.so", &server),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Mount the firmware of the GPU System Processor (GSP), from the first of the kernel's firmware directories that has it.
pub(super) fn firmware(root: &Root<'_>, machine: &Root<'_>, version: &str) -> Vec<CdiMount> {
    let own = machine.text("/sys/module/firmware_class/parameters/path").unwrap_or_default();
    let release = machine.text("/proc/sys/kernel/osrelease").unwrap_or_default();
    let directories = [
        own,
        format!("/lib/firmware/updates/{release}"),
        "/lib/firmware/updates".to_owned(),
        format!("/lib/firmware/{release}"),
        "/lib/firmware".to_owned(),
    ];
    for directory in directories.iter().filter(|directory| directory.starts_with('/')) {
        let directory = format!("{}/nvidia/{version}", directory.trim_end_matches('/'));
        let names = root.names(&directory);
        let is_firmware = |name: &&String| name.starts_with("gsp") && name.ends_with(".bin");
        let files = names.iter().filter(is_firmware).map(|name| format!("{directory}/{name}"));
        let mounts: Vec<CdiMount> = files.filter_map(|path| at(root, &path, path.clone())).collect();
        if !mounts.is_empty() {
            return mounts;
        }
    }
    Vec::new()
}

/// Mount the files that GPUDirect Storage needs in addition to its device nodes. Its configuration comes from the driver's root
/// or the machine. The udev database, which lists the disks, always comes from the machine, because a driver container may have
/// an empty udev database.
pub(super) fn storage(root: &Root<'_>, machine: &Root<'_>) -> Vec<CdiMount> {
    let config = |root| at(root, "/etc/cufile.json", "/etc/cufile.json".to_owned());
    let mut mounts: Vec<CdiMount> = config(root).or_else(|| config(machine)).into_iter().collect();
    if let Some((real, entry)) = machine.resolve("/run/udev")
        && entry.kind == FileKind::Directory
    {
        mounts.push(mount(machine.host(&real), "/run/udev".to_owned(), &FILE));
    }
    mounts
}

/// Mount the sockets of the driver's running daemons, and the directory with the pipes of MPS.
pub(super) fn sockets(root: &Root<'_>) -> Vec<CdiMount> {
    let mut mounts = Vec::new();
    for socket in SOCKETS {
        let found = ["/run", "/var/run"].iter().find_map(|directory| {
            let path = format!("{directory}/{socket}");
            let (real, entry) = root.resolve(&path)?;
            (entry.kind == FileKind::Special).then(|| mount(root.host(&real), path, &SOCKET))
        });
        mounts.extend(found);
    }
    if let Some((real, entry)) = root.resolve(MPS)
        && entry.kind == FileKind::Directory
    {
        mounts.push(mount(root.host(&real), MPS.to_owned(), &SOCKET));
    }
    mounts
}
