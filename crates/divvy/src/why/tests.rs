use divvy_explainer::from_objects;
use divvy_host::plain;
use divvy_kube::convert;
use divvy_kube::objects::{NodeObject, PodObject};
use divvy_model::{MemoryUnit, Vendor};
use divvy_placement::Ledger;
use divvy_policy::Policy;
use divvy_why::{Answer, Change, ClusterSnapshot, Hold, Obstacle};
use serde_json::{Value, json};

use super::*;

fn node(change: impl Fn(&mut Value)) -> NodeObject {
    let amounts = json!({"aliyun.com/gpu-mem": "16", "aliyun.com/gpu-count": "1", "cpu": "8", "memory": "64Gi", "pods": "110"});
    let mut node = json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1", "labels": {"disk": "hdd"}}, "spec": {},
        "status": {"capacity": amounts, "allocatable": amounts},
    });
    change(&mut node);
    serde_json::from_value(node).expect("a node")
}

fn pod(units: u64, change: impl Fn(&mut Value)) -> PodObject {
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "q", "namespace": "default", "uid": "u-q"},
        "spec": {"containers": [{"name": "main", "resources": {"limits": {"aliyun.com/gpu-mem": units}}}]},
    });
    change(&mut pod);
    serde_json::from_value(pod).expect("a pod")
}

/// Return a pod that runs on a GPU of n1.
fn runs(name: &'static str, index: &'static str, units: u64, change: impl Fn(&mut Value)) -> PodObject {
    pod(units, move |pod| {
        pod["metadata"]["name"] = json!(name);
        pod["metadata"]["uid"] = json!(format!("u-{name}"));
        pod["metadata"]["annotations"] = json!({"ALIYUN_COM_GPU_MEM_IDX": index, "ALIYUN_COM_GPU_MEM_POD": units.to_string(), "ALIYUN_COM_GPU_MEM_ASSUME_TIME": "1"});
        pod["spec"]["nodeName"] = json!("n1");
        pod["status"] = json!({"phase": "Running"});
        change(pod);
    })
}

fn snapshot(nodes: &[NodeObject], pods: &[PodObject]) -> ClusterSnapshot {
    let mut ledger = Ledger::new(MemoryUnit::GIB);
    ledger.replace_nodes(&nodes.iter().map(convert::node).collect::<Vec<_>>());
    ledger.replace_pods(pods.iter().map(|pod| convert::pod(pod).expect("readable")));
    ClusterSnapshot::new(
        ledger,
        nodes.iter().map(from_objects::site).collect(),
        pods.iter().cloned().filter_map(from_objects::tenant).collect(),
    )
}

/// Return the answer about a pod in a cluster of these nodes and other pods.
fn explained(nodes: &[NodeObject], object: &PodObject, others: &[PodObject]) -> Answer {
    let all: Vec<PodObject> = others.iter().chain([object]).cloned().collect();
    divvy_why::answer(&snapshot(nodes, &all), &from_objects::wants(object).expect("readable"), false)
}

fn shown(answer: &Answer) -> String {
    text(answer, AnswerStyle::default())
}

#[test]
fn what_a_pod_asks_for_moves_no_cursor() {
    for (model, shows) in [
        ("x\u{202e}y", "like x\\u{202e}y,"),
        ("x\n\u{1b}[2J", "\"x\\n\\u{1b}[2J\" is not a pattern"),
    ] {
        let wants = |pod: &mut Value| pod["metadata"]["annotations"] = json!({"divvy.dev/gpu-model": model});
        let text = shown(&explained(&[node(|_| ())], &pod(4, wants), &[]));
        assert!(text.starts_with("Pod default/q waits") && text.contains(shows), "{text}");
        assert_eq!(plain(&text), text);
    }
}

/// The only node has one obstacle. The answer names the obstacle, and suggests only a change that helps, if there is one.
#[test]
fn what_is_in_the_way_is_named_and_only_what_helps_is_proposed() {
    struct Case {
        name: &'static str,
        node: fn(&mut Value),
        pod: fn(&mut Value),
        others: Vec<PodObject>,
        says: &'static str,
        proposes: &'static str,
    }
    let case = |name, node, pod, says, proposes| Case {
        name,
        node,
        pod,
        others: Vec::new(),
        says,
        proposes,
    };
    let mut cases = vec![
        case(
            "nothing",
            |_| (),
            |_| (),
            "node n1 has room for that. No scheduler has tried to place it yet",
            "-",
        ),
        case(
            "a label that the node has",
            |_| (),
            |pod| pod["spec"]["nodeSelector"] = json!({"disk": "hdd"}),
            "node n1 has room for that",
            "-",
        ),
        case(
            "another value of a label",
            |_| (),
            |pod| pod["spec"]["nodeSelector"] = json!({"disk": "ssd"}),
            "nodeSelector asks for disk=ssd, and the node has disk=hdd",
            "Remove disk=ssd from the pod's nodeSelector.",
        ),
        case(
            "no such label",
            |_| (),
            |pod| pod["spec"]["nodeSelector"] = json!({"zone": "a"}),
            "nodeSelector asks for zone=a, and the node lacks that label",
            "kubectl label node n1 zone=a",
        ),
        case(
            "a label of Kubernetes'",
            |_| (),
            |pod| pod["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": "n9"}),
            "and the node lacks that label",
            "Remove kubernetes.io/hostname=n9 from the pod's nodeSelector.",
        ),
        case(
            "a label that others write",
            |_| (),
            |pod| pod["spec"]["nodeSelector"] = json!({"nvidia.com/gpu.product": "NVIDIA-H100"}),
            "and the node lacks that label",
            "Remove nvidia.com/gpu.product=NVIDIA-H100 from the pod's nodeSelector.",
        ),
        case(
            "four things",
            |node| node["spec"] = json!({"unschedulable": true, "taints": [{"key": "team", "effect": "NoSchedule"}]}),
            |pod| pod["spec"]["nodeSelector"] = json!({"zone": "a", "disk": "ssd"}),
            "asks for disk=ssd, and the node has disk=hdd, and 3 more things are in the way.",
            "-",
        ),
        case(
            "an empty node affinity",
            |_| (),
            |pod| {
                pod["spec"]["affinity"] =
                    json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{}]}}});
            },
            "the pod's node affinity has only empty terms, which match no node",
            "-",
        ),
        case(
            "the agent has ended in order",
            |node| {
                node["metadata"]["annotations"] = json!({"divvy.dev/inventory": r#"{"v":1,"agent":"0","driver":"1","unitMiB":1024,"unschedulable":true,"gpus":[]}"#});
                node["status"]["allocatable"]["aliyun.com/gpu-mem"] = json!("0");
            },
            |_| (),
            "so no Divvy agent runs there, or none is ready",
            "-",
        ),
        case(
            "several GPUs where there is one",
            |node| {
                node["metadata"]["annotations"] = json!({"divvy.dev/inventory": r#"{"v":1,"agent":"0","driver":"1","unitMiB":1024,"gpus":[
                    {"uuid":"GPU-1","index":0,"minor":0,"model":"T4","cc":"7.5","totalMiB":16384,"units":16,"health":"ok"}]}"#});
            },
            |pod| {
                pod["metadata"]["annotations"] = json!({"divvy.dev/gpus": "2"});
            },
            "asks for 4 GiB on each of 2 GPUs, and no node has as many",
            "-",
        ),
        case(
            "two labels",
            |_| (),
            |pod| pod["spec"]["nodeSelector"] = json!({"zone": "a", "disk": "ssd"}),
            "asks for disk=ssd, and the node has disk=hdd, and the pod's nodeSelector asks for zone=a",
            "-",
        ),
        case(
            "node affinity",
            |_| (),
            |pod| {
                pod["spec"]["affinity"] = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "disk", "operator": "In", "values": ["ssd", "nvme"]}]}]}}});
            },
            "it does not match the pod's node affinity (disk in (ssd, nvme))",
            "-",
        ),
        case(
            "a taint",
            |node| node["spec"]["taints"] = json!([{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]),
            |_| (),
            "the pod does not tolerate its taint nvidia.com/gpu:NoSchedule",
            "add a toleration to it: {key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}",
        ),
        case(
            "a taint with a value",
            |node| node["spec"]["taints"] = json!([{"key": "team", "value": "red", "effect": "NoExecute"}]),
            |_| (),
            "taint team=red:NoExecute",
            "{key: team, value: \"red\", effect: NoExecute}",
        ),
        case(
            "a taint that only asks",
            |node| node["spec"]["taints"] = json!([{"key": "team", "value": "red", "effect": "PreferNoSchedule"}]),
            |_| (),
            "node n1 has room for that",
            "-",
        ),
        case(
            "a taint of Kubernetes'",
            |node| node["spec"]["taints"] = json!([{"key": "node.kubernetes.io/disk-pressure", "effect": "NoSchedule"}]),
            |_| (),
            "taint node.kubernetes.io/disk-pressure:NoSchedule",
            "-",
        ),
        case(
            "cordoned",
            |node| node["spec"]["unschedulable"] = json!(true),
            |_| (),
            "but it is cordoned",
            "kubectl uncordon n1",
        ),
        case(
            "cordoned and tainted",
            |node| node["spec"] = json!({"unschedulable": true, "taints": [{"key": "team", "effect": "NoSchedule"}]}),
            |_| (),
            "taint team:NoSchedule, and it is cordoned",
            "-",
        ),
        case(
            "not ready",
            |node| node["status"]["conditions"] = json!([{"type": "Ready", "status": "Unknown"}]),
            |_| (),
            "it is not ready",
            "-",
        ),
        case(
            "the agent is away",
            |node| node["status"]["allocatable"]["aliyun.com/gpu-mem"] = json!("0"),
            |_| (),
            "no node that it can use now offers it a GPU",
            "-",
        ),
        case(
            "CPU",
            |_| (),
            |pod| pod["spec"]["containers"][0]["resources"]["requests"] = json!({"cpu": "9"}),
            "it has 8 cpu in all, and the pod asks for 9",
            "Ask for 8 cpu or less.",
        ),
        case(
            "a whole GPU besides",
            |_| (),
            |pod| pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] = json!("1"),
            "the pod also requests nvidia.com/gpu; a pod gets either shared memory or whole GPUs of one kind: remove one of the two",
            "-",
        ),
        case(
            "a scheduling gate",
            |_| (),
            |pod| pod["spec"]["schedulingGates"] = json!([{"name": "kueue.x-k8s.io/admission"}]),
            "until its scheduling gate kueue.x-k8s.io/admission has been removed",
            "-",
        ),
        case(
            "deleted",
            |_| (),
            |pod| pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z"),
            "the pod is being deleted",
            "-",
        ),
        case(
            "a suffix",
            |_| (),
            |pod| pod["spec"]["containers"][0]["resources"]["limits"]["aliyun.com/gpu-mem"] = json!("3Gi"),
            "takes no suffix: 3Gi is read as more units than any GPU has; write 3",
            "Write 3 (aliyun.com/gpu-mem: 3). Node n1 has room for that.",
        ),
        case(
            "too much",
            |_| (),
            |pod| pod["spec"]["containers"][0]["resources"]["limits"]["aliyun.com/gpu-mem"] = json!("17"),
            "asks for 17 GiB on one GPU, and no GPU is that large, even empty",
            "Ask for 16 GiB or less (aliyun.com/gpu-mem: 16).",
        ),
        case(
            "a volume claim",
            |_| (),
            |pod| pod["spec"]["volumes"] = json!([{"name": "data", "persistentVolumeClaim": {"claimName": "data-0"}}]),
            "Divvy could not check everything that decides where it may run",
            "-",
        ),
        case(
            "affinity to a pod that is not there",
            |_| (),
            |pod| {
                pod["spec"]["affinity"] = json!({"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
                    {"topologyKey": "disk", "labelSelector": {"matchLabels": {"app": "db"}}}]}});
            },
            "the pod's podAffinity requires a pod that is not there (per disk)",
            "-",
        ),
        case(
            "spread over a label that the node lacks",
            |_| (),
            |pod| {
                pod["spec"]["topologySpreadConstraints"] = json!([{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule",
                    "labelSelector": {"matchLabels": {"app": "db"}}}]);
            },
            "the pod must be spread over zone, but the node lacks that label",
            "-",
        ),
    ];
    let apart = |pod: &mut Value| {
        pod["metadata"]["labels"] = json!({"app": "db"});
        pod["spec"]["affinity"] = json!({"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
            {"topologyKey": "disk", "labelSelector": {"matchLabels": {"app": "db"}}}]}});
    };
    cases.push(Case {
        others: vec![runs("a", "0", 1, apart)],
        ..case(
            "a pod that wants no other pod on its disk",
            |_| (),
            |pod| pod["metadata"]["labels"] = json!({"app": "db"}),
            "the podAntiAffinity of pod default/a, which is there, keeps this pod away (per disk)",
            "kubectl delete pod -n default a",
        )
    });
    cases.push(Case {
        others: vec![runs("a", "0", 12, |_| ())],
        ..case(
            "a full GPU",
            |_| (),
            |_| (),
            "no GPU has that much free; the most is 4 GiB, on node n1",
            "Ask for 4 GiB or less (aliyun.com/gpu-mem: 4). Node n1 has room for that now.\n  2. Wait until pod default/a (12 GiB) on node n1 \
             has ended. If it is no longer needed, delete it: kubectl delete pod -n default a",
        )
    });
    cases.push(Case {
        others: vec![runs("a", "0", 12, |_| ())],
        ..case(
            "a full GPU, and a label besides",
            |_| (),
            |pod| pod["spec"]["nodeSelector"] = json!({"disk": "ssd"}),
            "no GPU has that much free",
            "-",
        )
    });
    let of_set = |pod: &mut Value| {
        pod["metadata"]["ownerReferences"] =
            json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web", "uid": "r", "controller": true}]);
    };
    cases.push(Case {
        others: vec![runs("a", "0", 16, of_set)],
        ..case(
            "a full GPU of a ReplicaSet",
            |_| (),
            |_| (),
            "no GPU has any memory free",
            "Pod default/a (16 GiB) on node n1 is in the way. ReplicaSet web would replace it if it were deleted; scale web down so that this pod ends.",
        )
    });
    let of_job = |pod: &mut Value| {
        pod["metadata"]["ownerReferences"] =
            json!([{"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "j", "controller": true}]);
    };
    cases.push(Case {
        others: vec![runs("a", "0", 16, of_job)],
        ..case(
            "a full GPU of a Job",
            |_| (),
            |_| (),
            "no GPU has any memory free",
            "has ended. Job train would replace it if it were deleted.",
        )
    });
    cases.push(Case {
        others: vec![runs("a", "0", 16, |pod| {
            pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z")
        })],
        ..case(
            "a GPU of a pod that is going",
            |_| (),
            |_| (),
            "no GPU has any memory free",
            "Wait. Pod default/a is being deleted, and node n1 has room when its containers have ended.",
        )
    });
    for case in cases {
        let answer = explained(&[node(case.node)], &pod(8, case.pod), &case.others);
        let text = shown(&answer);
        assert!(text.contains(case.says), "{}: {text}", case.name);
        match case.proposes {
            "-" => assert!(answer.suggestions.is_empty(), "{}: {:?}", case.name, answer.suggestions),
            proposes => assert!(text.contains(proposes), "{}: no {proposes:?} in\n{text}", case.name),
        }
        assert!(!text.contains("kubectl label node n1 kubernetes.io"), "{}: {text}", case.name);
    }
}

#[test]
fn a_pod_is_told_to_ask_for_another_vendors_shares() {
    for (vendor, model) in [(Vendor::Amd, "AMD Instinct MI210"), (Vendor::Intel, "Intel GPU 0xe211")] {
        let (name, title) = (vendor.name(), vendor.title());
        let gpu = |index: usize| {
            json!({"vendor": name, "uuid": format!("0x{index}"), "index": index, "nodes": [], "model": model,
                "totalMiB": 65520, "units": 63, "whole": true, "health": "ok"})
        };
        let inventory = json!({"v": 2, "agent": "0.2.0", "drivers": {name: "6.10.5"}, "unitMiB": 1024, "gpus": [gpu(0), gpu(1)]});
        let other = node(move |node| {
            let amounts = json!({"aliyun.com/gpu-mem": "126", "aliyun.com/gpu-count": "2", vendor.whole_resource(): "2", "cpu": "8", "memory": "64Gi", "pods": "110"});
            node["metadata"]["name"] = json!("n2");
            node["metadata"]["annotations"] = json!({"divvy.dev/inventory": inventory.to_string()});
            node["status"] = json!({"capacity": amounts, "allocatable": amounts});
        });
        let (only, both) = ([other.clone()], [node(|_| ()), other]);
        let other = "n2: it shares GPUs of another vendor, and the pod gets shares of NVIDIA GPUs; the annotation divvy.dev/gpu-vendor selects the vendor";
        let too_large = format!("64 GiB on a GPU from {title}, and no GPU is that large");
        let no_cores = format!("no GPU from {title} on which compute time is limited (gpu-cores: 30); it has 2 {model}");
        for (nodes, units, annotations, says) in [
            (
                &only[..],
                8,
                json!({}),
                &["8 GiB on one GPU, and no node shares NVIDIA GPUs.", other][..],
            ),
            (
                &both,
                60,
                json!({}),
                &["60 GiB on one GPU, and no NVIDIA GPU is that large, even empty.", other],
            ),
            (&only, 64, json!({"divvy.dev/gpu-vendor": name}), &[too_large.as_str()]),
            (
                &only,
                8,
                json!({"divvy.dev/gpu-vendor": name, "divvy.dev/gpu-cores": "30"}),
                &[no_cores.as_str()],
            ),
            (
                &only,
                8,
                json!({"divvy.dev/gpu-vendor": name}),
                &["node n2 has room for that"],
            ),
        ] {
            let pod = pod(units, |pod| pod["metadata"]["annotations"] = annotations.clone());
            let text = shown(&explained(nodes, &pod, &[]));
            let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
            for said in says {
                assert!(words.contains(said), "{said}:\n{text}");
            }
        }
    }
}

#[test]
fn a_pod_that_waits_for_whole_gpus_is_told_how_many_are_free() {
    let gpu = |index: usize, health: &str| {
        json!({"vendor": "amd", "uuid": format!("0x{index}"), "index": index, "nodes": [], "model": "AMD Instinct MI210",
            "totalMiB": 65520, "units": 0, "whole": true, "health": health})
    };
    let amd = |name: &'static str, health: [&'static str; 2]| {
        let gpus = [gpu(0, health[0]), gpu(1, health[1])];
        let inventory = json!({"v": 2, "agent": "0.2.0", "drivers": {"amd": "6.10.5"}, "unitMiB": 1024, "gpus": gpus});
        node(move |node| {
            let amounts = json!({"amd.com/gpu": "2", "cpu": "8", "memory": "64Gi", "pods": "110"});
            node["metadata"]["name"] = json!(name);
            node["metadata"]["annotations"] = json!({"divvy.dev/inventory": inventory.to_string()});
            node["status"] = json!({"capacity": amounts, "allocatable": amounts});
        })
    };
    let asks = |name: &'static str, gpus: u64, on: Option<&'static str>| {
        pod(0, move |pod| {
            pod["metadata"]["name"] = json!(name);
            pod["metadata"]["uid"] = json!(format!("u-{name}"));
            pod["spec"]["containers"][0]["resources"]["limits"] = json!({"amd.com/gpu": gpus});
            if let Some(node) = on {
                pod["spec"]["nodeName"] = json!(node);
                pod["status"] = json!({"phase": "Running"});
            }
        })
    };
    let well = ["ok", "ok"];
    let full = asks("full", 2, Some("n2"));
    let check = |nodes: &[NodeObject], gpus: u64, others: &[PodObject], says: &[&str]| {
        let text = shown(&explained(nodes, &asks("q", gpus, None), others));
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        for said in says {
            assert!(words.contains(said), "{said}:\n{text}");
        }
        assert!(!text.contains("gpu-mem") && !text.contains("MiB"), "{text}");
    };
    let shared = node(|_| ());
    check(
        &[amd("n2", well), shared.clone()],
        1,
        std::slice::from_ref(&full),
        &[
            "waits: it asks for 1 whole AMD GPU (amd.com/gpu), and no node has a free AMD GPU.",
            "n2: no free AMD GPU (2 of 2 in use)",
            "no AMD GPUs that Divvy offers",
            "GPU 1 (AMD Instinct MI210) is not allocated",
            "pod default/full on node n2",
        ],
    );
    check(
        &[amd("n2", ["ok", "failed"])],
        1,
        &[asks("one", 1, Some("n2"))],
        &["n2: no free AMD GPU (1 of 2 in use, 1 of 2 not healthy)"],
    );
    check(
        &[amd("n2", well)],
        4,
        &[],
        &["n2: 2 of 2 AMD GPUs are free, and 4 are needed"],
    );
    check(&[amd("n2", well)], 2, &[], &["node n2 has room for that"]);
    let text = shown(&explained(&[shared], &asks("q", 1, None), &[]));
    assert!(text.contains("amd.com/gpu is offered by no node"), "{text}");
    let text = shown(&explained(&[amd("n2", well)], &full, &[]));
    assert!(text.contains("the kubelet chose its GPUs"), "{text}");
}

/// All obstacles of a node are found. Those that the user can least change come first.
#[test]
fn a_node_with_several_obstacles_shows_them_all() {
    let node = node(|node| node["spec"] = json!({"unschedulable": true, "taints": [{"key": "team", "effect": "NoSchedule"}]}));
    let asks = pod(8, |pod| pod["spec"]["nodeSelector"] = json!({"disk": "ssd"}));
    let answer = explained(&[node], &asks, &[runs("a", "0", 12, |_| ())]);
    let kinds: Vec<&Obstacle> = answer.closest[0].obstacles.iter().map(|obstacle| &obstacle.what).collect();
    assert!(
        matches!(
            kinds.as_slice(),
            [
                Obstacle::NodeSelector { .. },
                Obstacle::Taint { .. },
                Obstacle::Cordoned,
                Obstacle::GpuMemory { .. }
            ]
        ),
        "{kinds:?}"
    );
    assert!(answer.suggestions.is_empty());
}

#[test]
fn units_the_kubelet_does_not_offer_are_never_free() {
    // A GPU failed: 8 of 16 units are offered, and a pod whose allocation is not visible requests 4.
    let nodes = [node(|node| node["status"]["allocatable"]["aliyun.com/gpu-mem"] = json!("8"))];
    let other = pod(4, |pod| {
        pod["metadata"]["name"] = json!("other");
        pod["metadata"]["uid"] = json!("u-other");
        pod["spec"]["nodeName"] = json!("n1");
    });
    let answer = explained(&nodes, &pod(6, |_| ()), std::slice::from_ref(&other));
    assert!(answer.message.contains("counts 4 of the 8 units"), "{}", answer.message);
    let expected = Change::AskFor { units: 4 };
    assert!(
        answer.suggestions.iter().any(|found| found.change == expected),
        "{:?}",
        answer.suggestions
    );
    assert!(explained(&nodes, &pod(4, |_| ()), &[other]).closest[0].fits);
}

#[test]
fn a_pod_whose_scheduler_never_looked_is_told_so() {
    let told = |name: &'static str, status: Value| {
        let object = pod(8, move |pod| {
            pod["spec"]["schedulerName"] = json!(name);
            pod["status"] = status.clone();
        });
        shown(&explained(&[node(|_| ())], &object, &[])).contains(&format!("its schedulerName is {name:?}"))
    };
    assert!(told("divvy-scheduler", json!({})));
    assert!(!told("default-scheduler", json!({})));
    let refused = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no"});
    assert!(!told("divvy-scheduler", json!({"conditions": [refused]})));
}

/// kube-scheduler decides about preemption by sums over whole nodes, and never preempts for a pod whose priority class forbids
/// it. The answer gives the true reason.
#[test]
fn why_a_higher_priority_evicts_no_pod_is_told() {
    let nodes = [node(|node| {
        node["status"]["capacity"] = json!({"aliyun.com/gpu-mem": "32", "aliyun.com/gpu-count": "2"});
        node["status"]["allocatable"] = json!({"aliyun.com/gpu-mem": "32", "aliyun.com/gpu-count": "2", "pods": "110"});
    })];
    let others = [runs("a", "0", 10, |_| ()), runs("b", "1", 9, |_| ())];
    let note = |priority: i64, units: u64, policy: &'static str| {
        let object = pod(units, move |pod| {
            pod["spec"]["priority"] = json!(priority);
            pod["spec"]["preemptionPolicy"] = json!(policy);
        });
        explained(&nodes, &object, &others).notes.concat()
    };
    let lower = "The pod has priority 100, and on node n1 it would have room without default/b (priority 0). kube-scheduler evicts no pod for it: ";
    for (priority, units, policy, expected) in [
        (
            100,
            12,
            "PreemptLowerPriority",
            format!("{lower}it counts sums, and node n1 has 13 units free in all."),
        ),
        (
            100,
            12,
            "Never",
            format!("{lower}its PriorityClass says preemptionPolicy: Never."),
        ),
        (
            100,
            14,
            "Never",
            format!("{lower}its PriorityClass says preemptionPolicy: Never."),
        ),
        (0, 12, "PreemptLowerPriority", String::new()),
        (100, 14, "PreemptLowerPriority", String::new()),
        (100, 6, "Never", String::new()),
        (100, 17, "Never", String::new()),
    ] {
        assert_eq!(note(priority, units, policy), expected, "{priority}, {units}, {policy}");
    }
}

#[test]
fn an_extender_that_is_away_is_named_and_preemption_is_not() {
    let says = |message: &str| {
        let message = message.to_owned();
        let object = pod(8, move |pod| {
            pod["status"] = json!({"conditions": [
                {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message},
            ]});
        });
        explained(&[node(|_| ())], &object, &[])
    };
    let away = says(r#"Post "http://127.0.0.1:9/gpushare-scheduler/filter": dial tcp 127.0.0.1:9: connect: connection refused"#);
    assert_eq!(away.holds[0].what, Hold::ExtenderAway);
    assert!(away.message.contains("cannot reach Divvy's extender"), "{}", away.message);
    let full = says(
        "0/1 nodes are available: 1 Insufficient aliyun.com/gpu-mem. no new claims to deallocate, preemption: 0/1 nodes are \
         available: 1 Preemption is not helpful for scheduling.",
    );
    assert!(full.holds.is_empty(), "{:?}", full.holds);
    let text = shown(&full);
    assert!(
        text.contains("1 Insufficient aliyun.com/gpu-mem.\n") && !text.contains("reemption"),
        "{text}"
    );
}

/// The Node object was deleted. The kubelet has created it again, without the label of the agents' DaemonSet.
#[test]
fn a_gpu_node_without_the_agents_label_is_told() {
    let gone = node(|node| {
        node["metadata"]["annotations"] =
            json!({"divvy.dev/inventory": r#"{"v":1,"agent":"0","driver":"1","unitMiB":1024,"unschedulable":true,"gpus":[]}"#});
        node["status"]["allocatable"]["aliyun.com/gpu-mem"] = json!("0");
    });
    let cpu = node(|node| {
        node["metadata"]["name"] = json!("cpu");
        node["status"] = json!({"capacity": {"cpu": "8"}, "allocatable": {"cpu": "8"}});
    });
    let object = pod(8, |_| ());
    let mut snapshot = snapshot(&[gone, cpu], std::slice::from_ref(&object));
    snapshot.agent_selector = Some([("gpushare".to_owned(), "true".to_owned())].into());
    let answer = divvy_why::answer(&snapshot, &from_objects::wants(&object).expect("readable"), true);
    let said = |node: usize| answer.nodes[node].obstacles[0].message.clone();
    assert_eq!(
        answer.nodes[1].obstacles.len(),
        1,
        "nothing else needs to be said: {:?}",
        answer.nodes[1].obstacles
    );
    assert_eq!(said(0), "it offers no aliyun.com/gpu-mem");
    assert!(
        said(1).starts_with("it lacks the label gpushare=true")
            && said(1).ends_with("(to share its GPUs: kubectl label node n1 gpushare=true)"),
        "{}",
        said(1)
    );
}

#[test]
fn an_answer_about_a_large_cluster_fits_a_screen() {
    let mut nodes = Vec::new();
    let mut pods = Vec::new();
    for number in 0..400 {
        nodes.push(node(move |node| {
            node["metadata"]["name"] = json!(format!("gpu-{number:03}"));
            let resources = json!({"aliyun.com/gpu-mem": "64", "aliyun.com/gpu-count": "4", "pods": "110", "cpu": "8"});
            (node["status"]["capacity"], node["status"]["allocatable"]) = (resources.clone(), resources);
            if number % 40 == 0 {
                node["spec"]["taints"] = json!([{"key": "team", "value": "red", "effect": "NoSchedule"}]);
            }
        }));
        for index in ["0", "1", "2", "3"] {
            pods.push(runs("x", index, 10, move |pod| {
                pod["metadata"]["name"] = json!(format!("p-{number}-{index}"));
                pod["metadata"]["uid"] = json!(format!("u-{number}-{index}"));
                pod["spec"]["nodeName"] = json!(format!("gpu-{number:03}"));
            }));
        }
    }
    for number in 0..100 {
        nodes.push(node(move |node| {
            node["metadata"]["name"] = json!(format!("cpu-{number:02}"));
            node["status"] = json!({"capacity": {"cpu": "8"}, "allocatable": {"cpu": "8"}});
        }));
    }
    let answer = explained(&nodes, &pod(12, |_| ()), &pods);
    let text = text(
        &answer,
        AnswerStyle {
            width: Some(100),
            ..AnswerStyle::default()
        },
    );
    insta::assert_snapshot!(text);
    assert!(
        text.lines().count() <= 24 && text.lines().all(|line| line.chars().count() <= 100),
        "{text}"
    );
}

#[test]
fn what_the_policy_thinks_of_each_node_is_shown_with_its_terms() {
    let named = |name: &'static str, units: &'static str, gpus: &'static str| {
        convert::node(&node(move |node| {
            node["metadata"]["name"] = json!(name);
            node["status"]["capacity"] = json!({"aliyun.com/gpu-mem": units, "aliyun.com/gpu-count": gpus});
            node["status"]["allocatable"] = json!({"aliyun.com/gpu-mem": units, "cpu": "8", "memory": "64Gi", "pods": "110"});
        }))
    };
    let mut ledger = Ledger::new(MemoryUnit::GIB);
    ledger.replace_nodes(&[
        named("n1", "32", "2"),
        named("n2", "32", "2"),
        named("n3", "8", "1"),
        named("n4", "3", "1"),
    ]);
    let other = |number: u64, index: &'static str, units: u64| {
        let object = pod(units, move |pod| {
            pod["metadata"]["name"] = json!(format!("p{number}"));
            pod["metadata"]["uid"] = json!(format!("u-p{number}"));
            pod["metadata"]["annotations"] = json!({"ALIYUN_COM_GPU_MEM_IDX": index, "ALIYUN_COM_GPU_MEM_POD": units.to_string(), "ALIYUN_COM_GPU_MEM_ASSUME_TIME": "1"});
            pod["spec"]["nodeName"] = json!("n1");
        });
        convert::pod(&object).expect("readable")
    };
    let bound = other(1, "0", 10);
    ledger.replace_pods([bound.clone(), other(2, "1", 6), other(3, "1", 6)]);
    let asking = convert::pod(&pod(6, |_| ())).expect("readable");
    ledger.apply_pod(asking.clone());
    let found = placement(&ledger, &asking, Policy::Divvy);
    insta::assert_snapshot!(placement_text(&found));
    assert_eq!(found.nodes, 3, "n4 is too small");
    let json = serde_json::to_value(&found).expect("JSON");
    assert_eq!(json["best"][0]["terms"][0]["name"], "stranding");
    assert!(json["best"][0]["terms"][0]["milliGPU"].is_i64());
    // A bound pod is ranked as if it were not bound.
    let found = placement(&ledger, &bound, Policy::BestFit);
    assert_eq!((found.node.as_deref(), found.best.len()), (Some("n1"), 2));
    insta::assert_snapshot!(placement_text(&found));
    let large = convert::pod(&pod(17, |_| ())).expect("readable");
    assert!(placement_text(&placement(&ledger, &large, Policy::Divvy)).contains("sees no node with room"));
}

/// Return a node with Divvy's agent and one GPU of 16 units, on which the guard enforces shares.
fn guarding() -> NodeObject {
    let gpu = json!({"uuid": "GPU-a", "kind": "gpu", "parent": null, "index": 0, "minor": 0, "model": "T4", "totalMiB": 16384, "units": 16,
        "health": "ok", "enforcement": "guard"});
    let inventory = json!({"v": 1, "agent": "0.1.0", "driver": "550.54.15", "unitMiB": 1024, "gpus": [gpu]}).to_string();
    node(|node| node["metadata"]["annotations"] = json!({"divvy.dev/inventory": inventory}))
}

/// The answer also says how much is free and who has the rest.
#[test]
fn a_pod_without_compute_time_is_told_what_helps() {
    let busy = pod(2, |pod| {
        let share = json!([{"uuid": "GPU-a", "memMiB": 2048, "cores": 80}]);
        let allocation = json!({"v": 1, "gpus": share, "containers": {"main": share}}).to_string();
        pod["metadata"] =
            json!({"name": "busy", "namespace": "default", "uid": "u-busy", "annotations": {"divvy.dev/allocation": allocation}});
        pod["spec"]["nodeName"] = json!("n1");
        pod["status"] = json!({"phase": "Running"});
    });
    let asks = pod(3, |pod| pod["metadata"]["annotations"] = json!({"divvy.dev/gpu-cores": "30"}));
    let answer = explained(&[guarding()], &asks, std::slice::from_ref(&busy));
    insta::assert_snapshot!(text(&answer, AnswerStyle::default()));
    assert!(
        matches!(answer.suggestions[0].change, Change::AskForCores { cores: 20 }),
        "{:?}",
        answer.suggestions
    );
}

#[test]
fn a_pod_that_wants_compute_time_is_told_if_no_node_limits_it() {
    let asks = pod(3, |pod| pod["metadata"]["annotations"] = json!({"divvy.dev/gpu-cores": "30"}));
    let mut plain = guarding();
    let annotations = plain.metadata.annotations.as_mut().expect("some");
    let inventory = annotations.get_mut("divvy.dev/inventory").expect("there");
    // The driver limits only the memory.
    *inventory = inventory.replace("\"guard\"", "\"cgroup\"");
    let answer = explained(&[plain], &asks, &[]);
    insta::assert_snapshot!(text(&answer, AnswerStyle::default()));
}
