//! The two views of one set of Event objects: core/v1 (as stored) and events.k8s.io/v1.
//!
//! The field names are those of `pkg/apis/events/v1/conversion.go`.

use std::borrow::Cow;

use serde_json::{Map, Value};

use super::resources::ServedResource;

/// The pairs of field names: core/v1, events.k8s.io/v1.
const RENAMED: &[(&str, &str)] = &[
    ("involvedObject", "regarding"),
    ("message", "note"),
    ("source", "deprecatedSource"),
    ("firstTimestamp", "deprecatedFirstTimestamp"),
    ("lastTimestamp", "deprecatedLastTimestamp"),
    ("count", "deprecatedCount"),
    ("reportingComponent", "reportingController"),
];

/// Return a stored object in the form that a client of this resource sees.
pub(crate) fn to_view<'a>(resource: &ServedResource, object: &'a Value) -> Cow<'a, Value> {
    if resource.is_events_k8s_io() {
        Cow::Owned(renamed(object, "events.k8s.io/v1", |name| {
            RENAMED.iter().find(|(core, _)| *core == name).map(|(_, new)| *new)
        }))
    } else {
        Cow::Borrowed(object)
    }
}

/// Convert an events.k8s.io/v1 Event to core/v1.
pub(crate) fn to_storage(view: &Value) -> Value {
    renamed(view, "v1", |name| {
        RENAMED.iter().find(|(_, new)| *new == name).map(|(core, _)| *core)
    })
}

fn renamed(object: &Value, api_version: &str, rename: impl Fn(&str) -> Option<&'static str>) -> Value {
    let Value::Object(map) = object else {
        return object.clone();
    };
    let mut out: Map<String, Value> = map
        .iter()
        .map(|(name, value)| (rename(name).unwrap_or(name).to_owned(), value.clone()))
        .collect();
    out.insert("apiVersion".into(), api_version.into());
    Value::Object(out)
}
