use divvy_model::Vendor;
use serde_json::json;

use super::*;

fn release() -> Release {
    Release {
        name: "divvy".to_owned(),
        namespace: "divvy-system".to_owned(),
    }
}

fn node(name: &str) -> NodeLeft {
    NodeLeft {
        name: name.to_owned(),
        annotations: vec!["divvy.dev/inventory".to_owned()],
        resources: vec![names::GPU_MEM.into(), names::GPU_COUNT.into()],
        labels: vec!["nvidia.com/gpu.count".to_owned()],
        labelled: true,
    }
}

fn holder_of(name: &str, memory: Option<MiB>) -> HoldingPod {
    HoldingPod {
        namespace: "ml".to_owned(),
        name: name.to_owned(),
        node: "n1".to_owned(),
        memory,
    }
}

fn found() -> InstalledParts {
    let object = |kind, name: &str| RemovedObject {
        kind,
        namespace: None,
        name: name.to_owned(),
    };
    InstalledParts {
        objects: vec![
            object("DaemonSet", "divvy-agent"),
            object("ClusterRole", "divvy-agent"),
            object("Lease", "divvy-extender"),
        ],
        helm: None,
        nodes: vec![node("n1"), node("n2")],
        pods: vec![holder_of("a", Some(MiB(3072))), holder_of("b", None)],
        waiting: 1,
        directories: Directories {
            state: "/var/lib/k0s/kubelet/plugins/divvy.dev".to_owned(),
            cdi: "/etc/my cdi/".to_owned(),
            known: true,
        },
    }
}

fn nothing() -> InstalledParts {
    InstalledParts {
        objects: Vec::new(),
        helm: None,
        nodes: vec![NodeLeft {
            annotations: Vec::new(),
            resources: Vec::new(),
            labels: Vec::new(),
            ..node("n1")
        }],
        pods: Vec::new(),
        waiting: 0,
        directories: Directories::default(),
    }
}

/// The plan also says who is in the way.
#[test]
fn the_plan_says_what_goes_and_what_is_left() {
    insta::assert_snapshot!("plan", text(&found(), &release(), false, false));
    insta::assert_snapshot!(
        "removed_with_labels",
        text(
            &InstalledParts {
                pods: vec![holder_of("a", None)],
                ..found()
            },
            &release(),
            true,
            true
        )
    );
    insta::assert_snapshot!("nothing", text(&nothing(), &release(), false, false));
    assert!(!nothing().is_nothing(true), "the label is something when it is asked for");
}

/// Only the refusal for pods that hold memory can be forced.
#[test]
fn uninstall_is_refused_for_held_memory_and_helm() {
    let refused = |found: &InstalledParts, force| refusal(found, &release(), force).unwrap_or_default();
    insta::assert_snapshot!("refused_for_pods", refused(&found(), false));
    assert_eq!(refused(&found(), true), "");
    let by_helm = InstalledParts {
        helm: Some("gpus".to_owned()),
        ..found()
    };
    assert!(
        refused(&by_helm, true).contains("helm uninstall gpus -n divvy-system, and then"),
        "{}",
        refused(&by_helm, true)
    );
    assert!(text(&by_helm, &release(), false, false).contains("First run helm uninstall gpus -n divvy-system, and then"));
}

#[test]
fn of_a_thousand_pods_the_first_ten_are_named() {
    let many = InstalledParts {
        pods: (0..1000).map(|number| holder_of(&format!("p{number}"), None)).collect(),
        ..found()
    };
    for text in [
        text(&many, &release(), false, false),
        refusal(&many, &release(), false).unwrap_or_default(),
    ] {
        assert!(text.contains("ml/p9 (node n1) and 990 more") && text.len() < 4_000, "{text}");
    }
}

#[test]
fn of_the_labels_those_that_only_divvy_applied_are_removed() {
    let entry = |manager: &str, keys: &[&str]| {
        let keys: serde_json::Map<String, Value> = keys.iter().map(|key| (format!("f:{key}"), json!({}))).collect();
        json!({"manager": manager, "operation": "Apply", "fieldsV1": {"f:metadata": {"f:labels": keys}}})
    };
    let managed = [
        entry("divvy-labels", &["nvidia.com/gpu.count", "nvidia.com/gpu.memory"]),
        entry("nfd-master", &["nvidia.com/gpu.memory", "nvidia.com/gpu.mode"]),
        json!({"manager": "kubelet", "operation": "Update", "fieldsV1": {"f:status": {}}}),
    ];
    let left = node_left(&json!({"metadata": {"name": "n1", "managedFields": managed}})).expect("something");
    assert_eq!(left.labels, ["nvidia.com/gpu.count"]);
    assert!(left.has_something(false));
}

#[test]
fn units_that_another_plugin_serves_are_left_alone() {
    let object = |annotations: Value, offered: &str| {
        json!({"metadata": {"name": "n1", "annotations": annotations, "labels": {"gpushare": "yes"}},
            "status": {"capacity": {"cpu": "4", "aliyun.com/gpu-mem": "16"}, "allocatable": {"cpu": "4", "aliyun.com/gpu-mem": offered}}})
    };
    let left =
        |annotations: Value, offered| node_left(&object(annotations, offered)).map(|left| (left.annotations, left.resources));
    assert_eq!(left(json!({"mine": "1"}), "16"), None, "gushare's plugin runs there");
    assert_eq!(
        left(json!({}), "0"),
        Some((vec![], vec![names::GPU_MEM.into()])),
        "no plugin serves them any longer"
    );
    let ours = json!({"divvy.dev/inventory": "{}", "mine": "1"});
    assert_eq!(
        left(ours, "16"),
        Some((vec!["divvy.dev/inventory".to_owned()], vec![names::GPU_MEM.into()]))
    );
    assert_eq!(
        node_left(&json!({"metadata": {"name": "cpu"}, "status": {"capacity": {"cpu": "4"}}})),
        None
    );
}

/// The vendor's own device plugin may run in the same cluster, on the same or on other nodes.
#[test]
fn whole_gpus_are_divvys_where_the_inventory_says_so() {
    use divvy_testkit::nodes::{add_whole, amd_node, amd_pod, divvy_node, divvy_pod};
    let shared = divvy_node("shared", &[16]);
    let left = |node: &Node, resource: &str| {
        let inventory = node
            .inventory
            .as_ref()
            .and_then(|inventory| inventory.as_ref().ok())
            .expect("it has one");
        let object = json!({"metadata": {"name": "n1", "annotations": {"divvy.dev/inventory": inventory.to_json()}},
            "status": {"capacity": {resource: "1"}, "allocatable": {resource: "1"}}});
        node_left(&object).map(|left| left.resources)
    };
    for vendor in [Vendor::Amd, Vendor::Intel] {
        let resource = vendor.whole_resource();
        let mut whole = divvy_node("whole", &[]);
        add_whole(&mut whole, vendor, 1);
        assert_eq!(left(&whole, resource), Some(vec![resource.into()]));
        assert_eq!(left(&shared, resource), Some(vec![]));
    }
    let nodes = [amd_node("amd", 1), shared];
    for (pod, node, expected) in [
        (amd_pod("a", "amd", &[0]), "amd", true),
        (amd_pod("b", "shared", &[0]), "shared", false),
        (divvy_pod("c", "shared", 0, 4), "shared", true),
    ] {
        let found = holder(&pod, &nodes);
        assert_eq!(found.map(|holder| holder.node), expected.then(|| node.to_owned()), "{pod:?}");
    }
}

/// The directories in the plan are those that the chart mounts.
#[test]
fn the_directories_are_those_of_the_charts_daemon_set() {
    let objects = |text: &str| -> Vec<Value> {
        let documents = text.split("\n---\n").skip(1);
        documents
            .map(|document| serde_saphyr::from_str(document).expect("YAML"))
            .collect()
    };
    let command = |objects: &[Value]| {
        objects
            .iter()
            .find_map(Directories::of)
            .map(|directories| directories.command())
    };
    let text = include_str!("../../../../deploy/divvy.yaml");
    // As with gpuNodes.kubeletDir=/var/lib/k0s/kubelet and gpuNodes.cdiDir=/run/cdi.
    let others = text
        .replace("/var/lib/kubelet", "/var/lib/k0s/kubelet")
        .replace("/var/run/cdi", "/run/cdi");
    assert_eq!(
        command(&objects(&others)).as_deref(),
        Some(
            "umount -l /var/lib/k0s/kubelet/plugins/divvy.dev/shares/*/* 2>/dev/null; rm -rf /var/lib/k0s/kubelet/plugins/divvy.dev /run/cdi/divvy.dev-*"
        )
    );
    let objects = objects(text);
    assert_eq!(command(&objects), Some(Directories::default().command()));
    // Every object of the chart is of a kind that the command looks for.
    for object in &objects {
        let kind = object["kind"].as_str().unwrap_or_default();
        assert!(KINDS.iter().any(|known| known.kind == kind), "{kind}");
        assert_eq!(
            object.pointer("/metadata/labels/app.kubernetes.io~1name"),
            Some(&json!("divvy")),
            "{kind}"
        );
        assert_eq!(
            object.pointer("/metadata/labels/app.kubernetes.io~1instance"),
            Some(&json!("divvy")),
            "{kind}"
        );
    }
    assert!(objects.len() > 20, "{}", objects.len());
}
