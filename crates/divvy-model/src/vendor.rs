//! The vendors whose GPUs Divvy offers, and their names.

use serde::{Deserialize, Serialize};

/// The vendor of a GPU. The capabilities of a vendor's GPUs, their failures, and what a container needs to use them are in the
/// modules named after the vendor. All other code may compare two vendors, but never tests for a particular one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Vendor {
    #[default]
    Nvidia,
    Amd,
    Intel,
}

/// The names of a vendor.
struct VendorNames {
    /// The name in inventories and labels.
    name: &'static str,
    /// The name in sentences.
    title: &'static str,
    /// The extended resource for whole GPUs, which the vendor's own device plugin defines.
    whole: &'static str,
    /// Whether Divvy shares the memory of these GPUs without being told to.
    shared: bool,
}

impl Vendor {
    /// All vendors, in the order in which a node's GPUs are listed.
    pub const ALL: [Vendor; 3] = [Vendor::Nvidia, Vendor::Amd, Vendor::Intel];

    const fn names(self) -> VendorNames {
        match self {
            Vendor::Nvidia => VendorNames {
                name: "nvidia",
                title: "NVIDIA",
                whole: "nvidia.com/gpu",
                shared: true,
            },
            Vendor::Amd => VendorNames {
                name: "amd",
                title: "AMD",
                whole: "amd.com/gpu",
                shared: false,
            },
            Vendor::Intel => VendorNames {
                name: "intel",
                title: "Intel",
                whole: "gpu.intel.com/xe",
                shared: false,
            },
        }
    }

    /// Return the name in inventories: `nvidia`, `amd`, `intel`.
    pub const fn name(self) -> &'static str {
        self.names().name
    }

    /// Return the name in sentences: `NVIDIA`, `AMD`, `Intel`.
    pub const fn title(self) -> &'static str {
        self.names().title
    }

    /// Return the extended resource for whole GPUs: `nvidia.com/gpu`, `amd.com/gpu`, or `gpu.intel.com/xe` (Divvy offers the Intel GPUs of the
    /// driver xe). The CDI specs for whole GPUs have the same kind.
    pub const fn whole_resource(self) -> &'static str {
        self.names().whole
    }

    /// Report whether agents share the memory of this vendor's GPUs (`aliyun.com/gpu-mem`) without being told to. If not, they offer each GPU as a
    /// whole, as [`Vendor::whole_resource`], and share its memory only where the operator wants that ([`crate::Gpu::is_shared`] says where).
    pub const fn is_shared_by_default(self) -> bool {
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
