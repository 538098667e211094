//! The names of the plugin's sockets, and the removal of sockets that earlier processes left behind.

use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use super::PluginSettings;
use crate::{Error, Result};

/// The maximum length of a Unix socket's path in bytes: `sockaddr_un.sun_path` has 108 bytes, including the NUL.
const MAX_PATH: usize = 107;
const SUFFIX: usize = 6;
const DIGITS: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";

/// Gives every socket a different name, so that a new process or listener is never mistaken for its predecessor. If the name is
/// fixed, all sockets have the same name.
#[derive(Debug)]
pub(super) struct SocketNames {
    prefix: String,
    is_fixed: bool,
    last: u64,
}

impl SocketNames {
    /// Check that the prefix is valid in a file name, and that the paths fit into a socket address.
    pub(super) fn new(settings: &PluginSettings) -> Result<Self> {
        let prefix = &settings.socket_prefix;
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
        if prefix.is_empty() || !prefix.bytes().all(plain) {
            return Err(Error::SocketPrefix { prefix: prefix.clone() });
        }
        let names = Self {
            prefix: prefix.clone(),
            is_fixed: settings.is_socket_fixed,
            last: 0,
        };
        for path in [settings.device_plugin_dir.join(names.with_suffix(0)), settings.kubelet_path()] {
            let bytes = path.as_os_str().as_bytes().len();
            if bytes > MAX_PATH {
                return Err(Error::PathTooLong { path, bytes });
            }
        }
        Ok(names)
    }

    /// Return the name for a socket that is created at this time (in milliseconds since 1970). Unless the name is fixed, it never
    /// repeats within a process, and names of earlier processes do not repeat for 25 days.
    pub(super) fn next(&mut self, now: u64) -> String {
        self.last = now.max(self.last + 1);
        self.with_suffix(self.last)
    }

    fn with_suffix(&self, mut number: u64) -> String {
        if self.is_fixed {
            return format!("{}.sock", self.prefix);
        }
        let mut suffix = [0_u8; SUFFIX];
        for place in suffix.iter_mut().rev() {
            *place = DIGITS[(number % 36) as usize];
            number /= 36;
        }
        format!("{}-{}.sock", self.prefix, String::from_utf8_lossy(&suffix))
    }

    fn is_ours(&self, name: &str) -> bool {
        if self.is_fixed {
            return name == self.with_suffix(0);
        }
        name.strip_prefix(&self.prefix)
            .and_then(|rest| rest.strip_prefix('-'))
            .and_then(|rest| rest.strip_suffix(".sock"))
            .is_some_and(|suffix| suffix.len() == SUFFIX && suffix.bytes().all(|byte| DIGITS.contains(&byte)))
    }

    /// Remove the sockets of killed processes. Call this only while no other process uses this prefix.
    pub(super) fn remove_stale(&self, directory: &Path) -> io::Result<Vec<PathBuf>> {
        let mut removed = Vec::new();
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            if entry.file_name().to_str().is_some_and(|name| self.is_ours(name)) && entry.file_type()?.is_socket() {
                match fs::remove_file(entry.path()) {
                    Ok(()) => removed.push(entry.path()),
                    // The kubelet also removes sockets.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    Err(error) => return Err(error),
                }
            }
        }
        removed.sort();
        Ok(removed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    fn names(directory: impl AsRef<Path>, prefix: &str) -> Result<SocketNames> {
        SocketNames::new(&PluginSettings::new(directory.as_ref(), prefix))
    }

    #[test]
    fn socket_names_never_repeat_whatever_the_clock_does() -> Result<()> {
        let mut names = names(Path::new("/d"), "p")?;
        let given = [names.next(1_795_253_400_000), names.next(1_795_253_400_000), names.next(5)];
        assert_eq!(given[0].len(), "p-abcdef.sock".len());
        assert!(
            given[0] != given[1] && given[1] != given[2] && given[0] != given[2],
            "{given:?}"
        );
        Ok(())
    }

    #[test]
    fn a_path_too_long_for_a_socket_is_refused_with_its_length() {
        // prefix-xxxxxx.sock: 18 bytes after the directory and its slash.
        let fits = format!("/{}", "d".repeat(MAX_PATH - 20));
        assert!(names(Path::new(&fits), "prefix").is_ok());
        let text = names(Path::new(&format!("{fits}d")), "prefix")
            .expect_err("one byte too long")
            .to_string();
        assert!(text.contains("has 108 bytes") && text.contains("at most 107"), "{text}");
        // A short prefix does not help if kubelet.sock itself does not fit.
        assert!(names(Path::new(&format!("/{}", "d".repeat(200))), "p").is_err());
    }

    #[test]
    fn a_prefix_that_is_no_file_name_is_refused() {
        for prefix in ["", "a/b", "a b", "ü"] {
            assert!(names(Path::new("/d"), prefix).is_err(), "{prefix:?}");
        }
    }

    #[test]
    fn only_stale_sockets_of_this_very_prefix_are_removed() -> std::result::Result<(), Box<dyn std::error::Error>> {
        let dir = tempfile::tempdir()?;
        for name in [
            "mem-abc123.sock",
            "mem-000000.sock",
            "mem-x-abc123.sock",
            "mem.sock",
            "kubelet.sock",
            "other-abc123.sock",
        ] {
            drop(UnixListener::bind(dir.path().join(name))?);
        }
        fs::write(dir.path().join("mem-abc124.sock"), "a regular file")?;
        let removed = names(dir.path(), "mem")?.remove_stale(dir.path())?;
        assert_eq!(
            removed,
            [dir.path().join("mem-000000.sock"), dir.path().join("mem-abc123.sock")]
        );
        assert_eq!(fs::read_dir(dir.path())?.count(), 5);
        let mut fixed = SocketNames::new(&PluginSettings {
            is_socket_fixed: true,
            ..PluginSettings::new(dir.path(), "mem")
        })?;
        assert_eq!((fixed.next(1), fixed.next(2)), ("mem.sock".to_owned(), "mem.sock".to_owned()));
        assert_eq!(fixed.remove_stale(dir.path())?, [dir.path().join("mem.sock")]);
        Ok(())
    }
}
