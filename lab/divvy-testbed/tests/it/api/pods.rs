//! Pods: creation, Binding, allowed changes, and deletion.

use divvy_testbed::api::{EventKind, PatchKind};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Status;
use kube::ResourceExt;
use kube::api::{DeleteParams, EvictParams, Patch, PatchParams, PostParams};

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
async fn a_new_pod_is_pending_with_defaults_and_a_request_equal_to_its_limit() {
    let api = server();
    let mut value = pod("p");
    value["status"] = json!({"phase": "Running"});
    let made = pods(&api).create(&PostParams::default(), &typed(value)).await.unwrap();
    let spec = made.spec.clone().unwrap();
    let status = made.status.clone().unwrap();
    assert_eq!(
        (status.phase.as_deref(), status.qos_class.as_deref()),
        (Some("Pending"), Some("BestEffort"))
    );
    assert_eq!(spec.restart_policy.as_deref(), Some("Always"));
    assert_eq!(spec.scheduler_name.as_deref(), Some("default-scheduler"));
    assert_eq!(spec.service_account_name.as_deref(), Some("default"));
    assert_eq!(spec.termination_grace_period_seconds, Some(30));
    let resources = spec.containers[0].resources.clone().unwrap();
    assert_eq!(resources.requests, resources.limits);
    assert_eq!(
        resources.limits.unwrap()["aliyun.com/gpu-mem"].0,
        "3",
        "a number in the manifest, text from the server"
    );
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
async fn a_binding_sets_the_node_merges_its_annotations_and_says_scheduled_in_one_commit() {
    let api = server();
    let mut value = pod("p");
    value["metadata"]["annotations"] = json!({"kept": "1", "changed": "old"});
    let made = api.create("pods", value).unwrap();
    let before = api.revision();
    let mut body = binding("p", "n1");
    body["metadata"]["uid"] = made["metadata"]["uid"].clone();
    body["metadata"]["annotations"] = json!({"changed": "new", "divvy.dev/allocation": "{}"});
    body["metadata"]["labels"] = json!({"zone": "z"});
    let status = bind(&api, "p", &body).await.unwrap();
    assert_eq!((status.status.as_deref(), status.code), (Some("Success"), Some(201)));
    assert_eq!(api.revision(), before + 1);
    let bound = api.get("pods", "default", "p").unwrap();
    assert_eq!(bound["spec"]["nodeName"], "n1");
    assert_eq!(
        bound["metadata"]["annotations"],
        json!({"kept": "1", "changed": "new", "divvy.dev/allocation": "{}"})
    );
    assert_eq!(bound["metadata"]["labels"], json!({"zone": "z"}));
    let condition = &bound["status"]["conditions"][0];
    assert_eq!(
        (&condition["type"], &condition["status"]),
        (&json!("PodScheduled"), &json!("True"))
    );
    assert_eq!(bound["status"]["phase"], "Pending");
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
async fn pods_that_no_kubelet_holds_go_at_once() {
    let api = server();
    api.create("pods", pod("unbound")).unwrap();
    pods(&api).delete("unbound", &DeleteParams::default()).await.unwrap();
    assert_eq!(refusal(pods(&api).get("unbound").await).0, 404);

    for (name, delete) in [
        ("forced", DeleteParams::default().grace_period(0)),
        ("ended", DeleteParams::default()),
    ] {
        let mut bound = pod(name);
        bound["spec"]["nodeName"] = json!("n1");
        api.create("pods", bound).unwrap();
        if name == "ended" {
            api.patch(
                "pods/status",
                "default",
                name,
                PatchKind::Merge,
                &json!({"status": {"phase": "Failed"}}),
            )
            .unwrap();
        }
        pods(&api).delete(name, &delete).await.unwrap();
        assert_eq!(refusal(pods(&api).get(name).await).0, 404, "{name}");
    }

    let mut bound = pod("evicted");
    bound["spec"]["nodeName"] = json!("n1");
    api.create("pods", bound).unwrap();
    pods(&api).evict("evicted", &EvictParams::default()).await.unwrap();
    assert!(pods(&api).get("evicted").await.unwrap().metadata.deletion_timestamp.is_some());
}

#[tokio::test]
async fn a_pod_of_the_same_name_is_another_pod() {
    let api = server();
    let first = api.create("pods", pod("p")).unwrap();
    pods(&api).delete("p", &DeleteParams::default()).await.unwrap();
    let second = api.create("pods", pod("p")).unwrap();
    assert_ne!(first["metadata"]["uid"], second["metadata"]["uid"]);
    let mut stale = binding("p", "n1");
    stale["metadata"]["uid"] = first["metadata"]["uid"].clone();
    assert_eq!(refusal(bind(&api, "p", &stale).await).0, 409);
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
async fn the_history_tells_every_commit_on_pods_in_order() {
    let api = server();
    api.create("pods", pod("p")).unwrap();
    api.create("configmaps", json!({"metadata": {"name": "not-told"}})).unwrap();
    bind(&api, "p", &binding("p", "n1")).await.unwrap();
    pods(&api)
        .delete("p", &DeleteParams::default().grace_period(0))
        .await
        .unwrap();
    let history = api.history();
    let told: Vec<(&str, &str)> = history
        .iter()
        .map(|event| (event.kind.as_str(), event.object["spec"]["nodeName"].as_str().unwrap_or("")))
        .collect();
    assert_eq!(
        told,
        [("ADDED", ""), ("MODIFIED", "n1"), ("MODIFIED", "n1"), ("DELETED", "n1")]
    );
    assert!(history.windows(2).all(|pair| pair[0].revision < pair[1].revision));
    for event in &history {
        assert_eq!(event.object["metadata"]["resourceVersion"], event.revision.to_string());
    }
    assert_eq!(typed((*history[0].object).clone()).name_any(), "p");
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
    let api = ApiServer::new(Options::default());
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
    let api = ApiServer::new(Options::default());
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
