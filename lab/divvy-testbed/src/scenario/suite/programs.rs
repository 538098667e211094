//! Programs in containers are held to their shares by the guard (`divvy agent --guard shadow`). The scene `guard` is about containers without programs.

use divvy_model::Enforcement;
use serde_json::{Value, json};

use super::node_configs::configure;
use crate::scenario::isolation::{self, LoadedLibrary, UsingPod};
use crate::scenario::play::NAMESPACE;
use crate::scenario::{ClusterProgram, End, NodeConfigs, Play, PlayStop, RunsGpuPrograms, TestbedMachine};

/// Where another version of the guard is on the node. `/etc/cdi` is used here because each node has its own.
const DIRECTORY: &str = "/etc/cdi";
const LIBRARIES: [&str; 2] = ["libdivvy-guard.so", "libdivvy-guard-nvml.so"];

/// The machine has one GPU of 16 GiB.
pub(in crate::scenario) async fn play<C: RunsGpuPrograms>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene("The node's driver gets libraries that programs can load, and the agent gets the guard")
        .await?;
    let node = play.ready(TestbedMachine::Laptop).await?;
    play.cluster.provide_cuda(&node, true)?;
    let played = guarded(play, &node).await;
    let restored = restored(play, &node, TestbedMachine::Laptop).await;
    played.and(restored)
}

async fn guarded<C: RunsGpuPrograms>(play: &mut Play<'_, C>, node: &str) -> Result<(), PlayStop> {
    configure(play, json!({"default": {"guard": "shadow", "on-escape": "event"}})).await?;
    play.enforces(node, Enforcement::GUARD, true).await?;
    isolation::play(play).await?;
    replaced(play, node).await?;
    killed(play, node).await?;
    evicted(play, node).await
}

/// End the pods, and let the node have what it had before.
pub(super) async fn restored<C: RunsGpuPrograms>(
    play: &mut Play<'_, C>,
    node: &str,
    machine: TestbedMachine,
) -> Result<(), PlayStop> {
    play.delete_all().await?;
    play.cluster.configure_nodes(&NodeConfigs::new()).await?;
    play.cluster.provide_cuda(node, false)?;
    play.offers(node, machine.units()).await
}

/// The agent ends, and another one has another version of the guard.
async fn replaced<C: RunsGpuPrograms>(play: &mut Play<'_, C>, node: &str) -> Result<(), PlayStop> {
    play.scene("The agent is killed while programs run: each stays within its share")
        .await?;
    let (mut greedy, _) = isolation::start(play, node, "greedy", 3, LoadedLibrary::Usual).await?;
    let (mut neighbor, _) = isolation::start(play, node, "neighbor", 5, LoadedLibrary::Usual).await?;
    isolation::measured(play, &mut greedy).await?;
    isolation::measured(play, &mut neighbor).await?;
    play.cluster.stop(ClusterProgram::Agent(node), End::Killed).await?;
    play.step("killed", &format!("the agent of {node}"), "kill -9", Vec::new())?;
    isolation::gets(play, &mut neighbor, 1024).await?;
    isolation::fills(play, &mut greedy).await?;
    play.cluster.start(ClusterProgram::Agent(node)).await?;
    play.offers(node, TestbedMachine::Laptop.units()).await?;

    play.scene(
        "The agent gets another version of the guard: programs of running pods keep theirs, and a new pod gets the new one",
    )
    .await?;
    let from = play.cluster.guard_libraries()?;
    for library in LIBRARIES {
        let mut content = std::fs::read(from.join(library))?;
        // The loader reads only what the headers describe.
        content.extend_from_slice(b"another version");
        let path = format!("{DIRECTORY}/{library}");
        play.cluster.place(node, &path, Some(&content))?;
    }
    let directory = play.cluster.agents_path(node, DIRECTORY);
    let settings = json!({"guard": "shadow", "guard-dir": directory, "on-escape": "event"});
    restart_with(play, node, settings).await?;
    let (mut late, _) = isolation::start(play, node, "late", 2, LoadedLibrary::Usual).await?;
    isolation::measured(play, &mut late).await?;
    isolation::fills(play, &mut late).await?;
    isolation::gets(play, &mut neighbor, 512).await?;
    let mut second = isolation::again(play, &neighbor).await?;
    play.eventually("the agent to measure the context of the other program", async |play| {
        let answer = second.program.ask("memory").await?;
        let held = isolation::held(play, &neighbor)? + isolation::held(play, &second)?;
        Ok(if answer.free_mib + held == neighbor.share {
            Ok(())
        } else {
            Err(format!("the driver has recorded {held} MiB, and the program says {answer:?}"))
        })
    })
    .await?;
    let answer = isolation::ask(play, &mut second, "fill").await?;
    let held = isolation::held(play, &neighbor)? + isolation::held(play, &second)?;
    play.check(
        answer.total_mib == neighbor.share && held == neighbor.share,
        "another program in neighbor's container gets the rest of neighbor's share, and no more",
        || format!("the driver has given both {held} MiB; {answer:?}"),
    )?;
    end(play, [greedy, neighbor, late, second]).await?;
    for library in LIBRARIES {
        play.cluster.place(node, &format!("{DIRECTORY}/{library}"), None)?;
    }
    Ok(())
}

/// The agent kills a program that avoids the guard.
async fn killed<C: RunsGpuPrograms>(play: &mut Play<'_, C>, node: &str) -> Result<(), PlayStop> {
    play.scene("With --on-escape kill, a program that avoids the guard is killed; its neighbor goes on")
        .await?;
    restart_with(play, node, json!({"guard": "shadow", "on-escape": "kill"})).await?;
    let (mut neighbor, _) = isolation::start(play, node, "neighbor", 5, LoadedLibrary::Usual).await?;
    let (mut bypass, _) = isolation::start(play, node, "bypass", 2, LoadedLibrary::Real).await?;
    let program = &mut bypass.program;
    let text = play
        .eventually("the agent to kill the program", async |_| {
            Ok(match program.ask("memory").await {
                Ok(answer) => Err(format!("it says: {}", answer.says)),
                Err(error) => Ok(error.to_string()),
            })
        })
        .await?;
    play.step("killed", &format!("{NAMESPACE}/{}", bypass.pod), &text, Vec::new())?;
    play.event(bypass.pod, "GuardAvoided", "The agent kills such processes")
        .await?;
    isolation::gets(play, &mut neighbor, 1024).await?;
    end(play, [neighbor, bypass]).await
}

/// The extender evicts the pod of such a program.
async fn evicted<C: RunsGpuPrograms>(play: &mut Play<'_, C>, node: &str) -> Result<(), PlayStop> {
    play.scene("With --on-escape evict, the extender evicts the pod of such a program")
        .await?;
    restart_with(play, node, json!({"guard": "shadow", "on-escape": "evict"})).await?;
    let (mut neighbor, _) = isolation::start(play, node, "neighbor", 5, LoadedLibrary::Usual).await?;
    let (bypass, _) = isolation::start(play, node, "bypass", 2, LoadedLibrary::Real).await?;
    let pods = play.pods(NAMESPACE);
    play.eventually("the pod to be evicted", async |_| {
        Ok(match pods.get_opt(bypass.pod).await {
            Ok(None) => Ok(()),
            Ok(Some(_)) => Err("it is there".to_owned()),
            Err(error) => Err(error.to_string()),
        })
    })
    .await?;
    play.step("evicted", &format!("{NAMESPACE}/{}", bypass.pod), "it is gone", Vec::new())?;
    play.event(bypass.pod, "GuardAvoided", "The pod is evicted").await?;
    isolation::gets(play, &mut neighbor, 1024).await?;
    end(play, [neighbor, bypass]).await
}

/// Give the agents these settings, and start the node's agent again.
/// The machine is the first one.
pub(super) async fn restart_with<C: RunsGpuPrograms>(
    play: &mut Play<'_, C>,
    node: &str,
    settings: Value,
) -> Result<(), PlayStop> {
    configure(play, json!({"default": settings})).await?;
    play.cluster.stop(ClusterProgram::Agent(node), End::Stopped).await?;
    // A kubelet permanently rejects a pod that it gets after the agent has ended and before it knows.
    play.offers(node, 0).await?;
    play.cluster.start(ClusterProgram::Agent(node)).await?;
    play.offers(node, TestbedMachine::Laptop.units()).await
}

/// End the programs and delete the pods.
async fn end<C: RunsGpuPrograms, const N: usize>(play: &mut Play<'_, C>, users: [UsingPod; N]) -> Result<(), PlayStop> {
    for user in users {
        user.program.end().await?;
    }
    play.delete_all().await
}
