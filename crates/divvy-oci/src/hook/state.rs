//! What a container runtime says of a container: its state on the hook's standard input, and the `config.json` of its bundle.

use serde::Deserialize;

/// The state.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct State {
    /// Its first process; 0 if there is none yet.
    #[serde(default)]
    pub pid: u64,
    bundle: Option<String>,
    /// By Docker of old.
    #[serde(rename = "bundlePath")]
    bundle_path: Option<String>,
}

impl State {
    /// Reads it.
    ///
    /// # Errors
    /// What is not as the runtime specification says, and where.
    pub fn parse(bytes: &[u8]) -> Result<State, serde_json::Error> {
        serde_json::from_str(text(bytes)?)
    }

    /// The folder of the container's bundle, if it is named.
    pub fn bundle(&self) -> Option<&str> {
        let named = self.bundle.as_deref().or(self.bundle_path.as_deref());
        named.filter(|bundle| !bundle.is_empty())
    }
}

/// As text, for which the parser is in a program once.
fn text(bytes: &[u8]) -> Result<&str, serde_json::Error> {
    std::str::from_utf8(bytes).map_err(serde::de::Error::custom)
}

/// What a hook looks at in a container's configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The container's root, from its bundle.
    pub root: String,
    /// Where something is mounted in it.
    pub mounts: Vec<String>,
    /// Where its device nodes are in it.
    pub devices: Vec<String>,
}

#[derive(Deserialize)]
struct Said {
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

impl Config {
    /// Reads it.
    ///
    /// # Errors
    /// What is not as the runtime specification says, and where.
    pub fn parse(bytes: &[u8]) -> Result<Config, serde_json::Error> {
        let said: Said = serde_json::from_str(text(bytes)?)?;
        let mounts = said.mounts.unwrap_or_default().into_iter();
        let nodes = said.linux.and_then(|linux| linux.devices).unwrap_or_default();
        Ok(Config {
            root: said.root.path,
            mounts: mounts.map(|mount| mount.destination).collect(),
            devices: nodes.into_iter().map(|node| node.path).collect(),
        })
    }
}
