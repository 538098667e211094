use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};

use divvy_kube::objects::PodObject;
use divvy_placement::NodeRefusal;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::value::RawValue;

use crate::core::{BindArgs, Eviction, FilterAnswer};

/// Why a request of kube-scheduler cannot be read. The texts about missing parts of a filter request are gpushare's.
#[derive(Debug, thiserror::Error)]
pub(super) enum UnreadableRequest {
    #[error("the request is not a JSON object: {0}")]
    NotAnObject(serde_json::Error),
    #[error("field {name} of the request cannot be read: {error}")]
    Field { name: &'static str, error: serde_json::Error },
    #[error("arg or pod is nil")]
    NoPod,
    #[error("cannot get node names")]
    NoNodes,
    #[error("a node in Nodes of the request has no name: {0}")]
    NamelessNode(serde_json::Error),
    #[error("the request names the node {0:?} twice; send each node once, as kube-scheduler does")]
    NodeTwice(String),
    #[error("the request has neither NodeNameToMetaVictims nor NodeNameToVictims")]
    NoVictims,
    #[error(
        "{field} of the request is {text:?}, which cannot be the name of an object; send PodName, PodNamespace, PodUID and Node, as \
         kube-scheduler does"
    )]
    NotAName { field: &'static str, text: String },
}

/// Split a JSON object into its fields: the lower-cased names, and the values, which are not parsed yet. kube-scheduler sends
/// Go's field names, but up to 1.16 it sent lower-case names, and Go's decoder ignores the case. The values (pods, nodes) are
/// ordinary Kubernetes JSON, where the case matters.
fn fields(body: &[u8]) -> Result<BTreeMap<String, &RawValue>, UnreadableRequest> {
    let outer: BTreeMap<Cow<'_, str>, &RawValue> = serde_json::from_slice(body).map_err(UnreadableRequest::NotAnObject)?;
    Ok(outer
        .into_iter()
        .map(|(name, value)| (name.to_ascii_lowercase(), value))
        .collect())
}

/// Parse one field. `null` is the same as absent.
fn field<'a, T: Deserialize<'a>>(
    fields: &BTreeMap<String, &'a RawValue>,
    name: &'static str,
) -> Result<Option<T>, UnreadableRequest> {
    match fields.get(&name.to_ascii_lowercase()) {
        None => Ok(None),
        Some(raw) => serde_json::from_str(raw.get()).map_err(|error| UnreadableRequest::Field { name, error }),
    }
}

/// kube-scheduler's `ExtenderArgs`, for filter and prioritize.
#[derive(Debug)]
pub(super) struct FilterArgs<'a> {
    pub(super) pod: PodObject,
    pub(super) nodes: RequestNodes<'a>,
}

/// The nodes of a request.
#[derive(Debug)]
pub(super) enum RequestNodes<'a> {
    /// Names only: `nodeCacheCapable: true`.
    Names(Vec<BorrowedName<'a>>),
    /// Whole objects, which are returned unchanged: `nodeCacheCapable: false`.
    Objects {
        metadata: Option<&'a RawValue>,
        items: Vec<(String, &'a RawValue)>,
    },
}

/// A name borrowed from the request body. It is copied only if it contains JSON escapes, and no node name does.
#[derive(Debug, Deserialize)]
pub(super) struct BorrowedName<'a>(#[serde(borrow)] Cow<'a, str>);

impl RequestNodes<'_> {
    pub(super) fn names(&self) -> impl Iterator<Item = &str> + Clone {
        let count = match self {
            RequestNodes::Names(names) => names.len(),
            RequestNodes::Objects { items, .. } => items.len(),
        };
        (0..count).map(|position| self.name(position))
    }

    fn name(&self, position: usize) -> &str {
        let name = match self {
            RequestNodes::Names(names) => names.get(position).map(|name| name.0.as_ref()),
            RequestNodes::Objects { items, .. } => items.get(position).map(|(name, _)| name.as_str()),
        };
        name.unwrap_or_default()
    }
}

/// Parse a filter request.
pub(super) fn filter_args(body: &[u8]) -> Result<FilterArgs<'_>, UnreadableRequest> {
    #[derive(Deserialize)]
    struct NodeList<'a> {
        #[serde(borrow, default)]
        metadata: Option<&'a RawValue>,
        #[serde(borrow, default)]
        items: Option<Vec<&'a RawValue>>,
    }
    #[derive(Deserialize)]
    struct NamedNode {
        metadata: NameMeta,
    }
    #[derive(Deserialize)]
    struct NameMeta {
        name: String,
    }
    let fields = fields(body)?;
    let pod = field(&fields, "Pod")?.ok_or(UnreadableRequest::NoPod)?;
    let nodes = if let Some(names) = field(&fields, "NodeNames")? {
        RequestNodes::Names(names)
    } else if let Some(list) = field::<NodeList<'_>>(&fields, "Nodes")? {
        let items = list.items.unwrap_or_default().into_iter();
        let named: Result<Vec<_>, UnreadableRequest> = items
            .map(|raw| {
                let node: NamedNode = serde_json::from_str(raw.get()).map_err(UnreadableRequest::NamelessNode)?;
                Ok((node.metadata.name, raw))
            })
            .collect();
        RequestNodes::Objects {
            metadata: list.metadata,
            items: named?,
        }
    } else {
        return Err(UnreadableRequest::NoNodes);
    };
    // In the response, the names of nodes are keys of an object.
    let mut known = HashSet::with_capacity(nodes.names().size_hint().0);
    if let Some(name) = nodes.names().find(|name| !known.insert(*name)) {
        return Err(UnreadableRequest::NodeTwice(name.to_owned()));
    }
    Ok(FilterArgs { pod, nodes })
}

/// Parse `ExtenderPreemptionArgs`: the pod, and for each node the pods to evict for it, as UIDs (`nodeCacheCapable: true`) or as whole pods.
pub(super) fn preemption_args(body: &[u8]) -> Result<(PodObject, Vec<Eviction>), UnreadableRequest> {
    #[derive(Deserialize)]
    struct NodeVictims<P> {
        #[serde(rename = "Pods")]
        pods: Option<Vec<P>>,
        #[serde(rename = "NumPDBViolations", default)]
        pdb_violations: i64,
    }
    #[derive(Deserialize)]
    struct Uid {
        #[serde(rename = "UID")]
        uid: String,
    }
    #[derive(Deserialize)]
    struct WholeVictim {
        metadata: UidMeta,
    }
    #[derive(Deserialize)]
    struct UidMeta {
        uid: String,
    }
    fn evictions<P>(map: BTreeMap<String, NodeVictims<P>>, uid: impl Fn(P) -> String) -> Vec<Eviction> {
        let eviction = |(node, victims): (String, NodeVictims<P>)| Eviction {
            node,
            victims: victims.pods.unwrap_or_default().into_iter().map(&uid).collect(),
            pdb_violations: victims.pdb_violations,
        };
        map.into_iter().map(eviction).collect()
    }
    let fields = fields(body)?;
    let pod = field(&fields, "Pod")?.ok_or(UnreadableRequest::NoPod)?;
    if let Some(map) = field(&fields, "NodeNameToMetaVictims")? {
        return Ok((pod, evictions(map, |Uid { uid }| uid)));
    }
    let map = field(&fields, "NodeNameToVictims")?;
    let map = map.ok_or(UnreadableRequest::NoVictims)?;
    Ok((pod, evictions(map, |whole: WholeVictim| whole.metadata.uid)))
}

/// kube-scheduler's `ExtenderPreemptionResult`. It contains UIDs, even if the request contained whole pods.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct PreemptionResult {
    node_name_to_meta_victims: BTreeMap<String, MetaVictims>,
}

#[derive(Debug, Serialize)]
struct MetaVictims {
    #[serde(rename = "Pods")]
    pods: Vec<MetaPod>,
    #[serde(rename = "NumPDBViolations")]
    pdb_violations: i64,
}

#[derive(Debug, Serialize)]
struct MetaPod {
    #[serde(rename = "UID")]
    uid: String,
}

impl PreemptionResult {
    pub(super) fn new(evictions: Vec<Eviction>) -> PreemptionResult {
        let victims = |eviction: Eviction| {
            let pods = eviction.victims.into_iter().map(|uid| MetaPod { uid }).collect();
            let pdb_violations = eviction.pdb_violations;
            (eviction.node, MetaVictims { pods, pdb_violations })
        };
        PreemptionResult {
            node_name_to_meta_victims: evictions.into_iter().map(victims).collect(),
        }
    }
}

/// Parse a bind request. The names become part of a URL, so anything that cannot be a name is an error.
pub(super) fn bind_args(body: &[u8]) -> Result<BindArgs, UnreadableRequest> {
    let fields = fields(body)?;
    let name = |name: &'static str| -> Result<String, UnreadableRequest> {
        let text: String = field(&fields, name)?.unwrap_or_default();
        let legal = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-' || byte == b'.';
        if text.is_empty() || text.len() > 253 || !text.bytes().all(legal) || text.starts_with('.') {
            return Err(UnreadableRequest::NotAName { field: name, text });
        }
        Ok(text)
    };
    let args = BindArgs {
        pod_name: name("PodName")?,
        pod_namespace: name("PodNamespace")?,
        node: name("Node")?,
        pod_uid: field(&fields, "PodUID")?.unwrap_or_default(),
    };
    Ok(args)
}

/// kube-scheduler's `ExtenderFilterResult`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct FilterResult<'a> {
    nodes: Option<NodeListOut<'a>>,
    node_names: Option<Vec<&'a str>>,
    failed_nodes: Option<Failed<'a>>,
    failed_and_unresolvable_nodes: Option<BTreeMap<String, String>>,
    error: String,
}

#[derive(Debug, Serialize)]
struct NodeListOut<'a> {
    metadata: Cow<'a, RawValue>,
    items: Option<Vec<&'a RawValue>>,
}

/// `FailedNodes`: names and reasons, serialized without copying either.
#[derive(Debug)]
struct Failed<'a> {
    nodes: &'a RequestNodes<'a>,
    refusals: &'a [(usize, NodeRefusal)],
}

impl Serialize for Failed<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.refusals.iter().map(|(position, refusal)| {
            let name = self.nodes.name(*position);
            (name, refusal.filter_text(name))
        }))
    }
}

impl<'a> FilterResult<'a> {
    pub(super) fn error(text: impl ToString) -> FilterResult<'a> {
        FilterResult {
            nodes: None,
            node_names: None,
            failed_nodes: None,
            failed_and_unresolvable_nodes: None,
            error: text.to_string(),
        }
    }

    /// Make the result from the nodes that passed: their names, and also the objects if the request had objects. kube-scheduler only
    /// accepts nodes that it sent.
    pub(super) fn new(nodes: &'a RequestNodes<'a>, answer: &'a FilterAnswer) -> FilterResult<'a> {
        let objects = match nodes {
            RequestNodes::Names(_) => None,
            RequestNodes::Objects { metadata, items } => {
                let passed = answer.passed.iter().filter_map(|i| items.get(*i));
                let objects: Vec<&'a RawValue> = passed.map(|(_, raw)| *raw).collect();
                Some(NodeListOut {
                    metadata: metadata.map_or_else(|| Cow::Owned(empty_object()), Cow::Borrowed),
                    items: Some(objects).filter(|objects| !objects.is_empty()),
                })
            }
        };
        FilterResult {
            nodes: objects,
            node_names: Some(answer.passed.iter().map(|i| nodes.name(*i)).collect()),
            failed_nodes: Some(Failed {
                nodes,
                refusals: &answer.failed,
            }),
            failed_and_unresolvable_nodes: None,
            error: String::new(),
        }
    }
}

/// kube-scheduler's `HostPriorityList`, serialized without copying the names.
#[derive(Debug)]
pub(super) struct Priorities<'a> {
    pub(super) nodes: &'a RequestNodes<'a>,
    /// The scores, in the order of the nodes.
    pub(super) scores: &'a [u8],
}

impl Serialize for Priorities<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        #[serde(rename_all = "PascalCase")]
        struct HostPriority<'a> {
            host: &'a str,
            score: u8,
        }
        let pairs = self.nodes.names().zip(self.scores);
        serializer.collect_seq(pairs.map(|(host, score)| HostPriority { host, score: *score }))
    }
}

fn empty_object() -> Box<RawValue> {
    RawValue::from_string("{}".to_owned()).expect("an empty object is JSON")
}

/// kube-scheduler's `ExtenderBindingResult`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct BindResult {
    pub(super) error: String,
}
