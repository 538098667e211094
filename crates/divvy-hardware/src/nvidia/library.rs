//! Where the driver's library may be.

use std::path::{Path, PathBuf};

use super::Options;

/// The name that every driver's library has.
const SONAME: &str = "libnvidia-ml.so.1";

/// Folders of distributions (research/nvidia-device-plugin.md section 8.2) and of WSL, below a root.
const FOLDERS: [&str; 8] = [
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "usr/lib/wsl/lib",
    "usr/lib/wsl/drivers",
];

/// Where a driver that runs as a container has its root, as the GPU operator mounts it.
const DRIVER_CONTAINER: &str = "run/nvidia/driver";

/// What to load, in this order. A library named by the user is the only candidate; below another root than `/` only
/// that root's libraries are, since the probe's own would not be the driver's.
pub(super) fn candidates(options: &Options) -> Vec<PathBuf> {
    if let Some(library) = &options.library {
        return vec![library.clone()];
    }
    let host = options.driver_root == Path::new("/");
    let mut candidates = Vec::new();
    if host {
        // The loader's own search: LD_LIBRARY_PATH, ld.so.cache.
        candidates.push(PathBuf::from(SONAME));
    }
    for root in [options.driver_root.clone(), options.driver_root.join(DRIVER_CONTAINER)] {
        let files = FOLDERS.iter().map(|folder| root.join(folder).join(SONAME));
        candidates.extend(files.filter(|file| file.exists()));
    }
    candidates
}

/// The directory in which the driver is installed whose library the probe loads: that of a driver container only where the driver is not
/// installed on the host itself.
pub fn driver_root(options: &Options) -> PathBuf {
    let container = options.driver_root.join(DRIVER_CONTAINER);
    let has_library = |root: &Path| FOLDERS.iter().any(|folder| root.join(folder).join(SONAME).exists());
    match !has_library(&options.driver_root) && has_library(&container) {
        true => container,
        false => options.driver_root.clone(),
    }
}

/// Why there is no driver, and what to do.
pub(super) fn not_found(options: &Options, not_loaded: &[String]) -> String {
    let root = options.driver_root.display();
    let tried = match not_loaded {
        [] => format!("no {SONAME} below {root}"),
        some => some.join("; "),
    };
    match &options.library {
        Some(library) => format!(
            "the driver's library could not be loaded: {tried}. Without it no GPU is found; --nvml-library names {}",
            library.display()
        ),
        None => format!(
            "the driver's library could not be loaded: {tried}. Without it no GPU is found; install the NVIDIA driver, or \
             say where it is with --driver-root (now {root}) or --nvml-library"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_root_than_the_hosts_is_searched_alone_and_its_driver_container_too() {
        let root = tempfile::tempdir().expect("folder");
        let files = [
            root.path().join("usr/lib64").join(SONAME),
            root.path().join("run/nvidia/driver/usr/lib/x86_64-linux-gnu").join(SONAME),
        ];
        for file in &files {
            std::fs::create_dir_all(file.parent().expect("folder")).expect("folder");
            std::fs::write(file, "").expect("file");
        }
        let mut options = Options {
            library: None,
            driver_root: root.path().to_owned(),
        };
        assert_eq!(candidates(&options), files);
        assert_eq!(driver_root(&options), root.path());
        std::fs::remove_file(&files[0]).expect("removed");
        assert_eq!(driver_root(&options), root.path().join("run/nvidia/driver"));
        options.driver_root = PathBuf::from("/");
        assert_eq!(candidates(&options)[0], Path::new(SONAME));
        options.library = Some(PathBuf::from("/x/y.so"));
        assert_eq!(candidates(&options), [Path::new("/x/y.so")]);
    }
}
