//! An error that a driver reports on its own.

use divvy_model::Vendor;
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::facts::{is_text, is_uuid};

/// The maximum length of a fault's name in bytes.
const NAME_BYTES: usize = 64;

/// An error of a GPU. The module of the GPU's vendor decides what the code means, so readers do not need to know any codes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// The vendor of the GPU.
    pub vendor: Vendor,
    /// The GPU's UUID, or `None` for every GPU of the vendor, if the driver does not name one.
    pub uuid: Option<String>,
    /// The vendor's number: an XID (NVIDIA), or the number of uncorrectable errors so far (AMD).
    pub code: u64,
    /// Whether the GPU cannot run new work until it has recovered.
    pub fatal: bool,
    /// The usual name of the fault, such as `XID 79`. It becomes the reason in the inventory and in events.
    pub name: String,
    /// MIG's GPU instance and compute instance. `None` without MIG, and if the driver does not name both.
    #[serde(default)]
    pub partition: Option<(u32, u32)>,
}

impl Fault {
    /// Refuse a fault that no probe can have sent, because its texts become part of logs, events, and the inventory.
    pub(crate) fn validate(&self) -> Result<(), Error> {
        if self.uuid.as_deref().is_some_and(|uuid| !is_uuid(uuid)) {
            return Err(Error::Protocol("a fault has a malformed UUID".to_owned()));
        }
        if self.name.is_empty() || !is_text(&self.name, NAME_BYTES) {
            return Err(Error::Protocol(format!(
                "the name of a fault is not printable text of 1 to {NAME_BYTES} bytes"
            )));
        }
        Ok(())
    }
}
