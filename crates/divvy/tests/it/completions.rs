//! Tab completion offers names from the cluster that the command line selects.

use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use divvy_testbed::api::{ApiServer, ApiServerOptions, Listening};
use serde_json::json;

use crate::cli::{command, stderr, stdout};

async fn cluster(directory: &std::path::Path) -> (ApiServer, Listening, String) {
    let api = ApiServer::new(ApiServerOptions::default());
    let spec = json!({"containers": [{"name": "main", "image": "i"}]});
    for namespace in ["ml", "mlops"] {
        api.create("namespaces", json!({"metadata": {"name": namespace}}))
            .expect("a namespace");
    }
    for node in ["gpu-1", "gpu-2", "cpu-1"] {
        api.create("nodes", json!({"metadata": {"name": node}})).expect("a node");
    }
    for (namespace, name) in [
        ("default", "train-0"),
        ("default", "train-1"),
        ("default", "web"),
        ("ml", "train-ml"),
    ] {
        api.create(
            "pods",
            json!({"metadata": {"name": name, "namespace": namespace}, "spec": spec}),
        )
        .expect("a pod");
    }
    let listening = api.listen(([127, 0, 0, 1], 0).into()).await.expect("a port");
    let path = directory.join("kubeconfig");
    std::fs::write(&path, api.kubeconfig(listening.addr())).expect("written");
    (api, listening, path.display().to_string())
}

/// Request completions as the bash script does, with the cursor at the last word.
async fn tab(words: &[&str], env: &[(&str, &str)]) -> Output {
    let index = (words.len() - 1).to_string();
    let mut command = command(&[&["--"], words].concat(), env);
    command
        .env("DIVVY_COMPLETE", "bash")
        .env("_CLAP_COMPLETE_INDEX", index)
        .env("_CLAP_IFS", "\n");
    tokio::process::Command::from(command).output().await.expect("it runs")
}

/// The cluster is the one that the line names.
#[tokio::test]
async fn pods_namespaces_and_nodes_of_the_cluster_are_offered() {
    let directory = tempfile::tempdir().expect("a directory");
    let (_api, _listening, kubeconfig) = cluster(directory.path()).await;
    let at = ["divvy", "why", "--kubeconfig", &kubeconfig];
    let cases: &[(&[&str], &[&str])] = &[
        (&["tr"], &["train-0", "train-1"]),
        (&[""], &["train-0", "train-1", "web"]),
        (&["web", "train-"], &["train-0", "train-1"]),
        (&["pod/w"], &["pod/web"]),
        (&["ml/"], &["ml/train-ml"]),
        (&["deploy/"], &[]),
        (&["-n", "ml", "tr"], &["train-ml"]),
        (&["-n", "ml"], &["ml", "mlops"]),
        (&["--namespace", "mlo"], &["mlops"]),
        (&["--namespace=ml"], &["--namespace=ml", "--namespace=mlops"]),
    ];
    for (words, expected) in cases {
        let output = tab(&[&at[..], words].concat(), &[]).await;
        assert_eq!(stdout(&output).lines().collect::<Vec<_>>(), *expected, "{words:?}");
    }
    // With the environment variable that applies to all commands.
    let nodes = tab(&["divvy", "inspect", "gpushare", "gpu"], &[("KUBECONFIG", &kubeconfig)]).await;
    assert_eq!(stdout(&nodes).lines().collect::<Vec<_>>(), ["gpu-1", "gpu-2"]);
}

#[tokio::test]
async fn kubectl_is_given_the_names_too() {
    let directory = tempfile::tempdir().expect("a directory");
    let (_api, _listening, kubeconfig) = cluster(directory.path()).await;
    let link = directory.path().join("kubectl_complete-divvy");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_divvy"), &link).expect("linked");
    let output = tokio::process::Command::new(link)
        .args(["why", "--kubeconfig", &kubeconfig, "train"])
        .output()
        .await
        .expect("it runs");
    assert_eq!(stdout(&output), "train-0\ntrain-1\n:4\n");
}

#[tokio::test]
async fn without_a_cluster_a_tab_is_silent_and_quick() {
    let silent = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let server = format!("http://{}", silent.local_addr().expect("an address"));
    let since = Instant::now();
    for words in [
        &["divvy", "why", "--server", &server, ""][..],
        &["divvy", "why", "--server", "http://127.0.0.1:1", "x"],
        &["divvy", "why", "--kubeconfig", "/nowhere", "x"],
        &["divvy", "why", "x"],
    ] {
        let output = tab(words, &[]).await;
        let offered = stdout(&output);
        assert!(offered.lines().all(|line| line.starts_with('-')), "{words:?}: {offered}");
        assert_eq!(stderr(&output), "", "{words:?}");
        assert!(output.status.success(), "{words:?}");
    }
    assert!(since.elapsed() < Duration::from_secs(30));
}

#[tokio::test]
async fn no_more_names_are_offered_than_anybody_reads() {
    let directory = tempfile::tempdir().expect("a directory");
    let (api, _listening, kubeconfig) = cluster(directory.path()).await;
    for i in 0..600 {
        api.create("nodes", json!({"metadata": {"name": format!("many-{i:04}")}}))
            .expect("a node");
    }
    let output = tab(&["divvy", "inspect", "gpushare", "--kubeconfig", &kubeconfig, "many"], &[]).await;
    assert_eq!(stdout(&output).lines().count(), 300);
    // Names beyond the first page are found.
    let output = tab(
        &["divvy", "inspect", "gpushare", "--kubeconfig", &kubeconfig, "many-0599"],
        &[],
    )
    .await;
    assert_eq!(stdout(&output), "many-0599");
}

/// A shell that has loaded the script calls the program.
#[test]
fn bash_takes_the_script() {
    let script = stdout(&command(&["completions", "bash"], &[]).output().expect("it runs"));
    let directory = tempfile::tempdir().expect("a directory");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_divvy"), directory.path().join("divvy")).expect("linked");
    let line = format!(
        "{script}\nCOMP_WORDS=(divvy wh); COMP_CWORD=1; COMP_TYPE=9; _clap_complete_divvy divvy wh divvy; echo \"${{COMPREPLY[@]}}\""
    );
    let path = format!("{}:{}", directory.path().display(), std::env::var("PATH").unwrap_or_default());
    let output = std::process::Command::new("bash")
        .args(["-c", &line])
        .env("PATH", path)
        .stdin(Stdio::null())
        .output()
        .expect("bash runs");
    assert_eq!(stdout(&output), "why\n", "{}", stderr(&output));
}
