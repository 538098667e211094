//! Checks of an object before it is stored: its namespace, its name, its metadata, and its types.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::error::{ApiError, FieldError};
use super::pods;
use super::resources::{RequestTarget, ServedResource};
use super::set_or_remove::set_or_remove;
use super::store::StoreContent;

pub(crate) fn wrong_namespace() -> ApiError {
    ApiError::bad_request("the namespace of the provided object does not match the namespace sent on the request")
}

/// Set the object's namespace to that of the path, or refuse a different one.
pub(crate) fn place_in_namespace(target: &RequestTarget, body: &mut Value) -> Result<(), ApiError> {
    let have = body["metadata"]["namespace"].as_str().unwrap_or("");
    if !have.is_empty() && have != target.namespace {
        return Err(wrong_namespace());
    }
    if target.resource.namespaced && target.namespace.is_empty() {
        return Err(ApiError::bad_request("an empty namespace may not be set during creation"));
    }
    let namespace = if target.namespace.is_empty() {
        Value::Null
    } else {
        target.namespace.clone().into()
    };
    set_or_remove(&mut body["metadata"], "namespace", namespace);
    Ok(())
}

/// NamespaceLifecycle admission: refuse objects in a namespace that does not exist or is being deleted.
pub(crate) fn namespace(inner: &StoreContent, resource: &ServedResource, namespace: &str) -> Result<(), ApiError> {
    if !resource.namespaced {
        return Ok(());
    }
    match inner.get("namespaces", &(String::new(), namespace.to_owned())) {
        None => Err(ApiError::not_found("namespaces", namespace)),
        Some(found) if !found["metadata"]["deletionTimestamp"].is_null() => Err(ApiError::new(
            403,
            "Forbidden",
            format!("unable to create new content in namespace {namespace} because it is being terminated"),
        )),
        Some(_) => Ok(()),
    }
}

pub(crate) fn name(resource: &ServedResource, name: &str) -> Result<(), ApiError> {
    let refuse = |detail: &str| {
        let error = FieldError::invalid("metadata.name", &Value::String(name.to_owned()), detail);
        Err(ApiError::invalid(&resource.group, &resource.kind, name, &[error]))
    };
    if resource.group == "rbac.authorization.k8s.io" {
        if matches!(name, "." | "..") || name.contains(['/', '%']) {
            return refuse("may not be '.' or '..' or contain '/' or '%'");
        }
    } else if resource.is_core("namespaces") {
        if !pods::is_dns_label(name) {
            return refuse(pods::NOT_A_LABEL);
        }
    } else if !pods::is_dns_subdomain(name) {
        return refuse(
            "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end \
             with an alphanumeric character (e.g. 'example.com', regex used for validation is \
             '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')",
        );
    }
    Ok(())
}

/// Refuse labels and annotations that are not maps of strings, as the decoder would.
pub(crate) fn metadata(resource: &ServedResource, body: &Value) -> Result<(), ApiError> {
    let wrong = |what: &str| {
        let (version, kind) = (&resource.version, &resource.kind);
        ApiError::bad_request(format!("{kind} in version {version:?} cannot be handled as a {kind}: {what}"))
    };
    for field in ["labels", "annotations"] {
        match &body["metadata"][field] {
            Value::Null => {}
            Value::Object(map) => {
                if let Some((key, value)) = map.iter().find(|(_, value)| !value.is_string()) {
                    return Err(wrong(&format!("metadata.{field}[{key}] is {value}, and must be a string")));
                }
            }
            other => return Err(wrong(&format!("metadata.{field} is {other}, and must be a map of strings"))),
        }
    }
    // The limit is upstream's TotalAnnotationSizeLimitB.
    let size: usize = body["metadata"]["annotations"]
        .as_object()
        .into_iter()
        .flatten()
        .map(|(key, value)| key.len() + value.as_str().map_or(0, str::len))
        .sum();
    if size > 256 * 1024 {
        let error = FieldError::too_long("metadata.annotations", 256 * 1024);
        let name = body["metadata"]["name"].as_str().unwrap_or("");
        return Err(ApiError::invalid(&resource.group, &resource.kind, name, &[error]));
    }
    Ok(())
}

/// Decode pods, nodes, and leases as their kinds, and drop fields that the kinds do not have, or refuse them if `strict`. Other kinds are
/// accepted as they are.
pub(crate) fn types(resource: &ServedResource, body: &mut Value, strict: bool) -> Result<(), ApiError> {
    use k8s_openapi::api::{coordination::v1::Lease, core::v1::Node, core::v1::Pod};
    let decoded = match (resource.group.as_ref(), resource.plural.as_ref()) {
        ("", "pods") => {
            pods::normalise_quantities(body);
            through::<Pod>(body)
        }
        ("", "nodes") => {
            node_quantities(body);
            // Go encodes both even if they are empty, because `omitempty` does not omit structs.
            for part in ["spec", "status"] {
                if body[part].is_null() {
                    body[part] = serde_json::json!({});
                }
            }
            through::<Node>(body)
        }
        ("coordination.k8s.io", "leases") => through::<Lease>(body),
        _ => return Ok(()),
    };
    let wrong = |why: String| {
        let (version, kind) = (&resource.version, &resource.kind);
        ApiError::bad_request(format!("{kind} in version {version:?} cannot be handled as a {kind}: {why}"))
    };
    let mut unknown = Vec::new();
    drop_unknown(body, &decoded.map_err(|why| wrong(why.to_string()))?, "", &mut unknown);
    if strict && !unknown.is_empty() {
        let list: Vec<String> = unknown.iter().map(|field| format!("unknown field {field:?}")).collect();
        return Err(wrong(format!("strict decoding error: {}", list.join(", "))));
    }
    Ok(())
}

fn through<K: Serialize + DeserializeOwned>(body: &Value) -> Result<Value, serde_json::Error> {
    serde_json::to_value(K::deserialize(body)?)
}

/// Remove the fields that did not survive decoding. An explicit null does not count as a field.
fn drop_unknown(body: &mut Value, decoded: &Value, path: &str, unknown: &mut Vec<String>) {
    match (body, decoded) {
        (Value::Object(body), Value::Object(decoded)) => body.retain(|name, value| {
            let at = if path.is_empty() {
                name.clone()
            } else {
                format!("{path}.{name}")
            };
            match decoded.get(name) {
                Some(decoded) => {
                    drop_unknown(value, decoded, &at, unknown);
                    true
                }
                None if value.is_null() => true,
                None => {
                    unknown.push(at);
                    false
                }
            }
        }),
        (Value::Array(body), Value::Array(decoded)) => {
            for (index, (value, decoded)) in body.iter_mut().zip(decoded).enumerate() {
                drop_unknown(value, decoded, &format!("{path}[{index}]"), unknown);
            }
        }
        _ => {}
    }
}

pub(crate) fn node_quantities(node: &mut Value) {
    for field in ["capacity", "allocatable"] {
        if let Some(Value::Object(quantities)) = node.pointer_mut(&format!("/status/{field}")) {
            pods::quantities_to_text(quantities);
        }
    }
}

/// Add the label by which a namespace can be selected by name (`SetDefaults_Namespace`).
pub(crate) fn name_as_label(namespace: &mut Value) {
    let metadata = &mut namespace["metadata"];
    let name = metadata["name"].clone();
    if !metadata["labels"].is_object() {
        metadata["labels"] = serde_json::json!({});
    }
    metadata["labels"]["kubernetes.io/metadata.name"] = name;
}
