//! What a pod can get as a whole, and the extended resource for it.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{Error, Vendor};

/// The domain and prefix of the extended resources for MIG devices (NVIDIA's device plugin, `MIG_STRATEGY=mixed`).
const MIG: &str = "nvidia.com/mig-";

/// What a pod can get as a whole. Each kind has its own extended resource, whose name represents the kind in JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum WholeKind {
    /// A GPU of this vendor: `nvidia.com/gpu`, `amd.com/gpu`, `gpu.intel.com/xe`.
    Gpu(Vendor),
    /// A MIG device of this profile: `nvidia.com/mig-1g.5gb`.
    Mig(MigProfile),
}

impl WholeKind {
    /// Return the kind that an extended resource stands for. `None` if it stands for something else.
    pub fn of_resource(name: &str) -> Option<WholeKind> {
        if let Some(profile) = name.strip_prefix(MIG) {
            return MigProfile::of_resource(profile).map(WholeKind::Mig);
        }
        let mut vendors = Vendor::ALL.into_iter();
        vendors.find(|vendor| vendor.whole_resource() == name).map(WholeKind::Gpu)
    }

    /// Return the name of the extended resource.
    pub fn resource(self) -> Cow<'static, str> {
        match self {
            WholeKind::Gpu(vendor) => Cow::Borrowed(vendor.whole_resource()),
            WholeKind::Mig(profile) => Cow::Owned(format!("{MIG}{}", profile.to_string().replace('+', "."))),
        }
    }

    /// Return the vendor whose driver reports the devices.
    pub const fn vendor(self) -> Vendor {
        match self {
            WholeKind::Gpu(vendor) => vendor,
            WholeKind::Mig(_) => Vendor::Nvidia,
        }
    }

    /// Report whether these are GPUs whose memory is shared by default where no pod has them as a whole.
    pub const fn is_of_shared_gpus(self) -> bool {
        match self {
            WholeKind::Gpu(vendor) => vendor.is_shared_by_default(),
            WholeKind::Mig(_) => false,
        }
    }

    /// Return the plural in sentences: `NVIDIA GPUs`, `MIG 1g.5gb devices`.
    pub fn plural(self) -> String {
        format!("{self}s")
    }
}

impl From<Vendor> for WholeKind {
    fn from(vendor: Vendor) -> WholeKind {
        WholeKind::Gpu(vendor)
    }
}

impl From<WholeKind> for String {
    fn from(kind: WholeKind) -> String {
        kind.resource().into_owned()
    }
}

impl TryFrom<String> for WholeKind {
    type Error = Error;

    fn try_from(resource: String) -> Result<WholeKind, Error> {
        let why = || {
            format!(
                "{resource:?} stands neither for whole GPUs, such as nvidia.com/gpu, nor for MIG devices, such as nvidia.com/mig-1g.5gb"
            )
        };
        WholeKind::of_resource(&resource).ok_or_else(|| Error::invalid("resource", why()))
    }
}

impl fmt::Display for WholeKind {
    /// Write the name in sentences: `NVIDIA GPU`, `MIG 1g.5gb device`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WholeKind::Gpu(vendor) => write!(f, "{vendor} GPU"),
            WholeKind::Mig(profile) => write!(f, "MIG {profile} device"),
        }
    }
}

/// The name of a MIG profile: `1g.5gb`, `1c.3g.20gb`, `1g.10gb+me` (NVIDIA's MIG User Guide, "MIG Device Names").
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MigProfile {
    /// The number of slices of the GPU instance.
    slices: u8,
    /// The memory in GB.
    gigabytes: u16,
    /// The number of slices of the compute instance. 0 if it has all slices of the GPU instance.
    compute: u8,
    engines: ProfileEngines,
}

/// The engines by which profiles of the same size differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum ProfileEngines {
    Usual,
    Media,
    AllMedia,
    NoMedia,
    Graphics,
}

impl ProfileEngines {
    const ALL: [ProfileEngines; 5] = [
        ProfileEngines::Usual,
        ProfileEngines::Media,
        ProfileEngines::AllMedia,
        ProfileEngines::NoMedia,
        ProfileEngines::Graphics,
    ];

    const fn suffix(self) -> &'static str {
        match self {
            ProfileEngines::Usual => "",
            ProfileEngines::Media => "+me",
            ProfileEngines::AllMedia => "+me.all",
            ProfileEngines::NoMedia => "-me",
            ProfileEngines::Graphics => "+gfx",
        }
    }
}

impl MigProfile {
    /// Read the end of a resource's name, in which `.` stands for `+`: `1g.10gb.me`.
    fn of_resource(name: &str) -> Option<MigProfile> {
        match name.split_once("gb.") {
            Some((size, engines)) => format!("{size}gb+{engines}").parse().ok(),
            None if name.contains('+') => None,
            None => name.parse().ok(),
        }
    }

    fn read(text: &str) -> Option<MigProfile> {
        fn number<T: FromStr>(text: &str) -> Option<T> {
            // One name for each profile: no sign, and no leading zero.
            text.bytes().next().filter(|first| matches!(first, b'1'..=b'9'))?;
            text.parse().ok()
        }
        let (size, suffix) = text.split_once("gb")?;
        let engines = ProfileEngines::ALL.into_iter().find(|engines| engines.suffix() == suffix)?;
        let (slices, gigabytes) = size.split_once("g.")?;
        let (compute, slices) = match slices.split_once("c.") {
            Some((compute, slices)) => (number(compute)?, slices),
            None => (0, slices),
        };
        Some(MigProfile {
            slices: number(slices)?,
            gigabytes: number(gigabytes)?,
            compute,
            engines,
        })
    }
}

impl FromStr for MigProfile {
    type Err = Error;

    fn from_str(text: &str) -> Result<MigProfile, Error> {
        let why = || {
            format!(
                "{text:?} is not the name of a MIG profile; nvidia-smi mig -lgip lists the names, such as 1g.5gb or 1g.10gb+me"
            )
        };
        MigProfile::read(text).ok_or_else(|| Error::invalid("MIG profile", why()))
    }
}

impl fmt::Display for MigProfile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.compute > 0 {
            write!(f, "{}c.", self.compute)?;
        }
        write!(f, "{}g.{}gb{}", self.slices, self.gigabytes, self.engines.suffix())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn each_kind_has_the_resource_of_the_vendors_own_device_plugin() {
        for (resource, text) in [
            ("nvidia.com/gpu", "NVIDIA GPU"),
            ("amd.com/gpu", "AMD GPU"),
            ("gpu.intel.com/xe", "Intel GPU"),
            ("nvidia.com/mig-1g.5gb", "MIG 1g.5gb device"),
            ("nvidia.com/mig-1g.10gb.me", "MIG 1g.10gb+me device"),
            ("nvidia.com/mig-1g.24gb.me.all", "MIG 1g.24gb+me.all device"),
            ("nvidia.com/mig-2g.48gb-me", "MIG 2g.48gb-me device"),
            ("nvidia.com/mig-4g.96gb.gfx", "MIG 4g.96gb+gfx device"),
            ("nvidia.com/mig-1c.3g.20gb", "MIG 1c.3g.20gb device"),
        ] {
            let kind = WholeKind::of_resource(resource).expect(resource);
            assert_eq!((kind.resource().as_ref(), kind.to_string().as_str()), (resource, text));
        }
        for other in [
            "aliyun.com/gpu-mem",
            "nvidia.com/gpu.shared",
            "nvidia.com/mig-1g.5gb.shared",
            "nvidia.com/mig-",
            "nvidia.com/mig-1g.5gb+me",
            "nvidia.com/mig-01g.5gb",
            "nvidia.com/mig-+1g.5gb",
            "nvidia.com/mig-300g.5gb",
            "nvidia.com/mig-1g.gb",
            "intel.com/gpu",
            "gpu.intel.com/i915",
        ] {
            assert_eq!(WholeKind::of_resource(other), None, "{other}");
        }
    }

    proptest! {
        #[test]
        fn no_two_names_stand_for_the_same_profile(text in "[0-9]{0,2}(c\\.)?[0-9+]{1,2}g\\.[0-9]{1,3}gb(\\+me|\\.me|-me|\\+gfx|\\.all)?") {
            if let Ok(profile) = text.parse::<MigProfile>() {
                prop_assert_eq!(profile.to_string(), text);
                let kind = WholeKind::Mig(profile);
                prop_assert_eq!(WholeKind::of_resource(&kind.resource()), Some(kind));
            }
        }
    }
}
