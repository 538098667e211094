//! Mode `legacy` of `divvy-runtime`: calls `nvidia-container-cli`, which needs the container's PID.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use divvy_oci::hook::arguments;

use crate::error::{Error, Result};
use crate::state;

/// The `PATH` for `nvidia-container-cli`. By default, that program gets no other variable.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Replace this process with `nvidia-container-cli`. `divvy-runtime` chose the arguments from the container's configuration. The
/// program's path is on the host, never in the image.
pub(crate) fn run(environment: &[String], words: &[OsString]) -> Result<()> {
    let Some((program, words)) = words.split_first().filter(|(program, _)| Path::new(program).is_absolute()) else {
        return Err(
            arguments::HookArgumentError::Usage("legacy: the program after -- must be an absolute path".to_owned()).into(),
        );
    };
    let state = state::read()?;
    if state.pid == 0 {
        return Err(Error::State(
            "the container has no process yet, but a prestart hook needs one".to_owned(),
        ));
    }
    let error = Command::new(program)
        .args(words)
        .arg(format!("--pid={}", state.pid))
        .arg(&state.root)
        .env_clear()
        .env("PATH", PATH)
        .envs(environment.iter().filter_map(|entry| entry.split_once('=')))
        .exec();
    Err(Error::host("run", &program.to_string_lossy(), error))
}
