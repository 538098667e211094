//! `divvy-runtime`: an OCI runtime that stands in front of runc or crun.
//!
//! Called to create a container it reads the container's `config.json`, puts in the devices that the container is to have, and becomes the real
//! runtime; called for anything else it becomes the real runtime at once. It opens nothing below the container's root, mounts nothing, and runs
//! nothing but that runtime, and `divvy-probe` where the driver has to be asked. What it decides is in `divvy_oci::runtime`; here is what is
//! read, written and executed.

#![forbid(unsafe_code)]

mod create;
mod error;
mod files;
mod hook;
mod low_level;
mod probe;

use std::ffi::OsString;
use std::io::Write as _;
use std::process::ExitCode;

use divvy_oci::runtime::call::Call;

use error::{Error, Log};

fn main() -> ExitCode {
    let words: Vec<OsString> = std::env::args_os().skip(1).collect();
    if let Some(name) = hook::name() {
        return hook::run(name, &words);
    }
    let call = Call::parse(&words);
    let (log, error) = match &call {
        Ok(call) => run(call, &words),
        Err(error) => (Log::default(), Error::Call(error.clone())),
    };
    log.error("divvy-runtime", &error);
    ExitCode::FAILURE
}

/// Returns only if something is in the way.
fn run(call: &Call, words: &[OsString]) -> (Log, Error) {
    // A version is asked for by many, and nothing happens that a log should tell.
    let mut log = if call.version { Log::default() } else { Log::of(call) };
    let error = go(call, words, &mut log);
    (log, error)
}

fn go(call: &Call, words: &[OsString], log: &mut Log) -> Error {
    if call.version {
        // runc's own follows: engines read that.
        let banner = format!(
            "Divvy Container Runtime version {}\nspec: 1.3.0\n\n",
            env!("CARGO_PKG_VERSION")
        );
        if let Err(error) = std::io::stdout().write_all(banner.as_bytes()) {
            return Error::Output(error);
        }
    }
    let settings = match files::settings() {
        Ok(settings) => settings,
        Err(error) => return error,
    };
    if !call.version {
        log.also(&settings);
    }
    let runtime = match low_level::find(&settings.runtimes) {
        Ok(runtime) => runtime,
        Err(error) => return error,
    };
    if call.creates
        && let Err(error) = create::prepare(call, &settings, log)
    {
        return error;
    }
    low_level::become_it(&runtime, words)
}
