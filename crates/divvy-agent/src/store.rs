//! The agent's own files: the node key, the grants' records, and the CDI specs. Only this module performs file [`AgentAction`]s.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use divvy_cdi as cdi;
use divvy_model::GrantRecord;
use tracing::{info, warn};

use crate::files::{self, FileError, LIMIT};
use divvy_agent_core::{AgentAction, ContainerKey, NodeFiles, NodeKey, SpecOnNode};

const KEY_FILE: &str = "node.key";

/// The file name of the agent's own CDI spec of the driver (see `crate::driver_spec`).
const DRIVER_FILE: &str = "divvy.dev-driver_nvidia.com-gpu.json";

/// The size limit of a driver's spec in bytes. A driver has hundreds of files.
const DRIVER_SPEC_LIMIT: u64 = 4 * 1024 * 1024;

/// The directories of the agent's files.
#[derive(Debug)]
pub(crate) struct Store {
    grants: PathBuf,
    cdi: PathBuf,
    sys_root: PathBuf,
    state: PathBuf,
    /// The parsed specs of whole GPUs, kept until a file changes: a driver's spec is long, and container starts are frequent.
    driver_specs: Mutex<Arc<DriverSpecs>>,
    /// The grants' specs as they were read last, by file name: they take a megabyte, and nearly all stay as they are.
    specs: Mutex<BTreeMap<String, (FileStamp, Arc<SpecOnNode>)>>,
}

/// The specs of whole GPUs, in the order in which grants search them for a GPU.
#[derive(Debug, Default)]
pub(crate) struct DriverSpecs {
    /// The stamps of all files in the directories, including files that are not used.
    stamps: Vec<FileStamp>,
    pub(crate) files: Vec<DriverFile>,
}

/// A spec of whole GPUs.
#[derive(Debug)]
pub(crate) struct DriverFile {
    pub(crate) stamp: FileStamp,
    /// The file's path on the machine.
    pub(crate) shown: String,
    /// Whether the agent made this file.
    pub(crate) own: bool,
    /// Whether the file is in the CDI directory, and not in `/etc/cdi`.
    pub(crate) in_cdi_dir: bool,
    pub(crate) spec: cdi::Spec,
}

/// Identifies a file's content at the time of reading.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FileStamp {
    path: PathBuf,
    inode: u64,
    size: u64,
    changed: (i64, i64),
}

impl Store {
    /// Create missing directories (the state directory is accessible to root only), and remove files that a killed agent left half-written.
    ///
    /// # Errors
    /// The error has the path and the system's error.
    pub(crate) fn open(state: &Path, cdi: &Path, sys_root: &Path) -> Result<Store, FileError> {
        let grants = state.join("grants");
        files::make_directory(state, 0o700)?;
        // Tighten an existing directory as well: the names of grants are secret.
        std::fs::set_permissions(state, std::fs::Permissions::from_mode(0o700)).map_err(|source| FileError {
            action: "restrict access to",
            path: state.to_owned(),
            source,
        })?;
        files::make_directory(&grants, 0o700)?;
        files::make_directory(cdi, 0o755)?;
        files::remove_temporary(state, |name| name == KEY_FILE)?;
        files::remove_temporary(&grants, |_| true)?;
        files::remove_temporary(cdi, |name| cdi::name_of_file(name).is_some() || name == DRIVER_FILE)?;
        Ok(Store {
            grants,
            cdi: cdi.to_owned(),
            sys_root: sys_root.to_owned(),
            state: state.to_owned(),
            driver_specs: Mutex::default(),
            specs: Mutex::default(),
        })
    }

    /// Return the node's key. The first start creates it from the system's random numbers.
    ///
    /// # Errors
    /// The file cannot be read or written, or its content is not a key. In the latter case the agent does not replace the file: with a new
    /// key, it could no longer derive the grant names that the kubelet has recorded.
    pub(crate) fn node_key(&self) -> Result<NodeKey, FileError> {
        let path = self.state.join(KEY_FILE);
        let refuse = |action, source| FileError {
            action,
            path: path.clone(),
            source,
        };
        if let Some(text) = files::read(&path, LIMIT)? {
            let key = decode_key(text.trim_end()).ok_or_else(|| {
                let text = "the file is not a node key (64 hex digits); remove it, and delete the pods with GPUs on this node";
                refuse("use", io::Error::new(io::ErrorKind::InvalidData, text))
            })?;
            return Ok(NodeKey(key));
        }
        let mut key = [0_u8; 32];
        let random = Path::new("/dev/urandom");
        std::fs::File::open(random)
            .and_then(|mut file| io::Read::read_exact(&mut file, &mut key))
            .map_err(|source| FileError {
                action: "read",
                path: random.to_owned(),
                source,
            })?;
        let text: String = key
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .chain(["\n".to_owned()])
            .collect();
        files::write_atomic(&self.state, KEY_FILE, text.as_bytes(), 0o600)?;
        info!(path = %path.display(), "created the node's key");
        Ok(NodeKey(key))
    }

    /// Return all records that can be read. A record that cannot be read is renamed and logged. Its grant is restored from its
    /// spec, or from the checkpoint and the allocation.
    ///
    /// # Errors
    /// The directory cannot be listed.
    pub(crate) fn load_records(&self) -> Result<Vec<GrantRecord>, FileError> {
        let mut records = Vec::new();
        for name in files::names(&self.grants)? {
            if !name.ends_with(".json") {
                continue;
            }
            let path = self.grants.join(&name);
            let found = match files::read(&path, LIMIT) {
                Ok(Some(text)) => GrantRecord::parse(&text)
                    .map_err(|error| error.to_string())
                    .and_then(|record| {
                        if record.file_name() == name {
                            Ok(record)
                        } else {
                            Err(format!("it should be named {}", record.file_name()))
                        }
                    }),
                Ok(None) => continue,
                Err(error) => Err(error.to_string()),
            };
            match found {
                Ok(record) => records.push(record),
                Err(text) => {
                    warn!(path = %path.display(), %text, "this grant record cannot be used; renaming it to *.broken");
                    if let Err(error) = std::fs::rename(&path, self.grants.join(format!("{name}.broken"))) {
                        warn!(path = %path.display(), %error, "this grant record could not be renamed");
                    }
                }
            }
        }
        Ok(records)
    }

    /// Perform an action on files. An event and a limit change none of these.
    ///
    /// # Errors
    /// The error has the path and the system's error. The file is then unchanged.
    pub(crate) fn perform(&self, action: &AgentAction) -> Result<(), FileError> {
        match action {
            AgentAction::WriteRecord(record) => {
                files::write_atomic(&self.grants, &record.file_name(), record.to_json().as_bytes(), 0o600)
            }
            AgentAction::RemoveRecord(ContainerKey { uid, container }) => {
                files::remove(&self.grants, &format!("{uid}_{container}.json"))
            }
            AgentAction::WriteSpec { name, text } => {
                files::write_atomic(&self.cdi, &cdi::file_name(name), text.as_bytes(), 0o644)
            }
            AgentAction::RemoveSpec { name, owner } => {
                let file = cdi::file_name(name);
                let path = self.cdi.join(&file);
                match files::read(&path, LIMIT) {
                    Ok(None) => Ok(()),
                    // The grant name was reused, and the file belongs to another pod by now.
                    Ok(Some(text)) if SpecOnNode::of(&text).owner() != owner.as_deref() => Ok(()),
                    Err(error) if owner.is_some() => Err(error),
                    Ok(Some(_)) | Err(_) => files::remove(&self.cdi, &file),
                }
            }
            AgentAction::Limit(_) | AgentAction::Event { .. } => Ok(()),
        }
    }

    /// Return the grants' specs on the node, by grant name. A spec that cannot be read has no owner. The files are read again only after a change.
    ///
    /// # Errors
    /// The directory cannot be listed.
    pub(crate) fn specs(&self) -> Result<BTreeMap<String, Arc<SpecOnNode>>, FileError> {
        self.specs_at(SystemTime::now())
    }

    fn specs_at(&self, now: SystemTime) -> Result<BTreeMap<String, Arc<SpecOnNode>>, FileError> {
        let mut known = self.specs.lock().unwrap_or_else(PoisonError::into_inner);
        let mut read = BTreeMap::new();
        let mut specs = BTreeMap::new();
        for file in files::names(&self.cdi)? {
            let Some(name) = cdi::name_of_file(&file).map(str::to_owned) else {
                continue;
            };
            let path = self.cdi.join(&file);
            let Some(stamp) = FileStamp::of(path.clone()) else { continue };
            let spec = match known.remove(&file).filter(|(before, _)| *before == stamp) {
                Some((_, spec)) => spec,
                None => match files::read(&path, LIMIT) {
                    Ok(Some(text)) => Arc::new(SpecOnNode::of(&text)),
                    Ok(None) => continue,
                    Err(error) => {
                        warn!(%error, "this CDI spec of a grant cannot be read");
                        specs.insert(name, Arc::new(SpecOnNode::of("")));
                        continue;
                    }
                },
            };
            if stamp.is_settled(now) {
                read.insert(file, (stamp, spec.clone()));
            }
            specs.insert(name, spec);
        }
        *known = read;
        Ok(specs)
    }

    /// Return the driver's files on the node: device nodes, and the specs of whole GPUs in the CDI directory and in `/etc/cdi`.
    pub(crate) fn node_files(&self, device_paths: BTreeSet<String>) -> NodeFiles {
        let devices = device_paths.into_iter().filter_map(|path| {
            let found = std::fs::metadata(self.sys_root.join(path.trim_start_matches('/'))).ok()?;
            Some((path, group_to_join(&found)))
        });
        let devices = devices.collect();
        let specs = self.driver_specs();
        NodeFiles {
            devices,
            specs: specs.files.iter().map(|file| file.spec.clone()).collect(),
            mps_serves: crate::mps::server(&self.sys_root).is_some(),
        }
    }

    /// Return the specs of whole GPUs in the CDI directory and in `/etc/cdi`. The files are read again only after a change.
    pub(crate) fn driver_specs(&self) -> Arc<DriverSpecs> {
        let mut found: Vec<(FileStamp, String, bool)> = Vec::new();
        let etc = self.sys_root.join("etc/cdi");
        // As in CDI, /var/run/cdi takes precedence over /etc/cdi. Both may be the same directory.
        let same = self.cdi.canonicalize().ok() == etc.canonicalize().ok();
        let directories = [(&self.cdi, self.cdi.display().to_string()), (&etc, "/etc/cdi".to_owned())];
        for (directory, shown) in directories.into_iter().take(if same { 1 } else { 2 }) {
            for file in files::names(directory).unwrap_or_default() {
                let is_spec = [".json", ".yaml"].iter().any(|ending| file.ends_with(ending));
                if !is_spec || file.starts_with('.') || cdi::name_of_file(&file).is_some() {
                    continue;
                }
                if let Some(stamp) = FileStamp::of(directory.join(&file)) {
                    found.push((stamp, format!("{shown}/{file}"), *directory == self.cdi));
                }
            }
        }
        let mut known = self.driver_specs.lock().unwrap_or_else(PoisonError::into_inner);
        let stamps = found.iter().map(|(stamp, ..)| stamp);
        if !known.stamps.iter().eq(stamps.clone()) {
            let stamps = stamps.cloned().collect();
            let own = self.cdi.join(DRIVER_FILE);
            let files = found.into_iter().filter_map(|(stamp, shown, in_cdi_dir)| {
                Some(DriverFile {
                    spec: driver_spec(&stamp.path)?,
                    own: stamp.path == own,
                    shown,
                    in_cdi_dir,
                    stamp,
                })
            });
            *known = Arc::new(DriverSpecs {
                files: files.collect(),
                stamps,
            });
        }
        known.clone()
    }

    /// Return the path of the agent's own spec of the driver.
    pub(crate) fn own_driver_spec(&self) -> PathBuf {
        self.cdi.join(DRIVER_FILE)
    }

    /// Write the agent's own spec of the driver, unless the file has this text already.
    ///
    /// # Errors
    /// The error has the path and the system's error.
    pub(crate) fn write_driver_spec(&self, text: &str) -> Result<WrittenSpec, FileError> {
        let path = self.own_driver_spec();
        // A file that cannot be read is replaced.
        let written = match files::read(&path, DRIVER_SPEC_LIMIT) {
            Ok(Some(present)) if present == text => false,
            Ok(_) | Err(_) => {
                files::write_atomic(&self.cdi, DRIVER_FILE, text.as_bytes(), 0o644)?;
                true
            }
        };
        Ok(WrittenSpec {
            stamp: FileStamp::of(path),
            written,
        })
    }

    /// Remove the agent's own spec of the driver.
    ///
    /// # Errors
    /// The error has the path and the system's error.
    pub(crate) fn remove_driver_spec(&self) -> Result<(), FileError> {
        files::remove(&self.cdi, DRIVER_FILE)
    }
}

/// The result of [`Store::write_driver_spec`].
#[derive(Debug)]
pub(crate) struct WrittenSpec {
    /// The file's present stamp.
    pub(crate) stamp: Option<FileStamp>,
    /// Whether the text was written. False if the file already had this text.
    pub(crate) written: bool,
}

impl FileStamp {
    /// Return the stamp of a file, or `None` if it does not exist. For a symbolic link, the stamp describes the link.
    fn of(path: PathBuf) -> Option<FileStamp> {
        let metadata = std::fs::symlink_metadata(&path).ok()?;
        Some(FileStamp {
            path,
            inode: metadata.ino(),
            size: metadata.size(),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        })
    }

    /// Report whether the next change of the file will leave another stamp. The kernel's clock for files advances in steps of some milliseconds, so two
    /// changes within one step can leave the same stamp.
    fn is_settled(&self, now: SystemTime) -> bool {
        let since_1970 = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        i64::try_from(since_1970.as_secs()).is_ok_and(|now| self.changed.0.saturating_add(1) < now)
    }
}

/// Read a spec of whole GPUs, or `None` if the file is something else.
fn driver_spec(path: &Path) -> Option<cdi::Spec> {
    match files::read(path, DRIVER_SPEC_LIMIT) {
        // This check is cheaper than parsing, and most nodes have specs of other kinds.
        Ok(Some(text)) if text.contains(cdi::NVIDIA_KIND) => match cdi::Spec::parse(&text) {
            Ok(spec) => (spec.kind == cdi::NVIDIA_KIND).then_some(spec),
            Err(error) => {
                warn!(path = %path.display(), %error, "this CDI spec is not used");
                None
            }
        },
        Ok(_) => None,
        Err(error) => {
            warn!(%error, "this CDI spec is not used");
            None
        }
    }
}

fn decode_key(text: &str) -> Option<[u8; 32]> {
    if text.len() != 64 || !text.is_ascii() {
        return None;
    }
    let mut key = [0; 32];
    for (i, byte) in key.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * i..2 * i + 2)?, 16).ok()?;
    }
    Some(key)
}

/// Return `/proc/sys/kernel/random/boot_id` under a root, or `unknown` if there is none. It only distinguishes boots.
pub(crate) fn boot_id(sys_root: &Path) -> String {
    let path = "proc/sys/kernel/random/boot_id";
    files::read_kernel(&sys_root.join(path))
        .or_else(|_| files::read_kernel(&Path::new("/").join(path)))
        .map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned())
}

/// Return the group that a process must be in to use a device. `None` if any process may use the device, or only root.
fn group_to_join(device: &std::fs::Metadata) -> Option<u32> {
    const GROUP: u32 = 0o060;
    const OTHERS: u32 = 0o006;
    let mode = device.mode();
    let only_group = mode & GROUP == GROUP && mode & OTHERS != OTHERS;
    Some(device.gid()).filter(|gid| only_group && *gid != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use divvy_model::{ContainerShare, GpuShare, MemoryUnit, MiB};

    fn record(uid: &str) -> GrantRecord {
        GrantRecord {
            v: 1,
            namespace: "default".into(),
            name: "p".into(),
            uid: uid.into(),
            container: "main".into(),
            cdi: Some("00".repeat(16)),
            unit: MemoryUnit::GIB,
            gpus: vec![GpuShare {
                uuid: "GPU-1".into(),
                memory: MiB(3072),
                cores: 0,
                whole: false,
                enforcement: None,
            }],
            container_gpus: vec![ContainerShare {
                uuid: "GPU-1".into(),
                memory: MiB(3072),
                cores: 0,
            }],
            guarded: false,
            threads: 0,
            boot_id: "b".into(),
        }
    }

    fn store(root: &Path) -> Store {
        Store::open(&root.join("state"), &root.join("cdi"), root).expect("opened")
    }

    #[test]
    fn the_state_is_roots_alone_and_the_key_stays_the_same() {
        let root = tempfile::tempdir().expect("temp dir");
        let key = store(root.path()).node_key().expect("made");
        assert_eq!(store(root.path()).node_key().expect("read").0, key.0);
        let mode = |path: &str| {
            let metadata = std::fs::metadata(root.path().join(path)).expect("there");
            metadata.permissions().mode() & 0o777
        };
        assert_eq!(mode("state"), 0o700);
        assert_eq!(mode("state/node.key"), 0o600);
        std::fs::write(root.path().join("state/node.key"), "short").expect("written");
        let text = store(root.path()).node_key().expect_err("no key").to_string();
        assert!(text.contains("node.key") && text.contains("64 hex digits"), "{text}");
    }

    #[test]
    fn a_corrupt_record_is_set_aside_and_the_others_are_read() {
        let root = tempfile::tempdir().expect("temp dir");
        let store = store(root.path());
        store.perform(&AgentAction::WriteRecord(record("u1"))).expect("written");
        let grants = root.path().join("state/grants");
        for (name, text) in [
            ("u2_main.json", "{\"v\":1,".to_owned()),
            ("u3_main.json", record("u4").to_json()),
            ("u5_main.json", "x".repeat(70_000)),
            ("u6_main.json", "{\"v\":2}".to_owned()),
        ] {
            std::fs::write(grants.join(name), text).expect("written");
        }
        assert_eq!(store.load_records().expect("listed"), [record("u1")]);
        assert_eq!(store.load_records().expect("listed again"), [record("u1")]);
        assert!(grants.join("u2_main.json.broken").exists(), "kept for inspection");
    }

    #[test]
    fn a_spec_that_has_another_owner_by_now_is_not_removed() {
        let root = tempfile::tempdir().expect("temp dir");
        let store = store(root.path());
        let name = "00".repeat(16);
        let text = cdi::grant_spec(&cdi::GrantSpec {
            name: &name,
            owner: &record("new").to_json(),
            ..cdi::GrantSpec::default()
        });
        store
            .perform(&AgentAction::WriteSpec {
                name: name.clone(),
                text,
            })
            .expect("written");
        let remove = |owner: &str| {
            let action = AgentAction::RemoveSpec {
                name: name.clone(),
                owner: Some(owner.to_owned()),
            };
            store.perform(&action).expect("performed");
            store.specs().expect("listed").len()
        };
        assert_eq!(remove("old"), 1);
        assert_eq!(remove("new"), 0);
    }

    /// A spec counts as new while the time stamp of its file is recent.
    #[test]
    fn a_changed_or_new_spec_is_read_again() {
        let root = tempfile::tempdir().expect("temp dir");
        let store = store(root.path());
        let name = "00".repeat(16);
        let write = |owner: &str| {
            let text = cdi::grant_spec(&cdi::GrantSpec {
                name: &name,
                owner: &record(owner).to_json(),
                ..cdi::GrantSpec::default()
            });
            // In place, as some editors do.
            std::fs::write(store.cdi.join(cdi::file_name(&name)), text).expect("written");
        };
        let later = SystemTime::now() + std::time::Duration::from_secs(60);
        let read = |now| store.specs_at(now).expect("listed").remove(&name).expect("the spec");
        write("u1");
        let first = read(SystemTime::now());
        assert!(!Arc::ptr_eq(&first, &read(later)), "the stamp was new");
        assert!(Arc::ptr_eq(&read(later), &read(later)));
        write("other");
        assert_eq!(read(later).owner(), Some("other"));
        std::fs::write(store.cdi.join(cdi::file_name(&name)), "{").expect("written");
        assert_eq!(read(later).owner(), None);
    }

    /// The error has the path and the number of the system's error.
    #[test]
    fn a_directory_that_cannot_be_made_is_named() {
        let root = tempfile::tempdir().expect("temp dir");
        std::fs::write(root.path().join("state"), "a file").expect("written");
        let text = Store::open(&root.path().join("state"), &root.path().join("cdi"), root.path())
            .expect_err("a file is in the way")
            .to_string();
        assert!(text.contains("/state") && text.contains("os error"), "{text}");
    }

    #[test]
    fn driver_files_are_those_of_the_sys_root() {
        let root = tempfile::tempdir().expect("temp dir");
        let store = store(root.path());
        for (path, text) in [
            ("dev/nvidia-uvm", ""),
            (
                "etc/cdi/nvidia.yaml",
                "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices: []\n",
            ),
            ("etc/cdi/broken.yaml", "kind: nvidia.com/gpu: ["),
            ("cdi/other.json", "{\"kind\":\"x.y/z\",\"devices\":[]}"),
        ] {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().expect("has one")).expect("made");
            std::fs::write(path, text).expect("written");
        }
        store.node_files(BTreeSet::new());
        let nvidia = root.path().join("etc/cdi/nvidia.yaml");
        std::fs::write(nvidia, "cdiVersion: 0.6.0\nkind: nvidia.com/gpu\ndevices: []\n").expect("changed");
        let found = store.node_files(["/dev/nvidia-uvm", "/dev/kfd"].map(str::to_owned).into());
        assert_eq!(found.specs[0].cdi_version, "0.6.0", "a changed file is read again");
        assert_eq!(found.devices.keys().collect::<Vec<_>>(), ["/dev/nvidia-uvm"]);
        assert_eq!(found.specs.len(), 1);
    }
}
