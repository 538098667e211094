//! The sort order of `--sort-by`.

use std::cmp::Ordering;
use std::str::FromStr;
use std::sync::Arc;

use divvy_view::{NodeView, View};
use serde_json::Value;

use crate::jsonpath::{self, KubectlPath};

/// The key by which the nodes are sorted, in ascending order, as in kubectl.
#[derive(Debug, Clone)]
pub enum SortBy {
    /// The node's name.
    Name,
    /// The number of units that are allocated to pods.
    Allocated,
    /// The number of units that pods can still be allocated.
    Free,
    /// The total number of units.
    Total,
    /// The first value that a path selects in the JSON of a node as printed by `-o json`, and the text of the path.
    Path(KubectlPath, String),
}

/// Why nodes cannot be sorted.
#[derive(Debug, thiserror::Error)]
pub enum SortError {
    /// The text is neither a column nor a path.
    #[error(
        "this is not a column; write name, allocated, free, total, or a path in a node's JSON such as {{.gpus[0].allocated}}"
    )]
    NoColumn,
    /// The text begins like a path, and is none.
    #[error(transparent)]
    Path(#[from] jsonpath::PathError),
    /// The path selects nothing in any node.
    #[error("--sort-by {0}: no node has this field; -o json shows the fields of a node")]
    NoField(String),
}

impl FromStr for SortBy {
    type Err = SortError;

    fn from_str(text: &str) -> Result<SortBy, SortError> {
        Ok(match text {
            "name" => SortBy::Name,
            "allocated" => SortBy::Allocated,
            "free" => SortBy::Free,
            "total" => SortBy::Total,
            path if path.starts_with(['.', '{', '$']) => SortBy::Path(path.parse()?, path.to_owned()),
            _ => return Err(SortError::NoColumn),
        })
    }
}

/// Sort the nodes. On a tie, sort by name.
pub fn sort(view: &mut View, by: &SortBy) -> Result<(), SortError> {
    view.nodes.sort_by(|a, b| a.name.cmp(&b.name));
    match by {
        SortBy::Name => {}
        SortBy::Allocated => view.nodes.sort_by_key(|node| node.allocated),
        SortBy::Free => view.nodes.sort_by_key(|node| node.free()),
        SortBy::Total => view.nodes.sort_by_key(|node| node.total),
        SortBy::Path(path, text) => {
            let key = |node: &NodeView| {
                let json = serde_json::to_value(node).unwrap_or_default();
                path.find(&json).first().copied().cloned()
            };
            let mut keyed: Vec<(Option<Value>, Arc<NodeView>)> = std::mem::take(&mut view.nodes)
                .into_iter()
                .map(|node| (key(&node), node))
                .collect();
            let none = keyed.iter().all(|(key, _)| key.is_none()) && !keyed.is_empty();
            keyed.sort_by(|(a, _), (b, _)| order(a.as_ref(), b.as_ref()));
            view.nodes = keyed.into_iter().map(|(_, node)| node).collect();
            if none {
                return Err(SortError::NoField(text.clone()));
            }
        }
    }
    Ok(())
}
/// Compare numbers as numbers, and everything else as text. A missing value comes first.
fn order(a: Option<&Value>, b: Option<&Value>) -> Ordering {
    match (a, b) {
        (Some(Value::Number(a)), Some(Value::Number(b))) => a.as_f64().partial_cmp(&b.as_f64()).unwrap_or(Ordering::Equal),
        (Some(Value::String(a)), Some(Value::String(b))) => a.cmp(b),
        (Some(a), Some(b)) => a.to_string().cmp(&b.to_string()),
        (a, b) => a.is_some().cmp(&b.is_some()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use divvy_view::GpuView;
    use std::collections::BTreeMap;

    fn view() -> View {
        let one = divvy_view::view(&[divvy_testkit::nodes::divvy_node("one", &[1])], &[]);
        let gpu = |free| GpuView {
            free: divvy_model::MiB(free * 1024),
            ..one.nodes[0].gpus[0].clone()
        };
        let node = |name: &str, allocated, total| {
            Arc::new(NodeView {
                name: name.to_owned(),
                address: "unknown".to_owned(),
                unit: divvy_model::MemoryUnit::GIB,
                allocated,
                total,
                gpus: vec![gpu(total - allocated)],
                pending: Vec::new(),
                unnamed: Vec::new(),
                driver_trouble: None,
            })
        };
        View {
            unit: "GiB".to_owned(),
            nodes: vec![node("c", 9, 16), node("a", 10, 100), node("b", 2, 8)],
            allocated: 21,
            total: 124,
            whole: BTreeMap::new(),
        }
    }

    #[test]
    fn nodes_are_sorted_by_columns_and_by_what_json_has() {
        for (by, expected) in [
            ("name", "abc"),
            ("allocated", "bca"),
            ("free", "bca"),
            ("total", "bca"),
            (".allocated", "bca"),
            ("{.name}", "abc"),
            ("{.total}", "bca"),
        ] {
            let mut view = view();
            sort(&mut view, &by.parse().expect(by)).expect(by);
            let names: String = view.nodes.iter().map(|node| node.name.as_str()).collect();
            assert_eq!(names, expected, "{by}");
        }
        assert!(
            "used"
                .parse::<SortBy>()
                .expect_err("no column")
                .to_string()
                .contains("name, allocated, free, total")
        );
        let by: SortBy = "{.used}".parse().expect("a path");
        let error = sort(&mut view(), &by).expect_err("no node has it").to_string();
        assert!(error.contains("{.used}"), "{error}");
    }
}
