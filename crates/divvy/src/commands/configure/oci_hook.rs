//! The OCI hook file (`oci-hooks(5)`). It makes an engine run a program for each container, and serves engines in which no OCI
//! runtime can be configured, above all old Podman.

use std::path::Path;

use anyhow::Context as _;
use serde_json::{Value, json};

use crate::commands::{say, write_whole};
use crate::printer;

/// The directories in the hook's environment variable `PATH`.
const PATH: [&str; 6] = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];

/// Print the OCI hook, or write it to a file.
pub(super) fn write(program: &str, file: Option<&Path>, dry_run: bool) -> anyhow::Result<()> {
    say("warning: OCI hooks are obsolete; use a runtime (--runtime) or CDI devices instead")?;
    let text = serde_json::to_string_pretty(&hook(program))? + "\n";
    let Some(file) = file.filter(|_| !dry_run) else {
        return Ok(printer::print(&text)?);
    };
    let told = || format!("{} could not be written", file.display());
    if let Some(directory) = file.parent().filter(|directory| !directory.as_os_str().is_empty()) {
        std::fs::create_dir_all(directory).with_context(told)?;
    }
    write_whole(file, &text, 0o644).with_context(told)
}

fn hook(program: &str) -> Value {
    let (directory, name) = program.rsplit_once('/').unwrap_or(("", program));
    let directory = if directory.is_empty() { "/" } else { directory };
    let own = [directory].into_iter().filter(|directory| !PATH.contains(directory));
    let path: Vec<&str> = PATH.into_iter().chain(own).collect();
    json!({
        "version": "1.0.0",
        "hook": {
            "path": program,
            "args": [name, "prestart"],
            "env": [format!("PATH={}", path.join(":"))],
        },
        "when": {"always": true, "commands": [".*"]},
        "stages": ["prestart"],
    })
}
