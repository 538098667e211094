//! The command-line grammar of `divvy simulate`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Context as _, anyhow, bail, ensure};
use clap::{ArgGroup, Args, ValueEnum};
use divvy_model::MemoryUnit;
use divvy_policy::Policy;

use super::AccessArgs;

/// Replay pods on nodes under placement policies, and compare how much the same GPUs hold
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("source").required(true).args(["nodes", "cluster", "cluster_dump"])))]
#[command(after_help = "\
Examples:
  divvy simulate --nodes nodes.csv --pods pods.csv.gz --policy fgd,divvy
  divvy simulate --nodes nodes.csv --pods pods.csv --policy all --seeds 1-10 -o csv
  divvy simulate --nodes nodes.csv --pods pods_default.csv --order 'orders/default_{seed}.txt.gz' --seeds 42-46
  divvy simulate --nodes nodes.csv --pods pods.csv --load 0.90,0.97 --policy best-fit,fgd,divvy
  divvy simulate --cluster --policy best-fit,divvy
  kubectl get nodes,pods -A -o json | divvy simulate --cluster-dump - --add-nodes 2 --keep-bound
  divvy simulate --nodes nodes.csv --pods pods.csv -o json | jq '.runs[] | {policy, seed, at100}'

The files are CSV, plain or gzip, with the columns of Alibaba's trace openb (cluster-trace-gpu-v2023). Other columns are ignored:
  nodes: sn,cpu_milli,memory_mib,gpu,model
  pods:  name,cpu_milli,memory_mib,num_gpu,gpu_milli and optionally
         gpu_spec (models joined by |), creation_time, deletion_time

Pods that never end (the default, as in the FGD paper): first the list in random order, then pods drawn from the list, until the pods have requested --tune times \
the cluster's GPUs. A pod that fits on no node is dropped. The output is the share of the GPUs in use, in percent, when 95, 100, and 130 % had been requested. Divvy's own \
generator makes the orders from --seeds. With --order the orders are read from files: line 1 has the rows of the pod list (from 0) in order of arrival, line 2 \
the rank of each row of the node list, which breaks ties.

Pods that end (--load, or --arrivals poisson): pods drawn from the list arrive at random and run for a while. --load is the fraction of all GPUs that would be in \
use if no pod were dropped. The output is the share of the GPUs in use, and the share that was lost, in percent. \
With --arrivals list --lifetimes trace, pods arrive and end at the times in the list.

What if (--cluster, --cluster-dump): the extender's own ledger places the cluster's pods that request GPU memory again, in the order in which they were created: \
under a policy, in other units, or with more nodes. The command changes nothing in the cluster. It considers GPUs, CPU, main memory, the number of \
pods, nodeSelectors, and cordons, but not taints, affinity, quotas, or priorities. Pods that are being deleted stay on their nodes. So do pods on nodes that \
are cordoned or advertise no GPU, and pods without GPU memory.

fgd and rf know from the start how often each kind of pod occurs in the list, as in their papers; divvy learns from the arriving pods; the other policies do not use the mix. \
The same input gives exactly the same output for every --jobs.")]
pub struct SimulateArgs {
    /// CSV file of the nodes
    #[arg(long, value_name = "FILE", requires = "pods", help_heading = "Input")]
    pub nodes: Option<PathBuf>,
    /// CSV file of the pods
    #[arg(long, value_name = "FILE", requires = "nodes", help_heading = "Input")]
    pub pods: Option<PathBuf>,
    /// Replicate the node list K times
    #[arg(long, value_name = "K", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000), help_heading = "Input")]
    pub repeat_nodes: u32,
    /// Place the cluster's pods again, and show what would change
    #[arg(long, help_heading = "What if", conflicts_with_all = TRACE_ONLY)]
    pub cluster: bool,
    /// Like --cluster, for a cluster saved with `kubectl get nodes,pods -A -o json`, plain or gzip; - is standard input
    #[arg(long, value_name = "FILE", help_heading = "What if", conflicts_with_all = TRACE_ONLY)]
    pub cluster_dump: Option<PathBuf>,
    /// Assume units of aliyun.com/gpu-mem of N MiB; pods keep their requested memory
    #[arg(long, value_name = "N", help_heading = "What if", conflicts_with_all = ["nodes"], value_parser = unit)]
    pub unit_mib: Option<MemoryUnit>,
    /// Add N nodes like NODE [default: like the most common kind of node]
    #[arg(long, value_name = "N[:NODE]", help_heading = "What if", conflicts_with_all = ["nodes"], value_parser = more)]
    pub add_nodes: Option<More>,
    /// Keep bound pods on their nodes, and place only waiting pods
    #[arg(long, help_heading = "What if", conflicts_with_all = ["nodes"])]
    pub keep_bound: bool,
    /// The current size of one unit of aliyun.com/gpu-mem, for clusters whose agents do not publish it
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
    /// The policies, separated by commas, or all
    #[arg(long, value_name = "NAME", default_value = "divvy", value_parser = policies)]
    pub policy: Policies,
    /// Seeds of the random number generator, such as 1-10 or 1,2,7 [default: 42-46]
    #[arg(long, value_name = "SEEDS", value_parser = seeds, help_heading = "How pods arrive and end")]
    pub seeds: Option<Seeds>,
    /// File with the order of arrival and the nodes' ranks; {seed} stands for each of --seeds, a name without {seed} means one run
    #[arg(long, value_name = "FILE", help_heading = "How pods arrive and end")]
    pub order: Option<String>,
    /// Total of the GPU requests, as a multiple of the cluster's GPUs [default: 1.3]
    #[arg(long, value_name = "TIMES", value_parser = hundredths, conflicts_with = "order", help_heading = "How pods arrive and end")]
    pub tune: Option<Hundredths>,
    /// When pods arrive [default: list; poisson with --load]
    #[arg(long, value_name = "HOW", help_heading = "How pods arrive and end")]
    pub arrivals: Option<Arrivals>,
    /// How long pods run [default: exp with --load or --arrivals poisson, else indefinitely]
    #[arg(long, value_name = "HOW", help_heading = "How pods arrive and end")]
    pub lifetimes: Option<LifetimesArg>,
    /// GPU requests of the pods at any time, as a fraction of the cluster's GPUs, such as 0.9 or 0.90,0.97,1.05 [default with --arrivals
    /// poisson: 0.9]
    #[arg(long, value_name = "LOAD", value_delimiter = ',', value_parser = hundredths, help_heading = "How pods arrive and end")]
    pub load: Vec<Hundredths>,
    /// If pods end: number of arrivals before counting starts
    #[arg(long, value_name = "N", default_value_t = 20_000, value_parser = clap::value_parser!(u64).range(..=100_000_000), help_heading = "How pods arrive and end")]
    pub warm_up: u64,
    /// If pods end: number of arrivals to count
    #[arg(long, value_name = "N", default_value_t = 40_000, value_parser = clap::value_parser!(u64).range(1..=100_000_000), help_heading = "How pods arrive and end")]
    pub count: u64,
    /// Let policies learn from only the first N arrivals
    #[arg(long, value_name = "N", help_heading = "Harder conditions")]
    pub history: Option<u64>,
    /// Ranks of the nodes, which break ties [default: the ranks in the file of --order, else generated from the seed]
    #[arg(long, value_name = "HOW", help_heading = "Harder conditions")]
    pub node_order: Option<NodeOrder>,
    /// How to choose a node from a policy's costs
    #[arg(long, value_name = "HOW", default_value = "best", help_heading = "Harder conditions")]
    pub choice: ChoiceOf,
    /// Number of parallel runs [default: the number of processors]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub jobs: Option<u32>,
    /// Output format
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    pub output: SimulateOutput,
}

/// The flags that have no meaning with `--cluster` and `--cluster-dump`.
const TRACE_ONLY: [&str; 14] = [
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
];

/// The nodes that `--add-nodes` adds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct More {
    /// The number of nodes, from 1 to 100 000.
    pub count: u32,
    /// The name of the node to copy; without it, a node of the most common kind.
    pub like: Option<String>,
}

fn more(text: &str) -> anyhow::Result<More> {
    let (count, like) = match text.split_once(':') {
        Some((count, like)) => (count, Some(like.to_owned())),
        None => (text, None),
    };
    match count.parse() {
        Ok(count @ 1..=100_000) if like.as_deref() != Some("") => Ok(More { count, like }),
        _ => bail!("{text:?} is not a number of nodes from 1 to 100000, optionally with a node's name; write 2, or 2:gpu-7"),
    }
}

fn unit(text: &str) -> anyhow::Result<MemoryUnit> {
    let unit = text.parse().ok().and_then(MemoryUnit::new);
    unit.with_context(|| format!("{text:?} is not a size in MiB above 0; write 256, or 1024 for 1 GiB"))
}

/// Output formats of `divvy simulate`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SimulateOutput {
    /// One line for each policy: mean and sample standard deviation over the seeds
    Table,
    /// One line for each run
    Csv,
    /// {"runs":[…]}
    Json,
}

/// When pods arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Arrivals {
    /// Drawn from the list at random, as a Poisson process
    Poisson,
    /// One after another in the given order; with --lifetimes trace at the times in the list
    List,
}

/// How long pods run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LifetimesArg {
    /// Exponentially distributed, with the same mean for all pods
    Exp,
    /// From creation_time to deletion_time; with --arrivals poisson, all of these times multiplied by one factor
    Trace,
}

/// How a node is chosen from a policy's costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ChoiceOf {
    /// The cheapest node; on a tie the first in the nodes' order
    Best,
    /// A random node of the cheapest, as kube-scheduler draws among equal scores
    Lot,
    /// Costs are rounded to scores from 0 to 10; a random node of those with 10
    Scores,
}

/// How nodes are ranked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum NodeOrder {
    /// By a hash of the name, as in the extender
    Hash,
    /// By hardware, so that equal nodes are neighbors
    Hardware,
}

/// The chosen policies, in the given order, without duplicates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policies(pub Vec<Policy>);

fn policies(text: &str) -> anyhow::Result<Policies> {
    let mut found: Vec<Policy> = Vec::new();
    for name in text.split(',').map(str::trim) {
        let these = match name {
            "all" => Policy::ALL.to_vec(),
            name => vec![Policy::from_str(name).map_err(|error| anyhow!("{error}, or all"))?],
        };
        for policy in these {
            if !found.contains(&policy) {
                found.push(policy);
            }
        }
    }
    Ok(Policies(found))
}

/// The chosen seeds, in the given order, without duplicates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seeds(pub Vec<u64>);

/// The largest number of seeds; more runs take longer than a user would wait.
const MOST_SEEDS: usize = 1000;

fn seeds(text: &str) -> anyhow::Result<Seeds> {
    let wrong = |what: &str| anyhow!("{what:?} is neither a number nor a range; write 42-46, or 1,2,7");
    let mut found: Vec<u64> = Vec::new();
    for part in text.split(',').map(str::trim) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number = |text: &str| text.trim().parse::<u64>().map_err(|_| wrong(part));
        let (first, last) = (number(first)?, number(last)?);
        ensure!(first <= last, "{part} ends before it begins; write {last}-{first}");
        for seed in first..=last {
            if !found.contains(&seed) {
                found.push(seed);
            }
            ensure!(
                found.len() <= MOST_SEEDS,
                "more than {MOST_SEEDS} seeds; five are enough to see a spread"
            );
        }
    }
    Ok(Seeds(found))
}

/// A number above 0 and up to 100, in hundredths: `1.3` is 130.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Hundredths(pub u32);

impl fmt::Display for Hundredths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:02}", self.0 / 100, self.0 % 100)
    }
}

fn hundredths(text: &str) -> anyhow::Result<Hundredths> {
    let wrong = || anyhow!("{text:?} is not a number above 0 and up to 100 with at most two decimals; write 1.3, or 0.97");
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
            assert_eq!(hundredths(text).expect(text), Hundredths(expected));
        }
        for text in ["-1", "0", "0.975", "1e3", "nan", "", ".5", "100.01", "1.+3"] {
            let error = hundredths(text).expect_err(text).to_string();
            assert!(error.contains("write 1.3"), "{error}");
        }
        assert_eq!(Hundredths(97).to_string(), "0.97");
    }

    #[test]
    fn seeds_are_numbers_and_ranges_each_once() {
        assert_eq!(seeds("42-44,7,43").expect("seeds"), Seeds(vec![42, 43, 44, 7]));
        for (text, expected) in [
            ("46-42", "write 42-46"),
            ("x", "\"x\" is neither"),
            ("1,,2", "\"\" is neither"),
            ("0-99999999999", "more than 1000"),
        ] {
            let error = seeds(text).expect_err(text).to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn policies_are_taken_once_each_and_all_means_all() {
        assert_eq!(policies("fgd,divvy,fgd").expect("two").0, [Policy::Fgd, Policy::Divvy]);
        assert_eq!(policies("all").expect("all").0.len(), Policy::ALL.len());
        let error = policies("fdg").expect_err("unknown").to_string();
        assert!(error.contains("best-fit") && error.ends_with("or all"), "{error}");
    }
}
