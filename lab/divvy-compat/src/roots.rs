//! The root file systems.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use sha2::{Digest as _, Sha256};

use crate::command::run;
use crate::progress::progress;

const DEBIAN: &str = "http://deb.debian.org/debian";
const DEBIAN_ARCHIVE: &str = "http://archive.debian.org/debian";
const UBUNTU: &str = "http://archive.ubuntu.com/ubuntu";

/// A root file system.
#[derive(Debug)]
pub(crate) struct RootFileSystem {
    pub(crate) name: &'static str,
    source: RootSource,
    /// The file name of jemalloc's library.
    pub(crate) jemalloc: &'static str,
}

/// Where the files come from.
#[derive(Debug)]
enum RootSource {
    /// A mirror and a release of Debian or Ubuntu, and the package of jemalloc's library.
    Bootstrap(&'static str, &'static str, &'static str),
    /// Debian's package of musl, and a shell.
    Musl,
    /// A directory on a server, and an archive in it. The file with `.sha256` at its end is the archive's hash.
    Archive(&'static str, &'static str),
}

const fn of(name: &'static str, mirror: &'static str, release: &'static str) -> RootFileSystem {
    RootFileSystem {
        name,
        source: RootSource::Bootstrap(mirror, release, "libjemalloc2"),
        jemalloc: "libjemalloc.so.2",
    }
}

/// All root file systems. Those with glibc come first, from the oldest to the newest one: 2.27, 2.28, 2.31, 2.31, 2.35, 2.36, 2.39, 2.41.
pub(crate) const ROOTS: [RootFileSystem; 10] = [
    RootFileSystem {
        name: "ubuntu-18.04",
        source: RootSource::Bootstrap(UBUNTU, "bionic", "libjemalloc1"),
        jemalloc: "libjemalloc.so.1",
    },
    of("debian-10", DEBIAN_ARCHIVE, "buster"),
    of("ubuntu-20.04", UBUNTU, "focal"),
    of("debian-11", DEBIAN, "bullseye"),
    of("ubuntu-22.04", UBUNTU, "jammy"),
    of("debian-12", DEBIAN, "bookworm"),
    of("ubuntu-24.04", UBUNTU, "noble"),
    of("debian-13", DEBIAN, "trixie"),
    RootFileSystem {
        name: "musl",
        source: RootSource::Musl,
        jemalloc: "",
    },
    RootFileSystem {
        name: "alpine",
        source: RootSource::Archive(
            "https://dl-cdn.alpinelinux.org/alpine/v3.22/releases/x86_64",
            "alpine-minirootfs-3.22.0-x86_64.tar.gz",
        ),
        jemalloc: "",
    },
];

/// What [`RootFileSystem::make`] returns.
pub(crate) enum Made {
    /// The directory with the files.
    Ready(PathBuf),
    /// Why there is none.
    Skipped(String),
}

impl RootFileSystem {
    pub(crate) fn has_glibc(&self) -> bool {
        matches!(self.source, RootSource::Bootstrap(..))
    }

    /// Make the root file system, if an earlier run has not made the same one.
    pub(crate) fn make(&self, cache: &Path) -> Result<Made> {
        let roots = cache.join("roots");
        let (directory, record) = (roots.join(self.name), roots.join(format!("{}.made", self.name)));
        let description = format!("{:?}\n{}\n", self.source, packages(""));
        if fs::read_to_string(&record).is_ok_and(|text| text == description) {
            return Ok(Made::Ready(directory));
        }
        if let Some(url) = self.url().filter(|url| !is_reachable(url)) {
            return Ok(Made::Skipped(format!("{url} is not reachable")));
        }
        if directory.exists() {
            fs::remove_dir_all(&directory)
                .with_context(|| format!("the unfinished {} could not be removed", directory.display()))?;
        }
        fs::create_dir_all(&directory).with_context(|| format!("{} could not be made", directory.display()))?;
        progress(&format!("{}: downloading and unpacking (once)", self.name));
        match self.source {
            RootSource::Bootstrap(mirror, release, jemalloc) => bootstrap(mirror, release, jemalloc, &directory, cache)?,
            RootSource::Musl => unpack_packages(&["musl", "busybox-static"], &directory)?,
            RootSource::Archive(server, archive) => unpack_archive(server, archive, &directory)?,
        }
        fs::write(&record, description).with_context(|| format!("{} could not be written", record.display()))?;
        Ok(Made::Ready(directory))
    }

    /// A small file that exists if the source does.
    fn url(&self) -> Option<String> {
        match self.source {
            RootSource::Bootstrap(mirror, release, _) => Some(format!("{mirror}/dists/{release}/Release")),
            RootSource::Musl => None,
            RootSource::Archive(server, archive) => Some(format!("{server}/{archive}.sha256")),
        }
    }
}

fn curl() -> Command {
    let mut command = Command::new("curl");
    command.args(["--fail", "--silent", "--show-error", "--location", "--max-time", "300"]);
    command
}

fn is_reachable(url: &str) -> bool {
    run(curl().args(["--max-time", "30", "--output", "/dev/null", url])).is_ok()
}

/// Python and Java are for the ways of loading, the C library's files for compiling.
fn packages(jemalloc: &str) -> String {
    ["python3", "libc6-dev", "default-jre-headless", jemalloc].join(",")
}

fn bootstrap(mirror: &str, release: &str, jemalloc: &str, directory: &Path, cache: &Path) -> Result<()> {
    let (components, keyring) = if mirror == UBUNTU {
        ("main,universe", ubuntu_keyring(cache)?)
    } else {
        ("main", PathBuf::from("/usr/share/keyrings/debian-archive-keyring.gpg"))
    };
    ensure!(
        keyring.exists(),
        "{} is missing, without which the packages cannot be verified; type: apt-get install debian-archive-keyring",
        keyring.display()
    );
    let mut command = Command::new("debootstrap");
    command.arg("--variant=minbase");
    command.arg(format!("--components={components}"));
    command.arg(format!("--keyring={}", keyring.display()));
    command.arg(format!("--include={}", packages(jemalloc)));
    command.arg(release).arg(directory).arg(mirror).env("PATH", PATH);
    if mirror == UBUNTU {
        // The script of all releases of Ubuntu. An older debootstrap lacks the links to it for newer releases.
        command.arg("/usr/share/debootstrap/scripts/gutsy");
    }
    run(&mut command)?;
    make_relative(directory)
}

/// Let the links to the C library, with which programs are compiled, stay in the root file system when this machine's compiler follows them.
fn make_relative(root: &Path) -> Result<()> {
    let root = root.canonicalize().context("the root file system was not made")?;
    for directory in ["usr/lib/x86_64-linux-gnu", "lib64"] {
        // It may itself be a link, and its depth is that of its place.
        let place = root.join(directory).canonicalize();
        let place = place.with_context(|| format!("{directory} is missing in {}", root.display()))?;
        let up: PathBuf = place.strip_prefix(&root)?.iter().map(|_| "..").collect();
        for entry in fs::read_dir(&place).with_context(|| format!("{} cannot be read", place.display()))? {
            let path = entry?.path();
            let Ok(target) = fs::read_link(&path) else { continue };
            let Ok(target) = target.strip_prefix("/") else { continue };
            fs::remove_file(&path)
                .and_then(|()| symlink(up.join(target), &path))
                .with_context(|| format!("{} could not be changed", path.display()))?;
        }
    }
    Ok(())
}

/// debootstrap is where only root looks for programs.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The keys of Ubuntu, which Debian may not have.
fn ubuntu_keyring(cache: &Path) -> Result<PathBuf> {
    const FILE: &str = "usr/share/keyrings/ubuntu-archive-keyring.gpg";
    const PACKAGE: &str = "pool/main/u/ubuntu-keyring/ubuntu-keyring_2023.11.28.1_all.deb";
    const HASH: &str = "36de43b15853ccae0028e9a767613770c704833f82586f28eb262f0311adb8a8";
    let directory = cache.join("ubuntu-keyring");
    let found = [Path::new("/").join(FILE), directory.join(FILE)]
        .into_iter()
        .find(|path| path.exists());
    if let Some(found) = found {
        return Ok(found);
    }
    fs::create_dir_all(&directory).with_context(|| format!("{} could not be made", directory.display()))?;
    let package = directory.join("package.deb");
    download(&format!("{UBUNTU}/{PACKAGE}"), &package, HASH)?;
    run(Command::new("dpkg-deb").arg("-x").args([&package, &directory]))?;
    Ok(directory.join(FILE))
}

fn download(url: &str, to: &Path, hash: &str) -> Result<()> {
    run(curl().arg("--output").arg(to).arg(url))?;
    let bytes = fs::read(to).with_context(|| format!("{} cannot be read", to.display()))?;
    let found: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    ensure!(
        found == hash,
        "{url} has the SHA-256 {found}, and not {hash}: it is another file, and is not used"
    );
    Ok(())
}

/// Unpack packages of this machine's distribution, without their scripts.
fn unpack_packages(packages: &[&str], directory: &Path) -> Result<()> {
    let files = tempfile::tempdir()?;
    run(Command::new("apt-get")
        .arg("download")
        .args(packages)
        .current_dir(files.path()))?;
    for entry in fs::read_dir(files.path())? {
        run(Command::new("dpkg-deb").arg("-x").arg(entry?.path()).arg(directory))?;
    }
    let busybox = ["bin", "usr/bin"]
        .into_iter()
        .find(|bin| directory.join(bin).join("busybox").exists());
    let busybox = format!(
        "/{}/busybox",
        busybox.context("the package busybox-static has no busybox in a directory that is known")?
    );
    for link in ["bin/sh", "bin/grep", "usr/bin/env"] {
        let link = directory.join(link);
        fs::create_dir_all(link.parent().unwrap_or(directory))?;
        symlink(&busybox, &link).with_context(|| format!("{} could not be made", link.display()))?;
    }
    fs::create_dir_all(directory.join("tmp"))?;
    Ok(())
}

fn unpack_archive(server: &str, archive: &str, directory: &Path) -> Result<()> {
    let files = tempfile::tempdir()?;
    let (sum, file) = (files.path().join("sum"), files.path().join("archive"));
    run(curl().arg("--output").arg(&sum).arg(format!("{server}/{archive}.sha256")))?;
    let sum = fs::read_to_string(&sum).context("the hash cannot be read")?;
    let hash = sum.split_whitespace().next().context("the file with the hash is empty")?;
    download(&format!("{server}/{archive}"), &file, hash)?;
    run(Command::new("tar").arg("-xzf").arg(file).arg("-C").arg(directory))
}
