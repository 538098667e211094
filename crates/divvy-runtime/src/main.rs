//! `divvy-runtime`: an OCI runtime that wraps runc or crun.
//!
//! When a call creates a container, this program adds the container's devices to its `config.json`, and then executes the real
//! runtime. For any other call, it executes the real runtime immediately. It opens nothing in the container's root, and mounts
//! nothing. The only programs that it runs are the real runtime and, if the driver must be queried, `divvy-probe`. The decisions
//! are in `divvy_oci::runtime`; this crate reads and writes the files and executes the programs.

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

use divvy_oci::runtime::call::RuntimeCall;

use error::{Error, RuntimeLog};

fn main() -> ExitCode {
    let words: Vec<OsString> = std::env::args_os().skip(1).collect();
    if let Some(name) = hook::name() {
        return hook::run(name, &words);
    }
    let call = RuntimeCall::parse(&words);
    let (log, error) = match &call {
        Ok(call) => run(call, &words),
        Err(error) => (RuntimeLog::default(), Error::Call(error.clone())),
    };
    log.error("divvy-runtime", &error);
    ExitCode::FAILURE
}

/// Handle one call. This function returns only on an error, because otherwise the real runtime replaces this process.
fn run(call: &RuntimeCall, words: &[OsString]) -> (RuntimeLog, Error) {
    // Many programs query the version, and a version query does nothing that a log should record.
    let mut log = if call.version {
        RuntimeLog::default()
    } else {
        RuntimeLog::of(call)
    };
    let error = go(call, words, &mut log);
    (log, error)
}

fn go(call: &RuntimeCall, words: &[OsString], log: &mut RuntimeLog) -> Error {
    if call.version {
        // The real runtime's version follows, which engines parse.
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
