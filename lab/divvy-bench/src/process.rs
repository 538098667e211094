//! Runs programs to their end and measures the time and memory that they needed. Also measures the memory of programs that keep
//! running.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use wait4::Wait4 as _;

/// The time limit for a program. A program that takes longer is considered hung.
const LIMIT: Duration = Duration::from_secs(300);
/// A program that has ended.
#[derive(Debug)]
pub(crate) struct EndedProgram {
    pub(crate) status: ExitStatus,
    pub(crate) seconds: f64,
    pub(crate) mib: f64,
    output: PathBuf,
    errors: PathBuf,
}

impl EndedProgram {
    /// Return the last line that the program wrote to standard error, or, if it wrote nothing there, to standard output.
    pub(crate) fn last_words(&self) -> String {
        let last = |file: &Path| lines(file).filter(|line| !line.trim().is_empty()).last();
        last(&self.errors).or_else(|| last(&self.output)).unwrap_or_default()
    }

    /// Report whether a line of the program's standard output contains this text.
    pub(crate) fn printed(&self, text: &str) -> bool {
        lines(&self.output).any(|line| line.contains(text))
    }
}

/// Read a file line by line. Reading it as a whole would raise the peak memory of this process, which is the lower limit of what
/// is reported for programs that are started later.
fn lines(file: &Path) -> impl Iterator<Item = String> {
    let lines = File::open(file).ok().map(|file| BufReader::new(file).lines());
    lines.into_iter().flatten().map_while(Result::ok)
}

/// Run a program to its end. Its output is written to files in `directory`, so that the program never waits for a reader.
pub(crate) fn run(command: &mut Command, directory: &Path) -> anyhow::Result<EndedProgram> {
    let (output, errors) = (directory.join("stdout"), directory.join("stderr"));
    command
        .stdin(Stdio::null())
        .stdout(File::create(&output)?)
        .stderr(File::create(&errors)?);
    let began = Instant::now();
    let mut child = command
        .spawn()
        .with_context(|| format!("could not run {}", command.get_program().display()))?;
    let used = loop {
        if let Some(used) = child.try_wait4()? {
            break used;
        }
        if began.elapsed() > LIMIT {
            child.kill()?;
            child.wait()?;
            bail!("it had not ended after {} s", LIMIT.as_secs());
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    Ok(EndedProgram {
        status: used.status,
        seconds: began.elapsed().as_secs_f64(),
        mib: used.rusage.maxrss as f64 / f64::from(1 << 20),
        output,
        errors,
    })
}

/// A program that runs until this value is dropped.
#[derive(Debug)]
pub(crate) struct RunningProgram(pub(crate) Child);

impl Drop for RunningProgram {
    fn drop(&mut self) {
        // The processes that a shell started are killed first. Any of them may already have ended.
        for id in tree(self.0.id()).into_iter().skip(1) {
            let _ = Command::new("kill").arg(id.to_string()).stderr(Stdio::null()).status();
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl RunningProgram {
    /// Return the resident memory of the program and all its descendants, now and at its peak, in MiB.
    pub(crate) fn memory(&self) -> anyhow::Result<(f64, f64)> {
        let mut sums = (0.0, 0.0);
        for id in tree(self.0.id()) {
            // The process may have ended in the meantime.
            let Ok(text) = fs::read_to_string(format!("/proc/{id}/status")) else {
                continue;
            };
            let mib = |key: &str| -> Option<f64> {
                let line = text.lines().find_map(|line| line.strip_prefix(key))?;
                Some(line.trim().trim_end_matches(" kB").parse::<f64>().ok()? / 1024.0)
            };
            sums.0 += mib("VmRSS:").unwrap_or(0.0);
            sums.1 += mib("VmHWM:").unwrap_or(0.0);
        }
        anyhow::ensure!(sums.1 > 0.0, "it has ended");
        Ok(sums)
    }
}

/// Return a process and its descendants.
fn tree(id: u32) -> Vec<u32> {
    let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    for process in entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok()) {
        let parent = fs::read_to_string(format!("/proc/{process}/stat")).ok().and_then(|stat| {
            // The program's name before this point may contain spaces and parentheses.
            let (_, rest) = stat.rsplit_once(')')?;
            rest.split_whitespace().nth(1)?.parse::<u32>().ok()
        });
        if let Some(parent) = parent {
            children.entry(parent).or_default().push(process);
        }
    }
    let mut found = vec![id];
    let mut at = 0;
    while at < found.len() {
        found.extend(children.get(&found[at]).into_iter().flatten().copied());
        at += 1;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_ends_is_measured_with_what_its_shell_started() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut command = Command::new("sh");
        // dd reads into one buffer of this size.
        command.args([
            "-c",
            "dd if=/dev/zero of=/dev/null bs=64M count=1; sleep 0.05; echo done; exit 3",
        ]);
        let ended = run(&mut command, directory.path()).expect("a shell");
        assert_eq!(ended.status.code(), Some(3));
        assert!(
            ended.printed("done") && !ended.printed("dd"),
            "its last words: {}",
            ended.last_words()
        );
        assert!((64.0..80.0).contains(&ended.mib), "{} MiB", ended.mib);
        assert!(ended.seconds >= 0.05, "{} s", ended.seconds);
    }

    #[test]
    fn a_program_that_goes_on_ends_with_what_its_shell_started() {
        let child = Command::new("sh").args(["-c", "sleep 100 & sleep 100; true"]).spawn();
        let running = RunningProgram(child.expect("a shell"));
        let processes = loop {
            let processes = tree(running.0.id());
            if processes.len() == 3 {
                break processes;
            }
            std::thread::yield_now();
        };
        let (now, peak) = running.memory().expect("it runs");
        assert!(now > 0.0 && peak >= now, "{now} {peak}");
        drop(running);
        let ended = |id: &u32| match fs::read_to_string(format!("/proc/{id}/stat")) {
            Err(_) => true,
            // A process whose parent has ended waits as a zombie for its new parent.
            Ok(stat) => stat.contains(") Z "),
        };
        while !processes.iter().all(ended) {
            std::thread::yield_now();
        }
    }
}
