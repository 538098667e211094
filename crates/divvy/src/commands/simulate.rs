//! `divvy simulate`: reads a trace, makes the runs, and prints the results.

mod cluster;

use std::fs;
use std::io::Read as _;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;

use anyhow::Context as _;
use divvy_simulator::{Error, Lifetimes, NodeChoice, Order, Trace};

use super::progress::ProgressLine;
use crate::cli::simulate::{Arrivals, ChoiceOf, Hundredths, LifetimesArg as Lives, NodeOrder, SimulateArgs, SimulateOutput};
use crate::printer;
use crate::simulate::study::{ArrivalOrder, Flow, Numbered, Study, StudyRun};
use crate::simulate::text;

/// The largest accepted input file in bytes.
const LARGEST: u64 = 1 << 30;

/// The default seeds: those of the published runs. The order of the pods in each of these runs is known.
const SEEDS: std::ops::RangeInclusive<u64> = 42..=46;

/// Replay a trace, or place a cluster's pods again.
pub async fn run(args: SimulateArgs) -> anyhow::Result<()> {
    match (&args.nodes, &args.pods) {
        (Some(nodes), Some(pods)) => trace(&args, nodes, pods),
        // The command-line grammar requires --nodes and --pods, or --cluster, or --cluster-dump.
        _ => cluster::run(&args).await,
    }
}

/// Read a trace, replay it, and print the results.
fn trace(args: &SimulateArgs, nodes: &Path, pods: &Path) -> anyhow::Result<()> {
    let mut trace = Trace::read(&bytes(nodes)?, &bytes(pods)?)?;
    trace.repeat_nodes(args.repeat_nodes as usize);
    let study = Study {
        flow: flow(args, &trace)?,
        ranks: args.node_order.map(|order| match order {
            NodeOrder::Hash => Order::ranks_by_name(&trace),
            NodeOrder::Hardware => Order::ranks_by_hardware(&trace),
        }),
        policies: args.policy.0.clone(),
        history: args.history,
        choice: match args.choice {
            ChoiceOf::Best => NodeChoice::Best,
            ChoiceOf::Lot => NodeChoice::Lot,
            ChoiceOf::Scores => NodeChoice::Scores,
        },
        trace,
    };
    study.check()?;
    let runs = all(&study, args.jobs.map(|jobs| jobs as usize))?;
    let answer = text::answer(&runs, study.trace.capacity_milli());
    match args.output {
        SimulateOutput::Json => printer::json(&answer)?,
        SimulateOutput::Csv => printer::print(&text::csv(&answer))?,
        SimulateOutput::Table => printer::print(&text::print(&text::table(&answer), &text::note(&runs)))?,
    }
    Ok(())
}

/// Derive from the flags how pods arrive and end. Fails if flags contradict each other.
fn flow(args: &SimulateArgs, trace: &Trace) -> anyhow::Result<Flow> {
    let seeds = || args.seeds.as_ref().map_or_else(|| SEEDS.collect(), |seeds| seeds.0.clone());
    let ends = match (args.arrivals, args.lifetimes, args.load.is_empty()) {
        (Some(Arrivals::List), _, false) => anyhow::bail!(
            "--load sets how many pods arrive per time, but with --arrivals list the list says when they arrive; omit --load or --arrivals list"
        ),
        (Some(Arrivals::List) | None, Some(Lives::Exp), true) => {
            anyhow::bail!("--lifetimes exp does not say how many pods arrive per time; add --load 0.9")
        }
        (Some(Arrivals::List) | None, None, true) => false,
        _ => true,
    };
    anyhow::ensure!(
        !ends || args.order.is_none(),
        "--order is for pods that never end; with --load, --arrivals poisson, or --lifetimes pods end and arrive in another order; omit one of these flags"
    );
    anyhow::ensure!(
        !ends || args.tune.is_none(),
        "--tune is for pods that never end; if pods end, --load sets how much they request; omit one of these flags"
    );
    if !ends {
        return fill(args, trace, seeds());
    }
    if args.load.is_empty() && args.arrivals != Some(Arrivals::Poisson) {
        anyhow::ensure!(
            args.seeds.is_none(),
            "pods that arrive and end at the times in the list leave nothing to chance; omit --seeds, or add --arrivals poisson"
        );
        return Ok(Flow::Replay);
    }
    let mut loads: Vec<u32> = args.load.iter().map(|load| load.0).collect();
    if loads.is_empty() {
        loads.push(90);
    }
    Ok(Flow::TurnOver {
        loads,
        lifetimes: match args.lifetimes {
            Some(Lives::Trace) => Lifetimes::Trace,
            Some(Lives::Exp) | None => Lifetimes::Exponential,
        },
        warm_up: args.warm_up,
        counted: args.count,
        seeds: seeds(),
    })
}

/// Return the flow in which pods never end. The orders of arrival come from files or from seeds.
fn fill(args: &SimulateArgs, trace: &Trace, seeds: Vec<u64>) -> anyhow::Result<Flow> {
    let read = |name: &str| {
        let order = Order::read(&bytes(Path::new(name))?, trace).with_context(|| format!("{name} cannot be used"))?;
        anyhow::Ok(ArrivalOrder::Read(order))
    };
    let orders = match &args.order {
        Some(pattern) if pattern.contains("{seed}") => seeds
            .into_iter()
            .map(|seed| {
                let of = read(&pattern.replace("{seed}", &seed.to_string()))?;
                anyhow::Ok(Numbered { seed: Some(seed), of })
            })
            .collect::<Result<_, _>>()?,
        Some(name) => {
            anyhow::ensure!(
                args.seeds.is_none(),
                "--order {name} names one file, so --seeds has no effect; write {{seed}} in place of the seed in the file names, or \
                 omit --seeds"
            );
            let of = read(name)?;
            vec![Numbered { seed: None, of }]
        }
        None => {
            let percent = args.tune.unwrap_or(Hundredths(130)).0;
            let of = |seed| ArrivalOrder::Shuffled { seed, percent };
            let numbered = |seed| Numbered {
                seed: Some(seed),
                of: of(seed),
            };
            seeds.into_iter().map(numbered).collect()
        }
    };
    Ok(Flow::Fill(orders))
}

fn bytes(path: &Path) -> anyhow::Result<Vec<u8>> {
    let cannot = || format!("{} cannot be read", path.display());
    let mut bytes = Vec::new();
    let file = fs::File::open(path).with_context(cannot)?;
    file.take(LARGEST + 1).read_to_end(&mut bytes).with_context(cannot)?;
    anyhow::ensure!(
        bytes.len() as u64 <= LARGEST,
        "{} is larger than 1 GiB, too large for a list of nodes or pods; check the file's name",
        path.display()
    );
    Ok(bytes)
}

/// Make all runs, several in parallel, and return them in the order of the study's jobs.
fn all(study: &Study, jobs: Option<usize>) -> Result<Vec<StudyRun>, Error> {
    let todo = study.jobs();
    let workers = jobs.unwrap_or_else(|| thread::available_parallelism().map_or(1, NonZeroUsize::get));
    let next = AtomicUsize::new(0);
    let (sender, receiver) = mpsc::channel();
    let mut done: Vec<Option<Result<StudyRun, Error>>> = todo.iter().map(|_| None).collect();
    thread::scope(|scope| {
        for _ in 0..workers.min(todo.len()) {
            let (sender, next, todo) = (sender.clone(), &next, &todo);
            scope.spawn(move || {
                while let Some((at, job)) = Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|at| Some((at, todo.get(at)?))) {
                    let run = study.run(*job);
                    let failed = run.is_err();
                    if sender.send((at, run)).is_err() || failed {
                        break;
                    }
                }
            });
        }
        drop(sender);
        let bar = ProgressLine::new();
        bar.show(|| format!("0 of {} runs", todo.len()));
        for (number, (at, run)) in receiver.iter().enumerate() {
            done[at] = Some(run);
            bar.show(|| format!("{} of {} runs", number + 1, todo.len()));
        }
        bar.clear();
    });
    // Jobs start in order, so every run that was not started follows one that failed, and `collect` returns that error.
    done.into_iter().flatten().collect()
}
