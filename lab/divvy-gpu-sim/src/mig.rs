//! The profiles of MIG's GPU instances (NVIDIA's MIG User Guide, "GPU Instance Profiles on A100").
//!
//! If the machine description names the profile of a MIG device, the MIG device is a GPU instance with one compute instance,
//! which has all slices of the GPU instance. Otherwise each compute instance has one slice, and a GPU instance has the smallest
//! profile with enough slices for its compute instances. The profiles are those of an A100 with 40 GB. On a GPU with another
//! amount of memory, the memory of each profile is in proportion.

/// A profile of GPU instances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Profile {
    /// `NVML_GPU_INSTANCE_PROFILE_…`.
    pub number: u32,
    /// The id that an instance reports, as `nvidia-smi mig -lgip` shows it.
    pub id: u32,
    /// The number of slices.
    pub slices: u32,
    /// Memory in MiB on a GPU with [`TABLE_MEMORY`].
    memory: u64,
    /// The number of copy engines.
    pub copy_engines: u32,
    /// The number of video decoders.
    pub decoders: u32,
    /// The number of JPEG decoders, and of optical flow accelerators.
    pub media: u32,
}

const fn profile(number: u32, id: u32, slices: u32, memory: u64, copy_engines: u32, decoders: u32, media: u32) -> Profile {
    Profile {
        number,
        id,
        slices,
        memory,
        copy_engines,
        decoders,
        media,
    }
}

/// The memory in MiB of the GPU to which [`PROFILES`] belong.
const TABLE_MEMORY: u64 = 40960;
/// The number of multiprocessors of a slice.
pub const SMS_OF_SLICE: u32 = 14;
/// The profiles. First come those that are chosen by their number of slices, in ascending order.
pub const PROFILES: [Profile; 8] = [
    profile(0, 19, 1, 4864, 1, 0, 0),
    profile(1, 14, 2, 9856, 2, 1, 0),
    profile(2, 9, 3, 19968, 3, 2, 0),
    profile(3, 5, 4, 19968, 4, 2, 0),
    profile(4, 0, 7, 40192, 7, 5, 1),
    // One slice with media engines.
    profile(7, 20, 1, 4864, 1, 1, 1),
    // One slice with twice the memory.
    profile(9, 15, 1, 9856, 1, 1, 0),
    // Not a profile of any driver: what a later one may add.
    profile(17, 117, 1, 4864, 1, 0, 0),
];

impl Profile {
    /// Return the profile of a GPU instance, which has this many compute instances. `named` is the profile in the description.
    pub fn of(named: Option<u32>, compute_instances: usize) -> Option<Profile> {
        let is_it = |profile: &Profile| match named {
            Some(number) => profile.number == number,
            None => compute_instances > 0 && profile.slices as usize >= compute_instances,
        };
        PROFILES.into_iter().find(is_it)
    }

    /// Return the number of slices of each compute instance.
    pub fn compute_slices(&self, named: Option<u32>) -> u32 {
        if named.is_some() { self.slices } else { 1 }
    }

    /// Return the memory in MiB on a GPU with this many MiB.
    pub fn memory_mib(&self, of_gpu: u64) -> u64 {
        of_gpu.saturating_mul(self.memory) / TABLE_MEMORY
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The smallest profile must have enough slices.
    #[test]
    fn an_instance_has_its_named_or_smallest_profile() {
        let of = |named, count| Profile::of(named, count).map(|profile| (profile.number, profile.compute_slices(named)));
        for (named, count, expected) in [
            (Some(9), 1, Some((9, 1))),
            (Some(2), 1, Some((2, 3))),
            (Some(16), 1, None),
            (None, 1, Some((0, 1))),
            (None, 5, Some((4, 1))),
            (None, 8, None),
            (None, 0, None),
        ] {
            assert_eq!(of(named, count), expected, "{named:?}, {count}");
        }
        let half = Profile::of(Some(2), 1).map(|profile| profile.memory_mib(20480));
        assert_eq!(half, Some(9984));
    }
}
