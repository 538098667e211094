//! The plugin NodeAffinity: `nodeSelector` and required node affinity (`plugins/nodeaffinity`,
//! `component-helpers/scheduling/corev1/nodeaffinity`).

use k8s_openapi::api::core::v1::{NodeSelector, NodeSelectorTerm};

use super::selector::{ObjectLabels, Requirement};

/// The reason that Filter returns.
pub const MISMATCH: &str = "node(s) didn't match Pod's node affinity/selector";

/// The parsed `requiredDuringSchedulingIgnoredDuringExecution`: the requirements of each term. Empty and invalid terms match no node and are
/// omitted, and so are terms with `matchFields`, which are not evaluated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeAffinity(Vec<Vec<Requirement>>);

impl NodeAffinity {
    /// Parse the selector.
    pub fn of(selector: &NodeSelector) -> NodeAffinity {
        NodeAffinity(selector.node_selector_terms.iter().filter_map(requirements).collect())
    }

    /// Report whether some term matches a node with these labels. Without terms, none does.
    pub fn matches(&self, labels: &ObjectLabels) -> bool {
        let holds = |term: &Vec<Requirement>| term.iter().all(|requirement| requirement.matches(labels));
        self.0.iter().any(holds)
    }
}

fn requirements(term: &NodeSelectorTerm) -> Option<Vec<Requirement>> {
    let expressions = term.match_expressions.as_deref().unwrap_or_default();
    if expressions.is_empty() || term.match_fields.as_ref().is_some_and(|fields| !fields.is_empty()) {
        return None;
    }
    let labels = expressions
        .iter()
        .map(|of| Requirement::new(&of.key, &of.operator, of.values.as_deref().unwrap_or_default()));
    labels.collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn affinity(terms: Value) -> NodeAffinity {
        NodeAffinity::of(&serde_json::from_value(json!({"nodeSelectorTerms": terms})).expect("selector"))
    }

    fn expressions(of: Value) -> Value {
        json!([{"matchExpressions": of}])
    }

    /// From `TestNodeAffinity` and `TestNodeSelectorMatch` upstream.
    #[test]
    fn terms_are_alternatives_and_all_of_a_term_must_hold() {
        let foo = |operator: &str, values: &[&str]| json!({"key": "foo", "operator": operator, "values": values});
        let labels = ObjectLabels::from([("foo".to_owned(), "bar".to_owned()), ("cpus".to_owned(), "16".to_owned())]);
        for (terms, expected) in [
            (json!([]), false),
            (json!([{}]), false),
            (json!([{"matchExpressions": [], "matchFields": []}]), false),
            (expressions(json!([foo("In", &["bar", "value2"])])), true),
            (expressions(json!([foo("In", &["value1", "value2"])])), false),
            (
                expressions(json!([foo("Exists", &[]), {"key": "cpus", "operator": "Gt", "values": ["8"]}])),
                true,
            ),
            (
                expressions(json!([foo("Exists", &[]), {"key": "cpus", "operator": "Lt", "values": ["8"]}])),
                false,
            ),
            (json!([{}, {"matchExpressions": [foo("In", &["bar"])]}]), true),
            (
                json!([{"matchExpressions": [foo("In", &["other"])]}, {"matchExpressions": [foo("NotIn", &["other"])]}]),
                true,
            ),
            // An invalid requirement matches nothing and does not affect other terms.
            (expressions(json!([foo("NotIn", &["invalid value: ___@#$"])])), false),
            (
                json!([{"matchExpressions": [foo("Like", &["b"])]}, {"matchExpressions": [foo("In", &["bar"])]}]),
                true,
            ),
        ] {
            assert_eq!(affinity(terms.clone()).matches(&labels), expected, "{terms}");
        }
    }
}
