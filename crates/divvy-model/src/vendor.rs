//! The vendors whose GPUs Divvy offers, and what identifies each of them.

use serde::{Deserialize, Serialize};

/// The vendor of a GPU. What a vendor's GPUs can do, how they fail, and what a container needs for them is in the modules named
/// after the vendor; other code compares vendors with each other, and never with a particular one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Vendor {
    #[default]
    Nvidia,
    Amd,
}

/// The names of a vendor.
struct Names {
    /// In inventories and labels.
    name: &'static str,
    /// In sentences.
    title: &'static str,
    /// The extended resource for whole GPUs, which the vendor's own device plugin defines.
    whole: &'static str,
    /// Divvy shares the memory of these GPUs. It offers other GPUs only as a whole.
    shared: bool,
}

impl Vendor {
    /// All vendors, in the order in which a node's GPUs are listed.
    pub const ALL: [Vendor; 2] = [Vendor::Nvidia, Vendor::Amd];

    const fn names(self) -> Names {
        match self {
            Vendor::Nvidia => Names {
                name: "nvidia",
                title: "NVIDIA",
                whole: "nvidia.com/gpu",
                shared: true,
            },
            Vendor::Amd => Names {
                name: "amd",
                title: "AMD",
                whole: "amd.com/gpu",
                shared: false,
            },
        }
    }

    /// Return the name in inventories: `nvidia`, `amd`.
    pub const fn name(self) -> &'static str {
        self.names().name
    }

    /// Return the name in sentences: `NVIDIA`, `AMD`.
    pub const fn title(self) -> &'static str {
        self.names().title
    }

    /// Return the extended resource for whole GPUs: `nvidia.com/gpu`, `amd.com/gpu`. It is also the kind of the CDI specs that
    /// describe whole GPUs.
    pub const fn whole_resource(self) -> &'static str {
        self.names().whole
    }

    /// Report whether Divvy shares the memory of this vendor's GPUs (`aliyun.com/gpu-mem`). Otherwise it offers each GPU only as a
    /// whole, as [`Vendor::whole_resource`].
    pub const fn shares_memory(self) -> bool {
        self.names().shared
    }

    /// Return the vendor with this name.
    pub fn of_name(name: &str) -> Option<Vendor> {
        Vendor::ALL.into_iter().find(|vendor| vendor.name() == name)
    }
}

impl std::fmt::Display for Vendor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.title())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vendor_is_found_by_the_name_that_it_writes() {
        for vendor in Vendor::ALL {
            assert_eq!(Vendor::of_name(vendor.name()), Some(vendor));
            assert_eq!(serde_json::to_value(vendor).expect("a name"), vendor.name());
        }
        assert_eq!(Vendor::of_name("NVIDIA"), None);
    }
}
