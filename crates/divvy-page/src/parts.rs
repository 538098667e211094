//! The parts of a page that change, each of which an event replaces.

use maud::html;

use crate::frame::{self, PageStream};
use crate::select::select;
use crate::{ClusterScene, PageAddress, UsageHistory, card, cluster, node, pod, waiting};

/// A part of a page, by what it depends on.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum PartKey {
    /// The sums of the cluster.
    Totals,
    /// The pods that wait.
    Waiting,
    /// A node, and what its agent measured.
    Node(String),
}

impl PartKey {
    /// Return the name of the events with this part.
    pub fn event(&self) -> &'static str {
        match self {
            PartKey::Totals => "totals",
            PartKey::Waiting => "waiting",
            PartKey::Node(_) => "node",
        }
    }
}

/// The parts of a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageParts {
    /// The parts, in the order of the page.
    pub keys: Vec<PartKey>,
    /// A text that stays the same while the page has the same parts and the same frame. If it changes, the page must be loaded again.
    pub list: String,
}

/// Return the parts of a page. `None` if the page does not exist.
pub fn listing(scene: &ClusterScene, address: &PageAddress) -> Option<PageParts> {
    let (keys, frame) = match address {
        PageAddress::Cluster(filter) => {
            let selected = select(scene, filter);
            let nodes = selected.nodes.iter().map(|node| PartKey::Node(node.name.clone()));
            let keys = [PartKey::Totals, PartKey::Waiting].into_iter().chain(nodes).collect();
            (keys, (selected.count, selected.page))
        }
        PageAddress::Node(name) => (vec![PartKey::Waiting, PartKey::Node(scene.node(name)?.name.clone())], (0, 0)),
        PageAddress::Pod { namespace, name } => {
            let place = pod::find(scene, namespace, name)?;
            (vec![PartKey::Waiting, PartKey::Node(place.node.name.clone())], (0, 0))
        }
        PageAddress::Waiting => (vec![PartKey::Waiting], (0, 0)),
    };
    let list = hash(&(&keys, frame));
    Some(PageParts { keys, list })
}

/// Return a short text for a value. It is the same only within one run of the program.
fn hash(value: &impl std::hash::Hash) -> String {
    use std::hash::{DefaultHasher, Hasher as _};
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

/// Return a part of a page as HTML: elements with an id, each of which replaces the one that the page has. `None` if the page has no such part.
pub fn part(scene: &ClusterScene, history: &UsageHistory, address: &PageAddress, key: &PartKey) -> Option<String> {
    let markup = match (key, address) {
        (PartKey::Totals, PageAddress::Cluster(_)) => cluster::totals(scene),
        (PartKey::Waiting, PageAddress::Waiting) => html! { (waiting::count(scene)) (waiting::list(scene)) },
        (PartKey::Waiting, _) => waiting::count(scene),
        (PartKey::Node(name), PageAddress::Cluster(_)) => card::card(scene, scene.node(name)?),
        (PartKey::Node(name), PageAddress::Node(_)) => node::section(scene, scene.node(name)?),
        (PartKey::Node(_), PageAddress::Pod { namespace, name }) => {
            let place = pod::find(scene, namespace, name)?;
            pod::section(scene, history, &place, namespace, name)
        }
        (PartKey::Totals | PartKey::Node(_), _) => return None,
    };
    Some(markup.into_string())
}

/// Return a page as HTML. `version` is what the stream of its events continues from. `None` if the page does not exist.
pub fn page(scene: &ClusterScene, history: &UsageHistory, address: &PageAddress, version: &str) -> Option<String> {
    let main = match address {
        PageAddress::Cluster(filter) => cluster::page(scene, filter),
        PageAddress::Node(name) => node::page(scene, scene.node(name)?),
        PageAddress::Pod { namespace, name } => {
            let place = pod::find(scene, namespace, name)?;
            pod::page(scene, history, &place, namespace, name)
        }
        PageAddress::Waiting => waiting::page(scene),
    };
    let mut query = form_urlencoded::Serializer::new(String::new());
    query.append_pair("at", &address.to_string());
    query.append_pair("list", &listing(scene, address)?.list);
    let stream = PageStream {
        address: format!("/events?{}", query.finish()),
        since: version.to_owned(),
    };
    Some(frame::page(scene, address, &frame::title(address), &stream, &main))
}
