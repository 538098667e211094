//! An application profile of NVIDIA's driver: which GPUs a program in the container sees by EGL, which looks at all that the kernel has.

use divvy_oci::hook::profile::text;

use crate::error::Result;
use crate::root::Root;

const FILE: &str = "/etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf";

/// Writes it for the device nodes that the container has; for none, nothing.
pub(crate) fn write(root: &Root, nodes: &[String]) -> Result<()> {
    let Some(text) = text(nodes) else { return Ok(()) };
    if root.read(FILE, text.len() + 1)?.is_some_and(|there| there == text.as_bytes()) {
        return Ok(());
    }
    root.write(FILE, text.as_bytes())
}
