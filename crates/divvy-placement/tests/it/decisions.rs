//! Fit, choice, and explanation. The case numbers are those of `docs/compatibility/gpushare.md`.

use std::sync::Arc;

use divvy_model::{ContainerKind, GpuRules, Health, Held, MemoryUnit, MiB, Phase, Pod, TestRun};
use divvy_placement::{Ask, GpuSource, HolderKind, Ledger, NodeRefusal, UnusableGpus};
use proptest::prelude::*;

use crate::fixture::*;

const INSUFFICIENT: &str = "Insufficient GPU Memory in one device";

#[test]
fn filter_answers_in_gpushares_words() {
    let ledger = fixture();
    for (node, units, answer) in [
        // Case 1
        ("n1", 8, ""),
        ("n2", 8, INSUFFICIENT),
        ("n3", 8, "The node n3 is not for GPU share, need skip"),
        ("n4", 8, ""),
        // Case 2: the sum of the free memory is enough, but no single GPU has enough.
        ("n1", 13, INSUFFICIENT),
        // Case 3: exact fit.
        ("n1", 12, ""),
        // Case 6
        ("nx", 8, "node \"nx\" not found"),
    ] {
        assert_eq!(filter(&ledger, node, units), answer, "{units} on {node}");
    }
}

#[test]
fn only_the_node_with_a_gpu_that_has_room_fits() {
    // Case 4, from gpushare's `designs.md`.
    let mib = MemoryUnit::MIB;
    let mut ledger = Ledger::new(mib);
    for (node, used) in [("N1", [16276, 12207]), ("N2", [12207, 12207]), ("N3", [8138, 16276])] {
        ledger.apply_node(&gpushare_node(node, 2 * 16276, 2));
        for (index, units) in used.into_iter().enumerate() {
            ledger.apply_pod(gpushare_pod(&format!("{node}-{index}"), node, index as u32, units));
        }
    }
    let fits: Vec<_> = ["N1", "N2", "N3"]
        .into_iter()
        .filter(|node| ledger.fits(node, &Ask::new(8138, mib), "u").is_ok())
        .collect();
    assert_eq!(fits, ["N3"]);
}

#[test]
fn a_pods_containers_share_one_gpu() {
    // Case 7
    let asked = Ask::of(&request(&[5, 5, 0]), GIB);
    assert_eq!(asked.units, 10);
    assert_eq!(fixture().choose("n1", &asked).expect("fits").gpus[0].index, 1);
}

#[test]
fn the_first_smallest_sufficient_gpu_is_chosen() {
    // Case 14, from gpushare's `designs.md`.
    let mib = MemoryUnit::MIB;
    let mut ledger = Ledger::new(mib);
    ledger.apply_node(&gpushare_node("n", 4 * 16276, 4));
    for (index, free) in [12207, 8138, 4069, 16276].into_iter().enumerate() {
        ledger.apply_pod(gpushare_pod(&format!("p{index}"), "n", index as u32, 16276 - free));
    }
    assert_eq!(ledger.choose("n", &Ask::new(8138, mib)).expect("fits").gpus[0].index, 1);
    // Case 15
    assert_eq!(fixture().choose("n1", &ask(6)).expect("fits").gpus[0].index, 0);
    assert_eq!(fixture().choose("n4", &ask(3)).expect("fits").gpus[0].index, 0);
}

#[test]
fn a_finished_pod_holds_nothing_and_a_deleting_one_everything() {
    let mut ledger = fixture();
    let mut c = gpushare_pod("c", "n2", 0, 16);
    c.deleting = true;
    ledger.apply_pod(c.clone());
    assert_eq!(filter(&ledger, "n2", 16), INSUFFICIENT, "its containers may still run (R5)");
    c.phase = Phase::Failed;
    c.container_running = true;
    ledger.apply_pod(c.clone());
    assert_eq!(
        filter(&ledger, "n2", 16),
        INSUFFICIENT,
        "a container runs whatever the phase says"
    );
    // Case 9
    c.phase = Phase::Succeeded;
    c.container_running = false;
    ledger.apply_pod(c);
    assert_eq!(filter(&ledger, "n2", 16), "");
}

#[test]
fn each_gpu_counts_by_its_own_size() {
    // Case 25: nodes with GPUs of different sizes, which gpushare treats as equal.
    let mut ledger = Ledger::new(GIB);
    ledger.apply_node(&divvy_node("mixed", &[40, 40, 14]));
    assert_eq!(free(&ledger, "mixed"), [40, 40, 14]);
    assert_eq!(ledger.choose("mixed", &ask(14)).expect("fits").gpus[0].index, 2);
    assert_eq!(ledger.choose("mixed", &ask(15)).expect("fits").gpus[0].index, 0);
    assert_eq!(ledger.choose("mixed", &ask(41)), Err(NodeRefusal::NoGpuFits));
    ledger.apply_pod(divvy_pod("p", "mixed", 1, 30));
    assert_eq!(ledger.choose("mixed", &ask(15)).expect("fits").gpus[0].index, 0);
    assert_eq!(ledger.choose("mixed", &ask(3)).expect("fits").gpus[0].index, 1);
    // gpushare's index refers to the same GPU.
    ledger.apply_pod(gpushare_pod("old", "mixed", 1, 10));
    assert_eq!(free(&ledger, "mixed"), [40, 0, 14]);
}

/// The other GPUs of the node are used to the last unit.
#[test]
fn a_failed_gpu_is_not_offered() {
    // Case 8, with the health from the inventory.
    let mut ledger = Ledger::new(GIB);
    let mut node = divvy_node("n1", &[16, 16]);
    for (health, reason) in [(Health::Failed, Some("XID 79")), (Health::Lost, None)] {
        edit_gpu(&mut node, 1, |gpu| {
            gpu.health = health;
            gpu.reason = reason.map(str::to_owned);
        });
        ledger.apply_node(&node);
        ledger.apply_pod(divvy_pod("p", "n1", 0, 10));
        assert_eq!(filter(&ledger, "n1", 8), INSUFFICIENT);
        assert_eq!(ledger.choose("n1", &ask(6)).expect("fits").gpus[0].index, 0);
        let room = ledger.room("n1", &ask(8));
        assert_eq!(
            (room.free, room.size, room.taken, room.unwell),
            (MiB(6 * 1024), MiB(16 * 1024), 2, 1)
        );
    }
    edit_gpu(&mut node, 1, |gpu| gpu.health = Health::Ok);
    ledger.apply_node(&node);
    assert_eq!(filter(&ledger, "n1", 8), "", "it came back");
}

#[test]
fn a_gpu_under_test_is_offered_only_to_the_pod_of_the_test() {
    let mut ledger = Ledger::new(GIB);
    let mut node = divvy_node("n1", &[16, 16]);
    edit_gpu(&mut node, 1, |gpu| {
        (gpu.health, gpu.test) = (Health::Testing, TestRun::parse("1a2b"));
        gpu.reason = Some("out of service: divvy smoke: S03 memory: wrong".to_owned());
    });
    ledger.apply_node(&node);
    ledger.apply_pod(divvy_pod("p", "n1", 0, 10));
    assert_eq!(filter(&ledger, "n1", 8), INSUFFICIENT);
    let with = |uuids: &[usize], run: Option<&str>| Ask {
        rules: Some(Arc::new(Ok(GpuRules {
            uuids: uuids.iter().map(|index| uuid("n1", *index)).collect(),
            test: run.and_then(TestRun::parse),
            ..GpuRules::default()
        }))),
        ..ask(8)
    };
    for (asked, is_taken) in [
        (with(&[1], Some("1a2b")), true),
        (with(&[0, 1], Some("1a2b")), true),
        (with(&[1], Some("1a2c")), false),
        (with(&[1], None), false),
        (with(&[0], Some("1a2b")), false),
        (with(&[], Some("1a2b")), false),
    ] {
        assert_eq!(ledger.fits("n1", &asked, "u").is_ok(), is_taken, "{asked:?}");
        let chosen = ledger.choose("n1", &asked).map(|choice| choice.gpus[0].index);
        assert_eq!(chosen.is_ok(), is_taken, "{asked:?}");
        assert!(chosen.is_err() || chosen == Ok(1));
        let report = ledger.explain("n1", &asked);
        assert_eq!(report.gpus[1].fits, is_taken, "{report}");
    }
    let report = ledger.explain("n1", &ask(8)).to_string();
    assert!(
        report.contains("GPU 1 is being tested (out of service: divvy smoke: S03 memory: wrong)"),
        "{report}"
    );
}

proptest! {
    /// What the inventory says of the test, and the pod's annotation, are any texts.
    /// The pod must have the same id as the test of the GPU.
    #[test]
    fn only_its_test_pod_gets_an_unhealthy_gpu(
        health in prop_oneof![1 => Just(Health::Failed), 1 => Just(Health::Lost), 3 => Just(Health::Testing)],
        // Without what JSON escapes.
        of_node in proptest::option::of("[ab]{0,2}|true|[ #-Z^-~ä]{0,4}"),
        of_pod in proptest::option::of(" ?[ab]{0,2} ?|true|.{0,4}"),
    ) {
        let is_id = |text: &str| !text.is_empty() && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
        let mut node = divvy_node("n1", &[16]);
        edit_gpu(&mut node, 0, |gpu| gpu.health = health);
        // As the API server has it.
        let inventory = node.inventory.take().expect("there").expect("read").to_json();
        let said = of_node.as_ref().map_or_else(|| "null".to_owned(), |run| format!("\"{run}\""));
        let inventory = inventory.replace("\"reason\":null", &format!("\"reason\":null,\"test\":{said}"));
        let inventory = divvy_model::Inventory::parse(&inventory).expect("readable");
        prop_assert!(inventory.gpus[0].test.is_some() || !of_node.as_deref().is_some_and(is_id));
        node.inventory = Some(Ok(inventory));
        let mut ledger = Ledger::new(GIB);
        ledger.apply_node(&node);
        let named = ("divvy.dev/gpu-uuid", uuid("n1", 0));
        let annotations = [named].into_iter().chain(of_pod.clone().map(|run| ("divvy.dev/gpu-test", run)));
        let annotations = annotations.map(|(key, value)| (key.to_owned(), value)).collect();
        let rules = GpuRules::from_annotations(&annotations).transpose();
        let asked = Ask { rules: rules.map(Arc::new), ..ask(8) };
        let expected = health == Health::Testing && of_node.as_deref().is_some_and(is_id) && of_pod.as_deref().map(str::trim) == of_node.as_deref();
        prop_assert_eq!(ledger.fits("n1", &asked, "u").is_ok(), expected);
        prop_assert_eq!(ledger.choose("n1", &asked).is_ok(), expected);
    }
}

#[test]
fn what_pods_without_an_object_hold_is_not_offered() {
    let mut ledger = Ledger::new(GIB);
    let mut node = divvy_node("n1", &[16]);
    edit_gpu(&mut node, 0, |gpu| gpu.held = MiB(10 * 1024));
    ledger.apply_node(&node);
    assert_eq!(free(&ledger, "n1"), [6]);
    ledger.end_leftovers("n1");
    assert_eq!(free(&ledger, "n1"), [16], "they have ended");
}

#[test]
fn an_inventory_counts_only_while_it_adds_up() {
    let read = |node: &divvy_model::Node| {
        let mut ledger = Ledger::new(GIB);
        ledger.apply_node(node);
        let view = ledger.node(&node.name).expect("applied");
        let source = view.state().expect("applied").source.clone();
        (source, free(&ledger, &node.name), filter(&ledger, &node.name, 1))
    };
    let mut node = divvy_node("n", &[40, 14]);
    assert_eq!(read(&node), (GpuSource::Inventory, vec![40, 14], String::new()));

    node.capacity_units = 16;
    node.capacity_gpus = 1;
    let (source, _, answer) = read(&node);
    assert_eq!(
        source,
        GpuSource::Unusable(UnusableGpus::UnitsDiffer {
            inventory: 54,
            capacity: 16
        })
    );
    assert!(
        answer.starts_with("node n is not offered: its inventory lists 54 units"),
        "{answer}"
    );

    // Aliyun's device plugin took over the node: its division counts, but the small GPU stays small.
    node.capacity_units = 80;
    node.capacity_gpus = 2;
    assert_eq!(read(&node), (GpuSource::Division, vec![40, 14], String::new()));

    // The resource is not registered yet, or no longer.
    node.capacity_units = 0;
    assert_eq!(read(&node).2, "The node n is not for GPU share, need skip");

    let mut other = divvy_node("n", &[16]);
    if let Some(Ok(inventory)) = &mut other.inventory {
        inventory.unit = MemoryUnit::MIB;
        inventory.gpus[0].units = 16384;
    }
    other.capacity_units = 16384;
    let (_, _, answer) = read(&other);
    assert_eq!(
        answer,
        "node n is not offered: its agent counts memory in MiB, the cluster in GiB; give both the same --memory-unit"
    );

    let mut starting = divvy_node("n", &[16]);
    if let Some(Ok(inventory)) = &mut starting.inventory {
        inventory.unschedulable = true;
    }
    let (_, _, answer) = read(&starting);
    assert_eq!(
        answer,
        "node n is not offered: its agent or its kubelet is starting or stopping; this passes when the agent has registered with the kubelet"
    );

    let mut broken = divvy_node("n", &[16]);
    broken.inventory = Some(divvy_model::Inventory::parse("{}"));
    let (_, _, answer) = read(&broken);
    assert!(
        answer.starts_with("node n is not offered: inventory (node annotation"),
        "{answer}"
    );
}

#[test]
fn a_capacity_that_does_not_divide_is_refused_and_not_averaged() {
    for (units, gpus) in [(95, 3), (16, 0), (1 << 40, 1 << 40), (u64::MAX, 2)] {
        let mut ledger = Ledger::new(GIB);
        ledger.apply_node(&gpushare_node("n", units, gpus));
        let answer = filter(&ledger, "n", 1);
        assert!(answer.contains("cannot be divided evenly"), "{units}/{gpus}: {answer}");
    }
}

#[test]
fn nothing_asked_fits_everywhere_and_too_much_nowhere() {
    let ledger = fixture();
    for node in ["n1", "n2", "n3", "n4"] {
        assert_eq!(filter(&ledger, node, 0), "");
    }
    assert_eq!(filter(&ledger, "nx", 0), "node \"nx\" not found");
    assert_eq!(
        filter(&ledger, "n4", u64::MAX),
        "the pod asks for 18446744073709551615 units (more memory than can be counted)"
    );
    assert_eq!(
        filter(&ledger, "n4", 10_000_000_000),
        INSUFFICIENT,
        "10G units, as users write"
    );
}

#[test]
fn overcommitment_leaves_nothing_free_and_is_reported() {
    // gpushare's unsigned subtraction made such a GPU look almost infinite (`getAvailableGPUs` in `nodeinfo.go`).
    let mut ledger = fixture();
    ledger.apply_pod(gpushare_pod("greedy", "n1", 0, u64::MAX));
    ledger.apply_pod(gpushare_pod("ghost", "n1", 7, 3));
    let mut unreadable = gpushare_pod("garbage", "n1", 0, 3);
    unreadable.held = Held::Unreadable(divvy_model::Allocation::parse("x").expect_err("garbage"));
    ledger.apply_pod(unreadable);
    let mut past = gpushare_pod("past", "n1", 0, 3);
    past.held = Held::Nothing;
    ledger.apply_pod(past);
    assert_eq!(free(&ledger, "n1"), [0, 12]);
    let found: Vec<String> = ledger.anomalies().iter().map(ToString::to_string).collect();
    assert_eq!(found.len(), 4, "{found:#?}");
    for (text, part) in found.iter().zip([
        "GPU 0 of node n1 offers 16384 MiB, but",
        "what pod default/garbage holds on node n1 cannot be read",
        "pod default/ghost holds 3072 MiB of GPU 7, which is not among",
        "pod default/past asks for 3 units of GPU memory but was bound to node n1 without the extender",
    ]) {
        assert!(text.contains(part), "{text}");
    }
    assert!(ledger.node("n1").expect("known").overcommitted() > MiB::ZERO);
}

#[test]
fn without_inventory_a_uuid_counts_on_every_gpu() {
    let mut ledger = Ledger::new(GIB);
    ledger.apply_node(&divvy_node("n", &[16, 16]));
    ledger.apply_pod(divvy_pod("p", "n", 1, 10));
    assert_eq!(free(&ledger, "n"), [16, 6]);
    ledger.apply_node(&gpushare_node("n", 32, 2));
    assert_eq!(free(&ledger, "n"), [6, 6], "it may be on either");
    ledger.apply_node(&divvy_node("n", &[16, 16]));
    assert_eq!(free(&ledger, "n"), [16, 6]);
}

#[test]
fn what_is_written_names_the_gpu_as_well_as_it_is_known() {
    let mut ledger = Ledger::new(GIB);
    ledger.apply_node(&divvy_node("ours", &[16]));
    ledger.apply_node(&gpushare_node("theirs", 16, 1));
    let mut asked = request(&[5, 0]);
    asked.containers[1].units = 8;
    asked.containers[1].kind = ContainerKind::Init;
    asked.containers.reverse();
    let total = Ask::of(&asked, GIB);
    assert_eq!(total.units, 8);
    let Held::Allocation(ours) = ledger.choose("ours", &total).expect("fits").held(&asked, GIB) else {
        panic!("a node with an inventory knows its GPUs by UUID");
    };
    assert_eq!(
        ours.to_json(),
        r#"{"v":1,"gpus":[{"uuid":"GPU-ours-0","memMiB":8192,"cores":0,"whole":false}],"containers":{"c0":[{"uuid":"GPU-ours-0","memMiB":5120,"cores":0}],"c1":[{"uuid":"GPU-ours-0","memMiB":8192,"cores":0}]}}"#
    );
    assert_eq!(divvy_model::Allocation::parse(&ours.to_json()).expect("our own form"), ours);
    let Held::Legacy(theirs) = ledger.choose("theirs", &total).expect("fits").held(&asked, GIB) else {
        panic!("a node without an inventory knows its GPUs by index only");
    };
    assert_eq!(theirs.gpus.into_iter().collect::<Vec<_>>(), [(0, 8)]);
}

#[test]
fn a_refusal_says_what_is_in_the_way_and_how_much_is_missing() {
    let mut ledger = fixture();
    let mut b = gpushare_pod("b", "n1", 1, 4);
    b.deleting = true;
    ledger.apply_pod(b);
    let report = ledger.explain("n1", &ask(13));
    assert_eq!(
        report.to_string(),
        "node n1 has no GPU with 13 units (13312 MiB) free: GPU 0 has 6144 of 16384 MiB free, GPU 1 has 12288 of 16384 MiB free"
    );
    let room = ledger.room("n1", &ask(13));
    assert_eq!(room.free, MiB(12288));
    assert_eq!(room.sum, MiB(18432), "kube-scheduler would have let it in");
    assert_eq!((room.fitting, room.taken), (0, 2));
    assert_eq!(report.gpus[0].holders[0].to_string(), "default/a 10240 MiB");
    assert_eq!(report.gpus[1].holders[0].kind, HolderKind::Deleting);
    let mut part = ledger.only("n1");
    part.end_pod(&report.gpus[1].holders[0].uid);
    assert!(part.choose("n1", &ask(13)).is_ok(), "it was in the way");
    assert!(
        ledger.choose("n1", &ask(13)).is_err(),
        "what is tried on a part changes nothing in the whole"
    );
    assert_eq!(ledger.explain("n4", &ask(16)).verdict, Ok(vec![0]));
    assert_eq!(ledger.explain("nx", &ask(1)).to_string(), "node nx is not known");
}

#[test]
fn a_pod_holds_what_it_asks_for_though_its_annotations_say_less() {
    // The kubelet has given the container devices for 12 units. A client that writes a smaller annotation without the extender
    // gets no memory for free.
    let free = |ledger: &Ledger| {
        let view = ledger.node("n1").expect("known");
        [0, 1].map(|position| GIB.units_in(view.free(position)))
    };
    let asks_for = |units: u64, pod: Pod| Pod {
        request: request(&[units]),
        ..pod
    };
    for (held, expected) in [
        (divvy_pod("p", "n1", 0, 0), [4, 16]),
        (divvy_pod("p", "n1", 0, 3), [4, 16]),
        (divvy_pod("p", "n1", 0, 12), [4, 16]),
        (divvy_pod("p", "n1", 0, 14), [2, 16]),
        (gpushare_pod("p", "n1", 1, 0), [16, 4]),
    ] {
        let mut ledger = Ledger::new(GIB);
        ledger.apply_node(&divvy_node("n1", &[16, 16]));
        ledger.apply_pod(asks_for(12, held));
        assert_eq!(free(&ledger), expected);
        let report = ledger.explain("n1", &ask(16));
        let holders = report.gpus.iter().flat_map(|gpu| &gpu.holders);
        let shown = holders.fold(0, |sum, holder| sum + GIB.units_in(holder.memory));
        assert_eq!(shown, 32 - expected.iter().sum::<u64>(), "and it is shown so");
    }
    // The pod was bound when the unit was 1 MiB: it holds no more than its GPU has.
    let mut ledger = Ledger::new(GIB);
    ledger.apply_node(&divvy_node("n1", &[16, 16]));
    ledger.apply_pod(asks_for(3072, divvy_pod("p", "n1", 0, 3)));
    assert_eq!(free(&ledger), [0, 16]);
    assert_eq!(ledger.node("n1").expect("known").overcommitted(), MiB::ZERO);
    // A request that is spread over two GPUs.
    let mut several = divvy_pod("p", "n1", 0, 1);
    if let (Held::Allocation(allocation), Held::Allocation(other)) = (&mut several.held, divvy_pod("p", "n1", 1, 1).held) {
        allocation.gpus.extend(other.gpus);
    }
    ledger.apply_pod(asks_for(12, several));
    assert_eq!(free(&ledger), [10, 10]);
}

/// The index does not mean the earlier card that the present one replaced.
#[test]
fn an_index_means_the_present_card() {
    let mut node = divvy_node("n1", &[16, 8]);
    for (index, uuid, health) in [(0, "GPU-a-gone", Health::Lost), (1, "GPU-z-new", Health::Ok)] {
        edit_gpu(&mut node, index, |gpu| {
            (gpu.index, gpu.health) = (0, health);
            gpu.uuid = uuid.to_owned();
        });
    }
    let mut ledger = Ledger::new(GIB);
    ledger.apply_node(&node);
    ledger.apply_pod(gpushare_pod("p", "n1", 0, 5));
    let view = ledger.node("n1").expect("known");
    assert_eq!([0, 1].map(|position| GIB.units_in(view.used(position))), [0, 5]);
}

#[test]
fn memory_of_several_gpus_avoids_mig_devices() {
    let mut node = divvy_node("n1", &[40, 4, 4, 40]);
    let part = |gpu: &mut divvy_model::Gpu| {
        gpu.partition = Some(divvy_model::Partition {
            parent: "GPU-x".to_owned(),
            profile: "1g.5gb".to_owned(),
        });
    };
    edit_gpu(&mut node, 1, part);
    edit_gpu(&mut node, 2, part);
    let two = |node: &divvy_model::Node, units: u64| {
        let mut ledger = Ledger::new(GIB);
        ledger.apply_node(node);
        let ask = Ask {
            gpus: 2,
            units: 2 * units,
            ..Ask::new(units, GIB)
        };
        let chosen = ledger.choose("n1", &ask)?;
        Ok(chosen.gpus.iter().map(|gpu| gpu.index).collect::<Vec<_>>())
    };
    assert_eq!(two(&node, 2), Ok(vec![0, 3]));
    edit_gpu(&mut node, 3, part);
    assert!(matches!(two(&node, 2), Err(NodeRefusal::TooFewFit(_))));
    edit_gpu(&mut node, 0, part);
    assert_eq!(two(&node, 2), Err(NodeRefusal::OnlyMigDevices));
    let amd = amd_node("n1", 2);
    assert!(
        !matches!(two(&amd, 2), Err(NodeRefusal::OnlyMigDevices)),
        "it has no MIG devices"
    );
    // A pod with one share gets one.
    let mut ledger = Ledger::new(GIB);
    ledger.apply_node(&node);
    assert_eq!(
        ledger.choose("n1", &Ask::new(3, GIB)).map(|choice| choice.gpus[0].index),
        Ok(1)
    );
}
