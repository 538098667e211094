//! The node annotation that carries what device ids leave out.

use divvy_model::limits::{DRIVER_TROUBLE_BYTES, OTHER_UNITS, REASON_BYTES, shortened};
use divvy_model::{Held, Inventory, MiB};

use super::Core;
use super::driver::Trouble;

impl Core {
    /// What goes into the node annotation `divvy.dev/inventory`: written before the first Register, patched when it changes.
    pub fn inventory(&self) -> Inventory {
        let mut gpus = self.gpus.clone();
        for gpu in &mut gpus {
            gpu.held = self.held.get(&gpu.uuid).copied().unwrap_or(MiB::ZERO);
            // Nobody reads an inventory with a longer one.
            gpu.reason = gpu
                .reason
                .take()
                .map(|reason| shortened(&reason, REASON_BYTES - "…".len()).into_owned());
        }
        Inventory {
            v: 1,
            agent: self.settings.agent_version.clone(),
            driver: self.driver.clone(),
            unit: self.settings.unit,
            other_units: self.other_units().take(OTHER_UNITS).collect(),
            unschedulable: self.leaving || !self.registered,
            driver_trouble: self
                .driver_trouble
                .as_ref()
                .map(|Trouble { text, .. }| shortened(text, DRIVER_TROUBLE_BYTES - "…".len()).into_owned()),
            gpus,
        }
    }

    /// Why containers get none of the driver's libraries, or wrong ones; `None`: they get them.
    pub fn set_driver_trouble(&mut self, trouble: Option<Trouble>) {
        self.driver_trouble = trouble;
    }

    /// The agent is about to end: the inventory says so, so that nobody binds a pod here that the kubelet, which has no plugin then, would
    /// refuse for good ("no healthy devices present").
    pub fn leave(&mut self) {
        self.leaving = true;
    }

    /// Whether the kubelet has our devices. While it has not, which is so at first, the inventory says so, for the same reason.
    pub fn set_registered(&mut self, registered: bool) {
        self.registered = registered;
    }

    /// How many pods were bound here, to one of our GPUs, and have not come to a start yet: the kubelet still has to ask us for their devices.
    pub fn on_their_way(&self) -> usize {
        let to_come = self.pods.iter().filter(|(uid, known)| {
            let begun = self.records.keys().any(|key| key.uid == **uid);
            matches!(known.pin, Held::Allocation(_)) && !known.pod.ended() && !known.pod.deleting && !begun
        });
        to_come.count()
    }
}
