//! Allocate: return an opaque name for a set of device ids. The call does not name the pod, and this step does not need
//! to know it.

use std::borrow::Cow;
use std::collections::BTreeSet;

use divvy_cdi as cdi;
use divvy_model::{DeviceId, MemoryUnit, cdi_device_name};

use super::{AgentCore, Ids, InFlight, ResourceSpec};

/// Why the kubelet gets no answer to Allocate. The text becomes the pod's final message (`UnexpectedAdmissionError`), so it says what was
/// found.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AllocateError {
    /// The request is for nothing.
    #[error("the kubelet requested no device of {resource}; at least one is needed")]
    NoDevice {
        /// The resource's name.
        resource: Cow<'static, str>,
    },
    /// An id appears twice in the request.
    #[error("device id {id:?} appears twice")]
    Twice {
        /// The id.
        id: String,
    },
    /// The text is not an id of this plugin.
    #[error(transparent)]
    Unreadable(#[from] divvy_model::Error),
    /// The id names no whole GPU or MIG device of the resource.
    #[error("device id {id:?} names none of this node's {plural} ({known})")]
    NotWhole {
        /// The id.
        id: String,
        /// What the resource consists of.
        plural: String,
        /// The ids of the resource.
        known: String,
    },
    /// The id names a GPU that the node does not have.
    #[error("device id {id:?} names GPU {uuid}, which this node does not have (GPUs: {known})")]
    UnknownGpu {
        /// The id.
        id: String,
        /// The UUID in the id.
        uuid: String,
        /// The UUIDs of the node's GPUs.
        known: String,
    },
    /// The GPU has less memory.
    #[error("device id {id:?} is slot {slot} of a GPU that has only {units} units of {unit}")]
    NoSuchSlot {
        /// The id.
        id: String,
        /// The slot in the id.
        slot: u32,
        /// The number of the GPU's slots.
        units: u64,
        /// The unit of gpu-mem.
        unit: MemoryUnit,
    },
    /// The id is one of another resource.
    #[error("device id {id:?} does not belong to {resource}")]
    OtherResource {
        /// The id.
        id: String,
        /// The resource's name.
        resource: Cow<'static, str>,
    },
}

impl AgentCore {
    /// Return the CDI devices for one container request: `divvy.dev/grant=<name>`, or none for a resource that grants nothing. The kubelet
    /// records the answer and replays it after a restart or a reboot without another call. Therefore the answer depends only on the node's
    /// key and the ids.
    pub fn allocate(&mut self, spec: ResourceSpec, ids: &[String]) -> Result<Vec<String>, AllocateError> {
        if ids.is_empty() {
            return Err(AllocateError::NoDevice { resource: spec.name() });
        }
        let mut set = BTreeSet::new();
        for id in ids {
            self.check_id(spec, id)?;
            if !set.insert(id.clone()) {
                return Err(AllocateError::Twice { id: id.clone() });
            }
        }
        if !spec.grants() {
            return Ok(Vec::new());
        }
        let name = cdi_device_name(&self.settings.node_key.0, &spec.name(), set.iter().map(String::as_str));
        let guess = match self.guess.take() {
            Some((guessed, key)) if guessed == set => Some(key),
            _ => None,
        };
        self.in_flight.push(InFlight { ids: set, guess, age: 0 });
        Ok(vec![cdi::qualified_name(&name)])
    }

    fn check_id(&self, spec: ResourceSpec, text: &str) -> Result<(), AllocateError> {
        let owned = || text.to_owned();
        if let Ids::Whole(kind) = spec.ids {
            return match self.gpu_of_id(spec, text) {
                Some(_) => Ok(()),
                None => Err(AllocateError::NotWhole {
                    id: owned(),
                    plural: kind.plural(),
                    known: self.ids_text(spec),
                }),
            };
        }
        let id: DeviceId = text.parse()?;
        let gpu = self.gpu(id.uuid()).ok_or_else(|| AllocateError::UnknownGpu {
            id: owned(),
            uuid: id.uuid().to_owned(),
            known: self.gpu_list(),
        })?;
        match (&id, spec.ids) {
            (DeviceId::Count { .. }, Ids::Count) if spec.covers(gpu) => Ok(()),
            (DeviceId::Memory { slot, .. }, Ids::Units) if u64::from(*slot) < spec.amount(gpu) => Ok(()),
            (DeviceId::Memory { slot, .. }, Ids::Units) => Err(AllocateError::NoSuchSlot {
                id: owned(),
                slot: *slot,
                units: spec.amount(gpu),
                unit: self.settings.unit,
            }),
            _ => Err(AllocateError::OtherResource {
                id: owned(),
                resource: spec.name(),
            }),
        }
    }

    fn ids_text(&self, spec: ResourceSpec) -> String {
        let ids: Vec<String> = self.gpus.iter().flat_map(|gpu| spec.ids_of(gpu)).collect();
        if ids.is_empty() {
            "it has none".to_owned()
        } else {
            ids.join(", ")
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
