//! The mounts of the container.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use nix::mount::{MsFlags, mount};
use nix::sys::statvfs::{FsFlags, statvfs};

/// A bind mount.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct BindMount {
    pub(crate) host: PathBuf,
    /// An absolute path in the container.
    pub(crate) container: PathBuf,
    pub(crate) read_only: bool,
}

impl BindMount {
    /// A file of the machine that has the same path in the container. It is not for writing.
    pub(crate) fn same(path: &Path) -> BindMount {
        BindMount {
            host: path.to_owned(),
            container: path.to_owned(),
            read_only: path != Path::new("/proc"),
        }
    }

    /// Mount it below the container's root.
    pub(crate) fn make(&self, root: &Path) -> Result<()> {
        let at = below(root, &self.container);
        let failed = || format!("{} could not be mounted at {}", self.host.display(), self.container.display());
        make_place(&self.host, &at).with_context(failed)?;
        bind(&self.host, &at).with_context(failed)?;
        if self.read_only {
            make_read_only(&at).with_context(failed)?;
        }
        Ok(())
    }
}

/// Mount an empty file system in memory.
pub(crate) fn empty(root: &Path) -> Result<()> {
    mount(Some("tmpfs"), root, Some("tmpfs"), MsFlags::MS_NOSUID, Some("mode=755"))
        .with_context(|| format!("a tmpfs could not be mounted at {}", root.display()))
}

/// Mount an image's files so that what is written to them stays in memory. Return the directory.
pub(crate) fn copy_on_write(image: &Path, at: &Path) -> Result<PathBuf> {
    empty(at)?;
    let [changes, work, root] = ["changes", "work", "root"].map(|name| at.join(name));
    for directory in [&changes, &work, &root] {
        fs::create_dir(directory).with_context(|| format!("{} could not be made", directory.display()))?;
    }
    let options = format!(
        "lowerdir={},upperdir={},workdir={}",
        image.display(),
        changes.display(),
        work.display()
    );
    // Programs of the image may be setuid, as in a container.
    mount(
        Some("overlay"),
        &root,
        Some("overlay"),
        MsFlags::empty(),
        Some(options.as_str()),
    )
    .with_context(|| {
        format!(
            "the image {} could not be mounted; a comma or colon in its path is not possible",
            image.display()
        )
    })?;
    Ok(root)
}

/// Make a symbolic link in the container.
pub(crate) fn link(target: &Path, root: &Path, path: &Path) -> std::io::Result<()> {
    let at = below(root, path);
    if let Some(directory) = at.parent() {
        fs::create_dir_all(directory)?;
    }
    symlink(target, at)
}

/// Return where a path of the container is on the machine.
pub(crate) fn below(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

fn make_place(host: &Path, at: &Path) -> std::io::Result<()> {
    if fs::metadata(host)?.is_dir() {
        return fs::create_dir_all(at);
    }
    if let Some(directory) = at.parent() {
        fs::create_dir_all(directory)?;
    }
    // What is there, such as an earlier mount of a device without a driver, may be impossible to open.
    match File::create_new(at) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        made => made.map(drop),
    }
}

/// The kernel refuses it to a user namespace without MS_REC, because that would uncover what the machine has hidden below a mount.
fn bind(host: &Path, at: &Path) -> nix::Result<()> {
    mount(Some(host), at, None::<&str>, MsFlags::MS_BIND | MsFlags::MS_REC, None::<&str>)
}

fn make_read_only(at: &Path) -> nix::Result<()> {
    // A user namespace may not take these flags away from a mount that it got from the machine.
    let kept = [
        (FsFlags::ST_NOSUID, MsFlags::MS_NOSUID),
        (FsFlags::ST_NODEV, MsFlags::MS_NODEV),
        (FsFlags::ST_NOEXEC, MsFlags::MS_NOEXEC),
        (FsFlags::ST_NOATIME, MsFlags::MS_NOATIME),
        (FsFlags::ST_NODIRATIME, MsFlags::MS_NODIRATIME),
        (FsFlags::ST_RELATIME, MsFlags::MS_RELATIME),
    ];
    let present = statvfs(at)?.flags();
    let kept = kept.iter().filter(|(flag, _)| present.contains(*flag));
    let flags = kept.fold(
        MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY,
        |flags, (_, kept)| flags | *kept,
    );
    mount(None::<&str>, at, None::<&str>, flags, None::<&str>)
}
