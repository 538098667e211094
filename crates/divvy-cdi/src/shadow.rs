//! How a container gets the guard: libraries that have the names of the driver's libraries, and that need the real ones by their absolute paths.
//!
//! Only the file behind a name changes. The links to it, such as `libcuda.so.1`, are made in the container as without the guard.

use super::{CdiMount, Edits, Spec};

/// What [`Edits::shadow`] puts into a container.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Shadow {
    /// The libraries. One that the container does not have is left out.
    pub libraries: Vec<ShadowLibrary>,
    /// Files that the container can only read: the path on the node, and the path in the container.
    pub read_only: Vec<(String, String)>,
    /// Files that the container can also write.
    pub writable: Vec<(String, String)>,
    /// Other libraries, which the container can load: the path on the node, and the path in the container.
    pub loaded: Vec<(String, String)>,
    /// Environment variables: name and value.
    pub env: Vec<(&'static str, &'static str)>,
}

/// A library in the place of one of the driver's.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ShadowLibrary {
    /// The driver's library, without a version: [`CUDA`], for example.
    pub name: &'static str,
    /// The file on the node that takes its place.
    pub file: String,
    /// Where the container has the driver's own file.
    pub real: &'static str,
    /// Where the container has the file that takes its place, in addition to the driver's paths.
    pub at: &'static str,
}

/// CUDA's driver library.
pub const CUDA: &str = "libcuda.so";
/// The library with which programs such as `nvidia-smi` query GPUs.
pub const NVML: &str = "libnvidia-ml.so";

impl Edits {
    /// Put the guard in the place of the driver's libraries. Change nothing if the container has none of them.
    pub fn shadow(&mut self, shadow: &Shadow) {
        let mut is_changed = false;
        for library in &shadow.libraries {
            let Some(real) = self.mounts.iter().find(|mount| has(mount, library.name)) else {
                continue;
            };
            let real = CdiMount {
                container_path: library.real.to_owned(),
                ..real.clone()
            };
            let guard = CdiMount {
                host_path: library.file.clone(),
                container_path: library.at.to_owned(),
                ..real.clone()
            };
            // A node may provide the library in several directories. All of them are the same driver, so one real library is enough.
            for mount in self.mounts.iter_mut().filter(|mount| has(mount, library.name)) {
                mount.host_path.clone_from(&library.file);
            }
            self.mounts.extend([real, guard]);
            is_changed = true;
        }
        if !is_changed {
            return;
        }
        let files = |files: &[(String, String)], options: &[&str]| -> Vec<CdiMount> {
            let mount = |(host, container): &(String, String)| CdiMount {
                host_path: host.clone(),
                container_path: container.clone(),
                options: options.iter().map(|option| (*option).to_owned()).collect(),
                ..CdiMount::default()
            };
            files.iter().map(mount).collect()
        };
        self.env
            .extend(shadow.env.iter().map(|(name, value)| format!("{name}={value}")));
        self.mounts.extend(files(&shadow.loaded, &["ro", "nosuid", "nodev", "bind"]));
        self.mounts
            .extend(files(&shadow.read_only, &["ro", "nosuid", "nodev", "noexec", "bind"]));
        self.mounts
            .extend(files(&shadow.writable, &["rw", "nosuid", "nodev", "noexec", "bind"]));
    }
}

impl Spec {
    /// Report whether a container with this device gets CUDA's driver library from a mount.
    pub fn mounts_cuda(&self, device: &str) -> bool {
        let edits = self.edits_of(device);
        edits.is_some_and(|edits| edits.mounts.iter().any(|mount| has(mount, CUDA)))
    }
}

/// Report whether a mount is this library, for 64-bit programs. The guard has no 32-bit version.
fn has(mount: &CdiMount, library: &str) -> bool {
    let mut parts = mount.container_path.rsplit('/');
    let version = parts.next().unwrap_or_default().strip_prefix(library);
    version.is_some_and(|version| version.is_empty() || version.starts_with('.'))
        && !parts.any(|directory| matches!(directory, "i386-linux-gnu" | "i686-linux-gnu" | "lib32"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edits(paths: &[&str]) -> Edits {
        let mount = |path: &&str| CdiMount {
            host_path: format!("/drv{path}"),
            container_path: (*path).to_owned(),
            options: vec!["ro".to_owned()],
            ..CdiMount::default()
        };
        Edits {
            mounts: paths.iter().map(mount).collect(),
            ..Edits::default()
        }
    }

    fn pair(host: &str, container: &str) -> (String, String) {
        (host.to_owned(), container.to_owned())
    }

    #[test]
    fn only_files_behind_driver_library_names_change() {
        let mut edits = edits(&[
            "/usr/lib64/libcuda.so.550.54.15",
            "/usr/lib64/libcudadebugger.so.550.54.15",
            "/usr/lib/i386-linux-gnu/libcuda.so.550.54.15",
            "/usr/lib64/libnvidia-ml.so.550.54.15",
        ]);
        let shadow = Shadow {
            libraries: vec![
                ShadowLibrary {
                    name: CUDA,
                    file: "/state/guard/1/libcuda.so.1".to_owned(),
                    real: "/run/divvy/guard/libcuda.so.real",
                    at: "/run/divvy/guard/libcuda.so.1",
                },
                ShadowLibrary {
                    name: NVML,
                    file: "/state/guard/1/libnvidia-ml.so.1".to_owned(),
                    real: "/run/divvy/guard/libnvidia-ml.so.real",
                    at: "/run/divvy/guard/libnvidia-ml.so.1",
                },
            ],
            read_only: vec![pair("/state/limits", "/run/limits")],
            writable: vec![pair("/state/usage", "/run/usage")],
            loaded: vec![pair("/state/guard/1/audit.so", "/run/audit.so")],
            env: vec![("LD_AUDIT", "/run/audit.so")],
        };
        edits.shadow(&shadow);
        let mounts = edits.mounts.iter();
        let lines = mounts.map(|mount| format!("{} -> {} {}", mount.host_path, mount.container_path, mount.options.join(",")));
        assert_eq!(edits.env, ["LD_AUDIT=/run/audit.so"]);
        insta::assert_snapshot!(lines.collect::<Vec<_>>().join("\n"), @"
        /state/guard/1/libcuda.so.1 -> /usr/lib64/libcuda.so.550.54.15 ro
        /drv/usr/lib64/libcudadebugger.so.550.54.15 -> /usr/lib64/libcudadebugger.so.550.54.15 ro
        /drv/usr/lib/i386-linux-gnu/libcuda.so.550.54.15 -> /usr/lib/i386-linux-gnu/libcuda.so.550.54.15 ro
        /state/guard/1/libnvidia-ml.so.1 -> /usr/lib64/libnvidia-ml.so.550.54.15 ro
        /drv/usr/lib64/libcuda.so.550.54.15 -> /run/divvy/guard/libcuda.so.real ro
        /state/guard/1/libcuda.so.1 -> /run/divvy/guard/libcuda.so.1 ro
        /drv/usr/lib64/libnvidia-ml.so.550.54.15 -> /run/divvy/guard/libnvidia-ml.so.real ro
        /state/guard/1/libnvidia-ml.so.1 -> /run/divvy/guard/libnvidia-ml.so.1 ro
        /state/guard/1/audit.so -> /run/audit.so ro,nosuid,nodev,bind
        /state/limits -> /run/limits ro,nosuid,nodev,noexec,bind
        /state/usage -> /run/usage rw,nosuid,nodev,noexec,bind
        ");
    }

    #[test]
    fn a_container_without_the_drivers_libraries_is_left_as_it_is() {
        for paths in [&[][..], &["/usr/lib64/libcudart.so.12", "/usr/lib64/libcuda.sox"]] {
            let mut edits = edits(paths);
            let before = edits.clone();
            edits.shadow(&Shadow {
                libraries: vec![ShadowLibrary {
                    name: CUDA,
                    ..ShadowLibrary::default()
                }],
                read_only: vec![pair("/state/limits", "/run/limits")],
                loaded: vec![pair("/state/guard/1/audit.so", "/run/audit.so")],
                env: vec![("LD_AUDIT", "/run/audit.so")],
                ..Shadow::default()
            });
            assert_eq!(edits, before);
        }
    }
}
