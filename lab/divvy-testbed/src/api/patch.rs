//! The patch formats: RFC 7386 merge patch, RFC 6902 JSON patch, and Kubernetes' strategic merge patch.
//!
//! Simplifications: strategic merge chooses the merge key by the name of the list field alone, and knows only the keys of the
//! core types used here (see [`merge_key`]). `$retainKeys` is dropped (it matters only for volume sources and Deployment
//! strategies), and `$setElementOrder` moves the listed elements to the front. Server-side apply is a strategic merge; `ownership`
//! adds the managers of labels.

use serde_json::{Map, Value};

use super::error::ApiError;

/// Apply an RFC 7386 merge patch.
pub(crate) fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    if let Value::Object(map) = target {
        for (name, value) in patch {
            if value.is_null() {
                map.shift_remove(name);
            } else {
                merge(map.entry(name.clone()).or_insert(Value::Null), value);
            }
        }
    }
}

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

/// Report whether a list of plain values is merged as a set.
fn is_primitive_merge(field: &str) -> bool {
    field == "finalizers"
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
        if name == "$patch" || name == "$retainKeys" || name.starts_with("$setElementOrder/") {
            continue;
        }
        if let Some(field) = name.strip_prefix("$deleteFromPrimitiveList/") {
            if let (Some(Value::Array(list)), Value::Array(gone)) = (map.get_mut(field), value) {
                list.retain(|item| !gone.contains(item));
            }
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
                let order = patch.get(&format!("$setElementOrder/{name}"));
                let list = map.entry(name.clone()).or_insert(Value::Null);
                strategic_list(list, items, name, order, &format!("{path}.{name}"))?;
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

fn strategic_list(target: &mut Value, items: &[Value], field: &str, order: Option<&Value>, path: &str) -> Result<(), ApiError> {
    let have = match target {
        Value::Array(list) => std::mem::take(list),
        _ => Vec::new(),
    };
    let list = if is_primitive_merge(field) {
        let mut list = have;
        for item in items {
            if !list.contains(item) {
                list.push(item.clone());
            }
        }
        list
    } else if let Some(key) = keyed(field, items) {
        merge_keyed(have, items, key, path)?
    } else {
        items.iter().map(without_directives).collect()
    };
    *target = Value::Array(list);
    if let (Value::Array(list), Some(order)) = (target, order) {
        reorder(list, field, order);
    }
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
    let Value::Array(operations) = patch else {
        return Err(ApiError::bad_request("a JSON patch is an array of operations"));
    };
    let mut result = target.clone();
    for operation in operations {
        apply_operation(&mut result, operation).map_err(|why| {
            ApiError::new(
                422,
                "Invalid",
                format!("the server rejected our request due to an error in our request: {why}: {operation}"),
            )
        })?;
    }
    *target = result;
    Ok(())
}

fn apply_operation(target: &mut Value, operation: &Value) -> Result<(), String> {
    let text = |name: &str| operation[name].as_str().ok_or_else(|| format!("{name:?} is missing"));
    let value = || {
        operation
            .get("value")
            .cloned()
            .ok_or_else(|| "\"value\" is missing".to_owned())
    };
    let path = text("path")?;
    match text("op")? {
        "add" => add(target, path, value()?),
        "remove" => remove(target, path).map(drop),
        "replace" => {
            let place = target.pointer_mut(path).ok_or_else(|| absent(path))?;
            *place = value()?;
            Ok(())
        }
        "test" => {
            let have = target.pointer(path).ok_or_else(|| absent(path))?;
            if *have == value()? {
                Ok(())
            } else {
                Err(format!("testing value {path} failed"))
            }
        }
        "copy" => {
            let from = text("from")?;
            let copied = target.pointer(from).cloned().ok_or_else(|| absent(from))?;
            add(target, path, copied)
        }
        "move" => {
            let moved = remove(target, text("from")?)?;
            add(target, path, moved)
        }
        other => Err(format!("unknown operation {other:?}")),
    }
}

fn absent(path: &str) -> String {
    format!("path {path:?} does not exist")
}

fn parent<'a>(target: &'a mut Value, path: &str) -> Result<(&'a mut Value, String), String> {
    let (parent, last) = path.rsplit_once('/').ok_or_else(|| absent(path))?;
    let last = last.replace("~1", "/").replace("~0", "~");
    Ok((target.pointer_mut(parent).ok_or_else(|| absent(parent))?, last))
}

fn add(target: &mut Value, path: &str, value: Value) -> Result<(), String> {
    if path.is_empty() {
        *target = value;
        return Ok(());
    }
    match parent(target, path)? {
        (Value::Object(map), name) => {
            map.insert(name, value);
        }
        (Value::Array(list), index) => {
            let at = if index == "-" {
                list.len()
            } else {
                index.parse().map_err(|_| absent(path))?
            };
            if at > list.len() {
                return Err(absent(path));
            }
            list.insert(at, value);
        }
        _ => return Err(absent(path)),
    }
    Ok(())
}

fn remove(target: &mut Value, path: &str) -> Result<Value, String> {
    match parent(target, path)? {
        (Value::Object(map), name) => map.shift_remove(&name).ok_or_else(|| absent(path)),
        (Value::Array(list), index) => {
            let at: usize = index.parse().map_err(|_| absent(path))?;
            if at < list.len() {
                Ok(list.remove(at))
            } else {
                Err(absent(path))
            }
        }
        _ => Err(absent(path)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// The cases are the examples of RFC 7386, appendix A, whose target is an object.
    #[test]
    fn merge_patches_follow_rfc_7386() {
        for (original, patch, expected) in [
            (json!({"a":"b"}), json!({"a":"c"}), json!({"a":"c"})),
            (json!({"a":"b"}), json!({"b":"c"}), json!({"a":"b","b":"c"})),
            (json!({"a":"b"}), json!({"a":null}), json!({})),
            (json!({"a":"b","b":"c"}), json!({"a":null}), json!({"b":"c"})),
            (json!({"a":["b"]}), json!({"a":"c"}), json!({"a":"c"})),
            (json!({"a":"c"}), json!({"a":["b"]}), json!({"a":["b"]})),
            (
                json!({"a":{"b":"c"}}),
                json!({"a":{"b":"d","c":null}}),
                json!({"a":{"b":"d"}}),
            ),
            (json!({"a":[{"b":"c"}]}), json!({"a":[1]}), json!({"a":[1]})),
            (json!({"e":null}), json!({"a":1}), json!({"e":null,"a":1})),
            (json!({}), json!({"a":{"bb":{"ccc":null}}}), json!({"a":{"bb":{}}})),
        ] {
            let mut target = original.clone();
            merge(&mut target, &patch);
            assert_eq!(target, expected, "{original} + {patch}");
        }
    }

    #[test]
    fn strategic_patches_merge_lists_by_their_key() {
        let pod = json!({"spec": {
            "containers": [{"name": "a", "image": "x", "env": [{"name": "E", "value": "1"}]}, {"name": "b", "image": "y"}],
            "tolerations": [{"key": "k"}]},
            "status": {"conditions": [{"type": "Ready", "status": "False", "reason": "R"}, {"type": "PodScheduled", "status": "True"}]},
            "metadata": {"finalizers": ["f"], "annotations": {"k": "v", "gone": "1"}}});
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
            (
                json!({"metadata": {"finalizers": ["g", "f"]}}),
                "/metadata/finalizers",
                json!(["f", "g"]),
            ),
            (
                json!({"metadata": {"$deleteFromPrimitiveList/finalizers": ["f"]}}),
                "/metadata/finalizers",
                json!([]),
            ),
        ] {
            let mut target = pod.clone();
            strategic(&mut target, &patch).expect("applies");
            assert_eq!(target.pointer(pointer), Some(&expected), "{patch}");
        }
        let refused = strategic(&mut pod.clone(), &json!({"spec": {"$patch": "twist"}})).expect_err("unknown");
        assert_eq!(refused.code, 400);
    }

    #[test]
    fn json_patches_apply_whole_or_not_at_all() {
        let original = json!({"a": {"b/c": 1}, "l": [1, 2, 3]});
        for (patch, expected) in [
            (
                json!([{"op": "add", "path": "/a/d", "value": 2}]),
                json!({"a": {"b/c": 1, "d": 2}, "l": [1, 2, 3]}),
            ),
            (json!([{"op": "remove", "path": "/a/b~1c"}]), json!({"a": {}, "l": [1, 2, 3]})),
            (
                json!([{"op": "add", "path": "/l/1", "value": 9}, {"op": "add", "path": "/l/-", "value": 4}]),
                json!({"a": {"b/c": 1}, "l": [1, 9, 2, 3, 4]}),
            ),
            (
                json!([{"op": "move", "from": "/l/0", "path": "/x"}, {"op": "copy", "from": "/x", "path": "/y"}]),
                json!({"a": {"b/c": 1}, "l": [2, 3], "x": 1, "y": 1}),
            ),
            (
                json!([{"op": "test", "path": "/l/0", "value": 1}, {"op": "replace", "path": "/l", "value": []}]),
                json!({"a": {"b/c": 1}, "l": []}),
            ),
        ] {
            let mut target = original.clone();
            json_patch(&mut target, &patch).expect("applies");
            assert_eq!(target, expected, "{patch}");
        }
        for patch in [
            json!([{"op": "remove", "path": "/l/0"}, {"op": "test", "path": "/l/0", "value": 1}]),
            json!([{"op": "replace", "path": "/none", "value": 1}]),
            json!([{"op": "add", "path": "/l/9", "value": 1}]),
            json!([{"op": "spin", "path": "/l"}]),
            json!({}),
        ] {
            let mut target = original.clone();
            assert!(json_patch(&mut target, &patch).is_err(), "{patch}");
            assert_eq!(target, original);
        }
    }
}
