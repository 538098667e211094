//! NVIDIA's `config.toml` as a text that is edited: `nvidia-ctk config`.
//!
//! What is not set stays as it is, comments too; a setting that is there as a comment (`#no-cgroups = false`) is put in its place.

use std::fmt::Write as _;

use thiserror::Error as ThisError;
use toml_edit::{Array, DocumentMut, Item, Table, Value};

use super::settings::{self, Settings};

/// The file that says what is assumed without one: the lines of NVIDIA's tool, with the values of [`Settings::default`].
///
/// A line that begins with `#` and a key is an example of what is not set. `set` puts a value in its place.
pub fn assumed(ldconfig: &str) -> String {
    let settings = Settings::default();
    let text = |value: &str| Value::from(value).to_string();
    let list = |values: &[String]| Value::from(values.iter().map(String::as_str).collect::<Array>()).to_string();
    // Where nothing is set, an example.
    let optional = |key: &str, value: Option<Value>, example: &str| match value {
        Some(value) => format!("{key} = {}", value.to_string().trim()),
        None => format!("#{key} = {example}"),
    };
    let maybe = |key: &str, value: &Option<String>, example: &str| optional(key, value.clone().map(Value::from), &text(example));
    let Settings {
        mode,
        runtimes,
        debug,
        log_level,
        spec_dirs,
        default_kind,
        annotation_prefixes,
        accept_mounts,
        accept_environment,
        swarm_resources,
        disable_require,
        capabilities,
        cli,
        cuda_compat_mode,
        skip_mode_detection,
        // NVIDIA's tool does not write these.
        no_imex_creation: _,
        ignore_imex: _,
        no_additional_groups: _,
        no_compat_hook: _,
        probe: _,
        nvml_library: _,
    } = &settings;
    let swarm = (!swarm_resources.is_empty()).then(|| Value::from(swarm_resources.join(",")));
    let blocks = [
        vec![
            "# Lines without # are what divvy-runtime assumes where they are missing. Lines with # are examples of what can be set.".to_owned(),
            String::new(),
            format!("#accept-nvidia-visible-devices-as-volume-mounts = {accept_mounts}"),
            "# If this is not set, NVIDIA_VISIBLE_DEVICES counts in an unprivileged container only where docker run --gpus wrote it.".to_owned(),
            "# false: it never counts there. true: it always counts, so that an image can take every GPU of the machine.".to_owned(),
            optional(
                "accept-nvidia-visible-devices-envvar-when-unprivileged",
                accept_environment.map(Value::from),
                "false",
            ),
            format!("disable-require = {disable_require}"),
            format!("supported-driver-capabilities = {}", text(&capabilities.join(","))),
            optional("swarm-resource", swarm, "\"DOCKER_RESOURCE_GPU\""),
        ],
        vec![
            "[nvidia-container-cli]".to_owned(),
            maybe("debug", &cli.debug, "/var/log/nvidia-container-toolkit.log"),
            format!("environment = {}", list(&cli.environment)),
            maybe("ldcache", &cli.ldcache, "/etc/ld.so.cache"),
            format!("ldconfig = {}", text(ldconfig)),
            format!("load-kmods = {}", cli.loads_kmods()),
            format!("#no-cgroups = {}", cli.no_cgroups),
            maybe("path", &cli.path, "/usr/bin/nvidia-container-cli"),
            maybe("root", &cli.root, "/run/nvidia/driver"),
            maybe("user", &cli.user, "root:video"),
        ],
        vec![
            "[nvidia-container-runtime]".to_owned(),
            maybe("debug", debug, "/var/log/nvidia-container-runtime.log"),
            format!("log-level = {}", text(log_level.as_str())),
            format!("mode = {}", text(mode.as_str())),
            format!("runtimes = {}", list(runtimes)),
        ],
        vec!["[nvidia-container-runtime.modes]".to_owned()],
        vec![
            "[nvidia-container-runtime.modes.cdi]".to_owned(),
            format!("annotation-prefixes = {}", list(annotation_prefixes)),
            format!("default-kind = {}", text(default_kind)),
            format!("spec-dirs = {}", list(spec_dirs)),
        ],
        vec![
            "# NVIDIA's programs read this; divvy-runtime does not.".to_owned(),
            "[nvidia-container-runtime.modes.csv]".to_owned(),
            "mount-spec-path = \"/etc/nvidia-container-runtime/host-files-for-container.d\"".to_owned(),
        ],
        vec![
            "[nvidia-container-runtime.modes.legacy]".to_owned(),
            format!("cuda-compat-mode = {}", text(cuda_compat_mode)),
        ],
        vec![
            "[nvidia-container-runtime-hook]".to_owned(),
            "# NVIDIA's programs read this; divvy-runtime does not.".to_owned(),
            "path = \"nvidia-container-runtime-hook\"".to_owned(),
            format!("skip-mode-detection = {skip_mode_detection}"),
        ],
        vec![
            "# NVIDIA's programs read this; divvy-runtime does not.".to_owned(),
            "[nvidia-ctk]".to_owned(),
            "path = \"nvidia-ctk\"".to_owned(),
        ],
    ];
    let blocks = blocks.map(|lines| lines.iter().map(|line| format!("{line}\n")).collect::<String>());
    blocks.join("\n")
}

/// Why a setting cannot be set.
#[derive(Debug, ThisError)]
pub enum Error {
    /// The file.
    #[error("it is no TOML, and stays as it is: {0}")]
    Toml(#[from] toml_edit::TomlError),
    /// An option, in NVIDIA's words.
    #[error("invalid --set option {option}: {why}")]
    Option {
        /// As it was given.
        option: String,
        /// What is wrong with it.
        why: String,
    },
    /// What the runtime would refuse, so that no container would start.
    #[error("divvy-runtime would refuse the file: {0}")]
    Refused(settings::Error),
    /// A table's name has a value, or a value's name is a table.
    #[error("{0} is not a table in the file, and has to be one")]
    NoTable(String),
}

/// What a setting is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Truth,
    Text,
    List,
    Table,
}

/// All settings of NVIDIA's programs and of this runtime, by table.
const KNOWN: [(&str, &[(&str, Kind)]); 11] = [
    (
        "",
        &[
            ("accept-nvidia-visible-devices-as-volume-mounts", Kind::Truth),
            ("accept-nvidia-visible-devices-envvar-when-unprivileged", Kind::Truth),
            ("disable-require", Kind::Truth),
            ("supported-driver-capabilities", Kind::Text),
            ("swarm-resource", Kind::Text),
        ],
    ),
    (
        "features",
        &[
            ("allow-cuda-compat-libs-from-container", Kind::Truth),
            ("allow-ldconfig-from-container", Kind::Truth),
            ("allow-unknown-oci-spec-fields", Kind::Truth),
            ("disable-cuda-compat-lib-hook", Kind::Truth),
            ("disable-imex-channel-creation", Kind::Truth),
            ("ignore-imex-channel-requests", Kind::Truth),
            ("no-additional-gids-for-device-nodes", Kind::Truth),
        ],
    ),
    (
        "nvidia-container-cli",
        &[
            ("debug", Kind::Text),
            ("environment", Kind::List),
            ("ldcache", Kind::Text),
            ("ldconfig", Kind::Text),
            ("load-kmods", Kind::Truth),
            ("no-cgroups", Kind::Truth),
            ("no-pivot", Kind::Truth),
            ("path", Kind::Text),
            ("root", Kind::Text),
            ("user", Kind::Text),
        ],
    ),
    (
        "nvidia-container-runtime",
        &[
            ("debug", Kind::Text),
            ("log-level", Kind::Text),
            ("mode", Kind::Text),
            ("runtimes", Kind::List),
        ],
    ),
    ("nvidia-container-runtime.modes", &[]),
    (
        "nvidia-container-runtime.modes.cdi",
        &[
            ("annotation-prefixes", Kind::List),
            ("default-kind", Kind::Text),
            ("spec-dirs", Kind::List),
        ],
    ),
    (
        "nvidia-container-runtime.modes.csv",
        &[("compat-container-root", Kind::Text), ("mount-spec-path", Kind::Text)],
    ),
    (
        "nvidia-container-runtime.modes.jit-cdi",
        &[
            ("nvcdi-disable-hooks", Kind::List),
            ("nvcdi-feature-flags", Kind::List),
            ("nvml-library", Kind::Text),
            ("probe", Kind::Text),
        ],
    ),
    ("nvidia-container-runtime.modes.legacy", &[("cuda-compat-mode", Kind::Text)]),
    (
        "nvidia-container-runtime-hook",
        &[("path", Kind::Text), ("skip-mode-detection", Kind::Truth)],
    ),
    ("nvidia-ctk", &[("path", Kind::Text)]),
];

/// The text with these options (`key=value`, or the key alone of what is true or false) set in it, in their order.
///
/// # Errors
/// See [`Error`]; no option is set then.
pub fn set(text: &str, options: &[String]) -> Result<String, Error> {
    // A byte order mark belongs to the file and to no line; toml_edit drops it.
    let (mark, text) = text.strip_prefix('\u{feff}').map_or(("", text), |rest| ("\u{feff}", rest));
    let mut after = text.to_owned();
    // What is broken already is to be mended piece by piece.
    let was_fine = Settings::parse(text).is_ok();
    let mut document: DocumentMut = text.parse()?;
    for option in options {
        let (table, key, value) = parse(option)?;
        let line = uncommented(&after, table, key, &value).filter(|edited| says(edited, table, key, &value));
        after = match line {
            Some(edited) => edited,
            None => {
                insert(&mut document, table, key, value)?;
                document.to_string()
            }
        };
        // So that the same once more is the same file.
        if !after.ends_with('\n') {
            after.push('\n');
        }
        document = after.parse()?;
    }
    match Settings::parse(&after) {
        Err(error) if was_fine => Err(Error::Refused(error)),
        _ => Ok(format!("{mark}{after}")),
    }
}

fn parse(option: &str) -> Result<(&'static str, &'static str, Value), Error> {
    let refuse = |why: String| Error::Option {
        option: option.to_owned(),
        why,
    };
    let (path, value) = option
        .split_once('=')
        .map_or((option, None), |(path, value)| (path, Some(value)));
    let (table, key, kind) = known(path).map_err(|part| refuse(format!("invalid config option: undefined field: {part:?}")))?;
    let text = || value.ok_or_else(|| refuse(format!("invalid format: expected key=value; got {option}")));
    let value = match kind {
        Kind::Table => {
            return Err(refuse(format!(
                "invalid config option: {path} is a table; set one of its fields"
            )));
        }
        Kind::Text => Value::from(text()?),
        Kind::List => {
            let parts = text()?.split([',', ':']).map(str::trim).filter(|part| !part.is_empty());
            Value::from(parts.collect::<Array>())
        }
        // As Go's strconv.ParseBool.
        Kind::Truth => match value {
            None | Some("1" | "t" | "T" | "TRUE" | "true" | "True") => Value::from(true),
            Some("0" | "f" | "F" | "FALSE" | "false" | "False") => Value::from(false),
            Some(other) => return Err(refuse(format!("invalid format: {other:?} is neither true nor false"))),
        },
    };
    Ok((table, key, value))
}

/// Table, key and kind of a dotted path; else the part of it that nobody knows.
fn known(path: &str) -> Result<(&'static str, &'static str, Kind), &str> {
    if let Some((table, _)) = KNOWN.iter().find(|(table, _)| *table == path && !path.is_empty()) {
        return Ok((*table, "", Kind::Table));
    }
    let (of_table, name) = path.rsplit_once('.').unwrap_or(("", path));
    let Some((table, keys)) = KNOWN.iter().find(|(table, _)| *table == of_table) else {
        // The first part that leads nowhere.
        let mut so_far = String::new();
        for part in path.split('.') {
            let dot = if so_far.is_empty() { "" } else { "." };
            // Writing to a text does not fail.
            let _ = write!(so_far, "{dot}{part}");
            if !KNOWN.iter().any(|(table, _)| *table == so_far) {
                return Err(part);
            }
        }
        return Err(name);
    };
    let key = keys.iter().find(|(key, _)| *key == name);
    key.map(|(key, kind)| (*table, *key, *kind)).ok_or(name)
}

/// The text with the comment `#key = …` of the table replaced, if there is one.
fn uncommented(text: &str, table: &str, key: &str, value: &Value) -> Option<String> {
    if table_of(&text.parse().ok()?, table).is_some_and(|table| table.contains_key(key)) {
        return None;
    }
    let mut current = String::new();
    let mut lines: Vec<String> = text.split('\n').map(str::to_owned).collect();
    for line in &mut lines {
        let trimmed = line.trim();
        if let Some(header) = trimmed.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            current = header.0.trim().to_owned();
        } else if current == table
            && let Some(rest) = trimmed.strip_prefix('#').map(str::trim_start)
            && rest.strip_prefix(key).is_some_and(|rest| rest.trim_start().starts_with('='))
        {
            *line = format!("{key} = {value}");
            return Some(lines.join("\n"));
        }
    }
    None
}

/// Whether the text is TOML in which the setting has this value.
fn says(text: &str, table: &str, key: &str, value: &Value) -> bool {
    let document: Result<DocumentMut, _> = text.parse();
    document.is_ok_and(|document| {
        let found = table_of(&document, table).and_then(|table| table.get(key)?.as_value());
        found.is_some_and(|found| found.to_string().trim() == value.to_string().trim())
    })
}

fn table_of<'d>(document: &'d DocumentMut, path: &str) -> Option<&'d dyn toml_edit::TableLike> {
    let mut table: &dyn toml_edit::TableLike = document.as_table();
    for part in path.split('.').filter(|part| !part.is_empty()) {
        table = table.get(part)?.as_table_like()?;
    }
    Some(table)
}

fn insert(document: &mut DocumentMut, path: &str, key: &str, value: Value) -> Result<(), Error> {
    let mut table: &mut dyn toml_edit::TableLike = document.as_table_mut();
    let parts: Vec<&str> = path.split('.').filter(|part| !part.is_empty()).collect();
    for (at, part) in parts.iter().enumerate() {
        let mut new = Table::new();
        // `[a.b]` says that there is an `[a]`.
        new.set_implicit(at + 1 < parts.len());
        let item = table.entry(part).or_insert(Item::Table(new));
        table = item
            .as_table_like_mut()
            .ok_or_else(|| Error::NoTable(parts[..=at].join(".")))?;
    }
    match table.get_mut(key).and_then(Item::as_value_mut) {
        Some(there) => {
            // A comment behind the value stays where it is.
            let decor = there.decor().clone();
            *there = value;
            *there.decor_mut() = decor;
        }
        None => {
            table.insert(key, Item::Value(value));
        }
    }
    Ok(())
}
