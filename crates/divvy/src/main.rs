//! Parses, runs, and turns errors into words: everything else is in the library.

use std::io::IsTerminal as _;
use std::process::ExitCode;

use clap::Parser as _;
use divvy::cli::{Cli, arguments};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

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
    if let Err(error) = log(cli.log.as_deref()) {
        return fail(&error);
    }
    // One thread: every command waits far more than it computes, and an agent must be small.
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&anyhow::Error::new(error).context("the program could not start")),
    };
    let outcome = runtime.block_on(divvy::commands::run(cli));
    // A blocking call that hangs must not hold up the end of the program.
    runtime.shutdown_background();
    match outcome {
        Ok(status) => ExitCode::from(status),
        // `divvy inspect … | head` is no error.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => fail(&error),
    }
}

/// Plain on a terminal, JSON otherwise: the one is read by people, the other by collectors.
fn log(filter: Option<&str>) -> anyhow::Result<()> {
    // kube's own lines say again, without the address, what our errors say.
    // Levels by module and nothing finer: filters by span and field would cost a regular expression engine.
    let filter: Targets = filter
        .unwrap_or("warn,kube_client=off,divvy=info,divvy_agent=info,divvy_extender=info,divvy_kubelet=info,divvy_hardware=info")
        .parse()
        .map_err(|error| anyhow::anyhow!("--log: {error}; write a level such as info, or module=level pairs"))?;
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let log = tracing_subscriber::registry().with(filter);
    if std::io::stderr().is_terminal() {
        log.with(lines.with_target(false)).init();
    } else {
        let lines = lines
            .json()
            .flatten_event(true)
            .with_current_span(false)
            .with_span_list(false);
        log.with(lines).init();
    }
    Ok(())
}

#[expect(clippy::print_stderr, reason = "the one place where an error reaches the user")]
fn fail(error: &anyhow::Error) -> ExitCode {
    let mut text = format!("error: {error}");
    for cause in error.chain().skip(1) {
        let cause = cause.to_string();
        if !text.contains(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
    }
    eprintln!("{text}");
    if error.downcast_ref::<divvy::commands::Unclear>().is_some() {
        return ExitCode::from(2);
    }
    ExitCode::FAILURE
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause
            .downcast_ref::<std::io::Error>()
            .is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
    })
}
