//! Runs `nvidia-smi` and `nvidia-cuda-mps-control`. A container runtime may mount them into the container. Otherwise they run in the driver's root directory,
//! which is a mount.

use std::ffi::OsString;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, ExitStatus, Stdio};
use std::time::Duration;

use divvy_host::plain_line;
use divvy_nvidia_config::NvidiaProgram;
use divvy_nvidia_plugin::mps::{Daemon, MpsComputeMode};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use crate::files::{self, FileError};

pub(super) const CONTROL: &str = "nvidia-cuda-mps-control";
const SMI: &str = "nvidia-smi";
/// The first argument of this program when it is to run another one in the driver's root directory.
pub(crate) const IN_ROOT: &str = "in-root";
/// The directories of programs in the driver's root directory.
const DIRECTORIES: &str = "/usr/bin:/bin:/usr/sbin:/sbin:/usr/local/bin:/usr/local/nvidia/bin:/opt/bin";
/// The maximum number of bytes that are read of a program's output. A program that writes more waits, and is killed at the deadline.
const BYTES: u64 = 64 * 1024;
/// The maximum number of characters of an output that an error contains.
const CHARACTERS: usize = 500;
/// How long a killed process may take to end. A process that hangs in the kernel's driver code never ends.
pub(super) const KILL_LIMIT: Duration = Duration::from_secs(1);

/// Why one of the driver's programs did not run to its end.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ProgramError {
    #[error(
        "exec: {program:?}: executable file not found in $PATH, and not below {root}: NVIDIA's container runtime mounts it; set \
         NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        root = .root.display()
    )]
    Absent { program: String, root: PathBuf },
    #[error(transparent)]
    System(#[from] io::Error),
    /// In Go's words, with the output.
    #[error("{how}{said}")]
    Status { how: String, said: String },
    #[error("{program} did not end within {} s; it was killed{rest}", .limit.as_secs_f64())]
    Late {
        program: String,
        limit: Duration,
        /// What a program does that does not end.
        rest: &'static str,
    },
}

/// What could not be done with one of the driver's programs, in the words of NVIDIA's program.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ToolError {
    #[error("error setting compute mode {mode}: error running nvidia-smi: {error}")]
    ComputeMode {
        mode: &'static str,
        #[source]
        error: ProgramError,
    },
    #[error(transparent)]
    Log(#[from] FileError),
    #[error(transparent)]
    Start(#[from] ProgramError),
    #[error("{control} -d: {0}", control = CONTROL)]
    Control(#[source] ProgramError),
    #[error("failed to start NVIDIA MPS command: {0}")]
    Command(#[source] ProgramError),
    #[error("failed to send command to MPS daemon: {0}")]
    Ask(#[source] ProgramError),
}

/// The driver's programs.
#[derive(Debug, Clone)]
pub(super) struct Tools {
    /// The directories in which they are looked for, as in the variable `PATH`.
    pub(super) path: OsString,
    /// The driver's root directory in this container. It may be missing.
    pub(super) root: PathBuf,
    /// This program, which starts another one in the driver's root directory.
    pub(super) own: PathBuf,
    /// The time in which the control daemon must answer. `nvidia-smi` has three times as much, because it may have to wake up GPUs.
    pub(super) deadline: Duration,
}

/// How a program ended, and what it wrote.
struct ToolOutput {
    status: ExitStatus,
    stdout: String,
    stderr: String,
}

impl Tools {
    /// Report whether a program is in one of the directories of this container, or in the driver's root directory.
    pub(super) fn has(&self, program: &str) -> bool {
        self.command(program).is_ok()
    }

    /// Return the command that runs a program, without arguments.
    fn command(&self, program: &str) -> Result<Command, ProgramError> {
        let here = std::env::split_paths(&self.path).map(|directory| directory.join(program));
        if let Some(path) = here.into_iter().find(|path| is_program(path)) {
            let mut command = Command::new(path);
            command.env("PATH", &self.path);
            return Ok(command);
        }
        let below = DIRECTORIES.split(':').map(|directory| Path::new(directory).join(program));
        let in_root = |path: &PathBuf| {
            path.strip_prefix("/")
                .is_ok_and(|path| is_program_or_link(&self.root.join(path)))
        };
        let Some(path) = below.into_iter().find(in_root) else {
            return Err(ProgramError::Absent {
                program: program.to_owned(),
                root: self.root.clone(),
            });
        };
        let mut command = Command::new(&self.own);
        command
            .arg0(NvidiaProgram::MpsControlDaemon.name())
            .arg(IN_ROOT)
            .arg(&self.root)
            .arg(path)
            .env("PATH", DIRECTORIES);
        Ok(command)
    }

    /// Set the compute mode of a GPU within `limit`.
    pub(super) async fn set_compute_mode(&self, gpu: &str, mode: MpsComputeMode, limit: Duration) -> Result<(), ToolError> {
        let set = async {
            let mut command = self.command(SMI)?;
            command.args(["-i", gpu, "-c", mode.name()]);
            let output = self.run(command, None, limit).await?;
            // nvidia-smi writes its errors to the standard output.
            succeeded(output.status, [&output.stdout, &output.stderr])
        };
        set.await.map_err(|error| ToolError::ComputeMode {
            mode: mode.name(),
            error,
        })
    }

    /// Start the control daemon, which goes on in the background.
    pub(super) async fn start_control(&self, daemon: &Daemon) -> Result<(), ToolError> {
        // The daemon may keep its standard error, so it must not be a pipe that is closed afterwards.
        let said = daemon.log_directory().join("start.log");
        let file = files::create(&said)?;
        let other = file.try_clone().map_err(ProgramError::from)?;
        let mut command = self.control_command(daemon)?;
        command
            .arg("-d")
            .stdin(Stdio::null())
            .stdout(file)
            .stderr(other)
            .kill_on_drop(true);
        let mut child = command.spawn().map_err(ProgramError::from)?;
        let ended = timeout(self.deadline, child.wait()).await;
        let status = match ended {
            Ok(status) => status.map_err(ProgramError::from)?,
            Err(_) => {
                let late = self.killed(&mut child, "nvidia-cuda-mps-control -d", self.deadline);
                return Err(late.await.into());
            }
        };
        let text = files::read(&said, BYTES).ok().flatten().unwrap_or_default();
        succeeded(status, [&text, ""]).map_err(ToolError::Control)
    }

    /// Give the control daemon a command, and return its answer, which must come within `limit`.
    pub(super) async fn ask(&self, daemon: &Daemon, command: &str, limit: Duration) -> Result<String, ToolError> {
        let program = self.control_command(daemon).map_err(ToolError::Command)?;
        let asked = async {
            let output = self.run(program, Some(command), limit).await?;
            succeeded(output.status, [&output.stdout, &output.stderr])?;
            Ok(output.stdout)
        };
        asked.await.map_err(ToolError::Ask)
    }

    /// Like NVIDIA's program, the control daemon gets no other variables. `PATH` is for `nvidia-cuda-mps-server`, which it starts.
    fn control_command(&self, daemon: &Daemon) -> Result<Command, ProgramError> {
        let mut command = self.command(CONTROL)?;
        let path = command
            .as_std()
            .get_envs()
            .find_map(|(name, value)| (name == "PATH").then_some(value?.to_owned()));
        command
            .env_clear()
            .envs(path.map(|path| ("PATH", path)))
            .envs(daemon.environment());
        Ok(command)
    }

    async fn run(&self, mut command: Command, input: Option<&str>, deadline: Duration) -> Result<ToolOutput, ProgramError> {
        let name = command.as_std().get_program().to_string_lossy().into_owned();
        let stdin = if input.is_some() { Stdio::piped() } else { Stdio::null() };
        command
            .stdin(stdin)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        let mut child = command.spawn()?;
        let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let write = async {
            if let (Some(mut stdin), Some(input)) = (stdin, input) {
                // A failed write needs no message: the exit status of the program tells whether the command failed.
                let _ = stdin.write_all(input.as_bytes()).await;
            }
        };
        let finished = async {
            let ((), stdout, stderr, status) = tokio::join!(write, text(stdout), text(stderr), child.wait());
            status.map(|status| ToolOutput { status, stdout, stderr })
        };
        let finished = timeout(deadline, finished).await;
        match finished {
            Ok(output) => Ok(output?),
            Err(_) => Err(self.killed(&mut child, &name, deadline).await),
        }
    }

    /// Kill a program that has missed its deadline, and return the error.
    async fn killed(&self, child: &mut Child, program: &str, limit: Duration) -> ProgramError {
        let ended = match child.start_kill() {
            Ok(()) => timeout(KILL_LIMIT, child.wait()).await.is_ok(),
            Err(_) => false,
        };
        ProgramError::Late {
            program: program.to_owned(),
            limit,
            rest: if ended {
                ""
            } else {
                " and does not end, so it hangs in the driver's kernel module"
            },
        }
    }
}

fn is_program(path: &Path) -> bool {
    let data = std::fs::metadata(path);
    data.is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0)
}

/// As [`is_program`], but accept any link: an absolute one leads to a file of the other root directory.
fn is_program_or_link(path: &Path) -> bool {
    let data = std::fs::symlink_metadata(path);
    data.is_ok_and(|data| data.is_symlink() || (data.is_file() && data.permissions().mode() & 0o111 != 0))
}

/// Run a program with this directory as its root, in place of this process. The words are the directory, the program's path below it, and its
/// arguments.
#[expect(clippy::print_stderr, reason = "the reader is the process that started this one")]
pub(crate) fn run_in_root(words: &[String]) -> ExitCode {
    let [root, program, arguments @ ..] = words else {
        eprintln!("{IN_ROOT} needs a directory and a program");
        return ExitCode::from(2);
    };
    let entered = rustix::process::chroot(root.as_str()).map_err(Into::into);
    let error = match entered.and_then(|()| std::env::set_current_dir("/")) {
        Ok(()) => std::process::Command::new(program).args(arguments).exec(),
        Err(error) => error,
    };
    eprintln!("{program} in {root}: {error}");
    ExitCode::from(127)
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
fn succeeded(status: ExitStatus, output: [&str; 2]) -> Result<(), ProgramError> {
    if status.success() {
        return Ok(());
    }
    let how = match status.code() {
        Some(code) => format!("exit status {code}"),
        None => status.to_string(),
    };
    let said = output.map(str::trim).join(" ");
    let said = match said.trim() {
        "" => String::new(),
        said => format!(": {}", plain_line(said.chars().take(CHARACTERS))),
    };
    Err(ProgramError::Status { how, said })
}
