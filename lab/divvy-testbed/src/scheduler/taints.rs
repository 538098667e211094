//! Taints and cordons: the plugins NodeUnschedulable and TaintToleration (`plugins/nodeunschedulable`, `plugins/tainttoleration`,
//! `api/core/v1/toleration.go`).

use std::sync::LazyLock;

use k8s_openapi::api::core::v1::{Taint, Toleration};

/// The reason that NodeUnschedulable returns.
pub const UNSCHEDULABLE: &str = "node(s) were unschedulable";

/// The reason that TaintToleration returns.
pub const UNTOLERATED: &str = "node(s) had untolerated taint(s)";

fn no_schedule(key: &str) -> Taint {
    Taint {
        key: key.to_owned(),
        effect: "NoSchedule".to_owned(),
        ..Taint::default()
    }
}

/// The taint that the node controller sets on a node with `spec.unschedulable`.
pub(super) static CORDONED: LazyLock<Taint> = LazyLock::new(|| no_schedule("node.kubernetes.io/unschedulable"));

/// The taint that the node controller sets on a node that is not Ready.
pub(super) static NOT_READY: LazyLock<Taint> = LazyLock::new(|| no_schedule("node.kubernetes.io/not-ready"));

/// Report whether a toleration tolerates a taint (`Toleration.ToleratesTaint`). An absent operator means `Equal`; an empty key
/// stands for all keys, an empty effect for all effects. `Lt` and `Gt` tolerate nothing, because their feature gate
/// (TaintTolerationComparisonOperators) is off in 1.36.
pub fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let text = |field: &Option<String>| field.clone().unwrap_or_default();
    let empty_or =
        |field: &Option<String>, wanted: &str| matches!(field.as_deref(), None | Some("")) || field.as_deref() == Some(wanted);
    empty_or(&toleration.effect, &taint.effect)
        && empty_or(&toleration.key, &taint.key)
        && match toleration.operator.as_deref() {
            None | Some("" | "Equal") => text(&toleration.value) == text(&taint.value),
            Some("Exists") => true,
            Some(_) => false,
        }
}

/// Report whether one of the tolerations tolerates the taint.
pub fn tolerated(taint: &Taint, tolerations: &[Toleration]) -> bool {
    tolerations.iter().any(|toleration| tolerates(toleration, taint))
}

/// Report whether all taints that repel pods are tolerated. `PreferNoSchedule` repels no pod (`DoNotScheduleTaintsFilterFunc`).
pub fn all_tolerated<'a>(mut taints: impl Iterator<Item = &'a Taint>, tolerations: &[Toleration]) -> bool {
    let keeps_away = |taint: &Taint| matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute");
    taints.all(|taint| !keeps_away(taint) || tolerated(taint, tolerations))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn taint(key: &str, value: Option<&str>, effect: &str) -> Taint {
        Taint {
            key: key.to_owned(),
            value: value.map(str::to_owned),
            effect: effect.to_owned(),
            time_added: None,
        }
    }

    fn tolerations(of: &[Value]) -> Vec<Toleration> {
        of.iter()
            .map(|one| serde_json::from_value(one.clone()).expect("toleration"))
            .collect()
    }

    /// `TestTolerationToleratesTaint` upstream, and the comparison operators, whose gate is off.
    #[test]
    fn a_toleration_matches_key_value_and_effect() {
        let foo = taint("foo", Some("bar"), "NoSchedule");
        for (toleration, taint, expected) in [
            (
                json!({"key": "foo", "operator": "Exists", "effect": "NoSchedule"}),
                &foo,
                true,
            ),
            (json!({"key": "foo", "operator": "Exists"}), &foo, true),
            (json!({"operator": "Exists"}), &foo, true),
            (json!({"operator": "Exists", "effect": "NoExecute"}), &foo, false),
            (json!({"key": "baz", "operator": "Exists"}), &foo, false),
            (
                json!({"key": "foo", "operator": "Equal", "value": "bar", "effect": "NoSchedule"}),
                &foo,
                true,
            ),
            (json!({"key": "foo", "value": "bar"}), &foo, true),
            (json!({"key": "foo", "operator": "", "value": "bar"}), &foo, true),
            (json!({"key": "foo", "value": "other"}), &foo, false),
            (json!({"key": "foo"}), &foo, false),
            (json!({"key": "foo"}), &taint("foo", None, "NoSchedule"), true),
            (json!({"key": "foo"}), &taint("foo", Some(""), "NoSchedule"), true),
            (
                json!({"key": "foo", "operator": "Equal", "value": "bar", "effect": "NoExecute"}),
                &foo,
                false,
            ),
            (
                json!({"key": "n", "operator": "Gt", "value": "1"}),
                &taint("n", Some("5"), "NoSchedule"),
                false,
            ),
            (
                json!({"key": "n", "operator": "Lt", "value": "9"}),
                &taint("n", Some("5"), "NoSchedule"),
                false,
            ),
        ] {
            let one = tolerations(std::slice::from_ref(&toleration));
            assert_eq!(tolerated(taint, &one), expected, "{toleration} {taint:?}");
        }
    }

    /// `TestTaintTolerationFilter` upstream.
    #[test]
    fn every_taint_that_keeps_pods_away_needs_a_toleration() {
        let none = &[][..];
        let dedicated = &[json!({"key": "dedicated", "value": "user1", "effect": "NoSchedule"})][..];
        let both = &[dedicated[0].clone(), json!({"key": "foo", "operator": "Exists"})][..];
        let user1 = taint("dedicated", Some("user1"), "NoSchedule");
        for (given, taints, expected) in [
            (none, vec![], true),
            (none, vec![user1.clone()], false),
            (dedicated, vec![user1.clone()], true),
            (dedicated, vec![taint("dedicated", Some("user2"), "NoSchedule")], false),
            (dedicated, vec![user1.clone(), taint("foo", Some("bar"), "NoExecute")], false),
            (both, vec![user1.clone(), taint("foo", Some("bar"), "NoExecute")], true),
            (none, vec![taint("foo", Some("bar"), "PreferNoSchedule")], true),
            (
                dedicated,
                vec![taint("foo", Some("bar"), "PreferNoSchedule"), user1.clone()],
                true,
            ),
        ] {
            assert_eq!(
                all_tolerated(taints.iter(), &tolerations(given)),
                expected,
                "{given:?} {taints:?}"
            );
        }
    }
}
