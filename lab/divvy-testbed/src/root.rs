//! The directory in which a cluster keeps its files, and its removal, even after a kill -9.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::mount::{UnmountFlags, unmount};

const PREFIX: &str = "divvy-demo-";
const LOCK: &str = "lock";
const UNLOCKED: &str = "lock.new";

static NEXT: AtomicU32 = AtomicU32::new(0);

/// A separate directory for one cluster, removed on drop. While the process lives, it holds a lock on a file in the directory. By
/// these locks, the next cluster that starts can tell which directories killed clusters left behind.
#[derive(Debug)]
pub struct ClusterRoot {
    path: PathBuf,
    _lock: File,
}

impl ClusterRoot {
    /// Create a directory in `base` (for example the system's temporary directory), after removing the directories of killed clusters.
    pub fn create(base: &Path) -> io::Result<ClusterRoot> {
        sweep(base)?;
        let own = std::process::id();
        for _ in 0..1000 {
            // A process never uses a name twice: another process may be removing a directory with the earlier name right now.
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            // The name is short because a Unix socket's path has at most 107 bytes, and the sockets are five directories deeper.
            let path = base.join(format!("{PREFIX}{own}-{number}"));
            match fs::create_dir(&path) {
                Ok(()) => {
                    // The directory has another name until it is locked, because an unlocked directory counts as that of a dead cluster.
                    let unlocked = path.join(UNLOCKED);
                    let lock = File::create(&unlocked)?;
                    flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
                    fs::rename(&unlocked, path.join(LOCK))?;
                    let mut permissions = fs::metadata(&path)?.permissions();
                    std::os::unix::fs::PermissionsExt::set_mode(&mut permissions, 0o700);
                    fs::set_permissions(&path, permissions)?;
                    return Ok(ClusterRoot { path, _lock: lock });
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
        Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            format!(
                "there are already a thousand directories {PREFIX}{own}-* in {}",
                base.display()
            ),
        ))
    }

    /// Return the directory's path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for ClusterRoot {
    fn drop(&mut self) {
        unmount_below(&self.path);
        // A child that is just ending may still write into the directory, so the removal is tried up to three times.
        for _ in 0..3 {
            match fs::remove_dir_all(&self.path) {
                Ok(()) => return,
                Err(error) if error.kind() == io::ErrorKind::NotFound => return,
                Err(error) => tracing::debug!(path = %self.path.display(), %error, "directory not removed yet"),
            }
        }
    }
}

/// The age up to which a directory without a lock may still be under construction. The creator of an older one was killed before
/// it took the lock.
const BEING_MADE: Duration = Duration::from_secs(60);

/// Remove the directories whose lock no process holds.
fn sweep(base: &Path) -> io::Result<()> {
    for entry in fs::read_dir(base)? {
        let entry = entry?;
        if !entry.file_name().to_string_lossy().starts_with(PREFIX) {
            continue;
        }
        match is_abandoned(&entry.path()) {
            Ok(false) => {}
            Ok(true) => {
                unmount_below(&entry.path());
                if let Err(error) = fs::remove_dir_all(entry.path()) {
                    tracing::warn!(path = %entry.path().display(), %error, "could not remove the directory of a killed cluster");
                }
            }
            // Its owner has just removed the directory.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => tracing::debug!(path = %entry.path().display(), %error, "directory left alone"),
        }
    }
    Ok(())
}

/// Unmount what the probes of a cluster have mounted for the files of shares, where this process and the probes may do so.
fn unmount_below(directory: &Path) {
    let text = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    // The kernel writes these characters as numbers (proc(5)).
    let mut shown = directory.display().to_string().replace('\\', "\\134");
    for (character, number) in [(' ', "\\040"), ('\t', "\\011"), ('\n', "\\012")] {
        shown = shown.replace(character, number);
    }
    let points = text
        .lines()
        .filter_map(|line| line.split(' ').nth(4)?.strip_prefix(&shown)?.strip_prefix('/'));
    for below in points {
        let at = directory.join(below);
        if let Err(error) = unmount(&at, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
            tracing::warn!(path = %at.display(), %error, "could not unmount what a cluster has left");
        }
    }
}

fn is_abandoned(directory: &Path) -> io::Result<bool> {
    let metadata = fs::symlink_metadata(directory)?;
    if !metadata.is_dir() {
        return Ok(false);
    }
    match File::open(directory.join(LOCK)) {
        Ok(lock) => Ok(flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Ok(metadata.modified()?.elapsed().is_ok_and(|age| age > BEING_MADE))
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The directory of a dead owner goes with the next start.
    #[test]
    fn a_directory_goes_with_its_owner() {
        let base = tempfile::tempdir().expect("a directory");
        let dead = base.path().join(format!("{PREFIX}1-0"));
        fs::create_dir(&dead).expect("made");
        fs::write(dead.join(LOCK), "").expect("made");
        let first = ClusterRoot::create(base.path()).expect("made");
        assert!(!dead.exists(), "no process holds its lock");
        let second = ClusterRoot::create(base.path()).expect("made");
        assert!(
            first.path().exists() && first.path() != second.path(),
            "the directory of a living cluster is kept"
        );
        let path = first.path().to_path_buf();
        drop(first);
        assert!(!path.exists());
        assert!(second.path().exists());
    }

    #[test]
    fn a_directory_goes_with_what_is_mounted_in_it() {
        if !divvy_skip::root("mount a file system") {
            return;
        }
        let base = tempfile::tempdir().expect("a directory");
        let base = base.path().join("with a space");
        fs::create_dir(&base).expect("made");
        let mount = |root: &Path| {
            let at = root.join("n1/shares/pod/GPU");
            fs::create_dir_all(&at).expect("made");
            let mounted = rustix::mount::mount("divvy", &at, "tmpfs", rustix::mount::MountFlags::empty(), c"size=4k");
            fs::write(at.join("usage"), "").expect("written");
            mounted.is_ok()
        };
        let dead = base.join(format!("{PREFIX}1-0"));
        fs::create_dir(&dead).expect("made");
        fs::write(dead.join(LOCK), "").expect("made");
        if !mount(&dead) {
            divvy_skip::skipped("nothing can be mounted");
            return;
        }
        let root = ClusterRoot::create(&base).expect("made");
        assert!(!dead.exists(), "the cluster was killed");
        let path = root.path().to_path_buf();
        assert!(mount(&path));
        drop(root);
        assert!(!path.exists());
    }

    #[test]
    fn clusters_that_come_and_go_at_once_keep_their_own_directories() {
        let base = tempfile::tempdir().expect("a directory");
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        let root = ClusterRoot::create(base.path()).expect("made");
                        fs::write(root.path().join("file"), "").expect("the directory exists");
                        std::thread::yield_now();
                        assert!(root.path().join("file").exists() && root.path().join(LOCK).exists());
                    }
                });
            }
        });
        assert_eq!(fs::read_dir(base.path()).expect("readable").count(), 0);
    }
}
