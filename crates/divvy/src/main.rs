//! Parses, runs, and turns errors into words: everything else is in the library.

use std::process::ExitCode;

use clap::Parser as _;
use divvy::cli::{Cli, arguments};
use divvy::program::{fail, run};

fn main() -> ExitCode {
    #[cfg(feature = "completions")]
    if let Some(answer) = divvy::commands::completions::for_kubectl(&std::env::args_os().collect::<Vec<_>>()) {
        return match answer.and_then(|text| divvy::printer::print(&text)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => fail(&error.into()),
        };
    }
    let cli = match arguments(std::env::args_os()) {
        Ok(arguments) => Cli::parse_from(arguments),
        // As NVIDIA's tool, whose flags these are: 1 and not 2.
        Err(error) => {
            let status = if error.use_stderr() {
                ExitCode::FAILURE
            } else {
                ExitCode::SUCCESS
            };
            return match error.print() {
                Ok(()) => status,
                Err(error) => fail(&error.into()),
            };
        }
    };
    let log = cli.log.clone();
    run(log.as_deref(), divvy::commands::run(cli))
}
