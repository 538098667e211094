//! `divvy demo`: runs the embedded cluster, and plays a scenario on it.

use std::io;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use divvy_testbed::embedded::{Embedded, EmbeddedSettings};
use divvy_testbed::programs::{GpuPrograms, Programs};
use divvy_testbed::real_driver::RealDriver;
use divvy_testbed::scenario::{BUILT_IN, Churn, Cluster as _, Play, Scenario};
use divvy_testbed::story::{StoryListener, TimedEvent};

use crate::cli::{DemoArgs, DemoGpus, DemoOutput};
use crate::printer;

/// How long scenarios create and delete random pods.
const CHURN: Duration = Duration::from_secs(20);
/// The node's name if the GPUs are those of this machine.
const REAL: &str = "this-machine";

/// Start a cluster, play the scenario on it, and stop the cluster. Return `Ok(false)` if a step did not end as the scenario says.
pub async fn run(args: DemoArgs) -> anyhow::Result<bool> {
    if args.list {
        printer::print(&scenarios())?;
        return Ok(true);
    }
    let stopped = divvy_program::until_stopped(false)?;
    let scenario = chosen(&args)?;
    let own = std::env::current_exe().context("this program's own path is not known")?;
    let mut machines = match &args.nodes {
        Some(path) => std::fs::read_to_string(path).with_context(|| format!("--nodes {}", path.display()))?,
        None => BUILT_IN.to_owned(),
    };
    let mut programs = Programs::beside(&own)?;
    let mut gpu_programs = match scenario {
        Some(Scenario::Isolation) => Some(GpuPrograms::beside(&own)?),
        _ => None,
    };
    if let Some(programs) = &gpu_programs {
        programs.check().await?;
    }
    if args.gpus == DemoGpus::Real {
        let containers = gpu_programs.as_mut();
        let containers =
            containers.context("--gpus real is for --scenario isolation: no other scenario runs programs that use a GPU")?;
        let driver = RealDriver::find(args.driver.as_deref()).await.context("--gpus real")?;
        machines = driver.describe(&programs.probe, REAL).await.context("--gpus real")?;
        containers.is_real = true;
        containers.cuda_sim = driver.cuda;
        programs.nvml_sim = driver.nvml;
    }
    // No audit: a demo does not need its history, which would grow for days with `--keep`.
    let settings = EmbeddedSettings {
        seed: args.seed,
        drivers: true,
        gpu_programs,
        audit: false,
        ..EmbeddedSettings::new(machines, programs)
    };
    let began = Instant::now();
    let mut cluster = tokio::select! {
        started = Embedded::start(settings) => started.context("the cluster did not come up")?,
        () = stopped.cancelled() => return Ok(true),
    };
    let mut listener = DemoTeller {
        json: args.output == Some(DemoOutput::Json),
    };
    let pause = if args.fast || listener.json {
        Duration::ZERO
    } else {
        Duration::from_millis(1200)
    };
    let outcome = tokio::select! {
        outcome = tell(&args, scenario, &mut cluster, &mut listener, pause, began) => outcome,
        () = stopped.cancelled() => Ok(true),
    };
    if args.keep && outcome.is_ok() && !stopped.is_cancelled() {
        keep(&cluster)?;
        stopped.cancelled().await;
    }
    cluster.shutdown().await;
    outcome
}

/// Return the chosen scenario. `None` if `--nodes` is given without `--scenario`.
fn chosen(args: &DemoArgs) -> anyhow::Result<Option<Scenario>> {
    match &args.scenario {
        Some(name) => Scenario::named(name)
            .map(Some)
            .ok_or_else(|| anyhow::anyhow!("there is no scenario {name:?}; the scenarios are\n{}", scenarios())),
        None if args.nodes.is_some() => Ok(None),
        None => Ok(Some(Scenario::DEFAULT)),
    }
}

/// Return all scenarios as a list, one per line.
fn scenarios() -> String {
    let line = |(name, about): (&str, &str)| format!("  {name:<22} {about}\n");
    Scenario::all().map(|scenario| line(scenario.about())).collect()
}

async fn tell(
    args: &DemoArgs,
    scenario: Option<Scenario>,
    cluster: &mut Embedded,
    listener: &mut DemoTeller,
    pause: Duration,
    began: Instant,
) -> anyhow::Result<bool> {
    let (api, extender) = (cluster.api_url(), cluster.extender_url());
    let names: Vec<String> = cluster.machines().nodes.iter().map(|node| node.name.clone()).collect();
    let mut play = Play::new(cluster, listener, pause);
    let text = format!("The cluster is up after {} ms", began.elapsed().as_millis());
    play.scene(&text).await?;
    play.step("simulated", "API server", &api, Vec::new())?;
    play.step("real", "divvy extender", &extender, Vec::new())?;
    match scenario {
        Some(scenario) => {
            let churn = Churn {
                time: CHURN,
                seed: args.seed,
            };
            scenario.play(&mut play, churn).await?;
        }
        None => {
            for name in &names {
                play.cluster.join(name).await?;
                play.step("joined", &format!("node {name}"), "", Vec::new())?;
            }
            play.joined(&names).await?;
            play.run("kubectl inspect gpushare", &["inspect", "gpushare"]).await?;
        }
    }
    let (checks, failures) = play.score();
    match (checks, failures) {
        (0, _) => {}
        (_, 0) => play.scene(&format!("All {checks} checks hold")).await?,
        _ => play.scene(&format!("{failures} of {checks} checks do not hold")).await?,
    }
    if failures > 0 && args.keep {
        tracing::warn!("the cluster stays up although checks failed, so that you can inspect it");
    }
    Ok(failures == 0)
}

fn keep(cluster: &Embedded) -> io::Result<()> {
    let kubeconfig = cluster.kubeconfig();
    let metrics: Vec<String> = cluster
        .metrics()
        .map(|(node, address)| format!("  curl http://{address}/metrics   # of {node}\n"))
        .collect();
    printer::print(&format!(
        "
The cluster stays up until Ctrl-C. In another terminal:

  export KUBECONFIG={}
  kubectl get pods -o wide
  kubectl --validate=false apply -f - <<'POD'
  apiVersion: v1
  kind: Pod
  metadata: {{name: mine}}
  spec:
    containers:
    - {{name: main, image: any, resources: {{limits: {{aliyun.com/gpu-mem: 4}}}}}}
  POD
  divvy why mine
  divvy inspect gpushare -d
{}
The containers are simulated: they have no logs, and no command runs in them.
",
        kubeconfig.display(),
        metrics.concat()
    ))
}

/// Prints the events of the play, as text for people or as one line of JSON each.
struct DemoTeller {
    json: bool,
}

impl StoryListener for DemoTeller {
    fn hear(&mut self, told: &TimedEvent) -> io::Result<()> {
        if self.json {
            return printer::line(&serde_json::to_string(told)?);
        }
        printer::print(&told.event.to_string())
    }
}
