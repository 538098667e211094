//! One look at the cluster, for the command line.

use divvy_model::{Node, Pod, legacy};
use k8s_openapi::api::core::v1::{ConfigMap, Event};
use kube::api::{Api, ListParams};

use crate::convert::UnhealthyGpus;
use crate::objects::{NodeObject, PodObject};
use crate::{Error, convert, objects};

/// Pods of a cluster, and those that could not be read.
#[derive(Debug, Default)]
pub struct Pods {
    /// In the API server's order: by namespace and name.
    pub pods: Vec<Pod>,
    /// `namespace/name` and what is wrong.
    pub unreadable: Vec<(String, divvy_model::Error)>,
}

/// All pods, or those that a field selector names.
pub async fn pods(client: &kube::Client, field_selector: Option<&str>) -> Result<Pods, Error> {
    let api: Api<PodObject> = Api::all_with(client.clone(), &objects::pods());
    let mut found = Pods::default();
    let mut params = ListParams::default().limit(5000);
    if let Some(selector) = field_selector {
        params = params.fields(selector);
    }
    loop {
        let page = api
            .list(&params)
            .await
            .map_err(|source| Error::api("the pods could not be listed", source))?;
        for object in &page.items {
            match convert::pod(object) {
                Ok(pod) => found.pods.push(pod),
                Err(error) => {
                    let meta = &object.metadata;
                    let name = format!(
                        "{}/{}",
                        meta.namespace.as_deref().unwrap_or(""),
                        meta.name.as_deref().unwrap_or("")
                    );
                    found.unreadable.push((name, error));
                }
            }
        }
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(found),
        }
    }
}

/// Whether nodes and pods can be listed at all: asks for one of each.
pub async fn can_list(client: &kube::Client) -> Result<(), Error> {
    let one = ListParams::default().limit(1);
    let nodes: Api<NodeObject> = Api::all_with(client.clone(), &objects::nodes());
    nodes
        .list_metadata(&one)
        .await
        .map_err(|source| Error::api("the nodes could not be listed", source))?;
    let pods: Api<PodObject> = Api::all_with(client.clone(), &objects::pods());
    pods.list_metadata(&one)
        .await
        .map_err(|source| Error::api("the pods could not be listed", source))?;
    Ok(())
}

/// Hands over every pod as it is, page by page, and forgets it.
pub async fn each_pod(client: &kube::Client, mut take: impl FnMut(PodObject)) -> Result<(), Error> {
    let api: Api<PodObject> = Api::all_with(client.clone(), &objects::pods());
    let mut params = ListParams::default().limit(1000);
    loop {
        let page = api
            .list(&params)
            .await
            .map_err(|source| Error::api("the pods could not be listed", source))?;
        page.items.into_iter().for_each(&mut take);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(()),
        }
    }
}

/// All nodes.
pub async fn nodes(client: &kube::Client) -> Result<Vec<Node>, Error> {
    Ok(node_objects(client).await?.iter().map(convert::node).collect())
}

/// All nodes as they are, labels among it.
pub async fn node_objects(client: &kube::Client) -> Result<Vec<NodeObject>, Error> {
    let api: Api<NodeObject> = Api::all_with(client.clone(), &objects::nodes());
    let list = api
        .list(&ListParams::default())
        .await
        .map_err(|source| Error::api("the nodes could not be listed", source))?;
    Ok(list.items)
}

/// The GPUs that gpushare's ConfigMaps call unhealthy.
pub async fn unhealthy_gpus(client: &kube::Client) -> Result<Vec<UnhealthyGpus>, Error> {
    let api: Api<ConfigMap> = Api::namespaced(client.clone(), legacy::UNHEALTHY_NAMESPACE);
    let list = api
        .list(&ListParams::default())
        .await
        .map_err(|source| Error::api("the ConfigMaps of unhealthy GPUs could not be listed", source))?;
    Ok(list.items.iter().filter_map(convert::unhealthy_gpus).collect())
}

/// One node.
pub async fn node(client: &kube::Client, name: &str) -> Result<Node, Error> {
    let api: Api<NodeObject> = Api::all_with(client.clone(), &objects::nodes());
    let object = api
        .get(name)
        .await
        .map_err(|source| Error::api(format!("node {name} could not be read"), source))?;
    Ok(convert::node(&object))
}

/// A pod that a controller wanted to make and was not allowed to: there is no pod that could say so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotMade {
    /// `ReplicaSet ml/train-6d5`
    pub by: String,
    /// The API server's words.
    pub why: String,
}

/// What controllers could not make, and why, by their events; of one namespace, or of all. Only what speaks of GPU memory.
pub async fn not_made(client: &kube::Client, namespace: Option<&str>) -> Result<Vec<NotMade>, Error> {
    let api: Api<Event> = match namespace {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    };
    let list = api
        .list(&ListParams::default().fields("reason=FailedCreate").limit(500))
        .await
        .map_err(|source| Error::api("the events could not be listed", source))?;
    let mut found: Vec<NotMade> = Vec::new();
    for event in list.items {
        let why = event.message.unwrap_or_default();
        let why = why
            .strip_prefix("(combined from similar events): ")
            .unwrap_or(&why)
            .to_owned();
        if event.reason.as_deref() != Some("FailedCreate") || !(why.contains("/gpu-mem") || why.contains("divvy.dev")) {
            continue;
        }
        let about = event.involved_object;
        let (kind, name) = (about.kind.unwrap_or_default(), about.name.unwrap_or_default());
        let by = format!("{kind} {}/{name}", about.namespace.unwrap_or_default());
        // The same one fails again and again, with another name for the pod each time.
        match found.iter_mut().find(|known| known.by == by) {
            Some(known) => known.why = why,
            None => found.push(NotMade { by, why }),
        }
    }
    Ok(found)
}

/// One pod as it is, status conditions among it.
pub async fn pod(client: &kube::Client, namespace: &str, name: &str) -> Result<PodObject, Error> {
    let api: Api<PodObject> = Api::namespaced_with(client.clone(), namespace, &objects::pods());
    api.get(name)
        .await
        .map_err(|source| Error::api(format!("pod {namespace}/{name} could not be read"), source))
}
