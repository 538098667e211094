//! The fields that a scheduler reads: they come back as written, and change only where a real API server allows it.

use divvy_testbed::api::PatchKind;
use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Namespace;
use kube::api::{Api, ListParams, PostParams};
use kube::runtime::{WatchStreamExt as _, watcher};

use super::*;

fn constrained() -> Value {
    let selector =
        json!({"matchLabels": {"app": "web"}, "matchExpressions": [{"key": "tier", "operator": "NotIn", "values": ["back"]}]});
    let term = json!({"topologyKey": "zone", "labelSelector": selector, "namespaces": ["a"], "namespaceSelector": {},
        "matchLabelKeys": ["hash"], "mismatchLabelKeys": ["team"]});
    let nodes = json!({"nodeSelectorTerms": [{"matchExpressions": [{"key": "cpus", "operator": "Gt", "values": ["8"]}],
        "matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}]});
    json!({
        "affinity": {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": nodes},
            "podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]},
            "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]},
        },
        "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": selector,
            "minDomains": 2, "nodeAffinityPolicy": "Ignore", "nodeTaintsPolicy": "Honor", "matchLabelKeys": ["hash"]}],
        "tolerations": [{"key": "dedicated", "operator": "Equal", "value": "gpu", "effect": "NoSchedule"}],
        "nodeSelector": {"disk": "ssd"},
        "schedulingGates": [{"name": "one"}, {"name": "two"}],
        "priorityClassName": "gentle",
    })
}

#[tokio::test]
async fn what_the_filters_read_of_a_pod_comes_back_as_it_was_written() {
    let api = server();
    let class = json!({"metadata": {"name": "gentle"}, "value": 1000, "preemptionPolicy": "Never"});
    api.create("priorityclasses.scheduling.k8s.io", class).unwrap();
    let mut value = pod("p");
    for (field, part) in constrained().as_object().unwrap() {
        value["spec"][field] = part.clone();
    }
    let made = pods(&api).create(&PostParams::default(), &typed(value)).await.unwrap();
    let stored = serde_json::to_value(pods(&api).get("p").await.unwrap()).unwrap();
    assert_eq!(serde_json::to_value(made).unwrap(), stored);
    for (field, part) in constrained().as_object().unwrap() {
        let found = &stored["spec"][field];
        match field.as_str() {
            // The server adds two more tolerations to each pod.
            "tolerations" => assert_eq!(found[0], part[0]),
            _ => assert_eq!(found, part, "{field}"),
        }
    }
    let spec = &stored["spec"];
    assert_eq!(
        (&spec["priority"], &spec["preemptionPolicy"]),
        (&json!(1000), &json!("Never"))
    );
}

#[tokio::test]
async fn gates_can_be_taken_away_one_by_one_and_nothing_else_of_a_gated_pod_changes() {
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

#[tokio::test]
async fn namespaces_are_listed_and_watched_with_their_labels_and_their_name_is_one() {
    let api = server();
    api.create("namespaces", json!({"metadata": {"name": "ns", "labels": {"team": "one"}}}))
        .unwrap();
    let namespaces: Api<Namespace> = Api::all(api.client());
    for selector in ["team=one", "kubernetes.io/metadata.name=ns"] {
        let found = namespaces.list(&ListParams::default().labels(selector)).await.unwrap();
        let names: Vec<_> = found.items.into_iter().filter_map(|one| one.metadata.name).collect();
        assert_eq!(names, ["ns"], "{selector}");
    }
    let mut changes = watcher(namespaces, watcher::Config::default().labels("team"))
        .applied_objects()
        .boxed();
    assert_eq!(changes.next().await.unwrap().unwrap().metadata.labels.unwrap()["team"], "one");
    let patch = json!({"metadata": {"labels": {"team": "two", "kubernetes.io/metadata.name": "other"}}});
    api.patch("namespaces", "", "ns", PatchKind::Merge, &patch).unwrap();
    let labels = changes.next().await.unwrap().unwrap().metadata.labels.unwrap();
    assert_eq!(
        (labels["team"].as_str(), labels["kubernetes.io/metadata.name"].as_str()),
        ("two", "ns")
    );
}

#[tokio::test]
async fn ports_of_a_pod_in_the_hosts_network_are_ports_of_the_host() {
    let api = server();
    let ports = |on_host: bool| {
        let mut value = pod(if on_host { "host" } else { "own" });
        value["spec"]["hostNetwork"] = json!(on_host);
        value["spec"]["containers"][0]["ports"] = json!([{"containerPort": 80}, {"containerPort": 81, "hostPort": 81}]);
        let made = api.create("pods", value).unwrap();
        let ports = made["spec"]["containers"][0]["ports"].clone();
        (ports[0]["hostPort"].clone(), ports[1]["hostPort"].clone())
    };
    assert_eq!(ports(true), (json!(80), json!(81)));
    assert_eq!(ports(false), (json!(null), json!(81)));
}
