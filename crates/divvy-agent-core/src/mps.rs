//! What a container gets that uses a GPU through CUDA's Multi-Process Service (MPS), which limits the compute time of its processes.
//!
//! NVIDIA documents the variables in the appendix of docs.nvidia.com/deploy/mps.

use divvy_model::{Gpu, GrantRecord, Vendor};

/// Where the control daemon has its files on the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mps {
    /// The directory for the connections of clients.
    pub pipe: String,
    /// The directory of the memory that clients and servers share.
    pub shm: String,
}

/// Where a container has the directory for connections.
const PIPE: &str = "/mps/divvy.dev/shares/pipe";
/// Where CUDA expects the shared memory.
const SHM: &str = "/dev/shm";

/// Report whether the control daemon serves such a GPU. MPS is not available for MIG devices.
pub(super) fn serves(gpu: &Gpu) -> bool {
    gpu.vendor == Vendor::Nvidia && gpu.partition.is_none()
}

/// The environment variables and the mounts of a client.
#[derive(Debug, Default)]
pub(super) struct MpsClientEdits {
    pub(super) env: Vec<(&'static str, String)>,
    /// The path on the node, and the path in the container.
    pub(super) mounts: Vec<(String, String)>,
}

impl Mps {
    /// Return what the container of a record gets. `gpus` are its GPUs, none of which another process than the daemon's server can use.
    pub(super) fn client(&self, record: &GrantRecord, gpus: &[&Gpu]) -> MpsClientEdits {
        let uuids: Vec<&str> = gpus.iter().map(|gpu| gpu.uuid.as_str()).collect();
        let mut env = vec![
            ("CUDA_MPS_PIPE_DIRECTORY", PIPE.to_owned()),
            // The server has all GPUs of the node. A client sees those that this variable names, and not only those whose device nodes it has.
            ("CUDA_VISIBLE_DEVICES", uuids.join(",")),
        ];
        if record.threads > 0 {
            env.push(("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", record.threads.to_string()));
        }
        MpsClientEdits {
            env,
            mounts: vec![(self.pipe.clone(), PIPE.to_owned()), (self.shm.clone(), SHM.to_owned())],
        }
    }
}
