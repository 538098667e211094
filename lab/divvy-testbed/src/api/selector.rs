//! Label and field selectors (apimachinery `pkg/labels`, `pkg/fields`).

use serde_json::Value;

use super::error::ApiError;
use super::resources::ServedResource;

#[derive(Debug, Clone, PartialEq)]
enum ListRequirement {
    In(String, Vec<String>),
    NotIn(String, Vec<String>),
    Exists(String),
    DoesNotExist(String),
}

/// The part of a collection that a request selects: by namespace, name, labels, and fields.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct ListSelector {
    labels: Vec<ListRequirement>,
    /// The field requirements: path, required value, and whether it must be equal.
    fields: Vec<(String, String, bool)>,
}

impl ListSelector {
    pub(crate) fn parse(resource: &ServedResource, labels: &str, fields: &str) -> Result<ListSelector, ApiError> {
        Ok(ListSelector {
            labels: parse_labels(labels)?,
            fields: parse_fields(resource, fields)?,
        })
    }

    pub(crate) fn matches(&self, object: &Value) -> bool {
        self.labels_match(object)
            && self
                .fields
                .iter()
                .all(|(path, want, equal)| (field(object, path) == *want) == *equal)
    }

    fn labels_match(&self, object: &Value) -> bool {
        let label = |key: &str| object["metadata"]["labels"].get(key).and_then(Value::as_str);
        self.labels.iter().all(|requirement| match requirement {
            ListRequirement::In(key, values) => label(key).is_some_and(|have| values.iter().any(|v| v == have)),
            // An absent label satisfies `!=` and `notin`.
            ListRequirement::NotIn(key, values) => label(key).is_none_or(|have| values.iter().all(|v| v != have)),
            ListRequirement::Exists(key) => label(key).is_some(),
            ListRequirement::DoesNotExist(key) => label(key).is_none(),
        })
    }
}

/// Return the value of a selectable field as text. Absent fields are empty, as in upstream's `fields.Set`.
fn field(object: &Value, path: &str) -> String {
    // An Event's `source` selects by the component of its source (`pkg/registry/core/event/strategy.go`).
    let pointer = match path {
        "source" if object["source"]["component"].as_str().unwrap_or("").is_empty() => "/reportingComponent".to_owned(),
        "source" => "/source/component".to_owned(),
        other => format!("/{}", other.replace('.', "/")),
    };
    match object.pointer(&pointer) {
        None | Some(Value::Null) => match path {
            "spec.unschedulable" | "spec.hostNetwork" => "false".to_owned(),
            _ => String::new(),
        },
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}

/// Return the selectable fields other than `metadata.name` and `metadata.namespace`, as paths of the stored form.
fn selectable(resource: &ServedResource) -> &'static [&'static str] {
    match (resource.group.as_ref(), resource.plural.as_ref()) {
        ("", "pods") => &[
            "spec.nodeName",
            "spec.restartPolicy",
            "spec.schedulerName",
            "spec.serviceAccountName",
            "spec.hostNetwork",
            "status.phase",
            "status.podIP",
            "status.nominatedNodeName",
        ],
        ("", "nodes") => &["spec.unschedulable"],
        ("", "namespaces") => &["status.phase"],
        ("", "secrets") => &["type"],
        ("" | "events.k8s.io", "events") => &[
            "involvedObject.kind",
            "involvedObject.namespace",
            "involvedObject.name",
            "involvedObject.uid",
            "involvedObject.apiVersion",
            "involvedObject.resourceVersion",
            "involvedObject.fieldPath",
            "reason",
            "reportingComponent",
            "source",
            "type",
        ],
        ("batch", "jobs") => &["status.successful"],
        ("resource.k8s.io", "resourceslices") => &["spec.nodeName", "spec.driver"],
        _ => &[],
    }
}

fn parse_fields(resource: &ServedResource, text: &str) -> Result<Vec<(String, String, bool)>, ApiError> {
    let mut terms = Vec::new();
    for term in split_unescaped(text) {
        if term.is_empty() {
            continue;
        }
        let (path, value, equal) = split_field_term(&term)
            .ok_or_else(|| ApiError::bad_request(format!("invalid selector: '{text}'; can't understand '{term}'")))?;
        let path = match path.strip_prefix("regarding.") {
            Some(rest) if resource.is_events_k8s_io() => format!("involvedObject.{rest}"),
            _ => path,
        };
        let known =
            matches!(path.as_str(), "metadata.name" | "metadata.namespace") || selectable(resource).contains(&path.as_str());
        if !known {
            return Err(ApiError::bad_request(format!(
                "Unable to find {:?} that match label selector \"\", field selector {text:?}: field label not supported: {path}",
                resource.qualified()
            )));
        }
        terms.push((path, value, equal));
    }
    Ok(terms)
}

/// Split at commas without a preceding backslash; the backslashes remain.
fn split_unescaped(text: &str) -> Vec<String> {
    let mut terms = vec![String::new()];
    let mut escaped = false;
    for c in text.chars() {
        match c {
            ',' if !escaped => terms.push(String::new()),
            c => {
                if let Some(last) = terms.last_mut() {
                    last.push(c);
                }
            }
        }
        escaped = c == '\\' && !escaped;
    }
    terms
}

fn split_field_term(term: &str) -> Option<(String, String, bool)> {
    let at = term.find(['=', '!'])?;
    let (path, rest) = term.split_at(at);
    let (value, equal) = rest
        .strip_prefix("!=")
        .map(|v| (v, false))
        .or_else(|| rest.strip_prefix("==").map(|v| (v, true)))
        .or_else(|| rest.strip_prefix('=').map(|v| (v, true)))?;
    let mut unescaped = String::new();
    let mut chars = value.chars();
    while let Some(c) = chars.next() {
        match c {
            '\\' => unescaped.push(chars.next()?),
            ',' | '=' => return None,
            c => unescaped.push(c),
        }
    }
    Some((path.trim().to_owned(), unescaped, equal))
}

fn parse_labels(text: &str) -> Result<Vec<ListRequirement>, ApiError> {
    let wrong = |term: &str| ApiError::bad_request(format!("unable to parse requirement: {term:?} in label selector {text:?}"));
    let mut requirements = Vec::new();
    // Commas inside parentheses belong to a value set.
    let mut depth = 0;
    let mut terms = vec![String::new()];
    for c in text.chars() {
        depth += match c {
            '(' => 1,
            ')' => -1,
            _ => 0,
        };
        match (c, terms.last_mut()) {
            (',', _) if depth == 0 => terms.push(String::new()),
            (c, Some(last)) => last.push(c),
            (_, None) => {}
        }
    }
    for term in terms.iter().map(|t| t.trim()).filter(|t| !t.is_empty()) {
        let requirement = if let Some(key) = term.strip_prefix('!') {
            ListRequirement::DoesNotExist(label_key(key).ok_or_else(|| wrong(term))?)
        } else if let Some((key, value)) = term.split_once("!=") {
            ListRequirement::NotIn(label_key(key).ok_or_else(|| wrong(term))?, vec![value.trim().to_owned()])
        } else if let Some((key, value)) = term.split_once("==").or_else(|| term.split_once('=')) {
            ListRequirement::In(label_key(key).ok_or_else(|| wrong(term))?, vec![value.trim().to_owned()])
        } else if let Some((head, set)) = term.split_once('(') {
            let set = set.strip_suffix(')').ok_or_else(|| wrong(term))?;
            let values = set.split(',').map(|v| v.trim().to_owned()).collect();
            let mut words = head.split_whitespace();
            let key = words.next().and_then(label_key).ok_or_else(|| wrong(term))?;
            match (words.next(), words.next()) {
                (Some("in"), None) => ListRequirement::In(key, values),
                (Some("notin"), None) => ListRequirement::NotIn(key, values),
                _ => return Err(wrong(term)),
            }
        } else {
            ListRequirement::Exists(label_key(term).ok_or_else(|| wrong(term))?)
        };
        requirements.push(requirement);
    }
    Ok(requirements)
}

fn label_key(text: &str) -> Option<String> {
    let key = text.trim();
    let legal = !key.is_empty() && key.chars().all(|c| c.is_ascii_alphanumeric() || "-_./".contains(c));
    legal.then(|| key.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::resources::ServedResources;
    use serde_json::json;

    fn select(resource: &str, labels: &str, fields: &str) -> Result<ListSelector, ApiError> {
        let resources = ServedResources::new(&[]);
        ListSelector::parse(resources.by_name(resource).expect("known"), labels, fields)
    }

    #[test]
    fn label_selectors_match_as_kubectl_users_expect() {
        let object = json!({"metadata": {"labels": {"app": "web", "tier": "front", "divvy.dev/x": ""}}});
        for (selector, expected) in [
            ("", true),
            ("app=web", true),
            ("app==web,tier=front", true),
            ("app=db", false),
            ("app!=db", true),
            ("missing!=x", true),
            ("app", true),
            ("missing", false),
            ("!missing", true),
            ("!app", false),
            ("app in (db, web),tier", true),
            ("app in (db)", false),
            ("app notin (db,cache)", true),
            ("missing notin (a)", true),
            ("divvy.dev/x=", true),
        ] {
            assert_eq!(
                select("pods", selector, "").expect(selector).matches(&object),
                expected,
                "{selector}"
            );
        }
        for wrong in ["app in (a", "a b", "=x", "app within (a)"] {
            assert_eq!(select("pods", wrong, "").expect_err(wrong).code, 400, "{wrong}");
        }
    }

    #[test]
    fn field_selectors_know_the_fields_of_each_resource() {
        let pod =
            json!({"metadata": {"name": "a", "namespace": "d"}, "spec": {"nodeName": "n1"}, "status": {"phase": "Running"}});
        for (selector, expected) in [
            ("spec.nodeName=n1", true),
            ("spec.nodeName=", false),
            ("spec.nodeName!=n2,status.phase!=Succeeded,status.phase!=Failed", true),
            ("metadata.name==a,metadata.namespace=d", true),
            ("spec.hostNetwork=false", true),
        ] {
            assert_eq!(
                select("pods", "", selector).expect(selector).matches(&pod),
                expected,
                "{selector}"
            );
        }
        let error = select("pods", "", "spec.image=x").expect_err("not selectable");
        assert!(error.message.contains("field label not supported: spec.image"), "{error}");
        assert!(select("nodes", "", "spec.nodeName=x").is_err());
        let event = json!({"involvedObject": {"uid": "u,1"}, "reportingComponent": "divvy"});
        assert!(
            select("events", "", r"involvedObject.uid=u\,1,source=divvy")
                .expect("escaped")
                .matches(&event)
        );
        assert!(
            select("events.events.k8s.io", "", r"regarding.uid=u\,1")
                .expect("view")
                .matches(&event)
        );
    }
}
