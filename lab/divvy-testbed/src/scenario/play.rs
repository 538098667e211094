//! What every scenario does: create, wait, look, tell.

mod acts;
mod looks;

use std::io;
use std::time::Duration;

use divvy_kube::convert;
use divvy_kube::objects::{self, PodObject};
use divvy_model::{Held, names};
use kube::api::{Api, DeleteParams, DynamicObject, PostParams};
use kube::core::ApiResource;
use tokio::time::Instant;

use super::{Cluster, Report};
use crate::builders::{PodBuilder, pod};
use crate::story::{Event, Listener, Told};

pub(super) use looks::Seen;

/// How long something that must come may take. Generous: it is only waited out when something is wrong.
const PATIENCE: Duration = Duration::from_secs(60);

/// So much more for each node of a cluster that comes up at once: three programs start on each.
const PATIENCE_PER_NODE: Duration = Duration::from_secs(2);

/// The same for programs of Kubernetes whose API server was away. A watch of client-go (`NewReflectorWithOptions`) begins again after at most
/// 30 s, and as much again of jitter; and an API server that has just started refuses the first list of a client until it has read the roles.
const PATIENCE_WITH_CLIENT_GO: Duration = Duration::from_secs(150);

/// Where a play's pods are.
pub(super) const NAMESPACE: &str = "default";

/// Why a play could not go on.
#[derive(Debug, thiserror::Error)]
pub enum Stop {
    /// What must come did not.
    #[error("waited {} s for {what}; last seen: {seen}", patience.as_secs())]
    NeverCame {
        /// For how long.
        patience: Duration,
        /// What was waited for.
        what: String,
        /// What was there instead.
        seen: String,
    },
    /// The API server refused.
    #[error("{what}: {}", divvy_kube::in_words(source))]
    Api {
        /// What was tried.
        what: String,
        /// Its answer.
        #[source]
        source: Box<kube::Error>,
    },
    /// A program or socket of the cluster failed, or nobody listens.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// A scenario that is being played on a cluster.
pub struct Play<'a, C> {
    /// The cluster.
    pub cluster: &'a mut C,
    listener: &'a mut dyn Listener,
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
    /// Begins. `pause` is how long a reader gets after each scene's first line.
    pub fn new(cluster: &'a mut C, listener: &'a mut dyn Listener, pause: Duration) -> Self {
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

    /// Checks made, and how many of them failed.
    pub fn score(&self) -> (u64, u64) {
        (self.checks, self.failures)
    }

    pub(super) fn tell(&mut self, event: Event) -> Result<(), Stop> {
        self.seq += 1;
        let ms = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        Ok(self.listener.hear(&Told {
            seq: self.seq,
            ms,
            event,
        })?)
    }

    /// A new part of the story.
    pub async fn scene(&mut self, text: &str) -> Result<(), Stop> {
        tokio::time::sleep(self.pause).await;
        self.tell(Event::Scene { text: text.to_owned() })
    }

    /// Something happened.
    pub fn step(&mut self, what: &str, subject: &str, text: &str, details: Vec<String>) -> Result<(), Stop> {
        self.tell(Event::Step {
            what: what.to_owned(),
            subject: subject.to_owned(),
            text: text.to_owned(),
            details,
        })
    }

    /// Looks whether something is as it should be; tells, counts, and goes on.
    pub fn check(&mut self, ok: bool, text: &str, found: impl FnOnce() -> String) -> Result<bool, Stop> {
        self.checks += 1;
        self.failures += u64::from(!ok);
        self.tell(Event::Check {
            ok,
            text: text.to_owned(),
            found: (!ok).then(found),
        })?;
        Ok(ok)
    }

    /// The pods' API in a namespace.
    pub fn pods(&self, namespace: &str) -> Api<PodObject> {
        Api::namespaced_with(self.cluster.client(), namespace, &objects::pods())
    }

    /// Creates a pod and tells so.
    pub async fn create(&mut self, pod: &PodBuilder, text: &str) -> Result<PodObject, Stop> {
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

    /// A pod as it is.
    pub async fn get(&self, namespace: &str, name: &str) -> Result<PodObject, Stop> {
        self.pods(namespace)
            .get(name)
            .await
            .map_err(|source| stop_api(format!("pod {name} could not be read"), source))
    }

    /// Asks for a pod's deletion.
    pub async fn delete(&mut self, namespace: &str, name: &str, text: &str) -> Result<(), Stop> {
        let deleted = self.pods(namespace).delete(name, &DeleteParams::default()).await;
        deleted.map_err(|source| stop_api(format!("pod {name} could not be deleted"), source))?;
        self.step("deleted", &format!("{namespace}/{name}"), text, Vec::new())
    }

    /// Waits until `look` sees what must come. `look` answers `Err` with what is there instead.
    pub async fn eventually<T>(
        &self,
        what: &str,
        look: impl AsyncFnMut(&Self) -> Result<Result<T, String>, Stop>,
    ) -> Result<T, Stop> {
        self.within(PATIENCE, what, look).await
    }

    async fn within<T>(
        &self,
        patience: Duration,
        what: &str,
        mut look: impl AsyncFnMut(&Self) -> Result<Result<T, String>, Stop>,
    ) -> Result<T, Stop> {
        let until = Instant::now() + patience;
        loop {
            match look(self).await? {
                Ok(found) => return Ok(found),
                Err(seen) if Instant::now() > until => {
                    return Err(Stop::NeverCame {
                        patience,
                        what: what.to_owned(),
                        seen,
                    });
                }
                Err(_) => tokio::time::sleep(Duration::from_millis(15)).await,
            }
        }
    }

    /// Waits until Kubernetes itself, without Divvy, runs new pods on this node after its API server was away.
    pub async fn kubernetes_is_back(&mut self, node: &str) -> Result<(), Stop> {
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

    /// Waits until a pod is bound and every app container runs, and tells both, with what the containers report.
    pub async fn started(&mut self, namespace: &str, name: &str) -> Result<(PodObject, Vec<Report>), Stop> {
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
        let (pod, reports) = self
            .eventually(&format!("pod {subject} to run"), async |play| {
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
            .await?;
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
        self.step("started", &subject, "its container reports:", details)?;
        Ok((pod, reports))
    }

    /// `GPU 0 (NVIDIA …), 3072 MiB`, from the pod's allocation and the node's inventory.
    async fn describe_gpus(&self, object: &PodObject) -> Result<String, Stop> {
        let pod = convert::pod(object).map_err(|error| io::Error::other(error.to_string()))?;
        let Held::Allocation(allocation) = &pod.held else {
            return Ok(format!("without an allocation: {:?}", pod.held));
        };
        let node = divvy_kube::list::node(&self.cluster.client(), pod.node.as_deref().unwrap_or_default())
            .await
            .map_err(|error| io::Error::other(error.to_string()))?;
        let Some(Ok(inventory)) = node.inventory else {
            return Ok("whose node has no inventory".to_owned());
        };
        let gpus = allocation.gpus.iter().map(|share| match inventory.gpu(&share.uuid) {
            Some(gpu) => format!("GPU {} ({}): {} of {}", gpu.index, gpu.model, share.memory, gpu.total),
            None => format!("a GPU that the node has not ({})", share.uuid),
        });
        Ok(gpus.collect::<Vec<_>>().join(", "))
    }

    /// Waits until every node with an inventory offers all that its inventory says.
    pub async fn all_offered(&self) -> Result<(), Stop> {
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

    /// Waits until each of these nodes has joined and, if its machine has GPUs, offers all that its inventory says.
    pub async fn joined(&self, nodes: &[String]) -> Result<(), Stop> {
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

    /// What `divvy` prints with these arguments to standard output and standard error, and whether its status is 0.
    pub(super) async fn said(&self, args: &[&str]) -> io::Result<(String, String, bool)> {
        let output = self.cluster.divvy(args).output().await?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok((text(&output.stdout), text(&output.stderr), output.status.success()))
    }

    /// Runs `divvy` as a user would, shows what it printed, and gives it back.
    pub async fn run(&mut self, shown: &str, args: &[&str]) -> Result<String, Stop> {
        let (output, errors, ok) = self.said(args).await?;
        self.tell(Event::Command {
            text: shown.to_owned(),
            output: format!("{output}{errors}"),
        })?;
        if !ok {
            self.check(false, &format!("`{shown}` ends with status 0"), || errors)?;
        }
        Ok(output)
    }
}

/// What a pod's status says, in a line.
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

pub(super) fn stop_api(what: String, source: kube::Error) -> Stop {
    Stop::Api {
        what,
        source: Box::new(source),
    }
}
