//! The loop's watches of pods, nodes, and namespaces: for each kind a list, then its changes.

use std::collections::BTreeMap;

use futures::StreamExt as _;
use futures::stream::BoxStream;
use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use kube::runtime::watcher;
use kube::{Api, Client};
use serde::de::DeserializeOwned;

/// A change of one object or of all objects.
pub(super) enum ObjectChange<K> {
    Apply(Box<K>),
    /// The object with this key is gone.
    Delete(String),
    /// All objects by key; any others are gone.
    List(BTreeMap<String, K>),
}

/// The result of a watch.
pub(super) enum WatchResult {
    Pods(ObjectChange<Pod>),
    Nodes(ObjectChange<Node>),
    Namespaces(ObjectChange<Namespace>),
    /// A part of a list that is not complete yet.
    Part,
    Failed(watcher::Error),
}

/// A watch that collects a list until it is complete.
struct ListWatch<K> {
    events: BoxStream<'static, watcher::Result<watcher::Event<K>>>,
    key: fn(&K) -> String,
    listing: Option<BTreeMap<String, K>>,
    known: bool,
}

impl<K> ListWatch<K>
where
    K: kube::Resource<DynamicType = ()> + DeserializeOwned + Clone + std::fmt::Debug + Send + 'static,
{
    fn new(client: Client, key: fn(&K) -> String) -> ListWatch<K> {
        ListWatch {
            events: watcher(Api::<K>::all(client), watcher::Config::default()).boxed(),
            key,
            listing: None,
            known: false,
        }
    }

    async fn next(&mut self, seen: fn(ObjectChange<K>) -> WatchResult) -> WatchResult {
        match self.events.next().await {
            Some(Ok(event)) => self.take(event).map_or(WatchResult::Part, seen),
            Some(Err(error)) => WatchResult::Failed(error),
            // A watch does not end.
            None => std::future::pending().await,
        }
    }

    fn take(&mut self, event: watcher::Event<K>) -> Option<ObjectChange<K>> {
        match event {
            watcher::Event::Init => self.listing = Some(BTreeMap::new()),
            watcher::Event::InitApply(object) => {
                if let Some(listing) = &mut self.listing {
                    listing.insert((self.key)(&object), object);
                }
            }
            watcher::Event::InitDone => {
                self.known = true;
                return self.listing.take().map(ObjectChange::List);
            }
            watcher::Event::Apply(object) => return Some(ObjectChange::Apply(Box::new(object))),
            watcher::Event::Delete(object) => return Some(ObjectChange::Delete((self.key)(&object))),
        }
        None
    }
}

/// All watches of the loop.
pub(super) struct Watches {
    pods: ListWatch<Pod>,
    nodes: ListWatch<Node>,
    namespaces: ListWatch<Namespace>,
}

impl Watches {
    pub(super) fn new(client: &Client) -> Watches {
        Watches {
            pods: ListWatch::new(client.clone(), super::uid_of),
            nodes: ListWatch::new(client.clone(), super::name_of),
            namespaces: ListWatch::new(client.clone(), super::name_of),
        }
    }

    /// Return the next result. Dropping the future loses nothing.
    pub(super) async fn next(&mut self) -> WatchResult {
        tokio::select! {
            biased;
            seen = self.pods.next(WatchResult::Pods) => seen,
            seen = self.nodes.next(WatchResult::Nodes) => seen,
            seen = self.namespaces.next(WatchResult::Namespaces) => seen,
        }
    }

    /// Report whether every list has been complete once.
    pub(super) fn known(&self) -> bool {
        self.pods.known && self.nodes.known && self.namespaces.known
    }
}
