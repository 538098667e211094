//! Reads TOML files and checks the types of their values. Each error has a line and a column.

use toml_edit::{Document, Item};

use super::{Error, TextFiles};

/// Return the text of a file, or `None` if the file does not exist.
pub(super) fn text(files: &dyn TextFiles, path: &str) -> Result<Option<String>, Error> {
    files.text(path).map_err(|why| Error::Unreadable {
        path: path.to_owned(),
        why: why.to_string(),
    })
}

/// Return the line and the column of a byte offset, both counted from 1.
pub(super) fn place(text: &str, offset: usize) -> (usize, usize) {
    let before = text.get(..offset).unwrap_or(text);
    let line = before.rsplit('\n').next().unwrap_or_default();
    (before.matches('\n').count() + 1, line.chars().count() + 1)
}

/// Parse a file's TOML.
pub(super) fn toml(path: &str, text: &str) -> Result<toml::Table, Error> {
    toml::from_str(text).map_err(|error| {
        let (line, column) = place(text, error.span().map_or(0, |span| span.start));
        Error::Syntax {
            path: path.to_owned(),
            format: "TOML",
            line,
            column,
            what: error.message().trim().replace('\n', "; "),
        }
    })
}

/// Make the error for a value of the wrong type.
pub(super) fn wrong(
    engine: &'static str,
    path: &str,
    text: &str,
    keys: &[&str],
    found: &toml::Value,
    wanted: &'static str,
) -> Error {
    let (line, column) = offset(text, keys).map_or((1, 1), |offset| place(text, offset));
    let found = match found {
        toml::Value::String(value) => format!("the string {value:?}"),
        toml::Value::Integer(value) => format!("the number {value}"),
        toml::Value::Boolean(value) => value.to_string(),
        toml::Value::Array(_) => "a list".to_owned(),
        toml::Value::Table(_) => "a table".to_owned(),
        other => format!("a {}", other.type_str()),
    };
    Error::WrongType {
        path: path.to_owned(),
        line,
        column,
        key: keys.join("."),
        found,
        wanted,
        engine,
    }
}

fn offset(text: &str, keys: &[&str]) -> Option<usize> {
    let document = Document::parse(text).ok()?;
    let mut item: &Item = document.as_item();
    let mut at = None;
    for key in keys {
        let table = item.as_table_like()?;
        let (key, value) = table.get_key_value(key)?;
        at = key.span().or_else(|| value.span()).map(|span| span.start).or(at);
        item = value;
    }
    at
}

/// The values of a file, and the text that is needed to locate a value of the wrong type.
pub(super) struct Values<'f> {
    pub(super) engine: &'static str,
    pub(super) path: &'f str,
    pub(super) text: &'f str,
    pub(super) table: toml::Table,
}

impl<'f> Values<'f> {
    pub(super) fn parse(engine: &'static str, path: &'f str, text: &'f str) -> Result<Values<'f>, Error> {
        Ok(Values {
            engine,
            path,
            text,
            table: toml(path, text)?,
        })
    }

    fn wrong(&self, keys: &[&str], found: &toml::Value, wanted: &'static str) -> Error {
        wrong(self.engine, self.path, self.text, keys, found, wanted)
    }

    /// Return the value at a path of keys, or `None` if a key is missing. Fail if another value on the path is not a table.
    pub(super) fn get(&self, keys: &[&str]) -> Result<Option<&toml::Value>, Error> {
        let mut table = &self.table;
        for (index, key) in keys.iter().enumerate() {
            let Some(value) = table.get(*key) else {
                return Ok(None);
            };
            if index + 1 == keys.len() {
                return Ok(Some(value));
            }
            table = value
                .as_table()
                .ok_or_else(|| self.wrong(&keys[..=index], value, "a table"))?;
        }
        Ok(None)
    }

    pub(super) fn table(&self, keys: &[&str]) -> Result<Option<&toml::Table>, Error> {
        self.get(keys)?
            .map(|value| value.as_table().ok_or_else(|| self.wrong(keys, value, "a table")))
            .transpose()
    }

    pub(super) fn text(&self, keys: &[&str]) -> Result<Option<&str>, Error> {
        self.get(keys)?
            .map(|value| value.as_str().ok_or_else(|| self.wrong(keys, value, "a string in quotes")))
            .transpose()
    }

    pub(super) fn flag(&self, keys: &[&str]) -> Result<Option<bool>, Error> {
        self.get(keys)?
            .map(|value| value.as_bool().ok_or_else(|| self.wrong(keys, value, "true or false")))
            .transpose()
    }

    pub(super) fn number(&self, keys: &[&str]) -> Result<Option<i64>, Error> {
        self.get(keys)?
            .map(|value| {
                value
                    .as_integer()
                    .ok_or_else(|| self.wrong(keys, value, "a number without quotes"))
            })
            .transpose()
    }

    pub(super) fn texts(&self, keys: &[&str]) -> Result<Option<Vec<String>>, Error> {
        let Some(value) = self.get(keys)? else {
            return Ok(None);
        };
        let wrong = |found| self.wrong(keys, found, "a list of strings");
        value
            .as_array()
            .ok_or_else(|| wrong(value))?
            .iter()
            .map(|value| value.as_str().map(str::to_owned).ok_or_else(|| wrong(value)))
            .collect::<Result<_, _>>()
            .map(Some)
    }
}
