//! Keeps the labels of the agent's node up to date.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use divvy_labels::{Labels, NodeFeature, Repairs};
use tracing::{info, warn};

use super::{Host, NodeLabels};
use crate::agent::Agent;
use crate::args::LabelsMode;
use crate::nvidia::Published;
use crate::{Config, Error, MigStrategy};

const RETRY_FIRST: Duration = Duration::from_millis(200);
const RETRY_MAX: Duration = Duration::from_secs(30);
/// The part in `/readyz`.
const PART: &str = "labels";

enum Output {
    Node(Box<NodeLabels>),
    NodeFeature(Box<Published>),
}

impl Output {
    async fn write(&mut self, labels: &Labels) -> Result<(), Error> {
        match self {
            Output::Node(node) => {
                for sentence in node.write(labels).await? {
                    warn!("{sentence}");
                }
                Ok(())
            }
            Output::NodeFeature(published) => published.write(labels).await,
        }
    }

    /// Return the keys of the labels that must be written again, because the node has other ones.
    fn undone(&self, wanted: &Labels, on_node: Option<&BTreeMap<String, String>>) -> Vec<String> {
        match (self, on_node) {
            (Output::Node(node), Some(on_node)) => node.undone(wanted, on_node).into_iter().map(str::to_owned).collect(),
            // Node Feature Discovery writes what the NodeFeature object says.
            _ => Vec::new(),
        }
    }

    /// Tell the operator about another program that undoes these labels again and again.
    fn tell_of_fight(&self, keys: &[String]) {
        if let Output::Node(node) = self {
            warn!("{}", node.fight(keys));
        }
    }
}

/// Keep the node's labels equal to what the probe reports. They stay when the agent ends.
pub(crate) async fn publish(agent: Arc<Agent>, config: Config, namespace: String) -> Result<(), Error> {
    let mut output = match config.labels {
        LabelsMode::Off => return std::future::pending().await,
        LabelsMode::Node => Output::Node(Box::new(NodeLabels::new(agent.client(), &config.node_name))),
        LabelsMode::NodeFeature => {
            let of = NodeFeature {
                node: config.node_name,
                namespace,
                owners: Vec::new(),
            };
            Output::NodeFeature(Box::new(Published::new(agent.client(), of, config.pod_name.as_deref()).await))
        }
    };
    // Only whole MIG devices are named `nvidia.com/gpu` by the strategy `single`. Pods choose a MIG device to share by its profile.
    let strategy = match config.whole_gpus {
        true => config.mig_strategy,
        false => MigStrategy::Mixed,
    };
    let root = config.sys_root;
    let host = tokio::task::spawn_blocking(move || Host::of_machine(&root)).await;
    let host = host.map_err(|error| Error::Ended {
        part: "the description of the machine",
        text: error.to_string(),
    })?;
    let mut seen = agent.seen.subscribe();
    let mut on_node = agent.labels_on_node.subscribe();
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
                agent.ready.set(PART, format!("the node cannot be labelled: {error}"));
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
                        agent.ready.set(PART, error.to_string());
                        tokio::time::sleep(wait).await;
                        wait = (wait * 2).min(RETRY_MAX);
                        continue;
                    }
                }
            }
            agent.ready.clear(PART);
        }
        let pause = async {
            match &repair {
                Some((due, _)) => tokio::time::sleep(Duration::from_millis(due.saturating_sub(now()))).await,
                None => std::future::pending().await,
            }
        };
        // Both senders live as long as the agent.
        tokio::select! {
            _ = seen.changed() => {}
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
