//! What the container runtime says of the container: its state on standard input, and the `config.json` of its bundle.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, Result};

/// As divvy-runtime takes it.
const MOST: u64 = 16 * 1024 * 1024;

/// What matters of a container.
#[derive(Debug)]
pub(crate) struct State {
    /// Its first process; 0 if there is none yet.
    pub(crate) pid: u64,
    /// Its root, as the machine sees it.
    pub(crate) root: PathBuf,
    /// Where something is mounted in it.
    pub(crate) mounts: Vec<String>,
    /// Where its device nodes are in it.
    pub(crate) devices: Vec<String>,
}

#[derive(Deserialize)]
struct Said {
    #[serde(default)]
    pid: u64,
    bundle: Option<String>,
    /// By Docker of old.
    #[serde(rename = "bundlePath")]
    bundle_path: Option<String>,
}

#[derive(Deserialize)]
struct Config {
    root: Place,
    #[serde(default)]
    mounts: Option<Vec<Mount>>,
    #[serde(default)]
    linux: Option<Linux>,
}

#[derive(Deserialize, Default)]
struct Linux {
    #[serde(default)]
    devices: Option<Vec<Node>>,
}

#[derive(Deserialize)]
struct Node {
    #[serde(default)]
    path: String,
}

#[derive(Deserialize)]
struct Place {
    path: String,
}

#[derive(Deserialize)]
struct Mount {
    #[serde(default)]
    destination: String,
}

/// Reads both.
pub(crate) fn read() -> Result<State> {
    let said: Said = parse(std::io::stdin(), "the state on standard input")?;
    let bundle = said.bundle.or(said.bundle_path).filter(|bundle| !bundle.is_empty());
    let bundle = bundle.ok_or_else(|| Error::State("the state on standard input names no bundle".to_owned()))?;
    let path = Path::new(&bundle).join("config.json");
    let shown = path.display().to_string();
    let file = File::open(&path).map_err(|error| Error::host("read", &shown, error))?;
    let config: Config = parse(file, &shown)?;
    let nodes = config.linux.and_then(|linux| linux.devices).unwrap_or_default();
    Ok(State {
        pid: said.pid,
        root: Path::new(&bundle).join(config.root.path),
        mounts: config
            .mounts
            .unwrap_or_default()
            .into_iter()
            .map(|mount| mount.destination)
            .collect(),
        devices: nodes.into_iter().map(|node| node.path).collect(),
    })
}

fn parse<T: DeserializeOwned>(from: impl Read, what: &str) -> Result<T> {
    let mut bytes = Vec::new();
    let read = from.take(MOST + 1).read_to_end(&mut bytes);
    let size = read.map_err(|error| Error::State(format!("{what} cannot be read: {error}")))?;
    if u64::try_from(size).is_ok_and(|size| size > MOST) {
        return Err(Error::State(format!("{what} is larger than {} MiB", MOST >> 20)));
    }
    serde_json::from_slice(&bytes)
        .map_err(|error| Error::State(format!("{what} is not what the runtime specification says: {error}")))
}
