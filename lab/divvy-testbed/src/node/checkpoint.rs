//! `kubelet_internal_checkpoint`: the state that the device manager keeps across a restart.
//!
//! The format is the kubelet's (`pkg/kubelet/cm/devicemanager/checkpoint/checkpoint.go`). Simplification: a real `Checksum` is FNV-1a of
//! Go's printed form of the data, which only Go can compute; here it is FNV-1a of the data's JSON. Programs other than the kubelet
//! cannot verify the checksum and do not.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use divvy_kubelet::api::v1beta1::ContainerAllocateResponse;
use prost::Message as _;
use serde::{Deserialize, Serialize};

use super::devices::{DeviceBooks, DeviceHolder, HeldDevices};

/// The file's name in the device plugin directory.
pub const FILE: &str = "kubelet_internal_checkpoint";

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct CheckpointFile {
    data: CheckpointBody,
    checksum: u64,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct CheckpointBody {
    pod_device_entries: Option<Vec<CheckpointPodDevices>>,
    registered_devices: BTreeMap<String, Vec<String>>,
}

#[derive(Debug, Serialize, Deserialize)]
struct CheckpointPodDevices {
    #[serde(rename = "PodUID")]
    pod_uid: String,
    #[serde(rename = "ContainerName")]
    container_name: String,
    #[serde(rename = "ResourceName")]
    resource_name: String,
    #[serde(rename = "DeviceIDs")]
    device_ids: BTreeMap<String, Vec<String>>,
    #[serde(rename = "AllocResp")]
    alloc_resp: String,
}

/// The contents of a checkpoint: the holders, and the resources that had registered.
#[derive(Debug, Default)]
pub struct Restored {
    /// The devices that each holder has.
    pub held: BTreeMap<DeviceHolder, HeldDevices>,
    /// The names of the registered resources.
    pub registered: BTreeSet<String>,
}

fn checksum(data: &[u8]) -> u64 {
    let hash = data.iter().fold(0x811c_9dc5_u32, |hash, byte| {
        (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193)
    });
    u64::from(hash)
}

/// Render the device manager's records as the text of the file.
pub fn render(books: &DeviceBooks) -> String {
    let entries = books.holders().iter().map(|(holder, held)| CheckpointPodDevices {
        pod_uid: holder.pod.clone(),
        container_name: holder.container.clone(),
        resource_name: holder.resource.clone(),
        device_ids: books
            .by_numa(&holder.resource, &held.ids)
            .into_iter()
            .map(|(node, ids)| (node.to_string(), ids))
            .collect(),
        alloc_resp: STANDARD.encode(held.response.encode_to_vec()),
    });
    let entries: Vec<CheckpointPodDevices> = entries.collect();
    let registered = books.healthy().iter();
    let data = CheckpointBody {
        // Go writes a nil slice as null.
        pod_device_entries: (!entries.is_empty()).then_some(entries),
        registered_devices: registered
            .map(|(resource, ids)| (resource.clone(), ids.iter().cloned().collect()))
            .collect(),
    };
    let checksum = checksum(serde_json::to_string(&data).unwrap_or_default().as_bytes());
    serde_json::to_string(&CheckpointFile { data, checksum }).unwrap_or_default()
}

/// Why a checkpoint cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum UnreadableCheckpoint {
    /// The file or its data is not the JSON of a checkpoint.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// The data does not have the file's checksum.
    #[error("checkpoint is corrupted")]
    Corrupted,
    /// A plugin's response is not in base64.
    #[error(transparent)]
    Base64(#[from] base64::DecodeError),
    /// A plugin's response is not a message.
    #[error(transparent)]
    Message(#[from] prost::DecodeError),
}

/// Parse a checkpoint's text.
pub fn parse(text: &str) -> Result<Restored, UnreadableCheckpoint> {
    let file: CheckpointFile = serde_json::from_str(text)?;
    let data = serde_json::to_string(&file.data)?;
    if checksum(data.as_bytes()) != file.checksum {
        return Err(UnreadableCheckpoint::Corrupted);
    }
    let mut restored = Restored {
        registered: file.data.registered_devices.into_keys().collect(),
        ..Restored::default()
    };
    for entry in file.data.pod_device_entries.unwrap_or_default() {
        let bytes = STANDARD.decode(&entry.alloc_resp)?;
        let response = ContainerAllocateResponse::decode(bytes.as_slice())?;
        let holder = DeviceHolder {
            pod: entry.pod_uid,
            container: entry.container_name,
            resource: entry.resource_name,
        };
        let ids = entry.device_ids.into_values().flatten().collect();
        restored.held.insert(holder, HeldDevices { ids, response });
    }
    Ok(restored)
}

/// Replace a file atomically: readers see either the old text or the new one.
pub(crate) fn replace(path: &Path, text: &str) -> std::io::Result<()> {
    let temporary = path.with_extension("tmp");
    std::fs::write(&temporary, text)?;
    std::fs::rename(&temporary, path)
}
