//! Server-side apply of labels: managers, conflicts, and what disappears.

use serde_json::{Value, json};

use super::{request, server};
use divvy_testbed::api::{ApiServer, PatchKind};

const NODE: &str = "/api/v1/nodes/n";

fn with_node(labels: &Value) -> ApiServer {
    let api = server();
    api.create("nodes", json!({"metadata": {"name": "n", "labels": labels}}))
        .unwrap();
    api
}

async fn apply(api: &ApiServer, query: &str, labels: &Value) -> (u16, Value) {
    let kind = [("content-type", "application/apply-patch+yaml")];
    let body = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n", "labels": labels}});
    request(api, "PATCH", &format!("{NODE}?{query}"), &kind, &body).await
}

fn labels(api: &ApiServer) -> Value {
    api.get("nodes", "", "n").unwrap()["metadata"]["labels"].clone()
}

#[tokio::test]
async fn a_label_that_its_only_manager_no_longer_applies_disappears() {
    let api = with_node(&json!({"theirs": "1"}));
    assert_eq!(apply(&api, "fieldManager=a", &json!({"x": "1", "y": "1"})).await.0, 200);
    assert_eq!(apply(&api, "fieldManager=b", &json!({"y": "1"})).await.0, 200);
    assert_eq!(apply(&api, "fieldManager=a", &json!({})).await.0, 200);
    assert_eq!(labels(&api), json!({"theirs": "1", "y": "1"}), "y is also b's");
    let managed = api.get("nodes", "", "n").unwrap()["metadata"]["managedFields"].clone();
    let managers: Vec<&str> = managed
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|one| one["manager"].as_str())
        .collect();
    assert_eq!(managers, ["before-first-apply", "b"]);
    assert_eq!(
        managed[1]["fieldsV1"],
        json!({"f:metadata": {"f:labels": {"f:y": {}}}}),
        "{managed}"
    );
}

/// Only another value is a conflict.
#[tokio::test]
async fn another_managers_label_is_a_conflict_unless_forced() {
    let api = with_node(&json!({}));
    assert_eq!(apply(&api, "fieldManager=a", &json!({"e.com/x": "1", "y": "1"})).await.0, 200);
    let (code, answer) = apply(&api, "fieldManager=b", &json!({"e.com/x": "2", "z": "1"})).await;
    assert_eq!((code, &answer["reason"]), (409, &json!("Conflict")));
    assert_eq!(
        answer["message"],
        "Apply failed with 1 conflict: conflict with \"a\": .metadata.labels.e.com/x"
    );
    assert_eq!(
        answer["details"]["causes"],
        json!([{"reason": "FieldManagerConflict", "message": "conflict with \"a\"", "field": ".metadata.labels.e.com/x"}])
    );
    let (_, answer) = apply(&api, "fieldManager=b", &json!({"e.com/x": "2", "y": "2"})).await;
    assert_eq!(
        answer["message"],
        "Apply failed with 2 conflicts: conflicts with \"a\":\n- .metadata.labels.e.com/x\n- .metadata.labels.y"
    );
    assert_eq!(labels(&api), json!({"e.com/x": "1", "y": "1"}), "nothing was written");
    assert_eq!(
        apply(&api, "fieldManager=b&force=true", &json!({"e.com/x": "2"})).await.0,
        200
    );
    let (code, answer) = apply(&api, "fieldManager=a", &json!({"e.com/x": "1", "y": "1"})).await;
    assert_eq!(code, 409, "{answer}");
}

#[tokio::test]
async fn who_changes_a_label_without_apply_owns_it_alone() {
    let api = with_node(&json!({}));
    assert_eq!(apply(&api, "fieldManager=a", &json!({"x": "1"})).await.0, 200);
    let patch = json!({"metadata": {"labels": {"x": "2"}}});
    api.patch("nodes", "", "n", PatchKind::Merge, &patch).unwrap();
    let (code, answer) = apply(&api, "fieldManager=a", &json!({"x": "1"})).await;
    assert_eq!(code, 409);
    let message = answer["details"]["causes"][0]["message"].as_str().unwrap();
    assert!(message.starts_with("conflict with \"testbed\" using v1 at "), "{message}");
    assert_eq!(apply(&api, "fieldManager=a", &json!({})).await.0, 200);
    assert_eq!(labels(&api), json!({"x": "2"}));
    let gone = json!({"metadata": {"labels": {"x": null}}});
    api.patch("nodes", "", "n", PatchKind::Merge, &gone).unwrap();
    assert_eq!(
        apply(&api, "fieldManager=a", &json!({"x": "1"})).await.0,
        200,
        "it has no owner"
    );
}

/// An apply without a manager is refused.
#[tokio::test]
async fn an_apply_that_changes_nothing_is_not_committed() {
    let api = with_node(&json!({"x": "1"}));
    assert_eq!(
        apply(&api, "fieldManager=a", &json!({"x": "1"})).await.0,
        200,
        "the same value"
    );
    let before = api.get("nodes", "", "n").unwrap();
    assert_eq!(apply(&api, "fieldManager=a", &json!({"x": "1"})).await.0, 200);
    assert_eq!(api.get("nodes", "", "n").unwrap(), before);
    let (code, answer) = apply(&api, "force=true", &json!({"x": "1"})).await;
    assert_eq!(code, 422);
    assert_eq!(
        answer["message"],
        "PatchOptions.meta.k8s.io \"\" is invalid: fieldManager: Required value: is required for apply patch"
    );
}

#[tokio::test]
async fn an_apply_with_a_uid_creates_nothing() {
    let api = server();
    let kind = [("content-type", "application/apply-patch+yaml")];
    let body = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n", "uid": "u", "labels": {"x": "1"}}});
    let (code, answer) = request(&api, "PATCH", &format!("{NODE}?fieldManager=a"), &kind, &body).await;
    assert_eq!((code, &answer["reason"]), (409, &json!("Conflict")));
    let message = answer["message"].as_str().unwrap();
    assert!(
        message.contains("uid mismatch: the provided object specified uid u"),
        "{message}"
    );
    assert!(api.get("nodes", "", "n").is_err());
}
