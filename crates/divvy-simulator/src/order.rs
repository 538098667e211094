use divvy_placement::policy::rank;

use crate::text::unpack;
use crate::{Error, Trace};

/// In which order the pods of a trace arrive, and which node comes first of nodes that are worth the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    /// Rows of the pod list; one may come several times, or never.
    pub arrivals: Vec<usize>,
    /// By row of the node list; the lowest comes first.
    pub ranks: Vec<u64>,
}

impl Order {
    /// Reads the two lines of an order file, plain or gzip, for this trace.
    ///
    /// # Errors
    ///
    /// When it has not two lines of numbers, names a pod that is not there, or has not one rank for each node.
    pub fn read(bytes: &[u8], trace: &Trace) -> Result<Order, Error> {
        let what = "the order file";
        let wrong = |why: String| Error::Order {
            what: what.to_owned(),
            why,
        };
        let text = unpack(what, bytes)?;
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
                    "row {number} is to arrive, and the pod list has {pods} rows (0 to {})",
                    pods - 1
                ))
            })
        };
        let arrivals = arrivals.into_iter().map(row).collect::<Result<_, _>>()?;
        if ranks.len() != trace.nodes.len() {
            return Err(wrong(format!(
                "it ranks {} nodes, and the node list has {}",
                ranks.len(),
                trace.nodes.len()
            )));
        }
        Ok(Order { arrivals, ranks })
    }

    /// The ranks that nodes have by their names.
    pub fn ranks_by_name(trace: &Trace) -> Vec<u64> {
        trace.nodes.iter().map(|node| rank(&node.name)).collect()
    }
}
