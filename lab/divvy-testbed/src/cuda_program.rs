//! Starts `divvy-cuda-program`, which uses a GPU, in a container, and sends requests to it.

use std::io;
use std::process::Stdio;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

/// What the program answers.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ProgramAnswer {
    /// What it did, in its own words.
    pub says: String,
    /// The GPU's memory in MiB, as the driver's library told the program.
    pub total_mib: u64,
    /// The part of it that is free.
    pub free_mib: u64,
    /// The allocation that failed, if that ended the request.
    pub refused: Option<FailedAllocation>,
}

/// An allocation that failed.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct FailedAllocation {
    /// How much the program asked for, in MiB.
    pub mib: u64,
    /// CUDA's name of the error.
    pub error: String,
}

/// The running program. It ends when this value is dropped, or when this process ends.
#[derive(Debug)]
pub struct CudaProgram {
    child: Child,
    pid: u32,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl CudaProgram {
    /// Start it with this command. It does nothing before the first request.
    ///
    /// # Errors
    /// The command cannot be started.
    pub fn start(mut command: Command) -> io::Result<CudaProgram> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Ctrl-C must reach only the parent, which ends its children in order.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()?;
        let ended = || io::Error::other("the program has ended already");
        Ok(CudaProgram {
            pid: child.id().ok_or_else(ended)?,
            input: child.stdin.take().ok_or_else(ended)?,
            output: BufReader::new(child.stdout.take().ok_or_else(ended)?),
            child,
        })
    }

    /// Set the PID of the program on this machine, if the command that was started is not the program itself.
    pub fn set_pid(&mut self, pid: u32) {
        self.pid = pid;
    }

    /// Report whether the command has ended.
    ///
    /// # Errors
    /// The system does not say it.
    pub fn has_ended(&mut self) -> io::Result<bool> {
        Ok(self.child.try_wait()?.is_some())
    }

    /// End a program that has not started as it should. Return what it printed to standard error.
    pub async fn failed(mut self) -> io::Error {
        // It may have ended already.
        let _ = self.child.start_kill();
        self.last_words().await
    }

    async fn last_words(&mut self) -> io::Error {
        let mut text = String::new();
        if let Some(errors) = &mut self.child.stderr
            && let Err(error) = errors.read_to_string(&mut text).await
        {
            return error;
        }
        io::Error::other(format!("the program has ended: {}", text.trim_end()))
    }

    /// Return its PID on this machine.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Send a request, and wait for the answer.
    ///
    /// # Errors
    /// The program has ended. The error has what it printed to standard error.
    pub async fn ask(&mut self, request: &str) -> io::Result<ProgramAnswer> {
        self.ask_for(request).await
    }

    /// Send a request whose answer is another one than [`ProgramAnswer`], and wait for it.
    ///
    /// # Errors
    /// As of [`CudaProgram::ask`], or the answer is another one.
    pub async fn ask_for<T: DeserializeOwned>(&mut self, request: &str) -> io::Result<T> {
        let mut line = String::new();
        // A program that has ended reads nothing. Then it has said why.
        if self.input.write_all(format!("{request}\n").as_bytes()).await.is_ok() {
            self.output.read_line(&mut line).await?;
        }
        if line.is_empty() {
            return Err(self.last_words().await);
        }
        Ok(serde_json::from_str(&line)?)
    }

    /// End it, and wait until it is gone.
    ///
    /// # Errors
    /// It cannot be killed.
    pub async fn end(mut self) -> io::Result<()> {
        self.child.kill().await
    }
}
