//! Adds Divvy's entry to an existing configuration. Everything else in the file stays, except for fields that v1 does not have.

use std::collections::BTreeSet;

use divvy_model::{MigProfile, WholeKind};
use serde_json::{Map, Value, json};

use super::convert::{Converted, to_v1};
use super::{INLINE_NOTE, Inline, PATH, PERCENTAGE, SchedulerConfigError, Stanza, Tls, WEIGHT, WholeConfig};

/// The settings that the merged file must contain.
#[derive(Debug, Clone)]
pub struct WantedSettings {
    /// Divvy's entry.
    pub stanza: Stanza,
    /// The source of the address in `stanza`.
    pub address: ExtenderAddressSource,
    /// The path of the scheduler's kubeconfig, if a flag gives it.
    pub kubeconfig: Option<String>,
    /// The path of the scheduler's kubeconfig if neither a flag nor the file gives it.
    pub default_kubeconfig: String,
    /// The name of a profile that the file must have.
    pub profile: Option<String>,
}

/// The source of the extender's address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExtenderAddressSource {
    /// The address comes from `--extender-url`.
    Flag,
    /// The address is that of the installed extender (`--from-cluster`).
    Cluster,
    /// The address is the default. If the file already has an entry of Divvy, the address of that entry stays.
    Default,
}

/// The merged file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Merged {
    /// The text of the file.
    pub text: String,
    /// One line for each change with its reason, in the order of the file.
    pub notes: Vec<String>,
    /// Those of the notes without whose changes kube-scheduler does not start with a file of version v1.
    pub stops: Vec<String>,
    /// Those of the notes without whose changes pods with GPUs wait, or get a worse GPU.
    pub misplaces: Vec<String>,
}

/// The fields of a configuration in v1, up to Kubernetes 1.36.
const FIELDS: [&str; 14] = [
    "apiVersion",
    "kind",
    "parallelism",
    "leaderElection",
    "clientConnection",
    "enableProfiling",
    "enableContentionProfiling",
    "percentageOfNodesToScore",
    "podInitialBackoffSeconds",
    "podMaxBackoffSeconds",
    "profiles",
    "extenders",
    "delayCacheUntilActive",
    "metadata",
];

const EXTENDER_FIELDS: [&str; 13] = [
    "urlPrefix",
    "filterVerb",
    "preemptVerb",
    "prioritizeVerb",
    "weight",
    "bindVerb",
    "enableHTTPS",
    "tlsConfig",
    "httpTimeout",
    "nodeCacheCapable",
    "managedResources",
    "ignorable",
    "enableHttps",
];

/// Merge the wanted settings into a configuration. `origin` is the file's name, for error messages.
pub fn merge(input: &str, origin: &str, wanted: &WantedSettings) -> Result<Merged, SchedulerConfigError> {
    let value: Value = serde_saphyr::from_str(input).map_err(|error| SchedulerConfigError::NotYaml {
        origin: origin.to_owned(),
        text: error.to_string().trim_start_matches("error: ").to_owned(),
    })?;
    let before = value.clone();
    let Converted { mut config, mut notes } = to_v1(value, origin)?;
    let mut stops: Vec<String> = notes.iter().filter(|note| !note.starts_with("note:")).cloned().collect();
    // A null field is the same as no field.
    config.retain(|_, value| !value.is_null());
    if config.shift_remove("metadata").is_some() {
        notes.push(
            "removed: metadata: this is a file for kube-scheduler, not an object of the cluster; kubectl apply does not accept it"
                .to_owned(),
        );
    }
    let of_file = notes.len();
    unknown(&config, &mut notes);
    client(&mut config, wanted, &mut notes);
    stops.extend_from_slice(&notes[of_file..]);
    let of_nodes = notes.len();
    percentage(&mut config, &mut notes);
    let mut misplaces = notes[of_nodes..].to_vec();
    profile(&mut config, wanted, &mut notes);
    let of_extenders = notes.len();
    let (extenders, ours, stanza) = extenders(&mut config, wanted, origin, &mut notes)?;
    for note in &notes[of_extenders..] {
        match note.split_once(": ") {
            Some(("removed", rest)) if rest.ends_with(SECOND) => stops.push(note.clone()),
            Some(("changed" | "added", rest)) if rest.starts_with("extenders[") => misplaces.push(note.clone()),
            _ => {}
        }
    }
    let comments = input
        .lines()
        .filter(|line| line.trim_start().starts_with('#') && !ours_text(line))
        .count();
    if comments > 0 {
        notes.push(format!(
            "removed: {comments} line{} of comments: they cannot be kept, but are still in the old file",
            if comments == 1 { "" } else { "s" }
        ));
    }
    let text = render(&config, &extenders, ours, &stanza);
    let after: Value = serde_saphyr::from_str(&text).map_err(|error| SchedulerConfigError::NotYaml {
        origin: "the merged file (this is a bug in Divvy; please report it)".to_owned(),
        text: error.to_string(),
    })?;
    if before == after {
        notes.push("unchanged: the file already contains what Divvy needs".to_owned());
    }
    Ok(Merged {
        text,
        notes,
        stops,
        misplaces,
    })
}

/// kube-scheduler refuses two extenders that manage the same resource.
const SECOND: &str = "a second entry for the same resources";

/// Report whether a comment line is one that this program writes.
fn ours_text(line: &str) -> bool {
    let line = line.trim();
    HEAD.lines().chain(PERCENTAGE.lines()).any(|own| own.trim() == line)
        || OWN.get_or_init(own_comments).iter().any(|own| own == line)
}

static OWN: std::sync::OnceLock<Vec<String>> = std::sync::OnceLock::new();

/// Return the comment lines of all configurations that this program can print.
fn own_comments() -> Vec<String> {
    let tls = Tls {
        ca: Some("/".to_owned()),
        ..Tls::default()
    };
    let stanza = Stanza {
        url: "https://".to_owned(),
        tls,
        weight: WEIGHT,
        mig_profiles: BTreeSet::new(),
    };
    let whole = |kubeconfig, lease| {
        WholeConfig {
            stanza: &stanza,
            kubeconfig,
            profile: "",
            lease,
        }
        .text()
    };
    [whole(Some(""), Some(("", ""))), whole(None, None), INLINE_NOTE.to_owned()]
        .iter()
        .flat_map(|text| text.lines())
        .map(|line| line.trim().to_owned())
        .filter(|line| line.starts_with('#'))
        .collect()
}

fn unknown(config: &Map<String, Value>, notes: &mut Vec<String>) {
    let mut say = |path: String, name: &str, known: &[&str]| {
        let near = known.iter().find(|known| known.eq_ignore_ascii_case(name));
        let near = near.map(|near| format!("; did you mean {near}?")).unwrap_or_default();
        notes.push(format!(
            "warning: {path}: not a field of {} up to Kubernetes 1.36, and a scheduler that does not know it does not start; kept unchanged{near}",
            super::API_VERSION
        ));
    };
    for name in config.keys().filter(|name| !FIELDS.contains(&name.as_str())) {
        say(name.clone(), name, &FIELDS);
    }
    let extenders = config.get("extenders").and_then(Value::as_array).into_iter().flatten();
    for (i, extender) in extenders.enumerate() {
        let names = extender.as_object().into_iter().flat_map(Map::keys);
        for name in names.filter(|name| !EXTENDER_FIELDS.contains(&name.as_str())) {
            say(format!("extenders[{i}].{name}"), name, &EXTENDER_FIELDS);
        }
    }
}

fn client(config: &mut Map<String, Value>, wanted: &WantedSettings, notes: &mut Vec<String>) {
    let there = config
        .get("clientConnection")
        .and_then(|client| client.get("kubeconfig"))
        .and_then(Value::as_str)
        .filter(|path| !path.is_empty())
        .map(str::to_owned);
    let path = match (&wanted.kubeconfig, &there) {
        (Some(wanted), Some(there)) if wanted == there => return,
        (None, Some(_)) => return,
        (Some(wanted), Some(there)) => {
            notes.push(format!(
                "changed: clientConnection.kubeconfig {there} to {wanted}: from --kubeconfig-path"
            ));
            wanted
        }
        (wanted_path, None) => {
            let path = wanted_path.as_ref().unwrap_or(&wanted.default_kubeconfig);
            notes.push(format!(
                "added: clientConnection.kubeconfig {path}: with --config, kube-scheduler ignores --kubeconfig; remove the line if kube-scheduler \
                 runs as a pod with a service account"
            ));
            path
        }
    };
    let client = config.entry("clientConnection").or_insert_with(|| json!({}));
    if !client.is_object() {
        *client = json!({});
    }
    client["kubeconfig"] = path.as_str().into();
}

fn percentage(config: &mut Map<String, Value>, notes: &mut Vec<String>) {
    const WHY: &str = "the scheduler must check all nodes; otherwise the extender may see only nodes without room although another node has a free GPU";
    match config.get("percentageOfNodesToScore").and_then(Value::as_u64) {
        Some(100) => {}
        None => notes.push(format!("added: percentageOfNodesToScore 100: {WHY}")),
        Some(was) => notes.push(format!("changed: percentageOfNodesToScore {was} to 100: {WHY}")),
    }
    config.insert("percentageOfNodesToScore".to_owned(), 100.into());
    let profiles = config.get_mut("profiles").and_then(Value::as_array_mut).into_iter().flatten();
    for (i, profile) in profiles.enumerate() {
        if let Some(value) = profile.get_mut("percentageOfNodesToScore")
            && value.as_u64() != Some(100)
        {
            notes.push(format!(
                "changed: profiles[{i}].percentageOfNodesToScore {value} to 100: it overrides the value of the whole file"
            ));
            *value = 100.into();
        }
    }
}

fn profile(config: &mut Map<String, Value>, wanted: &WantedSettings, notes: &mut Vec<String>) {
    let Some(name) = &wanted.profile else { return };
    let profiles = config.entry("profiles").or_insert_with(|| json!([]));
    let Value::Array(profiles) = profiles else { return };
    let is_there = |profile: &Value| {
        let own = profile.get("schedulerName").and_then(Value::as_str);
        own.unwrap_or(super::DEFAULT_PROFILE) == name
    };
    if !profiles.iter().any(is_there) {
        notes.push(format!(
            "added: profile {name}: from --profile; every profile calls the extender"
        ));
        profiles.push(json!({ "schedulerName": name }));
    }
}

/// Return the other extenders, the position of Divvy's entry among them, and Divvy's entry.
fn extenders(
    config: &mut Map<String, Value>,
    wanted: &WantedSettings,
    origin: &str,
    notes: &mut Vec<String>,
) -> Result<(Vec<Value>, usize, Stanza), SchedulerConfigError> {
    let list = match config.shift_remove("extenders") {
        Some(Value::Array(list)) => list,
        Some(other) => {
            return Err(SchedulerConfigError::Conflict {
                origin: origin.to_owned(),
                path: "extenders".to_owned(),
                found: format!("is {other}, not a list"),
                why: "kube-scheduler does not start with it".to_owned(),
                instead: "Write each extender as an item that starts with a dash, or remove the field.".to_owned(),
            });
        }
        None => Vec::new(),
    };
    let mut rest = Vec::new();
    let mut place = None;
    let mut stanza = wanted.stanza.clone();
    for (i, extender) in list.into_iter().enumerate() {
        let path = format!("extenders[{i}]");
        let url = extender
            .get("urlPrefix")
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned();
        let managed: Vec<&str> = extender
            .get("managedResources")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .filter_map(|resource| resource.get("name")?.as_str())
            .collect();
        let of_ours = managed.iter().filter(|name| super::is_managed(name)).count();
        let is_in_both = managed.iter().any(|name| stanza.resources().any(|ours| ours == **name));
        let replaced = url.trim_end_matches('/').ends_with(PATH) || (is_in_both && of_ours == managed.len());
        let clash = |found: String, why: &str| SchedulerConfigError::Conflict {
            origin: origin.to_owned(),
            path: path.clone(),
            found,
            why: why.to_owned(),
            instead: format!("If Divvy is to manage the GPUs, remove that entry, or the conflicting field, from {origin}."),
        };
        if replaced {
            if place.is_some() {
                notes.push(format!("removed: {path} ({url}): {SECOND}"));
                continue;
            }
            place = Some(rest.len());
            if wanted.address == ExtenderAddressSource::Default {
                stanza = keep_address(&extender, &url, &stanza);
            }
            keep_weight(&extender, &mut stanza);
            // Other nodes' MIG devices, for which the command was run before.
            stanza = stanza.with_mig(managed.iter().filter_map(|name| mig_profile(name)));
            explain_replaced(&extender, &stanza, wanted.address, &path, &url, notes);
        } else if is_in_both {
            return Err(clash(
                format!("({url}) manages {}", managed.join(", ")),
                "a resource can have only one extender, and kube-scheduler would call both",
            ));
        } else if extender
            .get("bindVerb")
            .and_then(Value::as_str)
            .is_some_and(|verb| !verb.is_empty())
        {
            return Err(clash(
                format!("({url}) has a bindVerb"),
                "kube-scheduler does not start with two extenders that bind, and Divvy's extender must bind",
            ));
        } else {
            if managed.is_empty() {
                notes.push(format!(
                    "note: {path} ({url}) has no managedResources, so the scheduler calls it for every pod, including GPU pods; kept"
                ));
            }
            rest.push(extender);
        }
    }
    if place.is_none() {
        notes.push(format!(
            "added: the extender at {} for {}: without it the scheduler binds every GPU pod by node sums only, without a GPU",
            stanza.url,
            stanza.resources().collect::<Vec<_>>().join(", ")
        ));
    }
    Ok((rest.clone(), place.unwrap_or(rest.len()), stanza))
}

/// Return Divvy's entry with the address and the TLS settings of the entry in the file.
fn keep_address(extender: &Value, url: &str, stanza: &Stanza) -> Stanza {
    let mut kept = stanza.at(url.trim_end_matches('/'));
    if !kept.url.ends_with(PATH) {
        return stanza.clone();
    }
    let field = |name: &str| Some(extender.pointer(&format!("/tlsConfig/{name}"))?.as_str()?.to_owned());
    if kept.https() {
        let there = Tls {
            ca: field("caFile"),
            cert: field("certFile"),
            key: field("keyFile"),
            server_name: field("serverName"),
            inline: field("caData").map(|ca| Inline {
                ca,
                cert: field("certData").unwrap_or_default(),
                key: field("keyData").unwrap_or_default(),
            }),
        };
        if stanza.tls == Tls::default() {
            kept.tls = there;
        }
    } else {
        kept.tls = Tls::default();
    }
    kept
}

/// Return the profile of the MIG devices that this resource stands for.
fn mig_profile(resource: &str) -> Option<MigProfile> {
    match WholeKind::of_resource(resource)? {
        WholeKind::Mig(profile) => Some(profile),
        WholeKind::Gpu(_) => None,
    }
}

/// Keep the weight of the entry in the file, if that entry has a prioritizeVerb.
fn keep_weight(extender: &Value, stanza: &mut Stanza) {
    let weight = extender.get("weight").and_then(Value::as_i64).filter(|weight| *weight > 0);
    if let Some(weight) = weight.filter(|_| extender.get("prioritizeVerb").is_some_and(Value::is_string)) {
        stanza.weight = weight;
    }
}

fn explain_replaced(
    extender: &Value,
    stanza: &Stanza,
    address: ExtenderAddressSource,
    path: &str,
    url: &str,
    notes: &mut Vec<String>,
) {
    let Ok(Value::Array(ours)) = serde_saphyr::from_str::<Value>(&stanza.text()) else {
        return;
    };
    let (Some(new), Some(old)) = (ours.first().and_then(Value::as_object), extender.as_object()) else {
        return;
    };
    let show = |value: &Value| match value {
        Value::String(text) => text.clone(),
        other => without_keys(other).to_string(),
    };
    for (name, value) in new {
        let why = match name.as_str() {
            "ignorable" => ": while the extender is unavailable, GPU pods must wait, not run without a GPU",
            "nodeCacheCapable" => ": the names of nodes are enough, and whole nodes are slow",
            "managedResources" => ": exactly these, and the scheduler must count them as well",
            "bindVerb" => ": the extender writes the GPU in the binding request",
            "httpTimeout" => ": longer than the extender's slowest answer (4.5 s)",
            "urlPrefix" => match address {
                ExtenderAddressSource::Flag => ": from --extender-url",
                ExtenderAddressSource::Cluster => ": the address of the installed extender (--from-cluster)",
                ExtenderAddressSource::Default => ": the address of Divvy's extender",
            },
            "prioritizeVerb" => ": the extender scores the nodes",
            "preemptVerb" => ": otherwise the scheduler evicts pods in vain, because their memory is on several GPUs",
            "weight" => ": the scheduler's own scores do not outweigh the extender's scores",
            _ => "",
        };
        match old.get(name) {
            Some(was) if was == value => {}
            Some(was) => notes.push(format!("changed: {path}.{name} {} to {}{why}", show(was), show(value))),
            None => notes.push(format!("added: {path}.{name} {}{why}", show(value))),
        }
    }
    for (name, was) in old.iter().filter(|(name, was)| !new.contains_key(*name) && !was.is_null()) {
        let why = match name.as_str() {
            "enableHTTPS" if *was == Value::Bool(false) => continue,
            "tlsConfig" => "the address is plain HTTP, or the new settings are different",
            _ => "Divvy's extender does not use it",
        };
        notes.push(format!("removed: {path}.{name} {}: {why}", show(was)));
    }
    if url.trim_end_matches('/') == stanza.url {
        let why = match address {
            ExtenderAddressSource::Cluster => "it is the address of the installed extender",
            ExtenderAddressSource::Flag | ExtenderAddressSource::Default => "--extender-url changes it",
        };
        notes.push(format!("kept: {path}.urlPrefix {url}; {why}"));
    }
}

/// Replace certificates and keys, so that the list of changes does not show them.
fn without_keys(value: &Value) -> Value {
    let mut value = value.clone();
    for (name, inner) in value.as_object_mut().into_iter().flatten() {
        if name.ends_with("Data") {
            *inner = "...".into();
        }
    }
    value
}

const HEAD: &str = "# For kube-scheduler --config, Kubernetes 1.25 and later. The scheduler reads this file only when it starts.";

fn render(config: &Map<String, Value>, extenders: &[Value], place: usize, stanza: &Stanza) -> String {
    let yaml = |value: &Value| serde_saphyr::to_string(value).unwrap_or_else(|_| value.to_string());
    let mut text = format!("{HEAD}\n");
    for (name, value) in config {
        if name == "percentageOfNodesToScore" {
            text.push_str(PERCENTAGE);
            text.push('\n');
            continue;
        }
        let mut one = Map::new();
        one.insert(name.clone(), value.clone());
        text.push_str(&yaml(&Value::Object(one)));
    }
    text.push_str("extenders:\n");
    for (i, extender) in extenders.iter().enumerate() {
        if i == place {
            text.push_str(&stanza.text());
        }
        text.push_str(&yaml(&json!([extender])));
    }
    if place >= extenders.len() {
        text.push_str(&stanza.text());
    }
    text
}

#[cfg(test)]
mod tests;
