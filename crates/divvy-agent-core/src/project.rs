//! Convert a grant's record to the CDI spec that the container runtime reads. The spec contains only what the record and the node state,
//! so it can be rebuilt at any time.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher as _};

use divvy_cdi::shadow::{CUDA, NVML, Shadow, ShadowLibrary};
use divvy_cdi::{self as cdi, GrantSpec};
use divvy_model::{Gpu, GrantRecord, Vendor};
use divvy_share::{AUDIT, GUARD_CUDA, GUARD_NVML, REAL_CUDA, REAL_NVML, TUNABLES};

use super::{AgentCore, ContainerKey, NodeFiles, SpecOnNode, mps, vendor};

/// The specs as the last reconciliation made them. To make and to parse each spec again takes most of the time of a reconciliation, and nearly all stay as they
/// are.
#[derive(Debug, Clone, Default)]
pub(super) struct Projected {
    node: NodeFiles,
    gpus: Vec<Gpu>,
    /// The key of the record, and the digests of the record and of the text, by the spec's name. The texts would take a megabyte.
    specs: BTreeMap<String, (ContainerKey, u64, u64)>,
}

impl Projected {
    /// Forget the specs that do not have one of these names, and all of them unless they were made from these files and GPUs.
    pub(super) fn keep(&mut self, names: &BTreeMap<&str, Vec<&GrantRecord>>, node: &NodeFiles, gpus: &[Gpu]) {
        self.specs.retain(|name, _| names.contains_key(name.as_str()));
        if self.node != *node || self.gpus != gpus {
            *self = Projected {
                node: node.clone(),
                gpus: gpus.to_vec(),
                specs: BTreeMap::new(),
            };
        }
    }

    /// Note that a spec was made from a record.
    pub(super) fn made(&mut self, name: String, text: &str, record: &GrantRecord) {
        self.specs
            .insert(name, (ContainerKey::of(record), digest(record), digest(text)));
    }

    /// Return the record from which a spec was made.
    pub(super) fn of<'r>(
        &self,
        name: &str,
        spec: &SpecOnNode,
        records: &'r BTreeMap<ContainerKey, GrantRecord>,
    ) -> Option<&'r GrantRecord> {
        let (key, of_record, of_text) = self.specs.get(name)?;
        let record = records.get(key).filter(|_| spec.digest == *of_text);
        record.filter(|record| digest(*record) == *of_record)
    }
}

/// Return a 64-bit hash of a value. It is the same in each run of a program.
pub(super) fn digest(of: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}

impl AgentCore {
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
        let library = |name, file: &String, real, at| ShadowLibrary {
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
