//! Shows the changes, as text for people and as JSON for programs.

use divvy_engines::{Edit, EditPlan, Engine, EngineTarget, TextFiles};
use divvy_host::Root;
use serde::Serialize;
use similar::{ChangeTag, TextDiff};

use crate::cli::configure::ConfigureArgs;
use crate::commands::say;
use crate::printer;

/// The output of `divvy configure -o json` for one engine.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ShownEngine {
    engine: &'static str,
    config: String,
    dry_run: bool,
    changed: bool,
    files: Vec<ShownFile>,
    notes: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) restart: Option<String>,
    pub(super) restarted: bool,
}

#[derive(Serialize)]
struct ShownFile {
    path: String,
    action: &'static str,
    diff: String,
}

impl ShownEngine {
    pub(super) fn of(engine: Engine, target: &EngineTarget, plan: &EditPlan, dry_run: bool) -> ShownEngine {
        ShownEngine {
            engine: engine.as_str(),
            config: target.config().to_owned(),
            dry_run,
            changed: !plan.edits.is_empty(),
            files: plan
                .edits
                .iter()
                .map(|edit| ShownFile {
                    path: edit.path.clone(),
                    action: action(edit),
                    diff: unified(edit, false),
                })
                .collect(),
            notes: plan.notes.clone(),
            restart: None,
            restarted: false,
        }
    }
}

fn action(edit: &Edit) -> &'static str {
    match (&edit.before, &edit.after) {
        (None, _) => "create",
        (_, None) => "remove",
        _ => "change",
    }
}

/// Print the diff of all files, colored as `--color` says.
pub(super) fn diff(plan: &EditPlan) -> anyhow::Result<()> {
    for edit in &plan.edits {
        printer::print(&unified(edit, printer::coloured()))?;
    }
    Ok(())
}

/// Print the new files, as NVIDIA's tool does.
pub(super) fn texts(root: &Root<'_>, target: &EngineTarget, plan: &EditPlan) -> anyhow::Result<()> {
    let mut paths = vec![target.written()];
    if let EngineTarget::Containerd { drop_in: Some(_), .. } = target {
        paths.push(target.config());
    }
    for path in paths {
        let new = plan
            .edits
            .iter()
            .find(|edit| edit.path == path)
            .and_then(|edit| edit.after.clone());
        let text = match new {
            Some(text) => text,
            None => TextFiles::text(root, path).ok().flatten().unwrap_or_default(),
        };
        printer::line(&text)?;
    }
    Ok(())
}

fn unified(edit: &Edit, coloured: bool) -> String {
    let (before, after) = (
        edit.before.as_deref().unwrap_or_default(),
        edit.after.as_deref().unwrap_or_default(),
    );
    let name = |text: &Option<String>| match text {
        Some(_) => edit.path.clone(),
        None => "/dev/null".to_owned(),
    };
    let paint = |colour: &str, line: &str| {
        if coloured {
            printer::paint(colour, line) + "\n"
        } else {
            format!("{line}\n")
        }
    };
    let mut out = paint("1", &format!("--- {}", name(&edit.before)));
    out += &paint("1", &format!("+++ {}", name(&edit.after)));
    let diff = TextDiff::from_lines(before, after);
    for hunk in diff.unified_diff().context_radius(3).iter_hunks() {
        out += &paint("36", &hunk.header().to_string());
        for change in hunk.iter_changes() {
            let line = change.value().trim_end_matches(['\n', '\r']);
            out += &match change.tag() {
                ChangeTag::Delete => paint("31", &format!("-{line}")),
                ChangeTag::Insert => paint("32", &format!("+{line}")),
                ChangeTag::Equal => format!(" {line}\n"),
            };
            if change.missing_newline() {
                out += "\\ No newline at end of file\n";
            }
        }
    }
    out
}

/// Print the notes, what was done to each file, and how pods select the runtime.
pub(super) fn tell(args: &ConfigureArgs, engine: Engine, target: &EngineTarget, plan: &EditPlan) -> anyhow::Result<()> {
    for note in &plan.notes {
        say(&format!("note: {note}"))?;
    }
    let name = engine.as_str();
    if plan.edits.is_empty() {
        say(&if args.undo {
            format!("{name}: nothing to remove from {}", target.config())
        } else {
            format!("{name}: already configured, nothing changed ({})", target.written())
        })?;
        return Ok(());
    }
    for edit in &plan.edits {
        let did = match (action(edit), args.dry_run) {
            ("create", false) => "written",
            ("create", true) => "would be written",
            ("remove", false) => "removed",
            ("remove", true) => "would be removed",
            (_, false) if args.undo => "restored",
            (_, true) if args.undo => "would be restored",
            (_, false) => "changed",
            (_, true) => "would be changed",
        };
        say(&format!("{name}: {} {did}", edit.path))?;
    }
    if !args.undo && engine != Engine::Docker && !args.dry_run {
        say(&format!(
            "pods select the runtime with a RuntimeClass: divvy configure --runtime-class{} | kubectl apply -f -",
            if args.runtime_name == "nvidia" {
                String::new()
            } else {
                format!(" --runtime-name {}", args.runtime_name)
            }
        ))?;
    }
    Ok(())
}
