//! `divvy scheduler-config` as a user runs it, and its check on the embedded cluster.

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use divvy_testbed::api::{Effect, FaultRule, Match};
use divvy_testbed::builders::pod;
use divvy_testbed::scheduler::{Scheduler, SchedulerConfig};
use rustix::process::{Pid, Signal, kill_process};

use crate::bed::Bed;

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_divvy"));
    command
        .arg("scheduler-config")
        .args(args)
        .stdin(Stdio::null())
        .env_remove("KUBECONFIG")
        .env("HOME", "/nonexistent");
    command
}

fn run(args: &[&str]) -> Output {
    command(args).output().expect("it runs")
}

/// Run the check without blocking this thread, because the API server runs in this process.
async fn check(kubeconfig: &Path, args: &[&str]) -> Output {
    let mut command = command(&["--check", "--kubeconfig"]);
    command.arg(kubeconfig).args(args);
    tokio::process::Command::from(command).output().await.expect("it runs")
}

fn kubeconfig(bed: &Bed) -> std::path::PathBuf {
    bed.cluster.kubeconfig()
}

fn pods_of_checks(bed: &Bed) -> Vec<String> {
    let all = bed.api().list("pods", "").expect("pods");
    let names = all.iter().filter_map(|pod| pod["metadata"]["name"].as_str());
    names
        .filter(|name| name.starts_with("divvy-scheduler-check-"))
        .map(str::to_owned)
        .collect()
}

#[tokio::test]
async fn the_check_says_yes_where_the_scheduler_calls_the_extender() {
    let bed = Bed::new(&[&[16]]).await;
    let output = check(&kubeconfig(&bed), &[]).await;
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{said}{}", text(&output.stderr));
    assert!(said.contains("\"default-scheduler\" calls the extender"), "{said}");
    assert_eq!(pods_of_checks(&bed), Vec::<String>::new());
    // The extender keeps nothing of the check: the whole GPU is free.
    bed.create(&pod("all").gpu_mem(16));
    bed.running("all").await;
    bed.delete("all");
    bed.gone("all").await;
    bed.end().await;
}

#[tokio::test]
async fn the_check_says_no_where_a_scheduler_binds_without_asking() {
    let bed = Bed::new(&[&[16]]).await;
    let without = SchedulerConfig {
        name: "without".to_owned(),
        ..SchedulerConfig::default()
    };
    let scheduler = Scheduler::start(bed.api().client(), without);
    let output = check(&kubeconfig(&bed), &["--profile", "without"]).await;
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{said}{}", text(&output.stderr));
    assert!(
        said.contains("bound the pod to node n1 without calling the extender"),
        "{said}"
    );
    assert_eq!(pods_of_checks(&bed), Vec::<String>::new());
    scheduler.shutdown().await;
}

#[tokio::test]
async fn the_check_cannot_tell_where_no_node_has_room_or_nobody_looks() {
    let bed = Bed::new(&[&[4]]).await;
    bed.create(&pod("all").gpu_mem(4));
    bed.running("all").await;
    let full = check(&kubeconfig(&bed), &["--timeout", "1s"]).await;
    assert_eq!(full.status.code(), Some(2), "{}", text(&full.stderr));
    let said = text(&full.stderr);
    assert!(
        said.contains("No node has a free unit of aliyun.com/gpu-mem")
            && said.contains("only for nodes with enough free units in total"),
        "{said}"
    );
    bed.delete("all");
    bed.gone("all").await;
    let nobody = check(&kubeconfig(&bed), &["--timeout", "1s", "--profile", "nobody"]).await;
    assert_eq!(nobody.status.code(), Some(2));
    assert!(
        text(&nobody.stderr).contains("Check that a scheduler named \"nobody\""),
        "{}",
        text(&nobody.stderr)
    );
    assert_eq!(pods_of_checks(&bed), Vec::<String>::new());
    bed.end().await;
}

#[tokio::test]
async fn an_interrupted_check_takes_its_pod_along() {
    let bed = Bed::new(&[&[16]]).await;
    let path = kubeconfig(&bed);
    let mut command = command(&["--check", "--profile", "nobody", "--timeout", "60s", "--kubeconfig"]);
    command.arg(path).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = tokio::process::Command::from(command).spawn().expect("it starts");
    bed.until("the check's pod", async |bed| {
        (!pods_of_checks(bed).is_empty())
            .then_some(())
            .ok_or_else(|| "there is none".to_owned())
    })
    .await;
    let pid = child.id().and_then(|id| Pid::from_raw(id.cast_signed())).expect("it runs");
    kill_process(pid, Signal::INT).expect("the signal is sent");
    let output = tokio::time::timeout(Duration::from_secs(20), child.wait_with_output())
        .await
        .expect("it ends")
        .expect("it ran");
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    assert_eq!(pods_of_checks(&bed), Vec::<String>::new());
}

#[tokio::test]
async fn a_pod_that_was_refused_is_not_said_to_be_there() {
    let bed = Bed::new(&[&[16]]).await;
    let config = kubeconfig(&bed);
    let faults = bed.api().faults();
    let pods = |verb: &str| Match::any().verb(verb).resource("pods").name("divvy-scheduler-check-*");
    let created = || Match::any().verb("create").resource("pods");
    let no_deletion = faults.add(FaultRule::new(pods("delete"), Effect::Refuse(403)));
    for code in [403, 409, 422] {
        let refused = faults.add(FaultRule::new(created(), Effect::Refuse(code)));
        let output = check(&config, &[]).await;
        faults.remove(refused);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains("the check's pod could not be created"), "{code}: {said}");
        assert!(!said.contains("may still exist"), "{code}: {said}");
    }
    assert_eq!(faults.fired(no_deletion), 0, "a pod that was not created is not deleted");
    // If it is unknown whether the pod was created, it is deleted, or a warning says that it may still exist.
    let lost = faults.add(FaultRule::new(created(), Effect::LoseAnswer));
    let output = check(&config, &[]).await;
    faults.remove(lost);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("may still exist"), "{said}");
    faults.remove(no_deletion);
    bed.end().await;
}

#[test]
fn a_check_without_a_cluster_cannot_tell() {
    let output = run(&["--check"]);
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    assert!(
        text(&output.stderr).contains("it is unknown whether the scheduler calls the extender"),
        "{}",
        text(&output.stderr)
    );
}

#[test]
fn a_file_is_merged_in_place_or_not_touched_at_all() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("config.yaml");
    let path = file.display().to_string();
    let old = "apiVersion: kubescheduler.config.k8s.io/v1beta2\nkind: KubeSchedulerConfiguration\n";
    std::fs::write(&file, old).expect("written");
    let output = run(&["--merge", &path, "-o", &path]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout), "", "data goes to the file");
    let new = std::fs::read_to_string(&file).expect("it is there");
    assert!(
        new.contains("kubescheduler.config.k8s.io/v1\n") && new.contains("/gpushare-scheduler"),
        "{new}"
    );

    std::fs::write(&file, "kind: [").expect("written");
    let refused = run(&["--merge", &path, "-o", &path]);
    assert_eq!(refused.status.code(), Some(1));
    assert_eq!(std::fs::read_to_string(&file).expect("it is there"), "kind: [");
    assert_eq!(
        std::fs::read_dir(directory.path()).expect("a directory").count(),
        1,
        "nothing else is left"
    );
}

#[test]
fn standard_input_is_merged_to_standard_output() {
    let mut command = command(&["--merge", "-"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("it starts");
    let mut stdin = child.stdin.take().expect("piped");
    stdin
        .write_all(b"apiVersion: kubescheduler.config.k8s.io/v1beta3\nkind: KubeSchedulerConfiguration\n")
        .expect("written");
    drop(stdin);
    let output = child.wait_with_output().expect("it ends");
    assert!(output.status.success());
    assert!(text(&output.stdout).contains("managedResources"), "{}", text(&output.stdout));
    assert!(
        text(&output.stderr).contains("1.29 no longer reads"),
        "{}",
        text(&output.stderr)
    );
}

#[test]
fn wrong_flags_are_refused_with_what_to_type() {
    let check = |args: &[&str], code: i32, part: &str| {
        let output = run(args);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {said}");
        assert!(said.contains(part), "{args:?}: {said}");
    };
    check(&["--for", "eks"], 2, "kubeadm, k3s, rke2, k0s, microk8s, kind");
    check(&["--extender-url", "localhost"], 1, "must start with http://");
    check(&["--merge", "/nowhere"], 1, "--config");
    check(&["--as-second-scheduler", "--kubernetes-version", "1.36"], 2, "1.36.3");
    check(&["--as-second-scheduler", "--namespace", "A b"], 2, "lower-case");
    check(
        &[
            "--as-second-scheduler",
            "--extender-url",
            "https://e/gpushare-scheduler",
            "--tls-ca",
            "/ca",
        ],
        1,
        "--tls-secret",
    );
    let old = ["--as-second-scheduler", "--kubernetes-version", "1.33.4"];
    check(&old, 1, "Add --from-cluster");
    check(&[&old[..], &["--mutate-with", "policy"]].concat(), 1, "--mutate-with webhook");
    check(&[&old[..], &["--mutate-with", "wish"]].concat(), 2, "policy, webhook, none");
    check(&["--mutate-with", "none"], 2, "--as-second-scheduler");
    check(&["--check", "--merge", "x"], 2, "cannot be used with");
    check(&["-o", "/nowhere/x.yaml"], 1, "could not be written, and is unchanged");
}

#[tokio::test]
async fn address_and_certificates_come_from_the_installed_extender() {
    use divvy_extender::tls::plan::{CertificateLifetimes, SecretData, plan};
    use divvy_extender::tls::{default_server_name, make};

    let bed = Bed::new(&[&[16]]).await;
    let kubeconfig = kubeconfig(&bed);
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("scheduler.yaml");
    let ask = async |more: &[&str]| {
        let mut command = command(&["--from-cluster", "--kubeconfig"]);
        command.arg(&kubeconfig).args(more);
        tokio::process::Command::from(command).output().await.expect("it runs")
    };
    let missing = ask(&[]).await;
    assert_eq!(missing.status.code(), Some(1));
    assert!(
        text(&missing.stderr).contains("there is no Service divvy-system/divvy-extender")
            && text(&missing.stderr).contains("(Helm: extender.loopback=true)"),
        "{missing:?}"
    );

    let meta = |name: &str| serde_json::json!({"name": name, "namespace": "divvy-system"});
    let create = |resource: &str, object: serde_json::Value| bed.api().create(resource, object).expect("created");
    create("namespaces", serde_json::json!({"metadata": {"name": "divvy-system"}}));
    create(
        "services",
        serde_json::json!({"metadata": meta("divvy-extender"), "spec": {"clusterIP": "10.96.0.7", "ports": [{"port": 32766}]}}),
    );
    let plain = ask(&[]).await;
    assert!(
        text(&plain.stdout).contains("\"http://10.96.0.7:32766/gpushare-scheduler\""),
        "{plain:?}"
    );
    assert!(text(&plain.stderr).contains("plain HTTP"), "{plain:?}");
    let unheard = ask(&["--as-second-scheduler", "--mutate-with", "webhook"]).await;
    assert_eq!(unheard.status.code(), Some(1));
    assert!(text(&unheard.stderr).contains("only over TLS"), "{unheard:?}");

    let now_s = jiff::Timestamp::now().as_second();
    let name = default_server_name("divvy-system");
    let due = plan(&SecretData::new(), &name, now_s, CertificateLifetimes::default()).expect("ours");
    let data = make::carry_out(&due, &SecretData::new(), &name, now_s, CertificateLifetimes::default()).expect("made");
    let data: std::collections::BTreeMap<String, k8s_openapi::ByteString> = data
        .into_iter()
        .map(|(key, value)| (key, k8s_openapi::ByteString(value)))
        .collect();
    create(
        "secrets",
        serde_json::json!({"metadata": meta("divvy-extender-tls"), "data": data}),
    );
    let done = ask(&["-o", file.to_str().expect("UTF-8")]).await;
    assert!(done.status.success(), "{done:?}");
    use std::os::unix::fs::PermissionsExt as _;
    let mode = std::fs::metadata(&file).expect("written").permissions().mode();
    assert_eq!(mode & 0o077, 0, "with a key in it, for its owner only");
    let written = std::fs::read_to_string(&file).expect("text");
    for part in [
        "\"https://10.96.0.7:32766/gpushare-scheduler\"",
        "enableHTTPS: true",
        "keyData: ",
        "serverName: \"divvy-extender.divvy-system.svc\"",
    ] {
        assert!(written.contains(part), "{part} in {written}");
    }
    let webhook = [
        "--as-second-scheduler",
        "--mutate-with",
        "webhook",
        "--kubernetes-version",
        "1.33.4",
    ];
    let hooked = ask(&webhook).await;
    assert!(hooked.status.success(), "{hooked:?}");
    let ca = bed.api().get("secrets", "divvy-system", "divvy-extender-tls").expect("there")["data"]["ca.crt"].clone();
    let bundle = format!("caBundle: {}\n", ca.as_str().expect("base64"));
    let hooked = text(&hooked.stdout);
    for part in [
        "kind: MutatingWebhookConfiguration",
        "name: divvy-extender\n",
        "port: 32766",
        &bundle,
    ] {
        assert!(hooked.contains(part), "{part} in {hooked}");
    }
    let named = ask(&[&webhook[..], &["--tls-server-name", "localhost"]].concat()).await;
    assert!(
        text(&named.stderr).contains("for the name divvy-extender.divvy-system.svc, and --tls-server-name"),
        "{named:?}"
    );

    // With the user's own certificates, the CA is in the Secret that the scheduler mounts.
    let own = async |secret: &str| {
        let mut command = command(&webhook);
        command.args(["--extender-url", "https://e.n.svc:9/gpushare-scheduler", "-n", "divvy-system"]);
        command.args(["--tls-secret", secret, "--kubeconfig"]).arg(&kubeconfig);
        tokio::process::Command::from(command).output().await.expect("it runs")
    };
    let found = text(&own("divvy-extender-tls").await.stdout);
    assert!(found.contains(&bundle) && found.contains("port: 9\n"), "{found}");
    let missing = own("other").await;
    assert_eq!(missing.status.code(), Some(1));
    assert!(
        text(&missing.stderr).contains("there is no Secret divvy-system/other"),
        "{missing:?}"
    );

    let second = text(&ask(&["--as-second-scheduler"]).await.stdout);
    assert!(
        second.contains("https://divvy-extender.divvy-system.svc:32766/gpushare-scheduler"),
        "{second}"
    );
    assert!(second.contains("kind: Secret") && !second.contains("keyData"), "{second}");
}
