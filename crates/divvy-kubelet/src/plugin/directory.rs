//! Watches the kubelet's directory for changes.

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use notify::event::{EventKind, ModifyKind};
use notify::{RecommendedWatcher, RecursiveMode, Watcher as _};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};
use tracing::{debug, warn};

/// The identity of a file. It differs from that of a later file with the same name, even if the inode is reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FileIdentity {
    device: u64,
    inode: u64,
    /// Creation time in nanoseconds since 1970.
    born: u128,
}

impl FileIdentity {
    pub(super) fn of_file(metadata: &Metadata) -> Self {
        let changed =
            || u128::from(metadata.ctime().unsigned_abs()) * 1_000_000_000 + u128::from(metadata.ctime_nsec().unsigned_abs());
        // The time of the last change is only the fallback: a chmod then looks like a new file and causes one unnecessary registration.
        let born = metadata.created().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            born: born.map_or_else(changed, |since| since.as_nanos()),
        }
    }

    /// Return the identity of the file at this path, or `None` if no file is accessible there.
    pub(super) fn at(path: &Path) -> Option<Self> {
        fs::metadata(path).ok().map(|metadata| Self::of_file(&metadata))
    }
}

/// Signals changes in the directory, with the help of inotify. It also signals at regular intervals, because inotify can be unavailable, and loses a directory
/// that is replaced. While inotify watches the directory, these are [`WATCHED`] times as long.
#[derive(Debug)]
pub(super) struct PluginDirectory {
    path: PathBuf,
    kubelet: PathBuf,
    changed: Arc<Notify>,
    look_every: Duration,
    next: Instant,
    watcher: Option<(RecommendedWatcher, FileIdentity)>,
    retry_watch: Instant,
    warned: bool,
}

/// How many times as long an interval is while inotify watches the directory.
const WATCHED: u32 = 4;
/// The interval between two attempts to create an inotify instance, if the machine has run out of them.
const RETRY_WATCH: Duration = Duration::from_secs(30);

impl PluginDirectory {
    pub(super) fn new(path: &Path, kubelet: PathBuf, look_every: Duration) -> Self {
        let mut directory = Self {
            path: path.to_owned(),
            kubelet,
            changed: Arc::new(Notify::new()),
            look_every,
            next: Instant::now(),
            watcher: None,
            retry_watch: Instant::now(),
            warned: false,
        };
        directory.keep_watching();
        directory
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn kubelet_path(&self) -> &Path {
        &self.kubelet
    }

    /// Return the identity of the kubelet's current socket.
    pub(super) fn kubelet(&self) -> Option<FileIdentity> {
        FileIdentity::at(&self.kubelet)
    }

    /// Wait until the caller should check the directory again: after a change, and in any case at regular intervals.
    /// Cancel-safe.
    pub(super) async fn changed(&mut self) {
        tokio::select! {
            () = self.changed.notified() => {}
            () = sleep_until(self.next) => {}
        }
        self.keep_watching();
        let pause = if self.watcher.is_some() {
            self.look_every.saturating_mul(WATCHED)
        } else {
            self.look_every
        };
        self.next = Instant::now() + pause;
    }

    /// Make sure that inotify watches the directory that currently exists.
    fn keep_watching(&mut self) {
        let Some(now) = FileIdentity::at(&self.path) else {
            self.watcher = None;
            return;
        };
        match &self.watcher {
            Some((_, watched)) if *watched == now => return,
            None if Instant::now() < self.retry_watch => return,
            _ => self.watcher = None,
        }
        match watch(&self.path, Arc::clone(&self.changed)) {
            Ok(watcher) => self.watcher = Some((watcher, now)),
            Err(error) => {
                let look_every = self.look_every;
                self.retry_watch = Instant::now() + RETRY_WATCH;
                if !std::mem::replace(&mut self.warned, true) {
                    warn!(%error, "cannot watch {} with inotify; checking it every {look_every:?} instead", self.path.display());
                }
            }
        }
    }
}

fn watch(path: &Path, changed: Arc<Notify>) -> notify::Result<RecommendedWatcher> {
    let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| match event {
        // Ignore changes of contents and attributes: the kubelet writes its checkpoint here all the time.
        Ok(event) if !event.need_rescan() && !concerns_names(event.kind) => {}
        Ok(_) => changed.notify_one(),
        Err(error) => {
            debug!(%error, "inotify");
            changed.notify_one();
        }
    })?;
    watcher.watch(path, RecursiveMode::NonRecursive)?;
    Ok(watcher)
}

fn concerns_names(kind: EventKind) -> bool {
    match kind {
        EventKind::Create(_) | EventKind::Remove(_) | EventKind::Modify(ModifyKind::Name(_)) => true,
        EventKind::Any | EventKind::Other | EventKind::Modify(_) | EventKind::Access(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::KUBELET_SOCKET;
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_file_made_anew_is_another_one_and_an_untouched_one_is_not() -> std::io::Result<()> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("s");
        assert_eq!(FileIdentity::at(&path), None);
        drop(UnixListener::bind(&path)?);
        let first = FileIdentity::at(&path);
        fs::rename(&path, dir.path().join("t"))?;
        fs::rename(dir.path().join("t"), &path)?;
        assert!(first.is_some());
        if fs::metadata(&path)?.created().is_ok() {
            assert_eq!(FileIdentity::at(&path), first);
        }
        fs::remove_file(&path)?;
        // File times have the resolution of the kernel's tick, so a reused inode is only distinguishable after another tick.
        std::thread::sleep(Duration::from_millis(20));
        drop(UnixListener::bind(&path)?);
        assert_ne!(FileIdentity::at(&path), first);
        Ok(())
    }

    #[tokio::test]
    async fn without_inotify_the_directory_is_polled() -> std::io::Result<()> {
        let dir = tempfile::tempdir()?;
        let mut directory = PluginDirectory::new(dir.path(), dir.path().join(KUBELET_SOCKET), Duration::from_millis(20));
        directory.watcher = None;
        directory.retry_watch = Instant::now() + RETRY_WATCH;
        for _ in 0..3 {
            tokio::time::timeout(Duration::from_secs(5), directory.changed())
                .await
                .expect("a signal");
        }
        assert!(directory.watcher.is_none(), "inotify is not requested at each check");
        drop(UnixListener::bind(directory.kubelet_path())?);
        assert!(directory.kubelet().is_some());
        Ok(())
    }

    /// A new name is noticed at once.
    #[tokio::test]
    async fn a_replaced_directory_is_watched_again() -> std::io::Result<()> {
        let parent = tempfile::tempdir()?;
        let path = parent.path().join("d");
        fs::create_dir(&path)?;
        let mut directory = PluginDirectory::new(&path, path.join(KUBELET_SOCKET), Duration::from_secs(3600));
        directory.next = Instant::now() + Duration::from_secs(3600);
        let soon = Duration::from_secs(5);
        fs::write(path.join("a"), "")?;
        tokio::time::timeout(soon, directory.changed()).await.expect("noticed");
        fs::remove_dir_all(&path)?;
        fs::create_dir(&path)?;
        // Events of the removal, until the watch has moved to the new directory.
        let new = FileIdentity::at(&path);
        while directory.watcher.as_ref().map(|(_, watched)| *watched) != new {
            tokio::time::timeout(soon, directory.changed()).await.expect("noticed");
        }
        fs::write(path.join("b"), "")?;
        tokio::time::timeout(soon, directory.changed())
            .await
            .expect("noticed in the new directory");
        Ok(())
    }
}
