//! Implements [`Tree`] for a real file system: a machine's files below a root directory.
//!
//! This module is separate from the code that talks to GPU drivers, so that the OCI runtime can use it without that code.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::{FileKind, PathMetadata, Tree};
use rustix::fs::OFlags;
use rustix::io::Errno;

/// The maximum number of paths that are remembered because they could not be read.
const MOST_TROUBLES: usize = 1024;

/// The files below a directory: `/`, or the place to which another machine's files were copied or mounted.
#[derive(Debug)]
pub struct Files {
    root: PathBuf,
    troubles: Mutex<Vec<String>>,
}

impl Files {
    /// Open the files of the machine whose root directory is `root`.
    pub fn below(root: impl Into<PathBuf>) -> Files {
        Files {
            root: root.into(),
            troubles: Mutex::default(),
        }
    }

    /// Return the paths that exist but could not be read, with the system's error messages. Each message is returned once, then forgotten.
    pub fn troubles(&self) -> Vec<String> {
        std::mem::take(&mut *self.troubles.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// Return the value, or record the error for [`Files::troubles`]. A missing path is not recorded, nor is a file in `/proc` of a process that has
    /// ended since the file was opened.
    fn known<T>(&self, path: &Path, result: io::Result<T>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => None,
            Err(error) if error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => None,
            Err(error) => {
                let text = format!("{}: {error}", path.display());
                let mut troubles = self.troubles.lock().unwrap_or_else(PoisonError::into_inner);
                if troubles.len() < MOST_TROUBLES && !troubles.contains(&text) {
                    troubles.push(text);
                }
                None
            }
        }
    }
}

impl Tree for Files {
    fn names(&self, directory: &str) -> Vec<String> {
        let mut names = self.first_names(directory, usize::MAX);
        names.sort_unstable();
        names
    }

    fn first_names(&self, directory: &str, most: usize) -> Vec<String> {
        let path = self.path(directory);
        let Some(entries) = self.known(&path, fs::read_dir(&path)) else {
            return Vec::new();
        };
        entries
            .take(most)
            .filter_map(|entry| self.known(&path, entry))
            // Skip names that are not UTF-8: no driver has such files.
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect()
    }

    fn stat(&self, path: &str) -> Option<PathMetadata> {
        let path = self.path(path);
        let metadata = self.known(&path, fs::symlink_metadata(&path))?;
        let kind = match metadata.file_type() {
            kind if kind.is_dir() => FileKind::Directory,
            kind if kind.is_file() => FileKind::File,
            kind if kind.is_symlink() => {
                FileKind::Link(self.known(&path, fs::read_link(&path))?.into_os_string().into_string().ok()?)
            }
            kind if kind.is_char_device() || kind.is_block_device() || kind.is_socket() || kind.is_fifo() => FileKind::Special,
            _ => return None,
        };
        Some(PathMetadata {
            kind,
            mode: metadata.mode() & 0o7777,
            gid: metadata.gid(),
        })
    }

    fn read(&self, path: &str, limit: usize) -> Option<Vec<u8>> {
        let path = self.path(path);
        // The caller has already resolved all links. A link found now was created since then, so it is not followed.
        let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
        let read = |file: File| {
            let mut bytes = Vec::new();
            file.take(u64::try_from(limit).unwrap_or(u64::MAX)).read_to_end(&mut bytes)?;
            Ok(bytes)
        };
        self.known(
            &path,
            OpenOptions::new().read(true).custom_flags(flags).open(&path).and_then(read),
        )
    }

    fn device(&self, path: &str) -> Option<(u32, u32)> {
        let path = self.path(path);
        let metadata = self.known(&path, fs::symlink_metadata(&path))?;
        let kind = metadata.file_type();
        (kind.is_char_device() || kind.is_block_device())
            .then(|| (rustix::fs::major(metadata.rdev()), rustix::fs::minor(metadata.rdev())))
    }

    fn modified(&self, path: &str) -> Option<i64> {
        let path = self.path(path);
        Some(self.known(&path, fs::symlink_metadata(&path))?.mtime())
    }

    fn stamp(&self, path: &str) -> Option<(i64, u64)> {
        let path = self.path(path);
        let metadata = self.known(&path, fs::symlink_metadata(&path))?;
        let ns = metadata
            .mtime()
            .checked_mul(1_000_000_000)?
            .checked_add(metadata.mtime_nsec())?;
        Some((ns, metadata.size()))
    }

    fn troubles(&self) -> Vec<String> {
        self.troubles()
    }
}

#[cfg(test)]
mod tests {
    use crate::Root;

    use super::*;

    #[test]
    fn a_copied_machine_is_looked_at_below_its_root_alone() {
        let directory = tempfile::tempdir().expect("a directory");
        let root = directory.path().join("root");
        fs::create_dir_all(root.join("usr/lib64")).expect("made");
        fs::write(root.join("usr/lib64/libcuda.so.1.2"), "0123456789").expect("written");
        fs::write(directory.path().join("secret"), "outside").expect("written");
        std::os::unix::fs::symlink("/usr/lib64", root.join("lib64")).expect("linked");
        std::os::unix::fs::symlink("../secret", root.join("out")).expect("linked");
        let files = Files::below(&root);
        let machine = Root::open(&files, "/").expect("a root");
        assert_eq!(
            machine.file("/lib64/libcuda.so.1.2").as_deref(),
            Some("/usr/lib64/libcuda.so.1.2")
        );
        assert_eq!(machine.read("/lib64/libcuda.so.1.2", 4).as_deref(), Some(&b"0123"[..]));
        assert_eq!(machine.names("/"), ["lib64", "out", "usr"]);
        assert_eq!(machine.resolve("/out"), None, "there is no /secret below this root");
        assert_eq!(files.read("/out", 9), None, "a link is not followed");
        assert_eq!(files.troubles().len(), 1, "the error is reported");
        assert_eq!(files.troubles(), [""; 0]);
        assert!(machine.modified("/lib64/libcuda.so.1.2").is_some_and(|seconds| seconds > 0));
        assert_eq!(machine.link("/out").as_deref(), Some("../secret"));
        assert_eq!(Files::below("/").device("/dev/null"), Some((1, 3)));
        assert_eq!(machine.device("/lib64/libcuda.so.1.2"), None, "a plain file");
    }
    #[test]
    fn a_large_directory_is_not_read_to_its_end() {
        let directory = tempfile::tempdir().expect("a directory");
        for number in 0..9 {
            fs::write(directory.path().join(number.to_string()), "").expect("written");
        }
        let files = Files::below(directory.path());
        let machine = Root::open(&files, "/").expect("a root");
        let first = machine.first_names("/", 4);
        assert!(
            first.len() == 4 && first.iter().all(|name| machine.names("/").contains(name)),
            "{first:?}"
        );
        assert_eq!(machine.first_names("/", 99).len(), 9);
        assert_eq!(machine.first_names("/3", 99), [""; 0]);
    }

    #[test]
    fn a_process_that_has_ended_meanwhile_is_no_trouble() {
        let files = Files::below("/");
        for (errno, reported) in [(Errno::SRCH, 0), (Errno::NOENT, 0), (Errno::ACCESS, 1), (Errno::IO, 1)] {
            let error: io::Result<()> = Err(errno.into());
            assert_eq!(files.known(Path::new("/proc/7/fd"), error), None);
            assert_eq!(files.troubles().len(), reported, "{errno}");
        }
    }
}
