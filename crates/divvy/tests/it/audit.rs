//! `divvy audit` as an operator uses it: exit status, texts, and truncated files.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::Path;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use divvy_testbed::api::{ApiServer, DeleteOptions, Listening, Options};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::cli::{beside, command, divvy, stderr, stdout};

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
    let api = ApiServer::new(Options::default());
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
async fn the_exit_status_is_0_when_sound_1_with_findings_2_when_it_cannot_be_told() {
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
         Where containers ran was not checked: this needs the containers' reports (--reports FILE).\n\
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
    // With only the pods, the sizes of the GPUs are missing.
    let pods = directory.path().join("pods.json");
    std::fs::write(&pods, json!({"kind": "List", "items": [pod("a", 0, 10)]}).to_string()).expect("written");
    let mut unnamed = pod("a", 0, 10);
    unnamed["metadata"]["uid"] = json!("u-a");
    std::fs::write(&pods, json!({"kind": "List", "items": [unnamed]}).to_string()).expect("written");
    let unclear = divvy(&["audit", &pods.display().to_string()], &[]);
    assert_eq!(status(&unclear), 2, "{}", stdout(&unclear));
    assert!(stdout(&unclear).contains("UNCLEAR  node-unknown"), "{}", stdout(&unclear));
    assert!(
        stderr(&unclear).contains("the findings above with UNCLEAR say what is missing"),
        "{}",
        stderr(&unclear)
    );
}

#[tokio::test]
async fn a_look_at_the_cluster_and_its_recording_replayed_have_the_same_verdict() {
    let cpu = |name: &str| json!({"kind": "Node", "metadata": {"name": name}, "status": {"capacity": {"cpu": "4"}, "allocatable": {"cpu": "4"}}});
    let web = json!({"kind": "Pod", "metadata": {"name": "web", "namespace": "default"},
        "spec": {"nodeName": "cpu-1", "containers": [{"name": "main", "image": "i"}]}});
    type Expected<'a> = (&'a str, Vec<Value>, Vec<Value>, i32, &'a str, [&'a str; 2]);
    let cases: [Expected<'_>; 6] = [
        (
            "an empty cluster",
            vec![],
            vec![],
            2,
            "nothing-seen",
            [
                "error: nothing to audit: no node and no pod was seen; check which cluster this is with kubectl config current-context\n",
                "error: nothing to audit: no node and no pod was seen; record a cluster that shares GPU memory with divvy audit record FILE\n",
            ],
        ),
        (
            "Divvy is not installed",
            vec![cpu("cpu-1"), cpu("cpu-2")],
            vec![web.clone()],
            2,
            "nothing-seen",
            [
                "error: nothing to audit: 2 nodes and 1 pod were seen, none with GPU memory; find what is missing with divvy doctor --cluster\n",
                "error: nothing to audit: 2 nodes without GPU memory, and no pod that has any; record a cluster that shares GPU memory with divvy audit record FILE\n",
            ],
        ),
        ("no pod", vec![node()], vec![], 0, "sound", ["", ""]),
        (
            "sound",
            vec![node(), cpu("cpu-1")],
            vec![pod("a", 0, 10), web],
            0,
            "sound",
            ["", ""],
        ),
        (
            "given twice",
            vec![node()],
            vec![pod("a", 0, 10), pod("b", 0, 7)],
            1,
            "faults",
            ["", ""],
        ),
        (
            "the node was deleted",
            vec![cpu("cpu-1")],
            vec![pod("a", 0, 10)],
            2,
            "unclear",
            [
                "error: the audit is incomplete; the findings above with UNCLEAR say what is missing\n",
                "error: the audit is incomplete; the findings above with UNCLEAR say what is missing\n",
            ],
        ),
    ];
    for (name, nodes, pods, expected, verdict, said) in cases {
        let directory = tempfile::tempdir().expect("a directory");
        let api = ApiServer::new(Options::default());
        for node in nodes {
            api.create("nodes", node).expect("a node");
        }
        for pod in pods {
            api.create("pods", pod).expect("a pod");
        }
        let listening = api.listen(([127, 0, 0, 1], 0).into()).await.expect("a port");
        let (config, log) = (directory.path().join("kubeconfig"), directory.path().join("day.log"));
        std::fs::write(&config, api.kubeconfig(listening.addr())).expect("written");
        let (config, file) = (config.display().to_string(), log.display().to_string());
        let ended = Recorder::start(&config, &log).await.end(Signal::INT).await;
        assert!(ended.success(), "{name}");
        for (of, said) in [["--kubeconfig", &config].to_vec(), vec![file.as_str()]].iter().zip(said) {
            let text = beside(&[&["audit"][..], of].concat(), &[]).await;
            assert_eq!(status(&text), expected, "{name}: {}", stdout(&text));
            // Standard error also has progress and warnings.
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
            assert_eq!(verdict == "unclear", stdout(&text).contains("UNCLEAR"), "{name}");
            assert!(!stdout(&text).contains("pass the nodes as well"), "{name}: {}", stdout(&text));
            let json = beside(&[&["audit", "-o", "json"][..], of].concat(), &[]).await;
            let answer: Value = serde_json::from_str(&stdout(&json)).expect("JSON");
            assert_eq!((status(&json), &answer["verdict"]), (expected, &json!(verdict)), "{name}");
        }
    }
}

#[tokio::test]
async fn what_was_recorded_to_standard_output_is_no_file_of_that_name() {
    let directory = tempfile::tempdir().expect("a directory");
    let (_api, _listening, kubeconfig) = cluster(directory.path()).await;
    let output = beside(&["audit", "record", "--kubeconfig", &kubeconfig, "-", "--for", "1s"], &[]).await;
    assert_eq!(status(&output), 0, "{}", stderr(&output));
    let said = stderr(&output);
    assert!(said.contains("next: divvy audit FILE with the recorded output"), "{said}");
}

/// A recorder that runs as a process of its own.
struct Recorder(tokio::process::Child);

impl Recorder {
    async fn start(kubeconfig: &str, log: &Path) -> Recorder {
        let mut command = command(
            &["audit", "record", "--kubeconfig", kubeconfig, &log.display().to_string()],
            &[],
        );
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let before = lines_with(log, "\"LISTED\",\"kind\":\"Pod\"");
        let mut command = tokio::process::Command::from(command);
        let recorder = Recorder(command.kill_on_drop(true).spawn().expect("it starts"));
        until_lines(log, "\"LISTED\",\"kind\":\"Pod\"", before + 1).await;
        recorder
    }

    async fn end(mut self, signal: Signal) -> std::process::ExitStatus {
        let pid = self.0.id().and_then(|pid| Pid::from_raw(pid as i32)).expect("it runs");
        kill_process(pid, signal).expect("a signal");
        self.0.wait().await.expect("it ends")
    }
}

fn lines_with(log: &Path, part: &str) -> usize {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    text.lines().filter(|line| line.contains(part)).count()
}

async fn until_lines(log: &Path, part: &str, count: usize) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while lines_with(log, part) < count {
        assert!(Instant::now() < deadline, "no {count} lines with {part} came");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_recorder_that_is_killed_leaves_a_log_that_is_read_and_gone_on_with() {
    let directory = tempfile::tempdir().expect("a directory");
    let (api, _listening, kubeconfig) = cluster(directory.path()).await;
    let log = directory.path().join("day.log");
    let audit = || divvy(&["audit", &log.display().to_string()], &[]);
    let recorder = Recorder::start(&kubeconfig, &log).await;
    let second = beside(
        &["audit", "record", "--kubeconfig", &kubeconfig, &log.display().to_string()],
        &[],
    )
    .await;
    assert!(
        stderr(&second).contains("another recorder writes to this file"),
        "{}",
        stderr(&second)
    );
    // A GPU is overcommitted for a moment. The final state does not show this.
    api.create("pods", pod("a", 0, 10)).expect("a pod");
    api.create("pods", pod("b", 0, 10)).expect("a pod");
    let at_once = DeleteOptions {
        grace_period_s: Some(0),
        ..DeleteOptions::default()
    };
    api.delete("pods", "default", "b", &at_once).expect("deleted");
    until_lines(&log, "\"DELETED\"", 1).await;
    recorder.end(Signal::KILL).await;
    let mut file = OpenOptions::new().append(true).open(&log).expect("it is there");
    file.write_all(b"{\"t\":1795277115.231,\"type\":\"ADD").expect("written");
    let torn = audit();
    assert_eq!(status(&torn), 1, "{}", stdout(&torn));
    assert!(stdout(&torn).contains("gpu-promised-twice"), "{}", stdout(&torn));
    assert!(stderr(&torn).contains("the last line of"), "{}", stderr(&torn));

    api.create("pods", pod("c", 1, 10)).expect("a pod");
    let recorder = Recorder::start(&kubeconfig, &log).await;
    assert!(recorder.end(Signal::TERM).await.success());
    let both = audit();
    let text = stdout(&both);
    for part in [
        "gpu-promised-twice",
        "UNCLEAR  history-gap",
        "changes of pods were not recorded for a while: the recorder was not running",
        "3 allocations on 2 GPUs",
        "The history has 2 gaps",
    ] {
        assert!(text.contains(part), "no {part} in {text}");
    }
    assert!(stderr(&both).contains("is incomplete and left out"), "{}", stderr(&both));
    assert!(!text.contains("not-read"), "a torn line costs itself alone: {text}");
    // A garbled line in the middle of a log is reported.
    let spoilt = std::fs::read_to_string(&log)
        .expect("the log")
        .replacen("\"DELETED\"", "\"DELE", 1);
    std::fs::write(&log, spoilt).expect("written");
    assert!(stdout(&audit()).contains("UNCLEAR  not-read"), "{}", stdout(&audit()));
}

#[tokio::test]
async fn what_containers_said_is_held_against_the_log_by_time() {
    let directory = tempfile::tempdir().expect("a directory");
    let write = |name: &str, lines: &[Value]| {
        let path = directory.path().join(name);
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        std::fs::write(&path, text).expect("written");
        path.display().to_string()
    };
    let event = |t: f64, rv: u64, event: &str, mut object: Value| {
        object["metadata"]["uid"] = json!(format!("u-{}", object["metadata"]["name"].as_str().expect("a name")));
        json!({"t": t, "type": event, "rv": rv.to_string(), "object": object})
    };
    let log = write(
        "log",
        &[
            json!({"divvyAudit": 1, "divvy": "0.1.0", "cluster": "c", "started": "2026-01-02T03:04:05Z"}),
            event(100.0, 1, "ADDED", node()),
            event(101.0, 2, "ADDED", pod("a", 0, 10)),
            event(103.0, 3, "DELETED", pod("a", 0, 10)),
            event(104.0, 4, "ADDED", pod("b", 0, 10)),
            json!({"t": 110.0, "type": "STOPPED"}),
        ],
    );
    let env = json!({"ALIYUN_COM_GPU_MEM_IDX": "0", "ALIYUN_COM_GPU_MEM_POD": "10", "ALIYUN_COM_GPU_MEM_CONTAINER": "10",
        "ALIYUN_COM_GPU_MEM_DEV": "16", "NVIDIA_VISIBLE_DEVICES": "void"});
    let began = |at: f64, name: &str| json!({"at": at, "node": "n1", "pod_uid": format!("u-{name}"), "container": "main", "id": name, "running": true, "gpus": [0], "env": env});
    let ended = |at: f64, name: &str| json!({"at": at, "node": "n1", "pod_uid": format!("u-{name}"), "container": "main", "id": name, "running": false});
    let audit = |reports: &[Value]| {
        let reports = write("reports", reports);
        divvy(&["audit", &log, "--reports", &reports], &[])
    };
    let sound = audit(&[began(102.0, "a"), ended(104.5, "a"), began(105.0, "b")]);
    assert_eq!(status(&sound), 0, "{}", stdout(&sound));
    assert!(
        stdout(&sound).contains("No pod ran on another GPU than allocated: 2 containers reported"),
        "{}",
        stdout(&sound)
    );
    assert!(stdout(&sound).contains("over 10 s, 4 changes"), "{}", stdout(&sound));
    let both = audit(&[began(102.0, "a"), began(105.0, "b"), ended(106.0, "a")]);
    assert_eq!(status(&both), 1);
    let text = stdout(&both);
    assert!(
        text.contains("gpu-overcommitted-by-reports  1970-01-01 00:01:45.000Z until 00:01:46.000Z"),
        "{text}"
    );
    let mut elsewhere = began(105.0, "b");
    elsewhere["gpus"] = json!(["GPU-1"]);
    let text = stdout(&audit(&[elsewhere]));
    assert!(
        text.contains("was allocated GPU 0 of node n1 and ran with GPU 1 of node n1"),
        "{text}"
    );
    let garbage = audit(&[json!({"at": "noon"})]);
    assert_eq!(status(&garbage), 1);
    assert!(
        stderr(&garbage).contains("is not a report of a container"),
        "{}",
        stderr(&garbage)
    );
}
