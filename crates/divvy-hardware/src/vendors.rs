//! What differs between vendors and is asked about a GPU by other modules: the answers are in the vendors' own modules.

use divvy_model::Vendor;

use crate::{amd, nvidia};

/// Report whether `text` is the name of a fault of this vendor. An inventory has only the text, and says with it why a GPU failed.
pub(crate) fn is_fault_name(vendor: Vendor, text: &str) -> bool {
    match vendor {
        Vendor::Nvidia => nvidia::is_fault_name(text),
        Vendor::Amd => amd::is_fault_name(text),
    }
}
