//! Measures the longest time for which one call holds the core's lock, for the worst requests of pods, inventories of nodes, and
//! earlier events.

use std::time::Duration;

use divvy_bench::cluster::scattered;
use divvy_extender::core::{BindArgs, CoreTiming, Eviction, ExtenderAction, ExtenderCore, Now, Posted};
use divvy_kube::convert::ReadPod;
use divvy_kube::objects::PodObject;
use divvy_kube::watch::WatchChange;
use divvy_model::limits::{DEVICE_TEXT_BYTES, RULE_BYTES, RULE_PATTERNS, RULE_UUIDS};
use divvy_model::{Gpu, GpuLink, LinkKind, MemoryUnit, MiB, Node};
use divvy_testkit::nodes::divvy_node;
use serde_json::{Value, json};

use crate::Outcome;

const BUDGET: Duration = Duration::from_millis(10);
const GPUS: usize = 8;
/// The memory of an ordinary GPU in MiB. The unit is 1 MiB, so that sizes can differ as much as possible.
const SIZE: u64 = 40_960;
/// kube-scheduler searches for victims on one in this many nodes.
const PREEMPTED: usize = 10;

fn at(ms: u64) -> Now {
    Now {
        monotonic_ns: (10_000 + ms) * 1_000_000,
        unix_ns: 0,
    }
}

/// Return the CPU time of this thread, which does not depend on other load of the machine.
fn worked() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(
        u64::try_from(now.tv_sec).unwrap_or(0),
        u32::try_from(now.tv_nsec).unwrap_or(0),
    )
}

fn held<T>(longest: &mut Duration, call: impl FnOnce() -> T) -> T {
    let began = worked();
    let answer = call();
    *longest = (*longest).max(worked().saturating_sub(began));
    answer
}

fn name(node: usize) -> String {
    format!("gpu-node-{node:05}")
}

/// Return a node with this number of GPUs. `each` changes each GPU.
fn node(number: usize, gpus: usize, each: impl Fn(usize, &mut Gpu)) -> Node {
    let mut node = divvy_node(&name(number), &vec![SIZE; gpus]);
    if let Some(Ok(inventory)) = &mut node.inventory {
        inventory.unit = MemoryUnit::MIB;
        for (at, gpu) in inventory.gpus.iter_mut().enumerate() {
            gpu.uuid = format!("GPU-{number:08x}-{at:04x}-4000-8000-000000000000");
            gpu.pci = format!("0000:{at:02x}:00.0");
            gpu.model = "NVIDIA A100-SXM4-40GB".to_owned();
            gpu.cc = "8.0".to_owned();
            (gpu.sms, gpu.clock_mhz, gpu.bandwidth_gbs) = (108, 1410, 1555);
            each(at, gpu);
            gpu.total = MiB(gpu.units);
        }
        node.capacity_units = inventory.total_units();
    }
    Node {
        uid: format!("node-{number}"),
        cpu_milli: 128_000,
        memory_bytes: 1 << 40,
        pods: 110,
        ..node
    }
}

fn pod(name: &str, units: u64, cpu: &str, priority: i32, annotations: &Value) -> Outcome<ReadPod> {
    let object: PodObject = serde_json::from_value(json!({
        "metadata": {"name": name, "namespace": "team-a", "uid": format!("uid-{name}"), "annotations": annotations},
        "spec": {"priority": priority, "containers": [{"name": "main", "resources": {"limits":
            {"aliyun.com/gpu-mem": units.to_string(), "cpu": cpu, "memory": "1Gi"}}}]},
        "status": {"phase": "Pending"}
    }))?;
    Ok(ReadPod::from(object))
}

fn bound(number: usize, node: usize, gpu: usize, units: u64) -> Outcome<ReadPod> {
    let uuid = format!("GPU-{node:08x}-{gpu:04x}-4000-8000-000000000000");
    let allocation =
        json!({"v": 1, "gpus": [{"uuid": uuid, "memMiB": units}], "containers": {"main": [{"uuid": uuid, "memMiB": units}]}});
    let object: PodObject = serde_json::from_value(json!({
        "metadata": {"name": format!("b-{number}"), "namespace": "team-a", "uid": format!("uid-b-{number}"),
            "annotations": {"divvy.dev/allocation": allocation.to_string()}},
        "spec": {"nodeName": name(node), "containers": [{"name": "main", "resources": {"limits":
            {"aliyun.com/gpu-mem": units.to_string(), "cpu": "1", "memory": "1Gi"}}}]},
        "status": {"phase": "Running", "containerStatuses": [{"state": {"running": {}}}]}
    }))?;
    Ok(ReadPod::from(object))
}

/// Return a pod that would have room on the first node if all other pods were gone.
fn nominated(number: usize) -> Outcome<ReadPod> {
    let object: PodObject = serde_json::from_value(json!({
        "metadata": {"name": format!("n-{number}"), "namespace": "team-a", "uid": format!("uid-n-{number}"),
            "annotations": {"divvy.dev/gpus": GPUS.to_string()}},
        "spec": {"priority": 2_000, "containers": [{"name": "main", "resources": {"limits":
            {"aliyun.com/gpu-mem": (GPUS as u64 * 39_000).to_string()}}}]},
        "status": {"phase": "Pending", "nominatedNodeName": name(0)}
    }))?;
    Ok(ReadPod::from(object))
}

/// Return a value of `divvy.dev/gpu-model` with as many patterns as the limits allow. Each is as long and as hard to match as
/// possible.
fn worst_rule(sign: &str) -> String {
    let each = RULE_BYTES / RULE_PATTERNS - 1 - sign.len();
    let pattern = "n*".repeat(each / 2);
    vec![format!("{sign}{}q", &pattern[..each - 1]); RULE_PATTERNS].join(",")
}

/// Return the most expensive pods: their names, requests, and rules.
fn pods() -> Vec<(&'static str, u64, Value)> {
    let uuids = vec!["GPU-00000001-0001-4000-8000-00000000000f"; RULE_UUIDS].join(",");
    vec![
        ("plain", 4_096, json!({})),
        (
            "32 patterns that match nothing",
            4_096,
            json!({"divvy.dev/gpu-model": worst_rule("")}),
        ),
        (
            "32 patterns that deny nothing",
            4_096,
            json!({"divvy.dev/gpu-model": worst_rule("!"), "divvy.dev/gpu-prefer": "fastest"}),
        ),
        ("16 UUIDs that are not there", 4_096, json!({"divvy.dev/gpu-uuid": uuids})),
        (
            "8 GPUs, 32 patterns",
            8 * 4_096,
            json!({"divvy.dev/gpus": "8", "divvy.dev/gpu-model": worst_rule("!")}),
        ),
        ("16 GPUs", 16 * 512, json!({"divvy.dev/gpus": "16"})),
        (
            "rules that cannot be read",
            4_096,
            json!({"divvy.dev/gpu-model": "!".repeat(RULE_BYTES)}),
        ),
        (
            "250 kB of patterns",
            4_096,
            json!({"divvy.dev/gpu-model": vec!["!a"; 83_000].join(",")}),
        ),
    ]
}

#[derive(Default)]
struct Holds {
    filter: Duration,
    prioritize: Duration,
    preempt: Duration,
    bind: Duration,
    pod: Duration,
    node: Duration,
}

/// Call all verbs for each of the pods. For each verb, measure the first call after a change, and some further calls.
fn ask(core: &mut ExtenderCore, names: &[String], proposed: &[Eviction], holds: &mut Holds) -> Outcome<()> {
    for (number, (what, units, annotations)) in pods().into_iter().enumerate() {
        let name = format!("ask-{number}");
        let read = pod(&name, units, "1", 1_000, &annotations)?;
        let value = read.pod().clone();
        held(&mut holds.pod, || core.pod_change(WatchChange::Apply(read), at(5_000)));
        let all = || names.iter().map(String::as_str);
        let mut passed = Vec::new();
        for _ in 0..3 {
            let answer = held(&mut holds.filter, || core.filter_at(&value, all(), at(5_000)));
            passed = answer.map(|answer| answer.passed).unwrap_or_default();
            held(&mut holds.prioritize, || core.prioritize(&value, all()))?;
        }
        for chunk in proposed.chunks(divvy_extender::core::EVICTIONS_AT_ONCE) {
            let chunk = chunk.to_vec();
            held(&mut holds.preempt, || core.preempt(&value, chunk))?;
        }
        // The first node is the hardest to choose GPUs on.
        let nodes = passed.first().copied().into_iter().chain([0]);
        for on in nodes {
            let args = BindArgs {
                pod_name: name.clone(),
                pod_namespace: "team-a".to_owned(),
                pod_uid: format!("uid-{name}"),
                node: names[on].clone(),
            };
            let (_, actions) = held(&mut holds.bind, || core.begin_bind(args, at(5_000)));
            for action in actions {
                match action {
                    ExtenderAction::Post { op, .. } => {
                        held(&mut holds.bind, || {
                            core.posted(op, Posted::Refused("no".to_owned()), at(5_000))
                        });
                    }
                    ExtenderAction::Answer { .. } => {}
                    other => return Err(format!("{what}: {other:?}").into()),
                }
            }
        }
    }
    Ok(())
}

struct Scene {
    what: &'static str,
    /// Makes the node with this number.
    node: Box<dyn Fn(usize) -> Node>,
    /// The number of pods that were created and deleted before.
    history: usize,
    /// The number of pods that are bound to each node.
    pods: usize,
    /// The number of times that one node changes its inventory.
    changes: usize,
    /// The number of further pods that are bound to the first node.
    crowd: usize,
    /// The number of pods that are nominated to the first node.
    nominated: usize,
}

fn scenes() -> Vec<Scene> {
    let ordinary = move |number: usize| node(number, GPUS, |_, _| {});
    let scene = |what: &'static str, node: Box<dyn Fn(usize) -> Node>| Scene {
        what,
        node,
        history: 0,
        pods: 8,
        changes: 0,
        crowd: 0,
        nominated: 0,
    };
    let shapes = move |number: usize| Node {
        cpu_milli: 128_000 - number as u64,
        memory_bytes: (1 << 40) - ((number as u64) << 21),
        ..ordinary(number)
    };
    let sizes = move |number: usize| node(number, GPUS, |gpu, it| it.units = SIZE + (number * GPUS + gpu) as u64);
    let linked = move |number: usize| match number % 50 {
        0 => node(number, 64, |gpu, it| {
            let link = |peer: usize| GpuLink {
                peer: format!("GPU-{number:08x}-{peer:04x}-4000-8000-000000000000"),
                kind: LinkKind::NvLink,
                count: (scattered(gpu * 64 + peer) % 900) as u32,
            };
            it.links = (0..64).filter(|peer| *peer != gpu).map(link).collect();
        }),
        1 => node(number, 16, |gpu, it| {
            let link = |peer: usize| GpuLink {
                peer: format!("GPU-{number:08x}-{peer:04x}-4000-8000-000000000000"),
                kind: LinkKind::NvLink,
                count: (scattered(gpu * 16 + peer) % 900) as u32,
            };
            it.links = (0..16).filter(|peer| *peer != gpu).map(link).collect();
        }),
        _ => ordinary(number),
    };
    vec![
        scene("nothing unusual", Box::new(ordinary)),
        scene(
            "each GPU of another product",
            Box::new(|number| {
                node(number, GPUS, |gpu, it| {
                    let product = number * GPUS + gpu;
                    it.model = format!("{}{product:05}", "n".repeat(DEVICE_TEXT_BYTES - 5));
                })
            }),
        ),
        scene("each GPU of another size", Box::new(sizes)),
        scene("each node of another shape", Box::new(shapes)),
        scene("some nodes of 64 and 16 GPUs, all linked at random", Box::new(linked)),
        Scene {
            history: 8_000,
            ..scene("8,000 pods came, each of another size", Box::new(ordinary))
        },
        Scene {
            history: 8_000,
            ..scene("the same, and each node of another shape", Box::new(shapes))
        },
        Scene {
            pods: 100,
            ..scene("100 pods on each node", Box::new(ordinary))
        },
        Scene {
            crowd: 1_000,
            nominated: 100,
            ..scene("1,000 pods on one node, 100 nominated to it", Box::new(ordinary))
        },
        Scene {
            changes: 2_000,
            ..scene("one node published 2,000 inventories", Box::new(ordinary))
        },
        Scene {
            changes: 2_000,
            history: 8_000,
            ..scene("the same after 8,000 pods", Box::new(ordinary))
        },
    ]
}

fn resident_mib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<f64>().ok())
        .unwrap_or(0.0)
        / 1024.0
}

/// Print the longest time for which each verb holds the lock in each scene. `only` selects the scenes whose names contain it.
pub(crate) fn measure(nodes: usize, only: Option<&str>) -> Outcome<()> {
    println!(
        "{nodes} nodes with 8 GPUs; the longest hold of the core's lock in ms on a processor, of each pod and verb (budget {} ms)",
        BUDGET.as_millis()
    );
    println!(
        "{:<52} {:>8} {:>10} {:>8} {:>8} {:>10} {:>11}",
        "", "filter", "prioritize", "preempt", "bind", "pod event", "node event"
    );
    let names: Vec<String> = (0..nodes).map(name).collect();
    for scene in scenes()
        .into_iter()
        .filter(|scene| only.is_none_or(|only| scene.what.contains(only)))
    {
        let mut core = ExtenderCore::new(MemoryUnit::MIB, CoreTiming::default());
        let mut holds = Holds::default();
        let listed: Vec<Node> = (0..nodes).map(&scene.node).collect();
        let of = |number: usize| {
            bound(
                number,
                number % nodes,
                number / nodes % GPUS,
                1_024 + scattered(number) % 1_024,
            )
        };
        let pods = (0..nodes * scene.pods).map(of).collect::<Outcome<Vec<ReadPod>>>()?;
        let mut lists = Duration::ZERO;
        held(&mut lists, || core.node_change(WatchChange::Reset(listed), at(0)));
        held(&mut lists, || core.pod_change(WatchChange::Reset(pods), at(0)));
        for number in 0..scene.history {
            let units = 1_024 + (number as u64 * 7) % 30_000;
            let annotations = json!({"divvy.dev/gpus": (1 + number % 4).to_string()});
            let units = units * (1 + number as u64 % 4);
            let read = pod(
                &format!("h-{number}"),
                units,
                &format!("{}m", 100 + number % 5_000),
                0,
                &annotations,
            )?;
            held(&mut holds.pod, || core.pod_change(WatchChange::Apply(read.clone()), at(0)));
            held(&mut holds.pod, || core.pod_change(WatchChange::Delete(read), at(0)));
        }
        for number in 0..scene.crowd {
            let read = bound(1_000_000 + number, 0, number % GPUS, 8)?;
            held(&mut holds.pod, || core.pod_change(WatchChange::Apply(read), at(0)));
        }
        for number in 0..scene.nominated {
            let read = nominated(number)?;
            held(&mut holds.pod, || core.pod_change(WatchChange::Apply(read), at(0)));
        }
        let before = resident_mib();
        for change in 0..scene.changes {
            // Memory moves from one GPU to another: the sum is the node's capacity, which the agent cannot change.
            let changed = node(1, GPUS, |gpu, it| {
                let shift = 1 + (change * 4 + gpu / 2) as u64;
                it.units = if gpu % 2 == 0 { SIZE + shift } else { SIZE - shift };
            });
            held(&mut holds.node, || core.node_change(WatchChange::Apply(changed), at(0)));
        }
        let grown = resident_mib() - before;
        let proposed: Vec<Eviction> = (0..nodes / PREEMPTED)
            .map(|node| Eviction {
                node: name(node),
                victims: (0..scene.pods).map(|pod| format!("uid-b-{}", pod * nodes + node)).collect(),
                pdb_violations: 0,
            })
            .collect();
        ask(&mut core, &names, &proposed, &mut holds)?;
        // Once more after some changes.
        for number in 0..50 {
            let read = bound(number, number, 0, 3_000)?;
            held(&mut holds.pod, || core.pod_change(WatchChange::Apply(read), at(0)));
            held(&mut holds.node, || {
                core.node_change(
                    WatchChange::Apply(Node {
                        cpu_milli: 64_000,
                        ..(scene.node)(number)
                    }),
                    at(0),
                )
            });
        }
        ask(&mut core, &names, &proposed, &mut holds)?;
        let ms = |hold: Duration| {
            let late = if hold > BUDGET { "!" } else { " " };
            format!("{:.2}{late}", hold.as_secs_f64() * 1_000.0)
        };
        println!(
            "{:<52} {:>8} {:>10} {:>8} {:>8} {:>10} {:>11}   lists {:.0} ms{}",
            scene.what,
            ms(holds.filter),
            ms(holds.prioritize),
            ms(holds.preempt),
            ms(holds.bind),
            ms(holds.pod),
            ms(holds.node),
            lists.as_secs_f64() * 1_000.0,
            if scene.changes > 0 {
                format!(", {grown:+.1} MiB by the changes")
            } else {
                String::new()
            }
        );
    }
    Ok(())
}
