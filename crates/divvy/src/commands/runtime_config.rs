//! `divvy runtime-config`: shows or changes the settings of divvy-runtime.

use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use anyhow::Context as _;
use divvy_oci::runtime::{edit, settings};

use super::{read_bounded, say, write_whole};
use crate::cli::runtime_config::RuntimeConfigArgs;
use crate::printer;

/// The largest accepted file in bytes. divvy-runtime has the same limit.
const LARGEST: u64 = 16 * 1024 * 1024;

/// Print the settings, or write them to a file.
pub fn run(args: &RuntimeConfigArgs) -> anyhow::Result<()> {
    let file = &args.config_file;
    let before = match read_bounded(file, LARGEST) {
        _ if args.default => None,
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        text => Some(text.with_context(|| format!("{} cannot be read", file.display()))?),
    };
    // The default path of ldconfig is the one that the runtime would find on this machine.
    let assumed = edit::assumed(settings::ldconfig(|path| Path::new(path).exists()));
    let after = edit::set(before.as_deref().unwrap_or(&assumed), &args.set).with_context(|| match before {
        Some(_) => file.display().to_string(),
        None => "the default settings".to_owned(),
    })?;
    let to = match (&args.output, args.in_place) {
        (Some(output), _) => output,
        (None, true) => file,
        (None, false) => return Ok(printer::print(&after)?),
    };
    write(to, &after).with_context(|| format!("{} was not written", to.display()))?;
    say(&format!(
        "note: wrote {}; it applies to containers that are created from now on",
        to.display()
    ))?;
    Ok(())
}

/// Replace the file. If it is a link, replace its target. Keep the permissions of an existing file.
fn write(to: &Path, text: &str) -> anyhow::Result<()> {
    let to = to.canonicalize().unwrap_or_else(|_| to.to_owned());
    if let Some(directory) = to.parent().filter(|directory| !directory.as_os_str().is_empty()) {
        std::fs::create_dir_all(directory).with_context(|| format!("the directory {} cannot be created", directory.display()))?;
    }
    let mode = std::fs::metadata(&to).map_or(0o644, |found| found.permissions().mode() & 0o7777);
    Ok(write_whole(&to, text, mode)?)
}
