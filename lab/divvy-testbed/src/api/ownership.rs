//! Field ownership of labels (apimachinery `pkg/util/managedfields`, structured-merge-diff): who wrote which label, and the
//! conflicts of server-side apply.
//!
//! Simplifications: only `metadata.labels` has owners. They are recorded from the first apply to an object on. At that time its
//! labels belong to `before-first-apply`, as upstream records an object without owners. Entries have no `subresource`.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::error::ApiError;

/// Who writes an object.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Writer<'w> {
    /// The field manager.
    pub(crate) manager: &'w str,
    /// The time of the write.
    pub(crate) time: &'w str,
    /// The version of the object that the writer uses, such as `v1`.
    pub(crate) version: &'w str,
}

const APPLY: &str = "Apply";
const UPDATE: &str = "Update";

/// A manager's entry in `metadata.managedFields`.
#[derive(Debug, Clone)]
struct OwnershipEntry {
    manager: String,
    operation: String,
    version: String,
    time: String,
    labels: BTreeSet<String>,
}

impl OwnershipEntry {
    fn new(writer: Writer<'_>, operation: &str, labels: BTreeSet<String>) -> OwnershipEntry {
        OwnershipEntry {
            manager: writer.manager.to_owned(),
            operation: operation.to_owned(),
            version: writer.version.to_owned(),
            time: writer.time.to_owned(),
            labels,
        }
    }

    fn is_of(&self, manager: &str, operation: &str) -> bool {
        self.manager == manager && self.operation == operation
    }

    fn read(entry: &Value) -> OwnershipEntry {
        let text = |name: &str| entry[name].as_str().unwrap_or_default().to_owned();
        let owned = entry["fieldsV1"]["f:metadata"]["f:labels"].as_object();
        let keys = owned.into_iter().flat_map(Map::keys);
        OwnershipEntry {
            manager: text("manager"),
            operation: text("operation"),
            version: text("apiVersion"),
            time: text("time"),
            labels: keys.filter_map(|key| key.strip_prefix("f:")).map(str::to_owned).collect(),
        }
    }

    fn write(&self) -> Value {
        let owned: Map<String, Value> = self.labels.iter().map(|key| (format!("f:{key}"), json!({}))).collect();
        json!({
            "manager": self.manager, "operation": self.operation, "apiVersion": self.version, "time": self.time,
            "fieldsType": "FieldsV1", "fieldsV1": {"f:metadata": {"f:labels": owned}},
        })
    }

    /// Name the manager as a conflict does.
    fn shown(&self) -> String {
        match self.operation.as_str() {
            UPDATE => format!("{:?} using {} at {}", self.manager, self.version, self.time),
            _ => format!("{:?}", self.manager),
        }
    }
}

fn labels(object: &Value) -> BTreeMap<&str, &str> {
    let all = object["metadata"]["labels"].as_object().into_iter().flatten();
    all.filter_map(|(key, value)| Some((key.as_str(), value.as_str()?))).collect()
}

fn entries(object: &Value) -> Vec<OwnershipEntry> {
    let all = object["metadata"]["managedFields"].as_array();
    all.into_iter().flatten().map(OwnershipEntry::read).collect()
}

/// Return the entries of an object to which a manager applies.
fn entries_at_apply(existing: &Value, version: &str) -> Vec<OwnershipEntry> {
    let found = entries(existing);
    let there: BTreeSet<String> = labels(existing).into_keys().map(str::to_owned).collect();
    if !found.is_empty() || there.is_empty() {
        return found;
    }
    let before = Writer {
        manager: "before-first-apply",
        time: existing["metadata"]["creationTimestamp"].as_str().unwrap_or_default(),
        version,
    };
    vec![OwnershipEntry::new(before, UPDATE, there)]
}

fn written(entries: impl Iterator<Item = OwnershipEntry>) -> Value {
    let all: Vec<Value> = entries
        .filter(|entry| !entry.labels.is_empty())
        .map(|entry| entry.write())
        .collect();
    if all.is_empty() { Value::Null } else { all.into() }
}

/// Check that an apply changes no label of another manager, and remove from `object` the labels that only this manager applied
/// before and no longer applies. With `force`, labels of others are taken over. `object` is `existing` with the patch merged.
pub(crate) fn apply(
    existing: &Value,
    patch: &Value,
    object: &mut Value,
    writer: Writer<'_>,
    force: bool,
) -> Result<(), ApiError> {
    let (now, wanted) = (labels(existing), labels(patch));
    let (own, others): (Vec<OwnershipEntry>, Vec<OwnershipEntry>) = entries_at_apply(existing, writer.version)
        .into_iter()
        .partition(|entry| entry.is_of(writer.manager, APPLY));
    let conflicts: Vec<(String, String)> = (wanted.iter())
        .filter(|(key, value)| now.get(*key) != Some(*value))
        .flat_map(|(key, _)| {
            let owners = others.iter().filter(|entry| entry.labels.contains(*key));
            owners.map(move |entry| (entry.shown(), format!(".metadata.labels.{key}")))
        })
        .collect();
    if !force && !conflicts.is_empty() {
        return Err(ApiError::apply_conflict(&conflicts));
    }
    let is_others = |key: &String| others.iter().any(|entry| entry.labels.contains(key));
    if let Some(Value::Object(left)) = object["metadata"].get_mut("labels") {
        for key in own.iter().flat_map(|entry| &entry.labels) {
            if !wanted.contains_key(key.as_str()) && !is_others(key) {
                left.shift_remove(key);
            }
        }
    }
    Ok(())
}

/// Return `metadata.managedFields` after a successful [`apply`] of `patch` to `existing`.
pub(crate) fn after_apply(existing: &Value, patch: &Value, writer: Writer<'_>) -> Value {
    let (now, wanted) = (labels(existing), labels(patch));
    let taken = |key: &String| {
        wanted
            .get(key.as_str())
            .is_some_and(|value| now.get(key.as_str()) != Some(value))
    };
    let mut all = entries_at_apply(existing, writer.version);
    let keys: BTreeSet<String> = wanted.keys().map(|key| (*key).to_owned()).collect();
    let own = all.iter().position(|entry| entry.is_of(writer.manager, APPLY));
    match own.map(|at| &mut all[at]) {
        Some(entry) if entry.labels == keys && !keys.iter().any(taken) => {}
        Some(entry) => *entry = OwnershipEntry::new(writer, APPLY, keys),
        None => all.push(OwnershipEntry::new(writer, APPLY, keys)),
    }
    for entry in all.iter_mut().filter(|entry| !entry.is_of(writer.manager, APPLY)) {
        entry.labels.retain(|key| !taken(key));
    }
    written(all.into_iter())
}

/// Return `metadata.managedFields` after an update of `existing` to `object` that is not an apply. A label belongs to the one who
/// changed it last.
pub(crate) fn after_update(existing: &Value, object: &Value, writer: Writer<'_>) -> Value {
    let mut all = entries(existing);
    if all.is_empty() {
        return Value::Null;
    }
    let (was, now) = (labels(existing), labels(object));
    let changed: BTreeSet<String> = (now.iter())
        .filter(|(key, value)| was.get(*key) != Some(*value))
        .map(|(key, _)| (*key).to_owned())
        .collect();
    for entry in &mut all {
        entry
            .labels
            .retain(|key| now.contains_key(key.as_str()) && !changed.contains(key));
    }
    if !changed.is_empty() {
        match all.iter_mut().find(|entry| entry.is_of(writer.manager, UPDATE)) {
            Some(entry) => {
                entry.labels.extend(changed);
                writer.time.clone_into(&mut entry.time);
            }
            None => all.push(OwnershipEntry::new(writer, UPDATE, changed)),
        }
    }
    written(all.into_iter())
}
