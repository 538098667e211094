//! The file systems for the files of shares: the two files of a pod's share of a GPU lie on a tmpfs of their own, so that the pod, which writes one of
//! them, can take no more of the node than that.
//!
//! The agent has no capability, so the probe mounts them, in the mount namespace from which the container runtime takes the files.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::thread;

use divvy_share::{limits, usage};
use nix::sched::{CloneFlags, setns, unshare};
use rustix::fs::{
    CWD, FlockOperation, Mode, OFlags, RawDir, ResolveFlags, Stat, flock, fstat, fstatfs, mkdirat, openat, openat2, stat,
};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, UnmountFlags, fsconfig_create, fsconfig_set_string, fsmount,
    fsopen, move_mount, unmount,
};
use rustix::param::page_size;
use rustix::process::fchdir;

use crate::facts::is_uuid;
use crate::protocol::ShareName;
use crate::{Code, Failure};

/// The number of a tmpfs in statfs(2).
const TMPFS: u64 = 0x0102_1994;
/// The root, the two files, and temporary files of the agent. What extended attributes may take counts as such, too (Linux 6.6 and later).
const INODES: usize = 8;
/// How many file systems are unmounted at one place. The probe mounts one.
const STACKED: usize = 8;

/// Where the files of shares are.
#[derive(Debug)]
pub(super) struct ShareFiles {
    /// The directory on the machine. `None` if the files lie on its disk.
    pub(super) directory: Option<PathBuf>,
    /// The path at which the machine's root is mounted.
    pub(super) sys_root: PathBuf,
}

#[derive(Debug, thiserror::Error)]
enum Problem {
    #[error("the probe runs without --share-files, so the files of shares lie on the node's disk")]
    Disabled,
    #[error("{0:?} is not the UID of a pod or the UUID of a GPU")]
    Name(String),
    #[error("{} has files already, which a file system would hide, so they stay on the node's disk", .0.display())]
    HasFiles(PathBuf),
    #[error("process 1 has another directory at {}, so the files of shares lie on the node's disk", .0.display())]
    OtherRoot(PathBuf),
    #[error("another file system is mounted at {}", .0.display())]
    Foreign(PathBuf),
    #[error("cannot {what} {}: {source}", path.display())]
    Io {
        what: &'static str,
        path: PathBuf,
        source: Errno,
    },
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
    #[error("the thread that mounts has failed")]
    Panic,
}

impl From<Problem> for Failure {
    fn from(problem: Problem) -> Failure {
        let code = match &problem {
            Problem::Disabled | Problem::HasFiles(_) | Problem::OtherRoot(_) => Code::NotSupported,
            Problem::Name(_) => Code::Protocol,
            Problem::Io { source, .. } => match *source {
                Errno::PERM | Errno::ACCESS => Code::NoPermission,
                // The kernel is older than 5.2, or has no tmpfs.
                Errno::NOSYS | Errno::NODEV => Code::NotSupported,
                _ => Code::Unknown,
            },
            Problem::Foreign(_) | Problem::Thread(_) | Problem::Panic => Code::Unknown,
        };
        Failure::new(code, problem.to_string())
    }
}

fn failed(what: &'static str, path: &Path) -> impl FnOnce(Errno) -> Problem {
    let path = path.to_owned();
    move |source| Problem::Io { what, path, source }
}

impl ShareFiles {
    /// Mount a file system for a share, unless one is mounted already.
    ///
    /// # Errors
    /// [`Code::NotSupported`] says that the files of this share lie on the disk.
    pub(super) fn mount(&self, share: &ShareName) -> Result<(), Failure> {
        Ok(self.perform(share, mount)?)
    }

    /// Unmount the file system of a share, if there is one. It ends with the last container that has a file of it.
    ///
    /// # Errors
    /// [`Code::NotSupported`] says that the files of this share lie on the disk.
    pub(super) fn unmount(&self, share: &ShareName) -> Result<(), Failure> {
        Ok(self.perform(share, unmount_all)?)
    }

    fn perform(&self, share: &ShareName, work: fn(&Path, &ShareName) -> Result<(), Problem>) -> Result<(), Problem> {
        let directory = self.directory.as_deref().ok_or(Problem::Disabled)?;
        for name in [&share.pod, &share.gpu] {
            if !is_uuid(name) {
                return Err(Problem::Name(name.chars().take(128).collect()));
            }
        }
        let machine = self.machine(directory)?;
        // Only this thread enters the machine's namespace, and has a working directory of its own. It serves no other request.
        thread::scope(|scope| {
            let work = || {
                let failed = |what| move |error: nix::Error| failed(what, directory)(Errno::from_raw_os_error(error as i32));
                unshare(CloneFlags::CLONE_FS).map_err(failed("leave the directory of the other threads for"))?;
                if let Some(machine) = machine {
                    setns(machine.namespace, CloneFlags::CLONE_NEWNS)
                        .map_err(failed("enter the machine's mount namespace for"))?;
                    if stat(parent(directory)).map(identity) != Ok(machine.state) {
                        return Err(Problem::OtherRoot(parent(directory).to_owned()));
                    }
                }
                work(directory, share)
            };
            let builder = thread::Builder::new().name("mount".to_owned()).stack_size(256 * 1024);
            let thread = builder.spawn_scoped(scope, work).map_err(Problem::Thread)?;
            thread.join().map_err(|_| Problem::Panic)?
        })
    }

    /// Return where to mount, if the probe sees the machine from outside: as a container does, at a path. A probe that has the machine's root as its own
    /// mounts where it is.
    fn machine(&self, directory: &Path) -> Result<Option<Machine>, Problem> {
        if self.sys_root == Path::new("/") {
            return Ok(None);
        }
        let path = self.sys_root.join("proc/1/ns/mnt");
        let opened = openat(CWD, &path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        let namespace = match opened {
            Ok(namespace) => namespace,
            // A described machine, which has no processes.
            Err(Errno::NOENT) => return Ok(None),
            Err(source) => return Err(failed("open", &path)(source)),
        };
        let found = fstat(&namespace).map_err(failed("look at", &path))?;
        let own = stat("/proc/self/ns/mnt").map_err(failed("look at", Path::new("/proc/self/ns/mnt")))?;
        if identity(own) == identity(found) {
            return Ok(None);
        }
        let state = self.state(parent(directory)).map_err(failed("look at", parent(directory)))?;
        Ok(Some(Machine { namespace, state }))
    }

    /// Return the identity of a directory of the machine, as the probe sees it.
    fn state(&self, directory: &Path) -> Result<(u64, u64), Errno> {
        let below = directory.strip_prefix("/").unwrap_or(directory);
        let root = openat(
            CWD,
            &self.sys_root,
            OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let opened = match openat2(&root, below, flags, Mode::empty(), ResolveFlags::IN_ROOT) {
            // A kernel before 5.6 follows absolute links of the machine to the wrong place, where the directory is missing or another one.
            Err(Errno::NOSYS) => openat(&root, below, flags, Mode::empty()),
            other => other,
        };
        fstat(opened?).map(identity)
    }
}

/// A machine that the probe sees from outside.
struct Machine {
    /// The mount namespace of its first process.
    namespace: OwnedFd,
    /// The state directory. In the namespace, it must be the same one: where a node is a mount namespace only, process 1 is not the node's.
    state: (u64, u64),
}

fn identity(data: Stat) -> (u64, u64) {
    (data.st_dev, data.st_ino)
}

fn parent(directory: &Path) -> &Path {
    directory.parent().unwrap_or(directory)
}

/// The size of a share's file system in bytes: the pages of its two files.
fn size() -> usize {
    let page = page_size();
    [usage::SIZE, limits::SIZE]
        .map(|file| file.next_multiple_of(page))
        .into_iter()
        .sum()
}

fn mount(base: &Path, share: &ShareName) -> Result<(), Problem> {
    make(parent(base), 0o700)?;
    make(base, 0o755)?;
    let base_file = open_locked(base)?;
    let (pod_path, gpu_path) = paths(base, share);
    let pod = enter(&base_file, &share.pod, &pod_path)?;
    let gpu = enter(&pod, &share.gpu, &gpu_path)?;
    if is_mounted(&pod, &gpu, &gpu_path)? {
        return Ok(());
    }
    if !is_empty(&gpu).map_err(failed("list", &gpu_path))? {
        return Err(Problem::HasFiles(gpu_path));
    }
    let mounted = || {
        let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_set_string(context.as_fd(), "source", "divvy")?;
        fsconfig_set_string(context.as_fd(), "size", size().to_string())?;
        fsconfig_set_string(context.as_fd(), "nr_inodes", INODES.to_string())?;
        fsconfig_set_string(context.as_fd(), "mode", "0755")?;
        fsconfig_create(context.as_fd())?;
        let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC;
        let tmpfs = fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
        let by_descriptors = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        move_mount(tmpfs.as_fd(), "", gpu.as_fd(), "", by_descriptors)
    };
    mounted().map_err(failed("mount a tmpfs at", &gpu_path))
}

fn unmount_all(base: &Path, share: &ShareName) -> Result<(), Problem> {
    match unmount_each(base, share) {
        // A directory is missing, and so is what could be mounted there.
        Err(Problem::Io {
            source: Errno::NOENT, ..
        }) => Ok(()),
        other => other,
    }
}

fn unmount_each(base: &Path, share: &ShareName) -> Result<(), Problem> {
    let base_file = open_locked(base)?;
    let (pod_path, gpu_path) = paths(base, share);
    let pod = open(&base_file, &share.pod, &pod_path)?;
    for _ in 0..STACKED {
        let gpu = open(&pod, &share.gpu, &gpu_path)?;
        if !is_mounted(&pod, &gpu, &gpu_path)? {
            return Ok(());
        }
        // umount(2) takes no descriptor, and this name cannot lead elsewhere.
        fchdir(&pod).map_err(failed("enter", &pod_path))?;
        // Containers still have files of it.
        let lazily = UnmountFlags::DETACH | UnmountFlags::NOFOLLOW;
        unmount(&*share.gpu, lazily).map_err(failed("unmount", &gpu_path))?;
    }
    Err(Problem::Foreign(gpu_path))
}

fn paths(base: &Path, share: &ShareName) -> (PathBuf, PathBuf) {
    let pod = base.join(&share.pod);
    let gpu = pod.join(&share.gpu);
    (pod, gpu)
}

fn make(directory: &Path, mode: u32) -> Result<(), Problem> {
    match DirBuilder::new().mode(mode).create(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            let source = Errno::from_io_error(&error).unwrap_or(Errno::IO);
            Err(failed("make", directory)(source))
        }
        _ => Ok(()),
    }
}

/// Open the directory of all shares, to which the operator's own links may lead, once no other request of any probe works there.
fn open_locked(base: &Path) -> Result<File, Problem> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = openat(CWD, base, flags, Mode::empty()).map_err(failed("open", base))?;
    flock(&opened, FlockOperation::LockExclusive).map_err(failed("lock", base))?;
    Ok(opened.into())
}

/// Open a directory, and make it if it is missing.
fn enter(parent: impl AsFd, name: &str, path: &Path) -> Result<OwnedFd, Problem> {
    match mkdirat(&parent, name, Mode::from_raw_mode(0o755)) {
        Ok(()) | Err(Errno::EXIST) => open(parent, name, path),
        Err(source) => Err(failed("make", path)(source)),
    }
}

/// Open a directory, and no link to one.
fn open(parent: impl AsFd, name: &str, path: &Path) -> Result<OwnedFd, Problem> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(parent, name, flags, Mode::empty()).map_err(failed("open", path))
}

/// Report whether a share's file system is mounted at its directory.
fn is_mounted(pod: impl AsFd, gpu: impl AsFd, path: &Path) -> Result<bool, Problem> {
    let look = failed("look at", path);
    let found = || {
        let (above, here) = (fstat(pod)?, fstat(&gpu)?);
        Ok((above.st_dev != here.st_dev, fstatfs(gpu)?.f_type))
    };
    match found().map_err(look)? {
        (false, _) => Ok(false),
        (true, kind) if u64::try_from(kind) == Ok(TMPFS) => Ok(true),
        (true, _) => Err(Problem::Foreign(path.to_owned())),
    }
}

fn is_empty(directory: impl AsFd) -> Result<bool, Errno> {
    let mut buffer = Vec::with_capacity(4096);
    let mut entries = RawDir::new(directory, buffer.spare_capacity_mut());
    while let Some(entry) = entries.next() {
        if !matches!(entry?.file_name().to_bytes(), b"." | b"..") {
            return Ok(false);
        }
    }
    Ok(true)
}
