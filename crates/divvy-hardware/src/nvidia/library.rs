//! Searches for the driver's library.

use std::path::{Path, PathBuf};

use divvy_host::{Files, Root};

use super::NvidiaOptions;

/// The library's name, which is the same for every driver version.
const SONAME: &str = "libnvidia-ml.so.1";

/// Library directories of the distributions, relative to a root, and those of WSL. The first six are the ones that NVIDIA's device plugin
/// searches.
const DIRECTORIES: [&str; 8] = [
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "usr/lib/wsl/lib",
    "usr/lib/wsl/drivers",
];

/// The root of a driver container below the host's root, as the GPU operator mounts it.
const DRIVER_CONTAINER: &str = "run/nvidia/driver";

/// Return the files of a library in these directories below a root. An absolute link, such as those of Debian's alternatives, is resolved inside the root, which is
/// the root of another file system. If no link leads to a file inside the root, links that lead out of it are followed: those in NixOS's `/run/opengl-driver` lead
/// to `/nix/store`.
fn files(root: &Path, directories: &[&str], soname: &str) -> Vec<PathBuf> {
    let machine = Files::below("/");
    let inside = root.to_str().and_then(|root| Root::open(&machine, root));
    let mut found: Vec<PathBuf> = Vec::new();
    for directory in directories {
        let file = inside
            .as_ref()
            .and_then(|root| Some(root.host(&root.file(&format!("/{directory}/{soname}"))?)));
        found.extend(file.map(PathBuf::from).filter(|file| !found.contains(file)));
    }
    if found.is_empty() {
        let files = directories.iter().map(|directory| root.join(directory).join(soname));
        found.extend(files.filter(|file| file.exists()));
    }
    found
}

/// Return the paths to try, in this order. A library that the user names is the only candidate. If the driver root is not `/`,
/// only libraries below it are candidates, because a library from the probe's own file system would belong to another driver
/// version.
pub(super) fn candidates(options: &NvidiaOptions) -> Vec<PathBuf> {
    if let Some(library) = &options.library {
        return vec![library.clone()];
    }
    let host = options.driver_root == Path::new("/");
    let mut candidates = Vec::new();
    if host {
        // The dynamic loader's own search: LD_LIBRARY_PATH, ld.so.cache.
        candidates.push(PathBuf::from(SONAME));
    }
    for root in [options.driver_root.clone(), options.driver_root.join(DRIVER_CONTAINER)] {
        candidates.extend(files(&root, &DIRECTORIES, SONAME));
    }
    candidates
}

/// Where NVIDIA's Linux for Tegra has the driver's libraries, relative to a root.
const TEGRA: [&str; 2] = ["usr/lib/aarch64-linux-gnu/nvidia", "usr/lib/aarch64-linux-gnu/tegra"];

/// Return the paths to try for CUDA's driver library, in this order: below a driver root that is not `/`, then where the dynamic
/// loader searches, then in the usual directories.
pub(super) fn cuda_candidates(options: &NvidiaOptions, soname: &str) -> Vec<PathBuf> {
    let mut candidates = files(&options.driver_root, &[&DIRECTORIES[..], &TEGRA].concat(), soname);
    let is_host = options.driver_root == Path::new("/");
    candidates.insert(if is_host { 0 } else { candidates.len() }, PathBuf::from(soname));
    candidates
}

/// Return the root directory of the driver whose library the probe loads. This is the driver container's root only if no driver is
/// installed on the host itself.
pub fn driver_root(options: &NvidiaOptions) -> PathBuf {
    let container = options.driver_root.join(DRIVER_CONTAINER);
    if !has_library(&options.driver_root) && has_library(&container) {
        container
    } else {
        options.driver_root.clone()
    }
}

/// Report whether the driver's library is below this root directory.
pub fn has_library(root: &Path) -> bool {
    !files(root, &DIRECTORIES, SONAME).is_empty()
}

/// Return the message for a missing driver, including what to do.
pub(super) fn not_found(options: &NvidiaOptions, not_loaded: &[String]) -> String {
    let root = options.driver_root.display();
    let tried = match not_loaded {
        [] => format!("no {SONAME} below {root}"),
        some => some.join("; "),
    };
    match &options.library {
        Some(library) => format!(
            "the driver's library could not be loaded: {tried}. Without it no GPU is found; check --nvml-library, which names {}",
            library.display()
        ),
        None => format!(
            "the driver's library could not be loaded: {tried}. Without it no GPU is found; install the NVIDIA driver, or \
             specify its location with --driver-root (now {root}) or --nvml-library"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_below_a_root_leads_to_a_file_below_it() {
        let root = tempfile::tempdir().expect("directory");
        let real = "usr/lib/x86_64-linux-gnu/nvidia/tesla-470/libnvidia-ml.so.470.256.02";
        let alternative = "etc/alternatives/nvidia--libnvidia-ml.so.1-x86_64-linux-gnu";
        for (link, target) in [
            ("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1", alternative),
            (alternative, real),
            ("lib", "usr/lib"),
            // It leads out of the root.
            ("usr/lib64/libnvidia-ml.so.1", "proc/self/exe"),
        ] {
            let link = root.path().join(link);
            std::fs::create_dir_all(link.parent().expect("directory")).expect("directory");
            std::os::unix::fs::symlink(Path::new("/").join(target), link).expect("link");
        }
        let real = root.path().join(real);
        let options = NvidiaOptions {
            proc_root: "/proc".into(),
            library: None,
            driver_root: root.path().to_owned(),
        };
        assert_eq!(candidates(&options), [root.path().join("usr/lib64/libnvidia-ml.so.1")]);
        std::fs::create_dir_all(real.parent().expect("directory")).expect("directory");
        std::fs::write(&real, "").expect("file");
        assert_eq!(candidates(&options), [real]);
    }

    /// The driver container of the root is searched, too.
    #[test]
    fn a_root_other_than_the_hosts_is_searched_alone() {
        let root = tempfile::tempdir().expect("directory");
        let files = [
            root.path().join("usr/lib64").join(SONAME),
            root.path().join("run/nvidia/driver/usr/lib/x86_64-linux-gnu").join(SONAME),
        ];
        for file in &files {
            std::fs::create_dir_all(file.parent().expect("directory")).expect("directory");
            std::fs::write(file, "").expect("file");
        }
        let mut options = NvidiaOptions {
            proc_root: "/proc".into(),
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
