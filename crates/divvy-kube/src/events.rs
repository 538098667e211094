//! Publishing of events, which users see in `kubectl describe` and `kubectl get events`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::{Event, EventSeries};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};

use crate::Error;

/// How long a repeated note is counted with the earlier one: the same period as in the recorders of client-go and of kube-rs. The latter keeps each event
/// that it sent as a whole, which takes 8 KB for each pod that has just started.
const SERIES: Duration = Duration::from_mins(6);
/// The maximum number of texts per object and reason that are counted separately. Further texts are counted with the last one, as
/// in client-go, because a program's texts may never repeat.
const MOST_TEXTS: usize = 10;
/// The namespace of events about objects that have none.
const DEFAULT_NAMESPACE: &str = "default";

/// A publisher of events under one controller name. Repeated events are counted and not published again.
#[derive(Clone)]
pub struct Events {
    client: kube::Client,
    controller: String,
    instance: Option<String>,
    sent: Arc<Mutex<HashMap<About, Vec<Sent>>>>,
}

/// The UID of an object, and the reason of an event about it.
type About = (Option<String>, String);

/// A text, and the object that counts its repetitions. Each text has its own, so that an event about a second failed GPU is not lost.
struct Sent {
    text: String,
    last: Instant,
    /// The name of the event's object, and how often it was published. `None` until the API server has accepted it.
    object: Option<(String, i32)>,
}

impl std::fmt::Debug for Events {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Events").finish_non_exhaustive()
    }
}

/// The content of one event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventNote {
    /// Whether the event's type is `Warning` instead of `Normal`.
    pub warning: bool,
    /// The reason, one word in CamelCase.
    pub reason: String,
    /// The action that was being performed, one word in CamelCase.
    pub action: String,
    /// The text. It is cut after 1,000 bytes, because the API allows 1 kB.
    pub text: String,
}

impl Events {
    /// Make a publisher. `controller` is `divvy-agent` or `divvy-extender`; `instance` is the node or pod on which it runs.
    pub fn new(client: kube::Client, controller: &str, instance: Option<String>) -> Events {
        Events {
            client,
            controller: controller.to_owned(),
            instance,
            sent: Arc::default(),
        }
    }

    fn sent(&self) -> MutexGuard<'_, HashMap<About, Vec<Sent>>> {
        self.sent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Take note of a text. Return its object if it was published a short time ago.
    fn note(&self, about: &About, text: &str) -> Option<(String, i32)> {
        let now = Instant::now();
        let mut sent = self.sent();
        sent.retain(|_, texts| {
            texts.retain(|sent| now.duration_since(sent.last) < SERIES);
            !texts.is_empty()
        });
        let texts = sent.entry(about.clone()).or_default();
        if texts.len() < MOST_TEXTS && texts.iter().all(|sent| sent.text != text) {
            texts.push(Sent {
                text: text.to_owned(),
                last: now,
                object: None,
            });
        }
        let sent = of_text(texts, text)?;
        sent.last = now;
        sent.object.clone()
    }

    /// Publish a note about an object.
    ///
    /// # Errors
    /// The API server does not accept the event. If the note is published again, it gets a new event.
    pub async fn publish(&self, regarding: &ObjectReference, note: EventNote) -> Result<(), Error> {
        let mut text = note.text;
        if text.len() > 1000 {
            let cut = (0..=1000).rev().find(|i| text.is_char_boundary(*i)).unwrap_or(0);
            text.truncate(cut);
        }
        let about = (regarding.uid.clone(), note.reason.clone());
        let object = self.note(&about, &text);
        let note = EventNote {
            text: text.clone(),
            ..note
        };
        let published = self.send(regarding, note, object).await;
        let (result, object) = match published {
            Ok(object) => (Ok(()), Some(object)),
            Err(source) => (Err(Error::api("an event could not be published", source)), None),
        };
        if let Some(sent) = self.sent().get_mut(&about).and_then(|texts| of_text(texts, &text)) {
            sent.object = object;
        }
        result
    }

    /// Count a note in its object, or make one.
    async fn send(
        &self,
        regarding: &ObjectReference,
        note: EventNote,
        object: Option<(String, i32)>,
    ) -> Result<(String, i32), kube::Error> {
        let namespace = regarding.namespace.as_deref().unwrap_or(DEFAULT_NAMESPACE);
        let events: Api<Event> = Api::namespaced(self.client.clone(), namespace);
        let now = Timestamp::now();
        if let Some((name, count)) = object {
            let count = count.saturating_add(1);
            let series = EventSeries {
                count,
                last_observed_time: MicroTime(now),
            };
            let patch = serde_json::json!({ "series": series });
            events.patch(&name, &PatchParams::default(), &Patch::Merge(patch)).await?;
            return Ok((name, count));
        }
        let of = regarding.name.as_ref().unwrap_or(&self.controller);
        let name = format!("{of}.{:x}", now.as_nanosecond());
        let event = Event {
            metadata: ObjectMeta {
                namespace: regarding.namespace.clone(),
                name: Some(name.clone()),
                ..ObjectMeta::default()
            },
            type_: Some(if note.warning { "Warning" } else { "Normal" }.to_owned()),
            reason: Some(note.reason),
            action: Some(note.action),
            note: Some(note.text),
            regarding: Some(regarding.clone()),
            event_time: Some(MicroTime(now)),
            reporting_controller: Some(self.controller.clone()),
            reporting_instance: Some(self.instance.as_ref().unwrap_or(&self.controller).clone()),
            ..Event::default()
        };
        events.create(&PostParams::default(), &event).await?;
        Ok((name, 1))
    }
}

/// Return what counts a text: its own entry, or the last one if there are too many texts.
fn of_text<'t>(texts: &'t mut [Sent], text: &str) -> Option<&'t mut Sent> {
    let own = texts.iter().position(|sent| sent.text == text);
    let place = own.or(texts.len().checked_sub(1))?;
    texts.get_mut(place)
}

/// Return a reference to a pod.
pub fn pod_reference(namespace: &str, name: &str, uid: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        namespace: Some(namespace.to_owned()),
        name: Some(name.to_owned()),
        uid: Some(uid.to_owned()),
        ..ObjectReference::default()
    }
}

/// Return a reference to a node. Its UID is the node's name, as in the kubelet's own events about nodes, because `kubectl
/// describe node` searches for this UID.
pub fn node_reference(name: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Node".to_owned()),
        name: Some(name.to_owned()),
        uid: Some(name.to_owned()),
        ..ObjectReference::default()
    }
}

#[cfg(test)]
mod tests {
    use axum::Json;
    use axum::extract::State;
    use axum::http::{Method, StatusCode, Uri};
    use axum::response::{IntoResponse as _, Response};
    use serde_json::{Value, json};

    use super::*;

    /// What an API server was asked: the method, the path, and the body. It refuses as many requests as the number says.
    #[derive(Clone, Default)]
    struct Asked(Arc<Mutex<(Vec<Request>, usize)>>);

    type Request = (Method, String, Value);

    impl Asked {
        fn events(&self, controller: &str, instance: Option<&str>) -> Events {
            let router = axum::Router::new().fallback(answer).with_state(self.clone());
            Events::new(kube::Client::new(router, "default"), controller, instance.map(str::to_owned))
        }

        fn take(&self) -> Vec<Request> {
            std::mem::take(&mut self.0.lock().expect("sound").0)
        }

        fn refuse(&self, requests: usize) {
            self.0.lock().expect("sound").1 = requests;
        }
    }

    async fn answer(State(Asked(asked)): State<Asked>, method: Method, uri: Uri, Json(body): Json<Value>) -> Response {
        let mut asked = asked.lock().expect("sound");
        asked.0.push((method, uri.path().to_owned(), body));
        if asked.1 > 0 {
            asked.1 -= 1;
            let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "message": "gone", "code": 404});
            return (StatusCode::NOT_FOUND, Json(status)).into_response();
        }
        Json(json!({"kind": "Event", "apiVersion": "events.k8s.io/v1", "metadata": {}, "eventTime": null})).into_response()
    }

    fn note(reason: &str, text: &str) -> EventNote {
        EventNote {
            warning: true,
            reason: reason.to_owned(),
            action: "Reconciling".to_owned(),
            text: text.to_owned(),
        }
    }

    /// An event has what the API requires.
    #[tokio::test]
    async fn a_repeated_event_is_counted() {
        let asked = Asked::default();
        let events = asked.events("divvy-agent", Some("n1"));
        let pod = pod_reference("ns", "a", "uid");
        events.publish(&pod, note("Failed", "it failed")).await.expect("published");
        let (method, path, mut event) = asked.take().remove(0);
        assert_eq!(
            (method, path.as_str()),
            (Method::POST, "/apis/events.k8s.io/v1/namespaces/ns/events")
        );
        let name = event["metadata"]["name"].as_str().expect("a name").to_owned();
        assert!(
            name.strip_prefix("a.")
                .is_some_and(|number| u128::from_str_radix(number, 16).is_ok()),
            "{name}"
        );
        let time = event["eventTime"].take();
        assert!(
            time.as_str().is_some_and(|time| time.ends_with('Z') && time.contains('.')),
            "{time}"
        );
        let expected = json!({
            "apiVersion": "events.k8s.io/v1", "kind": "Event", "metadata": {"name": name, "namespace": "ns"}, "eventTime": null,
            "type": "Warning", "reason": "Failed", "action": "Reconciling", "note": "it failed",
            "regarding": {"apiVersion": "v1", "kind": "Pod", "namespace": "ns", "name": "a", "uid": "uid"},
            "reportingController": "divvy-agent", "reportingInstance": "n1",
        });
        assert_eq!(event, expected);
        for count in [2, 3] {
            events.publish(&pod, note("Failed", "it failed")).await.expect("published");
            let (method, path, mut event) = asked.take().remove(0);
            let expected = format!("/apis/events.k8s.io/v1/namespaces/ns/events/{name}");
            assert_eq!((method, path), (Method::PATCH, expected));
            assert!(event["series"]["lastObservedTime"].take().is_string());
            assert_eq!(event, json!({"series": {"count": count, "lastObservedTime": null}}));
        }
    }

    /// After too many texts, further texts get no event of their own.
    #[tokio::test]
    async fn each_text_reason_and_object_has_an_event() {
        let asked = Asked::default();
        let events = asked.events("divvy-extender", None);
        let node = node_reference("n1");
        for (about, reason, text) in [
            (&node, "A", "0"),
            (&node, "B", "0"),
            (&node_reference("n2"), "A", "0"),
            (&node, "A", "1"),
        ] {
            events.publish(about, note(reason, text)).await.expect("published");
            let (method, path, event) = asked.take().remove(0);
            assert_eq!(
                (method, path.as_str()),
                (Method::POST, "/apis/events.k8s.io/v1/namespaces/default/events")
            );
            assert_eq!(event["reportingInstance"], "divvy-extender");
        }
        for text in 2..MOST_TEXTS {
            events.publish(&node, note("A", &text.to_string())).await.expect("published");
        }
        assert!(asked.take().iter().all(|(method, ..)| method == Method::POST));
        for text in ["one", "two"] {
            events.publish(&node, note("A", text)).await.expect("published");
        }
        let counts: Vec<Value> = asked
            .take()
            .into_iter()
            .map(|(.., event)| event["series"]["count"].clone())
            .collect();
        assert_eq!(counts, [json!(2), json!(3)], "both are counted with the last one");
    }

    #[tokio::test]
    async fn after_a_refusal_the_note_gets_a_new_event() {
        let asked = Asked::default();
        let events = asked.events("divvy-agent", None);
        let pod = pod_reference("ns", "a", "uid");
        // The API server refuses the first event, and accepts the second. It refuses to count in that one, because it was deleted. It accepts a new one.
        let mut methods = Vec::new();
        for refused in [true, false, true, false, false] {
            asked.refuse(refused.into());
            assert_eq!(events.publish(&pod, note("Failed", "x")).await.is_err(), refused);
            methods.extend(asked.take().into_iter().map(|(method, ..)| method));
        }
        assert_eq!(
            methods,
            [Method::POST, Method::POST, Method::PATCH, Method::POST, Method::PATCH]
        );
    }

    #[tokio::test]
    async fn a_text_that_is_too_long_is_cut_between_two_characters() {
        let asked = Asked::default();
        let events = asked.events("divvy-agent", None);
        let text = format!("{}\u{e4}\u{e4}", "x".repeat(999));
        events
            .publish(&node_reference("n1"), note("A", &text))
            .await
            .expect("published");
        assert_eq!(asked.take()[0].2["note"].as_str().map(str::len), Some(999));
    }
}
