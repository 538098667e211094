//! Reports for the operator, in the log and as events on the node.

use std::time::Duration;

use divvy_kube::events::{Events, Note, node_reference};
use tracing::warn;

/// The longest wait for the API server to accept an event.
const LIMIT: Duration = Duration::from_secs(5);

/// Reports about the configuration of a node.
pub(crate) struct Notice {
    events: Events,
    node: String,
    /// Whether the API server has refused an event. Then no more are sent: NVIDIA's chart does not grant the right.
    is_denied: bool,
}

impl Notice {
    pub(crate) fn new(client: kube::Client, program: &str, node: &str) -> Notice {
        Notice {
            events: Events::new(client, program, Some(node.to_owned())),
            node: node.to_owned(),
            is_denied: false,
        }
    }

    /// Report that the configuration that was asked for is not used.
    pub(crate) async fn report(&mut self, text: &str) {
        warn!("{text}");
        if self.is_denied {
            return;
        }
        let note = Note {
            warning: true,
            reason: "ConfigNotUsed".to_owned(),
            action: "Configuring".to_owned(),
            text: text.to_owned(),
        };
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
}
