//! The configuration file, version v1 (api/config/v1 of NVIDIA/k8s-device-plugin), before defaults are applied.

use serde::Deserialize;
use serde_json::Value;

use crate::Error;

/// The maximum number of entries of each list.
const MOST: usize = 256;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct File {
    version: Option<String>,
    pub(crate) flags: Flags,
    pub(crate) resources: Resources,
    pub(crate) sharing: Sharing,
    pub(crate) imex: Imex,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct Flags {
    pub(crate) mig_strategy: Option<String>,
    pub(crate) fail_on_init_error: Option<bool>,
    pub(crate) mps_root: Option<String>,
    pub(crate) nvidia_driver_root: Option<String>,
    pub(crate) nvidia_dev_root: Option<String>,
    pub(crate) gdrcopy_enabled: Option<bool>,
    pub(crate) gds_enabled: Option<bool>,
    pub(crate) mofed_enabled: Option<bool>,
    #[serde(rename = "useNodeFeatureAPI")]
    pub(crate) use_node_feature_api: Option<bool>,
    pub(crate) device_discovery_strategy: Option<String>,
    pub(crate) plugin: Plugin,
    pub(crate) gfd: Gfd,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct Plugin {
    pub(crate) pass_device_specs: Option<bool>,
    pub(crate) device_list_strategy: Option<OneOrMany>,
    #[serde(rename = "deviceIDStrategy")]
    pub(crate) device_id_strategy: Option<String>,
    pub(crate) cdi_annotation_prefix: Option<String>,
    #[serde(rename = "nvidiaCTKPath")]
    pub(crate) nvidia_ctk_path: Option<String>,
    pub(crate) container_driver_root: Option<String>,
    pub(crate) shared_devices_allocation_policy: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct Gfd {
    pub(crate) oneshot: Option<bool>,
    pub(crate) no_timestamp: Option<bool>,
    pub(crate) sleep_interval: Option<Interval>,
    pub(crate) output_file: Option<String>,
    pub(crate) machine_type_file: Option<String>,
}

/// A text in which commas separate several values, or a list of texts.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(crate) enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

/// A number of nanoseconds, or a duration such as `60s`.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(crate) enum Interval {
    Nanoseconds(u64),
    Text(String),
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Resources {
    pub(crate) gpus: Vec<Pattern>,
    pub(crate) mig: Vec<Pattern>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Pattern {
    pub(crate) pattern: String,
    pub(crate) name: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct Sharing {
    pub(crate) time_slicing: Option<Replicated>,
    pub(crate) mps: Option<Replicated>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct Replicated {
    pub(crate) rename_by_default: bool,
    pub(crate) fail_requests_greater_than_one: Option<bool>,
    pub(crate) resources: Vec<Shared>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Shared {
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) rename: Option<String>,
    #[serde(default)]
    pub(crate) devices: Option<Devices>,
    pub(crate) replicas: i64,
}

/// Which devices are shared: `all`, a number of devices, or a list of indices and UUIDs.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(crate) enum Devices {
    Count(i64),
    Word(String),
    List(Vec<IndexOrText>),
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(crate) enum IndexOrText {
    Index(u32),
    Text(String),
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Imex {
    #[serde(rename = "channelIDs")]
    pub(crate) channel_ids: Option<Vec<i64>>,
    pub(crate) required: Option<bool>,
}

/// Parse a file, as YAML or JSON. An empty text is a file without values. Also return a warning for each unknown key.
pub(crate) fn parse(text: &str) -> Result<(File, Vec<String>), Error> {
    let broken = |error: &dyn std::fmt::Display| Error::file(format!("unmarshal error: {error}"));
    if text.trim().is_empty() {
        return Ok((File::default(), Vec::new()));
    }
    let value: Value = serde_saphyr::from_str(text).map_err(|error| broken(&error))?;
    if value.is_null() {
        return Ok((File::default(), Vec::new()));
    }
    let mut unknown = Vec::new();
    let file: File = serde_ignored::deserialize(&value, |path| {
        if unknown.len() < MOST {
            // serde_ignored writes a question mark for an optional value.
            let path = path.to_string().replace(".?", "");
            unknown.push(format!(
                "the configuration file has the key {path}, which does not exist; it has no effect"
            ));
        }
    })
    .map_err(|error| broken(&error))?;
    match file.version.as_deref() {
        None | Some("" | "v1") => {}
        Some(other) => return Err(Error::file(format!("unknown version: {other}"))),
    }
    let shared = [&file.sharing.time_slicing, &file.sharing.mps].into_iter().flatten();
    let lists = shared.map(|shared| shared.resources.len());
    let lists = lists.chain([file.resources.gpus.len(), file.resources.mig.len()]);
    if let Some(length) = lists.max().filter(|length| *length > MOST) {
        return Err(Error::file(format!(
            "the configuration file has a list of {length} resources; at most {MOST} are allowed"
        )));
    }
    Ok((file, unknown))
}
