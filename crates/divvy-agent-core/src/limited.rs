//! Which pods with grants the driver limits. Their containers come and go, and each of them gets the pod's limit.

use std::collections::BTreeMap;

use divvy_model::{MiB, PodKey};

use super::AgentCore;
use super::booking::Booking;

/// A pod that the driver limits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LimitedPod {
    /// The pod's UID.
    pub uid: String,
    /// The pod's name.
    pub pod: PodKey,
    /// The GPUs of which the pod has a share that the driver can enforce, and the share.
    pub gpus: Vec<(String, MiB)>,
    /// Whether only one container of the pod requests GPU memory. Init containers count.
    pub alone: bool,
}

impl AgentCore {
    /// Return the pods that have a grant and are limited by the driver, ordered by UID. A pod whose object is not known is left out, because it may
    /// have said that it is not to be limited. A pod's first limit is its own, so a pod is left out until it has that.
    pub fn limited(&self) -> Vec<LimitedPod> {
        let mut found: BTreeMap<&str, BTreeMap<String, MiB>> = BTreeMap::new();
        for record in self.records.values().filter(|record| self.with_limits.contains(&record.uid)) {
            let booking = Booking {
                gpus: record.gpus.clone(),
                container: Vec::new(),
            };
            let gpus = found.entry(&record.uid).or_default();
            for (uuid, memory) in self.limits(&record.uid, &booking).gpus {
                let most = gpus.entry(uuid).or_default();
                *most = memory.max(*most);
            }
        }
        let pods = found.into_iter().filter(|(_, gpus)| !gpus.is_empty());
        let pods = pods.filter_map(|(uid, gpus)| {
            let pod = self.pod(uid).filter(|pod| !pod.ended())?;
            Some(LimitedPod {
                uid: uid.to_owned(),
                pod: pod.key(),
                gpus: gpus.into_iter().collect(),
                alone: pod.request.memory_containers().nth(1).is_none(),
            })
        });
        pods.collect()
    }
}
