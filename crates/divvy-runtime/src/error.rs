//! What can be in the way, and who is told: the caller by standard error, and the engine by the log that it asked runc for, from which the
//! text comes into a pod's events.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::PathBuf;
use std::time::SystemTime;

use divvy_container::runtime::call::{self, Call};
use divvy_container::runtime::{bundle, live, plan, require, settings};
use serde_json::json;
use thiserror::Error as ThisError;

/// Why a container was not created.
#[derive(Debug, ThisError)]
pub(crate) enum Error {
    /// The command line.
    #[error("{0}")]
    Call(call::Error),
    /// Standard output is closed.
    #[error("the version cannot be printed: {0}")]
    Output(std::io::Error),
    /// A file.
    #[error("{path} cannot be {what}: {source}", path = path.display())]
    File {
        /// Read, written.
        what: &'static str,
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// `config.toml`.
    #[error("{path}: {source}", path = path.display())]
    Settings {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: settings::Error,
    },
    /// No runc, no crun.
    #[error(
        "error locating runtime: no runtime binary found from candidate list: [{list}]; install one (Debian: runc), or name it in \
         nvidia-container-runtime.runtimes of {path}",
        list = .0.join(" "), path = settings::PATH
    )]
    NoRuntime(Vec<String>),
    /// The container's configuration.
    #[error("{path}: {source}", path = path.display())]
    Bundle {
        /// `config.json`.
        path: PathBuf,
        /// What is wrong with it.
        source: bundle::Error,
    },
    /// What the container asks for cannot be given.
    #[error(transparent)]
    Plan(#[from] plan::Error),
    /// The driver cannot run what the image has.
    #[error(transparent)]
    Require(#[from] require::Error),
    /// The driver was asked, and says nothing useful.
    #[error(
        "the driver was asked for this machine's GPUs, and {program}: {why}. Devices that CDI specs describe are had without it: nvidia.com/gpu=0 in \
         place of 0, or nvidia-container-runtime.mode = \"cdi\" in {path}",
        program = program.display(), path = settings::PATH
    )]
    Probe {
        /// Its path.
        program: PathBuf,
        /// What it says, or what became of it.
        why: String,
    },
    /// What it says makes no spec.
    #[error(transparent)]
    Live(#[from] live::Error),
    /// A program of Divvy's own.
    #[error("{0} is not there; it comes with divvy-runtime and belongs beside it")]
    NotBeside(PathBuf),
    /// Mode legacy without NVIDIA's program.
    #[error(
        "nvidia-container-cli, which mode \"legacy\" calls, is not at {0}; install libnvidia-container-tools, name it in nvidia-container-cli.path of \
         {path}, or set nvidia-container-runtime.mode to \"auto\", which does without", path = settings::PATH
    )]
    NoCli(String),
    /// The real runtime did not start.
    #[error("{runtime} could not be run: {source}", runtime = runtime.display())]
    Exec {
        /// Its path.
        runtime: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

/// Tells why.
pub(crate) fn report(error: &Error, call: Option<&Call>) {
    say(call, "error", &format!("divvy-runtime: {error}"));
}

/// A line for the engine's log, and for standard error if it is an error.
pub(crate) fn say(call: Option<&Call>, level: &str, text: &str) {
    if level == "error" {
        // Nobody is left to be told if that fails.
        let _ = writeln!(std::io::stderr(), "{text}");
    }
    let Some((call, path)) = call.and_then(|call| Some((call, call.log.as_ref()?))) else {
        return;
    };
    let time = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    let line = if call.log_is_json {
        json!({"level": level, "msg": text, "time": time}).to_string()
    } else {
        format!("time={time:?} level={level} msg={text:?}")
    };
    let log = OpenOptions::new().create(true).append(true).open(path);
    let _ = log.and_then(|mut log| writeln!(log, "{line}"));
}
