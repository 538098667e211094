//! Events on the node.

use std::time::Duration;

use divvy_kube::events::{EventNote, Events, node_reference};
use tracing::warn;

/// The longest wait for the API server to accept an event.
const LIMIT: Duration = Duration::from_secs(5);

/// What posts events on one node.
pub(crate) struct Notice {
    events: Events,
    node: String,
    /// Whether the API server has refused an event. Then no more are sent: NVIDIA's manifests do not grant the right.
    is_denied: bool,
}

impl Notice {
    /// `program` is the name of the program that the events come from.
    pub(crate) fn new(client: kube::Client, program: &str, node: &str) -> Notice {
        Notice {
            events: Events::new(client, program, Some(node.to_owned())),
            node: node.to_owned(),
            is_denied: false,
        }
    }

    /// Post an event, unless the right to is missing. The log of the caller has the text.
    pub(crate) async fn post(&mut self, note: EventNote) {
        if self.is_denied {
            return;
        }
        let about = node_reference(&self.node);
        match tokio::time::timeout(LIMIT, self.events.publish(&about, note)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) if error.is_forbidden() => {
                self.is_denied = true;
                warn!(
                    "{error}. Reports appear only in this log; to see them on the node, too, allow this service account to create events"
                );
            }
            Ok(Err(error)) => warn!("{error}"),
            Err(_) => warn!("an event could not be published: the API server does not answer"),
        }
    }

    /// Report in the log and as an event that the configuration which was asked for is not used.
    pub(crate) async fn config_not_used(&mut self, text: &str) {
        warn!("{text}");
        self.post(EventNote {
            warning: true,
            reason: "ConfigNotUsed".to_owned(),
            action: "Configuring".to_owned(),
            text: text.to_owned(),
        })
        .await;
    }
}
