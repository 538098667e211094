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

/// Return the recorded calls, one a line. Questions are left out: how often a limit is read back does not matter.
///
/// # Errors
/// The error is the system's, except that no call has been recorded.
pub fn calls(directory: &Path) -> io::Result<Vec<String>> {
    let text = match std::fs::read_to_string(directory.join(CALLS)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        text => text?,
    };
    let calls = text.lines().filter(|line| !line.starts_with("control get_"));
    Ok(calls.map(str::to_owned).collect())
}
