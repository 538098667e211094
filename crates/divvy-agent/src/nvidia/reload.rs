//! Reads the configuration, and reads it again when it may have changed.

use std::fmt;
use std::fs::OpenOptions;
use std::io::{self, Read as _};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use divvy_nvidia_config::NvidiaConfig;
use rustix::fs::OFlags;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{Interval, MissedTickBehavior};
use tracing::warn;

/// A configuration that has been read.
#[derive(Debug, Clone)]
pub struct LoadedConfig {
    /// The configuration.
    pub config: NvidiaConfig,
    /// Warnings about the configuration for the operator.
    pub warnings: Vec<String>,
}

/// Why there is no configuration.
#[derive(Debug, thiserror::Error)]
pub(super) enum LoadError {
    #[error(
        "unable to load config: unable to finalize config: unable to parse config file: {0}; check --config-file, and that the ConfigMap is mounted"
    )]
    File(#[from] Unreadable),
    #[error(transparent)]
    Content(#[from] divvy_nvidia_config::Error),
}

/// Why the file cannot be read, in NVIDIA's words.
#[derive(Debug, thiserror::Error)]
pub(super) enum Unreadable {
    #[error("error opening config file: open {path}: {}", plainly(.source))]
    Open { path: String, source: io::Error },
    #[error("error parsing config file: read error: read {path}: {}", plainly(.source))]
    Read { path: String, source: io::Error },
    #[error("error parsing config file: read error: read {0}: it is a FIFO, which cannot be read again")]
    Fifo(String),
    #[error("error parsing config file: read error: read {0}: it is larger than 1 MiB")]
    Large(String),
}

/// Parses the text of the configuration file, which is `None` if there is no file.
type Parse = Arc<dyn Fn(Option<&str>) -> Result<LoadedConfig, divvy_nvidia_config::Error> + Send + Sync>;

/// Where the configuration comes from.
#[derive(Clone)]
pub struct ConfigSource {
    file: Option<PathBuf>,
    parse: Parse,
}

impl fmt::Debug for ConfigSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Source").field("file", &self.file).finish_non_exhaustive()
    }
}

/// The interval at which the file is checked. The file is usually a ConfigMap, which the kubelet itself updates once a minute.
const LOOK: Duration = Duration::from_secs(2);
/// The maximum size of the file in bytes, which is the limit of a ConfigMap.
const BYTES: u64 = 1 << 20;

impl ConfigSource {
    /// Create a source from the path of the configuration file, if there is one, and a function that parses its text.
    pub fn new(
        file: Option<PathBuf>,
        parse: impl Fn(Option<&str>) -> Result<LoadedConfig, divvy_nvidia_config::Error> + Send + Sync + 'static,
    ) -> ConfigSource {
        ConfigSource {
            file,
            parse: Arc::new(parse),
        }
    }

    /// Read the configuration.
    pub(super) fn load(&self) -> Result<LoadedConfig, LoadError> {
        Ok((self.parse)(self.read()?.as_deref())?)
    }

    fn read(&self) -> Result<Option<String>, Unreadable> {
        let Some(file) = &self.file else { return Ok(None) };
        let path = file.display().to_string();
        let mut text = String::new();
        // The file of a ConfigMap is a symbolic link. Without O_NONBLOCK, a FIFO would stop the program until it has a writer.
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        let opened = match OpenOptions::new().read(true).custom_flags(flags).open(file) {
            Ok(opened) => opened,
            Err(source) => return Err(Unreadable::Open { path, source }),
        };
        if opened.metadata().is_ok_and(|about| about.file_type().is_fifo()) {
            return Err(Unreadable::Fifo(path));
        }
        match opened.take(BYTES + 1).read_to_string(&mut text) {
            Ok(size) if size as u64 > BYTES => Err(Unreadable::Large(path)),
            Ok(_) => Ok(Some(text)),
            Err(source) => Err(Unreadable::Read { path, source }),
        }
    }

    /// Watch for SIGHUP and for changes of the file's content.
    pub(super) fn watch(&self) -> Reloads {
        let mut tick = tokio::time::interval(LOOK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Reloads {
            source: self.clone(),
            known: self.read().ok().flatten(),
            hangup: signal(SignalKind::hangup())
                .inspect_err(|error| warn!("cannot receive SIGHUP: {error}"))
                .ok(),
            tick,
        }
    }
}

/// Return an error of the system as Go writes it: `no such file or directory`.
fn plainly(error: &io::Error) -> String {
    let text = error.to_string();
    let text = text.split(" (os error").next().unwrap_or(&text);
    let mut letters = text.chars();
    letters
        .next()
        .map_or_else(String::new, |first| first.to_lowercase().chain(letters).collect())
}

/// Tells when to read the configuration again.
#[derive(Debug)]
pub(super) struct Reloads {
    source: ConfigSource,
    known: Option<String>,
    hangup: Option<Signal>,
    tick: Interval,
}

impl Reloads {
    /// Wait for SIGHUP or for a change of the file's content. Cancel-safe.
    pub(super) async fn changed(&mut self) {
        loop {
            let hangup = async {
                match &mut self.hangup {
                    Some(hangup) => hangup.recv().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                _ = hangup => {
                    self.known = self.source.read().ok().flatten();
                    return;
                }
                _ = self.tick.tick() => {}
            }
            // While a ConfigMap is replaced, its file can be missing for a moment.
            if let Ok(now @ Some(_)) = self.source.read()
                && now != self.known
            {
                self.known = now;
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    /// An unusable file is refused at once.
    #[test]
    fn unusable_files_are_refused_and_dev_null_is_read() {
        let directory = tempfile::tempdir().expect("a directory");
        let at = |name: &str| directory.path().join(name);
        mknodat(CWD, at("fifo"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("made");
        std::fs::write(at("binary"), [0xff, 0xfe]).expect("written");
        let large = std::fs::File::create(at("large")).expect("created");
        large.set_len(100 << 20).expect("a sparse file");
        std::os::unix::fs::symlink(at("good"), at("link")).expect("linked");
        std::fs::write(at("good"), "version: v1\n").expect("written");
        let never = |_: Option<&str>| Err(divvy_nvidia_config::Error::NoFiles);
        let read = |path| {
            ConfigSource::new(Some(path), never)
                .read()
                .map_err(|error| LoadError::from(error).to_string())
        };
        for (path, part) in [
            (at("fifo"), "it is a FIFO"),
            (at("binary"), "UTF-8"),
            (at("large"), "larger than 1 MiB"),
            (at("absent"), "parse config file: error opening config file: open "),
            (at("absent"), "absent: no such file or directory; check --config-file"),
            (at("."), "parse config file: error parsing config file: read error: read "),
            (at("."), ": is a directory; check"),
            ("/dev/zero".into(), "larger than 1 MiB"),
        ] {
            let error = read(path).expect_err(part);
            assert!(error.contains(part), "{error}");
        }
        assert_eq!(read(at("link")), Ok(Some("version: v1\n".to_owned())));
        // What config-manager links to if a node gets an empty configuration.
        assert_eq!(read("/dev/null".into()), Ok(Some(String::new())));
    }
}
