//! Create, update, patch, and delete of objects in general.

use k8s_openapi::api::core::v1::{ConfigMap, Node};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

use super::*;

fn config_maps(api: &ApiServer) -> Api<ConfigMap> {
    Api::namespaced(api.client(), "default")
}

fn config_map(name: &str, data: Value) -> ConfigMap {
    serde_json::from_value(json!({"metadata": {"name": name}, "data": data})).unwrap()
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
            "sendInitialEvents",
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
