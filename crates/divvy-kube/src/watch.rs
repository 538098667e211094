//! A list and its changes, for ever, with kube-rs' back-off, folded into three kinds of change.

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

/// Longest wait before a broken watch of the whole cluster is taken up again.
const WHOLE_CLUSTER: Duration = Duration::from_secs(5);

/// A change of what is watched.
#[derive(Debug, Clone)]
pub enum Change<T> {
    /// This object is there, in this state.
    Apply(T),
    /// This object is gone; its last state.
    Delete(T),
    /// Exactly these objects are there: the first list, or one after a watch that could not be resumed (410). What is not
    /// among them is gone.
    Reset(Vec<T>),
    /// The watch broke and is being taken up again; nothing changed. The text says why.
    Interrupted(String),
    /// The watch goes on where it was interrupted; what was missed follows.
    Resumed,
}

impl<T> Change<T> {
    /// The same change of something else.
    pub fn map<U>(self, mut with: impl FnMut(T) -> U) -> Change<U> {
        match self {
            Change::Apply(object) => Change::Apply(with(object)),
            Change::Delete(object) => Change::Delete(with(object)),
            Change::Reset(objects) => Change::Reset(objects.into_iter().map(with).collect()),
            Change::Interrupted(why) => Change::Interrupted(why),
            Change::Resumed => Change::Resumed,
        }
    }
}

/// What a watch says, as it comes: a list is never held in memory as a whole.
#[derive(Debug, Clone)]
pub enum Seen<T> {
    /// What follows is all there is, until [`Seen::ListEnds`].
    ListBegins,
    /// The list is complete.
    ListEnds,
    /// This object is there, in this state.
    There(T),
    /// This object is gone; its last state.
    Gone(T),
    /// The watch broke and is being taken up again.
    Interrupted(String),
    /// The watch goes on where it was interrupted; what was missed follows. If it cannot, a list begins instead.
    Resumed,
}

/// All pods, as the watch says it.
pub fn pods_as_they_come(client: kube::Client) -> impl Stream<Item = Seen<PodObject>> + Send + 'static {
    as_they_come::<SlimPod>(client, PODS, None).map(|seen| seen.map(PodObject::from))
}

/// All nodes, as the watch says it.
pub fn nodes_as_they_come(client: kube::Client) -> impl Stream<Item = Seen<NodeObject>> + Send + 'static {
    as_they_come::<SlimNode>(client, NODES, None).map(|seen| seen.map(NodeObject::from))
}

impl<T> Seen<T> {
    fn map<U>(self, with: impl FnOnce(T) -> U) -> Seen<U> {
        match self {
            Seen::ListBegins => Seen::ListBegins,
            Seen::ListEnds => Seen::ListEnds,
            Seen::There(object) => Seen::There(with(object)),
            Seen::Gone(object) => Seen::Gone(with(object)),
            Seen::Interrupted(why) => Seen::Interrupted(why),
            Seen::Resumed => Seen::Resumed,
        }
    }
}

/// How long to wait before a broken watch is taken up again: as kube-rs and client-go do (0.8 s, doubled up to 30 s, with jitter), capped
/// at `most`.
struct Wait {
    usual: DefaultBackoff,
    most: Duration,
}

impl Wait {
    /// All scheduling waits for a watch of the whole cluster, and there are few of these. There are thousands of watches of single nodes.
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
) -> impl Stream<Item = Seen<K>> + Send + 'static + use<K> {
    let what = path.to_owned();
    follow::follow(client, path, field_selector)
        .backoff(Wait::of(field_selector))
        .map(move |seen| match seen {
            Ok(seen) => seen,
            Err(trouble) => {
                let text = trouble.to_string();
                tracing::warn!("the watch of {what} was interrupted, and is taken up again: {text}");
                Seen::Interrupted(text)
            }
        })
}

/// All pods of the cluster, or those that a field selector such as `spec.nodeName=n1` names.
pub fn pods(client: kube::Client, field_selector: Option<&str>) -> impl Stream<Item = Change<PodObject>> + Send + 'static {
    changes(as_they_come::<SlimPod>(client, PODS, field_selector), PodObject::from)
}

/// All pods and all nodes, each read into what is kept of it as soon as it comes: a list of 50,000 whole objects never lies in memory.
pub fn read<P, N>(
    client: kube::Client,
    pod: impl Fn(PodObject) -> P + Send + 'static,
    node: impl Fn(NodeObject) -> N + Send + 'static,
) -> (
    impl Stream<Item = Change<P>> + Send + 'static,
    impl Stream<Item = Change<N>> + Send + 'static,
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

/// All nodes, or those that a field selector such as `metadata.name=n1` names.
pub fn nodes(client: kube::Client, field_selector: Option<&str>) -> impl Stream<Item = Change<NodeObject>> + Send + 'static {
    changes(as_they_come::<SlimNode>(client, NODES, field_selector), NodeObject::from)
}

/// gpushare's ConfigMaps `kube-system/unhealthy-gpu-<node>`, and no other.
pub fn unhealthy_gpus(client: kube::Client) -> impl Stream<Item = Change<UnhealthyGpus>> + Send + 'static {
    let path = format!("/api/v1/namespaces/{}/configmaps", legacy::UNHEALTHY_NAMESPACE);
    let read = |object: ConfigMap| convert::unhealthy_gpus(&object);
    changes(as_they_come::<ConfigMap>(client, &path, None), read).filter_map(|change| futures::future::ready(named(change)))
}

fn named(change: Change<Option<UnhealthyGpus>>) -> Option<Change<UnhealthyGpus>> {
    Some(match change {
        Change::Apply(read) => Change::Apply(read?),
        Change::Delete(read) => Change::Delete(read?),
        Change::Reset(all) => Change::Reset(all.into_iter().flatten().collect()),
        Change::Interrupted(why) => Change::Interrupted(why),
        Change::Resumed => Change::Resumed,
    })
}

fn changes<K, T: Send + 'static>(
    seen: impl Stream<Item = Seen<K>> + Send + 'static,
    read: impl Fn(K) -> T + Send + 'static,
) -> impl Stream<Item = Change<T>> + Send + 'static {
    // While a list is being read: its objects.
    let mut list: Option<Vec<T>> = None;
    seen.filter_map(move |seen| {
        let change = match seen {
            Seen::ListBegins => {
                list = Some(Vec::new());
                None
            }
            Seen::ListEnds => list.take().map(Change::Reset),
            Seen::There(object) => match &mut list {
                Some(list) => {
                    list.push(read(object));
                    None
                }
                None => Some(Change::Apply(read(object))),
            },
            Seen::Gone(object) => Some(Change::Delete(read(object))),
            Seen::Interrupted(why) => {
                // A list that failed begins anew.
                list = None;
                Some(Change::Interrupted(why))
            }
            Seen::Resumed => Some(Change::Resumed),
        };
        futures::future::ready(change)
    })
}

#[cfg(test)]
mod tests;
