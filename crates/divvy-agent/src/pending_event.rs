//! An event that waits to be posted.

use divvy_model::PodKey;

/// An event to be published.
#[derive(Debug)]
pub(crate) struct PendingEvent {
    /// The pod and its UID, or `None` for an event about the node.
    pub(crate) pod: Option<(PodKey, String)>,
    /// Whether the event's type is `Warning` instead of `Normal`.
    pub(crate) warning: bool,
    /// One word in CamelCase.
    pub(crate) reason: &'static str,
    pub(crate) text: String,
}
