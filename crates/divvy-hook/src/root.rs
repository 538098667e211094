//! The image's root: every path of the image is opened here, beneath it.
//!
//! The kernel resolves them (`openat2`, Linux 5.6) with the image's root for a root, so that no link of the image leads out, whoever changes it
//! meanwhile; no link of `/proc` is followed, and what is written is not on another file system that is mounted there. Where the kernel is older, or a
//! seccomp filter refuses `openat2`, each component is opened by itself; no link is followed at all, and for writing no mount is entered either.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::path::Path;

use rustix::fs::{
    AtFlags, Dir, Mode, OFlags, ResolveFlags, StatxFlags, fstat, mkdirat, openat, openat2, readlinkat, renameat, statx,
    symlinkat, unlinkat,
};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, fsconfig_create,
    fsconfig_reconfigure, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, move_mount, open_tree, unmount,
};

use crate::error::{Error, Result};

/// How often a path is resolved anew that somebody changes meanwhile.
const TRIES: usize = 16;
const FOLDER: OFlags = OFlags::PATH.union(OFlags::DIRECTORY);

/// A descriptor of the root.
#[derive(Debug)]
pub(crate) struct Root {
    at: OwnedFd,
}

/// Whether a path may lead to what is mounted into the container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mounts {
    Crossed,
    Refused,
}

impl Root {
    /// The folder that the container's configuration names.
    pub(crate) fn open(path: &Path) -> Result<Root> {
        let opened = rustix::fs::open(path, FOLDER | OFlags::CLOEXEC, Mode::empty());
        opened
            .map(|at| Root { at })
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

    /// Without `openat2`: one component after the other, none of which may be a link or `..`, and with [`Mounts::Refused`] none on another mount.
    fn walk(&self, path: &str, flags: OFlags, mounts: Mounts) -> rustix::io::Result<OwnedFd> {
        let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
        if parts.contains(&"..") {
            return Err(Errno::XDEV);
        }
        let Some((last, folders)) = parts.split_last() else {
            return openat(&self.at, ".", flags | OFlags::CLOEXEC, Mode::empty());
        };
        let own = mount_of(&self.at)?;
        let open = |at: &OwnedFd, part: &str, flags: OFlags| {
            let opened = openat(at, part, flags | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
            match mounts {
                // As openat2 says it.
                Mounts::Refused if mount_of(&opened)? != own => Err(Errno::XDEV),
                Mounts::Refused | Mounts::Crossed => Ok(opened),
            }
        };
        let mut at = self.at.try_clone().map_err(|_| Errno::MFILE)?;
        for part in folders {
            at = open(&at, part, FOLDER)?;
        }
        open(&at, last, flags)
    }

    /// The names in a folder; none if there is no such folder.
    pub(crate) fn names(&self, folder: &str) -> Result<Vec<String>> {
        let failed = |error: Errno| Error::image("read the folder", folder, error);
        let opened = match self.resolve(folder, OFlags::RDONLY | OFlags::DIRECTORY, Mounts::Crossed) {
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(Vec::new()),
            opened => opened.map_err(failed)?,
        };
        let mut names = Vec::new();
        for entry in Dir::new(opened).map_err(failed)? {
            // A name that is no text is none of a driver's.
            match entry.map_err(failed)?.file_name().to_str() {
                Ok("." | "..") | Err(_) => {}
                Ok(name) => names.push(name.to_owned()),
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    /// The first bytes of a plain file; none if it is not there, or is none.
    pub(crate) fn read(&self, path: &str, limit: usize) -> Result<Option<Vec<u8>>> {
        let Some(file) = self.file(path)? else { return Ok(None) };
        let mut bytes = Vec::new();
        file.take(u64::try_from(limit).unwrap_or(u64::MAX))
            .read_to_end(&mut bytes)
            .map_err(|error| Error::image("read", path, error))?;
        Ok(Some(bytes))
    }

    /// A plain file, to be read; none if it is not there, or is none.
    pub(crate) fn file(&self, path: &str) -> Result<Option<File>> {
        // Looked at before it is opened: that alone does something with many a device. And opened without blocking, should it be a pipe by then.
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

    /// Puts a file in place of what is there, whole or not at all.
    pub(crate) fn write(&self, path: &str, bytes: &[u8]) -> Result<()> {
        let (folder, name, beside) = self.beside(path)?;
        let failed = |error: Errno| Error::image("write", path, error);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = openat(&folder, &beside, flags, Mode::from_raw_mode(0o644)).map_err(failed)?;
        let written = File::from(opened)
            .write_all(bytes)
            .map_err(|error| Error::image("write", path, error))
            .and_then(|()| renameat(&folder, &beside, &folder, name).map_err(failed));
        leave_nothing(written, &folder, &beside)
    }

    /// Mounts a small file that cannot be written over one that is there: in the mount namespace of whoever runs this, which is the container's.
    pub(crate) fn cover(&self, path: &str, bytes: &[u8]) -> Result<()> {
        let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
        let covered = self
            .resolve(path, OFlags::PATH, Mounts::Crossed)
            .and_then(|file| Ok((file, self.resolve(folder, FOLDER, Mounts::Crossed)?)))
            .and_then(|(file, folder)| cover(&file, &folder, bytes));
        covered.map_err(|error| Error::image("mount a file over", path, error))
    }

    /// Makes a link, or makes one lead elsewhere.
    pub(crate) fn link(&self, target: &str, path: &str) -> Result<()> {
        let failed = |error: Errno| Error::image("make the link", path, error);
        let (folder, name, beside) = self.beside(path)?;
        if readlinkat(&folder, name, Vec::new()).is_ok_and(|there| there.as_bytes() == target.as_bytes()) {
            return Ok(());
        }
        symlinkat(target, &folder, &beside).map_err(failed)?;
        let renamed = renameat(&folder, &beside, &folder, name).map_err(failed);
        leave_nothing(renamed, &folder, &beside)
    }

    /// The folder of a path, made if it is not there; the last component; and the name of a file that takes its place later, which is not there
    /// any more if a hook was killed over it.
    fn beside<'p>(&self, path: &'p str) -> Result<(OwnedFd, &'p str, String)> {
        let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
        if name.is_empty() || name == "." || name == ".." {
            return Err(Error::image("write", path, Errno::ISDIR));
        }
        let folder = self.folder(folder)?;
        let beside = format!(".{name}.divvy");
        match unlinkat(&folder, &beside, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok((folder, name, beside)),
            Err(error) => Err(Error::image("write", path, error)),
        }
    }

    fn folder(&self, path: &str) -> Result<OwnedFd> {
        let failed = |error: Errno| Error::image("make the folder", path, error);
        match self.resolve(path, FOLDER, Mounts::Refused) {
            Err(Errno::NOENT) => {}
            opened => return opened.map_err(failed),
        }
        let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
        if name.is_empty() || name == ".." {
            return Err(failed(Errno::NOENT));
        }
        let parent = self.folder(parent)?;
        match mkdirat(&parent, name, Mode::from_raw_mode(0o755)) {
            // One that leads nowhere is there, too, and is found by nobody below.
            Ok(()) | Err(Errno::EXIST) => self.resolve(path, FOLDER, Mounts::Refused).map_err(failed),
            Err(error) => Err(failed(error)),
        }
    }
}

/// On which mount a file is: the number of the mount where the kernel gives it (Linux 5.8), else the number of the file system. By the latter a bind mount of
/// the same file system cannot be told apart.
fn mount_of(file: &OwnedFd) -> rustix::io::Result<(bool, u64)> {
    if let Ok(found) = statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)
        && found.stx_mask & StatxFlags::MNT_ID.bits() != 0
    {
        return Ok((true, found.stx_mnt_id));
    }
    fstat(file).map(|found| (false, found.st_dev))
}

/// A file of a file system of its own. Kernels before 6.15 mount a part of a file system only from where it is mounted already: so all of it lies over the
/// folder for a moment.
fn cover(file: &OwnedFd, folder: &OwnedFd, bytes: &[u8]) -> rustix::io::Result<()> {
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
    move_mount(&mount, "", folder, "", both)?;
    let clone = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let moved = open_tree(&mount, NAME, clone).and_then(|tree| move_mount(&tree, "", file, "", both));
    // By its descriptor: no path of the image is looked up again.
    let uncovered = unmount(format!("/proc/self/fd/{}", mount.as_raw_fd()), UnmountFlags::DETACH);
    moved.and(uncovered)
}

fn leave_nothing(done: Result<()>, folder: impl AsFd, beside: impl AsRef<OsStr>) -> Result<()> {
    if done.is_err() {
        // The reason for which it could not be written is the one to tell.
        let _ = unlinkat(folder, beside.as_ref(), AtFlags::empty());
    }
    done
}

#[cfg(test)]
mod tests;
