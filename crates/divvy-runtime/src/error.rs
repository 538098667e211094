//! The errors of this program, and the places where they are reported: standard error, for the caller, and the log file that the
//! engine names for runc. The engine copies the text from that file into the pod's events.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use divvy_oci::runtime::call::{self, RuntimeCall};
use divvy_oci::runtime::settings::{LogLevel, OciRuntimeSettings};
use divvy_oci::runtime::{bundle, live, plan, require, settings};
use serde_json::json;
use thiserror::Error as ThisError;

/// A reason why a container was not created.
#[derive(Debug, ThisError)]
pub(crate) enum Error {
    /// The command line is wrong.
    #[error("{0}")]
    Call(call::RuntimeCallError),
    /// Standard output is closed.
    #[error("the version cannot be printed: {0}")]
    Output(std::io::Error),
    /// A file operation failed.
    #[error("{path} cannot be {what}: {source}", path = path.display())]
    File {
        /// The operation as a participle: `read`, `written`, or `found`.
        what: &'static str,
        /// The file's path.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// `config.toml` is invalid.
    #[error("{path}: {source}", path = path.display())]
    Settings {
        /// The file's path.
        path: PathBuf,
        /// The error in it.
        source: settings::RuntimeSettingsError,
    },
    /// Neither runc nor crun was found.
    #[error(
        "error locating runtime: no runtime binary found from candidate list: [{list}]; install one (Debian: runc), or set \
         nvidia-container-runtime.runtimes of {path}",
        list = .0.join(" "), path = settings::PATH
    )]
    NoRuntime(Vec<String>),
    /// The container's configuration is invalid, or an edit cannot be applied.
    #[error("{path}: {source}", path = path.display())]
    Bundle {
        /// The path of `config.json`.
        path: PathBuf,
        /// The error.
        source: bundle::BundleError,
    },
    /// The container cannot get what it requests.
    #[error(transparent)]
    Plan(#[from] plan::DevicePlanError),
    /// The driver does not meet the image's requirements.
    #[error(transparent)]
    Require(#[from] require::RequirementError),
    /// The driver could not be queried.
    #[error(
        "this machine's GPUs could not be read from the driver: {program}: {why}. Devices in CDI specs do not need the driver: request nvidia.com/gpu=0 \
         instead of 0, or set nvidia-container-runtime.mode = \"cdi\" in {path}",
        program = program.display(), path = settings::PATH
    )]
    Probe {
        /// The path of the probe.
        program: PathBuf,
        /// The probe's own error, or how it ended.
        why: String,
    },
    /// No spec can be made from the probe's output.
    #[error(transparent)]
    Live(#[from] live::LiveSpecError),
    /// A program that is part of Divvy is missing.
    #[error("{0} does not exist; it comes with divvy-runtime and must be in the same directory")]
    NotBeside(PathBuf),
    /// Mode `legacy` is set, but NVIDIA's program is missing.
    #[error(
        "mode \"legacy\" needs nvidia-container-cli, but it is not at {0}; install libnvidia-container-tools, set nvidia-container-cli.path in \
         {path}, or set nvidia-container-runtime.mode to \"auto\", which does not need it", path = settings::PATH
    )]
    NoCli(String),
    /// The hook is called, but NVIDIA's program is missing.
    #[error(
        "docker run --gpus with runc needs nvidia-container-cli, but it is not at {0}; make divvy-runtime Docker's \
         default runtime, which does not need it: sudo divvy configure docker --set-default --restart; or install libnvidia-container-tools, or \
         set nvidia-container-cli.path in {path}", path = settings::PATH
    )]
    NoCliForHook(String),
    /// The hook's input is wrong.
    #[error(
        "the container's state on standard input {0}; only a container runtime should call this program, with the container's state as its input"
    )]
    State(String),
    /// The real runtime did not start.
    #[error("{runtime} could not be run: {source}", runtime = runtime.display())]
    Exec {
        /// The path of the program.
        runtime: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
}

/// The files to which log lines are written: the file that the engine names for runc, and the runtime's own file
/// (`nvidia-container-runtime.debug`).
#[derive(Debug, Default)]
pub(crate) struct RuntimeLog {
    engine: Option<PathBuf>,
    is_json: bool,
    own: Option<PathBuf>,
    level: LogLevel,
}

impl RuntimeLog {
    pub(crate) fn of(call: &RuntimeCall) -> RuntimeLog {
        RuntimeLog {
            engine: call.log.as_ref().map(PathBuf::from),
            is_json: call.log_is_json,
            ..RuntimeLog::default()
        }
    }

    /// Set the runtime's own log file and its level from the settings.
    pub(crate) fn also(&mut self, settings: &OciRuntimeSettings) {
        self.own = settings.debug.as_ref().map(PathBuf::from);
        self.level = settings.log_level;
    }

    /// Report why no container was created: on standard error and in both log files.
    pub(crate) fn error(&self, program: &str, error: &Error) {
        let text = format!("{program}: {error}");
        // If this fails, there is no other place to report it.
        let _ = writeln!(std::io::stderr(), "{text}");
        self.log(LogLevel::Error, &text);
    }

    /// Log a problem with a container that is nevertheless created.
    pub(crate) fn warning(&self, text: &str) {
        self.log(LogLevel::Warning, text);
    }

    /// Log a change. It is written only to the runtime's own file, because engines show every line of their file to the user.
    pub(crate) fn info(&self, text: &str) {
        if self.level >= LogLevel::Info
            && let Some(path) = &self.own
        {
            self.in_own(path, LogLevel::Info, text);
        }
    }

    fn log(&self, level: LogLevel, text: &str) {
        if let Some(path) = &self.engine {
            // The file belongs to the engine, which notices itself if it cannot be written.
            let _ = append(path, &self.line(level, text));
        }
        if level <= self.level
            && let Some(path) = &self.own
        {
            self.in_own(path, level, text);
        }
    }

    /// Write to the runtime's own log file. If that fails, the container starts anyway, and a warning is written to the engine's
    /// log.
    fn in_own(&self, path: &Path, level: LogLevel, text: &str) {
        let directory = path.parent().map_or(Ok(()), std::fs::create_dir_all);
        let written = directory.and_then(|()| append(path, &self.line(level, text)));
        if let (Err(error), Some(engine)) = (written, &self.engine) {
            let why = format!(
                "nvidia-container-runtime.debug: {} cannot be written: {error}",
                path.display()
            );
            let _ = append(engine, &self.line(LogLevel::Warning, &why));
        }
    }

    /// Format a line as runc formats its log lines.
    fn line(&self, level: LogLevel, text: &str) -> String {
        let time = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
        let level = level.as_str();
        if self.is_json {
            json!({"level": level, "msg": text, "time": time}).to_string()
        } else {
            format!("time={time:?} level={level} msg={text:?}")
        }
    }
}

fn append(path: &Path, line: &str) -> std::io::Result<()> {
    let mut file = OpenOptions::new().create(true).append(true).open(path)?;
    writeln!(file, "{line}")
}
