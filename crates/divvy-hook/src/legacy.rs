//! Mode legacy of `divvy-runtime`: NVIDIA's own program, which needs the container's process.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use divvy_oci::hook::arguments;

use crate::error::{Error, Result};
use crate::state;

/// What programs of the machine need for an environment.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Becomes the program. Its words were settled by `divvy-runtime` from the container's configuration; a path of the machine, never of the image.
pub(crate) fn run(environment: &[String], words: &[OsString]) -> Result<()> {
    let Some((program, words)) = words.split_first().filter(|(program, _)| Path::new(program).is_absolute()) else {
        return Err(arguments::Error::Usage("legacy: the program after -- is to be named by its whole path".to_owned()).into());
    };
    let state = state::read()?;
    if state.pid == 0 {
        return Err(Error::State(
            "the container has no process yet: this is a prestart hook".to_owned(),
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
