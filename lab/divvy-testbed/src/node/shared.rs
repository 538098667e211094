//! What the workers and loops of one run of the kubelet share.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use kube::Client;
use tokio::sync::{RwLock, broadcast};

use super::events::Recorder;
use super::manager::DeviceManager;
use super::runtime::ContainerRuntime;
use super::tasks::Tasks;
use super::{NodeEvent, Timings};

/// A pod whose admission has begun.
#[derive(Debug, Clone)]
pub(crate) struct KnownPod {
    /// The pod's effective requests.
    pub(crate) requests: BTreeMap<String, u64>,
    /// Whether the pod is not yet terminal.
    pub(crate) active: bool,
}

/// The state that the workers and loops of one kubelet share.
pub(crate) struct KubeletState {
    pub(crate) client: Client,
    pub(crate) name: String,
    pub(crate) address: String,
    pub(crate) timings: Timings,
    pub(crate) runtime: ContainerRuntime,
    pub(crate) manager: Arc<DeviceManager>,
    pub(crate) recorder: Recorder,
    pub(crate) tasks: Tasks,
    /// Held for reading during calls to plugins. A soft stop of the kubelet waits for these calls.
    pub(crate) busy: Arc<RwLock<()>>,
    /// The kubelet's pods, keyed by UID.
    pub(super) known: Mutex<BTreeMap<String, KnownPod>>,
    pub(super) events: broadcast::Sender<NodeEvent>,
    /// The second byte of the addresses of this node's pods.
    pub(super) pod_net: u8,
}

impl KubeletState {
    pub(crate) fn tell(&self, event: NodeEvent) {
        // There may be no receiver.
        let _ = self.events.send(event);
    }

    /// Return an address for the pod whose sandbox has this PID.
    pub(crate) fn pod_ip(&self, pid: u32) -> String {
        let [_, _, high, low] = pid.to_be_bytes();
        format!("10.{}.{high}.{low}", self.pod_net)
    }

    /// Read or change the pods, and tell the device manager which of them are active.
    pub(super) fn with_known<T>(&self, change: impl FnOnce(&mut BTreeMap<String, KnownPod>) -> T) -> T {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut known);
        let active: BTreeSet<String> = known
            .iter()
            .filter(|(_, pod)| pod.active)
            .map(|(uid, _)| uid.clone())
            .collect();
        drop(known);
        self.manager.set_active(active);
        result
    }

    /// Note that the pod's containers have ended, so its devices and requests are free.
    pub(crate) fn set_inactive(&self, uid: &str) {
        self.with_known(|known| {
            if let Some(pod) = known.get_mut(uid) {
                pod.active = false;
            }
        });
    }
}
