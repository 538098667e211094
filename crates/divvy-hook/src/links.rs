//! Links in the container, `libcuda.so` for one, which programs are linked with.

use crate::error::{Error, Result};
use crate::root::Root;

/// `TARGET::LINK`
#[derive(Debug)]
pub(crate) struct Link {
    /// What it leads to: means something in the container only.
    target: String,
    at: String,
}

impl Link {
    pub(crate) fn parse(text: &str) -> Result<Link> {
        let parts = text
            .split_once("::")
            .filter(|(target, at)| !target.is_empty() && at.starts_with('/'));
        let (target, at) = parts.ok_or_else(|| Error::Link(text.chars().take(200).collect()))?;
        Ok(Link {
            target: target.to_owned(),
            at: at.to_owned(),
        })
    }
}

/// Makes it, if it is not there.
pub(crate) fn create(root: &Root, link: &Link) -> Result<()> {
    root.link(&link.target, &link.at)
}
