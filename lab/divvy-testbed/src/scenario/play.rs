//! The steps of every scenario: create, wait, read the state, and tell the listener.

mod actions;
mod reads;

use std::fmt::Display;
use std::io;
use std::time::Duration;

use divvy_kube::convert;
use divvy_kube::objects::{self, PodObject};
use divvy_model::{Held, names};
use kube::api::{Api, DeleteParams, DynamicObject, PostParams};
use kube::core::ApiResource;
use tokio::time::Instant;

use super::{Cluster, SelfReport};
use crate::builders::{PodBuilder, pod};
use crate::story::{StoryEvent, StoryListener, TimedEvent};

pub(super) use reads::SeenReport;

/// How long to wait for a required result. The limit is generous because only a failing play waits until the end.
const PATIENCE: Duration = Duration::from_secs(60);

/// The patience for each node, in addition to [`PATIENCE`], if a cluster starts all its nodes at once. Three programs per node
/// then start at the same time.
const PATIENCE_PER_NODE: Duration = Duration::from_secs(2);

/// The patience for Kubernetes' own programs after their API server was down. A watch of client-go (`NewReflectorWithOptions`) is retried
/// after at most 30 s plus the same again as jitter, and an API server that has just started refuses a client's first list until it has
/// read the roles.
const PATIENCE_WITH_CLIENT_GO: Duration = Duration::from_secs(150);

/// The namespace of a play's pods.
pub(super) const NAMESPACE: &str = "default";

/// The reason why a play could not go on.
#[derive(Debug, thiserror::Error)]
pub enum PlayStop {
    /// A required result did not come in time.
    #[error("waited {} s for {what}; last seen: {seen}", patience.as_secs())]
    NeverCame {
        /// How long the play waited.
        patience: Duration,
        /// What the play waited for.
        what: String,
        /// The last state that the play saw.
        seen: String,
    },
    /// The API server refused a request.
    #[error("{what}: {}", divvy_kube::in_words(source))]
    Api {
        /// The action that failed.
        what: String,
        /// The API server's answer.
        #[source]
        source: Box<kube::Error>,
    },
    /// A program or socket of the cluster failed, or the listener stopped listening.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// A scenario that is being played on a cluster.
pub struct Play<'a, C> {
    /// The cluster on which the scenario is played.
    pub cluster: &'a mut C,
    listener: &'a mut dyn StoryListener,
    began: Instant,
    pause: Duration,
    seq: u64,
    checks: u64,
    failures: u64,
}

impl<C> std::fmt::Debug for Play<'_, C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Play")
            .field("checks", &self.checks)
            .field("failures", &self.failures)
            .finish_non_exhaustive()
    }
}

impl<'a, C: Cluster> Play<'a, C> {
    /// Begin a play. `pause` is the time that a reader gets after the first line of each scene.
    pub fn new(cluster: &'a mut C, listener: &'a mut dyn StoryListener, pause: Duration) -> Self {
        Play {
            cluster,
            listener,
            began: Instant::now(),
            pause,
            seq: 0,
            checks: 0,
            failures: 0,
        }
    }

    /// Return the number of checks made, and how many of them failed.
    pub fn score(&self) -> (u64, u64) {
        (self.checks, self.failures)
    }

    pub(super) fn tell(&mut self, event: StoryEvent) -> Result<(), PlayStop> {
        self.seq += 1;
        let ms = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        Ok(self.listener.hear(&TimedEvent {
            seq: self.seq,
            ms,
            event,
        })?)
    }

    /// Tell the listener that a scene begins.
    pub async fn scene(&mut self, text: &str) -> Result<(), PlayStop> {
        tokio::time::sleep(self.pause).await;
        self.tell(StoryEvent::Scene { text: text.to_owned() })
    }

    /// Tell the listener that something happened.
    pub fn step(&mut self, what: &str, subject: &str, text: &str, details: Vec<String>) -> Result<(), PlayStop> {
        self.tell(StoryEvent::Step {
            what: what.to_owned(),
            subject: subject.to_owned(),
            text: text.to_owned(),
            details,
        })
    }

    /// Tell the listener whether a condition holds, and count the check. A failed check does not end the play.
    pub fn check(&mut self, ok: bool, text: &str, found: impl FnOnce() -> String) -> Result<bool, PlayStop> {
        self.checks += 1;
        self.failures += u64::from(!ok);
        self.tell(StoryEvent::Check {
            ok,
            text: text.to_owned(),
            found: (!ok).then(found),
        })?;
        Ok(ok)
    }

    /// Return the API of the pods in a namespace.
    pub fn pods(&self, namespace: &str) -> Api<PodObject> {
        Api::namespaced_with(self.cluster.client(), namespace, &objects::pods())
    }

    /// Create a pod and tell the listener.
    pub async fn create(&mut self, pod: &PodBuilder, text: &str) -> Result<PodObject, PlayStop> {
        let manifest = pod.build();
        let (namespace, name) = names_of(&manifest);
        let object: DynamicObject = serde_json::from_value(manifest).map_err(io::Error::from)?;
        let api: Api<DynamicObject> = Api::namespaced_with(
            self.cluster.client(),
            &namespace,
            &ApiResource::erase::<k8s_openapi::api::core::v1::Pod>(&()),
        );
        api.create(&PostParams::default(), &object)
            .await
            .map_err(|source| stop_api(format!("pod {name} could not be created"), source))?;
        self.step("created", &format!("{namespace}/{name}"), text, Vec::new())?;
        self.get(&namespace, &name).await
    }

    /// Return the current pod object.
    pub async fn get(&self, namespace: &str, name: &str) -> Result<PodObject, PlayStop> {
        self.pods(namespace)
            .get(name)
            .await
            .map_err(|source| stop_api(format!("pod {name} could not be read"), source))
    }

    /// Request a pod's deletion.
    pub async fn delete(&mut self, namespace: &str, name: &str, text: &str) -> Result<(), PlayStop> {
        let deleted = self.pods(namespace).delete(name, &DeleteParams::default()).await;
        deleted.map_err(|source| stop_api(format!("pod {name} could not be deleted"), source))?;
        self.step("deleted", &format!("{namespace}/{name}"), text, Vec::new())
    }

    /// Wait until `look` finds the required state. While the state is different, `look` returns it in `Err`.
    pub async fn eventually<T, Other: Display>(
        &self,
        what: &str,
        look: impl AsyncFnMut(&Self) -> Result<Result<T, Other>, PlayStop>,
    ) -> Result<T, PlayStop> {
        self.within(PATIENCE, what, look).await
    }

    async fn within<T, Other: Display>(
        &self,
        patience: Duration,
        what: &str,
        mut look: impl AsyncFnMut(&Self) -> Result<Result<T, Other>, PlayStop>,
    ) -> Result<T, PlayStop> {
        let until = Instant::now() + patience;
        loop {
            match look(self).await? {
                Ok(found) => return Ok(found),
                Err(seen) if Instant::now() > until => {
                    return Err(PlayStop::NeverCame {
                        patience,
                        what: what.to_owned(),
                        seen: seen.to_string(),
                    });
                }
                Err(_) => tokio::time::sleep(Duration::from_millis(15)).await,
            }
        }
    }

    /// Wait until Kubernetes itself, without Divvy, runs new pods on this node after its API server was down.
    pub async fn kubernetes_is_back(&mut self, node: &str) -> Result<(), PlayStop> {
        let began = Instant::now();
        self.create(&pod("ordinary").select(node), "asks for no GPU").await?;
        self.within(PATIENCE_WITH_CLIENT_GO, "pod ordinary to run", async |play| {
            let pod = play.get(NAMESPACE, "ordinary").await?;
            let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
            Ok(if phase == Some("Running") { Ok(()) } else { Err(state(&pod)) })
        })
        .await?;
        self.measured(&format!(
            "{} ms until kube-scheduler and kubelet run a pod without a GPU",
            began.elapsed().as_millis()
        ))?;
        self.delete_quietly("ordinary").await
    }

    /// Wait until a pod is bound and all its app containers run. Tell the listener of both, with the containers' reports.
    pub async fn started(&mut self, namespace: &str, name: &str) -> Result<(PodObject, Vec<SelfReport>), PlayStop> {
        let (pod, reports) = self.bound_and_running(namespace, name).await?;
        let interesting = [
            names::VISIBLE_DEVICES,
            names::ALIYUN_IDX,
            names::ALIYUN_POD,
            names::ALIYUN_CONTAINER,
            names::ALIYUN_DEV,
        ];
        let mut details = Vec::new();
        for report in &reports {
            details.extend(
                interesting
                    .iter()
                    .filter_map(|key| report.env.get(*key).map(|value| format!("{key}={value}"))),
            );
            details.push(format!("devices: {}", report.devices.join(" ")));
            if !report.mounts.is_empty() {
                details.push(format!("mounts: {}", report.mounts.join(" ")));
            }
        }
        self.step("started", &format!("{namespace}/{name}"), "its container reports:", details)?;
        Ok((pod, reports))
    }

    /// Wait until a pod is bound, tell the listener, and wait until all its app containers run.
    pub(super) async fn bound_and_running(
        &mut self,
        namespace: &str,
        name: &str,
    ) -> Result<(PodObject, Vec<SelfReport>), PlayStop> {
        let subject = format!("{namespace}/{name}");
        let bound = self
            .eventually(&format!("pod {subject} to be bound"), async |play| {
                let pod = play.get(namespace, name).await?;
                Ok(if pod.spec.node_name.is_some() {
                    Ok(pod)
                } else {
                    Err(state(&pod))
                })
            })
            .await?;
        let node = bound.spec.node_name.clone().unwrap_or_default();
        let gpu = self.describe_gpus(&bound).await?;
        self.step("bound", &subject, &format!("to node {node}, {gpu}"), Vec::new())?;
        self.eventually(&format!("pod {subject} to run"), async |play| {
            let pod = play.get(namespace, name).await?;
            if pod.status.as_ref().and_then(|status| status.phase.as_deref()) != Some("Running") {
                return Ok(Err(state(&pod)));
            }
            let uid = pod.metadata.uid.clone().unwrap_or_default();
            let mut reports = Vec::new();
            for container in &pod.spec.containers {
                match play.cluster.report(&uid, &container.name).await? {
                    Some(report) if report.running => reports.push(report),
                    other => return Ok(Err(format!("container {} reports {other:?}", container.name))),
                }
            }
            Ok(Ok((pod, reports)))
        })
        .await
    }

    /// Return for example `GPU 0 (NVIDIA …): 3072 MiB of 16384 MiB`, from the pod's allocation and the node's inventory.
    async fn describe_gpus(&self, object: &PodObject) -> Result<String, PlayStop> {
        let pod = convert::pod(object).map_err(|error| io::Error::other(error.to_string()))?;
        let Held::Allocation(allocation) = &pod.held else {
            return Ok(match &pod.held {
                Held::Nothing => "without an allocation by Divvy".to_owned(),
                held => format!("without an allocation: {held:?}"),
            });
        };
        let node = divvy_kube::list::node(&self.cluster.client(), pod.node.as_deref().unwrap_or_default())
            .await
            .map_err(|error| io::Error::other(error.to_string()))?;
        let Some(Ok(inventory)) = node.inventory else {
            return Ok("but the node has no inventory".to_owned());
        };
        let gpus = allocation.gpus.iter().map(|share| match inventory.gpu(&share.uuid) {
            Some(gpu) => format!("GPU {} ({}): {} of {}", gpu.index, gpu.model, share.memory, gpu.total),
            None => format!("a GPU that the node does not have ({})", share.uuid),
        });
        Ok(gpus.collect::<Vec<_>>().join(", "))
    }

    /// Wait until every node with an inventory offers all units that the inventory lists.
    pub async fn all_offered(&self) -> Result<(), PlayStop> {
        self.eventually("every node to offer its GPUs", async |play| {
            Ok(match divvy_kube::list::nodes(&play.cluster.client()).await {
                Err(error) => Err(error.to_string()),
                Ok(nodes) => {
                    let waiting = nodes.iter().find(|node| match &node.inventory {
                        Some(Ok(inventory)) => node.allocatable_units != inventory.total_units(),
                        Some(Err(_)) => true,
                        None => play.cluster.has_gpus(&node.name),
                    });
                    waiting.map_or(Ok(()), |node| {
                        Err(format!("node {} offers {} units", node.name, node.allocatable_units))
                    })
                }
            })
        })
        .await
    }

    /// Wait until each of these nodes has joined and, if its machine has GPUs, offers all units that its inventory lists.
    pub async fn joined(&self, nodes: &[String]) -> Result<(), PlayStop> {
        let count = u32::try_from(nodes.len()).unwrap_or(u32::MAX);
        let patience = PATIENCE.saturating_add(PATIENCE_PER_NODE.saturating_mul(count));
        let client = self.cluster.client();
        let mut waiting = nodes.iter();
        let mut next = waiting.next();
        let what = format!("{count} nodes to join and to offer their GPUs");
        self.within(patience, &what, async |play| {
            while let Some(name) = next {
                match divvy_kube::list::node(&client, name).await {
                    Err(error) => return Ok(Err(error.to_string())),
                    Ok(node) => {
                        let offers = match &node.inventory {
                            Some(Ok(inventory)) => node.allocatable_units == inventory.total_units(),
                            Some(Err(_)) => false,
                            None => !play.cluster.has_gpus(name),
                        };
                        if !offers {
                            play.cluster.agent_runs(name)?;
                            return Ok(Err(format!("node {name} offers {} units", node.allocatable_units)));
                        }
                    }
                }
                next = waiting.next();
            }
            Ok(Ok(()))
        })
        .await
    }

    /// Return what `divvy` prints with these arguments to standard output and to standard error, and whether its exit status is 0.
    pub(super) async fn run_divvy(&self, args: &[&str]) -> io::Result<(String, String, bool)> {
        let output = self.cluster.divvy(args).output().await?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok((text(&output.stdout), text(&output.stderr), output.status.success()))
    }

    /// Run `divvy` as a user would, show the output to the listener, and return it.
    pub async fn run(&mut self, shown: &str, args: &[&str]) -> Result<String, PlayStop> {
        let (output, errors, ok) = self.run_divvy(args).await?;
        self.tell(StoryEvent::Command {
            text: shown.to_owned(),
            output: format!("{output}{errors}"),
        })?;
        if !ok {
            self.check(false, &format!("`{shown}` ends with status 0"), || errors)?;
        }
        Ok(output)
    }
}

/// Return a one-line summary of a pod's status.
pub(super) fn state(pod: &PodObject) -> String {
    let status = pod.status.clone().unwrap_or_default();
    let mut text = status.phase.unwrap_or_else(|| "no phase".to_owned());
    for part in [status.reason, status.message].into_iter().flatten() {
        text = format!("{text}; {part}");
    }
    for condition in status.conditions.iter().filter(|condition| condition.status == "False") {
        text = format!(
            "{text}; {}: {}",
            condition.kind,
            condition.message.as_deref().unwrap_or_default()
        );
    }
    for container in &status.container_statuses {
        if let Some(waiting) = &container.state.waiting {
            let (reason, message) = (
                waiting.reason.as_deref().unwrap_or_default(),
                waiting.message.as_deref().unwrap_or_default(),
            );
            text = format!("{text}; {} waits: {reason} {message}", container.name);
        }
    }
    text
}

fn names_of(manifest: &serde_json::Value) -> (String, String) {
    let text = |key: &str| manifest["metadata"][key].as_str().unwrap_or_default().to_owned();
    (text("namespace"), text("name"))
}

pub(super) fn stop_api(what: String, source: kube::Error) -> PlayStop {
    PlayStop::Api {
        what,
        source: Box::new(source),
    }
}
