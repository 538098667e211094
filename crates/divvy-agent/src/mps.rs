//! Where the agent and the MPS control daemon meet: a directory of the node.

use std::path::{Path, PathBuf};

use divvy_agent_core::Mps;
use divvy_nvidia_plugin::mps::{SHARES, STARTED};
use tracing::debug;

use crate::files;

/// The directory of the control daemons' files on the node, the same as with NVIDIA's chart.
pub(crate) const DIRECTORY: &str = "/run/nvidia/mps";

/// The maximum size of the control daemon's marker: it has a UID.
const BYTES: u64 = 256;

/// Return the files of the control daemon for the agent's pods.
pub(crate) fn files() -> Mps {
    Mps {
        pipe: format!("{DIRECTORY}/{SHARES}/pipe"),
        shm: format!("{DIRECTORY}/shm"),
    }
}

/// Return the UID of the pod whose control daemon serves the node's GPUs; empty if the pod is not known. `None` if no daemon serves: it writes the file when
/// its GPUs are ready, and removes it before it ends. Containers cannot write it.
pub(crate) fn server(sys_root: &Path) -> Option<String> {
    let read = files::read(&below(sys_root).join(SHARES).join(STARTED), BYTES);
    read.unwrap_or_else(|error| {
        debug!("whether the MPS control daemon serves is not known: {error}");
        None
    })
}

/// Return the directory of the control daemons' files as a program sees it whose view of the node's root is `root`.
pub(crate) fn below(root: &Path) -> PathBuf {
    root.join(DIRECTORY.trim_start_matches('/'))
}
