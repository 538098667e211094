//! The plugin NodeAffinity: `nodeSelector` and required node affinity (`plugins/nodeaffinity`,
//! `component-helpers/scheduling/corev1/nodeaffinity`).

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{NodeSelector, NodeSelectorRequirement, NodeSelectorTerm};

use super::selector::{Labels, Requirement};

/// The reason that Filter returns.
pub const MISMATCH: &str = "node(s) didn't match Pod's node affinity/selector";

/// The reason for the nodes that PreFilter excludes because the pod names others.
pub const NOT_NAMED: &str = "node(s) didn't satisfy plugin(s) [NodeAffinity]";

/// The reason that PreFilter returns if each of the pod's terms requires a node to have two different names.
pub const CONFLICT: &str = "pod affinity terms conflict";

/// The nodes that PreFilter passes to the filters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Names {
    /// All nodes, because some term names no node.
    Any,
    /// These nodes, because every term names some.
    Only(BTreeSet<String>),
    /// No node, because the terms contradict each other.
    Conflict,
}

/// A requirement on a field of a node. Only `metadata.name` has a value; all other fields are empty.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Field {
    is_name: bool,
    equal: bool,
    value: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Term {
    labels: Vec<Requirement>,
    fields: Vec<Field>,
}

/// The parsed `requiredDuringSchedulingIgnoredDuringExecution`. Empty and invalid terms match no node and are omitted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeAffinity {
    terms: Vec<Term>,
    names: Names,
}

impl NodeAffinity {
    /// Parse the selector.
    pub fn of(selector: &NodeSelector) -> NodeAffinity {
        let terms = &selector.node_selector_terms;
        NodeAffinity {
            terms: terms.iter().filter_map(Term::of).collect(),
            names: names(terms),
        }
    }

    /// Report whether some term matches a node with this name and these labels. Without terms, none does.
    pub fn matches(&self, name: &str, labels: &Labels) -> bool {
        self.terms.iter().any(|term| term.matches(name, labels))
    }

    /// Return the nodes that reach the filters.
    pub fn names(&self) -> &Names {
        &self.names
    }
}

impl Term {
    fn of(term: &NodeSelectorTerm) -> Option<Term> {
        let expressions = term.match_expressions.as_deref().unwrap_or_default();
        let fields = term.match_fields.as_deref().unwrap_or_default();
        if expressions.is_empty() && fields.is_empty() {
            return None;
        }
        let label =
            |of: &NodeSelectorRequirement| Requirement::new(&of.key, &of.operator, of.values.as_deref().unwrap_or_default());
        Some(Term {
            labels: expressions.iter().map(label).collect::<Option<_>>()?,
            fields: fields.iter().map(Field::of).collect::<Option<_>>()?,
        })
    }

    fn matches(&self, name: &str, labels: &Labels) -> bool {
        self.labels.iter().all(|requirement| requirement.matches(labels)) && self.fields.iter().all(|field| field.matches(name))
    }
}

impl Field {
    /// Parse a requirement, which must have exactly one value.
    fn of(requirement: &NodeSelectorRequirement) -> Option<Field> {
        let equal = match requirement.operator.as_str() {
            "In" => true,
            "NotIn" => false,
            _ => return None,
        };
        match requirement.values.as_deref() {
            Some([value]) => Some(Field {
                is_name: requirement.key == "metadata.name",
                equal,
                value: value.clone(),
            }),
            _ => None,
        }
    }

    fn matches(&self, name: &str) -> bool {
        let have = if self.is_name { name } else { "" };
        (have == self.value) == self.equal
    }
}

/// Compute the names as PreFilter does, from the unparsed terms: the union over the terms of the intersection of each term's `In` values.
fn names(terms: &[NodeSelectorTerm]) -> Names {
    let mut union = BTreeSet::new();
    for term in terms {
        let named = |of: &&NodeSelectorRequirement| of.key == "metadata.name" && of.operator == "In";
        let sets = term.match_fields.iter().flatten().filter(named);
        let sets = sets.map(|of| of.values.iter().flatten().cloned().collect::<BTreeSet<String>>());
        match sets.reduce(|one, other| &one & &other) {
            Some(left) => union.extend(left),
            None => return Names::Any,
        }
    }
    match (terms.is_empty(), union.is_empty()) {
        (true, _) => Names::Any,
        (false, true) => Names::Conflict,
        (false, false) => Names::Only(union),
    }
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

    fn fields(of: Value) -> Value {
        json!([{"matchFields": of}])
    }

    fn name(operator: &str, values: &[&str]) -> Value {
        json!({"key": "metadata.name", "operator": operator, "values": values})
    }

    /// From `TestNodeAffinity` and `TestNodeSelectorMatch` upstream.
    #[test]
    fn terms_are_alternatives_and_all_of_a_term_must_hold() {
        let foo = |operator: &str, values: &[&str]| json!({"key": "foo", "operator": operator, "values": values});
        let labels = Labels::from([("foo".to_owned(), "bar".to_owned()), ("cpus".to_owned(), "16".to_owned())]);
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
            (fields(json!([name("In", &["n1"])])), true),
            (fields(json!([name("In", &["n2"])])), false),
            (fields(json!([name("NotIn", &["n2"])])), true),
            (fields(json!([name("In", &["n1", "n2"])])), false),
            (fields(json!([name("Exists", &[])])), false),
            (
                json!([{"matchFields": [name("In", &["n1"])], "matchExpressions": [foo("In", &["other"])]}]),
                false,
            ),
            (
                json!([{"matchFields": [name("In", &["n2"])]}, {"matchExpressions": [foo("In", &["bar"])]}]),
                true,
            ),
        ] {
            assert_eq!(affinity(terms.clone()).matches("n1", &labels), expected, "{terms}");
        }
    }

    /// From `TestNodeAffinity` upstream, where a PreFilter result is expected.
    #[test]
    fn nodes_that_no_term_names_are_left_out_only_where_every_term_names_some() {
        let only = |names: &[&str]| Names::Only(names.iter().map(|name| (*name).to_owned()).collect());
        for (terms, expected) in [
            (json!([]), Names::Any),
            (json!([{}]), Names::Any),
            (fields(json!([name("In", &["n1"])])), only(&["n1"])),
            (fields(json!([name("NotIn", &["n1"])])), Names::Any),
            (
                fields(json!([name("In", &["n1", "n2"]), name("In", &["n2", "n3"])])),
                only(&["n2"]),
            ),
            (fields(json!([name("In", &["n1"]), name("In", &["n2"])])), Names::Conflict),
            (
                json!([{"matchFields": [name("In", &["n1"])]}, {"matchFields": [name("In", &["n2"])]}]),
                only(&["n1", "n2"]),
            ),
            (
                json!([{"matchFields": [name("In", &["n1"])]}, {"matchExpressions": [{"key": "foo", "operator": "Exists"}]}]),
                Names::Any,
            ),
            (
                json!([{"matchFields": [name("In", &["n1"]), name("In", &["n2"])]}, {"matchFields": [name("In", &["n3"])]}]),
                only(&["n3"]),
            ),
        ] {
            assert_eq!(affinity(terms.clone()).names(), &expected, "{terms}");
        }
    }
}
