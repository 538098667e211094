//! Publishing of events, which users see in `kubectl describe` and `kubectl get events`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};

use crate::Error;

/// How long a repeated note is counted with the earlier one: the same period as in kube's recorder.
const SERIES: Duration = Duration::from_mins(6);
/// The maximum number of texts per object and reason that are counted separately. Further texts are counted with the last one, as
/// in client-go, because a program's texts may never repeat.
const MOST_TEXTS: usize = 10;

/// A publisher of events under one controller name. Repeated events are counted and not published again.
#[derive(Clone)]
pub struct Events {
    client: kube::Client,
    reporter: Reporter,
    sent: Arc<Mutex<HashMap<About, Vec<Sent>>>>,
}

/// The UID of an object, and the reason of an event about it.
type About = (Option<String>, String);

/// A text, and the recorder that counts its repetitions. Each text needs its own recorder: one recorder merges notes that differ only in their
/// text, so an event about a second failed GPU would be lost.
struct Sent {
    text: String,
    recorder: Recorder,
    last: Instant,
}

impl std::fmt::Debug for Events {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Events").finish_non_exhaustive()
    }
}

/// The content of one event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
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
            reporter: Reporter {
                controller: controller.to_owned(),
                instance,
            },
            sent: Arc::default(),
        }
    }

    fn recorder(&self, regarding: &ObjectReference, reason: &str, text: &str) -> Recorder {
        let now = Instant::now();
        let mut sent = self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        sent.retain(|_, texts| {
            texts.retain(|sent| now.duration_since(sent.last) < SERIES);
            !texts.is_empty()
        });
        let texts = sent.entry((regarding.uid.clone(), reason.to_owned())).or_default();
        let known = texts.iter().position(|sent| sent.text == text);
        let position = known.unwrap_or_else(|| {
            if texts.len() < MOST_TEXTS {
                texts.push(Sent {
                    text: text.to_owned(),
                    recorder: Recorder::new(self.client.clone(), self.reporter.clone()),
                    last: now,
                });
            }
            texts.len() - 1
        });
        texts[position].last = now;
        texts[position].recorder.clone()
    }

    /// Publish a note about an object.
    pub async fn publish(&self, regarding: &ObjectReference, note: Note) -> Result<(), Error> {
        let mut text = note.text;
        if text.len() > 1000 {
            let cut = (0..=1000).rev().find(|i| text.is_char_boundary(*i)).unwrap_or(0);
            text.truncate(cut);
        }
        let recorder = self.recorder(regarding, &note.reason, &text);
        let event = Event {
            type_: if note.warning { EventType::Warning } else { EventType::Normal },
            reason: note.reason,
            note: Some(text),
            action: note.action,
            secondary: None,
        };
        recorder
            .publish(&event, regarding)
            .await
            .map_err(|source| Error::api("an event could not be published", source))
    }
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
