//! CRI-O's `crio.conf` and the drop-ins beside it (`crio.conf(5)`): later files win, a runtime is taken whole from the last file that has it.

use std::collections::BTreeMap;

use toml_edit::DocumentMut;

use super::plan::{After, Wish, Write};
use super::text::{Values, text, toml};
use super::{Configuration, Error, Files, Runtime, glob, toml_text};

/// The file that CRI-O reads first.
pub const CONFIG: &str = "/etc/crio/crio.conf";
const ENGINE: &str = "CRI-O";

/// The folder of drop-ins of a configuration file.
pub fn drop_ins(main: &str) -> String {
    format!("{main}.d")
}

/// Whether CRI-O reads a drop-in, when it is not told of another folder.
pub(super) fn is_read(main: &str, drop_in: &str) -> bool {
    glob::folder(drop_in) == drop_ins(main)
}

/// The files that CRI-O reads, in its order, with their texts.
pub(super) fn load(files: &dyn Files, main: &str) -> Result<Vec<(String, String)>, Error> {
    let folder = drop_ins(main);
    let names = files.names(&folder).into_iter().map(|name| format!("{folder}/{name}"));
    let mut loaded = Vec::new();
    for path in std::iter::once(main.to_owned()).chain(names) {
        if let Some(text) = text(files, &path)? {
            loaded.push((path, text));
        }
    }
    Ok(loaded)
}

/// What CRI-O's files say together.
///
/// # Errors
/// A file that cannot be read, is no TOML, or has a value of the wrong type where this looks.
pub fn read(files: &dyn Files, main: &str) -> Result<Configuration, Error> {
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
        if let Some(folders) = values.texts(&at("cdi_spec_dirs"))? {
            all.cdi_spec_dirs = folders;
        }
        let names: Vec<&String> = values
            .table(&at("runtimes"))?
            .into_iter()
            .flat_map(toml::Table::keys)
            .collect();
        for name in names {
            let with = |key: &'static str| ["crio", "runtime", "runtimes", name, key];
            values.table(&with("")[..4])?;
            let runtime = Runtime {
                path: values.text(&with("runtime_path"))?.map(str::to_owned),
                runtime_type: values.text(&with("runtime_type"))?.map(str::to_owned),
                file: path.clone(),
                ..Runtime::default()
            };
            all.runtimes.insert(name.clone(), runtime);
        }
        all.files.push(path.clone());
    }
    Ok(all)
}

/// What is written so that the engine has the runtime; everything else of it is as with the runtime that is copied.
pub(super) fn configure(
    files: &dyn Files,
    main: &str,
    drop_in: Option<&str>,
    wish: &Wish,
    ours: &dyn Fn(&str, &str) -> bool,
    notes: &mut Vec<String>,
) -> Result<Vec<Write>, Error> {
    let path = drop_in.unwrap_or(main);
    let now = text(files, path)?;
    let fresh = drop_in.is_some() && now.as_deref().is_none_or(|now| wish.anew || ours(path, now));
    // What the engine has without us.
    let without = After {
        files,
        edits: if fresh { vec![(path.to_owned(), None)] } else { Vec::new() },
    };
    let said = wish
        .said
        .as_ref()
        .map(|said| toml("what CRI-O says of itself", said).map(|_| BTreeMap::from([(main.to_owned(), said.clone())])))
        .transpose()?;
    let without: &dyn Files = said.as_ref().map_or(&without, |said| said);
    let there = read(without, main)?;
    let before = if wish.anew { there.clone() } else { read(files, main)? };
    if let Some(drop_in) = drop_in.filter(|drop_in| !is_read(main, drop_in)) {
        notes.push(format!(
            "CRI-O reads {}/ and not {drop_in}, unless it is started with --config-dir {}",
            drop_ins(main),
            glob::folder(drop_in)
        ));
    }
    let tables = runtimes(without, main)?;
    let mut runtime = source(&there.default_runtime, &wish.name)
        .into_iter()
        .find_map(|name| tables.get(name).and_then(toml::Value::as_table).cloned())
        .unwrap_or_default();
    if runtime.contains_key("runtime_root")
        && before
            .runtimes
            .get(&wish.name)
            .is_none_or(|runtime| runtime.path.as_deref() != Some(&wish.path))
    {
        notes.push(format!(
            "the runtime {} keeps its state where the runtime does from which it was copied; let {} call that one",
            wish.name, wish.path
        ));
    }
    // Of what the engine says it is not known whether it is a person's or of an earlier run.
    if let Some(theirs) = tables.get(&wish.name).and_then(toml::Value::as_table)
        && wish.said.is_none()
    {
        runtime.extend(theirs.clone());
    }
    runtime.insert("runtime_path".to_owned(), wish.path.as_str().into());
    // Whatever the copied one is, a machine of its own say: this one is a program as runc is.
    runtime.insert("runtime_type".to_owned(), "oci".into());
    if wish.cdi.is_some() {
        notes.push("CRI-O puts CDI devices into containers always; there is nothing to switch".to_owned());
    }
    let driver = before.cgroup_driver.as_deref().unwrap_or("systemd");
    if let Some(systemd) = wish.systemd_cgroup
        && systemd != (driver == "systemd")
    {
        let wanted = if systemd { "systemd" } else { "cgroupfs" };
        notes.push(format!(
            "CRI-O's cgroup manager is {driver} and the kubelet's driver is {wanted}: pods will not start. Set cgroup_manager = \"{wanted}\" in [crio.runtime], \
             or the kubelet's cgroupDriver to {driver}"
        ));
    }
    let mut document = match fresh {
        true => DocumentMut::new(),
        false => toml_text::document(path, now.as_deref().unwrap_or_default())?,
    };
    let keep = before.default_runtime.as_deref() == Some(&wish.name) && fresh && wish.set_default.is_none() && !wish.anew;
    let broken = || Error::Unreadable {
        path: path.to_owned(),
        why: "crio.runtime.runtimes is no table".to_owned(),
    };
    let section = toml_text::reach(document.as_item_mut(), &["crio", "runtime"]).ok_or_else(broken)?;
    if wish.set_default == Some(true) || keep {
        toml_text::put(section, "default_runtime", wish.name.as_str());
    } else if wish.set_default == Some(false)
        && section.get("default_runtime").and_then(toml_edit::Item::as_str) == Some(&wish.name)
    {
        section.remove("default_runtime");
    }
    let runtimes = toml_text::reach(document.as_item_mut(), &["crio", "runtime", "runtimes"]).ok_or_else(broken)?;
    match runtimes.get(&wish.name).is_some() {
        true => {
            let table =
                toml_text::reach(document.as_item_mut(), &["crio", "runtime", "runtimes", &wish.name]).ok_or_else(broken)?;
            toml_text::put(table, "runtime_path", wish.path.as_str());
            let kind = table
                .get("runtime_type")
                .and_then(toml_edit::Item::as_str)
                .unwrap_or_default();
            if wish.anew || !kind.is_empty() {
                toml_text::put(table, "runtime_type", "oci");
            }
        }
        false => toml_text::put_table(runtimes, &wish.name, &runtime),
    }
    toml_text::hide_empty(document.as_item_mut());
    Ok(vec![Write {
        path: path.to_owned(),
        text: format!("{}{document}", if fresh { HEADER } else { "" }),
        like: drop_in.map(|_| main.to_owned()),
    }])
}

const HEADER: &str = "# Written by `divvy configure crio`, which also takes it out again: --undo.\n";

/// From which runtime the rest is copied, the first that is there: the default, unless it is ours or another of NVIDIA's, then the usual two.
pub(super) fn source<'n>(default: &'n Option<String>, name: &str) -> Vec<&'n str> {
    let default = default
        .as_deref()
        .filter(|default| *default != name && !default.starts_with("nvidia"));
    default
        .into_iter()
        .chain(["runc", "crun"])
        .filter(|from| *from != name)
        .collect()
}

/// The runtimes' tables, each from the last file that has it.
fn runtimes(files: &dyn Files, main: &str) -> Result<toml::Table, Error> {
    let mut all = toml::Table::new();
    for (path, text) in load(files, main)? {
        let values = Values::parse(ENGINE, &path, &text)?;
        if let Some(table) = values.table(&["crio", "runtime", "runtimes"])? {
            all.extend(table.clone());
        }
    }
    Ok(all)
}

/// A file without a runtime and a default that names it.
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
