use divvy_model::{Health, MiB, PodKey};
use divvy_placement::{GpuReport, HolderKind};
use serde::{Deserialize, Serialize};

use crate::Named;

/// What one GPU has, and who holds the rest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuAnswer {
    /// Its index.
    pub index: u32,
    /// Its UUID, where known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// Its product name; empty if unknown.
    pub model: String,
    /// Whether work may be placed on it.
    pub health: Health,
    /// Why not, `XID 79`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Free, in MiB: without what is kept for pods that preempted others.
    #[serde(rename = "freeMiB")]
    pub free: MiB,
    /// In all, in MiB.
    #[serde(rename = "totalMiB")]
    pub total: MiB,
    /// Whether the pod's annotations allow it.
    pub allowed: bool,
    /// Whether the pod would fit now.
    pub fits: bool,
    /// Who holds the rest, the largest share first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub held_by: Vec<HolderAnswer>,
}

/// Who holds memory of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HolderAnswer {
    /// `namespace/name`; `null` where only the node's agent knows that containers of deleted pods hold it, and where `hidden` says so.
    pub pod: Option<String>,
    /// Whoever asks may not see the pod's name.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub hidden: bool,
    /// Its share, in MiB.
    #[serde(rename = "memoryMiB")]
    pub memory: MiB,
    /// `bound`, `beingDeleted`, `beingBound`, `deleted` (its containers may still run), `nominated` (kept for it)
    pub state: String,
}

pub(crate) fn gpu(report: &GpuReport, named: &Named) -> GpuAnswer {
    let one = |pod: &PodKey, memory: MiB, state: &str| HolderAnswer {
        pod: named.shows(&pod.namespace).then(|| pod.to_string()),
        hidden: !named.shows(&pod.namespace),
        memory,
        state: state.to_owned(),
    };
    let holders = report.holders.iter().map(|holder| {
        let state = match holder.kind {
            HolderKind::Bound => "bound",
            HolderKind::Deleting => "beingDeleted",
            HolderKind::Reserved => "beingBound",
        };
        one(&holder.pod, holder.memory, state)
    });
    let departed = report.departed.iter().map(|gone| one(&gone.pod, gone.memory, "deleted"));
    let nominated = report.nominated.iter().map(|next| one(&next.pod, next.memory, "nominated"));
    let unnamed = (report.held > MiB::ZERO && report.departed.is_empty()).then(|| HolderAnswer {
        pod: None,
        hidden: false,
        memory: report.held,
        state: "deleted".to_owned(),
    });
    GpuAnswer {
        index: report.index,
        uuid: report.uuid.clone(),
        model: report.model.clone(),
        health: report.health,
        reason: report.reason.clone().filter(|_| report.health != Health::Ok),
        free: report.free,
        total: report.capacity,
        allowed: report.taken,
        fits: report.fits,
        held_by: holders.chain(departed).chain(nominated).chain(unnamed).collect(),
    }
}
