//! A lock that allows only one process per resource. Two plugins of the same resource would take the registration from each other
//! indefinitely.
//!
//! During a rolling update, the old process may still be finishing its calls when the new one starts. The kernel holds the lock,
//! so a killed process leaves no lock behind. When the kubelet starts, it removes only sockets, so the lock file stays.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use super::directory::FileIdentity;

#[derive(Debug)]
pub(super) struct Lock {
    path: PathBuf,
    identity: FileIdentity,
    /// The locked file. The lock lasts as long as the file is open.
    _file: File,
}

impl Lock {
    /// Try to take the lock. Return `None` if another process holds it.
    pub(super) fn try_acquire(path: &Path) -> io::Result<Option<Self>> {
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(path)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(error),
        }
        // The previous holder removes the file when it ends, so the locked file may no longer be the file at this path.
        let identity = FileIdentity::of_file(&file.metadata()?);
        if FileIdentity::at(path) != Some(identity) {
            return Ok(None);
        }
        Ok(Some(Self {
            path: path.to_owned(),
            identity,
            _file: file,
        }))
    }

    /// Report whether the locked file is still the one in the directory.
    pub(super) fn is_in_place(&self) -> bool {
        FileIdentity::at(&self.path) == Some(self.identity)
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        if self.is_in_place() {
            // An empty file that stays behind is harmless.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The last holder removes the file.
    #[test]
    fn a_second_lock_holder_waits_for_the_first() -> io::Result<()> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("x.lock");
        let first = Lock::try_acquire(&path)?;
        assert!(first.is_some());
        assert!(Lock::try_acquire(&path)?.is_none());
        drop(first);
        assert!(!path.exists());
        let second = Lock::try_acquire(&path)?.expect("free again");
        assert!(second.is_in_place());
        std::fs::remove_file(&path)?;
        assert!(!second.is_in_place());
        Ok(())
    }
}
