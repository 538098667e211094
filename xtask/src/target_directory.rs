//! Where cargo writes.

use std::path::PathBuf;

/// Return cargo's target directory.
pub(crate) fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into()).into()
}

/// Return the directory of cargo's debug builds.
pub(crate) fn debug_directory() -> PathBuf {
    target().join("debug")
}
