//! Reads the input that the container runtime provides: the container's state on standard input, and the `config.json` of its
//! bundle.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use divvy_oci::hook::state::{HookConfig, OciState};
use rustix::fs::OFlags;

use crate::error::{Error, Result};

/// The maximum size of each input in bytes, the same as in `divvy-runtime`.
const MOST: u64 = 16 * 1024 * 1024;

/// The parts of a container's state and configuration that the hook needs.
#[derive(Debug)]
pub(crate) struct HookedContainer {
    /// The PID of the container's first process; 0 if there is none yet.
    pub(crate) pid: u64,
    /// The container's root, as a path on the host.
    pub(crate) root: PathBuf,
    /// The destinations of the mounts, as paths in the container.
    pub(crate) mounts: Vec<String>,
    /// The paths of the device nodes in the container.
    pub(crate) devices: Vec<String>,
}

/// Read the state and the configuration.
pub(crate) fn read() -> Result<HookedContainer> {
    let said = parse(std::io::stdin(), "the state on standard input", OciState::parse)?;
    let bundle = said
        .bundle()
        .ok_or_else(|| Error::State("the state on standard input names no bundle".to_owned()))?;
    let path = Path::new(bundle).join("config.json");
    let shown = path.display().to_string();
    // Open without blocking: otherwise opening a named pipe would wait for a writer.
    let opened = File::options()
        .read(true)
        .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
        .open(&path);
    let file = opened.map_err(|error| Error::host("read", &shown, error))?;
    let config = parse(file, &shown, HookConfig::parse)?;
    Ok(HookedContainer {
        pid: said.pid,
        root: Path::new(bundle).join(config.root),
        mounts: config.mounts,
        devices: config.devices,
    })
}

fn parse<T>(from: impl Read, what: &str, parse: fn(&[u8]) -> serde_json::Result<T>) -> Result<T> {
    let mut bytes = Vec::new();
    let read = from.take(MOST + 1).read_to_end(&mut bytes);
    let size = read.map_err(|error| Error::State(format!("{what} cannot be read: {error}")))?;
    if u64::try_from(size).is_ok_and(|size| size > MOST) {
        return Err(Error::State(format!("{what} is larger than {} MiB", MOST >> 20)));
    }
    parse(&bytes).map_err(|error| Error::State(format!("{what} does not follow the runtime specification: {error}")))
}
