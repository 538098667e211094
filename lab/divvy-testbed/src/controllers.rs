//! The parts of kube-controller-manager that the scenarios need: they create a Deployment's pods, and delete pods whose Deployment is gone.
//!
//! Simpler than upstream: a Deployment owns its pods without a ReplicaSet in between, so a changed template replaces no pod. The
//! newest pods are deleted first when there are too many. Pods are deleted in the background, as the garbage collector does it.

use std::collections::BTreeMap;
use std::time::Duration;

use futures::StreamExt as _;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::runtime::watcher;
use kube::{Api, Client, Resource};
use serde_json::json;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// The wait before a failed watch or write is retried.
const RETRY: Duration = Duration::from_millis(100);

/// The running controllers. They end on drop.
#[derive(Debug)]
pub struct Controllers {
    token: CancellationToken,
    task: Option<JoinHandle<()>>,
}

impl Controllers {
    /// Start the controllers.
    pub fn start(client: Client) -> Controllers {
        let token = CancellationToken::new();
        let own = token.clone();
        let task = tokio::spawn(async move {
            let _ = own.run_until_cancelled(run(client)).await;
        });
        Controllers { token, task: Some(task) }
    }

    /// Stop the controllers and wait until they have ended.
    pub async fn shutdown(mut self) {
        self.token.cancel();
        if let Some(task) = self.task.take() {
            // The error says that the task was cancelled, which is intended.
            let _ = task.await;
        }
    }
}

impl Drop for Controllers {
    fn drop(&mut self) {
        self.token.cancel();
    }
}

/// Objects by UID, available once the first list is complete.
struct Cache<K> {
    objects: BTreeMap<String, K>,
    listing: BTreeMap<String, K>,
    whole: bool,
}

impl<K: Resource> Cache<K> {
    fn new() -> Self {
        Cache {
            objects: BTreeMap::new(),
            listing: BTreeMap::new(),
            whole: false,
        }
    }

    fn hear(&mut self, event: watcher::Event<K>) {
        match event {
            watcher::Event::Init => self.listing.clear(),
            watcher::Event::InitApply(object) => {
                self.listing.insert(uid(object.meta()), object);
            }
            watcher::Event::InitDone => {
                self.objects = std::mem::take(&mut self.listing);
                self.whole = true;
            }
            watcher::Event::Apply(object) => {
                self.objects.insert(uid(object.meta()), object);
            }
            watcher::Event::Delete(object) => {
                self.objects.remove(&uid(object.meta()));
            }
        }
    }
}

/// A write that the current state requires.
#[derive(Debug)]
enum ControllerAction {
    Create(Box<Pod>),
    Delete(Box<Pod>),
    Status(Box<Deployment>, i32, i32),
}

async fn run(client: Client) {
    let mut deployments = Cache::<Deployment>::new();
    let mut pods = Cache::<Pod>::new();
    let mut deployment_events = watcher(Api::all(client.clone()), watcher::Config::default()).boxed();
    let mut pod_events = watcher(Api::all(client.clone()), watcher::Config::default()).boxed();
    let mut again = false;
    loop {
        let heard = tokio::select! {
            Some(event) = deployment_events.next() => event.map(|event| deployments.hear(event)),
            Some(event) = pod_events.next() => event.map(|event| pods.hear(event)),
            () = tokio::time::sleep(RETRY), if again => Ok(()),
            else => return,
        };
        if let Err(error) = heard {
            tracing::debug!(%error, "watch failed; it will be retried");
            tokio::time::sleep(RETRY).await;
        }
        again = false;
        if !deployments.whole || !pods.whole {
            continue;
        }
        for action in actions(&deployments.objects, &pods.objects) {
            if let Err(error) = act(&client, action, &mut pods, &mut deployments).await {
                tracing::debug!(%error, "write failed; it will be retried");
                again = true;
            }
        }
    }
}

/// Carry out an action. Update the caches at once, because the watch event may arrive after the next computation of actions.
async fn act(
    client: &Client,
    action: ControllerAction,
    pods: &mut Cache<Pod>,
    deployments: &mut Cache<Deployment>,
) -> kube::Result<()> {
    let namespace = |meta: &ObjectMeta| meta.namespace.clone().unwrap_or_default();
    match action {
        ControllerAction::Create(pod) => {
            let api: Api<Pod> = Api::namespaced(client.clone(), &namespace(&pod.metadata));
            let made = api.create(&PostParams::default(), &pod).await?;
            pods.objects.insert(uid(&made.metadata), made);
        }
        ControllerAction::Delete(mut pod) => {
            let api: Api<Pod> = Api::namespaced(client.clone(), &namespace(&pod.metadata));
            let params = DeleteParams {
                preconditions: Some(Preconditions {
                    uid: pod.metadata.uid.clone(),
                    resource_version: None,
                }),
                ..DeleteParams::default()
            };
            match api.delete(&pod.metadata.name.clone().unwrap_or_default(), &params).await {
                Err(kube::Error::Api(status)) if status.code == 404 || status.code == 409 => {}
                other => drop(other?),
            }
            pod.metadata.deletion_timestamp.get_or_insert(Time(Timestamp::UNIX_EPOCH));
            pods.objects.insert(uid(&pod.metadata), *pod);
        }
        ControllerAction::Status(deployment, replicas, ready) => {
            let api: Api<Deployment> = Api::namespaced(client.clone(), &namespace(&deployment.metadata));
            let generation = deployment.metadata.generation;
            let status = json!({"status": {"observedGeneration": generation, "replicas": replicas, "updatedReplicas": replicas,
                "readyReplicas": ready, "availableReplicas": ready, "unavailableReplicas": replicas - ready}});
            let name = deployment.metadata.name.clone().unwrap_or_default();
            let patched = api
                .patch_status(&name, &PatchParams::default(), &Patch::Merge(status))
                .await?;
            deployments.objects.insert(uid(&patched.metadata), patched);
        }
    }
    Ok(())
}

/// Return the writes that the current state requires.
fn actions(deployments: &BTreeMap<String, Deployment>, pods: &BTreeMap<String, Pod>) -> Vec<ControllerAction> {
    let mut actions = Vec::new();
    let owner = |pod: &Pod| {
        let owners = pod.metadata.owner_references.iter().flatten();
        owners
            .filter(|owner| owner.kind == "Deployment")
            .map(|owner| owner.uid.clone())
            .next()
    };
    let deleting = |pod: &Pod| pod.metadata.deletion_timestamp.is_some();
    for pod in pods.values().filter(|pod| !deleting(pod)) {
        if owner(pod).is_some_and(|owner| !deployments.contains_key(&owner)) {
            actions.push(ControllerAction::Delete(Box::new(pod.clone())));
        }
    }
    for (uid, deployment) in deployments {
        let mut active: Vec<&Pod> = pods.values().filter(|pod| owner(pod).as_ref() == Some(uid)).collect();
        active.retain(|pod| !deleting(pod) && !matches!(phase(pod), "Succeeded" | "Failed"));
        active.sort_by_key(|pod| (pod.metadata.creation_timestamp.clone(), pod.metadata.name.clone()));
        let wanted = usize::try_from(deployment.spec.replicas.unwrap_or(1)).unwrap_or(0);
        for _ in active.len()..wanted {
            actions.push(ControllerAction::Create(Box::new(pod_of(deployment))));
        }
        for pod in active.iter().skip(wanted) {
            actions.push(ControllerAction::Delete(Box::new((*pod).clone())));
        }
        let count = |pods: usize| i32::try_from(pods).unwrap_or(i32::MAX);
        let (replicas, ready) = (count(active.len()), count(active.iter().filter(|pod| is_ready(pod)).count()));
        let known = deployment.status.clone().unwrap_or_default();
        if (known.replicas.unwrap_or(0), known.ready_replicas.unwrap_or(0)) != (replicas, ready) {
            actions.push(ControllerAction::Status(Box::new(deployment.clone()), replicas, ready));
        }
    }
    actions
}

fn pod_of(deployment: &Deployment) -> Pod {
    let template = deployment.spec.template.clone();
    let name = deployment.metadata.name.clone().unwrap_or_default();
    let mut metadata = template.metadata.unwrap_or_default();
    metadata.generate_name = Some(format!("{name}-"));
    metadata.namespace = deployment.metadata.namespace.clone();
    metadata.owner_references = Some(vec![OwnerReference {
        api_version: "apps/v1".to_owned(),
        kind: "Deployment".to_owned(),
        name,
        uid: uid(&deployment.metadata),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }]);
    Pod {
        metadata,
        spec: template.spec,
        status: None,
    }
}

fn uid(metadata: &ObjectMeta) -> String {
    metadata.uid.clone().unwrap_or_default()
}

fn phase(pod: &Pod) -> &str {
    pod.status
        .as_ref()
        .and_then(|status| status.phase.as_deref())
        .unwrap_or_default()
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions
        .into_iter()
        .any(|condition| condition.type_ == "Ready" && condition.status == "True")
}
