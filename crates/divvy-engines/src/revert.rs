//! Removes divvy's entries from a file that was edited since divvy wrote it. Every value that is still as divvy wrote it
//! gets its original value back. The comparison works on parsed values, not on text.

use serde_json::Value;
use toml_edit::{DocumentMut, Item, TableLike};

use super::edit::Recorded;
use super::target::EngineTarget;
use super::{Error, docker, json, template, toml_text};

/// The keys that divvy changed and that were changed again by hand. They keep their current value, and the user is told.
#[derive(Debug, Default)]
pub(super) struct KeptKeys(pub(super) Vec<String>);

/// Return the text without divvy's entries, or `None` if the file contained nothing else and did not exist before.
pub(super) fn file(
    target: &EngineTarget,
    path: &str,
    recorded: &Recorded,
    now: Option<String>,
) -> Result<(Option<String>, KeptKeys), Error> {
    let Some(now) = now else {
        return Ok((None, KeptKeys::default()));
    };
    let mut kept = KeptKeys::default();
    if let EngineTarget::Template { .. } = target {
        let left = template::without(&now);
        return Ok((left_or_none(recorded, left.trim().is_empty(), left), kept));
    }
    let original = recorded.original.as_deref().unwrap_or_default();
    // divvy parsed these texts before it recorded them. An error therefore means that the record is damaged.
    let of_record = |error: Error| Error::Record {
        path: target.record(),
        why: match error {
            Error::Syntax { what, .. } => format!("the text of {path} in it cannot be read: {what}"),
            other => other.to_string(),
        },
    };
    if target.is_json() {
        let parse = |text| docker::parse(path, text).map_err(of_record);
        let (original, written) = (parse(original)?, parse(&recorded.written)?);
        docker::parse(path, &now)?;
        let document = json::JsonDocument::parse(path, &now)?;
        let root = document.root();
        json_objects(&root, &Value::Object(original), &Value::Object(written), "", &mut kept);
        let left = document.text();
        let empty = docker::parse(path, &left)?.is_empty();
        return Ok((left_or_none(recorded, empty, left), kept));
    }
    let parse = |text| super::text::toml(path, text).map_err(of_record);
    let (original, written) = (parse(original)?, parse(&recorded.written)?);
    let mut document = toml_text::document(path, &now)?;
    tables(document.as_table_mut(), &original, &written, "", &mut kept);
    let empty = is_empty(&document);
    let left = document.to_string();
    Ok((left_or_none(recorded, empty, left), kept))
}

fn left_or_none(recorded: &Recorded, empty: bool, left: String) -> Option<String> {
    (!empty || recorded.original.is_some()).then_some(left)
}

/// Report whether a document has no content other than its format version.
fn is_empty(document: &DocumentMut) -> bool {
    document
        .iter()
        .all(|(key, item)| key == "version" || toml_text::is_empty(item))
}

fn dotted(at: &str, key: &str) -> String {
    match at {
        "" => key.to_owned(),
        at => format!("{at}.{key}"),
    }
}

fn tables(now: &mut dyn TableLike, original: &toml::Table, written: &toml::Table, at: &str, kept: &mut KeptKeys) {
    let nothing = toml::Table::new();
    for (key, wrote) in written {
        let was = original.get(key);
        if was == Some(wrote) {
            continue;
        }
        // Keep the format version: the rest of the file may have been written in it.
        if at.is_empty() && key == "version" && was.is_none() {
            continue;
        }
        let Some(item) = now.get_mut(key) else { continue };
        let same = toml_text::value(item).as_ref() == Some(wrote);
        if same {
            match was {
                Some(was) => toml_text::set(item, toml_text::item(was)),
                None => {
                    now.remove(key);
                }
            }
            continue;
        }
        match (wrote, item) {
            (toml::Value::Table(wrote), item) if item.is_table_like() => {
                let table = item.as_table_like_mut().expect("just looked");
                let was_table = was.and_then(toml::Value::as_table);
                tables(table, was_table.unwrap_or(&nothing), wrote, &dotted(at, key), kept);
                if was.is_none() && table.is_empty() {
                    now.remove(key);
                }
            }
            (toml::Value::Array(wrote), Item::Value(toml_edit::Value::Array(list))) => {
                let was: &[toml::Value] = was.and_then(toml::Value::as_array).map_or(&[], Vec::as_slice);
                list.retain(|element| {
                    let element = toml_text::value(&Item::Value(element.clone()));
                    element.is_none_or(|element| was.contains(&element) || !wrote.contains(&element))
                });
            }
            _ => kept.0.push(dotted(at, key)),
        }
    }
    for (key, was) in original {
        if !written.contains_key(key) && now.get(key).is_none() {
            now.insert(key, toml_text::item(was));
        }
    }
}

fn json_objects(now: &json::JsonObject, original: &Value, written: &Value, at: &str, kept: &mut KeptKeys) {
    let empty = serde_json::Map::new();
    let (original, written) = (original.as_object().unwrap_or(&empty), written.as_object().unwrap_or(&empty));
    for (key, wrote) in written {
        let was = original.get(key);
        if was == Some(wrote) {
            continue;
        }
        let Some(value) = now.get(key) else { continue };
        if value == *wrote {
            match was {
                Some(was) => now.set(key, was),
                None => now.remove(key),
            }
            continue;
        }
        match now.object(key) {
            Some(object) if wrote.is_object() => {
                json_objects(&object, was.unwrap_or(&Value::Null), wrote, &dotted(at, key), kept);
                if was.is_none() && object.is_empty() {
                    now.remove(key);
                }
            }
            _ => kept.0.push(dotted(at, key)),
        }
    }
    for (key, was) in original {
        if !written.contains_key(key) && now.get(key).is_none() {
            now.set(key, was);
        }
    }
}
