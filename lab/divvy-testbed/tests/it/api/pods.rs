//! Pods: creation, Binding, allowed changes, and deletion.

use divvy_testbed::api::{EventKind, PatchKind};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Status;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};

use super::*;

fn binding(name: &str, node: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": {"apiVersion": "v1", "kind": "Node", "name": node}})
}

async fn bind(api: &ApiServer, name: &str, binding: &Value) -> kube::Result<Status> {
    pods(api)
        .create_subresource("binding", name, &PostParams::default(), binding)
        .await
}

#[tokio::test]
async fn extended_resources_are_refused_with_a_cause_per_field() {
    let api = server();
    let mut value = pod("p");
    value["spec"]["containers"][0]["resources"] = json!({"requests": {"aliyun.com/gpu-mem": 3}});
    let (code, answer) = request(&api, "POST", "/api/v1/namespaces/default/pods", &[], &value).await;
    assert_eq!((code, &answer["reason"]), (422, &json!("Invalid")));
    assert_eq!(
        answer["message"],
        "Pod \"p\" is invalid: spec.containers[0].resources.limits: Required value: Limit must be set for non overcommitable resources"
    );
    assert_eq!(
        answer["details"]["causes"],
        json!([{"reason": "FieldValueRequired", "field": "spec.containers[0].resources.limits",
                "message": "Required value: Limit must be set for non overcommitable resources"}])
    );
}

#[tokio::test]
async fn a_binding_is_refused_when_the_pod_is_not_what_it_was() {
    let api = server();
    let made = api.create("pods", pod("p")).unwrap();
    let with = |field: &str, value: Value| {
        let mut body = binding("p", "n1");
        body["metadata"][field] = value;
        body
    };
    for (body, code, words) in [
        (
            with("uid", json!("other")),
            409,
            "Precondition failed: UID in precondition: other, UID in object meta: ",
        ),
        (
            with("resourceVersion", json!("1")),
            409,
            "Precondition failed: ResourceVersion in precondition: 1",
        ),
        (
            with("namespace", json!("kube-system")),
            400,
            "namespace of the provided object",
        ),
        (
            with("name", json!("q")),
            400,
            "name in URL does not match name in Binding object",
        ),
        (binding("p", ""), 500, "target.name: Required value"),
        (
            json!({"metadata": {"name": "p"}, "target": {"kind": "Pod", "name": "n1"}}),
            500,
            "target.kind: Unsupported value: \"Pod\"",
        ),
    ] {
        let answer = refusal(bind(&api, "p", &body).await);
        assert!(answer.0 == code && answer.2.contains(words), "{body}: {answer:?}");
    }
    assert_eq!(refusal(bind(&api, "absent", &binding("absent", "n1")).await).0, 404);
    assert_eq!(
        api.get("pods", "default", "p").unwrap(),
        made,
        "the refused requests changed nothing"
    );

    bind(&api, "p", &binding("p", "n1")).await.unwrap();
    let again = refusal(bind(&api, "p", &binding("p", "n2")).await);
    assert_eq!(again.1, "Conflict");
    assert_eq!(
        again.2,
        "Operation cannot be fulfilled on pods/binding \"p\": pod p is already assigned to node \"n1\""
    );
    pods(&api).delete("p", &DeleteParams::default()).await.unwrap();
    let deleting = refusal(bind(&api, "p", &binding("p", "n1")).await);
    assert_eq!(
        deleting.2,
        "Operation cannot be fulfilled on pods/binding \"p\": pod p is being deleted, cannot be assigned to a host"
    );

    let mut gated = pod("gated");
    gated["spec"]["schedulingGates"] = json!([{"name": "wait"}]);
    api.create("pods", gated).unwrap();
    assert!(
        refusal(bind(&api, "gated", &binding("gated", "n1")).await)
            .2
            .contains("non-empty .spec.schedulingGates")
    );
    let open = json!({"spec": {"schedulingGates": [{"name": "wait", "$patch": "delete"}]}});
    api.patch("pods", "default", "gated", PatchKind::Strategic, &open).unwrap();
    bind(&api, "gated", &binding("gated", "n1")).await.unwrap();
}

#[tokio::test]
async fn a_bound_pod_stays_until_its_kubelet_lets_it_go() {
    let api = server();
    let made = api.create("pods", pod("p")).unwrap();
    bind(&api, "p", &binding("p", "n1")).await.unwrap();
    let uid = made["metadata"]["uid"].as_str().unwrap();
    let asked = pods(&api)
        .delete("p", &DeleteParams::default())
        .await
        .unwrap()
        .left()
        .unwrap();
    assert_eq!(asked.metadata.deletion_grace_period_seconds, Some(30));
    let stored = api.get("pods", "default", "p").unwrap();
    assert_eq!(stored["metadata"]["deletionTimestamp"], "2026-11-21T10:00:30Z");

    // Repeating a deletion changes nothing. A smaller grace period shortens it, counted from the first request. It never gets longer.
    let before = api.revision();
    pods(&api).delete("p", &DeleteParams::default()).await.unwrap();
    pods(&api)
        .delete("p", &DeleteParams::default().grace_period(60))
        .await
        .unwrap();
    assert_eq!(api.revision(), before);
    pods(&api)
        .delete("p", &DeleteParams::default().grace_period(10))
        .await
        .unwrap();
    let stored = api.get("pods", "default", "p").unwrap();
    assert_eq!(stored["metadata"]["deletionTimestamp"], "2026-11-21T10:00:10Z");

    // The kubelet still reports, then removes the pod, but only the one with this UID.
    let status = json!({"status": {"phase": "Succeeded"}});
    pods(&api)
        .patch_status("p", &PatchParams::default(), &Patch::Merge(&status))
        .await
        .unwrap();
    let end = |uid: &str| DeleteParams {
        grace_period_seconds: Some(0),
        preconditions: Some(kube::api::Preconditions {
            uid: Some(uid.into()),
            resource_version: None,
        }),
        ..DeleteParams::default()
    };
    assert_eq!(refusal(pods(&api).delete("p", &end("another")).await).0, 409);
    pods(&api).delete("p", &end(uid)).await.unwrap();
    assert_eq!(refusal(pods(&api).get("p").await).0, 404);

    let kinds: Vec<EventKind> = api.history().iter().rev().take(2).map(|event| event.kind).collect();
    assert_eq!(
        kinds,
        [EventKind::Deleted, EventKind::Modified],
        "seen with a grace period of zero, then gone"
    );
}

#[tokio::test]
async fn a_spec_does_not_change_but_for_what_may() {
    let api = server();
    api.create("pods", pod("p")).unwrap();
    for patch in [
        json!({"spec": {"nodeName": "n1"}}),
        json!({"spec": {"containers": [{"name": "main", "resources": {"limits": {"aliyun.com/gpu-mem": "4"}, "requests": {"aliyun.com/gpu-mem": "4"}}}]}}),
        json!({"spec": {"tolerations": []}}),
        json!({"spec": {"schedulingGates": [{"name": "late"}]}}),
    ] {
        let error = api.patch("pods", "default", "p", PatchKind::Strategic, &patch).unwrap_err();
        assert_eq!((error.code, error.reason), (422, "Invalid"), "{patch}");
    }
    for patch in [
        json!({"spec": {"containers": [{"name": "main", "image": "tutorial:2"}]}}),
        json!({"metadata": {"labels": {"a": "b"}, "annotations": {"c": "d"}}}),
        json!({"spec": {"activeDeadlineSeconds": 9}}),
    ] {
        api.patch("pods", "default", "p", PatchKind::Strategic, &patch).unwrap();
    }
    let stored = pods(&api).get("p").await.unwrap();
    assert_eq!(stored.spec.unwrap().containers[0].image.as_deref(), Some("tutorial:2"));
    assert_eq!(stored.metadata.labels.unwrap()["a"], "b");
    let (code, _, _) = refusal(pods(&api).replace("p", &PostParams::default(), &typed(pod("p"))).await);
    assert_eq!(code, 422, "a PUT of the bare manifest lacks the defaults");
}

#[tokio::test]
async fn fields_that_pods_do_not_have_are_dropped_or_refused() {
    let api = server();
    let mut value = pod("p");
    value["spec"]["containers"][0]["resource"] = json!({"limits": {"aliyun.com/gpu-mem": "3"}});
    value["spec"]["nodeSelectors"] = json!({});
    let path = "/api/v1/namespaces/default/pods";
    let (code, answer) = request(&api, "POST", &format!("{path}?fieldValidation=Strict"), &[], &value).await;
    assert_eq!(code, 400);
    assert_eq!(
        answer["message"],
        "Pod in version \"v1\" cannot be handled as a Pod: strict decoding error: unknown field \"spec.containers[0].resource\", \
         unknown field \"spec.nodeSelectors\""
    );
    let (code, made) = request(&api, "POST", path, &[], &value).await;
    assert_eq!(code, 201);
    assert_eq!(
        (
            made["spec"]["containers"][0].get("resource"),
            made["spec"].get("nodeSelectors")
        ),
        (None, None)
    );
    let status = json!({"status": {"phase": "Running", "fase": "x"}});
    let patched = api.patch("pods/status", "default", "p", PatchKind::Merge, &status).unwrap();
    assert_eq!(
        (patched["status"].get("fase"), &patched["status"]["phase"]),
        (None, &json!("Running"))
    );
}

#[tokio::test]
async fn a_pods_priority_is_that_of_its_class() {
    let api = ApiServer::new(ApiServerOptions::default());
    let class = json!({"metadata": {"name": "urgent"}, "value": 1000, "preemptionPolicy": "Never"});
    api.create("priorityclasses.scheduling.k8s.io", class).unwrap();
    for (class, priority, policy) in [
        ("urgent", 1000, "Never"),
        ("system-cluster-critical", 2_000_000_000, "PreemptLowerPriority"),
        ("", 0, "PreemptLowerPriority"),
    ] {
        let mut manifest = pod(&format!("p{priority}"));
        manifest["spec"]["priorityClassName"] = json!(class);
        let made = pods(&api).create(&PostParams::default(), &typed(manifest)).await.unwrap();
        let spec = made.spec.unwrap();
        assert_eq!(
            (spec.priority, spec.preemption_policy.as_deref()),
            (Some(priority), Some(policy)),
            "{class:?}"
        );
    }
    let mut manifest = pod("lost");
    manifest["spec"]["priorityClassName"] = json!("lost");
    let (code, _, message) = refusal(pods(&api).create(&PostParams::default(), &typed(manifest)).await);
    assert_eq!(
        (code, message.as_str()),
        (403, "pods \"lost\" is forbidden: no PriorityClass with name lost was found")
    );
}

/// A real API server's Priority admission refused a pod of this repository's tests in this way.
#[tokio::test]
async fn a_pod_does_not_choose_its_own_priority_or_preemption() {
    let api = ApiServer::new(ApiServerOptions::default());
    for (field, value, part) in [
        (
            "preemptionPolicy",
            json!("Never"),
            "the string value of PreemptionPolicy (Never) must not be provided",
        ),
        ("priority", json!(7), "the integer value of priority (7) must not be provided"),
    ] {
        let mut manifest = pod("p");
        manifest["spec"][field] = value;
        let (code, reason, message) = refusal(pods(&api).create(&PostParams::default(), &typed(manifest)).await);
        assert_eq!((code, reason.as_str()), (403, "Forbidden"));
        assert!(message.contains(part), "{message}");
    }
    for (field, value) in [("preemptionPolicy", json!("PreemptLowerPriority")), ("priority", json!(0))] {
        let mut manifest = pod(&field.to_lowercase());
        manifest["spec"][field] = value;
        pods(&api).create(&PostParams::default(), &typed(manifest)).await.unwrap();
    }
}
