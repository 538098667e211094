//! `/proc/driver/nvidia/params`, by which the driver's libraries decide whether they make and change device nodes: in a container they are not to, since
//! the nodes that it has are those that it was given.

use divvy_oci::hook::params::forbidding;

use crate::error::Result;
use crate::root::Root;

const FILE: &str = "/proc/driver/nvidia/params";
const LIMIT: usize = 64 * 1024;

/// Covers the file with a copy that says no. Where it is not there, or says so already, nothing is done.
pub(crate) fn forbid_nodes(root: &Root) -> Result<()> {
    let text = root.read(FILE, LIMIT)?.and_then(|bytes| String::from_utf8(bytes).ok());
    match text.as_deref().and_then(forbidding) {
        Some(text) => root.cover(FILE, text.as_bytes()),
        None => Ok(()),
    }
}
