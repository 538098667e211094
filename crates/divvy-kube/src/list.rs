//! One-time lists of the cluster's objects, for the command line.

pub(crate) mod items;
pub(crate) mod pages;

pub use items::short;
#[cfg(test)]
mod tests;

use divvy_model::{Node, Pod, legacy, names};
use k8s_openapi::api::authentication::v1::SelfSubjectReview;
use k8s_openapi::api::core::v1::{ConfigMap, Event, ResourceQuota};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::api::{Api, ListParams, ObjectMeta, PostParams};
use kube::core::Selector;
use serde::de::{DeserializeOwned, IgnoredAny};
use tokio::sync::mpsc;

use crate::convert::UnhealthyGpus;
use crate::objects::{NodeObject, PodObject};
use crate::slim::{Kind, SlimNode, SlimPod, WholePod};
use crate::{Error, convert, objects};
use items::{ListMeta, ListParser, ListPart, ParsingSink, UnreadableItem, Wrong};
use pages::{Pages, Progress};

pub(crate) const PODS: &str = "/api/v1/pods";
pub(crate) const NODES: &str = "/api/v1/nodes";

/// The number of objects per page of a list. Objects are parsed as they arrive, so the page size bounds the API server's memory
/// and not Divvy's.
const PAGE: u32 = 5000;

/// The pods of a cluster.
#[derive(Debug, Default)]
pub struct Pods {
    /// The readable pods, in the API server's order: by namespace and name.
    pub pods: Vec<Pod>,
    /// The pods that could not be read.
    pub left_out: LeftOut,
}

/// Objects that could not be read and were skipped.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct LeftOut {
    /// The first [`LeftOut::NAMED`] objects: the name (`namespace/name` for a pod), and what is wrong.
    pub named: Vec<(String, String)>,
    /// The number of further objects.
    pub more: u64,
}

impl LeftOut {
    /// The maximum number of objects that are named.
    pub const NAMED: usize = 100;

    /// Add an object: its name, and why it cannot be read.
    pub fn add(&mut self, name: impl Into<String>, why: impl Into<String>) {
        if self.named.len() < LeftOut::NAMED {
            self.named.push((name.into(), why.into()));
        } else {
            self.more += 1;
        }
    }
}

/// List all pods, or those that match a field selector.
pub async fn pods(client: &kube::Client, field_selector: Option<&str>) -> Result<Pods, Error> {
    let mut found = Pods::default();
    let mut take = |pod: SlimPod| {
        let object = pod.into();
        let name = name(&object);
        pod_of(object)
            .map(|pod| found.pods.push(pod))
            .map_err(|error| UnreadableItem::new(name, &error))
    };
    found.left_out = few(client, PODS, field_selector, &mut take)
        .await
        .map_err(|failure| Error::list("the pods could not be listed", failure))?;
    Ok(found)
}

/// Return the name of a pod for messages, `namespace/name`.
pub fn name(pod: &PodObject) -> String {
    full_name(&pod.metadata)
}

/// Convert an object into a pod.
pub fn pod_of(object: PodObject) -> Result<Pod, divvy_model::Error> {
    convert::pod(&object)
}

/// Pass every pod, or those that match a field selector, to `take`, in the API server's order and as they arrive. The list is never in memory
/// as a whole.
///
/// `read` runs on another thread. It converts each object into the value that `take` receives, or returns the reason why it cannot. The
/// object has the fields of [`objects`] and the annotations that Divvy reads, but no labels.
pub async fn each_pod<R: Send + 'static>(
    client: &kube::Client,
    field_selector: Option<&str>,
    read: fn(PodObject) -> Result<R, divvy_model::Error>,
    mut take: impl FnMut(R) + Send,
) -> Result<LeftOut, Error> {
    let read = move |items: &mut ListParser, part: ListPart<'_>, take: Take<'_, R>| {
        read_pods(items, part, &mut |item| {
            take(item.and_then(|object| {
                let name = name(&object);
                read(object).map_err(|error| UnreadableItem::new(name, &error))
            }));
        })
    };
    many(client, PODS, field_selector, read, &mut take)
        .await
        .map_err(|failure| Error::list("the pods could not be listed", failure))
}

/// Pass every pod to `take`, as [`each_pod`] does. The objects also have their labels and conditions.
pub async fn each_whole_pod<R: Send + 'static>(
    client: &kube::Client,
    read: fn(PodObject) -> Result<R, divvy_model::Error>,
    mut take: impl FnMut(R) + Send,
) -> Result<LeftOut, Error> {
    let read = move |items: &mut ListParser, part: ListPart<'_>, take: Take<'_, R>| {
        read_whole_pods(items, part, &mut |item| {
            take(item.and_then(|object| {
                let name = name(&object);
                read(object).map_err(|error| UnreadableItem::new(name, &error))
            }));
        })
    };
    many(client, PODS, None, read, &mut take)
        .await
        .map_err(|failure| Error::list("the pods could not be listed", failure))
}

/// Pass every node to `take`, as [`each_pod`] does. The objects have their labels.
pub async fn each_node<R: Send + 'static>(
    client: &kube::Client,
    read: fn(NodeObject) -> R,
    mut take: impl FnMut(R) + Send,
) -> Result<LeftOut, Error> {
    let read = move |items: &mut ListParser, part: ListPart<'_>, take: Take<'_, R>| {
        read_nodes(items, part, &mut |item| take(item.map(read)))
    };
    many(client, NODES, None, read, &mut take)
        .await
        .map_err(|failure| Error::list("the nodes could not be listed", failure))
}

/// Pass every object of the list at a path to `take`, as [`each_pod`] does. The caller chooses the type into which objects are parsed.
pub async fn each_at<T: DeserializeOwned + 'static, R: Send + 'static>(
    client: &kube::Client,
    path: &str,
    read: fn(T) -> R,
    take: &mut (dyn FnMut(R) + Send),
) -> Result<LeftOut, Error> {
    let read = move |items: &mut ListParser, part: ListPart<'_>, take: Take<'_, R>| {
        items.take_in(part, &mut ParsingSink(&mut |item: Result<T, _>| take(item.map(read))))
    };
    many(client, path, None, read, take)
        .await
        .map_err(|failure| Error::list(format!("{path} could not be listed"), failure))
}

/// Return an item, or an error if it is unreadable or unusable.
pub(crate) fn usable<T: Kind>(item: Result<T, UnreadableItem>) -> Result<T, UnreadableItem> {
    let item = item?;
    match item.trouble() {
        None => Ok(item),
        Some(why) => Err(UnreadableItem {
            name: full_name(item.meta()),
            why: short(&why),
        }),
    }
}

/// Return `namespace/name`, or `name` if there is no namespace.
pub(crate) fn full_name(meta: &ObjectMeta) -> String {
    let name = meta.name.as_deref().unwrap_or_default();
    match meta.namespace.as_deref().filter(|namespace| !namespace.is_empty()) {
        Some(namespace) => short(&format!("{namespace}/{name}")),
        None => short(name),
    }
}

// A generic function is compiled as part of the program that uses it, and the programs are optimized for size. This crate is optimized for
// speed. The functions below are not generic, so that the code that parses lists is compiled here.

fn read_pods(items: &mut ListParser, part: ListPart<'_>, take: Take<'_, PodObject>) -> Result<ListMeta, Wrong> {
    items.take_in(
        part,
        &mut ParsingSink(&mut |item: Result<SlimPod, _>| take(usable(item).map(PodObject::from))),
    )
}

fn read_whole_pods(items: &mut ListParser, part: ListPart<'_>, take: Take<'_, PodObject>) -> Result<ListMeta, Wrong> {
    items.take_in(
        part,
        &mut ParsingSink(&mut |item: Result<WholePod, _>| take(usable(item).map(PodObject::from))),
    )
}

fn read_nodes(items: &mut ListParser, part: ListPart<'_>, take: Take<'_, NodeObject>) -> Result<ListMeta, Wrong> {
    items.take_in(
        part,
        &mut ParsingSink(&mut |item: Result<SlimNode, _>| take(usable(item).map(NodeObject::from))),
    )
}

/// Receives each item, in the order of the list.
type Take<'a, R> = &'a mut (dyn FnMut(Result<R, UnreadableItem>) + Send);

/// The length of each of the two queues between the two threads: parts of the response to parse, and batches of parsed items.
const PARTS: usize = 4;
/// The minimum number of items in a batch, except in the last batch.
const ITEMS: usize = 256;

/// Read a list that may be long. A separate thread parses the response, so that two cores share the work.
async fn many<R: Send + 'static>(
    client: &kube::Client,
    path: &str,
    field_selector: Option<&str>,
    read: impl Fn(&mut ListParser, ListPart<'_>, Take<'_, R>) -> Result<ListMeta, Wrong> + Copy + Send + 'static,
    take: &mut (dyn FnMut(R) + Send),
) -> Result<LeftOut, pages::ListFailure> {
    let mut left_out = LeftOut::default();
    let mut pages = pages(client, path, field_selector);
    loop {
        let (parts, mut arrived) = mpsc::channel::<Vec<u8>>(PARTS);
        let (done, mut ready) = mpsc::channel::<Vec<Result<R, UnreadableItem>>>(PARTS);
        let reader = tokio::task::spawn_blocking(move || {
            let (mut items, mut found) = (ListParser::new(), Vec::new());
            while let Some(part) = arrived.blocking_recv() {
                read(&mut items, ListPart::Next(&part), &mut |item| found.push(item))?;
                // The caller has dropped the list.
                if found.len() >= ITEMS && done.blocking_send(std::mem::take(&mut found)).is_err() {
                    return Ok(ListMeta::default());
                }
            }
            let ended = read(&mut items, ListPart::End, &mut |item| found.push(item));
            drop(done.blocking_send(found));
            ended
        });
        let feed = async {
            // The parsing thread stops at the first error and returns it below; the rest of the response does not matter.
            while let Some(part) = tokio::select! { part = pages.part() => part?, () = parts.closed() => None } {
                if parts.send(part).await.is_err() {
                    break;
                }
            }
            drop(parts);
            Ok::<(), pages::ListFailure>(())
        };
        let hand_over = async {
            while let Some(items) = ready.recv().await {
                for item in items {
                    match item {
                        Ok(item) => take(item),
                        Err(UnreadableItem { name, why }) => left_out.add(name, why),
                    }
                }
            }
        };
        let (fed, ()) = tokio::join!(feed, hand_over);
        fed?;
        let ended = match reader.await {
            Ok(ended) => ended?,
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(error) => return Err(pages::ListFailure::Cut(std::io::Error::other(error))),
            },
        };
        if pages.turn(ended) != Progress::More {
            return Ok(left_out);
        }
    }
}

/// Read a short list on this thread.
async fn few<T: Kind>(
    client: &kube::Client,
    path: &str,
    field_selector: Option<&str>,
    take: &mut (dyn FnMut(T) -> Result<(), UnreadableItem> + Send),
) -> Result<LeftOut, pages::ListFailure> {
    let mut left_out = LeftOut::default();
    let mut pages = pages(client, path, field_selector);
    let mut sort = |item| {
        if let Err(UnreadableItem { name, why }) = usable(item).and_then(&mut *take) {
            left_out.add(name, why);
        }
    };
    while pages.read(&mut ParsingSink(&mut sort)).await? == Progress::More {}
    Ok(left_out)
}

fn pages(client: &kube::Client, path: &str, field_selector: Option<&str>) -> Pages {
    let params = ListParams {
        field_selector: field_selector.map(str::to_owned),
        limit: Some(PAGE),
        ..ListParams::default()
    };
    Pages::new(client.clone(), path, params)
}

/// Check that the user may list nodes and pods, by requesting one of each.
pub async fn can_list(client: &kube::Client) -> Result<(), Error> {
    for (what, path) in [("nodes", NODES), ("pods", PODS)] {
        begin(client, path).await.map_err(|failure| not_listed(what, failure))?;
    }
    Ok(())
}

/// Request a list of one object, and read only the beginning of the answer: an API server may ignore the limit and send all objects.
async fn begin(client: &kube::Client, path: &str) -> Result<(), pages::ListFailure> {
    let mut pages = Pages::new(client.clone(), path, ListParams::default().limit(1));
    pages
        .read(&mut ParsingSink(&mut |_: Result<IgnoredAny, UnreadableItem>| {}))
        .await?;
    Ok(())
}

fn not_listed(what: &str, failure: pages::ListFailure) -> Error {
    Error::list(format!("the {what} could not be listed"), failure)
}

/// List all nodes that can be read. The others are logged and skipped.
pub async fn nodes(client: &kube::Client) -> Result<Vec<Node>, Error> {
    let mut nodes = Vec::new();
    let mut take = |node: SlimNode| {
        nodes.push(convert::node(&node.into()));
        Ok(())
    };
    let left_out = few(client, NODES, None, &mut take)
        .await
        .map_err(|failure| Error::list("the nodes could not be listed", failure))?;
    for (name, why) in left_out.named {
        tracing::warn!("node {name} is left out: {why}");
    }
    Ok(nodes)
}

/// List the GPUs that gpushare's ConfigMaps declare unhealthy.
pub async fn unhealthy_gpus(client: &kube::Client) -> Result<Vec<UnhealthyGpus>, Error> {
    let path = format!("/api/v1/namespaces/{}/configmaps", legacy::UNHEALTHY_NAMESPACE);
    let mut found = Vec::new();
    few::<ConfigMap>(client, &path, None, &mut |object| {
        found.extend(convert::unhealthy_gpus(&object));
        Ok(())
    })
    .await
    .map_err(|failure| Error::list("the ConfigMaps of unhealthy GPUs could not be listed", failure))?;
    Ok(found)
}

/// Read one node.
pub async fn node(client: &kube::Client, name: &str) -> Result<Node, Error> {
    let api: Api<NodeObject> = Api::all_with(client.clone(), &objects::nodes());
    let object = api
        .get(name)
        .await
        .map_err(|source| Error::api(format!("node {name} could not be read"), source))?;
    Ok(convert::node(&object))
}

/// A pod that a controller could not create. There is no pod object, so only an event reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotMade {
    /// The controller, such as `ReplicaSet ml/train-6d5`.
    pub by: String,
    /// The API server's reason.
    pub why: String,
}

/// List the pods that controllers could not create, from their events, in one namespace or in all. Only events that mention GPU memory count.
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
        // The same controller fails repeatedly, with a different pod name each time: keep the last reason.
        match found.iter_mut().find(|known| known.by == by) {
            Some(known) => known.why = why,
            None => found.push(NotMade { by, why }),
        }
    }
    Ok(found)
}

/// List the extender pods of Divvy's chart: the name (`namespace/name`) and image of each.
pub async fn extender_pods(client: &kube::Client) -> Result<Vec<(String, String)>, Error> {
    let api: Api<k8s_openapi::api::core::v1::Pod> = Api::all(client.clone());
    // Two or three are expected.
    let params = ListParams::default()
        .labels("app.kubernetes.io/name=divvy,app.kubernetes.io/component=extender")
        .limit(50);
    let list = api
        .list(&params)
        .await
        .map_err(|source| Error::api("the extender's pods could not be listed", source))?;
    let one = |pod: k8s_openapi::api::core::v1::Pod| {
        let image = pod.spec.and_then(|spec| spec.containers.into_iter().next()?.image)?;
        Some((full_name(&pod.metadata), image))
    };
    Ok(list.items.into_iter().filter_map(one).collect())
}

/// Return which of `nodes` and `pods` the user may not list.
///
/// # Errors
/// Fails if a list fails for a reason other than a missing right.
pub async fn refused(client: &kube::Client) -> Result<Vec<&'static str>, Error> {
    let (nodes, pods) = tokio::join!(begin(client, NODES), begin(client, PODS));
    let mut refused = Vec::new();
    for (what, answer) in [("nodes", nodes), ("pods", pods)] {
        match answer.map_err(|failure| not_listed(what, failure)) {
            Ok(()) => {}
            Err(error) if error.is_forbidden() => refused.push(what),
            Err(error) => return Err(error),
        }
    }
    Ok(refused)
}

/// Return the flag that names the user in `kubectl create rolebinding`: `--user=ann` or `--serviceaccount=ml:ann`; `None` if the API server
/// does not report the user.
pub async fn myself(client: &kube::Client) -> Option<String> {
    let api: Api<SelfSubjectReview> = Api::all(client.clone());
    let review = api.create(&PostParams::default(), &SelfSubjectReview::default()).await;
    let user = review.ok()?.status?.user_info?.username?;
    let account = user
        .strip_prefix("system:serviceaccount:")
        .and_then(|account| account.split_once(':'));
    Some(match account {
        Some((namespace, name)) => format!("--serviceaccount={namespace}:{name}"),
        None => format!("--user={user}"),
    })
}

/// List the pods of a namespace whose phase is Pending.
pub async fn pending_pods(client: &kube::Client, namespace: &str) -> Result<Vec<PodObject>, Error> {
    let api: Api<PodObject> = Api::namespaced_with(client.clone(), namespace, &objects::pods());
    let list = api
        .list(&ListParams::default().fields("status.phase=Pending"))
        .await
        .map_err(|source| Error::api(format!("the pods of namespace {namespace} could not be listed"), source))?;
    Ok(list.items)
}

/// Describe the GPU memory in the quotas of a namespace, such as `8 of 10 requests.aliyun.com/gpu-mem of quota gpus are used`.
pub async fn quotas(client: &kube::Client, namespace: &str) -> Result<Vec<String>, Error> {
    let api: Api<ResourceQuota> = Api::namespaced(client.clone(), namespace);
    let list = api
        .list(&ListParams::default())
        .await
        .map_err(|source| Error::api(format!("the quotas of namespace {namespace} could not be listed"), source))?;
    let words = |quota: ResourceQuota| {
        let name = quota.metadata.name.unwrap_or_default();
        let status = quota.status.unwrap_or_default();
        let used = status.used.unwrap_or_default();
        let hard = status
            .hard
            .unwrap_or_default()
            .into_iter()
            .filter(|(resource, _)| resource.ends_with(names::GPU_MEM));
        let one = move |(resource, hard): (String, Quantity)| {
            let used = used.get(&resource).map_or("0", |used| used.0.as_str());
            format!("{used} of {} {resource} of quota {name} are used", hard.0)
        };
        hard.map(one).collect::<Vec<String>>()
    };
    Ok(list.items.into_iter().flat_map(words).collect())
}

/// List the pods of a namespace that match a label selector.
pub async fn selected_pods(client: &kube::Client, namespace: &str, selector: &str) -> Result<Vec<PodObject>, Error> {
    let api: Api<PodObject> = Api::namespaced_with(client.clone(), namespace, &objects::pods());
    let list = api
        .list(&ListParams::default().labels(selector))
        .await
        .map_err(|source| Error::api(format!("the pods of namespace {namespace} could not be listed"), source))?;
    Ok(list.items)
}

/// Read the label selector for the pods of a workload, as text. `api` is the group, version, kind, and plural name of the
/// workload's type.
pub async fn selector_of(
    client: &kube::Client,
    api: (&str, &str, &str, &str),
    namespace: &str,
    name: &str,
) -> Result<String, Error> {
    #[derive(Debug, Clone, Default, serde::Serialize, serde::Deserialize)]
    struct Spec {
        selector: LabelSelector,
    }
    let (group, version, kind, plural) = api;
    let resource =
        kube::core::ApiResource::from_gvk_with_plural(&kube::core::GroupVersionKind::gvk(group, version, kind), plural);
    let workloads: Api<kube::core::Object<Spec, serde_json::Value>> = Api::namespaced_with(client.clone(), namespace, &resource);
    let failed = |source| Error::api(format!("{kind} {namespace}/{name} could not be read"), source);
    let found = workloads.get(name).await.map_err(failed)?;
    let selector = Selector::try_from(found.spec.selector).map_err(|error| failed(kube::Error::Service(Box::new(error))))?;
    Ok(selector.to_string())
}

/// Read one pod with its status conditions.
pub async fn pod(client: &kube::Client, namespace: &str, name: &str) -> Result<PodObject, Error> {
    let api: Api<PodObject> = Api::namespaced_with(client.clone(), namespace, &objects::pods());
    api.get(name)
        .await
        .map_err(|source| Error::api(format!("pod {namespace}/{name} could not be read"), source))
}
