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

impl MigDevice {
    /// The parts of a GPU whose MIG is on; none where it is off, or the driver knows no MIG. `mode` is whether it is on now, and after a reset.
    pub fn of(mode: Option<(bool, bool)>, parts: &[MigDevice]) -> Option<&[MigDevice]> {
        mode.is_some_and(|(is_on, _)| is_on).then_some(parts)
    }
}
