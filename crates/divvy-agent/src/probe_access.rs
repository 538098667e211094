//! The agent's way to the drivers: the probe, as soon as it is there.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use divvy_hardware::client::ProbeHandle;
use divvy_hardware::{Failure, FailureCode, GpuProcesses};
use tracing::debug;

use crate::mps;

/// How long to wait for the driver's lists of processes.
const PROCESSES_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a reconciliation waits for the probe to check the driver's files. It waits as long again for the probe to make a
/// spec.
const DRIVER_TIMEOUT: Duration = Duration::from_secs(2);

/// The probe, and where the MPS control daemon says that it serves.
#[derive(Debug)]
pub(crate) struct ProbeAccess {
    handle: OnceLock<ProbeHandle>,
    /// The root of the machine's files if containers use GPUs through the MPS control daemon.
    mps_root: Option<PathBuf>,
}

impl ProbeAccess {
    pub(crate) fn new(mps_root: Option<PathBuf>) -> ProbeAccess {
        ProbeAccess {
            handle: OnceLock::new(),
            mps_root,
        }
    }

    /// Set the probe. Only the first call has an effect.
    pub(crate) fn set(&self, probe: ProbeHandle) {
        self.handle.get_or_init(|| probe);
    }

    /// Return the probe, once there is one.
    pub(crate) fn get(&self) -> Option<&ProbeHandle> {
        self.handle.get()
    }

    /// Return the UID of the pod whose MPS control daemon serves the node's GPUs for this agent. `None` if none does.
    pub(crate) fn mps_server(&self) -> Option<String> {
        self.mps_root.as_deref().and_then(mps::server)
    }

    /// Ask the driver for the processes on the GPUs. `None` if it does not answer.
    pub(crate) async fn processes(&self) -> Option<Vec<GpuProcesses>> {
        let processes = match tokio::time::timeout(PROCESSES_TIMEOUT, self.get()?.processes()).await {
            Ok(Ok(mut processes)) => {
                if let Some(server) = self.mps_server() {
                    mps::disown(&mut processes, &server);
                }
                processes
            }
            // `hardware` reports that the driver does not work.
            Ok(Err(failure)) => {
                debug!("the agent does not know the processes on the GPUs: {failure}");
                return None;
            }
            Err(_) => {
                debug!(
                    "the agent does not know the processes on the GPUs: no answer in {} s",
                    PROCESSES_TIMEOUT.as_secs()
                );
                return None;
            }
        };
        for gpu in &processes {
            if let Some(error) = &gpu.error {
                debug!(gpu = gpu.uuid, "the agent does not know the processes on this GPU: {error}");
            }
        }
        Some(processes)
    }
}

/// Wait for an answer of the probe, but not longer than [`DRIVER_TIMEOUT`].
pub(crate) async fn answered<T>(answer: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let late = |_| {
        Err(Failure::new(
            FailureCode::Timeout,
            format!("no answer in {} s", DRIVER_TIMEOUT.as_secs()),
        ))
    };
    tokio::time::timeout(DRIVER_TIMEOUT, answer).await.unwrap_or_else(late)
}
