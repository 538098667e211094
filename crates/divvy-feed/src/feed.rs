use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use divvy_kube::{convert, watch};
use divvy_page::{ClusterScene, MeasuredUsage};
use divvy_view::{NoUsage, WaitingPod};
use divvy_web::PageHub;
use futures::StreamExt as _;
use tokio::sync::{mpsc, watch as signal};
use tokio::time::{Instant, sleep, sleep_until};

use crate::cluster::{KeptPod, WatchedCluster};
use crate::{Agents, waiting};

/// The time from a change to the page. Changes within it are shown together.
const SOON: Duration = Duration::from_millis(200);
/// The shortest pause after a computation or a read, as a multiple of the time that it took.
const REST: u32 = 5;
/// How often the agents are asked whose nodes are on an open page, and how often it is checked which nodes these are.
const AGENTS: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(500);
/// How often the other agents are asked, so that pods have a history, and in how large a cluster.
const HISTORY: Duration = Duration::from_secs(60);
const SMALL: usize = 64;
/// After this time, an answer says nothing about now.
const STALE_S: u64 = 75;
/// How often the reasons are read again for which pods wait, while a page is open.
const REASONS: Duration = Duration::from_secs(30);
/// How long agents are not asked after an answer that the right is missing.
const FORBIDDEN: Duration = Duration::from_secs(60);

/// What the other tasks found.
enum FeedUpdate {
    Usage(String, Result<divvy_model::usage::Usage, NoUsage>),
    Waiting(Vec<WaitingPod>, Option<String>),
}

/// Show the cluster on the pages, and every change of it, as long as the future is polled.
pub async fn feed(client: kube::Client, hub: Arc<PageHub>) {
    let node = |object| convert::node(&object);
    let (pods, nodes) = watch::read(client.clone(), KeptPod::from, node);
    let (mut pods, mut nodes) = (pin!(pods), pin!(nodes));
    let (found, mut coming) = mpsc::channel(16);
    let (names, known) = signal::channel(BTreeSet::new());
    let (reasons, asked) = signal::channel(BTreeSet::new());
    let mut agents = pin!(ask_agents(client.clone(), hub.clone(), known, found.clone()));
    let mut explainer = pin!(explain(client, hub.clone(), asked, found));
    let mut shown = SceneParts::default();
    let mut due: Option<Instant> = None;
    let mut pause = SOON;
    loop {
        let at = due.unwrap_or_else(Instant::now);
        tokio::select! {
            () = &mut agents => return,
            () = &mut explainer => return,
            Some(change) = pods.next() => {
                shown.cluster.take_pods(change);
                let waiting = shown.cluster.waiting();
                reasons.send_if_modified(|known| {
                    let is_other = known != waiting;
                    if is_other {
                        known.clone_from(waiting);
                    }
                    is_other
                });
            }
            Some(change) = nodes.next() => shown.cluster.take_nodes(change),
            Some(found) = coming.recv() => shown.take(found, now()),
            () = sleep_until(at), if due.is_some() => {
                due = None;
                let begun = Instant::now();
                let scene = shown.scene(now());
                let all = scene.view.nodes.iter().map(|node| node.name.clone()).collect();
                names.send_if_modified(|known| std::mem::replace(known, all) != *known);
                hub.show(scene);
                pause = SOON.max(begun.elapsed().saturating_mul(REST));
                continue;
            }
        }
        // A page that shows half of the pods would show the memory of the others as free.
        if due.is_none() && shown.cluster.is_listed() {
            due = Some(Instant::now() + pause);
        }
    }
}

/// All that a scene is made of.
#[derive(Default)]
struct SceneParts {
    cluster: WatchedCluster,
    answers: BTreeMap<String, MeasuredUsage>,
    /// Why agents cannot be asked.
    refused: Option<String>,
    waiting: Vec<WaitingPod>,
    /// What is not known of the waiting pods.
    unknown: Option<String>,
}

impl SceneParts {
    fn take(&mut self, found: FeedUpdate, at: u64) {
        match found {
            FeedUpdate::Usage(node, answer) => {
                let notice = answer.as_ref().err().and_then(NoUsage::notice);
                if notice.is_none() {
                    self.answers.insert(node, MeasuredUsage { at, usage: answer });
                }
                self.refused = notice;
            }
            FeedUpdate::Waiting(waiting, unknown) => (self.waiting, self.unknown) = (waiting, unknown),
        }
    }

    fn scene(&mut self, at: u64) -> ClusterScene {
        let view = self.cluster.view();
        let is_there = |name: &str| view.nodes.binary_search_by(|node| node.name.as_str().cmp(name)).is_ok();
        self.answers
            .retain(|name, answer| at.saturating_sub(answer.at) <= STALE_S && is_there(name));
        let notices = self.cluster.notices();
        let others = [&self.refused, &self.unknown]
            .into_iter()
            .flatten()
            .map(|text| sentence(text));
        ClusterScene {
            at,
            notices: notices.chain(others).collect(),
            view,
            answers: self.answers.clone(),
            waiting: self.waiting.clone(),
        }
    }
}

/// Return a clause as a sentence.
fn sentence(clause: &str) -> String {
    let mut letters = clause.chars();
    let first = letters.next().into_iter().flat_map(char::to_uppercase);
    let end = if clause.ends_with('.') { "" } else { "." };
    first.chain(letters).chain(end.chars()).collect()
}

fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

/// Ask the agents of the nodes on open pages. In a small cluster, ask the agents of all other nodes once a minute. The future ends when the receiver of the
/// answers is dropped.
async fn ask_agents(
    client: kube::Client,
    hub: Arc<PageHub>,
    nodes: signal::Receiver<BTreeSet<String>>,
    found: mpsc::Sender<FeedUpdate>,
) {
    let agents = Agents::new(client);
    let mut asked: BTreeMap<String, Instant> = BTreeMap::new();
    loop {
        let wanted = hub.wanted();
        let all = nodes.borrow().clone();
        asked.retain(|node, _| all.contains(node));
        let is_due = |node: &&String| {
            let every = match wanted.contains(*node) {
                true => AGENTS,
                false if all.len() <= SMALL => HISTORY,
                false => return false,
            };
            asked.get(*node).is_none_or(|at| at.elapsed() >= every)
        };
        let due: Vec<String> = all.iter().filter(is_due).cloned().collect();
        asked.extend(due.iter().map(|node| (node.clone(), Instant::now())));
        let mut is_forbidden = false;
        let mut answers = pin!(agents.ask(due));
        while let Some((node, answer)) = answers.next().await {
            is_forbidden |= answer.as_ref().err().and_then(NoUsage::notice).is_some();
            if found.send(FeedUpdate::Usage(node, answer)).await.is_err() {
                return;
            }
            if is_forbidden {
                break;
            }
        }
        sleep(if is_forbidden { FORBIDDEN } else { LOOK }).await;
    }
}

/// Find out why pods wait: each time the set of waiting pods changes, and every 30 s while a page is open. The future ends when the receiver of the
/// answers is dropped.
async fn explain(
    client: kube::Client,
    hub: Arc<PageHub>,
    mut pods: signal::Receiver<BTreeSet<String>>,
    found: mpsc::Sender<FeedUpdate>,
) {
    loop {
        let none = pods.borrow_and_update().is_empty();
        let begun = Instant::now();
        // Reading the whole cluster is expensive for the API server.
        let (waiting, unknown) = if none {
            (Vec::new(), None)
        } else {
            waiting(&client, now()).await
        };
        if found.send(FeedUpdate::Waiting(waiting, unknown)).await.is_err() {
            return;
        }
        sleep(SOON.max(begun.elapsed().saturating_mul(REST))).await;
        tokio::select! {
            changed = pods.changed() => if changed.is_err() { return },
            () = sleep(REASONS) => {}
        }
        while !hub.is_watched() {
            sleep(LOOK).await;
        }
    }
}
