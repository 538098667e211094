//! The runs of a study as a table, CSV, and JSON.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use divvy_policy::Policy;
use divvy_simulator::{FitTally, Inflation, Size, Turnover};
use serde::Serialize;

use super::study::{StudyOutcome, StudyRun};
use crate::printer::columns;

/// A run in the output.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum ToldRun {
    /// A run in which pods never end.
    Filled(Filled),
    /// A run in which pods end.
    TurnedOver(TurnedOver),
}

/// A run in which pods never end.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Filled {
    /// The name of the policy.
    pub policy: &'static str,
    /// The seed; `null` if the order comes from a file without a seed.
    pub seed: Option<u64>,
    /// The percentage of the cluster's GPUs that were in use when the requests had reached 95 % of the cluster's GPUs; `null`
    /// if the requests never reached 95 %.
    pub at95: Option<f64>,
    /// The percentage of the cluster's GPUs that were in use when the requests had reached 100 % of the cluster's GPUs.
    pub at100: Option<f64>,
    /// The percentage of the cluster's GPUs that were in use when the requests had reached 130 % of the cluster's GPUs.
    pub at130: Option<f64>,
    /// The GPUs in use at the end, in thousandths of a GPU.
    pub used_milli: u64,
    /// The GPUs in use at the end, in percent of the cluster's GPUs.
    pub used: f64,
    /// The number of pods that were placed.
    pub placed: u64,
    /// The number of pods that fitted on no node.
    pub failed: u64,
    /// The total of the requests when the first pod failed, in percent of the cluster's GPUs; `null` if no pod failed.
    pub first_failure: Option<f64>,
    /// The numbers of pods of each size.
    pub sizes: Vec<OfSize>,
}

/// A run in which pods end.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TurnedOver {
    /// The name of the policy.
    pub policy: &'static str,
    /// The load, as a fraction of the cluster's GPUs; `null` if pods arrive at the times in the list.
    pub load: Option<f64>,
    /// The seed; `null` if pods arrive at the times in the list.
    pub seed: Option<u64>,
    /// The mean of the GPUs in use over the counted time, in percent.
    pub used: f64,
    /// The GPU requests of pods that fitted on no node, in percent of all GPU requests.
    pub lost: f64,
    /// The pods with 8 or more GPUs that fitted on no node, in percent of all such pods.
    pub large_lost: f64,
    /// The number of pods that were placed.
    pub placed: u64,
    /// The number of pods that fitted on no node.
    pub failed: u64,
    /// The numbers of pods of each size.
    pub sizes: Vec<OfSize>,
}

/// The numbers of pods of one size.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct OfSize {
    /// The size, such as `part of a GPU` or `1 GPU`.
    pub size: String,
    /// The number of pods that arrived.
    pub asked: u64,
    /// The number of those pods that fitted on no node.
    pub failed: u64,
}

/// The output of a study.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StudyAnswer {
    /// All runs, in the order of policies, loads, and seeds.
    pub runs: Vec<ToldRun>,
    /// The cluster's GPUs, in thousandths of a GPU.
    pub capacity_milli: u64,
}

/// A table: the names of the columns, and the rows.
pub type TextTable = (Vec<String>, Vec<Vec<String>>);

fn of_sizes(by_size: &BTreeMap<Size, FitTally>) -> Vec<OfSize> {
    let of = by_size.iter().map(|(size, tally)| OfSize {
        size: size.to_string(),
        asked: tally.asked,
        failed: tally.failed,
    });
    of.collect()
}

fn filled(run: &StudyRun, of: &Inflation, capacity_milli: u64) -> Filled {
    Filled {
        policy: run.job.policy.name(),
        seed: run.job.seed,
        at95: of.at(95),
        at100: of.at(100),
        at130: of.at(130),
        used_milli: of.used_milli,
        used: 100.0 * of.used_milli as f64 / capacity_milli.max(1) as f64,
        placed: of.placed,
        failed: of.failed,
        first_failure: of
            .first_failure_milli
            .map(|milli| 100.0 * milli as f64 / capacity_milli.max(1) as f64),
        sizes: of_sizes(&of.by_size),
    }
}

fn turned_over(run: &StudyRun, of: &Turnover) -> TurnedOver {
    let pods = of.pods();
    TurnedOver {
        policy: run.job.policy.name(),
        load: run.job.load.map(|percent| f64::from(percent) / 100.0),
        seed: run.job.seed,
        used: of.used_percent(),
        lost: of.lost_percent(),
        large_lost: of.large().failed_percent(),
        placed: pods.asked - pods.failed,
        failed: pods.failed,
        sizes: of_sizes(&of.by_size),
    }
}

/// Return the output for `-o json`.
pub fn answer(runs: &[StudyRun], capacity_milli: u64) -> StudyAnswer {
    let told = runs.iter().map(|run| match &run.outcome {
        StudyOutcome::Filled(of) => ToldRun::Filled(filled(run, of, capacity_milli)),
        StudyOutcome::TurnedOver(of) => ToldRun::TurnedOver(turned_over(run, of)),
    });
    StudyAnswer {
        runs: told.collect(),
        capacity_milli,
    }
}

/// Return the output for `-o csv`: a line for each run, with percentages to two decimals.
pub fn csv(answer: &StudyAnswer) -> String {
    let mut text = String::new();
    let optional = |value: Option<f64>| value.map_or_else(String::new, |value| format!("{value:.2}"));
    let seed = |seed: Option<u64>| seed.map_or_else(String::new, |seed| seed.to_string());
    for (number, run) in answer.runs.iter().enumerate() {
        // Writing to a String does not fail.
        let _ = match run {
            ToldRun::Filled(run) => {
                if number == 0 {
                    text.push_str("policy,seed,at95,at100,at130,used_milli,placed,failed,first_failure\n");
                }
                writeln!(
                    text,
                    "{},{},{},{},{},{},{},{},{}",
                    run.policy,
                    seed(run.seed),
                    optional(run.at95),
                    optional(run.at100),
                    optional(run.at130),
                    run.used_milli,
                    run.placed,
                    run.failed,
                    optional(run.first_failure)
                )
            }
            ToldRun::TurnedOver(run) => {
                if number == 0 {
                    text.push_str("policy,load,seed,used,lost,large_lost,placed,failed\n");
                }
                writeln!(
                    text,
                    "{},{},{},{:.2},{:.2},{:.2},{},{}",
                    run.policy,
                    optional(run.load),
                    seed(run.seed),
                    run.used,
                    run.lost,
                    run.large_lost,
                    run.placed,
                    run.failed
                )
            }
        };
    }
    text
}

/// Return the table: a row for each policy and load, with mean and sample standard deviation over the runs.
pub fn table(answer: &StudyAnswer) -> TextTable {
    let mut groups: Vec<Vec<&ToldRun>> = Vec::new();
    for run in &answer.runs {
        match groups.last_mut() {
            Some(group) if key(group[0]) == key(run) => group.push(run),
            _ => groups.push(vec![run]),
        }
    }
    let names = match answer.runs.first() {
        Some(ToldRun::TurnedOver(run)) if run.load.is_none() => {
            &["POLICY", "IN USE %", "LOST %", "PODS OF 8 GPUS LOST %", "PLACED", "FAILED"][..]
        }
        Some(ToldRun::TurnedOver(_)) => &[
            "POLICY",
            "LOAD",
            "IN USE %",
            "LOST %",
            "PODS OF 8 GPUS LOST %",
            "PLACED",
            "FAILED",
        ],
        _ => &[
            "POLICY",
            "AT 95 %",
            "AT 100 %",
            "AT 130 %",
            "AT THE END %",
            "PLACED",
            "FAILED",
            "FIRST FAILURE AT %",
        ],
    };
    let rows = groups.iter().map(|group| row(group)).collect();
    (names.iter().map(|name| (*name).to_owned()).collect(), rows)
}

fn key(run: &ToldRun) -> (&'static str, Option<u64>) {
    match run {
        ToldRun::Filled(run) => (run.policy, None),
        ToldRun::TurnedOver(run) => (run.policy, run.load.map(f64::to_bits)),
    }
}

fn row(group: &[&ToldRun]) -> Vec<String> {
    let filled: Vec<&Filled> = group
        .iter()
        .filter_map(|run| match run {
            ToldRun::Filled(run) => Some(run),
            ToldRun::TurnedOver(_) => None,
        })
        .collect();
    let turned: Vec<&TurnedOver> = group
        .iter()
        .filter_map(|run| match run {
            ToldRun::TurnedOver(run) => Some(run),
            ToldRun::Filled(_) => None,
        })
        .collect();
    let (policy, _) = key(group[0]);
    let mut cells = vec![policy.to_owned()];
    if let Some(load) = turned.first().and_then(|run| run.load) {
        cells.push(format!("{load:.2}"));
    }
    let of_filled: [fn(&Filled) -> Option<f64>; 7] = [
        |run| run.at95,
        |run| run.at100,
        |run| run.at130,
        |run| Some(run.used),
        |run| Some(run.placed as f64),
        |run| Some(run.failed as f64),
        |run| run.first_failure,
    ];
    let of_turned: [fn(&TurnedOver) -> Option<f64>; 5] = [
        |run| Some(run.used),
        |run| Some(run.lost),
        |run| Some(run.large_lost),
        |run| Some(run.placed as f64),
        |run| Some(run.failed as f64),
    ];
    if filled.is_empty() {
        cells.extend(of_turned.iter().enumerate().map(|(at, get)| {
            let decimals = if at < 3 { 2 } else { 0 };
            mean_and_spread(turned.iter().map(|run| get(run)), decimals)
        }));
    } else {
        cells.extend(of_filled.iter().enumerate().map(|(at, get)| {
            let decimals = if at == 4 || at == 5 { 0 } else { 2 };
            mean_and_spread(filled.iter().map(|run| get(run)), decimals)
        }));
    }
    cells
}

/// Format mean and sample standard deviation as `95.01 ± 0.03`. A single value is printed without a deviation, and no value as
/// `-`.
fn mean_and_spread(values: impl Iterator<Item = Option<f64>>, decimals: usize) -> String {
    let values: Vec<f64> = values.flatten().collect();
    match mean_and_deviation(&values) {
        None => "-".to_owned(),
        Some((mean, None)) => format!("{mean:.decimals$}"),
        Some((mean, Some(deviation))) => format!("{mean:.decimals$} ± {deviation:.decimals$}"),
    }
}

/// Return the mean, and, for two or more values, the sample standard deviation. `None` if there are no values.
fn mean_and_deviation(values: &[f64]) -> Option<(f64, Option<f64>)> {
    if values.is_empty() {
        return None;
    }
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let squares = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>();
    Some((mean, (values.len() > 1).then(|| (squares / (count - 1.0)).sqrt())))
}

/// Return the sentence that says how many runs a row of the table stands for.
pub fn note(runs: &[StudyRun]) -> String {
    let policies: Vec<Policy> = runs.iter().fold(Vec::new(), |mut found, run| {
        if !found.contains(&run.job.policy) {
            found.push(run.job.policy);
        }
        found
    });
    let first = runs.iter().filter(|run| {
        let first = &runs[0].job;
        (run.job.policy, run.job.load) == (first.policy, first.load)
    });
    let seeds: Vec<String> = first
        .clone()
        .filter_map(|run| run.job.seed)
        .map(|seed| seed.to_string())
        .collect();
    let of = if policies.len() == 1 { "" } else { " of each policy" };
    match (first.count(), seeds.is_empty()) {
        (0 | 1, true) => format!("One run{of}."),
        (1, false) => format!("One run{of}, with seed {}.", seeds.join(", ")),
        (count, _) => format!(
            "{count} runs{of}, with seeds {}: mean ± sample standard deviation.",
            seeds.join(", ")
        ),
    }
}

/// Return the table as text, followed by a note.
pub fn print((names, rows): &TextTable, note: &str) -> String {
    let mut cells = names.join("\t") + "\n";
    for row in rows {
        cells.push_str(&row.join("\t"));
        cells.push('\n');
    }
    format!("{}\n{note}\n", columns(&cells))
}
