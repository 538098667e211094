//! The values that Divvy's programs exchange, and their representations as text.
//!
//! Nothing here does I/O, reads a clock, or draws a random number: every result depends only on the
//! arguments. `docs/design/formats.md` defines Divvy's own formats; the gpushare projects define the
//! formats in [`legacy`]. ARCHITECTURE.md says which program writes which format.
//!
//! Each of Divvy's own formats has a field `v`, which contains the version of the format. Readers ignore unknown fields and
//! refuse an unknown version.

#![forbid(unsafe_code)]

mod allocation;
pub mod cgroup;
mod container;
mod device_id;
mod error;
mod grant;
mod inventory;
mod kept;
pub mod legacy;
pub mod limits;
pub mod machine;
mod memory;
mod mig;
pub mod names;
mod node;
pub mod nvidia;
pub mod out_of_service;
mod pod;
mod quantity;
mod request;
mod rules;
pub mod runtime;
pub mod scores;
mod test_run;
pub mod usage;
mod vendor;
mod whole;

pub use allocation::{Allocation, ContainerShare, GpuShare};
pub use container::{ContainerKind, ContainerRequest, WholeContainer};
pub use device_id::DeviceId;
pub use error::Error;
pub use grant::{GrantRecord, cdi_device_name};
pub use inventory::{Enforcement, Gpu, GpuLink, Health, Inventory, LinkKind, Partition};
pub use kept::kept;
pub use memory::{MemoryUnit, MiB};
pub use mig::{MigDevice, MigParts};
pub use node::Node;
pub use pod::{Held, Phase, Pod, PodKey};
pub use quantity::{parse_quantity, quantity_milli, quantity_value};
pub use request::{PodRequest, WholeRequest};
pub use rules::{ALL_CORES, GpuRules, Isolation, MOST_GPUS, ModelRule, Prefer};
pub use test_run::TestRun;
pub use vendor::Vendor;
pub use whole::{MigProfile, WholeKind};

/// Parse one of Divvy's JSON formats of which only version 1 exists. See [`parse_versions`].
fn parse_versioned<T: serde::de::DeserializeOwned>(what: &'static str, text: &str, most: usize) -> Result<T, Error> {
    parse_versions(what, text, most, 1)
}

/// Parse one of Divvy's JSON formats. Refuse a text of more than `most` bytes. Before reading any other field, check that the
/// field `v` is at most `newest`, because a newer format may have fields that this version would misread.
fn parse_versions<T: serde::de::DeserializeOwned>(what: &'static str, text: &str, most: usize, newest: u64) -> Result<T, Error> {
    #[derive(serde::Deserialize)]
    struct VersionField {
        v: serde_json::Value,
    }
    if text.len() > most {
        return Err(Error::too_long(what, text.len(), most));
    }
    let version: VersionField = serde_json::from_str(text).map_err(|source| Error::json(what, &source))?;
    if !version.v.as_u64().is_some_and(|v| (1..=newest).contains(&v)) {
        return Err(Error::Version {
            what,
            found: limits::shortened(&version.v.to_string(), limits::QUOTED_BYTES).into_owned(),
            newest,
        });
    }
    serde_json::from_str(text).map_err(|source| Error::json(what, &source))
}
