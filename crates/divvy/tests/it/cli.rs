//! The command line: its output, and its errors for wrong input.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use divvy_testbed::api::{ApiServer, ApiServerOptions, Listening};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

pub(crate) fn command(args: &[&str], env: &[(&str, &str)]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_divvy"));
    command
        .args(args)
        .stdin(Stdio::null())
        .env_remove("KUBECONFIG")
        .env_remove("NODE_NAME")
        .env("HOME", "/nonexistent");
    command.envs(env.iter().copied());
    command
}

pub(crate) fn divvy(args: &[&str], env: &[(&str, &str)]) -> Output {
    command(args, env).output().expect("it runs")
}

/// Run the program without blocking this thread, because the API server runs in this process.
pub(crate) async fn beside(args: &[&str], env: &[(&str, &str)]) -> Output {
    tokio::process::Command::from(command(args, env))
        .output()
        .await
        .expect("it runs")
}

/// Serve an API that answers a request with what `answer` returns for its path: a status and a body. Return the path of a kubeconfig for it.
pub(crate) async fn serve<A>(directory: &Path, answer: A) -> String
where
    A: Fn(&str) -> (&'static str, Value) + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let path = directory.join("kubeconfig");
    let config = json!({"apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": format!("http://{address}")}}],
        "users": [{"name": "u", "user": {}}], "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}]});
    std::fs::write(&path, config.to_string()).expect("written");
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                match stream.read_u8().await {
                    Ok(byte) => head.push(byte),
                    Err(_) => break,
                }
            }
            let head = String::from_utf8_lossy(&head).into_owned();
            let (status, body) = answer(head.split([' ', '?']).nth(1).unwrap_or_default());
            let body = body.to_string();
            let text = format!(
                "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
                body.len()
            );
            // The command may close the connection before the end of the response.
            let _ = stream.write_all(text.as_bytes()).await;
        }
    });
    path.display().to_string()
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Every client that reaches an extender over plain HTTP can bind pods.
#[test]
fn no_example_opens_the_extender_to_everybody() {
    let mut seen = 0;
    for help in [&["--help"][..], &["extender", "--help"]] {
        let text = stdout(&divvy(help, &[]));
        for line in text.lines().filter(|line| line.starts_with("  divvy extender ")) {
            let words: Vec<&str> = line.split_whitespace().collect();
            let listen = words
                .iter()
                .position(|word| *word == "--listen")
                .and_then(|at| words.get(at + 1));
            let on_loopback = listen.is_none_or(|address| address.starts_with("127.") || address.starts_with("[::1]"));
            let over_tls = words.iter().any(|word| ["--tls-secret", "--tls-cert-file"].contains(word));
            assert!(on_loopback || over_tls, "{line}");
            assert!(!words.contains(&"--insecure"), "{line}");
            seen += 1;
        }
    }
    assert!(seen >= 4, "{seen}");
}

#[test]
fn every_help_teaches_by_example() {
    for command in [
        &["--help"][..],
        &["agent", "--help"],
        &["extender", "--help"],
        &["inspect", "gpushare", "--help"],
        &["why", "--help"],
        &["audit", "--help"],
        &["scheduler-config", "--help"],
        &["uninstall", "--help"],
        &["doctor", "--help"],
        &["smi", "--help"],
        &["labels", "--help"],
        &["cdi", "generate", "--help"],
        &["cdi", "list", "--help"],
        &["cdi", "validate", "--help"],
        &["configure", "--help"],
        &["simulate", "--help"],
        &["smoke", "--help"],
        &["completions", "--help"],
        &["version", "--help"],
        &["demo", "--help"],
    ] {
        let output = divvy(command, &[]);
        assert!(output.status.success(), "{command:?}");
        assert!(stdout(&output).contains("\nExamples:\n"), "{command:?}: {}", stdout(&output));
    }
}

/// Run the program under the name of a kubectl plugin, as kubectl does.
fn as_plugin(name: &str, args: &[&str]) -> Output {
    let directory = tempfile::tempdir().expect("a directory");
    let link = directory.path().join(name);
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_divvy"), &link).expect("linked");
    Command::new(link).args(args).output().expect("it runs")
}

#[test]
fn a_plugins_help_says_what_is_typed() {
    for (name, args, usage) in [
        (
            "kubectl-inspect-gpushare",
            &["--help"][..],
            "Usage: kubectl inspect gpushare [",
        ),
        ("kubectl-inspect_gpushare", &["-h"], "Usage: kubectl inspect gpushare ["),
        ("kubectl-divvy", &["why", "--help"], "Usage: kubectl divvy why ["),
        ("divvy", &["why", "--help"], "Usage: divvy why ["),
    ] {
        let help = stdout(&as_plugin(name, args));
        assert!(help.contains(usage), "{name}: {help}");
    }
}

#[test]
fn every_name_of_the_program_tells_its_version() {
    let version = env!("CARGO_PKG_VERSION");
    for (name, args, expected) in [
        ("divvy", &["--version"][..], format!("divvy {version}\n")),
        ("kubectl-divvy", &["--version"], format!("divvy {version}\n")),
        (
            "kubectl-inspect-gpushare",
            &["--version"],
            format!("kubectl-inspect-gpushare {version}\n"),
        ),
        (
            "divvy",
            &["inspect", "gpushare", "-V"],
            format!("kubectl-inspect-gpushare {version}\n"),
        ),
        (
            "kubectl-divvy",
            &["version", "--client"],
            format!("Client:  {version} (commit {})\n", divvy::version::CLIENT.commit),
        ),
    ] {
        assert_eq!(stdout(&as_plugin(name, args)), expected, "{name} {args:?}");
    }
}

/// The command says what runs in the cluster.
#[tokio::test]
async fn version_warns_of_other_versions_in_the_cluster() {
    let directory = tempfile::tempdir().expect("a directory");
    let (api, _listening, kubeconfig) = gpushares_cluster(directory.path()).await;
    let version = async |args: &[&str]| beside(&[&["version", "--kubeconfig", &kubeconfig][..], args].concat(), &[]).await;
    let bare = stdout(&version(&[]).await);
    assert!(
        bare.contains("Extender:    no pod of the cluster is Divvy's extender\n"),
        "{bare}"
    );
    assert!(bare.contains("Agents:      no node has published its GPUs\n"), "{bare}");
    let labels = json!({"app.kubernetes.io/name": "divvy", "app.kubernetes.io/component": "extender"});
    let spec = json!({"nodeName": "node-a", "containers": [{"name": "extender", "image": "example/divvy:0.0.9"}]});
    let pod = json!({"metadata": {"name": "extender-0", "namespace": "divvy-system", "labels": labels}, "spec": spec});
    api.create("namespaces", json!({"metadata": {"name": "divvy-system"}}))
        .expect("a namespace");
    api.create("pods", pod).expect("a pod");
    let output = version(&["-o", "json"]).await;
    let json: serde_json::Value = serde_json::from_str(&stdout(&output)).expect("JSON");
    assert_eq!(
        json["server"]["extender"],
        json!([{"version": "0.0.9", "image": "example/divvy:0.0.9", "pods": ["divvy-system/extender-0"]}])
    );
    assert!(json["server"]["kubernetes"].is_string(), "{json}");
    assert!(
        stderr(&output).starts_with("warning: the extender is 0.0.9, and this program is"),
        "{}",
        stderr(&output)
    );
    let away = divvy(&["version", "--server", "http://127.0.0.1:1"], &[]);
    assert_eq!(away.status.code(), Some(1));
    assert!(stdout(&away).starts_with("Client:  "), "{}", stdout(&away));
    assert!(stderr(&away).contains("http://127.0.0.1:1"), "{}", stderr(&away));
}

#[test]
fn what_is_wrong_is_named_with_what_to_type_instead() {
    let directory = tempfile::tempdir().expect("a directory");
    let write = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).expect("written");
        path.display().to_string()
    };
    let unknown_key = write("unknown.toml", "node-name = \"n\"\nmemory-units = \"GiB\"\n");
    let wrong_value = write("value.toml", "memory-unit = \"GB\"\n");
    let garbage = write("garbage", "{ not: [a kubeconfig");
    let cases: Vec<(Vec<&str>, i32, &str)> = vec![
        (
            vec!["inspect", "gpushare", "--kubeconfig", "/nowhere"],
            1,
            "there is no kubeconfig file at /nowhere",
        ),
        (vec!["inspect", "gpushare", "--kubeconfig", &garbage], 1, "cannot be used"),
        (vec!["why"], 1, "KUBECONFIG is not set"),
        (vec!["audit"], 1, "KUBECONFIG is not set"),
        (vec!["inspect", "gpushare", "--outptu", "json"], 2, "--output"),
        (vec!["inspect", "gpushare", "-o", "xml"], 2, "wide, json, yaml, name"),
        (vec!["extender", "--listen", "here"], 2, "--listen"),
        (
            vec!["extender", "--listen", "0.0.0.0:32766"],
            1,
            "--listen 0.0.0.0:32766 without TLS lets everyone who can connect to it bind pods",
        ),
        (vec!["extender", "--listen", "[::]:32766"], 1, "--insecure"),
        // The program continues, and does not find a cluster.
        (
            vec!["extender", "--listen", "0.0.0.0:32766", "--insecure"],
            1,
            "KUBECONFIG is not set",
        ),
        (
            vec!["extender", "--listen", "[::ffff:127.0.0.1]:32766"],
            1,
            "KUBECONFIG is not set",
        ),
        (vec!["extender", "--webhook"], 1, "--webhook needs TLS"),
        (vec!["extender", "--client-name", "x"], 2, "--client-ca-file"),
        (vec!["extender", "--memory-unit", "GB"], 2, "256MiB"),
        (vec!["agent"], 1, "--node-name"),
        (
            vec!["agent", "--node-name", "n", "--device-list-strategy", "envvar"],
            1,
            "auto or cdi",
        ),
        (
            vec!["agent", "--node-name", "n", "--reserve-memory", "512"],
            2,
            "512MiB or 2GiB",
        ),
        (
            vec!["agent", "--node-name", "n", "--config", "/nowhere.toml"],
            1,
            "/nowhere.toml",
        ),
        (vec!["agent", "--config", &unknown_key], 1, "unknown field `memory-units`"),
        (vec!["agent", "--config", &wrong_value], 1, "memory unit: "),
        (vec!["agent", "--node-name", "n", "--probe", "unix:"], 2, "unix:SOCKET"),
        (
            vec!["agent", "--node-name", "n", "--kubeconfig", "/nowhere"],
            1,
            "there is no kubeconfig file at /nowhere",
        ),
    ];
    for (args, status, part) in cases {
        let output = divvy(&args, &[]);
        assert_eq!(output.status.code(), Some(status), "{args:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(part), "{args:?} says {}", stderr(&output));
        assert!(!stderr(&output).contains("panicked"), "{args:?}");
    }
}

/// Make a cluster in the state in which gpushare's own programs leave it, according to gpushare's documentation.
async fn gpushares_cluster(directory: &Path) -> (ApiServer, Listening, String) {
    let api = ApiServer::new(ApiServerOptions::default());
    for (name, address, units, gpus) in [("node-a", "10.0.0.1", "32", "2"), ("node-b", "10.0.0.2", "16", "1")] {
        let resources = json!({"aliyun.com/gpu-mem": units, "aliyun.com/gpu-count": gpus});
        let status =
            json!({"capacity": resources, "allocatable": resources, "addresses": [{"type": "InternalIP", "address": address}]});
        api.create("nodes", json!({"metadata": {"name": name}, "status": status}))
            .expect("a node");
    }
    for (name, node, units, index) in [
        ("train-0", "node-a", "8", Some("0")),
        ("infer", "node-a", "3", Some("1")),
        ("lost", "node-b", "5", None),
    ] {
        let annotations = match index {
            Some(index) => json!({"ALIYUN_COM_GPU_MEM_IDX": index, "ALIYUN_COM_GPU_MEM_POD": units}),
            None => json!({}),
        };
        let container = json!({"name": "main", "image": "i", "resources": {"limits": {"aliyun.com/gpu-mem": units}}});
        let pod = json!({"metadata": {"name": name, "namespace": "default", "annotations": annotations}, "spec": {"nodeName": node, "containers": [container]}});
        api.create("pods", pod).expect("a pod");
    }
    let listening = api.listen(([127, 0, 0, 1], 0).into()).await.expect("a port");
    let path = directory.join("kubeconfig");
    std::fs::write(&path, api.kubeconfig(listening.addr())).expect("written");
    (api, listening, path.display().to_string())
}

#[tokio::test]
async fn inspect_shows_a_gpushare_cluster_in_every_form() {
    let directory = tempfile::tempdir().expect("a directory");
    let (_api, _listening, kubeconfig) = gpushares_cluster(directory.path()).await;
    let table = "NAME    IPADDRESS  GPU0(Allocated/Total)  GPU1(Allocated/Total)  PENDING(Allocated)  GPU Memory(GiB)\n\
                 node-a  10.0.0.1   8/16                   3/16                                       11/32\n\
                 node-b  10.0.0.2   0/16                   0/0                    5                   5/16\n\
                 -----------------------------------------------------\n\
                 Allocated/Total GPU Memory In Cluster:\n\
                 16/48 (33%)  \n";
    // Several paths, as in kubectl; missing files are ignored.
    let several = format!("/nowhere:{kubeconfig}");
    for env in [kubeconfig.as_str(), several.as_str()] {
        assert_eq!(stdout(&beside(&["inspect", "gpushare"], &[("KUBECONFIG", env)]).await), table);
    }
    assert_eq!(
        stdout(&beside(&["inspect", "gpushare", "--kubeconfig", &kubeconfig], &[]).await),
        table
    );
    let one = stdout(&beside(&["inspect", "gpushare", "node-b", "--kubeconfig", &kubeconfig], &[]).await);
    assert!(
        one.contains("node-b  10.0.0.2   0/16                   5                   5/16\n") && !one.contains("node-a"),
        "{one}"
    );
    let json: serde_json::Value = serde_json::from_str(&stdout(
        &beside(&["inspect", "gpushare", "-o", "json", "--kubeconfig", &kubeconfig], &[]).await,
    ))
    .expect("JSON");
    assert_eq!(
        json["nodes"][0]["gpus"][0]["pods"][0],
        json!({"name": "train-0", "namespace": "default", "units": 8})
    );
    assert_eq!(
        (&json["allocated"], &json["total"], &json["unit"]),
        (&json!(16), &json!(48), &json!("GiB"))
    );
    let yaml = stdout(&beside(&["inspect", "gpushare", "-o", "yaml", "--kubeconfig", &kubeconfig], &[]).await);
    assert!(yaml.contains("unit: GiB\n"), "{yaml}");
    let missing = beside(&["inspect", "gpushare", "node-c", "--kubeconfig", &kubeconfig], &[]).await;
    assert_eq!(missing.status.code(), Some(1));
    assert!(
        stderr(&missing).contains("node node-c could not be read"),
        "{}",
        stderr(&missing)
    );
}

/// The bound pod has no allocation.
#[tokio::test]
async fn why_tells_a_bound_pod_from_a_running_one() {
    let directory = tempfile::tempdir().expect("a directory");
    let (_api, _listening, kubeconfig) = gpushares_cluster(directory.path()).await;
    let why = async |args: &[&str]| beside(&[&["why", "--kubeconfig", &kubeconfig][..], args].concat(), &[]).await;
    let runs = stdout(&why(&["train-0"]).await);
    assert!(
        runs.contains("is bound to node node-a") && runs.contains("holds 8 GiB of GPU 0"),
        "{runs}"
    );
    let lost = stdout(&why(&["lost"]).await);
    assert!(lost.contains("without an allocation") && lost.contains("bindVerb"), "{lost}");
    assert_eq!(stdout(&why(&["-A"]).await), "No pod waits for GPU memory in any namespace.\n");
    let none = why(&["nope", "-n", "elsewhere"]).await;
    assert_eq!(none.status.code(), Some(1));
    assert_eq!(
        stderr(&none),
        "error: pod elsewhere/nope could not be read: pods \"nope\" not found (404 NotFound)\n"
    );
    let json: serde_json::Value = serde_json::from_str(&stdout(&why(&["train-0", "-o", "json"]).await)).expect("JSON");
    assert_eq!(
        (&json["state"], &json["shares"][0]["memoryMiB"]),
        (&json!("bound"), &json!(8192))
    );
}

#[tokio::test]
async fn names_and_paths_are_printed_as_kubectl_prints_them() {
    let directory = tempfile::tempdir().expect("a directory");
    let (_api, _listening, kubeconfig) = gpushares_cluster(directory.path()).await;
    let printed = async |args: &[&str]| {
        let output = beside(&[args, &["--kubeconfig", &kubeconfig]].concat(), &[]).await;
        assert!(output.status.success(), "{args:?}: {}", stderr(&output));
        stdout(&output)
    };
    for (args, expected) in [
        (&["inspect", "gpushare", "-o", "name"][..], "node/node-a\nnode/node-b\n"),
        (
            &["inspect", "gpushare", "node-b", "node-a", "node-b", "-o", "name"],
            "node/node-a\nnode/node-b\n",
        ),
        (
            &["inspect", "gpushare", "--sort-by", "total", "-o", "name"],
            "node/node-b\nnode/node-a\n",
        ),
        (
            &["inspect", "gpushare", "--sort-by", "{.gpus[0].allocated}", "-o", "name"],
            "node/node-b\nnode/node-a\n",
        ),
        (
            &["inspect", "gpushare", "-o", "jsonpath={.nodes[*].name} of {.unit}"],
            "node-a node-b of GiB\n",
        ),
        (
            &["inspect", "gpushare", "--no-headers"],
            "node-a  10.0.0.1  8/16  3/16     11/32\nnode-b  10.0.0.2  0/16  0/0   5  5/16\n",
        ),
        (&["why", "train-0", "infer", "-o", "name"], "pod/train-0\npod/infer\n"),
        (&["why", "train-0", "-o", "jsonpath={.state}"], "bound\n"),
        (
            &["why", "train-0", "infer", "-o", "jsonpath={[*].shares[0].memoryMiB}"],
            "8192 3072\n",
        ),
        (
            &[
                "why",
                "train-0",
                "--placement",
                "-o",
                "jsonpath={.best[0].gpus[0].index} {.request.units}",
            ],
            "0 8\n",
        ),
        (&["why", "train-0", "--placement", "-o", "name"], "pod/train-0\n"),
    ] {
        assert_eq!(printed(args).await, expected, "{args:?}");
    }
}

#[tokio::test]
async fn colours_come_when_they_are_asked_for_and_not_into_a_pipe() {
    let directory = tempfile::tempdir().expect("a directory");
    let (api, _listening, kubeconfig) = gpushares_cluster(directory.path()).await;
    let container = json!({"name": "main", "image": "i", "resources": {"limits": {"aliyun.com/gpu-mem": "40"}}});
    let pod = json!({"metadata": {"name": "big", "namespace": "default"}, "spec": {"containers": [container]}});
    api.create("pods", pod).expect("a pod");
    let said =
        async |args: &[&str], env: &[(&str, &str)]| stdout(&beside(&[args, &["--kubeconfig", &kubeconfig]].concat(), env).await);
    let none = |text: &str| !text.is_empty() && !text.contains('\x1b');
    for command in [&["why", "big"][..], &["audit"], &["doctor", "--cluster", "--only", "K03"]] {
        assert!(none(&said(command, &[]).await), "{command:?}");
        let always = [command, &["--color", "always"]].concat();
        let coloured = said(&always, &[("NO_COLOR", "1")]).await;
        assert!(coloured.contains("\x1b["), "{command:?}: {coloured}");
        assert!(none(&said(&[command, &["--color=never"]].concat(), &[]).await), "{command:?}");
    }
    let why = said(&["why", "big", "--color=always"], &[]).await;
    assert!(why.starts_with("\x1b[1;33mPod default/big\x1b[0m waits"), "{why}");
    let audit = said(&["--color=always", "audit"], &[]).await;
    assert!(audit.contains("\x1b[1;31mFAULT\x1b[0m  "), "{audit}");
}

/// The lines of a paragraph are wrapped only at the terminal's width.
#[test]
fn help_is_wrapped_by_the_terminal_alone() {
    let commands: &[&[&str]] = &[
        &[],
        &["agent"],
        &["extender"],
        &["inspect", "gpushare"],
        &["why"],
        &["version"],
        &["audit"],
        &["scheduler-config"],
        &["cdi", "generate"],
        &["cdi", "list"],
        &["cdi", "validate"],
        &["cdi", "transform"],
        &["configure"],
        &["runtime-config"],
        &["doctor"],
        &["simulate"],
        &["completions"],
        &["demo"],
    ];
    // The items of lists, which are not part of a paragraph.
    let item = |line: &str| {
        ["PASS", "SKIP", "error:", "warning:", "With --explain:"]
            .iter()
            .any(|word| line.starts_with(word))
    };
    for command in commands {
        for columns in [60, 80, 100] {
            let args = [command, &["--help"][..]].concat();
            let help = stdout(&divvy(&args, &[("COLUMNS", &columns.to_string())]));
            let after = help.split("\nExamples:\n").nth(1).unwrap_or_default();
            for pair in after.lines().collect::<Vec<_>>().windows(2) {
                let [line, next] = pair else { continue };
                let prose = |line: &str| !line.is_empty() && !line.starts_with(' ');
                if !prose(line) || !prose(next) || line.ends_with(':') || item(next) {
                    continue;
                }
                let word = next.split_whitespace().next().unwrap_or_default();
                let width = line.chars().count() + 1 + word.chars().count();
                assert!(
                    width > columns,
                    "{command:?} at {columns} columns: {line:?} goes on with {word:?}"
                );
            }
            if columns == 80 {
                for line in after.lines().filter(|line| line.chars().count() > columns) {
                    assert!(line.starts_with("  ") && !line.starts_with("      "), "{command:?}: {line:?}");
                }
            }
        }
    }
}

#[test]
fn an_unknown_form_is_answered_with_those_that_there_are() {
    for (args, expected) in [
        (
            &["inspect", "gpushare", "-o", "xml"][..],
            "[possible values: wide, json, yaml, name, jsonpath=]",
        ),
        (&["why", "-o", "xml"], "[possible values: json, yaml, name, jsonpath=]"),
        (&["audit", "-o", "xml"], "[possible values: json]"),
        (&["version", "-o", "xml"], "[possible values: json, yaml]"),
        (&["why", "-o", "jsonpath={.state"], "-o jsonpath={.state: a { has no }"),
        (
            &["why", "-o", "jsonpath={range .pods[*]}"],
            "{range .pods[*]} is not supported",
        ),
        (
            &["inspect", "gpushare", "--sort-by", "used"],
            "write name, allocated, free, total",
        ),
    ] {
        let output = divvy(args, &[]);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(stderr(&output).contains(expected), "{args:?}: {}", stderr(&output));
    }
}

/// A running program, and its output so far.
struct Running {
    child: tokio::process::Child,
    printed: String,
}

impl Running {
    fn start(args: &[&str]) -> Running {
        let mut command = tokio::process::Command::from(command(args, &[]));
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        Running {
            child: child.spawn().expect("it starts"),
            printed: String::new(),
        }
    }

    /// Wait for a text, and return all output up to it.
    async fn until(&mut self, text: &str) -> String {
        use tokio::io::AsyncReadExt as _;
        let out = self.child.stdout.as_mut().expect("piped");
        while !self.printed.contains(text) {
            let mut part = [0; 4096];
            let read = tokio::time::timeout(std::time::Duration::from_secs(60), out.read(&mut part)).await;
            let length = read
                .unwrap_or_else(|_| panic!("no {text:?} in {:?}", self.printed))
                .expect("readable");
            assert!(length > 0, "it ended without {text:?}: {:?}", self.printed);
            self.printed.push_str(&String::from_utf8_lossy(&part[..length]));
        }
        std::mem::take(&mut self.printed)
    }
}

#[tokio::test]
async fn a_watched_answer_follows_changes_and_ends_with_the_pod() {
    use divvy_testbed::api::{DeleteOptions, PatchKind};
    let directory = tempfile::tempdir().expect("a directory");
    let (api, _listening, kubeconfig) = gpushares_cluster(directory.path()).await;
    let container = json!({"name": "main", "image": "i", "resources": {"limits": {"aliyun.com/gpu-mem": "40"}}});
    for name in ["big", "other"] {
        let pod = json!({"metadata": {"name": name, "namespace": "default"}, "spec": {"containers": [container]}});
        api.create("pods", pod).expect("a pod");
    }
    let mut both = Running::start(&["why", "big", "other", "-w", "--kubeconfig", &kubeconfig]);
    let mut json = Running::start(&["why", "big", "-w", "-o", "jsonpath={.state}", "--kubeconfig", &kubeconfig]);
    let mut all = Running::start(&["why", "-w", "--kubeconfig", &kubeconfig]);
    all.until("default").await;
    let first = both.until("Pod default/other").await;
    assert!(first.contains("Pod default/big") && !first.contains("---"), "{first}");
    assert_eq!(json.until("\n").await, "waiting\n");
    let gate = json!({"metadata": {"annotations": {"divvy.dev/gpu-model": "H100*"}}});
    api.patch("pods", "default", "big", PatchKind::Merge, &gate).expect("patched");
    let second = both.until("H100").await;
    assert!(second.contains("--- ") && !second.contains("default/other"), "{second}");
    for name in ["big", "other"] {
        let options = DeleteOptions {
            grace_period_s: Some(0),
            ..DeleteOptions::default()
        };
        api.delete("pods", "default", name, &options).expect("deleted");
    }
    let over = all.until("No pod waits").await;
    for name in ["big", "other"] {
        assert!(over.contains(&format!("Pod default/{name} no longer waits.\n")), "{over}");
    }
    let last = both.until("other is gone.\n").await;
    assert!(last.contains("big is gone.\n"), "{last}");
    for running in [&mut both, &mut json] {
        let ended = tokio::time::timeout(std::time::Duration::from_secs(60), running.child.wait()).await;
        assert!(ended.expect("it ends").expect("waited for").success());
    }
}

#[tokio::test]
async fn a_table_that_is_watched_is_printed_anew_when_it_changes() {
    use divvy_testbed::api::DeleteOptions;
    let directory = tempfile::tempdir().expect("a directory");
    let (api, _listening, kubeconfig) = gpushares_cluster(directory.path()).await;
    let mut table = Running::start(&["inspect", "gpushare", "-w", "--no-headers", "--kubeconfig", &kubeconfig]);
    table.until("11/32").await;
    let options = DeleteOptions {
        grace_period_s: Some(0),
        ..DeleteOptions::default()
    };
    api.delete("pods", "default", "train-0", &options).expect("deleted");
    let second = table.until("3/32").await;
    assert!(second.starts_with("--- "), "{second}");
}
