//! The table of vendors, with what each contributes to the checks that concern all vendors. Checks that concern only one vendor
//! are in the module named after it.

use super::vendor_part::VendorChecks;
use super::{amd, intel, nvidia};

/// All vendors.
pub(super) const ALL: [VendorChecks; 3] = [nvidia::PART, amd::PART, intel::PART];
