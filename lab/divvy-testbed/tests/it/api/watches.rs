//! Watches: raw streams, and kube-rs watchers and reflectors. The clock is paused, so no test waits for real time.

use std::time::Duration;

use axum::body::BodyDataStream;
use divvy_testbed::api::{ApiServerOptions, PatchKind};
use futures::{Stream, StreamExt};
use kube::ResourceExt;
use kube::runtime::watcher::{self, Event};
use kube::runtime::{WatchStreamExt, reflector, watcher as watch};

use super::*;

/// The lines of one watch response.
struct Lines {
    body: BodyDataStream,
    buffer: Vec<u8>,
}

impl Lines {
    async fn open(api: &ApiServer, path: &str, accept: &str) -> Lines {
        let request = Request::get(path).header("accept", accept).body(Body::empty()).unwrap();
        let response = api.router().oneshot(request).await.unwrap();
        assert_eq!(response.status(), 200, "{path}");
        Lines {
            body: response.into_body().into_data_stream(),
            buffer: Vec::new(),
        }
    }

    /// Return the next event, or `None` at the end of the stream.
    async fn next(&mut self) -> Option<Value> {
        loop {
            if let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                return Some(serde_json::from_slice(&line).unwrap());
            }
            let chunk = tokio::time::timeout(Duration::from_secs(60), self.body.next())
                .await
                .expect("an event or the end")?;
            self.buffer.extend_from_slice(&chunk.unwrap());
        }
    }

    /// Return the next event as text: `ADDED p`, …; a bookmark with its revision.
    async fn told(&mut self) -> String {
        let Some(event) = self.next().await else { return "end".into() };
        let object = &event["object"];
        let what = object["metadata"]["name"]
            .as_str()
            .or(object["metadata"]["resourceVersion"].as_str())
            .unwrap_or("");
        format!("{} {what}", event["type"].as_str().unwrap())
    }
}

const PODS: &str = "/api/v1/namespaces/default/pods?watch=true";

fn bind(api: &ApiServer, name: &str, node: &str) {
    api.create("pods/binding", json!({"metadata": {"name": name}, "target": {"name": node}}))
        .unwrap();
}

#[tokio::test(start_paused = true)]
async fn an_object_that_begins_or_ceases_to_match_is_added_or_deleted() {
    let api = server();
    let mut on_node = Lines::open(&api, &format!("{PODS}&fieldSelector=spec.nodeName%3Dn1"), "application/json").await;
    let mut labelled = Lines::open(&api, &format!("{PODS}&labelSelector=app%3Dx"), "application/json").await;
    api.create("pods", pod("a")).unwrap();
    bind(&api, "a", "n1");
    let label = |value: Value| {
        api.patch(
            "pods",
            "default",
            "a",
            PatchKind::Merge,
            &json!({"metadata": {"labels": {"app": value}}}),
        )
        .unwrap()
    };
    label(json!("x"));
    label(json!("y"));
    assert_eq!(on_node.told().await, "ADDED a");
    assert_eq!(on_node.told().await, "MODIFIED a");
    assert_eq!(labelled.told().await, "ADDED a");
    let gone = labelled.next().await.unwrap();
    assert_eq!(
        (&gone["type"], &gone["object"]["metadata"]["labels"]["app"]),
        (&json!("DELETED"), &json!("x"))
    );
    assert_eq!(gone["object"]["metadata"]["resourceVersion"], api.revision().to_string());
}

#[tokio::test(start_paused = true)]
async fn a_watch_from_before_the_ring_is_expired() {
    let api = server_with(ApiServerOptions {
        watch_history: 2,
        ..ApiServerOptions::default()
    });
    let old = api.revision();
    for name in ["a", "b", "c"] {
        api.create("pods", pod(name)).unwrap();
    }
    let mut lines = Lines::open(&api, &format!("{PODS}&resourceVersion={old}"), "application/json").await;
    let error = lines.next().await.unwrap();
    assert_eq!((&error["type"], &error["object"]["code"]), (&json!("ERROR"), &json!(410)));
    assert_eq!(error["object"]["reason"], "Expired");
    assert_eq!(lines.told().await, "end");
    let mut recent = Lines::open(
        &api,
        &format!("{PODS}&resourceVersion={}", api.revision() - 2),
        "application/json",
    )
    .await;
    assert_eq!(recent.told().await, "ADDED b");
}

/// Run a reflector until the test ends. Return its store.
fn reflect<K>(stream: impl Stream<Item = watcher::Result<Event<K>>> + Send + 'static) -> reflector::Store<K>
where
    K: kube::Resource + Clone + std::fmt::Debug + Send + Sync + 'static,
    K::DynamicType: Eq + std::hash::Hash + Clone + Default + Send + Sync,
{
    let (reader, writer) = reflector::store();
    // The stream recovers from its errors on its own.
    tokio::spawn(stream.default_backoff().reflect(writer).for_each(|_| std::future::ready(())));
    reader
}

async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let limit = tokio::time::Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(tokio::time::Instant::now() < limit, "not within a minute: {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// The reflectors also stay true while the API server is down.
#[tokio::test(start_paused = true)]
async fn reflectors_stay_true_through_cuts_and_compaction() {
    let api = server();
    let store = reflect(watch(pods(&api), watcher::Config::default()));
    let names = |store: &reflector::Store<Pod>| {
        let mut names: Vec<String> = store.state().iter().map(|pod| pod.name_any()).collect();
        names.sort();
        names
    };
    api.create("pods", pod("a")).unwrap();
    eventually("the first pod", || names(&store) == ["a"]).await;

    api.faults().cut_watches();
    api.create("pods", pod("b")).unwrap();
    eventually("after a cut", || names(&store) == ["a", "b"]).await;

    // While the watch is down, its position in the history is forgotten: it gets 410 and lists again.
    api.faults().set_down(true);
    api.create("pods", pod("c")).unwrap();
    api.delete("pods", "default", "a", &Default::default()).unwrap();
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(names(&store), ["a", "b"], "a server that is down sends nothing");
    api.faults().compact();
    api.faults().set_down(false);
    eventually("after compaction", || names(&store) == ["b", "c"]).await;

    api.faults().hold_watches(true);
    api.create("pods", pod("d")).unwrap();
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert_eq!(names(&store), ["b", "c"], "held watches deliver nothing");
    api.faults().hold_watches(false);
    eventually("after the hold", || names(&store) == ["b", "c", "d"]).await;
}
