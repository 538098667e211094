//! `divvy simulate --cluster` and `--cluster-dump`.

use std::io::Read as _;
use std::path::Path;

use anyhow::Context as _;
use divvy_cluster::dump::{self, Dump};
use divvy_cluster::{client, convert, list};
use divvy_model::MemoryUnit;
use divvy_simulator::decompress;
use divvy_simulator::what_if::{Change, Cluster, ClusterNode, ClusterPod, what_if};

use super::super::inspect::choice;
use super::{LARGEST, bytes};
use crate::cli::simulate::{SimulateArgs, SimulateOutput};
use crate::printer;
use crate::simulate::cluster::{answer, text};

/// Places the pods of a cluster anew under each policy, and says what would change.
pub(super) async fn run(args: &SimulateArgs) -> anyhow::Result<()> {
    anyhow::ensure!(
        args.output != SimulateOutput::Csv,
        "-o csv has a line for each run of a trace; of a cluster there are a table and -o json"
    );
    let cluster = match &args.cluster_dump {
        Some(path) => {
            let dump = read(path).with_context(|| format!("{} cannot be used", path.display()))?;
            cluster(dump, args.memory_unit)
        }
        None => {
            let connection = client::connect(&choice(&args.access)).await?;
            let mut dump = Dump {
                nodes: list::node_objects(&connection.client).await?,
                pods: Vec::new(),
            };
            list::each_pod(&connection.client, |pod| dump.pods.push(pod)).await?;
            cluster(dump, args.memory_unit)
        }
    };
    let add = args.add_nodes.as_ref().map(|more| (more.count, more.like.clone()));
    let mut outcomes = Vec::new();
    for &policy in &args.policy.0 {
        let change = Change {
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

fn read(path: &Path) -> anyhow::Result<Dump> {
    let packed = if path == Path::new("-") {
        let mut text = Vec::new();
        std::io::stdin().lock().take(LARGEST).read_to_end(&mut text)?;
        text
    } else {
        bytes(path)?
    };
    Ok(dump::read(&decompress("the dump", &packed)?)?)
}

/// Slim objects in the simulator's terms. A pod of which it cannot be read what it asks for is left out, and told.
fn cluster(dump: Dump, unit: MemoryUnit) -> Cluster {
    let nodes = dump.nodes.into_iter().map(|object| ClusterNode {
        node: convert::node(&object),
        labels: object.metadata.labels.unwrap_or_default(),
    });
    let nodes: Vec<ClusterNode> = nodes.collect();
    let pods = dump.pods.into_iter().filter_map(|object| match convert::pod(&object) {
        Ok(pod) => Some(ClusterPod {
            pod,
            created: object.metadata.creation_timestamp.map_or(0, |time| time.0.as_second()),
            selector: object.spec.node_selector,
        }),
        Err(error) => {
            tracing::warn!("a pod is left out: {error}");
            None
        }
    });
    let pods = pods.collect();
    // The cluster's unit is what the agents publish; the flag is for clusters where none does.
    let published = nodes.iter().find_map(|node| match &node.node.inventory {
        Some(Ok(inventory)) => Some(inventory.unit),
        _ => None,
    });
    Cluster {
        unit: published.unwrap_or(unit),
        nodes,
        pods,
    }
}
