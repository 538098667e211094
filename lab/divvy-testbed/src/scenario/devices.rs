//! The GPUs that a container sees, by its own report.

use divvy_model::names;

use super::{Cluster, Play, PlayStop, SelfReport};

/// Report whether a path is the device node of a GPU, not one of the driver's own device nodes.
pub(super) fn is_gpu(path: &str) -> bool {
    let index = path.strip_prefix("/dev/nvidia");
    index.is_some_and(|index| !index.is_empty() && index.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Return the device nodes of GPUs in the containers.
pub(super) fn gpus(reports: &[SelfReport]) -> Vec<String> {
    let devices = reports.iter().flat_map(|report| &report.devices);
    devices.filter(|path| is_gpu(path)).cloned().collect()
}

/// Return the device nodes that give access to GPUs or to MIG devices.
pub(super) fn gpus_and_parts(reports: &[SelfReport]) -> Vec<&str> {
    let all = reports.iter().flat_map(|report| &report.devices).map(String::as_str);
    all.filter(|path| path.starts_with("/dev/nvidia-caps/") || is_gpu(path))
        .collect()
}

/// Check that a container sees its own GPU and no other, even if its own environment variables ask for more.
pub(super) fn check_own_gpu<C: Cluster>(
    play: &mut Play<'_, C>,
    name: &str,
    reports: &[SelfReport],
    minor: u32,
) -> Result<(), PlayStop> {
    let own = format!("/dev/nvidia{minor}");
    let good = reports.iter().all(|report| {
        let gpus: Vec<_> = report.devices.iter().filter(|device| is_gpu(device)).collect();
        gpus == [&own] && report.env.get(names::VISIBLE_DEVICES).map(String::as_str) == Some(names::VISIBLE_NONE)
    });
    play.check(
        good && !reports.is_empty(),
        &format!("{name} sees only its own GPU ({own})"),
        || format!("{reports:?}"),
    )?;
    Ok(())
}
