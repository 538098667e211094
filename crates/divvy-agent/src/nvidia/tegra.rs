//! Finds out whether the node is a Tegra.

use std::path::Path;

use divvy_hardware::{Failure, FailureCode, Snapshot};
use divvy_host::{Files, Root};
use divvy_model::Vendor;
use divvy_nvidia_config::NvidiaConfig;
use divvy_nvidia_plugin::{FAMILY_FILE, Nvml, RELEASE_FILE, is_tegra_family};

use super::Surroundings;

/// The maximum size in bytes of a family's name. No name comes near it.
const FAMILY: usize = 64;

/// Report whether the node has a Tegra's files. They are looked for where the driver's root is mounted in the container, as NVIDIA's
/// device plugin does, and below the container's own root, as NVIDIA's GPU feature discovery does: a container sees the kernel's
/// files in its own `/sys`.
pub(super) fn has_files(config: &NvidiaConfig, surroundings: &Surroundings) -> bool {
    let roots = [Path::new(&config.plugin.container_driver_root), &surroundings.root];
    roots.into_iter().any(has_files_below)
}

fn has_files_below(root: &Path) -> bool {
    let files = Files::below(root);
    Root::open(&files, "/").is_some_and(|root| {
        let family = || root.read(FAMILY_FILE, FAMILY);
        root.file(RELEASE_FILE).is_some() || family().is_some_and(|family| is_tegra_family(&String::from_utf8_lossy(&family)))
    })
}

/// Return what an answer of the probe says about NVML.
pub(super) fn nvml<'a>(answer: Result<&'a Snapshot, &Failure>) -> Nvml<'a> {
    match answer {
        Ok(snapshot) if snapshot.drivers.contains_key(&Vendor::Nvidia) => {
            let gpus = snapshot.gpus.iter().filter(|gpu| gpu.vendor == Vendor::Nvidia);
            Nvml::Gpus(gpus.map(|gpu| gpu.model.as_str()).collect())
        }
        Err(failure) if failure.code != FailureCode::LibraryNotFound => Nvml::Silent,
        // Another vendor's driver may answer.
        Ok(_) | Err(_) => Nvml::Missing,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_tegra_is_known_by_its_release_file_or_its_family() {
        let directory = tempfile::tempdir().expect("a directory");
        let has = |name: &str, file: &str, content: &[u8]| {
            let root = directory.path().join(name);
            let path = root.join(file.trim_start_matches('/'));
            std::fs::create_dir_all(path.parent().expect("a directory")).expect("created");
            std::fs::write(path, content).expect("written");
            has_files_below(&root)
        };
        assert!(has("release", RELEASE_FILE, b""));
        assert!(has("family", FAMILY_FILE, b"Tegra\n"));
        assert!(!has("other", FAMILY_FILE, b"Snapdragon\n"));
        assert!(!has("binary", FAMILY_FILE, &[0xff, b't', b'e', b'g', b'r', b'a']));
        assert!(!has_files_below(&directory.path().join("nothing")));
        // A symbolic link to a file outside the root is not followed. A directory with the file's name does not count.
        std::fs::create_dir_all(directory.path().join("link/etc")).expect("created");
        symlink(
            "../../release/etc/nv_tegra_release",
            directory.path().join("link/etc/nv_tegra_release"),
        )
        .expect("linked");
        assert!(!has_files_below(&directory.path().join("link")));
        std::fs::create_dir_all(directory.path().join("directory/etc/nv_tegra_release")).expect("created");
        assert!(!has_files_below(&directory.path().join("directory")));
    }
}
