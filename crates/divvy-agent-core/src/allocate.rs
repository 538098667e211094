//! Allocate: return an opaque name for a set of device ids. The call does not name the pod, and this step does not need
//! to know it.

use std::collections::BTreeSet;

use divvy_cdi as cdi;
use divvy_model::{DeviceId, cdi_device_name};

use super::{Core, Ids, InFlight, ResourceSpec};

impl Core {
    /// Return the CDI devices for one container request: `divvy.dev/grant=<name>`, or none for a resource that grants nothing. The kubelet
    /// records the answer and replays it after a restart or a reboot without another call. Therefore the answer depends only on the node's
    /// key and the ids.
    ///
    /// The error becomes the pod's final message (`UnexpectedAdmissionError`), so it says what was found.
    pub fn allocate(&mut self, spec: ResourceSpec, ids: &[String]) -> Result<Vec<String>, String> {
        if ids.is_empty() {
            return Err(format!(
                "the kubelet requested no device of {}; at least one is needed",
                spec.name()
            ));
        }
        let mut set = BTreeSet::new();
        for id in ids {
            self.check_id(spec, id)?;
            if !set.insert(id.clone()) {
                return Err(format!("device id {id:?} appears twice"));
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

    fn check_id(&self, spec: ResourceSpec, text: &str) -> Result<(), String> {
        if let Ids::Whole(kind) = spec.ids {
            return match self.gpu_of_id(spec, text) {
                Some(_) => Ok(()),
                None => Err(format!(
                    "device id {text:?} names none of this node's {} ({})",
                    kind.plural(),
                    self.ids_text(spec)
                )),
            };
        }
        let id: DeviceId = text.parse().map_err(|error: divvy_model::Error| error.to_string())?;
        let gpu = self.gpu(id.uuid()).ok_or_else(|| {
            format!(
                "device id {text:?} names GPU {}, which this node does not have (GPUs: {})",
                id.uuid(),
                self.gpu_list()
            )
        })?;
        match (&id, spec.ids) {
            (DeviceId::Count { .. }, Ids::Count) if spec.covers(gpu) => Ok(()),
            (DeviceId::Memory { slot, .. }, Ids::Units) if u64::from(*slot) < spec.amount(gpu) => Ok(()),
            (DeviceId::Memory { slot, .. }, Ids::Units) => Err(format!(
                "device id {text:?} is slot {slot} of a GPU that has only {} units of {}",
                spec.amount(gpu),
                self.settings.unit
            )),
            _ => Err(format!("device id {text:?} does not belong to {}", spec.name())),
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
