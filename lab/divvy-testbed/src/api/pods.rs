//! The API server's special treatment of pods: defaults, validation, update rules, Binding, and graceful deletion
//! (`pkg/apis/core/{v1/defaults.go,validation}`, `pkg/registry/core/pod`).
//!
//! Simplifications: only names, images, and resources are validated. Service account token volumes are not added. Ephemeral containers
//! and in-place resize are not served. A gated pod cannot narrow its node selector or node affinity. Quantities are stored as written, not
//! in canonical form.

use divvy_model::quantity_milli;
use serde_json::{Map, Value, json};

use super::error::{ApiError, FieldError};

/// The value and the preemption policy of a PriorityClass.
pub(crate) type PriorityClass = (i64, String);

const PREEMPTS: &str = "PreemptLowerPriority";

/// Return one of the classes that every API server creates.
pub(crate) fn built_in_class(name: &str) -> Option<PriorityClass> {
    match name {
        "system-cluster-critical" => Some((2_000_000_000, PREEMPTS.to_owned())),
        "system-node-critical" => Some((2_000_001_000, PREEMPTS.to_owned())),
        _ => None,
    }
}

/// Apply the Priority admission plugin: a pod must not set the values that its PriorityClass determines, unless they are equal.
/// Simpler than upstream: `globalDefault` has no effect.
pub(crate) fn admit_priority(pod: &mut Value, class: impl Fn(&str) -> Option<PriorityClass>) -> Result<(), ApiError> {
    let name = pod["metadata"]["name"].as_str().unwrap_or_default().to_owned();
    let refuse = |what: String| Err(ApiError::new(403, "Forbidden", format!("pods {name:?} is forbidden: {what}")));
    let tail = "from the given PriorityClass name";
    let (value, preempts) = match pod["spec"]["priorityClassName"].as_str().filter(|name| !name.is_empty()) {
        None => (0, PREEMPTS.to_owned()),
        Some(named) => match class(named) {
            Some(class) => class,
            None => return refuse(format!("no PriorityClass with name {named} was found")),
        },
    };
    if let Some(priority) = pod["spec"]["priority"].as_i64().filter(|priority| *priority != value) {
        return refuse(format!(
            "the integer value of priority ({priority}) must not be provided in pod spec; priority admission controller computed {value} {tail}"
        ));
    }
    if let Some(policy) = pod["spec"]["preemptionPolicy"].as_str().filter(|policy| *policy != preempts) {
        return refuse(format!(
            "the string value of PreemptionPolicy ({policy}) must not be provided in pod spec; priority admission controller computed \
             {preempts} {tail}"
        ));
    }
    default_to(pod, "spec", json!({}));
    pod["spec"]["priority"] = value.into();
    pod["spec"]["preemptionPolicy"] = preempts.into();
    Ok(())
}

/// Set the defaults of a new pod that come from the API types and from the built-in admission plugins (ServiceAccount, Priority,
/// DefaultTolerationSeconds). The status belongs to the server, so a status from the client is dropped.
pub(crate) fn set_defaults(pod: &mut Value) {
    default_to(pod, "spec", json!({}));
    normalise_quantities(pod);
    let on_host = pod["spec"]["hostNetwork"] == true;
    for list in ["initContainers", "containers"] {
        for container in array_mut(&mut pod["spec"], list) {
            default_container(container, on_host);
        }
    }
    let spec = &mut pod["spec"];
    for (field, value) in [
        ("restartPolicy", json!("Always")),
        ("terminationGracePeriodSeconds", json!(30)),
        ("dnsPolicy", json!("ClusterFirst")),
        ("securityContext", json!({})),
        ("schedulerName", json!("default-scheduler")),
        ("serviceAccountName", json!("default")),
        ("serviceAccount", json!("default")),
        ("enableServiceLinks", json!(true)),
    ] {
        default_to(spec, field, value);
    }
    spec["serviceAccount"] = spec["serviceAccountName"].clone();
    default_to(spec, "tolerations", json!([]));
    if let Value::Array(tolerations) = &mut spec["tolerations"] {
        for key in ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"] {
            let covered = tolerations.iter().any(|t| {
                (t["key"] == key || t["key"].as_str().unwrap_or("").is_empty())
                    && (t["effect"] == "NoExecute" || t["effect"].as_str().unwrap_or("").is_empty())
            });
            if !covered {
                tolerations.push(json!({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}));
            }
        }
    }
    let qos = qos_class(pod);
    pod["status"] = json!({"phase": "Pending", "qosClass": qos});
    if !array(&pod["spec"], "schedulingGates").is_empty() {
        pod["status"]["conditions"] = json!([{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated",
            "message": "Scheduling is blocked due to non-empty scheduling gates", "lastProbeTime": null, "lastTransitionTime": null}]);
    }
}

fn default_container(container: &mut Value, on_host: bool) {
    let image = container["image"].as_str().unwrap_or("");
    // A digest, or a tag other than latest, pins the image.
    let name = image.rsplit('/').next().unwrap_or("");
    let pinned = image.contains('@') || name.split_once(':').is_some_and(|(_, tag)| tag != "latest");
    let policy = if pinned { "IfNotPresent" } else { "Always" };
    for (field, value) in [
        ("resources", json!({})),
        ("terminationMessagePath", json!("/dev/termination-log")),
        ("terminationMessagePolicy", json!("File")),
        ("imagePullPolicy", json!(policy)),
    ] {
        default_to(container, field, value);
    }
    for port in array_mut(container, "ports") {
        default_to(port, "protocol", json!("TCP"));
        if on_host && port["hostPort"].as_i64().unwrap_or(0) == 0 {
            port["hostPort"] = port["containerPort"].clone();
        }
    }
    // A limit without a request also sets the request (SetDefaults_Pod).
    let limits = container["resources"]["limits"].as_object().cloned().unwrap_or_default();
    if !limits.is_empty() {
        let resources = &mut container["resources"];
        default_to(resources, "requests", json!({}));
        for (name, quantity) in limits {
            default_to(&mut resources["requests"], &name, quantity);
        }
    }
}

/// Turn quantities that are JSON numbers (`gpu-mem: 3` in YAML) into text, as the server serializes them.
pub(crate) fn normalise_quantities(pod: &mut Value) {
    for list in ["initContainers", "containers"] {
        for container in array_mut(&mut pod["spec"], list) {
            for kind in ["limits", "requests"] {
                if let Some(Value::Object(quantities)) = container.pointer_mut(&format!("/resources/{kind}")) {
                    quantities_to_text(quantities);
                }
            }
        }
    }
}

/// Turn the numbers among the quantities into text.
pub(crate) fn quantities_to_text(quantities: &mut Map<String, Value>) {
    for value in quantities.values_mut() {
        if value.is_number() {
            *value = Value::String(value.to_string());
        }
    }
}

fn default_to(object: &mut Value, field: &str, value: Value) {
    if let Value::Object(map) = object {
        let place = map.entry(field).or_insert(Value::Null);
        if place.is_null() {
            *place = value;
        }
    }
}

fn array_mut<'a>(object: &'a mut Value, field: &str) -> &'a mut [Value] {
    match object.get_mut(field) {
        Some(Value::Array(list)) => list,
        _ => &mut [],
    }
}

fn array<'a>(object: &'a Value, field: &str) -> &'a [Value] {
    object.get(field).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// Return Guaranteed, Burstable, or BestEffort, considering only cpu and memory (`pkg/apis/core/helper/qos`).
fn qos_class(pod: &Value) -> &'static str {
    let mut any = false;
    let mut guaranteed = true;
    for list in ["initContainers", "containers"] {
        for container in array(&pod["spec"], list) {
            for resource in ["cpu", "memory"] {
                let milli = |kind: &str| {
                    container["resources"][kind][resource]
                        .as_str()
                        .and_then(|text| quantity_milli(text).ok())
                        .filter(|milli| *milli > 0)
                };
                let (request, limit) = (milli("requests"), milli("limits"));
                any |= request.is_some() || limit.is_some();
                guaranteed &= limit.is_some() && request == limit;
            }
        }
    }
    match (any, guaranteed) {
        (false, _) => "BestEffort",
        (true, true) => "Guaranteed",
        (true, false) => "Burstable",
    }
}

/// Return the errors in a pod's spec, with upstream's texts.
pub(crate) fn validate(pod: &Value) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let spec = &pod["spec"];
    if array(spec, "containers").is_empty() {
        errors.push(FieldError::required("spec.containers", ""));
    }
    let mut names = Vec::new();
    for list in ["initContainers", "containers"] {
        for (index, container) in array(spec, list).iter().enumerate() {
            let path = format!("spec.{list}[{index}]");
            match container["name"].as_str().unwrap_or("") {
                "" => errors.push(FieldError::required(format!("{path}.name"), "")),
                name if names.contains(&name) => errors.push(FieldError::duplicate(format!("{path}.name"), &container["name"])),
                name => {
                    if !is_dns_label(name) {
                        errors.push(FieldError::invalid(format!("{path}.name"), &container["name"], NOT_A_LABEL));
                    }
                    names.push(name);
                }
            }
            if container["image"].as_str().unwrap_or("").is_empty() {
                errors.push(FieldError::required(format!("{path}.image"), ""));
            }
            validate_resources(&container["resources"], &format!("{path}.resources"), &mut errors);
        }
    }
    errors
}

pub(crate) const NOT_A_LABEL: &str = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must \
     start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is \
     '[a-z0-9]([-a-z0-9]*[a-z0-9])?')";

pub(crate) fn is_dns_label(name: &str) -> bool {
    name.len() <= 63 && is_dns_part(name)
}

/// Report whether the name consists of valid parts joined by dots. Upstream limits the length of the whole, not of the parts.
pub(crate) fn is_dns_subdomain(name: &str) -> bool {
    name.len() <= 253 && name.split('.').all(is_dns_part)
}

fn is_dns_part(part: &str) -> bool {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    !part.is_empty() && part.chars().all(inner) && !part.starts_with('-') && !part.ends_with('-')
}

/// Apply `ValidateResourceRequirements`: a resource that cannot be overcommitted must have a whole quantity, and its request must
/// equal its limit.
fn validate_resources(resources: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let quantities = |kind: &str| resources[kind].as_object().cloned().unwrap_or_default();
    let (limits, requests) = (quantities("limits"), quantities("requests"));
    for (kind, map) in [("limits", &limits), ("requests", &requests)] {
        for (name, quantity) in map {
            let field = format!("{path}.{kind}[{name}]");
            let text = quantity.as_str().unwrap_or("");
            if !is_resource_name(name) {
                errors.push(FieldError::invalid(
                    field.clone(),
                    &Value::String(name.clone()),
                    "must be a standard resource for containers",
                ));
            }
            if text.starts_with('-') {
                errors.push(FieldError::invalid(field, quantity, "must be greater than or equal to 0"));
            } else if is_extended(name) && quantity_milli(text).is_ok_and(|milli| milli % 1000 != 0) {
                errors.push(FieldError::invalid(field, quantity, "must be an integer"));
            }
        }
    }
    for (name, request) in &requests {
        let milli = |quantity: &Value| quantity_milli(quantity.as_str().unwrap_or("")).ok();
        let overcommit = !is_extended(name) && !name.starts_with("hugepages-");
        match limits.get(name) {
            Some(limit) => {
                let text = limit.as_str().unwrap_or("");
                if !overcommit && milli(request) != milli(limit) {
                    let detail = format!("must be equal to {name} limit of {text}");
                    errors.push(FieldError::invalid(format!("{path}.requests"), request, &detail));
                } else if milli(request) > milli(limit) {
                    let detail = format!("must be less than or equal to {name} limit of {text}");
                    errors.push(FieldError::invalid(format!("{path}.requests"), request, &detail));
                }
            }
            None if !overcommit => errors.push(FieldError::required(
                format!("{path}.limits"),
                "Limit must be set for non overcommitable resources",
            )),
            None => {}
        }
    }
}

/// Report whether this is the name of an extended resource (`IsExtendedResourceName`): it has a domain that is not Kubernetes'
/// own.
fn is_extended(name: &str) -> bool {
    name.split_once('/')
        .is_some_and(|(domain, _)| !domain.ends_with("kubernetes.io") && !name.starts_with("requests."))
}

fn is_resource_name(name: &str) -> bool {
    is_extended(name) || matches!(name, "cpu" | "memory" | "ephemeral-storage") || name.starts_with("hugepages-")
}

/// Refuse an object with an invalid quantity with 400, because upstream's decoder cannot read such an object at all.
pub(crate) fn check_quantities(pod: &Value) -> Result<(), ApiError> {
    for list in ["initContainers", "containers"] {
        for container in array(&pod["spec"], list) {
            for kind in ["limits", "requests"] {
                let quantities = container["resources"][kind].as_object();
                for quantity in quantities.into_iter().flat_map(Map::values) {
                    let readable = quantity
                        .as_str()
                        .is_some_and(|text| quantity_milli(text.strip_prefix('-').unwrap_or(text)).is_ok());
                    if !readable {
                        return Err(ApiError::bad_request(
                            "Pod in version \"v1\" cannot be handled as a Pod: quantities must match the regular expression \
                             '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'",
                        ));
                    }
                }
            }
        }
    }
    Ok(())
}

/// Check an update: only a few parts of a spec may change after creation (`ValidatePodUpdate`).
pub(crate) fn validate_update(old: &Value, new: &Value) -> Vec<FieldError> {
    let strip = |pod: &Value| {
        let mut spec = pod["spec"].clone();
        for list in ["initContainers", "containers"] {
            for container in array_mut(&mut spec, list) {
                container["image"] = Value::Null;
            }
        }
        for field in ["activeDeadlineSeconds", "tolerations", "schedulingGates"] {
            spec[field] = Value::Null;
        }
        if old["spec"]["terminationGracePeriodSeconds"].as_i64().unwrap_or(0) < 0
            && new["spec"]["terminationGracePeriodSeconds"] == 1
        {
            spec["terminationGracePeriodSeconds"] = Value::Null;
        }
        spec
    };
    let mut errors = Vec::new();
    if strip(old) != strip(new) {
        errors.push(FieldError::forbidden(
            "spec",
            "pod updates may not change fields other than `spec.containers[*].image`,`spec.initContainers[*].image`,\
             `spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),\
             `spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)",
        ));
    }
    let subset = |few: &Value, many: &Value, field: &str| {
        let many = array(&many["spec"], field);
        array(&few["spec"], field).iter().all(|item| many.contains(item))
    };
    if !subset(old, new, "tolerations") {
        errors.push(FieldError::forbidden(
            "spec.tolerations",
            "existing toleration can not be modified except its tolerationSeconds",
        ));
    }
    if !subset(new, old, "schedulingGates") {
        errors.push(FieldError::forbidden(
            "spec.schedulingGates",
            "only deletion is allowed, but found new scheduling gate",
        ));
    }
    errors
}

/// Return the grace period in seconds (`podStrategy.CheckGracefulDelete`).
pub(crate) fn grace_period_s(pod: &Value, asked: Option<i64>) -> i64 {
    let default = pod["spec"]["terminationGracePeriodSeconds"].as_i64().unwrap_or(0);
    let phase = pod["status"]["phase"].as_str().unwrap_or("");
    let unbound = pod["spec"]["nodeName"].as_str().unwrap_or("").is_empty();
    if unbound || matches!(phase, "Succeeded" | "Failed") {
        return 0;
    }
    match asked.unwrap_or(default) {
        negative if negative < 0 => 1,
        seconds => seconds,
    }
}

/// Return the name of a Binding's target node (`ValidatePodBinding`). Upstream reports these errors as 500.
pub(crate) fn binding_target(binding: &Value) -> Result<&str, ApiError> {
    let target = &binding["target"];
    let kind = target["kind"].as_str().unwrap_or("");
    if !matches!(kind, "" | "Node") {
        let message = format!("target.kind: Unsupported value: {kind:?}: supported values: \"Node\", \"<empty>\"");
        return Err(ApiError::new(500, "InternalError", message));
    }
    match target["name"].as_str().unwrap_or("") {
        "" => Err(ApiError::new(500, "InternalError", "target.name: Required value")),
        name => Ok(name),
    }
}

/// Bind a pod under the conditions and with the effect of `BindingREST.setPodNodeAndMetadata`. The caller checks preconditions.
pub(crate) fn bind(pod: &Value, binding: &Value, node: &str, now: &str) -> Result<Value, ApiError> {
    let name = pod["metadata"]["name"].as_str().unwrap_or("");
    let refuse = |why: String| Err(ApiError::conflict("pods/binding", name, &why));
    if !pod["metadata"]["deletionTimestamp"].is_null() {
        return refuse(format!("pod {name} is being deleted, cannot be assigned to a host"));
    }
    if let Some(bound) = pod["spec"]["nodeName"].as_str().filter(|bound| !bound.is_empty()) {
        return refuse(format!("pod {name} is already assigned to node {bound:?}"));
    }
    if !array(&pod["spec"], "schedulingGates").is_empty() {
        return refuse(format!("pod {name} has non-empty .spec.schedulingGates"));
    }
    let mut pod = pod.clone();
    pod["spec"]["nodeName"] = node.into();
    if let Some(status) = pod["status"].as_object_mut() {
        status.shift_remove("nominatedNodeName");
    }
    for field in ["annotations", "labels"] {
        if let Some(more) = binding["metadata"][field].as_object() {
            default_to(&mut pod["metadata"], field, json!({}));
            for (key, value) in more {
                pod["metadata"][field][key] = value.clone();
            }
        }
    }
    set_condition(
        &mut pod["status"],
        json!({"type": "PodScheduled", "status": "True", "lastProbeTime": null, "lastTransitionTime": now}),
    );
    Ok(pod)
}

/// Replace the condition of the same type. If its status is unchanged, it keeps its transition time.
fn set_condition(status: &mut Value, mut condition: Value) {
    default_to(status, "conditions", json!([]));
    let Some(conditions) = status["conditions"].as_array_mut() else {
        return;
    };
    match conditions.iter_mut().find(|c| c["type"] == condition["type"]) {
        Some(have) => {
            if have["status"] == condition["status"] {
                condition["lastTransitionTime"] = have["lastTransitionTime"].clone();
            }
            *have = condition;
        }
        None => conditions.push(condition),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(resources: Value) -> Value {
        let mut pod =
            json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": "x", "resources": resources}]}});
        set_defaults(&mut pod);
        pod
    }

    fn messages(pod: &Value) -> Vec<String> {
        match validate(pod).as_slice() {
            [] => Vec::new(),
            errors => vec![ApiError::invalid("", "Pod", "p", errors).message],
        }
    }

    #[test]
    fn extended_resources_are_whole_and_requested_as_limited() {
        let at = "Pod \"p\" is invalid: spec.containers[0].resources";
        for (resources, expected) in [
            (json!({"limits": {"aliyun.com/gpu-mem": 3}}), vec![]),
            (json!({"limits": {"aliyun.com/gpu-mem": "2k"}}), vec![]),
            (json!({"limits": {"aliyun.com/gpu-mem": "0"}}), vec![]),
            (json!({"limits": {"cpu": "1500m"}, "requests": {"cpu": "1"}}), vec![]),
            (
                json!({"limits": {"x.io/gpu": "2"}, "requests": {"x.io/gpu": "1"}}),
                vec![format!(
                    "{at}.requests: Invalid value: \"1\": must be equal to x.io/gpu limit of 2"
                )],
            ),
            (
                json!({"requests": {"x.io/gpu": "1"}}),
                vec![format!(
                    "{at}.limits: Required value: Limit must be set for non overcommitable resources"
                )],
            ),
            (
                json!({"limits": {"cpu": "1"}, "requests": {"cpu": "2"}}),
                vec![format!(
                    "{at}.requests: Invalid value: \"2\": must be less than or equal to cpu limit of 1"
                )],
            ),
            (
                json!({"limits": {"cpu": "-1"}}),
                vec![format!(
                    "Pod \"p\" is invalid: [spec.containers[0].resources.limits[cpu]: Invalid value: \"-1\": must be greater than or equal to 0, \
                     spec.containers[0].resources.requests[cpu]: Invalid value: \"-1\": must be greater than or equal to 0]"
                )],
            ),
        ] {
            assert_eq!(messages(&pod(resources.clone())), expected, "{resources}");
        }
        let fractional = messages(&pod(json!({"limits": {"x.io/gpu": "500m"}}))).join("");
        assert!(
            fractional.contains("spec.containers[0].resources.limits[x.io/gpu]: Invalid value: \"500m\": must be an integer"),
            "{fractional}"
        );
        assert!(check_quantities(&pod(json!({"limits": {"x.io/gpu": "three"}}))).is_err());
        assert!(
            check_quantities(&pod(json!({"limits": {"x.io/gpu": "-3"}}))).is_ok(),
            "left to validation"
        );
    }

    #[test]
    fn qos_follows_cpu_and_memory_only() {
        for (resources, expected) in [
            (json!({}), "BestEffort"),
            (json!({"limits": {"x.io/gpu": 1}}), "BestEffort"),
            (json!({"limits": {"cpu": 1, "memory": "1Gi"}}), "Guaranteed"),
            (json!({"limits": {"cpu": 1}}), "Burstable"),
            (
                json!({"limits": {"cpu": 1, "memory": "1Gi"}, "requests": {"cpu": "500m"}}),
                "Burstable",
            ),
        ] {
            assert_eq!(pod(resources.clone())["status"]["qosClass"], expected, "{resources}");
        }
    }

    #[test]
    fn the_grace_period_is_zero_for_pods_that_no_kubelet_holds() {
        let bound = json!({"spec": {"nodeName": "n", "terminationGracePeriodSeconds": 30}, "status": {"phase": "Running"}});
        let mut unbound = bound.clone();
        unbound["spec"]["nodeName"] = json!("");
        let mut ended = bound.clone();
        ended["status"]["phase"] = json!("Succeeded");
        for (pod, asked, expected) in [
            (&bound, None, 30),
            (&bound, Some(5), 5),
            (&bound, Some(0), 0),
            (&bound, Some(-3), 1),
            (&unbound, None, 0),
            (&unbound, Some(9), 0),
            (&ended, None, 0),
        ] {
            assert_eq!(grace_period_s(pod, asked), expected);
        }
    }
}
