//! Watch streams: newline-delimited JSON events from a revision on.

use std::collections::VecDeque;
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::Instant;

use super::ApiServer;
use super::error::ApiError;
use super::render::Rendering;
use super::resources::RequestTarget;
use super::selector::ListSelector;
use super::store::{EventKind, StoreContent, StoreEvent, StoreSnapshot, set_resource_version};

/// The parameters of a watch.
#[derive(Debug)]
pub(crate) struct WatchRequest {
    pub(crate) target: RequestTarget,
    pub(crate) selector: ListSelector,
    pub(crate) rendering: Rendering,
    /// The start of the watch. The objects of a snapshot are sent first.
    pub(crate) start: WatchStart,
    pub(crate) bookmarks: bool,
    pub(crate) timeout: Option<Duration>,
}

#[derive(Debug)]
pub(crate) enum WatchStart {
    /// Send the changes after this revision.
    After(u64),
    /// Send these objects as added, then the later changes.
    Initial(StoreSnapshot),
}

/// The state of one stream.
struct Watcher {
    api: ApiServer,
    request: WatchRequest,
    storage: String,
    cursor: u64,
    pending: VecDeque<Bytes>,
    finished: bool,
    commits: watch::Receiver<u64>,
    cuts: watch::Receiver<u64>,
    held: watch::Receiver<bool>,
    next_bookmark: Instant,
    deadline: Option<Instant>,
}

/// Return the body of a watch response. It ends at the timeout, when watches are cut, or after an ERROR event.
pub(crate) fn body(api: &ApiServer, request: WatchRequest) -> Body {
    let now = Instant::now();
    let mut watcher = Watcher {
        storage: request.target.resource.storage(),
        cursor: 0,
        pending: VecDeque::new(),
        finished: false,
        commits: api.registry().store.subscribe(),
        cuts: api.faults().cuts.subscribe(),
        held: api.faults().held.subscribe(),
        next_bookmark: now + api.options().bookmark_interval,
        deadline: request.timeout.map(|timeout| now + timeout),
        api: api.clone(),
        request,
    };
    watcher.begin();
    Body::from_stream(futures::stream::unfold(watcher, |mut watcher| async move {
        let line = watcher.next().await?;
        Some((Ok::<_, std::convert::Infallible>(line), watcher))
    }))
}

impl Watcher {
    fn begin(&mut self) {
        match std::mem::replace(&mut self.request.start, WatchStart::After(0)) {
            WatchStart::After(revision) => self.cursor = revision,
            WatchStart::Initial(snapshot) => {
                self.cursor = snapshot.revision;
                for (key, object) in &snapshot.objects {
                    if self.in_namespace(&key.0) && self.request.selector.matches(object) {
                        self.push("ADDED", object);
                    }
                }
            }
        }
    }

    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(line) = self.pending.pop_front() {
                return Some(line);
            }
            if self.finished {
                return None;
            }
            let held = *self.held.borrow_and_update();
            if !held {
                self.collect();
                if !self.pending.is_empty() {
                    continue;
                }
            }
            let bookmarks = self.request.bookmarks && !held;
            let deadline = self.deadline.unwrap_or(self.next_bookmark);
            tokio::select! {
                // The order matters: a cut must come before an event of the same moment.
                biased;
                _ = self.cuts.changed() => self.finished = true,
                _ = tokio::time::sleep_until(deadline), if self.deadline.is_some() => self.finished = true,
                changed = self.commits.changed(), if !held => self.finished = changed.is_err(),
                _ = self.held.changed() => {}
                _ = tokio::time::sleep_until(self.next_bookmark), if bookmarks => {
                    self.collect();
                    self.push_bookmark();
                }
            }
        }
    }

    /// Queue the events committed since the last call.
    fn collect(&mut self) {
        self.commits.mark_unchanged();
        let (events, revision) = self
            .api
            .registry()
            .store
            .read(|inner: &StoreContent| (inner.events_after(&self.storage, self.cursor), inner.revision()));
        match events {
            Ok(events) => {
                for event in &events {
                    self.take(event);
                }
                self.cursor = self.cursor.max(revision);
            }
            Err(gone) => {
                let why = format!("too old resource version: {} ({})", gone.asked, gone.oldest);
                self.push_line("ERROR", &ApiError::expired(why).to_status());
                self.finished = true;
            }
        }
    }

    fn in_namespace(&self, namespace: &str) -> bool {
        self.request.target.namespace.is_empty() || self.request.target.namespace == namespace
    }

    /// Queue an event. For this watcher, an object that begins or ceases to match the selector is added or deleted.
    fn take(&mut self, event: &StoreEvent) {
        if !self.in_namespace(event.object["metadata"]["namespace"].as_str().unwrap_or("")) {
            return;
        }
        let selector = &self.request.selector;
        let before = event.previous.as_ref().is_some_and(|object| selector.matches(object));
        let now = event.kind != EventKind::Deleted && selector.matches(&event.object);
        match (before, now) {
            (false, true) => self.push("ADDED", &event.object),
            (true, true) => self.push("MODIFIED", &event.object),
            (true, false) if event.kind == EventKind::Deleted => self.push("DELETED", &event.object),
            (true, false) => {
                // The last state that matched, at the revision of the change (watch cache, convertToWatchEvent).
                if let Some(previous) = &event.previous {
                    let mut last = (**previous).clone();
                    set_resource_version(&mut last, event.revision);
                    self.push("DELETED", &last);
                }
            }
            (false, false) => {}
        }
    }

    fn push(&mut self, kind: &str, object: &Value) {
        let rendered = self
            .request
            .rendering
            .watched(&self.request.target.resource, object, &self.api.options().clock);
        self.push_line(kind, &rendered);
    }

    fn push_line(&mut self, kind: &str, object: &Value) {
        let mut line = json!({"type": kind, "object": object}).to_string();
        line.push('\n');
        self.pending.push_back(line.into());
    }

    fn push_bookmark(&mut self) {
        let resource = &self.request.target.resource;
        let metadata = json!({"resourceVersion": self.cursor.to_string(), "creationTimestamp": null});
        let object = self.request.rendering.bookmark(resource, metadata);
        self.push_line("BOOKMARK", &object);
        self.next_bookmark = Instant::now() + self.api.options().bookmark_interval;
    }
}
