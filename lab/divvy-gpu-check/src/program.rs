//! A running `divvy-cuda-program`.

use std::process::Stdio;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

/// The program. It ends when this value is dropped.
#[derive(Debug)]
pub(crate) struct CheckProgram {
    child: Child,
    pid: u32,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl CheckProgram {
    /// Start it. It does nothing before the first request.
    pub(crate) fn start(mut command: Command) -> Result<CheckProgram> {
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        let mut child = command.spawn().context("divvy-cuda-program could not be started")?;
        let ended = "divvy-cuda-program has ended already";
        Ok(CheckProgram {
            pid: child.id().context(ended)?,
            input: child.stdin.take().context(ended)?,
            output: BufReader::new(child.stdout.take().context(ended)?),
            child,
        })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// Send a request, and wait for the answer.
    pub(crate) async fn ask(&mut self, request: &str) -> Result<Value> {
        let mut line = String::new();
        // A program that has ended reads nothing. Then it has said why.
        if self.input.write_all(format!("{request}\n").as_bytes()).await.is_ok() {
            self.output.read_line(&mut line).await?;
        }
        if line.is_empty() {
            let mut text = String::new();
            if let Some(errors) = &mut self.child.stderr {
                errors.read_to_string(&mut text).await?;
            }
            let status = self.child.wait().await?;
            bail!("{request}: the program has ended ({status}): {}", text.trim_end());
        }
        serde_json::from_str(&line).with_context(|| format!("{request}: {line}"))
    }

    /// Send a request, and return a number of the answer.
    pub(crate) async fn number(&mut self, request: &str, name: &str) -> Result<u64> {
        let answer = self.ask(request).await?;
        of(&answer, name)
    }

    /// Wait until it has ended on its own, or was killed by another.
    pub(crate) async fn ended(&mut self) -> Result<String> {
        Ok(self.child.wait().await?.to_string())
    }

    /// End it, and wait until it is gone.
    pub(crate) async fn end(mut self) -> Result<()> {
        self.child.kill().await.context("divvy-cuda-program cannot be killed")
    }
}

/// Return a number of an answer.
pub(crate) fn of(answer: &Value, name: &str) -> Result<u64> {
    answer[name]
        .as_u64()
        .with_context(|| format!("{answer} has no number {name}"))
}

/// Return a text of an answer.
pub(crate) fn text_of(answer: &Value, name: &str) -> Result<String> {
    let text = answer[name]
        .as_str()
        .with_context(|| format!("{answer} has no text {name}"))?;
    Ok(text.to_owned())
}
