//! The results of the cluster checks on clusters with one fault each.

use divvy_doctor::facts::cluster::{CheckedNode, CheckedPod, CheckedVariable, ClusterFacts, Taint, Toleration};
use divvy_doctor::{Asked, CheckStatus, ReportLine};

use crate::host::{cluster, debian, facts, map, one, plugin, pod};

/// Apply a change to the healthy cluster, and return the result of one check on it. The objects are reduced as in production.
fn said(id: &str, change: impl FnOnce(&mut ClusterFacts)) -> ReportLine {
    let host = debian();
    let mut facts = facts(&host);
    facts.node = false;
    let mut cluster = cluster();
    change(&mut cluster);
    cluster.pods = cluster.pods.into_iter().map(CheckedPod::slim).collect();
    cluster.nodes = cluster.nodes.into_iter().map(CheckedNode::slim).collect();
    facts.cluster = Asked::Answer(cluster);
    one(id, &facts)
}

fn asking(name: &str, resource: &str, amount: &str) -> CheckedPod {
    let mut pod = pod(name, "cuda");
    pod.spec.containers[0].resources.limits = map(&[(resource, amount)]);
    pod
}

/// Return a pending pod that has no node and requests this resource.
fn waiting(name: &str, resource: &str, amount: &str) -> CheckedPod {
    let mut pod = asking(name, resource, amount);
    pod.spec.node_name = None;
    pod.status.phase = "Pending".to_owned();
    pod
}

fn with_variable(mut pod: CheckedPod, value: &str) -> CheckedPod {
    pod.spec.containers[0].env = vec![CheckedVariable {
        name: "NVIDIA_VISIBLE_DEVICES".to_owned(),
        value: Some(value.to_owned()),
        ..CheckedVariable::default()
    }];
    pod
}

fn granted(mut pod: CheckedPod) -> CheckedPod {
    pod.metadata.annotations.insert("divvy.dev/allocation", "{}");
    pod
}

fn publish(cluster: &mut ClusterFacts, node: usize, unit: u64) {
    let text = format!(r#"{{"v":1,"agent":"0.1.0","driver":"550.54.15","unitMiB":{unit},"gpus":[]}}"#);
    cluster.nodes[node].metadata.annotations.insert("divvy.dev/inventory", text);
}

fn taint(key: &str) -> Vec<Taint> {
    vec![Taint {
        key: key.to_owned(),
        effect: "NoSchedule".to_owned(),
        ..Taint::default()
    }]
}

#[test]
fn an_amount_of_bytes_is_answered_in_units() {
    for (unit, amount, write) in [
        (Some(1024), "3Gi", "write 3 (one unit is 1 GiB in this cluster)"),
        (Some(256), "3Gi", "write 12 (one unit is 256MiB in this cluster)"),
        (Some(1), "3Gi", "write 3072 (one unit is 1 MiB in this cluster)"),
        (Some(1024), "3500Mi", "write 4 ("),
        (Some(1024), "3G", "write 3 ("),
        (
            None,
            "3Gi",
            "write 3 (if one unit is 1 GiB, the default; no agent has published its unit)",
        ),
    ] {
        let line = said("K13", |cluster| {
            match unit {
                Some(unit) => (0..2).for_each(|node| publish(cluster, node, unit)),
                None => cluster.nodes[0].metadata.annotations = Default::default(),
            }
            cluster.pods.push(waiting("bytes", "aliyun.com/gpu-mem", amount));
        });
        assert_eq!(line.status, CheckStatus::Warn, "{line:?}");
        assert!(
            line.found
                .contains(&format!("ml/bytes requests aliyun.com/gpu-mem: {amount}; {write}")),
            "{line:?}"
        );
    }
    let line = said("K13", |cluster| {
        publish(cluster, 0, 1024);
        publish(cluster, 1, 256);
        cluster.pods.push(waiting("bytes", "aliyun.com/gpu-mem", "3Gi"));
    });
    assert!(
        line.found.contains("the nodes of this cluster use different units"),
        "{line:?}"
    );
}

/// The API server shortens 4000 to 4k. Such numbers are normal in a cluster whose unit is 1 MiB.
#[test]
fn a_number_that_the_api_server_shortened_is_no_amount_of_bytes() {
    let line = said("K13", |cluster| {
        publish(cluster, 0, 1);
        cluster.pods.push(asking("many", "aliyun.com/gpu-mem", "4k"));
    });
    assert_eq!(line.status, CheckStatus::Pass, "{line:?}");
}

/// Only a pod that still waits for the resource counts.
#[test]
fn a_resource_of_no_node_is_a_warning() {
    let line = said("K13", |cluster| cluster.pods.push(waiting("tutorial", "nvidia.com/gpu", "1")));
    assert_eq!(line.status, CheckStatus::Warn);
    assert_eq!(line.found, "ml/tutorial requests nvidia.com/gpu, which no node offers");
    assert!(
        line.fix.as_deref().is_some_and(|fix| fix.contains("aliyun.com/gpu-mem: N")),
        "{line:?}"
    );
    let line = said("K13", |cluster| {
        cluster.nodes[1].status.capacity.insert("nvidia.com/gpu", "2");
        cluster.pods.push(waiting("tutorial", "nvidia.com/gpu", "1"));
    });
    assert_eq!((line.status, line.found.as_str()), (CheckStatus::Pass, "2 pods with GPUs"));
    // The pod got its GPU before the device plugin was removed.
    let line = said("K13", |cluster| cluster.pods.push(asking("runs", "nvidia.com/gpu", "1")));
    assert_eq!(line.status, CheckStatus::Pass, "{line:?}");
}

#[test]
fn an_init_container_is_looked_at_as_the_others_are() {
    let mut init = pod("init", "busybox");
    init.spec.init_containers = asking("x", "aliyun.com/gpu-count", "1").spec.containers;
    let line = said("K13", |cluster| cluster.pods.push(init));
    assert!(line.found.contains("ml/init requests only aliyun.com/gpu-count"), "{line:?}");
    let mut init = pod("init", "busybox");
    init.spec.init_containers = with_variable(pod("x", "y"), "all").spec.containers;
    let line = said("K14", |cluster| cluster.pods.push(init));
    assert!(line.found.contains("ml/init (all)"), "{line:?}");
}

#[test]
fn pods_that_are_not_judged_are_named_with_the_reason() {
    let line = said("K14", |cluster| {
        let granted = granted(with_variable(asking("shared", "aliyun.com/gpu-mem", "3"), "all"));
        let mut caretaker = with_variable(pod("exporter", "dcgm"), "all");
        caretaker.metadata.namespace = "gpu-operator".to_owned();
        let mut elsewhere = with_variable(pod("mapped", "x"), "");
        elsewhere.spec.containers[0].env[0].from_elsewhere = true;
        let mut ended = with_variable(pod("ended", "x"), "all");
        ended.status.phase = "Succeeded".to_owned();
        cluster.pods.extend([granted, caretaker, elsewhere, ended]);
    });
    assert_eq!(line.status, CheckStatus::Pass);
    assert_eq!(
        line.found,
        "3 pods checked; not checked: ml/shared (Divvy granted the GPU, and the grant replaces the variable); \
         gpu-operator/exporter (the namespace is for components that manage GPUs); \
         ml/mapped (the value comes from a ConfigMap, a Secret, or a field, which is not read); ml/ended (ended)"
    );
    let line = said("K15", |cluster| {
        let mut caretaker = pod("exporter", "nvcr.io/nvidia/k8s/dcgm-exporter");
        caretaker.metadata.namespace = "gpu-operator".to_owned();
        cluster.pods.push(caretaker);
    });
    assert!(
        line.found
            .starts_with("3 pods on 2 nodes with GPUs checked; not checked: gpu-operator/exporter ("),
        "{line:?}"
    );
}

/// A grant replaces the variable only in the containers that request GPU memory.
#[test]
fn a_container_without_a_grant_keeps_its_variable() {
    let line = said("K14", |cluster| {
        let mut two = granted(asking("two", "aliyun.com/gpu-mem", "3"));
        two.spec
            .containers
            .push(with_variable(pod("x", "y"), "all").spec.containers.remove(0));
        cluster.pods.push(two);
    });
    assert_eq!(line.status, CheckStatus::Warn, "{line:?}");
    assert!(line.found.contains("ml/two (all)"), "{line:?}");
}

#[test]
fn only_pods_that_failed_admission_should_be_deleted() {
    let line = said("K16", |cluster| {
        for (namespace, name, reason) in [
            ("ml", "a", "UnexpectedAdmissionError"),
            ("web", "c", "UnexpectedAdmissionError"),
            ("ml", "b", "UnexpectedAdmissionError"),
            ("ml", "precious", "Error"),
        ] {
            let mut failed = pod(name, "x");
            failed.metadata.namespace = namespace.to_owned();
            (failed.status.phase, failed.status.reason) = ("Failed".to_owned(), reason.to_owned());
            cluster.pods.push(failed);
        }
    });
    let fix = line.fix.unwrap_or_default();
    assert!(
        fix.starts_with("kubectl delete pod -n ml a b; kubectl delete pod -n web c. "),
        "{fix}"
    );
    assert!(!fix.contains("precious") && !fix.contains("field-selector"), "{fix}");
}

#[test]
fn a_waiting_pod_names_its_untolerated_taint() {
    // The other node has no taint, but also no free memory.
    let line = said("K09", |cluster| {
        cluster.daemon_sets[0].spec.template.spec.tolerations = vec![Toleration {
            key: "nvidia.com/gpu".to_owned(),
            operator: "Exists".to_owned(),
            ..Toleration::default()
        }];
        cluster.nodes[1].spec.taints = taint("nvidia.com/gpu");
        cluster.pods.push(waiting("patient", "aliyun.com/gpu-mem", "8"));
    });
    assert_eq!(line.status, CheckStatus::Warn, "{line:?}");
    assert_eq!(
        line.found,
        "pod ml/patient waits and does not tolerate the taint of gpu-2 (nvidia.com/gpu:NoSchedule)"
    );
    assert!(
        line.fix
            .is_some_and(|fix| fix.contains("key: nvidia.com/gpu, operator: Exists"))
    );
}

/// The pod would not run on the node without the taint either.
#[test]
fn an_unsuitable_nodes_taint_blocks_no_pod() {
    let tolerant = Toleration {
        operator: "Exists".to_owned(),
        ..Toleration::default()
    };
    let line = said("K09", |cluster| {
        cluster.daemon_sets[0].spec.template.spec.tolerations = vec![tolerant.clone()];
        cluster.nodes[1].spec.taints = taint("team");
        let mut elsewhere = waiting("elsewhere", "aliyun.com/gpu-mem", "8");
        elsewhere.spec.node_selector = map(&[("zone", "a")]);
        let other = waiting("other", "nvidia.com/gpu", "1");
        let mut ready = waiting("ready", "aliyun.com/gpu-mem", "8");
        ready.spec.tolerations = vec![tolerant];
        let too_large = waiting("large", "aliyun.com/gpu-mem", "81");
        cluster.pods.extend([elsewhere, other, ready, too_large]);
    });
    assert_eq!(line.status, CheckStatus::Pass, "{line:?}");
    assert_eq!(line.found, "2 nodes, 2 with GPUs; 4 pods wait for a GPU");
}

/// After `kubeadm init`, a control plane is the only node of its cluster. Its taint also keeps off an agent that is intended to
/// run there.
#[test]
fn a_control_plane_taint_counts_for_intended_agents() {
    let control_plane =
        |cluster: &mut ClusterFacts| cluster.nodes[1].spec.taints = taint("node-role.kubernetes.io/control-plane");
    let line = said("K09", control_plane);
    assert_eq!(line.status, CheckStatus::Fail, "{line:?}");
    let line = said("K09", |cluster| {
        control_plane(cluster);
        cluster.daemon_sets[0].spec.template.spec.node_selector = map(&[("kubernetes.io/os", "linux")]);
    });
    assert_eq!(
        line.status,
        CheckStatus::Pass,
        "the DaemonSet selects every node, so control planes do not count: {line:?}"
    );
}

#[test]
fn a_lost_agent_label_names_node_and_command() {
    type Sign = fn(&mut ClusterFacts);
    let signs: [(Sign, &str); 3] = [
        (
            |cluster| cluster.nodes[1].status.capacity.insert("aliyun.com/gpu-mem", "0"),
            "its capacity has aliyun.com/gpu-mem: 0",
        ),
        (
            |cluster| publish(cluster, 1, 1024),
            "it has the annotation divvy.dev/inventory",
        ),
        (
            |cluster| {
                let mut bound = granted(asking("bound", "aliyun.com/gpu-mem", "3"));
                bound.spec.node_name = Some("gpu-2".to_owned());
                cluster.pods.push(bound);
            },
            "pods with a Divvy allocation are bound to it",
        ),
    ];
    for (sign, said_of_it) in signs {
        let line = said("K07", |cluster| {
            let node = &mut cluster.nodes[1];
            node.metadata.labels = map(&[("kubernetes.io/os", "linux")]);
            (node.status.capacity, node.status.allocatable) = (map(&[]), map(&[]));
            sign(cluster);
        });
        assert_eq!(line.status, CheckStatus::Warn, "{line:?}");
        assert_eq!(
            line.found,
            format!(
                "node gpu-2 lacks the label divvy.dev/gpu=true that DaemonSet divvy-system/divvy-agent selects, so no agent runs there, although {said_of_it}"
            )
        );
        let fix = line.fix.unwrap_or_default();
        assert!(fix.starts_with("kubectl label node gpu-2 divvy.dev/gpu=true"), "{fix}");
    }
    // A node without GPUs needs no label.
    let line = said("K07", |cluster| {
        let node = &mut cluster.nodes[1];
        node.metadata.labels = map(&[]);
        (node.status.capacity, node.status.allocatable) = (map(&[]), map(&[]));
    });
    assert_eq!(line.status, CheckStatus::Pass, "{line:?}");
}

#[test]
fn the_other_plugin_is_deleted_by_its_own_name() {
    let line = said("K04", |cluster| {
        for node in &mut cluster.nodes {
            node.status.allocatable.insert("nvidia.com/gpu", "2");
        }
        cluster
            .daemon_sets
            .push(plugin("nvdp", "nvcr.io/nvidia/k8s-device-plugin:v0.17.1"));
    });
    assert!(
        line.found
            .starts_with("nodes gpu-1, gpu-2 offer aliyun.com/gpu-mem and nvidia.com/gpu"),
        "{line:?}"
    );
    assert!(
        line.fix
            .is_some_and(|fix| fix.starts_with("kubectl delete ds -n divvy-system nvdp"))
    );
}

/// Divvy's agent may offer its GPUs both in shares and as a whole. A second plugin on the same cluster is reported.
#[test]
fn a_node_whose_gpus_divvy_offers_in_both_ways_has_one_plugin() {
    let both = |cluster: &mut ClusterFacts| {
        for node in &mut cluster.nodes {
            node.status.allocatable.insert("nvidia.com/gpu", "2");
            let mut object = divvy_testkit::nodes::divvy_node("n", &[16]);
            divvy_testkit::nodes::offer_whole(&mut object);
            let inventory = object.inventory.and_then(Result::ok).expect("an inventory");
            node.metadata.annotations.insert("divvy.dev/inventory", inventory.to_json());
        }
    };
    let line = said("K04", both);
    assert_eq!(line.status, CheckStatus::Pass, "{line:?}");
    let line = said("K04", |cluster| {
        both(cluster);
        let nvidia = plugin("nvdp", "nvcr.io/nvidia/k8s-device-plugin:v0.17.1");
        cluster.daemon_sets.push(nvidia);
    });
    assert_eq!(line.status, CheckStatus::Warn, "{line:?}");
    assert!(
        line.found
            .contains("nvidia.com/gpu is of the one that registered last (Divvy offers it on gpu-1, gpu-2)"),
        "{line:?}"
    );
}

/// The agent shares a GPU and a MIG device, and offers them as a whole in one way. What it does not offer is of another plugin.
#[test]
fn unoffered_mig_devices_belong_to_another_plugin() {
    let found = |whole: [Option<&str>; 2], profile: Option<&str>, resource: &'static str| {
        let line = said("K04", |cluster| {
            let node = &mut cluster.nodes[1];
            node.status.allocatable.insert(resource, "2");
            let mut object = divvy_testkit::nodes::divvy_node("n", &[16, 16]);
            let inventory = object.inventory.as_mut().and_then(|inventory| inventory.as_mut().ok());
            let inventory = inventory.expect("an inventory");
            for (gpu, resource) in inventory.gpus.iter_mut().zip(whole) {
                gpu.whole = resource.and_then(divvy_model::WholeKind::of_resource);
            }
            inventory.gpus[1].partition = profile.map(|profile| divvy_model::Partition {
                parent: "GPU-x".to_owned(),
                profile: profile.to_owned(),
            });
            node.metadata.annotations.insert("divvy.dev/inventory", inventory.to_json());
        });
        (line.status == CheckStatus::Fail).then_some(line.found)
    };
    let (gpu, small, large) = ("nvidia.com/gpu", "nvidia.com/mig-1g.5gb", "nvidia.com/mig-3g.20gb");
    let of_another = |resource: &str| Some(format!("node gpu-2 offers aliyun.com/gpu-mem and {resource}"));
    let mixed = [Some(gpu), Some(small)];
    assert_eq!(found(mixed, Some("1g.5gb"), gpu), None);
    assert_eq!(found(mixed, Some("1g.5gb"), small), None);
    assert_eq!(found(mixed, Some("1g.5gb"), large), of_another(large));
    assert_eq!(
        found(mixed, Some("1g.5gb"), "nvidia.com/gpu.shared"),
        of_another("nvidia.com/gpu.shared")
    );
    // The strategy single, and shares only.
    assert_eq!(found([Some(gpu); 2], Some("1g.5gb"), small), of_another(small));
    assert_eq!(found([None; 2], Some("1g.5gb"), small), of_another(small));
    assert_eq!(found([None, Some(small)], Some("1g.5gb"), gpu), of_another(gpu));
    // Without a MIG strategy, the agent does not use the GPU that is divided.
    assert_eq!(found([None; 2], None, small), None);
    assert_eq!(found([None; 2], None, gpu), of_another(gpu));
}

/// Other nodes still offer the resource.
#[test]
fn a_node_that_offers_nothing_now_is_named() {
    let line = said("K03", |cluster| {
        let status = &mut cluster.nodes[1].status;
        (status.capacity, status.allocatable) = (map(&[("aliyun.com/gpu-mem", "0")]), map(&[("aliyun.com/gpu-mem", "0")]));
    });
    assert_eq!(
        (line.status, line.found.as_str()),
        (CheckStatus::Warn, "gpu-2 aliyun.com/gpu-mem: 0")
    );
}

/// A check cannot run without the lists that it needs, and does not depend on the other lists.
#[test]
fn a_refused_list_blocks_only_its_checks() {
    for (plural, ids) in [
        (
            "nodes",
            &["K01", "K03", "K04", "K05", "K06", "K07", "K08", "K09", "K13", "K15", "K19"][..],
        ),
        ("pods", &["K07", "K08", "K09", "K13", "K14", "K15", "K16", "R14"]),
        ("daemonsets", &["K04", "K07", "K09"]),
        ("runtimeclasses", &["R14"]),
    ] {
        for id in [
            "K01", "K03", "K04", "K05", "K06", "K07", "K08", "K09", "K13", "K14", "K15", "K16", "K19", "R14",
        ] {
            let line = said(id, |cluster| {
                drop(cluster.refused.insert(plural.to_owned(), format!("{plural} is forbidden")))
            });
            assert_eq!(line.could_not_look(), ids.contains(&id), "{id} without {plural}: {line:?}");
            assert!(
                !line.could_not_look() || line.found == format!("{plural} is forbidden"),
                "{line:?}"
            );
        }
    }
}

/// The finding repeats what the agent of each such node says.
#[test]
fn a_node_without_driver_libraries_is_named() {
    let line = said("K19", |cluster| {
        publish(cluster, 0, 1024);
        let text =
            r#"{"v":1,"agent":"0.1.0","driver":"550.54.15","unitMiB":1024,"driverTrouble":"no CDI spec; type this","gpus":[]}"#;
        cluster.nodes[1]
            .metadata
            .annotations
            .insert("divvy.dev/inventory", text.to_owned());
    });
    assert_eq!(
        (line.status, line.found.as_str()),
        (CheckStatus::Warn, "node gpu-2: no CDI spec; type this")
    );
    let line = said("K19", |cluster| publish(cluster, 0, 1024));
    assert_eq!((line.status, line.found.as_str()), (CheckStatus::Pass, "1 node"));
}
