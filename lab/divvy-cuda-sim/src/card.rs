//! A GPU or a MIG device, as CUDA shows it.

use divvy_model::machine::MachineGpu;

/// How many threads can run on a multiprocessor at the same time.
pub(crate) const THREADS_PER_SM: u64 = 2048;

/// One GPU, or one MIG device.
#[derive(Debug, Clone)]
pub(crate) struct CudaCard {
    pub(crate) uuid: String,
    /// The UUID of the GPU, also for a MIG device.
    pub(crate) gpu_uuid: String,
    /// The name of the ledger. The compute instances of a GPU instance have one memory, and so one ledger.
    pub(crate) ledger: String,
    /// The PCI bus id, such as `0000:81:00.0`.
    pub(crate) pci: String,
    pub(crate) described: MachineGpu,
    /// The memory that the processes of the ledger can have, in bytes: all but that of the described processes.
    pub(crate) capacity: u64,
    /// The memory that a context takes, in bytes.
    pub(crate) context: u64,
}

impl CudaCard {
    /// Return the compute capability: 86 for 8.6.
    pub(crate) fn capability(&self) -> u32 {
        let (major, minor) = self.described.cc.split_once('.').unwrap_or_default();
        let number = |text: &str| text.parse().unwrap_or(0);
        10 * number(major) + number(minor)
    }
}
