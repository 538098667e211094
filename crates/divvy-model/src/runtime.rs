//! Whether a node's container runtime supports CDI, judged by its version in `status.nodeInfo.containerRuntimeVersion`.

/// Whether a container runtime injects the devices that CDI device names refer to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CdiSupport {
    /// The runtime injects them, or there is no evidence that it does not.
    Yes,
    /// The runtime injects them only if an administrator has enabled CDI (containerd 1.7: `enable_cdi`).
    IfEnabled,
    /// The runtime ignores CDI device names: containers would start without a GPU.
    No,
}

/// Report whether a runtime supports CDI, given its version in the form `containerd://1.7.24`.
///
/// containerd supports CDI since 1.7, where it is disabled by default, and has it enabled by default since 2.0 (release notes).
/// With cri-dockerd, Docker does not receive the CDI device names. Any other runtime is assumed to support CDI.
pub fn cdi(version: &str) -> CdiSupport {
    let Some((runtime, version)) = version.split_once("://") else {
        return CdiSupport::Yes;
    };
    let mut numbers = version
        .trim_start_matches('v')
        .split(['.', '-', '+'])
        .map_while(|part| part.parse::<u64>().ok());
    match (runtime, numbers.next(), numbers.next()) {
        ("containerd", Some(1), Some(7)) => CdiSupport::IfEnabled,
        ("containerd", Some(0), _) => CdiSupport::No,
        ("containerd", Some(1), Some(minor)) if minor < 7 => CdiSupport::No,
        ("docker", ..) => CdiSupport::No,
        _ => CdiSupport::Yes,
    }
}

/// Describe why a runtime does not support CDI, and what to do about it. `None` if it supports CDI. The text continues a line
/// that starts with "node n1: ".
pub fn without_cdi(version: &str) -> Option<String> {
    match cdi(version) {
        CdiSupport::Yes => None,
        CdiSupport::IfEnabled => Some(format!(
            "its container runtime {version} gives containers their GPU only where CDI is switched on. Set enable_cdi = true and cdi_spec_dirs = \
             [\"/etc/cdi\", \"/var/run/cdi\"] in the section [plugins.\"io.containerd.grpc.v1.cri\"] of /etc/containerd/config.toml, restart \
             containerd, and start the agent with --device-list-strategy cdi; or upgrade to containerd 2"
        )),
        CdiSupport::No => Some(format!(
            "its container runtime {version} does not support CDI, so containers would start without their GPU; upgrade to containerd 2"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_version_that_is_known_to_lack_cdi_is_refused() {
        for (version, expected) in [
            ("containerd://2.3.7", CdiSupport::Yes),
            ("containerd://2.0.0-rc.1", CdiSupport::Yes),
            ("containerd://1.7.24", CdiSupport::IfEnabled),
            ("containerd://1.7.27-k3s1", CdiSupport::IfEnabled),
            ("containerd://v1.7.0", CdiSupport::IfEnabled),
            ("containerd://1.6.36", CdiSupport::No),
            ("containerd://1.10.0", CdiSupport::Yes),
            ("docker://27.1.1", CdiSupport::No),
            ("cri-o://1.31.2", CdiSupport::Yes),
            ("containerd://", CdiSupport::Yes),
            ("containerd://Unknown", CdiSupport::Yes),
            ("", CdiSupport::Yes),
        ] {
            assert_eq!(cdi(version), expected, "{version}");
            assert_eq!(without_cdi(version).is_none(), expected == CdiSupport::Yes, "{version}");
        }
    }
}
