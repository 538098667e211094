//! The `divvy` program: it parses the command line, runs the command, and prints errors. Everything else is in the library.

use std::process::ExitCode;

use clap::Parser as _;
use divvy::cli::{Cli, arguments, usage_status};
use divvy_program::{fail, run};

fn main() -> ExitCode {
    // `nvidia-ctk hook` runs while a container starts. It needs neither completions nor the grammar.
    if let Some(words) = divvy::cli::hook_of_spec(&std::env::args_os().collect::<Vec<_>>()) {
        return divvy::commands::hook::run(&words).map_or_else(|error| fail(&error), |()| ExitCode::SUCCESS);
    }
    #[cfg(feature = "completions")]
    match divvy::commands::completions::answered(&std::env::args_os().collect::<Vec<_>>()) {
        Ok(false) => {}
        Ok(true) => return ExitCode::SUCCESS,
        Err(error) => return fail(&error),
    }
    let parsed = arguments(std::env::args_os()).and_then(Cli::try_parse_from);
    let cli = match parsed {
        Ok(cli) => cli,
        Err(error) => {
            let status = usage_status(std::env::args_os().next().as_ref(), &error);
            return match error.print() {
                Ok(()) => ExitCode::from(status),
                // A reader that closes the pipe early (`divvy --help | head`) is not an error.
                Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => ExitCode::from(status),
                Err(error) => fail(&error.into()),
            };
        }
    };
    divvy::printer::choose_colour(cli.color);
    let log = cli.log_filter().map(str::to_owned);
    run(log.as_deref(), divvy::commands::run(cli))
}
