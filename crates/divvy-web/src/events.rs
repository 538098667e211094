//! The stream of a page's changes, as Server-Sent Events.
//!
//! A stream holds the version that its client has, and makes the next event when the socket takes it. So nothing is stored for a slow reader: what changed twice
//! in the meantime is sent once. [`Impatient`](crate::Impatient) closes the connection of a reader that takes nothing.

use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;
use std::time::Duration;

use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse as _, Response};
use divvy_page::{PageAddress, PartKey};
use futures::{Stream, stream};
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::time::{Instant, sleep_until};

use crate::Gate;
use crate::hub::{Followed, PageHub};
use crate::version::SceneVersion;

/// How often a comment is sent, so that a connection that is gone is noticed.
const ALIVE: Duration = Duration::from_secs(15);
/// How often the token is checked again.
const CHECK: Duration = Duration::from_secs(60);

/// A client that follows a page.
pub(crate) struct EventsClient {
    pub(crate) hub: Arc<PageHub>,
    pub(crate) gate: Arc<dyn Gate>,
    pub(crate) token: String,
    pub(crate) address: PageAddress,
    /// Which parts the client's page has.
    pub(crate) list: String,
    /// The version that the client has. `None` if that is not known.
    pub(crate) since: Option<SceneVersion>,
    /// One of the limited places.
    pub(crate) _place: OwnedSemaphorePermit,
}

/// Return the answer with the stream.
pub(crate) fn follow(client: EventsClient) -> Response {
    Sse::new(events(client))
        .keep_alive(KeepAlive::new().interval(ALIVE))
        .into_response()
}

struct Following {
    client: EventsClient,
    _followed: Followed,
    versions: watch::Receiver<u64>,
    /// What the client has of all parts.
    has: Option<SceneVersion>,
    /// The parts that are sent next, and the version that the client has after them.
    next: VecDeque<PartKey>,
    then: Option<SceneVersion>,
    /// What was sent, to send nothing that looks the same.
    sent: HashMap<PartKey, u64>,
    check: Instant,
    ended: bool,
}

fn events(client: EventsClient) -> impl Stream<Item = Result<Event, Infallible>> {
    let following = Following {
        _followed: client.hub.follow(&client.address),
        versions: client.hub.versions(),
        has: client.since,
        next: VecDeque::new(),
        then: None,
        sent: HashMap::new(),
        check: Instant::now() + CHECK,
        ended: false,
        client,
    };
    stream::unfold(following, |mut following| async move {
        let event = following.event().await?;
        Some((Ok(event), following))
    })
}

impl Following {
    /// Wait for the next event. `None` ends the stream.
    async fn event(&mut self) -> Option<Event> {
        if self.ended {
            return None;
        }
        loop {
            if Instant::now() >= self.check {
                self.client.gate.check(&self.client.token).await.ok()?;
                self.check = Instant::now() + CHECK;
            }
            if let Some(key) = self.next.pop_front() {
                if let Some(event) = self.part(key) {
                    return Some(event);
                }
                continue;
            }
            if let Some(version) = self.then.take() {
                self.has = Some(version);
            }
            // What changes from here on wakes the wait below.
            self.versions.mark_unchanged();
            let EventsClient { hub, address, list, .. } = &self.client;
            let Some((keys, now)) = self.has.and_then(|has| hub.changes(address, list, has)) else {
                self.ended = true;
                return Some(Event::default().event("reload").data("reload"));
            };
            if keys.is_empty() {
                self.has = Some(now);
                tokio::select! {
                    changed = self.versions.changed() => changed.ok()?,
                    () = sleep_until(self.check) => {}
                }
            } else {
                self.next = keys.into();
                self.then = Some(now);
            }
        }
    }

    /// Return the event with a part, if the part looks different from what was sent last.
    fn part(&mut self, key: PartKey) -> Option<Event> {
        let html = self.client.hub.part(&self.client.address, &key)?;
        let mut hasher = DefaultHasher::new();
        html.hash(&mut hasher);
        let hash = hasher.finish();
        let event = Event::default().event(key.event()).data(html);
        if self.sent.insert(key, hash) == Some(hash) {
            return None;
        }
        // A client that has only some of the parts keeps the version before: it gets all of them when it connects again.
        let id = if self.next.is_empty() { self.then } else { self.has };
        Some(id.map_or(event.clone(), |id| event.id(id.to_string())))
    }
}
