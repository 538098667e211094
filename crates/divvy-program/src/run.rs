//! Logging, error printing, and exit status: the code that `divvy` and the daemons share.

use std::io::IsTerminal as _;
use std::process::ExitCode;

use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

/// Start the log, run a command, and return its exit status. If the command fails, print its error and return status 1, or 2 for
/// [`crate::Unclear`].
pub fn run(filter: Option<&str>, command: impl Future<Output = anyhow::Result<u8>>) -> ExitCode {
    if let Err(error) = log(filter) {
        return fail(&error);
    }
    // One thread is enough: every command waits far more than it computes, and an agent must use little memory.
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&anyhow::Error::new(error).context("the program could not start")),
    };
    let outcome = runtime.block_on(command);
    // Do not wait for blocking calls, which may hang.
    runtime.shutdown_background();
    match outcome {
        Ok(status) => ExitCode::from(status),
        // A reader that closes the pipe early (`divvy inspect … | head`) is not an error.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => fail(&error),
    }
}

/// Start the log on standard error: text for people on a terminal, JSON for log collectors otherwise.
fn log(given: Option<&str>) -> anyhow::Result<()> {
    // kube's own log lines repeat our errors, but without the address.
    // Only levels per module: filters by span and field would need a regular expression engine, which makes the program larger.
    let filter: Targets = given
        .unwrap_or("warn,kube_client=off,kube_runtime=off,divvy=info,divvy_agent=info,divvy_agent_core=info,divvy_kube=info,divvy_extender=info,divvy_explainer=info,divvy_kubelet=info,divvy_hardware=info")
        .parse()
        .map_err(|error| anyhow::anyhow!("--log: {error}; write a level such as info, or module=level pairs"))?;
    if let Some(word) = given.and_then(unknown_level) {
        anyhow::bail!(
            "the log level is {word:?}, and nothing would be logged; write error, warn, info, debug, or trace, or module=level pairs"
        );
    }
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let log = tracing_subscriber::registry().with(filter);
    if std::io::stderr().is_terminal() {
        log.with(lines.with_target(false)).init();
    } else {
        let lines = lines.json().flatten_event(true).with_current_span(false);
        log.with(lines).init();
    }
    Ok(())
}

/// Return the first word of a filter that is not a level. `Targets` takes it for the name of a module.
fn unknown_level(filter: &str) -> Option<&str> {
    let is_level = |word: &&str| word.parse::<tracing_subscriber::filter::LevelFilter>().is_ok();
    let words = filter.split(',').map(str::trim);
    words.filter(|word| !word.contains('=')).find(|word| !is_level(word))
}

/// Print an error with its causes to standard error, and return the exit status.
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
    if error.downcast_ref::<crate::Unclear>().is_some() {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_that_is_no_level_is_found_in_a_log_filter() {
        for (filter, expected) in [
            ("bogus", Some("bogus")),
            ("info,bogus", Some("bogus")),
            ("", None),
            ("info", None),
            ("WARN", None),
            ("off", None),
            ("warn, divvy=debug", None),
            ("divvy_agent=trace", None),
        ] {
            assert_eq!(unknown_level(filter), expected, "{filter:?}");
        }
    }
}
