use divvy_model::{Health, MiB, PodKey};
use divvy_placement::{GpuReport, HolderKind};
use serde::{Deserialize, Serialize};

use crate::NamedPods;

/// One GPU with its free memory, and the pods that hold the rest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuAnswer {
    /// The index among the vendor's GPUs.
    pub index: u32,
    /// The GPU's UUID, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// The product name; empty if unknown.
    pub model: String,
    /// The GPU's health, which says whether work may be placed on it.
    pub health: Health,
    /// Why the GPU is not healthy, for example `XID 79`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Whether the GPU is offered only as a whole.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub whole: bool,
    /// Free memory in MiB, without the memory that is kept for nominated pods.
    #[serde(rename = "freeMiB")]
    pub free: MiB,
    /// The memory that the GPU offers, in MiB.
    #[serde(rename = "totalMiB")]
    pub total: MiB,
    /// Free compute time in percent, without what is kept for nominated pods. Only for a pod that requests a share of the compute time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub free_cores: Option<u32>,
    /// Whether the pod's annotations allow the GPU.
    pub allowed: bool,
    /// Whether the pod would fit on the GPU now.
    pub fits: bool,
    /// The pods that hold the rest of the memory, the largest share first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub held_by: Vec<HolderAnswer>,
}

/// A pod that holds memory of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HolderAnswer {
    /// `namespace/name`. `null` if only the node's agent knows that containers of deleted pods hold the memory, or if `hidden` is
    /// true.
    pub pod: Option<String>,
    /// Whether the user may not see the pod's name.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub hidden: bool,
    /// The memory that the pod holds, in MiB.
    #[serde(rename = "memoryMiB")]
    pub memory: MiB,
    /// The pod's share of the compute time in percent. 0 (then omitted): the pod has no limit.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub cores: u32,
    /// One of `bound`, `beingDeleted`, `beingBound`, `deleted` (its containers may still run), or `nominated` (the memory is kept
    /// for the pod).
    pub state: String,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes the field by reference")]
fn is_zero(cores: &u32) -> bool {
    *cores == 0
}

pub(crate) fn gpu(report: &GpuReport, named: &NamedPods) -> GpuAnswer {
    let one = |pod: &PodKey, memory: MiB, state: &str| HolderAnswer {
        pod: named.shows(&pod.namespace).then(|| pod.to_string()),
        hidden: !named.shows(&pod.namespace),
        memory,
        cores: 0,
        state: state.to_owned(),
    };
    let holders = report.holders.iter().map(|holder| {
        let state = match holder.kind {
            HolderKind::Bound => "bound",
            HolderKind::Deleting => "beingDeleted",
            HolderKind::Reserved => "beingBound",
        };
        HolderAnswer {
            cores: holder.cores,
            ..one(&holder.pod, holder.memory, state)
        }
    });
    let departed = report.departed.iter().map(|gone| one(&gone.pod, gone.memory, "deleted"));
    let nominated = report.nominated.iter().map(|next| one(&next.pod, next.memory, "nominated"));
    let unnamed = (report.held > MiB::ZERO && report.departed.is_empty()).then(|| HolderAnswer {
        pod: None,
        hidden: false,
        memory: report.held,
        cores: 0,
        state: "deleted".to_owned(),
    });
    GpuAnswer {
        index: report.index,
        uuid: report.uuid.clone(),
        model: report.model.clone(),
        health: report.health,
        reason: report.reason.clone().filter(|_| report.health != Health::Ok),
        whole: report.whole,
        free: report.free,
        total: report.capacity,
        free_cores: report.free_cores,
        allowed: report.taken,
        fits: report.fits,
        held_by: holders.chain(departed).chain(nominated).chain(unnamed).collect(),
    }
}
