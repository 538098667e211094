//! The template from which k3s and rke2 generate containerd's configuration at each start (`pkg/agent/templates` in k3s). It is a Go template
//! that produces TOML, so a TOML parser cannot read it. Therefore it is edited as text, and divvy's part is between two marks.

use super::edit::{RuntimeSettings, Write};
use super::text::text;
use super::{Error, TextFiles, containerd};

const BEGIN: &str = "# BEGIN divvy:";
const END: &str = "# END divvy";
/// Includes the distribution's own configuration (k3s and rke2 since September 2023).
const BASE: &str = "{{ template \"base\" . }}\n";

/// Compute the template's new text.
pub(super) fn configure(
    files: &dyn TextFiles,
    path: &str,
    generated: &str,
    version: i64,
    settings: &RuntimeSettings,
    notes: &mut Vec<String>,
) -> Result<Vec<Write>, Error> {
    let now = text(files, path)?;
    let old = now.as_deref().map_or_else(|| BASE.to_owned(), without);
    let head = format!(
        "[plugins.'{}'.containerd.runtimes.'{}'",
        containerd::section(version),
        settings.name
    );
    let same = |line: &str| {
        line.trim()
            .replace('"', "'")
            .replace(&format!(".{}", settings.name), &format!(".'{}'", settings.name))
            .starts_with(&head)
    };
    if old.lines().any(same) {
        return Err(Error::InTemplate {
            path: path.to_owned(),
            name: settings.name.clone(),
        });
    }
    let running = containerd::read(files, generated, containerd::Merge::Keys)?;
    if now.as_deref().is_none_or(|now| !now.contains(BEGIN))
        && let Some(found) = running.runtimes.get(&settings.name)
    {
        return Err(Error::FoundByItself {
            path: generated.to_owned(),
            name: settings.name.clone(),
            program: found.path.clone().unwrap_or_default(),
        });
    }
    let systemd = match settings.systemd_cgroup {
        Some(systemd) => systemd.to_string(),
        // The distribution's template uses the same variable for runc.
        None => "{{ .SystemdCgroup }}".to_owned(),
    };
    let annotations = match settings.cdi {
        Some(true) => format!("  container_annotations = [\"{}\"]\n", containerd::CDI_ANNOTATIONS),
        _ => String::new(),
    };
    let block = format!(
        "{BEGIN} `{} --undo` removes this\n{head}]\n  runtime_type = \"io.containerd.runc.v2\"\n{annotations}{head}.options]\n  BinaryName = \"{}\"\n  SystemdCgroup = {systemd}\n{END}\n",
        settings.command, settings.path
    );
    if settings.set_default == Some(true) {
        notes.push(format!(
            "a template cannot set the default runtime: write `default-runtime: {}` into the distribution's config.yaml",
            settings.name
        ));
    }
    if settings.cdi == Some(false) {
        notes.push("CDI stays enabled: the distribution's own part of the template decides this".to_owned());
    }
    let mut text = old;
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    Ok(vec![Write {
        path: path.to_owned(),
        text: text + &block,
        like: None,
    }])
}

/// Return the text without divvy's part and its marks.
pub(super) fn without(text: &str) -> String {
    let mut inside = false;
    text.split_inclusive('\n')
        .filter(|line| {
            let line = line.trim_end();
            let ours = inside || line.starts_with(BEGIN);
            inside = ours && line != END;
            !ours
        })
        .collect()
}
