//! The stream of a page.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::body::{Body, BodyDataStream};
use divvy_view_sim::mixed;
use divvy_web::TokenRefusal;
use futures::StreamExt as _;
use http::Response;

use crate::site::{Site, header, scene, text};

/// An event, as a browser reads it.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Event {
    name: String,
    id: Option<String>,
    data: String,
}

struct Reader {
    body: BodyDataStream,
    buffer: String,
}

impl Reader {
    fn of(response: Response<Body>) -> Reader {
        assert_eq!(
            (response.status().as_u16(), header(&response, "content-type")),
            (200, "text/event-stream")
        );
        Reader {
            body: response.into_body().into_data_stream(),
            buffer: String::new(),
        }
    }

    /// Wait for the next event. `None` at the end of the stream.
    async fn next(&mut self) -> Option<Event> {
        loop {
            let Some((block, rest)) = self.buffer.split_once("\n\n") else {
                let bytes = self.body.next().await?.expect("no error");
                self.buffer.push_str(std::str::from_utf8(&bytes).expect("text"));
                continue;
            };
            let mut event = Event::default();
            for (field, value) in block.lines().filter_map(|line| line.split_once(": ")) {
                match field {
                    "event" => event.name = value.to_owned(),
                    "id" => event.id = Some(value.to_owned()),
                    "data" => event.data.push_str(value),
                    // A comment, which keeps the connection open.
                    "" => {}
                    _ => panic!("{field}"),
                }
            }
            self.buffer = rest.to_owned();
            if event != Event::default() {
                return Some(event);
            }
        }
    }

    /// Read events until the client has everything of a version. Return their names with the ids of their elements, and the id of the last one.
    async fn until(&mut self, version: &str) -> (Vec<String>, String) {
        let mut names = Vec::new();
        loop {
            let event = self.next().await.expect("an event");
            let of = event
                .data
                .split_once("id=\"")
                .and_then(|(_, rest)| rest.split_once('"'))
                .map(|(id, _)| id);
            names.push(format!("{} {}", event.name, of.unwrap_or_default()));
            if let Some(id) = event.id.filter(|id| id.ends_with(version)) {
                return (names, id);
            }
        }
    }
}

/// The address of a page's stream, from the page itself.
async fn stream_of(site: &Site, path: &str) -> String {
    let page = text(site.get(path).await).await;
    let attribute = |name: &str| {
        let (_, rest) = page.split_once(&format!("{name}=\"")).expect("an attribute");
        rest.split_once('"').expect("an end").0.replace("&amp;", "&")
    };
    format!("{}&since={}", attribute("data-events"), attribute("data-since"))
}

/// Change what one node uses.
fn touched(step: u64, node: &str, sample: u64) -> divvy_page::ClusterScene {
    let mut scene = scene(mixed(0));
    if step > 0 {
        let later = mixed(step).usage.remove(node).expect("measured");
        scene.answers.get_mut(node).expect("measured").usage = later;
    }
    for answer in scene.answers.values_mut() {
        if let Ok(usage) = &mut answer.usage {
            usage.sample = sample;
        }
    }
    scene
}

#[tokio::test]
async fn a_stream_brings_only_what_changed_on_its_page() {
    let site = Site::new();
    let mut cluster = Reader::of(site.get(&stream_of(&site, "/").await).await);
    let mut node = Reader::of(site.get(&stream_of(&site, "/nodes/gpu-l4-01").await).await);
    // The same again, with other numbers of samples, is no change.
    site.hub.show(touched(0, "", 2));
    site.hub.show(touched(5, "gpu-a100-01", 3));
    let event = cluster.next().await.expect("an event");
    assert_eq!(event.name, "totals");
    let event = cluster.next().await.expect("an event");
    assert_eq!(event.name, "node");
    assert!(
        event.data.starts_with("<article") && event.data.contains("id=\"node-gpu-a100-01\""),
        "{}",
        event.data
    );
    assert!(event.id.is_some_and(|id| id.ends_with("-3")));
    // The other page has nothing of it.
    site.hub.show(touched(7, "gpu-l4-01", 4));
    let event = node.next().await.expect("an event");
    assert!(
        event.name == "node" && event.data.contains("id=\"node-gpu-l4-01\""),
        "{event:?}"
    );
    assert!(event.id.is_some_and(|id| id.ends_with("-4")));
}

#[tokio::test]
async fn a_stream_that_was_cut_goes_on_where_it_was() {
    let site = Site::new();
    let address = stream_of(&site, "/").await;
    let mut reader = Reader::of(site.get(&address).await);
    site.hub.show(touched(5, "gpu-a100-01", 2));
    let (_, id) = reader.until("-2").await;
    drop(reader);
    let mut scene = touched(5, "gpu-a100-01", 3);
    scene.waiting.pop();
    site.hub.show(scene.clone());
    scene.answers.remove("gpu-l4-01");
    site.hub.show(scene);
    let again = [("authorization", "Bearer a-token"), ("last-event-id", id.as_str())];
    let mut reader = Reader::of(site.ask(&address, &again, None).await);
    let (names, _) = reader.until("-4").await;
    assert_eq!(names, ["totals totals", "waiting waiting-count", "node node-gpu-l4-01"]);
}

#[tokio::test]
async fn a_client_that_cannot_go_on_loads_its_page_again() {
    let site = Site::new();
    let address = stream_of(&site, "/").await;
    let reload = Some(Event {
        name: "reload".to_owned(),
        id: None,
        data: "reload".to_owned(),
    });
    let (_, since) = address.rsplit_once("since=").expect("a version");
    let (run, _) = since.split_once('-').expect("a run");
    // An id of another run, of the future, or of nothing.
    for id in ["0123456789abcdef-1", &format!("{run}-2"), "x", ""] {
        let headers = [("authorization", "Bearer a-token"), ("last-event-id", id)];
        let mut reader = Reader::of(site.ask(&address, &headers, None).await);
        let first = tokio::time::timeout(Duration::from_secs(5), reader.next()).await;
        assert_eq!(first.expect("an event"), reload, "{id:?}");
        assert_eq!(reader.next().await, None, "{id:?}");
    }
    // A node that the client does not have, or that is gone.
    let mut reader = Reader::of(site.get(&address).await);
    let mut fewer = scene(mixed(0));
    fewer.view.nodes.remove(3);
    site.hub.show(fewer);
    assert_eq!(reader.next().await, reload);
    assert_eq!(reader.next().await, None);
    let mut reader = Reader::of(site.get(&address).await);
    assert_eq!(reader.next().await, reload);
}

#[tokio::test]
async fn a_reader_that_was_slow_gets_each_part_once_and_as_it_is_now() {
    let site = Site::new();
    let mut reader = Reader::of(site.get(&stream_of(&site, "/").await).await);
    for step in 1..200 {
        site.hub.show(scene(mixed(step)));
    }
    let mut count = BTreeMap::<String, u32>::new();
    let mut last = Event::default();
    while !last.id.as_ref().is_some_and(|id| id.ends_with("-200")) {
        last = reader.next().await.expect("an event");
        let id = last.data.split_once("id=\"").and_then(|(_, rest)| rest.split_once('"'));
        *count.entry(id.expect("an id").0.to_owned()).or_default() += 1;
    }
    assert!(count.len() > 8 && count.values().all(|times| *times == 1), "{count:?}");
    let now = text(site.get("/").await).await;
    assert!(now.contains(&last.data));
}

#[tokio::test(start_paused = true)]
async fn a_stream_ends_within_a_minute_after_its_token_has_expired() {
    let site = Site::new();
    for refused in [TokenRefusal::Unknown, TokenRefusal::Unavailable { why: "away".to_owned() }] {
        site.answers(Ok(()));
        let mut reader = Reader::of(site.get(&stream_of(&site, "/waiting").await).await);
        let started = tokio::time::Instant::now();
        site.answers(Err(refused));
        let end = tokio::time::timeout(Duration::from_secs(600), reader.next()).await;
        assert_eq!(end.expect("the stream ends"), None);
        assert_eq!(started.elapsed().as_secs(), 60);
    }
    // A token that stays valid keeps its stream.
    site.answers(Ok(()));
    let mut reader = Reader::of(site.get(&stream_of(&site, "/waiting").await).await);
    let waits = tokio::time::timeout(Duration::from_secs(600), reader.next()).await;
    assert!(waits.is_err(), "{waits:?}");
}

#[tokio::test(start_paused = true)]
async fn a_stream_without_events_has_a_sign_of_life_every_15_seconds() {
    let site = Site::new();
    let response = site.get(&stream_of(&site, "/waiting").await).await;
    let mut body = response.into_body().into_data_stream();
    for turn in 1..=5 {
        let before = tokio::time::Instant::now();
        let bytes = body.next().await.expect("open").expect("no error");
        assert!(bytes.starts_with(b":"), "{turn}: {bytes:?}");
        assert_eq!(before.elapsed().as_secs(), 15);
    }
}

#[tokio::test]
async fn the_65th_stream_is_sent_away_until_another_one_ends() {
    let site = Site::new();
    let address = stream_of(&site, "/waiting").await;
    let mut readers = Vec::new();
    for _ in 0..64 {
        readers.push(Reader::of(site.get(&address).await));
    }
    let response = site.get(&address).await;
    assert_eq!((response.status().as_u16(), header(&response, "retry-after")), (503, "10"));
    readers.pop();
    readers.push(Reader::of(site.get(&address).await));
    assert_eq!(site.get(&address).await.status(), 503);
    // Pages are not limited.
    assert_eq!(site.get("/").await.status(), 200);
}

#[tokio::test(start_paused = true)]
async fn the_nodes_of_a_stream_are_wanted_while_it_is_open() {
    let site = Site::new();
    let reader = Reader::of(site.get(&stream_of(&site, "/nodes/gpu-l4-01").await).await);
    tokio::time::advance(Duration::from_secs(3600)).await;
    assert_eq!(site.hub.wanted(), ["gpu-l4-01".to_owned()].into());
    drop(reader);
    assert!(site.hub.wanted().is_empty());
}

/// The page is watched for a minute, or while a stream follows it.
#[tokio::test(start_paused = true)]
async fn a_page_without_nodes_is_watched_too() {
    let site = Site::new();
    assert!(!site.hub.is_watched());
    let stream = stream_of(&site, "/waiting").await;
    assert!(site.hub.is_watched() && site.hub.wanted().is_empty());
    tokio::time::advance(Duration::from_secs(61)).await;
    assert!(!site.hub.is_watched());
    let reader = Reader::of(site.get(&stream).await);
    tokio::time::advance(Duration::from_secs(3600)).await;
    assert!(site.hub.is_watched());
    drop(reader);
    assert!(!site.hub.is_watched());
}
