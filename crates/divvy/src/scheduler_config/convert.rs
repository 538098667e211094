//! Older files to v1: what is renamed, what goes, what has no equal. From the "Scheduler configuration migrations" of the
//! Kubernetes documentation and from what 1.36's validation refuses.

use serde_json::{Map, Value, json};

use super::{API_VERSION, Error, KIND};

const GROUP: &str = "kubescheduler.config.k8s.io/";

/// A configuration in v1, and what was done to it, a line each.
#[derive(Debug)]
pub(super) struct Converted {
    pub(super) config: Map<String, Value>,
    pub(super) notes: Vec<String>,
}

/// The versions that were, and a Kubernetes that reads them no longer.
const VERSIONS: [(&str, &str); 5] = [
    ("v1alpha1", "1.19"),
    ("v1alpha2", "1.20"),
    ("v1beta1", "1.23"),
    ("v1beta2", "1.28"),
    ("v1beta3", "1.29"),
];

/// Plugins that went, and that nothing depends on: another does the same by default.
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

/// Plugins that went, and that somebody chose on purpose: what to write instead.
const CHOSEN: [(&str, &str); 6] = [
    (
        "NodeResourcesMostAllocated",
        "Write pluginConfig: [{name: NodeResourcesFit, args: {scoringStrategy: {type: MostAllocated}}}] instead.",
    ),
    (
        "NodeResourcesLeastAllocated",
        "Leave it out: NodeResourcesFit, on by default, does it; resources go to its scoringStrategy {type: LeastAllocated}.",
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

/// What `origin` says, in v1.
pub(super) fn to_v1(input: Value, origin: &str) -> Result<Converted, Error> {
    let Value::Object(mut file) = input else {
        return Err(other(origin, "not a list of fields", "it begins with apiVersion: and kind:"));
    };
    let text = |name: &str| file.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
    let (version, kind) = (text("apiVersion"), text("kind"));
    if kind == "Policy" || (kind.is_empty() && (file.contains_key("predicates") || file.contains_key("priorities"))) {
        return policy(file, origin);
    }
    if kind != KIND {
        return Err(of_another_kind(origin, &kind));
    }
    let short = version
        .strip_prefix(GROUP)
        .or_else(|| version.strip_prefix("componentconfig/"))
        .unwrap_or_default();
    let mut notes = Vec::new();
    if version != API_VERSION {
        let Some((_, without)) = VERSIONS.iter().find(|(name, _)| *name == short) else {
            return Err(other(
                origin,
                &format!("of apiVersion {version:?}"),
                &format!("known are {GROUP}v1alpha1 to {API_VERSION}"),
            ));
        };
        notes.push(format!(
            "changed: apiVersion {version} to {API_VERSION}: Kubernetes {without} no longer reads the old one, and the scheduler ends with \
             'no kind \"{KIND}\" is registered for version'"
        ));
        file.insert("apiVersion".to_owned(), API_VERSION.into());
    }
    let mut converted = Converted { config: file, notes };
    if short.starts_with("v1alpha") {
        converted.alpha(origin)?;
    }
    converted.addresses();
    converted.leases();
    converted.names_of_fields();
    converted.profiles(short, origin)?;
    Ok(converted)
}

fn other(origin: &str, found: &str, instead: &str) -> Error {
    Error::OtherKind {
        origin: origin.to_owned(),
        found: found.to_owned(),
        instead: instead.to_owned(),
    }
}

fn of_another_kind(origin: &str, kind: &str) -> Error {
    let (found, instead) = match kind {
        "" => ("without kind".to_owned(), "it should begin with apiVersion: and kind:"),
        "Pod" => (
            "the manifest of a pod".to_owned(),
            "give the file that its --config names; if it has no --config there is nothing to merge, and `divvy scheduler-config --for kubeadm` says what to add",
        ),
        "ConfigMap" => (
            "a ConfigMap".to_owned(),
            "give the text of the configuration that is under its data",
        ),
        "ClusterConfiguration" | "InitConfiguration" => (
            "kubeadm's configuration".to_owned(),
            "the scheduler's is the file that scheduler.extraArgs names as config",
        ),
        kind => (format!("a {kind}"), "give the file of kube-scheduler's --config flag"),
    };
    other(origin, &found, instead)
}

/// `--policy-config-file`, the form of the old tutorials. Its extenders live on; what chose nodes does not.
fn policy(mut file: Map<String, Value>, origin: &str) -> Result<Converted, Error> {
    let mut notes = vec![format!(
        "changed: kind Policy to {KIND} {API_VERSION}: Kubernetes 1.23 took --policy-config-file and --policy-configmap away; take that flag \
         out of the scheduler's arguments, and give it this file with --config"
    )];
    for (name, instead) in [
        (
            "predicates",
            "All of today's filters are on by default: take predicates out, or turn single plugins off under profiles.",
        ),
        (
            "priorities",
            "Today's scores are on by default: take priorities out, or set weights under profiles, plugins, score.",
        ),
    ] {
        if file
            .remove(name)
            .is_some_and(|value| value.as_array().is_none_or(|list| !list.is_empty()))
        {
            return Err(Error::NotInV1 {
                origin: origin.to_owned(),
                path: name.to_owned(),
                found: "a list of a Policy".to_owned(),
                why: "it went with Kubernetes 1.23, and without it pods may go to other nodes than today".to_owned(),
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
            _ => notes.push(format!("removed: {name}: it belongs to Policy and has no equal in v1")),
        }
    }
    let mut converted = Converted { config, notes };
    converted.names_of_fields();
    Ok(converted)
}

impl Converted {
    /// v1alpha1 had one scheduler per file, and the rest in a Policy.
    fn alpha(&mut self, origin: &str) -> Result<(), Error> {
        if let Some(source) = self.config.shift_remove("algorithmSource") {
            if source.get("policy").is_some_and(|policy| !policy.is_null()) {
                return Err(Error::NotInV1 {
                    origin: origin.to_owned(),
                    path: "algorithmSource.policy".to_owned(),
                    found: source["policy"].to_string(),
                    why: "Kubernetes 1.23 took Policy away, and the extenders are in that file".to_owned(),
                    instead: "Merge that file: divvy scheduler-config --merge THE-POLICY-FILE.".to_owned(),
                });
            }
            self.notes
                .push("removed: algorithmSource: v1 has profiles, and today's default plugins without it".to_owned());
        }
        if let Some(name) = self.config.shift_remove("schedulerName").filter(|name| !name.is_null()) {
            self.notes.push(format!(
                "changed: schedulerName {name} to profiles[0].schedulerName: one scheduler can have several"
            ));
            self.config.insert("profiles".to_owned(), json!([{ "schedulerName": name }]));
        }
        for gone in [
            "hardPodAffinitySymmetricWeight",
            "disablePreemption",
            "bindTimeoutSeconds",
            "failureDomains",
        ] {
            if let Some(value) = self.config.shift_remove(gone) {
                self.notes.push(format!(
                    "removed: {gone}: {value}: v1 has it as an argument of a plugin, under profiles, pluginConfig"
                ));
            }
        }
        Ok(())
    }

    fn addresses(&mut self) {
        for name in ["healthzBindAddress", "metricsBindAddress"] {
            if let Some(value) = self.config.shift_remove(name) {
                self.notes.push(format!(
                    "removed: {name}: {value}: v1beta3 took it away; health and metrics are served over TLS, by the flags --bind-address and --secure-port"
                ));
            }
        }
    }

    fn leases(&mut self) {
        let Some(Value::Object(election)) = self.config.get_mut("leaderElection") else {
            return;
        };
        for (old, new) in [
            ("lockObjectName", "resourceName"),
            ("lockObjectNamespace", "resourceNamespace"),
        ] {
            if let Some(value) = election.shift_remove(old) {
                self.notes.push(format!("changed: leaderElection.{old} to {new}"));
                election.entry(new).or_insert(value);
            }
        }
        if let Some(lock) = election.get_mut("resourceLock")
            && lock.as_str().is_some_and(|lock| lock != "leases")
        {
            self.notes.push(format!(
                "changed: leaderElection.resourceLock {lock} to leases: kube-scheduler knows no other; stop the old schedulers of all control \
                 planes before the first new one starts, since they would not see each other's lock"
            ));
            *lock = "leases".into();
        }
    }

    /// Policy wrote `enableHttps` and a timeout in nanoseconds; v1 is strict about names.
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
                            .push(format!("removed: extenders[{i}].{old}: v1 does not know it there"));
                    } else {
                        self.notes.push(format!(
                            "changed: extenders[{i}].{old} to {new}: v1 refuses names that it does not know"
                        ));
                        extender.entry(new).or_insert(value);
                    }
                }
            }
            if let Some(timeout) = extender.get_mut("httpTimeout")
                && let Some(nanoseconds) = timeout.as_u64()
            {
                *timeout = format!("{}ms", nanoseconds / 1_000_000).into();
                self.notes.push(format!(
                    "changed: extenders[{i}].httpTimeout {nanoseconds} to {timeout}: v1 wants a duration with its unit"
                ));
            }
        }
    }

    fn profiles(&mut self, from: &str, origin: &str) -> Result<(), Error> {
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
        if matches!(from, "v1beta1" | "v1beta2") {
            self.notes.push(
                "note: v1beta3 raised default weights: InterPodAffinity 1 to 2, NodeAffinity 1 to 2, TaintToleration 1 to 3; to keep the old \
                 ones set them under profiles, plugins, multiPoint, enabled"
                    .to_owned(),
            );
        }
        Ok(())
    }
}

fn plugin_sets(plugins: &mut Map<String, Value>, path: &str, origin: &str, notes: &mut Vec<String>) -> Result<(), Error> {
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

fn plugin_configs(configs: &mut Vec<Value>, path: &str, origin: &str, notes: &mut Vec<String>) -> Result<(), Error> {
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
                "changed: {place}[{}].args.apiVersion {version} to {API_VERSION}: arguments must be of the file's version",
                kept.len()
            ));
            *version = API_VERSION.into();
        }
        kept.push(config);
    }
    *configs = kept;
    Ok(())
}

/// Whether a plugin of that name is left out, and with which words; an error where that would change where pods go.
fn gone(name: Option<&str>, place: &str, matters: bool, origin: &str) -> Result<Option<String>, Error> {
    let Some(name) = name else { return Ok(None) };
    if let Some((_, why)) = REPLACED.iter().find(|(plugin, _)| *plugin == name) {
        return Ok(Some(format!("removed: {name} from {place}: {why}")));
    }
    let Some((_, instead)) = CHOSEN.iter().find(|(plugin, _)| *plugin == name) else {
        return Ok(None);
    };
    if !matters {
        return Ok(Some(format!(
            "removed: {name} from {place}: v1beta2 took the plugin away, so that there is nothing to turn off"
        )));
    }
    Err(Error::NotInV1 {
        origin: origin.to_owned(),
        path: place.to_owned(),
        found: name.to_owned(),
        why: "v1beta2 took that plugin away, and without it pods may go to other nodes than today".to_owned(),
        instead: (*instead).to_owned(),
    })
}
