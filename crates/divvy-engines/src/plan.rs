//! Computes the edits that register a runtime with an engine, and the edits that remove it again.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::edit::{EditedFiles, Recorded, RuntimeSettings};
use super::revert::{self, KeptKeys};
use super::target::EngineTarget;
use super::text::text;
use super::{Configuration, Error, TextFiles, containerd, crio, docker, template};
use divvy_host::plain_line;

/// The change of one file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Edit {
    /// The file's path.
    pub path: String,
    /// The current text; `None` if the file does not exist.
    pub before: Option<String>,
    /// The new text; `None` if the file is removed.
    pub after: Option<String>,
    /// The file whose owner and permissions a new file inherits, because secrets may have been copied from it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub like: Option<String>,
}

/// The edits that [`configure`] or [`undo`] computed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EditPlan {
    /// The changes, in the order in which they must be written: an imported file comes before the file that imports it. The list
    /// is empty if nothing has to change.
    pub edits: Vec<Edit>,
    /// Advice and warnings for the user.
    pub notes: Vec<String>,
    /// The record to keep for [`undo`]; `None` if no file contains anything from divvy.
    pub record: Option<OriginalTexts>,
}

impl EditPlan {
    /// Return the files as they will be after the edits.
    pub fn after<'f>(&self, files: &'f dyn TextFiles) -> impl TextFiles + 'f {
        let edits = self.edits.iter().map(|edit| (edit.path.clone(), edit.after.clone()));
        EditedFiles {
            files,
            edits: edits.collect(),
        }
    }
}

/// The original text of each file that divvy wrote.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OriginalTexts {
    /// The files that divvy wrote, by path.
    pub files: BTreeMap<String, Recorded>,
}

impl OriginalTexts {
    /// Parse the text of the record file at `path`.
    ///
    /// # Errors
    /// Fails with [`Error::Record`] if divvy did not write this text.
    pub fn parse(path: &str, text: &str) -> Result<OriginalTexts, Error> {
        let wrong = |why: String| Error::Record {
            path: path.to_owned(),
            why: plain_line(why.chars()),
        };
        let record: OriginalTexts = serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?;
        let is_whole =
            |path: &str| path.starts_with('/') && !path.split('/').any(|part| part == "..") && !path.contains(char::is_control);
        match record.files.keys().find(|file| !is_whole(file)) {
            Some(file) => Err(wrong(format!("{file:?} is not the path of a file that divvy wrote"))),
            None => Ok(record),
        }
    }
}

/// Compute the edits that give an engine the settings of a [`RuntimeSettings`]. If the engine already has these settings, the
/// plan has no edits.
///
/// The plan is verified: the edited files are read as the engine would read them, and the result must have the requested settings.
///
/// # Errors
/// Fails with the errors of [`EngineTarget::read`], and with [`Error::Overruled`] if a file that the engine reads later overrides a
/// requested setting.
pub fn configure(
    files: &dyn TextFiles,
    target: &EngineTarget,
    settings: &RuntimeSettings,
    record: Option<&OriginalTexts>,
) -> Result<EditPlan, Error> {
    let mut notes = Vec::new();
    // Keep the edits that a person made since the last run: a later undo removes only what divvy wrote.
    let mut originals = record.cloned().unwrap_or_default();
    for (path, recorded) in &mut originals.files {
        let now = text(files, path)?;
        if now.as_deref() != Some(&recorded.written) {
            recorded.original = revert::file(target, path, recorded, now)?.0;
        }
    }
    let ours =
        |path: &str, now: &str| record.is_some_and(|record| record.files.get(path).is_some_and(|file| file.written == now));
    let writes = match target {
        EngineTarget::Docker { config } => docker::configure(files, config, settings)?,
        EngineTarget::Containerd {
            config,
            drop_in,
            merge,
            version,
        } => containerd::configure(
            files,
            &containerd::Where {
                config,
                drop_in: drop_in.as_deref(),
                merge: *merge,
                version: *version,
            },
            settings,
            &ours,
            &mut notes,
        )?,
        EngineTarget::Crio { config, drop_in } => {
            crio::configure(files, config, drop_in.as_deref(), settings, &ours, &mut notes)?
        }
        EngineTarget::Template {
            config,
            generated,
            version,
        } => template::configure(files, config, generated, *version, settings, &mut notes)?,
    };
    let mut plan = EditPlan {
        notes,
        ..EditPlan::default()
    };
    for write in writes {
        let before = text(files, &write.path)?;
        if before.as_deref() == Some(&write.text) {
            continue;
        }
        let original = match originals.files.get(&write.path) {
            Some(recorded) => recorded.original.clone(),
            None => before.clone(),
        };
        originals.files.insert(
            write.path.clone(),
            Recorded {
                original,
                written: write.text.clone(),
            },
        );
        plan.edits.push(Edit {
            path: write.path,
            before,
            after: Some(write.text),
            like: write.like,
        });
    }
    check(files, target, settings, &plan)?;
    plan.record = (!originals.files.is_empty()).then_some(originals);
    Ok(plan)
}

/// Check that the engine gets the requested settings when it reads the edited files.
fn check(files: &dyn TextFiles, target: &EngineTarget, settings: &RuntimeSettings, plan: &EditPlan) -> Result<(), Error> {
    match target {
        EngineTarget::Template { .. } => return Ok(()),
        // CRI-O does not read this drop-in by default, so its files cannot show the result. A note tells the user which option makes CRI-O read it.
        EngineTarget::Crio {
            config,
            drop_in: Some(drop_in),
        } if !crio::is_read(config, drop_in) => return Ok(()),
        _ => {}
    }
    in_effect(target, settings, &target.read(&plan.after(files))?)
}

/// Check that a configuration, as the engine reads it, has the requested settings.
///
/// # Errors
/// Fails with [`Error::Overruled`] if the engine would not use a setting.
pub fn in_effect(target: &EngineTarget, settings: &RuntimeSettings, read: &Configuration) -> Result<(), Error> {
    let has = |what: &str, winner: Option<&String>| Error::Overruled {
        path: target.written().to_owned(),
        what: what.to_owned(),
        winner: winner.or(read.files.last()).unwrap_or(&target.config().to_owned()).clone(),
    };
    let runtime = read.runtimes.get(&settings.name).ok_or_else(|| has("the runtime", None))?;
    if runtime.path.as_deref() != Some(&settings.path) {
        return Err(has("the runtime's program", Some(&runtime.file)));
    }
    if settings.set_default == Some(true) && read.default_runtime.as_deref() != Some(&settings.name) {
        return Err(has("the default runtime", read.default_runtime_file.as_ref()));
    }
    if settings.cdi.is_some() && !matches!(target, EngineTarget::Crio { .. }) && read.cdi != settings.cdi {
        return Err(has("CDI", None));
    }
    Ok(())
}

/// Compute the edits that remove the runtime.
///
/// With a record, each file gets its original text back, byte for byte. If a file was edited since divvy wrote it, only divvy's entries are
/// removed from it. Without a record, only the runtime `name` and a default that names it are removed.
///
/// # Errors
/// Fails with the errors of [`EngineTarget::read`].
pub fn undo(files: &dyn TextFiles, target: &EngineTarget, name: &str, record: Option<&OriginalTexts>) -> Result<EditPlan, Error> {
    let mut plan = EditPlan::default();
    let Some(record) = record else {
        for path in target.read(files)?.files {
            let before = text(files, &path)?.unwrap_or_default();
            let after = match target {
                EngineTarget::Docker { .. } => docker::without(&path, &before, name)?,
                EngineTarget::Containerd { .. } => containerd::without(&path, &before, name, target.merge())?,
                EngineTarget::Crio { .. } => crio::without(&path, &before, name)?,
                // k3s generates these files at each start, so an edit would be lost. In the template, divvy's part is between two marks.
                EngineTarget::Template { .. } => continue,
            };
            if after != before {
                plan.edits.push(Edit {
                    path,
                    before: Some(before),
                    after: Some(after),
                    like: None,
                });
            }
        }
        plan.notes.push(if plan.edits.is_empty() {
            format!("divvy wrote nothing here, and this configuration has no runtime {name}")
        } else {
            format!(
                "there is no record of the original configuration (divvy did not write the current one), so only the runtime {name} and a default \
                 that names it are removed"
            )
        });
        return Ok(plan);
    };
    // Edit the importing file first, so that an import never names a missing file.
    let (main, others): (Vec<_>, Vec<_>) = record.files.iter().partition(|(path, _)| *path == target.config());
    for (path, recorded) in main.into_iter().chain(others) {
        let before = text(files, path)?;
        let (after, kept) = if before.as_deref() == Some(&recorded.written) {
            (recorded.original.clone(), KeptKeys::default())
        } else {
            revert::file(target, path, recorded, before.clone())?
        };
        if before.as_deref() != Some(&recorded.written) {
            plan.notes.push(match (&before, kept.0.is_empty()) {
                (None, _) => format!("{path} was already removed, and divvy does not restore it"),
                (_, true) => format!("{path} was edited since divvy wrote it; only divvy's entries are removed, and the edits stay"),
                (_, false) => format!(
                    "{path} was edited since divvy wrote it; divvy's entries are removed, except for those that were changed by hand: {}",
                    kept.0.join(", ")
                ),
            });
        }
        if after != before {
            plan.edits.push(Edit {
                path: path.clone(),
                before,
                after,
                like: None,
            });
        }
    }
    Ok(plan)
}
