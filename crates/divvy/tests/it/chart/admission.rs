//! Evaluates the expressions of the chart's admission policies for pods and nodes.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use divvy_model::limits::{
    ALLOCATION_BYTES, DEVICE_TEXT_BYTES, INVENTORY_BYTES, RULE_BYTES, RULE_PATTERNS, RULE_UUIDS, TEST_RUN_BYTES,
};
use divvy_model::{ContainerKind, ContainerRequest, GpuRules, PodRequest, Vendor, WholeKind, quantity_value};
use serde_json::{Value, json};

use super::{default_objects, parse, with};

/// An admission policy: its variables in order, and for each validation its expression, its `messageExpression` (if it has one),
/// and its `message`.
pub(crate) struct Policy {
    env: Arc<cel::Env>,
    variables: Vec<(String, cel::Program)>,
    validations: Vec<(cel::Program, Option<cel::Program>, String)>,
}

impl Policy {
    /// Return a policy of the chart with default values.
    pub(crate) fn of_chart(name: &str) -> Policy {
        Policy::of(&default_objects(), name)
    }

    fn of(objects: &[Value], name: &str) -> Policy {
        let policy = objects
            .iter()
            .find(|object| object["kind"] == "ValidatingAdmissionPolicy" && object["metadata"]["name"] == name)
            .expect("the policy");
        let mut env = cel::Env::stdlib();
        env.add_extension(cel::extensions::strings)
            .expect("Kubernetes has these functions, too");
        let env = Arc::new(env);
        let program = |text: &Value| env.compile(text.as_str().expect("text")).expect("CEL");
        let list = |field: &str| policy["spec"][field].as_array().cloned().unwrap_or_default();
        Policy {
            variables: list("variables")
                .iter()
                .map(|variable| {
                    (
                        variable["name"].as_str().expect("a name").to_owned(),
                        program(&variable["expression"]),
                    )
                })
                .collect(),
            validations: list("validations")
                .iter()
                .map(|validation| {
                    let told = validation.get("messageExpression").map(program);
                    let otherwise = validation["message"].as_str().expect("a message").to_owned();
                    (program(&validation["expression"]), told, otherwise)
                })
                .collect(),
            env,
        }
    }

    /// Return the messages with which the policy refuses a user's request to create `object`, or to replace `old` by `object`. An
    /// empty list means that the policy allows the request. Only [`ADMIN`] may patch nodes.
    pub(crate) fn refusals(&self, object: &Value, old: &Value, user: &str) -> Vec<String> {
        self.refusals_with(object, old, user, &Value::Null)
    }

    /// Do what [`Policy::refusals`] does with a parameter of the policy.
    fn refusals_with(&self, object: &Value, old: &Value, user: &str, params: &Value) -> Vec<String> {
        let mut context = cel::Context::with_env(self.env.clone());
        let number = |cel::extractors::This(text): cel::extractors::This<Arc<String>>| quantity_value(&text).unwrap_or(0) as i64;
        context.add_function("quantity", |text: Arc<String>| text).expect("new");
        context
            .add_function(
                "isInteger",
                |cel::extractors::This(text): cel::extractors::This<Arc<String>>| quantity_value(&text).is_ok(),
            )
            .expect("new");
        context.add_function("asInteger", number).expect("new");
        // The API server's authorizer, as a text that grows with each call.
        for step in ["group", "resource", "check"] {
            let and =
                |cel::extractors::This(text): cel::extractors::This<Arc<String>>, more: Arc<String>| format!("{text}/{more}");
            context.add_function(step, and).expect("new");
        }
        let allowed = |cel::extractors::This(text): cel::extractors::This<Arc<String>>| *text == format!("{ADMIN}//nodes/patch");
        context.add_function("allowed", allowed).expect("new");
        context.add_variable("authorizer", user).expect("a value");
        context.add_variable("params", params).expect("a value");
        context
            .add_function(
                "isLessThan",
                |cel::extractors::This(text): cel::extractors::This<Arc<String>>, other: Arc<String>| {
                    quantity_value(&text).unwrap_or(0) < quantity_value(&other).unwrap_or(0)
                },
            )
            .expect("new");
        context.add_variable("object", object).expect("a value");
        context.add_variable("oldObject", old).expect("a value");
        let extra = json!({"authentication.kubernetes.io/node-name": ["n1"]});
        let request = json!({"name": object["metadata"]["name"], "userInfo": {"username": user, "extra": extra}});
        context.add_variable("request", request).expect("a value");
        let mut known: HashMap<String, cel::Value> = HashMap::new();
        context.add_variable_from_value("variables", known.clone());
        for (name, program) in &self.variables {
            let value = program.execute(&context).unwrap_or_else(|error| panic!("{name}: {error}"));
            known.insert(name.clone(), value);
            context.add_variable_from_value("variables", known.clone());
        }
        let failed = self.validations.iter().filter(|(holds, ..)| match holds.execute(&context) {
            Ok(cel::Value::Bool(holds)) => !holds,
            other => panic!("{other:?}"),
        });
        let told = failed.map(
            |(_, told, otherwise)| match told.as_ref().map(|told| told.execute(&context)) {
                // The API server does not use longer messages (apiserver's `validating/message.go`: 5 KiB).
                Some(Ok(cel::Value::String(text))) if text.len() <= 5 << 10 => text.to_string(),
                _ => otherwise.clone(),
            },
        );
        told.collect()
    }
}

/// A user who may patch nodes.
const ADMIN: &str = "admin";

fn pod(annotations: &Value, units: Option<u64>) -> Value {
    let limits = units.map_or(json!({}), |units| json!({"aliyun.com/gpu-mem": units.to_string()}));
    json!({"metadata": {"name": "p", "annotations": annotations}, "spec": {"containers": [{"name": "main", "resources": {"limits": limits}}]}})
}

/// For Kubernetes, `3Gi` is 3,221,225,472 units, but a user who writes `3Gi` means 3 units. The message says so. Updates of the
/// status of an existing pod are still allowed.
#[test]
fn an_amount_of_bytes_is_refused_with_the_number_to_write() {
    for (unit, cases) in [
        (
            "GiB",
            &[
                ("3Gi", Some(3)),
                ("3G", Some(3)),
                ("512Mi", Some(1)),
                ("1500Mi", Some(2)),
                ("3", None),
            ][..],
        ),
        // `4k` is how the API server writes 4000.
        ("MiB", &[("3Gi", Some(3072)), ("16384", None), ("4k", None)]),
        ("256MiB", &[("3Gi", Some(12))]),
    ] {
        let objects = match unit {
            "GiB" => default_objects(),
            unit => match with(&[json!({"memoryUnit": unit})]) {
                Some(text) => parse(&text),
                None => return,
            },
        };
        let policy = Policy::of(&objects, "divvy-request");
        for (amount, write) in cases {
            let mut pod = pod(&json!({}), Some(0));
            pod["spec"]["containers"][0]["resources"]["limits"]["aliyun.com/gpu-mem"] = json!(amount);
            let expected: Vec<String> = write
                .map(|write| {
                    format!(
                        "aliyun.com/gpu-mem: \"{amount}\" was found; it is a number of units of {unit} and takes no suffix: write {write}"
                    )
                })
                .into_iter()
                .collect();
            let told = |old: &Value| policy.refusals(&pod, old, "ann");
            assert_eq!(told(&Value::Null), expected, "{unit}, {amount}");
            assert!(told(&json!({"metadata": {"name": "p"}})).is_empty(), "{unit}, {amount}");
        }
    }
}

fn rules(annotations: &Value) -> Result<Option<GpuRules>, divvy_model::Error> {
    let annotations: BTreeMap<String, String> = serde_json::from_value(annotations.clone()).expect("texts");
    GpuRules::from_annotations(&annotations)
}

/// Report whether the extender can read the rules in these annotations of a pod.
fn is_read(annotations: &Value, units: u64) -> bool {
    let container = ContainerRequest {
        name: "main".to_owned(),
        kind: ContainerKind::App,
        units,
        gpu_count: 0,
    };
    let request = PodRequest::new(vec![container], rules(annotations).transpose());
    !matches!(request.rules.as_deref(), Some(Err(_)))
}

const HUGE: usize = 250_000;

/// The policy refuses everything else and says why in one sentence.
#[test]
fn the_policy_admits_exactly_what_the_extender_reads() {
    let policy = Policy::of_chart("divvy-request");
    let list = |count: usize, one: &str| vec![one; count].join(",");
    let mut let_through = 0;
    let mut cases: Vec<(&str, String)> = vec![
        ("divvy.dev/gpu-model", list(RULE_PATTERNS, "A100*")),
        ("divvy.dev/gpu-model", list(RULE_PATTERNS + 1, "A100*")),
        ("divvy.dev/gpu-model", list(HUGE / 2, "a")),
        ("divvy.dev/gpu-model", list(HUGE / 3, "!a")),
        ("divvy.dev/gpu-model", "a".repeat(DEVICE_TEXT_BYTES)),
        ("divvy.dev/gpu-model", format!(" ! {} ", "a".repeat(DEVICE_TEXT_BYTES))),
        ("divvy.dev/gpu-model", "a".repeat(DEVICE_TEXT_BYTES + 1)),
        ("divvy.dev/gpu-model", "ö".repeat(DEVICE_TEXT_BYTES / 2)),
        ("divvy.dev/gpu-model", "ö".repeat(DEVICE_TEXT_BYTES / 2 + 1)),
        ("divvy.dev/gpu-model", format!("a{}", " ".repeat(RULE_BYTES - 1))),
        ("divvy.dev/gpu-model", format!("a{}", " ".repeat(RULE_BYTES))),
        ("divvy.dev/gpu-model", "ö,".repeat(RULE_BYTES / 3 + 1)),
        ("divvy.dev/gpu-model", "!".repeat(RULE_BYTES)),
        ("divvy.dev/gpu-uuid", list(RULE_UUIDS, "GPU-1")),
        ("divvy.dev/gpu-uuid", list(RULE_UUIDS + 1, "GPU-1")),
        ("divvy.dev/gpu-uuid", list(HUGE / 6, "GPU-1")),
        ("divvy.dev/gpu-uuid", "g".repeat(DEVICE_TEXT_BYTES)),
        ("divvy.dev/gpu-uuid", "g".repeat(DEVICE_TEXT_BYTES + 1)),
        ("divvy.dev/gpu-memory", ">=40Gi".to_owned()),
        ("divvy.dev/gpu-memory", " >= 1.5Gi ".to_owned()),
        ("divvy.dev/gpu-memory", ">=1Mi".to_owned()),
        ("divvy.dev/gpu-memory", ">=1M".to_owned()),
        ("divvy.dev/gpu-memory", ">=20".to_owned()),
        ("divvy.dev/gpu-memory", ">=0".to_owned()),
        ("divvy.dev/gpu-memory", "40Gi".to_owned()),
        ("divvy.dev/gpu-memory", format!(">={}", "9".repeat(HUGE))),
        ("divvy.dev/gpu-prefer", "fastest".to_owned()),
        ("divvy.dev/gpu-prefer", "x".repeat(HUGE)),
        ("divvy.dev/isolation", "hard".to_owned()),
        ("divvy.dev/isolation", " none ".to_owned()),
        ("divvy.dev/gpu-vendor", " intel ".to_owned()),
        ("divvy.dev/gpu-vendor", "matrox".to_owned()),
        ("divvy.dev/gpu-vendor", "AMD".to_owned()),
        ("divvy.dev/gpu-vendor", "x".repeat(HUGE)),
        ("divvy.dev/gpu-test", " 1a2b ".to_owned()),
        ("divvy.dev/gpu-test", "z".repeat(TEST_RUN_BYTES)),
        ("divvy.dev/gpu-test", "z".repeat(TEST_RUN_BYTES + 1)),
        ("divvy.dev/gpu-test", String::new()),
        ("divvy.dev/gpu-test", " ".to_owned()),
        ("divvy.dev/gpu-test", "1-2".to_owned()),
        ("divvy.dev/gpu-test", "Ab".to_owned()),
        ("divvy.dev/gpu-test", "ä".to_owned()),
        ("divvy.dev/gpu-test", "x".repeat(HUGE)),
        ("divvy.dev/isolation", "x".repeat(HUGE)),
        ("divvy.dev/gpus", "2".to_owned()),
        ("divvy.dev/gpus", "3".to_owned()),
        ("divvy.dev/gpus", "2".repeat(HUGE)),
        ("divvy.dev/gpu-cores", "1".to_owned()),
        ("divvy.dev/gpu-cores", " 100 ".to_owned()),
        ("divvy.dev/gpu-cores", "101".to_owned()),
        ("divvy.dev/gpu-cores", "0".to_owned()),
        ("divvy.dev/gpu-cores", "30%".to_owned()),
        ("divvy.dev/gpu-cores", "9".repeat(HUGE)),
    ];
    let unknown = format!("divvy.dev/{}", "x".repeat(HUGE));
    cases.push((&unknown, String::new()));
    for (key, value) in &cases {
        let annotations = json!({*key: value});
        let refusals = policy.refusals(&pod(&annotations, Some(4)), &Value::Null, ADMIN);
        let shown: String = value.chars().take(40).collect();
        assert_eq!(refusals.is_empty(), is_read(&annotations, 4), "{key} {shown}: {refusals:?}");
        assert!(refusals.iter().all(|text| text.len() < 1_500), "{key} {shown}");
        let_through += usize::from(refusals.is_empty());
        // The same holds for a pod that requests no memory.
        let idle = policy.refusals(&pod(&annotations, None), &Value::Null, ADMIN);
        assert!(idle == refusals || key.ends_with("gpus"), "{key} {shown}: {idle:?}");
        // A value that is older than the limit may stay. Otherwise, the owner could not change anything in the pod.
        let pod = pod(&annotations, Some(4));
        assert_eq!(policy.refusals(&pod, &pod, "anybody"), Vec::<String>::new(), "{key} {shown}");
    }
    assert!((10..20).contains(&let_through), "{let_through}");
    let long = policy.refusals(
        &pod(&json!({"divvy.dev/gpu-model": list(HUGE / 2, "a")}), Some(4)),
        &Value::Null,
        "anybody",
    );
    insta::assert_snapshot!(long.join("\n"), @"the annotation divvy.dev/gpu-model has more than 1024 bytes; which GPUs a pod takes is said in fewer");
}

/// Return the refusals of a patch by the agent on node `n1`.
fn refusals_of_agent(policy: &Policy, was: &Value, now: &Value) -> Vec<String> {
    let node = |labels: &Value| json!({"metadata": {"name": "n1", "labels": labels}, "spec": {}, "status": {}});
    policy.refusals(&node(now), &node(was), "system:serviceaccount:divvy-system:divvy-agent")
}

#[test]
fn an_agent_labels_nothing_unless_it_is_told_to() {
    let policy = Policy::of_chart("divvy-inventory");
    let (was, now) = (json!({"a": "b"}), json!({"a": "b", "nvidia.com/gpu.count": "1"}));
    assert_eq!(refusals_of_agent(&policy, &was, &was), Vec::<String>::new());
    let [refusal] = &refusals_of_agent(&policy, &was, &now)[..] else {
        panic!("refused");
    };
    assert!(
        refusal.contains("labels, taints and everything else are not its own"),
        "{refusal}"
    );
}

#[test]
fn an_agent_with_node_labels_writes_only_nvidias_labels() {
    let Some(text) = with(&[json!({"agent": {"labels": "node"}})]) else {
        return;
    };
    let policy = Policy::of(&parse(&text), "divvy-inventory");
    let was = json!({"a": "b", "nvidia.com/gpu.count": "1"});
    for (now, refused) in [
        (
            json!({"a": "b", "nvidia.com/gpu.count": "2", "nvidia.com/gpu.memory": "1"}),
            None,
        ),
        (json!({"a": "b"}), None),
        (json!({"a": "c", "nvidia.com/gpu.count": "1"}), Some("a")),
        (json!({"nvidia.com/gpu.count": "1"}), Some("a")),
        (
            json!({"a": "b", "nvidia.com/gpu.count": "1", "node-role.kubernetes.io/control-plane": ""}),
            Some("node-role.kubernetes.io/control-plane"),
        ),
        (json!({"a": "b", "nvidia.computer/x": "1"}), Some("nvidia.computer/x")),
    ] {
        let told = refusals_of_agent(&policy, &was, &now);
        let expected =
            refused.map(|key| format!("Divvy's agent writes labels that begin with nvidia.com/, and {key} are not its own"));
        assert_eq!(told, expected.into_iter().collect::<Vec<_>>(), "{now}");
    }
    let tainted = |spec: &Value| json!({"metadata": {"name": "n1"}, "spec": spec, "status": {}});
    let (was, now) = (tainted(&json!({})), tainted(&json!({"unschedulable": true})));
    let told = policy.refusals(&now, &was, "system:serviceaccount:divvy-system:divvy-agent");
    assert_eq!(
        told,
        ["Divvy's agent writes the annotation divvy.dev/inventory of its node; taints and everything else are not its own"]
    );
    assert!(text.contains("- --labels=node\n"), "{text}");
}

#[test]
fn only_an_agent_that_writes_node_features_may_write_them() {
    for (mode, expected) in [
        ("off", false),
        ("node", false),
        ("node-feature", true),
        ("feature-file", false),
    ] {
        let Some(text) = with(&[json!({"agent": {"labels": mode}})]) else {
            return;
        };
        assert_eq!(text.contains("nodefeatures"), expected, "{mode}");
        let agent = parse(&text).into_iter().find(|object| {
            let name = &object["metadata"]["name"];
            object["kind"] == "DaemonSet" && name == "divvy-agent"
        });
        assert_eq!(agent.expect("there").to_string().contains("POD_NAME"), expected, "{mode}");
    }
}

#[test]
fn only_feature_file_agents_can_write_their_directory() {
    for (mode, expected) in [
        ("off", false),
        ("node", false),
        ("node-feature", false),
        ("feature-file", true),
    ] {
        let Some(text) = with(&[json!({"agent": {"labels": mode}})]) else {
            return;
        };
        let agent = parse(&text).into_iter().find(|object| {
            let name = &object["metadata"]["name"];
            object["kind"] == "DaemonSet" && name == "divvy-agent"
        });
        let pod = &agent.expect("there")["spec"]["template"]["spec"];
        let named = |list: &Value| {
            list.as_array()
                .into_iter()
                .flatten()
                .find(|one| one["name"] == "features")
                .cloned()
        };
        let directory = "/etc/kubernetes/node-feature-discovery/features.d";
        let mount = json!({"name": "features", "mountPath": format!("/host{directory}")});
        let volume = json!({"name": "features", "hostPath": {"path": directory, "type": "DirectoryOrCreate"}});
        let found = (named(&pod["containers"][0]["volumeMounts"]), named(&pod["volumes"]));
        assert_eq!(found, (expected.then_some(mount), expected.then_some(volume)), "{mode}");
    }
}

/// In a cluster with the policies, a user reads the policy's message. In a cluster without them, the user reads the extender's
/// message, in an event or from `kubectl divvy why`.
#[test]
fn policy_and_extender_refuse_a_wrong_value_in_the_same_words() {
    let policy = Policy::of_chart("divvy-request");
    for (key, value) in [
        ("divvy.dev/gpu-memory", "lots"),
        ("divvy.dev/gpu-memory", ">=much"),
        ("divvy.dev/gpu-memory", ">=20"),
        ("divvy.dev/gpu-memory", ">=0"),
        ("divvy.dev/gpu-prefer", "quickest"),
        ("divvy.dev/isolation", "strong"),
        ("divvy.dev/gpu-vendor", "matrox"),
        ("divvy.dev/gpu-test", "No id"),
        ("divvy.dev/gpu-cores", "0"),
        ("divvy.dev/gpu-cores", "30 %"),
        ("divvy.dev/gpus", "two"),
        ("divvy.dev/gpus", "17"),
    ] {
        let annotations = json!({key: value});
        let extender = rules(&annotations).expect_err(key).to_string();
        assert_eq!(
            policy.refusals(&pod(&annotations, Some(4)), &Value::Null, ADMIN),
            [extender],
            "{key}: {value}"
        );
    }
}

#[test]
fn only_users_who_may_patch_nodes_say_that_a_pod_tests_a_gpu() {
    let policy = Policy::of_chart("divvy-request");
    let with = |test: Option<&str>| pod(&test.map_or(json!({}), |test| json!({"divvy.dev/gpu-test": test})), Some(4));
    let refusal = |user: &str| {
        format!(
            "the annotation divvy.dev/gpu-test opens a GPU that is out of service, and only users who may patch nodes may write it; {user} may not"
        )
    };
    let stale = with(Some("1a2c"));
    for (was, now, is_free) in [
        (Value::Null, Some("1a2b"), false),
        (with(None), Some("1a2b"), false),
        (stale.clone(), Some("1a2b"), false),
        // Of a pod that has it, everyone may change something else.
        (stale.clone(), Some("1a2c"), true),
        (stale, None, true),
        (Value::Null, None, true),
    ] {
        let told = |user: &str| policy.refusals(&with(now), &was, user);
        let expected = |user: &str| if is_free { vec![] } else { vec![refusal(user)] };
        for user in ["ann", "system:serviceaccount:kube-system:replicaset-controller", ""] {
            assert_eq!(told(user), expected(user), "{was} {now:?}");
        }
        assert_eq!(told(ADMIN), Vec::<String>::new(), "{was} {now:?}");
    }
    let binding = Policy::of_chart("divvy-binding");
    let told = binding.refusals(
        &json!({"metadata": {"annotations": {"divvy.dev/gpu-test": "1a2b"}}}),
        &Value::Null,
        "scheduler",
    );
    assert!(
        matches!(&told[..], [one] if one.starts_with("this binding carries divvy.dev/gpu-test")),
        "{told:?}"
    );
}

/// The API server evaluates the policy once for each pod of the namespace.
#[test]
fn the_extender_evicts_only_pods_with_gpus_and_by_their_uids() {
    let Some(text) = with(&[json!({"agent": {"onEscape": "evict", "guard": "shadow"}})]) else {
        return;
    };
    let policy = Policy::of(&parse(&text), "divvy-eviction");
    let named = |name: &str, limits: &Value, node: Option<&str>| {
        let mut spec = json!({"containers": [{"name": "other"}, {"name": "main", "resources": {"limits": limits}}]});
        if let Some(node) = node {
            spec["nodeName"] = node.into();
        }
        json!({"metadata": {"name": name, "uid": format!("uid-{name}")}, "spec": spec})
    };
    let resources = Vendor::ALL.map(|vendor| WholeKind::Gpu(vendor).resource().to_string());
    let part = WholeKind::of_resource("nvidia.com/mig-1g.5gb")
        .expect("a MIG device")
        .resource()
        .to_string();
    let mut cases: Vec<(Value, bool)> = resources
        .into_iter()
        .chain([part, "aliyun.com/gpu-mem".to_owned()])
        .map(|resource| (named("p", &json!({resource: "1"}), Some("n1")), true))
        .collect();
    let mut of_init = named("p", &json!({"cpu": "1"}), Some("n1"));
    of_init["spec"]["initContainers"] = named("p", &json!({"aliyun.com/gpu-mem": "1"}), None)["spec"]["containers"].clone();
    let mut another = named("p", &json!({"aliyun.com/gpu-mem": "1"}), Some("n1"));
    another["metadata"]["uid"] = "uid-before".into();
    cases.extend([
        (of_init, true),
        (another, false),
        (named("p", &json!({"cpu": "1"}), Some("n1")), false),
        (named("p", &json!({"rdma/hca": "1"}), Some("n1")), false),
        (named("p", &json!({"aliyun.com/gpu-mem": "1"}), None), false),
        (named("beside", &json!({"cpu": "1"}), Some("n1")), true),
    ]);
    let extender = "system:serviceaccount:divvy-system:divvy-extender";
    let key = divvy_model::PodKey {
        namespace: "team".to_owned(),
        name: "p".to_owned(),
    };
    let asked = divvy_extender::core::eviction(&key, "uid-p");
    for (pod, is_evicted) in &cases {
        let told = policy.refusals_with(&asked, &Value::Null, extender, pod);
        assert_eq!(told.is_empty(), *is_evicted, "{pod}: {told:?}");
    }
    let gpu = &cases[0].0;
    for options in [
        Value::Null,
        json!({}),
        json!({"preconditions": {}}),
        json!({"preconditions": {"uid": "uid-p"}, "gracePeriodSeconds": 0}),
    ] {
        let mut asked = asked.clone();
        match &options {
            Value::Null => drop(asked.as_object_mut().expect("an object").remove("deleteOptions")),
            options => asked["deleteOptions"] = options.clone(),
        }
        let told = policy.refusals_with(&asked, &Value::Null, extender, gpu);
        assert!(
            told.iter().any(|one| one.contains("evicts a pod by its UID")),
            "{options}: {told:?}"
        );
    }
    // The policy exists wherever the right does.
    let has = |text: &str, kind: &str| text.contains(kind);
    for (reaction, expected) in [("event", false), ("evict", true)] {
        let text = with(&[json!({"agent": {"onEscape": reaction, "guard": "shadow"}})]).expect("as before");
        assert_eq!(
            (has(&text, "pods/eviction"), has(&text, "name: divvy-eviction")),
            (expected, expected),
            "{reaction}"
        );
    }
}

/// An annotation is unreadable if it is larger than its readers accept.
#[test]
fn no_unreadable_allocation_or_inventory_is_written() {
    if let Some(text) = with(&[json!({"policies": {"gpushareAccounts": ["gpushare"]}})]) {
        let key = "scheduler.framework.gpushare.allocation";
        let policy = Policy::of(&parse(&text), "divvy-allocation");
        for (bytes, expected) in [(ALLOCATION_BYTES, true), (ALLOCATION_BYTES + 1, false)] {
            let pod = pod(&json!({key: " ".repeat(bytes)}), Some(4));
            let refusals = policy.refusals(&pod, &Value::Null, "gpushare");
            assert_eq!(refusals.is_empty(), expected, "{bytes}: {refusals:?}");
        }
    }
    let policy = Policy::of_chart("divvy-inventory");
    for (bytes, expected) in [(INVENTORY_BYTES, true), (INVENTORY_BYTES + 1, false)] {
        let node = |value: &str| json!({"metadata": {"name": "n1", "annotations": {"divvy.dev/inventory": value}}, "spec": {}, "status": {}});
        let refusals = policy.refusals(
            &node(&" ".repeat(bytes)),
            &node(""),
            "system:serviceaccount:divvy-system:divvy-agent",
        );
        assert_eq!(refusals.is_empty(), expected, "{bytes}: {refusals:?}");
    }
}

/// Exactly the pods that request a share and do not set an isolation get the default.
#[test]
fn the_default_isolation_is_for_undecided_shares() {
    let Some(text) = with(&[json!({"policies": {"enabled": false, "defaultIsolation": "soft"}})]) else {
        return;
    };
    let objects = parse(&text);
    let policies = objects.iter().filter(|object| object["kind"] == "MutatingAdmissionPolicy");
    let [policy] = &policies.collect::<Vec<_>>()[..] else {
        panic!("one policy: {text}");
    };
    let change = &policy["spec"]["mutations"][0]["applyConfiguration"]["expression"];
    assert_eq!(
        change,
        "Object{metadata: Object.metadata{annotations: {'divvy.dev/isolation': 'soft'}}}"
    );
    let env = cel::Env::stdlib();
    let conditions = policy["spec"]["matchConditions"].as_array().expect("a list");
    let conditions: Vec<cel::Program> = conditions
        .iter()
        .map(|condition| env.compile(condition["expression"].as_str().expect("text")).expect("CEL"))
        .collect();
    let env = Arc::new(env);
    let changes = |pod: &Value| {
        let mut context = cel::Context::with_env(env.clone());
        context.add_variable("object", pod).expect("a value");
        conditions
            .iter()
            .all(|condition| condition.execute(&context).expect("it is evaluated") == cel::Value::Bool(true))
    };
    let mut of_init = pod(&json!({}), None);
    of_init["spec"]["initContainers"] = pod(&json!({}), Some(2))["spec"]["containers"].clone();
    let mut without_annotations = pod(&Value::Null, Some(2));
    without_annotations["metadata"] = json!({"name": "p"});
    for (pod, expected) in [
        (pod(&json!({"a": "b"}), Some(2)), true),
        (without_annotations, true),
        (of_init, true),
        (pod(&json!({"divvy.dev/isolation": "none"}), Some(2)), false),
        (pod(&json!({}), None), false),
    ] {
        assert_eq!(changes(&pod), expected, "{pod}");
    }
    assert!(
        !default_objects()
            .iter()
            .any(|object| object["kind"] == "MutatingAdmissionPolicy")
    );
}
