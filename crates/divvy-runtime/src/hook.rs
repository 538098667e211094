//! A replacement for NVIDIA's `nvidia-container-runtime-hook`. This program acts as that hook when it is called by the hook's
//! name.
//!
//! Docker up to version 28 supports `--gpus` only if a program with this name is in dockerd's `PATH`. Docker then sets
//! `NVIDIA_VISIBLE_DEVICES` and adds `nvidia-container-runtime-hook prestart` to the container's hooks. If runc creates the
//! container, this hook adds the GPUs with the help of `nvidia-container-cli`. If `divvy-runtime` creates the container,
//! `divvy-runtime` adds the GPUs itself, and removes the hook in every mode except `legacy`.
//!
//! Flags, commands, and exit statuses are those of NVIDIA's program (toolkit 1.20.0, which uses Go's package `flag`): a flag may
//! have one or two dashes, and flags after the command are ignored.
//!
//! The hook runs with the host's privileges and with dockerd's environment variables. It opens nothing in the container's root,
//! and does not pass any of these variables on.

use std::ffi::OsString;
use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use divvy_oci::hook::state::OciState;
use divvy_oci::runtime::bundle::{Bundle, LEGACY_HOOKS};
use divvy_oci::runtime::{legacy, plan};

use crate::error::{Error, RuntimeLog};
use crate::{create, files, low_level};

/// The `PATH` for `nvidia-container-cli`. By default, that program gets no other variable.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Return the name by which this program was called, if that is a name of NVIDIA's hook.
pub(crate) fn name() -> Option<&'static str> {
    let called = PathBuf::from(std::env::args_os().next()?);
    let called = called.file_name()?.to_str()?;
    LEGACY_HOOKS.into_iter().find(|name| *name == called)
}

/// What the command line asks for.
#[derive(Debug, PartialEq, Eq)]
enum HookCommand {
    Help,
    Version,
    Prestart(HookFlags),
    /// A command that does nothing.
    Nothing,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct HookFlags {
    config: Option<PathBuf>,
    debug: bool,
    version: bool,
}

/// What is wrong with the command line, in Go's words.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum HookUsageError {
    #[error("flag needs an argument: -config")]
    NoArgument,
    #[error("flag provided but not defined: -{0}")]
    UnknownFlag(String),
    #[error("invalid boolean value {value:?} for -{flag}")]
    NoBoolean { flag: String, value: String },
    #[error("unknown command {0:?}")]
    UnknownCommand(String),
    #[error("no command is given")]
    NoCommand,
}

/// Execute the command. This function returns only if there is nothing to do, or on an error.
pub(crate) fn run(name: &str, words: &[OsString]) -> ExitCode {
    let say = |text: &str| {
        // If this fails, there is no other place to report it.
        let _ = writeln!(std::io::stderr(), "{text}");
    };
    match parse(words) {
        Err(wrong) => {
            say(&format!("{name}: {wrong}\n{}", usage(name)));
            ExitCode::from(2)
        }
        Ok(HookCommand::Help) => {
            say(&usage(name));
            ExitCode::SUCCESS
        }
        Ok(HookCommand::Version) => {
            let text = format!(
                "NVIDIA Container Runtime Hook version {} of divvy, in place of 1.20.0\n",
                env!("CARGO_PKG_VERSION")
            );
            match std::io::stdout().write_all(text.as_bytes()) {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => {
                    say(&format!("{name}: {}", Error::Output(error)));
                    ExitCode::FAILURE
                }
            }
        }
        Ok(HookCommand::Nothing) => ExitCode::SUCCESS,
        Ok(HookCommand::Prestart(flags)) => {
            let mut log = RuntimeLog::default();
            match prestart(name, flags, &mut log) {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => {
                    log.error(name, &error);
                    ExitCode::FAILURE
                }
            }
        }
    }
}

fn usage(name: &str) -> String {
    format!(
        "Adds the GPUs that Docker's --gpus requests to a starting container, with nvidia-container-cli. Reads the container's state from standard input.\n\n\
         Usage: {name} [-config FILE] [-debug] prestart | poststart | poststop\n       {name} -version\n\n\
         \x20 -config FILE  Path of config.toml\n\
         \x20 -debug        Make nvidia-container-cli log what it does\n\
         \x20 poststart, poststop do nothing"
    )
}

fn parse(words: &[OsString]) -> Result<HookCommand, HookUsageError> {
    let mut flags = HookFlags::default();
    let mut words = words.iter();
    let command = loop {
        let word = words.next().map(|word| word.to_string_lossy());
        let Some(word) = word else { break None };
        let Some(flag) = word.strip_prefix('-').filter(|rest| !rest.is_empty()) else {
            break Some(word.into_owned());
        };
        let flag = flag.strip_prefix('-').unwrap_or(flag);
        if flag.is_empty() {
            break words.next().map(|word| word.to_string_lossy().into_owned());
        }
        let (flag, value) = flag.split_once('=').map_or((flag, None), |(flag, value)| (flag, Some(value)));
        match flag {
            "debug" => flags.debug = truth(flag, value)?,
            "version" => flags.version = truth(flag, value)?,
            "config" => {
                let next = || words.next().map(|word| word.to_string_lossy().into_owned());
                let value = value.map(str::to_owned).or_else(next);
                let value = value.ok_or(HookUsageError::NoArgument)?;
                flags.config = Some(PathBuf::from(value)).filter(|path| !path.as_os_str().is_empty());
            }
            "h" | "help" => return Ok(HookCommand::Help),
            other => return Err(HookUsageError::UnknownFlag(other.to_owned())),
        }
    };
    match command.as_deref() {
        _ if flags.version => Ok(HookCommand::Version),
        Some("prestart") => Ok(HookCommand::Prestart(flags)),
        Some("poststart" | "poststop") => Ok(HookCommand::Nothing),
        Some(other) => Err(HookUsageError::UnknownCommand(other.to_owned())),
        None => Err(HookUsageError::NoCommand),
    }
}

/// Parse a boolean as Go does. A flag without a value means true.
fn truth(flag: &str, value: Option<&str>) -> Result<bool, HookUsageError> {
    match value {
        None | Some("1" | "t" | "T" | "true" | "TRUE" | "True") => Ok(true),
        Some("0" | "f" | "F" | "false" | "FALSE" | "False") => Ok(false),
        Some(other) => Err(HookUsageError::NoBoolean {
            flag: flag.to_owned(),
            value: other.to_owned(),
        }),
    }
}

/// Replace this process with `nvidia-container-cli` if the container requests GPUs.
fn prestart(name: &str, flags: HookFlags, log: &mut RuntimeLog) -> Result<(), Error> {
    let mut settings = files::settings_of_hook(flags.config)?;
    log.also(&settings);
    if flags.debug {
        settings.cli.debug = Some("/dev/stderr".to_owned());
    }
    let mut said = String::new();
    files::read_all(std::io::stdin(), &mut said).map_err(|error| Error::State(format!("cannot be read: {error}")))?;
    let state = OciState::parse(said.as_bytes())
        .map_err(|error| Error::State(format!("does not follow the runtime specification: {error}")))?;
    let directory = state.bundle().ok_or_else(|| Error::State("names no bundle".to_owned()))?;
    let path = Path::new(directory).join("config.json");
    let of_bundle = |source| Error::Bundle {
        path: path.clone(),
        source,
    };
    let text = files::read(&path).map_err(|source| Error::File {
        what: "read",
        path: path.clone(),
        source,
    })?;
    let bundle = Bundle::parse(&text).map_err(of_bundle)?;
    let container = bundle.container().map_err(of_bundle)?;
    let (wanted, ignored) = plan::by_hook(&container, &settings)?;
    for sentence in &ignored {
        let _ = writeln!(std::io::stderr(), "{name}: warning: {sentence}");
        log.warning(sentence);
    }
    let Some(wanted) = wanted else { return Ok(()) };
    let root = Path::new(directory).join(bundle.root().map_err(of_bundle)?);
    let words = legacy::words(&container, &wanted, &settings, create::ldconfig()).map_err(plan::DevicePlanError::Legacy)?;
    if state.pid == 0 {
        return Err(Error::State("has no PID, which a prestart hook needs".to_owned()));
    }
    let cli = low_level::nvidia_container_cli(&settings.cli, Error::NoCliForHook)?;
    let error = Command::new(&cli)
        .args(words)
        .arg(format!("--pid={}", state.pid))
        .arg(root)
        .env_clear()
        .env("PATH", PATH)
        .envs(settings.cli.environment.iter().filter_map(|entry| entry.split_once('=')))
        .exec();
    Err(Error::Exec {
        runtime: PathBuf::from(cli),
        source: error,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_read_as_go_reads_them() {
        let prestart = |config: &str, debug| {
            Ok(HookCommand::Prestart(HookFlags {
                config: Some(PathBuf::from(config)).filter(|path| !path.as_os_str().is_empty()),
                debug,
                version: false,
            }))
        };
        for (line, expected) in [
            ("prestart", prestart("", false)),
            ("-debug prestart", prestart("", true)),
            ("--debug=0 -config /c prestart", prestart("/c", false)),
            ("--config=/c -- prestart -debug", prestart("/c", false)),
            ("poststart", Ok(HookCommand::Nothing)),
            ("poststop -x", Ok(HookCommand::Nothing)),
            ("-version", Ok(HookCommand::Version)),
            ("-version=true bogus", Ok(HookCommand::Version)),
            ("-help", Ok(HookCommand::Help)),
            ("bogus", Err("unknown command \"bogus\"")),
            ("-debug", Err("no command is given")),
            ("-", Err("unknown command \"-\"")),
            ("-x prestart", Err("flag provided but not defined: -x")),
            ("-config", Err("flag needs an argument: -config")),
            ("-debug=maybe prestart", Err("invalid boolean value \"maybe\" for -debug")),
        ] {
            let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            assert_eq!(
                parse(&words).map_err(|error| error.to_string()),
                expected.map_err(str::to_owned),
                "{line}"
            );
        }
    }
}
