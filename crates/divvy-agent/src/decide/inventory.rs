//! The node annotation that carries what device ids leave out.

use divvy_model::{Inventory, MiB};

use super::Core;

impl Core {
    /// What goes into the node annotation `divvy.dev/inventory`: written before the first Register, patched when it changes.
    pub fn inventory(&self) -> Inventory {
        let mut gpus = self.gpus.clone();
        for gpu in &mut gpus {
            gpu.held = self.held.get(&gpu.uuid).copied().unwrap_or(MiB::ZERO);
        }
        Inventory {
            v: 1,
            agent: self.settings.agent_version.clone(),
            driver: self.driver.clone(),
            unit: self.settings.unit,
            gpus,
        }
    }
}
