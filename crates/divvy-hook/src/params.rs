//! `/proc/driver/nvidia/params`, by which the driver's libraries decide whether they make and change device nodes: in a container they are not to, since
//! the nodes that it has are those that it was given.

use crate::error::Result;
use crate::root::Root;

const FILE: &str = "/proc/driver/nvidia/params";
const LIMIT: usize = 64 * 1024;
const NAME: &str = "ModifyDeviceFiles";

/// Covers the file with a copy that says no. Where it is not there, or says so already, nothing is done.
pub(crate) fn forbid_nodes(root: &Root) -> Result<()> {
    let text = root.read(FILE, LIMIT)?.and_then(|bytes| String::from_utf8(bytes).ok());
    match text.as_deref().and_then(forbidding) {
        Some(text) => root.cover(FILE, text.as_bytes()),
        None => Ok(()),
    }
}

/// The same lines but for one; none if that one is there already, or not at all.
fn forbidding(text: &str) -> Option<String> {
    let allows = |line: &str| {
        line.split_once(':')
            .is_some_and(|(name, value)| name == NAME && value.trim() == "1")
    };
    text.lines().any(allows).then(|| {
        let lines = text.lines().map(|line| match allows(line) {
            true => format!("{NAME}: 0\n"),
            false => format!("{line}\n"),
        });
        lines.collect()
    })
}
