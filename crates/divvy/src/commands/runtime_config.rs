//! `divvy runtime-config`.

use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use anyhow::Context as _;
use divvy_oci::runtime::{edit, settings};

use super::{read_bounded, say, write_whole};
use crate::cli::runtime_config::RuntimeConfigArgs;
use crate::printer;

/// As divvy-runtime takes it.
const LARGEST: u64 = 16 * 1024 * 1024;

/// Prints the settings, or writes them.
pub fn run(args: &RuntimeConfigArgs) -> anyhow::Result<()> {
    let file = &args.config_file;
    let before = match read_bounded(file, LARGEST) {
        _ if args.default => None,
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        text => Some(text.with_context(|| format!("{} cannot be read", file.display()))?),
    };
    // As the runtime finds it on this machine.
    let assumed = edit::assumed(settings::ldconfig(|path| Path::new(path).exists()));
    let after = edit::set(before.as_deref().unwrap_or(&assumed), &args.set).with_context(|| match before {
        Some(_) => file.display().to_string(),
        None => "what is assumed without a file".to_owned(),
    })?;
    let to = match (&args.output, args.in_place) {
        (Some(output), _) => output,
        (None, true) => file,
        (None, false) => return Ok(printer::print(&after)?),
    };
    write(to, &after).with_context(|| format!("{} was not written", to.display()))?;
    say(&format!(
        "note: wrote {}; containers that are created from now on go by it",
        to.display()
    ))?;
    Ok(())
}

/// Where a link leads, with the permissions that are there.
fn write(to: &Path, text: &str) -> anyhow::Result<()> {
    let to = to.canonicalize().unwrap_or_else(|_| to.to_owned());
    if let Some(folder) = to.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        std::fs::create_dir_all(folder).with_context(|| format!("the folder {} cannot be made", folder.display()))?;
    }
    let mode = std::fs::metadata(&to).map_or(0o644, |found| found.permissions().mode() & 0o7777);
    Ok(write_whole(&to, text, mode)?)
}
