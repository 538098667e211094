//! `divvy top` on real terminals, with an API server and agents in this process.

use std::process::Stdio;

use divvy_testbed::api::{ApiServer, ApiServerOptions, Listening, PatchKind, Right};
use divvy_testbed::builders::pod;
use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpListener;

use crate::cli::{beside, command, stderr, stdout};
use crate::smi::{Machine, OTHER_UID, UID, cgroup_of};
use crate::terminal::Terminal;
use crate::tmux::Tmux;

const GIB: u64 = 1 << 30;

pub(crate) struct Cluster {
    pub(crate) api: ApiServer,
    listening: Listening,
    pub(crate) directory: TempDir,
}

impl Cluster {
    /// Two nodes, of which one has an agent, with two pods that share a GPU, and one that waits. A user of the namespace `ml` has made a pod with the
    /// labels of an agent on the other node.
    pub(crate) async fn new() -> Cluster {
        let api = ApiServer::new(ApiServerOptions::default());
        let listening = api.listen(([127, 0, 0, 1], 0).into()).await.expect("a port");
        for namespace in ["divvy-system", "ml"] {
            api.create("namespaces", json!({"metadata": {"name": namespace}}))
                .expect("a namespace");
        }
        let map = json!({"metadata": {"name": "divvy", "namespace": "kube-public"}, "data": {"service": "divvy-system/divvy-explainer:why"}});
        api.create("configmaps", map).expect("a ConfigMap");
        for (name, gpus) in [("gpu-a", 2), ("gpu-b", 1)] {
            node(&api, name, gpus);
        }
        let holds = |name: &str, units: u64| {
            let gpu = json!({"uuid": "GPU-gpu-a-0", "memMiB": units * 1024, "cores": 0, "whole": false});
            let allocation = json!({"v": 1, "gpus": [gpu], "containers": {}});
            let pod = pod(name).namespace("ml").gpu_mem(units).on_node("gpu-a");
            pod.annotation("divvy.dev/allocation", &allocation.to_string()).build()
        };
        let mut uids = Vec::new();
        for pod in [
            holds("train", 8),
            holds("notebook", 4),
            pod("large").namespace("ml").gpu_mem(16).build(),
        ] {
            let made = api.create("pods", pod).expect("a pod");
            uids.push(made["metadata"]["uid"].as_str().expect("a UID").to_owned());
        }
        let container = |pod: &str, uid: &str, limit: u64, used: u64, busy: u32| {
            json!({"namespace": "ml", "pod": pod, "uid": uid, "container": "main", "gpu": "GPU-gpu-a-0", "limitBytes": limit * GIB,
                "usedBytes": used * GIB, "busyPercent": busy})
        };
        let usage = json!({
            "v": 1, "sample": 1,
            "gpus": [{"uuid": "GPU-gpu-a-0", "memoryBytes": 16 * GIB, "usedBytes": 7 * GIB, "busyPercent": 61, "powerMilliwatts": 61_000, "temperatureCelsius": 54}],
            "containers": [container("train", &uids[0], 8, 6, 61), container("notebook", &uids[1], 4, 1, 0)],
        });
        agent(&api, "divvy-system", "gpu-a", &usage).await;
        let wrong = json!({"v": 1, "sample": 1, "gpus": [{"uuid": "GPU-gpu-b-0", "usedBytes": 15 * GIB}], "containers": []});
        agent(&api, "ml", "gpu-b", &wrong).await;
        Cluster {
            api,
            listening,
            directory: tempfile::tempdir().expect("a directory"),
        }
    }

    /// Return the kubeconfig of a user, or of an administrator.
    pub(crate) fn kubeconfig(&self, user: Option<&str>) -> String {
        let text = match user {
            Some(user) => self.api.kubeconfig_for(self.listening.addr(), user),
            None => self.api.kubeconfig(self.listening.addr()),
        };
        let path = self.directory.path().join(user.unwrap_or("admin"));
        std::fs::write(&path, text).expect("written");
        path.display().to_string()
    }
}

fn node(api: &ApiServer, name: &str, gpus: u64) {
    let gpu = |index: u64| json!({"uuid": format!("GPU-{name}-{index}"), "index": index, "minor": index, "model": "NVIDIA L4", "cc": "8.9", "totalMiB": 16384, "units": 16, "health": "ok"});
    let inventory =
        json!({"v": 1, "agent": "1", "driver": "550", "unitMiB": 1024, "gpus": (0..gpus).map(gpu).collect::<Vec<_>>()});
    let object = json!({"metadata": {"name": name, "annotations": {"divvy.dev/inventory": inventory.to_string()}}});
    api.create("nodes", object).expect("a node");
    let amounts = json!({"aliyun.com/gpu-mem": (16 * gpus).to_string(), "aliyun.com/gpu-count": gpus.to_string(), "cpu": "8", "memory": "32Gi", "pods": "110"});
    let status = json!({"status": {"capacity": amounts, "allocatable": amounts}});
    api.patch("nodes/status", "", name, PatchKind::Merge, &status)
        .expect("a status");
}

/// Make a pod that looks like the agent of a node, and answers with this usage.
async fn agent(api: &ApiServer, namespace: &str, node: &str, usage: &Value) {
    let name = format!("agent-{node}");
    let object = json!({
        "metadata": {
            "name": name, "namespace": namespace,
            "labels": {"app.kubernetes.io/name": "divvy", "app.kubernetes.io/component": "agent"},
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "divvy-agent", "uid": "1", "controller": true}],
        },
        "spec": {"nodeName": node, "containers": [{"name": "agent", "image": "divvy", "ports": [{"name": "metrics", "containerPort": 9400}]}]},
    });
    api.create("pods", object).expect("a pod");
    let status = json!({"status": {"phase": "Running"}});
    api.patch("pods/status", namespace, &name, PatchKind::Merge, &status)
        .expect("a status");
    let text = usage.to_string();
    let router = axum::Router::new().route("/v1/usage", axum::routing::get(move || async move { text }));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    api.reach_pod(namespace, &name, listener.local_addr().expect("bound"));
    tokio::spawn(async move { axum::serve(listener, router).await });
}

/// Replace how long the pod has waited, which depends on the machine.
fn timeless(text: &str) -> String {
    let without = |line: &str| {
        let rest = line.strip_prefix("ml/large")?.trim_start();
        let rest = rest.trim_start_matches(|character: char| character.is_ascii_digit());
        Some(format!("ml/large TIME{}", rest.strip_prefix(" s")?))
    };
    let lines: Vec<String> = text
        .lines()
        .map(|line| without(line).unwrap_or_else(|| line.to_owned()))
        .collect();
    lines.join("\n")
}

/// Run a part of a test that waits for a terminal, while the API server goes on.
async fn on_a_terminal<T: Send + 'static>(test: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(test).await.expect("the test of a terminal")
}

/// The terminals have three sizes.
#[tokio::test]
async fn terminals_show_cluster_node_and_waiting_pods() {
    let cluster = Cluster::new().await;
    let config = cluster.kubeconfig(None);
    on_a_terminal(move || {
        for (columns, rows) in [(80, 24), (120, 40), (60, 20)] {
            let mut terminal = Terminal::start(&["top"], &[("KUBECONFIG", &config)], columns, rows);
            let screen = terminal.until(|text| text.contains("7.0 GiB") && text.contains("no agent runs") | (columns < 80));
            assert!(terminal.is_raw());
            insta::assert_snapshot!(format!("cluster-{columns}"), screen);
            terminal.press("\r");
            let screen = terminal.until(|text| text.contains("node gpu-a") && text.contains("ml/train"));
            insta::assert_snapshot!(format!("node-{columns}"), screen);
            terminal.press("w");
            let screen = terminal.until(|text| text.contains("ml/large"));
            insta::assert_snapshot!(format!("waiting-{columns}"), timeless(&screen));
            terminal.press("\r");
            terminal.until(|text| text.contains("pod ml/large has waited"));
            // Escape is a key of its own only if nothing follows it.
            terminal.press("\u{1b}");
            terminal.until(|text| text.contains("1 pod waits for GPUs"));
            terminal.press("q");
            let (status, text) = terminal.ended();
            assert!(status.success() && !text.contains("gpu-a"), "{status} {text}");
        }
    })
    .await;
}

#[tokio::test]
async fn tmux_shows_the_same_screens_and_returns_the_shells_window() {
    if !divvy_skip::program("tmux", "tmux") {
        return;
    }
    let cluster = Cluster::new().await;
    let config = cluster.kubeconfig(None);
    on_a_terminal(move || {
        let top = env!("CARGO_BIN_EXE_divvy");
        let env = [("KUBECONFIG", config.as_str()), ("DIVVY", top)];
        for (columns, rows) in [(80, 24), (120, 40), (60, 20)] {
            let tmux = Tmux::start(&env, columns, rows);
            tmux.run("$DIVVY top");
            let screen = tmux.until(|text| text.contains("7.0 GiB") && text.contains("no agent runs") | (columns < 80));
            assert!(tmux.is_alternate());
            insta::assert_snapshot!(format!("cluster-{columns}"), screen);
            tmux.press(&["Enter"]);
            let screen = tmux.until(|text| text.contains("node gpu-a") && text.contains("ml/train"));
            insta::assert_snapshot!(format!("node-{columns}"), screen);
            tmux.press(&["w"]);
            let screen = tmux.until(|text| text.contains("ml/large"));
            insta::assert_snapshot!(format!("waiting-{columns}"), timeless(&screen));
            for (columns, rows) in [(40, 10), (200, 50)] {
                tmux.resize(columns, rows);
                tmux.until(|text| {
                    text.lines().count() == usize::from(rows) && text.lines().last().is_some_and(|line| line.contains("Esc"))
                });
            }
            tmux.press(&["q"]);
            tmux.until(|text| text.starts_with("ready> $DIVVY top") && text.trim_end().ends_with("ready>"));
            assert!(!tmux.is_alternate());
        }
        // The reader of a pipe that has seen enough, and a terminal that cannot move its cursor.
        let tmux = Tmux::start(&env, 100, 40);
        tmux.run("$DIVVY top --once | head -n 1; echo d''one");
        tmux.until(|text| text.contains("done") && !text.contains("panicked"));
        tmux.run("clear; TERM=dumb $DIVVY top");
        tmux.until(|text| text.contains("ml/train") && text.trim_end().ends_with("ready>"));
        assert!(!tmux.is_alternate());
    })
    .await;
}

#[tokio::test]
async fn a_window_that_gets_another_size_is_drawn_again() {
    let cluster = Cluster::new().await;
    let config = cluster.kubeconfig(None);
    on_a_terminal(move || {
        let mut terminal = Terminal::start(&["top"], &[("KUBECONFIG", &config)], 80, 24);
        let keys = |text: &str| text.lines().last().is_some_and(|line| line.starts_with("Enter open"));
        let is_wide = |text: &str| keys(text) && text.contains("q quit");
        terminal.until(is_wide);
        for (columns, rows) in [(40, 10), (200, 50), (10, 3), (80, 24)] {
            terminal.resize(columns, rows);
            terminal.until(|text| match columns {
                10 => text.lines().last() == Some("Enter ope…"),
                40 => keys(text) && text.contains('…') && text.lines().count() == 10,
                _ => is_wide(text) && text.lines().count() == usize::from(rows),
            });
        }
        terminal.press("\u{3}");
        assert!(terminal.ended().0.success());
    })
    .await;
}

#[tokio::test]
async fn a_signal_ends_the_program_and_leaves_the_terminal_as_it_was() {
    let cluster = Cluster::new().await;
    let config = cluster.kubeconfig(None);
    on_a_terminal(move || {
        for signal in [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT] {
            let terminal = Terminal::start(&["top"], &[("KUBECONFIG", &config)], 80, 24);
            terminal.until(|text| text.contains("q quit"));
            terminal.kill(signal);
            let (_, text) = terminal.ended();
            assert!(!text.contains("q quit"), "{text}");
        }
    })
    .await;
}

#[tokio::test]
async fn a_dumb_terminal_gets_the_table_once() {
    let cluster = Cluster::new().await;
    let config = cluster.kubeconfig(None);
    on_a_terminal(move || {
        let terminal = Terminal::start(&["top"], &[("KUBECONFIG", &config), ("TERM", "dumb")], 80, 40);
        let (status, text) = terminal.ended();
        assert!(
            status.success() && text.contains("ml/train") && !text.contains("q quit"),
            "{text}"
        );
    })
    .await;
}

/// Only the numbers of the true agent are printed.
#[tokio::test]
async fn once_prints_waiting_pods_and_true_numbers() {
    let cluster = Cluster::new().await;
    let config = cluster.kubeconfig(None);
    let env = [("KUBECONFIG", config.as_str())];
    let output = beside(&["top", "--once"], &env).await;
    assert!(output.status.success(), "{}", stderr(&output));
    insta::assert_snapshot!("once", timeless(&stdout(&output)));
    let output = beside(&["top", "-o", "json"], &env).await;
    let value: Value = serde_json::from_str(&stdout(&output)).expect("JSON");
    assert_eq!(value["usage"]["gpu-a"]["gpus"][0]["usedBytes"], json!(7 * GIB));
    assert_eq!(
        (&value["usage"]["gpu-b"], &value["usageErrors"]["gpu-b"]),
        (&Value::Null, &json!("no agent runs"))
    );
    let waiting = &value["waiting"][0];
    assert_eq!((&waiting["namespace"], &waiting["name"]), (&json!("ml"), &json!("large")));
    let why = waiting["why"].as_str().expect("a sentence");
    assert!(why.starts_with("It asks for 16 GiB on one GPU"), "{why}");
    // These pods are on no node.
    let output = beside(&["top", "gpu-a", "-o", "json"], &env).await;
    let value: Value = serde_json::from_str(&stdout(&output)).expect("JSON");
    assert_eq!(value.get("waiting"), None);
}

#[tokio::test]
async fn a_reader_that_has_closed_the_pipe_is_no_error() {
    let cluster = Cluster::new().await;
    let config = cluster.kubeconfig(None);
    let mut command = tokio::process::Command::from(command(&["top", "--once"], &[("KUBECONFIG", &config)]));
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it runs");
    drop(child.stdout.take());
    let output = child.wait_with_output().await.expect("it ends");
    let text = stderr(&output);
    assert!(!text.contains("panic") && !text.contains("error"), "{} {text}", output.status);
}

/// The command needs this right to show why pods wait.
#[tokio::test]
async fn who_may_not_list_nodes_reads_the_missing_right() {
    let cluster = Cluster::new().await;
    let rights = cluster.api.rights();
    rights.grant("ann", Right::new(&["get"], "nodes"));
    rights.grant("ann", Right::new(&["get", "list"], "pods"));
    let config = cluster.kubeconfig(Some("ann"));
    on_a_terminal(move || {
        let mut terminal = Terminal::start(&["top", "gpu-a"], &[("KUBECONFIG", &config)], 120, 24);
        terminal.until(|text| text.contains("12/32 GiB"));
        terminal.press("w");
        terminal.until(|text| text.contains("you lack the right to list nodes in the whole cluster"));
        terminal.press("q");
        assert!(terminal.ended().0.success());
    })
    .await;
}

#[test]
fn without_a_kubeconfig_top_shows_own_gpus_and_processes() {
    let machine = Machine::new(&json!({"gpus": {
        "0": {"processes": {"7": 9000, "9": 31}},
        "1": {"processes": {"8": 2048}},
    }}));
    machine.process(7, b"/opt/conda/bin/python3\0train.py\0", &cgroup_of(UID));
    machine.process(8, b"py\x1b[31m\0", &cgroup_of(OTHER_UID));
    machine.process(9, b"/usr/lib/xorg/Xorg\0", "/user.slice");
    let record = format!("{UID}_main.json");
    machine.record(UID, "main", &record);
    let path = machine.path("state/grants").join(record);
    let text = std::fs::read_to_string(&path).expect("the record");
    let share = r#""gpus":[{"uuid":"GPU-a","memMiB":12288,"cores":30}]"#;
    std::fs::write(&path, text.replace(r#""gpus":[]"#, share)).expect("written");
    let output = machine.divvy("top", &["--once"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let text = stdout(&output);
    assert!(
        text.lines()
            .nth(1)
            .is_some_and(|line| line.starts_with(&name[..name.len().min(20)])),
        "{text}"
    );
    let rows: Vec<&str> = text.lines().skip(2).collect();
    insta::assert_snapshot!("machine", rows.join("\n"));
    let value: Value = serde_json::from_str(&stdout(&machine.divvy("top", &["-o", "json"]))).expect("JSON");
    let pods: Vec<&str> = value["nodes"][0]["gpus"][0]["pods"]
        .as_array()
        .expect("pods")
        .iter()
        .filter_map(|pod| pod["name"].as_str())
        .collect();
    assert_eq!(pods, ["Xorg (9)", "trainer-0"]);
}

/// The cluster's views name MIG devices by the same indices.
#[test]
fn mig_devices_of_a_machine_have_the_indices_of_the_cluster() {
    let machine = Machine::new(&json!({"gpus": {
        "0": {"processes": {"7": 1000, "8": 30}, "mig_of": {"7": 0, "8": 1}},
    }}));
    machine.divide();
    machine.process(7, b"python3\0", "/user.slice");
    machine.process(8, b"python3\0", "/user.slice");
    let output = machine.divvy("top", &["--once"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let rows: Vec<String> = stdout(&output).lines().skip(2).map(str::to_owned).collect();
    insta::assert_snapshot!("machine_divided", rows.join("\n"));
}

#[test]
fn without_a_kubeconfig_and_without_a_driver_both_ways_are_told() {
    let machine = Machine::new(&json!({}));
    let state = machine.divvy("top", &["--once", "--probe", "/nowhere/divvy-probe"]);
    assert!(
        stderr(&state).contains("give the path of divvy-probe with --probe"),
        "{}",
        stderr(&state)
    );
    let output = crate::cli::divvy(
        &[
            "top",
            "--nvml-library",
            "/nowhere/libnvidia-ml.so.1",
            "--state-dir",
            "/nowhere",
        ],
        &[],
    );
    let text = stderr(&output);
    assert_eq!((output.status.code(), stdout(&output)), (Some(1), String::new()));
    for part in [
        "name a kubeconfig with --kubeconfig",
        "the node on which it runs as root",
        "type divvy doctor",
    ] {
        assert!(text.contains(part), "{text}");
    }
}
