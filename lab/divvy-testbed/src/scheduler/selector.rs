//! Label requirements, as the filters share them (apimachinery `pkg/labels/selector.go`, `pkg/apis/meta/v1/helpers.go`).

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

/// An object's labels: values by key.
pub type ObjectLabels = BTreeMap<String, String>;

/// The condition on a label's value.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Test {
    In(BTreeSet<String>),
    NotIn(BTreeSet<String>),
    Exists,
    DoesNotExist,
    Gt(i64),
    Lt(i64),
}

/// A requirement on one label.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Requirement {
    key: String,
    test: Test,
}

impl Requirement {
    /// Parse a requirement with the API's operators (`In`, `NotIn`, `Exists`, `DoesNotExist`, `Gt`, `Lt`). Return `None` for a requirement
    /// that `labels.NewRequirement` refuses because of its operator, its key, or the number or form of its values.
    pub fn new(key: &str, operator: &str, values: &[String]) -> Option<Requirement> {
        if !is_label_key(key) || !values.iter().all(|value| is_label_value(value)) {
            return None;
        }
        let set = || (!values.is_empty()).then(|| values.iter().cloned().collect());
        let number = || match values {
            [one] => one.parse().ok(),
            _ => None,
        };
        let test = match operator {
            "In" => Test::In(set()?),
            "NotIn" => Test::NotIn(set()?),
            "Exists" if values.is_empty() => Test::Exists,
            "DoesNotExist" if values.is_empty() => Test::DoesNotExist,
            "Gt" => Test::Gt(number()?),
            "Lt" => Test::Lt(number()?),
            _ => return None,
        };
        Some(Requirement {
            key: key.to_owned(),
            test,
        })
    }

    /// Report whether labels meet the requirement. An absent label meets `NotIn` and `DoesNotExist`; a label that is not a number meets
    /// neither `Gt` nor `Lt`.
    pub fn matches(&self, labels: &ObjectLabels) -> bool {
        let value = labels.get(&self.key);
        let number = || value.and_then(|value| value.parse::<i64>().ok());
        match &self.test {
            Test::In(set) => value.is_some_and(|value| set.contains(value)),
            Test::NotIn(set) => value.is_none_or(|value| !set.contains(value)),
            Test::Exists => value.is_some(),
            Test::DoesNotExist => value.is_none(),
            Test::Gt(than) => number().is_some_and(|number| number > *than),
            Test::Lt(than) => number().is_some_and(|number| number < *than),
        }
    }
}

/// A `metav1.LabelSelector`, as the scheduler reads it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Selector {
    /// No labels match: the selector is absent, or Kubernetes' validation would have refused it.
    #[default]
    Nothing,
    /// Labels that meet all of these requirements match. Without requirements, all labels match.
    All(Vec<Requirement>),
}

impl Selector {
    /// Parse a selector. An absent selector matches nothing, an empty one everything (`LabelSelectorAsSelector`).
    pub fn of(selector: Option<&LabelSelector>) -> Selector {
        let Some(selector) = selector else {
            return Selector::Nothing;
        };
        let labels = selector.match_labels.iter().flatten();
        let labels = labels.map(|(key, value)| Requirement::new(key, "In", std::slice::from_ref(value)));
        let expressions = selector.match_expressions.iter().flatten();
        let expressions = expressions.map(|expression| match expression.operator.as_str() {
            // Only node selectors compare numbers.
            "Gt" | "Lt" => None,
            operator => Requirement::new(&expression.key, operator, expression.values.as_deref().unwrap_or_default()),
        });
        match labels.chain(expressions).collect() {
            Some(requirements) => Selector::All(requirements),
            None => Selector::Nothing,
        }
    }

    /// Add a requirement for each label in `matchLabelKeys` (`In`) or `mismatchLabelKeys` (`NotIn`), with the owner's value of
    /// that label. Keys that the owner lacks add nothing, and a selector that matches nothing remains so
    /// (`pkg/registry/core/pod/strategy.go`).
    pub fn with_keys(mut self, operator: &str, keys: Option<&Vec<String>>, owner: &ObjectLabels) -> Selector {
        for key in keys.into_iter().flatten() {
            if let (Selector::All(requirements), Some(value)) = (&mut self, owner.get(key)) {
                match Requirement::new(key, operator, std::slice::from_ref(value)) {
                    Some(requirement) => requirements.push(requirement),
                    None => return Selector::Nothing,
                }
            }
        }
        self
    }

    /// Report whether labels match.
    pub fn matches(&self, labels: &ObjectLabels) -> bool {
        match self {
            Selector::Nothing => false,
            Selector::All(requirements) => requirements.iter().all(|requirement| requirement.matches(labels)),
        }
    }

    /// Report whether the selector matches all labels because it has no requirements.
    pub fn is_everything(&self) -> bool {
        matches!(self, Selector::All(requirements) if requirements.is_empty())
    }
}

/// Report whether this is a qualified name, with or without a domain (`IsQualifiedName`).
fn is_label_key(key: &str) -> bool {
    let (domain, name) = match key.split_once('/') {
        Some((domain, name)) => (Some(domain), name),
        None => (None, key),
    };
    domain.is_none_or(crate::api::is_dns_subdomain) && !name.is_empty() && is_label_value(name)
}

/// Report whether a label may have this value (`IsValidLabelValue`): at most 63 letters, digits, `-`, `_` and `.`, with a letter
/// or digit at both ends; or empty.
fn is_label_value(value: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    let end = |byte: Option<&u8>| byte.is_none_or(u8::is_ascii_alphanumeric);
    let bytes = value.as_bytes();
    bytes.len() <= 63 && bytes.iter().copied().all(inner) && end(bytes.first()) && end(bytes.last())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn labels(of: &[(&str, &str)]) -> ObjectLabels {
        of.iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect()
    }

    fn requirement(key: &str, operator: &str, values: &[&str]) -> Option<Requirement> {
        let values: Vec<String> = values.iter().map(|value| (*value).to_owned()).collect();
        Requirement::new(key, operator, &values)
    }

    /// Most of these cases are from upstream's `TestRequirementSelectorMatching` and `TestToString`.
    #[test]
    fn a_requirement_is_met_as_its_operator_says() {
        let have = labels(&[("app", "web"), ("size", "10"), ("word", "ten"), ("empty", "")]);
        for (key, operator, values, expected) in [
            ("app", "In", &["db", "web"][..], true),
            ("app", "In", &["db"], false),
            ("absent", "In", &["db"], false),
            ("empty", "In", &[""], true),
            ("absent", "In", &[""], false),
            ("app", "NotIn", &["db"], true),
            ("app", "NotIn", &["db", "web"], false),
            ("absent", "NotIn", &["db"], true),
            ("app", "Exists", &[], true),
            ("empty", "Exists", &[], true),
            ("absent", "Exists", &[], false),
            ("app", "DoesNotExist", &[], false),
            ("absent", "DoesNotExist", &[], true),
            ("size", "Gt", &["9"], true),
            ("size", "Gt", &["10"], false),
            ("size", "Lt", &["11"], true),
            ("size", "Lt", &["10"], false),
            ("word", "Gt", &["1"], false),
            ("word", "Lt", &["1"], false),
            ("absent", "Gt", &["1"], false),
            ("absent", "Lt", &["1"], false),
        ] {
            let requirement = requirement(key, operator, values).expect("legal");
            assert_eq!(requirement.matches(&have), expected, "{key} {operator} {values:?}");
        }
    }

    #[test]
    fn a_requirement_is_refused_as_upstream_refuses_it() {
        let long = "x".repeat(64);
        for (key, operator, values) in [
            ("app", "In", &[][..]),
            ("app", "NotIn", &[]),
            ("app", "Exists", &["web"]),
            ("app", "DoesNotExist", &["web"]),
            ("app", "Gt", &[]),
            ("app", "Gt", &["1", "2"]),
            ("app", "Lt", &["ten"]),
            // A label's value cannot begin with a sign.
            ("app", "Gt", &["-1"]),
            ("app", "NotIn", &["a b"]),
            ("app", "NotIn", &["web-"]),
            ("app", "In", &[long.as_str()]),
            ("app", "Equal", &["web"]),
            ("", "Exists", &[]),
            ("a/b/c", "Exists", &[]),
            ("/app", "Exists", &[]),
            ("Domain.example/app", "Exists", &[]),
            ("-app", "Exists", &[]),
        ] {
            assert_eq!(requirement(key, operator, values), None, "{key} {operator} {values:?}");
        }
        assert!(requirement("example.com/App_1.x", "Exists", &[]).is_some());
    }

    /// An absent selector and a wrong selector match nothing.
    #[test]
    fn only_an_empty_selector_matches_everything() {
        let have = labels(&[("app", "web"), ("tier", "front"), ("n", "5")]);
        let read = |selector| Selector::of(Some(&serde_json::from_value(selector).expect("selector")));
        assert!(!Selector::of(None).matches(&have) && !Selector::of(None).is_everything());
        assert!(read(json!({})).is_everything() && read(json!({})).matches(&ObjectLabels::new()));
        let tier = |operator, values| json!({"matchLabels": {"app": "web"}, "matchExpressions": [{"key": "tier", "operator": operator, "values": values}]});
        for (selector, expected) in [
            (json!({"matchLabels": {"app": "web", "tier": "front"}}), true),
            (json!({"matchLabels": {"app": "web", "tier": "back"}}), false),
            (tier("In", json!(["front"])), true),
            (tier("NotIn", json!(["front"])), false),
            (tier("Exists", json!(null)), true),
            (tier("NotIn", json!([])), false),
            (
                json!({"matchExpressions": [{"key": "n", "operator": "Gt", "values": ["1"]}]}),
                false,
            ),
            (json!({"matchLabels": {"app": "a b"}}), false),
        ] {
            assert_eq!(read(selector.clone()).matches(&have), expected, "{selector}");
        }
    }

    /// `TestApplyMatchLabelKeysAndMismatchLabelKeys` upstream.
    #[test]
    fn the_owners_values_of_the_keys_are_added_where_it_has_them() {
        let owner = labels(&[("hash", "1"), ("country", "jp")]);
        let keys = Some(vec!["hash".to_owned(), "absent".to_owned()]);
        let all = Selector::All(Vec::new());
        let same = all.clone().with_keys("In", keys.as_ref(), &owner);
        let other = all.clone().with_keys("NotIn", keys.as_ref(), &owner);
        for (have, in_same, in_other) in [
            (labels(&[("hash", "1")]), true, false),
            (labels(&[("hash", "2")]), false, true),
            (labels(&[]), false, true),
        ] {
            assert_eq!((same.matches(&have), other.matches(&have)), (in_same, in_other), "{have:?}");
        }
        assert_eq!(all.clone().with_keys("In", None, &owner), all);
        assert_eq!(Selector::Nothing.with_keys("In", keys.as_ref(), &owner), Selector::Nothing);
    }
}
