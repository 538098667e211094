//! Input of Divvy's commands: the arguments of command lines, the records of earlier runs, answers of engines and of the cluster; and the
//! output that the commands print about it.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;

use clap::Parser as _;
use divvy::audit;
use divvy::cli::{Cli, arguments, usage_status};
use divvy::inspect::table;
use divvy::scheduler_config::check::{SchedulerVerdict, unclear, verdict};
use divvy::scheduler_config::installed::{authority, installed};
use divvy::scheduler_config::second_scheduler::KubernetesVersion;
use divvy::simulate::dump;
use divvy::why::{self, AnswerStyle};
use divvy_audit::{Audit, AuditLimits, Fact, Moment, WatchedKind};
use divvy_doctor::facts::programs::Docker;
use divvy_engines::containerd::release;
use divvy_engines::{EditPlan, EngineTarget, OriginalTexts, undo};
use divvy_explainer::from_objects;
use divvy_extender::tls::make::carry_out;
use divvy_extender::tls::plan::{CertificateLifetimes, SecretData, plan};
use divvy_hardware::probe;
use divvy_host::plain;
use divvy_kube::convert;
use divvy_model::{MemoryUnit, Node, Pod};
use divvy_oci::hook::arguments::HookCall;
use divvy_placement::Ledger;
use divvy_view::view;
use divvy_why::ClusterSnapshot;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{Secret, Service};
use serde_json::{Value, json};

use super::{FuzzTarget, text};

pub(crate) fn targets() -> Vec<FuzzTarget> {
    vec![
        FuzzTarget::new("the record of divvy configure", record, &[&docker(), &containerd(), &crio()]),
        FuzzTarget::new(
            "what Docker answers",
            docker_answers,
            &[
                "{\"Version\":\"24.0.7\",\"Components\":[{}]}\u{1e}{\"DefaultRuntime\":\"nvidia\",\"Runtimes\":{\"runc\":{\"path\":\"runc\"},\"nvidia\":null}}",
            ],
        ),
        FuzzTarget::new(
            "versions",
            versions,
            &[
                "v1.31.4-eks-abc",
                "containerd github.com/containerd/containerd/v2 v2.3.7 5fd4c4d",
            ],
        ),
        FuzzTarget {
            accepted: vec![service(true), service(false)],
            ..FuzzTarget::new("the Service and the Secret of the extender", from_cluster, &[])
        },
        FuzzTarget::new("the pod by which a scheduler is tried", tried, &[TRIED, CALLED, WAITS]).refusing(&["[]"]),
        FuzzTarget::new("what inspect, why, and audit print", printed, &[CLUSTER]),
        FuzzTarget::new("divvy-hook's command line", hook, &HOOKS),
        FuzzTarget::new(
            "divvy-probe's command line",
            probe_words,
            &["--listen=unix:/a\0--watchdog\x002.5", "--once\0--driver-root\0/d"],
        ),
        FuzzTarget::new("nvidia-ctk's command line", nvidia_ctk, &NVIDIA_CTK),
        FuzzTarget::new("divvy's command line", divvy, &DIVVY),
    ]
}

const TRIED: &str = r#"{"spec":{"schedulerName":"s","nodeName":"n"},"metadata":{"annotations":{"divvy.dev/allocation":"{}"}}}"#;
const CALLED: &str = r#"{"spec":{"schedulerName":"s"},"status":{"conditions":[{"type":"PodScheduled","status":"False","reason":"Unschedulable","message":"0/1 nodes: Insufficient aliyun.com/gpu-mem, 0123456789abcdef"}]}}"#;
const WAITS: &str = r#"{"spec":{"schedulerName":"s"},"status":{"conditions":[{"type":"PodScheduled","status":"False","reason":"Unschedulable","message":"0/1 nodes: Insufficient cpu"}]}}"#;
const CLUSTER: &str = r#"{"kind":"List","items":[{"kind":"Node","metadata":{"name":"n","labels":{"zone":"a"},"annotations":{"divvy.dev/inventory":"{\"v\":1,\"agent\":\"0.1.0\",\"driver\":\"550\",\"unitMiB\":1024,\"gpus\":[{\"index\":0,\"uuid\":\"GPU-0\",\"minor\":0,\"model\":\"T4\",\"totalMiB\":15360,\"units\":15,\"health\":\"ok\",\"heldMiB\":1024}]}"}},"spec":{},"status":{"capacity":{"aliyun.com/gpu-mem":"15","aliyun.com/gpu-count":"1"},"allocatable":{"aliyun.com/gpu-mem":"15"},"addresses":[{"type":"InternalIP","address":"10.0.0.1"}]}},{"kind":"Pod","metadata":{"name":"p","namespace":"d","uid":"u","annotations":{"divvy.dev/allocation":"{\"v\":1,\"gpus\":[{\"uuid\":\"GPU-0\",\"memMiB\":4096}],\"containers\":{\"c\":[{\"uuid\":\"GPU-0\",\"memMiB\":4096}]}}"}},"spec":{"nodeName":"n","containers":[{"name":"c","resources":{"limits":{"aliyun.com/gpu-mem":"4"}}}]},"status":{"phase":"Running"}},{"kind":"Pod","metadata":{"name":"q","namespace":"d","uid":"v","annotations":{"divvy.dev/gpu-model":"A100"}},"spec":{"nodeSelector":{"zone":"b"},"containers":[{"name":"c","resources":{"limits":{"aliyun.com/gpu-mem":"9"}}}]},"status":{"phase":"Pending","conditions":[{"type":"PodScheduled","status":"False","reason":"Unschedulable","message":"0/1 nodes"}]}}]}"#;
const HOOKS: [&str; 5] = [
    "update-ldcache\0--folder\0/a\0--folder=/b\0--host-driver-version=550.54.15\0--on-failure\0fail",
    "enable-cuda-compat\0--host-driver-version\x00535.1\0--cuda-compat-container-root\0/c",
    "create-symlinks\0--link\0libcuda.so.1::/usr/lib64/libcuda.so",
    "legacy\0--env\0A=b\0--\0/usr/bin/nvidia-container-cli\0configure",
    "chmod\0--mode\x00755",
];
const NVIDIA_CTK: [&str; 5] = [
    "-quiet\0runtime\0configure\0--runtime=containerd\0-set-as-default\0--cdi.enabled=true\0--drop-in-config\0/a",
    "--debug\0cdi\0generate\0--output=/etc/cdi/nvidia.yaml\0--device-name-strategy\0index,uuid\0--no-all-device=1",
    "cdi\0list\0--spec-dir=/a,/b",
    "cdi\0transform\0root\0--from=/a\0--to\0/b\0--input=-",
    "config\0--set\0nvidia-container-runtime.mode=cdi\0--in-place\0--config-file=/c",
];
const DIVVY: [&str; 5] = [
    "configure\0docker\0--cdi\0--set-default=false\0--runtime-name\0nvidia\0--dry-run",
    "configure\0containerd\0--undo\0--restart\0--root\0/r\0-o\0json",
    "scheduler-config\0--as-second-scheduler\0--from-cluster\0--kubernetes-version\0v1.31.4\0--tls-server-name\0a.b",
    "runtime-config\0--set\0a.b=c\0--in-place",
    "doctor\0--only\0D01,K02\0--node\0-o\0json",
];

const DOCKER: &str = "/etc/docker/daemon.json";
const CONTAINERD: &str = "/etc/containerd/config.toml";
const CRIO: &str = "/etc/crio/crio.conf";

/// Return the record together with the engine's current file.
fn with_record(path: &str, original: &str, written: &str, now: &str) -> String {
    let record = json!({"files": {path: {"original": original, "written": written}}});
    format!("{record}\u{1e}{now}")
}

fn docker() -> String {
    let written = r#"{"debug":true,"runtimes":{"nvidia":{"path":"/r"}}}"#;
    with_record(DOCKER, r#"{"debug":true}"#, written, &written.replace("true", "false"))
}

fn containerd() -> String {
    let original = "version = 2\nimports = ['/a']\n[plugins.x]\na = 1\n";
    let written = "version = 2\nimports = ['/a', '/b']\n[plugins.x]\na = 2\nb = 3\n";
    with_record(CONTAINERD, original, written, &format!("# mine\n{written}c = 4\n"))
}

fn crio() -> String {
    let written = "[crio.runtime]\ndefault_runtime = 'nvidia'\n";
    with_record(CRIO, "", written, written)
}

/// Rules: only files that the record names are written, and only with contents that the record says were there or that are there now. A second
/// run changes nothing.
fn record(bytes: &[u8]) -> bool {
    let Some((said, now)) = text(bytes).and_then(|text| text.split_once('\u{1e}')) else {
        return false;
    };
    let mut good = false;
    for target in [
        EngineTarget::Docker {
            config: DOCKER.to_owned(),
        },
        EngineTarget::Containerd {
            config: CONTAINERD.to_owned(),
            drop_in: None,
            merge: None,
            version: 2,
        },
        EngineTarget::Crio {
            config: CRIO.to_owned(),
            drop_in: None,
        },
    ] {
        let path = target.record();
        let record = match OriginalTexts::parse(&path, said) {
            Ok(record) => record,
            Err(error) => {
                refused(&error.to_string(), &path);
                return false;
            }
        };
        let mut files = BTreeMap::from([
            (target.config().to_owned(), now.to_owned()),
            ("/etc/passwd".to_owned(), "root\n".to_owned()),
        ]);
        match undo(&files, &target, "nvidia", Some(&record)) {
            Err(error) => refused(&error.to_string(), target.config()),
            Ok(plan) => {
                good = true;
                sound(&target, &record, &plan);
                for edit in &plan.edits {
                    match &edit.after {
                        Some(text) => files.insert(edit.path.clone(), text.clone()),
                        None => files.remove(&edit.path),
                    };
                }
                assert_eq!(plan.record, None, "nothing of Divvy's is left");
            }
        }
    }
    good
}

fn sound(target: &EngineTarget, record: &OriginalTexts, plan: &EditPlan) {
    for edit in &plan.edits {
        let recorded = record.files.get(&edit.path).expect("only what the record names");
        if edit.before.as_deref() == Some(&recorded.written) {
            assert_eq!(edit.after, recorded.original, "as it was, to the byte");
            continue;
        }
        let values = |text: Option<&str>| match target {
            EngineTarget::Docker { .. } => text.map_or(Value::Null, |text| serde_json::from_str(text).unwrap_or_default()),
            _ => text.map_or(Value::Null, |text| {
                let table = toml::from_str::<toml::Table>(text).unwrap_or_default();
                serde_json::to_value(table).unwrap_or_default()
            }),
        };
        let (mut known, mut after) = (Vec::new(), Vec::new());
        for text in [edit.before.as_deref(), recorded.original.as_deref()] {
            leaves(&values(text), &mut known);
        }
        leaves(&values(edit.after.as_deref()), &mut after);
        for leaf in after {
            assert!(known.contains(&leaf), "{leaf} was nowhere: {edit:?}");
        }
    }
}

/// Collect all values that are neither an object nor a list.
fn leaves(value: &Value, found: &mut Vec<Value>) {
    match value {
        Value::Object(object) => object.values().for_each(|value| leaves(value, found)),
        Value::Array(list) => list.iter().for_each(|value| leaves(value, found)),
        other => found.push(other.clone()),
    }
}

/// Rules: a refusal names its subject and does not move the terminal's cursor.
fn refused(said: &str, about: &str) {
    assert!(said.contains(about), "{said:?}");
    calm(said);
}

/// Rule: no foreign text moves a terminal's cursor.
fn calm(said: &str) {
    assert_eq!(plain(said), said);
}

fn docker_answers(bytes: &[u8]) -> bool {
    let Some((version, info)) = text(bytes).and_then(|text| text.split_once('\u{1e}')) else {
        return false;
    };
    match Docker::parse(version, info) {
        Ok(docker) => {
            // A value that the parser ignores may be anything in quotes.
            if let Ok(said) = serde_json::from_str::<Value>(info) {
                let known = |name: &String| said["Runtimes"].get(name).is_some();
                assert!(docker.runtimes.iter().all(known), "{docker:?}");
            }
            true
        }
        Err(why) => {
            assert!(!why.to_string().is_empty());
            false
        }
    }
}

/// Rule: a version that was read is printed so that it reads back the same.
fn versions(bytes: &[u8]) -> bool {
    let Some(text) = text(bytes) else { return false };
    let of_cluster = text.parse::<KubernetesVersion>();
    match &of_cluster {
        Ok(version) => assert_eq!(version.to_string().parse::<KubernetesVersion>().as_ref().ok(), Some(version)),
        Err(error) => calm(&error.to_string()),
    }
    let of_engine = release(text);
    if let Some((major, minor, patch)) = of_engine {
        assert_eq!(release(&format!("containerd x v{major}.{minor}.{patch}")), of_engine);
    }
    of_cluster.is_ok() || of_engine.is_some()
}

const NOW_S: i64 = 1_800_000_000;

fn service(tls: bool) -> Vec<u8> {
    let lifetimes = CertificateLifetimes::default();
    let name = "divvy-extender.divvy-system.svc";
    let due = plan(&SecretData::new(), name, NOW_S, lifetimes).expect("a plan");
    let data = carry_out(&due, &SecretData::new(), name, NOW_S, lifetimes).expect("made");
    let secret = Secret {
        data: Some(data.into_iter().map(|(key, value)| (key, ByteString(value))).collect()),
        ..Secret::default()
    };
    let service = json!({"metadata": {"name": "divvy-extender", "namespace": "divvy-system"}, "spec": {"clusterIP": "10.96.0.7", "ports": [{"port": 32766}]}});
    serde_json::to_vec(&json!({"service": service, "secret": tls.then_some(secret)})).expect("JSON")
}

/// Rule: kube-scheduler receives the Service's address and the contents of the Secret.
fn from_cluster(bytes: &[u8]) -> bool {
    let Ok(said) = serde_json::from_slice::<Value>(bytes) else {
        return false;
    };
    let Ok(service) = serde_json::from_value::<Service>(said["service"].clone()) else {
        return false;
    };
    let Ok(secret) = serde_json::from_value::<Option<Secret>>(said["secret"].clone()) else {
        return false;
    };
    if let Some(Err(why)) = secret.as_ref().map(authority) {
        assert!(!why.to_string().is_empty());
    }
    match installed(&service, secret.as_ref(), None, NOW_S) {
        Ok((url, tls)) => {
            let uri: axum::http::Uri = url.parse().unwrap_or_else(|error| panic!("{url}: {error}"));
            let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
            let host: std::net::IpAddr = host.parse().expect("an address");
            let ip = said["service"]["spec"]["clusterIP"].as_str().unwrap_or_default();
            assert_eq!(ip.parse().ok(), Some(host));
            assert_eq!(tls.inline.is_some(), secret.is_some());
            if let Some(inline) = tls.inline {
                let data = &said["secret"]["data"];
                assert!(
                    [&data["ca.crt"], &data["client.crt"], &data["client.key"]]
                        == [&json!(inline.ca), &json!(inline.cert), &json!(inline.key)]
                );
            }
            true
        }
        Err(why) => {
            assert!(!why.to_string().is_empty());
            false
        }
    }
}

/// Rule: a pod proves that the extender was called only if its status contains the nonce, which cannot be guessed.
fn tried(bytes: &[u8]) -> bool {
    const NONCE: &str = "0123456789abcdef";
    let Ok(pod) = serde_json::from_slice::<Value>(bytes) else {
        return false;
    };
    match verdict(&pod, NONCE) {
        SchedulerVerdict::Called { .. } => assert!(pod["status"].to_string().contains(NONCE)),
        SchedulerVerdict::Waiting { scheduler, said } => calm(&unclear(&scheduler, said.as_ref(), "5 s")),
        SchedulerVerdict::Bound { node, .. } => assert_eq!(pod["spec"]["nodeName"], node),
    }
    pod.is_object()
}

/// Rule: no name, annotation, or message of the cluster moves the reader's cursor.
fn printed(bytes: &[u8]) -> bool {
    let Ok(read) = dump::read(bytes) else { return false };
    let nodes: Vec<Node> = read.nodes.iter().map(convert::node).collect();
    let pods: Vec<(&_, Pod)> = read
        .pods
        .iter()
        .filter_map(|object| Some((object, convert::pod(object).ok()?)))
        .collect();
    let all: Vec<Pod> = pods.iter().map(|(_, pod)| pod.clone()).collect();
    let shown = view(&nodes, &all);
    for text in [
        table::summary(&shown, true),
        table::details(&shown),
        table::wide(&shown, true),
    ] {
        calm(&text);
    }
    let mut ledger = Ledger::new(MemoryUnit::GIB);
    ledger.replace_nodes(&nodes);
    ledger.replace_pods(all.iter().cloned());
    let tenants = read.pods.iter().cloned().filter_map(from_objects::tenant).collect();
    let snapshot = ClusterSnapshot::new(ledger, read.nodes.iter().map(from_objects::site).collect(), tenants);
    for (object, _) in pods.iter().take(10) {
        let Ok(wants) = from_objects::wants(object) else { continue };
        for all_nodes in [false, true] {
            let answer = divvy_why::answer(&snapshot, &wants, all_nodes);
            let style = AnswerStyle {
                width: Some(80),
                all_nodes,
                short: false,
                coloured: false,
            };
            calm(&why::text(&answer, style));
        }
    }
    calm(&audited(nodes, all));
    true
}

/// Return what `divvy audit` prints about a cluster.
fn audited(nodes: Vec<Node>, pods: Vec<Pod>) -> String {
    let mut audit = Audit::new(AuditLimits {
        remember_ms: 0,
        reports: false,
        ..AuditLimits::default()
    });
    let pod = |pod| Fact::Pod {
        pod,
        delete_by_ms: Some(0),
    };
    let nodes: Vec<Fact> = nodes.into_iter().map(Fact::Node).collect();
    let pods: Vec<Fact> = pods.into_iter().map(pod).collect();
    for (kind, facts) in [(WatchedKind::Nodes, nodes), (WatchedKind::Pods, pods)] {
        let begins = Fact::ListBegins { kind, why: None };
        for fact in [begins].into_iter().chain(facts).chain([Fact::ListEnds { kind }]) {
            audit.take(Moment::default(), fact);
        }
    }
    audit::text(&audit.finish(Some(i64::MAX)))
}

fn words(bytes: &[u8]) -> Vec<OsString> {
    bytes
        .split(|byte| *byte == 0)
        .map(|word| OsString::from_vec(word.to_vec()))
        .collect()
}

/// Rules: the directories and links of a task come from the command line, and paths in the image begin at the image's root.
fn hook(bytes: &[u8]) -> bool {
    let words = words(bytes);
    let said = |part: &str| {
        words
            .iter()
            .any(|word| word.to_str().is_some_and(|word| word.ends_with(part)))
    };
    match HookCall::parse(&words) {
        Ok(HookCall::UpdateLdcache { directories, compat, .. }) => {
            assert!(
                directories.iter().all(|directory| said(directory)) && compat.starts_with('/'),
                "{directories:?} {compat}"
            );
            calm(&compat);
        }
        Ok(HookCall::CreateSymlinks { links, .. }) => {
            for link in &links {
                assert!(
                    said(&format!("{}::{}", link.target, link.at)) && link.at.starts_with('/'),
                    "{link:?}"
                );
            }
        }
        Ok(HookCall::Legacy { words: program, .. }) => assert!(!program.is_empty() && words.ends_with(&program)),
        Ok(HookCall::Unknown(name)) => one_line(&name),
        Ok(_) => {}
        Err(error) => {
            one_line(&error.to_string());
            return false;
        }
    }
    true
}

fn one_line(said: &str) {
    assert!(!said.contains('\n'), "{said:?}");
    calm(said);
}

fn probe_words(bytes: &[u8]) -> bool {
    match probe::ProbeCommand::parse(words(bytes)) {
        Ok(_) => true,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            false
        }
    }
}

/// Rules: a command of NVIDIA's tool becomes a command of Divvy with the same restrictions; in particular, a dry run changes nothing.
fn nvidia_ctk(bytes: &[u8]) -> bool {
    let program = OsString::from("nvidia-ctk");
    let mut given = vec![program.clone()];
    given.extend(words(bytes));
    match arguments(given) {
        Ok(ours) => {
            let parsed = Cli::try_parse_from(&ours);
            if let Ok(Cli {
                command: divvy::cli::DivvyCommand::Configure(args),
                ..
            }) = &parsed
            {
                assert_eq!(args.dry_run, ours.iter().any(|word| word == "--dry-run"));
                assert!(args.as_nvidia_ctk && !args.undo && !args.restart);
            }
            parsed.is_ok()
        }
        Err(error) => {
            let expected = if error.use_stderr() { 1..=3 } else { 0..=0 };
            assert!(expected.contains(&usage_status(Some(&program), &error)));
            !error.use_stderr()
        }
    }
}

/// Rules: a runtime's name is one that every engine's file can hold, and a refusal has its own exit status.
fn divvy(bytes: &[u8]) -> bool {
    let program = OsString::from("divvy");
    let mut given = vec![program.clone()];
    given.extend(words(bytes));
    match arguments(given).and_then(Cli::try_parse_from) {
        Ok(cli) => {
            if let divvy::cli::DivvyCommand::Configure(args) = cli.command {
                let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
                assert!(!args.runtime_name.is_empty() && args.runtime_name.chars().all(plain));
                assert!(args.runtime_path.is_none_or(|path| !path.contains(['"', '\'', '\\', '\n'])));
            }
            true
        }
        Err(error) => {
            let expected = if error.use_stderr() { 2 } else { 0 };
            assert_eq!(usage_status(Some(&program), &error), expected);
            !error.use_stderr()
        }
    }
}
