//! Runs programs and reads their output, within limits on time and size.

use std::io::ErrorKind;
use std::path::Path;
use std::process::{Output, Stdio};
use std::time::Duration;

use divvy_doctor::Asked;
use divvy_doctor::facts::programs::last_line;
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::process::Command;

/// The largest accepted output of a program in bytes.
const LARGEST_OUTPUT: u64 = 16 * 1024 * 1024;

pub(super) fn too_long(what: &str, limit: Duration) -> String {
    format!("{what} did not answer within {} s", limit.as_secs())
}

/// Run a program with a time limit, and return its standard output if it succeeds.
pub(super) async fn output_of(program: &Path, arguments: &[&str], limit: Duration) -> Asked<String> {
    let shown = format!("{} {}", program.display(), arguments.join(" "));
    let mut command = Command::new(program);
    command.args(arguments);
    match tokio::time::timeout(limit, output(command)).await {
        Err(_) => Asked::Failed(too_long(&shown, limit)),
        Ok(Err(error)) if error.kind() == ErrorKind::FileTooLarge => Asked::Failed(format!("{shown} {error}")),
        Ok(Err(error)) if error.kind() == ErrorKind::NotFound => Asked::Absent(format!("there is no {}", program.display())),
        // A program that could not be started is no evidence of a fault on the machine.
        Ok(Err(error)) => Asked::Blocked(format!("{shown} could not be started: {error}")),
        Ok(Ok(output)) if output.status.success() => Asked::Answer(String::from_utf8_lossy(&output.stdout).into_owned()),
        Ok(Ok(output)) => Asked::Failed(format!("{} ({}, {shown})", last_line(&output.stderr), output.status)),
    }
}

/// Run a program, and return its output and exit status. A program that prints more than [`LARGEST_OUTPUT`] is killed.
pub(super) async fn output(mut command: Command) -> std::io::Result<Output> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let (printed, complained) = (child.stdout.take(), child.stderr.take());
    let (stdout, stderr, status) = tokio::try_join!(all_of(printed), all_of(complained), child.wait())?;
    Ok(Output { status, stdout, stderr })
}

async fn all_of(from: Option<impl AsyncRead + Unpin>) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if let Some(from) = from {
        from.take(LARGEST_OUTPUT + 1).read_to_end(&mut bytes).await?;
    }
    if u64::try_from(bytes.len()).is_ok_and(|length| length <= LARGEST_OUTPUT) {
        Ok(bytes)
    } else {
        Err(std::io::Error::new(
            ErrorKind::FileTooLarge,
            format!("printed more than {} MiB", LARGEST_OUTPUT >> 20),
        ))
    }
}
