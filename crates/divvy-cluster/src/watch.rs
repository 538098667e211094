//! A list and its changes, for ever: kube-rs' watcher with its back-off, folded into three kinds of change.

pub(crate) mod slim;

use std::fmt::Debug;

use divvy_model::legacy;
use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::Api;
use kube::runtime::{WatchStreamExt, watcher};

use crate::convert::{self, UnhealthyGpus};
use crate::in_words;
use crate::objects::{self, NodeObject, PodObject};
use slim::Slim;

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
}

impl<T> Change<T> {
    /// The same change of something else.
    pub fn map<U>(self, mut with: impl FnMut(T) -> U) -> Change<U> {
        match self {
            Change::Apply(object) => Change::Apply(with(object)),
            Change::Delete(object) => Change::Delete(with(object)),
            Change::Reset(objects) => Change::Reset(objects.into_iter().map(with).collect()),
            Change::Interrupted(why) => Change::Interrupted(why),
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
    /// The watch broke and is being taken up again. A list follows if it could not go on where it was.
    Interrupted(String),
}

/// All pods, as the watch says it.
pub fn pods_as_they_come(client: kube::Client) -> impl Stream<Item = Seen<PodObject>> + Send + 'static {
    as_they_come(Api::all_with(client, &objects::pods())).map(|seen| seen.map(|Slim(object)| object))
}

/// All nodes, as the watch says it.
pub fn nodes_as_they_come(client: kube::Client) -> impl Stream<Item = Seen<NodeObject>> + Send + 'static {
    as_they_come(Api::all_with(client, &objects::nodes())).map(|seen| seen.map(|Slim(object)| object))
}

impl<T> Seen<T> {
    fn map<U>(self, with: impl FnOnce(T) -> U) -> Seen<U> {
        match self {
            Seen::ListBegins => Seen::ListBegins,
            Seen::ListEnds => Seen::ListEnds,
            Seen::There(object) => Seen::There(with(object)),
            Seen::Gone(object) => Seen::Gone(with(object)),
            Seen::Interrupted(why) => Seen::Interrupted(why),
        }
    }
}

fn as_they_come<K>(api: Api<K>) -> impl Stream<Item = Seen<K>> + Send + 'static
where
    K: kube::Resource + Clone + Debug + serde::de::DeserializeOwned + Send + 'static,
{
    let what = api.resource_url().to_owned();
    watcher(api, watcher::Config::default())
        .default_backoff()
        .map(move |event| match event {
            Ok(watcher::Event::Init) => Seen::ListBegins,
            Ok(watcher::Event::InitApply(object) | watcher::Event::Apply(object)) => Seen::There(object),
            Ok(watcher::Event::InitDone) => Seen::ListEnds,
            Ok(watcher::Event::Delete(object)) => Seen::Gone(object),
            Err(error) => Seen::Interrupted(interrupted(&what, &error)),
        })
}

fn interrupted(what: &str, error: &watcher::Error) -> String {
    let text = words(error);
    tracing::warn!("the watch of {what} was interrupted, and is taken up again: {text}");
    text
}

/// All pods of the cluster, or those that a field selector such as `spec.nodeName=n1` names.
pub fn pods(client: kube::Client, field_selector: Option<&str>) -> impl Stream<Item = Change<PodObject>> + Send + 'static {
    changes(Api::all_with(client, &objects::pods()), field_selector)
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
    let pods = Api::all_with(client.clone(), &objects::pods());
    let nodes = Api::all_with(client, &objects::nodes());
    (
        changes_read(pods, None, move |Slim(object)| pod(object)),
        changes_read(nodes, None, move |Slim(object)| node(object)),
    )
}

/// All nodes, or those that a field selector such as `metadata.name=n1` names.
pub fn nodes(client: kube::Client, field_selector: Option<&str>) -> impl Stream<Item = Change<NodeObject>> + Send + 'static {
    changes(Api::all_with(client, &objects::nodes()), field_selector)
}

/// gpushare's ConfigMaps `kube-system/unhealthy-gpu-<node>` (research/gpushare.md 1.4), and no other.
pub fn unhealthy_gpus(client: kube::Client) -> impl Stream<Item = Change<UnhealthyGpus>> + Send + 'static {
    let api: Api<ConfigMap> = Api::namespaced(client, legacy::UNHEALTHY_NAMESPACE);
    changes(api, None).filter_map(|change| futures::future::ready(named(change)))
}

fn named(change: Change<ConfigMap>) -> Option<Change<UnhealthyGpus>> {
    let read = |object: ConfigMap| convert::unhealthy_gpus(&object);
    Some(match change {
        Change::Apply(object) => Change::Apply(read(object)?),
        Change::Delete(object) => Change::Delete(read(object)?),
        Change::Reset(objects) => Change::Reset(objects.into_iter().filter_map(read).collect()),
        Change::Interrupted(why) => Change::Interrupted(why),
    })
}

/// What went wrong, without the whole of the API server's answer.
fn words(error: &watcher::Error) -> String {
    match error {
        watcher::Error::InitialListFailed(error) => format!("listing failed: {}", in_words(error)),
        watcher::Error::WatchStartFailed(error) | watcher::Error::WatchFailed(error) => in_words(error),
        watcher::Error::WatchError(status) => format!("{} ({} {})", status.message, status.code, status.reason),
        other => other.to_string(),
    }
}

fn changes<K>(api: Api<K>, field_selector: Option<&str>) -> impl Stream<Item = Change<K>> + Send + 'static
where
    K: kube::Resource + Clone + Debug + serde::de::DeserializeOwned + Send + 'static,
{
    changes_read(api, field_selector, |object| object)
}

fn changes_read<K, T>(
    api: Api<K>,
    field_selector: Option<&str>,
    read: impl Fn(K) -> T + Send + 'static,
) -> impl Stream<Item = Change<T>> + Send + 'static
where
    K: kube::Resource + Clone + Debug + serde::de::DeserializeOwned + Send + 'static,
    T: Send + 'static,
{
    // The default list asks for the most recent state (a quorum read): an old one could show memory as
    // free that is taken (research/reliability.md R13).
    let mut config = watcher::Config::default();
    if let Some(selector) = field_selector {
        config = config.fields(selector);
    }
    let what = api.resource_url().to_owned();
    let mut listed: Vec<T> = Vec::new();
    watcher(api, config).default_backoff().filter_map(move |event| {
        let change = match event {
            Ok(watcher::Event::Apply(object)) => Some(Change::Apply(read(object))),
            Ok(watcher::Event::Delete(object)) => Some(Change::Delete(read(object))),
            Ok(watcher::Event::Init) => {
                listed.clear();
                None
            }
            Ok(watcher::Event::InitApply(object)) => {
                listed.push(read(object));
                None
            }
            Ok(watcher::Event::InitDone) => Some(Change::Reset(std::mem::take(&mut listed))),
            Err(error) => Some(Change::Interrupted(interrupted(&what, &error))),
        };
        futures::future::ready(change)
    })
}
