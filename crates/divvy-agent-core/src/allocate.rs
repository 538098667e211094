//! Allocate: return an opaque name for a set of device ids. The call does not name a pod, and this step does not need one.

use std::collections::BTreeSet;

use divvy_cdi as cdi;
use divvy_model::{DeviceId, cdi_device_name};

use super::{Core, InFlight};

/// The agent's two extended resources.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resource {
    /// Shared memory: the container gets a CDI device, and PreStartContainer is required.
    Memory,
    /// The number of GPUs: a request for it grants nothing.
    Count,
}

impl Core {
    /// Return the CDI devices for one container request: `divvy.dev/grant=<name>`, or none for gpu-count. The kubelet records the answer and
    /// replays it after a restart or a reboot without another call. Therefore the answer depends only on the node's key and the ids.
    ///
    /// The error becomes the pod's final message (`UnexpectedAdmissionError`), so it says what was found.
    pub fn allocate(&mut self, resource: Resource, ids: &[String]) -> Result<Vec<String>, String> {
        if ids.is_empty() {
            return Err(format!(
                "the kubelet requested no device of {}; at least one is needed",
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
                        "device id {text:?} is slot {slot} of a GPU that has only {} units of {}",
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
                return Err(format!("device id {text:?} appears twice"));
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

    /// Return the resource's name.
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
