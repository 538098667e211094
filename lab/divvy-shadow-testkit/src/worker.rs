//! A process that does what a test says.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// A process that reads requests from standard input, one per line, and answers each with a line. It is killed when this value is dropped.
#[derive(Debug)]
pub struct RequestWorker {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl RequestWorker {
    pub fn start(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, input, output }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Send a request, and do not wait for the answer.
    pub fn send(&mut self, request: &str) {
        writeln!(self.input.as_mut().unwrap(), "{request}").unwrap();
    }

    /// Wait for the next line. `None`: the process has ended.
    pub fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.ends_with('\n').then_some(line)
    }

    /// Wait for an answer of numbers, which may have signs. `None`: the process has ended.
    pub fn answer(&mut self) -> Option<Vec<u64>> {
        let line = self.line()?;
        let numbers = line.split_whitespace().map(|word| word.parse::<i128>().unwrap() as u64);
        Some(numbers.collect())
    }

    /// Kill it with SIGKILL, and wait until it is gone.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Close its input, which its children share, and wait until no process writes its output any more.
    pub fn close(mut self) {
        self.input = None;
        self.output.read_to_string(&mut String::new()).unwrap();
    }
}

impl Drop for RequestWorker {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
