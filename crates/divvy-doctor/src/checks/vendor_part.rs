//! What each vendor contributes to the checks that concern all vendors.

use crate::check::CheckStop;
use crate::facts::{Facts, PciGpu};

/// A vendor's part of the checks that concern all vendors.
pub(super) struct VendorChecks {
    /// Returns the loaded kernel modules for the vendor's GPUs, or a problem if a GPU has none.
    pub(super) modules: fn(&Facts<'_>) -> Result<Vec<String>, CheckStop>,
    /// Returns the device nodes that should exist, or `None` if the vendor's driver is not loaded.
    pub(super) nodes: fn(&Facts<'_>) -> Option<DeviceNodes>,
}

/// The device nodes of a vendor's GPUs.
pub(super) struct DeviceNodes {
    pub(super) expected: Vec<ExpectedNode>,
    /// The command that creates missing device nodes.
    pub(super) create: &'static str,
}

/// A device node that should exist.
pub(super) struct ExpectedNode {
    pub(super) path: String,
    /// The major and minor device number, if the kernel publishes them.
    pub(super) number: Option<(u32, u32)>,
}

/// Return the PCI addresses of these GPUs, separated by commas.
pub(super) fn addresses(gpus: &[PciGpu]) -> String {
    gpus.iter().map(|gpu| gpu.address.as_str()).collect::<Vec<_>>().join(", ")
}
