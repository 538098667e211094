//! The developer tasks of this repository: building, testing, packaging, and real clusters.

mod arm64;
mod bench;
mod build;
mod cargo;
mod cluster;
mod compat;
mod cycles;
mod debian;
#[cfg(test)]
mod doc_tests;
mod driver_names;
mod fuzz;
mod gpu;
mod image;
mod machine;
#[cfg(test)]
mod named;
mod prose;
mod ptx;
mod purity;
mod quick;
mod real_driver;
mod size;
mod skips;
mod suite;
mod target_directory;
mod unused;
mod web_check;

use std::io::Write as _;
use std::process::ExitCode;

use anyhow::Result;

const USAGE: &str = "usage: cargo xtask COMMAND

  demo [ARGS]       build what `divvy demo` starts, and run it
  test [ARGS]       build everything, run all tests, and print the skipped tests with their reasons
  skips FILE        print the skips in FILE; fail if .ci/skips does not list one of them
  fuzz [ARGS]       feed broken input to everything that parses foreign data, guided by code coverage; `cargo xtask fuzz --help`
  suite [ARGS]      play the scenes on the embedded cluster and on a real Kubernetes; `cargo xtask suite --help`
  compare [PROGRAM] play the same scenarios to Divvy and to NVIDIA's device plugin and GPU feature discovery, and compare what they do; without
                    PROGRAM, with what they did when they were recorded (needs root)
  compat [FLAGS]    run the guard in the root file systems of distributions, and with third-party programs; `cargo xtask compat --help`
  torture [FLAGS]   play random histories against the decisions of extender and agent; `cargo xtask torture --help`
  cluster COMMAND   run a real Kubernetes with Divvy on this machine; `cargo xtask cluster --help`
  gpu [FLAGS]       run every check that needs a real GPU, and write a report; `cargo xtask gpu --help`
  gpu pack [DIR]    build what these checks need into a directory for another machine
  bench cluster     measure the time and memory that the programs need for a large cluster; `cargo xtask bench --help`
  web-check [FLAGS] check the web pages in a browser, and take pictures of them; `cargo xtask web-check --help`
  ptx               assemble the kernels of `divvy smoke` with NVIDIA's assembler for every GPU; `cargo xtask ptx --help`
  driver-names      compare the functions that the guard knows with those of NVIDIA's driver libraries; `cargo xtask driver-names --help`
  real-driver       run Divvy with the user-space files of NVIDIA's driver; `cargo xtask real-driver --help`
  arm64 [--fast]    compile for 64-bit Arm what is shipped, and run tests on an emulated processor; `cargo xtask arm64 --help`
  image [FLAGS]     write a container image; `cargo xtask image --help`
  quick             format, prose, purity, clippy, and the tests of the pure crates: about a minute
  prose             fail on words that .ci/words lists, and on references to files that do not exist
  purity            fail if a crate that must be pure can do I/O, if files import each other in a circle, or if a dependency is unused
  size              print the lines of Rust of each crate
  reference         write docs/reference, and man pages into target/man, from what the programs are made of";

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(error) => {
            #[expect(clippy::print_stderr, reason = "the final error message")]
            {
                eprintln!("error: {error:#}");
            }
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<ExitCode> {
    if fuzz::is_rustc() {
        return fuzz::rustc();
    }
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    command(&arguments)
}

fn command(arguments: &[&str]) -> Result<ExitCode> {
    match arguments {
        ["demo", rest @ ..] => return build::demo(rest),
        ["test", rest @ ..] => build::test(rest)?,
        ["arm64", rest @ ..] => return arm64::run(rest),
        ["bench", rest @ ..] => return bench::run(rest),
        ["driver-names", rest @ ..] => return driver_names::run(rest),
        ["fuzz", rest @ ..] => return fuzz::run(rest),
        ["gpu", rest @ ..] => return gpu::run(rest),
        ["compare"] => return build::compare(None),
        ["compare", theirs] => return build::compare(Some(*theirs)),
        ["compat", rest @ ..] => return compat::run(rest),
        ["torture", rest @ ..] => return build::torture(rest),
        ["cluster", rest @ ..] => return cluster::run(rest),
        ["ptx", rest @ ..] => return ptx::run(rest),
        ["real-driver", rest @ ..] => return real_driver::run(rest),
        ["skips", rest @ ..] => return skips::run(rest),
        ["suite", rest @ ..] => return suite::run(rest),
        ["web-check", rest @ ..] => return web_check::run(rest),
        ["image", rest @ ..] => image::run(rest)?,
        ["purity"] => {
            purity::check()?;
            cycles::check()?;
            unused::check()?;
        }
        ["prose"] => prose::check()?,
        ["reference"] => build::reference()?,
        ["size"] => write!(std::io::stdout(), "{}", size::table()?)?,
        ["quick"] => quick::run()?,
        ["help" | "--help" | "-h"] => writeln!(std::io::stdout(), "{USAGE}")?,
        _ => anyhow::bail!("{USAGE}"),
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_that_is_asked_for_is_no_error() {
        for word in ["--help", "-h", "help"] {
            assert_eq!(
                command(&[word]).map_err(|error| error.to_string()),
                Ok(ExitCode::SUCCESS),
                "{word}"
            );
        }
        for arguments in [&[][..], &["bogus"], &["purity", "--help-me"]] {
            let error = command(arguments).map_err(|error| error.to_string());
            assert_eq!(error, Err(USAGE.to_owned()), "{arguments:?}");
        }
    }
}
