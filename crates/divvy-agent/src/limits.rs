//! Limits the GPU memory of pods through the driver, on the pods' cgroups.
//!
//! The limit is set before the first process of a container exists, and holds for everything in the pod: children, `kubectl exec`, and
//! containers that start later. The driver forgets it when the kubelet removes the cgroup.

use std::path::Path;
use std::time::Duration;

use divvy_agent_core::Limits;
use divvy_hardware::client::ProbeHandle;
use divvy_hardware::protocol::Limit;
use tokio::time::timeout;

use crate::cgroups::pod_cgroup;

/// The time that the limits of one pod may take. The kubelet starts no other container of the pod meanwhile.
const PATIENCE: Duration = Duration::from_secs(2);

/// Set the limits of a pod.
///
/// # Errors
/// A limit is not set, so the pod may use more memory than its share. The text says why.
pub(crate) async fn set(probe: &ProbeHandle, sys_root: &Path, limits: &Limits) -> Result<(), String> {
    let cgroup = pod_cgroup(sys_root, &limits.uid)?;
    for (uuid, memory) in &limits.gpus {
        let limit = Limit {
            uuid: uuid.clone(),
            cgroup: cgroup.clone(),
            hard: *memory,
            alone: false,
        };
        match timeout(PATIENCE, probe.limit(limit)).await {
            Ok(Ok(_)) => {}
            Ok(Err(failure)) => return Err(failure.text),
            Err(_) => return Err(format!("the probe has not answered for {} s", PATIENCE.as_secs())),
        }
    }
    Ok(())
}
