//! A list and then the changes to it, indefinitely, as a state machine:
//!
//! ```text
//!          ┌────────────────── 410 Gone, or no resourceVersion ──────────────────┐
//!          ▼                                                                     │
//!        Begin ──► Listing ──(complete)──► Listed(version) ──(connected)──► Watching
//!          ▲          │                        ▲   │  ▲                          │
//!          └─(error)──┘                        └───┘  └── the connection ended ──┘
//!                                      (error: try again)
//! ```
//!
//! `Listed` and `Watching` know the resourceVersion from which the watch goes on, so no change is lost when a connection ends.
//!
//! kube-rs' `watcher` does the same. This module differs in three ways: it reads a list as it arrives, an unreadable object is skipped
//! instead of stopping the watch, and the length of a line is limited.

use std::collections::{BTreeSet, VecDeque};
use std::error::Error as StdError;
use std::io;
use std::time::Duration;

use futures::Stream;
use futures::io::{AsyncBufRead, AsyncBufReadExt as _};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{ListParams, WatchParams};
use kube::core::{Request, Status};
use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};

use super::WatchMessage;
use crate::in_words;
use crate::list::items::{LARGEST, ParsingSink, UnreadableItem, name, short, without_place};
use crate::list::pages::{ListFailure, Pages, Progress};
use crate::list::{full_name, usable};
use crate::slim::{Kind, Meta, Unread};

/// Objects per page of a list: the page size of client-go (`tools/pager/pager.go`) and kube-rs.
const PAGE: u32 = 500;
/// The longest silence of a watch. The server ends a watch after 290 s (kube-rs' default), so a connection that stays silent for
/// longer is dead.
const IDLE: Duration = Duration::from_secs(295);
/// The maximum number of unreadable objects whose names are remembered.
const REMEMBERED: usize = 100;

/// Why a list or a watch must be tried again.
#[derive(Debug, thiserror::Error)]
pub(super) enum FollowTrouble {
    #[error("listing failed: {0}")]
    List(#[from] ListFailure),
    /// The watch could not be started, or its connection broke.
    #[error("{}", in_words(.0))]
    Watch(#[from] kube::Error),
    #[error("the connection of the watch broke: {0}")]
    Cut(io::Error),
    /// The server ended the watch with an error.
    #[error("{} ({} {})", .0.message, .0.code, .0.reason)]
    Said(Box<Status>),
    #[error("an event of the watch cannot be read: {0}")]
    Event(String),
    #[error("no metadata.resourceVersion in the answer (can this resource be watched?)")]
    NoResourceVersion,
}

/// The state of one watch.
struct Follow<T> {
    client: kube::Client,
    path: String,
    fields: Option<String>,
    state: FollowState<T>,
    /// Whether an error has occurred, and no list or watch has succeeded since.
    broken: bool,
    unreadable: Remembered,
}

#[expect(clippy::large_enum_variant, reason = "there is one of these per watch")]
enum FollowState<T> {
    Begin,
    Listing {
        pages: Pages,
        ready: VecDeque<Result<T, UnreadableItem>>,
        complete: Option<Option<String>>,
    },
    /// The watch is to start or resume from this resourceVersion.
    Listed(String),
    Watching {
        version: String,
        lines: BodyLines,
    },
}

/// The result of a step; `None` if it produced no message.
type Stepped<T> = Option<Result<WatchMessage<T>, FollowTrouble>>;

/// Watch the objects at a path such as `/api/v1/pods`, or those that match a field selector. The stream continues after an error,
/// but its consumer must wait a little before the next poll (`StreamBackoff`).
pub(super) fn follow<T: Kind>(
    client: kube::Client,
    path: &str,
    fields: Option<&str>,
) -> impl Stream<Item = Result<WatchMessage<T>, FollowTrouble>> + Send + 'static + use<T> {
    let follow = Follow {
        client,
        path: path.to_owned(),
        fields: fields.map(str::to_owned),
        state: FollowState::Begin,
        broken: false,
        unreadable: Remembered::new(T::NAME),
    };
    futures::stream::unfold(follow, async |mut follow| {
        loop {
            if let Some(seen) = follow.step().await {
                follow.broken |= seen.is_err();
                return Some((seen, follow));
            }
        }
    })
}

impl<T: Kind> Follow<T> {
    async fn step(&mut self) -> Stepped<T> {
        if matches!(self.state, FollowState::Watching { .. }) && std::mem::take(&mut self.broken) {
            return Some(Ok(WatchMessage::Resumed));
        }
        match std::mem::replace(&mut self.state, FollowState::Begin) {
            FollowState::Begin => {
                // Without a resourceVersion the list is a quorum read. A list from a cache could be old and show used memory as free.
                let params = ListParams {
                    field_selector: self.fields.clone(),
                    limit: Some(PAGE),
                    ..ListParams::default()
                };
                self.unreadable.list_begins();
                self.state = FollowState::Listing {
                    pages: Pages::new(self.client.clone(), &self.path, params),
                    ready: VecDeque::new(),
                    complete: None,
                };
                Some(Ok(WatchMessage::ListBegins))
            }
            FollowState::Listing {
                mut pages,
                mut ready,
                mut complete,
            } => {
                if let Some(item) = ready.pop_front() {
                    self.state = FollowState::Listing { pages, ready, complete };
                    return self.listed(item).map(Ok);
                }
                if let Some(version) = complete {
                    self.unreadable.list_ends();
                    let Some(version) = version else {
                        return Some(Err(FollowTrouble::NoResourceVersion));
                    };
                    self.state = FollowState::Listed(version);
                    self.broken = false;
                    return Some(Ok(WatchMessage::ListEnds));
                }
                match pages.read(&mut ParsingSink(&mut |item| ready.push_back(item))).await {
                    Ok(Progress::More) => {}
                    Ok(Progress::Complete(version)) => complete = Some(version),
                    Err(failure) => return Some(Err(failure.into())),
                }
                self.state = FollowState::Listing { pages, ready, complete };
                None
            }
            FollowState::Listed(version) => {
                let params = WatchParams {
                    field_selector: self.fields.clone(),
                    ..WatchParams::default()
                };
                let opened = match Request::new(&self.path).watch(&params, &version) {
                    Ok(request) => self.client.request_stream(request).await,
                    Err(error) => Err(kube::Error::BuildRequest(error)),
                };
                match opened {
                    Ok(body) => {
                        let lines = BodyLines::new(Box::new(Box::pin(body)));
                        self.state = FollowState::Watching { version, lines };
                        None
                    }
                    Err(error) => {
                        // After 410 Gone, list again (state `Begin`). Otherwise the same outdated version would be requested forever.
                        if !matches!(&error, kube::Error::Api(status) if status.code == 410) {
                            self.state = FollowState::Listed(version);
                        }
                        Some(Err(error.into()))
                    }
                }
            }
            FollowState::Watching { version, mut lines } => match tokio::time::timeout(IDLE, lines.next()).await {
                Ok(Ok(WatchLine::Whole(line))) => {
                    let line = line.to_vec();
                    self.state = FollowState::Watching { version, lines };
                    self.event(&line)
                }
                Ok(Ok(WatchLine::TooLong)) => {
                    self.state = FollowState::Watching { version, lines };
                    Some(Err(FollowTrouble::Event(format!("it is larger than {} MiB", LARGEST >> 20))))
                }
                Ok(Err(error)) if !ended_early(&error) => {
                    self.state = FollowState::Listed(version);
                    Some(Err(FollowTrouble::Cut(error)))
                }
                Ok(Ok(WatchLine::End)) | Ok(Err(_)) | Err(_) => {
                    self.state = FollowState::Listed(version);
                    None
                }
            },
        }
    }

    /// Handle an item of a list.
    fn listed(&mut self, item: Result<T, UnreadableItem>) -> Option<WatchMessage<T>> {
        match usable(item) {
            Ok(object) => {
                self.unreadable.is_readable(object.meta());
                Some(WatchMessage::There(object))
            }
            Err(UnreadableItem { name, why }) => {
                self.unreadable.add(name, &why);
                None
            }
        }
    }

    /// Handle an event of a watch. The state must be `Watching`.
    fn event(&mut self, line: &[u8]) -> Stepped<T> {
        let head: Head = match serde_json::from_slice(line) {
            Ok(head) => head,
            // An incomplete line is the last one of a connection that broke.
            Err(error) if error.is_eof() => return None,
            Err(error) => return Some(Err(FollowTrouble::Event(short(&error.to_string())))),
        };
        let gone = match head.event.as_deref() {
            Some("ADDED" | "MODIFIED") => false,
            Some("DELETED") => true,
            Some("BOOKMARK") => return self.go_on_from(version_of(line)).map(Err),
            Some("ERROR") => {
                let status = serde_json::from_slice(line).map(|WatchObject { object }: WatchObject<Status>| object);
                let status = status.unwrap_or_else(|error| Status::failure(&short(&error.to_string()), "Unreadable"));
                if status.code == 410 {
                    self.state = FollowState::Begin;
                }
                return Some(Err(FollowTrouble::Said(status.boxed())));
            }
            _ => {
                let trouble = match serde_json::from_slice::<Status>(line) {
                    Ok(status) if head.is_status() => FollowTrouble::Said(status.boxed()),
                    _ => FollowTrouble::Event("it is neither an event nor a Status".to_owned()),
                };
                return Some(Err(trouble));
            }
        };
        let object = read::<T>(line);
        let trouble = match &object {
            Ok(object) => object.trouble(),
            Err(error) => Some(short(&without_place(error))),
        };
        let object = match (object, trouble) {
            (Ok(object), None) => {
                self.unreadable.is_readable(object.meta());
                object
            }
            (_, why) => {
                let meta = read::<WithMeta>(line)
                    .map(|object| ObjectMeta::from(object.metadata))
                    .unwrap_or_default();
                if !gone || meta.name.is_none() {
                    let name = object_name(line).unwrap_or_else(|| "without a name".to_owned());
                    self.unreadable.add(name, &why.unwrap_or_default());
                    // The object's last known state stays valid until the next list.
                    if let Some(version) = version_of(line) {
                        self.go_on_from(Some(version));
                    }
                    return None;
                }
                // A deletion must be reported even if the rest of the object is unreadable.
                self.unreadable.is_readable(&meta);
                T::bare(meta)
            }
        };
        if let Some(trouble) = self.go_on_from(object.meta().resource_version.clone()) {
            return Some(Err(trouble));
        }
        Some(Ok(if gone {
            WatchMessage::Gone(object)
        } else {
            WatchMessage::There(object)
        }))
    }

    /// Remember the resourceVersion from which the watch resumes after its connection ends.
    fn go_on_from(&mut self, newer: Option<String>) -> Option<FollowTrouble> {
        match newer.filter(|version| !version.is_empty()) {
            None => {
                self.state = FollowState::Begin;
                Some(FollowTrouble::NoResourceVersion)
            }
            Some(newer) => {
                if let FollowState::Watching { version, .. } = &mut self.state {
                    *version = newer;
                }
                None
            }
        }
    }
}

#[derive(Deserialize)]
struct Head {
    #[serde(rename = "type")]
    event: Option<String>,
    kind: Option<String>,
    object: Option<IgnoredAny>,
}

impl Head {
    /// Report whether the line is a Status that is not inside an event. An API server sends such a line if it refuses to
    /// continue a watch.
    fn is_status(&self) -> bool {
        self.object.is_none() && self.kind.as_deref() == Some("Status")
    }
}

#[derive(Deserialize)]
struct WatchObject<T> {
    object: T,
}

#[derive(Deserialize)]
struct WithMeta {
    metadata: Meta<Unread>,
}

#[derive(Deserialize)]
struct WithVersion {
    metadata: VersionMeta,
}

#[derive(Deserialize)]
struct VersionMeta {
    #[serde(rename = "resourceVersion")]
    version: Option<String>,
}

fn read<T: DeserializeOwned>(line: &[u8]) -> Result<T, serde_json::Error> {
    serde_json::from_slice(line).map(|WatchObject { object }| object)
}

fn version_of(line: &[u8]) -> Option<String> {
    read::<WithVersion>(line).ok().and_then(|object| object.metadata.version)
}

fn object_name(line: &[u8]) -> Option<String> {
    let object: serde_json::Value = read(line).ok()?;
    name(object.to_string().as_bytes())
}

/// The unreadable objects that have been logged, so that each is logged only once.
struct Remembered {
    kind: &'static str,
    names: BTreeSet<String>,
    /// The unreadable objects in the list that is being read.
    listed: Option<BTreeSet<String>>,
    /// Whether there are more unreadable objects than are remembered.
    more: bool,
}

impl Remembered {
    fn new(kind: &'static str) -> Remembered {
        Remembered {
            kind,
            names: BTreeSet::new(),
            listed: None,
            more: false,
        }
    }

    fn list_begins(&mut self) {
        self.listed = Some(BTreeSet::new());
    }

    /// Remember only the objects that were unreadable in this list. The others are gone or readable now.
    fn list_ends(&mut self) {
        if let Some(listed) = self.listed.take() {
            self.more &= listed.len() >= REMEMBERED;
            self.names = listed;
        }
    }

    fn add(&mut self, name: String, why: &str) {
        let kind = self.kind;
        if let Some(listed) = &mut self.listed
            && listed.len() < REMEMBERED
        {
            listed.insert(name.clone());
        }
        if self.names.contains(&name) {
            return;
        }
        if self.names.len() < REMEMBERED {
            tracing::warn!("{kind} {name} cannot be read and is left out: {why}");
            self.names.insert(name);
        } else if !self.more {
            self.more = true;
            tracing::warn!("more than {REMEMBERED} objects cannot be read and are left out, such as {kind} {name}: {why}");
        }
    }

    fn is_readable(&mut self, meta: &ObjectMeta) {
        if self.names.is_empty() {
            return;
        }
        self.names.remove(&full_name(meta));
    }
}

/// Splits a response body into lines.
struct BodyLines {
    body: Box<dyn AsyncBufRead + Send + Unpin>,
    buffer: Vec<u8>,
    /// Whether the buffer contains a line that was returned.
    handed: bool,
    too_long: bool,
}

enum WatchLine<'a> {
    Whole(&'a [u8]),
    TooLong,
    End,
}

impl BodyLines {
    fn new(body: Box<dyn AsyncBufRead + Send + Unpin>) -> BodyLines {
        BodyLines {
            body,
            buffer: Vec::new(),
            handed: false,
            too_long: false,
        }
    }

    /// Return the next line that is not empty. If the caller drops the future, the bytes read so far are kept.
    async fn next(&mut self) -> io::Result<WatchLine<'_>> {
        if std::mem::take(&mut self.handed) {
            self.buffer.clear();
            // One large object must not keep its memory for the rest of the connection.
            self.buffer.shrink_to(64 << 10);
        }
        loop {
            let chunk = self.body.fill_buf().await?;
            if chunk.is_empty() {
                return Ok(if self.buffer.is_empty() {
                    WatchLine::End
                } else {
                    self.handed = true;
                    WatchLine::Whole(&self.buffer)
                });
            }
            let end = chunk.iter().position(|byte| *byte == b'\n');
            let part = &chunk[..end.unwrap_or(chunk.len())];
            self.too_long |= self.buffer.len() + part.len() > LARGEST;
            if self.too_long {
                self.buffer = Vec::new();
            } else {
                self.buffer.extend_from_slice(part);
            }
            let used = part.len() + usize::from(end.is_some());
            self.body.consume_unpin(used);
            if end.is_none() {
                continue;
            }
            if std::mem::take(&mut self.too_long) {
                return Ok(WatchLine::TooLong);
            }
            if !self.buffer.trim_ascii().is_empty() {
                self.handed = true;
                return Ok(WatchLine::Whole(&self.buffer));
            }
            self.buffer.clear();
        }
    }
}

/// Report whether a connection ended in the middle of a response, as it does when an API server or a load balancer closes a watch. The watch
/// then resumes where it was, and nothing is logged. These are the same errors as in kube-client's `Client::request_events`.
fn ended_early(error: &io::Error) -> bool {
    let mut cause: Option<&(dyn StdError + 'static)> = Some(error);
    for _ in 0..16 {
        let Some(error) = cause else { return false };
        let io = error.downcast_ref::<io::Error>();
        if io.is_some_and(|error| error.kind() == io::ErrorKind::UnexpectedEof)
            || error.to_string().contains("unexpected EOF during chunk")
        {
            return true;
        }
        cause = match io.and_then(io::Error::get_ref) {
            Some(inner) => Some(inner),
            None => error.source(),
        };
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn readable(remembered: &mut Remembered, namespace: Option<&str>, name: &str) {
        remembered.is_readable(&ObjectMeta {
            name: Some(name.to_owned()),
            namespace: namespace.map(str::to_owned),
            ..ObjectMeta::default()
        });
    }

    /// Each object is remembered until it is readable or gone.
    #[test]
    fn remembered_unreadable_objects_are_bounded() {
        let mut remembered = Remembered::new("node");
        remembered.list_begins();
        for number in 0..3 * REMEMBERED {
            remembered.add(format!("n{number}"), "it is bad");
        }
        remembered.list_ends();
        assert_eq!((remembered.names.len(), remembered.more), (REMEMBERED, true));
        readable(&mut remembered, None, "n7");
        assert_eq!(remembered.names.len(), REMEMBERED - 1);
        remembered.add("n7".to_owned(), "it is bad again");
        assert!(remembered.names.contains("n7"));
        remembered.add("ns/p".to_owned(), "one more than is remembered");
        assert!(!remembered.names.contains("ns/p"));
        // In the next list, only one object is unreadable.
        remembered.list_begins();
        remembered.add("n1".to_owned(), "it is still bad");
        remembered.list_ends();
        assert_eq!((remembered.names.len(), remembered.more), (1, false));
        assert!(remembered.names.contains("n1"));
        remembered.add("ns/p".to_owned(), "it is bad");
        readable(&mut remembered, Some("ns"), "p");
        readable(&mut remembered, Some(""), "n1");
        assert!(remembered.names.is_empty());
    }
}
