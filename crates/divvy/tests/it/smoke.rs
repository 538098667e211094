//! `divvy smoke` on the embedded cluster. Its kubelets run no images, so a listener ends each container with the report that the program would write.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use divvy_model::out_of_service::{failed_smoke, out_of_service_key, under_test_key};
use divvy_model::{Allocation, Health, names};
use divvy_smoke_report::{SmokeReport, SmokeStep, StepId, TestedGpu};
use divvy_smoke_run::RUN_LABEL;
use divvy_testbed::api::{ApiServer, Clock, DeleteOptions, Effect, FaultRule, Match, PatchKind, Right};
use divvy_testbed::builders::pod;
use divvy_testbed::scenario::{Cluster as _, GpuFault};
use jiff::{SignedDuration, Timestamp};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::bed::Bed;
use crate::chart::admission::Policy;
use crate::cli::{beside, command, divvy, stderr, stdout};

const NAMESPACE: &str = "divvy-smoke";

/// Create the agent's DaemonSet as the chart does, as far as `divvy smoke` reads it.
fn install(api: &ApiServer) {
    api.create("namespaces", json!({"metadata": {"name": "divvy-system"}}))
        .expect("a namespace");
    let labels = json!({"app.kubernetes.io/name": "divvy", "app.kubernetes.io/component": "agent"});
    let spec = json!({"tolerations": [{"key": "gpus", "operator": "Exists"}], "containers": [{"name": "agent", "image": "divvy.test/divvy:1"}]});
    let set = json!({
        "metadata": {"name": "divvy-agent", "namespace": "divvy-system", "labels": labels},
        "spec": {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": spec}},
    });
    api.create("daemonsets.apps", set).expect("a DaemonSet");
}

fn report(uuid: &str, steps: Vec<SmokeStep>) -> SmokeReport {
    let gpu = TestedGpu {
        uuid: uuid.to_owned(),
        name: "NVIDIA A100-SXM4-40GB".to_owned(),
        ..TestedGpu::default()
    };
    SmokeReport::new(Some(gpu), steps)
}

fn good(uuid: &str) -> SmokeReport {
    report(
        uuid,
        vec![
            SmokeStep::pass(StepId::S01, "driver", 0),
            SmokeStep::pass(StepId::S02, "50000 elements", 200_000),
        ],
    )
}

fn bad(uuid: &str) -> SmokeReport {
    let wrong = SmokeStep::fail(
        StepId::S03,
        "byte 0x10 has 0xfe instead of 0xff",
        "results on this GPU are wrong",
        "drain the node",
    );
    report(uuid, vec![SmokeStep::pass(StepId::S01, "driver", 0), wrong])
}

fn pods(bed: &Bed) -> Vec<Value> {
    bed.api().list("pods", NAMESPACE).expect("listed")
}

fn has_namespace(bed: &Bed) -> bool {
    bed.api().get("namespaces", "", NAMESPACE).is_ok()
}

/// End the running containers of tests with what `result` says about the GPU that was allocated: a status and a termination message.
fn answer(bed: &Bed, nodes: &[&str], result: impl Fn(&str) -> Option<(i32, String)>) {
    for name in nodes {
        for view in bed.node(name).containers() {
            if view.namespace != NAMESPACE || !view.is_running() {
                continue;
            }
            let Ok(pod) = bed.api().get("pods", NAMESPACE, &view.pod) else {
                continue;
            };
            let text = pod["metadata"]["annotations"][names::ALLOCATION]
                .as_str()
                .expect("an allocation");
            let allocation = Allocation::parse(text).expect("legal");
            if let Some((code, message)) = result(&allocation.gpus[0].uuid) {
                bed.node(name).end_container(&view.id, code, Some(message));
            }
        }
    }
}

fn reported(report: &SmokeReport) -> (i32, String) {
    (i32::from(report.result.exit_status()), report.json())
}

/// Run the command while the nodes answer.
async fn smoke(
    bed: &Bed,
    args: &[&str],
    nodes: &[&str],
    result: impl Fn(&str) -> Option<(i32, String)>,
) -> (Option<i32>, String, String) {
    let kubeconfig = bed.cluster.kubeconfig();
    smoke_with(bed, &kubeconfig, args, nodes, result).await
}

/// Run the command as [`smoke`] does, with this kubeconfig.
async fn smoke_with(
    bed: &Bed,
    kubeconfig: &Path,
    args: &[&str],
    nodes: &[&str],
    result: impl Fn(&str) -> Option<(i32, String)>,
) -> (Option<i32>, String, String) {
    let kubeconfig = kubeconfig.display().to_string();
    let all = [&["smoke", "--kubeconfig", &kubeconfig], args].concat();
    let mut running = Box::pin(beside(&all, &[]));
    loop {
        tokio::select! {
            output = &mut running => return (output.status.code(), stdout(&output), stderr(&output)),
            () = tokio::time::sleep(Duration::from_millis(10)) => answer(bed, nodes, &result),
        }
    }
}

/// Replace what differs between runs: UUIDs, the run's id, and times.
fn steady(text: &str, bed: &Bed) -> String {
    let mut text = text.to_owned();
    for node in ["n1", "n2"] {
        let Some(machine) = bed.cluster.machines().node(node) else {
            continue;
        };
        for index in 0..machine.gpus.len() {
            text = text.replace(&machine.gpu_uuid(index), &format!("GPU-{node}-{index}"));
        }
    }
    let words = text.split_inclusive(' ').map(|word| {
        let time = word
            .trim_end()
            .strip_suffix('s')
            .and_then(|number| number.parse::<f64>().ok());
        if time.is_some() {
            word.replace(word.trim_end(), "0.1s")
        } else {
            word.to_owned()
        }
    });
    let lines: String = words.collect();
    let lines = lines.lines().map(|line| match line.rsplit_once(' ') {
        Some((rest, time)) if time.strip_suffix('s').is_some_and(|number| number.parse::<f64>().is_ok()) => {
            format!("{rest} 0.1s\n")
        }
        _ => format!("{line}\n"),
    });
    lines.collect()
}

#[tokio::test]
async fn the_table_shows_each_gpu_of_the_cluster_and_nothing_is_left() {
    let mut bed = Bed::new(&[&[16, 16], &[16, 16]]).await;
    install(bed.api());
    let gpus = bed.cluster.machines().node("n2").expect("a machine").clone();
    let (wrong, full) = (gpus.gpu_uuid(0), gpus.gpu_uuid(1));
    bed.create(&pod("neighbour").gpu_mem(16).annotation(names::GPU_UUID, &full));
    bed.running("neighbour").await;
    bed.cluster.fault("n1", 1, GpuFault::Dies { xid: 79 }).await.expect("told");
    bed.until("the inventory to say so", async |bed: &Bed| {
        match bed.inventory("n1").gpus[1].health {
            Health::Ok => Err("ok".to_owned()),
            _ => Ok(()),
        }
    })
    .await;
    let result = |uuid: &str| Some(reported(&if uuid == wrong { bad(uuid) } else { good(uuid) }));
    let (status, text, errors) = smoke(&bed, &["--all-nodes"], &["n1", "n2"], result).await;
    assert_eq!(status, Some(2), "{text}{errors}");
    insta::assert_snapshot!(steady(&text, &bed));
    assert_eq!(pods(&bed), [Value::Null; 0]);
    assert!(!has_namespace(&bed));

    let (status, text, errors) = smoke(&bed, &["--node", "n1", "--gpu", "0", "-o", "json"], &["n1"], result).await;
    assert_eq!(status, Some(0), "{text}{errors}");
    let json: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(
        (&json["result"], json["gpus"].as_array().map(Vec::len)),
        (&json!("PASS"), Some(1))
    );
    assert_eq!(json["gpus"][0]["report"]["steps"][1]["id"], "S02");

    // Only what a node reports about the right GPU counts.
    let other = |_: &str| Some(reported(&good("GPU-other")));
    let (status, text, _) = smoke(&bed, &["--node", "n1", "--gpu", "0"], &["n1"], other).await;
    assert!(
        status == Some(2) && text.contains("the container got GPU GPU-other"),
        "{text}"
    );
    let nonsense = |_: &str| Some((0, "Test PASSED\u{1b}[2J".to_owned()));
    let (status, text, _) = smoke(&bed, &["--node", "n1", "--gpu", "0"], &["n1"], nonsense).await;
    assert!(
        status == Some(3) && text.contains("this is not a report of divvy-smoke") && !text.contains('\u{1b}'),
        "{text}"
    );
    bed.cluster.fault("n1", 1, GpuFault::Recovers).await.expect("told");
}

/// A report in which everything passed that a GPU needs to be in service again.
fn all_good(uuid: &str) -> SmokeReport {
    let steps = [StepId::S01, StepId::S02, StepId::S03, StepId::S04].map(|id| SmokeStep::pass(id, "as it should be", 200_000));
    report(uuid, steps.to_vec())
}

/// The GPU is offered to no pod until it passes.
#[tokio::test]
async fn report_takes_a_failed_gpu_out_of_service() {
    let bed = Bed::new(&[&[16]]).await;
    install(bed.api());
    let wrong = |uuid: &str| {
        let mut steps = bad(uuid).steps;
        steps.iter_mut().for_each(|step| step.gpu_at_fault = step.id == StepId::S03);
        Some(reported(&report(uuid, steps)))
    };
    let is = async |bed: &Bed, wanted: Health| {
        bed.until("the inventory to say so", async |bed: &Bed| {
            let gpu = bed.inventory("n1").gpus.remove(0);
            if gpu.health == wanted {
                Ok(gpu.reason)
            } else {
                Err(format!("{gpu:?}"))
            }
        })
        .await
    };
    // Without --report, a failure changes nothing.
    let (status, text, errors) = smoke(&bed, &["--all-nodes"], &["n1"], wrong).await;
    assert_eq!(status, Some(2), "{text}{errors}");
    is(&bed, Health::Ok).await;
    let (status, text, errors) = smoke(&bed, &["--all-nodes", "--report"], &["n1"], wrong).await;
    assert_eq!(status, Some(2), "{text}{errors}");
    assert!(text.contains("The GPU is out of service: Divvy gives it to no pod"), "{text}");
    let reason = is(&bed, Health::Failed).await;
    let found = "out of service: divvy smoke: S03 memory: byte 0x10 has 0xfe instead of 0xff";
    assert_eq!(reason.as_deref(), Some(found));
    bed.create(&pod("patient").gpu_mem(1));
    bed.unschedulable("patient", "Insufficient").await;

    let (status, text, _) = smoke(&bed, &["--all-nodes"], &["n1"], wrong).await;
    assert!(
        status == Some(2) && text.contains("--report tests it") && text.contains(found),
        "{text}"
    );
    // A test in which it fails again, or that says too little, leaves it where it is.
    for (result, part) in [
        (wrong as fn(&str) -> Option<(i32, String)>, "The GPU is out of service"),
        (
            |uuid| Some(reported(&good(uuid))),
            "The GPU stays out of service, because S02, S03",
        ),
        (|_| Some((1, String::new())), "The GPU stays out of service."),
    ] {
        let (_, text, errors) = smoke(&bed, &["--all-nodes", "--report"], &["n1"], result).await;
        assert!(text.contains(part), "{text}{errors}");
        is(&bed, Health::Failed).await;
    }
    // While it is tested, no other pod gets it.
    let mut is_tested = false;
    let (status, text, errors) = {
        let seen = std::sync::Mutex::new(Vec::new());
        let passes = |uuid: &str| {
            let patient = bed.api().get("pods", "default", "patient").expect("there");
            seen.lock()
                .expect("no panic")
                .push((bed.inventory("n1").gpus[0].health, patient["spec"]["nodeName"].clone()));
            Some(reported(&all_good(uuid)))
        };
        let done = smoke(&bed, &["--all-nodes", "--report"], &["n1"], passes).await;
        for (health, node) in seen.into_inner().expect("no panic") {
            is_tested |= health == Health::Testing;
            assert!(health == Health::Ok || node.is_null(), "{health:?} {node}");
        }
        done
    };
    assert!(is_tested);
    assert_eq!(status, Some(0), "{text}{errors}");
    assert!(text.contains("The GPU is in service again."), "{text}");
    bed.running("patient").await;
    let node = bed.api().get("nodes", "", "n1").expect("there");
    let annotations = node["metadata"]["annotations"].as_object().expect("annotations");
    assert!(
        annotations
            .keys()
            .all(|key| !key.contains("-service") && !key.contains("-test")),
        "{annotations:?}"
    );

    // What an administrator took out of service stays there.
    let out = json!({"metadata": {"annotations": {out_of_service_key(&bed.inventory("n1").gpus[0].uuid): "fan is broken"}}});
    bed.api().patch("nodes", "", "n1", PatchKind::Merge, &out).expect("patched");
    is(&bed, Health::Failed).await;
    let (status, text, _) = smoke(&bed, &["--all-nodes", "--report"], &["n1"], wrong).await;
    assert!(
        status == Some(3)
            && text.contains("SKIP n1 GPU 0")
            && text.contains("out of service: fan is broken; kubectl annotate node n1"),
        "{text}"
    );
}

#[tokio::test]
async fn smoke_pods_pass_the_policies_the_scheduler_and_the_extender() {
    let bed = Bed::new(&[&[16, 16]]).await;
    install(bed.api());
    let class = json!({"metadata": {"name": "divvy-smoke"}, "value": -1000, "preemptionPolicy": "Never"});
    bed.api().create("priorityclasses.scheduling.k8s.io", class).expect("a class");
    let kubeconfig = bed.cluster.kubeconfig().display().to_string();
    let args = ["smoke", "--all-nodes", "--kubeconfig", &kubeconfig];
    let mut running = Box::pin(beside(&args, &[]));
    let bound = bed.until("both pods to run", async |bed: &Bed| {
        let found = pods(bed);
        let runs = |pod: &&Value| pod["status"]["phase"] == "Running";
        match found.iter().filter(runs).count() {
            2 => Ok(found),
            _ => Err(format!("{found:?}")),
        }
    });
    let found = tokio::select! {
        found = bound => found,
        output = &mut running => panic!("{}{}", stdout(&output), stderr(&output)),
    };
    let policies = ["divvy-request", "divvy-allocation"].map(Policy::of_chart);
    let classes: Vec<&Value> = found.iter().map(|pod| &pod["spec"]["priorityClassName"]).collect();
    assert_eq!(classes, ["divvy-smoke"; 2]);
    let mut gpus = BTreeSet::new();
    for pod in &found {
        let mut asked = pod.clone();
        let annotations = asked["metadata"]["annotations"].as_object_mut().expect("annotations");
        annotations.retain(|key, _| key == names::GPU_UUID);
        for policy in &policies {
            assert_eq!(policy.refusals(&asked, &Value::Null, "jane"), [""; 0]);
        }
        let text = pod["metadata"]["annotations"][names::ALLOCATION]
            .as_str()
            .expect("the extender's allocation");
        let allocation = Allocation::parse(text).expect("legal");
        assert_eq!(
            pod["metadata"]["annotations"][names::GPU_UUID],
            allocation.gpus[0].uuid.as_str()
        );
        gpus.insert(allocation.gpus[0].uuid.clone());
        assert_eq!(pod["spec"]["containers"][0]["image"], "divvy.test/divvy:1");
        assert_eq!(pod["spec"]["tolerations"][0]["key"], "gpus");
    }
    assert_eq!(gpus.len(), 2, "each GPU has its own pod");
    let output = loop {
        tokio::select! {
            output = &mut running => break output,
            () = tokio::time::sleep(Duration::from_millis(10)) => answer(&bed, &["n1"], |uuid| Some(reported(&good(uuid)))),
        }
    };
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
}

#[tokio::test]
async fn ctrl_c_takes_the_pods_along() {
    let bed = Bed::new(&[&[16, 16]]).await;
    install(bed.api());
    // The kubelet's own deletion, after the containers have ended, takes as long.
    let slow = Effect::Latency(Duration::from_millis(700));
    bed.api()
        .faults()
        .add(FaultRule::new(Match::any().verb("delete").resource("pods"), slow));
    for signal in [Signal::INT, Signal::TERM] {
        let kubeconfig = bed.cluster.kubeconfig().display().to_string();
        let mut command = command(&["smoke", "--all-nodes", "--kubeconfig", &kubeconfig], &[]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = tokio::process::Command::from(command).spawn().expect("it starts");
        bed.until("two pods", async |bed: &Bed| match pods(bed).len() {
            2 => Ok(()),
            count => Err(format!("{count} pods")),
        })
        .await;
        let pid = child.id().and_then(|id| Pid::from_raw(id.cast_signed())).expect("it runs");
        kill_process(pid, signal).expect("the signal is sent");
        let ended = tokio::time::timeout(Duration::from_secs(20), child.wait_with_output()).await;
        let output = ended.expect("it ends").expect("it ran");
        let text = stdout(&output);
        assert_eq!(output.status.code(), Some(3), "{text}{}", stderr(&output));
        assert_eq!(text.matches("stopped before the test had ended").count(), 2, "{text}");
        assert_eq!(pods(&bed), [Value::Null; 0]);
        assert!(!has_namespace(&bed));
    }
}

/// Start the command, wait until it has a pod, and kill it. Return the pod.
async fn killed(bed: &Bed, args: &[&str]) -> Value {
    let kubeconfig = bed.cluster.kubeconfig().display().to_string();
    let mut command = command(&[&["smoke", "--kubeconfig", &kubeconfig], args].concat(), &[]);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = tokio::process::Command::from(command).spawn().expect("it starts");
    let left = bed
        .until("a pod", async |bed: &Bed| pods(bed).pop().ok_or_else(|| "no pod".to_owned()))
        .await;
    child.kill().await.expect("killed");
    left
}

async fn nothing_is_left(bed: &Bed) {
    bed.until("nothing is left", async |bed: &Bed| {
        match (pods(bed).len(), has_namespace(bed)) {
            (0, false) => Ok(()),
            (count, namespace) => Err(format!("{count} pods; namespace: {namespace}")),
        }
    })
    .await;
}

#[tokio::test]
async fn a_run_that_is_killed_leaves_nothing_behind() {
    let bed = Bed::new(&[&[16, 16]]).await;
    install(bed.api());
    killed(&bed, &["--all-nodes"]).await;
    nothing_is_left(&bed).await;

    // A GPU that it tested again stays out of service, and no test of it stays open.
    let uuid = bed.inventory("n1").gpus[0].uuid.clone();
    let annotations = json!({"metadata": {"annotations": {out_of_service_key(&uuid): failed_smoke("S03 memory: byte 0x10")}}});
    bed.api()
        .patch("nodes", "", "n1", PatchKind::Merge, &annotations)
        .expect("patched");
    bed.until("it is out of service", async |bed: &Bed| {
        match bed.inventory("n1").gpus[0].health {
            Health::Failed => Ok(()),
            health => Err(health.word().to_owned()),
        }
    })
    .await;
    killed(&bed, &["--node", "n1", "--gpu", &uuid, "--report"]).await;
    nothing_is_left(&bed).await;
    let node = bed.api().get("nodes", "", "n1").expect("the node");
    let left = node["metadata"]["annotations"].as_object().expect("annotations");
    assert!(left.contains_key(&out_of_service_key(&uuid)), "{left:?}");
    assert!(!left.contains_key(&under_test_key(&uuid)), "{left:?}");
}

#[tokio::test]
async fn what_the_end_of_a_machine_left_is_removed_by_a_later_run() {
    let hours_ago = Arc::new(AtomicI64::new(0));
    let shown = hours_ago.clone();
    let clock = Clock::new(move || Timestamp::now() - SignedDuration::from_hours(shown.load(Ordering::SeqCst)));
    let bed = Bed::at(&[&[16]], clock, |_| {}).await;
    install(bed.api());
    let left = killed(&bed, &["--all-nodes"]).await;
    // The kubelet ends it.
    assert_eq!(left["spec"]["activeDeadlineSeconds"], 150);
    nothing_is_left(&bed).await;

    // With the machine, the process that cleans up ends as well.
    let label = json!({RUN_LABEL: "namespace"});
    bed.api()
        .create("namespaces", json!({"metadata": {"name": NAMESPACE, "labels": label}}))
        .expect("created");
    let name = left["metadata"]["name"].as_str().expect("a name");
    let mut object = left.clone();
    object["metadata"] = json!({"name": name, "namespace": NAMESPACE, "labels": left["metadata"]["labels"]});
    object["spec"].as_object_mut().expect("a spec").remove("nodeName");
    object["spec"]["schedulerName"] = "nobody".into();
    bed.api().create("pods", object.clone()).expect("created");

    // A run that is still at work may own it.
    let result = |uuid: &str| Some(reported(&good(uuid)));
    let (status, _, errors) = smoke(&bed, &["--all-nodes"], &["n1"], result).await;
    assert_eq!(status, Some(0), "{errors}");
    assert!(bed.api().get("pods", NAMESPACE, name).is_ok() && has_namespace(&bed));

    let options = DeleteOptions {
        grace_period_s: Some(0),
        ..DeleteOptions::default()
    };
    bed.api().delete("pods", NAMESPACE, name, &options).expect("deleted");
    hours_ago.store(2, Ordering::SeqCst);
    bed.api().create("pods", object).expect("created");
    hours_ago.store(0, Ordering::SeqCst);
    let (status, _, errors) = smoke(&bed, &["--all-nodes"], &["n1"], result).await;
    assert_eq!(status, Some(0), "{errors}");
    assert_eq!(pods(&bed), [Value::Null; 0]);
    assert!(!has_namespace(&bed));
}

#[tokio::test]
async fn a_pod_that_waits_is_explained_as_by_why() {
    let bed = Bed::new(&[&[16]]).await;
    install(bed.api());
    // The scheduler refuses the pod for a reason that the plan does not know.
    let taint = json!({"spec": {"taints": [{"key": "maintenance", "value": "yes", "effect": "NoSchedule"}]}});
    bed.api().patch("nodes", "", "n1", PatchKind::Merge, &taint).expect("patched");
    let (status, text, errors) = smoke(&bed, &["--all-nodes"], &["n1"], |_| None).await;
    assert_eq!(status, Some(3), "{text}{errors}");
    for part in [
        "ERROR n1 GPU 0",
        "no node took the pod: 0/1 nodes are available",
        "Pod divvy-smoke/divvy-smoke-",
        "maintenance",
    ] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    assert_eq!(pods(&bed), [Value::Null; 0]);
}

#[tokio::test]
async fn a_refused_pod_is_shown_with_what_was_tried() {
    let bed = Bed::new(&[&[16, 16]]).await;
    install(bed.api());
    let refuse = Effect::Refuse(403);
    bed.api()
        .faults()
        .add(FaultRule::new(Match::any().verb("create").resource("pods"), refuse));
    let (status, text, errors) = smoke(&bed, &["--all-nodes"], &["n1"], |_| None).await;
    assert_eq!(status, Some(3), "{text}{errors}");
    assert_eq!(
        text.matches("the API server refused the pod: forbidden (a fault on request) (403 Forbidden)")
            .count(),
        2,
        "{text}"
    );
    assert_eq!(text.matches("This was tried:\n").count(), 1, "{text}");
    assert!(
        text.contains("  runAsNonRoot: true") && text.contains("aliyun.com/gpu-mem"),
        "{text}"
    );
    assert!(!has_namespace(&bed));
}

#[tokio::test]
async fn a_user_without_rights_gets_a_sentence() {
    let bed = Bed::new(&[&[16]]).await;
    install(bed.api());
    let api = bed.api();
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("kubeconfig");
    let url = bed.cluster.api_url();
    let address = url.trim_start_matches("http://").split('/').next().expect("a host");
    let text = api.kubeconfig_for(address.parse().expect("an address"), "ann");
    std::fs::write(&file, text).expect("written");
    let as_ann = async || {
        let passes = |uuid: &str| Some(reported(&good(uuid)));
        let (status, text, errors) = smoke_with(&bed, &file, &["--all-nodes"], &["n1"], passes).await;
        (status, format!("{text}{errors}"))
    };
    api.rights().limit("ann");
    let right = |verbs: &[&str], resource: &str| api.rights().grant("ann", Right::new(verbs, resource));
    let (status, text) = as_ann().await;
    assert!(
        status == Some(3) && text.contains("divvy-viewer") && text.contains("divvy smoke --here needs no rights"),
        "{text}"
    );
    right(&["list"], "nodes");
    right(&["list"], "pods");
    let (status, text) = as_ann().await;
    assert!(
        status == Some(3) && text.contains("the agent's image could not be read") && text.contains("--image"),
        "{text}"
    );
    right(&["list"], "daemonsets.apps");
    right(&["get"], "namespaces");
    let (status, text) = as_ann().await;
    assert!(
        status == Some(3)
            && text.contains("there is no namespace divvy-smoke")
            && text.contains("kubectl create namespace divvy-smoke"),
        "{text}"
    );
    right(&["create", "delete"], "namespaces");
    let (status, text) = as_ann().await;
    assert!(status == Some(3) && text.contains("the API server refused the pod"), "{text}");
    right(&["create", "delete"], "pods");
    let (status, text) = as_ann().await;
    assert!(
        status == Some(3) && text.contains("the pods in namespace divvy-smoke could not be watched"),
        "{text}"
    );
    assert!(text.contains("kubectl auth can-i create pods -n divvy-smoke"), "{text}");
    right(&["watch"], "pods");
    let (status, text) = as_ann().await;
    assert_eq!(status, Some(0), "{text}");

    // To report takes one more right.
    let mut failing = bad(&bed.inventory("n1").gpus[0].uuid);
    failing
        .steps
        .iter_mut()
        .for_each(|step| step.gpu_at_fault = step.id == StepId::S03);
    let fails = |_: &str| Some(reported(&failing));
    let (status, text, _) = smoke_with(&bed, &file, &["--all-nodes", "--report"], &["n1"], fails).await;
    assert!(
        status == Some(2)
            && text.contains("The annotation of the node could not be written")
            && text.contains("kubectl auth can-i patch nodes"),
        "{text}"
    );
}

#[tokio::test]
async fn wrong_names_and_missing_parts_are_told() {
    let bed = Bed::new(&[&[16, 16]]).await;
    let mut texts = BTreeMap::new();
    for args in [
        &["--node", "n9"][..],
        &["--all-nodes", "--gpu", "7"],
        &["--all-nodes", "--gpu", "GPU-"],
        &["--all-nodes"],
    ] {
        let (status, text, errors) = smoke(&bed, args, &["n1"], |_| None).await;
        assert_eq!(status, Some(3), "{text}");
        texts.insert(args.join(" "), steady(&errors, &bed));
    }
    install(bed.api());
    // The namespace stays while a pod in it ends.
    bed.api()
        .create("namespaces", json!({"metadata": {"name": NAMESPACE}}))
        .expect("created");
    let slow = pod("slow")
        .namespace(NAMESPACE)
        .gpu_mem(1)
        .args(&["run", "--ignore-term"])
        .grace_seconds(600);
    bed.create(&slow);
    bed.until("the pod to run", async |bed: &Bed| {
        let found = pods(bed);
        if found.first().is_some_and(|pod| pod["status"]["phase"] == "Running") {
            Ok(())
        } else {
            Err(format!("{found:?}"))
        }
    })
    .await;
    bed.api()
        .delete("namespaces", "", NAMESPACE, &DeleteOptions::default())
        .expect("begun");
    let (status, _, errors) = smoke(&bed, &["--all-nodes"], &["n1"], |_| None).await;
    assert_eq!(status, Some(3));
    texts.insert("a namespace that is being deleted".to_owned(), errors);
    let shown: Vec<String> = texts
        .into_iter()
        .map(|(what, text)| format!("{what}\n  {}", text.trim_end()))
        .collect();
    insta::assert_snapshot!(shown.join("\n"));
}

#[test]
fn a_test_that_may_take_gpus_out_of_service_has_enough_time() {
    let output = divvy(&["smoke", "--all-nodes", "--report", "--timeout", "59s"], &[]);
    assert!(
        output.status.code() == Some(3) && stderr(&output).contains("allow 60 s or more"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn a_wrong_command_line_is_refused() {
    for (args, part) in [
        (&[][..], "--all-nodes|--node <NODE>|--here|--docker|--nerdctl|--podman"),
        (&["--all-nodes", "--node", "n1"], "cannot be used with"),
        (&["--here", "--share", "2"], "cannot be used with"),
        (&["--all-nodes", "--share", "0"], "0 is not in"),
        (&["--all-nodes", "--share", "2", "--whole"], "cannot be used with"),
        (&["--all-nodes", "--parallel", "0"], "0 is not in 1..=256"),
        (&["--all-nodes", "--timeout", "0s"], "write a time from 1s to 60m"),
        (&["--here", "--report"], "cannot be used with"),
        (&["--all-nodes", "-n", "A B"], "lower-case letters"),
        (&["--all-nodes", "--device", "x"], "cannot be used with"),
        (&["--podman", "--gpus", "all"], "cannot be used with"),
    ] {
        let output = divvy(&[&["smoke"], args].concat(), &[]);
        assert!(
            output.status.code() == Some(2) && stderr(&output).contains(part),
            "{args:?}: {}",
            stderr(&output)
        );
    }
}

/// Make a program that prints its arguments and ends with status 7.
fn program(directory: &Path, name: &str) -> String {
    use std::os::unix::fs::PermissionsExt as _;
    let path = directory.join(name);
    std::fs::write(&path, "#!/bin/sh\necho \"$@\"\nexit 7\n").expect("written");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("executable");
    path.display().to_string()
}

#[test]
fn here_the_program_gives_output_and_exit_status() {
    let directory = tempfile::tempdir().expect("a directory");
    let smoke = program(directory.path(), "divvy-smoke");
    program(directory.path(), "docker");
    let path = directory.path().display().to_string();
    let output = divvy(&["smoke", "--here", "--program", &smoke, "--steps", "S02"], &[]);
    assert_eq!(
        (output.status.code(), stdout(&output).as_str()),
        (Some(7), "here --timeout 120000ms --steps S02\n")
    );
    let search = format!("{path}:/usr/bin:/bin");
    let output = divvy(&["smoke", "--docker"], &[("PATH", &search)]);
    assert!(
        output.status.code() == Some(7) && stdout(&output).starts_with("run --rm"),
        "{}",
        stdout(&output)
    );
    let output = divvy(&["smoke", "--podman"], &[("PATH", &path)]);
    assert_eq!(output.status.code(), Some(3));
    assert!(
        stderr(&output).contains("podman could not be started; install the engine, or choose another one"),
        "{}",
        stderr(&output)
    );
    let output = divvy(&["smoke", "--here", "--program", "/nowhere/divvy-smoke"], &[]);
    assert!(
        output.status.code() == Some(3) && stderr(&output).contains("name its path with --program"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn doctor_ends_with_how_to_prove_it_and_with_smoke_proves_it() {
    let directory = tempfile::tempdir().expect("a directory");
    let smoke = program(directory.path(), "divvy-smoke");
    let text = stdout(&divvy(&["doctor"], &[]));
    assert!(
        text.ends_with("\nTo prove that a GPU computes: divvy smoke --here.\n"),
        "{text}"
    );
    let output = divvy(&["doctor", "--only", "K01", "--smoke"], &[("DIVVY_SMOKE", &smoke)]);
    let text = stdout(&output);
    assert!(
        text.contains("Not run: 1 cluster check") && text.ends_with("\n\nhere --timeout 120000ms\n"),
        "{text}"
    );
    // The status 7 of the program is no status of doctor.
    assert_eq!(output.status.code(), Some(2), "{text}");
    let text = stdout(&divvy(&["doctor", "--only", "D01"], &[]));
    assert!(!text.contains("divvy smoke"), "{text}");
    for args in [&["--smoke", "--root", "/tmp"][..], &["--smoke", "-o", "json"]] {
        let output = divvy(&[&["doctor"], args].concat(), &[]);
        assert!(
            output.status.code() == Some(2) && stderr(&output).contains("run divvy smoke on its own"),
            "{args:?}"
        );
    }
}
