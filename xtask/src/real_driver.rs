//! `cargo xtask real-driver`: Divvy with the user-space files of NVIDIA's driver, in the branches that Debian has. They run without a GPU, as far as they do not
//! need one.

mod container;
mod exports;
mod guard;
mod layouts;
mod mps;
pub(crate) mod packages;
mod tables;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};

use self::packages::{BRANCHES, PackagedDriver};
use crate::build;
use crate::cargo::build_workspace;
use crate::ptx::{SKIPPED, say};
use crate::target_directory::{debug_directory, target};

const HELP: &str = "\
usage: cargo xtask real-driver [CHECK]...

Run Divvy with the files of NVIDIA's driver, in the branches that Debian has packages of (component non-free). No GPU is needed.

Checks (all, if none is named):
  exports   of its functions, the simulated NVML has those that the library of the described branch has, and no other
  guard     the guard over the real libcuda: where programs find each function, what calls answer, and CUDA's runtime libraries 11 to 13
  layouts   the driver is found on nodes with Debian's packages, and with the files in lib64 or in a multiarch directory
  tables    `divvy smi` prints what nvidia-smi prints, both on the simulated driver
  mps       mps-control-daemon with the real control program: limits, restarts, refusals

Nothing is installed: the packages (about 150 MB) are downloaded once with apt-get and pip, into target/real-driver. NVIDIA's libraries create device
nodes when root loads them, so each program has a /dev of its own. Needs root on Debian or Ubuntu, cc, unshare, and python3 with pip.

What differs by intent is listed in xtask/src/real_driver/intended.txt, with its reasons.

Exit status: 0: all is as expected; 1: it is not; 77: something cannot be downloaded or run here.";

/// What a check found.
#[derive(Debug, Default)]
struct CheckResult {
    total: u32,
    wrong: Vec<String>,
}

impl CheckResult {
    /// Count a result.
    fn note(&mut self, name: impl Into<String>, is_right: bool) {
        self.total += 1;
        if !is_right {
            self.wrong.push(name.into());
        }
    }
}

/// What the checks need.
struct DriverBench {
    drivers: Vec<PackagedDriver>,
    /// Where the packages are.
    packages: PathBuf,
    /// A directory for this run.
    work: PathBuf,
    /// Where the programs of this repository were built.
    built: PathBuf,
}

/// What differs by intent, with the reason.
const INTENDED: &str = include_str!("real_driver/intended.txt");

/// Return the names of what differs by intent.
fn intended() -> impl Iterator<Item = &'static str> {
    let lines = INTENDED.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    lines.filter_map(|line| Some(line.split_once(": ")?.0))
}

type BenchCheck = fn(&DriverBench) -> Result<CheckResult>;
const CHECKS: [(&str, BenchCheck); 5] = [
    ("exports", exports::check),
    ("guard", guard::check),
    ("layouts", layouts::check),
    ("tables", tables::check),
    ("mps", mps::check),
];

pub(crate) fn run(arguments: &[&str]) -> Result<ExitCode> {
    if let ["--help" | "-h"] = arguments {
        say(HELP);
        return Ok(ExitCode::SUCCESS);
    }
    for name in arguments {
        ensure!(
            CHECKS.iter().any(|(known, _)| known == name),
            "{name:?} is no check\n\n{HELP}"
        );
    }
    let packages = std::path::absolute(target().join("real-driver"))?;
    let drivers: Result<Vec<PackagedDriver>> = BRANCHES
        .iter()
        .map(|branch| PackagedDriver::download(branch, &packages))
        .collect();
    build_workspace()?;
    build::guard()?;
    let built = std::path::absolute(debug_directory())?;
    let drivers = match drivers.and_then(|drivers| container::possible(&built.join("divvy-contain")).map(|()| drivers)) {
        Ok(drivers) => drivers,
        Err(error) => {
            say(&format!("skipped: {}", format!("{error:#}").replace('\n', " ")));
            return Ok(ExitCode::from(SKIPPED));
        }
    };
    let work = packages.join(format!("work.{}", std::process::id()));
    std::fs::create_dir_all(&work).with_context(|| format!("{} could not be created", work.display()))?;
    let bench = DriverBench {
        drivers,
        packages,
        built,
        work,
    };
    let mut is_good = true;
    let mut unused: Vec<&str> = intended().collect();
    for (name, check) in CHECKS
        .iter()
        .filter(|(name, _)| arguments.is_empty() || arguments.contains(name))
    {
        let start = Instant::now();
        let CheckResult { total, wrong } = check(&bench).with_context(|| format!("the check {name} could not be run"))?;
        let seconds = start.elapsed().as_secs();
        unused.retain(|intended| !wrong.iter().any(|name| name == intended));
        let (by_intent, wrong): (Vec<String>, Vec<String>) = wrong
            .into_iter()
            .partition(|name| intended().any(|intended| intended == name));
        let right = total - u32::try_from(wrong.len() + by_intent.len())?;
        say(&format!(
            "{name}: {right} of {total} as expected, {} different by intent ({seconds} s)",
            by_intent.len()
        ));
        for what in &wrong {
            say(&format!("  {what}"));
        }
        is_good &= wrong.is_empty();
    }
    if arguments.is_empty() && !unused.is_empty() {
        say(&format!(
            "xtask/src/real_driver/intended.txt has what is not different: {}",
            unused.join(", ")
        ));
        is_good = false;
    }
    if is_good {
        std::fs::remove_dir_all(&bench.work).with_context(|| format!("{} could not be removed", bench.work.display()))?;
        return Ok(ExitCode::SUCCESS);
    }
    bail!("the differences are in {}", bench.work.display())
}

impl DriverBench {
    fn built(&self, name: &str) -> Result<PathBuf> {
        let file = self.built.join(name);
        ensure!(file.exists(), "{} is missing; type: cargo build --workspace", file.display());
        Ok(file)
    }

    fn write(&self, name: &str, text: impl AsRef<[u8]>) -> Result<PathBuf> {
        let path = self.work.join(name);
        std::fs::write(&path, text).with_context(|| format!("{} could not be written", path.display()))?;
        Ok(path)
    }
}

/// Write two texts that differ, and a name for them.
fn differ(bench: &DriverBench, name: &str, [theirs, ours]: [&str; 2]) -> Result<()> {
    let file = name.replace(['/', ' '], "-");
    bench.write(&format!("{file}.theirs"), theirs)?;
    bench.write(&format!("{file}.ours"), ours)?;
    Ok(())
}

/// Copy a file, and make the directories above it.
fn place(from: &Path, to: &Path) -> Result<()> {
    let directory = to.parent().context("a file is in a directory")?;
    std::fs::create_dir_all(directory).with_context(|| format!("{} could not be created", directory.display()))?;
    std::fs::copy(from, to).with_context(|| format!("{} could not be copied", from.display()))?;
    Ok(())
}
