//! What the agent tells people: events, metrics, and why it is not ready.

use divvy_agent_core::{AgentAction, OWN_VISIBLE_DEVICES};
use tokio::sync::mpsc;
use tracing::{debug, warn};

use crate::metrics::{AgentMetrics, Allow};
use crate::pending_event::PendingEvent;
use crate::readiness::Readiness;

/// Where all tasks of the agent report.
pub(crate) struct Reports {
    pub(crate) metrics: AgentMetrics,
    pub(crate) ready: Readiness,
    events: mpsc::Sender<PendingEvent>,
}

impl Reports {
    /// Return reports that pass on their events, and show these metrics.
    pub(crate) fn new(events: mpsc::Sender<PendingEvent>, allow: Allow) -> Reports {
        Reports {
            metrics: AgentMetrics::showing(allow),
            ready: Readiness::default(),
            events,
        }
    }

    /// Log and send the events among these actions. The caller passes no file actions.
    pub(crate) fn post_events(&self, actions: Vec<AgentAction>) {
        for action in actions {
            self.post_event(action);
        }
    }

    /// Log and send an event. No other action has an effect.
    pub(crate) fn post_event(&self, action: AgentAction) {
        if let AgentAction::Event { pod, uid, reason, text } = action {
            warn!(%pod, uid, reason, "{text}");
            self.post(PendingEvent {
                pod: Some((pod, uid)),
                // This event reports no failure of the pod.
                warning: reason != OWN_VISIBLE_DEVICES,
                reason,
                text,
            });
        }
    }

    /// Send an event about the node.
    pub(crate) fn post_on_node(&self, warning: bool, reason: &'static str, text: String) {
        self.post(PendingEvent {
            pod: None,
            warning,
            reason,
            text,
        });
    }

    fn post(&self, event: PendingEvent) {
        // The queue is full only while the API server is unreachable. The log has the event.
        if self.events.try_send(event).is_err() {
            debug!("too many events are waiting; this event is only in the log");
        }
    }
}
