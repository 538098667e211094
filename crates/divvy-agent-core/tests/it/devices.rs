use std::collections::BTreeMap;
use std::sync::Arc;

use divvy_agent_core::{AgentCore, CoreSettings, PreStart, ResourceSpec, SizeWarning, TooManyIds};
use divvy_model::{Gpu, GpuRules, Health, MemoryUnit, MiB, TestRun};

use crate::node::{Node, gpu, offered, settings, simple};

fn set(core: &mut AgentCore, gpus: Vec<Gpu>) -> Result<Option<SizeWarning>, TooManyIds> {
    let gpus = offered(core.settings(), &gpus);
    core.set_hardware(BTreeMap::new(), gpus)
}

fn counts(node: &Node) -> Vec<(usize, usize)> {
    let devices = node.core.devices(ResourceSpec::MEMORY);
    (0..node.core.gpus().len())
        .map(|index| {
            let uuid = format!("GPU-{index}");
            let of = devices.iter().filter(|device| device.id.starts_with(&format!("{uuid}::")));
            let healthy = of.clone().filter(|device| device.healthy).count();
            (healthy, of.count() - healthy)
        })
        .collect()
}

#[test]
fn each_gpu_offers_units_of_its_own_size() {
    let units = |mib: u64, unit: &str, reserve: u64| {
        let settings = CoreSettings {
            unit: unit.parse().expect("a unit"),
            reserve: MiB(reserve),
            whole: false,
            ..settings()
        };
        let mut core = AgentCore::new(settings);
        set(&mut core, vec![gpu(0, mib)])
            .map(|_| core.devices(ResourceSpec::MEMORY).len())
            .ok()
    };
    assert_eq!(units(16384, "GiB", 0), Some(16));
    assert_eq!(units(15109, "GiB", 0), Some(14));
    assert_eq!(units(16384, "GiB", 512), Some(15));
    assert_eq!(units(16384, "256MiB", 512), Some(62));
    assert_eq!(units(512, "GiB", 1024), Some(0));
    assert_eq!(units(16384, "MiB", 0), Some(16384));
}

#[test]
fn ids_carry_gpu_slot_and_numa_node() {
    let node = Node::new(&[2048, 1024]);
    let devices = node.core.devices(ResourceSpec::MEMORY);
    let ids: Vec<&str> = devices.iter().map(|device| device.id.as_str()).collect();
    assert_eq!(ids, ["GPU-0::m0", "GPU-0::m1", "GPU-1::m0"]);
    assert_eq!(devices[2].numa, Some(1));
    let devices = node.core.devices(ResourceSpec::COUNT);
    let ids: Vec<&str> = devices.iter().map(|device| device.id.as_str()).collect();
    assert_eq!(ids, ["GPU-0::c", "GPU-1::c"]);
}

#[test]
fn a_unit_that_is_too_small_is_refused_with_the_unit_to_use() {
    let gpus = |count: u32| (0..count).map(|index| gpu(index, 143_771)).collect::<Vec<Gpu>>();
    let mut core = AgentCore::new(CoreSettings {
        unit: MemoryUnit::MIB,
        ..settings()
    });
    let error = set(&mut core, gpus(8)).expect_err("1.15 million ids");
    assert_eq!(
        (error.ids, error.smallest.mib(), error.comfortable.mib()),
        (1_150_168, 32, 512)
    );
    let text = error.to_string();
    assert!(text.contains("--memory-unit 32MiB") && text.contains("512MiB"), "{text}");
    assert!(core.gpus().is_empty(), "nothing is half taken over");
    let warning = set(&mut core, vec![gpu(0, 5000)]).expect("5000 ids").expect("many");
    assert_eq!((warning.ids, warning.suggestion.mib()), (5000, 2));
    assert_eq!(set(&mut core, vec![gpu(0, 4096)]).expect("4096 ids"), None);
}

/// Case K04 of `docs/compatibility/kubelet.md`: ids that pods hold stay healthy.
#[test]
fn only_unheld_ids_of_a_failed_gpu_turn_unhealthy() {
    let mut node = Node::new(&[8192, 8192]);
    node.see(simple("a", 0, 3));
    node.admit("a").expect("admitted");
    node.start("a", "main").expect("started");
    // This pod is bound but not admitted yet. It holds its units as well.
    node.see(simple("b", 0, 2));
    assert_eq!(counts(&node), [(8, 0), (8, 0)]);
    node.set_health(0, Health::Failed, Some("XID 79"));
    assert_eq!(counts(&node), [(5, 3), (8, 0)]);
    let counted = node.core.devices(ResourceSpec::COUNT);
    assert!(!counted[0].healthy && counted[1].healthy);
    let devices = node.core.devices(ResourceSpec::MEMORY);
    let handed_out = node.ids_of("a", "main");
    assert!(
        devices.iter().filter(|d| handed_out.contains(&d.id)).all(|d| d.healthy),
        "ids in use stay healthy"
    );
    node.object_gone("b");
    assert_eq!(counts(&node), [(3, 5), (8, 0)]);
    node.change("a", |pod| pod.phase = divvy_model::Phase::Succeeded);
    node.processes_end("a");
    assert_eq!(counts(&node), [(0, 8), (8, 0)]);
    node.set_health(0, Health::Ok, None);
    assert_eq!(counts(&node), [(8, 0), (8, 0)]);
}

/// The ids of a GPU under test are reported as healthy.
#[test]
fn a_gpu_under_test_starts_only_the_pod_of_the_test() {
    let mut node = Node::new(&[8192, 8192]);
    for (name, gpu, run) in [("other", 0, None), ("older", 0, Some("1a2c")), ("tester", 0, Some("1a2b"))] {
        let mut pod = simple(name, gpu, 1);
        let rules = run.map(|run| GpuRules {
            uuids: vec!["GPU-0".to_owned()],
            test: TestRun::parse(run),
            ..GpuRules::default()
        });
        pod.request.rules = rules.map(|rules| Arc::new(Ok(rules)));
        node.see(pod);
        node.admit(name).expect("admitted");
    }
    node.set_health(0, Health::Failed, Some("out of service: x"));
    assert_eq!(counts(&node), [(3, 5), (8, 0)]);
    for (health, run, starts) in [
        (Health::Failed, None, [false, false, false]),
        // The id of a GPU that is not tested any more opens nothing.
        (Health::Failed, Some("1a2b"), [false, false, false]),
        (Health::Testing, None, [false, false, false]),
        (Health::Testing, Some("1a2b"), [false, false, true]),
    ] {
        node.change_gpu(0, |gpu| gpu.test = run.and_then(TestRun::parse));
        node.set_health(0, health, Some("out of service: x"));
        for (name, starts) in ["other", "older", "tester"].into_iter().zip(starts) {
            let answer = node.pre_start(name, "main");
            assert_eq!(
                matches!(answer, PreStart::Granted { .. }),
                starts,
                "{health:?} {run:?} {name}: {answer:?}"
            );
        }
    }
    assert_eq!(counts(&node), [(8, 0), (8, 0)]);
}

/// The kubelet gave the pod ids of another GPU than that of its allocation.
#[test]
fn the_unhealthy_count_is_right_for_ids_of_another_gpu() {
    let mut node = Node::new(&[4096, 4096]);
    // Pod a is on GPU-1, but the kubelet gave it ids of GPU-0.
    node.see(simple("a", 1, 3));
    let ids: Vec<String> = (0..3).map(|slot| format!("GPU-0::m{slot}")).collect();
    node.allocate_as("a", "main", &ids).expect("allocated");
    node.set_health(0, Health::Lost, None);
    // GPU-0 has four ids and no pod of its own, so four ids turn unhealthy, all of them free ones.
    let devices = node.core.devices(ResourceSpec::MEMORY);
    let unhealthy: Vec<String> = devices.iter().filter(|d| !d.healthy).map(|d| d.id.clone()).collect();
    assert_eq!(unhealthy, ["GPU-0::m3", "GPU-1::m0", "GPU-1::m1", "GPU-1::m2"]);
    // The ids that are healthy and not handed out are what GPU-1 has free: 4 - 3.
    assert_eq!(node.free_ids().len(), 1);
}

/// The checkpoint does not show these ids yet.
#[test]
fn ids_just_given_out_stay_healthy_before_the_checkpoint() {
    let mut node = Node::new(&[4096]);
    node.see(simple("a", 0, 2));
    let ids = vec!["GPU-0::m0".to_owned(), "GPU-0::m1".to_owned()];
    node.core.allocate(ResourceSpec::MEMORY, &ids).expect("allocated");
    node.set_health(0, Health::Failed, None);
    let healthy = |node: &Node| {
        let devices = node.core.devices(ResourceSpec::MEMORY);
        devices.into_iter().filter(|d| d.healthy).map(|d| d.id).collect::<Vec<_>>()
    };
    assert_eq!(healthy(&node), ids);
    node.core.set_handouts(Vec::new());
    assert_eq!(healthy(&node), ids, "that checkpoint may be older than the Allocate");
    node.core.set_handouts(Vec::new());
    assert_ne!(
        healthy(&node),
        ids,
        "the kubelet gave them back: admission failed after Allocate"
    );
}

#[test]
fn the_inventory_says_what_ids_cannot() {
    let mut node = Node::new(&[16384, 15109]);
    node.set_health(1, Health::Failed, Some("XID 79"));
    let inventory = node.core.inventory();
    assert_eq!(inventory.total_units(), 30);
    assert_eq!(inventory.gpus[1].reason.as_deref(), Some("XID 79"));
    let text = inventory.to_json();
    assert_eq!(divvy_model::Inventory::parse(&text).expect("own text"), inventory);
}
