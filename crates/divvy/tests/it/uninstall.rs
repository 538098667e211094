//! `divvy uninstall` on the embedded cluster.

use std::time::Duration;

use divvy::uninstall::{InstalledKind, KINDS};
use divvy_testbed::api::{ApiServer, Effect, FaultRule, Match};
use divvy_testbed::builders::pod;
use serde_json::{Value, json};

use crate::bed::Bed;
use crate::chart;
use crate::cli::{beside, stderr, stdout};

fn resource(kind: InstalledKind) -> String {
    match kind.group {
        "" => kind.plural.to_owned(),
        group => format!("{}.{group}", kind.plural),
    }
}

/// Create the chart's objects, with a RuntimeClass, on the API server. Objects of kinds that this API server does not have are
/// left out.
fn install(api: &ApiServer) -> usize {
    api.create("namespaces", json!({"metadata": {"name": "divvy-system"}}))
        .expect("a namespace");
    let mut all = chart::default_objects();
    // With runtimeClass.enabled=true the chart has this one, too.
    let metadata = json!({"name": "nvidia", "labels": all[0]["metadata"]["labels"]});
    all.push(json!({"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": metadata, "handler": "nvidia"}));
    let mut made = 0;
    for object in all {
        let kind = KINDS
            .into_iter()
            .find(|kind| object["kind"] == kind.kind)
            .expect("a kind that is known");
        // The embedded API server has no such kind.
        if kind.kind != "NetworkPolicy" {
            api.create(&resource(kind), object).expect("created");
            made += 1;
        }
    }
    let lease = json!({"metadata": {"name": "divvy-extender", "namespace": "divvy-system"}});
    api.create("leases.coordination.k8s.io", lease).expect("a lease");
    made + 1
}

fn objects(api: &ApiServer) -> Vec<String> {
    let mut found = Vec::new();
    for kind in KINDS {
        for object in api.list(&resource(kind), "").unwrap_or_default() {
            let name = object["metadata"]["name"].as_str().unwrap_or_default();
            if name.starts_with("divvy") || name == "nvidia" {
                found.push(format!("{}/{name}", kind.kind));
            }
        }
    }
    found
}

fn node(bed: &Bed) -> String {
    bed.api().get("nodes", "", "n1").expect("the node").to_string()
}

/// Pods that still hold memory prevent the removal.
#[tokio::test]
async fn what_divvy_made_is_shown_and_then_removed() {
    let mut bed = Bed::with(&[&[16]], |spec| spec.timings.endpoint_grace = Duration::from_millis(100)).await;
    let made = install(bed.api());
    bed.create(&pod("holds").gpu_mem(3));
    bed.running("holds").await;
    let kubeconfig = bed.cluster.kubeconfig().display().to_string();
    let uninstall = async |args: &[&str]| {
        let all = [&["uninstall", "--kubeconfig", &kubeconfig, "--timeout", "0s"], args].concat();
        let output = beside(&all, &[]).await;
        (output.status.code(), stdout(&output), stderr(&output))
    };

    let (status, plan, errors) = uninstall(&[]).await;
    assert_eq!(status, Some(0), "{errors}");
    for part in [
        "nothing has been changed",
        &format!("{made} objects:\n    DaemonSet: divvy-agent, divvy-probe\n    Deployment: divvy-explainer, divvy-extender\n"),
        "annotations divvy.dev/… of 1 node: n1",
        "default/holds (node n1, 3072 MiB)",
        "rm -rf /var/lib/kubelet/plugins/divvy.dev /var/run/cdi/divvy.dev-*",
    ] {
        assert!(plan.contains(part), "no {part:?} in {plan}");
    }
    let (status, _, errors) = uninstall(&["--yes"]).await;
    assert_eq!(status, Some(1));
    assert!(
        errors.contains("1 pod holds GPU memory, so nothing was removed: default/holds"),
        "{errors}"
    );
    assert_eq!(objects(bed.api()).len(), made);

    // A missing permission is found before anything is removed.
    let faults = bed.api().faults();
    for (verb, of, right) in [
        ("list", "daemonsets.apps", "kubectl auth can-i list daemonsets.apps -A"),
        (
            "delete",
            "clusterroles.rbac.authorization.k8s.io",
            "kubectl auth can-i delete clusterroles.rbac.authorization.k8s.io/divvy-agent",
        ),
        ("patch", "nodes/status", "kubectl auth can-i patch nodes --subresource=status"),
    ] {
        let refuse = Effect::Refuse(403);
        let rule = faults.add(FaultRule::new(Match::any().verb(verb).resource(of), refuse));
        let (status, _, errors) = uninstall(&["--yes", "--force"]).await;
        assert_eq!(status, Some(1), "{verb} {of}");
        assert!(errors.contains(right), "{errors}");
        assert_eq!(objects(bed.api()).len(), made, "{verb} {of}");
        faults.remove(rule);
    }

    bed.delete("holds");
    bed.gone("holds").await;
    bed.settled().await;
    bed.cluster.stop_agent("n1").await.expect("the agent ends");
    let (status, removed, errors) = uninstall(&["--yes", "-o", "json"]).await;
    assert_eq!(status, Some(0), "{errors}");
    let removed: Value = serde_json::from_str(&removed).expect("JSON");
    assert_eq!(
        (&removed["removed"], removed["objects"].as_array().map(Vec::len)),
        (&json!(true), Some(made))
    );
    assert_eq!(objects(bed.api()), [""; 0]);
    assert!(!node(&bed).contains("divvy.dev/"), "{}", node(&bed));

    // The kubelet restores the resources until it has dropped the plugin.
    let mut last = String::new();
    for _ in 0..100 {
        last = uninstall(&["--yes"]).await.1;
        if last.starts_with("Nothing of Divvy is left") {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(last.starts_with("Nothing of Divvy is left"), "{last}");
    assert!(!node(&bed).contains("aliyun.com/"), "{}", node(&bed));
}
