//! Chores of this repository: `cargo xtask codegen` writes the checked-in gRPC code from the protocol files.

mod codegen;

use std::process::ExitCode;

use anyhow::Result;

const USAGE: &str = "usage: cargo xtask codegen [--check]

  codegen           writes crates/divvy-kubelet/src/gen/*.rs from crates/divvy-kubelet/proto
  codegen --check   changes nothing; fails if the files in the tree are not what codegen would write";

fn main() -> Result<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["codegen"] => codegen::write()?,
        ["codegen", "--check"] => codegen::check()?,
        _ => anyhow::bail!("{USAGE}"),
    }
    Ok(ExitCode::SUCCESS)
}
