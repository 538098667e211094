//! `nvidia-device-plugin` and `mps-control-daemon` share a GPU through MPS (`sharing.mps`), and the agent limits compute time through it (`--mps`).
//!
//! The driver's programs are scripts that record their calls. What the control daemon does with the limits is not simulated.

use divvy_model::{Enforcement, Vendor, names};

use super::whole::whole_gpus;
use crate::builders::pod;
use crate::scenario::devices::gpus;
use crate::scenario::{Cluster, ClusterProgram, Play, PlayStop, PluginSetup, SelfReport, TestbedMachine};

const PIPE: &str = "/mps/nvidia.com/gpu/pipe";
/// The commands that set the limits of each client before the control daemon serves: a quarter of 16 GiB, and a quarter of the threads.
const LIMITS: [&str; 2] = [
    "set_default_device_pinned_mem_limit 0 4096M",
    "set_default_active_thread_percentage 25",
];

/// The machine has one GPU.
pub(in crate::scenario) async fn mps<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene(
        "nvidia-device-plugin and mps-control-daemon run in place of the agent: four pods can use the GPU at the same time",
    )
    .await?;
    let node = play.ready(TestbedMachine::Laptop).await?;
    let config = format!(
        "version: v1\nsharing:\n  mps:\n    resources:\n    - name: {}\n      replicas: 4\n",
        Vendor::Nvidia.whole_resource()
    );
    let plugin = PluginSetup {
        config: &config,
        with_mps: true,
    };
    play.run_plugin(&node, plugin).await?;
    let played = clients(play, &node).await;
    play.scene("The agent runs again, and the GPU is everyone's").await?;
    let restored = play.run_agent(&node, TestbedMachine::Laptop).await;
    played.and(restored)?;
    let calls = play.cluster.mps_calls(&node)?;
    let is_open = calls
        .last()
        .is_some_and(|call| call.starts_with("nvidia-smi") && call.ends_with("DEFAULT"));
    play.check(is_open, "the GPU's compute mode is DEFAULT again", || format!("{calls:?}"))?;
    shares(play, &node).await
}

/// Where a client of the agent's has the daemon's directory.
const PIPE_OF_SHARES: &str = "/mps/divvy.dev/shares/pipe";
const PERCENTAGE: &str = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";

async fn shares<C: Cluster>(play: &mut Play<'_, C>, node: &str) -> Result<(), PlayStop> {
    play.scene(
        "The agent runs with --mps, and mps-control-daemon next to it: two pods have 30 and 70 percent of the GPU's threads",
    )
    .await?;
    let before = play.cluster.mps_calls(node)?.len();
    play.cluster.use_mps(true).await?;
    let played = share(play, node, before).await;
    play.scene("The agent runs without --mps, and the GPU is everyone's").await?;
    let ended = play.cluster.use_mps(false).await;
    played?;
    ended?;
    let calls = play.cluster.mps_calls(node)?;
    let is_open = calls.last().is_some_and(|call| call.ends_with("DEFAULT"));
    play.check(is_open, "the GPU's compute mode is DEFAULT again", || format!("{calls:?}"))?;
    play.run_agent(node, TestbedMachine::Laptop).await
}

async fn share<C: Cluster>(play: &mut Play<'_, C>, node: &str, before: usize) -> Result<(), PlayStop> {
    play.enforces(node, Enforcement::MPS, true).await?;
    let calls = play.cluster.mps_calls(node)?.split_off(before);
    let is_exclusive = calls.iter().any(|call| call.ends_with("EXCLUSIVE_PROCESS"));
    let has_limits = calls.iter().any(|call| call.contains("pinned_mem_limit"));
    play.check(
        is_exclusive && !has_limits,
        "the GPU is the daemon's alone, which limits no memory",
        || format!("{calls:?}"),
    )?;
    for (name, cores) in [("small", Some(30_u32)), ("large", Some(70)), ("plain", None)] {
        let asked = pod(name).gpu_mem(2).select(node).grace_seconds(1);
        match cores {
            Some(cores) => {
                let with_cores = asked.annotation(names::GPU_CORES, &cores.to_string());
                play.create(&with_cores, &format!("asks for 2 GiB and {cores} percent"))
                    .await?;
            }
            None => {
                play.create(&asked, "asks for 2 GiB").await?;
            }
        }
    }
    for (name, cores) in [("small", Some("30")), ("large", Some("70")), ("plain", None)] {
        let (_, reports) = play.started("default", name).await?;
        let is_client = |report: &SelfReport| {
            let of = |variable: &str| report.env.get(variable).map(String::as_str);
            of("CUDA_MPS_PIPE_DIRECTORY") == Some(PIPE_OF_SHARES)
                && of(PERCENTAGE) == cores
                && of("CUDA_VISIBLE_DEVICES").is_some_and(|gpu| gpu.starts_with("GPU-"))
                && report.mounts.iter().any(|mount| mount == PIPE_OF_SHARES)
        };
        let share = cores.map_or("no limit of threads".to_owned(), |cores| {
            format!("{cores} percent of the threads")
        });
        play.check(
            reports.iter().all(is_client),
            &format!("{name} is a client with {share}"),
            || format!("{reports:?}"),
        )?;
    }
    Ok(())
}

async fn clients<C: Cluster>(play: &mut Play<'_, C>, node: &str) -> Result<(), PlayStop> {
    let resource = Vendor::Nvidia.whole_resource();
    play.has(node, resource, 4).await?;
    let calls = play.cluster.mps_calls(node)?;
    play.step("told", "nvidia-smi, nvidia-cuda-mps-control", "", calls.clone())?;
    let position = |part: &str| calls.iter().position(|call| call.contains(part));
    let order = ["EXCLUSIVE_PROCESS", "control -d", LIMITS[0], LIMITS[1]].map(position);
    play.check(
        order.iter().all(Option::is_some) && order.is_sorted(),
        "the GPU is the daemon's alone, and the limits are set before the first pod",
        || format!("{calls:?}"),
    )?;
    for name in ["one", "two"] {
        play.create(
            &whole_gpus(name, 1).select(node).grace_seconds(1),
            "asks for 1 nvidia.com/gpu",
        )
        .await?;
    }
    for name in ["one", "two"] {
        is_client(play, name).await?;
    }

    play.scene("mps-control-daemon is killed: the daemon starts again with its limits before another pod starts")
        .await?;
    let before = play.reports().await?;
    play.kill_and_start(ClusterProgram::MpsControlDaemon(node), "mps-control-daemon")
        .await?;
    play.has(node, resource, 4).await?;
    let calls = play.cluster.mps_calls(node)?;
    let told = LIMITS.map(|limit| calls.iter().filter(|call| call.contains(limit)).count());
    play.check(told == [2, 2], "the limits are set again", || format!("{calls:?}"))?;
    play.unmoved(&before).await?;
    play.create(
        &whole_gpus("three", 1).select(node).grace_seconds(1),
        "asks for 1 nvidia.com/gpu",
    )
    .await?;
    is_client(play, "three").await
}

/// Wait until a pod runs, and check that it reaches the daemon.
async fn is_client<C: Cluster>(play: &mut Play<'_, C>, name: &str) -> Result<(), PlayStop> {
    let (_, reports) = play.started("default", name).await?;
    let reaches = |report: &SelfReport| {
        let variable = report.env.get("CUDA_MPS_PIPE_DIRECTORY").map(String::as_str);
        variable == Some(PIPE) && report.mounts.iter().any(|mount| mount == PIPE)
    };
    let holds = gpus(&reports) == ["/dev/nvidia0"] && reports.iter().all(reaches);
    play.check(
        holds,
        &format!("{name} sees the GPU, and the daemon's directory at {PIPE}"),
        || format!("{reports:?}"),
    )?;
    Ok(())
}
