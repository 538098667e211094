//! Tests of `divvy doctor` as a command.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::cli::{self, beside, divvy, stderr, stdout};
use divvy_testkit::machine::{MachineFiles, kinds};

fn copy_of(machine: &MachineFiles) -> tempfile::TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    machine.write_below(directory.path()).expect("laid out");
    directory
}

fn doctor(root: &Path, args: &[&str]) -> std::process::Output {
    let root = root.display().to_string();
    divvy(&[&["doctor", "--root", &root], args].concat(), &[])
}

#[test]
fn a_copied_machines_worst_finding_is_the_exit_status() {
    let mut machine = kinds::debian();
    let directory = copy_of(&machine);
    let well = doctor(directory.path(), &["--only", "D02,D05,d07"]);
    assert_eq!(well.status.code(), Some(0), "{}", stdout(&well));
    assert!(
        stdout(&well).contains("PASS D05 the driver libraries and the kernel module have the same version: both 550.54.15\n")
    );
    machine.file("/sys/module/nvidia/version", "560.35.03\n");
    let directory = copy_of(&machine);
    let broken = doctor(directory.path(), &["--only", "D05", "-o", "json"]);
    assert_eq!(broken.status.code(), Some(2));
    let report: serde_json::Value = serde_json::from_str(&stdout(&broken)).expect("JSON");
    assert_eq!(report["checks"][0]["status"], "FAIL");
    assert_eq!(report["checks"][0]["found"], "kernel module 560.35.03, libraries 550.54.15");
    let why = "is a copy of a machine: its programs cannot be queried";
    let whole = stdout(&doctor(directory.path(), &["--verbose"]));
    assert!(whole.contains(why), "{whole}");
    assert!(
        whole.contains("\nNot run: 10 cluster checks (add --cluster): K01 "),
        "{whole}"
    );
    let short = stdout(&doctor(directory.path(), &[]));
    assert!(
        !short.contains(why) && short.contains("checks do not apply here; --verbose lists them"),
        "{short}"
    );
}

#[test]
fn a_machine_without_a_gpu_is_told_so() {
    let directory = copy_of(&kinds::none());
    let output = doctor(directory.path(), &["--only", "D01,D02"]);
    assert_eq!(output.status.code(), Some(2));
    let text = stdout(&output);
    assert!(text.contains("FAIL D01") && !text.contains("SKIP"), "{text}");
    assert!(
        text.ends_with("0 passed, 1 failed.\n1 check does not apply here; --verbose lists them with the reasons.\n"),
        "{text}"
    );
    let text = stdout(&doctor(directory.path(), &["--only", "D01,D02", "--verbose"]));
    assert!(text.contains("SKIP D02 the kernel driver is loaded: no GPU here"), "{text}");
    assert!(stdout(&doctor(directory.path(), &[])).lines().count() < 20);
}

#[test]
fn a_probe_that_hangs_is_a_finding_and_holds_nothing_up() {
    let directory = copy_of(&kinds::debian());
    let probe = directory.path().join("hanging-probe");
    std::fs::write(&probe, "#!/bin/sh\nexec sleep 60\n").expect("written");
    std::fs::set_permissions(&probe, std::fs::Permissions::from_mode(0o755)).expect("executable");
    let (probe, library) = (probe.display().to_string(), directory.path().join("x").display().to_string());
    let began = Instant::now();
    let args = [
        "--only",
        "D11",
        "--timeout",
        "1s",
        "--probe",
        &probe,
        "--nvml-library",
        &library,
    ];
    let output = doctor(directory.path(), &args);
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    assert_eq!(output.status.code(), Some(2));
    assert!(stdout(&output).contains("did not answer within 1 s"), "{}", stdout(&output));
}

#[test]
fn checks_that_need_an_absent_api_server_say_so() {
    let directory = tempfile::tempdir().expect("a directory");
    let missing = directory.path().join("none").display().to_string();
    let output = divvy(
        &["doctor", "--cluster", "--kubeconfig", &missing, "--only", "K01,K16,D01"],
        &[],
    );
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(
        text.contains("SKIP K01") && text.contains("SKIP K16") && text.contains(&missing),
        "{text}"
    );
    assert!(
        text.ends_with("Not run: 1 machine check (add --node on the machine).\n"),
        "{text}"
    );
}

/// Serve an API that forbids listing these kinds, or, for `proxy`, access to a pod's proxy. Return the path of a kubeconfig for
/// it.
async fn serve(directory: &Path, pods: Vec<Value>, forbidden: &'static [&'static str]) -> String {
    let answer = move |path: &str| {
        let kind = path.rsplit('/').next().unwrap_or_default();
        let kind = if path.contains("/proxy/") { "proxy" } else { kind };
        if forbidden.contains(&kind) {
            let words = format!("{kind} is forbidden: User \"guest\" cannot list resource \"{kind}\" at the cluster scope");
            let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": words, "reason": "Forbidden", "code": 403});
            return ("403 Forbidden", status);
        }
        let items = if kind == "pods" { &pods[..] } else { &[] };
        ("200 OK", json!({"items": items, "metadata": {"resourceVersion": "9"}}))
    };
    cli::serve(directory, answer).await
}

/// The message says which rights the user lacks, and how to see them.
#[tokio::test]
async fn who_may_list_nothing_is_told_what_was_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    let kubeconfig = serve(
        directory.path(),
        Vec::new(),
        &["nodes", "pods", "daemonsets", "runtimeclasses"],
    )
    .await;
    let output = beside(&["doctor", "--cluster", "--kubeconfig", &kubeconfig], &[]).await;
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(!text.contains("PASS"), "{text}");
    for right in ["list nodes", "list pods --all-namespaces"] {
        assert!(
            text.contains(&format!(
                "Check your permission with kubectl --kubeconfig {kubeconfig} auth can-i {right}\n"
            )),
            "{text}"
        );
    }
    assert!(
        text.contains("reason the nodes could not be listed: nodes is forbidden: User \"guest\" cannot list"),
        "{text}"
    );
}

/// The doctor still checks everything that may be read.
#[tokio::test]
async fn what_may_not_be_read_makes_the_status_2() {
    let directory = tempfile::tempdir().expect("a directory");
    let kubeconfig = serve(directory.path(), Vec::new(), &["daemonsets"]).await;
    let args = [
        "doctor",
        "--cluster",
        "--kubeconfig",
        &kubeconfig,
        "-o",
        "json",
        "--only",
        "K04,K14,K16",
    ];
    let output = beside(&args, &[]).await;
    assert_eq!(output.status.code(), Some(2));
    let report: Value = serde_json::from_str(&stdout(&output)).expect("JSON");
    let of = |id: &str| {
        let lines = report["checks"].as_array().expect("checks");
        lines.iter().find(|line| line["id"] == id).cloned().expect(id)
    };
    assert_eq!(
        (&of("K04")["status"], &of("K04")["skipped"]),
        (&json!("SKIP"), &json!("couldNotLook"))
    );
    assert_eq!((&of("K16")["status"], &of("K16")["skipped"]), (&json!("PASS"), &Value::Null));
}

/// The message says which rights the user lacks, and how to see them.
#[tokio::test]
async fn who_may_not_ask_the_extender_is_told_so() {
    let directory = tempfile::tempdir().expect("a directory");
    let extender = json!({"metadata": {"name": "e-1", "namespace": "divvy-system",
        "labels": {"app.kubernetes.io/name": "divvy", "app.kubernetes.io/component": "extender"}},
        "spec": {"containers": []}, "status": {"phase": "Running"}});
    let kubeconfig = serve(directory.path(), vec![extender], &["proxy"]).await;
    let output = beside(&["doctor", "--cluster", "--kubeconfig", &kubeconfig, "--only", "K12"], &[]).await;
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(
        text.contains("SKIP K12") && text.contains("auth can-i get pods --subresource=proxy -n divvy-system, or"),
        "{text}"
    );
}

#[test]
fn a_log_is_explained() {
    let directory = tempfile::tempdir().expect("a directory");
    let log = directory.path().join("log");
    std::fs::write(&log, b"\xff\nFailed to initialize NVML: Driver/library version mismatch\n").expect("written");
    let log = log.display().to_string();
    let output = divvy(&["doctor", "--explain", &log], &[]);
    assert_eq!(output.status.code(), Some(0));
    assert!(stdout(&output).starts_with("D05 line 2\n"), "{}", stdout(&output));
    std::fs::write(&log, "all is well\n").expect("written");
    let output = divvy(&["doctor", "--explain", &log, "-o", "json"], &[]);
    assert_eq!((output.status.code(), stdout(&output).trim()), (Some(1), "[]"));
}

/// A log that cannot be read has a different status than a log without a known error text.
#[test]
fn a_log_that_cannot_be_read_has_a_status_and_words_of_its_own() {
    let directory = tempfile::tempdir().expect("a directory");
    let missing = directory.path().join("nosuchfile").display().to_string();
    for path in [missing, directory.path().display().to_string()] {
        let output = divvy(&["doctor", "--explain", &path], &[]);
        assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(2), ""));
        assert!(
            stderr(&output).starts_with(&format!("error: --explain: {path} cannot be read: ")),
            "{}",
            stderr(&output)
        );
    }
}

#[test]
fn wrong_questions_are_refused_with_what_to_type() {
    for (args, part) in [
        (
            &["doctor", "--only", "X01"][..],
            "there is no check with this id; the ids are D01",
        ),
        (
            &["doctor", "--root", "/nowhere"],
            "--root /nowhere: there is no such directory; give the directory with",
        ),
        (
            &["doctor", "--root", "/tmp", "--fix"],
            "a copy of a machine cannot be repaired; run --fix on the machine itself",
        ),
        (&["doctor", "--timeout", "0s"], "no program answers within 0 s"),
        (&["doctor", "--explain", "/nowhere"], "--explain: /nowhere cannot be read"),
    ] {
        let output = divvy(args, &[]);
        assert!(!output.status.success(), "{args:?}");
        assert!(stderr(&output).contains(part), "{args:?}: {}", stderr(&output));
    }
}

const MANIFEST: &str = "apiVersion: v1\nkind: Pod\nspec:\n  containers:\n  - name: kube-scheduler\n    image: registry/kube-scheduler:v1.33.2\n    command: [kube-scheduler, --config=/etc/kubernetes/divvy.yaml]\n    \
    volumeMounts: [{name: k, mountPath: /etc/kubernetes}]\n  volumes: [{name: k, hostPath: {path: /etc/kubernetes}}]\n";

/// Each rule of `scheduler-config --merge` is one of doctor's, because both use the same function.
#[test]
fn doctor_checks_the_file_by_the_rules_of_scheduler_config() {
    let ours = "- {urlPrefix: 'http://127.0.0.1:32766/gpushare-scheduler', filterVerb: filter, bindVerb: bind, nodeCacheCapable: true, ignorable: false, \
                managedResources: [{name: aliyun.com/gpu-mem, ignoredByScheduler: false}]}\n";
    let file = |top: &str, more: &str| {
        format!(
            "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\nclientConnection: {{kubeconfig: /etc/kubernetes/scheduler.conf}}\n\
             percentageOfNodesToScore: 100\n{top}extenders:\n{ours}{more}"
        )
    };
    let gone = "profiles: [{plugins: {score: {enabled: [{name: NodeLabel}]}}}]\n";
    let limits = "profiles: [{plugins: {filter: {enabled: [{name: EBSLimits}]}}}]\n";
    for (text, id, found) in [
        (
            file(
                "",
                "- {urlPrefix: 'http://127.0.0.1:9/x', bindVerb: bind, managedResources: [{name: a.b/c}]}\n",
            ),
            "K10",
            "has a bindVerb",
        ),
        (
            file(
                "",
                "- {urlPrefix: 'http://127.0.0.1:9/x', managedResources: [{name: aliyun.com/gpu-mem}, {name: a.b/c}]}\n",
            ),
            "K10",
            "a resource can have only one extender",
        ),
        (file("", ours), "K10", "a second entry for the same resources"),
        (
            file("", "- {urlPrefix: 'http://127.0.0.1:9/x', enableHttps: false}\n"),
            "K10",
            "enableHttps",
        ),
        (
            file("", "- {urlPrefix: 'http://127.0.0.1:9/x', httpTimeout: 5000000000}\n"),
            "K10",
            "httpTimeout",
        ),
        (file("healthzBindAddress: 0.0.0.0\n", ""), "K10", "healthzBindAddress"),
        (file("leaderElection: {resourceLock: endpoints}\n", ""), "K10", "resourceLock"),
        (file("percentageOfNodes: 1\n", ""), "K10", "not a field of"),
        (file(gone, ""), "K10", "NodeLabel"),
        (file(limits, ""), "K10", "EBSLimits"),
        (
            file("", "").replace("clientConnection: {kubeconfig: /etc/kubernetes/scheduler.conf}\n", ""),
            "K10",
            "clientConnection.kubeconfig",
        ),
        (
            file("", "").replace("percentageOfNodesToScore: 100\n", ""),
            "K12",
            "percentageOfNodesToScore",
        ),
        (
            file("", "").replace("ignorable: false", "ignorable: true"),
            "K12",
            "ignorable",
        ),
        (file("", ""), "", ""),
    ] {
        let mut machine = kinds::none();
        machine
            .file("/etc/kubernetes/manifests/kube-scheduler.yaml", MANIFEST)
            .file("/etc/kubernetes/scheduler.conf", "kind: Config\n")
            .file("/etc/kubernetes/divvy.yaml", text.clone());
        let output = doctor(copy_of(&machine).path(), &["--only", "K10,K11,K12", "-o", "json"]);
        let report: Value = serde_json::from_str(&stdout(&output)).expect("JSON");
        let lines = report["checks"].as_array().expect("checks").iter();
        let bad: Vec<&Value> = lines
            .filter(|line| line["status"] == "FAIL" || (!id.is_empty() && line["status"] == "WARN"))
            .collect();
        match id {
            "" => assert_eq!(bad, [] as [&Value; 0], "{report}"),
            id => assert!(
                bad.iter()
                    .any(|line| line["id"] == id && line["found"].as_str().is_some_and(|text| text.contains(found))),
                "{id} {found}: {report}\n{text}"
            ),
        }
    }
}

/// The fixes that the checks print, from the tests of divvy-doctor.
const FIXES: &str = include_str!("../../../divvy-doctor/tests/it/snapshots/it__fires__fixes.snap");

/// Find the command lines in a text: each starts with one of these programs, and ends before the next word of prose.
fn commands<'t>(text: &'t str, programs: &[&str]) -> Vec<&'t str> {
    let starts = text
        .match_indices(|c: char| c.is_ascii_lowercase())
        .map(|(at, _)| at)
        .filter(|at| {
            let before = text[..*at].chars().next_back();
            let is_word = before.is_none_or(|c| c == ' ' || c == '(');
            is_word
                && programs
                    .iter()
                    .any(|program| text[*at..].strip_prefix(program).is_some_and(|rest| rest.starts_with(' ')))
        });
    let ends = [
        "; ",
        ", ",
        ". ",
        " (",
        ")",
        ": ",
        " | ",
        " > ",
        " && ",
        " and ",
        " or ",
        " if ",
        " on ",
        " of ",
        " then ",
        " with ",
        " creates ",
        " names ",
        " prints ",
        " says ",
        " sets ",
        " shows ",
        " tests ",
        " writes ",
    ];
    starts
        .map(|at| {
            let line = text[at..].lines().next().unwrap_or_default();
            let end = ends.iter().filter_map(|end| line.find(end)).min().unwrap_or(line.len());
            line[..end].trim_end_matches([';', ',', '.'])
        })
        .collect()
}

#[test]
fn every_program_accepts_its_commands_in_fixes() {
    use clap::Parser as _;
    let mut parsed = 0;
    for fix in FIXES.lines() {
        for command in commands(fix, &["divvy"]) {
            let words = command
                .split_whitespace()
                .map(|word| if word == "NODE" || word == "POD" { "x" } else { word });
            if let Err(error) = ::divvy::cli::Cli::try_parse_from(words) {
                panic!("{command:?} in {fix:?}: {error}");
            }
            parsed += 1;
        }
        let others = [
            "systemctl",
            "kubectl",
            "modprobe",
            "mkdir",
            "printf",
            "dmesg",
            "apt-get",
            "dnf",
            "nvidia-smi",
            "sed",
            "chmod",
            "ln",
            "rm",
            "dockerd",
        ];
        for command in commands(fix, &others) {
            let output = std::process::Command::new("bash")
                .args(["-n", "-c", command])
                .output()
                .expect("bash");
            assert!(output.status.success(), "{command:?} in {fix:?}: {}", stderr(&output));
            assert!(
                !command.starts_with("sed"),
                "a fix deletes lines of a file that a person has not seen: {fix:?}"
            );
        }
    }
    assert!(parsed > 20, "only {parsed} commands of divvy");
}
