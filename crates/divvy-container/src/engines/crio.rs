//! CRI-O's `crio.conf` and the drop-ins beside it (`crio.conf(5)`): later files win, a runtime is taken whole from the last file that has it.

use super::text::{Values, text};
use super::{Configuration, Error, Files, Runtime};

/// The file that CRI-O reads first.
pub const CONFIG: &str = "/etc/crio/crio.conf";
const ENGINE: &str = "CRI-O";

/// The folder of drop-ins of a configuration file.
pub fn drop_ins(main: &str) -> String {
    format!("{main}.d")
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
