//! Scheduling gates.

use divvy_testbed::api::PatchKind;

use super::*;

/// Nothing else of a gated pod changes.
#[tokio::test]
async fn gates_can_be_taken_away_one_by_one() {
    let api = server();
    let mut value = pod("p");
    value["spec"]["schedulingGates"] = json!([{"name": "one"}, {"name": "two"}]);
    let made = api.create("pods", value).unwrap();
    let condition = &made["status"]["conditions"][0];
    assert_eq!(
        (&condition["reason"], &condition["status"]),
        (&json!("SchedulingGated"), &json!("False"))
    );
    let gates = |api: &ApiServer| api.get("pods", "default", "p").unwrap()["spec"]["schedulingGates"].clone();
    for refused in [
        json!({"spec": {"schedulingGates": [{"name": "three"}]}}),
        json!({"spec": {"schedulingGates": null, "nodeName": "n1"}}),
        json!({"spec": {"schedulingGates": null, "affinity": {"podAffinity": {}}}}),
        json!({"spec": {"priority": 5}}),
    ] {
        let error = api.patch("pods", "default", "p", PatchKind::Merge, &refused).unwrap_err();
        assert_eq!((error.code, error.reason), (422, "Invalid"), "{refused}");
    }
    let first = json!([{"op": "remove", "path": "/spec/schedulingGates/0"}]);
    api.patch("pods", "default", "p", PatchKind::Json, &first).unwrap();
    assert_eq!(gates(&api), json!([{"name": "two"}]));
    let all = json!({"spec": {"schedulingGates": null}});
    api.patch("pods", "default", "p", PatchKind::Merge, &all).unwrap();
    assert_eq!(gates(&api), json!(null));
    let again = json!({"spec": {"schedulingGates": [{"name": "one"}]}});
    let error = api.patch("pods", "default", "p", PatchKind::Merge, &again).unwrap_err();
    assert_eq!((error.code, error.reason), (422, "Invalid"));
}
