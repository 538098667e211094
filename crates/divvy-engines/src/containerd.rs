//! containerd's `config.toml`, format versions 1 to 4, and the files that it imports (`cmd/containerd/server/config` in containerd). Statements
//! about releases of containerd were verified with the programs 1.6.20 and 2.3.7, and with `LoadConfig` of 2.0.0, 2.0.7, and 2.1.5.

mod edit;
mod effective;

use std::collections::VecDeque;

use super::text::{Values, text};
use super::{Configuration, Error, TextFiles, glob};

pub(super) use edit::{CDI_ANNOTATIONS, Where, configure, without};
pub use effective::effective;

/// The main file that containerd reads by default.
pub const CONFIG: &str = "/etc/containerd/config.toml";
const ENGINE: &str = "containerd";
/// The maximum number of imported files. More files than this mean that an import pattern is wrong.
const MOST_FILES: usize = 1000;

/// How a drop-in is written, which depends on how containerd merges its main file and the files that it imports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Merge {
    /// If several files have a plugin's section, only the section of the last file counts (containerd 1.x). Such a file is also right for 2.0.
    Sections,
    /// Files are merged key by key (containerd 2).
    Keys,
}

/// A release of containerd: major, minor, and patch number.
pub type ContainerdRelease = (u32, u32, u32);

impl Merge {
    /// Return how a release of containerd merges files. `version` is the output of `containerd --version`; the result is `None` if it has no
    /// version number.
    pub fn of(version: &str) -> Option<Merge> {
        Some(if release(version)? >= (2, 1, 0) {
            Merge::Keys
        } else {
            Merge::Sections
        })
    }
}

/// Return the release from the output of `containerd --version`, such as `containerd github.com/containerd/containerd/v2 v2.3.7 …`, or from the
/// version of a package, such as `1.7.27-1`. A patch number that is missing is 0.
pub fn release(version: &str) -> Option<ContainerdRelease> {
    version.split_whitespace().find_map(|word| {
        let mut numbers = word.trim_start_matches('v').splitn(3, '.');
        let major = numbers.next()?.parse().ok()?;
        let minor = leading_number(numbers.next()?)?;
        Some((major, minor, numbers.next().and_then(leading_number).unwrap_or(0)))
    })
}

fn leading_number(text: &str) -> Option<u32> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text[..end].parse().ok()
}

/// Return the key below `plugins` that has the CRI plugin's runtimes, for a format version.
pub fn section(version: i64) -> &'static str {
    match version {
        ..=1 => "cri",
        2 => "io.containerd.grpc.v1.cri",
        3.. => "io.containerd.cri.v1.runtime",
    }
}

/// A configuration file, with its format version and the key of its CRI section.
pub(super) struct ContainerdFile {
    pub(super) path: String,
    pub(super) text: String,
    /// `None` for a file without any key.
    pub(super) version: Option<i64>,
    /// The version that the file states; 0 if it states none.
    pub(super) stated: i64,
    pub(super) imports: Vec<String>,
    /// The key below `plugins` that containerd reads in a file of this version.
    pub(super) section: &'static str,
}

impl ContainerdFile {
    pub(super) fn values(&self) -> Result<Values<'_>, Error> {
        Values::parse(ENGINE, &self.path, &self.text)
    }

    fn parse(path: String, text: String, merge: Merge) -> Result<ContainerdFile, Error> {
        let values = Values::parse(ENGINE, &path, &text)?;
        let written = values.number(&["version"])?;
        let plugins = values.table(&["plugins"])?;
        let has = |version: i64| plugins.is_some_and(|plugins| plugins.contains_key(section(version)));
        let version = match written {
            Some(version) => Some(version),
            None if values.table.is_empty() => None,
            // From a file without a version, containerd 2 reads the sections of any version, and containerd 1.x reads those of version 1.
            None if merge == Merge::Keys && has(3) => Some(3),
            None if merge == Merge::Keys && has(2) => Some(2),
            None => Some(1),
        };
        let imports = values.texts(&["imports"])?.unwrap_or_default();
        let section = section(version.unwrap_or(2));
        Ok(ContainerdFile {
            path,
            text,
            version,
            stated: written.unwrap_or(0),
            imports,
            section,
        })
    }
}

/// Return the files that containerd reads, in containerd's order: breadth-first along the imports, each file once.
pub(super) fn load(files: &dyn TextFiles, main: &str, merge: Merge) -> Result<Vec<ContainerdFile>, Error> {
    let mut waiting = VecDeque::from([main.to_owned()]);
    let mut loaded: Vec<ContainerdFile> = Vec::new();
    while let Some(path) = waiting.pop_front() {
        if loaded.iter().any(|file| file.path == path) {
            continue;
        }
        if loaded.len() == MOST_FILES {
            return Err(Error::TooMany {
                path: main.to_owned(),
                most: MOST_FILES,
            });
        }
        let Some(text) = text(files, &path)? else {
            continue;
        };
        let file = ContainerdFile::parse(path, text, merge)?;
        for pattern in &file.imports {
            waiting.extend(glob::expand(files, &absolute(&file.path, pattern)));
        }
        loaded.push(file);
    }
    Ok(loaded)
}

/// Resolve an import, which is relative to the directory of the importing file.
pub(super) fn absolute(file: &str, import: &str) -> String {
    if import.starts_with('/') {
        return import.to_owned();
    }
    let mut parts: Vec<&str> = Vec::new();
    let whole = format!("{}/{import}", glob::directory(file));
    for part in whole.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    format!("/{}", parts.join("/"))
}

/// Read containerd's files, starting at `main`, and merge them as the given kind of containerd does.
///
/// # Errors
/// Fails if a file cannot be read, is not valid TOML, or has a value of the wrong type at one of the keys in [`Configuration`].
pub fn read(files: &dyn TextFiles, main: &str, merge: Merge) -> Result<Configuration, Error> {
    let loaded = load(files, main, merge)?;
    let mut all = Configuration {
        version: loaded.first().and_then(|file| file.version),
        ..Configuration::default()
    };
    for file in &loaded {
        let values = file.values()?;
        let section = &["plugins", file.section][..];
        if merge == Merge::Sections && values.table(section)?.is_some() {
            all.forget_section();
        }
        add(&mut all, &values, section, true)?;
        all.add_general(file, &values)?;
    }
    Ok(all)
}

impl Configuration {
    /// Forget what earlier files said in the CRI plugin's section.
    fn forget_section(&mut self) {
        self.runtimes.clear();
        self.default_runtime = None;
        self.default_runtime_file = None;
        self.cdi = None;
        self.cdi_spec_dirs.clear();
    }

    /// Add what a file says outside of the CRI plugin's section.
    fn add_general(&mut self, file: &ContainerdFile, values: &Values<'_>) -> Result<(), Error> {
        self.imports.extend(file.imports.iter().cloned());
        for plugin in values.texts(&["disabled_plugins"])?.unwrap_or_default() {
            if !self.disabled_plugins.contains(&plugin) {
                self.disabled_plugins.push(plugin);
            }
        }
        self.files.push(file.path.clone());
        Ok(())
    }
}

/// Add what a section says, with or without its runtimes.
fn add(all: &mut Configuration, values: &Values<'_>, section: &[&str], with_runtimes: bool) -> Result<(), Error> {
    let at = |rest: &[&'static str]| -> Vec<String> { section.iter().chain(rest).map(|key| (*key).to_owned()).collect() };
    fn keys(path: &[String]) -> Vec<&str> {
        path.iter().map(String::as_str).collect()
    }
    if let Some(cdi) = values.flag(&keys(&at(&["enable_cdi"])))? {
        all.cdi = Some(cdi);
    }
    if let Some(directories) = values.texts(&keys(&at(&["cdi_spec_dirs"])))? {
        all.cdi_spec_dirs = directories;
    }
    if let Some(name) = values.text(&keys(&at(&["containerd", "default_runtime_name"])))? {
        all.default_runtime = (!name.is_empty()).then(|| name.to_owned());
        all.default_runtime_file = Some(values.path.to_owned());
    }
    let of_runtimes = at(&["containerd", "runtimes"]);
    let names: Vec<String> = values
        .table(&keys(&of_runtimes))?
        .filter(|_| with_runtimes)
        .into_iter()
        .flat_map(|table| table.keys().cloned())
        .collect();
    for name in names {
        let mut path = keys(&of_runtimes);
        path.push(&name);
        values.table(&path)?;
        let runtime = all.runtimes.entry(name.clone()).or_default();
        let with = |rest: &[&'static str]| [&path[..], rest].concat();
        // The shim `io.containerd.runtime.v1.linux` reads `Runtime`; newer shims read `BinaryName`.
        for key in ["Runtime", "BinaryName"] {
            if let Some(program) = values.text(&with(&["options", key]))?.filter(|program| !program.is_empty()) {
                runtime.path = Some(program.to_owned());
            }
        }
        if let Some(kind) = values.text(&with(&["runtime_type"]))? {
            runtime.runtime_type = Some(kind.to_owned());
        }
        if let Some(systemd) = values.flag(&with(&["options", "SystemdCgroup"]))? {
            runtime.systemd_cgroup = Some(systemd);
        }
        runtime.file = values.path.to_owned();
    }
    Ok(())
}
