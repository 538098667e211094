//! The states that a play reads and waits for.

use std::time::Duration;

use divvy_kube::objects::{NodeObject, PodObject};
use divvy_model::{Enforcement, Inventory, names};
use kube::api::{Api, ListParams};
use tokio::time::Instant;

use super::actions::offered;
use super::{NAMESPACE, Play, PlayStop, state, stop_api};
use crate::scenario::{Cluster, SelfReport};
use crate::story::StoryEvent;

/// How the program of a new pod took over the memory of an old pod's program.
#[derive(Debug, Clone, Copy)]
pub(in crate::scenario) struct HandedOver {
    /// Whether both programs ran at the same moment.
    pub(in crate::scenario) overlap: bool,
    /// Whether the new pod was bound while the old program was running.
    pub(in crate::scenario) early: bool,
    /// The time from the end of the old program to the start of the new one, as an observer outside sees it.
    pub(in crate::scenario) gap: Duration,
}

/// A pod UID, a container name, and the container's report.
pub(in crate::scenario) type SeenReport = (String, String, SelfReport);

impl<C: Cluster> Play<'_, C> {
    pub(in crate::scenario) async fn uid(&self, name: &str) -> Result<String, PlayStop> {
        Ok(self.get(NAMESPACE, name).await?.metadata.uid.unwrap_or_default())
    }

    pub(in crate::scenario) async fn all_pods(&self) -> Result<Vec<PodObject>, PlayStop> {
        let found = self.pods(NAMESPACE).list(&ListParams::default()).await;
        Ok(found.map_err(|source| stop_api("list of pods".to_owned(), source))?.items)
    }

    pub(in crate::scenario) async fn nodes(&self) -> Result<Vec<NodeObject>, PlayStop> {
        let nodes: Api<NodeObject> = Api::all_with(self.cluster.client(), &divvy_kube::objects::nodes());
        let found = nodes.list(&ListParams::default()).await;
        Ok(found.map_err(|source| stop_api("list of nodes".to_owned(), source))?.items)
    }

    /// Return a node's internal address, as tables print it.
    pub(in crate::scenario) async fn address(&self, node: &str) -> Result<String, PlayStop> {
        let nodes = self.nodes().await?;
        let found = nodes.into_iter().find(|object| object.metadata.name.as_deref() == Some(node));
        let addresses = found.and_then(|object| object.status).unwrap_or_default().addresses;
        let internal = addresses.into_iter().find(|address| address.kind == "InternalIP");
        Ok(internal.map(|address| address.address).unwrap_or_default())
    }

    /// Wait until a node's status offers this many units.
    pub(in crate::scenario) async fn offers(&self, node: &str, units: u64) -> Result<(), PlayStop> {
        let nodes: Api<NodeObject> = Api::all_with(self.cluster.client(), &divvy_kube::objects::nodes());
        self.eventually(&format!("node {node} to offer {units} units"), async |play| {
            Ok(match nodes.get(node).await {
                Ok(found) if offered(&found) == units.to_string() || (units == 0 && offered(&found) == "none") => Ok(()),
                Ok(found) => {
                    play.cluster.agent_runs(node)?;
                    Err(format!("{} units", offered(&found)))
                }
                Err(error) => Err(divvy_kube::in_words(&error)),
            })
        })
        .await
    }

    /// Wait until a node's status offers this amount of an extended resource.
    pub(in crate::scenario) async fn has(&self, node: &str, resource: &str, amount: u64) -> Result<(), PlayStop> {
        let nodes: Api<NodeObject> = Api::all_with(self.cluster.client(), &divvy_kube::objects::nodes());
        self.eventually(&format!("node {node} to offer {amount} of {resource}"), async |_| {
            let found = match nodes.get(node).await {
                Ok(found) => found.status.unwrap_or_default(),
                Err(error) => return Ok(Err(divvy_kube::in_words(&error))),
            };
            let offered = found.allocatable.get(resource).map_or("0", |amount| amount.0.as_str());
            Ok(if offered == amount.to_string() {
                Ok(())
            } else {
                Err(format!("it offers {offered}"))
            })
        })
        .await
    }

    /// Wait until shares of a node's GPUs are enforced in this way, or no longer.
    pub(in crate::scenario) async fn enforces(&mut self, node: &str, kind: Enforcement, expected: bool) -> Result<(), PlayStop> {
        self.eventually("what enforces shares", async |play| {
            let nodes = play.nodes().await?;
            let found = nodes.into_iter().find(|found| found.metadata.name.as_deref() == Some(node));
            let annotations = found.and_then(|found| found.metadata.annotations).unwrap_or_default();
            let text = annotations.get(names::INVENTORY).cloned().unwrap_or_default();
            let enforces = |inventory: Inventory| inventory.gpus.iter().any(|gpu| gpu.enforcement == Some(kind));
            Ok(match Inventory::parse(&text).map(enforces) {
                Ok(enforces) if enforces == expected => Ok(()),
                _ => Err(text),
            })
        })
        .await
    }

    /// Wait until `kubectl inspect gpushare` reports this many allocated units on a node, and check the result.
    pub(in crate::scenario) async fn used(&mut self, node: &str, units: u64) -> Result<(), PlayStop> {
        let line = format!("{units}/");
        // Sums of whole GPUs follow, without a percentage.
        let total = |output: &str| {
            let mut lines = output.lines().rev();
            lines
                .find(|line| line.contains("%)"))
                .unwrap_or_default()
                .trim_end()
                .to_owned()
        };
        let holds = |output: &str| total(output).starts_with(&line);
        let args = ["inspect", "gpushare", node];
        let output = self.until_said(&args, holds).await?;
        let total = total(&output);
        self.check(
            holds(&output),
            &format!("kubectl inspect gpushare {node} says {units} allocated: {total}"),
            || output.clone(),
        )?;
        Ok(())
    }

    /// Wait until the answer of `divvy why` about a pod contains every part, and show the answer. Each part is a check.
    pub(in crate::scenario) async fn why(&mut self, name: &str, parts: &[&str]) -> Result<(), PlayStop> {
        let holds = |output: &str| parts.iter().all(|part| output.contains(part));
        let output = self.until_said(&["why", name], holds).await?;
        self.tell(StoryEvent::Command {
            text: format!("kubectl divvy why {name}"),
            output: output.clone(),
        })?;
        for part in parts {
            self.check(output.contains(part), &format!("`why` says \"{part}\""), || output.clone())?;
        }
        Ok(())
    }

    /// Run `divvy` with these arguments until `holds` accepts its output, or until the time is up. Return the last output.
    async fn until_said(&self, args: &[&str], holds: impl Fn(&str) -> bool) -> Result<String, PlayStop> {
        let until = Instant::now() + Duration::from_secs(20);
        loop {
            let (output, errors, _) = self.run_divvy(args).await?;
            let said = format!("{output}{errors}");
            if holds(&said) || Instant::now() > until {
                return Ok(said);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Wait until the scheduler refuses a pod with a message that contains `part`, and tell the listener.
    pub(in crate::scenario) async fn refused(&mut self, name: &str, part: &str) -> Result<(), PlayStop> {
        let message = self
            .eventually(&format!("pod {name} to be refused with {part:?}"), async |play| {
                let pod = play.get(NAMESPACE, name).await?;
                let conditions = pod.status.clone().unwrap_or_default().conditions;
                let refused = conditions
                    .into_iter()
                    .find(|condition| condition.kind == "PodScheduled" && condition.status == "False");
                let text = refused
                    .and_then(|condition| condition.message)
                    .filter(|text| text.contains(part));
                Ok(text.ok_or_else(|| state(&pod)))
            })
            .await?;
        self.step("pending", &format!("{NAMESPACE}/{name}"), &message, Vec::new())
    }

    pub(in crate::scenario) async fn phase(&mut self, name: &str, phase: &str) -> Result<(), PlayStop> {
        let why = self
            .eventually(&format!("pod {name} to be {phase}"), async |play| {
                let pod = play.get(NAMESPACE, name).await?;
                let is = pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some(phase);
                Ok(if is { Ok(state(&pod)) } else { Err(state(&pod)) })
            })
            .await?;
        self.step(&phase.to_lowercase(), &format!("{NAMESPACE}/{name}"), &why, Vec::new())
    }

    /// Wait for an event about a pod, and tell the listener.
    pub async fn event(&mut self, pod: &str, reason: &str, part: &str) -> Result<(), PlayStop> {
        let text = self.event_text(pod, reason, part).await?;
        let about = format!("{NAMESPACE}/{pod}");
        self.step("event", &about, &format!("{reason}: {text}"), Vec::new())
    }

    /// Wait for an event about a node, and tell the listener.
    pub(in crate::scenario) async fn node_event(&mut self, node: &str, reason: &str, part: &str) -> Result<(), PlayStop> {
        let text = self.event_text(node, reason, part).await?;
        self.step("event", node, &format!("{reason}: {text}"), Vec::new())
    }

    /// Wait for an event about a pod or a node, which Kubernetes keeps in the same namespace.
    async fn event_text(&self, about: &str, reason: &str, part: &str) -> Result<String, PlayStop> {
        self.eventually(&format!("event {reason} about {about} with {part:?}"), async |play| {
            let mut texts = play.event_texts(about, reason).await?.into_iter();
            Ok(texts
                .find(|text| text.contains(part))
                .ok_or_else(|| "no such event".to_owned()))
        })
        .await
    }

    /// Return the texts of the events about a pod or a node that have this reason now.
    pub(in crate::scenario) async fn event_texts(&self, about: &str, reason: &str) -> Result<Vec<String>, PlayStop> {
        let events: Api<k8s_openapi::api::core::v1::Event> = Api::namespaced(self.cluster.client(), NAMESPACE);
        let of = ListParams::default().fields(&format!("involvedObject.name={about}"));
        let told = events.list(&of).await;
        let told = told.map_err(|source| stop_api("list of events".to_owned(), source))?;
        let of_reason = told.items.into_iter().filter(|event| event.reason.as_deref() == Some(reason));
        Ok(of_reason.filter_map(|event| event.message).collect())
    }

    /// Wait until a Deployment has `all` pods, of which `ready` are ready.
    pub(in crate::scenario) async fn replicas(&mut self, name: &str, all: i32, ready: i32) -> Result<(), PlayStop> {
        let deployments = self.deployments();
        self.eventually(&format!("{ready} of {all} replicas of {name} to be ready"), async |_| {
            let found = deployments
                .get(name)
                .await
                .map_err(|source| stop_api(format!("deployment {name}"), source))?;
            let status = found.status.unwrap_or_default();
            let is = (status.replicas.unwrap_or(0), status.ready_replicas.unwrap_or(0));
            Ok(if is == (all, ready) {
                Ok(())
            } else {
                Err(format!("{} of {} are ready", is.1, is.0))
            })
        })
        .await?;
        self.step(
            "ready",
            &format!("deployment {name}"),
            &format!("{ready} of {all} replicas"),
            Vec::new(),
        )
    }

    /// Return the report of every running app container.
    pub(in crate::scenario) async fn reports(&self) -> Result<Vec<SeenReport>, PlayStop> {
        let mut found = Vec::new();
        for pod in self.all_pods().await? {
            let uid = pod.metadata.uid.clone().unwrap_or_default();
            for container in &pod.spec.containers {
                let report = self.cluster.report(&uid, &container.name).await?;
                if let Some(report) = report.filter(|report| report.running) {
                    found.push((uid.clone(), container.name.clone(), report));
                }
            }
        }
        Ok(found)
    }

    /// Check that each of these programs still runs in the same container.
    pub(in crate::scenario) async fn unmoved(&mut self, before: &[SeenReport]) -> Result<(), PlayStop> {
        for (uid, container, then) in before {
            let now = self.cluster.report(uid, container).await?;
            if now.as_ref() != Some(then) {
                self.check(false, "every container kept running unchanged", || {
                    format!("{then:?}, then {now:?}")
                })?;
                return Ok(());
            }
        }
        let text = format!("every container kept running unchanged ({})", before.len());
        self.check(!before.is_empty(), &text, || "no container was running".to_owned())
            .map(drop)
    }

    /// Watch the old and the new program until the new one runs.
    pub(in crate::scenario) async fn hand_over(&mut self, old_uid: &str, new: &str) -> Result<HandedOver, PlayStop> {
        let new_uid = self.uid(new).await?;
        let mut ended = None;
        let mut early = false;
        self.eventually(&format!("the program of pod {new} to run"), async |play| {
            // The order of reads matters: if the new pod is seen bound or running first and the old program still runs afterwards, they overlap.
            let bound = play.get(NAMESPACE, new).await?.spec.node_name.is_some();
            let new_runs = play
                .cluster
                .report(&new_uid, "main")
                .await?
                .is_some_and(|report| report.running);
            let old_runs = play
                .cluster
                .report(old_uid, "main")
                .await?
                .is_some_and(|report| report.running);
            early |= bound && old_runs;
            if !old_runs && ended.is_none() {
                ended = Some(Instant::now());
            }
            Ok(if new_runs {
                Ok(HandedOver {
                    overlap: old_runs,
                    early,
                    gap: ended.map(|ended| ended.elapsed()).unwrap_or_default(),
                })
            } else {
                Err(format!(
                    "the old program {}",
                    if old_runs { "is running" } else { "has ended" }
                ))
            })
        })
        .await
    }

    /// Tell the listener a figure that the play measured.
    pub(in crate::scenario) fn measured(&mut self, text: &str) -> Result<(), PlayStop> {
        self.step("measured", text, "", Vec::new())
    }
}
