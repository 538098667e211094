use serde::{Deserialize, Serialize};

/// What the driver's library says of a part of a GPU that is divided (NVML, "Multi Instance GPU Management"). In what `divvy-probe` answers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigDevice {
    /// NVML's index among the MIG devices of the GPU, which may leave numbers out.
    pub index: u32,
    /// `MIG-…`
    pub uuid: String,
    /// GPU instance.
    pub gi: u32,
    /// Compute instance.
    pub ci: u32,
}
