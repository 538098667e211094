//! The configuration file, version v1 (api/config/v1 of NVIDIA/k8s-device-plugin), before defaults are applied.

use serde_json::Value;
use serde_saphyr::{DuplicateKeyPolicy, Options};

use crate::place::{Keys, PlacedValue, Section, integer, shown};
use crate::{Error, duration};

#[derive(Debug, Default)]
pub(crate) struct PluginConfigFile {
    pub(crate) flags: FileFlags,
    pub(crate) resources: ResourcesSection,
    pub(crate) sharing: SharingSection,
    pub(crate) imex: ImexSection,
}

#[derive(Debug, Default)]
pub(crate) struct FileFlags {
    pub(crate) mig_strategy: Option<String>,
    pub(crate) fail_on_init_error: Option<bool>,
    pub(crate) mps_root: Option<String>,
    pub(crate) nvidia_driver_root: Option<String>,
    pub(crate) nvidia_dev_root: Option<String>,
    pub(crate) gdrcopy_enabled: Option<bool>,
    pub(crate) gds_enabled: Option<bool>,
    pub(crate) mofed_enabled: Option<bool>,
    pub(crate) use_node_feature_api: Option<bool>,
    pub(crate) device_discovery_strategy: Option<String>,
    pub(crate) plugin: PluginSection,
    pub(crate) gfd: Gfd,
}

#[derive(Debug, Default)]
pub(crate) struct PluginSection {
    pub(crate) pass_device_specs: Option<bool>,
    pub(crate) device_list_strategy: Option<Vec<String>>,
    pub(crate) device_id_strategy: Option<String>,
    pub(crate) cdi_annotation_prefix: Option<String>,
    pub(crate) nvidia_ctk_path: Option<String>,
    pub(crate) container_driver_root: Option<String>,
    pub(crate) shared_devices_allocation_policy: Option<String>,
}

#[derive(Debug, Default)]
pub(crate) struct Gfd {
    pub(crate) oneshot: Option<bool>,
    pub(crate) no_timestamp: Option<bool>,
    pub(crate) sleep_interval: Option<Interval>,
    pub(crate) output_file: Option<String>,
    pub(crate) machine_type_file: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Interval {
    Nanoseconds(i64),
    Infinite,
}

#[derive(Debug, Default)]
pub(crate) struct ResourcesSection {
    pub(crate) gpus: Vec<PatternEntry>,
    pub(crate) mig: Vec<PatternEntry>,
}

#[derive(Debug)]
pub(crate) struct PatternEntry {
    pub(crate) pattern: String,
    pub(crate) name: String,
}

#[derive(Debug, Default)]
pub(crate) struct SharingSection {
    pub(crate) time_slicing: Option<Replicated>,
    pub(crate) mps: Option<Replicated>,
}

#[derive(Debug)]
pub(crate) struct Replicated {
    pub(crate) rename_by_default: bool,
    pub(crate) fail_requests_greater_than_one: Option<bool>,
    pub(crate) resources: Vec<SharedResource>,
}

#[derive(Debug)]
pub(crate) struct SharedResource {
    pub(crate) name: String,
    pub(crate) rename: Option<String>,
    pub(crate) devices: DevicesToShare,
    pub(crate) replicas: i64,
}

/// Which devices are shared: `all`, a number of devices, or a list of indices and UUIDs.
#[derive(Debug)]
pub(crate) enum DevicesToShare {
    All,
    Count(u32),
    List(Vec<String>),
}

#[derive(Debug, Default)]
pub(crate) struct ImexSection {
    pub(crate) channel_ids: Option<Vec<i64>>,
    pub(crate) required: Option<bool>,
}

/// Parse a file, as YAML or JSON. An empty text is a file without values. Also return warnings for the operator.
pub(crate) fn parse(text: &str) -> Result<(PluginConfigFile, Vec<String>), Error> {
    let mut warnings = Vec::new();
    let value = document(text, &mut warnings)?;
    let mut root = PlacedValue::root(&value).section(Keys::AnyCase)?;
    let version = root.take("version");
    let file = PluginConfigFile {
        flags: flags(root.section("flags", Keys::AnyCase)?, &mut warnings)?,
        resources: resources(root.section("resources", Keys::AnyCase)?, &mut warnings)?,
        sharing: sharing(root.section("sharing", Keys::AnyCase)?, &mut warnings)?,
        imex: imex(root.section("imex", Keys::AnyCase)?, &mut warnings)?,
    };
    root.end(&mut warnings);
    match version.map(|version| version.value) {
        None | Some(Value::Null) => {}
        Some(Value::String(text)) if text.is_empty() || text == "v1" => {}
        Some(other) => {
            let found = other.as_str().map_or_else(|| shown(other), str::to_owned);
            return Err(Error::file(format!("unknown version: {found}; write version: v1")));
        }
    }
    Ok((file, warnings))
}

/// Read the first YAML document. Of a key that occurs twice, the last value counts. NVIDIA's programs accept both silently.
fn document(text: &str, warnings: &mut Vec<String>) -> Result<Value, Error> {
    let (first, is_all) = first_document(text);
    if !is_all {
        warnings.push("the configuration file has several YAML documents; only the first one counts".to_owned());
    }
    if first.trim().is_empty() {
        return Ok(Value::Null);
    }
    let read = |duplicate_keys| {
        let mut options = Options::default();
        options.duplicate_keys = duplicate_keys;
        options.with_snippet = false;
        serde_saphyr::from_str_with_options::<Value>(first, options)
    };
    match read(DuplicateKeyPolicy::Error) {
        Err(serde_saphyr::Error::DuplicateMappingKey { key, .. }) => {
            warnings.push(format!(
                "the configuration file has the key {} twice; the last one counts",
                key.unwrap_or_default()
            ));
            read(DuplicateKeyPolicy::LastWins)
        }
        read => read,
    }
    .map_err(|error| Error::file(format!("unmarshal error: error converting YAML to JSON: yaml: {error}")))
}

/// Return the first YAML document of a text, and whether it is the only one. The lines `---` and `...` delimit documents; YAML allows them
/// nowhere else at the start of a line.
fn first_document(text: &str) -> (&str, bool) {
    let is_marker = |line: &str, marker: &str| {
        let rest = line.strip_prefix(marker);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(char::is_whitespace))
    };
    let mut has_begun = false;
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        let is_start = is_marker(line, "---");
        if is_marker(line, "...") || is_start && has_begun {
            let rest = text.get(at..).unwrap_or_default();
            let says_something = |line: &str| !line.is_empty() && !line.starts_with('#') && line != "---" && line != "...";
            return (
                text.get(..at).unwrap_or_default(),
                !rest.lines().map(str::trim).any(says_something),
            );
        }
        let is_content = !line.trim().is_empty() && !line.starts_with(['#', '%']);
        has_begun |= is_start || is_content;
        at += line.len();
    }
    (text, true)
}

fn flags(mut section: Section<'_>, warnings: &mut Vec<String>) -> Result<FileFlags, Error> {
    let flags = FileFlags {
        mig_strategy: section.read("migStrategy", PlacedValue::text)?,
        fail_on_init_error: section.read("failOnInitError", PlacedValue::boolean)?,
        mps_root: section.read("mpsRoot", PlacedValue::text)?,
        nvidia_driver_root: section.read("nvidiaDriverRoot", PlacedValue::text)?,
        nvidia_dev_root: section.read("nvidiaDevRoot", PlacedValue::text)?,
        gdrcopy_enabled: section.read("gdrcopyEnabled", PlacedValue::boolean)?,
        gds_enabled: section.read("gdsEnabled", PlacedValue::boolean)?,
        mofed_enabled: section.read("mofedEnabled", PlacedValue::boolean)?,
        use_node_feature_api: section.read("useNodeFeatureAPI", PlacedValue::boolean)?,
        device_discovery_strategy: section.read("deviceDiscoveryStrategy", PlacedValue::text)?,
        plugin: plugin(section.section("plugin", Keys::AnyCase)?, warnings)?,
        gfd: gfd(section.section("gfd", Keys::AnyCase)?, warnings)?,
    };
    section.end(warnings);
    Ok(flags)
}

fn plugin(mut section: Section<'_>, warnings: &mut Vec<String>) -> Result<PluginSection, Error> {
    let plugin = PluginSection {
        pass_device_specs: section.read("passDeviceSpecs", PlacedValue::boolean)?,
        device_list_strategy: section.read("deviceListStrategy", one_or_many)?,
        device_id_strategy: section.read("deviceIDStrategy", PlacedValue::text)?,
        cdi_annotation_prefix: section.read("cdiAnnotationPrefix", PlacedValue::text)?,
        nvidia_ctk_path: section.read("nvidiaCTKPath", PlacedValue::text)?,
        container_driver_root: section.read("containerDriverRoot", PlacedValue::text)?,
        shared_devices_allocation_policy: section.read("sharedDevicesAllocationPolicy", PlacedValue::text)?,
    };
    section.end(warnings);
    Ok(plugin)
}

fn gfd(mut section: Section<'_>, warnings: &mut Vec<String>) -> Result<Gfd, Error> {
    let gfd = Gfd {
        oneshot: section.read("oneshot", PlacedValue::boolean)?,
        no_timestamp: section.read("noTimestamp", PlacedValue::boolean)?,
        sleep_interval: section.read("sleepInterval", interval)?,
        output_file: section.read("outputFile", PlacedValue::text)?,
        machine_type_file: section.read("machineTypeFile", PlacedValue::text)?,
    };
    section.end(warnings);
    Ok(gfd)
}

/// Read a text in which commas separate several values, or a list of texts.
fn one_or_many(place: PlacedValue<'_>) -> Result<Option<Vec<String>>, Error> {
    let found = shown(place.value);
    let wrong = || {
        Error::decoding(format!(
            "invalid deviceListStrategy: {found}; write envvar, or a list such as [envvar, cdi-cri]"
        ))
    };
    match place.value {
        Value::Null => Ok(None),
        Value::String(text) => Ok(Some(text.split(',').map(|part| part.trim().to_owned()).collect())),
        Value::Array(_) => {
            let texts = place.list()?.into_iter().map(|entry| entry.value.as_str().map(str::to_owned));
            texts.collect::<Option<_>>().map(Some).ok_or_else(wrong)
        }
        _ => Err(wrong()),
    }
}

/// Read a number of nanoseconds, or a duration such as `60s`.
#[expect(
    clippy::cast_possible_truncation,
    reason = "as in Go: what is behind the point does not count"
)]
fn interval(place: PlacedValue<'_>) -> Result<Option<Interval>, Error> {
    const WRITE: &str = "write 60s, 1h30m, or infinite as";
    match place.value {
        Value::Null => Ok(None),
        Value::String(text) if text == "infinite" => Ok(Some(Interval::Infinite)),
        Value::String(text) => match duration::parse(text) {
            Ok(nanoseconds) => Ok(Some(Interval::Nanoseconds(nanoseconds))),
            Err(error) => Err(place.refused(error, WRITE)),
        },
        Value::Number(number) => {
            let whole = number.as_i64().or_else(|| number.as_f64().map(|number| number as i64));
            Ok(whole.map(Interval::Nanoseconds))
        }
        _ => Err(place.refused("invalid duration", WRITE)),
    }
}

fn resources(mut section: Section<'_>, warnings: &mut Vec<String>) -> Result<ResourcesSection, Error> {
    let mut patterns = |key| -> Result<Vec<PatternEntry>, Error> {
        let entries = section.list(key)?.into_iter();
        entries.map(|entry| pattern(entry, warnings)).collect()
    };
    let resources = ResourcesSection {
        gpus: patterns("gpus")?,
        mig: patterns("mig")?,
    };
    section.end(warnings);
    Ok(resources)
}

fn pattern(place: PlacedValue<'_>, warnings: &mut Vec<String>) -> Result<PatternEntry, Error> {
    let missing = |key: &str| {
        let text = format!("resources must have a '{key}' field set");
        place.refused(text, &format!("add {key} to"))
    };
    let mut section = place.clone().section(Keys::Exact)?;
    let pattern = PatternEntry {
        pattern: section
            .read("pattern", PlacedValue::text)?
            .ok_or_else(|| missing("pattern"))?,
        name: section.read("name", PlacedValue::text)?.ok_or_else(|| missing("name"))?,
    };
    section.end(warnings);
    Ok(pattern)
}

fn sharing(mut section: Section<'_>, warnings: &mut Vec<String>) -> Result<SharingSection, Error> {
    let sharing = SharingSection {
        time_slicing: section
            .take("timeSlicing")
            .map(|place| replicated(place, warnings))
            .transpose()?,
        // NVIDIA's programs refuse `timeSlicing: null`, and accept `mps: null`.
        mps: match section.take("mps") {
            Some(place) if !place.value.is_null() => Some(replicated(place, warnings)?),
            _ => None,
        },
    };
    section.end(warnings);
    Ok(sharing)
}

fn replicated(place: PlacedValue<'_>, warnings: &mut Vec<String>) -> Result<Replicated, Error> {
    let mut section = place.clone().section(Keys::Exact)?;
    let entries = section.list("resources")?;
    if entries.is_empty() {
        return Err(place.refused("no resources specified", "add resources to"));
    }
    let replicated = Replicated {
        rename_by_default: section.read("renameByDefault", PlacedValue::boolean)?.unwrap_or(false),
        fail_requests_greater_than_one: section.read("failRequestsGreaterThanOne", PlacedValue::boolean)?,
        resources: entries
            .into_iter()
            .map(|entry| shared(entry, warnings))
            .collect::<Result<_, _>>()?,
    };
    section.end(warnings);
    Ok(replicated)
}

fn shared(place: PlacedValue<'_>, warnings: &mut Vec<String>) -> Result<SharedResource, Error> {
    let mut section = place.clone().section(Keys::Exact)?;
    let name = section.read("name", PlacedValue::text)?;
    let devices = section.read("devices", |place| devices(place, warnings).map(Some))?;
    let replicas = section.read("replicas", PlacedValue::integer)?;
    let shared = SharedResource {
        name: name.ok_or_else(|| place.refused("no resource name specified", "add name: gpu to"))?,
        rename: section.read("rename", PlacedValue::text)?,
        devices: devices.unwrap_or(DevicesToShare::All),
        replicas: replicas.ok_or_else(|| place.refused("no replicas specified", "add replicas, such as replicas: 4, to"))?,
    };
    section.end(warnings);
    Ok(shared)
}

fn devices(place: PlacedValue<'_>, warnings: &mut Vec<String>) -> Result<DevicesToShare, Error> {
    let found = shown(place.value);
    let write = "write all, a number, or a list as";
    match place.value {
        Value::Null => Ok(DevicesToShare::All),
        Value::String(word) if word == "all" => Ok(DevicesToShare::All),
        Value::String(word) => {
            let text = format!("devices set as '{word}' but the only valid string input is 'all'");
            Err(place.refused(text, write))
        }
        Value::Array(list) if list.is_empty() => {
            warnings.push("devices is an empty list in the configuration file; all devices are shared".to_owned());
            Ok(DevicesToShare::All)
        }
        Value::Array(_) => {
            let listed = place.list()?;
            let named = listed.iter().filter(|entry| !entry.value.is_null());
            let text = |entry: &PlacedValue<'_>| match (entry.value, integer(entry.value)) {
                (Value::String(text), _) => Ok(text.clone()),
                (_, Some(index)) if index >= 0 => Ok(index.to_string()),
                _ => Err(entry.wrong("an index (0, \"0:1\") or a UUID (GPU-…, MIG-…)")),
            };
            Ok(DevicesToShare::List(named.map(text).collect::<Result<_, _>>()?))
        }
        Value::Number(_) => match integer(place.value) {
            Some(..1) => {
                let text = format!("devices set as '{found}' but a count of devices must be > 0");
                Err(place.refused(text, write))
            }
            Some(count) => Ok(DevicesToShare::Count(u32::try_from(count).unwrap_or(u32::MAX))),
            None => Err(place.refused(format!("unrecognized type for devices spec: {found}"), write)),
        },
        _ => Err(place.refused(format!("unrecognized type for devices spec: {found}"), write)),
    }
}

fn imex(mut section: Section<'_>, warnings: &mut Vec<String>) -> Result<ImexSection, Error> {
    let number = |entry: PlacedValue<'_>| entry.clone().integer()?.ok_or_else(|| entry.wrong("the number of a channel"));
    let ids = |place: PlacedValue<'_>| {
        let ids = place.list()?.into_iter().map(number);
        ids.collect::<Result<Vec<i64>, Error>>().map(Some)
    };
    let imex = ImexSection {
        channel_ids: section.read("channelIDs", ids)?,
        required: section.read("required", PlacedValue::boolean)?,
    };
    section.end(warnings);
    Ok(imex)
}
