//! Reads a cluster from the output of `kubectl get nodes,pods -A -o json`. No I/O.

use serde::{Deserialize, Deserializer};

use divvy_kube::list::LeftOut;
use divvy_kube::list::short;
use divvy_kube::objects::{NodeObject, PodObject};
use divvy_kube::slim::{Kind as _, SlimNode, SlimPod};

/// The nodes and pods in a dump.
#[derive(Debug, Default)]
pub struct ClusterDump {
    /// The nodes, in the order of the text.
    pub nodes: Vec<NodeObject>,
    /// The pods, in the order of the text.
    pub pods: Vec<PodObject>,
    /// Nodes and pods that could not be read.
    pub left_out: LeftOut,
}

/// The reason why a text is not a dump.
#[derive(Debug, thiserror::Error)]
pub enum UnusableDump {
    /// The text is not JSON, or is incomplete.
    #[error("it is not JSON as kubectl prints it ({0}); create it with: kubectl get nodes,pods -A -o json")]
    Json(#[from] serde_json::Error),
    /// The text has no nodes.
    #[error("{found}; create it with: kubectl get nodes,pods -A -o json")]
    Other {
        /// What the text contains instead.
        found: String,
    },
}

#[derive(Deserialize)]
struct DumpDocument {
    kind: Option<String>,
    items: Option<Vec<DumpItem>>,
}

/// An item of a list. It is converted as soon as it is parsed, because as a JSON value, it would take many times the memory.
enum DumpItem {
    Node(Box<NodeObject>),
    Pod(Box<PodObject>),
    /// The name of a node or pod that cannot be read, and the reason.
    Unreadable(String, String),
    /// An object of another kind.
    Other(String),
    /// An object that does not state its kind. Its kind follows from the kind of the list.
    Unsaid(serde_json::Value),
}

impl<'de> Deserialize<'de> for DumpItem {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<DumpItem, D::Error> {
        let item = serde_json::Value::deserialize(deserializer)?;
        let kind = item.get("kind").and_then(serde_json::Value::as_str).map(str::to_owned);
        Ok(match kind {
            None => DumpItem::Unsaid(item),
            Some(kind) => DumpItem::of(&kind, item),
        })
    }
}

impl DumpItem {
    fn of(kind: &str, item: serde_json::Value) -> DumpItem {
        let text = |key: &str| item["metadata"][key].as_str().unwrap_or_default().to_owned();
        let name = match (text("namespace"), text("name")) {
            (namespace, name) if namespace.is_empty() => name,
            (namespace, name) => format!("{namespace}/{name}"),
        };
        let read = match kind {
            "Node" => SlimNode::deserialize(item)
                .map_err(|error| error.to_string())
                .and_then(|node| match node.trouble() {
                    None => Ok(DumpItem::Node(Box::new(node.into()))),
                    Some(why) => Err(why),
                }),
            "Pod" => match SlimPod::deserialize(item) {
                Ok(pod) => Ok(DumpItem::Pod(Box::new(pod.into()))),
                Err(error) => Err(error.to_string()),
            },
            other => return DumpItem::Other(other.to_owned()),
        };
        read.unwrap_or_else(|why| DumpItem::Unreadable(format!("{kind} {}", short(&name)), short(&why)))
    }
}

/// Parse one or several lists of nodes, pods, or both.
///
/// # Errors
/// Fails if the text is not JSON or contains no nodes.
pub fn read(text: &[u8]) -> Result<ClusterDump, UnusableDump> {
    let mut dump = ClusterDump::default();
    let mut others: Vec<String> = Vec::new();
    for document in serde_json::Deserializer::from_slice(text).into_iter::<DumpDocument>() {
        let document = document?;
        let own = document.kind.unwrap_or_default();
        let Some(items) = document.items else {
            return Err(UnusableDump::Other {
                found: format!("an object of kind {own:?} was found where lists are expected"),
            });
        };
        for item in items {
            let item = match item {
                DumpItem::Unsaid(item) => DumpItem::of(own.trim_end_matches("List"), item),
                said => said,
            };
            match item {
                DumpItem::Node(node) => dump.nodes.push(*node),
                DumpItem::Pod(pod) => dump.pods.push(*pod),
                DumpItem::Unreadable(name, why) => dump.left_out.add(name, why),
                DumpItem::Other(kind) if !others.contains(&kind) => others.push(kind),
                DumpItem::Other(_) | DumpItem::Unsaid(_) => {}
            }
        }
    }
    let missing = match (dump.nodes.is_empty(), dump.pods.is_empty()) {
        (false, _) => return Ok(dump),
        (true, false) => "it has pods but no nodes",
        (true, true) => "it has neither nodes nor pods",
    };
    let besides = if others.is_empty() {
        String::new()
    } else {
        format!(", but {}", others.join(", "))
    };
    Err(UnusableDump::Other {
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
    fn an_object_that_cannot_be_read_is_named_and_the_rest_is_read() {
        let text = r#"{"kind":"List","items":[{"kind":"Node","metadata":{"name":"n"},"spec":{}},{"kind":"Node","metadata":{"name":"bad"}},
            {"kind":"Node","metadata":{"name":"worse"},"spec":{},"status":{"capacity":{"aliyun.com/gpu-mem":"8 GiB"}}},
            {"kind":"Pod","metadata":{"name":"p","namespace":"ns"},"spec":{"containers":7}}]}"#;
        let dump = read(text.as_bytes()).expect("a dump");
        assert_eq!((dump.nodes.len(), dump.pods.len(), dump.left_out.more), (1, 0, 0));
        let named: Vec<String> = dump
            .left_out
            .named
            .iter()
            .map(|(name, why)| format!("{name}: {why}"))
            .collect();
        insta::assert_snapshot!(named.join("\n"), @r#"
        Node bad: missing field `spec`
        Node worse: status.capacity, aliyun.com/gpu-mem: quantity: "8 GiB" has an unknown suffix
        Pod ns/p: invalid type: integer `7`, expected a sequence
        "#);
    }

    #[test]
    fn what_is_no_dump_is_said() {
        for (text, expected) in [
            ("{\"kind\":\"List\",\"items\":[", "it is not JSON as kubectl prints it (EOF"),
            (
                "{\"kind\":\"PodList\",\"items\":[{\"metadata\":{}, \"spec\":{}}]}",
                "it has pods but no nodes; create it with",
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
