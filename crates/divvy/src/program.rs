//! From parsed arguments to an exit status: what `divvy` and `divvy-agent` have in common.

use std::io::IsTerminal as _;
use std::process::ExitCode;

use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

/// Runs a command, which gives its exit status, with a log for it; an error is printed, with status 1, or 2 for [`crate::commands::Unclear`].
pub fn run(filter: Option<&str>, command: impl Future<Output = anyhow::Result<u8>>) -> ExitCode {
    if let Err(error) = log(filter) {
        return fail(&error);
    }
    // One thread: every command waits far more than it computes, and an agent must be small.
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&anyhow::Error::new(error).context("the program could not start")),
    };
    let outcome = runtime.block_on(command);
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
        .unwrap_or("warn,kube_client=off,kube_runtime=off,divvy=info,divvy_agent=info,divvy_extender=info,divvy_explainer=info,divvy_kubelet=info,divvy_hardware=info")
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

/// Prints an error with its causes.
#[expect(clippy::print_stderr, reason = "the one place where an error reaches the user")]
pub fn fail(error: &anyhow::Error) -> ExitCode {
    let mut text = format!("error: {error}");
    for cause in error.chain().skip(1) {
        let cause = cause.to_string();
        if !text.contains(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
    }
    eprintln!("{}", divvy_host::plain(&text));
    if error.downcast_ref::<crate::commands::Unclear>().is_some() {
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
