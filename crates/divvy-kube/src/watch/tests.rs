use std::time::Duration;

use futures::StreamExt as _;
use serde_json::{Value, json};

use super::*;
use crate::script::ScriptedServer;

fn pod(name: &str, rv: u64) -> Value {
    json!({"kind": "Pod", "metadata": {"name": name, "namespace": "ns", "uid": format!("u-{name}"), "resourceVersion": rv.to_string()}, "spec": {}})
}

fn list(items: &[Value], rv: &str, next: &str) -> String {
    json!({"kind": "PodList", "items": items, "metadata": {"resourceVersion": rv, "continue": next}}).to_string()
}

fn event(kind: &str, object: &Value) -> String {
    format!("{}\n", json!({"type": kind, "object": object}))
}

/// Return the first `count` messages of a watch, as texts.
async fn said(script: &ScriptedServer, count: usize) -> Vec<String> {
    let seen = pods_as_they_come(script.client()).take(count).map(|seen| {
        let name = |pod: PodObject| pod.metadata.name.unwrap_or_default();
        match seen {
            WatchMessage::ListBegins => "list".to_owned(),
            WatchMessage::ListEnds => "listed".to_owned(),
            WatchMessage::There(pod) => format!("there {}", name(pod)),
            WatchMessage::Gone(pod) => format!("gone {}", name(pod)),
            WatchMessage::Interrupted(why) => format!("interrupted: {why}"),
            WatchMessage::Resumed => "resumed".to_owned(),
        }
    });
    tokio::time::timeout(Duration::from_secs(600), seen.collect())
        .await
        .expect("as much as that")
}

/// The resourceVersions at which watches began; `list` for a list.
fn questions(script: &ScriptedServer) -> Vec<String> {
    let of = |query: &Value| match (&query["watch"], &query["continue"]) {
        (Value::Null, Value::Null) => "list".to_owned(),
        (Value::Null, next) => format!("list on {}", next.as_str().unwrap_or_default()),
        _ => format!("watch from {}", query["resourceVersion"].as_str().unwrap_or_default()),
    };
    script.requests().iter().map(of).collect()
}

#[tokio::test(start_paused = true)]
async fn a_paged_list_and_later_changes_keep_order() {
    let script = ScriptedServer::default()
        .then_in_parts(list(&[pod("a", 1), pod("b", 2)], "9", "more"), 7)
        .then_in_parts(list(&[pod("c", 3)], "9", ""), 1)
        .then_in_parts(
            event("ADDED", &pod("d", 10))
                + &event("BOOKMARK", &json!({"metadata": {"resourceVersion": "12"}}))
                + &event("DELETED", &pod("a", 13)),
            11,
        )
        .then_stays_open(event("MODIFIED", &pod("b", 14)));
    let seen = said(&script, 8).await;
    assert_eq!(
        seen,
        [
            "list", "there a", "there b", "there c", "listed", "there d", "gone a", "there b"
        ]
    );
    assert_eq!(questions(&script), ["list", "list on more", "watch from 9", "watch from 13"]);
    let first = &script.requests()[0];
    assert_eq!(
        (&first["limit"], &first["resourceVersion"]),
        (&json!("500"), &Value::Null),
        "a quorum read"
    );
    assert_eq!(script.requests()[2]["allowWatchBookmarks"], "true");
}

/// The API server may report the expired version in a watch event or in the HTTP status.
#[tokio::test(start_paused = true)]
async fn a_watch_with_an_expired_version_lists_again() {
    let expired = json!({"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"});
    for script in [
        ScriptedServer::default()
            .then(list(&[], "1", ""))
            .then(event("ERROR", &expired)),
        ScriptedServer::default()
            .then(list(&[], "1", ""))
            .then_status(410, expired.to_string()),
    ] {
        let script = script.then(list(&[pod("a", 5)], "6", "")).then_stays_open("");
        let seen = said(&script, 6).await;
        let why = "interrupted: too old resource version (410 Expired)";
        assert_eq!(seen, ["list", "listed", why, "list", "there a", "listed"]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_list_that_breaks_off_is_no_list_and_is_asked_for_again() {
    let whole = list(&[pod("a", 1)], "6", "");
    let cut = whole[..whole.len() - 3].to_owned();
    let script = ScriptedServer::default()
        .then(cut)
        .then_status(502, "<html>Bad Gateway</html>")
        .then("<html>hello</html>")
        .then("{}")
        .then(whole.clone())
        .then_stays_open("");
    let seen = said(&script, 12).await;
    let expected = [
        "list",
        "there a",
        &format!(
            "interrupted: listing failed: the answer ended after {} bytes, in the middle of the list",
            whole.len() - 3
        ),
        "list",
        "interrupted: listing failed: <html>Bad Gateway</html> (502 Failed to parse error data)",
        "list",
        "interrupted: listing failed: the answer is not JSON: expected value (byte 0)",
        "list",
        "interrupted: listing failed: the answer is not a list: it is an object without items",
        "list",
        "there a",
        "listed",
    ];
    assert_eq!(seen, expected);
    // A consumer that keeps the objects ignores the incomplete list.
    let script = ScriptedServer::default()
        .then(&whole[..whole.len() - 3])
        .then(whole)
        .then_stays_open("");
    let changes: Vec<_> = pods(script.client(), None).take(2).collect().await;
    assert!(
        matches!(&changes[..], [WatchChange::Interrupted(_), WatchChange::Reset(pods)] if pods.len() == 1),
        "{changes:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_ends_goes_on_where_it_was() {
    let script = ScriptedServer::default()
        .then(list(&[], "1", ""))
        // The last line is incomplete.
        .then(event("ADDED", &pod("a", 5)) + r#"{"type":"ADDED","obj"#)
        .then_status(
            500,
            r#"{"kind":"Status","code":500,"reason":"InternalError","message":"etcd"}"#,
        )
        .then_stays_open("")
        .then_stays_open(event("ADDED", &pod("b", 6)));
    let seen = said(&script, 6).await;
    assert_eq!(
        seen,
        [
            "list",
            "listed",
            "there a",
            "interrupted: etcd (500 InternalError)",
            // Even if nothing happened in the meantime.
            "resumed",
            "there b"
        ]
    );
    assert_eq!(
        questions(&script),
        ["list", "watch from 1", "watch from 5", "watch from 5", "watch from 5"]
    );
}

/// While its watch is broken, the extender answers with errors instead of refusals, so pods wait for the watch.
/// A cluster watch resumes within seconds after a long outage; a watch of one node waits longer.
#[tokio::test(start_paused = true)]
async fn a_cluster_watch_resumes_soon_after_an_outage() {
    for (fields, at_most_s, at_least_s) in [(None, 5.0, 0.8), (Some("spec.nodeName=n1"), 60.0, 20.0)] {
        let mut script = ScriptedServer::default().then(list(&[], "1", ""));
        for _ in 0..12 {
            script = script.then_status(503, "away");
        }
        let script = script.then_stays_open("");
        let changes = pods(script.client(), fields);
        tokio::pin!(changes);
        let (mut waits, mut before) = (Vec::new(), tokio::time::Instant::now());
        while let Some(change) = changes.next().await {
            waits.push(before.elapsed().as_secs_f64());
            before = tokio::time::Instant::now();
            if matches!(change, WatchChange::Resumed) {
                break;
            }
        }
        let longest = waits.iter().copied().fold(0.0, f64::max);
        assert_eq!(waits.len(), 14, "{fields:?}");
        assert!((at_least_s..=at_most_s + 0.1).contains(&longest), "{fields:?}: {waits:?}");
    }
}

/// Objects that are JSON but not pods: an API server would not accept them, but a proxy or an aggregated server may send them.
fn unreadable() -> Vec<Value> {
    let meta = |name: &str| json!({"name": name, "namespace": "ns", "uid": format!("u-{name}"), "resourceVersion": "20"});
    vec![
        json!({"metadata": meta("no-spec")}),
        json!({"metadata": meta("null-spec"), "spec": null}),
        json!({"metadata": meta("text-spec"), "spec": "x"}),
        json!({"metadata": meta("no-quantity"), "spec": {"containers": [{"resources": {"limits": {"aliyun.com/gpu-mem": {}}}}]}}),
        json!({"metadata": meta("bad-map"), "spec": {"nodeSelector": [1]}}),
        json!({"metadata": {"name": 7, "resourceVersion": "20"}, "spec": {}}),
        json!({"spec": {}}),
        json!(null),
        json!([1]),
    ]
}

#[tokio::test(start_paused = true)]
async fn an_unreadable_object_stops_no_list_or_watch() {
    for bad in unreadable() {
        let script = ScriptedServer::default()
            .then(list(&[pod("a", 1), bad.clone(), pod("b", 2)], "9", ""))
            .then_stays_open(event("ADDED", &bad) + &event("MODIFIED", &bad) + &event("ADDED", &pod("c", 21)));
        assert_eq!(
            said(&script, 5).await,
            ["list", "there a", "there b", "listed", "there c"],
            "{bad}"
        );
        let changes: Vec<_> = pods(script.client(), None).take(0).collect().await;
        assert!(changes.is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn an_unreadable_object_is_known_to_be_gone() {
    let bad = json!({"metadata": {"name": "a", "namespace": "ns", "uid": "u-a", "resourceVersion": "20"}});
    let script = ScriptedServer::default()
        .then(list(&[pod("a", 1)], "9", ""))
        .then_stays_open(event("MODIFIED", &bad) + &event("DELETED", &bad));
    let changes: Vec<_> = pods(script.client(), None).take(2).collect().await;
    assert!(
        matches!(&changes[..], [WatchChange::Reset(_), WatchChange::Delete(pod)] if pod.metadata.uid.as_deref() == Some("u-a")),
        "{changes:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_node_with_a_quantity_that_is_none_is_left_out() {
    let node = |name: &str, amount: Value| json!({"metadata": {"name": name, "resourceVersion": "5"}, "spec": {}, "status": {"capacity": {"aliyun.com/gpu-mem": amount}}});
    let script = ScriptedServer::default()
        .then(list(
            &[
                node("a", json!("16")),
                node("b", json!("16 GiB")),
                node("c", json!(-1)),
                node("d", json!([])),
                node("e", json!(16)),
            ],
            "9",
            "",
        ))
        .then_stays_open(event("MODIFIED", &node("a", json!("?"))) + &event("MODIFIED", &node("b", json!("8"))));
    let changes: Vec<_> = nodes(script.client(), None).take(2).collect().await;
    let names = |nodes: &[NodeObject]| nodes.iter().filter_map(|node| node.metadata.name.clone()).collect::<Vec<_>>();
    assert!(
        matches!(&changes[..], [WatchChange::Reset(all), WatchChange::Apply(b)] if names(all) == ["a", "e"] && names(std::slice::from_ref(b)) == ["b"]),
        "{changes:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn an_event_that_is_larger_than_any_object_is_skipped() {
    let large = event("ADDED", &json!({"metadata": {"name": "x".repeat(17 << 20)}, "spec": {}}));
    let script = ScriptedServer::default()
        .then(list(&[], "1", ""))
        .then_in_parts(large + &event("ADDED", &pod("a", 5)), 1 << 20)
        .then_stays_open("");
    let seen = said(&script, 5).await;
    assert_eq!(
        seen,
        [
            "list",
            "listed",
            "interrupted: an event of the watch cannot be read: it is larger than 16 MiB",
            "resumed",
            "there a"
        ]
    );
}
