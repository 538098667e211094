//! From a wish to edits, and back again.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::revert::{self, Kept};
use super::text::text;
use super::{Configuration, Error, Files, containerd, crio, docker, template};
use divvy_host::plain_line;

/// What an engine is to be told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wish {
    /// The runtime's name: what a RuntimeClass has as its handler, what `docker run --runtime` takes.
    pub name: String,
    /// Its program.
    pub path: String,
    /// Whether it is the runtime of who asks for none; none leaves that as it is.
    pub set_default: Option<bool>,
    /// Whether the engine puts CDI devices into containers; none leaves that as it is.
    pub cdi: Option<bool>,
    /// Whether the kubelet's cgroup driver is systemd; none where nobody says.
    pub systemd_cgroup: Option<bool>,
    /// Write a drop-in that is there anew from the other files, whatever is in it, as NVIDIA's tool does.
    pub anew: bool,
    /// What the engine says itself of its configuration, as TOML (`containerd config dump`, `crio status config`): copied from in place of its files.
    pub said: Option<String>,
}

/// Whose files, and which.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// Docker's one file.
    Docker {
        /// `daemon.json`.
        config: String,
    },
    /// containerd's.
    Containerd {
        /// The file that containerd is told to read.
        config: String,
        /// Where the runtime is written; none writes it into `config`.
        drop_in: Option<String>,
        /// How this containerd puts files together; none where its version is not known.
        merge: Option<containerd::Merge>,
        /// The version of the format for a file that is not there yet.
        version: i64,
    },
    /// CRI-O's.
    Crio {
        /// The first file.
        config: String,
        /// Where the runtime is written; none writes it into `config`.
        drop_in: Option<String>,
    },
    /// The template from which k3s or rke2 makes containerd's configuration at each start.
    Template {
        /// The template.
        config: String,
        /// What was made of it at the last start.
        generated: String,
        /// The version of containerd's format.
        version: i64,
    },
}

impl Target {
    /// The file by which the engine is known.
    pub fn config(&self) -> &str {
        match self {
            Target::Docker { config }
            | Target::Containerd { config, .. }
            | Target::Crio { config, .. }
            | Target::Template { config, .. } => config,
        }
    }

    /// Where the [`Record`] is kept.
    pub fn record(&self) -> String {
        format!("{}.divvy-undo", self.config())
    }

    /// The file into which the runtime goes.
    pub fn written(&self) -> &str {
        match self {
            Target::Containerd {
                drop_in: Some(drop_in), ..
            }
            | Target::Crio {
                drop_in: Some(drop_in), ..
            } => drop_in,
            _ => self.config(),
        }
    }

    fn merge(&self) -> containerd::Merge {
        match self {
            Target::Containerd { merge: Some(merge), .. } => *merge,
            // What is right for the older ones is right for all.
            _ => containerd::Merge::Sections,
        }
    }

    /// What the engine's files say together.
    ///
    /// # Errors
    /// As [`docker::read`], [`containerd::read`], [`crio::read`].
    pub fn read(&self, files: &dyn Files) -> Result<Configuration, Error> {
        match self {
            Target::Docker { config } => docker::read(files, config),
            Target::Containerd { config, .. } => containerd::read(files, config, self.merge()),
            Target::Crio { config, .. } => crio::read(files, config),
            Target::Template { generated, .. } => containerd::read(files, generated, containerd::Merge::Keys),
        }
    }

    pub(super) fn is_json(&self) -> bool {
        matches!(self, Target::Docker { .. })
    }
}

/// A file that changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Edit {
    /// The file.
    pub path: String,
    /// Its text until now; none if it is not there.
    pub before: Option<String>,
    /// Its text from now on; none if it goes.
    pub after: Option<String>,
    /// The file whose owner and permissions a new file gets: what was copied from it may be secret.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub like: Option<String>,
}

/// What there is to do.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// The files that change, in the order in which they are written: what is imported comes before who imports it. Empty: all is as wished.
    pub edits: Vec<Edit>,
    /// What the person should know.
    pub notes: Vec<String>,
    /// What is to be kept for [`undo`]; none if nothing of ours is left.
    pub record: Option<Record>,
}

/// What was there before us, file by file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The files that were written.
    pub files: BTreeMap<String, Recorded>,
}

impl Record {
    /// Reads the record in the file of this path.
    ///
    /// # Errors
    /// [`Error::Record`]: it is none that we wrote.
    pub fn parse(path: &str, text: &str) -> Result<Record, Error> {
        let wrong = |why: String| Error::Record {
            path: path.to_owned(),
            why: plain_line(why.chars()),
        };
        let record: Record = serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?;
        let is_whole =
            |path: &str| path.starts_with('/') && !path.split('/').any(|part| part == "..") && !path.contains(char::is_control);
        match record.files.keys().find(|file| !is_whole(file)) {
            Some(file) => Err(wrong(format!("{file:?} is no path of a file that it wrote"))),
            None => Ok(record),
        }
    }
}

/// A file that was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recorded {
    /// Its text before; none if it was not there.
    pub original: Option<String>,
    /// What was written.
    pub written: String,
}

/// The files as they would be after edits.
pub(super) struct After<'f> {
    pub(super) files: &'f dyn Files,
    pub(super) edits: Vec<(String, Option<String>)>,
}

impl Files for After<'_> {
    fn text(&self, path: &str) -> Result<Option<String>, String> {
        match self.edits.iter().rev().find(|(edited, _)| edited == path) {
            Some((_, text)) => Ok(text.clone()),
            None => self.files.text(path),
        }
    }

    fn names(&self, folder: &str) -> Vec<String> {
        let mut names = self.files.names(folder);
        for (path, text) in &self.edits {
            let below = path
                .strip_prefix(folder.trim_end_matches('/'))
                .and_then(|rest| rest.strip_prefix('/'));
            let Some(below) = below else { continue };
            match (below.split_once('/'), text) {
                // A folder that comes with its first file, and may have been there.
                (Some((name, _)), Some(_)) if !names.iter().any(|known| known == name) => names.push(name.to_owned()),
                (Some(_), _) => {}
                (None, text) => {
                    names.retain(|known| known != below);
                    if text.is_some() {
                        names.push(below.to_owned());
                    }
                }
            }
        }
        names.sort_unstable();
        names
    }
}

/// One file's new text, before it is known whether that is a change.
pub(super) struct Write {
    pub(super) path: String,
    pub(super) text: String,
    pub(super) like: Option<String>,
}

/// What makes an engine have the runtime of a wish. A second time it is nothing.
///
/// # Errors
/// As [`Target::read`]; and what is wished cannot be had in the files as they are, because another file wins.
pub fn configure(files: &dyn Files, target: &Target, wish: &Wish, record: Option<&Record>) -> Result<Plan, Error> {
    let mut notes = Vec::new();
    // A person's edits since are kept: what is undone later is ours alone.
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
        Target::Docker { config } => docker::configure(files, config, wish)?,
        Target::Containerd {
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
            wish,
            &ours,
            &mut notes,
        )?,
        Target::Crio { config, drop_in } => crio::configure(files, config, drop_in.as_deref(), wish, &ours, &mut notes)?,
        Target::Template {
            config,
            generated,
            version,
        } => template::configure(files, config, generated, *version, wish, &mut notes)?,
    };
    let mut plan = Plan {
        notes,
        ..Plan::default()
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
    check(files, target, wish, &plan)?;
    plan.record = (!originals.files.is_empty()).then_some(originals);
    Ok(plan)
}

/// Whether the engine, reading the new files as it does, has what was wished.
fn check(files: &dyn Files, target: &Target, wish: &Wish, plan: &Plan) -> Result<(), Error> {
    match target {
        Target::Template { .. } => return Ok(()),
        // Who reads it was told; what it says was written whole.
        Target::Crio {
            config,
            drop_in: Some(drop_in),
        } if !crio::is_read(config, drop_in) => return Ok(()),
        _ => {}
    }
    let after = After {
        files,
        edits: plan
            .edits
            .iter()
            .map(|edit| (edit.path.clone(), edit.after.clone()))
            .collect(),
    };
    let read = target.read(&after)?;
    let has = |what: &str, winner: Option<&String>| Error::Overruled {
        path: target.written().to_owned(),
        what: what.to_owned(),
        winner: winner.or(read.files.last()).unwrap_or(&target.config().to_owned()).clone(),
    };
    let runtime = read.runtimes.get(&wish.name).ok_or_else(|| has("the runtime", None))?;
    if runtime.path.as_deref() != Some(&wish.path) {
        return Err(has("the runtime's program", Some(&runtime.file)));
    }
    if wish.set_default == Some(true) && read.default_runtime.as_deref() != Some(&wish.name) {
        return Err(has("the default runtime", read.default_runtime_file.as_ref()));
    }
    if wish.cdi.is_some() && !matches!(target, Target::Crio { .. }) && read.cdi != wish.cdi {
        return Err(has("CDI", None));
    }
    Ok(())
}

/// What takes the runtime out again: each file as it was, to the byte; where somebody has edited it since, all of it but ours.
/// Without a record, the runtime of this name and the default that points to it.
///
/// # Errors
/// As [`Target::read`].
pub fn undo(files: &dyn Files, target: &Target, name: &str, record: Option<&Record>) -> Result<Plan, Error> {
    let mut plan = Plan::default();
    let Some(record) = record else {
        for path in target.read(files)?.files {
            let before = text(files, &path)?.unwrap_or_default();
            let after = match target {
                Target::Docker { .. } => docker::without(&path, &before, name)?,
                Target::Containerd { .. } => containerd::without(&path, &before, name, target.merge())?,
                Target::Crio { .. } => crio::without(&path, &before, name)?,
                // What k3s made is not ours to edit; the template has our mark.
                Target::Template { .. } => continue,
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
        plan.notes.push(match plan.edits.is_empty() {
            true => format!("nothing here was written by divvy, and there is no runtime {name} to take out"),
            false => format!(
                "there is no record of what was here before (divvy did not write it), so the runtime {name} and a default that names it are taken out, \
                 and nothing else"
            ),
        });
        return Ok(plan);
    };
    // Who imports goes first, so that no import ever lacks its file.
    let (main, others): (Vec<_>, Vec<_>) = record.files.iter().partition(|(path, _)| *path == target.config());
    for (path, recorded) in main.into_iter().chain(others) {
        let before = text(files, path)?;
        let (after, kept) = match before.as_deref() == Some(&recorded.written) {
            true => (recorded.original.clone(), Kept::default()),
            false => revert::file(target, path, recorded, before.clone())?,
        };
        if before.as_deref() != Some(&recorded.written) {
            plan.notes.push(match (&before, kept.0.is_empty()) {
                (None, _) => format!("{path} is gone already, and stays so"),
                (_, true) => format!("{path} was edited since; only what divvy wrote is taken out, and the edits stay"),
                (_, false) => format!(
                    "{path} was edited since; what divvy wrote is taken out, but what was changed by hand stays: {}",
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
