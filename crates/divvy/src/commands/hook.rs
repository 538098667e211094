//! `nvidia-ctk hook`, which CDI specs call if NVIDIA's toolkit before 1.17 generated them. `divvy-hook` implements it.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use anyhow::Context as _;

use super::say;

/// Replace this process by the `divvy-hook` in this program's directory. The environment is cleared, because it may come from an
/// image, which must not influence a program that runs on the host.
///
/// # Errors
/// Fails if `divvy-hook` cannot be started.
pub fn run(words: &[OsString]) -> anyhow::Result<()> {
    if words.is_empty() {
        // As with NVIDIA's tool, the container starts anyway.
        return Ok(say("warning: No CDI hook specified")?);
    }
    let own = std::env::current_exe().context("this program's own path cannot be read")?;
    let program = own.with_file_name("divvy-hook");
    let error = Command::new(&program).arg0("divvy-hook").args(words).env_clear().exec();
    Err(error).with_context(|| {
        format!(
            "nvidia-ctk hook: {} cannot be run; without it, no container whose CDI spec calls nvidia-ctk starts. Install the divvy-hook that comes with \
             divvy there, or generate a spec without hooks (divvy cdi generate)",
            program.display()
        )
    })
}
