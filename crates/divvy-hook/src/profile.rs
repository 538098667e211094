//! An application profile of NVIDIA's driver: which GPUs a program in the container sees by EGL, which looks at all that the kernel has.

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

/// As the driver reads it, which takes numbers that are no JSON.
fn text(nodes: &[String]) -> Option<String> {
    let minors = nodes.iter().filter_map(|path| {
        let number = path.strip_prefix("/dev/nvidia")?;
        let digits = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
        number.parse::<u32>().ok().filter(|_| digits)
    });
    let mask = minors.fold(0, |mask: u128, minor| mask | 1_u128.checked_shl(minor).unwrap_or_default());
    (mask != 0).then(|| {
        format!(
            "{{\"profiles\":[{{\"name\":\"_container_\",\"settings\":[\"EGLVisibleDGPUDevices\",{mask:#x}]}}],\
             \"rules\":[{{\"pattern\":[],\"profile\":\"_container_\"}}]}}"
        )
    })
}
