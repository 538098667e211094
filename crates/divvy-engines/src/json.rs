//! JSON that is edited where it is: what is not touched stays as it is, to the byte.

use jsonc_parser::cst::{CstInputValue, CstObject, CstRootNode};
use serde_json::Value;

use super::Error;

/// Lines and values that a text may have: what the library takes for an edit grows with their square. A second for these, in a debug build.
const MOST_PARTS: usize = 4_000;

/// A text with an object in it.
pub(super) struct Document(CstRootNode);

/// An object in a text; edits are seen by all who hold it.
pub(super) struct Object(CstObject);

impl Document {
    /// Of a text that was parsed strictly before.
    pub(super) fn parse(path: &str, text: &str) -> Result<Document, Error> {
        bounded(path, text)?;
        let text = if text.trim().is_empty() { "{}\n" } else { text };
        let root = CstRootNode::parse(text, &jsonc_parser::ParseOptions::default()).map_err(|error| Error::Syntax {
            path: path.to_owned(),
            format: "JSON",
            line: error.line_display(),
            column: error.column_display(),
            what: error.kind().to_string(),
        })?;
        Ok(Document(root))
    }

    pub(super) fn root(&self) -> Object {
        Object(self.0.object_value_or_set())
    }

    pub(super) fn text(&self) -> String {
        self.0.to_string()
    }

    /// The same after things were added: what is written can be edited again.
    pub(super) fn longer_text(&self, path: &str) -> Result<String, Error> {
        let text = self.text();
        bounded(path, &text).map(|()| text)
    }
}

impl Object {
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

    pub(super) fn object(&self, key: &str) -> Option<Object> {
        self.0.object_value(key).map(Object)
    }

    /// The object under a key, made if there is none.
    pub(super) fn object_or_new(&self, key: &str) -> Object {
        Object(self.0.object_value_or_set(key))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.properties().is_empty()
    }
}

fn bounded(path: &str, text: &str) -> Result<(), Error> {
    let parts = text.bytes().filter(|byte| b"\n,:{[".contains(byte)).count();
    match parts > MOST_PARTS {
        true => Err(Error::TooLong {
            path: path.to_owned(),
            parts,
            most: MOST_PARTS,
        }),
        false => Ok(()),
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
