//! An existing configuration with our extender in it. Everything else that is in the file stays, but for what v1 does not have.

use serde_json::{Map, Value, json};

use super::convert::{Converted, to_v1};
use super::{Error, INLINE_NOTE, Inline, MANAGED, PATH, PERCENTAGE, Stanza, Tls, WEIGHT, Whole};

/// What is to be in the file afterwards.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// Our extender.
    pub stanza: Stanza,
    /// Who says its address.
    pub address: Address,
    /// The scheduler's kubeconfig, if it was asked for.
    pub kubeconfig: Option<String>,
    /// The scheduler's kubeconfig where the file names none.
    pub default_kubeconfig: String,
    /// A profile that must be there.
    pub profile: Option<String>,
}

/// Who says the extender's address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Address {
    /// `--extender-url`.
    Flag,
    /// The extender that is installed (`--from-cluster`).
    Cluster,
    /// Nobody: that of an extender of ours in the file stays.
    Default,
}

/// The new file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Merged {
    /// Its text.
    pub text: String,
    /// What changed and why, a line each, in the order of the file.
    pub notes: Vec<String>,
}

/// All fields of v1 up to Kubernetes 1.36.
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

/// The text of `input` (from `origin`), with what is wanted in it.
pub fn merge(input: &str, origin: &str, wanted: &Wanted) -> Result<Merged, Error> {
    let value: Value = serde_saphyr::from_str(input).map_err(|error| Error::NotYaml {
        origin: origin.to_owned(),
        text: error.to_string().trim_start_matches("error: ").to_owned(),
    })?;
    let before = value.clone();
    let Converted { mut config, mut notes } = to_v1(value, origin)?;
    // A field that says null says nothing.
    config.retain(|_, value| !value.is_null());
    if config.shift_remove("metadata").is_some() {
        notes.push(
            "removed: metadata: this is a file for kube-scheduler and no object of the cluster; kubectl apply cannot take it"
                .to_owned(),
        );
    }
    unknown(&config, &mut notes);
    client(&mut config, wanted, &mut notes);
    percentage(&mut config, &mut notes);
    profile(&mut config, wanted, &mut notes);
    let (extenders, ours, stanza) = extenders(&mut config, wanted, origin, &mut notes)?;
    let comments = input
        .lines()
        .filter(|line| line.trim_start().starts_with('#') && !ours_text(line))
        .count();
    if comments > 0 {
        notes.push(format!(
            "removed: {comments} line{} of comments: they cannot be kept; the old file has them",
            if comments == 1 { "" } else { "s" }
        ));
    }
    let text = render(&config, &extenders, ours, &stanza);
    let after: Value = serde_saphyr::from_str(&text).map_err(|error| Error::NotYaml {
        origin: "what was made of it (a fault of Divvy; please report it)".to_owned(),
        text: error.to_string(),
    })?;
    if before == after {
        notes.push("unchanged: it says already what Divvy needs".to_owned());
    }
    Ok(Merged { text, notes })
}

/// Whether a comment is one that we write.
fn ours_text(line: &str) -> bool {
    let line = line.trim();
    HEAD.lines().chain(PERCENTAGE.lines()).any(|own| own.trim() == line)
        || OWN.get_or_init(own_comments).iter().any(|own| own == line)
}

static OWN: std::sync::OnceLock<Vec<String>> = std::sync::OnceLock::new();

/// The comments of every file that this program prints.
fn own_comments() -> Vec<String> {
    let tls = Tls {
        ca: Some("/".to_owned()),
        ..Tls::default()
    };
    let stanza = Stanza {
        url: "https://".to_owned(),
        tls,
        weight: WEIGHT,
    };
    let whole = |kubeconfig, lease| {
        Whole {
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
            "warning: {path}: no field of {} up to Kubernetes 1.36, and a scheduler that does not know it does not start; kept as it is{near}",
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

fn client(config: &mut Map<String, Value>, wanted: &Wanted, notes: &mut Vec<String>) {
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
                "changed: clientConnection.kubeconfig {there} to {wanted}: --kubeconfig-path says so"
            ));
            wanted
        }
        (wanted_path, None) => {
            let path = wanted_path.as_ref().unwrap_or(&wanted.default_kubeconfig);
            notes.push(format!(
                "added: clientConnection.kubeconfig {path}: with --config kube-scheduler ignores --kubeconfig; if it runs as a pod with an \
                 account of its own, take the line out"
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
    const WHY: &str = "all nodes are looked at; else the extender refuses those it is asked about while a node with a free GPU is never named to it";
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
                "changed: profiles[{i}].percentageOfNodesToScore {value} to 100: it wins over the whole file's"
            ));
            *value = 100.into();
        }
    }
}

fn profile(config: &mut Map<String, Value>, wanted: &Wanted, notes: &mut Vec<String>) {
    let Some(name) = &wanted.profile else { return };
    let profiles = config.entry("profiles").or_insert_with(|| json!([]));
    let Value::Array(profiles) = profiles else { return };
    let is_there = |profile: &Value| {
        let own = profile.get("schedulerName").and_then(Value::as_str);
        own.unwrap_or(super::DEFAULT_PROFILE) == name
    };
    if !profiles.iter().any(is_there) {
        notes.push(format!(
            "added: profile {name}: --profile says so; every profile asks the extender"
        ));
        profiles.push(json!({ "schedulerName": name }));
    }
}

/// The extenders without ours, the place of ours among them, and ours.
fn extenders(
    config: &mut Map<String, Value>,
    wanted: &Wanted,
    origin: &str,
    notes: &mut Vec<String>,
) -> Result<(Vec<Value>, usize, Stanza), Error> {
    let list = match config.shift_remove("extenders") {
        Some(Value::Array(list)) => list,
        Some(other) => {
            return Err(Error::Conflict {
                origin: origin.to_owned(),
                path: "extenders".to_owned(),
                found: format!("is {other}, not a list"),
                why: "kube-scheduler does not start with it".to_owned(),
                instead: "Write each extender as an item that begins with a dash, or take the field out.".to_owned(),
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
        let of_ours = managed.iter().filter(|name| MANAGED.contains(name)).count();
        let replaced = url.trim_end_matches('/').ends_with(PATH) || (of_ours > 0 && of_ours == managed.len());
        let clash = |found: String, why: &str| Error::Conflict {
            origin: origin.to_owned(),
            path: path.clone(),
            found,
            why: why.to_owned(),
            instead: format!("Take it, or the part that clashes, out of {origin}, if Divvy is to decide about GPUs."),
        };
        if replaced {
            if place.is_some() {
                notes.push(format!("removed: {path} ({url}): a second entry for the same resources"));
                continue;
            }
            place = Some(rest.len());
            if wanted.address == Address::Default {
                stanza = keep_address(&extender, &url, &stanza);
            }
            keep_weight(&extender, &mut stanza);
            explain_replaced(&extender, &stanza, wanted.address, &path, &url, notes);
        } else if of_ours > 0 {
            return Err(clash(
                format!("({url}) manages {}", managed.join(", ")),
                "a resource can have one extender only, and kube-scheduler asks both",
            ));
        } else if extender
            .get("bindVerb")
            .and_then(Value::as_str)
            .is_some_and(|verb| !verb.is_empty())
        {
            return Err(clash(
                format!("({url}) has a bindVerb"),
                "kube-scheduler does not start with two extenders that bind, and Divvy's must",
            ));
        } else {
            if managed.is_empty() {
                notes.push(format!(
                    "note: {path} ({url}) has no managedResources, so that it is asked about every pod, GPU pods too; kept"
                ));
            }
            rest.push(extender);
        }
    }
    if place.is_none() {
        notes.push(format!(
            "added: the extender at {} for {}: without it every GPU pod is bound by node sums alone, without a GPU",
            stanza.url,
            MANAGED.join(", ")
        ));
    }
    Ok((rest.clone(), place.unwrap_or(rest.len()), stanza))
}

/// Our entry at the address of the one that is there, with its TLS settings.
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

/// The weight of the entry that is there, where it has counted for something.
fn keep_weight(extender: &Value, stanza: &mut Stanza) {
    let weight = extender.get("weight").and_then(Value::as_i64).filter(|weight| *weight > 0);
    if let Some(weight) = weight.filter(|_| extender.get("prioritizeVerb").is_some_and(Value::is_string)) {
        stanza.weight = weight;
    }
}

fn explain_replaced(extender: &Value, stanza: &Stanza, address: Address, path: &str, url: &str, notes: &mut Vec<String>) {
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
            "ignorable" => ": while the extender is away GPU pods must wait, not run without a GPU",
            "nodeCacheCapable" => ": names of nodes are enough, whole nodes are slow",
            "managedResources" => ": these, counted by the scheduler as well, and no others",
            "bindVerb" => ": the extender writes the GPU in the request that binds",
            "httpTimeout" => ": longer than the extender takes at worst (4.5 s)",
            "urlPrefix" => match address {
                Address::Flag => ": --extender-url says so",
                Address::Cluster => ": the extender that is installed is there (--from-cluster)",
                Address::Default => ": the address of Divvy's extender",
            },
            "prioritizeVerb" => ": the extender says which node is best",
            "preemptVerb" => ": else pods are evicted in vain, whose memory is on several GPUs",
            "weight" => ": the scheduler's own scores do not undo the extender's",
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
            "tlsConfig" => "the address is plain HTTP, or the settings are other ones",
            _ => "Divvy's extender does not use it",
        };
        notes.push(format!("removed: {path}.{name} {}: {why}", show(was)));
    }
    if url.trim_end_matches('/') == stanza.url {
        let why = match address {
            Address::Cluster => "the extender that is installed is there",
            Address::Flag | Address::Default => "--extender-url changes it",
        };
        notes.push(format!("kept: {path}.urlPrefix {url}; {why}"));
    }
}

/// Certificates and keys are not for the eyes of who reads what changed.
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
