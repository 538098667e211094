//! The image's root. Every path of the image is opened through this module, which keeps the path beneath the root.
//!
//! The kernel resolves the paths (`openat2`, Linux 5.6) as if the image's root were `/`. No link of the image leads out of the
//! root, even if a process changes the link at the same time. Magic links of `/proc` are not followed, and files are never
//! written to another file system that is mounted below the root.
//!
//! On an older kernel, or if a seccomp filter refuses `openat2`, the components of a path are opened one by one. In that case, no
//! link is followed at all, and for writing, no mount is crossed.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::path::Path;

use rustix::fs::{
    AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, StatxFlags, fstat, mkdirat, openat, openat2, readlinkat, renameat, statx,
    symlinkat, unlinkat,
};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, fsconfig_create,
    fsconfig_reconfigure, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, move_mount, open_tree, unmount,
};

use crate::error::{Error, Result};

/// The maximum number of attempts to resolve a path while another process changes it.
const TRIES: usize = 16;
const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY);

/// The image's root, held open by a file descriptor.
#[derive(Debug)]
pub(crate) struct ImageRoot {
    at: OwnedFd,
}

/// A file of the container, as an identity and as a place where another file can be mounted.
#[derive(Debug)]
pub(crate) struct MountPlace {
    file: OwnedFd,
    path: String,
    device: u64,
    inode: u64,
}

impl MountPlace {
    /// Mount the file of another place over this one. The current mount namespace, which is the container's, is changed.
    pub(crate) fn cover_with(&self, other: &MountPlace) -> Result<()> {
        let clone = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
        let both = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        open_tree(&other.file, "", clone)
            .and_then(|tree| move_mount(&tree, "", &self.file, "", both))
            .map_err(|error| Error::image("mount Divvy's guard over", &self.path, error))
    }
}

/// Whether a path may cross into mounts of the container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mounts {
    Crossed,
    Refused,
}

impl ImageRoot {
    /// Open the root directory that the container's configuration names.
    pub(crate) fn open(path: &Path) -> Result<ImageRoot> {
        let opened = rustix::fs::open(path, DIRECTORY | OFlags::CLOEXEC, Mode::empty());
        opened
            .map(|at| ImageRoot { at })
            .map_err(|error| Error::host("open the container's root", &path.display().to_string(), error.into()))
    }

    fn resolve(&self, path: &str, flags: OFlags, mounts: Mounts) -> rustix::io::Result<OwnedFd> {
        let mut how = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        if mounts == Mounts::Refused {
            how |= ResolveFlags::NO_XDEV;
        }
        let relative = path.trim_start_matches('/');
        let relative = if relative.is_empty() { "." } else { relative };
        for _ in 0..TRIES {
            match openat2(&self.at, relative, flags | OFlags::CLOEXEC, Mode::empty(), how) {
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(Errno::NOSYS | Errno::PERM) => return self.walk(path, flags, mounts),
                done => return done,
            }
        }
        Err(Errno::AGAIN)
    }

    /// Resolve a path without `openat2`, component by component. No component may be a link or `..`. With [`Mounts::Refused`], no
    /// component may be on another mount.
    fn walk(&self, path: &str, flags: OFlags, mounts: Mounts) -> rustix::io::Result<OwnedFd> {
        let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
        if parts.contains(&"..") {
            return Err(Errno::XDEV);
        }
        let Some((last, directories)) = parts.split_last() else {
            return openat(&self.at, ".", flags | OFlags::CLOEXEC, Mode::empty());
        };
        let own = mount_of(&self.at)?;
        let open = |at: &OwnedFd, part: &str, flags: OFlags| {
            let opened = openat(at, part, flags | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
            match mounts {
                // The same error as that of openat2.
                Mounts::Refused if mount_of(&opened)? != own => Err(Errno::XDEV),
                Mounts::Refused | Mounts::Crossed => Ok(opened),
            }
        };
        let mut at = self.at.try_clone().map_err(|_| Errno::MFILE)?;
        for part in directories {
            at = open(&at, part, DIRECTORY)?;
        }
        open(&at, last, flags)
    }

    /// Return the names in a directory, sorted. The list is empty if the directory does not exist.
    pub(crate) fn names(&self, directory: &str) -> Result<Vec<String>> {
        let failed = |error: Errno| Error::image("read the directory", directory, error);
        let opened = match self.resolve(directory, OFlags::RDONLY | OFlags::DIRECTORY, Mounts::Crossed) {
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(Vec::new()),
            opened => opened.map_err(failed)?,
        };
        let mut names = Vec::new();
        for entry in Dir::new(opened).map_err(failed)? {
            // No file of a driver has a name that is not UTF-8.
            match entry.map_err(failed)?.file_name().to_str() {
                Ok("." | "..") | Err(_) => {}
                Ok(name) => names.push(name.to_owned()),
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    /// Return up to `limit` bytes of a regular file. The result is `None` if it does not exist or is not a regular file.
    pub(crate) fn read(&self, path: &str, limit: usize) -> Result<Option<Vec<u8>>> {
        let Some(file) = self.file(path)? else { return Ok(None) };
        let mut bytes = Vec::new();
        file.take(u64::try_from(limit).unwrap_or(u64::MAX))
            .read_to_end(&mut bytes)
            .map_err(|error| Error::image("read", path, error))?;
        Ok(Some(bytes))
    }

    /// Open a regular file for reading. The result is `None` if it does not exist or is not a regular file.
    pub(crate) fn file(&self, path: &str) -> Result<Option<File>> {
        // Check the type before opening, because opening a device can have side effects. Open without blocking, because the file
        // may have become a named pipe since the check.
        let mut opened = None;
        for flags in [OFlags::PATH, OFlags::RDONLY | OFlags::NONBLOCK] {
            let file = match self.resolve(path, flags, Mounts::Crossed) {
                Err(Errno::NOENT | Errno::NOTDIR) => return Ok(None),
                opened => File::from(opened.map_err(|error| Error::image("open", path, error))?),
            };
            if !file.metadata().map_err(|error| Error::image("read", path, error))?.is_file() {
                return Ok(None);
            }
            opened = Some(file);
        }
        Ok(opened)
    }

    /// Find a regular file of the image itself, which is not on another mount. The result is `None` if it is one of these.
    pub(crate) fn place(&self, path: &str) -> Result<Option<MountPlace>> {
        match self.resolve(path, OFlags::PATH, Mounts::Refused) {
            Err(Errno::NOENT | Errno::NOTDIR | Errno::XDEV) => Ok(None),
            found => self.place_of(path, found),
        }
    }

    /// Find a regular file that the container runtime has mounted at this path. The result is `None` if there is none.
    pub(crate) fn mounted(&self, path: &str) -> Result<Option<MountPlace>> {
        // No component is a link of the image, which could lead to a file that the kernel or another program trusts.
        match self.walk(path, OFlags::PATH, Mounts::Crossed) {
            Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
            found => self.place_of(path, found),
        }
    }

    /// Report whether a path leads to the same file as a place.
    pub(crate) fn has(&self, path: &str, place: &MountPlace) -> Result<bool> {
        match self.resolve(path, OFlags::PATH, Mounts::Crossed) {
            Err(Errno::NOENT | Errno::NOTDIR) => Ok(false),
            found => Ok(self
                .place_of(path, found)?
                .is_some_and(|found| (found.device, found.inode) == (place.device, place.inode))),
        }
    }

    fn place_of(&self, path: &str, found: rustix::io::Result<OwnedFd>) -> Result<Option<MountPlace>> {
        let failed = |error: Errno| Error::image("open", path, error);
        let file = found.map_err(failed)?;
        let stat = fstat(&file).map_err(failed)?;
        let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        Ok(is_file.then(|| MountPlace {
            file,
            path: path.to_owned(),
            device: stat.st_dev,
            inode: stat.st_ino,
        }))
    }

    /// Create or replace a file atomically.
    pub(crate) fn write(&self, path: &str, bytes: &[u8]) -> Result<()> {
        let (directory, name, beside) = self.beside(path)?;
        let failed = |error: Errno| Error::image("write", path, error);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = openat(&directory, &beside, flags, Mode::from_raw_mode(0o644)).map_err(failed)?;
        let written = File::from(opened)
            .write_all(bytes)
            .map_err(|error| Error::image("write", path, error))
            .and_then(|()| renameat(&directory, &beside, &directory, name).map_err(failed));
        leave_nothing(written, &directory, &beside)
    }

    /// Mount a small read-only file over an existing file. The current mount namespace, which is the container's, is changed.
    pub(crate) fn cover(&self, path: &str, bytes: &[u8]) -> Result<()> {
        let directory = path.rsplit_once('/').map_or("", |(directory, _)| directory);
        let covered = self
            .resolve(path, OFlags::PATH, Mounts::Crossed)
            .and_then(|file| Ok((file, self.resolve(directory, DIRECTORY, Mounts::Crossed)?)))
            .and_then(|(file, directory)| cover(&file, &directory, bytes));
        covered.map_err(|error| Error::image("mount a file over", path, error))
    }

    /// Create a symbolic link, or replace the file or link at that path.
    pub(crate) fn link(&self, target: &str, path: &str) -> Result<()> {
        let failed = |error: Errno| Error::image("create the link", path, error);
        let (directory, name, beside) = self.beside(path)?;
        if readlinkat(&directory, name, Vec::new()).is_ok_and(|there| there.as_bytes() == target.as_bytes()) {
            return Ok(());
        }
        symlinkat(target, &directory, &beside).map_err(failed)?;
        let renamed = renameat(&directory, &beside, &directory, name).map_err(failed);
        leave_nothing(renamed, &directory, &beside)
    }

    /// Prepare the replacement of the file at a path. Create its directory if necessary, and remove the temporary file that a
    /// killed hook may have left. Return the directory, the file's name, and the name for a temporary file in the same directory.
    fn beside<'p>(&self, path: &'p str) -> Result<(OwnedFd, &'p str, String)> {
        let (directory, name) = path.rsplit_once('/').unwrap_or(("", path));
        if name.is_empty() || name == "." || name == ".." {
            return Err(Error::image("write", path, Errno::ISDIR));
        }
        let directory = self.directory(directory)?;
        let beside = format!(".{name}.divvy");
        match unlinkat(&directory, &beside, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok((directory, name, beside)),
            Err(error) => Err(Error::image("write", path, error)),
        }
    }

    fn directory(&self, path: &str) -> Result<OwnedFd> {
        let failed = |error: Errno| Error::image("create the directory", path, error);
        match self.resolve(path, DIRECTORY, Mounts::Refused) {
            Err(Errno::NOENT) => {}
            opened => return opened.map_err(failed),
        }
        let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
        if name.is_empty() || name == ".." {
            return Err(failed(Errno::NOENT));
        }
        let parent = self.directory(parent)?;
        match mkdirat(&parent, name, Mode::from_raw_mode(0o755)) {
            // A dangling link also exists; then the second attempt to resolve the path fails.
            Ok(()) | Err(Errno::EXIST) => self.resolve(path, DIRECTORY, Mounts::Refused).map_err(failed),
            Err(error) => Err(failed(error)),
        }
    }
}

/// Identify the mount of a file: by the mount's ID if the kernel provides it (Linux 5.8), otherwise by the device number of the
/// file system. The device number does not distinguish bind mounts of the same file system.
fn mount_of(file: &OwnedFd) -> rustix::io::Result<(bool, u64)> {
    if let Ok(found) = statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)
        && found.stx_mask & StatxFlags::MNT_ID.bits() != 0
    {
        return Ok((true, found.stx_mnt_id));
    }
    fstat(file).map(|found| (false, found.st_dev))
}

/// Mount a file of a new file system over an existing file. Before version 6.15, kernels can mount a part of a file system only
/// if the file system is already mounted. Therefore the whole file system covers the directory for a moment.
fn cover(file: &OwnedFd, directory: &OwnedFd, bytes: &[u8]) -> rustix::io::Result<()> {
    const NAME: &str = "file";
    let system = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&system, "mode", "0555")?;
    fsconfig_set_string(&system, "size", "128k")?;
    fsconfig_create(&system)?;
    let harmless = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let mount = fsmount(&system, FsMountFlags::FSMOUNT_CLOEXEC, harmless)?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let new = openat(&mount, NAME, flags, Mode::from_raw_mode(0o444))?;
    let written = File::from(new).write_all(bytes);
    written.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    fsconfig_set_flag(&system, "ro")?;
    fsconfig_reconfigure(&system)?;
    let both = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    move_mount(&mount, "", directory, "", both)?;
    let clone = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let moved = open_tree(&mount, NAME, clone).and_then(|tree| move_mount(&tree, "", file, "", both));
    // Unmount through the file descriptor, so that no path of the image is resolved again.
    let uncovered = unmount(format!("/proc/self/fd/{}", mount.as_raw_fd()), UnmountFlags::DETACH);
    moved.and(uncovered)
}

fn leave_nothing(done: Result<()>, directory: impl AsFd, beside: impl AsRef<OsStr>) -> Result<()> {
    if done.is_err() {
        // Ignore a second error, because the first one is the cause.
        let _ = unlinkat(directory, beside.as_ref(), AtFlags::empty());
    }
    done
}

#[cfg(test)]
mod tests;
