//! The input that a container runtime provides to a hook: the container's state on standard input, and the `config.json` of its bundle.

use serde::Deserialize;

/// The state of a container, as defined by the OCI runtime specification.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct OciState {
    /// The PID of the container's first process; 0 if there is none yet.
    #[serde(default)]
    pub pid: u64,
    bundle: Option<String>,
    /// The bundle's directory under its former name, which old versions of Docker use.
    #[serde(rename = "bundlePath")]
    bundle_path: Option<String>,
}

impl OciState {
    /// Parse the state.
    ///
    /// # Errors
    /// Fails if the state does not follow the runtime specification. The error contains the position and the reason.
    pub fn parse(bytes: &[u8]) -> Result<OciState, serde_json::Error> {
        serde_json::from_str(text(bytes)?)
    }

    /// Return the directory of the container's bundle, or `None` if the state does not name it.
    pub fn bundle(&self) -> Option<&str> {
        let named = self.bundle.as_deref().or(self.bundle_path.as_deref());
        named.filter(|bundle| !bundle.is_empty())
    }
}

/// Convert the input to text first, so that only one instance of the JSON parser is compiled into the program.
fn text(bytes: &[u8]) -> Result<&str, serde_json::Error> {
    std::str::from_utf8(bytes).map_err(serde::de::Error::custom)
}

/// The parts of a container's configuration that a hook needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HookConfig {
    /// The container's root directory, absolute or relative to the bundle.
    pub root: String,
    /// The destinations of the mounts, as paths in the container.
    pub mounts: Vec<String>,
    /// The paths of the device nodes in the container.
    pub devices: Vec<String>,
}

#[derive(Deserialize)]
struct ConfigFile {
    root: ConfigRoot,
    #[serde(default)]
    mounts: Option<Vec<ConfigMount>>,
    #[serde(default)]
    linux: Option<Linux>,
}

#[derive(Deserialize, Default)]
struct Linux {
    #[serde(default)]
    devices: Option<Vec<ConfigDeviceNode>>,
}

#[derive(Deserialize)]
struct ConfigDeviceNode {
    #[serde(default)]
    path: String,
}

#[derive(Deserialize)]
struct ConfigRoot {
    path: String,
}

#[derive(Deserialize)]
struct ConfigMount {
    #[serde(default)]
    destination: String,
}

impl HookConfig {
    /// Parse a `config.json`.
    ///
    /// # Errors
    /// Fails if the file does not follow the runtime specification. The error contains the position and the reason.
    pub fn parse(bytes: &[u8]) -> Result<HookConfig, serde_json::Error> {
        let said: ConfigFile = serde_json::from_str(text(bytes)?)?;
        let mounts = said.mounts.unwrap_or_default().into_iter();
        let nodes = said.linux.and_then(|linux| linux.devices).unwrap_or_default();
        Ok(HookConfig {
            root: said.root.path,
            mounts: mounts.map(|mount| mount.destination).collect(),
            devices: nodes.into_iter().map(|node| node.path).collect(),
        })
    }
}
