use divvy_policy::rank;

use crate::random::Random;
use crate::text::decompress;
use crate::{Error, Trace};

/// The order in which the pods of a trace arrive, and the order among nodes of equal cost.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    /// Rows of the pod list, in the order of arrival. A row may occur several times, or never.
    pub arrivals: Vec<usize>,
    /// By row of the node list: the node's rank. On a tie, the node with the lowest rank is chosen.
    pub ranks: Vec<u64>,
}

impl Order {
    /// Read the two lines of an order file for this trace, plain or compressed with gzip.
    ///
    /// # Errors
    ///
    /// Fails if the file does not have two lines of numbers, if it names a pod that does not exist, or if it does not have one
    /// rank for each node.
    pub fn read(bytes: &[u8], trace: &Trace) -> Result<Order, Error> {
        let what = "the order file";
        let wrong = |why: String| Error::Order {
            what: what.to_owned(),
            why,
        };
        let text = decompress(what, bytes)?;
        let text = std::str::from_utf8(&text).map_err(|_| wrong("it is not text".to_owned()))?;
        let mut lines = text.lines();
        let mut numbers = |name: &str| -> Result<Vec<u64>, Error> {
            let line = lines.next().ok_or_else(|| wrong(format!("it has no line with the {name}")))?;
            let words = line.split_whitespace();
            let number = |word: &str| {
                word.parse()
                    .map_err(|_| wrong(format!("{word:?} among the {name} is not a number")))
            };
            words.map(number).collect()
        };
        let arrivals = numbers("arrivals")?;
        let ranks = numbers("ranks")?;
        let pods = trace.pods.len();
        let row = |number: u64| {
            let row = usize::try_from(number).ok().filter(|row| *row < pods);
            row.ok_or_else(|| {
                wrong(format!(
                    "row {number} shall arrive, but the pod list has {pods} rows (0 to {})",
                    pods - 1
                ))
            })
        };
        let arrivals = arrivals.into_iter().map(row).collect::<Result<_, _>>()?;
        if ranks.len() != trace.nodes.len() {
            return Err(wrong(format!(
                "it ranks {} nodes, but the node list has {}",
                ranks.len(),
                trace.nodes.len()
            )));
        }
        Ok(Order { arrivals, ranks })
    }

    /// Generate an order by the published procedure (`simulator.go` of github.com/hkust-adsl/kubernetes-scheduler-simulator), but
    /// with other random numbers. All pods of the list arrive once, in random order. Then further pods are drawn from the list
    /// until the next one would exceed `percent` of the cluster's GPU capacity. If the list alone exceeds that, the last pods are
    /// dropped. The order of the nodes is also random.
    pub fn shuffled(trace: &Trace, seed: u64, percent: u32) -> Order {
        let mut random = Random::new(seed);
        let mut arrivals = random.permutation(trace.pods.len());
        let most = u128::from(trace.capacity_milli()) * u128::from(percent) / 100;
        let milli = |row: usize| u128::from(trace.pods[row].gpu_milli());
        let mut asked: u128 = arrivals.iter().map(|row| milli(*row)).sum();
        let enough = asked > most;
        while asked > most {
            let Some(row) = arrivals.pop() else { break };
            asked -= milli(row);
        }
        // A list that requests no GPU never reaches the limit.
        let mut more = !enough && trace.pods.iter().any(|pod| pod.gpu_milli() > 0);
        while more {
            let row = random.below(trace.pods.len());
            more = asked + milli(row) <= most;
            if more {
                asked += milli(row);
                arrivals.push(row);
            }
        }
        let ranks = random.permutation(trace.nodes.len());
        let ranks = ranks.into_iter().map(|rank| rank as u64).collect();
        Order { arrivals, ranks }
    }

    /// Return ranks by which nodes with the same hardware follow each other, as nodes sorted by name usually do. This is the
    /// worst order for policies that often leave the choice to the rank.
    pub fn ranks_by_hardware(trace: &Trace) -> Vec<u64> {
        let mut rows: Vec<usize> = (0..trace.nodes.len()).collect();
        rows.sort_by_key(|row| (trace.nodes[*row].shape, *row));
        let mut ranks = vec![0; rows.len()];
        for (rank, row) in (0..).zip(rows) {
            ranks[row] = rank;
        }
        ranks
    }

    /// Return the ranks that the nodes have because of their names.
    pub fn ranks_by_name(trace: &Trace) -> Vec<u64> {
        trace.nodes.iter().map(|node| rank(&node.name)).collect()
    }
}
