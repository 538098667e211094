//! The permissions, ports, and mounts of the chart's objects, and the names of the chart's values.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::{DEFAULT, default_objects, parse, refusal, root, with};

#[test]
fn every_mount_of_a_container_has_a_path_and_a_volume() {
    let mut mounts = 0;
    for object in default_objects() {
        let pod = &object["spec"]["template"]["spec"];
        let list = |of: &Value, key: &str| of[key].as_array().cloned().unwrap_or_default();
        let volumes: Vec<Value> = list(pod, "volumes")
            .into_iter()
            .map(|volume| volume["name"].clone())
            .collect();
        for container in list(pod, "containers") {
            for mount in list(&container, "volumeMounts") {
                assert!(
                    mount["mountPath"].is_string() && volumes.contains(&mount["name"]),
                    "{mount} of {}: {volumes:?}",
                    container["name"]
                );
                mounts += 1;
            }
        }
    }
    assert!(mounts >= 8, "{mounts}");
}

fn text_of(name: &str) -> String {
    std::fs::read_to_string(root().join(name)).expect("a file of the repository")
}

fn yaml(name: &str) -> Value {
    serde_saphyr::from_str(&text_of(name)).expect("YAML")
}

#[test]
fn every_document_is_an_object_of_its_own() {
    each_is_an_object_of_its_own(&default_objects(), 45);
    if let Some(text) = with(&[yaml("deploy/helm/values/service.yaml")]) {
        each_is_an_object_of_its_own(&parse(&text), 52);
    }
}

fn each_is_an_object_of_its_own(objects: &[Value], count: usize) {
    let mut seen = BTreeSet::new();
    for object in objects {
        let field = |path: &str| object.pointer(path).and_then(Value::as_str).unwrap_or_default().to_owned();
        let id = (
            field("/apiVersion"),
            field("/kind"),
            field("/metadata/namespace"),
            field("/metadata/name"),
        );
        assert!(!id.0.is_empty() && !id.1.is_empty() && !id.3.is_empty(), "{object}");
        assert!(seen.insert(id), "twice: {object}");
        let cluster_wide = ["Cluster", "Validating", "RuntimeClass", "PriorityClass"]
            .iter()
            .any(|begin| field("/kind").starts_with(begin));
        let expected = match field("/kind").as_str() {
            _ if cluster_wide => "",
            "Role" | "RoleBinding" if field("/metadata/name").ends_with("-unhealthy-gpus") => "kube-system",
            "ConfigMap" if !field("/metadata/name").ends_with("-dashboards") => "kube-public",
            "Role" | "RoleBinding" if ["divvy-explainer", "divvy-find-explainer"].contains(&field("/metadata/name").as_str()) => {
                "kube-public"
            }
            _ => "divvy-system",
        };
        assert_eq!(field("/metadata/namespace"), expected, "{object}");
    }
    assert_eq!(seen.len(), count);
}

/// The probe is privileged, because it opens the driver's device nodes. It has no token and no network.
#[test]
fn every_container_but_the_probe_runs_without_privileges() {
    let objects = default_objects();
    let mut programs = Vec::new();
    for object in &objects {
        let pod = &object["spec"]["template"]["spec"];
        for container in pod["containers"].as_array().into_iter().flatten() {
            let name = container["name"].as_str().expect("a name");
            programs.push(name);
            let context = &container["securityContext"];
            assert_eq!(context["readOnlyRootFilesystem"], true, "{name}");
            if name == "probe" {
                assert_eq!(pod["automountServiceAccountToken"], false);
                continue;
            }
            assert_eq!(context["privileged"], false, "{name}");
            assert_eq!(context["allowPrivilegeEscalation"], false, "{name}");
            assert_eq!(context["capabilities"], json!({"drop": ["ALL"]}), "{name}");
            assert_eq!(context["seccompProfile"], json!({"type": "RuntimeDefault"}), "{name}");
        }
    }
    programs.sort_unstable();
    assert_eq!(programs, ["agent", "explainer", "extender", "probe"]);
    let probe = objects
        .iter()
        .find(|object| object["kind"] == "NetworkPolicy" && object["metadata"]["name"] == "divvy-probe")
        .expect("the probe's policy");
    assert_eq!(probe["spec"]["policyTypes"], json!(["Ingress", "Egress"]));
    assert!(
        probe["spec"].get("ingress").is_none() && probe["spec"].get("egress").is_none(),
        "{probe}"
    );
}

#[test]
fn what_makes_no_sense_with_loopback_is_refused_in_words() {
    for (other, part) in [
        (json!({"replicas": 1}), "extender.replicas cannot be chosen with it"),
        (json!({"service": {"clusterIP": "10.96.0.7"}}), "has no Service"),
        (json!({"tls": {"existingSecret": "x"}}), "would not be used"),
        (json!({"webhook": true}), "the API server calls webhooks over TLS only"),
        (json!({"web": {"enabled": true}}), "use kubectl divvy web"),
    ] {
        let loopback = json!({"extender": {"loopback": true}});
        let Some(error) = refusal(&[loopback, json!({"extender": other})]) else {
            return;
        };
        assert!(error.contains(": extender.loopback ") && error.contains(part), "{error}");
    }
}

#[test]
fn the_extender_may_read_its_own_secret_and_lease_and_no_others() {
    for object in default_objects() {
        for rule in object["rules"].as_array().into_iter().flatten() {
            let names = |field: &str| rule[field].as_array().cloned().unwrap_or_default();
            let resources = names("resources");
            if resources.contains(&json!("secrets")) {
                assert_eq!(object["kind"], "Role");
                assert_eq!(
                    (names("resourceNames"), names("verbs")),
                    (vec![json!("divvy-extender-tls")], vec![json!("get"), json!("update")])
                );
            }
            if resources.contains(&json!("leases")) && names("verbs") != [json!("create")] {
                assert_eq!(
                    (object["kind"].as_str(), names("resourceNames")),
                    (Some("Role"), vec![json!("divvy-extender")])
                );
            }
        }
    }
    assert!(DEFAULT.contains("- --tls-secret=divvy-system/divvy-extender-tls\n"));
    assert!(DEFAULT.contains("- --tls-server-name=divvy-extender.divvy-system.svc\n"));
}

/// Return the rules of all roles that are bound to a subject.
fn rules_of(objects: &[Value], subject: &str) -> Vec<Value> {
    let bound = objects.iter().filter(move |object| {
        let subjects = object["subjects"].as_array().into_iter().flatten();
        subjects.into_iter().any(|one| one["name"] == subject)
    });
    let of = |binding: &Value| {
        let is_it = |role: &&Value| {
            role["kind"] == binding["roleRef"]["kind"]
                && role["metadata"]["name"] == binding["roleRef"]["name"]
                && (role["kind"] == "ClusterRole" || role["metadata"]["namespace"] == binding["metadata"]["namespace"])
        };
        let role = objects.iter().find(is_it).expect("its role");
        role["rules"].as_array().cloned().unwrap_or_default()
    };
    bound.flat_map(of).collect()
}

#[test]
fn the_extender_has_exactly_the_rights_of_the_threat_model() {
    let all = json!({"agent": {"onEscape": "evict", "guard": "shadow"}, "extender": {"web": {"enabled": true}, "unhealthyGpuConfigMaps": true}});
    let Some(text) = with(&[all]) else { return };
    let list = |rule: &Value, field: &str| -> Vec<String> {
        let values = rule[field].as_array().into_iter().flatten();
        values.filter_map(Value::as_str).map(str::to_owned).collect()
    };
    let mut rights: Vec<String> = rules_of(&parse(&text), "divvy-extender")
        .iter()
        .flat_map(|rule| {
            let (verbs, names) = (list(rule, "verbs").join(","), list(rule, "resourceNames").join(","));
            let resources = list(rule, "resources").into_iter();
            resources.map(move |resource| format!("{resource} {verbs} {names}").trim_end().to_owned())
        })
        .collect();
    rights.sort_unstable();
    rights.dedup();
    insta::assert_snapshot!(rights.join("\n"), @r"
    configmaps get,list,watch
    daemonsets list
    events create,patch
    leases create
    leases get,update divvy-extender
    namespaces get,list,watch
    nodes get,list,watch
    persistentvolumeclaims get
    persistentvolumes get
    pods get,list,watch
    pods/binding create
    pods/eviction create
    pods/proxy get
    secrets get,update divvy-extender-tls
    storageclasses get
    subjectaccessreviews create
    tokenreviews create
    ");
    let text = std::fs::read_to_string(root().join("docs/threat-model.md")).expect("readable");
    let (_, section) = text
        .split_once("## An attacker with the extender's token")
        .expect("the section");
    let (section, _) = section.split_once("\n## ").expect("another section");
    for right in rights
        .iter()
        .filter_map(|right| right.split(' ').next())
        .filter(|right| right.contains('/') || right.contains("review"))
    {
        assert!(section.contains(&format!("`{right}`")), "{right}");
    }
}

/// Every user can connect to the explainer.
/// Users reach nothing but the explainer and its ConfigMap.
#[test]
fn the_explainer_may_change_only_its_configmap() {
    let objects = default_objects();
    let rules = |subject: &str| rules_of(&objects, subject);
    let writes: Vec<Value> = rules("divvy-explainer")
        .into_iter()
        .filter(|rule| {
            let verbs = rule["verbs"].as_array().into_iter().flatten();
            verbs
                .into_iter()
                .any(|verb| !["get", "list"].contains(&verb.as_str().unwrap_or_default()))
        })
        .collect();
    let review = |group: &str, resource: &str| json!({"apiGroups": [group], "resources": [resource], "verbs": ["create"]});
    let patch = json!({"apiGroups": [""], "resources": ["configmaps"], "resourceNames": ["divvy"], "verbs": ["patch"]});
    let expected = [
        review("authentication.k8s.io", "tokenreviews"),
        review("authorization.k8s.io", "subjectaccessreviews"),
        patch,
    ];
    assert_eq!(writes, expected);
    let reads = json!({"apiGroups": [""], "resources": ["configmaps"], "resourceNames": ["divvy"], "verbs": ["get"]});
    let connects =
        json!({"apiGroups": [""], "resources": ["services/proxy"], "resourceNames": ["divvy-explainer:why"], "verbs": ["get"]});
    assert_eq!(rules("system:authenticated"), [reads, connects]);
}

#[test]
fn an_agents_port_is_open_only_to_named_peers() {
    let policy = |objects: Vec<Value>| {
        let mut found = objects.into_iter().filter(|object| object["kind"] == "NetworkPolicy");
        found.find(|object| object["metadata"]["name"] == "divvy-agent")
    };
    let default = policy(default_objects()).expect("there is one");
    assert_eq!(default["spec"]["policyTypes"], json!(["Ingress"]));
    let monitoring = json!({"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}});
    assert_eq!(
        default["spec"]["ingress"],
        json!([{"ports": [{"protocol": "TCP", "port": 9400}], "from": [monitoring]}])
    );
    for (agent, ingress) in [
        (json!({"networkPolicy": {"from": []}}), Some(json!([]))),
        (json!({"networkPolicy": {"enabled": false}}), None),
        // The policy would cover nothing.
        (json!({"hostNetwork": true}), None),
    ] {
        let Some(text) = with(&[json!({"agent": agent})]) else {
            return;
        };
        let found = policy(parse(&text)).map(|policy| policy["spec"]["ingress"].clone());
        assert_eq!(found, ingress, "{agent}");
    }
}

#[test]
fn node_settings_are_mounted_files_that_agents_read() {
    let configs = json!({
        "default": {"reserve-memory": "512MiB"},
        "a100-mig": {"mig-strategy": "mixed", "whole-gpus": true},
    });
    let Some(text) = with(&[json!({"agent": {"nodeConfigs": configs}})]) else {
        return;
    };
    let objects = parse(&text);
    let named = |kind: &str, name: &str| {
        let mut found = objects.iter().filter(|object| object["kind"] == kind);
        found.find(|object| object["metadata"]["name"] == name).expect("rendered")
    };
    let files = named("ConfigMap", "divvy-agent-node-configs")["data"]
        .as_object()
        .expect("a map");
    let settings = |name: &str| divvy_agent::AgentSettings::parse(name, files[name].as_str().expect("text")).expect("understood");
    assert_eq!(files.len(), 2);
    assert_eq!(settings("default").reserve_memory, Some(divvy_model::MiB(512)));
    let mig = settings("a100-mig");
    assert_eq!(
        (mig.mig_strategy, mig.whole_gpus),
        (Some(divvy_agent::MigStrategyArg::Mixed), Some(true))
    );
    let pod = &named("DaemonSet", "divvy-agent")["spec"]["template"]["spec"];
    let agent = &pod["containers"][0];
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let mounts = list(&agent["volumeMounts"]);
    let mount = mounts.iter().find(|mount| mount["name"] == "node-configs").expect("mounted");
    let flag = format!("--node-configs={}", mount["mountPath"].as_str().expect("a path"));
    assert!(list(&agent["args"]).contains(&json!(flag)), "{agent}");
    let volume = json!({"name": "node-configs", "configMap": {"name": "divvy-agent-node-configs"}});
    assert!(list(&pod["volumes"]).contains(&volume), "{pod}");
}

#[test]
fn agents_serve_the_named_metrics_or_all_without_names() {
    assert!(!super::DEFAULT.contains("--metrics-allow"));
    let names = ["divvy_gpu_info", "divvy_agent_probe_up"];
    let Some(text) = with(&[json!({"agent": {"metrics": {"allow": names}}})]) else {
        return;
    };
    assert!(
        text.contains("- --metrics-allow=divvy_gpu_info,divvy_agent_probe_up\n"),
        "{text}"
    );
    assert!(divvy_agent::Allow::parse(&names.join(",")).is_ok());
}

#[test]
fn nothing_that_is_not_asked_for_is_served_or_read() {
    for unwanted in ["--webhook", "--insecure", "pod-resources"] {
        assert!(!DEFAULT.contains(unwanted), "{unwanted}");
    }
    let of_explainer = [
        "divvy-explainer",
        "kube-public",
        "tokenreviews",
        "services/proxy",
        "system:authenticated",
    ];
    for part in of_explainer {
        assert!(DEFAULT.contains(part), "{part}");
    }
    assert!(DEFAULT.contains("divvy-extender-unhealthy-gpus") && !DEFAULT.contains("--unhealthy-gpu-configmaps"));

    let Some(webhook) = with(&[json!({"extender": {"webhook": true}})]) else {
        return;
    };
    assert!(webhook.contains("        - --webhook\n"));
    let without = with(&[json!({"explainer": {"enabled": false}})]).expect("Helm");
    for part in of_explainer {
        assert!(!without.contains(part), "{part}: {without}");
    }
    let without = with(&[json!({"extender": {"unhealthyGpuConfigMaps": false}})]).expect("Helm");
    assert!(
        !without.contains("kube-system") && without.contains("        - --unhealthy-gpu-configmaps=false\n"),
        "{without}"
    );
}

/// Return the values of the chart, and their schema.
fn values() -> (Value, Value) {
    let schema = text_of("deploy/helm/divvy/values.schema.json");
    (
        yaml("deploy/helm/divvy/values.yaml"),
        serde_json::from_str(&schema).expect("JSON"),
    )
}

#[test]
fn every_value_that_a_template_names_is_in_values_yaml() {
    let (values, _) = values();
    let mut named = BTreeSet::new();
    let directories = ["deploy/helm/divvy/templates", "deploy/helm/divvy/templates/tests"];
    let entries = directories.map(|directory| std::fs::read_dir(root().join(directory)).expect("templates"));
    let files = entries.into_iter().flatten().map(|entry| entry.expect("an entry").path());
    for file in files.filter(|file| file.is_file()) {
        let text = std::fs::read_to_string(&file).expect("text");
        for rest in text.split(".Values.").skip(1) {
            let path: String = rest.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '.').collect();
            let pointer = format!("/{}", path.replace('.', "/"));
            assert!(values.pointer(&pointer).is_some(), "{} names {path}", file.display());
            named.insert(path);
        }
    }
    assert!(named.len() > 50, "{}", named.len());
}

/// Texts of the programs name the chart's values in the form `(Helm: extender.loopback=true)`.
#[test]
fn every_value_that_a_text_of_a_program_names_is_in_values_yaml() {
    fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(directory).expect("sources") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                sources(&path, found);
            } else if path.extension().is_some_and(|ending| ending == "rs" || ending == "md") {
                found.push(path);
            }
        }
    }
    let root = root();
    let mut files = Vec::new();
    for crate_ in [
        "divvy",
        "divvy-agent",
        "divvy-audit",
        "divvy-doctor",
        "divvy-explainer",
        "divvy-extender",
        "divvy-why",
    ] {
        sources(&root.join("crates").join(crate_).join("src"), &mut files);
    }
    sources(&root.join("docs"), &mut files);
    let (values, _) = values();
    let mut named = 0;
    for file in files {
        let text = std::fs::read_to_string(&file).expect("text");
        for rest in text.split("Helm: ").skip(1) {
            let path: String = rest.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '.').collect();
            if !rest[path.len()..].starts_with('=') {
                continue;
            }
            let pointer = format!("/{}", path.replace('.', "/"));
            assert!(values.pointer(&pointer).is_some(), "{} names {path}", file.display());
            named += 1;
        }
    }
    assert!(named >= 2, "{named}");
}

#[test]
fn the_schema_knows_every_value_and_no_other() {
    fn compare(values: &Value, schema: &Value, at: &str) {
        let Some(properties) = schema.get("properties").and_then(Value::as_object) else {
            return;
        };
        let values = values.as_object().expect("a map");
        for key in properties.keys().filter(|key| *key != "global") {
            // The schema also describes keys of lists and free maps, which the defaults do not contain.
            let known = values.contains_key(key) || at.ends_with(".resources");
            assert!(known, "{at}.{key} is not in values.yaml");
        }
        for (key, value) in values {
            compare(value, &properties[key], &format!("{at}.{key}"));
        }
    }
    let (values, schema) = values();
    compare(&values, &schema, "");
}

#[test]
fn wrong_values_are_refused_by_the_schema() {
    for (chosen, place) in [
        (json!({"agnt": {}}), "agnt"),
        (json!({"agent": {"extraArg": []}}), "extraArg"),
        (json!({"image": {"pullPolicy": "never"}}), "pullPolicy"),
        (json!({"image": {"digest": "sha256:12"}}), "digest"),
        (json!({"memoryUnit": "3"}), "memoryUnit"),
        (json!({"gpuNodes": {"kubeletDir": "/x/"}}), "kubeletDir"),
        (json!({"rbac": {"create": "yes"}}), "create"),
        (json!({"agent": {"nodeConfigs": {"-a": {}}}}), "'-a'"),
        (json!({"agent": {"nodeConfigs": {"a": "whole-gpus = true"}}}), "nodeConfigs"),
        (json!({"policies": {"defaultIsolation": "strong"}}), "defaultIsolation"),
        (json!({"agent": {"metrics": {"allow": ["divvy_gpu_*"]}}}), "allow"),
    ] {
        let Some(error) = refusal(std::slice::from_ref(&chosen)) else {
            return;
        };
        assert!(
            error.contains("don't meet the specifications of the schema") && error.contains(place),
            "{chosen}: {error}"
        );
    }
}
