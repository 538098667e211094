//! `divvy audit` as an operator uses it: exit status and texts.

use std::path::Path;
use std::process::Output;

use divvy_testbed::api::{ApiServer, ApiServerOptions, Listening};
use serde_json::{Value, json};

use crate::cli::{beside, stderr, stdout};

fn node() -> Value {
    let gpu = |index: u32| json!({"uuid": format!("GPU-{index}"), "index": index, "minor": index, "totalMiB": 16384, "units": 16, "health": "ok"});
    let inventory = json!({"v": 1, "agent": "0.1.0", "driver": "1", "unitMiB": 1024, "gpus": [gpu(0), gpu(1)]});
    let resources = json!({"aliyun.com/gpu-mem": "32", "aliyun.com/gpu-count": "2"});
    json!({"kind": "Node", "metadata": {"name": "n1", "annotations": {"divvy.dev/inventory": inventory.to_string()}},
        "status": {"capacity": resources, "allocatable": resources}})
}

/// Return a pod that was bound to a GPU of n1.
fn pod(name: &str, gpu: u32, units: u64) -> Value {
    let share = json!([{"uuid": format!("GPU-{gpu}"), "memMiB": units * 1024}]);
    let allocation = json!({"v": 1, "gpus": share, "containers": {"main": share}}).to_string();
    json!({"kind": "Pod", "metadata": {"name": name, "namespace": "default", "annotations": {"divvy.dev/allocation": allocation}},
        "spec": {"nodeName": "n1", "containers": [{"name": "main", "image": "i", "resources": {"limits": {"aliyun.com/gpu-mem": units.to_string()}}}]}})
}

async fn cluster(directory: &Path) -> (ApiServer, Listening, String) {
    let api = ApiServer::new(ApiServerOptions::default());
    api.create("nodes", node()).expect("a node");
    let listening = api.listen(([127, 0, 0, 1], 0).into()).await.expect("a port");
    let path = directory.join("kubeconfig");
    std::fs::write(&path, api.kubeconfig(listening.addr())).expect("written");
    (api, listening, path.display().to_string())
}

fn status(output: &Output) -> i32 {
    output.status.code().expect("no signal ended it")
}

#[tokio::test]
async fn the_exit_status_is_0_when_sound_and_1_with_findings() {
    let directory = tempfile::tempdir().expect("a directory");
    let (api, _listening, kubeconfig) = cluster(directory.path()).await;
    let audit = async |args: &[&str]| beside(&[&["audit", "--kubeconfig", &kubeconfig][..], args].concat(), &[]).await;
    api.create("pods", pod("a", 0, 10)).expect("a pod");
    let sound = audit(&[]).await;
    assert_eq!(status(&sound), 0, "{}", stderr(&sound));
    assert_eq!(
        stdout(&sound),
        "No GPU is overcommitted: 1 allocation on 2 GPUs, 10240 MiB of 32768 MiB allocated.\n\
         Every pod's allocation matches its request, on a GPU of its node.\n\
         Where containers ran was not checked: the API server does not know which GPUs they use.\n\
         Nothing leaked: no memory is held for a pod that is gone, and no deletion is late.\n"
    );
    api.create("pods", pod("b", 0, 7)).expect("a pod");
    let found = audit(&[]).await;
    assert_eq!(status(&found), 1, "{}", stderr(&found));
    let text = stdout(&found);
    for part in [
        "FAULT  gpu-promised-twice  20",
        "GPU 0 of node n1 offers 16384 MiB, and 17408 MiB were allocated: default/a 10240 MiB, default/b 7168 MiB",
        "Why it matters: ",
        "Next: look at the node (divvy inspect gpushare -d), and delete a pod, so that the others fit: kubectl delete pod -n default b",
        "GPUs were overcommitted: 1 finding above",
    ] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    let json: Value = serde_json::from_str(&stdout(&audit(&["-o", "json"]).await)).expect("JSON");
    assert_eq!(json["verdict"], "faults");
    let finding = &json["findings"][0];
    assert_eq!(
        (
            &finding["id"],
            &finding["node"],
            &finding["gpuIndex"],
            &finding["pods"][1]["name"]
        ),
        (&json!("gpu-promised-twice"), &json!("n1"), &json!(0), &json!("b"))
    );
}

/// The error says what to do next.
#[tokio::test]
async fn an_undecided_audit_exits_with_status_2() {
    let cpu = |name: &str| json!({"kind": "Node", "metadata": {"name": name}, "status": {"capacity": {"cpu": "4"}, "allocatable": {"cpu": "4"}}});
    let web = json!({"kind": "Pod", "metadata": {"name": "web", "namespace": "default"},
        "spec": {"nodeName": "cpu-1", "containers": [{"name": "main", "image": "i"}]}});
    type Expected<'a> = (&'a str, Vec<Value>, Vec<Value>, i32, &'a str, &'a str);
    let cases: [Expected<'_>; 6] = [
        (
            "an empty cluster",
            vec![],
            vec![],
            2,
            "nothing-seen",
            "error: nothing to audit: no node and no pod was seen; check which cluster this is with kubectl config current-context\n",
        ),
        (
            "Divvy is not installed",
            vec![cpu("cpu-1"), cpu("cpu-2")],
            vec![web.clone()],
            2,
            "nothing-seen",
            "error: nothing to audit: 2 nodes and 1 pod were seen, none with GPU memory; find what is missing with divvy doctor --cluster\n",
        ),
        ("no pod", vec![node()], vec![], 0, "sound", ""),
        (
            "sound",
            vec![node(), cpu("cpu-1")],
            vec![pod("a", 0, 10), web],
            0,
            "sound",
            "",
        ),
        (
            "given twice",
            vec![node()],
            vec![pod("a", 0, 10), pod("b", 0, 7)],
            1,
            "faults",
            "",
        ),
        (
            "the node was deleted",
            vec![cpu("cpu-1")],
            vec![pod("a", 0, 10)],
            2,
            "unclear",
            "error: the audit is incomplete; the findings above with UNCLEAR say what is missing\n",
        ),
    ];
    for (name, nodes, pods, expected, verdict, said) in cases {
        let directory = tempfile::tempdir().expect("a directory");
        let api = ApiServer::new(ApiServerOptions::default());
        for node in nodes {
            api.create("nodes", node).expect("a node");
        }
        for pod in pods {
            api.create("pods", pod).expect("a pod");
        }
        let listening = api.listen(([127, 0, 0, 1], 0).into()).await.expect("a port");
        let config = directory.path().join("kubeconfig");
        std::fs::write(&config, api.kubeconfig(listening.addr())).expect("written");
        let config = config.display().to_string();
        let text = beside(&["audit", "--kubeconfig", &config], &[]).await;
        assert_eq!(status(&text), expected, "{name}: {}", stdout(&text));
        // Standard error also has warnings.
        let last = stderr(&text)
            .lines()
            .last()
            .map(|line| format!("{line}\n"))
            .unwrap_or_default();
        assert_eq!(last, said, "{name}");
        assert_eq!(
            verdict == "nothing-seen",
            stdout(&text).is_empty(),
            "{name}: {}",
            stdout(&text)
        );
        assert_eq!(
            verdict == "unclear",
            stdout(&text).contains("UNCLEAR  node-unknown"),
            "{name}"
        );
        let json = beside(&["audit", "-o", "json", "--kubeconfig", &config], &[]).await;
        let answer: Value = serde_json::from_str(&stdout(&json)).expect("JSON");
        assert_eq!((status(&json), &answer["verdict"]), (expected, &json!(verdict)), "{name}");
    }
}
