//! Edits TOML in place: comments, order, and spaces of all other entries stay as they are.

use toml_edit::{Array, DocumentMut, InlineTable, Item, Table, TableLike, Value};

use super::Error;

/// Parse a text into a document that can be edited.
pub(super) fn document(path: &str, text: &str) -> Result<DocumentMut, Error> {
    text.parse::<DocumentMut>().map_err(|error| {
        let (line, column) = super::text::place(text, error.span().map_or(0, |span| span.start));
        Error::Syntax {
            path: path.to_owned(),
            format: "TOML",
            line,
            column,
            what: error.message().trim().to_owned(),
        }
    })
}

/// Convert a plain value into an item that can be inserted; a table gets its own header.
pub(super) fn item(value: &toml::Value) -> Item {
    match value {
        toml::Value::Table(table) => {
            let mut made = Table::new();
            for (key, value) in table {
                made.insert(key, item(value));
            }
            // A table that has only subtables needs no header of its own.
            made.set_implicit(!table.is_empty() && table.values().all(toml::Value::is_table));
            Item::Table(made)
        }
        other => Item::Value(scalar(other)),
    }
}

fn scalar(value: &toml::Value) -> Value {
    match value {
        toml::Value::String(value) => value.as_str().into(),
        toml::Value::Integer(value) => (*value).into(),
        toml::Value::Float(value) => (*value).into(),
        toml::Value::Boolean(value) => (*value).into(),
        toml::Value::Datetime(value) => (*value).into(),
        toml::Value::Array(values) => Value::Array(values.iter().map(scalar).collect::<Array>()),
        toml::Value::Table(table) => {
            let mut made = InlineTable::new();
            for (key, value) in table {
                made.insert(key, scalar(value));
            }
            Value::InlineTable(made)
        }
    }
}

/// Convert an item into a plain value; `None` if the item has no value.
pub(super) fn value(item: &Item) -> Option<toml::Value> {
    let mut alone = DocumentMut::new();
    alone.insert("value", item.clone());
    let mut table: toml::Table = toml::from_str(&alone.to_string()).ok()?;
    table.remove("value")
}

/// Report whether an item is an empty table, or a table with only empty tables in it.
pub(super) fn is_empty(item: &Item) -> bool {
    match item.as_table_like() {
        Some(table) => table.iter().all(|(_, item)| is_empty(item)),
        None => item.is_none(),
    }
}

/// Replace a value, and keep the comment and the spaces around the old value.
pub(super) fn set(item: &mut Item, mut new: Item) {
    if let (Some(old), Some(new)) = (item.as_value(), new.as_value_mut()) {
        *new.decor_mut() = old.decor().clone();
    }
    *item = new;
}

/// Set a key to a scalar: replace an existing value, or append the key to the table.
pub(super) fn put(table: &mut dyn TableLike, key: &str, new: impl Into<Value>) {
    let new = new.into();
    match table.get_mut(key) {
        Some(item) => {
            if value(item) != value(&Item::Value(new.clone())) {
                set(item, Item::Value(new));
            }
        }
        None => {
            // Indent the new key like its neighbors.
            let last = table
                .iter()
                .filter(|(_, item)| item.is_value())
                .map(|(key, _)| key.to_owned())
                .last();
            let indent = last.and_then(|last| indent(table.key(&last)?.leaf_decor().prefix()?.as_str()?));
            table.insert(key, Item::Value(new));
            if let (Some(indent), Some(mut key)) = (indent, table.key_mut(key)) {
                key.leaf_decor_mut().set_prefix(indent);
            }
        }
    }
}

/// Return the indentation at the end of the text that precedes an item, or `None` if there is none.
pub(super) fn indent(before: &str) -> Option<String> {
    let last = before.rsplit('\n').next().unwrap_or_default();
    (!last.is_empty() && last.trim().is_empty()).then(|| last.to_owned())
}

/// Return the table at a path of keys, and create missing tables: inline tables below an inline table, tables with headers elsewhere. Return
/// `None` if a key on the path is not a table.
pub(super) fn reach<'d>(item: &'d mut Item, keys: &[&str]) -> Option<&'d mut dyn TableLike> {
    let mut item = item;
    for (index, key) in keys.iter().enumerate() {
        let new = match item {
            Item::Value(Value::InlineTable(_)) => Item::Value(Value::InlineTable(InlineTable::new())),
            _ => {
                let mut new = Table::new();
                new.set_implicit(index + 1 < keys.len());
                Item::Table(new)
            }
        };
        let table = item.as_table_like_mut()?;
        if table.get(key).is_none() {
            table.insert(key, new);
        }
        item = table.get_mut(key)?;
    }
    item.as_table_like_mut()
}

/// Insert a table under a key.
pub(super) fn put_table(table: &mut dyn TableLike, key: &str, new: &toml::Table) {
    table.insert(key, item(&toml::Value::Table(new.clone())));
}

/// Return the table at a path of keys, if it exists.
pub(super) fn find<'d>(item: &'d mut Item, keys: &[&str]) -> Option<&'d mut dyn TableLike> {
    let mut item = item;
    for key in keys {
        item = item.as_table_like_mut()?.get_mut(key)?;
    }
    item.as_table_like_mut()
}

/// Hide the headers of new tables that have only subtables.
pub(super) fn hide_empty(item: &mut Item) {
    let Item::Table(table) = item else { return };
    if !table.is_empty() && table.iter().all(|(_, item)| item.is_table()) && table.position().is_none() {
        table.set_implicit(true);
    }
    for (_, item) in table.iter_mut() {
        hide_empty(item);
    }
}
