//! Measures the first screen of `divvy top`, on a pseudo terminal.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::process::Command;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rustix::fs::OFlags;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

use crate::process::RunningProgram;
use crate::report::{BenchRow, CostBudget};

/// The time limit for the screen.
const PATIENCE: Duration = Duration::from_secs(300);
const BUDGET: CostBudget = CostBudget {
    seconds: Some(1.5),
    mib: Some(60.0),
};
const SIZE: Winsize = Winsize {
    ws_row: 24,
    ws_col: 80,
    ws_xpixel: 0,
    ws_ypixel: 0,
};

/// Run the command until its screen has all these texts, and return the time and the peak memory.
pub(crate) fn first(name: &str, command: Command, texts: &[&str]) -> BenchRow {
    match measured(command, texts) {
        Ok((seconds, mib)) => BenchRow::new(name, Some(seconds), Some(mib), BUDGET),
        Err(error) => BenchRow::failed(name, format!("{error:#}")),
    }
}

fn measured(mut command: Command, texts: &[&str]) -> anyhow::Result<(f64, f64)> {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY)?;
    grantpt(&ours)?;
    unlockpt(&ours)?;
    let name = ptsname(&ours, Vec::new())?.into_string()?;
    let flags = i32::try_from(OFlags::NOCTTY.bits())?;
    let theirs = File::options().read(true).write(true).custom_flags(flags).open(name)?;
    tcsetwinsize(&ours, SIZE)?;
    let mut ours = File::from(ours);
    let mut screen = ours.try_clone()?;
    let (shown, arrived) = mpsc::channel();
    std::thread::spawn(move || {
        let mut part = vec![0; 64 << 10];
        while let Ok(length @ 1..) = screen.read(&mut part) {
            if shown.send(part[..length].to_vec()).is_err() {
                return;
            }
        }
    });
    let side = || theirs.try_clone();
    command
        .env("TERM", "xterm-256color")
        .env("LC_ALL", "C.UTF-8")
        .stdin(side()?)
        .stdout(side()?)
        .stderr(side()?);
    let began = Instant::now();
    let mut running = RunningProgram(command.spawn().context("could not run it")?);
    let mut text = String::new();
    let seconds = loop {
        if let Some(status) = running.0.try_wait()? {
            anyhow::bail!("it ended before its first screen, with {status}");
        }
        ensure!(began.elapsed() < PATIENCE, "it had no screen after {} s", PATIENCE.as_secs());
        // The wait is short, so that a program that ends is noticed.
        if let Ok(part) = arrived.recv_timeout(Duration::from_millis(100)) {
            text.push_str(&String::from_utf8_lossy(&part));
        }
        if texts.iter().all(|wanted| text.contains(wanted)) {
            break began.elapsed().as_secs_f64();
        }
    };
    let (_, peak) = running.memory()?;
    ours.write_all(b"q")?;
    let status = running.0.wait()?;
    ensure!(status.success(), "it ended with {status}");
    Ok((seconds, peak))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_screen_is_measured_when_its_last_text_has_come() {
        let mut command = Command::new("sh");
        command.args([
            "-c",
            "stty -icanon -echo; printf one; sleep 0.05; printf two; dd bs=1 count=1 of=/dev/null",
        ]);
        let (seconds, mib) = measured(command, &["one", "two"]).expect("a shell");
        assert!(seconds >= 0.05 && mib > 0.1, "{seconds} s, {mib} MiB");
        let mut command = Command::new("sh");
        command.args(["-c", "printf one"]);
        let error = measured(command, &["one", "two"]).expect_err("it ends").to_string();
        assert!(error.contains("before its first screen"), "{error}");
    }
}
