//! Values of the configuration file, with their places in it: `sharing.timeSlicing.resources[0].devices`.

use serde_json::{Map, Value};

use crate::Error;

/// The maximum number of entries of each list, and of warnings about unknown keys.
pub(crate) const MOST: usize = 256;
/// How many characters of a wrong value or key a message shows.
const SHOWN: usize = 60;

/// A value and its place. The place of the whole file is empty.
#[derive(Debug, Clone)]
pub(crate) struct PlacedValue<'v> {
    path: String,
    pub(crate) value: &'v Value,
}

/// How the keys of a section are compared. Go's JSON decoder ignores case, but NVIDIA's own decoders of some sections do not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keys {
    AnyCase,
    Exact,
}

/// A mapping whose keys are taken one by one. The keys that are left in the end are unknown.
#[derive(Debug)]
pub(crate) struct Section<'v> {
    path: String,
    keys: Keys,
    left: Vec<(&'v String, &'v Value)>,
}

impl<'v> PlacedValue<'v> {
    pub(crate) fn root(value: &'v Value) -> PlacedValue<'v> {
        PlacedValue {
            path: String::new(),
            value,
        }
    }

    /// Return the error that says what was found here, and what to write instead.
    pub(crate) fn wrong(&self, write: &str) -> Error {
        let place = if self.path.is_empty() {
            "the configuration file"
        } else {
            &self.path
        };
        Error::file(format!("unmarshal error: {place} is {}; write {write}", shown(self.value)))
    }

    /// Return NVIDIA's error for this value, with what to do.
    pub(crate) fn refused(&self, nvidias: impl std::fmt::Display, fix: &str) -> Error {
        Error::decoding(format!("{nvidias}; {fix} {}", self.path))
    }

    /// Return the value as a section. `null` is a section without keys, because a key under which everything is commented out has this value.
    pub(crate) fn section(self, keys: Keys) -> Result<Section<'v>, Error> {
        let map = match self.value {
            Value::Null => None,
            Value::Object(map) => Some(map),
            _ => return Err(self.wrong("keys and values below it")),
        };
        Ok(Section {
            path: self.path,
            keys,
            left: map.into_iter().flat_map(Map::iter).collect(),
        })
    }

    pub(crate) fn list(self) -> Result<Vec<PlacedValue<'v>>, Error> {
        let list = match self.value {
            Value::Null => &[][..],
            Value::Array(list) => list,
            _ => return Err(self.wrong("a list: each entry on a line of its own, after \"- \"")),
        };
        if list.len() > MOST {
            return Err(Error::file(format!(
                "{} has {} entries; at most {MOST} are allowed",
                self.path,
                list.len()
            )));
        }
        let entries = list.iter().enumerate().map(|(index, value)| PlacedValue {
            path: format!("{}[{index}]", self.path),
            value,
        });
        Ok(entries.collect())
    }

    pub(crate) fn text(self) -> Result<Option<String>, Error> {
        match self.value {
            Value::Null => Ok(None),
            Value::String(text) => Ok(Some(text.clone())),
            Value::Bool(_) | Value::Number(_) => Err(self.wrong("a text, in quotes if it looks like a number")),
            _ => Err(self.wrong("a text")),
        }
    }

    pub(crate) fn boolean(self) -> Result<Option<bool>, Error> {
        match self.value {
            Value::Null => Ok(None),
            Value::Bool(value) => Ok(Some(*value)),
            // YAML 1.1, which NVIDIA's programs read, has more words for them.
            Value::String(text) => match text.as_str() {
                "y" | "Y" | "yes" | "Yes" | "YES" | "on" | "On" | "ON" => Ok(Some(true)),
                "n" | "N" | "no" | "No" | "NO" | "off" | "Off" | "OFF" => Ok(Some(false)),
                "true" | "false" => Err(self.wrong("it without quotes")),
                _ => Err(self.wrong("true or false")),
            },
            _ => Err(self.wrong("true or false")),
        }
    }

    pub(crate) fn integer(self) -> Result<Option<i64>, Error> {
        match self.value {
            Value::Null => Ok(None),
            value => match integer(value) {
                Some(number) => Ok(Some(number)),
                None => Err(self.wrong("a whole number, without quotes")),
            },
        }
    }
}

/// Return a whole number, which may be written as 2.0.
#[expect(clippy::cast_possible_truncation, reason = "the number is whole, and smaller than 2^53")]
pub(crate) fn integer(value: &Value) -> Option<i64> {
    let whole = |number: f64| (number.fract() == 0.0 && number.abs() < 9e15).then_some(number as i64);
    value.as_i64().or_else(|| value.as_f64().and_then(whole))
}

/// Return a value as it is written in JSON, cut to a length that fits into a message.
pub(crate) fn shown(value: &Value) -> String {
    cut(&value.to_string())
}

fn cut(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
        None => text.to_owned(),
    }
}

impl<'v> Section<'v> {
    /// Take the value of a key. Of several spellings of the key the last one counts, as in Go.
    pub(crate) fn take(&mut self, key: &str) -> Option<PlacedValue<'v>> {
        let keys = self.keys;
        let is_it = |(name, _): &mut (&'v String, &'v Value)| match keys {
            Keys::AnyCase => name.eq_ignore_ascii_case(key),
            Keys::Exact => *name == key,
        };
        let (_, value) = self.left.extract_if(.., is_it).last()?;
        Some(PlacedValue {
            path: join(&self.path, key),
            value,
        })
    }

    /// Take the value of a key that may be `null` or missing, and read it.
    pub(crate) fn read<T>(
        &mut self,
        key: &str,
        read: impl FnOnce(PlacedValue<'v>) -> Result<Option<T>, Error>,
    ) -> Result<Option<T>, Error> {
        self.take(key).map_or(Ok(None), read)
    }

    /// Take a section that may be `null` or missing.
    pub(crate) fn section(&mut self, key: &str, keys: Keys) -> Result<Section<'v>, Error> {
        let place = self.take(key).unwrap_or(PlacedValue {
            path: join(&self.path, key),
            value: &Value::Null,
        });
        place.section(keys)
    }

    /// Take a list that may be `null` or missing.
    pub(crate) fn list(&mut self, key: &str) -> Result<Vec<PlacedValue<'v>>, Error> {
        self.take(key).map_or(Ok(Vec::new()), PlacedValue::list)
    }

    /// Warn about the keys that are left over.
    pub(crate) fn end(self, warnings: &mut Vec<String>) {
        let most = MOST.saturating_sub(warnings.len());
        for (name, _) in self.left.into_iter().take(most) {
            let path = join(&self.path, &cut(name));
            warnings.push(format!("unknown key {path} in the configuration file; it is ignored"));
        }
    }
}

fn join(path: &str, key: &str) -> String {
    match path {
        "" => key.to_owned(),
        path => format!("{path}.{key}"),
    }
}
