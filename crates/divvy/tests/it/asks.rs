//! `divvy why` for a user who may see only one namespace. The explainer runs with the permissions from the chart.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use divvy_testbed::api::{ApiServer, ApiServerOptions, Effect, FaultRule, Listening, Match, PatchKind, Right};
use divvy_testbed::builders::pod;
use divvy_testbed::programs::ChildProgram;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::chart::default_objects;
use crate::cli::{beside, stderr, stdout};
use crate::cluster::programs;

const EXPLAINER: &str = "system:serviceaccount:divvy-system:divvy-explainer";
const ANN: &str = "ann";

/// The permissions that the chart's roles grant to a ServiceAccount or a group.
fn rights_of(objects: &[Value], subject: &str) -> Vec<Right> {
    let texts = |value: &Value| -> Vec<String> {
        let all = value.as_array().into_iter().flatten();
        all.filter_map(Value::as_str).map(str::to_owned).collect()
    };
    let mut rights = Vec::new();
    let bound = objects
        .iter()
        .filter(|object| object["kind"].as_str().is_some_and(|kind| kind.ends_with("RoleBinding")));
    for binding in bound.filter(|binding| {
        binding["subjects"]
            .as_array()
            .is_some_and(|all| all.iter().any(|one| one["name"] == subject))
    }) {
        let (reference, namespace) = (&binding["roleRef"], binding["metadata"]["namespace"].as_str());
        let is_it = |role: &&Value| {
            role["kind"] == reference["kind"]
                && role["metadata"]["name"] == reference["name"]
                && (role["kind"] == "ClusterRole" || role["metadata"]["namespace"].as_str() == namespace)
        };
        let role = objects.iter().find(is_it).expect("the role of a binding");
        for rule in role["rules"].as_array().into_iter().flatten() {
            let verbs = texts(&rule["verbs"]);
            let verbs: Vec<&str> = verbs.iter().map(String::as_str).collect();
            let names = texts(&rule["resourceNames"]);
            for group in texts(&rule["apiGroups"]) {
                for resource in texts(&rule["resources"]) {
                    let resource = if group.is_empty() {
                        resource
                    } else {
                        format!("{resource}.{group}")
                    };
                    let right = match namespace {
                        Some(namespace) => Right::new(&verbs, &resource).in_namespace(namespace),
                        None => Right::new(&verbs, &resource),
                    };
                    if names.is_empty() {
                        rights.push(right)
                    } else {
                        rights.extend(names.iter().map(|name| right.clone().named(name)))
                    }
                }
            }
        }
    }
    rights
}

struct Cluster {
    api: ApiServer,
    listening: Listening,
    directory: TempDir,
    /// The address of the explainer.
    address: SocketAddr,
    _explainer: ChildProgram,
}

/// Make a cluster with Divvy, a waiting pod in `ml`, and pods in `ml` and `other` that hold the memory for which it waits.
async fn cluster() -> Cluster {
    let api = ApiServer::new(ApiServerOptions::default());
    let listening = api.listen(([127, 0, 0, 1], 0).into()).await.expect("a port");
    let objects = default_objects();
    for namespace in ["divvy-system", "ml", "other"] {
        api.create("namespaces", json!({"metadata": {"name": namespace}}))
            .expect("a namespace");
    }
    for object in objects.iter().filter(|object| object["kind"] == "ConfigMap") {
        api.create("configmaps", object.clone()).expect("the chart's");
    }
    for right in rights_of(&objects, "divvy-explainer") {
        api.rights().grant(EXPLAINER, right);
    }
    for right in rights_of(&objects, "system:authenticated") {
        api.rights().grant(ANN, right);
    }
    for resource in ["pods", "events", "resourcequotas"] {
        api.rights()
            .grant(ANN, Right::new(&["get", "list", "watch"], resource).in_namespace("ml"));
    }
    let gpu = json!({"uuid": "GPU-1", "index": 0, "minor": 0, "model": "NVIDIA L4", "cc": "8.9", "totalMiB": 16384, "units": 16, "health": "ok"});
    let inventory = json!({"v": 1, "agent": "1", "driver": "550", "unitMiB": 1024, "gpus": [gpu]});
    let resources = json!({"aliyun.com/gpu-mem": "16", "aliyun.com/gpu-count": "1", "cpu": "8", "memory": "32Gi", "pods": "110"});
    let node = json!({"metadata": {"name": "n1", "annotations": {"divvy.dev/inventory": inventory.to_string()}}});
    api.create("nodes", node).expect("a node");
    let status = json!({"status": {"capacity": resources, "allocatable": resources}});
    api.patch("nodes/status", "", "n1", PatchKind::Merge, &status)
        .expect("a status");
    let allocation = r#"{"v":1,"gpus":[{"uuid":"GPU-1","memMiB":8192,"cores":0,"whole":false}],"containers":{}}"#;
    let holds = |name: &str, namespace: &str| {
        let pod = pod(name).namespace(namespace).gpu_mem(8).on_node("n1");
        pod.annotation("divvy.dev/allocation", allocation).build()
    };
    for pod in [
        pod("mine").namespace("ml").gpu_mem(8).build(),
        holds("neighbor", "ml"),
        holds("stranger", "other"),
    ] {
        api.create("pods", pod).expect("a pod");
    }
    let directory = tempfile::tempdir().expect("a directory");
    let free = std::net::TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    let address: SocketAddr = free.expect("a port");
    let explainer = start(&api, &listening, &directory, address);
    api.reach("divvy-system", "divvy-explainer", address);
    let written = api.until(Duration::from_secs(20), |api| {
        let map = api.get("configmaps", "kube-public", "divvy").ok()?;
        map["data"]["tls.crt"].as_str().map(str::to_owned)
    });
    assert!(
        written.await.is_some(),
        "the explainer writes its certificate: {}",
        said(&directory)
    );
    Cluster {
        api,
        listening,
        directory,
        address,
        _explainer: explainer,
    }
}

fn start(api: &ApiServer, listening: &Listening, directory: &TempDir, address: SocketAddr) -> ChildProgram {
    let path = directory.path().join("explainer.kubeconfig");
    std::fs::write(&path, api.kubeconfig_for(listening.addr(), EXPLAINER)).expect("written");
    let (kubeconfig, listen) = (path.display().to_string(), address.to_string());
    let args = [
        "explainer",
        "--exit-with-stdin",
        "--kubeconfig",
        &kubeconfig,
        "--listen",
        &listen,
    ];
    ChildProgram::start("explainer", &programs().divvy, &args, &[], &directory.path().join("logs")).expect("it starts")
}

fn said(directory: &TempDir) -> String {
    let logs = std::fs::read_dir(directory.path().join("logs")).expect("logs").flatten();
    logs.filter_map(|log| std::fs::read_to_string(log.path()).ok()).collect()
}

impl Cluster {
    async fn why(&self, args: &[&str]) -> String {
        self.why_as(ANN, args).await
    }

    async fn why_as(&self, user: &str, args: &[&str]) -> String {
        let path = self.directory.path().join(format!("{user}.kubeconfig"));
        std::fs::write(&path, self.api.kubeconfig_for(self.listening.addr(), user)).expect("written");
        let kubeconfig = path.display().to_string();
        let output = beside(&[&["why", "-n", "ml", "--kubeconfig", &kubeconfig], args].concat(), &[]).await;
        assert!(output.status.success(), "{}{}", stderr(&output), said(&self.directory));
        stdout(&output) + &stderr(&output)
    }
}

/// Apart from these names, the user gets the whole answer.
#[tokio::test]
async fn a_namespaces_user_sees_no_names_of_foreign_pods() {
    let cluster = cluster().await;
    for args in [&["mine"][..], &[], &["mine", "--all-nodes"], &["mine", "-o", "json"]] {
        let text = cluster.why(args).await;
        assert!(text.contains("n1") && text.contains("ml/neighbor"), "{args:?}: {text}");
        for wrong in ["stranger", "divvy-viewer", "could not be"] {
            assert!(!text.contains(wrong), "{args:?}: {wrong}: {text}");
        }
    }
    insta::assert_snapshot!(cluster.why(&["mine"]).await);
}

/// The explainer closes a connection after a while, and also if a client is slow.
#[tokio::test]
async fn many_pods_are_asked_about_in_one_command() {
    let cluster = cluster().await;
    for number in 0..30 {
        let pod = pod(&format!("wait-{number}")).namespace("ml").gpu_mem(number + 1).build();
        cluster.api.create("pods", pod).expect("a pod");
    }
    let text = cluster.why(&[]).await;
    assert!(!text.contains("could not be reached"), "{text}");
    assert_eq!(text.matches("waits").count(), 31, "{text}");
}

#[tokio::test]
async fn a_question_is_repeated_if_its_connection_breaks_off() {
    let cluster = cluster().await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    cluster
        .api
        .reach("divvy-system", "divvy-explainer", listener.local_addr().expect("bound"));
    let slowly = FaultRule::new(
        Match::any().verb("list").resource("pods").namespace(""),
        Effect::Latency(Duration::from_secs(1)),
    );
    cluster.api.faults().add(slowly);
    let address = cluster.address;
    let connections = Arc::new(AtomicUsize::new(0));
    let counted = connections.clone();
    tokio::spawn(async move {
        while let Ok((mut user, _)) = listener.accept().await {
            let mut explainer = tokio::net::TcpStream::connect(address).await.expect("the explainer");
            let number = counted.fetch_add(1, Ordering::SeqCst);
            tokio::spawn(async move {
                // The first connection ends while its request is in progress.
                let time = Duration::from_millis(if number == 0 { 500 } else { 60_000 });
                let _ = tokio::time::timeout(time, tokio::io::copy_bidirectional(&mut user, &mut explainer)).await;
            });
        }
    });
    let text = cluster.why(&["mine"]).await;
    assert!(
        text.contains("ml/neighbor") && !text.contains("could not be reached"),
        "{text}"
    );
    assert_eq!(connections.load(Ordering::SeqCst), 2);
}

/// The answer says why the explainer cannot be asked.
#[tokio::test]
async fn without_the_explainer_the_answer_has_what_may_be_read() {
    let cluster = cluster().await;
    let namespace_only = |text: &str, why: &str| {
        for part in [why, "--clusterrole=divvy-viewer --user=ann", "you may not list nodes"] {
            assert!(text.contains(part), "no {part:?} in:\n{text}");
        }
    };
    namespace_only(&cluster.why(&["mine", "--as", "ann"]).await, "with --as there is no token");
    let api = &cluster.api;
    let map = |data: Value| api.patch("configmaps", "kube-public", "divvy", PatchKind::Merge, &json!({"data": data}));
    // With a foreign certificate, the user's token must not be sent.
    let foreign = rcgen::generate_simple_self_signed(["divvy-explainer".to_owned()]).expect("made");
    let own = map(json!({})).expect("there")["data"]["tls.crt"].clone();
    map(json!({"tls.crt": foreign.cert.pem()})).expect("patched");
    namespace_only(&cluster.why(&["mine"]).await, "so your token was not sent to it");
    map(json!({"tls.crt": own, "service": "divvy-system/other:why"})).expect("patched");
    namespace_only(&cluster.why(&["mine"]).await, "cannot get resource \"services/proxy\"");
    map(json!({"service": "nonsense"})).expect("patched");
    namespace_only(
        &cluster.why(&["mine"]).await,
        "does not name a Service (data.service is \"nonsense\"",
    );
    api.delete("configmaps", "kube-public", "divvy", &Default::default())
        .expect("deleted");
    let none = "the ConfigMap kube-public/divvy with the explainer's address does not exist, or you may not read it";
    namespace_only(&cluster.why(&["mine"]).await, none);
    // If Divvy is not installed, no user may read the ConfigMap.
    api.rights().limit("bob");
    let pods = Right::new(&["get", "list"], "pods").in_namespace("ml");
    api.rights().grant("bob", pods);
    namespace_only(&cluster.why_as("bob", &["mine"]).await.replace("bob", ANN), none);
}
