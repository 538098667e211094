//! The actions of a play on a cluster.

use std::io;
use std::time::Duration;

use divvy_kube::objects;
use divvy_model::names;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::Client;
use kube::api::{Api, DeleteParams, EvictParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::{NAMESPACE, Play, PlayStop, state, stop_api};
use crate::builders::{PodBuilder, pod};
use crate::scenario::{Cluster, ClusterProgram, End, PluginSetup, TestbedMachine};

/// How many guest pods were created, and how many of them ran.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::scenario) struct Guests {
    pub(in crate::scenario) created: u64,
    /// Pods that were seen running before they were deleted.
    pub(in crate::scenario) ran: u64,
}

/// A background task that creates and deletes pods while the play does something else.
#[derive(Debug)]
pub(in crate::scenario) struct BackgroundLoad {
    token: CancellationToken,
    task: JoinHandle<kube::Result<Guests>>,
}

impl BackgroundLoad {
    /// Stop the task and return its counts.
    pub(in crate::scenario) async fn finish(self) -> Result<Guests, PlayStop> {
        self.token.cancel();
        let made = self.task.await.map_err(io::Error::other)?;
        made.map_err(|source| stop_api("a pod could not be created or deleted".to_owned(), source))
    }
}

impl<C: Cluster> Play<'_, C> {
    /// Let a machine's node join, wait until it offers everything that the machine has, and return the node's name.
    pub(in crate::scenario) async fn ready(&mut self, machine: TestbedMachine) -> Result<String, PlayStop> {
        let missing = || io::Error::new(io::ErrorKind::NotFound, format!("this cluster has no node like {machine:?}"));
        let node = self.cluster.node_of(machine).ok_or_else(missing)?;
        self.cluster.join(&node).await?;
        self.offers(&node, machine.units()).await?;
        Ok(node)
    }

    /// Run `nvidia-device-plugin` on a node in place of the agent, or change its configuration.
    pub(in crate::scenario) async fn run_plugin(&mut self, node: &str, plugin: PluginSetup<'_>) -> Result<(), PlayStop> {
        self.cluster.run_plugin(node, Some(plugin)).await?;
        let lines = plugin.config.trim().lines().map(str::to_owned).collect();
        self.step("configured", node, "nvidia-device-plugin has this configuration:", lines)
    }

    /// Run the agent again on a node that is left without pods, and wait until it offers everything that its machine has.
    pub(in crate::scenario) async fn run_agent(&mut self, node: &str, machine: TestbedMachine) -> Result<(), PlayStop> {
        self.delete_all().await?;
        self.cluster.run_plugin(node, None).await?;
        self.offers(node, machine.units()).await?;
        self.step("restored", node, "divvy agent runs again", Vec::new())
    }

    /// Kill a program and start it again.
    pub(in crate::scenario) async fn kill_and_start(&mut self, part: ClusterProgram<'_>, name: &str) -> Result<(), PlayStop> {
        self.cluster.stop(part, End::Killed).await?;
        self.step("killed", name, "", Vec::new())?;
        self.cluster.start(part).await?;
        self.step("started", name, "", Vec::new())
    }

    /// Remove the pods and cordons that an interrupted play left behind.
    pub async fn begin(&mut self) -> Result<(), PlayStop> {
        for node in self.nodes().await? {
            if node.spec.unschedulable {
                self.cordon(&node.metadata.name.unwrap_or_default(), false).await?;
            }
        }
        self.clear().await
    }

    /// Create a pod without telling the listener.
    pub(in crate::scenario) async fn create_quietly(&self, pod: &PodBuilder) -> Result<(), PlayStop> {
        create(&self.cluster.client(), &pod.build())
            .await
            .map_err(|source| stop_api("a pod could not be created".to_owned(), source))
    }

    /// Delete a pod without telling the listener, and wait until it is gone.
    pub(in crate::scenario) async fn delete_quietly(&self, name: &str) -> Result<(), PlayStop> {
        let pods = self.pods(NAMESPACE);
        let deleted = pods.delete(name, &DeleteParams::default()).await;
        deleted.map_err(|source| stop_api(format!("pod {name} could not be deleted"), source))?;
        self.eventually(&format!("pod {name} to be gone"), async |_| {
            let found = pods
                .get_opt(name)
                .await
                .map_err(|source| stop_api(format!("pod {name}"), source))?;
            Ok(found.map_or(Ok(()), |pod| Err(state(&pod))))
        })
        .await
    }

    /// Create a Deployment with this pod as its template.
    pub(in crate::scenario) async fn create_deployment(
        &mut self,
        name: &str,
        replicas: u32,
        pod: &PodBuilder,
    ) -> Result<(), PlayStop> {
        let labels = json!({"app": name});
        let deployment = json!({
            "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {"replicas": replicas, "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod.build()["spec"]}},
        });
        let deployment = serde_json::from_value(deployment).map_err(io::Error::from)?;
        let created = self.deployments().create(&PostParams::default(), &deployment).await;
        created.map_err(|source| stop_api(format!("deployment {name} could not be created"), source))?;
        self.step(
            "created",
            &format!("deployment {name}"),
            &format!("{replicas} replicas"),
            Vec::new(),
        )
    }

    pub(in crate::scenario) async fn scale(&mut self, name: &str, replicas: u32) -> Result<(), PlayStop> {
        let patch = Patch::Merge(json!({"spec": {"replicas": replicas}}));
        let patched = self.deployments().patch(name, &PatchParams::default(), &patch).await;
        patched.map_err(|source| stop_api(format!("deployment {name} could not be scaled"), source))?;
        self.step(
            "scaled",
            &format!("deployment {name}"),
            &format!("to {replicas} replicas"),
            Vec::new(),
        )
    }

    pub(in crate::scenario) fn deployments(&self) -> Api<Deployment> {
        Api::namespaced(self.cluster.client(), NAMESPACE)
    }

    /// Delete a pod as `kubectl delete --force --grace-period=0` does.
    pub(in crate::scenario) async fn force_delete(&mut self, name: &str) -> Result<(), PlayStop> {
        let deleted = self
            .pods(NAMESPACE)
            .delete(name, &DeleteParams::default().grace_period(0))
            .await;
        deleted.map_err(|source| stop_api(format!("pod {name} could not be deleted"), source))?;
        self.step("deleted", &format!("{NAMESPACE}/{name}"), "by force", Vec::new())
    }

    pub(in crate::scenario) async fn cordon(&mut self, node: &str, cordoned: bool) -> Result<(), PlayStop> {
        let nodes: Api<Node> = Api::all(self.cluster.client());
        let patch = Patch::Merge(json!({"spec": {"unschedulable": cordoned}}));
        let patched = nodes.patch(node, &PatchParams::default(), &patch).await;
        patched.map_err(|source| stop_api(format!("node {node} could not be cordoned"), source))?;
        let what = if cordoned { "cordoned" } else { "uncordoned" };
        self.step(what, node, "", Vec::new())
    }

    /// Set a label of a node, or remove it.
    pub(in crate::scenario) async fn label(&mut self, node: &str, key: &str, value: Option<&str>) -> Result<(), PlayStop> {
        let nodes: Api<Node> = Api::all(self.cluster.client());
        let patch = Patch::Merge(json!({"metadata": {"labels": {key: value}}}));
        let patched = nodes.patch(node, &PatchParams::default(), &patch).await;
        patched.map_err(|source| stop_api(format!("node {node} could not be labelled"), source))?;
        let text = value.map_or_else(|| format!("{key}-"), |value| format!("{key}={value}"));
        self.step("labelled", node, &text, Vec::new())
    }

    /// Evict the play's pods from a node, as `kubectl drain` does, and return how many there were.
    pub(in crate::scenario) async fn evict_all(&mut self, node: &str) -> Result<usize, PlayStop> {
        let pods: Api<Pod> = Api::namespaced(self.cluster.client(), NAMESPACE);
        let on_node = ListParams::default().fields(&format!("spec.nodeName={node}"));
        let found = pods
            .list(&on_node)
            .await
            .map_err(|source| stop_api("list of pods".to_owned(), source))?;
        for pod in &found.items {
            let name = pod.metadata.name.clone().unwrap_or_default();
            let evicted = pods.evict(&name, &EvictParams::default()).await;
            evicted.map_err(|source| stop_api(format!("pod {name} could not be evicted"), source))?;
        }
        self.step("evicted", &format!("{} pods of {node}", found.items.len()), "", Vec::new())?;
        Ok(found.items.len())
    }

    /// Create pods of this size on a node, one after another, until [`BackgroundLoad::finish`]. Each is deleted once it runs, or after 10 s.
    pub(in crate::scenario) fn come_and_go(&self, node: &str, units: u64) -> BackgroundLoad {
        let token = CancellationToken::new();
        let (own, client, node) = (token.clone(), self.cluster.client(), node.to_owned());
        let task = tokio::spawn(async move {
            let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
            let mut guests = Guests::default();
            while !own.is_cancelled() {
                let name = format!("guest-{}", guests.created);
                create(&client, &pod(&name).gpu_mem(units).grace_seconds(1).select(&node).build()).await?;
                guests.created += 1;
                // A pod that is still starting at the end gets this time as well.
                for _ in 0..200 {
                    let found = pods.get(&name).await?;
                    let runs = found.status.and_then(|status| status.phase).as_deref() == Some("Running");
                    guests.ran += u64::from(runs);
                    if runs {
                        break;
                    }
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                pods.delete(&name, &DeleteParams::default()).await?;
            }
            Ok(guests)
        });
        BackgroundLoad { token, task }
    }

    /// Delete every Deployment and pod of the play, and wait until they are gone.
    pub(in crate::scenario) async fn delete_all(&self) -> Result<(), PlayStop> {
        let every = ListParams::default();
        let deployments = self.deployments();
        let cleared = deployments.delete_collection(&DeleteParams::background(), &every).await;
        cleared.map_err(|source| stop_api("the deployments could not be deleted".to_owned(), source))?;
        let pods = self.pods(NAMESPACE);
        self.eventually("every pod to be gone", async |play| {
            let left = play.all_pods().await?;
            for pod in left.iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()) {
                let name = pod.metadata.name.clone().unwrap_or_default();
                match pods.delete(&name, &DeleteParams::default()).await {
                    Err(kube::Error::Api(status)) if status.code == 404 => {}
                    other => drop(other.map_err(|source| stop_api(format!("pod {name}"), source))?),
                }
            }
            Ok(match left.len() {
                0 => Ok(()),
                count => Err(format!("{count} pods are left")),
            })
        })
        .await
    }

    /// Delete every Deployment and pod of the play. Wait until they are gone, no memory is held, and no grant file is left.
    pub async fn clear(&mut self) -> Result<(), PlayStop> {
        self.delete_all().await?;
        for object in self.nodes().await? {
            let node = object.metadata.name.clone().unwrap_or_default();
            if !self.cluster.has_gpus(&node) {
                continue;
            }
            self.eventually(&format!("nothing to be left on {node}"), async |play| {
                let kept = play.cluster.grants(&node)?;
                Ok(if kept.is_empty() { Ok(()) } else { Err(format!("{kept:?}")) })
            })
            .await?;
            if offered(&object) != "none" {
                self.used(&node, 0).await?;
            }
        }
        Ok(())
    }
}

async fn create(client: &Client, manifest: &Value) -> kube::Result<()> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    let pod: Pod = serde_json::from_value(manifest.clone()).map_err(kube::Error::SerdeError)?;
    pods.create(&PostParams::default(), &pod).await.map(drop)
}

/// Return the units of shared GPU memory that a node's status offers, or "none".
pub(super) fn offered(node: &objects::NodeObject) -> String {
    let status = node.status.clone().unwrap_or_default();
    let units = status.allocatable.get(names::GPU_MEM);
    units.map_or_else(|| "none".to_owned(), |units| units.0.clone())
}
