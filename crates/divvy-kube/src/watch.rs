//! Watches: a list of objects and then all its changes, indefinitely.
//!
//! ```text
//! API server ──► follow ──► Seen (list begins, object, …, list ends, object, …) ──► changes ──► Change (Reset, Apply, Delete)
//! ```
//!
//! [`WatchMessage`] reports each object as it arrives. [`WatchChange`] collects the objects of a list into one [`WatchChange::Reset`]. After a
//! failure the watch is retried with kube-rs' back-off, and [`WatchChange::Interrupted`] and [`WatchChange::Resumed`] report the interruption.

mod follow;

use std::time::Duration;

use divvy_model::legacy;
use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::runtime::WatchStreamExt;
use kube::runtime::utils::Backoff;
use kube::runtime::watcher::DefaultBackoff;

use crate::convert::{self, UnhealthyGpus};
use crate::list::{NODES, PODS};
use crate::objects::{NodeObject, PodObject};
use crate::slim::{Kind, SlimNode, SlimPod};

/// The longest wait before a broken watch of the whole cluster is resumed.
const WHOLE_CLUSTER: Duration = Duration::from_secs(5);

/// A change of the watched objects.
#[derive(Debug, Clone)]
pub enum WatchChange<T> {
    /// The object exists in this state: it is new or has changed.
    Apply(T),
    /// The object is gone; this is its last state.
    Delete(T),
    /// Exactly these objects exist: the first list, or a list after a watch that could not be resumed (410). All other objects
    /// are gone.
    Reset(Vec<T>),
    /// The watch broke and is being resumed. No object has changed. The text says why the watch broke.
    Interrupted(String),
    /// The watch has resumed where it was interrupted. The missed changes follow.
    Resumed,
}

impl<T> WatchChange<T> {
    /// Convert the objects of the change.
    pub fn map<U>(self, mut with: impl FnMut(T) -> U) -> WatchChange<U> {
        match self {
            WatchChange::Apply(object) => WatchChange::Apply(with(object)),
            WatchChange::Delete(object) => WatchChange::Delete(with(object)),
            WatchChange::Reset(objects) => WatchChange::Reset(objects.into_iter().map(with).collect()),
            WatchChange::Interrupted(why) => WatchChange::Interrupted(why),
            WatchChange::Resumed => WatchChange::Resumed,
        }
    }
}

/// A message of a watch, as it arrives. A list is reported object by object, so that it is never in memory as a whole.
#[derive(Debug, Clone)]
pub enum WatchMessage<T> {
    /// A complete list of the objects follows, until [`WatchMessage::ListEnds`].
    ListBegins,
    /// The list is complete.
    ListEnds,
    /// The object exists in this state.
    There(T),
    /// The object is gone; this is its last state.
    Gone(T),
    /// The watch broke and is being resumed. The text says why it broke.
    Interrupted(String),
    /// The watch has resumed where it was interrupted. The missed changes follow. If it cannot resume, a list begins instead.
    Resumed,
}

/// Watch all pods, message by message.
pub fn pods_as_they_come(client: kube::Client) -> impl Stream<Item = WatchMessage<PodObject>> + Send + 'static {
    as_they_come::<SlimPod>(client, PODS, None).map(|seen| seen.map(PodObject::from))
}

/// Watch all nodes, message by message.
pub fn nodes_as_they_come(client: kube::Client) -> impl Stream<Item = WatchMessage<NodeObject>> + Send + 'static {
    as_they_come::<SlimNode>(client, NODES, None).map(|seen| seen.map(NodeObject::from))
}

impl<T> WatchMessage<T> {
    fn map<U>(self, with: impl FnOnce(T) -> U) -> WatchMessage<U> {
        match self {
            WatchMessage::ListBegins => WatchMessage::ListBegins,
            WatchMessage::ListEnds => WatchMessage::ListEnds,
            WatchMessage::There(object) => WatchMessage::There(with(object)),
            WatchMessage::Gone(object) => WatchMessage::Gone(with(object)),
            WatchMessage::Interrupted(why) => WatchMessage::Interrupted(why),
            WatchMessage::Resumed => WatchMessage::Resumed,
        }
    }
}

/// The wait before a broken watch is resumed: the same back-off as in kube-rs and client-go (0.8 s, doubled up to 30 s, with jitter), capped
/// at `most`.
struct Wait {
    usual: DefaultBackoff,
    most: Duration,
}

impl Wait {
    /// Return the back-off for a watch. A watch of the whole cluster gets a short cap: all scheduling waits for it, and there are few such
    /// watches. Watches with a field selector get no cap, because there are thousands of them, one per node.
    fn of(field_selector: Option<&str>) -> Wait {
        Wait {
            usual: DefaultBackoff::default(),
            most: match field_selector {
                None => WHOLE_CLUSTER,
                Some(_) => Duration::MAX,
            },
        }
    }
}

impl Iterator for Wait {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        Some(self.usual.next()?.min(self.most))
    }
}

impl Backoff for Wait {
    fn reset(&mut self) {
        self.usual.reset();
    }
}

fn as_they_come<K: Kind>(
    client: kube::Client,
    path: &str,
    field_selector: Option<&str>,
) -> impl Stream<Item = WatchMessage<K>> + Send + 'static + use<K> {
    let what = path.to_owned();
    follow::follow(client, path, field_selector)
        .backoff(Wait::of(field_selector))
        .map(move |seen| match seen {
            Ok(seen) => seen,
            Err(trouble) => {
                let text = trouble.to_string();
                tracing::warn!("the watch of {what} was interrupted and will be resumed: {text}");
                WatchMessage::Interrupted(text)
            }
        })
}

/// Watch all pods of the cluster, or those that match a field selector such as `spec.nodeName=n1`.
pub fn pods(client: kube::Client, field_selector: Option<&str>) -> impl Stream<Item = WatchChange<PodObject>> + Send + 'static {
    changes(as_they_come::<SlimPod>(client, PODS, field_selector), PodObject::from)
}

/// Watch all pods and all nodes. Each object is converted by `pod` or `node` as soon as it arrives, so that a list of 50,000 whole objects is
/// never in memory.
pub fn read<P, N>(
    client: kube::Client,
    pod: impl Fn(PodObject) -> P + Send + 'static,
    node: impl Fn(NodeObject) -> N + Send + 'static,
) -> (
    impl Stream<Item = WatchChange<P>> + Send + 'static,
    impl Stream<Item = WatchChange<N>> + Send + 'static,
)
where
    P: Send + 'static,
    N: Send + 'static,
{
    let pods = as_they_come::<SlimPod>(client.clone(), PODS, None);
    let nodes = as_they_come::<SlimNode>(client, NODES, None);
    (
        changes(pods, move |slim| pod(slim.into())),
        changes(nodes, move |slim| node(slim.into())),
    )
}

/// Watch all nodes, or those that match a field selector such as `metadata.name=n1`.
pub fn nodes(client: kube::Client, field_selector: Option<&str>) -> impl Stream<Item = WatchChange<NodeObject>> + Send + 'static {
    changes(as_they_come::<SlimNode>(client, NODES, field_selector), NodeObject::from)
}

/// Watch gpushare's ConfigMaps `kube-system/unhealthy-gpu-<node>` and skip all other ConfigMaps.
pub fn unhealthy_gpus(client: kube::Client) -> impl Stream<Item = WatchChange<UnhealthyGpus>> + Send + 'static {
    let path = format!("/api/v1/namespaces/{}/configmaps", legacy::UNHEALTHY_NAMESPACE);
    let read = |object: ConfigMap| convert::unhealthy_gpus(&object);
    changes(as_they_come::<ConfigMap>(client, &path, None), read).filter_map(|change| futures::future::ready(named(change)))
}

fn named(change: WatchChange<Option<UnhealthyGpus>>) -> Option<WatchChange<UnhealthyGpus>> {
    Some(match change {
        WatchChange::Apply(read) => WatchChange::Apply(read?),
        WatchChange::Delete(read) => WatchChange::Delete(read?),
        WatchChange::Reset(all) => WatchChange::Reset(all.into_iter().flatten().collect()),
        WatchChange::Interrupted(why) => WatchChange::Interrupted(why),
        WatchChange::Resumed => WatchChange::Resumed,
    })
}

fn changes<K, T: Send + 'static>(
    seen: impl Stream<Item = WatchMessage<K>> + Send + 'static,
    read: impl Fn(K) -> T + Send + 'static,
) -> impl Stream<Item = WatchChange<T>> + Send + 'static {
    // The objects of the list that is being read, if one is.
    let mut list: Option<Vec<T>> = None;
    seen.filter_map(move |seen| {
        let change = match seen {
            WatchMessage::ListBegins => {
                list = Some(Vec::new());
                None
            }
            WatchMessage::ListEnds => list.take().map(WatchChange::Reset),
            WatchMessage::There(object) => match &mut list {
                Some(list) => {
                    list.push(read(object));
                    None
                }
                None => Some(WatchChange::Apply(read(object))),
            },
            WatchMessage::Gone(object) => Some(WatchChange::Delete(read(object))),
            WatchMessage::Interrupted(why) => {
                // A failed list starts again from its beginning.
                list = None;
                Some(WatchChange::Interrupted(why))
            }
            WatchMessage::Resumed => Some(WatchChange::Resumed),
        };
        futures::future::ready(change)
    })
}

#[cfg(test)]
mod tests;
