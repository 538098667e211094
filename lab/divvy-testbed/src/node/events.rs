//! Events: core/v1 objects for users, written by a separate task so that they never delay the kubelet's work.

use std::collections::BTreeMap;

use divvy_testkit::dice::Dice;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use tokio::sync::mpsc;

/// An event, or a repetition of one.
#[derive(Debug, Clone)]
pub(crate) struct RecordedEvent {
    pub(crate) namespace: String,
    pub(crate) pod: String,
    pub(crate) uid: String,
    pub(crate) warning: bool,
    pub(crate) reason: String,
    pub(crate) message: String,
}

/// The sender of events. If the queue is full, events are lost, as in client-go.
#[derive(Debug, Clone)]
pub(crate) struct Recorder(mpsc::Sender<RecordedEvent>);

impl Recorder {
    /// Create the recorder and the future that writes the events; the caller must spawn the future.
    pub(crate) fn new(
        client: Client,
        component: &'static str,
        host: Option<String>,
        seed: Dice,
    ) -> (Recorder, impl Future<Output = ()> + Send) {
        let (sender, receiver) = mpsc::channel(1000);
        (Recorder(sender), write(client, component, host, seed, receiver))
    }

    pub(crate) fn note(&self, note: RecordedEvent) {
        if self.0.try_send(note).is_err() {
            tracing::warn!("the event queue is full; an event was lost");
        }
    }
}

async fn write(
    client: Client,
    component: &'static str,
    host: Option<String>,
    mut seed: Dice,
    mut notes: mpsc::Receiver<RecordedEvent>,
) {
    // A repetition increases the count of the existing event.
    let mut known: BTreeMap<(String, String, String), (String, i32)> = BTreeMap::new();
    while let Some(note) = notes.recv().await {
        let api: Api<Event> = Api::namespaced(client.clone(), &note.namespace);
        let now = Time(Timestamp::now());
        let key = (note.uid.clone(), note.reason.clone(), note.message.clone());
        let result = if let Some((name, count)) = known.get_mut(&key) {
            *count += 1;
            let patch = serde_json::json!({"count": *count, "lastTimestamp": now});
            api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await
        } else {
            let name = format!("{}.{}", note.pod, seed.hex(16));
            let event = Event {
                metadata: ObjectMeta {
                    name: Some(name.clone()),
                    namespace: Some(note.namespace.clone()),
                    ..ObjectMeta::default()
                },
                involved_object: ObjectReference {
                    api_version: Some("v1".to_owned()),
                    kind: Some("Pod".to_owned()),
                    namespace: Some(note.namespace),
                    name: Some(note.pod),
                    uid: Some(note.uid),
                    ..ObjectReference::default()
                },
                type_: Some(if note.warning { "Warning" } else { "Normal" }.to_owned()),
                reason: Some(note.reason),
                message: Some(note.message),
                count: Some(1),
                first_timestamp: Some(now.clone()),
                last_timestamp: Some(now),
                source: Some(EventSource {
                    component: Some(component.to_owned()),
                    host: host.clone(),
                }),
                reporting_component: Some(component.to_owned()),
                reporting_instance: Some(host.clone().unwrap_or_default()),
                ..Event::default()
            };
            known.insert(key, (name, 1));
            api.create(&PostParams::default(), &event).await
        };
        if let Err(error) = result {
            tracing::warn!(%error, "could not write the event");
        }
    }
}
