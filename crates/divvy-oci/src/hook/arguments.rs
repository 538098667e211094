//! The command line of `divvy-hook`. The arguments come from CDI specs. For the hooks that NVIDIA's `nvidia-cdi-hook` also has,
//! `divvy-hook` accepts the same arguments.

use std::ffi::OsString;

use thiserror::Error as ThisError;

use super::compat::DIRECTORY;
use divvy_host::plain_line;

type Result<T, E = HookArgumentError> = std::result::Result<T, E>;

/// Invalid arguments.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
pub enum HookArgumentError {
    /// The command line is wrong.
    #[error("{0}; see divvy-hook --help")]
    Usage(String),
    /// The value of `--link` is wrong. The first part of the text is the same as NVIDIA's.
    #[error("invalid symlink specification {0}: use TARGET::LINK, where LINK begins with /")]
    Link(String),
}

/// The output of `--help`.
pub const HELP: &str = "\
Prepare a container in ways that mounts and device nodes cannot. A container runtime runs this program because a CDI spec
(divvy cdi generate --hooks minimal) or divvy-runtime (mode \"legacy\") names it as a hook. It reads the container's state from
standard input.

Usage: divvy-hook update-ldcache --folder DIR... [--host-driver-version VERSION] [--on-failure ignore|fail]
       divvy-hook enable-cuda-compat --host-driver-version VERSION [--cuda-compat-container-root DIR] [--on-failure ignore|fail]
       divvy-hook create-symlinks --link TARGET::LINK... [--on-failure ignore|fail]
       divvy-hook update-application-profile [--on-failure ignore|fail]
       divvy-hook disable-device-node-modification [--on-failure ignore|fail]
       divvy-hook legacy [--env NAME=VALUE]... -- nvidia-container-cli ARG...

  update-ldcache    Add the libraries that are mounted into these directories of the container to its /etc/ld.so.cache, so that a
                    loader that does not search the directories finds them. This program writes the file; it runs nothing of the
                    image. For musl's loader, add the directories to ld-musl-ARCH.path. With --host-driver-version, also do what
                    enable-cuda-compat does
  enable-cuda-compat
                    Let the loader find the image's own libcuda (/usr/local/cuda/compat) before the host's, if it was made for the
                    host's driver version or, where it does not say, if it is newer. This is CUDA's forward compatibility, which only
                    data center GPUs support. In a container with Divvy's guard, mount the guard over this libcuda. Call update-ldcache
                    afterwards
  create-symlinks   Create these links in the container, with the directories that they need
  update-application-profile
                    Limit EGL to the container's GPUs (/etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf)
  disable-device-node-modification
                    Stop the driver's libraries from creating device nodes in the container: mount a changed copy of
                    /proc/driver/nvidia/params over the original
  legacy            Run nvidia-container-cli with these arguments, the container's PID, and its root

  --on-failure      What to do if the image's files cannot be written (read-only, full): ignore (print a warning; the default) or fail

To try it: echo '{\"pid\":1,\"bundle\":\"/path\"}' | divvy-hook create-symlinks --link libcuda.so.1::/usr/lib64/libcuda.so
";

/// One call of the hook.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HookCall {
    /// Print [`HELP`].
    Help,
    /// Print the version.
    Version,
    /// A hook that this version does not know. The text is the beginning of its name, safe to print.
    Unknown(String),
    /// Add the libraries in some directories to the loader's cache, preceded by the image's own libcuda if it is preferred.
    UpdateLdcache {
        /// The directories in the container into which the libraries are mounted.
        directories: Vec<String>,
        /// The version of the host's driver. `None` if the image's own libcuda must not be preferred.
        host_driver: Option<String>,
        /// The absolute path of the directory in the image that contains the image's own libcuda.
        compat: String,
        /// The value of the last `--on-failure`.
        on_failure: OnFailure,
    },
    /// Limit EGL to the container's GPUs.
    UpdateApplicationProfile {
        /// The value of the last `--on-failure`.
        on_failure: OnFailure,
    },
    /// Stop the driver's libraries from creating device nodes.
    DisableDeviceNodeModification {
        /// The value of the last `--on-failure`.
        on_failure: OnFailure,
    },
    /// Create links, and the directories that they need.
    CreateSymlinks {
        /// The links in the order of the arguments.
        links: Vec<LinkArgument>,
        /// The value of the last `--on-failure`.
        on_failure: OnFailure,
    },
    /// Run `nvidia-container-cli` in place of this program.
    Legacy {
        /// The program's environment variables, as `NAME=VALUE`.
        environment: Vec<String>,
        /// The program and its arguments.
        words: Vec<OsString>,
    },
}

/// A link, written `TARGET::LINK` on the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkArgument {
    /// The link's target, which has a meaning only inside the container.
    pub target: String,
    /// The absolute path of the link.
    pub at: String,
}

impl LinkArgument {
    fn parse(text: &str) -> Result<LinkArgument> {
        let parts = text
            .split_once("::")
            .filter(|(target, at)| !target.is_empty() && at.starts_with('/'));
        let (target, at) = parts.ok_or_else(|| HookArgumentError::Link(plain_line(text.chars().take(200))))?;
        Ok(LinkArgument {
            target: target.to_owned(),
            at: at.to_owned(),
        })
    }
}

/// Whether the container starts if the hook could not write to its image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnFailure {
    /// The container starts, and the hook prints a warning.
    Ignore,
    /// The container does not start.
    Fail,
}

impl HookCall {
    /// Parse the arguments after the program's name.
    ///
    /// # Errors
    /// Fails with [`HookArgumentError`] on an unknown flag or an invalid value. An unknown hook is not an error: see [`HookCall::Unknown`].
    pub fn parse(words: &[OsString]) -> Result<HookCall> {
        let Some((name, rest)) = words.split_first() else {
            return Err(HookArgumentError::Usage("no hook is named".to_owned()));
        };
        let name = text(name)?;
        match name {
            "--help" | "-h" | "help" => Ok(HookCall::Help),
            "--version" | "-V" => Ok(HookCall::Version),
            "update-ldcache" => {
                let (directories, host_driver, on_failure) = lists(name, rest, "folder", &["host-driver-version"])?;
                Ok(HookCall::UpdateLdcache {
                    directories,
                    host_driver: host_driver.into_iter().next_back(),
                    compat: DIRECTORY.to_owned(),
                    on_failure,
                })
            }
            "enable-cuda-compat" => {
                // NVIDIA's hook also takes the host's CUDA version, which follows from the driver's version.
                let more = ["cuda-compat-container-root"];
                let (host_driver, directory, on_failure) = lists(name, rest, "host-driver-version", &more)?;
                let compat = directory.into_iter().next_back().unwrap_or_else(|| DIRECTORY.to_owned());
                // The path is written as a line of a file in the container, so it must not contain a newline.
                if compat.starts_with('/') && !compat.contains(char::is_control) {
                    Ok(HookCall::UpdateLdcache {
                        directories: Vec::new(),
                        host_driver: host_driver.into_iter().next_back(),
                        compat,
                        on_failure,
                    })
                } else {
                    Err(HookArgumentError::Usage(format!(
                        "--cuda-compat-container-root {}: an absolute path is required",
                        plain_line(compat.chars().take(200))
                    )))
                }
            }
            "disable-device-node-modification" => Ok(HookCall::DisableDeviceNodeModification {
                on_failure: on_failure(&values(name, rest, &["on-failure"])?)?,
            }),
            "update-application-profile" => Ok(HookCall::UpdateApplicationProfile {
                on_failure: on_failure(&values(name, rest, &["on-failure"])?)?,
            }),
            "create-symlinks" => {
                let (links, _, on_failure) = lists(name, rest, "link", &[])?;
                let links = links.iter().map(|link| LinkArgument::parse(link)).collect::<Result<_>>()?;
                Ok(HookCall::CreateSymlinks { links, on_failure })
            }
            "legacy" => {
                let end = rest.iter().position(|word| word == "--").unwrap_or(rest.len());
                let environment = values(name, &rest[..end], &["env"])?;
                let words = rest.get(end + 1..).unwrap_or_default().to_vec();
                if words.is_empty() {
                    Err(HookArgumentError::Usage("legacy: no program is named after --".to_owned()))
                } else {
                    Ok(HookCall::Legacy {
                        environment: environment.into_iter().map(|(_, value)| value).collect(),
                        words,
                    })
                }
            }
            name if name.starts_with('-') => {
                let name = plain_line(name.chars().take(100));
                Err(HookArgumentError::Usage(format!("unknown flag {name}")))
            }
            name => Ok(HookCall::Unknown(plain_line(name.chars().take(100)))),
        }
    }
}

/// Return the values of a required flag, the values of optional flags, and the value of `--on-failure`.
fn lists(hook: &str, words: &[OsString], flag: &str, others: &[&str]) -> Result<(Vec<String>, Vec<String>, OnFailure)> {
    let known: Vec<&str> = [flag, "on-failure"].iter().chain(others).copied().collect();
    let found = values(hook, words, &known)?;
    let on_failure = on_failure(&found)?;
    let (list, rest): (Vec<_>, Vec<_>) = found
        .into_iter()
        .filter(|(name, _)| name != "on-failure")
        .partition(|(name, _)| name == flag);
    let text = |list: Vec<(String, String)>| list.into_iter().map(|(_, value)| value).collect();
    if list.is_empty() {
        Err(HookArgumentError::Usage(format!("{hook} needs --{flag}")))
    } else {
        Ok((text(list), text(rest), on_failure))
    }
}

/// Return the value of the last `--on-failure`.
fn on_failure(found: &[(String, String)]) -> Result<OnFailure> {
    let mut on_failure = OnFailure::Ignore;
    for (_, value) in found.iter().filter(|(name, _)| name == "on-failure") {
        on_failure = match value.as_str() {
            "ignore" => OnFailure::Ignore,
            "fail" => OnFailure::Fail,
            other => {
                return Err(HookArgumentError::Usage(format!(
                    "--on-failure is {other:?}; use ignore or fail"
                )));
            }
        };
    }
    Ok(on_failure)
}

/// Return the flags with their values. A value may follow `=` or be the next argument.
fn values(hook: &str, words: &[OsString], known: &[&str]) -> Result<Vec<(String, String)>> {
    let mut found = Vec::new();
    let mut words = words.iter().peekable();
    while let Some(word) = words.next() {
        let word = text(word)?;
        let (name, value) = word.split_once('=').map_or((word, None), |(name, value)| (name, Some(value)));
        let is_known = name.strip_prefix("--").filter(|name| known.contains(name));
        let Some(name) = is_known else {
            return Err(HookArgumentError::Usage(format!("{hook} does not accept {word:?}")));
        };
        let value = match (value, words.next_if(|_| value.is_none())) {
            (Some(value), _) => value,
            (None, Some(next)) => text(next)?,
            (None, None) => return Err(HookArgumentError::Usage(format!("--{name} needs a value"))),
        };
        found.push((name.to_owned(), value.to_owned()));
    }
    Ok(found)
}

fn text(word: &std::ffi::OsStr) -> Result<&str> {
    word.to_str()
        .ok_or_else(|| HookArgumentError::Usage(format!("{word:?} is not valid UTF-8")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> String {
        let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        match HookCall::parse(&words) {
            Ok(hook) => format!("{hook:?}"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn the_words_of_nvidias_hook_are_understood_and_others_refused() {
        for (line, expected) in [
            (
                "update-ldcache --folder /a --folder=/b",
                "UpdateLdcache { directories: [\"/a\", \"/b\"], host_driver: None, compat: \"/usr/local/cuda/compat\", on_failure: Ignore }",
            ),
            (
                "update-ldcache --on-failure fail --folder /a",
                "UpdateLdcache { directories: [\"/a\"], host_driver: None, compat: \"/usr/local/cuda/compat\", on_failure: Fail }",
            ),
            (
                "create-symlinks --link a.so.1::/l/a.so",
                "CreateSymlinks { links: [LinkArgument { target: \"a.so.1\", at: \"/l/a.so\" }], on_failure: Ignore }",
            ),
            (
                "legacy --env A=b -- cli -x",
                "Legacy { environment: [\"A=b\"], words: [\"cli\", \"-x\"] }",
            ),
            (
                "enable-cuda-compat --host-driver-version=535.1 --cuda-compat-container-root /c",
                "UpdateLdcache { directories: [], host_driver: Some(\"535.1\"), compat: \"/c\", on_failure: Ignore }",
            ),
            (
                "update-application-profile --on-failure=fail",
                "UpdateApplicationProfile { on_failure: Fail }",
            ),
            ("chmod --mode 755", "Unknown(\"chmod\")"),
            ("--help", "Help"),
        ] {
            assert_eq!(parsed(line), expected, "{line}");
        }
        for (line, part) in [
            ("create-symlinks --link a", "invalid symlink specification a"),
            ("create-symlinks --link a::b", "invalid symlink specification a::b"),
            ("create-symlinks", "create-symlinks needs --link"),
            ("update-ldcache --folder", "--folder needs a value"),
            (
                "update-ldcache --ldconfig-path /x --folder /a",
                "update-ldcache does not accept \"--ldconfig-path\"",
            ),
            ("update-ldcache --folder /a --on-failure no", "use ignore or fail"),
            ("enable-cuda-compat", "enable-cuda-compat needs --host-driver-version"),
            (
                "update-application-profile --x 1",
                "update-application-profile does not accept \"--x\"",
            ),
            ("legacy --env A=b", "no program is named after --"),
            ("--bogus", "unknown flag --bogus"),
        ] {
            let found = parsed(line);
            assert!(found.contains(part), "{line}: {found}");
        }
        assert!(HookCall::parse(&[]).is_err());
    }

    /// The messages contain no control sequences for a terminal.
    #[test]
    fn messages_about_a_specs_words_have_one_line() {
        for line in [
            "create-symlinks --link a\n\u{1b}[2J",
            "enable-cuda-compat --host-driver-version 1 --cuda-compat-container-root /a\n/b",
            "update-ldcache --folder /a --on-failure \u{1b}",
            "--bo\ngus",
            "chm\u{7}od",
        ] {
            let found = parsed(line);
            assert!(!found.contains(char::is_control), "{found:?}");
        }
    }
}
