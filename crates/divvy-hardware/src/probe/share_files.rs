//! The file systems for the files of shares: the two files of a pod's share of a GPU lie on a tmpfs of their own, so that the pod, which writes one of
//! them, can take no more of the node than that.
//!
//! The agent has no capability, so the probe mounts them. In a container, its directory of shares is a volume with `mountPropagation: Bidirectional`, so the
//! kernel mounts them on the machine, too, where the container runtime takes the files, and in the agent's container.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use divvy_share::{limits, usage};
use rustix::fs::{CWD, FlockOperation, Mode, OFlags, RawDir, ResolveFlags, flock, fstat, fstatfs, mkdirat, openat, openat2};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, UnmountFlags, fsconfig_create, fsconfig_set_string, fsmount,
    fsopen, move_mount, unmount,
};
use rustix::param::page_size;

use crate::facts::is_uuid;
use crate::protocol::ShareName;
use crate::{Failure, FailureCode};

/// The number of a tmpfs in statfs(2).
const TMPFS: u64 = 0x0102_1994;
/// The root, the two files, and temporary files of the agent. What extended attributes may take counts as such, too (Linux 6.6 and later).
const INODES: usize = 8;
/// How many file systems are unmounted at one place. The probe mounts one.
const STACKED: usize = 8;

/// Where the files of shares are.
#[derive(Debug)]
pub(super) struct ShareFiles {
    /// The directory, which has the same path on the machine. `None` if the files lie on its disk.
    pub(super) directory: Option<PathBuf>,
    /// The path at which the machine's root is mounted, where all that this probe mounts must appear. `None` if the agent started this probe: it is in the same
    /// mount namespace, so it sees what the probe mounts.
    pub(super) machine: Option<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
enum ShareFilesProblem {
    #[error("the probe runs without --share-files, so the files of shares lie on the node's disk")]
    Disabled,
    #[error("{0:?} is not the UID of a pod or the UUID of a GPU")]
    Name(String),
    #[error("{} has files already, which a file system would hide, so they stay on the node's disk", .0.display())]
    HasFiles(PathBuf),
    #[error(
        "what the probe mounts at {} does not appear on the node, so the files of shares lie on the node's disk; the directory of --share-files must be a volume \
         with mountPropagation: Bidirectional", .0.display()
    )]
    Hidden(PathBuf),
    #[error("another file system is mounted at {}", .0.display())]
    Foreign(PathBuf),
    #[error("cannot {what} {}: {source}", path.display())]
    Io {
        what: &'static str,
        path: PathBuf,
        source: Errno,
    },
}

impl From<ShareFilesProblem> for Failure {
    fn from(problem: ShareFilesProblem) -> Failure {
        let code = match &problem {
            ShareFilesProblem::Disabled | ShareFilesProblem::HasFiles(_) | ShareFilesProblem::Hidden(_) => {
                FailureCode::NotSupported
            }
            ShareFilesProblem::Name(_) => FailureCode::Protocol,
            ShareFilesProblem::Io { source, .. } => match *source {
                Errno::PERM | Errno::ACCESS => FailureCode::NoPermission,
                // The kernel is older than 5.2, or has no tmpfs.
                Errno::NOSYS | Errno::NODEV => FailureCode::NotSupported,
                _ => FailureCode::Unknown,
            },
            ShareFilesProblem::Foreign(_) => FailureCode::Unknown,
        };
        Failure::new(code, problem.to_string())
    }
}

fn failed(what: &'static str, path: &Path) -> impl FnOnce(Errno) -> ShareFilesProblem {
    let path = path.to_owned();
    move |source| ShareFilesProblem::Io { what, path, source }
}

impl ShareFiles {
    /// Mount a file system for a share, unless one is mounted already.
    ///
    /// # Errors
    /// [`FailureCode::NotSupported`] says that the files of this share lie on the disk.
    pub(super) fn mount(&self, share: &ShareName) -> Result<(), Failure> {
        Ok(mount(self.directory_for(share)?, share, self.machine.as_deref())?)
    }

    /// Unmount the file system of a share, if there is one. It ends with the last container that has a file of it.
    ///
    /// # Errors
    /// [`FailureCode::NotSupported`] says that the files of this share lie on the disk.
    pub(super) fn unmount(&self, share: &ShareName) -> Result<(), Failure> {
        Ok(unmount_all(self.directory_for(share)?, share)?)
    }

    /// Return the directory of all shares, if this can be the name of a share.
    fn directory_for(&self, share: &ShareName) -> Result<&Path, ShareFilesProblem> {
        let directory = self.directory.as_deref().ok_or(ShareFilesProblem::Disabled)?;
        match [&share.pod, &share.gpu].into_iter().find(|name| !is_uuid(name)) {
            Some(name) => Err(ShareFilesProblem::Name(name.chars().take(128).collect())),
            None => Ok(directory),
        }
    }
}

/// The size of a share's file system in bytes: the pages of its two files.
fn size() -> usize {
    let page = page_size();
    [usage::SIZE, limits::SIZE]
        .map(|file| file.next_multiple_of(page))
        .into_iter()
        .sum()
}

fn mount(base: &Path, share: &ShareName, machine: Option<&Path>) -> Result<(), ShareFilesProblem> {
    make(base.parent().unwrap_or(base), 0o700)?;
    make(base, 0o755)?;
    let base_file = open_locked(base)?;
    let (pod_path, gpu_path) = paths(base, share);
    let pod = enter(&base_file, &share.pod, &pod_path)?;
    let gpu = enter(&pod, &share.gpu, &gpu_path)?;
    if is_mounted(&pod, &gpu, &gpu_path)? {
        return Ok(());
    }
    if !is_empty(&gpu).map_err(failed("list", &gpu_path))? {
        return Err(ShareFilesProblem::HasFiles(gpu_path));
    }
    let mounted = || {
        let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_set_string(context.as_fd(), "source", "divvy")?;
        fsconfig_set_string(context.as_fd(), "size", size().to_string())?;
        fsconfig_set_string(context.as_fd(), "nr_inodes", INODES.to_string())?;
        fsconfig_set_string(context.as_fd(), "mode", "0755")?;
        fsconfig_create(context.as_fd())?;
        let forbidden = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC;
        // The agent reads each file each second.
        let attributes = forbidden | MountAttrFlags::MOUNT_ATTR_NOATIME;
        let tmpfs = fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
        let by_descriptors = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        move_mount(tmpfs.as_fd(), "", gpu.as_fd(), "", by_descriptors)
    };
    mounted().map_err(failed("mount a tmpfs at", &gpu_path))?;
    let Some(machine) = machine else { return Ok(()) };
    let shown = || {
        let own = fstat(open(&pod, &share.gpu, &gpu_path)?).map_err(failed("look at", &gpu_path))?;
        match device(machine, &gpu_path) {
            Ok(device) if device == own.st_dev => Ok(()),
            Ok(_) | Err(Errno::NOENT) => Err(ShareFilesProblem::Hidden(gpu_path.clone())),
            Err(source) => Err(failed("look at", &machine.join(below(&gpu_path)))(source)),
        }
    };
    shown().inspect_err(|_| {
        // It would hide what the agent writes below it.
        let _ = detach(&pod, share);
    })
}

/// Return the device of a directory of the machine, whose root is mounted at a path.
fn device(machine: &Path, directory: &Path) -> Result<u64, Errno> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = openat(CWD, machine, flags, Mode::empty())?;
    let opened = match openat2(&root, below(directory), flags, Mode::empty(), ResolveFlags::IN_ROOT) {
        // A kernel before 5.6 follows absolute links of the machine to the wrong place, where the directory is missing or another one.
        Err(Errno::NOSYS) => openat(&root, below(directory), flags, Mode::empty()),
        other => other,
    };
    Ok(fstat(opened?)?.st_dev)
}

fn below(path: &Path) -> &Path {
    path.strip_prefix("/").unwrap_or(path)
}

/// Unmount what is mounted last at the directory of a GPU. Containers may still have files of it.
fn detach(pod: &OwnedFd, share: &ShareName) -> Result<(), Errno> {
    // umount(2) takes no descriptor. This path leads through one, and the name at its end is not followed if it is a link.
    let path = format!("/proc/self/fd/{}/{}", pod.as_raw_fd(), share.gpu);
    unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)
}

fn unmount_all(base: &Path, share: &ShareName) -> Result<(), ShareFilesProblem> {
    match unmount_each(base, share) {
        // A directory is missing, and so is what could be mounted there.
        Err(ShareFilesProblem::Io {
            source: Errno::NOENT, ..
        }) => Ok(()),
        other => other,
    }
}

fn unmount_each(base: &Path, share: &ShareName) -> Result<(), ShareFilesProblem> {
    let base_file = open_locked(base)?;
    let (pod_path, gpu_path) = paths(base, share);
    let pod = open(&base_file, &share.pod, &pod_path)?;
    for _ in 0..STACKED {
        let gpu = open(&pod, &share.gpu, &gpu_path)?;
        if !is_mounted(&pod, &gpu, &gpu_path)? {
            return Ok(());
        }
        detach(&pod, share).map_err(failed("unmount", &gpu_path))?;
    }
    Err(ShareFilesProblem::Foreign(gpu_path))
}

fn paths(base: &Path, share: &ShareName) -> (PathBuf, PathBuf) {
    let pod = base.join(&share.pod);
    let gpu = pod.join(&share.gpu);
    (pod, gpu)
}

fn make(directory: &Path, mode: u32) -> Result<(), ShareFilesProblem> {
    match DirBuilder::new().mode(mode).create(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            let source = Errno::from_io_error(&error).unwrap_or(Errno::IO);
            Err(failed("make", directory)(source))
        }
        _ => Ok(()),
    }
}

/// Open the directory of all shares, to which the operator's own links may lead, once no other request of any probe works there.
fn open_locked(base: &Path) -> Result<File, ShareFilesProblem> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = openat(CWD, base, flags, Mode::empty()).map_err(failed("open", base))?;
    flock(&opened, FlockOperation::LockExclusive).map_err(failed("lock", base))?;
    Ok(opened.into())
}

/// Open a directory, and make it if it is missing.
fn enter(parent: impl AsFd, name: &str, path: &Path) -> Result<OwnedFd, ShareFilesProblem> {
    match mkdirat(&parent, name, Mode::from_raw_mode(0o755)) {
        Ok(()) | Err(Errno::EXIST) => open(parent, name, path),
        Err(source) => Err(failed("make", path)(source)),
    }
}

/// Open a directory, and no link to one.
fn open(parent: impl AsFd, name: &str, path: &Path) -> Result<OwnedFd, ShareFilesProblem> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(parent, name, flags, Mode::empty()).map_err(failed("open", path))
}

/// Report whether a share's file system is mounted at its directory.
fn is_mounted(pod: impl AsFd, gpu: impl AsFd, path: &Path) -> Result<bool, ShareFilesProblem> {
    let look = failed("look at", path);
    let found = || {
        let (above, here) = (fstat(pod)?, fstat(&gpu)?);
        Ok((above.st_dev != here.st_dev, fstatfs(gpu)?.f_type))
    };
    match found().map_err(look)? {
        (false, _) => Ok(false),
        (true, kind) if u64::try_from(kind) == Ok(TMPFS) => Ok(true),
        (true, _) => Err(ShareFilesProblem::Foreign(path.to_owned())),
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
