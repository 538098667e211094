//! The parts of a page that change, each of which an event replaces.

use maud::html;

use crate::frame::{self, Stream};
use crate::select::select;
use crate::{Address, History, Scene, card, cluster, node, pod, waiting};

/// A part of a page, by what it depends on.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Key {
    /// The sums of the cluster.
    Totals,
    /// The pods that wait.
    Waiting,
    /// A node, and what its agent measured.
    Node(String),
}

impl Key {
    /// Return the name of the events with this part.
    pub fn event(&self) -> &'static str {
        match self {
            Key::Totals => "totals",
            Key::Waiting => "waiting",
            Key::Node(_) => "node",
        }
    }
}

/// The parts of a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listing {
    /// The parts, in the order of the page.
    pub keys: Vec<Key>,
    /// A text that stays the same while the page has the same parts and the same frame. If it changes, the page must be loaded again.
    pub list: String,
}

/// Return the parts of a page. `None` if the page does not exist.
pub fn listing(scene: &Scene, address: &Address) -> Option<Listing> {
    let (keys, frame) = match address {
        Address::Cluster(filter) => {
            let selected = select(scene, filter);
            let nodes = selected.nodes.iter().map(|node| Key::Node(node.name.clone()));
            let keys = [Key::Totals, Key::Waiting].into_iter().chain(nodes).collect();
            (keys, (selected.count, selected.page))
        }
        Address::Node(name) => (vec![Key::Waiting, Key::Node(scene.node(name)?.name.clone())], (0, 0)),
        Address::Pod { namespace, name } => {
            let place = pod::find(scene, namespace, name)?;
            (vec![Key::Waiting, Key::Node(place.node.name.clone())], (0, 0))
        }
        Address::Waiting => (vec![Key::Waiting], (0, 0)),
    };
    let list = hash(&(&keys, frame));
    Some(Listing { keys, list })
}

/// Return a short text for a value. It is the same only within one run of the program.
fn hash(value: &impl std::hash::Hash) -> String {
    use std::hash::{DefaultHasher, Hasher as _};
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

/// Return a part of a page as HTML: elements with an id, each of which replaces the one that the page has. `None` if the page has no such part.
pub fn part(scene: &Scene, history: &History, address: &Address, key: &Key) -> Option<String> {
    let markup = match (key, address) {
        (Key::Totals, Address::Cluster(_)) => cluster::totals(scene),
        (Key::Waiting, Address::Waiting) => html! { (waiting::count(scene)) (waiting::list(scene)) },
        (Key::Waiting, _) => waiting::count(scene),
        (Key::Node(name), Address::Cluster(_)) => card::card(scene, scene.node(name)?),
        (Key::Node(name), Address::Node(_)) => node::section(scene, scene.node(name)?),
        (Key::Node(_), Address::Pod { namespace, name }) => {
            let place = pod::find(scene, namespace, name)?;
            pod::section(scene, history, &place, namespace, name)
        }
        (Key::Totals | Key::Node(_), _) => return None,
    };
    Some(markup.into_string())
}

/// Return a page as HTML. `version` is what the stream of its events continues from. `None` if the page does not exist.
pub fn page(scene: &Scene, history: &History, address: &Address, version: &str) -> Option<String> {
    let main = match address {
        Address::Cluster(filter) => cluster::page(scene, filter),
        Address::Node(name) => node::page(scene, scene.node(name)?),
        Address::Pod { namespace, name } => {
            let place = pod::find(scene, namespace, name)?;
            pod::page(scene, history, &place, namespace, name)
        }
        Address::Waiting => waiting::page(scene),
    };
    let mut query = form_urlencoded::Serializer::new(String::new());
    query.append_pair("at", &address.to_string());
    query.append_pair("list", &listing(scene, address)?.list);
    let stream = Stream {
        address: format!("/events?{}", query.finish()),
        since: version.to_owned(),
    };
    Some(frame::page(scene, address, &frame::title(address), &stream, &main))
}
