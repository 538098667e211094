use std::fmt;
use std::str::FromStr;

use crate::Error;

/// A device id that the agent advertises to the kubelet.
///
/// The ids of each resource have their own form, so that ids are unique across all resources of a node. This is necessary
/// because, up to Kubernetes 1.36, the kubelet finds the pod of an unhealthy device by the id alone and ignores the resource
/// (`pkg/kubelet/cm/devicemanager/pod_devices.go`).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DeviceId {
    /// One unit of a GPU's memory: `<GPU UUID>::m<slot>`.
    Memory {
        /// The GPU's UUID.
        uuid: String,
        /// The position of the id on its GPU, from 0 to the GPU's number of units − 1.
        slot: u32,
    },
    /// One GPU, as counted by `aliyun.com/gpu-count`: `<GPU UUID>::c`.
    Count {
        /// The GPU's UUID.
        uuid: String,
    },
}

impl DeviceId {
    /// Return the UUID of the GPU to which the id belongs.
    pub fn uuid(&self) -> &str {
        match self {
            DeviceId::Memory { uuid, .. } | DeviceId::Count { uuid } => uuid,
        }
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceId::Memory { uuid, slot } => write!(f, "{uuid}::m{slot}"),
            DeviceId::Count { uuid } => write!(f, "{uuid}::c"),
        }
    }
}

impl FromStr for DeviceId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let wrong = || Error::invalid("device id", format!("{text:?} is not an id of this plugin"));
        let (uuid, rest) = text.rsplit_once("::").ok_or_else(wrong)?;
        if uuid.is_empty() {
            return Err(wrong());
        }
        let uuid = uuid.to_owned();
        if rest == "c" {
            return Ok(DeviceId::Count { uuid });
        }
        let digits = rest.strip_prefix('m').ok_or_else(wrong)?;
        let slot: u32 = digits.parse().map_err(|_| wrong())?;
        // Each id has one spelling: `m07` or `m+7` would be a second name of the same slot.
        if slot.to_string() != digits {
            return Err(wrong());
        }
        Ok(DeviceId::Memory { uuid, slot })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn reading_what_was_written_gives_the_same_id(uuid in "GPU-[0-9a-f-]{1,36}", slot: u32) {
            for id in [DeviceId::Memory { uuid: uuid.clone(), slot }, DeviceId::Count { uuid: uuid.clone() }] {
                prop_assert_eq!(id.to_string().parse::<DeviceId>().expect("own text"), id);
            }
        }

        #[test]
        fn an_id_has_one_spelling(text in ".{0,40}") {
            if let Ok(id) = text.parse::<DeviceId>() {
                prop_assert_eq!(id.to_string(), text);
            }
        }
    }

    #[test]
    fn foreign_ids_are_refused() {
        for text in [
            "",
            "GPU-1",
            "GPU-1-_-3",
            "::m1",
            "GPU-1::m",
            "GPU-1::m-1",
            "GPU-1::m07",
            "GPU-1::x",
            "GPU-1::m4294967296",
        ] {
            assert!(text.parse::<DeviceId>().is_err(), "{text}");
        }
    }
}
