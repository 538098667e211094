//! The command line of an OCI runtime, parsed as runc and crun parse it.
//!
//! The parser understands only what it needs to recognize that a container is created. The real runtime receives all arguments
//! unchanged. NVIDIA's runtime looks for `create` among all arguments. Therefore, its `delete create` (of a container named
//! `create`) fails, and its `run` adds no devices. Here, the command is the first argument that is neither a global flag nor
//! the value of one.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;

use thiserror::Error as ThisError;

/// An error in a command line.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
pub enum RuntimeCallError {
    /// `--bundle` is the last argument, so its value is missing.
    #[error("bundle option requires an argument")]
    NoBundle,
}

/// One call of the runtime.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RuntimeCall {
    /// Whether the command is `create` or `run`, so that the call creates a container from a bundle.
    pub creates: bool,
    /// The bundle's directory, as given. `None` stands for the current directory.
    pub bundle: Option<OsString>,
    /// Whether `--version` or `-v` occurs before a command.
    pub version: bool,
    /// The value of `--log`: the file to which runc writes its errors. Container engines read it when a container could not be
    /// created.
    pub log: Option<OsString>,
    /// Whether `--log-format` is `json`.
    pub log_is_json: bool,
}

/// Global flags of runc (`--criu`, `--rootless`, ...) and crun (`--cgroup-manager`) whose value may be a separate argument.
/// `--bundle` before the command is an error of the caller; it is listed so that its value is not mistaken for the command.
const WITH_VALUE: [&str; 8] = [
    "bundle",
    "b",
    "log",
    "log-format",
    "root",
    "criu",
    "rootless",
    "cgroup-manager",
];
/// Flags of `create` and `run` whose value may be a separate argument.
const WITH_VALUE_AFTER: [&str; 4] = ["console-socket", "pid-file", "preserve-fds", "keep-preserved-fds"];

impl RuntimeCall {
    /// Parse the arguments after the program's name.
    ///
    /// # Errors
    /// [`RuntimeCallError::NoBundle`] if `--bundle` has no value.
    pub fn parse<S: AsRef<OsStr>>(words: &[S]) -> Result<RuntimeCall, RuntimeCallError> {
        let mut call = RuntimeCall::default();
        let mut words = words.iter().map(AsRef::as_ref);
        while let Some(word) = words.next() {
            let Some((flag, value)) = flag(word) else {
                call.creates = word == "create" || word == "run";
                if call.creates {
                    call.bundle = bundle(words)?;
                }
                return Ok(call);
            };
            let mut value = || value.map(OsStr::to_owned).or_else(|| words.next().map(OsStr::to_owned));
            match flag {
                b"version" | b"v" => call.version = true,
                b"log" => call.log = value(),
                b"log-format" => call.log_is_json = value().is_some_and(|format| format == "json"),
                flag if WITH_VALUE.iter().any(|known| known.as_bytes() == flag) => drop(value()),
                _ => {}
            }
        }
        Ok(call)
    }
}

/// Return the value of the last `--bundle` after `create`.
fn bundle<'a>(mut words: impl Iterator<Item = &'a OsStr>) -> Result<Option<OsString>, RuntimeCallError> {
    let mut bundle = None;
    while let Some(word) = words.next() {
        match flag(word) {
            Some((b"bundle" | b"b", Some(value))) => bundle = Some(value.to_owned()),
            Some((b"bundle" | b"b", None)) => bundle = Some(words.next().ok_or(RuntimeCallError::NoBundle)?.to_owned()),
            Some((flag, None)) if WITH_VALUE_AFTER.iter().any(|known| known.as_bytes() == flag) => {
                words.next();
            }
            _ => {}
        }
    }
    Ok(bundle)
}

/// Split a flag into its name and its value after `=`. As in Go's `flag` package, `-name` and `--name` are the same. The result
/// is `None` if the argument is not a flag.
fn flag(word: &OsStr) -> Option<(&[u8], Option<&OsStr>)> {
    let name = word.as_bytes().strip_prefix(b"-")?;
    let name = name.strip_prefix(b"-").unwrap_or(name);
    Some(match name.iter().position(|byte| *byte == b'=') {
        Some(at) => (&name[..at], Some(OsStr::from_bytes(&name[at + 1..]))),
        None => (name, None),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn case_17_a_the_command_is_the_first_word_that_is_no_flag() {
        let creates = |bundle: &str| (true, Some(bundle.to_owned()));
        let passes = (false, None);
        for (line, expected) in [
            ("create --bundle /b c1", creates("/b")),
            ("create -b /b c1", creates("/b")),
            ("--root /r create --bundle=/b c1", creates("/b")),
            ("create -bundle /b c1", creates("/b")),
            ("create --bundle /a -b=/b c1", creates("/b")),
            ("run --bundle /b c1", creates("/b")),
            (
                "--log /l --log-format json --systemd-cgroup create --pid-file /p --console-socket -b -b /b c",
                creates("/b"),
            ),
            ("--cgroup-manager systemd create c", (true, None)),
            ("create c1", (true, None)),
            ("--bundle create start", passes.clone()),
            ("--root create state c1", passes.clone()),
            ("--criu create --rootless run kill c1", passes.clone()),
            ("delete create", passes.clone()),
            ("state create", passes.clone()),
            ("exec create sh", passes.clone()),
            ("start c1", passes.clone()),
            ("", passes),
        ] {
            let words: Vec<&str> = line.split_whitespace().collect();
            let call = RuntimeCall::parse(&words).expect("understood");
            let bundle = call.bundle.map(|bundle| bundle.to_string_lossy().into_owned());
            assert_eq!((call.creates, bundle), expected, "{line}");
        }
        assert_eq!(RuntimeCall::parse(&["create", "--bundle"]), Err(RuntimeCallError::NoBundle));
    }

    #[test]
    fn the_log_that_engines_read_is_found() {
        let call = RuntimeCall::parse(&["--log=/run/log.json", "--log-format", "json", "create", "c"]).expect("understood");
        assert_eq!(
            (call.log.as_deref(), call.log_is_json),
            (Some(OsStr::new("/run/log.json")), true)
        );
        let call = RuntimeCall::parse(&["--log", "/l", "--log-format=text", "create", "c"]).expect("understood");
        assert_eq!((call.log.as_deref(), call.log_is_json), (Some(OsStr::new("/l")), false));
        assert!(RuntimeCall::parse(&["--version"]).expect("understood").version);
        assert!(
            !RuntimeCall::parse(&["exec", "--version"]).expect("understood").version,
            "after the command the flag belongs to the command"
        );
    }
}
