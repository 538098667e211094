//! The forms in which objects are sent: unchanged, as PartialObjectMetadata, or as rows of a server-side Table.

use serde::Serialize;
use serde::ser::{SerializeMap, SerializeSeq, Serializer};
use serde_json::{Map, Value, json};
use std::sync::Arc;

use super::clock::Clock;
use super::error::ApiError;
use super::include::{Include, partial};
use super::resources::ServedResource;
use super::{events, table};

/// The form of a response, chosen from the Accept header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rendering {
    Json,
    Metadata,
    Table(Include),
}

impl Rendering {
    /// Choose the first media type of the header that the server supports. It does not support protobuf and CBOR; clients that prefer these
    /// also accept JSON.
    pub(crate) fn choose(accept: &str, include: Option<&str>) -> Result<Rendering, ApiError> {
        if accept.trim().is_empty() {
            return Ok(Rendering::Json);
        }
        for range in accept.split(',') {
            let mut parts = range.split(';').map(str::trim);
            let media = parts.next().unwrap_or("");
            if !matches!(media, "application/json" | "application/*" | "*/*") {
                continue;
            }
            match parts.find_map(|p| p.strip_prefix("as=")) {
                None => return Ok(Rendering::Json),
                Some("Table") => {
                    return Ok(Rendering::Table(match include {
                        Some("None") => Include::None,
                        Some("Object") => Include::Object,
                        _ => Include::Metadata,
                    }));
                }
                Some("PartialObjectMetadata" | "PartialObjectMetadataList") => return Ok(Rendering::Metadata),
                Some(_) => {}
            }
        }
        Err(ApiError::new(
            406,
            "NotAcceptable",
            "only the following media types are accepted: application/json, application/json;as=Table;v=v1;g=meta.k8s.io, \
             application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io",
        ))
    }

    pub(crate) fn object(self, resource: &ServedResource, object: &Value, clock: &Clock) -> Value {
        let view = events::to_view(resource, object);
        match self {
            Rendering::Json => view.into_owned(),
            Rendering::Metadata => partial(&view),
            Rendering::Table(include) => {
                let metadata = json!({"resourceVersion": view["metadata"]["resourceVersion"]});
                self::table::table(resource, &[object], metadata, include, clock)
            }
        }
    }

    pub(crate) fn list(self, resource: &ServedResource, items: &[Arc<Value>], revision: u64, clock: &Clock) -> Vec<u8> {
        let metadata = json!({"resourceVersion": revision.to_string()});
        let result = match self {
            Rendering::Json => serde_json::to_vec(&RenderedList {
                resource,
                items,
                metadata: &metadata,
            }),
            Rendering::Metadata => {
                let items: Vec<Value> = items.iter().map(|item| partial(&events::to_view(resource, item))).collect();
                serde_json::to_vec(&json!({
                    "kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1", "metadata": metadata, "items": items
                }))
            }
            Rendering::Table(include) => {
                let items: Vec<&Value> = items.iter().map(|item| &**item).collect();
                serde_json::to_vec(&table::table(resource, &items, metadata, include, clock))
            }
        };
        result.expect("values made of JSON serialize")
    }

    /// Return the object of a watch event.
    pub(crate) fn watched(self, resource: &ServedResource, object: &Value, clock: &Clock) -> Value {
        self.object(resource, object, clock)
    }

    /// Return the object of a BOOKMARK event, which carries only a revision.
    pub(crate) fn bookmark(self, resource: &ServedResource, metadata: Value) -> Value {
        match self {
            Rendering::Json => json!({"kind": resource.kind, "apiVersion": resource.api_version(), "metadata": metadata}),
            Rendering::Metadata => json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": metadata}),
            Rendering::Table(_) => {
                // The row's object carries the revision.
                json!({
                    "kind": "Table", "apiVersion": "meta.k8s.io/v1",
                    "metadata": {"resourceVersion": metadata["resourceVersion"]},
                    "columnDefinitions": table::columns(resource),
                    "rows": [{"cells": [], "object": {
                        "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": metadata}}],
                })
            }
        }
    }
}

/// A list that borrows its items. As from a real server, the items have no apiVersion and kind.
struct RenderedList<'a> {
    resource: &'a ServedResource,
    items: &'a [Arc<Value>],
    metadata: &'a Value,
}

impl Serialize for RenderedList<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(4))?;
        map.serialize_entry("kind", &format!("{}List", self.resource.kind))?;
        map.serialize_entry("apiVersion", &self.resource.api_version())?;
        map.serialize_entry("metadata", self.metadata)?;
        map.serialize_entry("items", &ListItems(self))?;
        map.end()
    }
}

struct ListItems<'a>(&'a RenderedList<'a>);

impl Serialize for ListItems<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut seq = serializer.serialize_seq(Some(self.0.items.len()))?;
        for item in self.0.items {
            let view = events::to_view(self.0.resource, item);
            match &*view {
                Value::Object(map) => seq.serialize_element(&UntypedObject(map))?,
                other => seq.serialize_element(other)?,
            }
        }
        seq.end()
    }
}

struct UntypedObject<'a>(&'a Map<String, Value>);

impl Serialize for UntypedObject<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(
            self.0
                .iter()
                .filter(|(name, _)| !matches!(name.as_str(), "kind" | "apiVersion")),
        )
    }
}
