//! A cluster as `kubectl get nodes,pods -A -o json` prints it. No I/O.

use serde::{Deserialize, Deserializer};

use crate::objects::{NodeObject, PodObject};

/// Nodes and pods as they are.
#[derive(Debug, Default)]
pub struct Dump {
    /// In the order of the text.
    pub nodes: Vec<NodeObject>,
    /// In the order of the text.
    pub pods: Vec<PodObject>,
}

/// Why a text is no dump.
#[derive(Debug, thiserror::Error)]
pub enum Unusable {
    /// Not JSON, or not to its end.
    #[error("it is not JSON as kubectl prints it ({0}); make it by: kubectl get nodes,pods -A -o json")]
    Json(#[from] serde_json::Error),
    /// Something else than nodes and pods.
    #[error("{found}; make it by: kubectl get nodes,pods -A -o json")]
    Other {
        /// What was found.
        found: String,
    },
}

#[derive(Deserialize)]
struct Document {
    kind: Option<String>,
    items: Option<Vec<Item>>,
}

/// An item of a list: read at once, since as JSON it takes many times the memory.
enum Item {
    Node(Box<NodeObject>),
    Pod(Box<PodObject>),
    /// Of another kind.
    Other(String),
    /// Of the list's kind.
    Unsaid(serde_json::Value),
}

impl<'de> Deserialize<'de> for Item {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Item, D::Error> {
        let item = serde_json::Value::deserialize(deserializer)?;
        let kind = item.get("kind").and_then(serde_json::Value::as_str).map(str::to_owned);
        match kind {
            None => Ok(Item::Unsaid(item)),
            Some(kind) => Item::of(&kind, item).map_err(serde::de::Error::custom),
        }
    }
}

impl Item {
    fn of(kind: &str, item: serde_json::Value) -> serde_json::Result<Item> {
        Ok(match kind {
            "Node" => Item::Node(Box::new(serde_json::from_value(item)?)),
            "Pod" => Item::Pod(Box::new(serde_json::from_value(item)?)),
            other => Item::Other(other.to_owned()),
        })
    }
}

/// Reads one list or several one after the other, of nodes, of pods, or of both.
///
/// # Errors
///
/// When the text is not JSON, or speaks of nothing but other things.
pub fn read(text: &[u8]) -> Result<Dump, Unusable> {
    let mut dump = Dump::default();
    let mut others: Vec<String> = Vec::new();
    for document in serde_json::Deserializer::from_slice(text).into_iter::<Document>() {
        let document = document?;
        let own = document.kind.unwrap_or_default();
        let Some(items) = document.items else {
            return Err(Unusable::Other {
                found: format!("an object of kind {own:?} was found where lists are expected"),
            });
        };
        for item in items {
            let item = match item {
                Item::Unsaid(item) => Item::of(own.trim_end_matches("List"), item)?,
                said => said,
            };
            match item {
                Item::Node(node) => dump.nodes.push(*node),
                Item::Pod(pod) => dump.pods.push(*pod),
                Item::Other(kind) if !others.contains(&kind) => others.push(kind),
                Item::Other(_) | Item::Unsaid(_) => {}
            }
        }
    }
    let missing = match (dump.nodes.is_empty(), dump.pods.is_empty()) {
        (false, _) => return Ok(dump),
        (true, false) => "it has pods and no nodes",
        (true, true) => "it has neither nodes nor pods",
    };
    let besides = if others.is_empty() {
        String::new()
    } else {
        format!(", but {}", others.join(", "))
    };
    Err(Unusable::Other {
        found: format!("{missing}{besides}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_both_kinds_and_of_one_are_read() {
        let both = r#"{"kind":"List","items":[{"kind":"Node","metadata":{"name":"n"},"spec":{}},{"kind":"Pod","metadata":{"name":"p"},"spec":{}}]}"#;
        let dump = read(both.as_bytes()).expect("a dump");
        assert_eq!((dump.nodes.len(), dump.pods.len()), (1, 1));
        let one = r#"{"kind":"NodeList","items":[{"metadata":{"name":"n"},"spec":{}}]} {"kind":"PodList","items":[]}"#;
        let dump = read(one.as_bytes()).expect("a dump");
        assert_eq!((dump.nodes.len(), dump.pods.len()), (1, 0));
    }

    #[test]
    fn what_is_no_dump_is_said() {
        for (text, expected) in [
            ("{\"kind\":\"List\",\"items\":[", "it is not JSON as kubectl prints it (EOF"),
            (
                "{\"kind\":\"PodList\",\"items\":[{\"metadata\":{}, \"spec\":{}}]}",
                "it has pods and no nodes; make it by",
            ),
            (
                "{\"kind\":\"List\",\"items\":[{\"kind\":\"Service\"}]}",
                "it has neither nodes nor pods, but Service",
            ),
            (
                "{\"kind\":\"Pod\"}",
                "an object of kind \"Pod\" was found where lists are expected",
            ),
            ("", "it has neither nodes nor pods"),
        ] {
            let error = read(text.as_bytes()).expect_err("unusable").to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
