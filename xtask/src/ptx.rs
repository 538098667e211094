//! `cargo xtask ptx`: NVIDIA's own assembler reads the kernels of `divvy smoke`. A driver's compiler is the same program, and each of these versions
//! knows other GPUs.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result, bail, ensure};

const HELP: &str = "\
usage: cargo xtask ptx

Assemble each file in crates/divvy-smoke/src/kernels for every GPU from sm_35 to sm_121 that the file is for, with each version of ptxas that knows
the GPU, and fail if a kernel needs memory for registers that it spills.

ptxas comes from NVIDIA's packages for Python (about 100 MB), and needs x86-64. They are downloaded once with python3 and pip, into
$DIVVY_PTXAS, or ~/.cache/divvy-ptxas.

Exit status: 0: all files were assembled; 1: one was not; 77: ptxas cannot be installed here.";

const KERNELS: &str = "crates/divvy-smoke/src/kernels";

/// The packages. CUDA 11 is the last with Kepler, CUDA 12 the last with Maxwell, Pascal, and Volta.
const PACKAGES: [(&str, &str); 3] = [
    ("nvidia-cuda-nvcc-cu11", "11.8.89"),
    ("nvidia-cuda-nvcc-cu12", "12.9.86"),
    ("nvidia-cuda-nvcc", "13.5.37"),
];

/// The GPUs, by compute capability. Some are known only to one version: 101 was renamed to 110 in CUDA 13.
const ARCHITECTURES: [u32; 23] = [
    35, 37, 50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 88, 89, 90, 100, 101, 103, 110, 120, 121,
];

/// Cannot run here.
pub(crate) const SKIPPED: u8 = 77;

pub(crate) fn run(arguments: &[&str]) -> Result<ExitCode> {
    match arguments {
        [] => {}
        ["--help" | "-h"] => {
            say(HELP);
            return Ok(ExitCode::SUCCESS);
        }
        _ => bail!("{HELP}"),
    }
    let assemblers = match install() {
        Ok(assemblers) => assemblers,
        Err(error) => {
            say(&format!("skipped: {error:#}"));
            return Ok(ExitCode::from(SKIPPED));
        }
    };
    let mut files: Vec<PathBuf> = std::fs::read_dir(KERNELS)
        .with_context(|| format!("{KERNELS} could not be read"))?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<_>>()?;
    files.retain(|path| path.extension().is_some_and(|extension| extension == "ptx"));
    files.sort();
    ensure!(!files.is_empty(), "{KERNELS} has no PTX");
    for file in &files {
        let text = std::fs::read_to_string(file).with_context(|| format!("{} could not be read", file.display()))?;
        let target = target(&text).with_context(|| format!("{} has no .target such as sm_30", file.display()))?;
        let wanted: BTreeSet<u32> = ARCHITECTURES
            .into_iter()
            .filter(|architecture| *architecture >= target)
            .collect();
        let mut done = BTreeSet::new();
        let mut count = 0;
        for assembler in &assemblers {
            let known = known(&output(Command::new(assembler).arg("--help"))?);
            for architecture in wanted.intersection(&known) {
                assemble(assembler, file, *architecture)?;
                done.insert(*architecture);
                count += 1;
            }
        }
        let missing: Vec<&u32> = wanted.difference(&done).collect();
        ensure!(missing.is_empty(), "no ptxas knows {missing:?}");
        say(&format!(
            "{}: assembled {count} times, for {} GPUs",
            file.display(),
            done.len()
        ));
    }
    Ok(ExitCode::SUCCESS)
}

/// Return the programs. Install those that are missing.
fn install() -> Result<Vec<PathBuf>> {
    ensure!(std::env::consts::ARCH == "x86_64", "ptxas comes only for x86-64");
    let home = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache/divvy-ptxas"));
    let directory = std::env::var_os("DIVVY_PTXAS").map(PathBuf::from).or_else(home);
    let directory = directory.context("neither DIVVY_PTXAS nor HOME is set")?;
    let mut found = Vec::new();
    for (package, version) in PACKAGES {
        let at = directory.join(format!("{package}-{version}"));
        if !at.exists() {
            pip_install(&format!("{package}=={version}"), &at)?;
        }
        let programs = ["cuda_nvcc/bin/ptxas", "cu13/bin/ptxas"].map(|name| at.join("nvidia").join(name));
        let program = programs.into_iter().find(|path| path.exists());
        found.push(program.with_context(|| format!("{} has no ptxas; remove it", at.display()))?);
    }
    Ok(found)
}

/// Unpack a package for Python into a directory, without what it needs.
pub(crate) fn pip_install(package: &str, at: &Path) -> Result<()> {
    // A directory that is renamed at the end is complete.
    let part = at.with_added_extension(std::process::id().to_string());
    let mut pip = Command::new("python3");
    pip.args([
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--target",
    ]);
    output(pip.arg(&part).arg(package))?;
    std::fs::rename(&part, at).with_context(|| format!("{} could not be renamed", part.display()))
}

/// Run a command, and return what it prints.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| format!("{name} could not be started"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    ensure!(
        output.status.success(),
        "{name} failed: {}{}",
        text(&output.stdout),
        text(&output.stderr)
    );
    // ptxas prints what it says of a kernel to standard error.
    Ok(text(&output.stdout) + &text(&output.stderr))
}

fn assemble(assembler: &Path, file: &Path, architecture: u32) -> Result<()> {
    let mut command = Command::new(assembler);
    command
        .args(["-v", "-arch", &format!("sm_{architecture}"), "-o", "/dev/null"])
        .arg(file);
    let said = output(&mut command)?;
    let spills = spills(&said).with_context(|| format!("{} says nothing of spills: {said}", assembler.display()))?;
    ensure!(
        spills == 0,
        "{} needs {spills} bytes for spilled registers on sm_{architecture}: {said}",
        file.display()
    );
    Ok(())
}

/// Return the least compute capability that a file is for.
fn target(text: &str) -> Option<u32> {
    let line = text.lines().find_map(|line| line.strip_prefix(".target sm_"))?;
    line.trim().parse().ok()
}

/// Read from ptxas's help which GPUs it knows.
fn known(help: &str) -> BTreeSet<u32> {
    let names = help.split('\'').filter_map(|word| word.strip_prefix("sm_"));
    names.filter_map(|number| number.parse().ok()).collect()
}

/// Read from what ptxas says with `-v` how many bytes all kernels store and load for spilled registers.
fn spills(said: &str) -> Option<u64> {
    let mut sum = None;
    for (place, _) in said.match_indices(" bytes spill") {
        let number = said[..place].rsplit([' ', ',']).next()?.parse::<u64>().ok()?;
        sum = Some(sum.unwrap_or(0) + number);
    }
    sum
}

#[expect(clippy::print_stdout, reason = "the result of the task")]
pub(crate) fn say(text: &str) {
    println!("{text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ptxas_says_is_understood() {
        let said = "ptxas info    : Function properties for fill\n    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
                    ptxas info    : Function properties for check\n    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n";
        assert_eq!(spills(said), Some(16));
        assert_eq!(spills("ptxas info: nothing"), None);
        let help = "Allowed values for this option:  'compute_35','compute_100a',\n  'sm_100','sm_100a','sm_35','sm_90f'.";
        assert_eq!(known(help), BTreeSet::from([35, 100]));
        assert_eq!(target("// text\n.version 6.0\n.target sm_30\n"), Some(30));
        assert_eq!(target(".target x"), None);
    }
}
