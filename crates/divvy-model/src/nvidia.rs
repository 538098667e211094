//! Definitions that several modules for NVIDIA's GPUs share: the names of device nodes, and which XIDs (the driver's error codes)
//! mean that a GPU is broken. All other modules treat a device node as a path, and an XID as a named fault.

const PREFIX: &str = "nvidia";

/// Return the device node of the GPU with this minor number, as [`Gpu::nodes`](crate::Gpu::nodes) lists it: `nvidia0`.
pub fn node(minor: u32) -> String {
    format!("{PREFIX}{minor}")
}

/// Return the minor number of a GPU, given the names of its device nodes (`nvidia<minor>`). `None` for a GPU of another vendor.
pub fn minor(nodes: &[String]) -> Option<u32> {
    let [node] = nodes else { return None };
    let minor = node.strip_prefix(PREFIX)?.parse().ok()?;
    (self::node(minor) == *node).then_some(minor)
}

/// XIDs that are caused by a program, and after which the GPU still works for other programs: 13 graphics engine exception, 31
/// memory page fault, 43 stopped channel, 45 preemptive cleanup, 68 video processor exception, 109 context switch timeout.
///
/// Source: NVIDIA/k8s-device-plugin, `internal/rm/health.go` (`ignoredXids`), which follows NVIDIA's XID catalog,
/// <https://docs.nvidia.com/deploy/xid-errors/>.
const CAUSED_BY_PROGRAMS: [u64; 6] = [13, 31, 43, 45, 68, 109];

/// Report whether this XID makes the GPU unfit for new pods. Unknown XIDs count as fatal, because the errors of a newer driver
/// may not be harmless.
pub fn xid_is_fatal(xid: u64) -> bool {
    !CAUSED_BY_PROGRAMS.contains(&xid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_that_programs_cause_do_not_fail_a_gpu() {
        for xid in [13, 31, 43, 45, 68, 109] {
            assert!(!xid_is_fatal(xid), "{xid}");
        }
        for xid in [0, 48, 62, 63, 64, 74, 79, 94, 95, 119, 120, 140, 999, u64::MAX] {
            assert!(xid_is_fatal(xid), "{xid}");
        }
    }
}
