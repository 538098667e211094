//! Convert a grant's record to the CDI spec that the container runtime reads. The spec contains only what the record and the node state,
//! so it can be rebuilt at any time.

use std::collections::BTreeSet;

use divvy_cdi::shadow::{CUDA, Library, NVML, Shadow};
use divvy_cdi::{self as cdi, GrantSpec};
use divvy_model::{GrantRecord, Vendor};
use divvy_share::{AUDIT, GUARD_CUDA, GUARD_NVML, REAL_CUDA, REAL_NVML, TUNABLES};

use super::{Core, NodeFiles, mps, vendor};

impl Core {
    /// Return the paths of the device nodes that [`NodeFiles::devices`] must describe.
    pub fn device_paths(&self) -> BTreeSet<String> {
        let shared = Vendor::ALL.into_iter().flat_map(|vendor| vendor::of(vendor).shared_devices());
        let own = self.gpus.iter().flat_map(|gpu| &gpu.nodes).map(|node| format!("/dev/{node}"));
        shared.map(|path| (*path).to_owned()).chain(own).collect()
    }

    /// Return the spec's name and text. Return `None` if a granted GPU is currently unknown: its device nodes are not in the
    /// record, because their numbers may change at a reboot.
    pub(super) fn project(&self, record: &GrantRecord, node: &NodeFiles) -> Option<(String, String)> {
        let name = record.cdi.as_deref()?;
        let gpus = record
            .container_gpus
            .iter()
            .map(|share| self.gpu(&share.uuid))
            .collect::<Option<Vec<_>>>()?;
        let rules = vendor::of(gpus.first()?.vendor);
        let mut edits = rules.edits(record, &gpus, node);
        let mps = self.settings.mps.as_ref().filter(|_| gpus.iter().all(|gpu| mps::serves(gpu)));
        let client = mps.map(|mps| mps.client(record, &gpus)).unwrap_or_default();
        edits.env.extend(client.env);
        let uuids: Vec<&str> = gpus.iter().map(|gpu| gpu.uuid.as_str()).collect();
        let text = cdi::grant_spec(&GrantSpec {
            name,
            owner: &record.to_json(),
            env: &edits.env,
            device_nodes: &edits.device_nodes,
            mounts: &client.mounts,
            groups: &edits.groups,
            gpus: &uuids,
            libraries: rules.libraries(),
            base: &node.specs,
            shadow: self.shadow(record).as_ref(),
        });
        Some((name.to_owned(), text))
    }

    /// Return what a container gets in the place of the driver's libraries: the guard, and for each of its GPUs the files with the pod's share. The
    /// containers of a pod have the same files, because the share is the pod's.
    fn shadow(&self, record: &GrantRecord) -> Option<Shadow> {
        let guard = self.settings.guard.as_ref().filter(|_| record.guarded)?;
        let files = |name: &str| {
            let paths = record.container_gpus.iter().map(|share| {
                (
                    format!("{}/{}/{}/{name}", guard.shares, record.uid, share.uuid),
                    format!("{}/{}/{name}", divvy_share::DIRECTORY, share.uuid),
                )
            });
            paths.collect()
        };
        let library = |name, file: &String, real, at| Library {
            name,
            file: file.clone(),
            real,
            at,
        };
        let audit = guard.audit.iter();
        Some(Shadow {
            libraries: vec![
                library(CUDA, &guard.cuda, REAL_CUDA, GUARD_CUDA),
                library(NVML, &guard.nvml, REAL_NVML, GUARD_NVML),
            ],
            read_only: files(divvy_share::LIMITS),
            writable: files(divvy_share::USAGE),
            loaded: audit.map(|file| (file.clone(), AUDIT.to_owned())).collect(),
            env: match guard.audit {
                Some(_) => vec![("LD_AUDIT", AUDIT), ("GLIBC_TUNABLES", TUNABLES)],
                None => Vec::new(),
            },
        })
    }
}
