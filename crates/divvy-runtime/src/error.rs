//! What can be in the way, and who is told: the caller by standard error, and the engine by the log that it asked runc for, from which the
//! text comes into a pod's events.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use divvy_oci::runtime::call::{self, Call};
use divvy_oci::runtime::settings::{Level, Settings};
use divvy_oci::runtime::{bundle, live, plan, require, settings};
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
    /// The hook without NVIDIA's program.
    #[error(
        "nvidia-container-cli, which gives GPUs to a container that starts with runc alone (docker run --gpus), is not at {0}; make divvy-runtime Docker's \
         default runtime, with which --gpus does without it: sudo divvy configure docker --set-default --restart; or install libnvidia-container-tools, or \
         name the program in nvidia-container-cli.path of {path}", path = settings::PATH
    )]
    NoCliForHook(String),
    /// What a container runtime says to a hook on standard input.
    #[error(
        "the container's state on standard input {0}; a container runtime calls this program, with the container's state there"
    )]
    State(String),
    /// The real runtime did not start.
    #[error("{runtime} could not be run: {source}", runtime = runtime.display())]
    Exec {
        /// Its path.
        runtime: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

/// Where lines go: to the file that the engine asked runc for, and to one of our own (`nvidia-container-runtime.debug`).
#[derive(Debug, Default)]
pub(crate) struct Log {
    engine: Option<PathBuf>,
    is_json: bool,
    own: Option<PathBuf>,
    level: Level,
}

impl Log {
    pub(crate) fn of(call: &Call) -> Log {
        Log {
            engine: call.log.as_ref().map(PathBuf::from),
            is_json: call.log_is_json,
            ..Log::default()
        }
    }

    /// From here on there is our own file, too.
    pub(crate) fn also(&mut self, settings: &Settings) {
        self.own = settings.debug.as_ref().map(PathBuf::from);
        self.level = settings.log_level;
    }

    /// Why nothing was created; on standard error, too.
    pub(crate) fn error(&self, program: &str, error: &Error) {
        let text = format!("{program}: {error}");
        // Nobody is left to be told if that fails.
        let _ = writeln!(std::io::stderr(), "{text}");
        self.say(Level::Error, &text);
    }

    /// What somebody should know about a container that is created.
    pub(crate) fn warning(&self, text: &str) {
        self.say(Level::Warning, text);
    }

    /// What was done; in our own file alone, since engines show all that is in theirs.
    pub(crate) fn info(&self, text: &str) {
        if self.level >= Level::Info
            && let Some(path) = &self.own
        {
            self.in_own(path, Level::Info, text);
        }
    }

    fn say(&self, level: Level, text: &str) {
        if let Some(path) = &self.engine {
            // The file of the engine, which finds out by itself.
            let _ = append(path, &self.line(level, text));
        }
        if level <= self.level
            && let Some(path) = &self.own
        {
            self.in_own(path, level, text);
        }
    }

    /// A log that cannot be written is nobody's reason not to start a container.
    fn in_own(&self, path: &Path, level: Level, text: &str) {
        let folder = path.parent().map_or(Ok(()), std::fs::create_dir_all);
        let written = folder.and_then(|()| append(path, &self.line(level, text)));
        if let (Err(error), Some(engine)) = (written, &self.engine) {
            let why = format!(
                "nvidia-container-runtime.debug: {} cannot be written: {error}",
                path.display()
            );
            let _ = append(engine, &self.line(Level::Warning, &why));
        }
    }

    /// As runc writes its own.
    fn line(&self, level: Level, text: &str) -> String {
        let time = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
        let level = level.as_str();
        match self.is_json {
            true => json!({"level": level, "msg": text, "time": time}).to_string(),
            false => format!("time={time:?} level={level} msg={text:?}"),
        }
    }
}

fn append(path: &Path, line: &str) -> std::io::Result<()> {
    let mut file = OpenOptions::new().create(true).append(true).open(path)?;
    writeln!(file, "{line}")
}
