//! Runs the guard where users run it: in the root file systems of distributions, loaded in all ways in which programs load CUDA's driver library, and with
//! third-party programs. Each program runs twice, with the simulated driver alone and with the guard in its place, and the two runs are compared.
//!
//! `cargo xtask compat` builds and starts it. It downloads much, so `.ci/run` does not run it.

#![forbid(unsafe_code)]

mod arguments;
mod command;
mod container;
mod driver;
mod outcome;
mod probes;
mod programs;
mod progress;
mod report;
mod roots;
mod ways;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result, ensure};

use self::arguments::CompatArguments;
use self::container::{CompatContainer, ProgramRun};
use self::driver::CompatDriver;
use self::outcome::{ExpectedOutcome, ProgramOutcome, judge};
use self::progress::progress;
use self::report::{Cell, CompatReport};
use self::roots::{Made, ROOTS, RootFileSystem};

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(error) => {
            progress(&format!("error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<ExitCode> {
    let arguments = CompatArguments::parse(std::env::args().skip(1))?;
    ensure!(
        nix::unistd::geteuid().is_root(),
        "this is not root, which debootstrap and programs that are setuid need; type: sudo -E cargo xtask compat"
    );
    let cache = cache()?;
    let mut report = CompatReport::default();
    let mut made = Vec::new();
    for root in ROOTS.iter().filter(|root| arguments.wants_root(root)) {
        match root.make(&cache)? {
            Made::Ready(directory) => made.push((root, directory)),
            Made::Skipped(reason) => report.skip_root(root.name, reason),
        }
    }
    ensure!(
        !made.is_empty(),
        "no root file system could be made, so nothing was tested\n{report}"
    );
    let work = tempfile::Builder::new()
        .prefix("divvy-compat.")
        .disable_cleanup(arguments.keep)
        .tempdir()?;
    if arguments.keep {
        progress(&format!("the working directory is kept: {}", work.path().display()));
    }
    // What needs only functions of the oldest C library works with all later ones.
    let oldest = made.iter().find(|(root, _)| root.has_glibc());
    let driver = CompatDriver::build(oldest.map(|(_, directory)| directory.as_path()), work.path())?;
    for (root, directory) in &made {
        if arguments.wants_ways(root) {
            ways(root, directory, &driver, work.path(), &arguments, &mut report)?;
        }
        if root.name == programs::ROOT {
            third_party(directory, &cache, &driver, &arguments, &mut report)?;
        }
    }
    report.print()?;
    Ok(if report.is_good() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Return the directory of what is downloaded once.
fn cache() -> Result<PathBuf> {
    let parent = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let parent = parent.or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache")));
    let parent = parent.context("neither XDG_CACHE_HOME nor HOME is set, so it is not known where to keep what is downloaded")?;
    Ok(parent.join("divvy-compat"))
}

/// Load the libraries in each way in a root file system.
fn ways(
    root: &'static RootFileSystem,
    directory: &Path,
    driver: &CompatDriver,
    work: &Path,
    arguments: &CompatArguments,
    report: &mut CompatReport,
) -> Result<()> {
    progress(&format!("{}: compiling the probes", root.name));
    let probes = probes::compile(root, directory, &work.join(root.name))?;
    let container = CompatContainer {
        image: directory,
        driver,
    };
    for way in ways::WAYS.iter().filter(|way| arguments.wants_way(root, way)) {
        if way.needs_glibc && !root.has_glibc() {
            report.way(root.name, way.name, Cell::None);
            continue;
        }
        let mut run = (way.run)(root);
        run.mount(&probes, "/probe");
        let (expected, needs) = if root.has_glibc() {
            (way.expected, way.needs)
        } else {
            (ExpectedOutcome::AsDriver, &[][..])
        };
        let [plain, guarded] = container.both(&run)?;
        let cell = cell(expected, needs, &plain, &guarded);
        progress(&format!("{}: {}: {cell}", root.name, way.name));
        report.way(root.name, way.name, cell);
    }
    Ok(())
}

/// Run the third-party programs.
fn third_party(
    directory: &Path,
    cache: &Path,
    driver: &CompatDriver,
    arguments: &CompatArguments,
    report: &mut CompatReport,
) -> Result<()> {
    let container = CompatContainer {
        image: directory,
        driver,
    };
    for program in programs::PROGRAMS.iter().filter(|program| arguments.wants_program(program)) {
        let packages = program.install(cache)?;
        let mut run = ProgramRun::new("/usr/bin/python3", &[&format!("/programs/{}", program.script)]);
        // Where Python of Debian looks for packages, so that they find each other.
        run.mount(&packages, "/usr/local/lib/python3.11/dist-packages");
        run.mount(&programs::scripts(), "/programs");
        progress(&format!("{}: running", program.name));
        let [plain, guarded] = container.both(&run)?;
        let cell = cell(program.expected, program.needs, &plain, &guarded);
        progress(&format!("{}: {cell}", program.name));
        report.program(program, &plain, cell);
    }
    Ok(())
}

fn cell(expected: ExpectedOutcome, needs: &[(&str, &str)], plain: &ProgramOutcome, guarded: &ProgramOutcome) -> Cell {
    let differences = judge(expected, needs, plain, guarded);
    if differences.is_empty() {
        return Cell::Good(expected);
    }
    Cell::Differs {
        differences,
        plain: plain.to_string(),
        guarded: guarded.to_string(),
    }
}
