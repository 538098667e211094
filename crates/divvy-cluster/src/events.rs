//! Events: what users see in `kubectl describe` and `kubectl get events`.

use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};

use crate::Error;

/// Publishes events under one controller name; repeated ones are counted, not repeated.
#[derive(Clone)]
pub struct Events {
    recorder: Recorder,
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
            recorder: Recorder::new(
                client,
                Reporter {
                    controller: controller.to_owned(),
                    instance,
                },
            ),
        }
    }

    /// Publishes a note about an object.
    pub async fn publish(&self, regarding: &ObjectReference, note: Note) -> Result<(), Error> {
        let mut text = note.text;
        if text.len() > 1000 {
            let cut = (0..=1000).rev().find(|i| text.is_char_boundary(*i)).unwrap_or(0);
            text.truncate(cut);
        }
        let event = Event {
            type_: if note.warning { EventType::Warning } else { EventType::Normal },
            reason: note.reason,
            note: Some(text),
            action: note.action,
            secondary: None,
        };
        self.recorder
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
