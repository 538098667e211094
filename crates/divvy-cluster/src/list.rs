//! One look at the cluster, for the command line.

pub(crate) mod items;
pub(crate) mod pages;

use std::pin::Pin;

use divvy_model::{Node, Pod, legacy};
use k8s_openapi::api::core::v1::{ConfigMap, Event};
use kube::api::{Api, ListParams, ObjectMeta};
use serde::de::DeserializeOwned;

use crate::convert::UnhealthyGpus;
use crate::objects::{NodeObject, PodObject};
use crate::watch::slim::{Kind, SlimNode, SlimPod};
use crate::{Error, convert, objects};
use items::{Take, Unreadable, short};
use pages::{Pages, Progress};

pub(crate) const PODS: &str = "/api/v1/pods";
pub(crate) const NODES: &str = "/api/v1/nodes";

/// How many objects are asked for at once. They are read as they arrive, so that this is for the API server's memory and not for ours.
const PAGE: u32 = 5000;

/// Pods of a cluster, and those that could not be read.
#[derive(Debug, Default)]
pub struct Pods {
    /// In the API server's order: by namespace and name.
    pub pods: Vec<Pod>,
    /// The rest.
    pub left_out: LeftOut,
}

/// Objects that could not be read, and are left out.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct LeftOut {
    /// The name, `namespace/name` of a pod, and what is wrong; the first [`LeftOut::NAMED`].
    pub named: Vec<(String, String)>,
    /// How many there are besides.
    pub more: u64,
}

impl LeftOut {
    /// So many are named.
    pub const NAMED: usize = 100;

    /// Adds one.
    pub fn add(&mut self, name: impl Into<String>, why: impl Into<String>) {
        if self.named.len() < LeftOut::NAMED {
            self.named.push((name.into(), why.into()));
        } else {
            self.more += 1;
        }
    }
}

/// All pods, or those that a field selector names.
pub async fn pods(client: &kube::Client, field_selector: Option<&str>) -> Result<Pods, Error> {
    let mut found = Pods::default();
    let mut unreadable = LeftOut::default();
    found.left_out = each_pod(client, field_selector, |object| match convert::pod(&object) {
        Ok(pod) => found.pods.push(pod),
        Err(error) => unreadable.add(name(&object), error.to_string()),
    })
    .await?;
    for (name, why) in unreadable.named {
        found.left_out.add(name, why);
    }
    found.left_out.more += unreadable.more;
    Ok(found)
}

/// The name of a pod, for messages.
pub fn name(pod: &PodObject) -> String {
    full_name(&pod.metadata)
}

/// Hands over every pod, or those that a field selector names, in the API server's order and as they arrive: the list is never held in memory.
/// What is handed over has the fields of [`objects`], no labels, and the annotations that Divvy reads.
pub async fn each_pod(
    client: &kube::Client,
    field_selector: Option<&str>,
    mut take: impl FnMut(PodObject) + Send,
) -> Result<LeftOut, Error> {
    all_pods(client, field_selector, &mut take)
        .await
        .map_err(|failure| Error::list("the pods could not be listed", failure))
}

/// Hands over every node, as [`each_pod`] does; with its labels.
pub async fn each_node(client: &kube::Client, mut take: impl FnMut(NodeObject) + Send) -> Result<LeftOut, Error> {
    all_nodes(client, &mut take)
        .await
        .map_err(|failure| Error::list("the nodes could not be listed", failure))
}

/// Hands over every object of the list at a path, as [`each_pod`] does, read into a type of the caller's.
pub async fn each_at<T: DeserializeOwned>(
    client: &kube::Client,
    path: &str,
    take: &mut (dyn FnMut(T) + Send),
) -> Result<LeftOut, Error> {
    let mut left_out = LeftOut::default();
    all(client, path, None, &mut |item| match item {
        Ok(item) => take(item),
        Err(Unreadable { name, why }) => left_out.add(name, why),
    })
    .await
    .map_err(|failure| Error::list(format!("{path} could not be listed"), failure))?;
    Ok(left_out)
}

/// What was read, if it is of use.
pub(crate) fn usable<T: Kind>(item: Result<T, Unreadable>) -> Result<T, Unreadable> {
    let item = item?;
    match item.trouble() {
        None => Ok(item),
        Some(why) => Err(Unreadable {
            name: full_name(item.meta()),
            why: short(&why),
        }),
    }
}

/// `namespace/name`, or `name` without a namespace.
pub(crate) fn full_name(meta: &ObjectMeta) -> String {
    let name = meta.name.as_deref().unwrap_or_default();
    match meta.namespace.as_deref().filter(|namespace| !namespace.is_empty()) {
        Some(namespace) => short(&format!("{namespace}/{name}")),
        None => short(name),
    }
}

type Listing<'a> = Pin<Box<dyn Future<Output = Result<LeftOut, pages::Failure>> + Send + 'a>>;

// A generic function, and the future of any async one, is compiled with the program that uses it, and programs are compiled for size. These two
// are neither, so that the lists are read by code that is compiled for speed, as the whole of this crate is.

fn all_pods<'a>(
    client: &'a kube::Client,
    field_selector: Option<&'a str>,
    take: &'a mut (dyn FnMut(PodObject) + Send),
) -> Listing<'a> {
    Box::pin(async move { each::<SlimPod>(client, PODS, field_selector, &mut |slim| take(slim.into())).await })
}

fn all_nodes<'a>(client: &'a kube::Client, take: &'a mut (dyn FnMut(NodeObject) + Send)) -> Listing<'a> {
    Box::pin(async move { each::<SlimNode>(client, NODES, None, &mut |slim| take(slim.into())).await })
}

async fn each<T: Kind>(
    client: &kube::Client,
    path: &str,
    field_selector: Option<&str>,
    take: &mut (dyn FnMut(T) + Send),
) -> Result<LeftOut, pages::Failure> {
    let mut left_out = LeftOut::default();
    all::<T>(client, path, field_selector, &mut |item| match usable(item) {
        Ok(item) => take(item),
        Err(Unreadable { name, why }) => left_out.add(name, why),
    })
    .await?;
    Ok(left_out)
}

async fn all<T: DeserializeOwned>(
    client: &kube::Client,
    path: &str,
    field_selector: Option<&str>,
    take: Take<'_, T>,
) -> Result<(), pages::Failure> {
    let params = ListParams {
        field_selector: field_selector.map(str::to_owned),
        limit: Some(PAGE),
        ..ListParams::default()
    };
    let mut pages = Pages::new(client.clone(), path, params);
    while pages.read(take).await? == Progress::More {}
    Ok(())
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

/// All nodes that can be read.
pub async fn nodes(client: &kube::Client) -> Result<Vec<Node>, Error> {
    let mut nodes = Vec::new();
    let left_out = each_node(client, |object| nodes.push(convert::node(&object))).await?;
    for (name, why) in left_out.named {
        tracing::warn!("node {name} is left out: {why}");
    }
    Ok(nodes)
}

/// The GPUs that gpushare's ConfigMaps call unhealthy.
pub async fn unhealthy_gpus(client: &kube::Client) -> Result<Vec<UnhealthyGpus>, Error> {
    let path = format!("/api/v1/namespaces/{}/configmaps", legacy::UNHEALTHY_NAMESPACE);
    let mut found = Vec::new();
    each::<ConfigMap>(client, &path, None, &mut |object| {
        found.extend(convert::unhealthy_gpus(&object))
    })
    .await
    .map_err(|failure| Error::list("the ConfigMaps of unhealthy GPUs could not be listed", failure))?;
    Ok(found)
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
