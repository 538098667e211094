//! Scripts that stand in for the driver's programs that MPS needs. They record their calls in the file `calls` in their directory.

use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

/// The file in which the scripts record their calls, one a line.
pub const CALLS: &str = "calls";

const SCRIPTS: [(&str, &str); 2] = [
    ("nvidia-smi", include_str!("mps/nvidia-smi")),
    ("nvidia-cuda-mps-control", include_str!("mps/nvidia-cuda-mps-control")),
];

/// Write the scripts into a directory, which must exist.
///
/// # Errors
/// The error is the system's.
pub fn install(directory: &Path) -> io::Result<()> {
    for (name, text) in SCRIPTS {
        let path = directory.join(name);
        std::fs::write(&path, text)?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?;
    }
    Ok(())
}
