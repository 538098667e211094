//! Reads the state of the cluster for `divvy why`, as far as the user's permissions allow.

use std::sync::{Mutex, PoisonError};

use divvy_explainer::read_cluster::{ArrivedObject, wants_gpus};
use divvy_explainer::{from_objects, read_cluster};
use divvy_kube::list;
use divvy_model::MemoryUnit;
use divvy_why::{ClusterSnapshot, Wants};

use crate::commands::inspect::warn_left_out;
use crate::commands::progress::Arrived;

/// The state of the cluster, and the pods that wait for GPUs, ordered by namespace and name.
pub(super) struct ClusterState {
    pub(super) snapshot: ClusterSnapshot,
    pub(super) waiting: Vec<Wants>,
}

/// Read all nodes and pods. `unit` is the size of a unit in clusters whose agents do not publish it.
pub(super) async fn read(client: &kube::Client, unit: MemoryUnit) -> Result<ClusterState, divvy_kube::Error> {
    let (arrived, waiting) = (Arrived::default(), Mutex::new(Vec::new()));
    let look = read_cluster::read_cluster(client, unit, |arrival| match arrival {
        ArrivedObject::Node => arrived.node(),
        ArrivedObject::Pod(wants) => {
            arrived.pod();
            let mut waiting = waiting.lock().unwrap_or_else(PoisonError::into_inner);
            waiting.extend(wants.map(|wants| *wants));
        }
    });
    let seen = arrived.shown(look).await?;
    warn_left_out("node", &seen.no_nodes);
    warn_left_out("pod", &seen.no_pods);
    Ok(ClusterState {
        snapshot: seen.snapshot,
        waiting: waiting.into_inner().unwrap_or_else(PoisonError::into_inner),
    })
}

/// Read only the pods of one namespace, for a user who may not list the nodes or the pods of all namespaces. `error` is the API
/// server's refusal of these lists.
pub(super) async fn of_namespace(
    client: &kube::Client,
    unit: MemoryUnit,
    namespace: Option<&str>,
    error: divvy_kube::Error,
) -> anyhow::Result<ClusterState> {
    let unseen = list::refused(client).await?;
    let Some(namespace) = namespace.filter(|_| !unseen.is_empty()) else {
        return Err(anyhow::Error::new(error)
            .context("--all-namespaces requires permission to list nodes and pods; without it, choose one namespace: -n NAME"));
    };
    let mut waiting = Vec::new();
    for object in list::pending_pods(client, namespace).await? {
        let wants = from_objects::wants(&object)?;
        if wants.pod.node.is_none() && wants_gpus(&wants) {
            waiting.push(wants);
        }
    }
    Ok(ClusterState {
        snapshot: ClusterSnapshot::unseen(unit, unseen),
        waiting,
    })
}
