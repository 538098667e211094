//! The plots of a study, and the page that contains them.

use std::collections::BTreeMap;

use divvy_policy::Policy;
use divvy_simulator::report::{Bars, Lines, Page, Series};
use divvy_simulator::{Inflation, Percent, Size, Tally, Turnover};

use super::study::{Outcome, Run, Study};
use super::text::{self, mean_and_deviation};

/// A plot with a caption.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plot {
    /// The name of the plot's file without the extension, such as `allocation`.
    pub name: &'static str,
    /// The plot as SVG.
    pub svg: String,
    /// An explanation of how to read the plot.
    pub caption: String,
}

/// Draw all plots of the runs.
pub fn plots(runs: &[Run]) -> Vec<Plot> {
    let policies = policies(runs);
    let mut plots = Vec::new();
    if runs.iter().any(|run| matches!(run.outcome, Outcome::Filled(_))) {
        plots.extend(of_filling(&policies, runs));
    } else if runs.iter().any(|run| run.job.load.is_some()) {
        plots.extend(of_loads(&policies, runs));
    }
    plots.push(failures(&policies, runs));
    plots
}

fn policies(runs: &[Run]) -> Vec<Policy> {
    let mut found: Vec<Policy> = Vec::new();
    for run in runs {
        if !found.contains(&run.job.policy) {
            found.push(run.job.policy);
        }
    }
    found
}

fn series<T>(policies: &[Policy], values: impl Fn(Policy) -> T) -> Vec<Series<T>> {
    let of = policies.iter().map(|policy| Series {
        name: policy.name().to_owned(),
        colour: Policy::ALL.iter().position(|other| other == policy).unwrap_or(0),
        values: values(*policy),
    });
    of.collect()
}

fn filled(runs: &[Run], policy: Policy) -> Vec<&Inflation> {
    let of = runs.iter().filter(|run| run.job.policy == policy);
    of.filter_map(|run| match &run.outcome {
        Outcome::Filled(of) => Some(of),
        Outcome::TurnedOver(_) => None,
    })
    .collect()
}

fn of_filling(policies: &[Policy], runs: &[Run]) -> Vec<Plot> {
    let across = "GPUs requested so far, in % of the cluster's GPUs".to_owned();
    let curve = |policy, of: fn(&Inflation) -> &Vec<Percent>| -> Vec<(f64, f64)> {
        let runs: Vec<&Vec<Percent>> = filled(runs, policy).into_iter().map(of).collect();
        let most = runs.iter().map(|run| run.len()).max().unwrap_or(0);
        let at = |percent: usize| {
            let values: Vec<f64> = runs.iter().filter_map(|run| run.get(percent)?.value()).collect();
            Some((percent as f64, mean_and_deviation(&values)?.0))
        };
        (0..most).filter_map(at).collect()
    };
    let used = series(policies, |policy| curve(policy, |of| &of.used));
    let end = used
        .iter()
        .filter_map(|one| one.values.last())
        .map(|(percent, _)| *percent)
        .fold(1.0, f64::max);
    let lines = |title: &str, up: &str, range, series| Lines {
        title: title.to_owned(),
        across: across.clone(),
        up: up.to_owned(),
        range,
        series,
        marks: false,
    };
    let mut plots = vec![Plot {
        name: "allocation",
        svg: lines("GPUs in use while pods arrive", "GPUs in use, in %", (0.0, end), used.clone()).svg(),
        caption: "Higher is better. As long as every pod fits, all policies are on the diagonal.".to_owned(),
    }];
    if end > 90.0 {
        plots.push(Plot {
            name: "allocation-end",
            svg: lines(
                "GPUs in use while the cluster fills up",
                "GPUs in use, in %",
                (85.0, end),
                used,
            )
            .svg(),
            caption: "The end of the plot above, on a larger scale.".to_owned(),
        });
    }
    let fragments = series(policies, |policy| curve(policy, |of| &of.fragments));
    if fragments.iter().any(|one| !one.values.is_empty()) {
        plots.push(Plot {
            name: "fragmentation",
            svg: lines(
                "Fragmentation while pods arrive",
                "idle GPUs that pods cannot use, in %",
                (0.0, end),
                fragments,
            )
            .svg(),
            caption: "Lower is better: idle GPUs that the list's typical pods cannot use, weighted by the pods' frequency (FGD's measure F), in % \
                      of the cluster's GPUs. For a pod that needs no GPU, all idle GPUs count."
                .to_owned(),
        });
    }
    plots
}

fn of_loads(policies: &[Policy], runs: &[Run]) -> Vec<Plot> {
    let curve = |policy, of: fn(&Turnover) -> f64| -> Vec<(f64, f64)> {
        let mut at: BTreeMap<u32, Vec<f64>> = BTreeMap::new();
        for run in runs.iter().filter(|run| run.job.policy == policy) {
            if let (Some(load), Outcome::TurnedOver(outcome)) = (run.job.load, &run.outcome) {
                at.entry(load).or_default().push(of(outcome));
            }
        }
        let mean = |(load, values): (u32, Vec<f64>)| Some((f64::from(load) / 100.0, mean_and_deviation(&values)?.0));
        at.into_iter().filter_map(mean).collect()
    };
    let loads: Vec<f64> = runs
        .iter()
        .filter_map(|run| run.job.load)
        .map(|load| f64::from(load) / 100.0)
        .collect();
    let least = loads.iter().copied().fold(f64::INFINITY, f64::min);
    let most = loads.iter().copied().fold(0.0, f64::max);
    let lines = |title: &str, up: &str, of| Lines {
        title: title.to_owned(),
        across: "load".to_owned(),
        up: up.to_owned(),
        range: (least - 0.02, most + 0.02),
        series: series(policies, |policy| curve(policy, of)),
        marks: true,
    };
    vec![
        Plot {
            name: "in-use",
            svg: lines("GPUs in use, by load", "GPUs in use, in %", Turnover::used_percent).svg(),
            caption: "Higher is better. If no pod were dropped, the GPUs in use would equal the load.".to_owned(),
        },
        Plot {
            name: "lost",
            svg: lines(
                "GPU requests lost, by load",
                "GPU requests lost, in %",
                Turnover::lost_percent,
            )
            .svg(),
            caption: "Lower is better: the GPU requests of pods that fitted on no node, in % of all GPU requests.".to_owned(),
        },
    ]
}

fn failures(policies: &[Policy], runs: &[Run]) -> Plot {
    let of = |run: &Run| match &run.outcome {
        Outcome::Filled(of) => of.by_size.clone(),
        Outcome::TurnedOver(of) => of.by_size.clone(),
    };
    let total = |which: &dyn Fn(&Run) -> bool| {
        let mut sum: BTreeMap<Size, Tally> = BTreeMap::new();
        for (size, tally) in runs.iter().filter(|run| which(run)).flat_map(of) {
            let there = sum.entry(size).or_default();
            there.asked += tally.asked;
            there.failed += tally.failed;
        }
        sum
    };
    let all = total(&|_| true);
    let each = policies.len().max(1) as u64;
    let groups = all.iter().map(|(size, tally)| {
        let pods = tally.asked / each;
        (size.to_string(), format!("{pods} pods"))
    });
    let bars = Bars {
        title: "Pods that fitted on no node, by size".to_owned(),
        up: "in % of the pods of that size".to_owned(),
        groups: groups.collect(),
        series: series(policies, |policy| {
            let own = total(&|run| run.job.policy == policy);
            all.keys()
                .map(|size| own.get(size).map_or(0.0, Tally::failed_percent))
                .collect()
        }),
    };
    Plot {
        name: "failures",
        svg: bars.svg(),
        caption: "Lower is better, but large pods cannot always use the room that small pods leave. The bars add up all runs of a policy."
            .to_owned(),
    }
}

/// Return the page with the table and all plots. `command` is the command line that made the runs.
pub fn page(study: &Study, runs: &[Run], plots: &[Plot], command: &str) -> Page {
    let answer = text::answer(runs, study.trace.capacity_milli());
    let about = format!(
        "{} nodes with {} GPUs; a list of {} pods.",
        study.trace.nodes.len(),
        study.trace.capacity_milli() / 1000,
        study.trace.pods.len()
    );
    Page {
        title: "Simulated placement".to_owned(),
        about: vec![about, "Made with:".to_owned()],
        command: command.to_owned(),
        table: text::table(&answer),
        note: text::note(runs),
        plots: plots.iter().map(|plot| (plot.svg.clone(), plot.caption.clone())).collect(),
    }
}
