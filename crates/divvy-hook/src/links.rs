//! Links in the container, `libcuda.so` for one, which programs are linked with.

use divvy_oci::hook::arguments::Link;

use crate::error::Result;
use crate::root::Root;

/// Makes it, if it is not there.
pub(crate) fn create(root: &Root, link: &Link) -> Result<()> {
    root.link(&link.target, &link.at)
}
