//! The patch formats that the crate `json-patch` does not have, or not as the API server answers: Kubernetes' strategic merge patch, and the errors
//! of RFC 6902 JSON patches.
//!
//! Simplifications: strategic merge chooses the merge key by the name of the list field alone, and knows only the keys of the
//! core types used here (see [`merge_key`]). `$retainKeys` is dropped (it matters only for volume sources and Deployment
//! strategies), and so is `$deleteFromPrimitiveList` (only finalizers are such a list); `$setElementOrder` moves the listed elements to the front. Server-side apply is a strategic merge; `ownership`
//! adds the managers of labels.

use json_patch::Patch;
use serde::Deserialize as _;
use serde_json::{Map, Value};

use super::error::ApiError;

/// Return the `patchMergeKey` of a list field (k8s.io/api struct tags), or `None` for lists that are replaced as a whole.
fn merge_key(field: &str) -> Option<&'static str> {
    Some(match field {
        "containers"
        | "initContainers"
        | "ephemeralContainers"
        | "env"
        | "volumes"
        | "imagePullSecrets"
        | "resourceClaims"
        | "schedulingGates"
        | "secrets" => "name",
        "conditions" | "addresses" => "type",
        "volumeMounts" => "mountPath",
        "volumeDevices" => "devicePath",
        "ports" => "containerPort",
        "hostAliases" | "podIPs" | "hostIPs" => "ip",
        "topologySpreadConstraints" => "topologyKey",
        "ownerReferences" => "uid",
        _ => return None,
    })
}

/// Apply a strategic merge patch (apimachinery `pkg/util/strategicpatch`).
pub(crate) fn strategic(target: &mut Value, patch: &Value) -> Result<(), ApiError> {
    strategic_map(target, patch, "")
}

fn strategic_map(target: &mut Value, patch: &Value, path: &str) -> Result<(), ApiError> {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return Ok(());
    };
    match patch.get("$patch").and_then(Value::as_str) {
        Some("replace") => {
            let kept = patch.iter().filter(|(name, _)| *name != "$patch");
            *target = Value::Object(kept.map(|(name, value)| (name.clone(), value.clone())).collect());
            return Ok(());
        }
        Some("delete") => {
            *target = Value::Object(Map::new());
            return Ok(());
        }
        Some("merge") | None => {}
        Some(other) => {
            return Err(ApiError::bad_request(format!(
                "unknown $patch directive {other:?} at {path:?}"
            )));
        }
    }
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    let Value::Object(map) = target else {
        return Ok(());
    };
    for (name, value) in patch {
        if name.starts_with('$') {
            continue;
        }
        match value {
            Value::Null => {
                map.shift_remove(name);
            }
            Value::Object(_) => {
                strategic_map(
                    map.entry(name.clone()).or_insert(Value::Null),
                    value,
                    &format!("{path}.{name}"),
                )?;
            }
            Value::Array(items) => {
                let list = map.entry(name.clone()).or_insert(Value::Null);
                strategic_list(list, items, name, &format!("{path}.{name}"))?;
            }
            plain => {
                map.insert(name.clone(), plain.clone());
            }
        }
    }
    // An order may occur without a change to the list's elements.
    for (name, order) in patch {
        if let Some(field) = name.strip_prefix("$setElementOrder/")
            && let Some(Value::Array(list)) = map.get_mut(field)
        {
            reorder(list, field, order);
        }
    }
    Ok(())
}

fn strategic_list(target: &mut Value, items: &[Value], field: &str, path: &str) -> Result<(), ApiError> {
    let have = match target {
        Value::Array(list) => std::mem::take(list),
        _ => Vec::new(),
    };
    let list = match keyed(field, items) {
        Some(key) => merge_keyed(have, items, key, path)?,
        None => items.iter().map(without_directives).collect(),
    };
    *target = Value::Array(list);
    Ok(())
}

/// Return the merge key if the elements have it. The `ports` of a Service are keyed by `port`, those of a container by
/// `containerPort`.
fn keyed(field: &str, items: &[Value]) -> Option<&'static str> {
    let key = merge_key(field)?;
    let candidates = if field == "ports" { vec![key, "port"] } else { vec![key] };
    candidates.into_iter().find(|key| {
        items
            .iter()
            .all(|item| item.get(key).is_some() || item.get("$patch").is_some())
    })
}

fn merge_keyed(mut list: Vec<Value>, items: &[Value], key: &str, path: &str) -> Result<Vec<Value>, ApiError> {
    if items.iter().any(|item| item["$patch"] == "replace") {
        return Ok(items
            .iter()
            .filter(|item| item["$patch"] != "replace")
            .map(without_directives)
            .collect());
    }
    for item in items {
        let Some(wanted) = item.get(key) else {
            return Err(ApiError::bad_request(format!(
                "map: {item} does not contain declared merge key: {key} at {path:?}"
            )));
        };
        let place = list.iter().position(|have| have.get(key) == Some(wanted));
        if item["$patch"] == "delete" {
            if let Some(at) = place {
                list.remove(at);
            }
            continue;
        }
        match place.and_then(|at| list.get_mut(at)) {
            Some(have) => strategic_map(have, item, path)?,
            None => {
                let mut fresh = Value::Object(Map::new());
                strategic_map(&mut fresh, item, path)?;
                list.push(fresh);
            }
        }
    }
    Ok(list)
}

fn without_directives(value: &Value) -> Value {
    match value {
        Value::Object(map) => Value::Object(
            map.iter()
                .filter(|(name, _)| !name.starts_with('$'))
                .map(|(name, value)| (name.clone(), without_directives(value)))
                .collect(),
        ),
        Value::Array(list) => Value::Array(list.iter().map(without_directives).collect()),
        plain => plain.clone(),
    }
}

/// Move the elements that `order` names to the front, in the order in which it names them. The others follow in their previous
/// order.
fn reorder(list: &mut [Value], field: &str, order: &Value) {
    let Value::Array(order) = order else { return };
    let key = keyed(field, order);
    let place = |item: &Value| {
        order
            .iter()
            .position(|wanted| match key {
                Some(key) => wanted.get(key) == item.get(key),
                None => wanted == item,
            })
            .unwrap_or(order.len())
    };
    list.sort_by_key(place);
}

/// Apply an RFC 6902 JSON patch completely or not at all: if an operation fails, the target is unchanged.
pub(crate) fn json_patch(target: &mut Value, patch: &Value) -> Result<(), ApiError> {
    if !patch.is_array() {
        return Err(ApiError::bad_request("a JSON patch is an array of operations"));
    }
    let refused = |why: &dyn std::fmt::Display| {
        let why = format!("the server rejected our request due to an error in our request: {why}");
        ApiError::new(422, "Invalid", why)
    };
    let operations = Patch::deserialize(patch).map_err(|error| refused(&error))?;
    // A copy, because the crate's own way back from a failed patch can panic: it cannot undo a move to the root.
    let mut result = target.clone();
    json_patch::patch_unsafe(&mut result, &operations).map_err(|error| refused(&error))?;
    *target = result;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn strategic_patches_merge_lists_by_their_key() {
        let pod = json!({"spec": {
            "containers": [{"name": "a", "image": "x", "env": [{"name": "E", "value": "1"}]}, {"name": "b", "image": "y"}],
            "tolerations": [{"key": "k"}]},
            "status": {"conditions": [{"type": "Ready", "status": "False", "reason": "R"}, {"type": "PodScheduled", "status": "True"}]},
            "metadata": {"annotations": {"k": "v", "gone": "1"}}});
        for (patch, pointer, expected) in [
            (
                json!({"spec": {"containers": [{"name": "a", "env": [{"name": "F", "value": "2"}]}]}}),
                "/spec/containers",
                json!([{"name": "a", "image": "x", "env": [{"name": "E", "value": "1"}, {"name": "F", "value": "2"}]}, {"name": "b", "image": "y"}]),
            ),
            (
                json!({"spec": {"containers": [{"name": "a", "$patch": "delete"}]}}),
                "/spec/containers",
                json!([{"name": "b", "image": "y"}]),
            ),
            (
                json!({"spec": {"containers": [{"$patch": "replace"}, {"name": "z"}]}}),
                "/spec/containers",
                json!([{"name": "z"}]),
            ),
            // The kubelet patches conditions like this.
            (
                json!({"status": {"$setElementOrder/conditions": [{"type": "PodScheduled"}, {"type": "Ready"}],
                       "conditions": [{"type": "Ready", "status": "True", "reason": null}]}}),
                "/status/conditions",
                json!([{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "True"}]),
            ),
            // Tolerations have no merge key upstream, so they are replaced.
            (
                json!({"spec": {"tolerations": [{"key": "l"}]}}),
                "/spec/tolerations",
                json!([{"key": "l"}]),
            ),
            (
                json!({"metadata": {"annotations": {"new": "2", "gone": null}}}),
                "/metadata/annotations",
                json!({"k": "v", "new": "2"}),
            ),
            (
                json!({"metadata": {"annotations": {"$patch": "replace", "only": "1"}}}),
                "/metadata/annotations",
                json!({"only": "1"}),
            ),
        ] {
            let mut target = pod.clone();
            strategic(&mut target, &patch).expect("applies");
            assert_eq!(target.pointer(pointer), Some(&expected), "{patch}");
        }
        let refused = strategic(&mut pod.clone(), &json!({"spec": {"$patch": "twist"}})).expect_err("unknown");
        assert_eq!(refused.code, 400);
    }
}
