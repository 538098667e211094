//! The record of skipped tests and steps, and the list of allowed skips. See `lab/divvy-skip`.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail, ensure};

pub(crate) const USAGE: &str = "usage: cargo xtask skips FILE

Print the skips that FILE records. Fail if .ci/skips does not list one of them. `.ci/run` runs this command at its end.";

const ALLOWED: &str = ".ci/skips";

pub(crate) fn run(args: &[&str]) -> Result<ExitCode> {
    let [file] = args else { bail!("{USAGE}") };
    if matches!(*file, "--help" | "-h") {
        say(USAGE);
        return Ok(ExitCode::SUCCESS);
    }
    let read = |path: &str| std::fs::read_to_string(path).with_context(|| format!("{path} could not be read"));
    let (skips, allowed) = (Skips::parse(&read(file)?), AllowedSkips::parse(&read(ALLOWED)?)?);
    say(&skips.to_string());
    let wrong = skips.not_in(&allowed);
    for Skip { name, reason } in &wrong {
        say(&format!("NOT ALLOWED  {name}: {reason}"));
    }
    ensure!(
        wrong.is_empty(),
        "{} of these skips are not listed in {ALLOWED}: install what is missing, or list a skip there if it cannot run on every machine",
        wrong.len()
    );
    Ok(ExitCode::SUCCESS)
}

/// The file in which one run of the tests records its skips.
#[derive(Debug)]
pub(crate) struct SkipRecord {
    path: PathBuf,
    /// The file's size in bytes before this run. Earlier lines belong to other runs.
    before: usize,
}

impl SkipRecord {
    /// Start a record: in the file that the environment names, or in a new empty file.
    pub(crate) fn begin() -> Result<SkipRecord> {
        if let Some(path) = std::env::var_os(divvy_skip::FILE).filter(|path| !path.is_empty()) {
            // Tests run in the directories of their packages, so a relative path would mean different files.
            let path = std::path::absolute(path)?;
            let before = std::fs::read(&path).map_or(0, |bytes| bytes.len());
            return Ok(SkipRecord { path, before });
        }
        let path = std::path::absolute(crate::target_directory::target())?.join("skips");
        std::fs::create_dir_all(crate::target_directory::target())?;
        std::fs::write(&path, "").with_context(|| format!("{} could not be written", path.display()))?;
        Ok(SkipRecord { path, before: 0 })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Print all skips since the start of this record, and their number.
    pub(crate) fn print(&self) -> Result<()> {
        let bytes = std::fs::read(&self.path).unwrap_or_default();
        let own = bytes
            .get(self.before..)
            .context("the record of skips has been truncated meanwhile")?;
        say(&Skips::parse(&String::from_utf8_lossy(own)).to_string());
        Ok(())
    }
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Skip {
    name: String,
    reason: String,
}

/// The recorded skips, sorted and without duplicates: a test may meet the same obstacle several times.
#[derive(Debug)]
struct Skips(BTreeSet<Skip>);

impl Skips {
    fn parse(text: &str) -> Skips {
        let skip = |line: &str| {
            let (name, reason) = line.split_once('\t').unwrap_or((line, "no reason was given"));
            Skip {
                name: name.to_owned(),
                reason: reason.to_owned(),
            }
        };
        Skips(text.lines().filter(|line| !line.is_empty()).map(skip).collect())
    }

    fn not_in(&self, allowed: &AllowedSkips) -> Vec<&Skip> {
        self.0.iter().filter(|skip| !allowed.lists(&skip.name)).collect()
    }
}

impl fmt::Display for Skips {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Skip { name, reason } in &self.0 {
            writeln!(f, "skipped  {name}: {reason}")?;
        }
        match self.0.len() {
            0 => write!(f, "nothing was skipped"),
            number => write!(f, "{number} skipped"),
        }
    }
}

/// The names in `.ci/skips`.
#[derive(Debug)]
struct AllowedSkips(Vec<String>);

impl AllowedSkips {
    fn parse(text: &str) -> Result<AllowedSkips> {
        let mut names = Vec::new();
        for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let (name, reason) = line.split_once('\t').unwrap_or((line, ""));
            ensure!(
                !name.is_empty() && !reason.trim().is_empty(),
                "{ALLOWED}: {line:?} gives no reason; write NAME, a tab, and why it cannot run on every machine"
            );
            names.push(name.to_owned());
        }
        Ok(AllowedSkips(names))
    }

    /// Report whether the list contains a name. A listed name that ends in `::` stands for every test of that module.
    fn lists(&self, name: &str) -> bool {
        let lists = |listed: &String| listed == name || (listed.ends_with("::") && name.starts_with(listed.as_str()));
        self.0.iter().any(lists)
    }
}

#[expect(clippy::print_stdout, reason = "the result of the task")]
fn say(text: &str) {
    println!("{text}");
}

#[cfg(test)]
mod tests;
