//! Edits JSON in place: the rest of the text stays the same, byte for byte.

use jsonc_parser::cst::{CstInputValue, CstObject, CstRootNode};
use serde_json::Value;

use super::Error;

/// The maximum number of lines and values in a text. The time that the library needs for an edit grows with the square of this
/// number; in a debug build it is about one second at this limit.
const MOST_PARTS: usize = 4_000;

/// A JSON text whose top-level value is an object.
pub(super) struct JsonDocument(CstRootNode);

/// A handle to an object in a text. An edit is visible through all handles to the object.
pub(super) struct JsonObject(CstObject);

impl JsonDocument {
    /// Parse a text that was already checked with a strict parser; this parser alone would accept comments and trailing commas.
    pub(super) fn parse(path: &str, text: &str) -> Result<JsonDocument, Error> {
        bounded(path, text)?;
        let text = if text.trim().is_empty() { "{}\n" } else { text };
        let root = CstRootNode::parse(text, &jsonc_parser::ParseOptions::default()).map_err(|error| Error::Syntax {
            path: path.to_owned(),
            format: "JSON",
            line: error.line_display(),
            column: error.column_display(),
            what: error.kind().to_string(),
        })?;
        Ok(JsonDocument(root))
    }

    pub(super) fn root(&self) -> JsonObject {
        JsonObject(self.0.object_value_or_set())
    }

    pub(super) fn text(&self) -> String {
        self.0.to_string()
    }

    /// Return the text after entries were added. A text that has grown beyond the limit is an error, so every written text can be edited again.
    pub(super) fn longer_text(&self, path: &str) -> Result<String, Error> {
        let text = self.text();
        bounded(path, &text).map(|()| text)
    }
}

impl JsonObject {
    pub(super) fn get(&self, key: &str) -> Option<Value> {
        let value = self.0.get(key)?.value()?;
        serde_json::from_str(&value.to_string()).ok()
    }

    pub(super) fn set(&self, key: &str, value: &Value) {
        match self.0.get(key) {
            Some(_) if self.get(key).as_ref() == Some(value) => {}
            Some(member) => member.set_value(input(value)),
            None => {
                self.0.append(key, input(value));
            }
        }
    }

    pub(super) fn remove(&self, key: &str) {
        if let Some(member) = self.0.get(key) {
            member.remove();
        }
    }

    pub(super) fn object(&self, key: &str) -> Option<JsonObject> {
        self.0.object_value(key).map(JsonObject)
    }

    /// Return the object under a key, and create it if there is none.
    pub(super) fn object_or_new(&self, key: &str) -> JsonObject {
        JsonObject(self.0.object_value_or_set(key))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.properties().is_empty()
    }
}

fn bounded(path: &str, text: &str) -> Result<(), Error> {
    let parts = text.bytes().filter(|byte| b"\n,:{[".contains(byte)).count();
    if parts > MOST_PARTS {
        Err(Error::TooLong {
            path: path.to_owned(),
            parts,
            most: MOST_PARTS,
        })
    } else {
        Ok(())
    }
}

fn input(value: &Value) -> CstInputValue {
    match value {
        Value::Null => CstInputValue::Null,
        Value::Bool(value) => CstInputValue::Bool(*value),
        Value::Number(value) => CstInputValue::Number(value.to_string()),
        Value::String(value) => CstInputValue::String(value.clone()),
        Value::Array(values) => CstInputValue::Array(values.iter().map(input).collect()),
        Value::Object(members) => CstInputValue::Object(members.iter().map(|(key, value)| (key.clone(), input(value))).collect()),
    }
}
