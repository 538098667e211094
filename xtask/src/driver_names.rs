//! `cargo xtask driver-names`: the guard knows each function that NVIDIA's driver libraries and the newest header have.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context as _, Result, bail, ensure};
use divvy_shadow_testkit::Elf;
use regex::Regex;

use crate::debian::find;
use crate::ptx::{SKIPPED, output, pip_install, say};
use crate::real_driver::packages::{BRANCHES, Branch, PackagedDriver};
use crate::target_directory::target;

const HELP: &str = "\
usage: cargo xtask driver-names

Compare crates/divvy-guard/tests/it/functions.txt, which says of each function of CUDA's driver library what the guard does about it, with the names of
the functions in six branches of the library (Debian's packages, 450 to 555) and in the newest cuda.h (NVIDIA's package nvidia-cuda-runtime for Python).
Nothing is installed: the packages are downloaded once with apt-get and pip, into target/real-driver, as `cargo xtask real-driver` does.

Exit status: 0: the file has each of these names, and no other; 1: it has not; 77: something cannot be downloaded here.";

const TABLE: &str = "crates/divvy-guard/tests/it/functions.txt";

pub(crate) fn run(arguments: &[&str]) -> Result<ExitCode> {
    match arguments {
        [] => {}
        ["--help" | "-h"] => {
            say(HELP);
            return Ok(ExitCode::SUCCESS);
        }
        _ => bail!("{HELP}"),
    }
    let text = std::fs::read_to_string(TABLE).with_context(|| format!("{TABLE} could not be read"))?;
    let known = table(&text);
    let directory = std::path::absolute(target().join("real-driver"))?;
    let mut seen = BTreeSet::new();
    let mut missing = Vec::new();
    for branch in BRANCHES.iter().map(Some).chain([None]) {
        let (name, names) = match branch {
            Some(branch) => (format!("libcuda.so of {}", branch.name), of_library(&directory, branch)),
            None => ("the newest cuda.h".to_owned(), of_header(&directory)),
        };
        match names {
            Ok(names) => {
                let unknown: Vec<&String> = names.difference(&known).collect();
                ensure!(
                    unknown.is_empty(),
                    "{name} has functions that are not in {TABLE}: {unknown:?}. Find out whether they take memory, replace them in the guard if they do, and put them \
                     into the group that says so"
                );
                say(&format!("{name}: {} functions", names.len()));
                seen.extend(names);
            }
            Err(error) => missing.push(format!("{name}: {error:#}")),
        }
    }
    if !missing.is_empty() {
        say(&format!("skipped: {}", missing.join("; ").replace('\n', " ")));
        return Ok(ExitCode::from(SKIPPED));
    }
    let stale: Vec<&String> = known.difference(&seen).collect();
    ensure!(stale.is_empty(), "{TABLE} has names that no driver has: {stale:?}");
    Ok(ExitCode::SUCCESS)
}

/// Read the names from the table. The other lines are the heads of groups.
fn table(text: &str) -> BTreeSet<String> {
    let lines = text.lines().filter(|line| !line.starts_with('['));
    lines.flat_map(str::split_whitespace).map(str::to_owned).collect()
}

/// Whether a symbol is a function of CUDA. The library has others, for debuggers.
fn is_function(name: &str) -> bool {
    let rest = name.strip_prefix("cu");
    rest.is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_uppercase()))
}

/// Return the names of the functions in the library of a branch.
fn of_library(directory: &Path, branch: &Branch) -> Result<BTreeSet<String>> {
    let library = PackagedDriver::download(branch, directory)?.cuda;
    let bytes = std::fs::read(&library).with_context(|| format!("{} could not be read", library.display()))?;
    let names = Elf::of(&bytes).exports().into_iter().filter(|name| is_function(name));
    Ok(names.map(str::to_owned).collect())
}

/// Return the names of the functions in the newest header: those of a usual program, those of a program with a default stream for each thread, and earlier ones.
fn of_header(directory: &Path) -> Result<BTreeSet<String>> {
    let package = directory.join("nvidia-cuda-runtime");
    if !package.exists() {
        pip_install("nvidia-cuda-runtime", &package)?;
    }
    let header = find(&package, &|name| name == "cuda.h").context("nvidia-cuda-runtime has no cuda.h")?;
    let mut names = BTreeSet::new();
    for flags in [
        &[][..],
        &["-DCUDA_API_PER_THREAD_DEFAULT_STREAM"],
        &["-D__CUDA_API_VERSION_INTERNAL"],
    ] {
        let mut compiler = Command::new("cc");
        compiler
            .args(["-E", "-P", "-x", "c"])
            .args(flags)
            .arg(&header)
            .stdin(Stdio::null());
        names.extend(declared(&output(&mut compiler)?)?);
    }
    Ok(names)
}

/// Return the names of the functions that a preprocessed header declares. Inline functions are not in the library.
fn declared(text: &str) -> Result<BTreeSet<String>> {
    let function = Regex::new(r"(inline\s+)?\bCUresult\s+(cu[A-Z]\w+)\s*\(")?;
    let all = function.captures_iter(text).filter(|found| found.get(1).is_none());
    Ok(all.filter_map(|found| Some(found.get(2)?.as_str().to_owned())).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_from_the_table_and_from_headers() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
        let text = "[replaced: cuNot]\ncuMemAlloc cuMemFree\ncuInit\n\n[none: questions]\ncuGetErrorName\n";
        assert_eq!(table(text), names(&["cuGetErrorName", "cuInit", "cuMemAlloc", "cuMemFree"]));
        let text = "CUresult cuInit(unsigned int Flags);\nCUresult\ncuLinkCreate_v2(int);\ntypedef CUresult (*CUfn)(int);\n\
                    static inline CUresult cuGetProcAddress_v2_ptsz(const char *symbol) { return cuGetProcAddress_v2(symbol); }";
        assert_eq!(declared(text).ok(), Some(names(&["cuInit", "cuLinkCreate_v2"])));
        assert!(is_function("cuMemAlloc") && !is_function("cudbgMain") && !is_function("cuda"));
    }
}
