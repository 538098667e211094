//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};

use crate::mounts::Mount;

const USAGE: &str = "usage: divvy-contain [--mount FILE PATH | --read-only FILE PATH]... ROOT PROGRAM [ARGUMENT]...
       divvy-contain --check

ROOT is an empty directory, which becomes the program's root directory. FILE on the machine, also a directory, is at PATH in the container.
--check reports whether this machine allows that.";

/// What to do.
#[derive(Debug, PartialEq)]
pub(crate) enum Arguments {
    /// Make a namespace and nothing in it.
    Check,
    /// Start a program.
    Run(Task),
}

/// A program in a container.
#[derive(Debug, PartialEq)]
pub(crate) struct Task {
    pub(crate) mounts: Vec<Mount>,
    pub(crate) root: PathBuf,
    pub(crate) program: PathBuf,
    pub(crate) arguments: Vec<OsString>,
}

impl Arguments {
    pub(crate) fn parse(words: impl IntoIterator<Item = OsString>) -> Result<Arguments> {
        let mut words = words.into_iter();
        let mut mounts = Vec::new();
        let root = loop {
            let word = words.next().context(USAGE)?;
            let read_only = match word.to_str() {
                Some("--check") => return Ok(Arguments::Check),
                Some("--mount") => false,
                Some("--read-only") => true,
                Some(flag) if flag.starts_with('-') => bail!("{flag:?} is unknown; {USAGE}"),
                _ => break word,
            };
            let mut path = || words.next().map(PathBuf::from).context(USAGE);
            mounts.push(Mount {
                host: path()?,
                container: path()?,
                read_only,
            });
        };
        Ok(Arguments::Run(Task {
            mounts,
            root: root.into(),
            program: words.next().context(USAGE)?.into(),
            arguments: words.collect(),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Arguments> {
        Arguments::parse(line.split_whitespace().map(OsString::from))
    }

    #[test]
    fn the_flags_before_the_root_are_ours_and_what_follows_the_program_is_its_own() {
        let mount = |host: &str, container: &str, read_only| Mount {
            host: host.into(),
            container: container.into(),
            read_only,
        };
        let parsed = parse("--mount /a:1 /b --read-only /c /d /root /bin/x --mount 1").expect("valid");
        let expected = Task {
            mounts: vec![mount("/a:1", "/b", false), mount("/c", "/d", true)],
            root: "/root".into(),
            program: "/bin/x".into(),
            arguments: vec!["--mount".into(), "1".into()],
        };
        assert_eq!(parsed, Arguments::Run(expected));
        assert_eq!(parse("--check").expect("valid"), Arguments::Check);
        for line in ["", "/root", "--mount /a", "--mount /a /b", "--bogus /root /bin/x"] {
            let error = parse(line).expect_err("refused").to_string();
            assert!(error.contains("usage:"), "{line:?}: {error}");
        }
    }
}
