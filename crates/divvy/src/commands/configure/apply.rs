//! Writes the planned files: each file atomically, and either all files or none.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use divvy_engines::{Edit, EditPlan};
use divvy_host::Root;

use crate::commands::write_whole;

/// The directory tree of the machine to configure.
pub(super) struct ConfiguredTree<'p> {
    pub(super) root: &'p Root<'p>,
    pub(super) directory: &'p Path,
}

impl ConfiguredTree<'_> {
    /// Return the local path for a path on the machine. Symbolic links are resolved, so that a write replaces the target of a
    /// link and not the link.
    fn real(&self, path: &str) -> PathBuf {
        let below = |path: &str| self.directory.join(path.trim_start_matches('/'));
        if let Some((real, _)) = self.root.resolve(path) {
            return below(&real);
        }
        match path.rsplit_once('/') {
            Some((directory, name)) if !directory.is_empty() => self.real(directory).join(name),
            _ => below(path),
        }
    }

    fn write(&self, edit: &Edit, text: &str) -> io::Result<()> {
        let file = self.real(&edit.path);
        let like = match fs::metadata(&file) {
            Ok(there) => Some(there),
            Err(_) => edit.like.as_ref().and_then(|like| fs::metadata(self.real(like)).ok()),
        };
        if let Some(directory) = file.parent() {
            fs::create_dir_all(directory)?;
        }
        let mode = like.as_ref().map_or(0o644, |like| like.permissions().mode() & 0o7777);
        write_whole(&file, text, mode)?;
        let made = fs::metadata(&file)?;
        if let Some(like) = like.filter(|like| (like.uid(), like.gid()) != (made.uid(), made.gid())) {
            std::os::unix::fs::chown(&file, Some(like.uid()), Some(like.gid()))?;
        }
        Ok(())
    }

    fn put(&self, edit: &Edit, text: Option<&str>) -> io::Result<()> {
        match text {
            Some(text) => self.write(edit, text),
            None => match fs::remove_file(self.real(&edit.path)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                result => result,
            },
        }
    }
}

/// Apply a plan. The record of the previous content is written before any other file, and removed after all others. If a write fails, the files
/// that were already written are restored.
pub(super) fn apply(place: &ConfiguredTree<'_>, plan: &EditPlan, record_path: &str) -> anyhow::Result<()> {
    let record = place.real(record_path);
    let record_before = fs::read_to_string(&record).ok();
    if let Some(kept) = plan.record.as_ref().filter(|_| !plan.edits.is_empty()) {
        let text = serde_json::to_string_pretty(kept)? + "\n";
        if let Some(directory) = record.parent() {
            fs::create_dir_all(directory).with_context(|| not_written(record_path))?;
        }
        // The record may contain a registry's password.
        write_whole(&record, &text, 0o600).with_context(|| not_written(record_path))?;
    }
    for (index, edit) in plan.edits.iter().enumerate() {
        let Err(error) = place.put(edit, edit.after.as_deref()) else {
            continue;
        };
        for done in plan.edits[..index].iter().rev() {
            place
                .put(done, done.before.as_deref())
                .with_context(|| format!("{} could not be restored", done.path))?;
        }
        match &record_before {
            Some(text) => write_whole(&record, text, 0o600),
            None => fs::remove_file(&record),
        }
        .with_context(|| format!("{record_path} could not be restored"))?;
        return Err(error).with_context(|| not_written(&edit.path));
    }
    if plan.record.is_none() && record.exists() {
        fs::remove_file(&record).with_context(|| not_written(record_path))?;
    }
    Ok(())
}

fn not_written(path: &str) -> String {
    format!(
        "{path} could not be written, and all files are unchanged; only root may change engines' files, so run this command with sudo"
    )
}
