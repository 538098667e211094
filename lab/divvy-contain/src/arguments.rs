//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};

use crate::mounts::BindMount;

const USAGE: &str = "usage: divvy-contain [--image DIRECTORY] [--mount FILE PATH | --read-only FILE PATH | --link TARGET PATH]... ROOT PROGRAM [ARGUMENT]...
       divvy-contain --check

ROOT is an empty directory, which becomes the program's root directory. FILE on the machine, also a directory, is at PATH in the container.
--link makes a symbolic link. Without --image, PROGRAM is a file of the machine, and the container has only it and its C library. With --image, PROGRAM is in
the container, which has the files of DIRECTORY; what the container writes is gone when it ends. --check reports whether this machine allows that.";

/// What to do.
#[derive(Debug, PartialEq)]
pub(crate) enum ContainArguments {
    /// Make a namespace and nothing in it.
    Check,
    /// Start a program.
    Run(ContainerTask),
}

/// A program in a container.
#[derive(Debug, PartialEq)]
pub(crate) struct ContainerTask {
    /// The image's root file system; `None`: the program and its C library are the image.
    pub(crate) image: Option<PathBuf>,
    pub(crate) mounts: Vec<BindMount>,
    /// Symbolic links: the target, and the path in the container.
    pub(crate) links: Vec<(PathBuf, PathBuf)>,
    pub(crate) root: PathBuf,
    pub(crate) program: PathBuf,
    pub(crate) arguments: Vec<OsString>,
}

impl ContainArguments {
    pub(crate) fn parse(words: impl IntoIterator<Item = OsString>) -> Result<ContainArguments> {
        let mut words = words.into_iter();
        let (mut image, mut mounts, mut links) = (None, Vec::new(), Vec::new());
        let root = loop {
            let word = words.next().context(USAGE)?;
            let mut path = || words.next().map(PathBuf::from).context(USAGE);
            match word.to_str() {
                Some("--check") => return Ok(ContainArguments::Check),
                Some("--image") => image = Some(path()?),
                Some("--link") => links.push((path()?, path()?)),
                Some(flag @ ("--mount" | "--read-only")) => mounts.push(BindMount {
                    host: path()?,
                    container: path()?,
                    read_only: flag == "--read-only",
                }),
                Some(flag) if flag.starts_with('-') => bail!("{flag:?} is unknown; {USAGE}"),
                _ => break word,
            }
        };
        Ok(ContainArguments::Run(ContainerTask {
            image,
            mounts,
            links,
            root: root.into(),
            program: words.next().context(USAGE)?.into(),
            arguments: words.collect(),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<ContainArguments> {
        ContainArguments::parse(line.split_whitespace().map(OsString::from))
    }

    /// All arguments after the program belong to the program.
    #[test]
    fn only_flags_before_the_root_are_ours() {
        let mount = |host: &str, container: &str, read_only| BindMount {
            host: host.into(),
            container: container.into(),
            read_only,
        };
        let parsed = parse("--mount /a:1 /b --image /i --read-only /c /d --link t /l /root /bin/x --mount 1").expect("valid");
        let expected = ContainerTask {
            image: Some("/i".into()),
            links: vec![("t".into(), "/l".into())],
            mounts: vec![mount("/a:1", "/b", false), mount("/c", "/d", true)],
            root: "/root".into(),
            program: "/bin/x".into(),
            arguments: vec!["--mount".into(), "1".into()],
        };
        assert_eq!(parsed, ContainArguments::Run(expected));
        assert_eq!(parse("--check").expect("valid"), ContainArguments::Check);
        for line in [
            "",
            "/root",
            "--mount /a",
            "--mount /a /b",
            "--link /a",
            "--image",
            "--bogus /root /bin/x",
        ] {
            let error = parse(line).expect_err("refused").to_string();
            assert!(error.contains("usage:"), "{line:?}: {error}");
        }
    }
}
