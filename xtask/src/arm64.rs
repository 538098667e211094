//! `cargo xtask arm64`: on a machine with another processor, compile what is shipped for 64-bit Arm (GH200, GB200, GB10, Jetson), and run tests there.
//!
//! The tests run under qemu's user-mode emulator. They start other programs, which start others, so the kernel must start each program for Arm with the
//! emulator, and each must find its loader and C library where a machine with such a processor has them. Nothing of this machine is changed for that: the
//! tests have a user namespace with a table of emulators of its own (binfmt_misc, since Linux 6.7), and a mount namespace in which the C library for Arm
//! lies over `/lib`.

use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context as _, Result, bail, ensure};

use crate::cargo::run_cargo;
use crate::machine::{ARM64, TargetMachine};
use crate::ptx::{SKIPPED, output, say};
use crate::skips;
use crate::target_directory::target;

const HELP: &str = "\
usage: cargo xtask arm64 [--fast]

Compile all programs and libraries that are shipped for aarch64-unknown-linux-gnu and aarch64-unknown-linux-musl, and fail on warnings. Then run tests on an
emulated processor: those of the guard's libraries, and of share, model, agent-core, cdi, hardware, oci, and smoke.

  --fast   compile each only for the C library with which it is shipped, and run only the tests of the guard's libraries: as .ci/run does

Needs Debian's packages gcc-aarch64-linux-gnu, libc6-dev-arm64-cross, and qemu-user-static, Rust's libraries for both targets, and Linux 6.7.

Exit status: 0: everything compiles, and the tests pass; 1: something does not; 77: something that this needs is missing here.";

/// What is shipped, by the C library with which it is shipped (`cargo xtask image`), and what `divvy` has besides on a laptop: arguments of cargo.
const SHIPPED: [(&str, &str); 2] = [
    (
        "musl",
        "-p divvy -p divvy-agent -p divvy-runtime -p divvy-hook --no-default-features --features divvy/completions,divvy/top",
    ),
    (
        "gnu",
        "-p divvy-hardware -p divvy-smoke -p divvy-guard -p divvy-guard-nvml -p divvy-guard-audit",
    ),
];

/// The packages whose tests run: the guard's libraries, and others.
const TESTED: [&str; 2] = [
    "-p divvy-guard -p divvy-guard-nvml -p divvy-guard-audit -p divvy-shadow",
    "-p divvy-share -p divvy-model -p divvy-agent-core -p divvy-cdi -p divvy-hardware -p divvy-oci -p divvy-smoke",
];

/// A warning is an error.
const WARNINGS: &str = "-Dwarnings";
/// The same for libraries with musl: otherwise Rust makes only static programs with it.
const DYNAMIC: &str = "-Dwarnings -Ctarget-feature=-crt-static";

const EMULATOR: &str = "qemu-aarch64-static";

/// The start of a program for Arm, and which of its bits count, as the kernel's binfmt_misc reads them. They are those of qemu's
/// scripts/qemu-binfmt-conf.sh.
const HEAD: &str = r"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00";
const MASK: &str = r"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff";

/// Run a command where programs for Arm start. Arguments: the entry for binfmt_misc, the directory of the C library, and the command.
const INSIDE: &str = r#"set -e
mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
printf '%s' "$1" > /proc/sys/fs/binfmt_misc/register
mount -t overlay -o "lowerdir=$2:$(realpath /lib)" overlay /lib
shift 2
exec "$@""#;

pub(crate) fn run(arguments: &[&str]) -> Result<ExitCode> {
    let is_fast = match arguments {
        [] => false,
        ["--fast"] => true,
        ["--help" | "-h"] => {
            say(HELP);
            return Ok(ExitCode::SUCCESS);
        }
        _ => bail!("{HELP}"),
    };
    if ARM64.is_own() {
        say("skipped: this machine has such a processor: cargo xtask test runs all tests on it");
        return Ok(ExitCode::from(SKIPPED));
    }
    if let Some(commands) = ARM64.missing(&[(EMULATOR, "qemu-user-static")]) {
        say(&format!("skipped: on Debian, type: {commands}"));
        return Ok(ExitCode::from(SKIPPED));
    }
    for (own, words) in SHIPPED {
        for libc in ["gnu", "musl"] {
            if libc == own || !is_fast {
                let check = format!("check --quiet --target {} {words}", ARM64.target(libc));
                let flags = if (own, libc) == ("gnu", "musl") { DYNAMIC } else { WARNINGS };
                run_cargo(cargo()?.args(check.split(' ')).env("RUSTFLAGS", flags))?;
            }
        }
    }
    let compiled = if is_fast {
        "everything that is shipped compiles without a warning for its C library"
    } else {
        "everything that is shipped compiles without a warning for both C libraries"
    };
    // The C library's loader is a program.
    if let Err(error) = output(inside()?.args(["/lib/ld-linux-aarch64.so.1", "--version"])) {
        let reason = format!("{error:#}").replace('\n', "; ");
        say(&format!(
            "skipped: {compiled}, but its programs cannot be started here: {reason}"
        ));
        return Ok(ExitCode::from(SKIPPED));
    }
    let passed = test(if is_fast { &TESTED[..1] } else { &TESTED })?;
    say(&format!("arm64: {compiled}, {passed} tests passed"));
    Ok(ExitCode::SUCCESS)
}

fn directory() -> Result<PathBuf> {
    Ok(std::path::absolute(target())?.join("arm64"))
}

/// Cargo for this machine and for Arm. It builds into a directory of its own, because its flags differ from those of other builds, and other builds must not wait
/// for it.
fn cargo() -> Result<Command> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    configure(&mut cargo)?;
    Ok(cargo)
}

fn configure(command: &mut Command) -> Result<()> {
    ARM64.configure(command);
    command.env("CARGO_TARGET_DIR", directory()?).env("RUSTFLAGS", WARNINGS);
    Ok(())
}

/// Return a command that runs another one, whose words are its further arguments, where programs for Arm start.
fn inside() -> Result<Command> {
    let emulator = which(EMULATOR)?;
    // P: the program sees the name by which it was called. F: the emulator is opened now, and not in the file system that a program sees.
    let entry = format!(":divvy-arm64:M::{HEAD}:{MASK}:{emulator}:PF");
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--mount", "sh", "-c", INSIDE, "sh", &entry]);
    command.arg(ARM64.library("libc.so.6")?.with_file_name(""));
    configure(&mut command)?;
    Ok(command)
}

/// Run the tests of packages, print what was skipped, and return how many passed.
fn test(packages: &[&str]) -> Result<u64> {
    // Tests compile C for the processor on which they run. What is built for this machine, such as build scripts and their libraries of C, needs its own compiler.
    let tools = directory()?.join("tools");
    std::fs::create_dir_all(&tools).with_context(|| format!("{} could not be made", tools.display()))?;
    let (compiler, own) = (which(&ARM64.compiler())?, which(&TargetMachine::own()?.compiler())?);
    let own_target = TargetMachine::own()?.target("gnu").replace('-', "_");
    let link = tools.join("cc");
    if std::fs::read_link(&link).is_ok_and(|old| old.as_os_str() != compiler.as_str()) {
        std::fs::remove_file(&link)?;
    }
    if !link.exists() {
        symlink(&compiler, &link).with_context(|| format!("{} could not be made", link.display()))?;
    }
    let mut path = tools.into_os_string();
    path.push(":");
    path.push(std::env::var_os("PATH").unwrap_or_default());

    let record = skips::SkipRecord::begin()?;
    let mut command = inside()?;
    command
        .arg(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["test", "--quiet", "--no-fail-fast", "--lib", "--bins", "--tests"])
        .args(packages.iter().flat_map(|packages| packages.split(' ')))
        .env("PATH", path)
        // Without it, the tests take minutes longer.
        .env("CARGO_PROFILE_DEV_OPT_LEVEL", "1")
        // An environment variable and not an argument, because tests run cargo, too.
        .env("CARGO_BUILD_TARGET", ARM64.target("gnu"))
        .env(format!("CC_{own_target}"), &own)
        .env(format!("CARGO_TARGET_{}_LINKER", own_target.to_uppercase()), own)
        .env(divvy_skip::EMULATED, ARM64.oci)
        .env(divvy_skip::FILE, record.path())
        .stdout(Stdio::piped());
    let mut child = command.spawn().context("unshare could not be run")?;
    let mut passed = 0;
    for line in BufReader::new(child.stdout.take().context("the output is a pipe")?).lines() {
        let line = line?;
        // `test result: ok. 12 passed; 0 failed; …`
        let words: Vec<&str> = line.split_whitespace().collect();
        let count = words
            .windows(2)
            .find_map(|pair| (pair[1] == "passed;").then(|| pair[0].parse::<u64>().ok()));
        passed += count.flatten().unwrap_or(0);
        say(&line);
    }
    let status = child.wait()?;
    record.print()?;
    ensure!(status.success(), "a test failed on the emulated processor");
    Ok(passed)
}

/// Return where a program is.
fn which(program: &str) -> Result<String> {
    output(Command::new("sh").args(["-c", r#"command -v "$1""#, "sh", program]))
}
