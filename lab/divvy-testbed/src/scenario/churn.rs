//! The scenes in which pods are created and deleted at random while programs are killed. A thread inspects the running containers all the time.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use divvy_model::{Vendor, names};
use divvy_testkit::dice::Dice;
use kube::api::DeleteParams;
use tokio::time::Instant;

use super::history::{AuditHistory, ContainerReports};
use super::play::NAMESPACE;
use super::{Cluster, ClusterProgram, End, Living, Play, PlayStop, TestbedMachine, WholeOffer, Witness};
use crate::builders::{PodBuilder, pod};

/// How long the scene runs, and with which random seed.
#[derive(Debug, Clone, Copy)]
pub struct Churn {
    /// How long pods are created and deleted.
    pub time: Duration,
    /// The seed of the random actions. The same seed repeats the actions, but not their exact times.
    pub seed: u64,
}

/// The interval between two inspections of the running containers.
const INSPECT_EVERY: Duration = Duration::from_millis(20);

/// What the inspections found.
#[derive(Debug, Default)]
struct InspectionFindings {
    samples: u64,
    most_units: u64,
    /// The problems, one per line.
    wrong: Vec<String>,
}

/// Random pods with shares of one GPU.
pub(super) async fn shares<C: Cluster>(play: &mut Play<'_, C>, churn: Churn) -> Result<(), PlayStop> {
    play.scene(&format!(
        "Pods are created and deleted for {} s while agent, extender, kubelet and containerd are killed (seed {})",
        churn.time.as_secs(),
        churn.seed
    ))
    .await?;
    let node = play.ready(TestbedMachine::Laptop).await?;
    run(play, &node, churn, &|roll, name| pod(name).gpu_mem(roll(9) + 1)).await?;
    play.create(&pod("all").gpu_mem(16).select(&node), "asks for all 16 GiB")
        .await?;
    play.started("default", "all").await.map(drop)
}

/// Random pods with shares and with whole GPUs, on a node with three GPUs.
pub(super) async fn whole<C: Cluster>(play: &mut Play<'_, C>, churn: Churn) -> Result<(), PlayStop> {
    play.scene(&format!(
        "Pods with shares and with whole GPUs are created and deleted for {} s while programs are killed (seed {})",
        churn.time.as_secs(),
        churn.seed
    ))
    .await?;
    let node = play.ready(TestbedMachine::Mixed).await?;
    play.cluster.offer_whole(WholeOffer::Mixed).await?;
    let played = whole_and_shares(play, &node, churn).await;
    play.clear().await?;
    // The next scene expects shares only.
    play.cluster.offer_whole(WholeOffer::Nothing).await?;
    played
}

async fn whole_and_shares<C: Cluster>(play: &mut Play<'_, C>, node: &str, churn: Churn) -> Result<(), PlayStop> {
    let resource = Vendor::Nvidia.whole_resource();
    play.has(node, resource, 3).await?;
    let random = |roll: &mut dyn FnMut(u64) -> u64, name: &str| match roll(8) {
        0..=3 => pod(name).gpu_mem(roll(15) + 1),
        4..=6 => pod(name).limit(resource, &(roll(2) + 1).to_string()),
        // No extender places it. It may wait for a free GPU as long as the others run.
        _ => pod(&format!("{PAST}{name}")).limit(resource, "1").on_node(node),
    };
    run(play, node, churn, &random).await?;
    play.create(&pod("all").limit(resource, "3").select(node), "asks for all 3 GPUs")
        .await?;
    play.started("default", "all").await.map(drop)
}

/// The prefix of the names of pods that bypass the scheduler and the extender.
const PAST: &str = "past-";

/// A function that returns a random pod with a given name. It gets a random function, which returns a number below its argument.
type RandomPod<'a> = dyn Fn(&mut dyn FnMut(u64) -> u64, &str) -> PodBuilder + 'a;

async fn run<C: Cluster>(play: &mut Play<'_, C>, node: &str, churn: Churn, random: &RandomPod<'_>) -> Result<(), PlayStop> {
    let history = AuditHistory::begin(play).await?;
    let ended = Arc::new(AtomicBool::new(false));
    let looks = tokio::task::spawn_blocking({
        let (witness, ended, reports) = (play.cluster.witness(), ended.clone(), history.reports());
        move || inspect(witness, reports, &ended)
    });
    let acted = act(play, node, churn, random).await;
    if acted.is_ok() {
        settled(play).await?;
    }
    let cleared = play.clear().await;
    ended.store(true, Ordering::Relaxed);
    let looks = looks.await.map_err(io::Error::other)?;
    let (created, kills) = acted?;
    let kills: Vec<String> = kills.iter().map(|(what, times)| format!("{what} {times} times")).collect();
    play.step(
        "killed",
        &kills.join(", "),
        &format!("while {created} pods were created"),
        Vec::new(),
    )?;
    play.measured(&format!(
        "{} inspections of the running containers, at most {} units in use at once",
        looks.samples, looks.most_units
    ))?;
    play.check(
        looks.wrong.is_empty() && looks.samples > 0,
        "the programs on a GPU never had more memory than the GPU has, and none ran without a grant",
        || looks.wrong.join("\n"),
    )?;
    play.check(looks.most_units > 0, "programs ran meanwhile", || "none ran".to_owned())?;
    history.end(play)?;
    cleared
}

async fn act<C: Cluster>(
    play: &mut Play<'_, C>,
    node: &str,
    churn: Churn,
    random: &RandomPod<'_>,
) -> Result<(u64, BTreeMap<&'static str, u64>), PlayStop> {
    let mut dice = Dice::new(churn.seed);
    let mut roll = |sides: u64| dice.number() % sides;
    let until = Instant::now() + churn.time;
    let (mut created, mut kills) = (0, BTreeMap::new());
    while Instant::now() < until {
        match roll(10) {
            0..=4 => {
                let mut manifest = random(&mut roll, &format!("c{created}"))
                    .grace_seconds(roll(4) + 1)
                    .select(node);
                if roll(3) == 0 {
                    manifest = manifest.args(&["run", "--ignore-term"]);
                }
                play.create_quietly(&manifest).await?;
                created += 1;
            }
            choice @ 5..=8 => {
                // Mostly choose bound pods: many pods wait, and deleting a waiting pod frees no memory.
                let any = roll(4) == 0;
                let pods = play.all_pods().await?;
                let chosen = pods.into_iter().filter(|pod| any || pod.spec.node_name.is_some());
                let names: Vec<String> = chosen.filter_map(|pod| pod.metadata.name).collect();
                let dice = usize::try_from(roll(1 << 16)).unwrap_or(0);
                if let Some(name) = dice.checked_rem(names.len()).and_then(|index| names.get(index)) {
                    let grace = (choice == 8).then_some(0);
                    let params = DeleteParams {
                        grace_period_seconds: grace,
                        ..DeleteParams::default()
                    };
                    match play.pods(NAMESPACE).delete(name, &params).await {
                        Err(kube::Error::Api(status)) if status.code == 404 => {}
                        other => drop(other.map_err(|source| super::play::stop_api(format!("pod {name}"), source))?),
                    }
                }
            }
            _ => {
                let (name, part) = match roll(4) {
                    0 => ("agent", ClusterProgram::Agent(node)),
                    1 => ("extender", ClusterProgram::Extender),
                    2 => ("kubelet", ClusterProgram::Kubelet(node)),
                    _ => ("containerd", ClusterProgram::Runtime(node)),
                };
                play.cluster.stop(part, End::Killed).await?;
                tokio::time::sleep(Duration::from_millis(roll(900))).await;
                play.cluster.start(part).await?;
                *kills.entry(name).or_insert(0) += 1;
            }
        }
        tokio::time::sleep(Duration::from_millis(roll(400))).await;
    }
    Ok((created, kills))
}

/// Wait until every pod runs, waits for room, or has ended, and no pod is being deleted.
async fn settled<C: Cluster>(play: &Play<'_, C>) -> Result<(), PlayStop> {
    play.eventually("the pods to settle", async |play| {
        let pods = play.all_pods().await?;
        let placed = pods
            .iter()
            .filter(|pod| !pod.metadata.name.as_deref().is_some_and(|name| name.starts_with(PAST)));
        let mut placed = placed.chain(pods.iter().filter(|pod| pod.metadata.deletion_timestamp.is_some()));
        let unsettled = placed.find(|pod| {
            let pending = pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Pending");
            pod.metadata.deletion_timestamp.is_some() || (pending && pod.spec.node_name.is_some())
        });
        Ok(unsettled.map_or(Ok(()), |pod| {
            let name = pod.metadata.name.as_deref().unwrap_or_default();
            Err(format!("{name}: {}", super::play::state(pod)))
        }))
    })
    .await
}

fn inspect(mut witness: Witness, mut reports: ContainerReports, ended: &AtomicBool) -> InspectionFindings {
    let mut looks = InspectionFindings::default();
    while !ended.load(Ordering::Relaxed) {
        match witness() {
            Ok(living) => {
                reports.see(&living);
                let found = judge(&living);
                looks.most_units = looks.most_units.max(found.0);
                looks.wrong.extend(found.1);
                looks.samples += 1;
            }
            Err(error) => looks.wrong.push(format!("the machines could not be inspected: {error}")),
        }
        std::thread::sleep(INSPECT_EVERY);
    }
    looks
}

/// Return the units in use and the problems found, judged by the containers' own environment variables and device nodes. A container
/// with whole GPUs has no variables about units.
fn judge(living: &[Living]) -> (u64, Vec<String>) {
    let mut wrong = Vec::new();
    let mut used: BTreeMap<(&str, u64), (u64, u64, Vec<&str>)> = BTreeMap::new();
    let mut whole: BTreeMap<(&str, u64), BTreeSet<&str>> = BTreeMap::new();
    for container in living {
        let number = |key: &str| container.env.get(key).and_then(|text| text.parse::<u64>().ok());
        let parts = (
            number(names::ALIYUN_IDX),
            number(names::ALIYUN_CONTAINER),
            number(names::ALIYUN_DEV),
        );
        let void = container.env.get(names::VISIBLE_DEVICES).map(String::as_str) == Some(names::VISIBLE_NONE);
        let devices = container.devices.iter();
        let gpus: Vec<u64> = devices
            .filter_map(|path| path.strip_prefix("/dev/nvidia")?.parse().ok())
            .collect();
        if parts == (None, None, None) && void && !gpus.is_empty() {
            for gpu in gpus {
                whole.entry((&container.node, gpu)).or_default().insert(&container.pod_uid);
            }
            continue;
        }
        let (Some(index), Some(units), Some(has), true) = (parts.0, parts.1, parts.2, void) else {
            wrong.push(format!(
                "on {} pod {} runs without a grant: {:?}",
                container.node, container.pod_uid, container.env
            ));
            continue;
        };
        let gpu = used.entry((&container.node, index)).or_default();
        gpu.0 += units;
        gpu.1 = has;
        gpu.2.push(&container.pod_uid);
    }
    for ((node, index), (units, has, pods)) in &used {
        if units > has {
            wrong.push(format!(
                "GPU {index} of {node}: {units} of {has} in use, by {}",
                pods.join(", ")
            ));
        }
    }
    for (gpu @ (node, index), pods) in &whole {
        let sharing = used.get(gpu).map_or(&[][..], |(.., pods)| pods);
        let all: BTreeSet<&str> = pods.iter().chain(sharing).copied().collect();
        if all.len() > 1 {
            let all: Vec<&str> = all.into_iter().collect();
            wrong.push(format!(
                "GPU {index} of {node} is taken as a whole, and used by {}",
                all.join(", ")
            ));
        }
    }
    (used.values().map(|(units, ..)| units).sum(), wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn living(pod: &str, index: &str, units: &str) -> Living {
        let env = [
            (names::ALIYUN_IDX, index),
            (names::ALIYUN_CONTAINER, units),
            (names::ALIYUN_DEV, "16"),
            (names::VISIBLE_DEVICES, names::VISIBLE_NONE),
        ];
        Living {
            node: "n1".to_owned(),
            pod_uid: pod.to_owned(),
            container: "main".to_owned(),
            id: format!("id-{pod}"),
            devices: Vec::new(),
            env: env.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
        }
    }

    #[test]
    fn an_overcommitted_gpu_and_a_program_without_a_grant_are_seen() {
        let sound = [living("a", "0", "10"), living("b", "0", "6"), living("c", "1", "16")];
        assert_eq!(judge(&sound), (32, Vec::new()));
        let over = [living("a", "0", "10"), living("b", "0", "7")];
        assert_eq!(judge(&over).1, ["GPU 0 of n1: 17 of 16 in use, by a, b"]);
        let taken = |pod: &str, gpus: &[&str]| Living {
            devices: gpus.iter().map(|gpu| (*gpu).to_owned()).collect(),
            env: BTreeMap::from([(names::VISIBLE_DEVICES.to_owned(), names::VISIBLE_NONE.to_owned())]),
            ..living(pod, "0", "1")
        };
        let beside = [
            living("a", "0", "10"),
            taken("b", &["/dev/nvidiactl", "/dev/nvidia1", "/dev/nvidia2"]),
        ];
        assert_eq!(judge(&beside), (10, Vec::new()));
        let on = [
            living("a", "1", "10"),
            taken("b", &["/dev/nvidia1"]),
            taken("c", &["/dev/nvidia2"]),
        ];
        assert_eq!(judge(&on).1, ["GPU 1 of n1 is taken as a whole, and used by a, b"]);
        assert_eq!(judge(&[taken("b", &["/dev/nvidiactl"])]).1.len(), 1, "it has no GPU");
        for key in [names::ALIYUN_IDX, names::VISIBLE_DEVICES] {
            let mut bare = living("a", "0", "1");
            bare.env.remove(key);
            assert_eq!(judge(&[bare]).1.len(), 1, "{key}");
        }
    }
}
