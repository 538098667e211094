//! Chores of this repository.

mod bench;
mod build;
mod cluster;
mod codegen;
mod fuzz;
mod image;
mod krew;
#[cfg(test)]
mod named;
mod purity;
mod skips;
mod suite;

use std::io::Write as _;
use std::process::ExitCode;

use anyhow::Result;

const USAGE: &str = "usage: cargo xtask COMMAND

  demo [ARGS]       builds everything and runs `divvy demo`
  test [ARGS]       builds everything, runs every test, and prints which were skipped and why
  skips FILE        prints the skips in FILE; fails on any that .ci/skips does not list
  fuzz [ARGS]       gives broken input to all that reads what others wrote, guided by the code that it reaches; `cargo xtask fuzz --help`
  suite [ARGS]      plays the scenarios on the embedded cluster and on a real Kubernetes; `cargo xtask suite --help`
  torture [FLAGS]   plays random histories against the decisions of extender and agent; `cargo xtask torture --help`
  cluster COMMAND   a real Kubernetes on this machine, and Divvy on it; `cargo xtask cluster --help`
  bench cluster     measures what the programs take to read a large cluster; `cargo xtask bench --help`
  image [FLAGS]     writes a container image; `cargo xtask image --help`
  krew [FLAGS]      writes the kubectl plugins as krew takes them; `cargo xtask krew --help`
  purity            fails if a crate that must be pure can do I/O
  codegen           writes crates/divvy-kubelet/src/gen/*.rs from crates/divvy-kubelet/proto
  codegen --check   changes nothing; fails if the files in the tree are not what codegen would write";

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(error) => {
            #[expect(clippy::print_stderr, reason = "a program's last words")]
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
        ["bench", rest @ ..] => return bench::run(rest),
        ["fuzz", rest @ ..] => return fuzz::run(rest),
        ["torture", rest @ ..] => return build::torture(rest),
        ["cluster", rest @ ..] => return cluster::run(rest),
        ["skips", rest @ ..] => return skips::run(rest),
        ["suite", rest @ ..] => return suite::run(rest),
        ["image", rest @ ..] => image::run(rest)?,
        ["krew", rest @ ..] => krew::run(rest)?,
        ["purity"] => purity::check()?,
        ["codegen"] => codegen::write()?,
        ["codegen", "--check"] => codegen::check()?,
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
