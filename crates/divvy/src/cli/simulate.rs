//! The grammar of `divvy simulate`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{ArgGroup, Args, ValueEnum};
use divvy_model::MemoryUnit;
use divvy_policy::Policy;

use super::AccessArgs;

/// Replay pods on nodes under placement policies: how much more the same GPUs would hold
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("source").required(true).args(["nodes", "cluster", "cluster_dump"])))]
#[command(after_help = "\
Examples:
  divvy simulate --nodes nodes.csv --pods pods.csv.gz --policy fgd,divvy
  divvy simulate --nodes nodes.csv --pods pods.csv --policy all --seeds 1-10 --report ./report
  divvy simulate --nodes nodes.csv --pods pods_default.csv --order 'orders/default_{seed}.txt.gz' --seeds 42-46
  divvy simulate --nodes nodes.csv --pods pods.csv --load 0.90,0.97 --policy best-fit,fgd,divvy
  divvy simulate --cluster --policy best-fit,divvy
  kubectl get nodes,pods -A -o json | divvy simulate --cluster-dump - --add-nodes 2 --keep-bound
  divvy simulate --nodes nodes.csv --pods pods.csv -o json | jq '.runs[] | {policy, seed, at100}'

Files are CSV, plain or gzip, with the columns of Alibaba's trace openb (cluster-trace-gpu-v2023); more columns do no harm:
  nodes: sn,cpu_milli,memory_mib,gpu,model
  pods:  name,cpu_milli,memory_mib,num_gpu,gpu_milli and, if you have them,
         gpu_spec (models joined by |), creation_time, deletion_time

Pods that only come (the default, as FGD was published): the list in random order, then pods drawn from it, until --tune times the cluster's GPU is \
asked for; a pod that fits nowhere is dropped. Printed is the GPU in use, in percent, while 95, 100 and 130 % had been asked for. The orders \
come from --seeds by a generator of Divvy's own; with --order they are read: line 1 the rows of the pod list (from 0) as they arrive, line 2 \
the rank of each row of the node list, which breaks ties.

Pods that end (--load, or --arrivals poisson): pods drawn from the list come at random and run for a while; --load is the GPU that would be in \
use, of all, if none were lost. Printed is the GPU in use, and what was lost, in percent. \
With --arrivals list --lifetimes trace pods come and end when the list says.

What if (--cluster, --cluster-dump): the pods of a cluster that ask for GPU memory are placed anew, in the order in which they were created, by the \
extender's own ledger: under a policy, in other units, with more nodes. Nothing is changed in the cluster. Looked at are GPUs, CPU, main memory, the number of \
pods, nodeSelectors and cordons; not taints, affinity, quotas or priorities. Pods that are being deleted stay where they are, and so do those on nodes that \
are cordoned or offer no GPU, and pods without GPU memory.

fgd and rf know the mix of the whole list from the start, as published; divvy learns from what arrives; the others need not know it. \
The same input gives the same output, to the byte, whatever --jobs.")]
pub struct SimulateArgs {
    /// The nodes
    #[arg(long, value_name = "FILE", requires = "pods", help_heading = "What is replayed")]
    pub nodes: Option<PathBuf>,
    /// The pods
    #[arg(long, value_name = "FILE", requires = "nodes", help_heading = "What is replayed")]
    pub pods: Option<PathBuf>,
    /// So many clusters of these nodes in one
    #[arg(long, value_name = "K", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000), help_heading = "What is replayed")]
    pub repeat_nodes: u32,
    /// Place the pods of the cluster anew: what would change
    #[arg(long, help_heading = "What if", conflicts_with_all = TRACE_ONLY)]
    pub cluster: bool,
    /// The same of a cluster that was saved by `kubectl get nodes,pods -A -o json`, plain or gzip; - is standard input
    #[arg(long, value_name = "FILE", help_heading = "What if", conflicts_with_all = TRACE_ONLY)]
    pub cluster_dump: Option<PathBuf>,
    /// If one unit of aliyun.com/gpu-mem were N MiB: pods ask for the memory that they ask for now
    #[arg(long, value_name = "N", help_heading = "What if", conflicts_with_all = ["nodes"], value_parser = unit)]
    pub unit_mib: Option<MemoryUnit>,
    /// If there were N more nodes like NODE [default: like those that there are most of]
    #[arg(long, value_name = "N[:NODE]", help_heading = "What if", conflicts_with_all = ["nodes"], value_parser = more)]
    pub add_nodes: Option<More>,
    /// Pods that are on a node stay there; only those that wait are placed
    #[arg(long, help_heading = "What if", conflicts_with_all = ["nodes"])]
    pub keep_bound: bool,
    /// One unit of aliyun.com/gpu-mem as it is, for clusters whose agents publish none
    #[arg(
        long,
        env = "DIVVY_MEMORY_UNIT",
        value_name = "UNIT",
        default_value = "GiB",
        help_heading = "What if"
    )]
    pub memory_unit: MemoryUnit,
    #[command(flatten)]
    pub access: AccessArgs,
    /// Policies, with commas; all of them: all
    #[arg(long, value_name = "NAME", default_value = "divvy", value_parser = policies)]
    pub policy: Policies,
    /// Seeds of the random numbers, such as 1-10 or 1,2,7 [default: 42-46]
    #[arg(long, value_name = "SEEDS", value_parser = seeds, help_heading = "How pods come and go")]
    pub seeds: Option<Seeds>,
    /// The order of arrival and the nodes' ranks; {seed} stands for each of --seeds, and a name without it is one run
    #[arg(long, value_name = "FILE", help_heading = "How pods come and go")]
    pub order: Option<String>,
    /// GPU that is asked for in all, over what there is [default: 1.3]
    #[arg(long, value_name = "TIMES", value_parser = hundredths, conflicts_with = "order", help_heading = "How pods come and go")]
    pub tune: Option<Hundredths>,
    /// When pods come [default: list; poisson with --load]
    #[arg(long, value_name = "HOW", help_heading = "How pods come and go")]
    pub arrivals: Option<Arrivals>,
    /// How long pods run; without it, and without --load, for ever [default: exp with --arrivals poisson]
    #[arg(long, value_name = "HOW", help_heading = "How pods come and go")]
    pub lifetimes: Option<Lifetimes>,
    /// GPU that pods ask for at a time, over what there is, such as 0.9 or 0.90,0.97,1.05 [default with --arrivals poisson: 0.9]
    #[arg(long, value_name = "LOAD", value_delimiter = ',', value_parser = hundredths, help_heading = "How pods come and go")]
    pub load: Vec<Hundredths>,
    /// Arrivals before anything is counted, when pods end
    #[arg(long, value_name = "N", default_value_t = 20_000, value_parser = clap::value_parser!(u64).range(..=100_000_000), help_heading = "How pods come and go")]
    pub warm_up: u64,
    /// Arrivals that are counted, when pods end
    #[arg(long, value_name = "N", default_value_t = 40_000, value_parser = clap::value_parser!(u64).range(1..=100_000_000), help_heading = "How pods come and go")]
    pub count: u64,
    /// Learn from the first N arrivals only
    #[arg(long, value_name = "N", help_heading = "What makes it harder")]
    pub history: Option<u64>,
    /// Ranks of the nodes, which break ties [default: those of the order]
    #[arg(long, value_name = "HOW", help_heading = "What makes it harder")]
    pub node_order: Option<NodeOrder>,
    /// How a policy's opinion becomes a node
    #[arg(long, value_name = "HOW", default_value = "best", help_heading = "What makes it harder")]
    pub choice: ChoiceOf,
    /// Runs at the same time [default: the machine's processors]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub jobs: Option<u32>,
    /// The form
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    pub output: SimulateOutput,
    /// Write a page with plots to this folder, to be read offline: index.html, and the plots as SVG
    #[arg(long, value_name = "DIR")]
    pub report: Option<PathBuf>,
}

/// What has no meaning for a cluster's own pods.
const TRACE_ONLY: [&str; 15] = [
    "choice",
    "pods",
    "repeat_nodes",
    "seeds",
    "order",
    "tune",
    "arrivals",
    "lifetimes",
    "load",
    "warm_up",
    "count",
    "history",
    "node_order",
    "jobs",
    "report",
];

/// More nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct More {
    /// How many.
    pub count: u32,
    /// Like which.
    pub like: Option<String>,
}

fn more(text: &str) -> Result<More, String> {
    let (count, like) = match text.split_once(':') {
        Some((count, like)) => (count, Some(like.to_owned())),
        None => (text, None),
    };
    match count.parse() {
        Ok(count @ 1..=100_000) if like.as_deref() != Some("") => Ok(More { count, like }),
        _ => Err(format!(
            "{text:?} is not a number of nodes from 1 to 100000, with a node's name if you like; write 2, or 2:gpu-7"
        )),
    }
}

fn unit(text: &str) -> Result<MemoryUnit, String> {
    let unit = text.parse().ok().and_then(MemoryUnit::new);
    unit.ok_or_else(|| format!("{text:?} is not a size in MiB above 0; write 256, or 1024 for a GiB"))
}

/// Forms of the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SimulateOutput {
    /// A line for each policy, mean and sample standard deviation over the seeds
    Table,
    /// A line for each run
    Csv,
    /// {"runs":[…]}
    Json,
}

/// When pods come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Arrivals {
    /// Drawn from the list at random, in a Poisson stream
    Poisson,
    /// One after another in the order; with --lifetimes trace when the list says
    List,
}

/// How long pods run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Lifetimes {
    /// Exponentially distributed, the same for all
    Exp,
    /// From creation_time to deletion_time; with --arrivals poisson in proportion to that
    Trace,
}

/// How a policy's opinion becomes a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ChoiceOf {
    /// The best, of equals the first in the nodes' order
    Best,
    /// Of those that cost the least one by lot, as kube-scheduler draws among equal scores
    Lot,
    /// Costs are rounded to scores from 0 to 10; of those with 10 one by lot
    Scores,
}

/// Ranks of nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum NodeOrder {
    /// A hash of the name, as in the extender
    Hash,
    /// Nodes that are alike stand together
    Hardware,
}

/// Some policies, each once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policies(pub Vec<Policy>);

fn policies(text: &str) -> Result<Policies, String> {
    let mut found: Vec<Policy> = Vec::new();
    for name in text.split(',').map(str::trim) {
        let these = match name {
            "all" => Policy::ALL.to_vec(),
            name => vec![Policy::from_str(name).map_err(|error| format!("{error}, or all"))?],
        };
        for policy in these {
            if !found.contains(&policy) {
                found.push(policy);
            }
        }
    }
    Ok(Policies(found))
}

/// Seeds in the order in which they were given, each once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seeds(pub Vec<u64>);

/// More runs than anybody waits for.
const MOST_SEEDS: usize = 1000;

fn seeds(text: &str) -> Result<Seeds, String> {
    let wrong = |what: &str| format!("{what:?} is neither a number nor a range; write 42-46, or 1,2,7");
    let mut found: Vec<u64> = Vec::new();
    for part in text.split(',').map(str::trim) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number = |text: &str| text.trim().parse::<u64>().map_err(|_| wrong(part));
        let (first, last) = (number(first)?, number(last)?);
        if first > last {
            return Err(format!("{part} ends before it begins; write {last}-{first}"));
        }
        for seed in first..=last {
            if !found.contains(&seed) {
                found.push(seed);
            }
            if found.len() > MOST_SEEDS {
                return Err(format!("more than {MOST_SEEDS} seeds; five are enough to see a spread"));
            }
        }
    }
    Ok(Seeds(found))
}

/// A number above zero in hundredths: `1.3` is 130.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Hundredths(pub u32);

impl fmt::Display for Hundredths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:02}", self.0 / 100, self.0 % 100)
    }
}

fn hundredths(text: &str) -> Result<Hundredths, String> {
    let wrong = || format!("{text:?} is not a number above 0 and up to 100 with at most two decimals; write 1.3, or 0.97");
    let (whole, part) = text.trim().split_once('.').unwrap_or((text.trim(), ""));
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(whole) || !digits(part) || part.len() > 2 || whole.is_empty() || whole.len() > 3 {
        return Err(wrong());
    }
    let number: u32 = format!("{whole}{part:0<2}").parse().map_err(|_| wrong())?;
    (1..=10_000).contains(&number).then_some(Hundredths(number)).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hundredths_are_read_exactly_or_refused() {
        for (text, expected) in [("1.3", 130), ("0.97", 97), ("1", 100), ("100", 10_000), ("0.05", 5)] {
            assert_eq!(hundredths(text), Ok(Hundredths(expected)), "{text}");
        }
        for text in ["-1", "0", "0.975", "1e3", "nan", "", ".5", "100.01", "1.+3"] {
            let error = hundredths(text).expect_err(text);
            assert!(error.contains("write 1.3"), "{error}");
        }
        assert_eq!(Hundredths(97).to_string(), "0.97");
    }

    #[test]
    fn seeds_are_numbers_and_ranges_each_once() {
        assert_eq!(seeds("42-44,7,43"), Ok(Seeds(vec![42, 43, 44, 7])));
        for (text, expected) in [
            ("46-42", "write 42-46"),
            ("x", "\"x\" is neither"),
            ("1,,2", "\"\" is neither"),
            ("0-99999999999", "more than 1000"),
        ] {
            let error = seeds(text).expect_err(text);
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn policies_are_taken_once_each_and_all_means_all() {
        assert_eq!(policies("fgd,divvy,fgd"), Ok(Policies(vec![Policy::Fgd, Policy::Divvy])));
        assert_eq!(policies("all").map(|all| all.0.len()), Ok(Policy::ALL.len()));
        let error = policies("fdg").expect_err("unknown");
        assert!(error.contains("best-fit") && error.ends_with("or all"), "{error}");
    }
}
