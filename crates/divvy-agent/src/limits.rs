//! Limits the GPU memory of pods through the driver, on the pods' cgroups and on those of their containers.
//!
//! A pod's limit is set before the first process of a container exists, and holds for everything in the pod: children, `kubectl exec`, and
//! containers that start later. The driver forgets it when the kubelet removes the cgroup. A container's limit ([`Containers`]) has the driver show the
//! share as the size of the GPU.

mod containers;
mod watch;

use std::path::Path;
use std::time::Duration;

use divvy_hardware::client::ProbeHandle;
use divvy_hardware::protocol::{LimitAnswer, LimitRequest};
use divvy_hardware::{Failure, FailureCode};
use divvy_model::MiB;
use tokio::time::timeout;

use crate::cgroups::{CgroupError, pod_cgroup};
pub(crate) use containers::{Containers, NextLook};

/// The time that one limit may take. While a pod's limits are set, the kubelet starts no other container of the pod.
const PATIENCE: Duration = Duration::from_secs(2);

/// What sets limits.
pub(crate) trait LimitSetter: Sync {
    /// Set the limit of one cgroup.
    fn limit(&self, limit: LimitRequest) -> impl Future<Output = Result<LimitAnswer, Failure>> + Send;
}

impl LimitSetter for ProbeHandle {
    async fn limit(&self, limit: LimitRequest) -> Result<LimitAnswer, Failure> {
        ProbeHandle::limit(self, limit).await
    }
}

fn late() -> Failure {
    let text = format!("the probe has not answered for {} s", PATIENCE.as_secs());
    Failure::new(FailureCode::Timeout, text)
}

/// Why a pod has no limit.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PodNotLimited {
    /// The pod's cgroup is not found.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// The driver, or the kernel, does not do it.
    #[error("{}", .0.text)]
    Refused(Failure),
}

/// Set the limits of a pod.
///
/// # Errors
/// A limit is not set, so the pod may use more memory than its share. The text says why.
pub(crate) async fn set(probe: &ProbeHandle, sys_root: &Path, uid: &str, gpus: &[(String, MiB)]) -> Result<(), PodNotLimited> {
    let cgroup = pod_cgroup(sys_root, uid)?;
    for (uuid, memory) in gpus {
        let limit = LimitRequest {
            uuid: uuid.clone(),
            cgroup: cgroup.clone(),
            hard: *memory,
            alone: false,
        };
        let set = timeout(PATIENCE, probe.limit(limit)).await.unwrap_or_else(|_| Err(late()));
        set.map_err(PodNotLimited::Refused)?;
    }
    Ok(())
}
