//! An application profile for NVIDIA's driver that limits EGL to the container's GPUs. Without a profile, EGL tries every GPU
//! that the kernel has.

/// Return the profile for the container's device nodes. The result is `None` if no node is a GPU. The profile contains
/// hexadecimal numbers, which the driver accepts although they are not valid JSON.
pub fn text(nodes: &[String]) -> Option<String> {
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
