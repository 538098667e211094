//! `nvidia-ctk hook`, which CDI specs of NVIDIA's toolkit before 1.17 call: `divvy-hook` does what it does.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use anyhow::Context as _;

use super::say;

/// Becomes the `divvy-hook` beside this program, with no variable of whoever called: those of an image are not for a program of the machine.
///
/// # Errors
/// It is not there.
pub fn run(words: &[OsString]) -> anyhow::Result<()> {
    if words.is_empty() {
        // As NVIDIA's: the container starts.
        return Ok(say("warning: No CDI hook specified")?);
    }
    let own = std::env::current_exe().context("this program's own path cannot be read")?;
    let program = own.with_file_name("divvy-hook");
    let error = Command::new(&program).arg0("divvy-hook").args(words).env_clear().exec();
    Err(error).with_context(|| {
        format!(
            "nvidia-ctk hook: {} cannot be run; it comes with divvy and belongs beside it, and no container whose CDI spec calls nvidia-ctk starts \
             without it: put it there, or make the spec anew (divvy cdi generate), which calls nothing",
            program.display()
        )
    })
}
