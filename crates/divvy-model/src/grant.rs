use std::collections::BTreeSet;

use hmac::{Hmac, KeyInit, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use crate::limits::{ALLOCATION_BYTES, quoted};
use crate::{ContainerShare, Error, GpuShare, MemoryUnit, PodKey};

/// The record of a grant, which allows one container to start on these GPUs. The file is `<state-dir>/grants/<pod
/// uid>_<container>.json`.
///
/// The agent writes the record before the CDI spec, which is derived from the record. The agent removes the record only when the
/// pod is gone or has ended *and* the pod's cgroup is empty. See `docs/design/allocation.md`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Hash)]
#[serde(rename_all = "camelCase")]
pub struct GrantRecord {
    /// Format version, 1.
    pub v: u32,
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub name: String,
    /// The pod's UID.
    pub uid: String,
    /// The container's name.
    pub container: String,
    /// The name of the CDI device, without the kind. `None` if the AllocateResponse that the kubelet recorded does not name a CDI
    /// device of Divvy, because another device plugin sent that response. In this case, the record only accounts for the memory.
    pub cdi: Option<String>,
    /// The unit at the time of the grant, in MiB. The container's `ALIYUN_COM_GPU_MEM_*` environment variables use this unit.
    #[serde(rename = "unitMiB")]
    pub unit: MemoryUnit,
    /// The pod's effective total on each GPU, as in the allocation. The agent counts it once per pod, even if several containers
    /// of the pod have records.
    pub gpus: Vec<GpuShare>,
    /// The shares that this container may use.
    pub container_gpus: Vec<ContainerShare>,
    /// Whether the container gets the guard in the place of CUDA's driver library.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub guarded: bool,
    /// The part of its GPUs' threads that MPS leaves to each process of the container, in percent; 0 if it has no limit.
    #[serde(default, skip_serializing_if = "unlimited")]
    pub threads: u32,
    /// The value of `/proc/sys/kernel/random/boot_id` at the time of the grant. If the current value differs, the node has
    /// rebooted since.
    pub boot_id: String,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn unlimited(threads: &u32) -> bool {
    *threads == 0
}

impl GrantRecord {
    /// Return the file's name, `<pod uid>_<container>.json`. The name is unambiguous because neither part can contain `_` or `/`:
    /// a UID consists of hexadecimal digits and dashes, and a container's name is a DNS label. [`GrantRecord::parse`] refuses any
    /// other values.
    pub fn file_name(&self) -> String {
        format!("{}_{}.json", self.uid, self.container)
    }

    /// Parse a record. Fails if a UID, container name, or CDI name could lead to a path outside of the directory.
    pub fn parse(text: &str) -> Result<GrantRecord, Error> {
        const WHAT: &str = "grant record";
        let record: GrantRecord = crate::parse_versioned(WHAT, text, ALLOCATION_BYTES)?;
        let plain = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'.');
        let cdi = record.cdi.as_ref().map(|cdi| ("cdi", cdi));
        for (field, value) in [("uid", &record.uid), ("container", &record.container)]
            .into_iter()
            .chain(cdi)
        {
            if !plain(value) || value.starts_with('.') {
                return Err(Error::invalid(
                    WHAT,
                    format!("{field} is {}, which is not a valid name", quoted(value)),
                ));
            }
        }
        Ok(record)
    }

    /// Return the text of the file: one line of JSON and a newline.
    pub fn to_json(&self) -> String {
        let mut text = serde_json::to_string(self).expect("a record has only string keys and numbers");
        text.push('\n');
        text
    }

    /// Return the pod's namespace and name.
    pub fn pod(&self) -> PodKey {
        PodKey {
            namespace: self.namespace.clone(),
            name: self.name.clone(),
        }
    }
}

/// Compute the CDI device name of a set of device ids: the first 32 hexadecimal digits of `HMAC-SHA256(node key, resource 0x00
/// sorted ids joined by ",")`. A program without the node's key cannot guess the name of another container's grant.
pub fn cdi_device_name<'a>(key: &[u8], resource: &str, ids: impl IntoIterator<Item = &'a str>) -> String {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes a key of any length");
    mac.update(resource.as_bytes());
    mac.update(&[0]);
    for (i, id) in ids.into_iter().collect::<BTreeSet<_>>().into_iter().enumerate() {
        if i > 0 {
            mac.update(b",");
        }
        mac.update(id.as_bytes());
    }
    let mut name = String::with_capacity(32);
    for byte in &mac.finalize().into_bytes()[..16] {
        name.push(char::from_digit(u32::from(byte >> 4), 16).expect("four bits"));
        name.push(char::from_digit(u32::from(byte & 15), 16).expect("four bits"));
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MiB;

    /// The name depends on the key, the resource, and the set of ids.
    #[test]
    fn a_device_name_ignores_the_order_of_ids() {
        let name = cdi_device_name(b"key", "aliyun.com/gpu-mem", ["b", "a"]);
        // printf 'aliyun.com/gpu-mem\0a,b' | openssl dgst -sha256 -hmac key
        assert_eq!(name.len(), 32);
        assert_eq!(name, cdi_device_name(b"key", "aliyun.com/gpu-mem", ["a", "b"]));
        assert_ne!(name, cdi_device_name(b"other", "aliyun.com/gpu-mem", ["a", "b"]));
        assert_ne!(name, cdi_device_name(b"key", "aliyun.com/gpu-count", ["a", "b"]));
        assert_ne!(name, cdi_device_name(b"key", "aliyun.com/gpu-mem", ["a"]));
    }

    /// Names that leave the directory are refused.
    #[test]
    fn a_grant_record_survives_its_file() {
        let record = GrantRecord {
            v: 1,
            namespace: "default".into(),
            name: "p".into(),
            uid: "0b1f-2".into(),
            container: "main".into(),
            cdi: Some("00ff".into()),
            unit: MemoryUnit::GIB,
            gpus: vec![GpuShare {
                uuid: "GPU-1".into(),
                memory: MiB(3072),
                cores: 0,
                whole: false,
                enforcement: None,
            }],
            container_gpus: vec![ContainerShare {
                uuid: "GPU-1".into(),
                memory: MiB(3072),
                cores: 0,
            }],
            guarded: false,
            threads: 0,
            boot_id: "b".into(),
        };
        assert_eq!(GrantRecord::parse(&record.to_json()).expect("own text"), record);
        assert_eq!(record.file_name(), "0b1f-2_main.json");
        for bad in ["../x", "", "a/b", ".."] {
            let text = GrantRecord {
                container: bad.into(),
                ..record.clone()
            }
            .to_json();
            assert!(GrantRecord::parse(&text).is_err(), "{bad}");
        }
    }
}
