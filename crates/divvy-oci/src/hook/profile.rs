//! An application profile of NVIDIA's driver: which GPUs a program in the container sees by EGL, which looks at all that the kernel has.

/// For the device nodes that the container has, as the driver reads it, which takes numbers that are no JSON; none for no GPU.
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
