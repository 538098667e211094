//! Labels of the node that other programs or people also write.

use std::collections::{BTreeMap, BTreeSet};

/// Return the labels that a server-side apply must leave out, with the manager that owns each, from the causes of the API
/// server's refusal: pairs of a field, such as `.metadata.labels.nvidia.com/gpu.count`, and a message, such as
/// `conflict with "nfd-master" using v1` (apimachinery, `managedfields/internal/conflict.go`).
pub fn owners<'c>(causes: impl IntoIterator<Item = (&'c str, &'c str)>) -> BTreeMap<String, String> {
    let labels = causes.into_iter().filter_map(|(field, message)| {
        let key = field.strip_prefix(".metadata.labels.")?;
        let manager = message.split('"').nth(1).unwrap_or(message);
        Some((key.to_owned(), manager.to_owned()))
    });
    labels.collect()
}

/// Return the keys of the labels that must be written again to a node that has the labels `on_node`: those that are missing, and those
/// that have another value and are not in `left_out`. `left_out` has the keys that other managers owned at the last write.
pub fn undone<'w>(
    wanted: &'w BTreeMap<String, String>,
    on_node: &BTreeMap<String, String>,
    left_out: &BTreeSet<String>,
) -> Vec<&'w str> {
    let is_undone = |(key, value): &(&String, &String)| match on_node.get(*key) {
        None => true,
        Some(there) => there != *value && !left_out.contains(*key),
    };
    wanted.iter().filter(is_undone).map(|(key, _)| key.as_str()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cause_names_a_label_and_its_owner() {
        let found = owners([
            (".metadata.labels.nvidia.com/gpu.count", "conflict with \"nfd-master\""),
            (
                ".metadata.labels.nvidia.com/gpu.product",
                "conflict with \"kubectl-label\" using v1 at 2026-11-21T10:00:00Z",
            ),
            (".metadata.labels.nvidia.com/gpu.mode", "conflict with an unnamed manager"),
            (".metadata.annotations.a", "conflict with \"other\""),
        ]);
        let expected = [
            ("nvidia.com/gpu.count", "nfd-master"),
            ("nvidia.com/gpu.mode", "conflict with an unnamed manager"),
            ("nvidia.com/gpu.product", "kubectl-label"),
        ];
        assert_eq!(found, expected.map(|(key, owner)| (key.to_owned(), owner.to_owned())).into());
    }

    #[test]
    fn foreign_labels_are_written_only_when_given_up() {
        let map = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
            pairs
                .iter()
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect()
        };
        let wanted = map(&[("a", "1"), ("b", "1")]);
        for (on_node, left_out, expected) in [
            (&[("a", "1"), ("b", "1"), ("c", "1")][..], &[][..], &[][..]),
            (&[("a", "1")], &[], &["b"]),
            (&[("a", "1"), ("b", "2")], &[], &["b"]),
            (&[("a", "1"), ("b", "2")], &["b"], &[]),
            (&[("a", "1")], &["b"], &["b"]),
        ] {
            let left_out = left_out.iter().map(|key: &&str| (*key).to_owned()).collect();
            assert_eq!(
                undone(&wanted, &map(on_node), &left_out),
                expected,
                "{on_node:?} {left_out:?}"
            );
        }
    }
}
