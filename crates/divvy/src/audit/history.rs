//! The history of a cluster as text. [`Recorder`] writes the watch log of `divvy audit record`. [`Reader`] reads watch logs and kubectl's
//! output, and converts them into facts for [`divvy_audit`]. No I/O.
//!
//! # The watch log
//!
//! The log consists of JSON lines. The first line is a header. Each other line has the time (`t`, Unix seconds) at which the recorder received
//! the message. It is either one of Kubernetes' own watch events or one of four types about the recording itself (`LIST`, `LISTED`,
//! `INTERRUPTED`, `STOPPED`):
//!
//! ```json
//! {"divvyAudit":1,"divvy":"0.1.0","cluster":"https://10.0.0.1:6443/","started":"2026-01-02T03:04:05Z"}
//! {"t":1767323045.123,"type":"LIST","kind":"Pod"}
//! {"t":1767323045.150,"type":"ADDED","rv":"71","object":{"kind":"Pod","metadata":{},"spec":{},"status":{}}}
//! {"t":1767323045.160,"type":"LISTED","kind":"Pod"}
//! {"t":1767323046.001,"type":"MODIFIED","rv":"75","object":{"kind":"Pod","metadata":{},"spec":{},"status":{}}}
//! {"t":1767323047.120,"type":"INTERRUPTED","kind":"Pod","why":"the connection was lost"}
//! ```
//!
//! The events between `LIST` and `LISTED` are a complete list of a kind. A later `LIST` of the same kind, with `why`, means that the watch could
//! not resume where it broke, so it is unknown what happened in between. `rv` is the object's resourceVersion. Objects contain only the
//! fields that an audit reads, and changes of other fields are not recorded. Pods that neither request GPUs nor hold any are omitted.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use divvy_audit::{Fact, Kind, Moment, What};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::core::Object;
use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use divvy_kube::convert;
use divvy_kube::convert::ReadPod;
use divvy_kube::objects::{
    Address, Amounts, Container, ContainerStatus, NodeObject, NodeSpec, NodeStatus, PodObject, PodSpec, PodStatus,
    null_is_default,
};
use divvy_kube::slim::{Meta, is_read};
use divvy_kube::watch::Seen;

/// One JSON value in a watch log or in the output of `kubectl get -o json` or `kubectl get -w -o json --output-watch-events`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Document {
    divvy_audit: Option<u64>,
    started: Option<String>,
    t: Option<f64>,
    #[serde(rename = "type")]
    event: Option<String>,
    kind: Option<String>,
    why: Option<String>,
    rv: Option<String>,
    object: Option<Any>,
    items: Option<Vec<Any>>,
    metadata: Option<Meta>,
    spec: Option<Spec>,
    status: Option<Status>,
}

#[derive(Debug, Deserialize)]
struct Any {
    kind: Option<String>,
    #[serde(default)]
    metadata: Meta,
    spec: Option<Spec>,
    status: Option<Status>,
    message: Option<String>,
}

/// The fields of a pod's or a node's `spec` that an audit reads.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Spec {
    node_name: Option<String>,
    #[serde(deserialize_with = "null_is_default")]
    init_containers: Vec<Container>,
    #[serde(deserialize_with = "null_is_default")]
    containers: Vec<Container>,
    unschedulable: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct StatusFields {
    phase: Option<String>,
    #[serde(deserialize_with = "null_is_default")]
    init_container_statuses: Vec<ContainerStatus>,
    #[serde(deserialize_with = "null_is_default")]
    container_statuses: Vec<ContainerStatus>,
    #[serde(deserialize_with = "null_is_default")]
    capacity: Amounts,
    #[serde(deserialize_with = "null_is_default")]
    allocatable: Amounts,
    #[serde(deserialize_with = "null_is_default")]
    addresses: Vec<Address>,
}

/// The `status` of a pod or node. In a Kubernetes `Status` object, this field is a string, which is ignored.
#[derive(Debug, Default)]
struct Status(StatusFields);

impl<'de> Deserialize<'de> for Status {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = Status;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("the status of an object")
            }

            fn visit_str<E>(self, _: &str) -> Result<Status, E> {
                Ok(Status::default())
            }

            fn visit_unit<E>(self) -> Result<Status, E> {
                Ok(Status::default())
            }

            fn visit_map<M: MapAccess<'de>>(self, map: M) -> Result<Status, M::Error> {
                StatusFields::deserialize(MapAccessDeserializer::new(map)).map(Status)
            }
        }
        deserializer.deserialize_any(Either)
    }
}

/// The reason why a document cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unusable {
    /// A newer Divvy wrote the watch log.
    #[error("this watch log has version {0}; this Divvy reads version 1 (use the divvy that recorded it, or a newer one)")]
    Version(u64),
    /// The document is output of `kubectl get -w` without event types.
    #[error(
        "these are objects without event types (kubectl get -w -o json?), so a deletion cannot be told from a change; add \
         --output-watch-events, or record with: divvy audit record FILE"
    )]
    NoEventTypes,
    /// The input contains a second stream of watch events of the same kind.
    #[error(
        "there are two streams of watch events of {0}, and it is unknown what happened between them; pass only one of them, or record with: \
         divvy audit record FILE"
    )]
    TwoStreams(&'static str),
    /// The document is none of the supported kinds.
    #[error("this is neither a watch log of `divvy audit record`, nor pods or nodes as `kubectl get -o json` prints them")]
    Unknown,
}

/// Converts documents, in their order, into facts.
#[derive(Debug, Default)]
pub struct Reader {
    /// The kinds with kubectl watch events in the previous files, each with the number of these events.
    streamed: BTreeMap<Kind, u64>,
    /// The kinds with kubectl watch events in the current file, each with the number of these events.
    streaming: BTreeMap<Kind, u64>,
    /// The UIDs of objects that the input contains outside of lists and watch events.
    bare: HashMap<String, ()>,
    logged: bool,
    /// The number of recordings that have begun, in all files.
    recordings: u64,
    /// The time of the last line of a watch log. `None` for kubectl's output, which has no times.
    at_ms: Option<i64>,
}

impl Reader {
    /// Start the next file. The state that concerns only the current file is reset.
    pub fn next_file(&mut self) {
        self.streamed.append(&mut self.streaming);
        self.logged = false;
        self.at_ms = None;
    }

    /// Return the start time of the recording if the document is the first line of a watch log, else `None`.
    pub fn started(document: &Document) -> Option<&str> {
        document.divvy_audit.and(document.started.as_deref())
    }

    /// Report whether a document is only about nodes.
    pub fn is_of_nodes(document: &Document) -> bool {
        let object = document.object.as_ref().and_then(|object| object.kind.as_deref());
        let kind = object.or(document.kind.as_deref());
        let all = |items: &Vec<Any>| !items.is_empty() && items.iter().all(|item| item.kind.as_deref() == Some("Node"));
        matches!(kind, Some("Node" | "NodeList")) || document.items.as_ref().is_some_and(all)
    }

    /// Return the time of the last line that was read from the watch log, in Unix milliseconds.
    pub fn at_ms(&self) -> Option<i64> {
        self.at_ms
    }

    /// Append the facts in a document to `facts`. A part that cannot be read is not an error, but is appended as a finding ([`What`]).
    pub fn read(&mut self, document: Document, facts: &mut Vec<(Moment, Result<Fact, What>)>) -> Result<(), Unusable> {
        if let Some(version) = document.divvy_audit {
            self.logged = true;
            self.recordings += 1;
            return if version == 1 {
                Ok(())
            } else {
                Err(Unusable::Version(version))
            };
        }
        if let Some(t) = document.t {
            // The conversion saturates. The log's times are taken as they are.
            self.at_ms = Some((t * 1000.0).round() as i64);
        }
        let at = Moment {
            revision: None,
            at_ms: self.at_ms,
        };
        match (document.event.as_deref(), document.object, document.items) {
            (Some("LIST"), ..) => {
                let kind = kind_of(document.kind.as_deref())?;
                // Before the first recording there is no gap.
                let again = (self.recordings > 1).then(|| "the recorder was not running".to_owned());
                let why = document.why.or(again);
                facts.push((at, Ok(Fact::ListBegins { kind, why })));
            }
            (Some("LISTED"), ..) => {
                let kind = kind_of(document.kind.as_deref())?;
                facts.push((at, Ok(Fact::ListEnds { kind })));
            }
            (Some("INTERRUPTED" | "STOPPED" | "BOOKMARK"), ..) => facts.push((at, Ok(Fact::Time))),
            (Some("ERROR"), object, _) => {
                let why = object.and_then(|object| object.message);
                for kind in self.streaming.keys() {
                    let (of, why) = (kind.name(), why.clone());
                    facts.push((at, Err(What::Gap { of, why })));
                }
            }
            (Some(event @ ("ADDED" | "MODIFIED" | "DELETED")), Some(object), _) => {
                let kind = kind_of(object.kind.as_deref())?;
                if !self.logged {
                    *self.streaming.entry(kind).or_default() += 1;
                    if self.streamed.contains_key(&kind) {
                        return Err(Unusable::TwoStreams(kind.name()));
                    }
                }
                facts.push(self.object(kind, object, document.rv, event == "DELETED"));
            }
            (None, _, Some(items)) => self.list(document.kind.as_deref(), items, facts)?,
            (None, None, None) => {
                let object = Any {
                    kind: document.kind,
                    metadata: document.metadata.ok_or(Unusable::Unknown)?,
                    spec: document.spec,
                    status: document.status,
                    message: None,
                };
                let kind = kind_of(object.kind.as_deref())?;
                let uid = object.metadata.uid.clone().unwrap_or_default();
                if self.bare.insert(uid, ()).is_some() {
                    return Err(Unusable::NoEventTypes);
                }
                facts.push(self.object(kind, object, None, false));
            }
            _ => return Err(Unusable::Unknown),
        }
        Ok(())
    }

    /// Process a list: the output of `kubectl get pods,nodes -o json`, or an API server's own list of one kind.
    fn list(&self, list: Option<&str>, items: Vec<Any>, facts: &mut Vec<(Moment, Result<Fact, What>)>) -> Result<(), Unusable> {
        let own = list
            .and_then(|kind| kind.strip_suffix("List"))
            .filter(|kind| !kind.is_empty());
        let mut by_kind: BTreeMap<Kind, Vec<Any>> = BTreeMap::new();
        // An empty list of a kind also means that there are no such objects.
        if let Some(own) = own {
            by_kind.entry(kind_of(Some(own))?).or_default();
        }
        for item in items {
            let kind = kind_of(item.kind.as_deref().or(own))?;
            by_kind.entry(kind).or_default().push(item);
        }
        let at = Moment {
            revision: None,
            at_ms: self.at_ms,
        };
        for kind in by_kind.keys().copied() {
            let why = Some("a later list follows".to_owned());
            facts.push((at, Ok(Fact::ListBegins { kind, why })));
        }
        let kinds: Vec<Kind> = by_kind.keys().copied().collect();
        // Nodes first, because pods are interpreted with the data of their nodes.
        for (kind, items) in by_kind.into_iter().rev() {
            facts.extend(items.into_iter().map(|item| self.object(kind, item, None, false)));
        }
        facts.extend(kinds.into_iter().map(|kind| (at, Ok(Fact::ListEnds { kind }))));
        Ok(())
    }

    fn object(&self, kind: Kind, object: Any, rv: Option<String>, gone: bool) -> (Moment, Result<Fact, What>) {
        let Any {
            metadata, spec, status, ..
        } = object;
        let at = Moment {
            revision: rv
                .or_else(|| metadata.resource_version.clone())
                .and_then(|text| text.parse().ok()),
            at_ms: self.at_ms,
        };
        let spec = spec.unwrap_or_default();
        let Status(status) = status.unwrap_or_default();
        let delete_by_ms = metadata.deletion_timestamp.as_ref().map(|time| time.0.as_millisecond());
        let metadata = metadata.into();
        let fact = match kind {
            Kind::Pods => {
                let object: PodObject = Object {
                    types: None,
                    metadata,
                    spec: PodSpec {
                        node_name: spec.node_name,
                        init_containers: spec.init_containers,
                        containers: spec.containers,
                        ..PodSpec::default()
                    },
                    status: Some(PodStatus {
                        phase: status.phase,
                        init_container_statuses: status.init_container_statuses,
                        container_statuses: status.container_statuses,
                        ..PodStatus::default()
                    }),
                };
                // The pod's requests may be unreadable; what it holds still counts.
                let (pod, _) = ReadPod::from(object).into_parts();
                match gone {
                    true => Fact::PodGone(pod),
                    false => Fact::Pod { pod, delete_by_ms },
                }
            }
            Kind::Nodes => {
                let object: NodeObject = Object {
                    types: None,
                    metadata,
                    spec: NodeSpec {
                        unschedulable: spec.unschedulable,
                        ..NodeSpec::default()
                    },
                    status: Some(NodeStatus {
                        capacity: status.capacity,
                        allocatable: status.allocatable,
                        addresses: status.addresses,
                        ..NodeStatus::default()
                    }),
                };
                let node = convert::node(&object);
                match gone {
                    true => Fact::NodeGone(node.name),
                    false => Fact::Node(node),
                }
            }
        };
        (at, Ok(fact))
    }
}

fn kind_of(kind: Option<&str>) -> Result<Kind, Unusable> {
    match kind {
        Some("Pod") => Ok(Kind::Pods),
        Some("Node") => Ok(Kind::Nodes),
        _ => Err(Unusable::Unknown),
    }
}

/// An object in a log, with only the fields that an audit reads.
#[derive(Serialize)]
struct Kept<'a, S, T> {
    kind: &'static str,
    metadata: KeptMeta<'a>,
    spec: &'a S,
    status: &'a Option<T>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct KeptMeta<'a> {
    name: &'a Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    namespace: &'a Option<String>,
    uid: &'a Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    deletion_timestamp: &'a Option<Time>,
    #[serde(skip_serializing_if = "Option::is_none")]
    annotations: &'a Option<BTreeMap<String, String>>,
}

#[derive(Serialize)]
struct Header<'a> {
    #[serde(rename = "divvyAudit")]
    version: u64,
    divvy: &'a str,
    cluster: &'a str,
    started: &'a str,
}

#[derive(Serialize)]
struct StreamEvent<'a> {
    t: f64,
    #[serde(rename = "type")]
    event: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    kind: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<&'a str>,
}

/// Converts watch messages into lines of a log. It remembers 16 bytes per object in order to skip changes of fields that are not recorded.
#[derive(Debug, Default)]
pub struct Recorder {
    pods: Feed,
    nodes: Feed,
}

#[derive(Debug, Default)]
struct Feed {
    /// For each UID: a hash of the last state written to the log, and the number of the list in which the object was last seen.
    known: HashMap<String, (u64, u32)>,
    list: u32,
    listing: bool,
    broke: Option<String>,
}

/// Return the first line of a log.
pub fn header(divvy: &str, cluster: &str, started: &str) -> String {
    let header = Header {
        version: 1,
        divvy,
        cluster,
        started,
    };
    line(&header)
}

/// Return the last line of a log, which says that the user stopped the recorder.
pub fn stopped(at_ms: i64) -> String {
    stream_event(at_ms, "STOPPED", None, None)
}

impl Recorder {
    /// Return the log line for a message of the pod watch. `None` if no recorded field has changed.
    pub fn pod(&mut self, at_ms: i64, seen: Seen<PodObject>) -> Option<String> {
        self.pods.line(at_ms, "Pod", seen, |pod, known| {
            let containers = || pod.spec.init_containers.iter().chain(&pod.spec.containers);
            let asks = |container: &Container| {
                let amounts = container.resources.limits.keys().chain(container.resources.requests.keys());
                amounts.into_iter().any(is_ours)
            };
            let says = pod.metadata.annotations.iter().flatten().any(|(key, _)| is_read(key));
            if !known && !says && !containers().any(asks) {
                return None;
            }
            for container in pod.spec.init_containers.iter_mut().chain(&mut pod.spec.containers) {
                container.resources.limits.retain(is_ours);
                container.resources.requests.retain(is_ours);
            }
            pod.spec.overhead.clear();
            pod.spec.node_selector.clear();
            if let Some(status) = &mut pod.status {
                status.conditions.clear();
                (status.reason, status.message) = (None, None);
                for container in status
                    .init_container_statuses
                    .iter_mut()
                    .chain(&mut status.container_statuses)
                {
                    container.state.waiting = None;
                }
            }
            Some(keep("Pod", &mut pod.metadata, &pod.spec, &pod.status))
        })
    }

    /// Return the log line for a message of the node watch. `None` if no recorded field has changed.
    pub fn node(&mut self, at_ms: i64, seen: Seen<NodeObject>) -> Option<String> {
        self.nodes.line(at_ms, "Node", seen, |node, _| {
            if let Some(status) = &mut node.status {
                status.capacity.retain(is_ours);
                status.allocatable.retain(is_ours);
                status.addresses.clear();
                status.node_info = None;
            }
            Some(keep("Node", &mut node.metadata, &node.spec, &node.status))
        })
    }
}

impl Feed {
    fn line<T: kube::Resource>(
        &mut self,
        at_ms: i64,
        kind: &'static str,
        seen: Seen<T>,
        kept: impl FnOnce(&mut T, bool) -> Option<String>,
    ) -> Option<String> {
        let (mut object, gone) = match seen {
            Seen::ListBegins => {
                self.list = self.list.wrapping_add(1);
                self.listing = true;
                let why = match (self.list, self.broke.take()) {
                    (1, why) => why,
                    (_, why) => Some(why.unwrap_or_else(|| "the watch could not resume where it broke".to_owned())),
                };
                return Some(stream_event(at_ms, "LIST", Some(kind), why.as_deref()));
            }
            Seen::ListEnds => {
                self.listing = false;
                let list = self.list;
                self.known.retain(|_, (_, seen)| *seen == list);
                return Some(stream_event(at_ms, "LISTED", Some(kind), None));
            }
            Seen::Interrupted(why) => {
                let line = stream_event(at_ms, "INTERRUPTED", Some(kind), Some(&why));
                self.broke = Some(why);
                return Some(line);
            }
            Seen::Resumed => {
                self.broke = None;
                return None;
            }
            Seen::There(object) => (object, false),
            Seen::Gone(object) => (object, true),
        };
        let meta = object.meta_mut();
        let rv = meta.resource_version.take();
        let uid = meta.uid.clone().unwrap_or_default();
        let known = self.known.get(&uid).copied();
        let text = kept(&mut object, known.is_some())?;
        let mut hasher = DefaultHasher::new();
        text.hash(&mut hasher);
        let hash = hasher.finish();
        let event = match (gone, known) {
            (true, _) => {
                self.known.remove(&uid);
                "DELETED"
            }
            (false, Some((before, _))) if before == hash && !self.listing => return None,
            (false, Some(_)) if !self.listing => "MODIFIED",
            _ => "ADDED",
        };
        if !gone {
            self.known.insert(uid, (hash, self.list));
        }
        let t = seconds(at_ms);
        let rv = rv.map(|rv| format!("\"rv\":{},", line(&rv).trim_end())).unwrap_or_default();
        Some(format!("{{\"t\":{t},\"type\":\"{event}\",{rv}\"object\":{text}}}\n"))
    }
}

fn is_ours(resource: &str) -> bool {
    crate::scheduler_config::is_managed(resource)
}

fn keep<S: Serialize, T: Serialize>(kind: &'static str, metadata: &mut ObjectMeta, spec: &S, status: &Option<T>) -> String {
    if let Some(annotations) = &mut metadata.annotations {
        annotations.retain(|key, _| is_read(key));
    }
    let kept = Kept {
        kind,
        metadata: KeptMeta {
            name: &metadata.name,
            namespace: &metadata.namespace,
            uid: &metadata.uid,
            deletion_timestamp: &metadata.deletion_timestamp,
            annotations: &metadata.annotations,
        },
        spec,
        status,
    };
    line(&kept).trim_end().to_owned()
}

fn stream_event(at_ms: i64, event: &str, kind: Option<&str>, why: Option<&str>) -> String {
    let said = StreamEvent {
        t: seconds(at_ms),
        event,
        kind,
        why,
    };
    line(&said)
}

fn seconds(at_ms: i64) -> f64 {
    at_ms as f64 / 1000.0
}

fn line<T: Serialize>(value: &T) -> String {
    let mut text = serde_json::to_string(value).expect("only string keys and finite numbers");
    text.push('\n');
    text
}

#[cfg(test)]
mod tests;
