//! `nvidia-device-plugin` and `mps-control-daemon` share a GPU through MPS (`sharing.mps`).
//!
//! The driver's programs are scripts that record their calls. What the control daemon does with the limits is not simulated.

use divvy_model::Vendor;

use super::whole::whole_gpus;
use crate::scenario::devices::gpus;
use crate::scenario::{Cluster, Machine, Part, Play, Plugin, Report, Stop};

const PIPE: &str = "/mps/nvidia.com/gpu/pipe";
/// The commands that set the limits of each client before the control daemon serves: a quarter of 16 GiB, and a quarter of the threads.
const LIMITS: [&str; 2] = [
    "set_default_device_pinned_mem_limit 0 4096M",
    "set_default_active_thread_percentage 25",
];

/// The machine has one GPU.
pub(in crate::scenario) async fn mps<C: Cluster>(play: &mut Play<'_, C>) -> Result<(), Stop> {
    play.scene(
        "nvidia-device-plugin and mps-control-daemon run in place of the agent: four pods can use the GPU at the same time",
    )
    .await?;
    let node = play.ready(Machine::Laptop).await?;
    let config = format!(
        "version: v1\nsharing:\n  mps:\n    resources:\n    - name: {}\n      replicas: 4\n",
        Vendor::Nvidia.whole_resource()
    );
    let plugin = Plugin {
        config: &config,
        with_mps: true,
    };
    play.run_plugin(&node, plugin).await?;
    let played = clients(play, &node).await;
    play.scene("The agent runs again, and the GPU is everyone's").await?;
    let restored = play.run_agent(&node, Machine::Laptop).await;
    played.and(restored)?;
    let calls = play.cluster.mps_calls(&node)?;
    let is_open = calls
        .last()
        .is_some_and(|call| call.starts_with("nvidia-smi") && call.ends_with("DEFAULT"));
    play.check(is_open, "the GPU's compute mode is DEFAULT again", || format!("{calls:?}"))?;
    Ok(())
}

async fn clients<C: Cluster>(play: &mut Play<'_, C>, node: &str) -> Result<(), Stop> {
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
    play.kill_and_start(Part::MpsControlDaemon(node), "mps-control-daemon")
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
async fn is_client<C: Cluster>(play: &mut Play<'_, C>, name: &str) -> Result<(), Stop> {
    let (_, reports) = play.started("default", name).await?;
    let reaches = |report: &Report| {
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
