//! Adds a runtime to containerd's configuration, and removes it.

use toml_edit::{DocumentMut, Item};

use super::{ContainerdFile, Merge, absolute, load, read, section};
use crate::copied_from::source;
use crate::edit::{EditedFiles, RuntimeSettings, Write};
use crate::text::{text, toml};
use crate::{Configuration, Error, TextFiles, glob, toml_text};

/// The files to write, and how containerd reads them.
pub(crate) struct Where<'t> {
    pub(crate) config: &'t str,
    pub(crate) drop_in: Option<&'t str>,
    pub(crate) merge: Option<Merge>,
    pub(crate) version: i64,
}

/// The standard shim since containerd 1.3.
const RUNC_V2: &str = "io.containerd.runc.v2";
/// The standard shim before containerd 1.3. Its key for the program is `Runtime`, not `BinaryName`.
const LINUX_V1: &str = "io.containerd.runtime.v1.linux";

/// Compute the new texts. The drop-in comes before the file that imports it.
pub(crate) fn configure(
    files: &dyn TextFiles,
    at: &Where<'_>,
    settings: &RuntimeSettings,
    ours: &dyn Fn(&str, &str) -> bool,
    notes: &mut Vec<String>,
) -> Result<Vec<Write>, Error> {
    let merge = at.merge.unwrap_or(Merge::Sections);
    // A drop-in that is about to be replaced is not read: it may even be invalid.
    let known = EditedFiles {
        files,
        edits: at
            .drop_in
            .filter(|_| settings.overwrite)
            .map(|drop_in| (drop_in.to_owned(), None))
            .into_iter()
            .collect(),
    };
    let said = EditedFiles {
        files: &known,
        edits: settings
            .printed
            .as_deref()
            .map(alone)
            .transpose()?
            .map(|text| (at.config.to_owned(), Some(text)))
            .into_iter()
            .collect(),
    };
    let before = read(&said, at.config, merge)?;
    if before
        .disabled_plugins
        .iter()
        .any(|plugin| plugin == "cri" || plugin == "io.containerd.grpc.v1.cri")
    {
        notes.push(
            "disabled_plugins turns off containerd's CRI plugin (Docker's package does this), so no kubelet can use this containerd: on a Kubernetes \
             node, remove \"cri\" from that list"
                .to_owned(),
        );
    }
    let loaded = load(&known, at.config, merge)?;
    let main = loaded.first().filter(|file| file.path == at.config);
    let version = main
        .and_then(|file| file.version)
        .or(before.version.filter(|_| settings.printed.is_some()));
    let version = version.unwrap_or(at.version);
    // containerd 1.x rejects imported files of version 1, so with version 1 the runtime goes into the main file.
    let Some(drop_in) = at.drop_in.filter(|_| version > 1) else {
        let now = text(files, at.config)?;
        let (header, now) = match now {
            Some(now) => (String::new(), now),
            None => (settings.header(), String::new()),
        };
        let place = SectionPlace {
            path: at.config,
            version,
            section: main
                .filter(|file| file.version.is_some())
                .map_or(section(version), |file| file.section),
        };
        let mut document = toml_text::document(at.config, &now)?;
        if main.is_none_or(|file| file.version.is_none()) {
            toml_text::put(document.as_table_mut(), "version", version);
        }
        let effective = tables(&load(&said, at.config, merge)?, merge, None)?;
        into(&mut document, &place, &effective, &before, settings, merge, at, notes)?;
        return Ok(vec![Write {
            path: at.config.to_owned(),
            text: header + &document.to_string(),
            like: None,
        }]);
    };
    let now = text(files, drop_in)?;
    let fresh = now.as_deref().is_none_or(|now| settings.overwrite || ours(drop_in, now));
    let without = EditedFiles {
        files: &said,
        edits: if fresh { vec![(drop_in.to_owned(), None)] } else { Vec::new() },
    };
    let effective = tables(&load(&without, at.config, merge)?, merge, Some(drop_in))?;
    let configured = read(&without, at.config, merge)?;
    let version = effective.as_ref().map_or(version, |effective| effective.version);
    let place = SectionPlace {
        path: drop_in,
        version,
        section: effective.as_ref().map_or(section(version), |effective| effective.section),
    };
    let mut document = match (fresh, merge) {
        (false, _) => toml_text::document(drop_in, now.as_deref().unwrap_or_default())?,
        (true, Merge::Keys) => begin(version, &settings.header()),
        (true, Merge::Sections) => {
            let copied = effective.as_ref().filter(|effective| !effective.table.is_empty());
            let mut document = begin(version, &settings.header());
            if let Some(effective) = copied {
                let comment = format!(
                    "# This file repeats the section of {}, because containerd before 2.1 takes a section from only one file. After a change to that file, run the command again.\n",
                    effective.from
                );
                document = begin(version, &(settings.header() + &comment));
                let plugins = toml_text::reach(document.as_item_mut(), &["plugins"]).ok_or_else(|| broken(drop_in))?;
                toml_text::put_table(plugins, place.section, &effective.table);
            }
            document
        }
    };
    let mut settings = settings.clone();
    if fresh && !settings.overwrite {
        let had = now.as_deref().map(|now| toml(drop_in, now)).transpose()?.unwrap_or_default();
        if settings.cdi.is_none() && hands_on(&had, place.section, &settings.name) {
            settings.cdi = Some(true);
        }
        // Keep the settings of an earlier run if this run does not set them.
        if settings.set_default.is_none() && before.default_runtime.as_deref() == Some(&settings.name) {
            settings.set_default = Some(true);
        }
        if settings.cdi.is_none() && before.cdi != configured.cdi {
            settings.cdi = before.cdi;
        }
    }
    into(&mut document, &place, &effective, &configured, &settings, merge, at, notes)?;
    let mut writes = vec![Write {
        path: drop_in.to_owned(),
        text: document.to_string(),
        like: Some(at.config.to_owned()),
    }];
    let imported = loaded.iter().any(|file| {
        let mut patterns = file.imports.iter().map(|import| absolute(&file.path, import));
        patterns.any(|pattern| glob::matches(&pattern, drop_in))
    });
    if !imported {
        writes.push(Write {
            path: at.config.to_owned(),
            text: import(files, at, drop_in, version)?,
            like: None,
        });
    }
    Ok(writes)
}

/// The annotations through which containers request CDI devices. containerd passes to a runtime only the annotations that match
/// `container_annotations` in the runtime's table.
pub(crate) const CDI_ANNOTATIONS: &str = "cdi.k8s.io/*";

/// Report whether a file makes containerd pass [`CDI_ANNOTATIONS`] to the runtime `name`.
fn hands_on(file: &toml::Table, section: &str, name: &str) -> bool {
    let runtime = ["plugins", section, "containerd", "runtimes", name]
        .iter()
        .try_fold(file, |table, key| table.get(*key)?.as_table());
    let list = runtime.and_then(|runtime| runtime.get("container_annotations")?.as_array());
    list.is_some_and(|list| list.contains(&CDI_ANNOTATIONS.into()))
}

/// Remove the imports from the configuration that containerd printed, because that configuration already includes the imported files.
fn alone(said: &str) -> Result<String, Error> {
    let mut table = toml("the configuration that containerd printed", said)?;
    table.remove("imports");
    Ok(table.to_string())
}

fn begin(version: i64, comment: &str) -> DocumentMut {
    let mut document = DocumentMut::new();
    document.insert("version", toml_edit::value(version));
    if let Some(mut key) = document.as_table_mut().key_mut("version") {
        key.leaf_decor_mut().set_prefix(comment);
    }
    document
}

struct SectionPlace<'p> {
    path: &'p str,
    version: i64,
    section: &'static str,
}

/// The effective CRI section as plain values, and the file that it is from.
struct CriSection {
    table: toml::Table,
    version: i64,
    section: &'static str,
    from: String,
}

fn tables(loaded: &[ContainerdFile], merge: Merge, but: Option<&str>) -> Result<Option<CriSection>, Error> {
    let mut effective: Option<CriSection> = None;
    for file in loaded.iter().filter(|file| Some(file.path.as_str()) != but) {
        let values = file.values()?;
        let Some(table) = values.table(&["plugins", file.section])? else {
            continue;
        };
        let mut whole = toml::Table::new();
        if let (Merge::Keys, Some(effective)) = (merge, &effective) {
            whole = effective.table.clone();
        }
        add(&mut whole, table);
        let version = file.version.unwrap_or(2);
        let first = effective.take().filter(|_| merge == Merge::Keys);
        effective = Some(CriSection {
            table: whole,
            // A drop-in is written in the format version of the first file.
            version: first.as_ref().map_or(version, |first| first.version),
            section: first.as_ref().map_or(file.section, |first| first.section),
            from: file.path.clone(),
        });
    }
    Ok(effective)
}

fn add(whole: &mut toml::Table, table: &toml::Table) {
    for (key, value) in table {
        match (whole.get_mut(key), value) {
            (Some(toml::Value::Table(whole)), toml::Value::Table(table)) => add(whole, table),
            _ => {
                whole.insert(key.clone(), value.clone());
            }
        }
    }
}

fn broken(path: &str) -> Error {
    Error::Unreadable {
        path: path.to_owned(),
        why: "a key of containerd's CRI plugin that must be a table has another type".to_owned(),
    }
}

/// Write the runtime, the default runtime, CDI, and the cgroup driver into the CRI section of a document.
#[expect(clippy::too_many_arguments, reason = "one call for the drop-in and one for the main file")]
fn into(
    document: &mut DocumentMut,
    place: &SectionPlace<'_>,
    effective: &Option<CriSection>,
    configured: &Configuration,
    settings: &RuntimeSettings,
    merge: Merge,
    at: &Where<'_>,
    notes: &mut Vec<String>,
) -> Result<(), Error> {
    let broken = || broken(place.path);
    let section = ["plugins", place.section];
    let of = |rest: &[&'static str]| [&section[..], rest].concat();
    let runtimes = effective
        .as_ref()
        .and_then(|effective| effective.table.get("containerd")?.get("runtimes")?.as_table())
        .cloned()
        .unwrap_or_default();

    let mut runtime = source(&configured.default_runtime, &settings.name)
        .into_iter()
        .find_map(|name| runtimes.get(name).and_then(toml::Value::as_table).cloned())
        .unwrap_or_default();
    if runtime.is_empty() && settings.overwrite {
        // NVIDIA's tool writes these values when there is no runtime to copy from.
        runtime.insert("privileged_without_host_devices".to_owned(), false.into());
        runtime.insert("runtime_engine".to_owned(), "".into());
        runtime.insert("runtime_root".to_owned(), "".into());
    }
    let copied = runtime
        .get("options")
        .and_then(|options| options.get("SystemdCgroup"))
        .cloned();
    // A dumped configuration does not say whether a person or an earlier run of divvy wrote this table, so it is used only from files.
    if let Some(theirs) = runtimes.get(&settings.name).and_then(toml::Value::as_table)
        && settings.printed.is_none()
    {
        add(&mut runtime, theirs);
    }
    let kind = runtime.entry("runtime_type").or_insert_with(|| RUNC_V2.into());
    let kind = kind.as_str().unwrap_or_default().to_owned();
    let Some(options) = runtime
        .entry("options")
        .or_insert_with(|| toml::Value::Table(toml::Table::new()))
        .as_table_mut()
    else {
        return Err(broken());
    };
    options.insert("BinaryName".to_owned(), settings.path.as_str().into());
    if kind == LINUX_V1 || (settings.overwrite && place.version == 1) {
        options.insert("Runtime".to_owned(), settings.path.as_str().into());
    }
    if let Some(systemd) = settings.systemd_cgroup.map(toml::Value::Boolean).or(copied) {
        options.insert("SystemdCgroup".to_owned(), systemd);
    }
    if settings.cdi == Some(true) && !settings.overwrite {
        let list = runtime
            .entry("container_annotations")
            .or_insert_with(|| toml::Value::Array(Vec::new()));
        let list = list.as_array_mut().ok_or_else(broken)?;
        if !list.contains(&CDI_ANNOTATIONS.into()) {
            list.push(CDI_ANNOTATIONS.into());
        }
    }
    let names = toml_text::reach(document.as_item_mut(), &of(&["containerd", "runtimes"])).ok_or_else(broken)?;
    if settings.printed.is_some() && at.drop_in.is_some() {
        names.remove(&settings.name);
    }
    put(names, &settings.name, &runtime);

    // MicroK8s replaces `${…}`. Once a file has a table of any runtime, containerd 1.x drops its built-in table of runc, and its CRI plugin does
    // not start if the default runtime has no table. Therefore a missing table of runc is added.
    let default = configured.default_runtime.as_deref().unwrap_or("runc");
    let default = if default == settings.name { "runc" } else { default };
    let missing = !runtimes.contains_key(default);
    let alone = merge == Merge::Sections && place.version <= 2 && !(settings.overwrite && at.merge.is_none());
    if missing && default == "runc" && (alone || settings.systemd_cgroup.is_some()) {
        let mut stock = toml::Table::new();
        stock.insert("runtime_type".to_owned(), RUNC_V2.into());
        if let Some(systemd) = settings.systemd_cgroup {
            let options = toml::Table::from_iter([("SystemdCgroup".to_owned(), systemd.into())]);
            stock.insert("options".to_owned(), options.into());
        }
        put(names, "runc", &stock);
    } else if missing && default != "runc" && !default.starts_with("${") && settings.set_default != Some(true) {
        notes.push(format!(
            "the default runtime is {default}, and there is no such runtime: pods will not start until you correct this in {}",
            at.config
        ));
    } else if let (Some(systemd), Some(stock)) = (settings.systemd_cgroup, runtimes.get("runc").and_then(toml::Value::as_table)) {
        let now = stock
            .get("options")
            .and_then(|options| options.get("SystemdCgroup"))
            .and_then(toml::Value::as_bool);
        if now.unwrap_or(false) != systemd {
            let (is, was) = if systemd {
                ("systemd", "cgroupfs")
            } else {
                ("cgroupfs", "systemd")
            };
            notes.push(format!(
                "runc used the cgroup driver {was}, but the kubelet uses {is}: SystemdCgroup of runc is also set to {systemd}"
            ));
            let mut with = toml::Table::new();
            if merge == Merge::Keys || names.get("runc").is_some() {
                with.insert(
                    "options".to_owned(),
                    toml::Table::from_iter([("SystemdCgroup".to_owned(), systemd.into())]).into(),
                );
            }
            put(names, "runc", &with);
        }
    }

    let of_containerd = toml_text::reach(document.as_item_mut(), &of(&["containerd"])).ok_or_else(broken)?;
    match settings.set_default {
        Some(true) => toml_text::put(of_containerd, "default_runtime_name", settings.name.as_str()),
        Some(false)
            if configured.default_runtime.as_deref() == Some(&settings.name)
                || written(of_containerd) == Some(&settings.name) =>
        {
            of_containerd.remove("default_runtime_name");
            if merge == Merge::Keys {
                toml_text::put(of_containerd, "default_runtime_name", "runc");
            }
        }
        _ => {}
    }
    if let Some(cdi) = settings.cdi {
        let of_section = toml_text::reach(document.as_item_mut(), &section).ok_or_else(broken)?;
        toml_text::put(of_section, "enable_cdi", cdi);
    }
    toml_text::hide_empty(document.as_item_mut());
    Ok(())
}

fn written(table: &dyn toml_edit::TableLike) -> Option<&str> {
    table.get("default_runtime_name").and_then(Item::as_str)
}

/// Write a runtime's table: value by value if the table exists, as a whole otherwise.
fn put(names: &mut dyn toml_edit::TableLike, name: &str, runtime: &toml::Table) {
    match names.get_mut(name).and_then(Item::as_table_like_mut) {
        None => toml_text::put_table(names, name, runtime),
        Some(table) => merge_into(table, runtime),
    }
}

fn merge_into(table: &mut dyn toml_edit::TableLike, values: &toml::Table) {
    for (key, value) in values {
        match (table.get_mut(key), value) {
            (Some(item), toml::Value::Table(values)) if item.is_table_like() => {
                merge_into(item.as_table_like_mut().expect("just looked"), values);
            }
            (Some(item), value) => {
                if toml_text::value(item).as_ref() != Some(value) {
                    toml_text::set(item, toml_text::item(value));
                }
            }
            (None, value) => {
                table.insert(key, toml_text::item(value));
            }
        }
    }
}

/// Return the main file's text with one more import: the customary pattern `DIRECTORY/*.toml` if this pattern would not activate
/// any other file in the directory, otherwise only the drop-in.
fn import(files: &dyn TextFiles, at: &Where<'_>, drop_in: &str, version: i64) -> Result<String, Error> {
    let directory = glob::directory(drop_in);
    let others = files
        .names(directory)
        .iter()
        .any(|name| name.ends_with(".toml") && format!("{directory}/{name}") != drop_in);
    let pattern = if drop_in.ends_with(".toml") && !others {
        format!("{directory}/*.toml")
    } else {
        drop_in.to_owned()
    };
    let now = text(files, at.config)?.unwrap_or_default();
    let mut document = toml_text::document(at.config, &now)?;
    if document.is_empty() {
        let version = format!("version = {version}\n");
        let mut text = now;
        if !text.is_empty() && !text.ends_with('\n') {
            text.push('\n');
        }
        return Ok(format!("{text}{version}imports = [\"{pattern}\"]\n"));
    }
    match document.get_mut("imports").and_then(Item::as_array_mut) {
        None => {
            document.insert("imports", toml_edit::value(toml_edit::Array::from_iter([pattern])));
        }
        Some(list) => {
            // Keep a list that has one element per line in that form.
            let last = list
                .iter()
                .last()
                .and_then(|last| last.decor().prefix()?.as_str().map(str::to_owned));
            let mut element = toml_edit::Value::from(pattern);
            match last.filter(|before| before.contains('\n')) {
                Some(before) => {
                    element
                        .decor_mut()
                        .set_prefix(format!("\n{}", toml_text::indent(&before).unwrap_or_default()));
                    list.push_formatted(element);
                }
                None => list.push(element),
            }
        }
    }
    Ok(document.to_string())
}

/// Return a file's text without the runtime `name`, and without a default-runtime setting that names it.
pub(crate) fn without(path: &str, text: &str, name: &str, merge: Merge) -> Result<String, Error> {
    let file = ContainerdFile::parse(path.to_owned(), text.to_owned(), merge)?;
    let mut document = toml_text::document(path, text)?;
    let of = ["plugins", file.section, "containerd"];
    if let Some(table) = toml_text::find(document.as_item_mut(), &of)
        && written(table) == Some(name)
    {
        table.remove("default_runtime_name");
    }
    if let Some(runtimes) = toml_text::find(document.as_item_mut(), &[&of[..], &["runtimes"]].concat()) {
        runtimes.remove(name);
    }
    Ok(document.to_string())
}
