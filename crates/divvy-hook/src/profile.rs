//! Writes an application profile for NVIDIA's driver that limits EGL to the container's GPUs. Without a profile, EGL tries every
//! GPU that the kernel has.

use divvy_oci::hook::profile::text;

use crate::error::Result;
use crate::root::ImageRoot;

const FILE: &str = "/etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf";

/// Write the profile for the container's device nodes. Write nothing if no node is a GPU.
pub(crate) fn write(root: &ImageRoot, nodes: &[String]) -> Result<()> {
    let Some(text) = text(nodes) else { return Ok(()) };
    if root.read(FILE, text.len() + 1)?.is_some_and(|there| there == text.as_bytes()) {
        return Ok(());
    }
    root.write(FILE, text.as_bytes())
}
