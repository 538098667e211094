//! Edits the text of NVIDIA's `config.toml`, as `nvidia-ctk config` does.
//!
//! Settings that are not named stay as they are, and so do comments. If the file contains a setting as a comment (`#no-cgroups =
//! false`), the new value replaces that comment.

use std::fmt::Write as _;

use thiserror::Error as ThisError;
use toml_edit::{Array, DocumentMut, Item, Table, Value};

use super::settings::{self, OciRuntimeSettings};

/// Return a file that contains all defaults: the lines that NVIDIA's tool prints, with the values of [`OciRuntimeSettings::default`].
///
/// A line that begins with `#` and a key is an example of a setting that is not set. [`set`] replaces such a line.
pub fn assumed(ldconfig: &str) -> String {
    let settings = OciRuntimeSettings::default();
    let text = |value: &str| Value::from(value).to_string();
    let list = |values: &[String]| Value::from(values.iter().map(String::as_str).collect::<Array>()).to_string();
    // An optional setting that is not set becomes a commented example.
    let optional = |key: &str, value: Option<Value>, example: &str| match value {
        Some(value) => format!("{key} = {}", value.to_string().trim()),
        None => format!("#{key} = {example}"),
    };
    let maybe = |key: &str, value: &Option<String>, example: &str| optional(key, value.clone().map(Value::from), &text(example));
    let OciRuntimeSettings {
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
        // NVIDIA's tool does not print these.
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
            "# Lines without # are the defaults of divvy-runtime. Lines with # are examples of other settings.".to_owned(),
            String::new(),
            format!("#accept-nvidia-visible-devices-as-volume-mounts = {accept_mounts}"),
            "# If this is not set, NVIDIA_VISIBLE_DEVICES counts in an unprivileged container only if docker run --gpus wrote it.".to_owned(),
            "# false: it never counts there. true: it always counts, so an image can take every GPU of the machine.".to_owned(),
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
            "# Only NVIDIA's programs read this; divvy-runtime does not.".to_owned(),
            "[nvidia-container-runtime.modes.csv]".to_owned(),
            "mount-spec-path = \"/etc/nvidia-container-runtime/host-files-for-container.d\"".to_owned(),
        ],
        vec![
            "[nvidia-container-runtime.modes.legacy]".to_owned(),
            format!("cuda-compat-mode = {}", text(cuda_compat_mode)),
        ],
        vec![
            "[nvidia-container-runtime-hook]".to_owned(),
            "# Only NVIDIA's programs read this; divvy-runtime does not.".to_owned(),
            "path = \"nvidia-container-runtime-hook\"".to_owned(),
            format!("skip-mode-detection = {skip_mode_detection}"),
        ],
        vec![
            "# Only NVIDIA's programs read this; divvy-runtime does not.".to_owned(),
            "[nvidia-ctk]".to_owned(),
            "path = \"nvidia-ctk\"".to_owned(),
        ],
    ];
    let blocks = blocks.map(|lines| lines.iter().map(|line| format!("{line}\n")).collect::<String>());
    blocks.join("\n")
}

/// An error that prevents changing a setting.
#[derive(Debug, ThisError)]
pub enum SettingEditError {
    /// The file is not TOML.
    #[error("it is not valid TOML and stays as it is: {0}")]
    Toml(#[from] toml_edit::TomlError),
    /// An option of `--set` is wrong. The text is the same as NVIDIA's.
    #[error("invalid --set option {option}: {why}")]
    Option {
        /// The option as the user typed it.
        option: String,
        /// The reason, without a full stop.
        why: String,
    },
    /// The runtime would refuse the changed file, so that no container would start.
    #[error("divvy-runtime would refuse the file: {0}")]
    Refused(settings::RuntimeSettingsError),
    /// The file has a plain value where a table must be. The text is the path of that value.
    #[error("{0} is not a table in the file, but it must be one")]
    NoTable(String),
}

/// The type of a setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SettingKind {
    Truth,
    Text,
    List,
    Table,
}

/// All settings of NVIDIA's programs and of this runtime, grouped by table.
const KNOWN: [(&str, &[(&str, SettingKind)]); 11] = [
    (
        "",
        &[
            ("accept-nvidia-visible-devices-as-volume-mounts", SettingKind::Truth),
            ("accept-nvidia-visible-devices-envvar-when-unprivileged", SettingKind::Truth),
            ("disable-require", SettingKind::Truth),
            ("supported-driver-capabilities", SettingKind::Text),
            ("swarm-resource", SettingKind::Text),
        ],
    ),
    (
        "features",
        &[
            ("allow-cuda-compat-libs-from-container", SettingKind::Truth),
            ("allow-ldconfig-from-container", SettingKind::Truth),
            ("allow-unknown-oci-spec-fields", SettingKind::Truth),
            ("disable-cuda-compat-lib-hook", SettingKind::Truth),
            ("disable-imex-channel-creation", SettingKind::Truth),
            ("ignore-imex-channel-requests", SettingKind::Truth),
            ("no-additional-gids-for-device-nodes", SettingKind::Truth),
        ],
    ),
    (
        "nvidia-container-cli",
        &[
            ("debug", SettingKind::Text),
            ("environment", SettingKind::List),
            ("ldcache", SettingKind::Text),
            ("ldconfig", SettingKind::Text),
            ("load-kmods", SettingKind::Truth),
            ("no-cgroups", SettingKind::Truth),
            ("no-pivot", SettingKind::Truth),
            ("path", SettingKind::Text),
            ("root", SettingKind::Text),
            ("user", SettingKind::Text),
        ],
    ),
    (
        "nvidia-container-runtime",
        &[
            ("debug", SettingKind::Text),
            ("log-level", SettingKind::Text),
            ("mode", SettingKind::Text),
            ("runtimes", SettingKind::List),
        ],
    ),
    ("nvidia-container-runtime.modes", &[]),
    (
        "nvidia-container-runtime.modes.cdi",
        &[
            ("annotation-prefixes", SettingKind::List),
            ("default-kind", SettingKind::Text),
            ("spec-dirs", SettingKind::List),
        ],
    ),
    (
        "nvidia-container-runtime.modes.csv",
        &[
            ("compat-container-root", SettingKind::Text),
            ("mount-spec-path", SettingKind::Text),
        ],
    ),
    (
        "nvidia-container-runtime.modes.jit-cdi",
        &[
            ("nvcdi-disable-hooks", SettingKind::List),
            ("nvcdi-feature-flags", SettingKind::List),
            ("nvml-library", SettingKind::Text),
            ("probe", SettingKind::Text),
        ],
    ),
    (
        "nvidia-container-runtime.modes.legacy",
        &[("cuda-compat-mode", SettingKind::Text)],
    ),
    (
        "nvidia-container-runtime-hook",
        &[("path", SettingKind::Text), ("skip-mode-detection", SettingKind::Truth)],
    ),
    ("nvidia-ctk", &[("path", SettingKind::Text)]),
];

/// Apply these options to the text, in order, and return the new text. An option is `key=value`; for a boolean, `key` without a
/// value means true.
///
/// # Errors
/// See [`SettingEditError`]. If there is an error, no option is applied.
pub fn set(text: &str, options: &[String]) -> Result<String, SettingEditError> {
    // toml_edit drops a byte order mark. Keep it aside and put it back at the end.
    let (mark, text) = text.strip_prefix('\u{feff}').map_or(("", text), |rest| ("\u{feff}", rest));
    let mut after = text.to_owned();
    // A file that the runtime already refuses may be repaired one setting at a time, so only a file that was fine must stay fine.
    let was_fine = OciRuntimeSettings::parse(text).is_ok();
    let mut document: DocumentMut = text.parse()?;
    for option in options {
        let (table, key, value) = parse(option)?;
        // Do not write what the file already says: toml_edit writes a header such as `[a .b]` in another way.
        if says(&after, table, key, &value) && after.ends_with('\n') {
            continue;
        }
        let line = uncommented(&after, table, key, &value).filter(|edited| says(edited, table, key, &value));
        after = match line {
            Some(edited) => edited,
            None => {
                insert(&mut document, table, key, value)?;
                document.to_string()
            }
        };
        // Without a final newline a second run with the same options would change the file again.
        if !after.ends_with('\n') {
            after.push('\n');
        }
        document = after.parse()?;
    }
    match OciRuntimeSettings::parse(&after) {
        Err(error) if was_fine => Err(SettingEditError::Refused(error)),
        _ => Ok(format!("{mark}{after}")),
    }
}

fn parse(option: &str) -> Result<(&'static str, &'static str, Value), SettingEditError> {
    let refuse = |why: String| SettingEditError::Option {
        option: option.to_owned(),
        why,
    };
    let (path, value) = option
        .split_once('=')
        .map_or((option, None), |(path, value)| (path, Some(value)));
    let (table, key, kind) = known(path).map_err(|part| refuse(format!("invalid config option: undefined field: {part:?}")))?;
    let text = || value.ok_or_else(|| refuse(format!("invalid format: expected key=value; got {option}")));
    let value = match kind {
        SettingKind::Table => {
            return Err(refuse(format!(
                "invalid config option: {path} is a table; set one of its fields"
            )));
        }
        SettingKind::Text => Value::from(text()?),
        SettingKind::List => {
            let parts = text()?.split([',', ':']).map(str::trim).filter(|part| !part.is_empty());
            Value::from(parts.collect::<Array>())
        }
        // The values that Go's strconv.ParseBool accepts.
        SettingKind::Truth => match value {
            None | Some("1" | "t" | "T" | "TRUE" | "true" | "True") => Value::from(true),
            Some("0" | "f" | "F" | "FALSE" | "false" | "False") => Value::from(false),
            Some(other) => return Err(refuse(format!("invalid format: {other:?} is neither true nor false"))),
        },
    };
    Ok((table, key, value))
}

/// Return the table, the key, and the kind of a dotted path. The error is the first component of the path that is unknown.
fn known(path: &str) -> Result<(&'static str, &'static str, SettingKind), &str> {
    if let Some((table, _)) = KNOWN.iter().find(|(table, _)| *table == path && !path.is_empty()) {
        return Ok((*table, "", SettingKind::Table));
    }
    let (of_table, name) = path.rsplit_once('.').unwrap_or(("", path));
    let Some((table, keys)) = KNOWN.iter().find(|(table, _)| *table == of_table) else {
        // Find the first part that does not lead to a table.
        let mut so_far = String::new();
        for part in path.split('.') {
            let dot = if so_far.is_empty() { "" } else { "." };
            // Writing to a String cannot fail.
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

/// Return the text in which the comment `#key = …` of the table is replaced. The result is `None` if the table has no such
/// comment, or if it already has the key.
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

/// Report whether the text is TOML in which the setting has this value. If the replaced comment was inside a multi-line string,
/// this check fails.
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

fn insert(document: &mut DocumentMut, path: &str, key: &str, value: Value) -> Result<(), SettingEditError> {
    let mut table: &mut dyn toml_edit::TableLike = document.as_table_mut();
    let parts: Vec<&str> = path.split('.').filter(|part| !part.is_empty()).collect();
    for (at, part) in parts.iter().enumerate() {
        let mut new = Table::new();
        // `[a.b]` implies `[a]`, so the parents need no header of their own.
        new.set_implicit(at + 1 < parts.len());
        let item = table.entry(part).or_insert(Item::Table(new));
        table = item
            .as_table_like_mut()
            .ok_or_else(|| SettingEditError::NoTable(parts[..=at].join(".")))?;
    }
    match table.get_mut(key).and_then(Item::as_value_mut) {
        Some(there) => {
            // Keep a comment that follows the value.
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
