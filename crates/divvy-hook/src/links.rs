//! Symbolic links in the container, such as `libcuda.so`, which linkers need.

use divvy_oci::hook::arguments::Link;

use crate::error::Result;
use crate::root::Root;

/// Create the link, unless it exists already.
pub(crate) fn create(root: &Root, link: &Link) -> Result<()> {
    root.link(&link.target, &link.at)
}
