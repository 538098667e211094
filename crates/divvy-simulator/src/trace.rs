use std::collections::BTreeSet;

use divvy_policy::{Demand, DemandShare, MOST_GPUS, Mix, ModelSet, Models, NodeShape};
use serde::Deserialize;

use crate::Error;
use crate::text::decompress;

/// A node of a trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceNode {
    /// The node's name.
    pub name: String,
    /// What the node has when it is empty. The size of a GPU is 1000.
    pub shape: NodeShape,
}

/// A pod of a trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TracePod {
    /// The pod's name.
    pub name: String,
    /// The pod's request.
    pub demand: Demand,
    /// When the pod was created, in seconds. `None` if the trace does not say.
    pub created: Option<u64>,
    /// How long the pod existed, in seconds. `None` if the trace does not say.
    pub seconds: Option<u64>,
}

impl TracePod {
    /// Return the GPU capacity that the pod requests in total, in thousandths of a GPU.
    pub fn gpu_milli(&self) -> u64 {
        match self.demand.share {
            DemandShare::Milli(milli) => u64::from(milli) * u64::from(self.demand.gpus),
            DemandShare::Memory(_) => 0,
        }
    }
}

/// A cluster, and the pods that were submitted to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    /// The nodes, in the order of the list.
    pub nodes: Vec<TraceNode>,
    /// The pods, in the order of the list.
    pub pods: Vec<TracePod>,
}

const NODE_COLUMNS: &str = "node list: sn, cpu_milli, memory_mib, gpu, model";
const POD_COLUMNS: &str =
    "pod lists: name, cpu_milli, memory_mib, num_gpu, gpu_milli and, if you have them, gpu_spec, creation_time, deletion_time";

#[derive(Debug, Deserialize)]
struct NodeRow {
    sn: String,
    cpu_milli: u32,
    memory_mib: u32,
    gpu: u8,
    #[serde(default)]
    model: String,
}

#[derive(Debug, Deserialize)]
struct PodRow {
    name: String,
    cpu_milli: u32,
    memory_mib: u32,
    num_gpu: u8,
    gpu_milli: u16,
    #[serde(default)]
    gpu_spec: String,
    #[serde(default)]
    creation_time: Option<u64>,
    #[serde(default)]
    deletion_time: Option<u64>,
}

impl PodRow {
    /// Return the products that the pod may use. If there are none, it may use any product.
    fn models(&self) -> impl Iterator<Item = &str> {
        self.gpu_spec.split('|').map(str::trim).filter(|name| !name.is_empty())
    }
}

impl Trace {
    /// Read a list of nodes and a list of pods, each plain or compressed with gzip.
    ///
    /// # Errors
    ///
    /// The [`Error`] names the list, the line, what was found there, and what is allowed.
    pub fn read(nodes: &[u8], pods: &[u8]) -> Result<Trace, Error> {
        let nodes = rows::<NodeRow>("the node list", nodes, NODE_COLUMNS)?;
        let pods = rows::<PodRow>("the pod list", pods, POD_COLUMNS)?;
        // Products get their numbers in the order of their names, so that nothing depends on the order of the lists.
        let mut models = Models::default();
        let names: BTreeSet<&str> = nodes.iter().map(|row| row.model.as_str()).collect();
        let wanted: BTreeSet<&str> = pods.iter().flat_map(PodRow::models).collect();
        for name in names.into_iter().chain(wanted) {
            models.number(name);
        }
        let nodes = nodes.into_iter().map(|row| node(row, &mut models));
        let nodes = nodes.collect::<Result<_, _>>()?;
        let pods = pods.into_iter().map(|row| pod(row, &mut models));
        let pods = pods.collect::<Result<_, _>>()?;
        Ok(Trace { nodes, pods })
    }

    /// Return the GPU capacity of all nodes, in thousandths of a GPU.
    pub fn capacity_milli(&self) -> u64 {
        self.nodes.iter().map(|node| u64::from(node.shape.gpus) * 1000).sum()
    }

    /// Return how often each class of pods is in the list.
    pub fn mix(&self) -> Mix {
        self.pods.iter().map(|pod| &pod.demand).collect()
    }

    /// Repeat the nodes, so that each exists `times` times. The name of a copy is the name of the original node with a number.
    /// The pods stay the same.
    pub fn repeat_nodes(&mut self, times: usize) {
        let originals = self.nodes.clone();
        for copy in 1..times {
            self.nodes.extend(originals.iter().map(|node| TraceNode {
                name: format!("{}-{copy}", node.name),
                shape: node.shape,
            }));
        }
    }
}

fn rows<T: for<'de> Deserialize<'de>>(what: &str, bytes: &[u8], example: &'static str) -> Result<Vec<T>, Error> {
    let text = decompress(what, bytes)?;
    let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(&*text);
    let rows: Result<Vec<T>, csv::Error> = reader.deserialize().collect();
    let wrong = |why: String| Error::Table {
        what: what.to_owned(),
        why,
        example,
    };
    match rows {
        Ok(rows) if rows.is_empty() => Err(wrong("it has no rows".to_owned())),
        Ok(rows) => Ok(rows),
        Err(error) => Err(wrong(error.to_string())),
    }
}

fn node(row: NodeRow, models: &mut Models) -> Result<TraceNode, Error> {
    let wrong = |why: String| Error::Value {
        what: "the node list".to_owned(),
        whose: format!("node {}", row.sn),
        why,
    };
    if usize::from(row.gpu) > MOST_GPUS {
        return Err(wrong(format!(
            "{} GPUs; at most {MOST_GPUS} can be simulated on a node",
            row.gpu
        )));
    }
    let most = || wrong(format!("more than {} GPU models", Models::MOST));
    let shape = NodeShape {
        model: models.number(&row.model).ok_or_else(most)?,
        gpus: row.gpu,
        gpu_size: 1000,
        cpu_milli: row.cpu_milli,
        memory_mib: row.memory_mib,
    };
    Ok(TraceNode { name: row.sn, shape })
}

fn pod(row: PodRow, models: &mut Models) -> Result<TracePod, Error> {
    let wrong = |why: String| Error::Value {
        what: "the pod list".to_owned(),
        whose: format!("pod {}", row.name),
        why,
    };
    match (row.num_gpu, row.gpu_milli) {
        (0, _) | (1, 1..=1000) | (2.., 1000) => {}
        (1, milli) => return Err(wrong(format!("gpu_milli is {milli}; a part of a GPU is 1 to 1000"))),
        (gpus, milli) => {
            return Err(wrong(format!(
                "gpu_milli is {milli} with {gpus} GPUs; with several GPUs it must be 1000"
            )));
        }
    }
    let mut allowed = ModelSet::ANY;
    for (position, name) in row.models().enumerate() {
        let model = models
            .number(name)
            .ok_or_else(|| wrong(format!("more than {} GPU models", Models::MOST)))?;
        allowed = if position == 0 { ModelSet::NONE } else { allowed }.with(model);
    }
    let seconds = row.deletion_time.zip(row.creation_time);
    let created = row.creation_time;
    Ok(TracePod {
        demand: Demand {
            cpu_milli: row.cpu_milli,
            memory_mib: row.memory_mib,
            gpus: row.num_gpu,
            share: DemandShare::Milli(if row.num_gpu == 0 { 0 } else { row.gpu_milli }),
            models: if row.num_gpu == 0 { ModelSet::ANY } else { allowed },
        },
        created,
        seconds: seconds.map(|(deleted, created)| deleted.saturating_sub(created)),
        name: row.name,
    })
}
