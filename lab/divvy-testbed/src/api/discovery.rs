//! The server's description of itself: health, version, and the served resources.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::resources::{ServedResource, ServedResources};

/// The Kubernetes version that the server imitates.
pub(crate) const VERSION: &str = "v1.36.3";

pub(crate) fn version() -> Value {
    json!({
        "major": "1", "minor": "36", "gitVersion": format!("{VERSION}+divvy-testbed"), "gitCommit": "", "gitTreeState": "",
        "buildDate": "1970-01-01T00:00:00Z", "goVersion": "", "compiler": "", "platform": "",
    })
}

/// Return the response to a GET that names no object, or `None` if there is no such page.
pub(crate) fn page(resources: &ServedResources, segments: &[String]) -> Option<Value> {
    let segments: Vec<&str> = segments.iter().map(String::as_str).collect();
    match segments.as_slice() {
        ["version"] => Some(version()),
        ["api"] => Some(json!({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []})),
        ["apis"] => {
            let groups: Vec<Value> = groups(resources)
                .into_iter()
                .map(|(group, versions)| api_group(&group, &versions))
                .collect();
            Some(json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}))
        }
        ["apis", group] => {
            let versions = groups(resources).remove(*group)?;
            let mut answer = api_group(group, &versions);
            answer["kind"] = "APIGroup".into();
            answer["apiVersion"] = "v1".into();
            Some(answer)
        }
        ["api", version] => resource_list(resources, "", version),
        ["apis", group, version] => resource_list(resources, group, version),
        ["openapi", "v3"] => {
            let groups = versions(resources);
            let paths: serde_json::Map<String, Value> = groups
                .iter()
                .map(|path| (path.clone(), json!({"serverRelativeURL": format!("/openapi/v3/{path}")})))
                .collect();
            Some(json!({"paths": paths}))
        }
        ["openapi", "v3", path @ ..] => openapi(resources, &path.join("/")),
        _ => None,
    }
}

fn groups(resources: &ServedResources) -> BTreeMap<String, Vec<String>> {
    let mut groups: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for resource in resources.all().iter().filter(|r| !r.group.is_empty()) {
        let versions = groups.entry(resource.group.to_string()).or_default();
        if !versions.contains(&resource.version.to_string()) {
            versions.push(resource.version.to_string());
        }
    }
    groups
}

fn api_group(group: &str, versions: &[String]) -> Value {
    let versions: Vec<Value> = versions
        .iter()
        .map(|version| json!({"groupVersion": format!("{group}/{version}"), "version": version}))
        .collect();
    json!({"name": group, "preferredVersion": versions.first(), "versions": versions})
}

fn resource_list(resources: &ServedResources, group: &str, version: &str) -> Option<Value> {
    let mut list = Vec::new();
    for resource in resources.all().iter().filter(|r| r.group == group && r.version == version) {
        let verbs = [
            "create",
            "delete",
            "deletecollection",
            "get",
            "list",
            "patch",
            "update",
            "watch",
        ];
        list.push(json!({
            "name": resource.plural, "singularName": resource.kind.to_lowercase(), "namespaced": resource.namespaced,
            "kind": resource.kind, "verbs": verbs, "shortNames": resource.short_names,
        }));
        if resource.status {
            list.push(json!({
                "name": format!("{}/status", resource.plural), "singularName": "", "namespaced": resource.namespaced,
                "kind": resource.kind, "verbs": ["get", "patch", "update"],
            }));
        }
        for sub in resource.subresources() {
            list.push(json!({
                "name": format!("{}/{}", resource.plural, sub.name), "singularName": "", "namespaced": resource.namespaced,
                "group": sub.group, "version": sub.version, "kind": sub.kind, "verbs": ["create"],
            }));
        }
    }
    if list.is_empty() {
        return None;
    }
    let group_version = if group.is_empty() {
        version.to_owned()
    } else {
        format!("{group}/{version}")
    };
    Some(json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": list}))
}

/// Return the group versions: `api/v1`, `apis/apps/v1`, …
fn versions(resources: &ServedResources) -> Vec<String> {
    let mut paths: Vec<String> = resources.all().iter().map(|r| version_path(r)).collect();
    paths.sort();
    paths.dedup();
    paths
}

fn version_path(resource: &ServedResource) -> String {
    if resource.group.is_empty() {
        format!("api/{}", resource.version)
    } else {
        format!("apis/{}/{}", resource.group, resource.version)
    }
}

/// Return the smallest OpenAPI v3 document that tells kubectl that PATCH supports `fieldValidation`. kubectl then leaves
/// validation to the server, and `kubectl apply` works without `--validate=false`. There are no schemas, so `kubectl explain`
/// does not work.
fn openapi(resources: &ServedResources, path: &str) -> Option<Value> {
    let mut paths = serde_json::Map::new();
    for resource in resources.all().iter().filter(|r| version_path(r) == path) {
        let namespace = if resource.namespaced { "/namespaces/{namespace}" } else { "" };
        let url = format!("/{path}{namespace}/{}/{{name}}", resource.plural);
        paths.insert(
            url,
            json!({"patch": {
                "parameters": [
                    {"name": "dryRun", "in": "query", "schema": {"type": "string"}},
                    {"name": "fieldValidation", "in": "query", "schema": {"type": "string"}},
                ],
                "responses": {},
                "x-kubernetes-action": "patch",
                "x-kubernetes-group-version-kind": {"group": resource.group, "version": resource.version, "kind": resource.kind},
            }}),
        );
    }
    (!paths.is_empty()).then(|| {
        json!({"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": VERSION}, "paths": paths, "components": {"schemas": {}}})
    })
}
