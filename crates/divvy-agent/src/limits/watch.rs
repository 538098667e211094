//! Tells which of some directories got a new directory, by inotify. One instance serves all of them, because a user may have only few.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

use futures::{FutureExt as _, StreamExt as _};
use inotify::{EventMask, EventStream, Inotify, WatchDescriptor, WatchMask};
use tracing::debug;

/// The number of events that are read before the caller hears of them.
const AT_ONCE: usize = 1024;

/// What watches the directories.
#[derive(Debug)]
pub(super) struct DirectoryWatch {
    events: EventStream<[u8; 4096]>,
}

/// A directory that is watched.
#[derive(Debug)]
pub(super) struct DirectoryHandle(WatchDescriptor);

/// The directories in which something may be new.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Changed {
    /// These, by [`DirectoryHandle::id`]. They may have been removed from the watch meanwhile.
    Some(BTreeSet<i32>),
    /// The kernel has dropped events.
    All,
}

impl DirectoryHandle {
    /// Return a number that no other directory of this watch has or gets soon.
    pub(super) fn id(&self) -> i32 {
        self.0.get_watch_descriptor_id()
    }
}

impl DirectoryWatch {
    /// Create an inotify instance. The caller must be within a tokio runtime.
    pub(super) fn new() -> io::Result<DirectoryWatch> {
        let events = Inotify::init()?.into_event_stream([0; 4096])?;
        Ok(DirectoryWatch { events })
    }

    /// Watch a directory. What it contains already is not reported.
    pub(super) fn add(&self, directory: &Path) -> io::Result<DirectoryHandle> {
        let mask = WatchMask::CREATE | WatchMask::ONLYDIR | WatchMask::DONT_FOLLOW;
        self.events.watches().add(directory, mask).map(DirectoryHandle)
    }

    /// Watch a directory no longer. The kernel may have done so itself, when the directory was removed. For cgroups it does not.
    pub(super) fn remove(&self, watched: DirectoryHandle) {
        if let Err(error) = self.events.watches().remove(watched.0) {
            debug!(%error, "a directory was not watched any more");
        }
    }

    /// Wait until there is a new directory. Cancel-safe.
    pub(super) async fn changed(&mut self) -> io::Result<Changed> {
        let mut found = BTreeSet::new();
        loop {
            let mut next = self.events.next().await;
            for _ in 0..AT_ONCE {
                let event = match next {
                    Some(event) => event?,
                    None => return Err(io::ErrorKind::UnexpectedEof.into()),
                };
                if event.mask.contains(EventMask::Q_OVERFLOW) {
                    return Ok(Changed::All);
                }
                if event.mask.contains(EventMask::CREATE | EventMask::ISDIR) {
                    found.insert(event.wd.get_watch_descriptor_id());
                }
                match self.events.next().now_or_never() {
                    Some(event) => next = event,
                    None => break,
                }
            }
            if !found.is_empty() {
                return Ok(Changed::Some(found));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt as _;
    use std::path::PathBuf;
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    /// The deadline for events.
    const LIMIT: Duration = Duration::from_secs(10);

    /// Count the directories with these inodes that this process watches.
    fn watched(inodes: &[u64]) -> usize {
        let entries = fs::read_dir("/proc/self/fdinfo").expect("listed");
        let texts = entries.filter_map(|entry| fs::read_to_string(entry.ok()?.path()).ok());
        // Each watch is a line such as "inotify wd:1 ino:9e7e sdev:800013 mask:800afce …" (man 5 proc_pid_fdinfo).
        let is_of = |line: &str| {
            let inode = line.strip_prefix("inotify wd:").and_then(|line| line.split(' ').nth(1));
            let inode = inode.and_then(|field| u64::from_str_radix(field.strip_prefix("ino:")?, 16).ok());
            inode.is_some_and(|inode| inodes.contains(&inode))
        };
        texts.map(|text| text.lines().filter(|line| is_of(line)).count()).sum()
    }

    async fn ids(watch: &mut DirectoryWatch) -> BTreeSet<i32> {
        match timeout(LIMIT, watch.changed()).await.expect("an event").expect("no error") {
            Changed::Some(found) => found,
            Changed::All => panic!("events were dropped"),
        }
    }

    async fn check(root: &Path) {
        let pods = ["a", "b", "c"].map(|name| root.join(name));
        pods.iter().for_each(|pod| fs::create_dir(pod).expect("created"));
        let inodes = pods.each_ref().map(|pod| fs::metadata(pod).expect("there").ino());
        let mut watch = DirectoryWatch::new().expect("an instance");
        let of = pods.each_ref().map(|pod| watch.add(pod).expect("watched"));
        assert_eq!(watched(&inodes), 3);
        fs::create_dir(pods[0].join("0f")).expect("created");
        assert_eq!(ids(&mut watch).await, [of[0].id()].into());
        // What happens below a new directory, and to a directory, is nothing new.
        fs::create_dir(pods[0].join("0f/nested")).expect("created");
        fs::remove_dir(pods[0].join("0f/nested")).expect("removed");
        fs::remove_dir(pods[0].join("0f")).expect("removed");
        fs::create_dir(pods[1].join("0f")).expect("created");
        fs::create_dir(pods[2].join("0f")).expect("created");
        assert_eq!(ids(&mut watch).await, [of[1].id(), of[2].id()].into());
        for pod in &pods[1..] {
            fs::remove_dir(pod.join("0f")).expect("removed");
        }
        // Nothing is left of a pod that has ended.
        pods.iter().for_each(|pod| fs::remove_dir(pod).expect("removed"));
        of.into_iter().for_each(|of| watch.remove(of));
        assert_eq!(watched(&inodes), 0);
    }

    #[tokio::test]
    async fn new_directories_are_reported_and_gone_ones_forgotten() {
        let root = tempfile::tempdir().expect("a directory");
        check(root.path()).await;
        if let Some(root) = cgroup() {
            check(&root).await;
            fs::remove_dir(&root).expect("removed");
        }
    }

    /// Create a real cgroup of version 2, if this machine lets the test do so.
    fn cgroup() -> Option<PathBuf> {
        let mounts = fs::read_to_string("/proc/mounts").expect("read");
        let mount = mounts.lines().find_map(|line| {
            let mut fields = line.split(' ').skip(1);
            let (at, kind) = (fields.next()?, fields.next()?);
            (kind == "cgroup2").then(|| Path::new(at).join(format!("divvy-watch-{}", std::process::id())))
        });
        let made = mount.filter(|path| fs::create_dir(path).is_ok());
        if made.is_none() {
            divvy_skip::skipped("no cgroup of version 2 can be made");
        }
        made
    }
}
