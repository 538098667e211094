//! The checkpoint's JSON, with Go's field names.

use std::collections::{BTreeMap, BTreeSet};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use prost::Message as _;
use serde::{Deserialize, Serialize};

use super::{Checkpoint, CheckpointEntry};
use crate::api::v1beta1::ContainerAllocateResponse;
use crate::error::Malformed;
use crate::plugin::AllocateAnswer;

/// The key in the map of NUMA nodes that stands for "no NUMA node".
const NO_NODE: i64 = -1;

#[derive(Deserialize, Serialize)]
struct FileText {
    #[serde(rename = "Data")]
    data: CheckpointData,
    /// The checksum. It may be of any type and is ignored.
    #[serde(rename = "Checksum", default)]
    checksum: serde_json::Value,
}

/// The checkpoint's data. A nil slice or nil map in Go becomes `null`.
#[derive(Deserialize, Serialize)]
struct CheckpointData {
    #[serde(rename = "PodDeviceEntries", default)]
    entries: Option<Vec<PodDevicesEntry>>,
    #[serde(rename = "RegisteredDevices", default)]
    registered: Option<BTreeMap<String, Option<Vec<String>>>>,
}

#[derive(Deserialize, Serialize)]
struct PodDevicesEntry {
    #[serde(rename = "PodUID")]
    pod_uid: String,
    #[serde(rename = "ContainerName")]
    container: String,
    #[serde(rename = "ResourceName")]
    resource: String,
    #[serde(rename = "DeviceIDs", default)]
    ids: Option<DeviceIds>,
    #[serde(rename = "AllocResp", default)]
    answer: Option<String>,
}

#[derive(Deserialize, Serialize)]
#[serde(untagged)]
enum DeviceIds {
    ByNode(BTreeMap<String, Option<Vec<String>>>),
    /// The form before Kubernetes 1.20: a list without NUMA nodes.
    List(Vec<String>),
}

pub(super) fn parse(text: &[u8]) -> Result<Checkpoint, Malformed> {
    let FileText { data, .. } = serde_json::from_slice(text).map_err(Malformed::Json)?;
    let mut checkpoint = Checkpoint {
        registered: data
            .registered
            .unwrap_or_default()
            .into_iter()
            .map(|(name, ids)| (name, ids.unwrap_or_default()))
            .collect(),
        ..Checkpoint::default()
    };
    for entry in data.entries.unwrap_or_default() {
        let answer = match decode(entry.answer.as_deref().unwrap_or_default()) {
            Ok(answer) => answer,
            Err(reason) => {
                let PodDevicesEntry {
                    pod_uid,
                    container,
                    resource,
                    ..
                } = entry;
                checkpoint
                    .skipped
                    .push(format!("{resource} of container {container:?} of pod {pod_uid}: {reason}"));
                continue;
            }
        };
        let (ids, numa) = flatten(entry.ids)?;
        let PodDevicesEntry {
            pod_uid,
            container,
            resource,
            ..
        } = entry;
        checkpoint.entries.push(CheckpointEntry {
            pod_uid,
            container,
            resource,
            ids,
            numa,
            answer,
        });
    }
    Ok(checkpoint)
}

/// Why the kubelet's record of a plugin's answer cannot be read.
#[derive(Debug, thiserror::Error)]
enum BadAnswer {
    #[error("AllocResp is not base64: {0}")]
    Base64(#[from] base64::DecodeError),
    #[error("AllocResp is not a ContainerAllocateResponse: {0}")]
    Message(#[from] prost::DecodeError),
}

fn decode(answer: &str) -> Result<AllocateAnswer, BadAnswer> {
    let bytes = STANDARD.decode(answer)?;
    let response = ContainerAllocateResponse::decode(bytes.as_slice())?;
    Ok(response.into())
}

fn flatten(ids: Option<DeviceIds>) -> Result<(BTreeSet<String>, BTreeMap<String, i64>), Malformed> {
    let mut all = BTreeSet::new();
    let mut numa = BTreeMap::new();
    match ids {
        None => {}
        Some(DeviceIds::List(ids)) => all.extend(ids),
        Some(DeviceIds::ByNode(nodes)) => {
            for (node, ids) in nodes {
                let Ok(number) = node.parse::<i64>() else {
                    return Err(Malformed::NumaNode(node));
                };
                for id in ids.unwrap_or_default() {
                    if number != NO_NODE {
                        numa.insert(id.clone(), number);
                    }
                    all.insert(id);
                }
            }
        }
    }
    Ok((all, numa))
}

pub(super) fn print(checkpoint: &Checkpoint) -> String {
    let entries = checkpoint.entries.iter().map(to_wire).collect();
    let registered = checkpoint
        .registered
        .iter()
        .map(|(name, ids)| (name.clone(), Some(ids.clone())))
        .collect();
    let data = CheckpointData {
        entries: Some(entries),
        registered: Some(registered),
    };
    let text = serde_json::to_string(&data).expect("strings, lists and maps with string keys are always JSON");
    let checksum = fnv1a(text.as_bytes());
    format!("{{\"Data\":{text},\"Checksum\":{checksum}}}")
}

fn to_wire(entry: &CheckpointEntry) -> PodDevicesEntry {
    let mut nodes: BTreeMap<String, Option<Vec<String>>> = BTreeMap::new();
    for id in &entry.ids {
        let node = entry.numa.get(id).copied().unwrap_or(NO_NODE);
        nodes
            .entry(node.to_string())
            .or_default()
            .get_or_insert_default()
            .push(id.clone());
    }
    let answer = STANDARD.encode(ContainerAllocateResponse::from(entry.answer.clone()).encode_to_vec());
    PodDevicesEntry {
        pod_uid: entry.pod_uid.clone(),
        container: entry.container.clone(),
        resource: entry.resource.clone(),
        ids: Some(DeviceIds::ByNode(nodes)),
        answer: Some(answer),
    }
}

fn fnv1a(bytes: &[u8]) -> u32 {
    bytes
        .iter()
        .fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_checksum_is_fnv1a() {
        for (text, want) in [("", 0x811c_9dc5_u32), ("a", 0xe40c_292c), ("foobar", 0xbf9c_f968)] {
            assert_eq!(fnv1a(text.as_bytes()), want, "{text}");
        }
    }

    #[test]
    fn both_forms_of_the_file_are_read() -> Result<(), Malformed> {
        // CDI device "a.b/c=d": field 5, inside it field 1.
        let answer = STANDARD.encode([0x2a, 9, 0x0a, 7, b'a', b'.', b'b', b'/', b'c', b'=', b'd']);
        for ids in [r#"{"-1":["x"],"0":["y"],"7":null}"#, r#"["x","y"]"#] {
            let text = format!(
                r#"{{"Data":{{"PodDeviceEntries":[{{"PodUID":"u","ContainerName":"c","ResourceName":"r/n","DeviceIDs":{ids},
                   "AllocResp":"{answer}","New":1}}],"RegisteredDevices":{{"r/n":["x","y"],"r/m":null}}}},"Checksum":3456789012}}"#
            );
            let checkpoint = parse(text.as_bytes())?;
            let [entry] = checkpoint.entries.as_slice() else {
                panic!("one entry: {checkpoint:?}")
            };
            assert_eq!(
                (entry.pod_uid.as_str(), entry.container.as_str(), entry.resource.as_str()),
                ("u", "c", "r/n")
            );
            assert_eq!(entry.ids, BTreeSet::from(["x".to_owned(), "y".to_owned()]));
            assert_eq!(entry.numa.get("y").copied(), ids.starts_with('{').then_some(0));
            assert_eq!(entry.numa.get("x"), None);
            assert_eq!(entry.cdi_devices(), ["a.b/c=d"]);
            assert_eq!(checkpoint.registered["r/m"], Vec::<String>::new());
        }
        Ok(())
    }

    #[test]
    fn null_where_go_has_nothing_is_nothing() -> Result<(), Malformed> {
        for text in [
            r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":null},"Checksum":0}"#,
            r#"{"Data":{},"Checksum":null}"#,
            r#"{"Data":{}}"#,
        ] {
            assert_eq!(parse(text.as_bytes())?, Checkpoint::default());
        }
        let one = r#"{"Data":{"PodDeviceEntries":[{"PodUID":"u","ContainerName":"c","ResourceName":"r","DeviceIDs":null,"AllocResp":null}]}}"#;
        assert_eq!(parse(one.as_bytes())?.entries.len(), 1);
        Ok(())
    }

    #[test]
    fn an_answer_that_cannot_be_decoded_costs_only_its_entry() -> Result<(), Malformed> {
        let entry = |uid: &str, answer: &str| {
            format!(
                r#"{{"PodUID":"{uid}","ContainerName":"c","ResourceName":"r","DeviceIDs":{{"0":["x"]}},"AllocResp":"{answer}"}}"#
            )
        };
        let entries = [entry("one", "!!"), entry("two", ""), entry("three", "/////w==")].join(",");
        let checkpoint = parse(format!(r#"{{"Data":{{"PodDeviceEntries":[{entries}]}}}}"#).as_bytes())?;
        assert_eq!(
            checkpoint
                .entries
                .iter()
                .map(|entry| entry.pod_uid.as_str())
                .collect::<Vec<_>>(),
            ["two"]
        );
        assert_eq!(checkpoint.skipped.len(), 2);
        assert!(
            checkpoint.skipped[0].contains("pod one") && checkpoint.skipped[0].contains("base64"),
            "{:?}",
            checkpoint.skipped
        );
        Ok(())
    }

    #[test]
    fn a_numa_node_that_is_no_number_is_refused() {
        let text =
            r#"{"Data":{"PodDeviceEntries":[{"PodUID":"u","ContainerName":"c","ResourceName":"r","DeviceIDs":{"one":["x"]}}]}}"#;
        let refusal = parse(text.as_bytes()).expect_err("refused").to_string();
        assert!(refusal.contains("\"one\""), "{refusal}");
    }

    fn entries() -> impl Strategy<Value = CheckpointEntry> {
        let devices = proptest::collection::btree_map("[a-zA-Z0-9:\u{e9}\"\\\\-]{0,12}", proptest::option::of(0_i64..4), 0..6);
        let envs = proptest::collection::btree_map("[A-Z_]{1,6}", ".{0,6}", 0..3);
        (
            "[a-f0-9-]{0,12}",
            ".{0,8}",
            "[a-z./]{0,12}",
            devices,
            envs,
            proptest::collection::vec("[a-z./=]{0,12}", 0..3),
        )
            .prop_map(|(pod_uid, container, resource, devices, envs, cdi_devices)| CheckpointEntry {
                pod_uid,
                container,
                resource,
                ids: devices.keys().cloned().collect(),
                numa: devices
                    .into_iter()
                    .filter_map(|(id, node)| node.map(|node| (id, node)))
                    .collect(),
                answer: AllocateAnswer {
                    envs,
                    cdi_devices,
                    ..AllocateAnswer::default()
                },
            })
    }

    proptest! {
        #[test]
        fn every_checkpoint_survives_its_text(
            entries in proptest::collection::vec(entries(), 0..5),
            registered in proptest::collection::btree_map("[a-z./]{1,8}", proptest::collection::vec("[a-z:0-9]{0,8}", 0..4), 0..3),
        ) {
            let checkpoint = Checkpoint { entries, registered, skipped: Vec::new() };
            prop_assert_eq!(parse(checkpoint.to_text().as_bytes()).expect("a checkpoint"), checkpoint);
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&bytes);
        }

        #[test]
        fn a_damaged_checkpoint_never_panics(
            entries in proptest::collection::vec(entries(), 1..4),
            at in any::<proptest::sample::Index>(),
            byte in any::<u8>(),
            cut in any::<bool>(),
        ) {
            let mut text = Checkpoint { entries, ..Checkpoint::default() }.to_text().into_bytes();
            let at = at.index(text.len());
            if cut { text.truncate(at) } else { text[at] = byte }
            let _ = parse(&text);
        }
    }
}
