//! Keeps the labels of the agent's node up to date.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use divvy_labels::{Labels, NodeFeature, Repairs};
use tracing::{info, warn};

use super::{DescribedHost, FeatureFile, NodeLabels};
use crate::args::LabelsMode;
use crate::nvidia::PublishedFeature;
use crate::own_node::OwnNode;
use crate::publishing::Publishing;
use crate::reports::Reports;
use crate::{AgentConfig, Error, MigStrategyArg};

const RETRY_FIRST: Duration = Duration::from_millis(200);
const RETRY_MAX: Duration = Duration::from_secs(30);
/// The part in `/readyz`.
const PART: &str = "labels";

enum LabelOutput {
    Node(Box<NodeLabels>),
    NodeFeature(Box<PublishedFeature>),
    FeatureFile(FeatureFile),
}

impl LabelOutput {
    async fn write(&mut self, labels: &Labels) -> Result<(), Error> {
        match self {
            LabelOutput::Node(node) => {
                for sentence in node.write(labels).await? {
                    warn!("{sentence}");
                }
                Ok(())
            }
            LabelOutput::NodeFeature(published) => published.write(labels).await,
            LabelOutput::FeatureFile(feature) => {
                let (feature, labels) = (feature.clone(), labels.clone());
                let written = blocking(move || feature.write(&labels)).await?;
                written.map(drop).map_err(|error| {
                    Error::Labels(format!(
                        "the labels cannot be written to the feature file: {error}; the agent needs the node's directory of feature files, and may write \
                         to it with (Helm: agent.labels=feature-file)"
                    ))
                })
            }
        }
    }

    /// Return the keys of the labels that must be written again, because the node has other ones.
    fn undone(&self, wanted: &Labels, on_node: Option<&BTreeMap<String, String>>) -> Vec<String> {
        match (self, on_node) {
            (LabelOutput::Node(node), Some(on_node)) => node.undone(wanted, on_node).into_iter().map(str::to_owned).collect(),
            // Node Feature Discovery writes what the NodeFeature object or the feature file says.
            _ => Vec::new(),
        }
    }

    /// Tell the operator about another program that undoes these labels again and again.
    fn tell_of_fight(&self, undone: &[String]) {
        match self {
            LabelOutput::Node(node) => warn!("{}", node.fight(undone)),
            LabelOutput::NodeFeature(_) => {}
            LabelOutput::FeatureFile(_) => warn!(
                "another program removes or changes {} again and again. It is written again after longer and longer pauses, up to 5 min. Keep \
                 NVIDIA's GPU feature discovery off this node",
                undone.join(", ")
            ),
        }
    }
}

/// Report whether another program has removed or changed the file.
async fn is_undone(feature: &FeatureFile, wanted: &Labels) -> Result<bool, Error> {
    let (feature, wanted) = (feature.clone(), wanted.clone());
    blocking(move || !feature.has(&wanted)).await
}

/// Do work that blocks on files.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Error> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| Error::Ended {
        part: "the work on the labels",
        text: error.to_string(),
    })
}

/// Keep the node's labels equal to what the probe reports. They stay when the agent ends.
pub(crate) async fn publish(
    client: kube::Client,
    node: Arc<OwnNode>,
    publishing: Arc<Publishing>,
    reports: Arc<Reports>,
    config: AgentConfig,
    namespace: String,
) -> Result<(), Error> {
    let mut output = match config.labels {
        LabelsMode::Off => return std::future::pending().await,
        LabelsMode::Node => LabelOutput::Node(Box::new(NodeLabels::new(client, &config.node_name))),
        LabelsMode::NodeFeature => {
            let of = NodeFeature {
                node: config.node_name,
                namespace,
                owners: Vec::new(),
            };
            LabelOutput::NodeFeature(Box::new(PublishedFeature::new(client, of, config.pod_name.as_deref()).await))
        }
        LabelsMode::FeatureFile => LabelOutput::FeatureFile(FeatureFile::below(&config.sys_root)),
    };
    // Only whole MIG devices are named `nvidia.com/gpu` by the strategy `single`. Pods choose a MIG device to share by its profile.
    let strategy = if config.whole_gpus {
        config.mig_strategy
    } else {
        MigStrategyArg::Mixed
    };
    let root = config.sys_root;
    let host = blocking(move || DescribedHost::of_machine(&root)).await?;
    let mut seen = publishing.seen.subscribe();
    let mut on_node = node.labels.subscribe();
    let mut wait = RETRY_FIRST;
    let mut written = None;
    let start = Instant::now();
    let now = || u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX);
    let mut repairs = Repairs::default();
    // What another program has undone, and when to repair it.
    let mut repair: Option<(u64, Vec<String>)> = None;
    loop {
        let found = seen.borrow_and_update().clone();
        let wanted = match found.labels(&host, strategy).transpose() {
            Ok(wanted) => wanted,
            Err(error) => {
                reports.ready.set(PART, format!("the node cannot be labelled: {error}"));
                None
            }
        };
        if let Some(labels) = wanted {
            if written.as_ref() != Some(&labels) {
                match output.write(&labels).await {
                    Ok(()) => {
                        info!("wrote {} labels of the node", labels.labels.len());
                        labels.warnings.iter().for_each(|warning| warn!("{warning}"));
                        wait = RETRY_FIRST;
                        written = Some(labels);
                        if let Some((_, keys)) = repair.take()
                            && repairs.made(now())
                        {
                            output.tell_of_fight(&keys);
                        }
                    }
                    Err(error) => {
                        warn!("{error}; trying again");
                        reports.ready.set(PART, error.to_string());
                        tokio::time::sleep(wait).await;
                        wait = (wait * 2).min(RETRY_MAX);
                        continue;
                    }
                }
            }
            reports.ready.clear(PART);
        }
        let pause = async {
            match &repair {
                Some((due, _)) => tokio::time::sleep(Duration::from_millis(due.saturating_sub(now()))).await,
                None => std::future::pending().await,
            }
        };
        // Both senders live as long as the agent.
        tokio::select! {
            _ = seen.changed() => {
                if let (LabelOutput::FeatureFile(feature), Some(labels)) = (&output, &written) {
                    let is_undone = is_undone(feature, labels).await?;
                    repair = is_undone.then(|| (repairs.due(now()), vec![feature.path().display().to_string()]));
                }
            }
            _ = on_node.changed() => {
                let on_node = on_node.borrow_and_update().clone();
                let undone = written.as_ref().map_or_else(Vec::new, |labels| output.undone(labels, on_node.as_ref()));
                repair = (!undone.is_empty()).then(|| (repairs.due(now()), undone));
            }
            () = pause => {}
        }
        if repair.as_ref().is_some_and(|(due, _)| *due <= now()) {
            written = None;
        }
    }
}
