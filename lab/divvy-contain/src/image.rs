//! The files of the container's "image": a program, and the C library that this program has, too.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::mounts::{BindMount, below};

/// Where distributions have `ldconfig`, which is not always in the PATH of users.
const LDCONFIG: [&str; 3] = ["/sbin/ldconfig", "/usr/sbin/ldconfig", "/run/current-system/sw/bin/ldconfig"];

/// The files that a program needs.
#[derive(Debug)]
pub(crate) struct ProgramImage {
    /// The dynamic loader, which is one of the files.
    pub(crate) loader: PathBuf,
    pub(crate) files: BTreeSet<PathBuf>,
}

impl ProgramImage {
    /// Return the files of a program, which needs no more libraries than this one.
    pub(crate) fn of(program: &Path) -> Result<ProgramImage> {
        let program = program
            .canonicalize()
            .with_context(|| format!("{} is not a program", program.display()))?;
        let maps = fs::read_to_string("/proc/self/maps").context("/proc/self/maps cannot be read")?;
        let mut files = libraries(&maps);
        let loader = files.iter().find(|file| is_loader(file)).cloned();
        let loader = loader.context(
            "this program was linked statically, so it does not know where the C library is; build it for a glibc target",
        )?;
        files.insert(program);
        Ok(ProgramImage { loader, files })
    }
}

/// Return the libraries in a text like `/proc/self/maps`.
fn libraries(maps: &str) -> BTreeSet<PathBuf> {
    let paths = maps
        .lines()
        .filter_map(|line| line.find('/').map(|at| Path::new(&line[at..])));
    paths.filter(|path| is_library(&name(path))).map(Path::to_owned).collect()
}

/// Report whether a file name is that of a library: `libc-2.31.so` or `libcuda.so.1`, but not `libcuda.so.real`.
fn is_library(name: &str) -> bool {
    let Some((_, version)) = name.split_once(".so") else {
        return false;
    };
    version.is_empty() || version.starts_with('.') && version.chars().all(|c| c == '.' || c.is_ascii_digit())
}

fn is_loader(path: &Path) -> bool {
    let name = name(path);
    name.starts_with("ld-") || name.starts_with("ld64.so")
}

fn name(path: &Path) -> std::borrow::Cow<'_, str> {
    path.file_name().unwrap_or_else(|| OsStr::new("")).to_string_lossy()
}

/// Let the loader find the libraries, and make their links such as `libcuda.so.1`. NVIDIA's CDI hook `update-ldcache` does the same, with the same program.
pub(crate) fn find_libraries(root: &Path, image: &ProgramImage, mounts: &[BindMount]) -> Result<()> {
    let paths = mounts.iter().map(|mount| mount.container.as_path());
    ldconfig(root, "ld.so.conf", paths.chain(image.files.iter().map(PathBuf::as_path)))
}

/// Let the loader of an image find the libraries of the mounts, if it has a cache of libraries. musl's loader has none.
pub(crate) fn update_cache(root: &Path, mounts: &[BindMount]) -> Result<()> {
    if !below(root, Path::new("/etc/ld.so.cache")).exists() {
        return Ok(());
    }
    ldconfig(
        root,
        "ld.so.conf.d/00-divvy-contain.conf",
        mounts.iter().map(|mount| mount.container.as_path()),
    )
}

/// Run this machine's `ldconfig` on the directories of the libraries among these files, which the file of `/etc` then lists.
fn ldconfig<'a>(root: &Path, list: &str, paths: impl Iterator<Item = &'a Path>) -> Result<()> {
    let libraries = paths.filter(|path| is_library(&name(path)));
    let directories: BTreeSet<&Path> = libraries.filter_map(Path::parent).collect();
    let text: String = directories
        .iter()
        .map(|directory| format!("{}\n", directory.display()))
        .collect();
    let list = below(root, Path::new("/etc")).join(list);
    fs::create_dir_all(list.parent().unwrap_or(root))
        .and_then(|()| fs::write(&list, text))
        .with_context(|| format!("{} could not be written", list.display()))?;
    let ldconfig = LDCONFIG.iter().find(|path| Path::new(path).exists());
    let ldconfig = ldconfig.with_context(|| format!("this machine has no ldconfig; looked for {}", LDCONFIG.join(", ")))?;
    let output = Command::new(ldconfig).arg("-r").arg(root).output();
    let output = output.with_context(|| format!("{ldconfig} could not be run"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "{ldconfig} failed in the container: {}",
        errors.trim()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_libraries_and_the_loader_are_found_among_the_mappings() {
        let maps = "55e0-55e1 r--p 00000000 fe:00 1 /opt/x/divvy-contain
7f00-7f01 r-xp 00000000 fe:00 2                          /usr/lib/x86_64-linux-gnu/libc.so.6
7f01-7f02 r--p 00000000 fe:00 2                          /usr/lib/x86_64-linux-gnu/libc.so.6
7f02-7f03 r--p 00000000 fe:00 3                          /usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2
7ffc-7ffd rw-p 00000000 00:00 0                          [stack]";
        let found = libraries(maps);
        let names: Vec<_> = found.iter().map(|path| name(path).into_owned()).collect();
        assert_eq!(names, ["ld-linux-x86-64.so.2", "libc.so.6"]);
        let others = ["libcuda.so.real", "program", "lib.sox", "libx.so.1.tmp"];
        assert!(!others.iter().any(|name| is_library(name)) && is_library("libc-2.31.so"));
        let loaders: Vec<bool> = found.iter().map(|path| is_loader(path)).collect();
        assert_eq!(loaders, [true, false]);
    }
}
