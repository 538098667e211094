//! Create, update, patch, and delete of objects in general.

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Node};
use kube::api::{ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

use divvy_testbed::api::{Options, Resource};

use super::*;

fn config_maps(api: &ApiServer) -> Api<ConfigMap> {
    Api::namespaced(api.client(), "default")
}

fn config_map(name: &str, data: Value) -> ConfigMap {
    serde_json::from_value(json!({"metadata": {"name": name}, "data": data})).unwrap()
}

#[tokio::test]
async fn a_created_object_has_what_the_server_gives() {
    let api = server();
    let maps = config_maps(&api);
    let made = maps
        .create(&PostParams::default(), &config_map("a", json!({"k": "v"})))
        .await
        .unwrap();
    assert_eq!(made.namespace().as_deref(), Some("default"));
    assert_eq!(made.uid().unwrap().len(), 36);
    assert!(made.creation_timestamp().is_some());
    assert_eq!(made.resource_version().unwrap(), api.revision().to_string());
    assert_eq!(maps.get("a").await.unwrap(), made);

    let again = refusal(maps.create(&PostParams::default(), &config_map("a", json!({}))).await);
    assert_eq!(again, (409, "AlreadyExists".into(), "configmaps \"a\" already exists".into()));
    let (code, reason, message) = refusal(maps.get("b").await);
    assert_eq!(
        (code, reason.as_str(), message.as_str()),
        (404, "NotFound", "configmaps \"b\" not found")
    );
}

#[tokio::test]
async fn generated_names_differ() {
    let api = server();
    let mut map = config_map("", json!({}));
    map.metadata.name = None;
    map.metadata.generate_name = Some("x-".into());
    let (first, second) = (
        config_maps(&api)
            .create(&PostParams::default(), &map)
            .await
            .unwrap()
            .name_any(),
        config_maps(&api)
            .create(&PostParams::default(), &map)
            .await
            .unwrap()
            .name_any(),
    );
    assert!(
        first.starts_with("x-") && first.len() == 7 && first != second,
        "{first} {second}"
    );
}

#[tokio::test]
async fn an_update_from_an_old_version_is_a_conflict() {
    let api = server();
    let maps = config_maps(&api);
    let first = maps
        .create(&PostParams::default(), &config_map("a", json!({"n": "1"})))
        .await
        .unwrap();
    let mut second = first.clone();
    second.data = Some([("n".to_owned(), "2".to_owned())].into());
    let second = maps.replace("a", &PostParams::default(), &second).await.unwrap();
    assert!(second.resource_version() > first.resource_version());
    let (code, reason, message) = refusal(maps.replace("a", &PostParams::default(), &first).await);
    assert_eq!((code, reason.as_str()), (409, "Conflict"));
    assert_eq!(
        message,
        "Operation cannot be fulfilled on configmaps \"a\": the object has been modified; please apply your changes to the latest version and try again"
    );

    // The same through a patch with a version, and through one with a uid.
    for patch in [
        json!({"metadata": {"resourceVersion": first.resource_version()}, "data": {"n": "3"}}),
        json!({"metadata": {"uid": "11111111-0000-4000-8000-000000000000"}, "data": {"n": "3"}}),
    ] {
        let result = maps.patch("a", &PatchParams::default(), &Patch::Merge(&patch)).await;
        assert_eq!(refusal(result).0, 409, "{patch}");
    }
    let unconditional = config_map("a", json!({"n": "4"}));
    assert_eq!(
        maps.replace("a", &PostParams::default(), &unconditional).await.unwrap().uid(),
        first.uid()
    );
}

#[tokio::test]
async fn an_update_that_changes_nothing_is_no_commit() {
    let api = server();
    let maps = config_maps(&api);
    let made = maps
        .create(&PostParams::default(), &config_map("a", json!({"n": "1"})))
        .await
        .unwrap();
    let before = api.revision();
    let same = maps.replace("a", &PostParams::default(), &made).await.unwrap();
    let patched = maps
        .patch("a", &PatchParams::default(), &Patch::Merge(json!({"data": {"n": "1"}})))
        .await
        .unwrap();
    assert_eq!((api.revision(), &same, &patched), (before, &made, &made));
}

#[tokio::test]
async fn status_and_the_rest_are_written_apart() {
    let api = server();
    let nodes: Api<Node> = Api::all(api.client());
    let node = json!({"metadata": {"name": "n"}, "status": {"capacity": {"cpu": 2}}});
    nodes
        .create(
            &PostParams::default(),
            &serde_json::from_value(json!({"metadata": {"name": "m"}})).unwrap(),
        )
        .await
        .unwrap();
    api.create("nodes", node).unwrap();
    assert_eq!(
        api.get("nodes", "", "n").unwrap()["status"]["capacity"]["cpu"],
        "2",
        "a kubelet registers with its status"
    );

    let both =
        json!({"metadata": {"annotations": {"a": "b"}}, "spec": {"unschedulable": true}, "status": {"capacity": {"cpu": "9"}}});
    nodes.patch("n", &PatchParams::default(), &Patch::Merge(&both)).await.unwrap();
    let stored = api.get("nodes", "", "n").unwrap();
    assert_eq!(
        (&stored["spec"]["unschedulable"], &stored["status"]["capacity"]["cpu"]),
        (&json!(true), &json!("2"))
    );

    let both =
        json!({"metadata": {"annotations": {"c": "d"}}, "spec": {"unschedulable": false}, "status": {"capacity": {"cpu": "9"}}});
    nodes
        .patch_status("n", &PatchParams::default(), &Patch::Strategic(&both))
        .await
        .unwrap();
    let stored = api.get("nodes", "", "n").unwrap();
    assert_eq!(
        (&stored["spec"]["unschedulable"], &stored["status"]["capacity"]["cpu"]),
        (&json!(true), &json!("9"))
    );
    assert_eq!(
        stored["metadata"]["annotations"],
        json!({"a": "b", "c": "d"}),
        "metadata goes with either"
    );
}

#[tokio::test]
async fn conditions_are_merged_by_type_and_apply_creates_what_is_absent() {
    let api = server();
    let nodes: Api<Node> = Api::all(api.client());
    let apply = PatchParams::apply("test").force();
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n", "labels": {"a": "b"}}});
    nodes.patch("n", &apply, &Patch::Apply(&node)).await.unwrap();
    for (kind, status) in [("Ready", "False"), ("DiskPressure", "False"), ("Ready", "True")] {
        let patch = json!({"status": {"conditions": [{"type": kind, "status": status}]}});
        nodes
            .patch_status("n", &PatchParams::default(), &Patch::Strategic(&patch))
            .await
            .unwrap();
    }
    let node = api.get("nodes", "", "n").unwrap();
    assert_eq!(node["metadata"]["labels"]["a"], "b");
    assert_eq!(
        node["status"]["conditions"],
        json!([{"type": "Ready", "status": "True"}, {"type": "DiskPressure", "status": "False"}])
    );
}

#[tokio::test]
async fn json_patches_with_a_test_are_optimistic_locks() {
    let api = server();
    api.create("configmaps", json!({"metadata": {"name": "a"}, "data": {"n": "1"}}))
        .unwrap();
    let kind = [("content-type", "application/json-patch+json")];
    let path = "/api/v1/namespaces/default/configmaps/a";
    let patch = json!([{"op": "test", "path": "/data/n", "value": "1"}, {"op": "replace", "path": "/data/n", "value": "2"}]);
    assert_eq!(request(&api, "PATCH", path, &kind, &patch).await.0, 200);
    assert_eq!(request(&api, "PATCH", path, &kind, &patch).await.0, 422);
    assert_eq!(api.get("configmaps", "default", "a").unwrap()["data"]["n"], "2");
    let (code, answer) = request(&api, "PATCH", path, &[("content-type", "text/plain")], &json!({})).await;
    assert_eq!((code, &answer["reason"]), (415, &json!("UnsupportedMediaType")));
}

#[tokio::test]
async fn deletion_heeds_preconditions() {
    let api = server();
    let maps = config_maps(&api);
    let made = maps
        .create(&PostParams::default(), &config_map("a", json!({})))
        .await
        .unwrap();
    let with = |uid: &str, version: Option<String>| DeleteParams {
        preconditions: Some(kube::api::Preconditions {
            uid: Some(uid.into()),
            resource_version: version,
        }),
        ..DeleteParams::default()
    };
    let (code, _, message) = refusal(maps.delete("a", &with("other", None)).await);
    assert_eq!(code, 409);
    assert!(
        message.contains("the UID in the precondition (other) does not match the UID in record"),
        "{message}"
    );
    let uid = made.uid().unwrap();
    assert_eq!(refusal(maps.delete("a", &with(&uid, Some("1".into()))).await).0, 409);

    let gone = maps.delete("a", &with(&uid, made.resource_version())).await.unwrap();
    assert!(gone.is_right(), "removed at once: a Status");
    assert_eq!(refusal(maps.get("a").await).0, 404);
}

#[tokio::test]
async fn delete_collection_takes_what_the_selector_matches() {
    let api = server();
    for (name, app) in [("a", "x"), ("b", "x"), ("c", "y")] {
        api.create("configmaps", json!({"metadata": {"name": name, "labels": {"app": app}}}))
            .unwrap();
    }
    api.create("namespaces", json!({"metadata": {"name": "other"}})).unwrap();
    api.create(
        "configmaps",
        json!({"metadata": {"name": "a", "namespace": "other", "labels": {"app": "x"}}}),
    )
    .unwrap();
    let chosen = ListParams::default().labels("app=x");
    config_maps(&api)
        .delete_collection(&DeleteParams::default(), &chosen)
        .await
        .unwrap();
    let left: Vec<(String, String)> = Api::<ConfigMap>::all(api.client())
        .list(&ListParams::default())
        .await
        .unwrap()
        .iter()
        .map(|map| (map.namespace().unwrap(), map.name_any()))
        .collect();
    assert_eq!(
        left,
        [("default".to_owned(), "c".to_owned()), ("other".to_owned(), "a".to_owned())]
    );
}

#[tokio::test]
async fn namespaces_must_exist_and_take_their_content_along() {
    let api = server();
    let lost = api
        .create("configmaps", json!({"metadata": {"name": "a", "namespace": "none"}}))
        .unwrap_err();
    assert_eq!((lost.code, lost.message.as_str()), (404, "namespaces \"none\" not found"));

    api.create("namespaces", json!({"metadata": {"name": "ns"}})).unwrap();
    api.create("configmaps", json!({"metadata": {"name": "a", "namespace": "ns"}}))
        .unwrap();
    let mut bound = pod("p");
    bound["metadata"]["namespace"] = json!("ns");
    bound["spec"]["nodeName"] = json!("n");
    api.create("pods", bound).unwrap();
    api.delete("namespaces", "", "ns", &Default::default()).unwrap();
    assert!(api.get("configmaps", "ns", "a").is_err());
    assert_eq!(api.get("namespaces", "", "ns").unwrap()["status"]["phase"], "Terminating");
    let refused = api
        .create("configmaps", json!({"metadata": {"name": "b", "namespace": "ns"}}))
        .unwrap_err();
    assert_eq!(refused.code, 403);
    let now = divvy_testbed::api::DeleteOptions {
        grace_period_s: Some(0),
        ..Default::default()
    };
    api.delete("pods", "ns", "p", &now).unwrap();
    assert!(
        api.get("namespaces", "", "ns").is_err(),
        "the namespace was removed with its last pod"
    );
}

#[tokio::test]
async fn leases_are_taken_by_compare_and_swap() {
    let api = server();
    let leases: Api<Lease> = Api::namespaced(api.client(), "kube-system");
    let lease = |holder: &str, version: Option<String>| -> Lease {
        serde_json::from_value(json!({"metadata": {"name": "l", "resourceVersion": version}, "spec": {"holderIdentity": holder}}))
            .unwrap()
    };
    let made = leases.replace("l", &PostParams::default(), &lease("a", None)).await.unwrap();
    assert_eq!(
        refusal(leases.replace("l", &PostParams::default(), &lease("b", None)).await).0,
        422,
        "a version is required"
    );
    let version = made.resource_version();
    leases
        .replace("l", &PostParams::default(), &lease("b", version.clone()))
        .await
        .unwrap();
    assert_eq!(
        refusal(leases.replace("l", &PostParams::default(), &lease("c", version)).await).0,
        409
    );
}

#[tokio::test]
async fn events_of_both_groups_are_the_same_objects() {
    let api = server();
    api.create(
        "events.events.k8s.io",
        json!({"metadata": {"name": "e"}, "regarding": {"kind": "Pod", "name": "p"}, "note": "hello", "reason": "R",
               "reportingController": "divvy", "eventTime": "2026-11-21T10:00:00.000000Z"}),
    )
    .unwrap();
    let core: Api<k8s_openapi::api::core::v1::Event> = Api::namespaced(api.client(), "default");
    let new: Api<k8s_openapi::api::events::v1::Event> = Api::namespaced(api.client(), "default");
    let event = core.get("e").await.unwrap();
    assert_eq!(
        (event.message.as_deref(), event.reporting_component.as_deref()),
        (Some("hello"), Some("divvy"))
    );
    assert_eq!(event.involved_object.name.as_deref(), Some("p"));
    let patch = Patch::Merge(json!({"series": {"count": 2, "lastObservedTime": "2026-11-21T10:00:01.000000Z"}}));
    let patched = new.patch("e", &PatchParams::default(), &patch).await.unwrap();
    assert_eq!(patched.note.as_deref(), Some("hello"));
    let listed = new.list(&ListParams::default().fields("regarding.name=p")).await.unwrap();
    assert_eq!(listed.items.len(), 1);
    assert_eq!(listed.items[0].series.as_ref().unwrap().count, 2);
    assert_eq!(api.list("events", "default").unwrap().len(), 1);
}

#[tokio::test]
async fn more_resources_can_be_served() {
    let api = server_with(Options {
        resources: vec![Resource::custom("divvy.dev", "v1", "pools", "Pool", false)],
        ..Options::default()
    });
    let kind = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk("divvy.dev", "v1", "Pool"), "pools");
    let pools: Api<DynamicObject> = Api::all_with(api.client(), &kind);
    let pool = DynamicObject::new("a", &kind).data(json!({"spec": {"n": 1}, "status": {"dropped": true}}));
    let made = pools.create(&PostParams::default(), &pool).await.unwrap();
    assert_eq!((&made.data["spec"]["n"], made.data.get("status")), (&json!(1), None));
    assert_eq!(pools.list(&ListParams::default()).await.unwrap().items.len(), 1);
    let discovered = api.client().list_api_group_resources("divvy.dev/v1").await.unwrap();
    assert_eq!(discovered.resources[0].name, "pools");
}

#[tokio::test]
async fn dry_runs_check_and_store_nothing() {
    let api = server();
    let before = api.revision();
    let dry = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    assert!(pods(&api).create(&dry, &typed(pod("p"))).await.unwrap().uid().is_some());
    assert_eq!(api.revision(), before);
    let mut wrong = pod("p");
    wrong["spec"]["containers"][0]["resources"]["limits"]["aliyun.com/gpu-mem"] = json!("500m");
    assert_eq!(refusal(pods(&api).create(&dry, &typed(wrong)).await).0, 422);
}

#[tokio::test]
async fn what_is_not_legal_is_refused_in_words() {
    let api = server();
    api.create("pods", pod("p")).unwrap();
    let base = "/api/v1/namespaces/default";
    for (method, path, body, code, words) in [
        (
            "GET",
            format!("{base}/gizmos"),
            json!(null),
            404,
            "the server could not find the requested resource",
        ),
        ("GET", "/apis/none.io/v1/gizmos".into(), json!(null), 404, "could not find"),
        (
            "GET",
            "/api/v1/namespaces/default/nodes".into(),
            json!(null),
            404,
            "could not find",
        ),
        ("PUT", format!("{base}/pods"), pod("p"), 405, "does not allow this method"),
        ("POST", format!("{base}/pods/p"), pod("p"), 405, "does not allow this method"),
        ("POST", format!("{base}/pods"), json!("text"), 400, "must be a JSON object"),
        (
            "POST",
            format!("{base}/pods"),
            json!({"kind": "Node", "metadata": {"name": "x"}}),
            400,
            "does not match the expected kind (Pod)",
        ),
        (
            "POST",
            format!("{base}/pods"),
            json!({"metadata": {"name": "Upper"}, "spec": {"containers": []}}),
            422,
            "RFC 1123 subdomain",
        ),
        (
            "POST",
            format!("{base}/pods"),
            json!({"metadata": {"name": "x", "namespace": "y"}}),
            400,
            "namespace of the provided object",
        ),
        (
            "POST",
            format!("{base}/pods"),
            json!({"metadata": {"name": "x", "labels": {"a": 1}}}),
            400,
            "must be a string",
        ),
        (
            "POST",
            format!("{base}/pods"),
            json!({"metadata": {"name": "x"}, "spec": {"containers": {}}}),
            400,
            "cannot be handled as a Pod",
        ),
        (
            "POST",
            format!("{base}/pods"),
            json!({"metadata": {}, "spec": {}}),
            422,
            "name or generateName is required",
        ),
        (
            "PUT",
            format!("{base}/pods/p"),
            pod("q"),
            400,
            "does not match the name on the URL",
        ),
        (
            "GET",
            format!("{base}/pods?fieldSelector=spec.image%3Dx"),
            json!(null),
            400,
            "field label not supported",
        ),
        (
            "GET",
            format!("{base}/pods?resourceVersion=99999"),
            json!(null),
            504,
            "Too large resource version",
        ),
        (
            "GET",
            format!("{base}/pods?resourceVersion=x"),
            json!(null),
            400,
            "is not a number",
        ),
        (
            "GET",
            format!("{base}/pods?watch=1&sendInitialEvents=true"),
            json!(null),
            422,
            "resourceVersionMatch",
        ),
        ("GET", format!("{base}/pods/%zz"), json!(null), 400, "percent-encoded"),
    ] {
        let (have, answer) = request(&api, method, &path, &[], &body).await;
        let message = answer["message"].as_str().unwrap_or("");
        assert!(have == code && message.contains(words), "{method} {path}: {have} {answer}");
        assert_eq!(
            (&answer["kind"], &answer["status"], &answer["code"]),
            (&json!("Status"), &json!("Failure"), &json!(code))
        );
    }
    let (code, answer) = request(
        &api,
        "POST",
        &format!("{base}/configmaps"),
        &[("content-type", "application/vnd.kubernetes.protobuf")],
        &json!("k8s"),
    )
    .await;
    assert_eq!((code, &answer["reason"]), (415, &json!("UnsupportedMediaType")));
    let (code, _) = request(
        &api,
        "GET",
        &format!("{base}/pods"),
        &[("accept", "application/vnd.kubernetes.protobuf")],
        &json!(null),
    )
    .await;
    assert_eq!(code, 406);
}

#[tokio::test]
async fn the_items_of_a_list_have_no_kind() {
    let api = server();
    api.create("configmaps", json!({"metadata": {"name": "a"}})).unwrap();
    let (code, list) = request(&api, "GET", "/api/v1/configmaps", &[], &json!(null)).await;
    assert_eq!((code, list["items"].as_array().unwrap().len()), (200, 1));
    assert_eq!(list["items"][0].get("kind"), None, "as in lists of a real server");
}
