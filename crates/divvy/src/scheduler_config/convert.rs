//! Converts older files to v1, in which some fields are renamed, are removed, or have no equivalent. The sources are "Scheduler
//! configuration migrations" in the Kubernetes documentation, and the validation of Kubernetes 1.36.

use serde_json::{Map, Value, json};

use super::{API_VERSION, KIND, SchedulerConfigError};

const GROUP: &str = "kubescheduler.config.k8s.io/";

/// A configuration in v1, and one line of text for each change.
#[derive(Debug)]
pub(super) struct Converted {
    pub(super) config: Map<String, Value>,
    pub(super) notes: Vec<String>,
}

/// The older versions, each with the first Kubernetes version that no longer reads it.
const VERSIONS: [(&str, &str); 2] = [("v1beta2", "1.28"), ("v1beta3", "1.29")];

/// Removed plugins whose function is now part of another plugin that is enabled by default.
const REPLACED: [(&str, &str); 5] = [
    (
        "SelectorSpread",
        "v1 removed it; PodTopologySpread, on by default, spreads a Service's pods",
    ),
    (
        "AzureDiskLimits",
        "Kubernetes 1.36 refuses it; NodeVolumeLimits, on by default, counts all volumes",
    ),
    (
        "CinderLimits",
        "Kubernetes 1.36 refuses it; NodeVolumeLimits, on by default, counts all volumes",
    ),
    (
        "EBSLimits",
        "Kubernetes 1.36 refuses it; NodeVolumeLimits, on by default, counts all volumes",
    ),
    (
        "GCEPDLimits",
        "Kubernetes 1.36 refuses it; NodeVolumeLimits, on by default, counts all volumes",
    ),
];

/// Removed plugins that a user enables on purpose, each with what to write instead.
const CHOSEN: [(&str, &str); 6] = [
    (
        "NodeResourcesMostAllocated",
        "Write pluginConfig: [{name: NodeResourcesFit, args: {scoringStrategy: {type: MostAllocated}}}] instead.",
    ),
    (
        "NodeResourcesLeastAllocated",
        "Remove it: NodeResourcesFit, on by default, does the same; move resources to its scoringStrategy {type: LeastAllocated}.",
    ),
    (
        "RequestedToCapacityRatio",
        "Write pluginConfig: [{name: NodeResourcesFit, args: {scoringStrategy: {type: RequestedToCapacityRatio, …}}}] instead.",
    ),
    (
        "NodeLabel",
        "Use node affinity in the pods, or a profile's NodeAffinity with addedAffinity, instead.",
    ),
    ("ServiceAffinity", "Use affinity between pods (InterPodAffinity) instead."),
    (
        "NodePreferAvoidPods",
        "Use a taint of effect PreferNoSchedule on those nodes instead.",
    ),
];

/// Convert a configuration to v1. `origin` is the file's name, for error messages.
pub(super) fn to_v1(input: Value, origin: &str) -> Result<Converted, SchedulerConfigError> {
    let Value::Object(mut file) = input else {
        return Err(other(
            origin,
            "not a list of fields",
            "such a file starts with apiVersion: and kind:",
        ));
    };
    let text = |name: &str| file.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
    let (version, kind) = (text("apiVersion"), text("kind"));
    if kind == "Policy" || (kind.is_empty() && (file.contains_key("predicates") || file.contains_key("priorities"))) {
        return policy(file, origin);
    }
    if kind != KIND {
        return Err(of_another_kind(origin, &kind));
    }
    let short = version.strip_prefix(GROUP).unwrap_or_default();
    let mut notes = Vec::new();
    if version != API_VERSION {
        let Some((_, without)) = VERSIONS.iter().find(|(name, _)| *name == short) else {
            return Err(other(
                origin,
                &format!("of apiVersion {version:?}"),
                &format!(
                    "divvy converts {GROUP}v1beta2, v1beta3, and an old Policy; convert another version by hand first: \
                     https://kubernetes.io/docs/reference/scheduling/config/#scheduler-configuration-migrations"
                ),
            ));
        };
        notes.push(format!(
            "changed: apiVersion {version} to {API_VERSION}: Kubernetes {without} no longer reads the old one, and the scheduler exits with \
             'no kind \"{KIND}\" is registered for version'"
        ));
        file.insert("apiVersion".to_owned(), API_VERSION.into());
    }
    let mut converted = Converted { config: file, notes };
    converted.addresses();
    converted.leases();
    converted.names_of_fields();
    converted.profiles(short, origin)?;
    Ok(converted)
}

fn other(origin: &str, found: &str, instead: &str) -> SchedulerConfigError {
    SchedulerConfigError::OtherKind {
        origin: origin.to_owned(),
        found: found.to_owned(),
        instead: instead.to_owned(),
    }
}

fn of_another_kind(origin: &str, kind: &str) -> SchedulerConfigError {
    let (found, instead) = match kind {
        "" => ("without kind".to_owned(), "such a file starts with apiVersion: and kind:"),
        "Pod" => (
            "the manifest of a pod".to_owned(),
            "give the file that its --config names; without --config there is nothing to merge, and `divvy scheduler-config --for kubeadm` prints what to add",
        ),
        "ConfigMap" => ("a ConfigMap".to_owned(), "give the text of the configuration from its data"),
        "ClusterConfiguration" | "InitConfiguration" => (
            "kubeadm's configuration".to_owned(),
            "give the file that config in scheduler.extraArgs names",
        ),
        kind => (format!("a {kind}"), "give the file of kube-scheduler's --config flag"),
    };
    other(origin, &found, instead)
}

/// Convert a Policy (`--policy-config-file`), which old tutorials use. Its extenders are kept. Its predicates and priorities have
/// no equivalent in v1.
fn policy(mut file: Map<String, Value>, origin: &str) -> Result<Converted, SchedulerConfigError> {
    let mut notes = vec![format!(
        "changed: kind Policy to {KIND} {API_VERSION}: Kubernetes 1.23 removed --policy-config-file and --policy-configmap; remove that flag \
         from the scheduler's arguments, and add --config with this file"
    )];
    for (name, instead) in [
        (
            "predicates",
            "All filters are now on by default: remove predicates, or disable single plugins under profiles.",
        ),
        (
            "priorities",
            "The scores are now on by default: remove priorities, or set weights under profiles, plugins, score.",
        ),
    ] {
        if file
            .remove(name)
            .is_some_and(|value| value.as_array().is_none_or(|list| !list.is_empty()))
        {
            return Err(SchedulerConfigError::NotInV1 {
                origin: origin.to_owned(),
                path: name.to_owned(),
                found: "a list of a Policy".to_owned(),
                why: "Kubernetes 1.23 removed it, and without it pods may be placed on other nodes than now".to_owned(),
                instead: instead.to_owned(),
            });
        }
    }
    let mut config = Map::new();
    config.insert("apiVersion".to_owned(), API_VERSION.into());
    config.insert("kind".to_owned(), KIND.into());
    for (name, value) in file {
        match name.as_str() {
            "apiVersion" | "kind" => {}
            "extenders" => {
                config.insert(name, value);
            }
            "hardPodAffinitySymmetricWeight" => {
                notes.push(format!(
                    "changed: {name}: {value} to hardPodAffinityWeight of plugin InterPodAffinity"
                ));
                config.insert(
                    "profiles".to_owned(),
                    json!([{"schedulerName": "default-scheduler",
                        "pluginConfig": [{"name": "InterPodAffinity", "args": {"hardPodAffinityWeight": value}}]}]),
                );
            }
            _ => notes.push(format!(
                "removed: {name}: it is a field of Policy without an equivalent in v1"
            )),
        }
    }
    let mut converted = Converted { config, notes };
    converted.names_of_fields();
    Ok(converted)
}

impl Converted {
    fn addresses(&mut self) {
        for name in ["healthzBindAddress", "metricsBindAddress"] {
            if let Some(value) = self.config.shift_remove(name) {
                self.notes.push(format!(
                    "removed: {name}: {value}: v1beta3 removed it; the scheduler serves health and metrics over TLS, with the flags --bind-address and --secure-port"
                ));
            }
        }
    }

    fn leases(&mut self) {
        let Some(Value::Object(election)) = self.config.get_mut("leaderElection") else {
            return;
        };
        if let Some(lock) = election.get_mut("resourceLock")
            && lock.as_str().is_some_and(|lock| lock != "leases")
        {
            self.notes.push(format!(
                "changed: leaderElection.resourceLock {lock} to leases: kube-scheduler supports no other lock; stop the old schedulers of all control \
                 plane nodes before the first new one starts, because they would not see each other's lock"
            ));
            *lock = "leases".into();
        }
    }

    /// Rename the fields of extenders. Policy has `enableHttps` and a timeout in nanoseconds; v1 refuses unknown names.
    fn names_of_fields(&mut self) {
        let Some(Value::Array(extenders)) = self.config.get_mut("extenders") else {
            return;
        };
        for (i, extender) in extenders.iter_mut().enumerate() {
            let Value::Object(extender) = extender else { continue };
            for (old, new) in [("enableHttps", "enableHTTPS"), ("apiVersion", ""), ("kind", "")] {
                if let Some(value) = extender.shift_remove(old) {
                    if new.is_empty() {
                        self.notes
                            .push(format!("removed: extenders[{i}].{old}: v1 does not have it here"));
                    } else {
                        self.notes
                            .push(format!("changed: extenders[{i}].{old} to {new}: v1 refuses unknown names"));
                        extender.entry(new).or_insert(value);
                    }
                }
            }
            if let Some(timeout) = extender.get_mut("httpTimeout")
                && let Some(nanoseconds) = timeout.as_u64()
            {
                *timeout = format!("{}ms", nanoseconds / 1_000_000).into();
                self.notes.push(format!(
                    "changed: extenders[{i}].httpTimeout {nanoseconds} to {timeout}: v1 needs a duration with a unit"
                ));
            }
        }
    }

    fn profiles(&mut self, from: &str, origin: &str) -> Result<(), SchedulerConfigError> {
        let Some(Value::Array(profiles)) = self.config.get_mut("profiles") else {
            return Ok(());
        };
        for (i, profile) in profiles.iter_mut().enumerate() {
            let path = format!("profiles[{i}]");
            if let Some(Value::Object(plugins)) = profile.get_mut("plugins") {
                plugin_sets(plugins, &path, origin, &mut self.notes)?;
            }
            if let Some(Value::Array(configs)) = profile.get_mut("pluginConfig") {
                plugin_configs(configs, &path, origin, &mut self.notes)?;
            }
        }
        if from == "v1beta2" {
            self.notes.push(
                "note: v1beta3 raised default weights: InterPodAffinity 1 to 2, NodeAffinity 1 to 2, TaintToleration 1 to 3; to keep the old \
                 ones set them under profiles, plugins, multiPoint, enabled"
                    .to_owned(),
            );
        }
        Ok(())
    }
}

fn plugin_sets(
    plugins: &mut Map<String, Value>,
    path: &str,
    origin: &str,
    notes: &mut Vec<String>,
) -> Result<(), SchedulerConfigError> {
    for (point, set) in plugins.iter_mut() {
        for list in ["enabled", "disabled"] {
            let Some(Value::Array(names)) = set.get_mut(list) else {
                continue;
            };
            let mut kept = Vec::with_capacity(names.len());
            for plugin in names.drain(..) {
                let place = format!("{path}.plugins.{point}.{list}");
                match gone(plugin.get("name").and_then(Value::as_str), &place, list == "enabled", origin)? {
                    None => kept.push(plugin),
                    Some(note) => notes.push(note),
                }
            }
            *names = kept;
        }
    }
    Ok(())
}

fn plugin_configs(
    configs: &mut Vec<Value>,
    path: &str,
    origin: &str,
    notes: &mut Vec<String>,
) -> Result<(), SchedulerConfigError> {
    let mut kept = Vec::with_capacity(configs.len());
    for mut config in configs.drain(..) {
        let place = format!("{path}.pluginConfig");
        if let Some(note) = gone(config.get("name").and_then(Value::as_str), &place, true, origin)? {
            notes.push(note);
            continue;
        }
        if let Some(version) = config.pointer_mut("/args/apiVersion")
            && version
                .as_str()
                .is_some_and(|text| text.starts_with(GROUP) && text != API_VERSION)
        {
            notes.push(format!(
                "changed: {place}[{}].args.apiVersion {version} to {API_VERSION}: the arguments must have the file's version",
                kept.len()
            ));
            *version = API_VERSION.into();
        }
        kept.push(config);
    }
    *configs = kept;
    Ok(())
}

/// Return a note if the plugin must be removed. Fails if its removal would change the placement of pods.
fn gone(name: Option<&str>, place: &str, matters: bool, origin: &str) -> Result<Option<String>, SchedulerConfigError> {
    let Some(name) = name else { return Ok(None) };
    if let Some((_, why)) = REPLACED.iter().find(|(plugin, _)| *plugin == name) {
        return Ok(Some(format!("removed: {name} from {place}: {why}")));
    }
    let Some((_, instead)) = CHOSEN.iter().find(|(plugin, _)| *plugin == name) else {
        return Ok(None);
    };
    if !matters {
        return Ok(Some(format!(
            "removed: {name} from {place}: v1beta2 removed the plugin, so there is nothing to turn off"
        )));
    }
    Err(SchedulerConfigError::NotInV1 {
        origin: origin.to_owned(),
        path: place.to_owned(),
        found: name.to_owned(),
        why: "v1beta2 removed that plugin, and without it pods may be placed on other nodes than now".to_owned(),
        instead: (*instead).to_owned(),
    })
}
