//! Evaluates the policy that restricts the events of agents, as the API server would.

use serde_json::{Map, Value, json};

use super::default_objects;

fn policy() -> Value {
    default_objects()
        .into_iter()
        .find(|object| object["kind"] == "ValidatingAdmissionPolicy" && object["metadata"]["name"] == "divvy-events")
        .expect("the chart has it")
}

struct Request {
    user: &'static str,
    extra: Value,
    object: Value,
    old: Value,
}

/// Return the messages of the validations that fail. `None` means that the policy does not apply to the request.
fn judge(policy: &Value, request: &Request) -> Option<Vec<String>> {
    let mut variables = Map::new();
    let evaluate = |expression: &Value, variables: &Map<String, Value>| {
        let text = expression.as_str().expect("an expression");
        let mut context = cel::Context::default();
        let user = json!({"userInfo": {"username": request.user, "extra": request.extra}});
        for (name, value) in [
            ("request", &user),
            ("object", &request.object),
            ("oldObject", &request.old),
            ("variables", &Value::Object(variables.clone())),
        ] {
            context.add_variable(name, value).expect("a value");
        }
        let program = cel::Program::compile(text).unwrap_or_else(|error| panic!("{text}: {error}"));
        program
            .execute(&context)
            .unwrap_or_else(|error| panic!("{text}: {error}: {}", request.object))
    };
    let list = |pointer: &str| policy.pointer(pointer).and_then(Value::as_array).cloned().unwrap_or_default();
    for condition in list("/spec/matchConditions") {
        if evaluate(&condition["expression"], &variables) == cel::Value::Bool(false) {
            return None;
        }
    }
    for variable in list("/spec/variables") {
        let cel::Value::String(text) = evaluate(&variable["expression"], &variables) else {
            panic!("{variable} is no text");
        };
        variables.insert(variable["name"].as_str().expect("a name").to_owned(), json!(*text));
    }
    let mut refused = Vec::new();
    for validation in list("/spec/validations") {
        match evaluate(&validation["expression"], &variables) {
            cel::Value::Bool(true) => {}
            cel::Value::Bool(false) => refused.push(match validation.get("messageExpression") {
                Some(expression) => match evaluate(expression, &variables) {
                    cel::Value::String(text) => text.to_string(),
                    other => panic!("{other:?}"),
                },
                None => validation["message"].as_str().expect("a message").to_owned(),
            }),
            other => panic!("{other:?}"),
        }
    }
    Some(refused)
}

const AGENT: &str = "system:serviceaccount:divvy-system:divvy-agent";

fn on(node: &str) -> Value {
    json!({"authentication.kubernetes.io/node-name": [node], "authentication.kubernetes.io/pod-name": ["divvy-agent-x"]})
}

fn event(controller: &str, instance: &str, regarding: Value) -> Value {
    json!({
        "metadata": {"name": "e", "namespace": "default"}, "reason": "MemoryHeld", "action": "Reconciling", "note": "x",
        "reportingController": controller, "reportingInstance": instance, "regarding": regarding
    })
}

/// An agent writes events under its own name.
#[test]
fn agents_write_events_on_pods_and_their_node() {
    let policy = policy();
    let pod = json!({"kind": "Pod", "name": "p", "namespace": "default"});
    let node = |name: &str| json!({"kind": "Node", "name": name});
    let own = || event("divvy-agent", "n1", pod.clone());
    let foreign = event("kubelet", "n1", pod.clone());
    let without = |field: &str| {
        let mut event = own();
        event.as_object_mut().expect("a map").remove(field);
        event
    };
    let cases = [
        ("a pod's", on("n1"), own(), Value::Null, ""),
        (
            "its node's",
            on("n1"),
            event("divvy-agent", "n1", node("n1")),
            Value::Null,
            "",
        ),
        ("counted again", on("n1"), own(), own(), ""),
        (
            "another node's agent",
            on("n1"),
            event("divvy-agent", "n2", pod.clone()),
            Value::Null,
            "may not write an event of divvy-agent on n2",
        ),
        (
            "another program",
            on("n1"),
            foreign.clone(),
            Value::Null,
            "may not write an event of kubelet on n1",
        ),
        (
            "the extender",
            on("n1"),
            event("divvy-extender", "n1", pod.clone()),
            Value::Null,
            "an event of divvy-extender",
        ),
        (
            "nobody",
            on("n1"),
            without("reportingController"),
            Value::Null,
            "an event of  on n1",
        ),
        (
            "nowhere",
            on("n1"),
            without("reportingInstance"),
            Value::Null,
            "of divvy-agent on ",
        ),
        (
            "what another program wrote",
            on("n1"),
            own(),
            foreign,
            "may not change an event that another program has written",
        ),
        (
            "what the agent of another node wrote",
            on("n1"),
            own(),
            event("divvy-agent", "n2", pod.clone()),
            "that another program has written",
        ),
        (
            "another node",
            on("n1"),
            event("divvy-agent", "n1", node("n2")),
            Value::Null,
            "not about this Node",
        ),
        (
            "a Deployment",
            on("n1"),
            event("divvy-agent", "n1", json!({"kind": "Deployment", "name": "d"})),
            Value::Null,
            "not about this Deployment",
        ),
        ("nothing", on("n1"), without("regarding"), Value::Null, "not about this"),
        (
            "a token without a node",
            json!({}),
            event("divvy-agent", "", pod.clone()),
            Value::Null,
            "does not say on which node",
        ),
    ];
    for (what, extra, object, old, expected) in cases {
        let request = Request {
            user: AGENT,
            extra,
            object,
            old,
        };
        let refused = judge(&policy, &request).expect("it is about agents").join("; ");
        assert!(
            refused.is_empty() == expected.is_empty() && refused.contains(expected),
            "{what}: {refused}"
        );
    }
    for user in ["system:node:n1", "system:serviceaccount:divvy-system:divvy-extender", "jane"] {
        let request = Request {
            user,
            extra: json!({}),
            object: event("kubelet", "n2", pod.clone()),
            old: Value::Null,
        };
        assert_eq!(judge(&policy, &request), None, "{user}");
    }
    let writes = &policy["spec"]["matchConstraints"]["resourceRules"][0];
    assert_eq!(writes["apiGroups"], json!(["events.k8s.io"]));
    assert_eq!(writes["operations"], json!(["CREATE", "UPDATE"]), "a patch is an UPDATE");
}

/// The policy only matches events of the API group `events.k8s.io`, so no role may allow events of another group.
#[test]
fn agents_may_write_events_of_no_other_group() {
    let mut groups = 0;
    for object in default_objects() {
        for rule in object["rules"].as_array().into_iter().flatten() {
            let writes = rule["verbs"].as_array().is_some_and(|all| all.contains(&json!("create")));
            if writes && rule["resources"].as_array().is_some_and(|all| all.contains(&json!("events"))) {
                assert_eq!(rule["apiGroups"], json!(["events.k8s.io"]), "{object}");
                groups += 1;
            }
        }
    }
    assert_eq!(groups, 2, "agent and extender");
}
