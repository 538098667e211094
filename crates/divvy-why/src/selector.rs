//! Label selectors, as Kubernetes evaluates them (`apimachinery/pkg/labels`, `component-helpers/scheduling/corev1/nodeaffinity`).

use k8s_openapi::api::core::v1::{NodeSelector, NodeSelectorRequirement, NodeSelectorTerm};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

use divvy_model::limits::shortened;

use crate::{LabelMap, NodeSite};

/// The maximum length in bytes of a selector in words, because it is repeated for each node.
const LONGEST: usize = 300;

/// Report whether a selector matches labels. An empty selector matches everything.
pub(crate) fn selects(selector: &LabelSelector, labels: &LabelMap) -> bool {
    let equal = selector
        .match_labels
        .iter()
        .flatten()
        .all(|(key, value)| labels.get(key) == Some(value));
    let expressions = selector.match_expressions.iter().flatten();
    equal
        && expressions
            .into_iter()
            .all(|one| holds(&one.operator, one.values.as_deref(), labels.get(&one.key)))
}

/// Report whether a node is selected by at least one of the terms.
pub(crate) fn selects_node(selector: &NodeSelector, site: &NodeSite) -> bool {
    selector.node_selector_terms.iter().any(|term| term_selects(term, site))
}

/// Report whether all requirements of a term hold. A term without requirements selects nothing.
fn term_selects(term: &NodeSelectorTerm, site: &NodeSite) -> bool {
    let expressions = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    let of_labels = |one: &NodeSelectorRequirement| holds(&one.operator, one.values.as_deref(), site.labels.get(&one.key));
    let of_fields = |one: &NodeSelectorRequirement| {
        let value = (one.key == "metadata.name").then_some(&site.name);
        holds(&one.operator, one.values.as_deref(), value)
    };
    !(expressions.is_empty() && fields.is_empty()) && expressions.iter().all(of_labels) && fields.iter().all(of_fields)
}

/// Report whether a requirement holds for the value of its label. A requirement with an unknown operator never holds.
fn holds(operator: &str, values: Option<&[String]>, found: Option<&String>) -> bool {
    let values = values.unwrap_or_default();
    let number = |text: &String| text.parse::<i64>().ok();
    let compare = |is: fn(i64, i64) -> bool| match (found.and_then(number), values.first().and_then(number)) {
        (Some(found), Some(wanted)) => is(found, wanted),
        _ => false,
    };
    match operator {
        "In" => found.is_some_and(|found| values.contains(found)),
        "NotIn" => found.is_none_or(|found| !values.contains(found)),
        "Exists" => found.is_some(),
        "DoesNotExist" => found.is_none(),
        "Gt" => compare(|found, wanted| found > wanted),
        "Lt" => compare(|found, wanted| found < wanted),
        _ => false,
    }
}

/// Describe a selector in words: `disk=ssd, zone in (a, b)`.
pub(crate) fn in_words(selector: &NodeSelector) -> String {
    shortened(&all_in_words(selector), LONGEST).into_owned()
}

fn all_in_words(selector: &NodeSelector) -> String {
    let of_term = |term: &NodeSelectorTerm| {
        let fields = term.match_fields.iter().flatten();
        let parts: Vec<String> = term
            .match_expressions
            .iter()
            .flatten()
            .chain(fields)
            .map(requirement)
            .collect();
        parts.join(", ")
    };
    let terms: Vec<String> = selector.node_selector_terms.iter().map(of_term).collect();
    terms.join("; or ")
}

fn requirement(one: &NodeSelectorRequirement) -> String {
    let key = &one.key;
    let values = one.values.as_deref().unwrap_or_default();
    match (one.operator.as_str(), values) {
        ("In", [value]) => format!("{key}={value}"),
        ("NotIn", [value]) => format!("{key}!={value}"),
        ("In", _) => format!("{key} in ({})", values.join(", ")),
        ("NotIn", _) => format!("{key} not in ({})", values.join(", ")),
        ("Exists", _) => format!("{key} is set"),
        ("DoesNotExist", _) => format!("{key} is not set"),
        ("Gt", [value]) => format!("{key} > {value}"),
        ("Lt", [value]) => format!("{key} < {value}"),
        (operator, _) => format!("{key} {operator} ({})", values.join(", ")),
    }
}
