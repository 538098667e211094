//! Docker's `daemon.json`, as dockerd reads it (`dockerd(8)`, and `daemon/config` in moby).

use serde_json::{Map, Value};

use super::edit::{RuntimeSettings, Write};
use super::text::{place, text};
use super::{Configuration, Error, OciRuntime, TextFiles, json};

/// The file that dockerd reads by default.
pub const CONFIG: &str = "/etc/docker/daemon.json";
const ENGINE: &str = "Docker";

/// Read Docker's file. A missing or empty file has the default configuration.
///
/// # Errors
/// Fails if the file cannot be read, is not valid JSON, or has a value of the wrong type at one of the keys in [`Configuration`].
pub fn read(files: &dyn TextFiles, path: &str) -> Result<Configuration, Error> {
    let Some(text) = text(files, path)? else {
        return Ok(Configuration::default());
    };
    let mut object = parse(path, &text)?;
    // dockerd treats null as an absent key.
    object.retain(|_, value| !value.is_null());
    let at = |keys: &[&str], found: &Value, wanted| wrong(path, &text, keys, found, wanted);
    let mut all = Configuration {
        files: vec![path.to_owned()],
        ..Configuration::default()
    };
    if let Some(name) = object.get("default-runtime") {
        let name = name.as_str().ok_or_else(|| at(&["default-runtime"], name, "a string"))?;
        all.default_runtime = (!name.is_empty()).then(|| name.to_owned());
        all.default_runtime_file = Some(path.to_owned());
    }
    if let Some(features) = object.get("features") {
        let features = features.as_object().ok_or_else(|| at(&["features"], features, "an object"))?;
        if let Some(cdi) = features.get("cdi") {
            all.cdi = Some(cdi.as_bool().ok_or_else(|| at(&["features", "cdi"], cdi, "true or false"))?);
        }
    }
    if let Some(directories) = object.get("cdi-spec-dirs") {
        all.cdi_spec_dirs = texts(directories).ok_or_else(|| at(&["cdi-spec-dirs"], directories, "a list of strings"))?;
    }
    if let Some(options) = object.get("exec-opts") {
        let options = texts(options).ok_or_else(|| at(&["exec-opts"], options, "a list of strings"))?;
        let driver = options
            .iter()
            .rev()
            .find_map(|option| option.strip_prefix("native.cgroupdriver="));
        all.cgroup_driver = driver.map(str::to_owned);
    }
    if let Some(runtimes) = object.get("runtimes") {
        let runtimes = runtimes.as_object().ok_or_else(|| at(&["runtimes"], runtimes, "an object"))?;
        for (name, runtime) in runtimes {
            let keys = ["runtimes", name];
            let table = runtime.as_object().ok_or_else(|| at(&keys, runtime, "an object"))?;
            let member = |key: &'static str| -> Result<Option<String>, Error> {
                let Some(value) = table.get(key) else { return Ok(None) };
                let value = value
                    .as_str()
                    .ok_or_else(|| at(&["runtimes", name, key], value, "a string"))?;
                Ok((!value.is_empty()).then(|| value.to_owned()))
            };
            // dockerd reads runtimeArgs; NVIDIA's tool writes args.
            let mut args = Vec::new();
            for key in ["runtimeArgs", "args"] {
                if let Some(list) = table.get(key).filter(|list| !list.is_null())
                    && args.is_empty()
                {
                    args = texts(list).ok_or_else(|| at(&["runtimes", name, key], list, "a list of strings"))?;
                }
            }
            all.runtimes.insert(
                name.clone(),
                OciRuntime {
                    path: member("path")?,
                    runtime_type: member("runtimeType")?,
                    systemd_cgroup: None,
                    args,
                    file: path.to_owned(),
                },
            );
        }
    }
    Ok(all)
}

fn texts(value: &Value) -> Option<Vec<String>> {
    value
        .as_array()?
        .iter()
        .map(|value| value.as_str().map(str::to_owned))
        .collect()
}

/// Parse a `daemon.json`. An empty file is an empty object.
pub(super) fn parse(path: &str, text: &str) -> Result<Map<String, Value>, Error> {
    if text.trim().is_empty() {
        return Ok(Map::new());
    }
    let value: Value = serde_json::from_str(text).map_err(|error| {
        let what = error.to_string();
        let what = what.rsplit_once(" at line ").map_or(what.as_str(), |(what, _)| what);
        let line = text
            .lines()
            .nth(error.line().saturating_sub(1))
            .unwrap_or_default()
            .trim_start();
        let comment = ["//", "/*", "#"].iter().any(|begin| line.starts_with(begin));
        Error::Syntax {
            path: path.to_owned(),
            format: "JSON",
            line: error.line(),
            column: error.column(),
            what: if comment {
                format!("{what} (JSON has no comments)")
            } else {
                what.to_owned()
            },
        }
    })?;
    match value {
        Value::Object(object) => Ok(object),
        other => Err(wrong(path, text, &[], &other, "an object in braces")),
    }
}

pub(super) fn wrong(path: &str, text: &str, keys: &[&str], found: &Value, wanted: &'static str) -> Error {
    let found = match found {
        Value::Null => "null".to_owned(),
        Value::Bool(value) => value.to_string(),
        Value::Number(value) => format!("the number {value}"),
        Value::String(value) => format!("the string {value:?}"),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "an object".to_owned(),
    };
    let (line, column) = place(text, offset(text, keys));
    Error::WrongType {
        path: path.to_owned(),
        line,
        column,
        key: if keys.is_empty() {
            "the file".to_owned()
        } else {
            keys.join(".")
        },
        found,
        wanted,
        engine: ENGINE,
    }
}

/// Return the byte offset of a member, or of the last of its parents that exists.
fn offset(text: &str, keys: &[&str]) -> usize {
    use jsonc_parser::common::Ranged as _;
    let Ok(parsed) = jsonc_parser::parse_to_ast(text, &Default::default(), &Default::default()) else {
        return 0;
    };
    let mut value = parsed.value;
    let mut at = value.as_ref().map_or(0, |value| value.range().start);
    for key in keys {
        let Some(jsonc_parser::ast::Value::Object(object)) = value else {
            break;
        };
        let Some(property) = object.properties.into_iter().find(|property| property.name.as_str() == *key) else {
            break;
        };
        at = property.range.start;
        value = Some(property.value);
    }
    at
}

/// Compute the new text of a `daemon.json`.
pub(super) fn configure(files: &dyn TextFiles, path: &str, settings: &RuntimeSettings) -> Result<Vec<Write>, Error> {
    let now = read(files, path)?;
    let text = text(files, path)?.unwrap_or_default();
    let document = json::JsonDocument::parse(path, &text)?;
    let root = document.root();
    let runtime = root.object_or_new("runtimes").object_or_new(&settings.name);
    runtime.set("path", &Value::from(settings.path.as_str()));
    // dockerd rejects a runtime that has both a path and a shim.
    for key in ["runtimeType", "options"] {
        runtime.remove(key);
    }
    match settings.set_default {
        Some(true) => root.set("default-runtime", &Value::from(settings.name.as_str())),
        Some(false) if now.default_runtime.as_deref() == Some(&settings.name) => root.set("default-runtime", &Value::from(STOCK)),
        _ => {}
    }
    if let Some(cdi) = settings.cdi {
        root.object_or_new("features").set("cdi", &Value::Bool(cdi));
    }
    let text = document.longer_text(path)?;
    Ok(vec![Write {
        path: path.to_owned(),
        text,
        like: None,
    }])
}

/// Docker's built-in runtime.
const STOCK: &str = "runc";

/// Return the text without the runtime `name`. If it is the default runtime, Docker's built-in runtime becomes the default. An
/// empty `runtimes` is removed.
pub(super) fn without(path: &str, text: &str, name: &str) -> Result<String, Error> {
    let object = parse(path, text)?;
    let document = json::JsonDocument::parse(path, text)?;
    let root = document.root();
    if object.get("default-runtime").and_then(Value::as_str) == Some(name) {
        root.set("default-runtime", &Value::from(STOCK));
    }
    if let Some(runtimes) = root.object("runtimes") {
        runtimes.remove(name);
        if runtimes.is_empty() {
            root.remove("runtimes");
        }
    }
    Ok(document.text())
}
