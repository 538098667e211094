//! `divvy simulate --cluster` and `--cluster-dump`: reads a cluster, and prints what would change in it.

use std::io::Read as _;
use std::path::Path;

use crate::simulate::dump::{self, ClusterDump};
use anyhow::Context as _;
use divvy_kube::list::LeftOut;
use divvy_kube::objects::{NodeObject, PodObject};
use divvy_kube::{client, convert, list};
use divvy_model::{Held, MemoryUnit};
use divvy_simulator::decompress;
use divvy_simulator::what_if::{ClusterNode, ClusterPod, CurrentCluster, SimulatedChange, what_if};

use super::super::inspect::{access, warn_left_out};
use super::super::progress::Arrived;
use super::{LARGEST, bytes};
use crate::cli::simulate::{SimulateArgs, SimulateOutput};
use crate::printer;
use crate::simulate::cluster::{answer, text};

/// Place the pods of a cluster again under each policy, and print what would change.
pub(super) async fn run(args: &SimulateArgs) -> anyhow::Result<()> {
    anyhow::ensure!(
        args.output != SimulateOutput::Csv,
        "-o csv has a line for each run of a trace; for a cluster, use -o table or -o json"
    );
    let cluster = match &args.cluster_dump {
        Some(path) => {
            let dump = read(path).with_context(|| format!("{} cannot be used", path.display()))?;
            let mut found = FoundCluster::default();
            let mut unreadable = LeftOut::default();
            found.nodes.extend(dump.nodes.into_iter().map(node));
            for object in dump.pods {
                let name = list::name(&object);
                match pod(object) {
                    Ok(pod) => found.pods.push(pod),
                    Err(error) => unreadable.add(name, error.to_string()),
                }
            }
            warn_left_out("object", &dump.left_out);
            warn_left_out("pod", &unreadable);
            found.cluster(args.memory_unit)
        }
        None => {
            let connection = client::connect(&access(&args.access)).await?;
            let client = &connection.client;
            let (arrived, mut found) = (Arrived::default(), FoundCluster::default());
            let FoundCluster { nodes, pods } = &mut found;
            let all_nodes = list::each_node(client, node, |node| {
                arrived.node();
                nodes.push(node);
            });
            let all_pods = list::each_pod(client, None, pod, |pod| {
                arrived.pod();
                pods.push(pod);
            });
            let (no_nodes, no_pods) = arrived.shown(async { tokio::try_join!(all_nodes, all_pods) }).await?;
            warn_left_out("node", &no_nodes);
            warn_left_out("pod", &no_pods);
            found.cluster(args.memory_unit)
        }
    };
    let add = args.add_nodes.as_ref().map(|more| (more.count, more.like.clone()));
    let mut outcomes = Vec::new();
    for &policy in &args.policy.0 {
        let change = SimulatedChange {
            policy,
            unit: args.unit_mib,
            add: add.clone(),
            keep_bound: args.keep_bound,
        };
        outcomes.push(what_if(&cluster, &change)?);
    }
    let answer = answer(&cluster, &outcomes);
    match args.output {
        SimulateOutput::Json => printer::json(&answer)?,
        SimulateOutput::Table | SimulateOutput::Csv => printer::text(&text(&answer))?,
    }
    Ok(())
}

fn read(path: &Path) -> anyhow::Result<ClusterDump> {
    let packed = if path == Path::new("-") {
        let mut text = Vec::new();
        std::io::stdin().lock().take(LARGEST).read_to_end(&mut text)?;
        text
    } else {
        bytes(path)?
    };
    Ok(dump::read(&decompress("the dump", &packed)?)?)
}

/// The cluster's nodes and pods, in the simulator's types.
#[derive(Default)]
struct FoundCluster {
    nodes: Vec<ClusterNode>,
    pods: Vec<ClusterPod>,
}

fn node(object: NodeObject) -> ClusterNode {
    ClusterNode {
        node: convert::node(&object),
        labels: object.metadata.labels.unwrap_or_default(),
    }
}

fn pod(object: PodObject) -> Result<ClusterPod, divvy_model::Error> {
    let mut pod = convert::pod(&object)?;
    // The ledger does not read the containers' parts of an allocation, which take more memory than the rest of the pod.
    if let Held::Allocation(allocation) = &mut pod.held {
        allocation.containers.clear();
    }
    Ok(ClusterPod {
        pod,
        created: object.metadata.creation_timestamp.map_or(0, |time| time.0.as_second()),
        selector: object.spec.node_selector,
    })
}

impl FoundCluster {
    fn cluster(self, unit: MemoryUnit) -> CurrentCluster {
        // The agents publish the cluster's unit; the flag is for clusters whose agents do not.
        let published = self.nodes.iter().find_map(|node| match &node.node.inventory {
            Some(Ok(inventory)) => Some(inventory.unit),
            _ => None,
        });
        CurrentCluster {
            unit: published.unwrap_or(unit),
            nodes: self.nodes,
            pods: self.pods,
        }
    }
}
