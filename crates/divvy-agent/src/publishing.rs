//! What the node offers: the devices of each resource for the kubelet, and the inventory for the extender.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use divvy_agent_core::{AdvertisedDevice, ResourceSpec};
use divvy_kubelet::plugin;
use divvy_model::Health;
use tokio::sync::watch;

use crate::labels::SeenGpus;
use crate::shared_core::SharedCore;

/// A resource's devices, as the kubelet receives them.
type DeviceSender = watch::Sender<Arc<Vec<plugin::PluginDevice>>>;

/// What was published last, and who receives it.
pub(crate) struct Publishing {
    core: Arc<SharedCore>,
    /// The devices of every resource that this node has offered so far.
    devices: Mutex<Vec<(ResourceSpec, DeviceSender)>>,
    /// The resources that this node offers.
    pub(crate) offered: watch::Sender<Vec<ResourceSpec>>,
    /// The state from which the last devices were published: the hardware generation, and whether some GPU was not healthy.
    published: Mutex<(u64, bool)>,
    hardware_generation: AtomicU64,
    /// The inventory as JSON, or an empty string until the first GPU was seen.
    pub(crate) inventory: watch::Sender<Arc<str>>,
    /// What the labels of the node are made from.
    pub(crate) seen: watch::Sender<SeenGpus>,
}

impl Publishing {
    pub(crate) fn new(core: Arc<SharedCore>) -> Publishing {
        Publishing {
            core,
            devices: Mutex::default(),
            offered: watch::Sender::new(Vec::new()),
            published: Mutex::new((0, false)),
            hardware_generation: AtomicU64::new(0),
            inventory: watch::Sender::new(Arc::from("")),
            seen: watch::Sender::default(),
        }
    }

    /// Set whether the kubelet knows the devices, and publish what follows.
    pub(crate) fn set_registered(&self, registered: bool) {
        self.core.lock().set_registered(registered);
        self.publish();
    }

    /// Take back what the node offers, because the agent stops.
    pub(crate) fn leave(&self) {
        self.core.lock().leave();
        self.publish();
    }

    /// Publish the devices and the inventory after the driver has described the GPUs. `is_new`: they are not as they were described before.
    pub(crate) fn hardware_described(&self, is_new: bool) {
        if is_new || self.hardware_generation.load(Ordering::Relaxed) == 0 {
            self.hardware_generation.fetch_add(1, Ordering::Relaxed);
        }
        self.publish();
    }

    /// Return the devices of a resource.
    pub(crate) fn devices(&self, spec: ResourceSpec) -> watch::Receiver<Arc<Vec<plugin::PluginDevice>>> {
        let mut all = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        of_resource(&mut all, spec).subscribe()
    }

    /// Send the core's devices and inventory to their subscribers, if they changed.
    pub(crate) fn publish(&self) {
        let core = self.core.lock();
        if core.gpus().is_empty() && self.hardware_generation.load(Ordering::Relaxed) == 0 {
            return;
        }
        // While all GPUs are healthy, the device list changes only with the hardware. So pods can come and go without 4,096 ids being
        // formatted each time.
        let bad = core.gpus().iter().any(|gpu| gpu.health != Health::Ok);
        let now = (self.hardware_generation.load(Ordering::Relaxed), bad);
        let mut published = self.published.lock().unwrap_or_else(PoisonError::into_inner);
        let offered = core.offers();
        if bad || *published != now || *self.offered.borrow() != offered {
            *published = now;
            let mut all = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
            for spec in &offered {
                of_resource(&mut all, *spec);
            }
            for (spec, sender) in all.iter() {
                send_devices(sender, &core.devices(*spec));
            }
            drop(all);
            self.offered.send_if_modified(|before| {
                let changed = *before != offered;
                *before = offered;
                changed
            });
        }
        drop(published);
        let text = core.inventory().to_json();
        drop(core);
        self.inventory.send_if_modified(|sent| {
            let changed = **sent != *text;
            if changed {
                *sent = Arc::from(text);
            }
            changed
        });
    }
}

/// Return the devices of a resource, and add the resource if it is new.
fn of_resource(all: &mut Vec<(ResourceSpec, DeviceSender)>, spec: ResourceSpec) -> &DeviceSender {
    let position = all.iter().position(|(of, _)| *of == spec).unwrap_or_else(|| {
        all.push((spec, DeviceSender::default()));
        all.len() - 1
    });
    &all[position].1
}

fn send_devices(sender: &DeviceSender, devices: &[AdvertisedDevice]) {
    let list: Vec<plugin::PluginDevice> = devices
        .iter()
        .map(|device| plugin::PluginDevice {
            id: device.id.to_string(),
            healthy: device.healthy,
            numa: device.numa.map(i64::from),
        })
        .collect();
    sender.send_if_modified(|sent| {
        let changed = **sent != list;
        if changed {
            *sent = Arc::new(list);
        }
        changed
    });
}
