//! Writes labels to the node's object, by server-side apply.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use divvy_kube::in_words;
use divvy_kube::objects::{self, NodeObject};
use divvy_labels::{Labels, MANAGER, must_be_written, node, owners};
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
}

enum Refusal {
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
                    self.left_out = left_out;
                    return Ok(news);
                }
                Err(Refusal::Owned(theirs)) => {
                    own.retain(|key, _| !theirs.contains_key(key));
                    left_out.extend(theirs);
                }
                Err(Refusal::Failed(error)) => return Err(error),
            }
        }
        Err(Error::Labels(format!(
            "the labels of node {} cannot be written: other programs change them at the same time",
            self.node
        )))
    }

    /// Report whether the labels must be written to a node that has the labels `on_node`.
    pub(super) fn must_be_written(&self, wanted: &Labels, on_node: &BTreeMap<String, String>) -> bool {
        let left_out: BTreeSet<String> = self.left_out.keys().cloned().collect();
        must_be_written(&wanted.labels, on_node, &left_out)
    }

    async fn uid(&self) -> Result<String, Error> {
        match tokio::time::timeout(TIMEOUT, self.nodes.get_metadata(&self.node)).await {
            Ok(Ok(found)) => Ok(found.metadata.uid.unwrap_or_default()),
            Ok(Err(error)) => Err(self.failed(&error)),
            Err(_) => Err(self.silent()),
        }
    }

    async fn apply(&self, labels: &BTreeMap<String, String>, uid: &str) -> Result<(), Refusal> {
        let body = node(labels, &self.node, uid);
        let (params, patch) = (PatchParams::apply(MANAGER), Patch::Apply(&body));
        let request = self.nodes.patch_metadata(&self.node, &params, &patch);
        let error = match tokio::time::timeout(TIMEOUT, request).await {
            Ok(Ok(_)) => return Ok(()),
            Ok(Err(error)) => error,
            Err(_) => return Err(Refusal::Failed(self.silent())),
        };
        let theirs = match &error {
            kube::Error::Api(status) if status.code == 409 => {
                let causes = status.details.iter().flat_map(|details| &details.causes);
                owners(causes.map(|cause| (cause.field.as_str(), cause.message.as_str())))
            }
            _ => BTreeMap::new(),
        };
        Err(match theirs.is_empty() {
            true => Refusal::Failed(self.failed(&error)),
            false => Refusal::Owned(theirs),
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
            if self.left_out.get(key) != Some(manager) {
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
