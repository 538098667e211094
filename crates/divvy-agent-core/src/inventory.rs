//! The inventory: the node annotation with the facts that device ids do not carry.

use divvy_model::limits::{DRIVER_TROUBLE_BYTES, NODE_EVICTIONS, OTHER_UNITS, REASON_BYTES, shortened};
use divvy_model::{Held, Inventory};

use super::AgentCore;
use super::driver_spec::DriverSpecTrouble;

impl AgentCore {
    /// Return the node annotation `divvy.dev/inventory`. It is written before the first Register call and patched when it changes.
    pub fn inventory(&self) -> Inventory {
        let mut gpus = self.gpus.clone();
        for gpu in &mut gpus {
            // Readers reject an inventory with a longer reason.
            gpu.reason = gpu
                .reason
                .take()
                .map(|reason| shortened(&reason, REASON_BYTES - "…".len()).into_owned());
        }
        Inventory {
            agent: self.settings.agent_version.clone(),
            drivers: self.drivers.clone(),
            unit: self.settings.unit,
            other_units: self.other_units().take(OTHER_UNITS).collect(),
            unschedulable: self.leaving || !self.registered,
            driver_trouble: self
                .driver_trouble
                .as_ref()
                .map(|DriverSpecTrouble { text, .. }| shortened(text, DRIVER_TROUBLE_BYTES - "…".len()).into_owned()),
            evict: self.evict.iter().take(NODE_EVICTIONS).cloned().collect(),
            gpus,
        }
    }

    /// Store the reason why containers get none of the driver's libraries, or the wrong ones. `None` means that they get the
    /// right ones.
    pub fn set_driver_trouble(&mut self, trouble: Option<DriverSpecTrouble>) {
        self.driver_trouble = trouble;
    }

    /// Mark the node as unschedulable, because the agent is about to stop. A pod that is bound here after that would be rejected permanently: the
    /// kubelet has no device plugin then ("no healthy devices present").
    pub fn leave(&mut self) {
        self.leaving = true;
    }

    /// Set whether the agent's devices are registered with the kubelet. At a start, they are not registered yet. Until
    /// they are, the inventory marks the node as unschedulable, for the same reason as in [`AgentCore::leave`].
    pub fn set_registered(&mut self, registered: bool) {
        self.registered = registered;
    }

    /// Count the pods that are bound here with one of our GPUs and have not started a container yet: the kubelet will still call the plugin for them.
    pub fn on_their_way(&self) -> usize {
        let to_come = self.pods.iter().filter(|(uid, known)| {
            let begun = self.records.keys().any(|key| key.uid == **uid);
            let has_gpu = matches!(known.pin, Held::Allocation(_)) || known.pod.request.whole.is_some();
            has_gpu && !known.pod.ended() && !known.pod.deleting && !begun
        });
        to_come.count()
    }
}
