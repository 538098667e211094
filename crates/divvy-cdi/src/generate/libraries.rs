//! Finds the driver's libraries in its root, and mounts them where a container's loader finds them.

use std::collections::{BTreeMap, BTreeSet};

use super::files::{FILE, mount};
use super::ldcache;
use crate::CdiMount;
use divvy_host::{FileKind, Root};

/// The directories in which installers put the libraries, as in nvidia-container-toolkit's library search paths. Directories from the root's
/// `ld.so.cache` are searched as well.
const DIRECTORIES: [&str; 11] = [
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/lib/aarch64-linux-gnu/nvidia/current",
    "/lib64",
    "/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/lib",
    "/usr/local/nvidia/lib64",
    "/",
];

/// Libraries that belong to the driver but do not have the driver's version in their name.
const OWN_VERSION: [&str; 6] = [
    "libnvidia-egl-gbm.so.",
    "libnvidia-egl-wayland.so.",
    "libnvidia-egl-wayland2.so.",
    "libnvidia-egl-xcb.so.",
    "libnvidia-egl-xlib.so.",
    "libnvidia-nvvm70.so.",
];

/// The names under which programs load libraries, by stem. Usually a root has links with these names. This list is for roots in which `ldconfig`
/// never ran, and for names that no installer creates.
const NAMES: [(&str, &str); 20] = [
    ("libcuda", "libcuda.so.1"),
    ("libcuda", "libcuda.so"),
    ("libnvidia-ml", "libnvidia-ml.so.1"),
    ("libnvidia-cfg", "libnvidia-cfg.so.1"),
    ("libnvidia-nscq", "libnvidia-nscq.so.2"),
    ("libcudadebugger", "libcudadebugger.so.1"),
    ("libnvidia-opencl", "libnvidia-opencl.so.1"),
    ("libnvidia-ptxjitcompiler", "libnvidia-ptxjitcompiler.so.1"),
    ("libnvidia-allocator", "libnvidia-allocator.so.1"),
    ("libnvidia-nvvm", "libnvidia-nvvm.so.4"),
    ("libnvcuvid", "libnvcuvid.so.1"),
    ("libnvidia-encode", "libnvidia-encode.so.1"),
    ("libnvidia-opticalflow", "libnvidia-opticalflow.so.1"),
    ("libnvidia-opticalflow", "libnvidia-opticalflow.so"),
    ("libnvidia-fbc", "libnvidia-fbc.so.1"),
    ("libnvoptix", "libnvoptix.so.1"),
    ("libGLX_nvidia", "libGLX_nvidia.so.0"),
    ("libGLX_nvidia", "libGLX_indirect.so.0"),
    ("libEGL_nvidia", "libEGL_nvidia.so.0"),
    ("libnvidia-vulkan-producer", "libnvidia-vulkan-producer.so"),
];

/// The links through which a program finds a driver.
const LINKED: [&str; 2] = ["libcuda.so.1", "libnvidia-ml.so.1"];

/// The architecture of a library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ElfMachine {
    X86,
    Arm,
}

impl ElfMachine {
    /// The directories that loaders search: one of Debian's multiarch, and the other distributions' one.
    fn loader_directories(self) -> [&'static str; 2] {
        match self {
            ElfMachine::X86 => ["/usr/lib/x86_64-linux-gnu", "/usr/lib64"],
            ElfMachine::Arm => ["/usr/lib/aarch64-linux-gnu", "/usr/lib64"],
        }
    }
}

/// Return the directories in which loaders search for libraries of the architecture of `library`.
pub(super) fn loader_directories(root: &Root<'_>, library: &str) -> [&'static str; 2] {
    match header(root, library) {
        Header::Bits64(machine) => machine.loader_directories(),
        Header::Bits32 | Header::Unknown => ElfMachine::X86.loader_directories(),
    }
}

/// The driver's libraries, and how they are mounted.
#[derive(Debug, Clone)]
pub(super) struct DriverLibraries {
    /// The driver's version.
    pub(super) version: String,
    pub(super) mounts: Vec<CdiMount>,
    /// The directories in the container that have libcuda.
    pub(super) cuda: Vec<String>,
    /// The directories in the root that have libraries of the driver, without links.
    pub(super) directories: Vec<String>,
    /// The directories in the container in which a loader should find libraries.
    pub(super) searched: Vec<String>,
}

/// Find the libraries. Return `None` if neither libcuda nor libnvidia-ml exists. `loaded` is the version of the kernel module; if several versions
/// are installed, this one is selected.
pub(super) fn find(root: &Root<'_>, loaded: Option<&str>, notes: &mut Vec<String>) -> Option<DriverLibraries> {
    let cache = root.read("/etc/ld.so.cache", ldcache::LIMIT);
    let cached = match cache.as_deref().map(ldcache::parse) {
        Some(Ok(libraries)) => libraries,
        Some(Err(error)) => {
            notes.push(format!("{} is not used: {error}", root.host("/etc/ld.so.cache")));
            Vec::new()
        }
        None => Vec::new(),
    };
    let directories = directories(root, &cached);
    let version = version(root, &directories, loaded)?;
    let ending = format!(".so.{version}");
    let mut found = FoundLibraries::default();
    for directory in &directories {
        for directory in [directory.clone(), format!("{directory}/vdpau")] {
            let names = root.names(&directory);
            let wanted = |name: &&String| name.ends_with(&ending) || OWN_VERSION.iter().any(|own| name.starts_with(own));
            for name in names.iter().filter(wanted) {
                found.take(root, &directory, name);
            }
        }
    }
    let machine = found.machine.unwrap_or(ElfMachine::X86);
    let usual = machine.loader_directories();
    let mut placed = PlacedMounts::default();
    for (file, (directory, name)) in &found.files {
        placed.put(root, file, &format!("{directory}/{name}"));
    }
    for (directory, name, file) in links(root, &directories, &cached, &found) {
        placed.put(root, &file, &format!("{}/{name}", directory.trim_end_matches('/')));
    }
    let cuda = placed.make_reachable(root, &found, &usual);
    let with_libraries: BTreeSet<&String> = found.files.values().map(|(directory, _)| directory).collect();
    let searched: BTreeSet<String> = placed
        .mounts
        .keys()
        .filter_map(|path| path.rsplit_once('/'))
        .map(|(directory, _)| directory)
        .filter(|directory| !is_asked_for_by_path(directory))
        .map(str::to_owned)
        .collect();
    Some(DriverLibraries {
        searched: searched.into_iter().collect(),
        version,
        mounts: placed.mounts.into_values().collect(),
        cuda,
        directories: with_libraries.into_iter().cloned().collect(),
    })
}

/// Return the existing directories to search, without links, each once.
fn directories(root: &Root<'_>, cached: &[ldcache::CachedLibrary<'_>]) -> Vec<String> {
    let from_cache = cached.iter().filter(|library| {
        library.is_64_bit()
            && ["libcuda.so", "libnvidia-", "libGLX_nvidia"]
                .iter()
                .any(|own| library.name.starts_with(own))
    });
    let from_cache = from_cache.filter_map(|library| library.path.rsplit_once('/').map(|(directory, _)| directory));
    let mut tried = BTreeSet::new();
    let mut found: Vec<String> = Vec::new();
    let usual = DIRECTORIES.into_iter().chain(from_cache);
    for directory in usual.filter(|directory| tried.insert(*directory)) {
        let Some((directory, entry)) = root.resolve(directory) else {
            continue;
        };
        if entry.kind == FileKind::Directory {
            // Debian's packages of some branches have the libraries in a directory of their own, such as `nvidia/tesla-470`, and links to it.
            let linked = LINKED.iter().filter_map(|name| root.file(&format!("{directory}/{name}")));
            let linked = linked.filter_map(|file| Some(file.rsplit_once('/')?.0.to_owned()));
            let directory = directory.trim_end_matches('/').to_owned();
            for directory in std::iter::once(directory).chain(linked) {
                if !found.contains(&directory) {
                    found.push(directory);
                }
            }
        }
    }
    found
}

fn version(root: &Root<'_>, directories: &[String], loaded: Option<&str>) -> Option<String> {
    for library in ["libcuda.so.", "libnvidia-ml.so."] {
        let mut installed = Vec::new();
        for directory in directories {
            for name in root.names(directory) {
                let Some(version) = name
                    .strip_prefix(library)
                    .filter(|version| crate::driver_version::is_version(version))
                else {
                    continue;
                };
                let is_file = root
                    .stat_in(directory, &name)
                    .is_some_and(|entry| entry.kind == FileKind::File);
                if is_file && header(root, &format!("{directory}/{name}")) != Header::Bits32 {
                    installed.push(version.to_owned());
                }
            }
        }
        let first = installed.first().cloned();
        if let Some(version) = installed
            .into_iter()
            .find(|version| Some(version.as_str()) == loaded)
            .or(first)
        {
            return Some(version);
        }
    }
    None
}

/// The kind of file according to its first bytes.
#[derive(Debug, PartialEq, Eq)]
enum Header {
    Bits32,
    Bits64(ElfMachine),
    /// Not an ELF file, or for another architecture. Such a file is selected by its name.
    Unknown,
}

fn header(root: &Root<'_>, path: &str) -> Header {
    let bytes = root.read(path, 20).unwrap_or_default();
    match (bytes.get(..4), bytes.get(4), bytes.get(18)) {
        (Some(b"\x7fELF"), Some(1), _) => Header::Bits32,
        (Some(b"\x7fELF"), Some(2), Some(0x3e)) => Header::Bits64(ElfMachine::X86),
        (Some(b"\x7fELF"), Some(2), Some(0xb7)) => Header::Bits64(ElfMachine::Arm),
        _ => Header::Unknown,
    }
}

#[derive(Debug, Default)]
struct FoundLibraries {
    /// The directory and the file name of each library, by its path in the root.
    files: BTreeMap<String, (String, String)>,
    machine: Option<ElfMachine>,
}

impl FoundLibraries {
    fn take(&mut self, root: &Root<'_>, directory: &str, name: &str) {
        let path = format!("{directory}/{name}");
        if root.stat_in(directory, name).is_none_or(|entry| entry.kind != FileKind::File) {
            return;
        }
        let machine = match header(root, &path) {
            Header::Bits32 => return,
            Header::Bits64(machine) => Some(machine),
            Header::Unknown if directory.contains("aarch64") => Some(ElfMachine::Arm),
            Header::Unknown => None,
        };
        self.machine = self.machine.or(machine);
        self.files.insert(path, (directory.to_owned(), name.to_owned()));
    }
}

/// Return the links to the libraries, from the libraries' directories and from the cache: the link's directory, its name, and the file that it leads
/// to.
fn links(
    root: &Root<'_>,
    directories: &[String],
    cached: &[ldcache::CachedLibrary<'_>],
    found: &FoundLibraries,
) -> Vec<(String, String, String)> {
    let stems: BTreeSet<&str> = found.files.values().filter_map(|(_, name)| stem(name)).collect();
    let mut candidates: BTreeSet<(String, String)> = BTreeSet::new();
    for directory in directories {
        for (directory, any_name) in [
            (directory.clone(), false),
            (format!("{directory}/vdpau"), false),
            // In this directory, Mesa's loader looks for nvidia-drm_gbm.so, which is a link to libnvidia-allocator.
            (format!("{directory}/gbm"), true),
        ] {
            for name in root.names(&directory) {
                let ours = any_name || stem(&name).is_some_and(|stem| stems.contains(stem)) || name == "libGLX_indirect.so.0";
                if ours && matches!(root.stat_in(&directory, &name), Some(entry) if matches!(entry.kind, FileKind::Link(_))) {
                    candidates.insert((directory.clone(), name));
                }
            }
        }
    }
    for library in cached.iter().filter(|library| library.is_64_bit()) {
        if stem(library.name).is_some_and(|stem| stems.contains(stem))
            && let Some((directory, name)) = library.path.rsplit_once('/')
            && let Some((directory, _)) = root.resolve(directory)
        {
            candidates.insert((directory, name.to_owned()));
        }
    }
    candidates
        .into_iter()
        .filter_map(|(directory, name)| {
            let file = root.file(&format!("{directory}/{name}"))?;
            found.files.contains_key(&file).then_some((directory, name, file))
        })
        .collect()
}

/// Report whether programs load the libraries of a directory by path, so that the loader does not need to find them by name.
fn is_asked_for_by_path(directory: &str) -> bool {
    directory.ends_with("/vdpau") || directory.ends_with("/gbm")
}

/// Return the part of a library's name before `.so`, such as `libcuda` for `libcuda.so.1`.
fn stem(name: &str) -> Option<&str> {
    name.split_once(".so").map(|(stem, _)| stem)
}

/// The mounts, by their path in the container.
#[derive(Debug, Default)]
struct PlacedMounts {
    mounts: BTreeMap<String, CdiMount>,
}

impl PlacedMounts {
    fn put(&mut self, root: &Root<'_>, file: &str, at: &str) {
        self.mounts
            .entry(at.to_owned())
            .or_insert_with(|| mount(root.host(file), at.to_owned(), &FILE));
    }

    /// Mount each library in the directories that loaders search, under every name that programs use. Return the directories that have libcuda.
    fn make_reachable(&mut self, root: &Root<'_>, found: &FoundLibraries, usual: &[&str; 2]) -> Vec<String> {
        let mut names: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
        for (at, mount) in &self.mounts {
            let name = at.rsplit('/').next().unwrap_or_default();
            if is_asked_for_by_path(at[..at.len() - name.len()].trim_end_matches('/')) {
                continue;
            }
            let file = mount.host_path.as_str();
            names.entry(file).or_default().insert(name.to_owned());
        }
        let mut wanted: Vec<(String, String)> = Vec::new();
        let mut cuda = BTreeSet::new();
        for (file, (directory, name)) in &found.files {
            let Some(known) = names.get(root.host(file).as_str()) else {
                continue;
            };
            let mut all = known.clone();
            let extra = NAMES.iter().filter(|(stem_of, _)| stem(name) == Some(stem_of));
            all.extend(extra.map(|(_, name)| (*name).to_owned()));
            // If the library has a short name, no program loads it by the name with the version.
            let short = all.iter().any(|other| other != name);
            for at in std::iter::once(directory.as_str()).chain(usual.iter().copied()) {
                if name.starts_with("libcuda.so.") {
                    cuda.insert(at.to_owned());
                }
                for asked in &all {
                    if asked != name || !short || at == directory {
                        wanted.push((file.clone(), format!("{at}/{asked}")));
                    }
                }
            }
        }
        for (file, at) in wanted {
            self.put(root, &file, &at);
        }
        cuda.into_iter().collect()
    }
}
