//! Covers `/proc/driver/nvidia/params`. Its line `ModifyDeviceFiles` tells the driver's libraries whether to create and change
//! device nodes. In a container they must not, because the container may have only the nodes that it was given.

use divvy_oci::hook::params::forbidding;

use crate::error::Result;
use crate::root::ImageRoot;

const FILE: &str = "/proc/driver/nvidia/params";
const LIMIT: usize = 64 * 1024;

/// Mount a copy of the file that forbids modification over the file. Do nothing if the file does not exist or already forbids it.
pub(crate) fn forbid_nodes(root: &ImageRoot) -> Result<()> {
    let text = root.read(FILE, LIMIT)?.and_then(|bytes| String::from_utf8(bytes).ok());
    match text.as_deref().and_then(forbidding) {
        Some(text) => root.cover(FILE, text.as_bytes()),
        None => Ok(()),
    }
}
