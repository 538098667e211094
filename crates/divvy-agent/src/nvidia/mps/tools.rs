//! Runs `nvidia-smi` and `nvidia-cuda-mps-control`, which a container runtime mounts into the container.

use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use divvy_host::plain_line;
use divvy_nvidia_plugin::mps::{ComputeMode, Daemon};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use crate::files;

pub(super) const CONTROL: &str = "nvidia-cuda-mps-control";
const SMI: &str = "nvidia-smi";
/// The maximum number of bytes that are read of a program's output. A program that writes more waits, and is killed at the deadline.
const BYTES: u64 = 64 * 1024;
/// The maximum number of characters of an output that an error contains.
const CHARACTERS: usize = 500;
/// How long a killed process may take to end. A process that hangs in the kernel's driver code never ends.
pub(super) const KILL_LIMIT: Duration = Duration::from_secs(1);

/// The driver's programs.
#[derive(Debug, Clone)]
pub(super) struct Tools {
    /// The directories in which they are looked for, as in the variable `PATH`.
    pub(super) path: OsString,
    /// The time in which the control daemon must answer. `nvidia-smi` has three times as much, because it may have to wake up GPUs.
    pub(super) deadline: Duration,
}

/// How a program ended, and what it wrote.
struct Output {
    status: ExitStatus,
    stdout: String,
    stderr: String,
}

impl Tools {
    /// Return the path of a program, or `None` if no directory contains it.
    pub(super) fn find(&self, program: &str) -> Option<PathBuf> {
        let is_program = |path: &PathBuf| {
            let data = std::fs::metadata(path);
            data.is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0)
        };
        std::env::split_paths(&self.path)
            .map(|directory| directory.join(program))
            .find(is_program)
    }

    fn found(&self, program: &str) -> Result<PathBuf, String> {
        self.find(program).ok_or_else(|| {
            format!(
                "exec: {program:?}: executable file not found in $PATH: NVIDIA's container runtime mounts it; set \
                 NVIDIA_DRIVER_CAPABILITIES=compute,utility"
            )
        })
    }

    /// Set the compute mode of a GPU within `limit`.
    pub(super) async fn set_compute_mode(&self, gpu: &str, mode: ComputeMode, limit: Duration) -> Result<(), String> {
        let set = async {
            let mut command = Command::new(self.found(SMI)?);
            command.env("PATH", &self.path).args(["-i", gpu, "-c", mode.name()]);
            let output = self.run(command, None, limit).await?;
            // nvidia-smi writes its errors to the standard output.
            succeeded(output.status, [&output.stdout, &output.stderr])
        };
        set.await.map_err(|error: String| {
            format!(
                "error setting compute mode {}: error running nvidia-smi: {error}",
                mode.name()
            )
        })
    }

    /// Start the control daemon, which goes on in the background.
    pub(super) async fn start_control(&self, daemon: &Daemon) -> Result<(), String> {
        // The daemon may keep its standard error, so it must not be a pipe that is closed afterwards.
        let said = daemon.log_directory().join("start.log");
        let file = files::create(&said).map_err(|error| error.to_string())?;
        let other = file.try_clone().map_err(|error| error.to_string())?;
        let mut command = self.control_command(daemon)?;
        command
            .arg("-d")
            .stdin(Stdio::null())
            .stdout(file)
            .stderr(other)
            .kill_on_drop(true);
        let mut child = command.spawn().map_err(|error| error.to_string())?;
        let ended = timeout(self.deadline, child.wait()).await;
        let status = match ended {
            Ok(status) => status.map_err(|error| error.to_string())?,
            Err(_) => return Err(self.killed(&mut child, "nvidia-cuda-mps-control -d", self.deadline).await),
        };
        let text = files::read(&said, BYTES).ok().flatten().unwrap_or_default();
        succeeded(status, [&text, ""]).map_err(|error| format!("{CONTROL} -d: {error}"))
    }

    /// Give the control daemon a command, and return its answer, which must come within `limit`.
    pub(super) async fn ask(&self, daemon: &Daemon, command: &str, limit: Duration) -> Result<String, String> {
        let program = self
            .control_command(daemon)
            .map_err(|error| format!("failed to start NVIDIA MPS command: {error}"))?;
        let asked = async {
            let output = self.run(program, Some(command), limit).await?;
            succeeded(output.status, [&output.stdout, &output.stderr])?;
            Ok(output.stdout)
        };
        asked
            .await
            .map_err(|error: String| format!("failed to send command to MPS daemon: {error}"))
    }

    /// Like NVIDIA's program, the control daemon gets no other variables. `PATH` is for `nvidia-cuda-mps-server`, which it starts.
    fn control_command(&self, daemon: &Daemon) -> Result<Command, String> {
        let mut command = Command::new(self.found(CONTROL)?);
        command.env_clear().env("PATH", &self.path).envs(daemon.environment());
        Ok(command)
    }

    async fn run(&self, mut command: Command, input: Option<&str>, deadline: Duration) -> Result<Output, String> {
        let name = command.as_std().get_program().to_string_lossy().into_owned();
        let stdin = if input.is_some() { Stdio::piped() } else { Stdio::null() };
        command
            .stdin(stdin)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        let mut child = command.spawn().map_err(|error| error.to_string())?;
        let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let write = async {
            if let (Some(mut stdin), Some(input)) = (stdin, input) {
                // A failed write needs no message: the exit status of the program tells whether the command failed.
                let _ = stdin.write_all(input.as_bytes()).await;
            }
        };
        let finished = async {
            let ((), stdout, stderr, status) = tokio::join!(write, text(stdout), text(stderr), child.wait());
            status.map(|status| Output { status, stdout, stderr })
        };
        let finished = timeout(deadline, finished).await;
        match finished {
            Ok(output) => output.map_err(|error| error.to_string()),
            Err(_) => Err(self.killed(&mut child, &name, deadline).await),
        }
    }

    /// Kill a program that has missed its deadline, and return what to say.
    async fn killed(&self, child: &mut Child, program: &str, deadline: Duration) -> String {
        let ended = match child.start_kill() {
            Ok(()) => timeout(KILL_LIMIT, child.wait()).await.is_ok(),
            Err(_) => false,
        };
        let rest = match ended {
            true => "it was killed",
            false => "it was killed and does not end, so it hangs in the driver's kernel module",
        };
        format!("{program} did not end within {} s; {rest}", deadline.as_secs_f64())
    }
}

async fn text(pipe: Option<impl AsyncRead + Unpin>) -> String {
    let mut bytes = Vec::new();
    if let Some(pipe) = pipe {
        // What was read before an error is worth showing.
        let _ = pipe.take(BYTES).read_to_end(&mut bytes).await;
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Return an error in Go's words, with the output, if the status is not success.
fn succeeded(status: ExitStatus, output: [&str; 2]) -> Result<(), String> {
    if status.success() {
        return Ok(());
    }
    let how = match status.code() {
        Some(code) => format!("exit status {code}"),
        None => status.to_string(),
    };
    let said = output.map(str::trim).join(" ");
    match said.trim() {
        "" => Err(how),
        said => Err(format!("{how}: {}", plain_line(said.chars().take(CHARACTERS)))),
    }
}
