//! Allocate: an opaque name for a set of ids. Which pod it is for is not in the call and does not matter here.

use std::collections::BTreeSet;

use divvy_cdi as cdi;
use divvy_model::{DeviceId, cdi_device_name};

use super::{Core, InFlight};

/// The two resources.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resource {
    /// Shared memory: a CDI device, and PreStartContainer is required.
    Memory,
    /// The number of GPUs: a container that asks for it gets nothing.
    Count,
}

impl Core {
    /// The CDI devices for one container request, `divvy.dev/grant=<name>`; none for gpu-count. The kubelet records the answer
    /// and replays it after a restart or a reboot without asking again, so it depends only on the node's key and the ids.
    ///
    /// The error is the pod's final message (`UnexpectedAdmissionError`): it says what was found.
    pub fn allocate(&mut self, resource: Resource, ids: &[String]) -> Result<Vec<String>, String> {
        if ids.is_empty() {
            return Err(format!(
                "the kubelet asked for no device of {}; at least one is needed",
                self.resource_name(resource)
            ));
        }
        let mut set = BTreeSet::new();
        for text in ids {
            let id: DeviceId = text.parse().map_err(|error: divvy_model::Error| error.to_string())?;
            let gpu = self.gpu(id.uuid()).ok_or_else(|| {
                format!(
                    "device id {text:?} names GPU {}, which this node does not have (GPUs: {})",
                    id.uuid(),
                    self.gpu_list()
                )
            })?;
            match (&id, resource) {
                (DeviceId::Memory { slot, .. }, Resource::Memory) if u64::from(*slot) < gpu.units => {}
                (DeviceId::Memory { slot, .. }, Resource::Memory) => {
                    return Err(format!(
                        "device id {text:?} is slot {slot} of a GPU with {} units of {}",
                        gpu.units, self.settings.unit
                    ));
                }
                (DeviceId::Count { .. }, Resource::Count) => {}
                _ => {
                    return Err(format!(
                        "device id {text:?} does not belong to {}",
                        self.resource_name(resource)
                    ));
                }
            }
            if !set.insert(text.clone()) {
                return Err(format!("device id {text:?} is there twice"));
            }
        }
        match resource {
            Resource::Count => Ok(Vec::new()),
            Resource::Memory => {
                let name = cdi_device_name(
                    &self.settings.node_key.0,
                    &self.settings.memory_resource,
                    set.iter().map(String::as_str),
                );
                let guess = match self.guess.take() {
                    Some((guessed, key)) if guessed == set => Some(key),
                    _ => None,
                };
                self.in_flight.push(InFlight { ids: set, guess, age: 0 });
                Ok(vec![cdi::qualified_name(&name)])
            }
        }
    }

    /// The resource's name.
    pub fn resource_name(&self, resource: Resource) -> &str {
        match resource {
            Resource::Memory => &self.settings.memory_resource,
            Resource::Count => &self.settings.count_resource,
        }
    }

    pub(super) fn gpu_list(&self) -> String {
        if self.gpus.is_empty() {
            return "none".to_owned();
        }
        let uuids: Vec<&str> = self.gpus.iter().map(|gpu| gpu.uuid.as_str()).collect();
        uuids.join(", ")
    }
}
