mod events;

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::template::Templates;
use super::{Chart, Error, Release, Rendered, render, values};

/// What a template gives for values, or the words of its refusal.
fn text(template: &str, values: &Value) -> String {
    let files = [
        ("a.yaml", template),
        (
            "_h.tpl",
            "{{ define \"name\" -}}\n  {{ .Values.name }}-x\n{{- end }}\n{{ define \"self\" }}{{ include \"self\" . }}{{ end }}",
        ),
    ];
    let context = json!({"Values": values});
    let rendered = Templates::parse(&files).and_then(|templates| templates.render("a.yaml", &context));
    rendered.unwrap_or_else(|error| error.to_string())
}

#[test]
fn templates_mean_what_they_mean_in_go() {
    let values = json!({
        "name": "n", "port": 9400, "on": true, "off": false, "empty": "", "zero": 0, "list": ["a", 1, true], "none": [],
        "map": {"b": 1, "a": {"c": "yes"}}, "no": {},
    });
    for (template, expected) in [
        ("plain }} text", "plain }} text"),
        ("{{ .Values.name }}:{{ .Values.port }}:{{ .Values.on }}", "n:9400:true"),
        ("a  {{- .Values.name -}}  b", "anb"),
        ("a\n  {{- /* why */}}\nb{{/* x */}}c", "a\nbc"),
        ("{{ .Values.missing }}|{{ .Values.map.missing }}", "|"),
        (
            "{{ if .Values.on }}1{{ else }}2{{ end }}{{ if .Values.off }}1{{ else }}2{{ end }}",
            "12",
        ),
        (
            "{{ if .Values.empty }}1{{ end }}{{ if .Values.zero }}2{{ end }}{{ if .Values.none }}3{{ end }}{{ if .Values.no }}4{{ end }}",
            "",
        ),
        ("{{ if .Values.missing }}1{{ else }}2{{ end }}", "2"),
        (
            "{{ if eq .Values.name \"n\" }}1{{ else }}2{{ end }}{{ if eq \"m\" .Values.name }}1{{ else }}2{{ end }}",
            "12",
        ),
        ("{{ with .Values.map }}{{ .b }}{{ .a.c }}{{ end }}", "1yes"),
        ("{{ with .Values.missing }}1{{ else }}{{ .Values.name }}{{ end }}", "n"),
        (
            "{{ range .Values.list }}[{{ . }}]{{ end }}{{ range .Values.none }}x{{ end }}",
            "[a][1][true]",
        ),
        (
            "{{ range .Values.list -}} {{ . | quote }}, {{ end }}",
            "\"a\", \"1\", \"true\", ",
        ),
        (
            "{{ .Values.empty | default .Values.name | quote }}{{ .Values.port | default \"x\" }}",
            "\"n\"9400",
        ),
        ("{{ default \"x\" .Values.missing }}{{ quote .Values.name }}", "x\"n\""),
        ("x:\n  {{- include \"name\" . | nindent 2 }}", "x:\n  n-x"),
        (
            "x:\n  {{- toYaml .Values.map | nindent 2 }}",
            "x:\n  a:\n    c: \"yes\"\n  b: 1",
        ),
        ("{{ toYaml .Values.none }}{{ toYaml .Values.no }}", "[]{}"),
    ] {
        assert_eq!(text(template, &values), expected, "{template}");
    }
}

#[test]
fn what_is_not_understood_is_refused_with_file_and_line() {
    let values = json!({"list": [], "map": {"a": 1}, "name": "n"});
    for (template, expected) in [
        (
            "a\nb {{ printf \"%s\" .Values.name }}",
            "a.yaml:2: {{ printf \"%s\" .Values.name }} is not understood: understood are ",
        ),
        (
            "{{ .Values.name | upper }}",
            "a.yaml:1: {{ .Values.name | upper }} is not understood",
        ),
        ("\n\n{{ $x := 1 }}", "a.yaml:3: {{ $x := 1 }} is not understood"),
        ("{{ .Values.name .Values.name }}", "is not understood"),
        (
            "{{ range $k, $v := .Values.map }}{{ end }}",
            "a.yaml:1: {{ $k, $v := .Values.map }} is not understood",
        ),
        ("{{ if ne .Values.name \"n\" }}{{ end }}", "is not understood"),
        ("{{ if eq .Values.name }}{{ end }}", "is not understood"),
        (
            "{{ if eq .Values.map \"n\" }}{{ end }}",
            "a.yaml:1: eq compares texts here, and not a map with a text",
        ),
        ("{{ if .Values.name }}\n", "a.yaml:1: this if has no end"),
        (
            "{{ if .Values.name }}{{ else }}{{ else }}{{ end }}",
            "a.yaml:1: this if has two else",
        ),
        (
            "{{ if .Values.name }}{{ else if .Values.map }}{{ end }}",
            "{{ else if .Values.map }} is not understood",
        ),
        ("a\n{{ end }}", "a.yaml:2: {{ end }} ends nothing"),
        ("{{ .Values.name", "a.yaml:1: this {{ has no }}"),
        ("{{ }}", "a.yaml:1: {{  }} is not understood"),
        ("{{ include \"unknown\" . }}", "a.yaml:1: nothing is defined as \"unknown\""),
        ("{{ include \"self\" . }}", "_h.tpl:4: \"self\" includes itself"),
        ("{{ define \"name\" }}{{ end }}", "\"name\" is defined twice"),
        ("{{ .Values.map }}", "a.yaml:1: a map cannot be printed here; toYaml can"),
        (
            "{{ .Values.name.deeper }}",
            "a.yaml:1: .Values.name.deeper is looked for in a text",
        ),
        (
            "{{ range .Values.map }}{{ end }}",
            "a.yaml:1: range needs a list, and this is a map",
        ),
    ] {
        let found = text(template, &values);
        assert!(found.contains(expected), "{template}: {found}");
    }
}

fn rendered(chosen: &[Value]) -> Result<Rendered, Error> {
    let release = Release {
        name: "divvy".into(),
        namespace: "divvy-system".into(),
    };
    render(&Chart::embedded()?, &release, chosen)
}

fn value_set(text: &str) -> Vec<Value> {
    vec![values::parse(text).expect("values")]
}

/// `deploy/helm/compare.sh` holds the same value sets against Helm itself: what is recorded here is what Helm printed.
#[test]
fn the_chart_renders_as_helm_renders_it() {
    for (name, text) in [
        ("plain", include_str!("../../../../deploy/helm/values/plain.yaml")),
        ("service", include_str!("../../../../deploy/helm/values/service.yaml")),
        ("bare", include_str!("../../../../deploy/helm/values/bare.yaml")),
        ("loopback", include_str!("../../../../deploy/helm/values/loopback.yaml")),
    ] {
        let rendered = rendered(&value_set(text)).expect("rendered");
        insta::assert_snapshot!(name, rendered.objects);
        insta::assert_snapshot!(format!("{name}_notes"), rendered.notes);
    }
}

#[test]
fn every_mount_of_a_container_has_a_path_and_a_volume() {
    let mut mounts = 0;
    let rendered = rendered(&[]).expect("rendered");
    for document in super::split(&rendered.objects) {
        let object: Value = serde_saphyr::from_str(document).expect("YAML");
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

#[test]
fn every_document_is_an_object_of_its_own() {
    let rendered = rendered(&value_set(include_str!("../../../../deploy/helm/values/service.yaml"))).expect("rendered");
    let mut seen = std::collections::BTreeSet::new();
    for document in super::split(&rendered.objects) {
        let object: Value = serde_saphyr::from_str(document).expect("YAML");
        let field = |path: &str| object.pointer(path).and_then(Value::as_str).unwrap_or_default().to_owned();
        let id = (field("/apiVersion"), field("/kind"), field("/metadata/name"));
        assert!(!id.0.is_empty() && !id.1.is_empty() && !id.2.is_empty(), "{document}");
        assert!(seen.insert(id), "twice: {document}");
        let cluster_wide = ["Cluster", "Validating", "RuntimeClass"]
            .iter()
            .any(|begin| field("/kind").starts_with(begin));
        let expected = match field("/kind").as_str() {
            _ if cluster_wide => "",
            "Role" | "RoleBinding" if field("/metadata/name").ends_with("-unhealthy-gpus") => "kube-system",
            "ConfigMap" => "kube-public",
            "Role" | "RoleBinding" if ["divvy-explainer", "divvy-find-explainer"].contains(&field("/metadata/name").as_str()) => {
                "kube-public"
            }
            _ => "divvy-system",
        };
        assert_eq!(field("/metadata/namespace"), expected, "{document}");
    }
    assert_eq!(seen.len(), 42);
}

#[test]
fn what_makes_no_sense_with_loopback_is_refused_in_words() {
    for (other, part) in [
        (json!({"replicas": 1}), "extender.replicas cannot be chosen with it"),
        (json!({"service": {"clusterIP": "10.96.0.7"}}), "has no Service"),
        (json!({"tls": {"existingSecret": "x"}}), "would not be used"),
        (json!({"webhook": true}), "the API server calls webhooks over TLS only"),
    ] {
        let loopback = json!({"extender": {"loopback": true}});
        let error = rendered(&[loopback, json!({"extender": other})]).expect_err(part).to_string();
        assert!(
            error.starts_with("these values: extender.loopback") && error.contains(part),
            "{error}"
        );
    }
}

#[test]
fn the_extender_may_read_its_own_secret_and_lease_and_no_others() {
    let rendered = rendered(&[]).expect("rendered");
    for document in super::split(&rendered.objects) {
        let object: Value = serde_saphyr::from_str(document).expect("YAML");
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
    let text = &rendered.objects;
    assert!(text.contains("- --tls-secret=divvy-system/divvy-extender-tls\n"), "{text}");
    assert!(
        text.contains("- --tls-server-name=divvy-extender.divvy-system.svc\n"),
        "{text}"
    );
}

/// Every user can connect to it.
#[test]
fn the_explainer_may_change_nothing_but_its_configmap_and_every_user_reaches_nothing_else() {
    let rendered = rendered(&[]).expect("rendered");
    let objects: Vec<Value> = super::split(&rendered.objects)
        .into_iter()
        .map(|document| serde_saphyr::from_str(document).expect("YAML"))
        .collect();
    let rules = |subject: &str| {
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
        bound.flat_map(of).collect::<Vec<Value>>()
    };
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
fn an_agents_port_is_open_to_those_who_are_named_and_to_nobody_without_a_name() {
    let policy = |chosen: &[Value]| {
        let rendered = rendered(chosen).expect("rendered");
        let documents = super::split(&rendered.objects).into_iter();
        let objects = documents.map(|document| serde_saphyr::from_str::<Value>(document).expect("YAML"));
        let mut found = objects.into_iter().filter(|object| object["kind"] == "NetworkPolicy");
        found.find(|object| object["metadata"]["name"] == "divvy-agent")
    };
    let default = policy(&[]).expect("there is one");
    assert_eq!(default["spec"]["policyTypes"], json!(["Ingress"]));
    let monitoring = json!({"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}});
    assert_eq!(
        default["spec"]["ingress"],
        json!([{"ports": [{"protocol": "TCP", "port": 9400}], "from": [monitoring]}])
    );
    let with = |network: Value| policy(&[json!({"agent": {"networkPolicy": network}})]);
    assert_eq!(with(json!({"from": []})).expect("there is one")["spec"]["ingress"], json!([]));
    assert_eq!(with(json!({"enabled": false})), None);
    assert_eq!(
        policy(&[json!({"agent": {"hostNetwork": true}})]),
        None,
        "it would cover nothing"
    );
}

#[test]
fn nothing_that_is_not_asked_for_is_served_or_read() {
    let objects = |chosen: &[Value]| rendered(chosen).expect("rendered").objects;
    let default = objects(&[]);
    for unwanted in ["--webhook", "--insecure", "pod-resources"] {
        assert!(!default.contains(unwanted), "{unwanted}");
    }
    assert!(objects(&[json!({"extender": {"webhook": true}})]).contains("        - --webhook\n"));
    let without = objects(&[json!({"explainer": {"enabled": false}})]);
    for part in [
        "divvy-explainer",
        "kube-public",
        "tokenreviews",
        "services/proxy",
        "system:authenticated",
    ] {
        assert!(default.contains(part) && !without.contains(part), "{part}: {without}");
    }
    assert!(default.contains("divvy-extender-unhealthy-gpus") && !default.contains("--unhealthy-gpu-configmaps"));
    let without = objects(&[json!({"extender": {"unhealthyGpuConfigMaps": false}})]);
    assert!(
        !without.contains("kube-system") && without.contains("        - --unhealthy-gpu-configmaps=false\n"),
        "{without}"
    );
}

#[test]
fn every_value_that_a_template_names_is_in_values_yaml() {
    let chart = Chart::embedded().expect("a chart");
    let templates = Templates::parse(chart.templates()).expect("templates");
    let paths = templates.value_paths();
    assert!(paths.len() > 50, "{}", paths.len());
    for (file, path) in paths {
        let pointer = format!("/{}", path.join("/"));
        assert!(chart.values().pointer(&pointer).is_some(), "{file} names {}", path.join("."));
    }
}

/// Texts say `(Helm: extender.loopback=true)`.
#[test]
fn every_value_that_a_text_of_a_program_names_is_in_values_yaml() {
    fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).expect("sources") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                sources(&path, found);
            } else if path.extension().is_some_and(|ending| ending == "rs" || ending == "md") {
                found.push(path);
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut files = Vec::new();
    for crate_ in ["divvy", "divvy-agent", "divvy-extender", "divvy-doctor"] {
        sources(&root.join("crates").join(crate_).join("src"), &mut files);
    }
    sources(&root.join("docs"), &mut files);
    let chart = Chart::embedded().expect("a chart");
    let mut named = 0;
    for file in files {
        let text = std::fs::read_to_string(&file).expect("text");
        for rest in text.split("Helm: ").skip(1) {
            let path: String = rest.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '.').collect();
            if !rest[path.len()..].starts_with('=') {
                continue;
            }
            let pointer = format!("/{}", path.replace('.', "/"));
            assert!(chart.values().pointer(&pointer).is_some(), "{} names {path}", file.display());
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
            // Of lists and free maps the schema knows more than the defaults have.
            let known = values.contains_key(key) || at.ends_with(".resources");
            assert!(known, "{at}.{key} is not in values.yaml");
        }
        for (key, value) in values {
            compare(value, &properties[key], &format!("{at}.{key}"));
        }
    }
    let chart = Chart::embedded().expect("a chart");
    compare(chart.values(), chart.schema(), "");
}

#[test]
fn wrong_values_are_refused_in_words_all_at_once() {
    for (chosen, expected) in [
        (json!({"agnt": {}}), "agnt: there is no such value; did you mean agent?"),
        (
            json!({"agent": {"extraArg": []}}),
            "agent.extraArg: there is no such value; did you mean agent.extraArgs?",
        ),
        (
            json!({"policies": {"xyz": 1}}),
            "policies.xyz: there is no such value; policies may have enabled, gpushareAccounts",
        ),
        (
            json!({"somethingElse": 1}),
            "somethingElse: there is no such value; the values may have ",
        ),
        (
            json!({"image": {"pullPolicy": "never"}}),
            "image.pullPolicy: \"never\" is not one of Always, IfNotPresent, Never",
        ),
        (
            json!({"agent": {"metrics": {"port": 99999}}}),
            "agent.metrics.port: 99999 is more than 65535",
        ),
        (json!({"agent": {"metrics": 7}}), "agent.metrics: 7 is not a map"),
        (
            json!({"memoryUnit": "3"}),
            "memoryUnit: \"3\" is not GiB, MiB, or a chunk such as 256MiB",
        ),
        (
            json!({"agent": {"reserveMemory": "1GB"}}),
            "agent.reserveMemory: \"1GB\" is not an amount such as 512MiB or 2GiB",
        ),
        (
            json!({"gpuNodes": {"kubeletDir": "/x/"}}),
            "gpuNodes.kubeletDir: \"/x/\" is not an absolute path without / at its end",
        ),
        (
            json!({"image": {"digest": "sha256:12"}}),
            "image.digest: \"sha256:12\" is not sha256: with 64 hexadecimal digits, or empty",
        ),
        (
            json!({"agent": {"driverSpec": "on"}}),
            "agent.driverSpec: \"on\" is not one of auto, off",
        ),
        (
            json!({"probe": {"driverRoot": "x"}}),
            "probe.driverRoot: \"x\" is not an absolute path",
        ),
        (
            json!({"agent": {"extraEnv": [{"value": "x"}]}}),
            "agent.extraEnv[0]: name is missing",
        ),
        (
            json!({"gpuNodes": {"selector": {"a": true}}}),
            "gpuNodes.selector.a: true is not a text (in YAML, quotes make one",
        ),
        (
            json!({"rbac": {"create": "yes"}}),
            "rbac.create: \"yes\" is not true or false",
        ),
    ] {
        let error = rendered(std::slice::from_ref(&chosen)).expect_err("refused").to_string();
        assert!(error.contains(expected), "{chosen}: {error}");
    }
    let both = rendered(&[json!({"agnt": 1, "log": 2})]).expect_err("refused").to_string();
    assert!(both.contains("agnt") && both.contains("log"), "{both}");
}

#[test]
fn set_is_read_as_helm_reads_it() {
    for (argument, expected) in [
        ("a.b=c,d=1", json!({"a": {"b": "c"}, "d": 1})),
        ("a.b=1,a.c=2", json!({"a": {"b": 1, "c": 2}})),
        (
            "a=true,b=false,c=null,d=0,e=01,f=",
            json!({"a": true, "b": false, "c": null, "d": 0, "e": "01", "f": ""}),
        ),
        (r"a.x\.y/z=1", json!({"a": {"x.y/z": 1}})),
        (r"a=b\,c", json!({"a": "b,c"})),
        ("a={x,1,true}", json!({"a": ["x", 1, true]})),
        ("a={}", json!({"a": []})),
        ("a=b=c", json!({"a": "b=c"})),
    ] {
        assert_eq!(values::set(argument).expect("read"), expected, "{argument}");
    }
    for argument in ["a", "=b", "a..b=c", "a[0]=b", ""] {
        let error = values::set(argument).expect_err("refused").to_string();
        assert!(error.contains("write KEY=VALUE"), "{argument}: {error}");
    }
}

/// It would be as many maps within maps, and no stack is that deep.
#[test]
fn a_key_of_thousands_of_parts_is_refused() {
    let argument = format!("{}a=1", "a.".repeat(100_000));
    let error = values::set(&argument).expect_err("refused").to_string();
    assert!(error.contains("100001 parts"), "{}", &error[error.len() - 200..]);
}

#[test]
fn later_values_lie_over_earlier_ones_and_null_takes_away() {
    let image = |chosen: &[Value]| {
        let objects = rendered(chosen).expect("rendered").objects;
        objects
            .lines()
            .find(|line| line.contains("image: "))
            .map(|line| line.trim().to_owned())
    };
    let tag = |tag: &str| json!({"image": {"tag": tag}});
    assert_eq!(image(&[]).as_deref(), Some("image: divvy.dev/divvy:0.1.0"));
    assert_eq!(image(&[tag("1"), tag("2")]).as_deref(), Some("image: divvy.dev/divvy:2"));
    let selector = json!({"gpuNodes": {"selector": {"gpushare": null, "a/b": "c"}}});
    let objects = rendered(&[selector]).expect("rendered").objects;
    assert!(
        objects.contains("nodeSelector:\n        a/b: c\n") && !objects.contains("gpushare:"),
        "{objects}"
    );
}
