//! `divvy-kube`'s events, as an API server stores them.

use divvy_kube::events::{EventNote, Events, node_reference};
use divvy_testbed::api::ApiServer;

use super::server;

async fn publish(events: &Events, texts: impl IntoIterator<Item = String>) {
    for text in texts {
        let note = EventNote {
            warning: true,
            reason: "GpuFailed".to_owned(),
            action: "Reconciling".to_owned(),
            text,
        };
        events.publish(&node_reference("n1"), note).await.expect("published");
    }
}

/// Return the events' texts with their counts.
fn told(api: &ApiServer) -> Vec<(String, u64)> {
    let events = api.list("events", "default").expect("listed");
    let mut told: Vec<(String, u64)> = events
        .iter()
        .map(|event| {
            let count = event["series"]["count"].as_u64().unwrap_or(1);
            (event["message"].as_str().unwrap_or_default().to_owned(), count)
        })
        .collect();
    told.sort();
    told
}

/// A repeated event is counted.
#[tokio::test(start_paused = true)]
async fn another_text_is_another_event() {
    let api = server();
    let events = Events::new(api.client(), "divvy-agent", Some("n1".to_owned()));
    let texts = ["GPU 0 failed", "GPU 3 failed", "GPU 0 failed", "GPU 0 failed"];
    publish(&events, texts.map(str::to_owned)).await;
    let expected = [("GPU 0 failed".to_owned(), 3), ("GPU 3 failed".to_owned(), 1)];
    assert_eq!(told(&api), expected);
}

#[tokio::test(start_paused = true)]
async fn ever_new_texts_make_few_events() {
    let api = server();
    let events = Events::new(api.client(), "divvy-agent", Some("n1".to_owned()));
    publish(&events, (0..100).map(|i| format!("{i:02} MiB are free"))).await;
    let told = told(&api);
    let counts: Vec<u64> = told.iter().map(|(_, count)| *count).collect();
    assert_eq!(counts, [1, 1, 1, 1, 1, 1, 1, 1, 1, 91]);
}
