//! The command line of `divvy-hook`; its words come from CDI specs, and are those of NVIDIA's `nvidia-cdi-hook` where both do the same.

use std::ffi::OsString;

use thiserror::Error as ThisError;

use super::compat::FOLDER;
use divvy_host::plain_line;

type Result<T, E = Error> = std::result::Result<T, E>;

/// Words that are none of a hook's.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
pub enum Error {
    /// Of the command line.
    #[error("{0}; divvy-hook --help tells the rest")]
    Usage(String),
    /// What is to be a link.
    #[error("invalid symlink specification {0}: TARGET::LINK is one, and LINK begins with /")]
    Link(String),
}

/// What `--help` prints.
pub const HELP: &str = "\
What a container needs that mounts and device nodes do not give it. Container runtimes run this program, because a CDI spec says so
(divvy cdi generate --hooks minimal) or divvy-runtime does (mode \"legacy\"); the container's state is read from standard input.

Usage: divvy-hook update-ldcache --folder FOLDER... [--host-driver-version VERSION] [--on-failure ignore|fail]
       divvy-hook enable-cuda-compat --host-driver-version VERSION [--cuda-compat-container-root FOLDER] [--on-failure ignore|fail]
       divvy-hook create-symlinks --link TARGET::LINK... [--on-failure ignore|fail]
       divvy-hook update-application-profile [--on-failure ignore|fail]
       divvy-hook disable-device-node-modification [--on-failure ignore|fail]
       divvy-hook legacy [--env NAME=VALUE]... -- nvidia-container-cli WORD...

  update-ldcache    Puts the libraries that are mounted into these folders of the container into its /etc/ld.so.cache, so that a
                    loader that does not search the folders finds them. The file is written here; nothing of the image is run.
                    musl's loader gets the folders in its ld-musl-ARCH.path. With --host-driver-version, enable-cuda-compat, too
  enable-cuda-compat
                    Puts the image's own libcuda (/usr/local/cuda/compat) before the machine's, if it is newer than that driver and made
                    for it: CUDA's forward compatibility, which GPUs of data centres have and others refuse. After update-ldcache
  create-symlinks   Makes these links in the container, with the folders that they need
  update-application-profile
                    Tells EGL in the container which GPUs it has (/etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf)
  disable-device-node-modification
                    The driver's libraries make no device nodes in the container: a copy of /proc/driver/nvidia/params that says so
                    is mounted over it
  legacy            Becomes nvidia-container-cli with the container's process and root added to its words

  --on-failure      What happens if the image's files cannot be written (read-only, full): ignore (a warning; the default) or fail

By hand: echo '{\"pid\":1,\"bundle\":\"/path\"}' | divvy-hook create-symlinks --link libcuda.so.1::/usr/lib64/libcuda.so
";

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hook {
    /// `--help`
    Help,
    /// `--version`
    Version,
    /// What this version does not know: the beginning of its name, for a terminal.
    Unknown(String),
    /// Folders' libraries into the loader's cache, and the image's own libcuda before them.
    UpdateLdcache {
        /// Into which the libraries are mounted.
        folders: Vec<String>,
        /// The machine's driver, if the image's own libcuda may take its place.
        host_driver: Option<String>,
        /// Where the image has its own: a whole path.
        compat: String,
        /// The last one said.
        on_failure: OnFailure,
    },
    /// Which GPUs EGL has.
    UpdateApplicationProfile {
        /// The last one said.
        on_failure: OnFailure,
    },
    /// The driver's libraries make no device nodes.
    DisableDeviceNodeModification {
        /// The last one said.
        on_failure: OnFailure,
    },
    /// Links with the folders that they need.
    CreateSymlinks {
        /// In the order in which they are said.
        links: Vec<Link>,
        /// The last one said.
        on_failure: OnFailure,
    },
    /// Becomes `nvidia-container-cli`.
    Legacy {
        /// `NAME=VALUE`
        environment: Vec<String>,
        /// The program and its words.
        words: Vec<OsString>,
    },
}

/// `TARGET::LINK`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// What it leads to: means something in the container only.
    pub target: String,
    /// Where it is: a whole path.
    pub at: String,
}

impl Link {
    fn parse(text: &str) -> Result<Link> {
        let parts = text
            .split_once("::")
            .filter(|(target, at)| !target.is_empty() && at.starts_with('/'));
        let (target, at) = parts.ok_or_else(|| Error::Link(plain_line(text.chars().take(200))))?;
        Ok(Link {
            target: target.to_owned(),
            at: at.to_owned(),
        })
    }
}

/// Whether a container starts whose image could not be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnFailure {
    /// With a warning.
    Ignore,
    /// It does not.
    Fail,
}

impl Hook {
    /// Reads the words after the program's name.
    ///
    /// # Errors
    /// A flag that is not known, or a value that is none; not the name of a hook that is not known.
    pub fn parse(words: &[OsString]) -> Result<Hook> {
        let Some((name, rest)) = words.split_first() else {
            return Err(Error::Usage("which hook is to be run is not said".to_owned()));
        };
        let name = text(name)?;
        match name {
            "--help" | "-h" | "help" => Ok(Hook::Help),
            "--version" | "-V" => Ok(Hook::Version),
            "update-ldcache" => {
                let (folders, host_driver, on_failure) = lists(name, rest, "folder", &["host-driver-version"])?;
                Ok(Hook::UpdateLdcache {
                    folders,
                    host_driver: host_driver.into_iter().next_back(),
                    compat: FOLDER.to_owned(),
                    on_failure,
                })
            }
            "enable-cuda-compat" => {
                // The machine's CUDA version says no more than its driver's.
                let more = ["cuda-compat-container-root"];
                let (host_driver, folder, on_failure) = lists(name, rest, "host-driver-version", &more)?;
                let compat = folder.into_iter().next_back().unwrap_or_else(|| FOLDER.to_owned());
                // It becomes a line of a file of the container.
                match compat.starts_with('/') && !compat.contains(char::is_control) {
                    false => Err(Error::Usage(format!(
                        "--cuda-compat-container-root {}: a whole path is needed",
                        plain_line(compat.chars().take(200))
                    ))),
                    true => Ok(Hook::UpdateLdcache {
                        folders: Vec::new(),
                        host_driver: host_driver.into_iter().next_back(),
                        compat,
                        on_failure,
                    }),
                }
            }
            "disable-device-node-modification" => Ok(Hook::DisableDeviceNodeModification {
                on_failure: on_failure(&values(name, rest, &["on-failure"])?)?,
            }),
            "update-application-profile" => Ok(Hook::UpdateApplicationProfile {
                on_failure: on_failure(&values(name, rest, &["on-failure"])?)?,
            }),
            "create-symlinks" => {
                let (links, _, on_failure) = lists(name, rest, "link", &[])?;
                let links = links.iter().map(|link| Link::parse(link)).collect::<Result<_>>()?;
                Ok(Hook::CreateSymlinks { links, on_failure })
            }
            "legacy" => {
                let end = rest.iter().position(|word| word == "--").unwrap_or(rest.len());
                let environment = values(name, &rest[..end], &["env"])?;
                let words = rest.get(end + 1..).unwrap_or_default().to_vec();
                match words.is_empty() {
                    true => Err(Error::Usage(
                        "legacy: which program is to be run is not said after --".to_owned(),
                    )),
                    false => Ok(Hook::Legacy {
                        environment: environment.into_iter().map(|(_, value)| value).collect(),
                        words,
                    }),
                }
            }
            name if name.starts_with('-') => {
                let name = plain_line(name.chars().take(100));
                Err(Error::Usage(format!("{name} is no flag of divvy-hook")))
            }
            name => Ok(Hook::Unknown(plain_line(name.chars().take(100)))),
        }
    }
}

/// The values of one flag, of which there is one at least, of others, and of `--on-failure`.
fn lists(hook: &str, words: &[OsString], flag: &str, others: &[&str]) -> Result<(Vec<String>, Vec<String>, OnFailure)> {
    let known: Vec<&str> = [flag, "on-failure"].iter().chain(others).copied().collect();
    let found = values(hook, words, &known)?;
    let on_failure = on_failure(&found)?;
    let (list, rest): (Vec<_>, Vec<_>) = found
        .into_iter()
        .filter(|(name, _)| name != "on-failure")
        .partition(|(name, _)| name == flag);
    let text = |list: Vec<(String, String)>| list.into_iter().map(|(_, value)| value).collect();
    match list.is_empty() {
        true => Err(Error::Usage(format!("{hook} needs --{flag}"))),
        false => Ok((text(list), text(rest), on_failure)),
    }
}

/// The last `--on-failure`.
fn on_failure(found: &[(String, String)]) -> Result<OnFailure> {
    let mut on_failure = OnFailure::Ignore;
    for (_, value) in found.iter().filter(|(name, _)| name == "on-failure") {
        on_failure = match value.as_str() {
            "ignore" => OnFailure::Ignore,
            "fail" => OnFailure::Fail,
            other => return Err(Error::Usage(format!("--on-failure is {other:?}; there are ignore and fail"))),
        };
    }
    Ok(on_failure)
}

/// Flags with a value, which may stand behind `=`.
fn values(hook: &str, words: &[OsString], known: &[&str]) -> Result<Vec<(String, String)>> {
    let mut found = Vec::new();
    let mut words = words.iter().peekable();
    while let Some(word) = words.next() {
        let word = text(word)?;
        let (name, value) = word.split_once('=').map_or((word, None), |(name, value)| (name, Some(value)));
        let is_known = name.strip_prefix("--").filter(|name| known.contains(name));
        let Some(name) = is_known else {
            return Err(Error::Usage(format!("{hook} knows no {word:?}")));
        };
        let value = match (value, words.next_if(|_| value.is_none())) {
            (Some(value), _) => value,
            (None, Some(next)) => text(next)?,
            (None, None) => return Err(Error::Usage(format!("--{name} needs a value"))),
        };
        found.push((name.to_owned(), value.to_owned()));
    }
    Ok(found)
}

fn text(word: &std::ffi::OsStr) -> Result<&str> {
    word.to_str().ok_or_else(|| Error::Usage(format!("{word:?} is no text")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> String {
        let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        match Hook::parse(&words) {
            Ok(hook) => format!("{hook:?}"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn the_words_of_nvidias_hook_are_understood_and_others_refused() {
        for (line, expected) in [
            (
                "update-ldcache --folder /a --folder=/b",
                "UpdateLdcache { folders: [\"/a\", \"/b\"], host_driver: None, compat: \"/usr/local/cuda/compat\", on_failure: Ignore }",
            ),
            (
                "update-ldcache --on-failure fail --folder /a",
                "UpdateLdcache { folders: [\"/a\"], host_driver: None, compat: \"/usr/local/cuda/compat\", on_failure: Fail }",
            ),
            (
                "create-symlinks --link a.so.1::/l/a.so",
                "CreateSymlinks { links: [Link { target: \"a.so.1\", at: \"/l/a.so\" }], on_failure: Ignore }",
            ),
            (
                "legacy --env A=b -- cli -x",
                "Legacy { environment: [\"A=b\"], words: [\"cli\", \"-x\"] }",
            ),
            (
                "enable-cuda-compat --host-driver-version=535.1 --cuda-compat-container-root /c",
                "UpdateLdcache { folders: [], host_driver: Some(\"535.1\"), compat: \"/c\", on_failure: Ignore }",
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
                "update-ldcache knows no \"--ldconfig-path\"",
            ),
            ("update-ldcache --folder /a --on-failure no", "there are ignore and fail"),
            ("enable-cuda-compat", "enable-cuda-compat needs --host-driver-version"),
            (
                "update-application-profile --x 1",
                "update-application-profile knows no \"--x\"",
            ),
            ("legacy --env A=b", "is not said after --"),
            ("--bogus", "is no flag"),
        ] {
            let found = parsed(line);
            assert!(found.contains(part), "{line}: {found}");
        }
        assert!(Hook::parse(&[]).is_err());
    }

    #[test]
    fn what_is_said_of_a_specs_words_is_one_line_without_orders_to_a_terminal() {
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
