//! What `divvy why` sees of the cluster, as far as the user may look.

use std::sync::{Mutex, PoisonError};

use divvy_explainer::look::{Arrival, wants_gpus};
use divvy_explainer::{look, sites};
use divvy_kube::list;
use divvy_model::MemoryUnit;
use divvy_why::{Snapshot, Wants};

use crate::commands::inspect::say_left_out;
use crate::commands::progress::Arrived;

/// The cluster, and the pods that wait for GPUs, in the order of namespaces and names.
pub(super) struct Look {
    pub(super) snapshot: Snapshot,
    pub(super) waiting: Vec<Wants>,
}

/// Reads all nodes and pods. `unit`: for clusters whose agents publish none.
pub(super) async fn look(client: &kube::Client, unit: MemoryUnit) -> Result<Look, divvy_kube::Error> {
    let (arrived, waiting) = (Arrived::default(), Mutex::new(Vec::new()));
    let look = look::look(client, unit, |arrival| match arrival {
        Arrival::Node => arrived.node(),
        Arrival::Pod(wants) => {
            arrived.pod();
            let mut waiting = waiting.lock().unwrap_or_else(PoisonError::into_inner);
            waiting.extend(wants.map(|wants| *wants));
        }
    });
    let seen = arrived.shown(look).await?;
    say_left_out("node", &seen.no_nodes);
    say_left_out("pod", &seen.no_pods);
    Ok(Look {
        snapshot: seen.snapshot,
        waiting: waiting.into_inner().unwrap_or_else(PoisonError::into_inner),
    })
}

/// What the pods of a namespace say of themselves, for a user who may not list the nodes, or the pods of all namespaces. `error`: the refusal.
pub(super) async fn of_namespace(
    client: &kube::Client,
    unit: MemoryUnit,
    namespace: Option<&str>,
    error: divvy_kube::Error,
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
