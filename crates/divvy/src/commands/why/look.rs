//! One look at the cluster for `divvy why`.

use divvy_cluster::objects::{NodeObject, PodObject};
use divvy_cluster::{convert, list, sites};
use divvy_model::{MemoryUnit, Pod, names};
use divvy_placement::{Ledger, kept};
use divvy_why::{Snapshot, Tenant, Tenants, Wants};

use crate::commands::inspect::say_left_out;
use crate::commands::progress::Arrived;

/// The cluster, and the pods that wait for GPUs, in the order of namespaces and names.
pub(super) struct Look {
    pub(super) snapshot: Snapshot,
    pub(super) waiting: Vec<Wants>,
}

/// What is kept of a pod in a list.
struct Listed {
    pod: Pod,
    tenant: Option<Tenant>,
    waiting: Option<Box<Wants>>,
}

/// Reads all nodes and pods. `unit`: for clusters whose agents publish none.
pub(super) async fn look(client: &kube::Client, unit: MemoryUnit) -> Result<Look, divvy_cluster::Error> {
    let arrived = Arrived::default();
    let (mut sites, mut nodes, mut pods, mut waiting) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut tenants = Tenants::default();
    let node = |object: NodeObject| (convert::node(&object), sites::site(&object));
    let all_nodes = list::each_node(client, node, |(node, site)| {
        arrived.node();
        nodes.push(node);
        sites.push(site);
    });
    let all_pods = list::each_whole_pod(client, listed, |pod: Listed| {
        arrived.pod();
        pods.push(pod.pod);
        tenants.extend(pod.tenant);
        waiting.extend(pod.waiting.map(|wants| *wants));
    });
    let (no_nodes, no_pods) = arrived.shown(async { tokio::try_join!(all_nodes, all_pods) }).await?;
    say_left_out("node", &no_nodes);
    say_left_out("pod", &no_pods);
    // The cluster's unit is what the agents publish.
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
        // Who may read pods may often not read kube-system; few clusters have these ConfigMaps.
        Err(error) => tracing::debug!("{error}"),
    }
    let mut snapshot = Snapshot::new(ledger, sites, tenants);
    snapshot.namespaces = seen(list::namespaces(client).await);
    snapshot.agent_selector = seen(list::agent_selector(client).await).flatten();
    Ok(Look { snapshot, waiting })
}

/// What the pods of a namespace say of themselves, for a user who may not list the nodes, or the pods of all namespaces. `error`: the refusal.
pub(super) async fn of_namespace(
    client: &kube::Client,
    unit: MemoryUnit,
    namespace: Option<&str>,
    error: divvy_cluster::Error,
) -> anyhow::Result<Look> {
    let unseen = list::refused(client).await?;
    let Some(namespace) = namespace.filter(|_| !unseen.is_empty()) else {
        return Err(anyhow::Error::new(error)
            .context("--all-namespaces needs the right to list nodes and pods; without it, ask about one namespace: -n NAME"));
    };
    let mut waiting = Vec::new();
    for object in list::pending_pods(client, namespace).await? {
        let wants = sites::wants(&object)?;
        if wants.pod.node.is_none() && wants_gpus(&wants) {
            waiting.push(wants);
        }
    }
    Ok(Look {
        snapshot: Snapshot::unseen(unit, unseen),
        waiting,
    })
}

/// What could be read; the answer says what it lacks where that matters.
fn seen<T>(read: Result<T, divvy_cluster::Error>) -> Option<T> {
    read.inspect_err(|error| tracing::debug!("{error}")).ok()
}

fn listed(object: PodObject) -> Result<Listed, String> {
    let words = |error: divvy_model::Error| error.to_string();
    let waits = object.spec.node_name.as_deref().is_none_or(str::is_empty);
    let wants = if waits {
        Some(sites::wants(&object).map_err(words)?)
    } else {
        None
    };
    Ok(Listed {
        waiting: wants.filter(|wants| !wants.pod.ended() && wants_gpus(wants)).map(Box::new),
        pod: kept(convert::pod(&object).map_err(words)?),
        tenant: sites::tenant(object),
    })
}

/// GPU memory, or whole GPUs, which another device plugin serves: who waits for them asks here, too.
fn wants_gpus(wants: &Wants) -> bool {
    let whole = wants
        .requests
        .iter()
        .any(|(resource, amount)| resource == names::WHOLE_GPU && *amount > 0);
    wants.pod.request.wants_memory() || whole
}
