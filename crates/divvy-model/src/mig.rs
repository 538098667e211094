use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use crate::MiB;

/// A MIG device, which is one part of a divided GPU, as NVML describes it ("Multi Instance GPU Management") and `divvy-probe`
/// reports it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigDevice {
    /// NVML's index of the MIG device on its GPU. The indices may have gaps.
    pub index: u32,
    /// NVML's UUID, `MIG-…`.
    pub uuid: String,
    /// ID of the GPU instance.
    pub gi: u32,
    /// ID of the compute instance within the GPU instance.
    pub ci: u32,
    /// The minor numbers of the two device nodes `/dev/nvidia-caps/nvidia-cap<minor>` that give access to the GPU instance and to the
    /// compute instance. `None` if the kernel module does not list them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capabilities: Option<(u32, u32)>,
    /// The components of the MIG device. `None` if the driver does not report them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parts: Option<MigParts>,
}

/// The components of a MIG device (nvml.h, `nvmlDeviceAttributes_t` and `nvmlGpuInstanceInfo_t`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MigParts {
    /// ID of the profile of the GPU instance (`NVML_GPU_INSTANCE_PROFILE_…`). `None` if the driver does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gi_profile: Option<u32>,
    /// The number of slices of the GPU instance.
    pub gi_slices: u32,
    /// The number of slices of the compute instance.
    pub ci_slices: u32,
    /// Memory in MiB.
    #[serde(rename = "memoryMiB")]
    pub memory: u64,
    /// The number of streaming multiprocessors.
    pub multiprocessors: u32,
    /// The number of copy engines.
    pub copy_engines: u32,
    /// The number of video decoders.
    pub decoders: u32,
    /// The number of video encoders.
    pub encoders: u32,
    /// The number of JPEG decoders.
    pub jpeg: u32,
    /// The number of optical flow accelerators.
    pub ofa: u32,
}

impl MigDevice {
    /// Return `parts`, the MIG devices of a GPU, if MIG is enabled, else `None`. `mode` says whether MIG is enabled now, and
    /// whether it will be enabled after a reset. `mode` is `None` if the driver does not support MIG.
    pub fn of(mode: Option<(bool, bool)>, parts: &[MigDevice]) -> Option<&[MigDevice]> {
        mode.is_some_and(|(is_on, _)| is_on).then_some(parts)
    }

    /// Return the name of the profile, such as `1g.5gb+me`, on a GPU with `total` memory. `None` if the driver does not report
    /// the components of the MIG device.
    pub fn profile(&self, total: MiB) -> Option<String> {
        self.parts.map(|parts| parts.profile(total))
    }
}

impl MigParts {
    /// Return the name of the profile, such as `1g.5gb+me`, on a GPU with `total` memory. The memory of the MIG device is rounded
    /// up to eighths of the GPU's memory, as in NVIDIA's tools (github.com/NVIDIA/go-nvlib, `NewProfile`).
    pub fn profile(&self, total: MiB) -> String {
        let eighths = (self.memory.saturating_mul(8)).div_ceil(total.0.max(1));
        let whole_gb = total.0.div_ceil(1024);
        let gb = (eighths.saturating_mul(whole_gb).saturating_add(4)) / 8;
        let mut name = String::new();
        if self.ci_slices != self.gi_slices {
            let _ = write!(name, "{}c.", self.ci_slices);
        }
        let _ = write!(name, "{}g.{gb}gb", self.gi_slices);
        // nvml.h, NVML_GPU_INSTANCE_PROFILE_…: REV1 has the media engines of the GPU's other slices, GFX can render.
        name.push_str(match self.gi_profile {
            Some(7 | 8) => "+me",
            Some(10..=12) => "+gfx",
            Some(13 | 14) => "-me",
            Some(15 | 16) => "+me.all",
            _ => "",
        });
        name
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profiles_have_the_names_that_nvidia_smi_shows() {
        const A100: u64 = 40960;
        const H100: u64 = 81559;
        for (total, gi_profile, gi_slices, ci_slices, memory, name) in [
            (A100, 0, 1, 1, 4864, "1g.5gb"),
            (A100, 7, 1, 1, 4864, "1g.5gb+me"),
            (A100, 9, 1, 1, 9856, "1g.10gb"),
            (A100, 1, 2, 2, 9856, "2g.10gb"),
            (A100, 2, 3, 3, 19968, "3g.20gb"),
            (A100, 2, 3, 1, 19968, "1c.3g.20gb"),
            (A100, 4, 7, 7, 40192, "7g.40gb"),
            (A100, 17, 1, 1, 4864, "1g.5gb"),
            (H100, 0, 1, 1, 9984, "1g.10gb"),
            (H100, 2, 3, 3, 40448, "3g.40gb"),
            (H100, 4, 7, 7, 80384, "7g.80gb"),
            (24576, 13, 1, 1, 5952, "1g.6gb-me"),
            (24576, 12, 4, 4, 24064, "4g.24gb+gfx"),
            (24576, 15, 1, 1, 5952, "1g.6gb+me.all"),
            (0, 0, 1, 1, 5, "1g.0gb"),
        ] {
            let parts = MigParts {
                gi_profile: Some(gi_profile),
                gi_slices,
                ci_slices,
                memory,
                ..MigParts::default()
            };
            assert_eq!(parts.profile(MiB(total)), name);
        }
    }
}
