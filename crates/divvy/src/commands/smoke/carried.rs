//! `divvy-smoke` with a C library of its own, for containers of images that have neither.
//!
//! In a pod, a container of Divvy's image copies these files to a volume (the hidden command `copy-smoke-to`). A container engine mounts them from this
//! machine.

use std::path::{Path, PathBuf};
use std::{fs, os::unix::fs::symlink};

use anyhow::Context as _;
use divvy_smoke_run::{LOADER, PROGRAM_NAME};

/// The path of glibc's loader, as glibc programs of this architecture name it, and where distributions and Divvy's image have glibc. A machine may have
/// the C library of another architecture, too.
const GLIBC: (&str, [&str; 6]) = if cfg!(target_arch = "aarch64") {
    (
        "lib/ld-linux-aarch64.so.1",
        [
            "lib/aarch64-linux-gnu",
            "lib64",
            "lib",
            "usr/lib/aarch64-linux-gnu",
            "usr/lib64",
            "usr/lib",
        ],
    )
} else {
    (
        "lib64/ld-linux-x86-64.so.2",
        [
            "lib/x86_64-linux-gnu",
            "lib64",
            "lib",
            "usr/lib/x86_64-linux-gnu",
            "usr/lib64",
            "usr/lib",
        ],
    )
};

/// The libraries of the program and of the driver's libraries.
const LIBRARIES: [&str; 7] = [
    "libc.so.6",
    "libgcc_s.so.1",
    "libdl.so.2",
    "libm.so.6",
    "libpthread.so.0",
    "librt.so.1",
    "libutil.so.1",
];

/// Where the files of a machine are. They all go to one directory, under their own names.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Carried {
    pub(super) program: PathBuf,
    pub(super) loader: PathBuf,
    pub(super) libraries: Vec<PathBuf>,
}

impl Carried {
    /// Find the files below a root; `program` is `divvy-smoke`.
    ///
    /// # Errors
    /// A file without which the program cannot start is missing.
    pub(super) fn find(root: &Path, program: &Path) -> anyhow::Result<Carried> {
        anyhow::ensure!(
            program.is_file(),
            "{} does not exist; the release and Divvy's image contain it next to divvy",
            program.display()
        );
        let (loader, directories) = GLIBC;
        let loader = root.join(loader);
        anyhow::ensure!(
            loader.is_file(),
            "this machine has no glibc, which divvy-smoke needs: {} does not exist",
            loader.display()
        );
        let found = LIBRARIES.iter().filter_map(|name| {
            let mut files = directories.iter().map(|directory| root.join(directory).join(name));
            files.find(|file| file.is_file())
        });
        Ok(Carried {
            program: program.to_owned(),
            loader,
            libraries: found.collect(),
        })
    }

    /// Return each file with its name in the directory.
    pub(super) fn files(&self) -> impl Iterator<Item = (&Path, &str)> {
        let named = [&self.loader].into_iter().chain(&self.libraries);
        let named = named.filter_map(|path| Some((path.as_path(), path.file_name()?.to_str()?)));
        std::iter::once((self.program.as_path(), PROGRAM_NAME)).chain(named)
    }
}

/// Copy the program of this image, and what it needs, to a directory that exists.
pub(super) fn copy_to(directory: &Path) -> anyhow::Result<()> {
    let own = std::env::current_exe().context("this program's own path is unknown")?;
    copy(&Carried::find(Path::new("/"), &own.with_file_name(PROGRAM_NAME))?, directory)
}

fn copy(carried: &Carried, directory: &Path) -> anyhow::Result<()> {
    for (from, name) in carried.files() {
        let to = directory.join(name);
        // With its mode.
        fs::copy(from, &to).with_context(|| format!("{} could not be copied to {}", from.display(), to.display()))?;
    }
    // Its name differs from architecture to architecture, and the pod's manifest is the same for all.
    let name = carried.loader.file_name().context("the loader has no name")?;
    let link = directory.join(LOADER);
    symlink(name, &link).with_context(|| format!("{} could not be made", link.display()))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_copy_runs_without_the_machines_c_library() {
        let directory = tempfile::tempdir().expect("a directory");
        // Any program that is linked to glibc.
        let carried = Carried::find(Path::new("/"), Path::new("/bin/true")).expect("found");
        copy(&carried, directory.path()).expect("copied");
        let mut command = Command::new(directory.path().join(LOADER));
        command.arg("--library-path").arg(directory.path());
        let list = command.arg("--list").arg(directory.path().join(PROGRAM_NAME)).output();
        let list = String::from_utf8(list.expect("started").stdout).expect("text");
        let used: Vec<&str> = list.lines().filter(|line| line.contains("libc.so.6")).collect();
        assert!(
            used.iter()
                .all(|line| line.contains(&format!("=> {}", directory.path().display())))
                && !used.is_empty(),
            "{list}"
        );
    }

    #[test]
    fn what_is_missing_is_named() {
        let root = tempfile::tempdir().expect("a directory");
        let program = root.path().join(PROGRAM_NAME);
        let missing = |root: &Path| Carried::find(root, &program).expect_err("missing").to_string();
        assert!(missing(root.path()).contains("divvy-smoke does not exist"));
        fs::write(&program, "").expect("written");
        assert!(missing(root.path()).contains("has no glibc"));
    }
}
