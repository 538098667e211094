//! Reads the whole cluster once for `divvy why`, either as the user or as the explainer, which serves users who may not list nodes and pods.

use divvy_model::kept;
use divvy_model::{MemoryUnit, Pod, limits};
use divvy_placement::Ledger;
use divvy_why::{ClusterSnapshot, Tenant, Tenants, Wants};

use divvy_kube::list::LeftOut;
use divvy_kube::objects::{NodeObject, PodObject};
use divvy_kube::{Error, convert, list};

use crate::{from_objects, related};

/// An object that has arrived. [`read_cluster`] reports each one, in order.
#[derive(Debug)]
pub enum ArrivedObject {
    /// A node.
    Node,
    /// A pod, with its requests and rules if it waits for GPUs. Pods arrive in the order of namespaces and names.
    Pod(Option<Box<Wants>>),
}

/// The cluster, and the objects that could not be read.
#[derive(Debug)]
pub struct ClusterReading {
    /// The cluster without the unreadable objects.
    pub snapshot: ClusterSnapshot,
    /// Nodes that could not be read.
    pub no_nodes: LeftOut,
    /// Pods that could not be read.
    pub no_pods: LeftOut,
}

/// The parts of a listed pod that are kept.
struct ListedPod {
    pod: Pod,
    /// The pod as a tenant of its node, and whether its labels and rules are complete.
    tenant: Option<(Tenant, bool)>,
    waiting: Option<Box<Wants>>,
}

/// Read all nodes and pods, which takes about two seconds for 50,000 pods. `unit` is the unit if no agent publishes one.
///
/// # Errors
/// Fails if the nodes or the pods cannot be listed. Other data that cannot be read is missing in the snapshot, and answers
/// mention this where it matters.
pub async fn read_cluster(
    client: &kube::Client,
    unit: MemoryUnit,
    arrived: impl Fn(ArrivedObject) + Sync,
) -> Result<ClusterReading, Error> {
    read_with(client, unit, listed, arrived).await
}

/// Read the cluster as [`read_cluster`] does, but without the requests and rules of the waiting pods.
///
/// # Errors
/// Fails as [`read_cluster`] does.
pub async fn read_without_waiting(client: &kube::Client, unit: MemoryUnit) -> Result<ClusterReading, Error> {
    read_with(client, unit, |object| listed_as(object, None), |_| {}).await
}

async fn read_with(
    client: &kube::Client,
    unit: MemoryUnit,
    listed: fn(PodObject) -> Result<ListedPod, divvy_model::Error>,
    arrived: impl Fn(ArrivedObject) + Sync,
) -> Result<ClusterReading, Error> {
    let (mut sites, mut nodes, mut pods, mut tenants) = (Vec::new(), Vec::new(), Vec::new(), Tenants::default());
    let mut simplified = 0;
    let node = |object: NodeObject| (convert::node(&object), from_objects::site(&object));
    let all_nodes = list::each_node(client, node, |(node, site)| {
        arrived(ArrivedObject::Node);
        nodes.push(node);
        sites.push(site);
    });
    let all_pods = list::each_whole_pod(client, listed, |pod: ListedPod| {
        arrived(ArrivedObject::Pod(pod.waiting));
        pods.push(pod.pod);
        simplified += u64::from(pod.tenant.as_ref().is_some_and(|(_, whole)| !whole));
        tenants.extend(pod.tenant.map(|(tenant, _)| tenant));
    });
    let (no_nodes, no_pods) = tokio::try_join!(all_nodes, all_pods)?;
    // The unit that the agents publish takes precedence.
    let published = nodes.iter().find_map(|node| match &node.inventory {
        Some(Ok(inventory)) => Some(inventory.unit),
        _ => None,
    });
    let mut ledger = Ledger::new(published.unwrap_or(unit));
    ledger.replace_nodes(&nodes);
    drop(nodes);
    ledger.replace_pods(pods);
    match list::unhealthy_gpus(client).await {
        Ok(named) => ledger.replace_unhealthy(named.into_iter().map(|named| (named.node, named.gpus))),
        // Ignore the error: many users who may list pods may not read kube-system, and few clusters have these ConfigMaps.
        Err(error) => tracing::debug!("{error}"),
    }
    let mut snapshot = ClusterSnapshot::new(ledger, sites, tenants);
    snapshot.simplified = simplified;
    snapshot.namespaces = seen(related::namespaces(client).await);
    snapshot.agent_selector = seen(related::agent_selector(client).await).flatten();
    Ok(ClusterReading {
        snapshot,
        no_nodes,
        no_pods,
    })
}

/// Return what could be read. After an error, log the error and return `None`. The answers mention missing data where it matters.
fn seen<T>(read: Result<T, Error>) -> Option<T> {
    read.inspect_err(|error| tracing::debug!("{error}")).ok()
}

fn listed(object: PodObject) -> Result<ListedPod, divvy_model::Error> {
    let waits = object.spec.node_name.as_deref().is_none_or(str::is_empty);
    let wants = if waits { Some(from_objects::wants(&object)?) } else { None };
    listed_as(object, wants)
}

fn listed_as(object: PodObject, wants: Option<Wants>) -> Result<ListedPod, divvy_model::Error> {
    Ok(ListedPod {
        waiting: wants.filter(|wants| !wants.pod.ended() && wants_gpus(wants)).map(Box::new),
        pod: kept(convert::pod(&object)?),
        tenant: from_objects::tenant(object).map(bounded),
    })
}

/// Limit the size of the labels, rules, and host ports of a pod, because users write them: remove all of them if they are too
/// large. The returned flag is false if they were removed.
fn bounded(mut tenant: Tenant) -> (Tenant, bool) {
    let whole = tenant.rules_bytes() <= limits::POD_RULES_BYTES;
    if !whole {
        (tenant.labels, tenant.avoids, tenant.ports) = Default::default();
    }
    (tenant, whole)
}

/// Report whether a pod requests GPU memory or whole GPUs. Other device plugins serve some of the whole GPUs, but `divvy why` also explains why such pods
/// wait.
pub fn wants_gpus(wants: &Wants) -> bool {
    wants.pod.request.wants_gpus()
}
