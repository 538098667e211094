//! CRI-O's `crio.conf` and its drop-ins (`crio.conf(5)`). Later files override earlier ones. A runtime's table is not merged: the last file that
//! has it provides the whole table.

use std::collections::BTreeMap;

use toml_edit::DocumentMut;

use super::copied_from::source;
use super::edit::{EditedFiles, RuntimeSettings, Write};
use super::text::{Values, text, toml};
use super::{Configuration, Error, OciRuntime, TextFiles, glob, toml_text};

/// The main file, which CRI-O reads first.
pub const CONFIG: &str = "/etc/crio/crio.conf";
const ENGINE: &str = "CRI-O";

/// Return the directory of drop-ins for a main file.
pub fn drop_ins(main: &str) -> String {
    format!("{main}.d")
}

/// Report whether CRI-O reads a drop-in by default, that is, without `--config-dir`.
pub(super) fn is_read(main: &str, drop_in: &str) -> bool {
    glob::directory(drop_in) == drop_ins(main)
}

/// Return the files that CRI-O reads, in CRI-O's order: path and text.
pub(super) fn load(files: &dyn TextFiles, main: &str) -> Result<Vec<(String, String)>, Error> {
    let directory = drop_ins(main);
    let names = files.names(&directory).into_iter().map(|name| format!("{directory}/{name}"));
    let mut loaded = Vec::new();
    for path in std::iter::once(main.to_owned()).chain(names) {
        if let Some(text) = text(files, &path)? {
            loaded.push((path, text));
        }
    }
    Ok(loaded)
}

/// Read and merge CRI-O's files.
///
/// # Errors
/// Fails if a file cannot be read, is not valid TOML, or has a value of the wrong type at one of the keys in [`Configuration`].
pub fn read(files: &dyn TextFiles, main: &str) -> Result<Configuration, Error> {
    let mut all = Configuration::default();
    for (path, text) in load(files, main)? {
        let values = Values::parse(ENGINE, &path, &text)?;
        let at = |key: &'static str| ["crio", "runtime", key];
        if let Some(name) = values.text(&at("default_runtime"))? {
            all.default_runtime = (!name.is_empty()).then(|| name.to_owned());
            all.default_runtime_file = Some(path.clone());
        }
        if let Some(manager) = values.text(&at("cgroup_manager"))? {
            all.cgroup_driver = Some(manager.to_owned());
        }
        if let Some(directories) = values.texts(&at("cdi_spec_dirs"))? {
            all.cdi_spec_dirs = directories;
        }
        let names: Vec<&String> = values
            .table(&at("runtimes"))?
            .into_iter()
            .flat_map(toml::Table::keys)
            .collect();
        for name in names {
            let with = |key: &'static str| ["crio", "runtime", "runtimes", name, key];
            values.table(&with("")[..4])?;
            let runtime = OciRuntime {
                path: values.text(&with("runtime_path"))?.map(str::to_owned),
                runtime_type: values.text(&with("runtime_type"))?.map(str::to_owned),
                file: path.clone(),
                ..OciRuntime::default()
            };
            all.runtimes.insert(name.clone(), runtime);
        }
        all.files.push(path.clone());
    }
    Ok(all)
}

/// Compute the new text of the drop-in or the main file. The new runtime copies all other settings from an existing runtime, see [`source`].
pub(super) fn configure(
    files: &dyn TextFiles,
    main: &str,
    drop_in: Option<&str>,
    settings: &RuntimeSettings,
    ours: &dyn Fn(&str, &str) -> bool,
    notes: &mut Vec<String>,
) -> Result<Vec<Write>, Error> {
    let path = drop_in.unwrap_or(main);
    let now = text(files, path)?;
    let fresh = drop_in.is_some() && now.as_deref().is_none_or(|now| settings.overwrite || ours(path, now));
    // The configuration without the drop-in, if the drop-in is divvy's own.
    let without = EditedFiles {
        files,
        edits: if fresh { vec![(path.to_owned(), None)] } else { Vec::new() },
    };
    let said = settings
        .printed
        .as_ref()
        .map(|said| toml("the configuration that CRI-O printed", said).map(|_| BTreeMap::from([(main.to_owned(), said.clone())])))
        .transpose()?;
    let without: &dyn TextFiles = said.as_ref().map_or(&without, |said| said);
    let there = read(without, main)?;
    let before = if settings.overwrite {
        there.clone()
    } else {
        read(files, main)?
    };
    if let Some(drop_in) = drop_in.filter(|drop_in| !is_read(main, drop_in)) {
        notes.push(format!(
            "CRI-O reads {}/, so it ignores {drop_in} unless it is started with --config-dir {}",
            drop_ins(main),
            glob::directory(drop_in)
        ));
    }
    let tables = runtimes(without, main)?;
    let mut runtime = source(&there.default_runtime, &settings.name)
        .into_iter()
        .find_map(|name| tables.get(name).and_then(toml::Value::as_table).cloned())
        .unwrap_or_default();
    if runtime.contains_key("runtime_root")
        && before
            .runtimes
            .get(&settings.name)
            .is_none_or(|runtime| runtime.path.as_deref() != Some(&settings.path))
    {
        notes.push(format!(
            "the runtime {} uses the same state directory (runtime_root) as the runtime that it was copied from; configure {} to call that runtime",
            settings.name, settings.path
        ));
    }
    // A dumped configuration does not say whether a person or an earlier run of divvy wrote this table, so it is used only from files.
    if let Some(theirs) = tables.get(&settings.name).and_then(toml::Value::as_table)
        && settings.printed.is_none()
    {
        runtime.extend(theirs.clone());
    }
    runtime.insert("runtime_path".to_owned(), settings.path.as_str().into());
    // The copied runtime may have another type, such as `vm`. The new runtime is always a command-line program like runc.
    runtime.insert("runtime_type".to_owned(), "oci".into());
    if settings.cdi.is_some() {
        notes.push("CRI-O always injects CDI devices into containers; there is nothing to enable or disable".to_owned());
    }
    let driver = before.cgroup_driver.as_deref().unwrap_or("systemd");
    if let Some(systemd) = settings.systemd_cgroup
        && systemd != (driver == "systemd")
    {
        let wanted = if systemd { "systemd" } else { "cgroupfs" };
        notes.push(format!(
            "CRI-O's cgroup manager is {driver}, but the kubelet's cgroup driver is {wanted}: pods will not start. Set cgroup_manager = \"{wanted}\" in \
             [crio.runtime], or set the kubelet's cgroupDriver to {driver}"
        ));
    }
    let mut document = if fresh {
        DocumentMut::new()
    } else {
        toml_text::document(path, now.as_deref().unwrap_or_default())?
    };
    let keep = before.default_runtime.as_deref() == Some(&settings.name)
        && fresh
        && settings.set_default.is_none()
        && !settings.overwrite;
    let broken = || Error::Unreadable {
        path: path.to_owned(),
        why: "crio.runtime.runtimes is not a table".to_owned(),
    };
    let section = toml_text::reach(document.as_item_mut(), &["crio", "runtime"]).ok_or_else(broken)?;
    if settings.set_default == Some(true) || keep {
        toml_text::put(section, "default_runtime", settings.name.as_str());
    } else if settings.set_default == Some(false)
        && section.get("default_runtime").and_then(toml_edit::Item::as_str) == Some(&settings.name)
    {
        section.remove("default_runtime");
    }
    let runtimes = toml_text::reach(document.as_item_mut(), &["crio", "runtime", "runtimes"]).ok_or_else(broken)?;
    if runtimes.get(&settings.name).is_some() {
        let table =
            toml_text::reach(document.as_item_mut(), &["crio", "runtime", "runtimes", &settings.name]).ok_or_else(broken)?;
        toml_text::put(table, "runtime_path", settings.path.as_str());
        let kind = table
            .get("runtime_type")
            .and_then(toml_edit::Item::as_str)
            .unwrap_or_default();
        if settings.overwrite || !kind.is_empty() {
            toml_text::put(table, "runtime_type", "oci");
        }
    } else {
        toml_text::put_table(runtimes, &settings.name, &runtime)
    }
    toml_text::hide_empty(document.as_item_mut());
    Ok(vec![Write {
        path: path.to_owned(),
        text: format!("{}{document}", if fresh { settings.header() } else { String::new() }),
        like: drop_in.map(|_| main.to_owned()),
    }])
}

/// Return the tables of all runtimes, each from the last file that has it.
fn runtimes(files: &dyn TextFiles, main: &str) -> Result<toml::Table, Error> {
    let mut all = toml::Table::new();
    for (path, text) in load(files, main)? {
        let values = Values::parse(ENGINE, &path, &text)?;
        if let Some(table) = values.table(&["crio", "runtime", "runtimes"])? {
            all.extend(table.clone());
        }
    }
    Ok(all)
}

/// Return a file's text without the runtime `name`, and without a default-runtime setting that names it.
pub(super) fn without(path: &str, text: &str, name: &str) -> Result<String, Error> {
    let mut document = toml_text::document(path, text)?;
    if let Some(section) = toml_text::find(document.as_item_mut(), &["crio", "runtime"])
        && section.get("default_runtime").and_then(toml_edit::Item::as_str) == Some(name)
    {
        section.remove("default_runtime");
    }
    if let Some(runtimes) = toml_text::find(document.as_item_mut(), &["crio", "runtime", "runtimes"]) {
        runtimes.remove(name);
    }
    Ok(document.to_string())
}
