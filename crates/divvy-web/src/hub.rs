//! The scene that is shown now, and what changed in which version.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher as _, DefaultHasher, Hash as _, Hasher as _, RandomState};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use divvy_page::{ClusterScene, Filter, MeasuredUsage, PageAddress, PageParts, PartKey, UsageHistory, listing, page, part};
use divvy_view::NodeView;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::version::SceneVersion;

/// For how long after a page was rendered its nodes are wanted.
const WANTED: Duration = Duration::from_secs(60);

/// What all pages and streams are made of. Each change of the scene has a version; [`PageHub::show`] finds out which parts changed in it.
#[derive(Debug)]
pub struct PageHub {
    state: RwLock<HubState>,
    newest: watch::Sender<u64>,
    asked: RwLock<WantedNodes>,
}

#[derive(Debug)]
struct HubState {
    scene: ClusterScene,
    history: UsageHistory,
    /// A number for this run of the program: the versions of another run mean nothing here.
    run: u64,
    version: u64,
    /// The version in which a part changed last.
    changed: BTreeMap<String, u64>,
    totals: SeenPart,
    waiting: SeenPart,
}

/// What is different in a new scene.
struct SceneDifference {
    nodes: Vec<String>,
    totals: SeenPart,
    waiting: SeenPart,
}

/// A part that is compared by what it looks like.
#[derive(Debug, Default, Clone, Copy)]
struct SeenPart {
    hash: u64,
    changed: u64,
}

/// Which nodes are wanted.
#[derive(Debug, Default)]
struct WantedNodes {
    rendered: BTreeMap<String, Instant>,
    /// When any page was rendered last.
    last: Option<Instant>,
    followed: BTreeMap<u64, Vec<String>>,
    next: u64,
}

impl Default for PageHub {
    fn default() -> PageHub {
        PageHub::new()
    }
}

impl PageHub {
    /// Make a hub that shows an empty cluster.
    pub fn new() -> PageHub {
        let run = RandomState::new().build_hasher().finish();
        PageHub {
            state: RwLock::new(HubState {
                scene: ClusterScene::default(),
                history: UsageHistory::default(),
                run,
                version: 0,
                changed: BTreeMap::new(),
                totals: SeenPart::default(),
                waiting: SeenPart::default(),
            }),
            newest: watch::Sender::new(0),
            asked: RwLock::new(WantedNodes::default()),
        }
    }

    /// Show this scene from now on. While it is compared with the scene before, pages can be rendered. Only one thread may call this at a time: between the
    /// comparison and the replacement, another call could replace the scene.
    pub fn show(&self, scene: ClusterScene) {
        let compared = self.read().compared(&scene);
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        let before = state.show(scene, compared);
        let version = state.version;
        drop(state);
        self.newest.send_replace(version);
        // Dropping a large scene takes time. No page waits for it here, without the lock.
        drop(before);
    }

    fn read(&self) -> RwLockReadGuard<'_, HubState> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Return the nodes on pages that were rendered in the last minute, or that a stream follows: the nodes whose agents should be asked.
    pub fn wanted(&self) -> BTreeSet<String> {
        let mut asked = self.asked.write().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        asked.rendered.retain(|_, at| now.duration_since(*at) < WANTED);
        let followed = asked.followed.values().flatten();
        asked.rendered.keys().chain(followed).cloned().collect()
    }

    /// Report whether a page was rendered in the last minute, or a stream follows one.
    pub fn is_watched(&self) -> bool {
        let asked = self.asked.read().unwrap_or_else(PoisonError::into_inner);
        !asked.followed.is_empty() || asked.last.is_some_and(|at| at.elapsed() < WANTED)
    }

    /// Report whether there is a scene to show.
    pub(crate) fn has_scene(&self) -> bool {
        self.read().version > 0
    }

    /// Return a page. `None` if it does not exist.
    pub(crate) fn page(&self, address: &PageAddress) -> Option<String> {
        let state = self.read();
        let page = page(&state.scene, &state.history, address, &state.now().to_string())?;
        let nodes = listing(&state.scene, address).map(nodes).unwrap_or_default();
        drop(state);
        let mut asked = self.asked.write().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        asked.rendered.retain(|_, at| now.duration_since(*at) < WANTED);
        asked.last = Some(now);
        asked.rendered.extend(nodes.into_iter().map(|node| (node, now)));
        Some(page)
    }

    /// Return the receiver of new versions.
    pub(crate) fn versions(&self) -> watch::Receiver<u64> {
        self.newest.subscribe()
    }

    /// Return the parts of a page that changed after a version, and the version now. `None` if the page must be loaded again: it has other parts than the
    /// client's (`list`), or the version is not one of this run.
    pub(crate) fn changes(&self, address: &PageAddress, list: &str, since: SceneVersion) -> Option<(Vec<PartKey>, SceneVersion)> {
        let state = self.read();
        let now = state.now();
        let listing = listing(&state.scene, address).filter(|listing| listing.list == list)?;
        if since.run != now.run || since.number > now.number {
            return None;
        }
        let changed = |key: &PartKey| state.changed(key) > since.number;
        Some((listing.keys.into_iter().filter(changed).collect(), now))
    }

    /// Return a part of a page as it is now.
    pub(crate) fn part(&self, address: &PageAddress, key: &PartKey) -> Option<String> {
        let state = self.read();
        part(&state.scene, &state.history, address, key)
    }

    /// Follow the nodes of a page until the result is dropped.
    pub(crate) fn follow(self: &Arc<PageHub>, address: &PageAddress) -> Followed {
        let state = self.read();
        let nodes = listing(&state.scene, address).map(nodes).unwrap_or_default();
        drop(state);
        let mut asked = self.asked.write().unwrap_or_else(PoisonError::into_inner);
        let id = asked.next;
        asked.next += 1;
        asked.followed.insert(id, nodes);
        Followed { hub: self.clone(), id }
    }
}

/// A stream's interest in the nodes of its page.
#[derive(Debug)]
pub(crate) struct Followed {
    hub: Arc<PageHub>,
    id: u64,
}

impl Drop for Followed {
    fn drop(&mut self) {
        self.hub
            .asked
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .followed
            .remove(&self.id);
    }
}

fn nodes(listing: PageParts) -> Vec<String> {
    let node = |key| match key {
        PartKey::Node(name) => Some(name),
        PartKey::Totals | PartKey::Waiting => None,
    };
    listing.keys.into_iter().filter_map(node).collect()
}

impl HubState {
    fn now(&self) -> SceneVersion {
        SceneVersion {
            run: self.run,
            number: self.version,
        }
    }

    fn changed(&self, key: &PartKey) -> u64 {
        match key {
            PartKey::Totals => self.totals.changed,
            PartKey::Waiting => self.waiting.changed,
            PartKey::Node(name) => self.changed.get(name).copied().unwrap_or(0),
        }
    }

    /// Find out which parts of a scene look different from the one that is shown.
    fn compared(&self, scene: &ClusterScene) -> SceneDifference {
        let version = self.version + 1;
        let old = &self.scene;
        let is_same = |node: &NodeView| looks(old, old.node(&node.name)) == looks(scene, Some(node));
        let hash = |address, key| {
            let mut hasher = DefaultHasher::new();
            part(scene, &self.history, &address, &key).hash(&mut hasher);
            hasher.finish()
        };
        SceneDifference {
            nodes: scene
                .view
                .nodes
                .iter()
                .filter(|node| !is_same(node))
                .map(|node| node.name.clone())
                .collect(),
            totals: self
                .totals
                .next(hash(PageAddress::Cluster(Filter::default()), PartKey::Totals), version),
            waiting: self.waiting.next(hash(PageAddress::Waiting, PartKey::Waiting), version),
        }
    }

    /// Show a scene, and return the one before.
    fn show(&mut self, scene: ClusterScene, compared: SceneDifference) -> ClusterScene {
        self.version += 1;
        let old = std::mem::replace(&mut self.scene, scene);
        self.history.record(&self.scene);
        let scene = &self.scene;
        self.changed.retain(|name, _| scene.node(name).is_some());
        self.changed
            .extend(compared.nodes.into_iter().map(|name| (name, self.version)));
        (self.totals, self.waiting) = (compared.totals, compared.waiting);
        old
    }
}

/// Return what a node looks like, without the number of the sample and the time of the answer, which change each time. A minute is a change: the last hour has
/// another point.
fn looks<'s>(scene: &'s ClusterScene, node: Option<&'s NodeView>) -> impl PartialEq + 's {
    let answer = node.and_then(|node| scene.answers.get(&node.name));
    let usage = |answer: &'s MeasuredUsage| {
        let usage = answer.usage.as_ref();
        (answer.at / 60, usage.map(|usage| (usage.v, &usage.gpus, &usage.containers)))
    };
    (node, answer.map(usage))
}

impl SeenPart {
    fn next(self, hash: u64, version: u64) -> SeenPart {
        if self.hash == hash && self.changed > 0 {
            self
        } else {
            SeenPart { hash, changed: version }
        }
    }
}
