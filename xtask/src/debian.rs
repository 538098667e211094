//! Packages of Debian, unpacked without being installed.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};

use crate::ptx::output;

/// Debian's signatures.
const KEYS: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Unpack packages of a suite, from the mirror that this machine uses, into `directory / NAME`. Return that directory. Nothing is downloaded if it exists.
pub(crate) fn unpack(directory: &Path, name: &str, suite: &str, packages: &[&str]) -> Result<PathBuf> {
    let at = directory.join(name);
    if at.exists() {
        return Ok(at);
    }
    let apt = Apt::of(&directory.join("apt").join(suite), suite)?;
    // A directory that is renamed at the end is complete.
    let part = directory.join(format!("{name}.{}", std::process::id()));
    let archives = part.join(".archives");
    std::fs::create_dir_all(&archives).with_context(|| format!("{} could not be created", archives.display()))?;
    if !apt.has_lists() || output(apt.command().arg("download").args(packages).current_dir(&archives)).is_err() {
        // The lists that were read some days ago name packages that the mirror no longer has.
        output(apt.command().arg("update"))?;
        output(apt.command().arg("download").args(packages).current_dir(&archives))?;
    }
    for archive in std::fs::read_dir(&archives)? {
        output(Command::new("dpkg-deb").arg("-x").arg(archive?.path()).arg(&part))?;
    }
    std::fs::remove_dir_all(&archives).with_context(|| format!("{} could not be removed", archives.display()))?;
    std::fs::rename(&part, &at).with_context(|| format!("{} could not be renamed", part.display()))?;
    Ok(at)
}

/// apt-get with lists of its own.
struct Apt {
    at: PathBuf,
}

impl Apt {
    fn of(at: &Path, suite: &str) -> Result<Apt> {
        for name in ["lists/partial", "cache/archives/partial"] {
            let directory = at.join(name);
            std::fs::create_dir_all(&directory).with_context(|| format!("{} could not be created", directory.display()))?;
        }
        let targets = output(Command::new("apt-get").args(["indextargets", "--format", "$(REPO_URI) $(RELEASE)"]))?;
        let mirrors = targets
            .lines()
            .filter(|line| !line.contains("-security") && !line.contains("-updates"));
        let mirror = mirrors.filter_map(|line| line.split(' ').next()).next();
        let mirror = mirror.context("apt-get knows no mirror")?;
        let list = format!("deb [signed-by={KEYS}] {mirror} {suite} main contrib non-free\n");
        let file = at.join("sources.list");
        std::fs::write(&file, list).with_context(|| format!("{} could not be written", file.display()))?;
        Ok(Apt { at: at.to_owned() })
    }

    fn has_lists(&self) -> bool {
        let lists = std::fs::read_dir(self.at.join("lists"))
            .into_iter()
            .flatten()
            .filter_map(Result::ok);
        lists
            .map(|entry| entry.file_name())
            .any(|name| name.to_string_lossy().ends_with("_Packages"))
    }

    fn command(&self) -> Command {
        let mut apt = Command::new("apt-get");
        for (option, name) in [
            ("Dir::Etc::sourcelist", "sources.list"),
            ("Dir::State::lists", "lists"),
            ("Dir::Cache", "cache"),
        ] {
            apt.args(["-o", &format!("{option}={}", self.at.join(name).display())]);
        }
        apt.args(["-o", "Dir::Etc::sourceparts=-", "-o", "Acquire::GzipIndexes=false", "-qq"])
            .stdin(Stdio::null());
        apt
    }
}

/// Find a regular file below a directory.
pub(crate) fn find(directory: &Path, is_it: &dyn Fn(&str) -> bool) -> Option<PathBuf> {
    let entries = std::fs::read_dir(directory).ok()?.filter_map(Result::ok);
    entries
        .map(|entry| (entry.path(), entry.file_type()))
        .find_map(|(path, kind)| {
            let kind = kind.ok()?;
            let matches = kind.is_file() && is_it(path.file_name()?.to_str()?);
            if kind.is_dir() {
                find(&path, is_it)
            } else {
                matches.then_some(path)
            }
        })
}
