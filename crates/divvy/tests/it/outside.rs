//! Faults outside of Divvy. Each leads to a sentence that a user can act on, in an event or in `divvy why`.

use std::time::Duration;

use divvy_testbed::api::{ApiServer, ApiServerOptions, Effect, FaultRule, Match, PatchKind};
use divvy_testbed::builders::pod;
use serde_json::{Value, json};

use crate::bed::Bed;
use crate::cli::{beside, stderr, stdout};

async fn why(objects: &[(&str, Value)], args: &[&str]) -> (i32, String) {
    say("why", objects, args).await
}

/// Run a command on a cluster that contains these objects. Return its exit status and output.
async fn say(command: &str, objects: &[(&str, Value)], args: &[&str]) -> (i32, String) {
    let directory = tempfile::tempdir().expect("a directory");
    let api = ApiServer::new(ApiServerOptions::default());
    for (resource, object) in objects {
        api.create(resource, object.clone()).expect("it is made");
        // The API server sets a new pod to Pending, even if its object names another phase.
        if let (&"pods", Some(phase)) = (resource, object["status"]["phase"].as_str()) {
            let name = object["metadata"]["name"].as_str().unwrap_or_default();
            let status = json!({"status": {"phase": phase}});
            api.patch("pods/status", "default", name, PatchKind::Merge, &status)
                .expect("it has begun");
        }
    }
    let listening = api.listen(([127, 0, 0, 1], 0).into()).await.expect("a port");
    let path = directory.path().join("kubeconfig");
    std::fs::write(&path, api.kubeconfig(listening.addr())).expect("written");
    let kubeconfig = path.display().to_string();
    let output = beside(&[&[command], args, &["--kubeconfig", &kubeconfig]].concat(), &[]).await;
    let text = stdout(&output) + &stderr(&output);
    (output.status.code().expect("it ended"), text)
}

fn node(units: u64, runtime: &str, whole: u64) -> (&'static str, Value) {
    let resources =
        json!({"aliyun.com/gpu-mem": units.to_string(), "aliyun.com/gpu-count": "1", "nvidia.com/gpu": whole.to_string()});
    let status = json!({"capacity": resources, "allocatable": resources, "nodeInfo": {"containerRuntimeVersion": runtime}});
    ("nodes", json!({"metadata": {"name": "n1"}, "status": status}))
}

fn says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "no {part:?} in:\n{text}");
    }
}

/// The answer says whether a runtime is to blame.
#[tokio::test]
async fn why_says_that_no_node_offers_gpu_memory() {
    let waiting = ("pods", pod("p").gpu_mem(3).build());
    let (_, text) = why(&[node(0, "containerd://2.1.0", 0), waiting.clone()], &["p"]).await;
    says(
        &text,
        &[
            "no node of the cluster offers any aliyun.com/gpu-mem: Divvy's agent is not installed, or it is not ready",
            "helm install divvy deploy/helm/divvy -n divvy-system --create-namespace",
        ],
    );
    assert!(!text.contains("CDI"), "{text}");
    let (_, text) = why(&[node(0, "containerd://1.7.24", 0), waiting], &["p"]).await;
    says(
        &text,
        &[
            "Node n1: its container runtime containerd://1.7.24",
            "enable_cdi = true",
            "--device-list-strategy cdi",
        ],
    );
}

#[tokio::test]
async fn why_names_the_offers_to_pods_with_other_resources() {
    for (resource, words) in [
        (
            "nvidia.com/gpu",
            "nvidia.com/gpu is offered by no node. The nodes offer aliyun.com/gpu-count, aliyun.com/gpu-mem.",
        ),
        (
            "nvidia.com/gpumem",
            "nvidia.com/gpumem is a resource of HAMi, and it is offered by no node.",
        ),
        (
            "volcano.sh/vgpu-memory",
            "volcano.sh/vgpu-memory is a resource of Volcano, and it is offered by no node.",
        ),
        (
            "nvidia.com/mig-1g.5gb",
            "NVIDIA's device plugin, for GPUs in MIG mode, and it is offered by no node.",
        ),
        ("amd.com/gpu", "amd.com/gpu is offered by no node."),
        ("nvidia.com/gpus", "nvidia.com/gpus is offered by no node."),
    ] {
        let container = json!({"name": "c", "image": "x", "resources": {"limits": {resource: "1"}}});
        let waiting = json!({"metadata": {"name": "p", "namespace": "default"}, "spec": {"containers": [container]}});
        let (_, text) = why(&[node(8, "containerd://2.1.0", 0), ("pods", waiting)], &["p"]).await;
        says(&text, &[words, "aliyun.com/gpu-mem"]);
        assert!(!text.contains("is not installed"), "{resource}: {text}");
    }
}

/// After a plugin has stopped, the capacity remains in the node's status, and the allocatable amount is 0.
#[tokio::test]
async fn why_asks_for_the_agent_of_a_node_that_offers_nothing() {
    let (resource, mut away) = node(2, "containerd://2.1.0", 0);
    away["status"]["allocatable"]["aliyun.com/gpu-mem"] = json!("0");
    let (_, text) = why(&[(resource, away), ("pods", pod("p").gpu_mem(3).build())], &["p"]).await;
    says(
        &text,
        &["no Divvy agent runs there, or none is ready (kubectl get pods -A -o wide --field-selector spec.nodeName=n1)"],
    );
    let there = node(2, "containerd://2.1.0", 0);
    let (_, text) = why(&[there, ("pods", pod("p").gpu_mem(3).build())], &["p"]).await;
    assert!(!text.contains("no Divvy agent runs there"), "{text}");
}

/// The answer is about the pods that were asked for, and not about the whole namespace.
#[tokio::test]
async fn if_no_pod_matches_the_answer_says_so() {
    let objects = [
        node(16, "containerd://2.1.0", 0),
        ("pods", pod("p").gpu_mem(3).build()),
        (
            "statefulsets.apps",
            json!({"metadata": {"name": "db", "namespace": "default"}, "spec": {"selector": {"matchLabels": {"app": "db"}}}}),
        ),
    ];
    for (args, words) in [
        (["-l", "app=none"], "No pod in namespace default has the labels app=none.\n"),
        (
            ["sts/db", "sts/db"],
            "There are no pods of statefulset/db, statefulset/db in namespace default.\n",
        ),
    ] {
        let (status, text) = why(&objects, &args).await;
        assert_eq!((status, text.as_str()), (0, words));
    }
}

#[tokio::test]
async fn a_name_that_is_not_there_keeps_no_other_from_being_answered() {
    let objects = [node(16, "containerd://2.1.0", 0), ("pods", pod("p").gpu_mem(3).build())];
    let (status, text) = why(&objects, &["none", "p", "nothing"]).await;
    says(
        &text,
        &[
            "Pod default/p waits",
            "error: pod default/none could not be read",
            "error: pod default/nothing could not be read",
        ],
    );
    assert_eq!(status, 1, "{text}");
    // Without an answer there is no JSON output.
    let (status, text) = why(&objects, &["none", "-o", "json"]).await;
    assert!(
        status == 1 && text.starts_with("error: pod default/none could not be read"),
        "{text}"
    );
}

#[tokio::test]
async fn a_controllers_running_and_waiting_pods_are_two_answers() {
    let mut objects = vec![node(16, "containerd://2.1.0", 0)];
    let owner = json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-1", "uid": "r", "controller": true}]);
    for number in 0..6 {
        let mut one = pod(&format!("web-1-{number}")).gpu_mem(4);
        if number < 4 {
            let allocation = r#"{"v":1,"gpus":[{"uuid":"GPU-1","memMiB":4096,"cores":0,"whole":false}],"containers":{}}"#;
            one = one.on_node("n1").annotation("divvy.dev/allocation", allocation);
        }
        let mut one = one.build();
        one["metadata"]["ownerReferences"] = owner.clone();
        one["metadata"]["labels"] = json!({"app": "web"});
        if number < 4 {
            one["status"] = json!({"phase": "Running"});
        }
        objects.push(("pods", one));
    }
    let (_, text) = why(&objects, &["-l", "app=web"]).await;
    says(
        &text,
        &[
            "Each of 4 pods of ReplicaSet web-1 in namespace default (web-1-0, web-1-1, web-1-2 and 1 more) is running on node n1.\n",
            "Each of 2 pods of ReplicaSet web-1 in namespace default (web-1-4 and web-1-5) waits",
        ],
    );
    let (_, text) = why(&objects, &["web-1-0"]).await;
    says(&text, &["Pod default/web-1-0 is bound to node n1 (Running)"]);
}

#[tokio::test]
async fn a_pod_that_names_a_node_that_does_not_exist_is_told_so() {
    let lost = pod("lost").gpu_mem(4).on_node("n77").build();
    let (_, text) = why(&[node(16, "containerd://2.1.0", 0), ("pods", lost)], &["lost"]).await;
    says(&text, &["Pod default/lost names node n77 (Pending), which does not exist."]);
    assert!(!text.contains("kube-scheduler did not ask"), "{text}");
}

/// A user who may write nodes or create pods cannot send control characters to another user's terminal.
#[tokio::test]
async fn what_objects_say_is_no_order_to_a_terminal() {
    let (resource, mut odd) = node(16, "containerd://2.1.0\u{1b}[2J", 0);
    let gpu = json!({"uuid": "GPU-a", "index": 0, "minor": 0, "model": "T4\u{1b}]0;owned\u{7}", "totalMiB": 16384, "units": 16, "health": "failed",
                     "reason": "XID\u{9b}31m 79"});
    let inventory = json!({"v": 1, "agent": "1", "driver": "550\u{8}", "unitMiB": 1024, "gpus": [gpu]});
    odd["metadata"]["annotations"] = json!({"divvy.dev/inventory": inventory.to_string()});
    let waiting = pod("p").gpu_mem(3).env("NVIDIA_VISIBLE_DEVICES", "\u{1b}[2J\u{202e}");
    let objects = [(resource, odd), ("pods", waiting.build())];
    let answers = [
        why(&objects, &["p"]).await.1,
        why(&objects, &["p", "--placement"]).await.1,
        why(&objects, &["no\u{1b}pod"]).await.1,
        say("inspect", &objects, &["gpushare", "-o", "wide"]).await.1,
        say("inspect", &objects, &["gpushare", "-d"]).await.1,
    ];
    let shown = answers.concat();
    let orders: Vec<char> = shown
        .chars()
        .filter(|c| (c.is_control() && *c != '\n') || *c == '\u{202e}')
        .collect();
    assert!(orders.is_empty(), "{orders:?} in {shown:?}");
    says(
        &shown,
        &["\\u{1b}[2J\\u{202e}", "T4\\u{1b}]0;owned\\u{7}", "XID\\u{9b}31m 79"],
    );
}

/// The answer also names a variable without effect.
#[tokio::test]
async fn why_names_a_second_plugin_and_a_forged_allocation() {
    let waiting = pod("p").gpu_mem(3).env("NVIDIA_VISIBLE_DEVICES", "all");
    let two = node(16, "containerd://2.1.0", 1);
    let (_, text) = why(&[two, ("pods", waiting.build())], &["p"]).await;
    says(
        &text,
        &[
            "On node n1, another device plugin offers nvidia.com/gpu.",
            "Container main sets NVIDIA_VISIBLE_DEVICES=all itself. That has no effect",
        ],
    );
    let alone = node(16, "containerd://2.1.0", 0);
    let allocation = r#"{"v":1,"gpus":[{"uuid":"GPU-1","memMiB":1024}],"containers":{}}"#;
    let forged = pod("p")
        .gpu_mem(3)
        .env("NVIDIA_VISIBLE_DEVICES", "void")
        .annotation("divvy.dev/allocation", allocation);
    let (_, text) = why(&[alone, ("pods", forged.build())], &["p"]).await;
    says(&text, &["The pod has an allocation although it has no node."]);
    assert!(
        !text.contains("another device plugin") && !text.contains("NVIDIA_VISIBLE_DEVICES"),
        "{text}"
    );
}

#[tokio::test]
async fn a_half_upgraded_cluster_is_told_by_version() {
    // The agent is newer than the extender.
    let (resource, mut newer) = node(16, "containerd://2.1.0", 0);
    newer["metadata"]["annotations"] = json!({"divvy.dev/inventory": r#"{"v":3,"cards":[]}"#});
    let (_, text) = why(&[(resource, newer), ("pods", pod("p").gpu_mem(3).build())], &["p"]).await;
    says(
        &text,
        &[
            "inventory (node annotation divvy.dev/inventory) has version 3; this Divvy reads versions 1 to 2 (is another component newer?)",
        ],
    );
    // The extender is newer than the agent.
    let bound = pod("p")
        .gpu_mem(3)
        .on_node("n1")
        .annotation("divvy.dev/allocation", r#"{"v":2,"cards":[]}"#);
    let (_, text) = why(&[node(16, "containerd://2.1.0", 0), ("pods", bound.build())], &["p"]).await;
    says(
        &text,
        &["its allocation cannot be read: allocation (pod annotation divvy.dev/allocation) has version 2"],
    );
    let mut bed = Bed::new(&[&[4]]).await;
    bed.expect("allocation-unreadable");
    bed.create(
        &pod("p")
            .gpu_mem(3)
            .on_node("n1")
            .annotation("divvy.dev/allocation", r#"{"v":2,"cards":[]}"#),
    );
    bed.start_refused("p", "has version 2; this Divvy reads version 1 (is another component newer?)")
        .await;
    bed.event("p", "NoAllocation", "is another component newer?").await;
    bed.end().await;
}

#[tokio::test]
async fn why_tells_of_pods_stopped_by_quota_or_policy() {
    let event = |name: &str, owner: &str, message: &str| {
        let about = json!({"kind": "ReplicaSet", "namespace": "default", "name": owner});
        (
            "events",
            json!({"metadata": {"name": name, "namespace": "default"}, "involvedObject": about, "reason": "FailedCreate", "message": message, "type": "Warning"}),
        )
    };
    let quota = "Error creating: pods \"train-6d5-x1\" is forbidden: exceeded quota: gpus, requested: requests.aliyun.com/gpu-mem=4, used: \
                 requests.aliyun.com/gpu-mem=8, limited: requests.aliyun.com/gpu-mem=10";
    let objects = [
        node(16, "containerd://2.1.0", 0),
        event("a", "train-6d5", quota),
        event(
            "b",
            "train-6d5",
            &format!("(combined from similar events): {}", quota.replace("x1", "x2")),
        ),
        event(
            "c",
            "web-1",
            "Error creating: pods \"web-1\" is forbidden: exceeded quota: cpus, requested: cpu=4",
        ),
    ];
    let (status, text) = why(&objects, &[]).await;
    assert_eq!(status, 0, "{text}");
    says(
        &text,
        &[
            "No pod waits for GPU memory in namespace default, but some pods could not be created:\n",
            "ReplicaSet default/train-6d5 could not create a pod: Error creating",
            "kubectl describe quota",
        ],
    );
    assert_eq!(
        text.matches("train-6d5 could not").count(),
        1,
        "once, however often it was tried: {text}"
    );
    assert!(!text.contains("web-1") && !text.contains("combined"), "{text}");
    let (status, text) = why(&objects, &["train"]).await;
    assert_eq!(status, 1, "{text}");
    says(&text, &["pod default/train could not be read", "exceeded quota: gpus"]);
}

/// Run a command as a user who may list the pods of one namespace, but neither nodes nor the pods of all namespaces.
async fn as_a_user_of_a_namespace(objects: &[(&str, Value)], args: &[&str]) -> (i32, String) {
    let directory = tempfile::tempdir().expect("a directory");
    let api = ApiServer::new(ApiServerOptions::default());
    for (resource, object) in objects {
        api.create(resource, object.clone()).expect("it is made");
        // The API server sets the status of a quota only in an update.
        if *resource == "resourcequotas" {
            let (name, status) = (
                object["metadata"]["name"].as_str().expect("a name"),
                json!({"status": object["status"]}),
            );
            api.patch("resourcequotas/status", "default", name, PatchKind::Merge, &status)
                .expect("it is used");
        }
    }
    let refused = json!({"status": {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
        "message": "0/2 nodes are available: 2 Insufficient aliyun.com/gpu-mem."}]}});
    api.patch("pods/status", "default", "mine", PatchKind::Merge, &refused)
        .expect("it waits");
    let forbidden = || Effect::Refuse(403);
    for matching in [
        Match::any().verb("list").resource("nodes"),
        Match::any().verb("list").resource("pods").namespace(""),
        Match::any().verb("list").resource("namespaces"),
        Match::any().verb("list").resource("daemonsets.apps"),
    ] {
        api.faults().add(FaultRule::new(matching, forbidden()));
    }
    let listening = api.listen(([127, 0, 0, 1], 0).into()).await.expect("a port");
    let path = directory.path().join("kubeconfig");
    std::fs::write(&path, api.kubeconfig(listening.addr())).expect("written");
    let kubeconfig = path.display().to_string();
    let output = beside(&[&["why"], args, &["--kubeconfig", &kubeconfig]].concat(), &[]).await;
    (output.status.code().expect("it ended"), stdout(&output) + &stderr(&output))
}

/// The answer comes from what the user may read.
#[tokio::test]
async fn why_tells_a_namespaces_user_what_it_missed() {
    let about = json!({"kind": "Pod", "namespace": "default", "name": "mine"});
    let warning = json!({"metadata": {"name": "mine.1", "namespace": "default"}, "involvedObject": about, "type": "Warning", "reason": "GpuPromisedTwice",
        "message": "another pod got the GPU first", "reportingComponent": "divvy-extender"});
    let quota = json!({"metadata": {"name": "gpus", "namespace": "default"}, "spec": {"hard": {"requests.aliyun.com/gpu-mem": "10"}},
        "status": {"hard": {"requests.aliyun.com/gpu-mem": "10"}, "used": {"requests.aliyun.com/gpu-mem": "3"}}});
    let runs = pod("runs").gpu_mem(2).on_node("n1").annotation(
        "divvy.dev/allocation",
        r#"{"v":1,"gpus":[{"uuid":"GPU-1","memMiB":2048,"cores":0,"whole":false}],"containers":{}}"#,
    );
    let objects = [
        node(16, "containerd://2.1.0", 0),
        ("pods", pod("mine").gpu_mem(3).build()),
        ("pods", runs.build()),
        ("events", warning),
        ("resourcequotas", quota),
    ];
    for args in [&["mine"][..], &[], &["pod/mine"]] {
        let (status, text) = as_a_user_of_a_namespace(&objects, args).await;
        assert_eq!(status, 0, "{text}");
        says(
            &text,
            &[
                "Pod default/mine waits: it asks for 3 GiB on one GPU. Divvy could not check which nodes have that much free.",
                "kube-scheduler says: 0/2 nodes are available: 2 Insufficient aliyun.com/gpu-mem.",
                "divvy-extender says: another pod got the GPU first",
                "the nodes of the cluster could not be checked: you may not list nodes.",
                "the pods of the cluster could not be checked: you may not list pods.",
                "3 of 10 requests.aliyun.com/gpu-mem of quota gpus are used.",
                "--clusterrole=divvy-viewer --",
            ],
        );
        assert!(
            !text.contains("Any one of these") && !text.contains("agent is not installed"),
            "{text}"
        );
    }
    let (status, text) = as_a_user_of_a_namespace(&objects, &["runs"]).await;
    assert_eq!(status, 0, "{text}");
    says(
        &text,
        &["Pod default/runs is bound to node n1", "holds 2 GiB of GPU GPU-1 of node n1"],
    );
    let (status, text) = as_a_user_of_a_namespace(&objects, &["-A"]).await;
    assert_eq!(status, 1, "{text}");
    says(
        &text,
        &["--all-namespaces requires permission to list nodes and pods", "-n NAME"],
    );
}

/// Return the number of events with this reason, and their messages.
fn events(bed: &Bed, reason: &str) -> (usize, String) {
    let all = bed.api().list("events", "").expect("a list");
    let named: Vec<String> = all
        .iter()
        .filter(|event| event["reason"] == reason)
        .map(Value::to_string)
        .collect();
    (named.len(), named.concat())
}

/// The pod gets one event.
#[tokio::test]
async fn a_pod_that_chooses_all_gpus_gets_its_own() {
    let bed = Bed::new(&[&[4, 4]]).await;
    let all = pod("all")
        .gpu_mem(3)
        .container("other", 1)
        .env("NVIDIA_VISIBLE_DEVICES", "all");
    bed.create(&all);
    let views = bed.running("all").await;
    assert!(
        views.iter().all(|view| view.env["NVIDIA_VISIBLE_DEVICES"] == "void"),
        "{views:?}"
    );
    let text = bed
        .event(
            "all",
            "OwnVisibleDevices",
            "sets NVIDIA_VISIBLE_DEVICES=all itself, which has no effect",
        )
        .await;
    assert!(text.contains("container other"), "{text}");
    bed.create(&pod("quiet").gpu_mem(1).env("NVIDIA_VISIBLE_DEVICES", "void"));
    bed.running("quiet").await;
    // The same event is not sent again either, which would increase the count of its series.
    bed.stays("one event", Duration::from_millis(300), |bed| {
        let (count, text) = events(bed, "OwnVisibleDevices");
        count == 1 && !text.contains("\"series\":{")
    })
    .await;
    bed.end().await;
}

/// Meanwhile, the node offers no resources.
#[tokio::test]
async fn a_runtime_without_cdi_is_said_before_a_pod_fails() {
    let mut bed = Bed::new(&[&[4]]).await;
    let runtime = |bed: &Bed, version: &str| {
        let patch = json!({"status": {"nodeInfo": {"containerRuntimeVersion": version}}});
        bed.api()
            .patch("nodes/status", "", "n1", PatchKind::Merge, &patch)
            .expect("a status");
    };
    bed.cluster.stop_agent("n1").await.expect("it ends");
    runtime(&bed, "containerd://1.7.24");
    bed.cluster.start_agent("n1").await.expect("it starts");
    bed.until("the node's event", async |bed: &Bed| match events(bed, "NoCDI") {
        (1, text) if text.contains("its container runtime containerd://1.7.24") && text.contains("enable_cdi = true") => Ok(()),
        (count, text) => Err(format!("{count}: {text}")),
    })
    .await;
    bed.create(&pod("waits").gpu_mem(1));
    bed.unschedulable("waits", "Insufficient aliyun.com/gpu-mem").await;
    bed.stays("nothing is offered", Duration::from_millis(300), |bed| !bed.is_bound("waits"))
        .await;
    // The runtime was upgraded.
    runtime(&bed, "containerd://2.1.0");
    bed.running("waits").await;
    bed.end().await;
}

#[tokio::test]
async fn a_second_device_plugin_on_the_node_is_an_event_of_the_node() {
    let bed = Bed::new(&[&[4]]).await;
    assert_eq!(events(&bed, "TwoDevicePlugins").0, 0);
    let patch = json!({"status": {"capacity": {"nvidia.com/gpu": "1"}}});
    bed.api()
        .patch("nodes/status", "", "n1", PatchKind::Merge, &patch)
        .expect("a status");
    bed.until("the node's event", async |bed: &Bed| match events(bed, "TwoDevicePlugins") {
        (1, text) if text.contains("another device plugin offers 1 nvidia.com/gpu on this node") => Ok(()),
        (count, text) => Err(format!("{count}: {text}")),
    })
    .await;
    bed.end().await;
}
