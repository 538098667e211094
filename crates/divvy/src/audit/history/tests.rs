use divvy_audit::{Audit, Limits, Outcome};
use serde_json::{Value, json};

use super::*;

fn pod(name: &str, rv: u64, edit: impl FnOnce(&mut Value)) -> Value {
    let allocation = json!({"v": 1, "gpus": [{"uuid": "GPU-1", "memMiB": 10240}], "containers": {"main": [{"uuid": "GPU-1", "memMiB": 10240}]}});
    let mut pod = json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "ml", "uid": format!("u-{name}"), "resourceVersion": rv.to_string(), "labels": {"secret": "label"},
            "annotations": {"divvy.dev/allocation": allocation.to_string(), "secret": "annotation"}},
        "spec": {"nodeName": "n1", "nodeSelector": {"secret": "selector"}, "containers": [{"name": "main", "env": [{"name": "secret", "value": "env"}],
            "resources": {"limits": {"aliyun.com/gpu-mem": "10", "cpu": "1"}}}]},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True", "message": "secret"}],
            "containerStatuses": [{"name": "main", "state": {"running": {"startedAt": "x"}}}]}});
    edit(&mut pod);
    pod
}

fn node(rv: u64) -> Value {
    let inventory = json!({"v": 1, "agent": "0.1.0", "driver": "1", "unitMiB": 1024, "gpus": [{"uuid": "GPU-1", "index": 0, "minor": 0,
        "totalMiB": 16384, "units": 16, "health": "ok"}]});
    json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1", "uid": "u-n1", "resourceVersion": rv.to_string(),
            "annotations": {"divvy.dev/inventory": inventory.to_string()}},
        "spec": {}, "status": {"capacity": {"aliyun.com/gpu-mem": "16", "aliyun.com/gpu-count": "1", "cpu": "8"}}})
}

fn pod_object(value: Value) -> PodObject {
    serde_json::from_value(value).expect("a pod")
}

fn node_object(value: Value) -> NodeObject {
    serde_json::from_value(value).expect("a node")
}

/// Replay these files, each a list of documents, and return the outcome.
fn replay(files: &[Vec<Value>]) -> Result<Outcome, Unusable> {
    let mut reader = Reader::default();
    let mut audit = Audit::new(Limits::default());
    for file in files {
        reader.next_file();
        for document in file {
            let mut facts = Vec::new();
            reader.read(serde_json::from_value(document.clone()).expect("a document"), &mut facts)?;
            for (at, fact) in facts {
                match fact {
                    Ok(fact) => audit.take(at, fact),
                    Err(what) => audit.note(at, what),
                }
            }
        }
    }
    Ok(audit.finish(None))
}

fn ids(outcome: &Outcome) -> Vec<&'static str> {
    outcome.findings.iter().map(|finding| finding.what.id()).collect()
}

fn parsed(lines: &[String]) -> Vec<Value> {
    lines
        .iter()
        .map(|line| serde_json::from_str(line).expect("a line of JSON"))
        .collect()
}

#[test]
fn what_is_recorded_is_read_again_and_says_the_same() {
    let mut recorder = Recorder::default();
    let mut lines = vec![header("0.1.0", "https://c/", "2026-01-02T03:04:05Z")];
    lines.extend(recorder.node(1000, Seen::ListBegins));
    lines.extend(recorder.node(1001, Seen::There(node_object(node(5)))));
    lines.extend(recorder.node(1002, Seen::ListEnds));
    lines.extend(recorder.pod(1003, Seen::ListBegins));
    lines.extend(recorder.pod(1004, Seen::There(pod_object(pod("a", 6, |_| ())))));
    lines.extend(recorder.pod(1005, Seen::ListEnds));
    lines.extend(recorder.pod(2000, Seen::There(pod_object(pod("b", 7, |_| ())))));
    lines.extend(recorder.pod(
        3500,
        Seen::Gone(pod_object(pod("b", 9, |pod| pod["status"]["phase"] = json!("Failed")))),
    ));
    lines.push(stopped(60_000));
    let outcome = replay(&[parsed(&lines)]).expect("readable");
    assert_eq!(ids(&outcome), ["gpu-overcommitted"]);
    let finding = &outcome.findings[0];
    let until = finding.until.expect("it passed");
    assert_eq!((finding.at.revision, finding.at.at_ms), (Some(7), Some(2000)));
    assert_eq!((until.revision, until.at_ms), (Some(9), Some(3500)));
    let summary = outcome.summary;
    assert_eq!((summary.changes, summary.pods, summary.gpus), (2, 2, 1));
    assert_eq!(
        summary.last.and_then(|last| last.at_ms),
        Some(60_000),
        "the quiet at the end counts"
    );
    let text = lines.concat();
    assert!(!text.contains("secret"), "only what an audit reads is written: {text}");
}

#[test]
fn a_change_of_nothing_that_is_read_is_no_line() {
    let mut recorder = Recorder::default();
    let mut line = |rv, edit: fn(&mut Value)| recorder.pod(1, Seen::There(pod_object(pod("a", rv, edit))));
    let first = line(1, |_| ()).expect("it is new");
    assert!(first.contains("\"type\":\"ADDED\",\"rv\":\"1\""), "{first}");
    assert_eq!(line(2, |pod| pod["status"]["conditions"] = json!([])), None);
    assert_eq!(line(3, |pod| pod["metadata"]["labels"] = json!({"other": "label"})), None);
    let changed = line(4, |pod| pod["status"]["phase"] = json!("Failed")).expect("a change");
    assert!(changed.contains("\"type\":\"MODIFIED\",\"rv\":\"4\""), "{changed}");
    // It is unknown what happens between two lists, so each list is complete.
    assert!(recorder.pod(1, Seen::ListBegins).is_some());
    let same = Seen::There(pod_object(pod("a", 4, |pod| pod["status"]["phase"] = json!("Failed"))));
    assert!(recorder.pod(1, same).expect("in a list").contains("ADDED"));
}

#[test]
fn pods_that_have_nothing_to_do_with_gpus_are_left_out_until_they_do() {
    let mut recorder = Recorder::default();
    let plain = |pod: &mut Value| {
        pod["metadata"]["annotations"] = json!({"a": "b"});
        pod["spec"]["containers"][0]["resources"] = json!({});
    };
    assert_eq!(recorder.pod(1, Seen::There(pod_object(pod("a", 1, plain)))), None);
    assert_eq!(recorder.pod(1, Seen::Gone(pod_object(pod("b", 2, plain)))), None);
    let forged = |pod: &mut Value| pod["spec"]["containers"][0]["resources"] = json!({});
    assert!(recorder.pod(1, Seen::There(pod_object(pod("a", 3, forged)))).is_some());
    assert!(
        recorder.pod(1, Seen::There(pod_object(pod("a", 4, plain)))).is_some(),
        "it was taken away again"
    );
    assert!(recorder.pod(1, Seen::Gone(pod_object(pod("a", 5, plain)))).is_some());
}

#[test]
fn a_watch_that_could_not_go_on_is_a_gap_with_its_reason() {
    let mut recorder = Recorder::default();
    let mut lines = vec![header("0.1.0", "https://c/", "2026-01-02T03:04:05Z")];
    for seen in [Seen::ListBegins, Seen::There(pod_object(pod("a", 6, |_| ()))), Seen::ListEnds] {
        lines.extend(recorder.pod(1000, seen));
    }
    // The watch resumed where it was: no gap.
    lines.extend(recorder.pod(2000, Seen::Interrupted("the connection was lost".to_owned())));
    lines.extend(recorder.pod(3000, Seen::There(pod_object(pod("b", 7, |_| ())))));
    lines.extend(recorder.pod(4000, Seen::Interrupted("too old resource version".to_owned())));
    for seen in [Seen::ListBegins, Seen::There(pod_object(pod("b", 7, |_| ()))), Seen::ListEnds] {
        lines.extend(recorder.pod(9000, seen));
    }
    let outcome = replay(&[vec![node(1)], parsed(&lines)]).expect("readable");
    assert_eq!(ids(&outcome), ["gpu-overcommitted", "history-gap"]);
    let gap = &outcome.findings[1];
    assert_eq!(
        (gap.at.at_ms, gap.until.and_then(|until| until.at_ms)),
        (Some(3000), Some(9000))
    );
    assert!(gap.what.to_string().ends_with("too old resource version"), "{}", gap.what);
}

#[test]
fn kubectls_output_is_read() {
    let event = |event: &str, object: Value| json!({"type": event, "object": object});
    let list = |items: Vec<Value>| json!({"apiVersion": "v1", "kind": "List", "items": items});
    let unkind = |mut object: Value| {
        object.as_object_mut().expect("an object").remove("kind");
        object
    };
    let (a, b) = (pod("a", 6, |_| ()), pod("b", 7, |_| ()));
    for (name, files) in [
        ("get pods,nodes", vec![vec![list(vec![a.clone(), b.clone(), node(1)])]]),
        (
            "two lists",
            vec![vec![list(vec![node(1)])], vec![list(vec![a.clone(), b.clone()])]],
        ),
        ("one by one", vec![vec![node(1), a.clone(), b.clone()]]),
        (
            "from the API server itself",
            vec![vec![
                json!({"kind": "NodeList", "items": [unkind(node(1))]}),
                json!({"kind": "PodList", "items": [unkind(a.clone()), unkind(b.clone())]}),
            ]],
        ),
        (
            "a watch",
            vec![
                vec![list(vec![node(1)])],
                vec![event("ADDED", a.clone()), event("ADDED", b.clone())],
            ],
        ),
    ] {
        assert_eq!(ids(&replay(&files).expect(name)), ["gpu-overcommitted"], "{name}");
    }
    let pending = pod("b", 6, |pod| {
        pod["metadata"]["annotations"] = Value::Null;
        pod["spec"]["nodeName"] = Value::Null;
    });
    let gone = vec![
        event("ADDED", a.clone()),
        event("ADDED", pending),
        event("DELETED", a.clone()),
        event("MODIFIED", b.clone()),
    ];
    let broke = event(
        "ERROR",
        json!({"kind": "Status", "status": "Failure", "message": "too old resource version"}),
    );
    let outcome = replay(&[vec![list(vec![node(1)])], gone.clone(), vec![]]).expect("readable");
    // It is unknown when its container ended: kubectl's output has no times.
    assert_eq!(ids(&outcome), ["given-before-its-end-was-seen"]);
    let outcome = replay(&[vec![event("ADDED", a.clone()), broke]]).expect("readable");
    assert!(ids(&outcome).contains(&"history-gap"));
    for (files, expected) in [
        (vec![vec![a.clone(), a.clone()]], Unusable::NoEventTypes),
        (vec![gone.clone(), gone], Unusable::TwoStreams("pods")),
        (vec![vec![json!({"divvyAudit": 2})]], Unusable::Version(2)),
        (
            vec![vec![json!({"kind": "Service", "metadata": {"name": "x"}})]],
            Unusable::Unknown,
        ),
        (vec![vec![json!({})]], Unusable::Unknown),
        (vec![vec![json!({"type": "LISTED"})]], Unusable::Unknown),
    ] {
        assert_eq!(replay(&files).map(|outcome| ids(&outcome)).expect_err("unusable"), expected);
    }
}
