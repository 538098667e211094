//! Events: what users see in `kubectl describe` and `kubectl get events`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};

use crate::Error;

/// How long a repeated note is counted with the one before: as long as the recorder of `kube` does it.
const SERIES: Duration = Duration::from_mins(6);
/// More texts than this, of one object and reason at a time, are counted with the last: as client-go does, for texts that are never twice the same.
const MOST_TEXTS: usize = 10;

/// Publishes events under one controller name; repeated ones are counted, not repeated.
#[derive(Clone)]
pub struct Events {
    client: kube::Client,
    reporter: Reporter,
    told: Arc<Mutex<HashMap<About, Vec<Told>>>>,
}

/// UID of an object, and a reason.
type About = (Option<String>, String);

/// A text and who counts it. A recorder takes notes that differ in their text alone for one, so that of a second GPU that fails nobody would read.
struct Told {
    text: String,
    recorder: Recorder,
    last: Instant,
}

impl std::fmt::Debug for Events {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Events").finish_non_exhaustive()
    }
}

/// One event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    /// `Warning` instead of `Normal`.
    pub warning: bool,
    /// One word in CamelCase.
    pub reason: String,
    /// What was being done, one word in CamelCase.
    pub action: String,
    /// In words; cut at 1 kB by the API.
    pub text: String,
}

impl Events {
    /// `controller` is `divvy-agent` or `divvy-extender`; `instance` the node or pod that it runs on.
    pub fn new(client: kube::Client, controller: &str, instance: Option<String>) -> Events {
        Events {
            client,
            reporter: Reporter {
                controller: controller.to_owned(),
                instance,
            },
            told: Arc::default(),
        }
    }

    fn recorder(&self, regarding: &ObjectReference, reason: &str, text: &str) -> Recorder {
        let now = Instant::now();
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        told.retain(|_, texts| {
            texts.retain(|told| now.duration_since(told.last) < SERIES);
            !texts.is_empty()
        });
        let texts = told.entry((regarding.uid.clone(), reason.to_owned())).or_default();
        let known = texts.iter().position(|told| told.text == text);
        let position = known.unwrap_or_else(|| {
            if texts.len() < MOST_TEXTS {
                texts.push(Told {
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

    /// Publishes a note about an object.
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

/// A reference to a pod.
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

/// A reference to a node. The kubelet's own events about nodes carry the name as UID, and `kubectl describe node` looks for that.
pub fn node_reference(name: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Node".to_owned()),
        name: Some(name.to_owned()),
        uid: Some(name.to_owned()),
        ..ObjectReference::default()
    }
}
