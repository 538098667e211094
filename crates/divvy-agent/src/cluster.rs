//! The agent's traffic with the API server: this node's pods, this node's annotation, and events.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use divvy_kube::events::{EventNote, Events, node_reference, pod_reference};
use divvy_kube::objects::{self, NodeObject, PodObject};
use divvy_kube::watch::{self, WatchChange};
use divvy_kube::{convert, in_words, list};
use divvy_model::{Inventory, Pod, names};
use futures::StreamExt;
use kube::Api;
use kube::api::{Patch, PatchParams};
use tokio::sync::mpsc;
use tracing::{debug, info, warn};

use crate::Error;
use crate::accounting::Accounting;
use crate::grants::Grants;
use crate::own_node::OwnNode;
use crate::own_pods::OwnPods;
use crate::pending_event::PendingEvent;
use crate::publishing::Publishing;
use crate::reports::Reports;

/// The timeout of one request.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How long after the agent's own write a watch may still show the earlier state.
const OWN_ECHO: Duration = Duration::from_secs(2);
const RETRY_FIRST: Duration = Duration::from_millis(200);
const RETRY_MAX: Duration = Duration::from_secs(30);

/// Follow this node's pods indefinitely.
pub(crate) async fn follow_pods(
    pods: Arc<OwnPods>,
    accounting: Arc<Accounting>,
    publishing: Arc<Publishing>,
    grants: Arc<Grants>,
) -> Result<(), Error> {
    let usage = accounting.usage();
    let changes = watch::pods(pods.client(), Some(pods.selector()));
    tokio::pin!(changes);
    while let Some(change) = changes.next().await {
        match change {
            WatchChange::Apply(object) => {
                usage.name(&object);
                if let Some(pod) = pod(&object) {
                    pods.apply(pod);
                }
            }
            WatchChange::Delete(object) => {
                let gone = object.metadata.uid.as_deref();
                usage.keep_names(|uid| Some(uid) != gone);
                pods.delete(gone.unwrap_or_default());
            }
            WatchChange::Reset(objects) => {
                let there: BTreeSet<&str> = objects.iter().filter_map(|object| object.metadata.uid.as_deref()).collect();
                usage.keep_names(|uid| there.contains(uid));
                objects.iter().for_each(|object| usage.name(object));
                pods.reset(objects.iter().filter_map(pod).collect());
            }
            WatchChange::Interrupted(text) => {
                pods.set_watched(Some(&text));
                continue;
            }
            WatchChange::Resumed => {
                pods.set_watched(None);
                continue;
            }
        }
        pods.set_watched(None);
        publishing.publish();
        pods.notify();
        grants.look_soon();
    }
    Err(Error::Ended {
        part: "the watch of pods",
        text: "its stream ended".to_owned(),
    })
}

/// Convert a pod. Return `None` for a pod that cannot be read. Such a pod does not request our resource, because the API
/// server validates quantities.
fn pod(object: &PodObject) -> Option<Pod> {
    match convert::pod(object) {
        Ok(pod) => Some(pod),
        Err(error) => {
            let name = object.metadata.name.as_deref().unwrap_or("?");
            warn!(pod = name, %error, "this pod cannot be read and is ignored");
            None
        }
    }
}

/// Read the node's inventory from the cluster. Return `None` if there is none, if it cannot be read, or if no answer comes in
/// time.
pub(crate) async fn inventory_before(client: &kube::Client, own: &OwnNode, node: &str, patience: Duration) -> Option<Inventory> {
    let answer = tokio::time::timeout(patience, list::node(client, node)).await;
    if let Ok(Ok(node)) = &answer {
        own.check(node);
    }
    match answer {
        Ok(Ok(node)) => match node.inventory {
            Some(Ok(inventory)) => Some(inventory),
            Some(Err(error)) => {
                info!(%error, "the node's inventory cannot be read; the agent replaces it");
                None
            }
            None => None,
        },
        Ok(Err(error)) => {
            warn!(%error, "the node's previous inventory is unknown");
            None
        }
        Err(_) => {
            warn!("the API server does not answer; the node's previous inventory is unknown");
            None
        }
    }
}

/// Keep the node's annotation equal to the core's inventory, and report the last written text through `written`. The agent watches the
/// node, because the node's object may be recreated and other clients may edit it.
pub(crate) async fn publish_inventory(
    client: kube::Client,
    own: Arc<OwnNode>,
    publishing: Arc<Publishing>,
    reports: Arc<Reports>,
    node: String,
    written: tokio::sync::watch::Sender<Arc<str>>,
) -> Result<(), Error> {
    let api: Api<NodeObject> = Api::all_with(client.clone(), &objects::nodes());
    let mut wanted = publishing.inventory.subscribe();
    let changes = watch::nodes(client, Some(&format!("metadata.name={node}")));
    tokio::pin!(changes);
    let mut wait = RETRY_FIRST;
    let mut done: Arc<str> = Arc::from("");
    let mut written_at = Instant::now();
    loop {
        let text = wanted.borrow_and_update().clone();
        if !text.is_empty() && text != done {
            match patch(&api, &node, &text).await {
                Ok(()) => {
                    debug!("wrote the node's inventory");
                    reports.ready.clear("inventory");
                    written.send_replace(text.clone());
                    written_at = Instant::now();
                    done = text;
                    wait = RETRY_FIRST;
                }
                Err(error) => {
                    let reason = format!(
                        "the annotation {} of node {node} could not be written: {error}",
                        names::INVENTORY
                    );
                    warn!("{reason}; trying again");
                    reports.ready.set("inventory", reason);
                    tokio::time::sleep(wait).await;
                    wait = (wait * 2).min(RETRY_MAX);
                    continue;
                }
            }
        }
        tokio::select! {
            changed = wanted.changed() => if changed.is_err() {
                return Ok(());
            },
            change = changes.next() => match change.inspect(|change| check_node(&own, change)) {
                Some(change) if !done.is_empty() && lacks(&change, &done) => {
                    // Right after a write, this is most likely the state before the write.
                    if written_at.elapsed() > OWN_ECHO {
                        info!("another client changed or removed the node's inventory; the agent writes it again");
                    }
                    reports.ready.clear("node");
                    done = Arc::from("");
                }
                Some(WatchChange::Interrupted(text)) => reports.ready.set(
                    "node",
                    format!("the watch of node {node} was interrupted, so the agent would not notice if its inventory were removed: {text}"),
                ),
                Some(_) => reports.ready.clear("node"),
                None => return Err(Error::Ended { part: "the watch of the node", text: "its stream ended".to_owned() }),
            },
        }
    }
}

fn check_node(own: &OwnNode, change: &WatchChange<NodeObject>) {
    let check = |object: &NodeObject| {
        own.check(&convert::node(object));
        let labels = Some(object.metadata.labels.clone().unwrap_or_default());
        own.labels.send_if_modified(|known| {
            let changed = *known != labels;
            *known = labels;
            changed
        });
    };
    match change {
        WatchChange::Apply(object) => check(object),
        WatchChange::Reset(objects) => objects.iter().for_each(check),
        WatchChange::Delete(_) | WatchChange::Interrupted(_) | WatchChange::Resumed => {}
    }
}

/// Report whether a change shows that the node's inventory differs from this text. An event from before the agent's own write
/// counts as well: the agent then writes the same text once more, which is harmless.
fn lacks(change: &WatchChange<NodeObject>, text: &str) -> bool {
    let differs = |object: &NodeObject| {
        let annotations = object.metadata.annotations.as_ref();
        annotations
            .and_then(|annotations| annotations.get(names::INVENTORY))
            .map(String::as_str)
            != Some(text)
    };
    match change {
        WatchChange::Apply(object) => differs(object),
        WatchChange::Reset(objects) => objects.iter().any(differs),
        // Without the node's object there is nothing to write to. A new object arrives as `Apply`.
        WatchChange::Delete(_) | WatchChange::Interrupted(_) | WatchChange::Resumed => false,
    }
}

/// Why an annotation was not written.
#[derive(Debug, thiserror::Error)]
enum PatchError {
    #[error("{}", in_words(.0))]
    Refused(#[source] kube::Error),
    #[error("the API server does not answer")]
    Late,
}

async fn patch(api: &Api<NodeObject>, node: &str, text: &str) -> Result<(), PatchError> {
    let patch = serde_json::json!({"metadata": {"annotations": {names::INVENTORY: text}}});
    let (params, patch) = (PatchParams::default(), Patch::Merge(&patch));
    let request = api.patch_metadata(node, &params, &patch);
    let answer = tokio::time::timeout(TIMEOUT, request).await;
    answer.map_err(|_| PatchError::Late)?.map_err(PatchError::Refused)?;
    Ok(())
}

/// Publish the events one after the other. An event that the API server does not accept appears only in the log.
pub(crate) async fn publish_events(
    client: kube::Client,
    node: String,
    mut queue: mpsc::Receiver<PendingEvent>,
) -> Result<(), Error> {
    let events = Events::new(client, "divvy-agent", Some(node.clone()));
    while let Some(PendingEvent {
        pod,
        warning,
        reason,
        text,
    }) = queue.recv().await
    {
        let regarding = match &pod {
            Some((pod, uid)) => pod_reference(&pod.namespace, &pod.name, uid),
            None => node_reference(&node),
        };
        let note = EventNote {
            warning,
            reason: reason.to_owned(),
            action: "Reconciling".to_owned(),
            text,
        };
        let about = pod.map_or_else(|| format!("node {node}"), |(pod, _)| format!("pod {pod}"));
        match tokio::time::timeout(TIMEOUT, events.publish(&regarding, note)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => warn!(about, reason, %error, "an event could not be published"),
            Err(_) => warn!(
                about,
                reason, "an event could not be published: the API server does not answer"
            ),
        }
    }
    Ok(())
}
