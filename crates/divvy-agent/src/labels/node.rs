//! Writes labels to the node's object, by server-side apply.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use divvy_kube::in_words;
use divvy_kube::objects::{self, NodeObject};
use divvy_labels::{Labels, MANAGER, node, owners, undone};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry;
use kube::Api;
use kube::api::{Patch, PatchParams};

use crate::Error;

/// The timeout of one request.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How often a write is repeated without the labels of other managers. Each time, other managers would have to take further ones.
const ATTEMPTS: usize = 5;

/// The labels of one node, as this program writes them. Labels of other managers are not changed, and those that this program no
/// longer writes disappear.
#[derive(Debug)]
pub struct NodeLabels {
    nodes: Api<NodeObject>,
    node: String,
    /// The managers of the labels that the last write left out, by key.
    left_out: BTreeMap<String, String>,
    /// The managers that were named to the operator, by key.
    told: BTreeMap<String, String>,
    /// The other manager that has written labels of the node last, if the last write has found one.
    rival: Option<String>,
}

enum LabelRefusal {
    /// Other managers own labels with other values.
    Owned(BTreeMap<String, String>),
    Failed(Error),
}

impl NodeLabels {
    /// Return the labels of a node. This sends no request.
    pub fn new(client: kube::Client, node: &str) -> NodeLabels {
        NodeLabels {
            nodes: Api::all_with(client, &objects::nodes()),
            node: node.to_owned(),
            left_out: BTreeMap::new(),
            told: BTreeMap::new(),
            rival: None,
        }
    }

    /// Write the labels. Return a sentence for each other manager that owns some of them with other values, unless an earlier write
    /// has returned the same.
    ///
    /// # Errors
    /// The node does not exist, the right to write its labels is missing, or the API server does not answer.
    pub async fn write(&mut self, labels: &Labels) -> Result<Vec<String>, Error> {
        let uid = self.uid().await?;
        let mut own = labels.labels.clone();
        let mut left_out = BTreeMap::new();
        for _ in 0..ATTEMPTS {
            match self.apply(&own, &uid).await {
                Ok(()) => {
                    let news = self.sentences(&left_out);
                    self.told.extend(left_out.clone());
                    self.left_out = left_out;
                    return Ok(news);
                }
                Err(LabelRefusal::Owned(theirs)) => {
                    own.retain(|key, _| !theirs.contains_key(key));
                    left_out.extend(theirs);
                }
                Err(LabelRefusal::Failed(error)) => return Err(error),
            }
        }
        Err(Error::Labels(format!(
            "the labels of node {} cannot be written: other programs change them at the same time",
            self.node
        )))
    }

    /// Return the keys of the labels that must be written again to a node that has the labels `on_node`.
    pub(super) fn undone<'w>(&self, wanted: &'w Labels, on_node: &BTreeMap<String, String>) -> Vec<&'w str> {
        let left_out: BTreeSet<String> = self.left_out.keys().cloned().collect();
        undone(&wanted.labels, on_node, &left_out)
    }

    /// Return a sentence about labels that another program has undone again.
    pub(super) fn fight(&self, keys: &[String]) -> String {
        let node = &self.node;
        let rival = match &self.rival {
            Some(manager) => {
                format!("By the node's managedFields, the other program that has written labels of the node last is {manager:?}")
            }
            None => "The node's managedFields name no such program".to_owned(),
        };
        format!(
            "another program removes or overwrites labels of node {node} again and again: {}. They are written again after longer and \
             longer pauses, up to 5 min. {rival}; to see them, type kubectl get node {node} -o yaml --show-managed-fields",
            keys.join(", ")
        )
    }

    async fn uid(&mut self) -> Result<String, Error> {
        match tokio::time::timeout(TIMEOUT, self.nodes.get_metadata(&self.node)).await {
            Ok(Ok(found)) => {
                self.rival = last_other_writer(found.metadata.managed_fields.unwrap_or_default());
                Ok(found.metadata.uid.unwrap_or_default())
            }
            Ok(Err(error)) => Err(self.failed(&error)),
            Err(_) => Err(self.silent()),
        }
    }

    async fn apply(&self, labels: &BTreeMap<String, String>, uid: &str) -> Result<(), LabelRefusal> {
        let body = node(labels, &self.node, uid);
        let (params, patch) = (PatchParams::apply(MANAGER), Patch::Apply(&body));
        let request = self.nodes.patch_metadata(&self.node, &params, &patch);
        let error = match tokio::time::timeout(TIMEOUT, request).await {
            Ok(Ok(_)) => return Ok(()),
            Ok(Err(error)) => error,
            Err(_) => return Err(LabelRefusal::Failed(self.silent())),
        };
        let theirs = match &error {
            kube::Error::Api(status) if status.code == 409 => {
                let causes = status.details.iter().flat_map(|details| &details.causes);
                owners(causes.map(|cause| (cause.field.as_str(), cause.message.as_str())))
            }
            _ => BTreeMap::new(),
        };
        Err(if theirs.is_empty() {
            LabelRefusal::Failed(self.failed(&error))
        } else {
            LabelRefusal::Owned(theirs)
        })
    }

    fn failed(&self, error: &kube::Error) -> Error {
        let code = match error {
            kube::Error::Api(status) => status.code,
            _ => 0,
        };
        let node = &self.node;
        let text = in_words(error);
        Error::Labels(match code {
            404 => format!(
                "node {node} does not exist, so no labels were written; to see the names of the nodes, type kubectl get nodes"
            ),
            403 => format!(
                "the labels of node {node} cannot be written: {text}; this needs the rights to get and patch nodes, which agents have with (Helm: \
                 agent.labels=node); to see yours, type kubectl auth can-i patch nodes"
            ),
            _ => format!("the labels of node {node} cannot be written: {text}"),
        })
    }

    fn silent(&self) -> Error {
        Error::Labels(format!(
            "the labels of node {} cannot be written: the API server does not answer",
            self.node
        ))
    }

    fn sentences(&self, left_out: &BTreeMap<String, String>) -> Vec<String> {
        let mut by_manager: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (key, manager) in left_out {
            if self.told.get(key) != Some(manager) {
                by_manager.entry(manager).or_default().push(key);
            }
        }
        let sentence = |(manager, keys): (&str, Vec<&str>)| {
            let node = &self.node;
            format!(
                "{manager:?} owns labels of node {node} with other values, and they stay as they are: {}. To have this program write them, remove them: \
                 kubectl label node {node} {}",
                keys.join(", "),
                keys.iter().map(|key| format!("{key}-")).collect::<Vec<_>>().join(" ")
            )
        };
        by_manager.into_iter().map(sentence).collect()
    }
}

/// Return the manager, except this program, that has written labels last. The status of a node is not of interest.
fn last_other_writer(entries: Vec<ManagedFieldsEntry>) -> Option<String> {
    let has_labels = |entry: &ManagedFieldsEntry| {
        let fields = entry.fields_v1.as_ref().map(|fields| &fields.0);
        fields.is_some_and(|fields| fields.pointer("/f:metadata/f:labels").is_some())
    };
    let others = entries.into_iter().filter(|entry| entry.manager.as_deref() != Some(MANAGER));
    let writers = others.filter(|entry| entry.subresource.is_none() && has_labels(entry));
    writers.max_by(|a, b| a.time.cmp(&b.time)).and_then(|entry| entry.manager)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_rival_is_the_last_other_manager_that_has_written_labels() {
        let entry = |manager: &str, hour: u32, subresource: Option<&str>, fields: &str| {
            let value = json!({
                "manager": manager, "time": format!("2026-11-21T{hour:02}:00:00Z"), "subresource": subresource,
                "fieldsV1": {"f:metadata": {fields: {"f:a": {}}}},
            });
            serde_json::from_value(value).expect("an entry")
        };
        let mut entries = vec![
            entry(MANAGER, 9, None, "f:labels"),
            entry("kubelet", 8, Some("status"), "f:labels"),
            entry("annotator", 7, None, "f:annotations"),
        ];
        assert_eq!(last_other_writer(entries.clone()), None);
        entries.extend([("cleaner", 6), ("kubectl-label", 5)].map(|(manager, hour)| entry(manager, hour, None, "f:labels")));
        assert_eq!(last_other_writer(entries).as_deref(), Some("cleaner"));
    }
}
