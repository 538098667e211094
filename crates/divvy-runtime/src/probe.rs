//! Calls `divvy-probe --once`. Only this child process loads the driver's library, and it runs for a limited time.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use divvy_oci::runtime::settings::OciRuntimeSettings;

use crate::error::Error;

/// The maximum time that the probe may take. The driver may have to initialize every GPU first. The kubelet waits two minutes for
/// a container, so this limit is lower.
const PATIENCE: Duration = Duration::from_secs(60);
/// The maximum size of the probe's output in bytes. A snapshot of 16 GPUs has about a hundredth of this size.
const MOST: u64 = 4 * 1024 * 1024;

/// Return the probe's output, a snapshot of this machine's GPUs.
pub(crate) fn ask(settings: &OciRuntimeSettings) -> Result<String, Error> {
    let program = match &settings.probe {
        Some(path) => PathBuf::from(path),
        None => super::files::beside("divvy-probe")?,
    };
    let failed = |why: String| Error::Probe {
        program: program.clone(),
        why,
    };
    let mut command = Command::new(&program);
    command.arg("--once");
    if let Some(library) = &settings.nvml_library {
        command.args(["--nvml-library", library]);
    } else if let Some(root) = settings.cli.root.as_deref().filter(|root| Path::new(root) != Path::new("/")) {
        command.args(["--driver-root", root]);
    }
    // Neither the probe nor the library that it loads should see the engine's environment.
    command
        .env_clear()
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command
        .spawn()
        .map_err(|error| failed(format!("could not be run: {error}")))?;
    let (said, complained) = (collect(child.stdout.take()), collect(child.stderr.take()));
    let end = Instant::now() + PATIENCE;
    let all = said.recv_timeout(PATIENCE).ok().zip(status(&mut child, end));
    let Some((said, status)) = all else {
        // A process that hangs in the driver does not even react to SIGKILL, so this program does not wait for its end.
        let _ = child.kill();
        let _ = status(&mut child, Instant::now() + Duration::from_secs(1));
        return Err(failed(format!(
            "did not answer within {} s: the driver hangs",
            PATIENCE.as_secs()
        )));
    };
    if status.success() {
        return Ok(said);
    }
    let complained = complained.recv_timeout(Duration::from_secs(1)).unwrap_or_default();
    let complained = complained.trim().trim_start_matches("divvy-probe: ").to_owned();
    Err(failed(if complained.is_empty() {
        format!("ended with {status}")
    } else {
        complained
    }))
}

/// Read to the end in another thread, and send the text to the receiver.
fn collect(from: Option<impl Read + Send + 'static>) -> Receiver<String> {
    let (send, receive) = channel();
    thread::spawn(move || {
        let mut bytes = Vec::new();
        let read = from.map(|from| from.take(MOST).read_to_end(&mut bytes));
        // Sending fails if the receiver has stopped waiting.
        let _ = read.map(|_| send.send(String::from_utf8_lossy(&bytes).into_owned()));
    });
    receive
}

/// Wait for the child and return its exit status. The result is `None` if the child has not ended by `end`.
fn status(child: &mut Child, end: Instant) -> Option<std::process::ExitStatus> {
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status),
            Ok(None) if Instant::now() < end => thread::sleep(Duration::from_millis(1)),
            _ => return None,
        }
    }
}
