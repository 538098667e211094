//! The cgroup tree of a node's pods as files, written from the list of running processes.
//!
//! Unified (v2): `sys/fs/cgroup/kubepods/<qos>/pod<UID>/<id>/cgroup.{procs,events}`. Version 1: the same path below `pids`, `memory` and
//! `cpu,cpuacct`, with `pids.current` below `pids`. Guaranteed pods have no `<qos>` level. Simplification: the files are plain files that
//! are replaced by rename, so an inotify watch on a file does not survive a change.
//!
//! Where the root has a `dmem.capacity`, each cgroup of version 2 has a `dmem.max`, as if the controller were enabled everywhere. Simplification: the
//! file keeps what was written last, and no write is refused.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The cgroup hierarchy that a node shows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CgroupVersion {
    /// The unified hierarchy.
    #[default]
    V2,
    /// One hierarchy per controller.
    V1,
}

/// The PIDs in each cgroup, keyed by its `kubepods/…` path. The parent cgroups are derived from these paths.
pub(crate) type CgroupTree = BTreeMap<String, Vec<u32>>;

/// The writer of the cgroup files. Leaves are the cgroups of containers and sandboxes, which exist with or without processes. Anything
/// below `kubepods` that is neither a leaf nor an ancestor of a leaf is removed.
#[derive(Debug)]
pub(crate) struct Cgroups {
    version: CgroupVersion,
    root: PathBuf,
    scratch: PathBuf,
    written: BTreeMap<PathBuf, String>,
}

const V1_CONTROLLERS: [&str; 3] = ["cpu,cpuacct", "memory", "pids"];

impl Cgroups {
    pub(crate) fn new(version: CgroupVersion, root: PathBuf, scratch: PathBuf) -> std::io::Result<Cgroups> {
        std::fs::create_dir_all(&root)?;
        let mut cgroups = Cgroups {
            version,
            root,
            scratch,
            written: BTreeMap::new(),
        };
        if version == CgroupVersion::V2 {
            std::fs::write(
                cgroups.root.join("cgroup.controllers"),
                "cpuset cpu io memory hugetlb pids rdma misc\n",
            )?;
        }
        cgroups.project(&CgroupTree::new(), &BTreeSet::new())?;
        Ok(cgroups)
    }

    /// Return the content of `dmem.max` in a new cgroup: no limit for any region. Empty if the kernel does not have the controller `dmem`.
    fn unlimited(&self) -> String {
        let capacity = std::fs::read_to_string(self.root.join("dmem.capacity")).unwrap_or_default();
        let regions = capacity.lines().filter_map(|line| line.split_once(' '));
        regions.map(|(region, _)| format!("{region} max\n")).collect()
    }

    /// Update the files: `tree` has the cgroups of containers and sandboxes, `pods` has the pods' own cgroups.
    pub(crate) fn project(&mut self, tree: &CgroupTree, pods: &BTreeSet<String>) -> std::io::Result<()> {
        let mut all: BTreeMap<String, Vec<u32>> = BTreeMap::new();
        for fixed in ["kubepods", "kubepods/besteffort", "kubepods/burstable"] {
            all.entry(fixed.to_owned()).or_default();
        }
        for pod in pods {
            all.entry(pod.clone()).or_default();
        }
        let mut below: BTreeMap<String, usize> = BTreeMap::new();
        for (path, pids) in tree {
            all.insert(path.clone(), pids.clone());
            let mut at = Some(path.as_str());
            while let Some(path) = at {
                *below.entry(path.to_owned()).or_default() += pids.len();
                at = path.rsplit_once('/').map(|(parent, _)| parent);
            }
        }
        let mut wanted: BTreeMap<PathBuf, String> = BTreeMap::new();
        for (path, pids) in &all {
            let procs: String = pids.iter().map(|pid| format!("{pid}\n")).collect();
            let count = below.get(path).copied().unwrap_or(0);
            match self.version {
                CgroupVersion::V2 => {
                    let directory = self.root.join(path);
                    wanted.insert(directory.join("cgroup.procs"), procs);
                    let events = format!("populated {}\nfrozen 0\n", u8::from(count > 0));
                    wanted.insert(directory.join("cgroup.events"), events);
                }
                CgroupVersion::V1 => {
                    for controller in V1_CONTROLLERS {
                        wanted.insert(self.root.join(controller).join(path).join("cgroup.procs"), procs.clone());
                    }
                    wanted.insert(self.root.join("pids").join(path).join("pids.current"), format!("{count}\n"));
                }
            }
        }
        // Cgroups are removed from the bottom up, so that a reader never finds a populated parent without its child.
        let gone: BTreeSet<PathBuf> = self
            .written
            .keys()
            .filter(|path| !wanted.contains_key(*path))
            .cloned()
            .collect();
        let directories = |files: &mut dyn Iterator<Item = &PathBuf>| -> BTreeSet<PathBuf> {
            files.filter_map(|path| path.parent().map(Path::to_path_buf)).collect()
        };
        let kept = directories(&mut wanted.keys());
        for directory in directories(&mut gone.iter())
            .iter()
            .rev()
            .filter(|directory| !kept.contains(*directory))
        {
            match std::fs::remove_dir_all(directory) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        for path in gone {
            self.written.remove(&path);
        }
        let unlimited = self.unlimited();
        for (path, text) in wanted {
            if self.written.get(&path) == Some(&text) {
                continue;
            }
            if let Some(directory) = path.parent() {
                std::fs::create_dir_all(directory)?;
                let max = directory.join("dmem.max");
                if !unlimited.is_empty() && !max.exists() {
                    std::fs::write(max, &unlimited)?;
                }
            }
            std::fs::write(&self.scratch, &text)?;
            std::fs::rename(&self.scratch, &path)?;
            self.written.insert(path, text);
        }
        Ok(())
    }
}
