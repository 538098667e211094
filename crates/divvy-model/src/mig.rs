use serde::{Deserialize, Serialize};

/// A MIG device: one part of a divided GPU, as NVML describes it ("Multi Instance GPU Management") and `divvy-probe` reports it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigDevice {
    /// NVML's index among the GPU's MIG devices. The indices may have gaps.
    pub index: u32,
    /// NVML's UUID, `MIG-…`.
    pub uuid: String,
    /// ID of the GPU instance.
    pub gi: u32,
    /// ID of the compute instance within the GPU instance.
    pub ci: u32,
}

impl MigDevice {
    /// Return a GPU's MIG devices if MIG is enabled, else `None`. `mode` is whether MIG is enabled now and whether it will be
    /// after a reset; `None` if the driver does not support MIG.
    pub fn of(mode: Option<(bool, bool)>, parts: &[MigDevice]) -> Option<&[MigDevice]> {
        mode.is_some_and(|(is_on, _)| is_on).then_some(parts)
    }
}
