//! The test on the GPUs of a cluster: sends the requests of a run, and tells the run what happened.

mod agent;
pub(super) mod cleaner;
mod namespace;
mod pods;

use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::pin::pin;
use std::time::{Duration, Instant};

use divvy_explainer::read_cluster::read_without_waiting;
use divvy_kube::client;
use divvy_model::limits::{TEST_LASTS, TEST_TIMEOUT};
use divvy_model::{MemoryUnit, TestRun};
use divvy_smoke_run::{
    Planned, RUN_LABEL, RunEvent, RunLimits, SmokeAction, SmokeRun, SmokeSummary, TargetChoice, TestPodSettings, plan,
};
use futures::stream::FuturesUnordered;
use futures::{FutureExt as _, StreamExt as _};
use kube::api::DynamicObject;
use tokio_util::sync::CancellationToken;

use crate::cli::smoke::{SmokeArgs, SmokeOutput};
use crate::commands::inspect::choice;
use crate::commands::progress::ProgressLine;
use crate::commands::say;
use crate::printer;

use cleaner::{Cleaner, RetestedGpu};
use namespace::Namespace;
use pods::{PodChange, TestPods};

/// The largest number of requests within a second. The watch and its repetitions need a few in addition: together they are at most 20.
const CALLS: usize = 16;
/// The requests that it takes to read a cluster, without further pages of pods and nodes.
const READ: usize = 6;
/// The number of pods and of nodes in a page.
const PAGE: usize = 5000;
/// How long a pod may wait for a node or for its image until that is reported.
const PENDING: Duration = Duration::from_secs(15);
/// The least time limit of a test that may take a GPU out of service: a call of the driver that does not end within it counts against the GPU.
const LEAST_WITH_REPORT: Duration = Duration::from_secs(60);
/// How long a pod may exist in addition to the program's own time limit.
const START: Duration = Duration::from_secs(45);
// A GPU under test is open from the request to open it until its pod is given up.
const _: () = assert!(TEST_TIMEOUT.as_secs() + START.as_secs() + 3 * pods::ANSWER.as_secs() <= TEST_LASTS.as_secs());

/// Try the chosen GPUs, print the results, and return the exit status.
pub(super) async fn run(args: &SmokeArgs) -> anyhow::Result<u8> {
    if args.report && args.timeout < LEAST_WITH_REPORT {
        anyhow::bail!(
            "--report with --timeout {}s could take a GPU out of service that is only slow; allow {} s or more",
            args.timeout.as_secs(),
            LEAST_WITH_REPORT.as_secs()
        );
    }
    let stopped = divvy_program::until_stopped(false)?;
    let client = client::connect(&choice(&args.cluster)).await?.client;
    let reading = read_without_waiting(&client, MemoryUnit::GIB).await.map_err(|error| {
        let rights = error.is_forbidden();
        let error = anyhow::Error::new(error);
        if rights {
            error.context(
                "divvy smoke chooses GPUs with room, and so it must list the nodes and the pods of all namespaces; an administrator can grant that with the cluster \
                 role divvy-viewer (RELEASE-viewer, if Divvy was installed under another name); on the machine itself, divvy smoke --here needs no rights",
            )
        } else {
            error
        }
    })?;
    let snapshot = reading.snapshot;
    let wanted = TargetChoice {
        nodes: args.nodes.clone(),
        gpu: args.gpu.clone(),
        share: args.share,
        whole: args.whole,
        report: args.report,
    };
    let planned = plan(&snapshot, &wanted)?;
    let calls_to_explain = READ + snapshot.ledger.pod_count() / PAGE + snapshot.sites().len() / PAGE;
    drop(snapshot);
    let limits = RunLimits {
        parallel: usize::from(args.parallel),
        calls: CALLS,
        calls_to_explain,
        pending: PENDING,
        total: args.timeout.saturating_add(START),
        report: args.report,
    };
    let mut run = SmokeRun::new(&planned, limits);
    let mut left = Vec::new();
    // If no GPU has room, nothing is made on the cluster.
    if !run.is_over() {
        let agent = agent::read(&client).await;
        let of_agent = match &agent {
            Ok(agent) => Ok(agent.as_ref().map(|agent| &agent.image)),
            Err(error) => Err(error),
        };
        let (image, program_image) = match (&args.image, of_agent) {
            // Another image has no program that can be started.
            (Some(image), Ok(Some(of_agent))) => (image.clone(), (of_agent != image).then(|| of_agent.clone())),
            (Some(image), Ok(None) | Err(_)) => (image.clone(), None),
            (None, Ok(Some(of_agent))) => (of_agent.clone(), None),
            (None, Ok(None)) => anyhow::bail!(
                "the image is unknown, because there is no DaemonSet of Divvy's agent (labels {}); name Divvy's image with --image",
                agent::AGENT
            ),
            (None, Err(error)) => anyhow::bail!("the agent's image could not be read: {error}; name Divvy's image with --image"),
        };
        let settings = TestPodSettings {
            run: TestRun::of((RandomState::new().build_hasher().finish() >> 32) as u32),
            namespace: args.namespace.clone(),
            image,
            program_image,
            priority_class: agent::priority_class(&client).await,
            tolerations: agent.ok().flatten().map(|agent| agent.tolerations).unwrap_or_default(),
            timeout: args.timeout,
            arguments: super::what(args),
        };
        let cleaner = if args.keep {
            None
        } else {
            cleaner(args, settings.run.as_str(), &planned).await?
        };
        let namespace = Namespace::ensure(&client, &args.namespace).await?;
        let pods = TestPods::new(client.clone(), settings, planned, args.keep);
        pods.remove_old().await?;
        let played = play(&mut run, &pods, &stopped).await;
        left = run
            .left()
            .iter()
            .map(|(number, why)| (pods.name(*number), why.clone()))
            .collect();
        if left.is_empty() && !args.keep {
            namespace.leave(pods.run()).await;
            if let Some(cleaner) = cleaner {
                cleaner.dismiss().await;
            }
        }
        if args.keep {
            say(&format!(
                "note: the pods are kept; look at them, and delete them: kubectl -n {} delete pods -l {RUN_LABEL}={}",
                args.namespace,
                pods.run()
            ))?;
        }
        played?;
    }
    let summary = SmokeSummary::new(run.results());
    match args.output {
        SmokeOutput::Json => printer::json(&summary)?,
        SmokeOutput::Table => printer::print(&summary.text())?,
    }
    for (name, why) in left {
        say(&format!(
            "warning: the pod {0}/{name} may still exist ({why}); delete it: kubectl -n {0} delete pod {name}",
            args.namespace
        ))?;
    }
    Ok(summary.exit_status())
}

/// Start the process that cleans up if this one is killed. Without it, a later run does.
async fn cleaner(args: &SmokeArgs, run: &str, planned: &[Planned]) -> anyhow::Result<Option<Cleaner>> {
    let tests = planned.iter().filter(|planned| planned.ask.is_ok()).filter_map(|planned| {
        let target = &planned.target;
        Some(RetestedGpu {
            node: target.node.clone(),
            uuid: target.uuid.clone(),
            failed_before: target.failed_before.clone()?,
        })
    });
    let run = cleaner::RunToClean {
        choice: choice(&args.cluster),
        namespace: args.namespace.clone(),
        run: run.to_owned(),
        tests: tests.collect(),
    };
    match Cleaner::start(&run).await {
        Ok(cleaner) => Ok(Some(cleaner)),
        Err(error) => {
            say(&format!(
                "warning: if this command is killed, its pods stay until they time out, because a second process to delete them could not be started: {error:#}"
            ))?;
            Ok(None)
        }
    }
}

/// Send the requests of the run until it is over.
async fn play(run: &mut SmokeRun, pods: &TestPods, stopped: &CancellationToken) -> anyhow::Result<()> {
    let began = Instant::now();
    let now = || u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
    let bar = ProgressLine::new();
    let mut watch = pin!(pods.watch());
    let mut work = FuturesUnordered::new();
    let mut objects: BTreeMap<usize, DynamicObject> = BTreeMap::new();
    let (mut is_stopped, mut trouble) = (false, None);
    let mut event = RunEvent::Time;
    loop {
        for action in run.step(now(), event) {
            work.push(match action {
                SmokeAction::Create(number) => pods.create(number).boxed(),
                SmokeAction::Mark(number, mark) => pods.mark(number, mark).boxed(),
                SmokeAction::Delete(number) => pods.delete(number).boxed(),
                SmokeAction::Explain(numbers) => {
                    let waiting: Vec<(usize, DynamicObject)> = numbers
                        .into_iter()
                        .filter_map(|number| Some((number, objects.get(&number)?.clone())))
                        .collect();
                    pods.explain(waiting).boxed()
                }
            });
        }
        if run.is_over() {
            break;
        }
        bar.show(|| {
            let (done, all) = run.progress();
            format!("{done} of {all} GPUs done, {} pods", run.pods())
        });
        let due = run.next_ms().map_or(Duration::from_secs(3600), |due| {
            Duration::from_millis(due.saturating_sub(now()))
        });
        event = tokio::select! {
            biased;
            () = stopped.cancelled(), if !is_stopped => {
                is_stopped = true;
                RunEvent::Stop
            }
            Some(done) = work.next() => done,
            Some(change) = watch.next() => match change {
                PodChange::Pod(number, object) => {
                    let seen = TestPods::seen(&object);
                    objects.insert(number, *object);
                    RunEvent::Seen(number, seen)
                }
                PodChange::Gone(number) => {
                    objects.remove(&number);
                    RunEvent::Gone(number)
                }
                PodChange::Forbidden(error) => {
                    trouble = Some(error);
                    RunEvent::Stop
                }
            },
            () = tokio::time::sleep(due) => RunEvent::Time,
        };
    }
    bar.clear();
    trouble.map_or(Ok(()), |error| Err(pods.forbidden("watched", &error)))
}
