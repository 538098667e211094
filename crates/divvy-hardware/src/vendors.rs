//! Questions that other modules ask about a GPU and whose answers differ between vendors. The vendors' own modules answer them.

use divvy_model::Vendor;

use crate::{amd, nvidia};

/// Report whether `text` is the name of a fault of this vendor. An inventory contains only this text as the reason why a GPU
/// failed.
pub(crate) fn is_fault_name(vendor: Vendor, text: &str) -> bool {
    match vendor {
        Vendor::Nvidia => nvidia::is_fault_name(text),
        Vendor::Amd => amd::is_fault_name(text),
        // Its driver reports no faults.
        Vendor::Intel => false,
    }
}
