//! `cargo xtask gpu`: every check that needs a real GPU (`lab/divvy-gpu-check`).
//!
//! The checks run from a directory of built programs, because a machine with a GPU may have neither cargo nor this repository. Programs that load the driver's
//! libraries are linked to glibc, as `divvy-probe` is in the image. A C library is in the directory, too, for machines whose own is older than the one here.

use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result, bail, ensure};

use crate::cargo::run_cargo;
use crate::image;
use crate::machine::TargetMachine;
use crate::target_directory::target;

const USAGE: &str = "usage: cargo xtask gpu [FLAGS]
       cargo xtask gpu pack [DIRECTORY]

Run every check that needs a real GPU, on this machine, and write a report. With --simulated, the driver is simulated.
`target/gpu/divvy-gpu-check --help` lists the flags.

pack only builds the programs into a directory [default: target/gpu]. Copy it to a machine with an NVIDIA driver, and run its divvy-gpu-check there.
That machine needs neither cargo nor this repository.

Needs musl's gcc wrapper (Debian: apt-get install musl-tools) and the Rust target (rustup target add x86_64-unknown-linux-musl).";

/// The limit on the size of the directory, in MiB: what can be copied to a machine that is lent for minutes.
const MOST_MIB: u64 = 64;

pub(crate) fn run(arguments: &[&str]) -> Result<ExitCode> {
    match arguments {
        ["pack"] => pack(&target().join("gpu")).map(|()| ExitCode::SUCCESS),
        ["pack", directory] if !directory.starts_with('-') => pack(Path::new(directory)).map(|()| ExitCode::SUCCESS),
        ["pack", ..] => bail!("{USAGE}"),
        ["--help" | "-h"] => {
            say(USAGE);
            Ok(ExitCode::SUCCESS)
        }
        _ => {
            let directory = target().join("gpu");
            pack(&directory)?;
            let program = directory.join("divvy-gpu-check");
            // Replace this process, so that Ctrl-C and the exit status are the checks' own.
            let error = Command::new(&program).args(arguments).exec();
            Err(error).with_context(|| format!("{} could not be run", program.display()))
        }
    }
}

/// Build the programs, and put them into a directory.
fn pack(directory: &Path) -> Result<()> {
    if let Some(missing) = image::missing() {
        bail!("{missing}");
    }
    let (fixed, dynamic) = (triple("musl"), triple("gnu"));
    cargo(&fixed, "-p divvy -p divvy-gpu-check")?;
    let in_fixed = |name: &str| built(&fixed, name);
    let mut files = vec![
        ("divvy".to_owned(), in_fixed("divvy")),
        ("divvy-gpu-check".to_owned(), in_fixed("divvy-gpu-check")),
    ];
    // Without the features that divvy selects, as in the image. A later build replaces the file.
    cargo(&fixed, "-p divvy-agent")?;
    files.push(("divvy-agent".to_owned(), in_fixed("divvy-agent")));
    cargo(&dynamic, "-p divvy-hardware --bin divvy-probe")?;
    // Alone, as in the image.
    cargo(&dynamic, "-p divvy-smoke")?;
    cargo(
        &dynamic,
        "-p divvy-cuda-program -p divvy-contain -p divvy-cuda-sim -p divvy-nvml-sim",
    )?;
    for name in [
        "divvy-probe",
        "divvy-smoke",
        "divvy-cuda-program",
        "divvy-contain",
        "libdivvy_cuda_sim.so",
        "libdivvy_nvml_sim.so",
    ] {
        files.push((name.to_owned(), built(&dynamic, name)));
    }
    for (package, name) in [
        ("divvy-guard", "libdivvy-guard.so"),
        ("divvy-guard-nvml", "libdivvy-guard-nvml.so"),
    ] {
        // Each is built alone, because other packages enable features of its dependencies that need the standard library.
        cargo(&dynamic, &format!("-p {package} --features shadow"))?;
        files.push((
            name.to_owned(),
            built(&dynamic, &format!("lib{}.so", package.replace('-', "_"))),
        ));
    }
    files.extend(c_library(&built(&dynamic, "divvy-cuda-program"))?);
    write(directory, &files)
}

/// Return the C library of a program, and its loader, by their names in the directory.
fn c_library(program: &Path) -> Result<Vec<(String, PathBuf)>> {
    let files = TargetMachine::own()?.libraries(&[program])?;
    let name = |path: &Path| match path.file_name().unwrap_or_default().to_string_lossy() {
        name if name.starts_with("ld-linux") => "lib/loader".to_owned(),
        name => format!("lib/{name}"),
    };
    Ok(files.into_values().map(|path| (name(&path), path)).collect())
}

/// Write the files into a new directory, which takes the place of an old one.
fn write(directory: &Path, files: &[(String, PathBuf)]) -> Result<()> {
    let next = directory.with_extension("next");
    let failed = |path: &Path| format!("{} could not be replaced", path.display());
    for old in [&next, directory] {
        if old.exists() {
            // Only what this command has made.
            ensure!(
                old.join("divvy-gpu-check").exists() || old == next,
                "{} exists, and is not a directory of `cargo xtask gpu pack`",
                old.display()
            );
        }
    }
    if next.exists() {
        fs::remove_dir_all(&next).with_context(|| failed(&next))?;
    }
    fs::create_dir_all(next.join("lib")).with_context(|| failed(&next))?;
    let mut bytes = 0;
    for (name, path) in files {
        let to = next.join(name);
        bytes += fs::copy(path, &to).with_context(|| format!("{} could not be copied", path.display()))?;
    }
    if directory.exists() {
        fs::remove_dir_all(directory).with_context(|| failed(directory))?;
    }
    fs::rename(&next, directory).with_context(|| failed(directory))?;
    let mib = bytes.div_ceil(1 << 20);
    say(&format!("{}: {mib} MiB (at most {MOST_MIB})", directory.display()));
    ensure!(mib <= MOST_MIB, "{} is larger than {MOST_MIB} MiB", directory.display());
    Ok(())
}

fn triple(libc: &str) -> String {
    format!("{}-unknown-linux-{libc}", std::env::consts::ARCH)
}

/// Return where cargo writes a program or a library.
fn built(triple: &str, name: &str) -> PathBuf {
    target().join(triple).join("node").join(name)
}

fn cargo(triple: &str, words: &str) -> Result<()> {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command
        .args(["build", "--quiet", "--locked", "--profile", "node", "--target", triple])
        .args(words.split(' '))
        .env(
            format!("CC_{}", triple.replace('-', "_")),
            if triple.ends_with("musl") { "musl-gcc" } else { "cc" },
        );
    run_cargo(&mut command)
}

#[expect(clippy::print_stdout, reason = "the result of the task")]
fn say(text: &str) {
    println!("{text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_has_something_else_is_not_replaced() {
        let place = tempfile::tempdir().expect("a directory");
        let (directory, file) = (place.path().join("mine"), place.path().join("divvy-gpu-check"));
        fs::create_dir(&directory).expect("made");
        fs::write(directory.join("thesis"), "text").expect("written");
        fs::write(&file, "a program").expect("written");
        let files = [("divvy-gpu-check".to_owned(), file)];
        let error = write(&directory, &files).expect_err("refused").to_string();
        assert!(error.contains("is not a directory of `cargo xtask gpu pack`"), "{error}");
        assert!(directory.join("thesis").exists());

        let directory = place.path().join("gpu");
        for _ in 0..2 {
            write(&directory, &files).expect("written");
            fs::write(directory.join("old"), "").expect("written");
        }
        write(&directory, &files).expect("written");
        assert!(!directory.join("old").exists() && directory.join("divvy-gpu-check").exists());
    }

    #[test]
    fn the_c_library_of_a_program_has_its_loader() {
        let own = std::env::current_exe().expect("there");
        let files = c_library(&own).expect("this test is linked to glibc");
        for name in ["lib/loader", "lib/libc.so.6", "lib/libm.so.6"] {
            assert!(
                files.iter().any(|(at, path)| at == name && path.exists()),
                "{name}: {files:?}"
            );
        }
    }
}
