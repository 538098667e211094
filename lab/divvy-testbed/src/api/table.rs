//! Server-side tables: the output of `kubectl get` (`pkg/printers/internalversion/printers.go`).

use serde_json::{Value, json};

use super::clock::Clock;
use super::events;
use super::include::{Include, partial};
use super::resources::ServedResource;

/// Return a `meta.k8s.io/v1` Table of stored objects.
pub(crate) fn table(resource: &ServedResource, objects: &[&Value], metadata: Value, include: Include, clock: &Clock) -> Value {
    let rows: Vec<Value> = objects
        .iter()
        .map(|object| {
            let view = events::to_view(resource, object);
            let carried = match include {
                Include::None => Value::Null,
                Include::Metadata => partial(&view),
                Include::Object => view.into_owned(),
            };
            json!({"cells": cells(resource, object, clock), "object": carried})
        })
        .collect();
    json!({
        "kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": metadata,
        "columnDefinitions": columns(resource), "rows": rows,
    })
}

/// A column: its name, and whether only `-o wide` shows it.
type Column = (&'static str, bool);

fn column_names(resource: &ServedResource) -> &'static [Column] {
    match (resource.group.as_ref(), resource.plural.as_ref()) {
        ("", "pods") => &[
            ("Name", false),
            ("Ready", false),
            ("Status", false),
            ("Restarts", false),
            ("Age", false),
            ("IP", true),
            ("Node", true),
            ("Nominated Node", true),
            ("Readiness Gates", true),
        ],
        ("", "nodes") => &[
            ("Name", false),
            ("Status", false),
            ("Roles", false),
            ("Age", false),
            ("Version", false),
            ("Internal-IP", true),
            ("External-IP", true),
            ("OS-Image", true),
            ("Kernel-Version", true),
            ("Container-Runtime", true),
        ],
        ("" | "events.k8s.io", "events") => &[
            ("Last Seen", false),
            ("Type", false),
            ("Reason", false),
            ("Object", false),
            ("Subobject", true),
            ("Source", true),
            ("Message", false),
            ("First Seen", true),
            ("Count", true),
            ("Name", true),
        ],
        ("", "configmaps") => &[("Name", false), ("Data", false), ("Age", false)],
        ("", "namespaces") => &[("Name", false), ("Status", false), ("Age", false)],
        ("coordination.k8s.io", "leases") => &[("Name", false), ("Holder", false), ("Age", false)],
        _ => &[("Name", false), ("Age", false)],
    }
}

pub(crate) fn columns(resource: &ServedResource) -> Vec<Value> {
    column_names(resource)
        .iter()
        .map(|(name, wide)| {
            let kind = if *name == "Count" { "integer" } else { "string" };
            // Only the name column has a format, from which kubectl takes the object's name.
            let format = if *name == "Name" { "name" } else { "" };
            json!({"name": name, "type": kind, "format": format, "description": "", "priority": i32::from(*wide)})
        })
        .collect()
}

fn cells(resource: &ServedResource, object: &Value, clock: &Clock) -> Value {
    let name = text(&object["metadata"]["name"]);
    let age = since(clock, &object["metadata"]["creationTimestamp"]);
    match (resource.group.as_ref(), resource.plural.as_ref()) {
        ("", "pods") => pod_cells(object, age, clock),
        ("", "nodes") => node_cells(object, age),
        ("" | "events.k8s.io", "events") => event_cells(object, clock),
        ("", "configmaps") => {
            let count = |field: &str| object[field].as_object().map_or(0, serde_json::Map::len);
            json!([name, (count("data") + count("binaryData")).to_string(), age])
        }
        ("", "namespaces") => json!([name, text(&object["status"]["phase"]), age]),
        ("coordination.k8s.io", "leases") => json!([name, text(&object["spec"]["holderIdentity"]), age]),
        _ => json!([name, age]),
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or("")
}

fn or_none(value: &str) -> &str {
    if value.is_empty() { "<none>" } else { value }
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn since(clock: &Clock, timestamp: &Value) -> String {
    timestamp
        .as_str()
        .and_then(|at| clock.seconds_since(at))
        .map_or_else(|| "<unknown>".to_owned(), human_duration)
}

/// Format a duration as apimachinery's `pkg/util/duration.HumanDuration` does.
fn human_duration(seconds: u64) -> String {
    let (minutes, hours, days, years) = (seconds / 60, seconds / 3600, seconds / 86400, seconds / 86400 / 365);
    let with = |whole: u64, unit: char, rest: u64, small: char| {
        if rest == 0 {
            format!("{whole}{unit}")
        } else {
            format!("{whole}{unit}{rest}{small}")
        }
    };
    match seconds {
        0..120 => format!("{seconds}s"),
        _ if minutes < 10 => with(minutes, 'm', seconds % 60, 's'),
        _ if minutes < 180 => format!("{minutes}m"),
        _ if hours < 8 => with(hours, 'h', minutes % 60, 'm'),
        _ if hours < 48 => format!("{hours}h"),
        _ if hours < 192 => with(days, 'd', hours % 24, 'h'),
        _ if days < 730 => format!("{days}d"),
        _ if years < 8 => with(years, 'y', days % 365, 'd'),
        _ => format!("{years}y"),
    }
}

/// Return a pod's cells, as upstream's `printPod` does.
fn pod_cells(pod: &Value, age: String, clock: &Clock) -> Value {
    let (spec, status) = (&pod["spec"], &pod["status"]);
    let mut reason = match text(&status["reason"]) {
        "" => text(&status["phase"]).to_owned(),
        reason => reason.to_owned(),
    };
    for condition in list(&status["conditions"]) {
        if condition["type"] == "PodScheduled" && condition["reason"] == "SchedulingGated" {
            reason = "SchedulingGated".to_owned();
        }
    }
    let sidecars: Vec<&str> = list(&spec["initContainers"])
        .iter()
        .filter(|c| c["restartPolicy"] == "Always")
        .map(|c| text(&c["name"]))
        .collect();
    let total = list(&spec["containers"]).len() + sidecars.len();
    let (mut ready, mut restarts, mut sidecar_restarts) = (0, 0, 0);
    let mut last_restart: Option<&Value> = None;
    let mut initializing = false;
    let init_total = list(&spec["initContainers"]).len();
    for (index, container) in list(&status["initContainerStatuses"]).iter().enumerate() {
        restarts += container["restartCount"].as_i64().unwrap_or(0);
        let sidecar = sidecars.contains(&text(&container["name"]));
        if sidecar {
            sidecar_restarts += container["restartCount"].as_i64().unwrap_or(0);
        }
        let state = &container["state"];
        if !state["terminated"].is_null() && state["terminated"]["exitCode"] == 0 {
            continue;
        }
        if sidecar && container["started"] == true {
            ready += usize::from(container["ready"] == true);
            continue;
        }
        initializing = true;
        let waiting = text(&state["waiting"]["reason"]);
        reason = if !state["terminated"].is_null() {
            format!("Init:{}", terminated(&state["terminated"]))
        } else if !waiting.is_empty() && waiting != "PodInitializing" {
            format!("Init:{waiting}")
        } else {
            format!("Init:{index}/{init_total}")
        };
        break;
    }
    let initialized = list(&status["conditions"])
        .iter()
        .any(|c| c["type"] == "Initialized" && c["status"] == "True");
    if !initializing || initialized {
        restarts = sidecar_restarts;
        let mut running = false;
        for container in list(&status["containerStatuses"]).iter().rev() {
            restarts += container["restartCount"].as_i64().unwrap_or(0);
            let finished = &container["lastState"]["terminated"]["finishedAt"];
            if text(finished) > last_restart.map_or("", text) {
                last_restart = Some(finished);
            }
            let state = &container["state"];
            let waiting = text(&state["waiting"]["reason"]);
            if !waiting.is_empty() {
                reason = waiting.to_owned();
            } else if !state["terminated"].is_null() {
                reason = terminated(&state["terminated"]);
            } else if container["ready"] == true && !state["running"].is_null() {
                running = true;
                ready += 1;
            }
        }
        if reason == "Completed" && running {
            let pod_ready = list(&status["conditions"])
                .iter()
                .any(|c| c["type"] == "Ready" && c["status"] == "True");
            reason = if pod_ready { "Running" } else { "NotReady" }.to_owned();
        }
    }
    let ended = matches!(text(&status["phase"]), "Succeeded" | "Failed");
    if !pod["metadata"]["deletionTimestamp"].is_null() {
        if status["reason"] == "NodeLost" {
            reason = "Unknown".to_owned();
        } else if !ended {
            reason = "Terminating".to_owned();
        }
    }
    let restarts = match last_restart {
        Some(at) if restarts > 0 => format!("{restarts} ({} ago)", since(clock, at)),
        _ => restarts.to_string(),
    };
    let ip = match list(&status["podIPs"]).first() {
        Some(first) => text(&first["ip"]),
        None => text(&status["podIP"]),
    };
    let gates = list(&spec["readinessGates"]);
    let gates_met = gates
        .iter()
        .filter(|gate| {
            list(&status["conditions"])
                .iter()
                .any(|c| c["type"] == gate["conditionType"] && c["status"] == "True")
        })
        .count();
    json!([
        text(&pod["metadata"]["name"]),
        format!("{ready}/{total}"),
        reason,
        restarts,
        age,
        or_none(ip),
        or_none(text(&spec["nodeName"])),
        or_none(text(&status["nominatedNodeName"])),
        if gates.is_empty() {
            "<none>".to_owned()
        } else {
            format!("{gates_met}/{}", gates.len())
        },
    ])
}

fn terminated(state: &Value) -> String {
    match (text(&state["reason"]), state["signal"].as_i64().unwrap_or(0)) {
        ("", 0) => format!("ExitCode:{}", state["exitCode"].as_i64().unwrap_or(0)),
        ("", signal) => format!("Signal:{signal}"),
        (reason, _) => reason.to_owned(),
    }
}

/// Return a node's cells, as upstream's `printNode` does.
fn node_cells(node: &Value, age: String) -> Value {
    let mut status: Vec<&str> = list(&node["status"]["conditions"])
        .iter()
        .filter(|c| c["type"] == "Ready")
        .map(|c| if c["status"] == "True" { "Ready" } else { "NotReady" })
        .collect();
    if status.is_empty() {
        status.push("Unknown");
    }
    if node["spec"]["unschedulable"] == true {
        status.push("SchedulingDisabled");
    }
    let mut roles: Vec<&str> = node["metadata"]["labels"]
        .as_object()
        .into_iter()
        .flatten()
        .filter_map(|(key, value)| match key.strip_prefix("node-role.kubernetes.io/") {
            Some(role) => Some(role).filter(|role| !role.is_empty()),
            None if key == "kubernetes.io/role" => value.as_str().filter(|role| !role.is_empty()),
            None => None,
        })
        .collect();
    roles.sort_unstable();
    roles.dedup();
    let address = |kind: &str| {
        list(&node["status"]["addresses"])
            .iter()
            .find(|a| a["type"] == kind)
            .map_or("<none>", |a| text(&a["address"]))
    };
    let info = |field: &str| match text(&node["status"]["nodeInfo"][field]) {
        "" => "<unknown>",
        known => known,
    };
    json!([
        text(&node["metadata"]["name"]),
        status.join(","),
        or_none(&roles.join(",")),
        age,
        text(&node["status"]["nodeInfo"]["kubeletVersion"]),
        address("InternalIP"),
        address("ExternalIP"),
        info("osImage"),
        info("kernelVersion"),
        info("containerRuntimeVersion"),
    ])
}

/// Return an event's cells, as upstream's `printEvent` does, for events as stored (core/v1).
fn event_cells(event: &Value, clock: &Clock) -> Value {
    let or_event_time = |field: &str| {
        if event[field].is_null() {
            since(clock, &event["eventTime"])
        } else {
            since(clock, &event[field])
        }
    };
    let first_seen = or_event_time("firstTimestamp");
    let (last_seen, count) = match event["series"].as_object() {
        Some(series) => {
            let last = series.get("lastObservedTime").cloned().unwrap_or_default();
            let count = series.get("count").and_then(Value::as_i64).unwrap_or(1);
            (format!("{} (x{count} over {first_seen})", since(clock, &last)), count)
        }
        None => match event["count"].as_i64().unwrap_or(0) {
            count if count > 1 => (
                format!("{} (x{count} over {first_seen})", or_event_time("lastTimestamp")),
                count,
            ),
            _ if event["lastTimestamp"].is_null() => (first_seen.clone(), 1),
            _ => (or_event_time("lastTimestamp"), 1),
        },
    };
    let target = &event["involvedObject"];
    let source = match text(&event["source"]["component"]) {
        "" => text(&event["reportingComponent"]),
        component => component,
    };
    let host = match text(&event["source"]["host"]) {
        "" => text(&event["reportingInstance"]),
        host => host,
    };
    json!([
        last_seen,
        text(&event["type"]),
        text(&event["reason"]),
        format!("{}/{}", text(&target["kind"]).to_lowercase(), text(&target["name"])),
        text(&target["fieldPath"]),
        if host.is_empty() {
            source.to_owned()
        } else {
            format!("{source}, {host}")
        },
        text(&event["message"]).trim(),
        first_seen,
        count,
        text(&event["metadata"]["name"]),
    ])
}
