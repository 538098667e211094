//! Symbolic links in the container, such as `libcuda.so`, which linkers need.

use divvy_oci::hook::arguments::LinkArgument;

use crate::error::Result;
use crate::root::ImageRoot;

/// Create the link, unless it exists already.
pub(crate) fn create(root: &ImageRoot, link: &LinkArgument) -> Result<()> {
    root.link(&link.target, &link.at)
}
