//! The kubelet's own record of which container holds which device: `kubelet_internal_checkpoint`.
//!
//! No other source maps a set of device ids to the pod's **UID** and the container, including ordinary init containers. During
//! `Allocate`, the checkpoint does not contain the container that is being admitted yet; during `PreStartContainer`, it does.
//!
//! The kubelet replaces the file by rename, once per admitted container and once per `ListAndWatch` message. The format is not a
//! stable API. It comes from `pkg/kubelet/cm/devicemanager/checkpoint`, and has two forms: since Kubernetes 1.20, `DeviceIDs` is
//! a map from NUMA nodes to ids; before, it was a list. This module treats the file as untrusted input.
//!
//! **The checksum is not verified.** The kubelet hashes (FNV-1a, 32 bits) the text that a Go library prints for its in-memory
//! structs, with pointers followed and type names included. Verifying the checksum would mean reimplementing that printer for
//! each kubelet version. A checksum would reveal a truncated or damaged file, but so do the JSON, base64, and protobuf decoders.
//! In addition, every reader of an entry compares it with the device ids that the reader already knows.

mod json;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::time::Duration;

use crate::error::Malformed;
use crate::plugin::AllocateAnswer;
use crate::{Error, Result};

/// The file's name in the device plugin directory.
pub const FILE_NAME: &str = "kubelet_internal_checkpoint";

/// The maximum size of the file in bytes.
pub const SIZE_LIMIT: u64 = 16 << 20;

/// How often to try to read an incomplete file, and the wait between two attempts. The kubelet replaces the file by rename, so an
/// incomplete file should never be visible. If one is, it is complete a moment later.
const READS: u32 = 3;
const BETWEEN_READS: Duration = Duration::from_millis(5);

/// Identifies one version of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Writing {
    inode: u64,
    /// Modification time in seconds and nanoseconds.
    modified: (i64, i64),
}

impl Writing {
    /// Return the current version of the file, or `None` if no file is accessible.
    pub fn of(directory: &Path) -> Option<Writing> {
        let metadata = std::fs::symlink_metadata(directory.join(FILE_NAME)).ok()?;
        Some(Writing {
            inode: metadata.ino(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
        })
    }
}

/// The content of the kubelet's checkpoint at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Checkpoint {
    /// The entries in the file's order.
    pub entries: Vec<CheckpointEntry>,
    /// The ids of each resource's healthy devices.
    pub registered: BTreeMap<String, Vec<String>>,
    /// A description of each entry that was skipped because its answer cannot be decoded. The kubelet skips such entries as well.
    pub skipped: Vec<String>,
}

/// The devices of one resource in one container.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CheckpointEntry {
    /// The pod's UID.
    pub pod_uid: String,
    /// The name of the container or init container.
    pub container: String,
    /// The extended resource, such as `vendor.example/memory`.
    pub resource: String,
    /// The device ids.
    pub ids: BTreeSet<String>,
    /// The NUMA node of each id that has one.
    pub numa: BTreeMap<String, i64>,
    /// The plugin's answer to `Allocate`. The kubelet uses it at each start of the container.
    pub answer: AllocateAnswer,
}

impl CheckpointEntry {
    /// The CDI device names in the plugin's answer.
    pub fn cdi_devices(&self) -> &[String] {
        &self.answer.cdi_devices
    }
}

impl Checkpoint {
    /// Read the checkpoint in this device plugin directory. Return `None` if no checkpoint exists, as on a node where no kubelet
    /// has run.
    ///
    /// This function blocks: on the file, and for at most 10 ms more if the file is incomplete and must be read again.
    ///
    /// # Errors
    /// Fails if the file cannot be read, is not a regular file (symbolic links are not followed), is larger than [`SIZE_LIMIT`]
    /// bytes, or is still not a valid checkpoint after three reads.
    pub fn read(directory: &Path) -> Result<Option<Self>> {
        let path = directory.join(FILE_NAME);
        let mut reads = 1;
        loop {
            let Some(text) = read_capped(&path)? else { return Ok(None) };
            match json::parse(&text) {
                Ok(checkpoint) => return Ok(Some(checkpoint)),
                Err(reason) if reads == READS => return Err(Error::Malformed { path, reason }),
                Err(_) => {
                    reads += 1;
                    std::thread::sleep(BETWEEN_READS);
                }
            }
        }
    }

    /// Parse a checkpoint's text.
    ///
    /// # Errors
    /// Fails if the text is not a valid checkpoint. The error says what is wrong, and where in the text.
    pub fn parse(text: &[u8]) -> std::result::Result<Self, Malformed> {
        json::parse(text)
    }

    /// Return the file's text in the form that kubelets since 1.20 write, for simulated kubelets.
    ///
    /// `Checksum` is FNV-1a (32 bits) over the JSON text of `Data`, which a real kubelet would not accept (see the module's documentation).
    /// [`Checkpoint::skipped`] is not written.
    pub fn to_text(&self) -> String {
        json::print(self)
    }
}

fn read_capped(path: &Path) -> Result<Option<Vec<u8>>> {
    let unreadable = |source: io::Error| Error::Unreadable {
        path: path.to_owned(),
        source,
    };
    // Without O_NONBLOCK, opening a FIFO would wait for a writer.
    let flags = (rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK).bits();
    let file = match OpenOptions::new().read(true).custom_flags(flags.cast_signed()).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) => {
            return Err(Error::NotAFile { path: path.to_owned() });
        }
        Err(error) => return Err(unreadable(error)),
    };
    if !file.metadata().map_err(unreadable)?.is_file() {
        return Err(Error::NotAFile { path: path.to_owned() });
    }
    let mut text = Vec::new();
    File::take(file, SIZE_LIMIT + 1).read_to_end(&mut text).map_err(unreadable)?;
    if text.len() as u64 > SIZE_LIMIT {
        return Err(Error::TooLarge {
            path: path.to_owned(),
            limit: SIZE_LIMIT,
        });
    }
    Ok(Some(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Checkpoint {
        let entry = |container: &str, ids: &[(&str, Option<i64>)], cdi: &[&str]| CheckpointEntry {
            pod_uid: "0f0c2a4e-5a0b-4b43-9d3e-1d6d2f0a7c11".into(),
            container: container.into(),
            resource: "vendor.example/memory".into(),
            ids: ids.iter().map(|(id, _)| (*id).into()).collect(),
            numa: ids
                .iter()
                .filter_map(|(id, node)| node.map(|node| ((*id).into(), node)))
                .collect(),
            answer: AllocateAnswer {
                cdi_devices: cdi.iter().map(|name| (*name).into()).collect(),
                ..AllocateAnswer::default()
            },
        };
        Checkpoint {
            entries: vec![
                entry(
                    "main",
                    &[("a::1", Some(0)), ("a::2", Some(0)), ("b::1", Some(1))],
                    &["vendor.example/class=x"],
                ),
                entry("side", &[("c::1", None)], &[]),
            ],
            registered: BTreeMap::from([("vendor.example/memory".into(), vec!["a::1".into(), "a::2".into()])]),
            skipped: Vec::new(),
        }
    }

    fn write(text: &[u8]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("a temporary directory");
        std::fs::write(dir.path().join(FILE_NAME), text).expect("written");
        dir
    }

    #[test]
    fn what_is_written_is_read_again() -> Result<()> {
        let dir = write(sample().to_text().as_bytes());
        assert_eq!(Checkpoint::read(dir.path())?, Some(sample()));
        Ok(())
    }

    #[test]
    fn a_missing_file_is_none_and_not_an_error() -> Result<()> {
        let dir = tempfile::tempdir().expect("a temporary directory");
        assert_eq!(Checkpoint::read(dir.path())?, None);
        assert_eq!(Checkpoint::read(&dir.path().join("nowhere"))?, None);
        Ok(())
    }

    #[test]
    fn the_cdi_names_are_read() {
        let checkpoint = sample();
        assert_eq!(checkpoint.entries[0].cdi_devices(), ["vendor.example/class=x"]);
    }

    #[test]
    fn what_is_not_a_checkpoint_is_refused_with_the_path() {
        let whole = sample().to_text();
        for text in ["", "{", "[]", "null", "{\"Data\":1}", &whole[..whole.len() / 2]] {
            let dir = write(text.as_bytes());
            let error = Checkpoint::read(dir.path()).expect_err("not a checkpoint");
            assert!(
                matches!(error, Error::Malformed { .. }) && error.to_string().contains(FILE_NAME),
                "{text}: {error}"
            );
        }
    }

    #[test]
    fn a_file_torn_at_the_first_look_is_read_again() -> Result<()> {
        let whole = sample().to_text();
        let dir = write(&whole.as_bytes()[..40]);
        let path = dir.path().join(FILE_NAME);
        let writer = std::thread::spawn(move || {
            let next = path.with_extension("tmp");
            std::fs::write(&next, whole).and_then(|()| std::fs::rename(&next, &path))
        });
        // The writer may be late by more than the reader waits. The reader then reports an error, and the test reads again.
        let deadline = std::time::Instant::now() + Duration::from_secs(5);
        let read = loop {
            match Checkpoint::read(dir.path()) {
                Err(Error::Malformed { .. }) if std::time::Instant::now() < deadline => {}
                other => break other?,
            }
        };
        writer.join().expect("no panic").expect("written");
        assert_eq!(read, Some(sample()));
        Ok(())
    }

    #[test]
    fn links_directories_fifos_and_huge_files_are_not_read() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join(FILE_NAME);
        std::fs::write(dir.path().join("secret"), sample().to_text()).expect("written");
        std::os::unix::fs::symlink(dir.path().join("secret"), &path).expect("linked");
        assert!(matches!(Checkpoint::read(dir.path()), Err(Error::NotAFile { .. })));
        std::fs::remove_file(&path).expect("removed");
        std::fs::create_dir(&path).expect("made");
        assert!(matches!(Checkpoint::read(dir.path()), Err(Error::NotAFile { .. })));
        std::fs::remove_dir(&path).expect("removed");
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).expect("made");
        assert!(matches!(Checkpoint::read(dir.path()), Err(Error::NotAFile { .. })));
        std::fs::remove_file(&path).expect("removed");
        File::create(&path).and_then(|file| file.set_len(50 << 20)).expect("made");
        assert!(matches!(Checkpoint::read(dir.path()), Err(Error::TooLarge { .. })));
    }
}
