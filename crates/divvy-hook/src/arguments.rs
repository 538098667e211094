//! The command line; its words come from CDI specs, and are those of NVIDIA's `nvidia-cdi-hook` where both do the same.

use std::ffi::OsString;

use crate::error::{Error, Result};
use crate::links::Link;

pub(crate) const HELP: &str = "\
What a container needs that mounts and device nodes do not give it. Container runtimes run this program, because a CDI spec says so
(divvy cdi generate --hooks minimal) or divvy-runtime does (mode \"legacy\"); the container's state is read from standard input.

Usage: divvy-hook update-ldcache --folder FOLDER... [--on-failure ignore|fail]
       divvy-hook create-symlinks --link TARGET::LINK... [--on-failure ignore|fail]
       divvy-hook legacy [--env NAME=VALUE]... -- nvidia-container-cli WORD...

  update-ldcache    Puts the libraries that are mounted into these folders of the container into its /etc/ld.so.cache, so that a
                    loader that does not search the folders finds them. The file is written here; nothing of the image is run
  create-symlinks   Makes these links in the container, with the folders that they need
  legacy            Becomes nvidia-container-cli with the container's process and root added to its words

  --on-failure      What happens if the image's files cannot be written (read-only, full): ignore (a warning; the default) or fail

By hand: echo '{\"pid\":1,\"bundle\":\"/path\"}' | divvy-hook create-symlinks --link libcuda.so.1::/usr/lib64/libcuda.so
";

/// What is to be done.
#[derive(Debug)]
pub(crate) enum Hook {
    Help,
    Version,
    /// What this version does not know.
    Unknown(String),
    UpdateLdcache {
        folders: Vec<String>,
        on_failure: OnFailure,
    },
    CreateSymlinks {
        links: Vec<Link>,
        on_failure: OnFailure,
    },
    Legacy {
        environment: Vec<String>,
        words: Vec<OsString>,
    },
}

/// Whether a container starts whose image could not be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OnFailure {
    Ignore,
    Fail,
}

impl Hook {
    /// Reads the words after the program's name.
    pub(crate) fn parse(words: &[OsString]) -> Result<Hook> {
        let Some((name, rest)) = words.split_first() else {
            return Err(Error::Usage("which hook is to be run is not said".to_owned()));
        };
        let name = text(name)?;
        match name {
            "--help" | "-h" | "help" => Ok(Hook::Help),
            "--version" | "-V" => Ok(Hook::Version),
            "update-ldcache" => {
                let (folders, on_failure) = lists(name, rest, "folder")?;
                Ok(Hook::UpdateLdcache { folders, on_failure })
            }
            "create-symlinks" => {
                let (links, on_failure) = lists(name, rest, "link")?;
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
            name if name.starts_with('-') => Err(Error::Usage(format!("{name} is no flag of divvy-hook"))),
            name => Ok(Hook::Unknown(name.chars().take(100).collect())),
        }
    }
}

/// The values of one flag, and of `--on-failure`.
fn lists(hook: &str, words: &[OsString], flag: &str) -> Result<(Vec<String>, OnFailure)> {
    let mut list = Vec::new();
    let mut on_failure = OnFailure::Ignore;
    for (name, value) in values(hook, words, &[flag, "on-failure"])? {
        match (name.as_str(), value.as_str()) {
            ("on-failure", "ignore") => on_failure = OnFailure::Ignore,
            ("on-failure", "fail") => on_failure = OnFailure::Fail,
            ("on-failure", other) => return Err(Error::Usage(format!("--on-failure is {other:?}; there are ignore and fail"))),
            _ => list.push(value),
        }
    }
    match list.is_empty() {
        true => Err(Error::Usage(format!("{hook} needs --{flag}"))),
        false => Ok((list, on_failure)),
    }
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
                "UpdateLdcache { folders: [\"/a\", \"/b\"], on_failure: Ignore }",
            ),
            (
                "update-ldcache --on-failure fail --folder /a",
                "UpdateLdcache { folders: [\"/a\"], on_failure: Fail }",
            ),
            (
                "create-symlinks --link a.so.1::/l/a.so",
                "CreateSymlinks { links: [Link { target: \"a.so.1\", at: \"/l/a.so\" }], on_failure: Ignore }",
            ),
            (
                "legacy --env A=b -- cli -x",
                "Legacy { environment: [\"A=b\"], words: [\"cli\", \"-x\"] }",
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
            ("legacy --env A=b", "is not said after --"),
            ("--bogus", "is no flag"),
        ] {
            let found = parsed(line);
            assert!(found.contains(part), "{line}: {found}");
        }
        assert!(Hook::parse(&[]).is_err());
    }
}
