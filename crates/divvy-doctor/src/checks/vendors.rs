//! The table of vendors: their parts of the checks that concern all of them. A vendor's own checks are in the module named after it.

use super::vendor_part::VendorChecks;
use super::{amd, intel, nvidia};

/// All vendors.
pub(super) const ALL: [VendorChecks; 3] = [nvidia::PART, amd::PART, intel::PART];
