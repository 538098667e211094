//! The guard holds programs to their shares of a GPU (`divvy agent --guard shadow`).
//!
//! The guard is the real one, and programs load it as CUDA's driver library. The driver behind it is simulated. What the driver itself has recorded for
//! each process is what every share is compared with.

use std::io;

use divvy_kube::convert;
use divvy_model::Held;

use super::play::NAMESPACE;
use super::{Play, PlayStop, RunsGpuPrograms};
use crate::builders::{PodBuilder, pod};
use crate::cuda_program::{CudaProgram, FailedAllocation, ProgramAnswer};

const MIB: u64 = 1 << 20;
/// The name by which programs load CUDA's driver library.
const CUDA: &str = "libcuda.so.1";
/// Where a container has the driver's own libraries, and the pod's accounts.
const GUARD: &str = "/run/divvy/";
/// The driver's own file of CUDA's library.
const REAL_CUDA: &str = "/libcuda.so.real";
const OUT_OF_MEMORY: &str = "CUDA_ERROR_OUT_OF_MEMORY";
/// What a context is charged with before its pod has shown what one takes (`divvy_agent_core::GuardedShares`), in MiB.
pub(super) const CONTEXT_CHARGE_MIB: u64 = 512;
/// The events about a program that avoids the guard, and about a pod that uses more than its share, each with a part of its text.
const EVENTS: [(&str, &str); 2] = [
    ("GpuMemoryExceeded", "were granted"),
    ("GuardAvoided", "without Divvy's guard"),
];

/// Which library a program loads.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum LoadedLibrary {
    /// CUDA's driver library by its name, as all programs do.
    Usual,
    /// The driver's own file by its path.
    Real,
}

/// A pod with a program that uses the GPU.
pub(super) struct UsingPod {
    pub(super) pod: &'static str,
    pub(super) program: CudaProgram,
    /// The UUID of its GPU.
    pub(super) gpu: String,
    /// What the pod's allocation says, in MiB.
    pub(super) share: u64,
}

/// The pods are on the first machine.
pub(super) async fn play<C: RunsGpuPrograms>(play: &mut Play<'_, C>) -> Result<(), PlayStop> {
    play.scene("Two pods share a GPU, and the guard enforces their shares: each sees its share as the whole GPU")
        .await?;
    let (node, units) = play.cluster.gpu_machine()?;
    play.cluster.join(&node).await?;
    play.offers(&node, units).await?;
    let (mut greedy, _) = start(play, &node, "greedy", 3, LoadedLibrary::Usual).await?;
    let (mut neighbor, _) = start(play, &node, "neighbor", 5, LoadedLibrary::Usual).await?;
    let args = ["inspect", "gpushare", "-o", "wide", node.as_str()];
    let table = play.run(&format!("kubectl {}", args.join(" ")), &args).await?;
    play.check(table.contains("  guard  "), "it says that the guard enforces shares", || {
        table.clone()
    })?;
    measured(play, &mut greedy).await?;
    measured(play, &mut neighbor).await?;

    play.scene("greedy allocates as much as it can: it is refused at its share, although the GPU has free memory")
        .await?;
    gets(play, &mut neighbor, 1024).await?;
    let refused = fills(play, &mut greedy).await?;
    let free = free_of_gpu(play, &node, &greedy.gpu).await?;
    let text = format!("the GPU itself has {free} MiB free");
    play.check(free > refused.mib, &text, || format!("{refused:?}"))?;

    play.scene("The neighbor goes on, up to its own share").await?;
    gets(play, &mut neighbor, 1024).await?;
    fills(play, &mut neighbor).await?;

    play.scene("A program avoids the guard: it loads the driver's own library by its path, and takes more than its share")
        .await?;
    let (mut bypass, sees) = start(play, &node, "bypass", 2, LoadedLibrary::Real).await?;
    play.check(sees.total_mib > bypass.share, "it sees the whole GPU", || format!("{sees:?}"))?;
    let wanted = bypass.share + 1024;
    gets(play, &mut bypass, wanted).await?;
    let held = held(play, &bypass)?;
    let text = format!("the driver has given it {held} MiB, and its share is {} MiB", bypass.share);
    play.check(held > bypass.share, &text, || format!("{held} MiB"))?;

    play.scene("The agent compares what the driver reports with the shares and with the guard's accounts, and reports the pod")
        .await?;
    for (reason, part) in EVENTS {
        play.event(bypass.pod, reason, part).await?;
    }
    for user in [&greedy, &neighbor] {
        for (reason, _) in EVENTS {
            let events = play.event_texts(user.pod, reason).await?;
            let text = format!("{} has no event {reason}", user.pod);
            play.check(events.is_empty(), &text, || format!("{events:?}"))?;
        }
    }

    play.scene("The programs end, and their memory is free").await?;
    let gpu = greedy.gpu.clone();
    for user in [greedy, neighbor, bypass] {
        let about = format!("{NAMESPACE}/{}", user.pod);
        user.program.end().await?;
        play.step("ended", &about, "its program", Vec::new())?;
    }
    play.eventually("the memory of the programs to be free", async |play| {
        let held: u64 = play.cluster.held(&gpu)?.values().sum();
        Ok(if held == 0 { Ok(()) } else { Err(format!("{held} bytes")) })
    })
    .await?;
    play.step("freed", &gpu, "the driver has recorded no memory of any process", Vec::new())?;
    play.delete_all().await?;
    play.used(&node, 0).await
}

/// Create a pod, and start a program in its container that loads a library and makes a context on the GPU. Return what the program then sees.
pub(super) async fn start<C: RunsGpuPrograms>(
    play: &mut Play<'_, C>,
    node: &str,
    name: &'static str,
    gib: u64,
    library: LoadedLibrary,
) -> Result<(UsingPod, ProgramAnswer), PlayStop> {
    let manifest = pod(name).gpu_mem(gib).select(node).grace_seconds(1);
    let mut user = run(play, node, name, manifest, &format!("asks for {gib} GiB"), library).await?;
    let sees = ask(play, &mut user, "start").await?;
    if library == LoadedLibrary::Usual {
        let text = format!("{name} sees a GPU as large as its share");
        play.check(sees.total_mib == user.share, &text, || format!("{sees:?}"))?;
    }
    Ok((user, sees))
}

/// Create a pod with this name, and start a program in its container. It loads a library when it is asked to.
pub(super) async fn run<C: RunsGpuPrograms>(
    play: &mut Play<'_, C>,
    node: &str,
    name: &'static str,
    manifest: PodBuilder,
    text: &str,
    library: LoadedLibrary,
) -> Result<UsingPod, PlayStop> {
    let manifest = play.cluster.for_programs(manifest, node);
    play.create(&manifest, text).await?;
    let about = format!("{NAMESPACE}/{name}");
    let (object, reports) = play.bound_and_running(NAMESPACE, name).await?;
    let mounts: Vec<String> = reports.into_iter().flat_map(|report| report.mounts).collect();
    let of_guard = mounts.iter().filter(|path| path.starts_with(GUARD)).cloned().collect();
    play.step("started", &about, "its container has what the guard needs:", of_guard)?;
    let found = convert::pod(&object).map_err(|error| io::Error::other(error.to_string()))?;
    let Held::Allocation(allocation) = found.held else {
        return Err(io::Error::other(format!("pod {name} has no allocation")).into());
    };
    let share = allocation
        .gpus
        .first()
        .ok_or_else(|| io::Error::other("an allocation without a GPU"))?;
    let path = match library {
        LoadedLibrary::Usual => Some(CUDA),
        LoadedLibrary::Real => mounts.iter().find(|path| path.ends_with(REAL_CUDA)).map(String::as_str),
    };
    let path = path.ok_or_else(|| io::Error::other(format!("the container of pod {name} has no {REAL_CUDA}")))?;
    let uid = object.metadata.uid.unwrap_or_default();
    Ok(UsingPod {
        pod: name,
        program: play.cluster.start_cuda_program(&uid, "main", path).await?,
        gpu: share.uuid.clone(),
        share: share.memory.0,
    })
}

/// Start another program in a pod's container, as `kubectl exec` does.
pub(super) async fn again<C: RunsGpuPrograms>(play: &mut Play<'_, C>, user: &UsingPod) -> Result<UsingPod, PlayStop> {
    let uid = play.uid(user.pod).await?;
    let mut second = UsingPod {
        pod: user.pod,
        program: play.cluster.start_cuda_program(&uid, "main", CUDA).await?,
        gpu: user.gpu.clone(),
        share: user.share,
    };
    ask(play, &mut second, "start").await?;
    Ok(second)
}

/// Send a request to a pod's program, and tell the listener what the program says.
pub(super) async fn ask<C: RunsGpuPrograms>(
    play: &mut Play<'_, C>,
    user: &mut UsingPod,
    request: &str,
) -> Result<ProgramAnswer, PlayStop> {
    let answer = user.program.ask(request).await?;
    let pid = user.program.pid();
    let about = format!("{NAMESPACE}/{}", user.pod);
    play.step("program", &about, &format!("(PID {pid}) says:"), vec![answer.says.clone()])?;
    Ok(answer)
}

/// Return how much the driver has recorded for a pod's program, in MiB.
pub(super) fn held<C: RunsGpuPrograms>(play: &Play<'_, C>, user: &UsingPod) -> Result<u64, PlayStop> {
    let held = play.cluster.held(&user.gpu)?;
    Ok(held.get(&user.program.pid()).copied().unwrap_or_default() / MIB)
}

/// Wait until the agent has measured what the program's context takes, which no allocation accounts for.
pub(super) async fn measured<C: RunsGpuPrograms>(play: &mut Play<'_, C>, user: &mut UsingPod) -> Result<(), PlayStop> {
    let (program, pod, gpu, share) = (&mut user.program, user.pod, &user.gpu, user.share);
    let rounding = play.cluster.rounding_mib();
    let context = play
        .eventually(&format!("the agent to measure the context of {pod}"), async |play| {
            let answer = program.ask("memory").await?;
            let held = play.cluster.held(gpu)?.get(&program.pid()).copied().unwrap_or_default() / MIB;
            Ok(if (answer.free_mib + held).abs_diff(share) <= rounding {
                Ok(held)
            } else {
                Err(format!("the driver has recorded {held} MiB, and the program says {answer:?}"))
            })
        })
        .await?;
    let text = format!("its context takes {context} MiB of its share, as the agent has measured");
    play.step("measured", &format!("{NAMESPACE}/{pod}"), &text, Vec::new())
}

/// Let a program allocate this much, which must succeed.
pub(super) async fn gets<C: RunsGpuPrograms>(play: &mut Play<'_, C>, user: &mut UsingPod, mib: u64) -> Result<(), PlayStop> {
    let answer = ask(play, user, &format!("allocate {mib}")).await?;
    let text = format!("{} gets {mib} MiB", user.pod);
    play.check(answer.refused.is_none(), &text, || format!("{answer:?}"))?;
    Ok(())
}

/// Let a program allocate until it is refused, which must happen at its share. Return what was refused.
pub(super) async fn fills<C: RunsGpuPrograms>(play: &mut Play<'_, C>, user: &mut UsingPod) -> Result<FailedAllocation, PlayStop> {
    fills_within(play, user, play.cluster.rounding_mib()).await
}

/// The same for a program that may have so many MiB more or less than its share.
pub(super) async fn fills_within<C: RunsGpuPrograms>(
    play: &mut Play<'_, C>,
    user: &mut UsingPod,
    mib: u64,
) -> Result<FailedAllocation, PlayStop> {
    let answer = ask(play, user, "fill").await?;
    let refused = answer
        .refused
        .ok_or_else(|| io::Error::other("the program was never refused"))?;
    let text = format!("{} is refused with {OUT_OF_MEMORY}", user.pod);
    play.check(refused.error == OUT_OF_MEMORY, &text, || format!("{refused:?}"))?;
    let held = held(play, user)?;
    let text = match mib {
        0 => "exactly its share".to_owned(),
        mib => format!("its share, within {mib} MiB"),
    };
    let text = format!("the driver has given {} {text}, {} MiB", user.pod, user.share);
    play.check(held.abs_diff(user.share) <= mib, &text, || format!("{held} MiB"))?;
    Ok(refused)
}

/// Return how much of a GPU's memory no process has, in MiB: what its node says that it has, less what the driver has recorded.
async fn free_of_gpu<C: RunsGpuPrograms>(play: &Play<'_, C>, node: &str, gpu: &str) -> Result<u64, PlayStop> {
    let node = divvy_kube::list::node(&play.cluster.client(), node).await;
    let node = node.map_err(|error| io::Error::other(error.to_string()))?;
    let inventory = node.inventory.and_then(Result::ok);
    let total = inventory.and_then(|inventory| inventory.gpu(gpu).map(|gpu| gpu.total.0));
    let total = total.ok_or_else(|| io::Error::other(format!("the node does not list {gpu}")))?;
    let held: u64 = play.cluster.held(gpu)?.values().sum();
    Ok(total.saturating_sub(held / MIB))
}
