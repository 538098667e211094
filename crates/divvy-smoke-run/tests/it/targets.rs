//! Which GPUs are tried.

use std::collections::BTreeMap;

use divvy_model::out_of_service::{GpusOutOfService, out_of_service_key};
use divvy_model::{Gpu, Health, Inventory, MemoryUnit, MiB, Node, Partition, Vendor, WholeKind};
use divvy_placement::Ledger;
use divvy_smoke_run::{GpuVerdict, Planned, TargetChoice, TargetError, TestAsk, plan};
use divvy_testkit::nodes::{self, divvy_node};
use divvy_why::{ClusterSnapshot, NodeSite, Tenants};

fn gpu(index: u32) -> Gpu {
    Gpu {
        uuid: format!("GPU-{index}{index}aa"),
        index,
        model: "NVIDIA T4".to_owned(),
        ..nodes::gpu("n", 0, 16)
    }
}

fn node(name: &str, gpus: Vec<Gpu>) -> Node {
    let units: Vec<u64> = gpus.iter().map(|gpu| gpu.units).collect();
    let mut node = divvy_node(name, &units);
    node.whole = BTreeMap::from([(WholeKind::Gpu(Vendor::Nvidia), 1)]);
    if let Some(Ok(inventory)) = &mut node.inventory {
        inventory.gpus = gpus;
    }
    node
}

fn snapshot(nodes: &[Node], change: impl Fn(&mut NodeSite)) -> ClusterSnapshot {
    snapshot_in(MemoryUnit::GIB, nodes, change)
}

/// The same in a cluster with this unit.
fn snapshot_in(unit: MemoryUnit, nodes: &[Node], change: impl Fn(&mut NodeSite)) -> ClusterSnapshot {
    let mut ledger = Ledger::new(unit);
    ledger.replace_nodes(nodes);
    let site = |node: &Node| {
        let mut site = NodeSite {
            name: node.name.clone(),
            ready: true,
            has_inventory: node.inventory.is_some(),
            labels: [("kubernetes.io/hostname".to_owned(), format!("host-{}", node.name))].into(),
            ..NodeSite::default()
        };
        change(&mut site);
        site
    };
    ClusterSnapshot::new(ledger, nodes.iter().map(site).collect(), Tenants::default())
}

fn shown(planned: &[Planned]) -> Vec<String> {
    let one = |one: &Planned| {
        let what = match &one.ask {
            Ok(TestAsk::Units(units)) => format!("{units} units"),
            Ok(TestAsk::Whole(kind)) => kind.resource().into_owned(),
            Err(GpuVerdict::Skipped(reason)) => format!("SKIP {reason}"),
            Err(GpuVerdict::Broken { found, .. }) => format!("FAIL {found}"),
            Err(GpuVerdict::Untried { reason, .. }) => format!("ERROR {reason}"),
            Err(GpuVerdict::Tested(_)) => "a report".to_owned(),
        };
        format!("{}: {what}", one.target)
    };
    planned.iter().map(one).collect()
}

fn choice(nodes: &[&str], gpu: Option<&str>) -> TargetChoice {
    TargetChoice {
        nodes: nodes.iter().map(|name| (*name).to_owned()).collect(),
        gpu: gpu.map(str::to_owned),
        ..TargetChoice::default()
    }
}

#[test]
fn each_gpu_is_tried_or_there_is_a_reason() {
    let broken = Gpu {
        health: Health::Failed,
        reason: Some("XID 79".to_owned()),
        ..gpu(1)
    };
    let full = Gpu {
        held: MiB(16384),
        ..gpu(2)
    };
    let whole = Gpu {
        whole: Some(WholeKind::Gpu(Vendor::Nvidia)),
        ..gpu(3)
    };
    let nodes = [node("n1", vec![gpu(0), broken, full, whole])];
    let snapshot = snapshot(&nodes, |_| {});
    let with = |share: Option<u64>, whole: bool| {
        let choice = TargetChoice {
            share,
            whole,
            ..TargetChoice::default()
        };
        shown(&plan(&snapshot, &choice).expect("a plan")).join("\n")
    };
    insta::assert_snapshot!(with(None, false));
    insta::assert_snapshot!(with(Some(17), false));
    insta::assert_snapshot!(with(None, true));
    let first = &plan(&snapshot, &TargetChoice::default()).expect("a plan")[0].target;
    assert_eq!(first.hostname, "host-n1");
}

/// The GPU is retried only if a test took it out of service.
#[test]
fn only_report_retries_a_gpu_out_of_service() {
    let out = |index: u32, reason: &str| Gpu {
        health: Health::Failed,
        reason: Some(format!("out of service: {reason}")),
        ..gpu(index)
    };
    let full = Gpu {
        held: MiB(16384),
        ..out(2, "divvy smoke: S03 memory: wrong")
    };
    let nodes = [node(
        "n1",
        vec![out(0, "divvy smoke: S03 memory: wrong"), out(1, "fan is broken"), full],
    )];
    let snapshot = snapshot(&nodes, |_| {});
    let with = |report: bool| {
        let choice = TargetChoice {
            report,
            ..TargetChoice::default()
        };
        let planned = plan(&snapshot, &choice).expect("a plan");
        let before = planned.iter().map(|one| one.target.failed_before.clone());
        let before: Vec<_> = before.collect();
        assert_eq!(before[..2], [Some("S03 memory: wrong".to_owned()), None]);
        shown(&planned).join("\n")
    };
    insta::assert_snapshot!(with(false));
    insta::assert_snapshot!(with(true));
}

/// The annotation of the GPU would stay, whatever a test of its part finds.
#[test]
fn a_part_of_a_gpu_that_is_out_of_service_is_not_tried_again() {
    let annotations = BTreeMap::from([(out_of_service_key("GPU-00"), "divvy smoke: S03 memory: wrong".to_owned())]);
    let out = GpusOutOfService::read(&annotations)
        .get("MIG-1", Some("GPU-00"))
        .expect("out of service");
    let part = Gpu {
        uuid: "MIG-1".to_owned(),
        partition: Some(Partition {
            parent: "GPU-00".to_owned(),
            profile: "3g.20gb".to_owned(),
        }),
        health: Health::Failed,
        reason: Some(out.text()),
        ..gpu(100)
    };
    let snapshot = snapshot(&[node("n1", vec![part])], |_| {});
    for report in [false, true] {
        let choice = TargetChoice {
            report,
            ..TargetChoice::default()
        };
        let planned = plan(&snapshot, &choice).expect("a plan");
        assert_eq!(
            shown(&planned),
            [
                "n1 GPU 100 (MIG-1): SKIP out of service: GPU GPU-00, of which it is a part: divvy smoke: S03 memory: wrong; kubectl annotate node n1 \
              out-of-service.divvy.dev/GPU-00- puts it back into service"
            ]
        );
        assert_eq!(planned[0].target.failed_before, None);
    }
}

/// An undivided GPU in MIG mode is skipped.
#[test]
fn a_mig_device_is_tried_with_its_resource() {
    let part = |index: u32, whole: Option<WholeKind>| Gpu {
        uuid: format!("MIG-{index}"),
        model: "NVIDIA A100-SXM4-40GB MIG 3g.20gb".to_owned(),
        partition: Some(Partition {
            parent: "GPU-00".to_owned(),
            profile: "3g.20gb".to_owned(),
        }),
        whole,
        ..gpu(index)
    };
    let mig = WholeKind::Mig("3g.20gb".parse().expect("a profile"));
    // As the agent writes it.
    let reason = "MIG mode is on, so nothing can run on the whole GPU; switch it off with nvidia-smi -i 1 -mig 0";
    let undivided = Gpu {
        health: Health::Failed,
        reason: Some(reason.to_owned()),
        ..gpu(1)
    };
    let shared = Gpu {
        held: MiB(4096),
        ..part(103, Some(mig))
    };
    let failed = Gpu {
        health: Health::Failed,
        reason: Some("XID 94".to_owned()),
        ..part(104, Some(mig))
    };
    let gpus = vec![
        undivided,
        part(100, Some(mig)),
        part(101, Some(WholeKind::Gpu(Vendor::Nvidia))),
        part(102, None),
        shared,
        failed,
    ];
    let mut node = node("n1", gpus);
    node.whole = BTreeMap::from([(mig, 2), (WholeKind::Gpu(Vendor::Nvidia), 1)]);
    let snapshot = snapshot(&[node], |_| {});
    let skipped = format!("n1 GPU 1 (GPU-11aa): SKIP the GPU is in MIG mode, and none of its MIG devices is offered: {reason}");
    let failed = "n1 GPU 104 (MIG-104): FAIL Divvy's agent does not offer the GPU: XID 94";
    let check = |choice: &TargetChoice, expected: [&str; 4]| {
        let planned = shown(&plan(&snapshot, choice).expect("a plan"));
        assert_eq!(planned.len(), 6);
        assert_eq!((planned[0].as_str(), planned[5].as_str()), (skipped.as_str(), failed));
        for ((one, expected), index) in planned[1..5].iter().zip(expected).zip(100..) {
            assert_eq!(one, &format!("n1 GPU {index} (MIG-{index}): {expected}"));
        }
    };
    check(
        &TargetChoice::default(),
        ["nvidia.com/mig-3g.20gb", "nvidia.com/gpu", "1 units", "1 units"],
    );
    let share = TargetChoice {
        share: Some(2),
        ..TargetChoice::default()
    };
    check(&share, ["2 units"; 4]);
    let whole = TargetChoice {
        whole: true,
        ..TargetChoice::default()
    };
    check(
        &whole,
        [
            "nvidia.com/mig-3g.20gb",
            "nvidia.com/gpu",
            "SKIP the GPU is not offered as a whole (the agent's --whole-gpus)",
            "SKIP full: pods hold 4096 MiB of it",
        ],
    );
}

#[test]
fn a_test_requests_as_many_units_as_make_a_gibibyte() {
    for (unit, units) in [("100MiB", 11), ("128MiB", 8), ("1GiB", 1), ("4GiB", 1)] {
        let unit: MemoryUnit = unit.parse().expect("a unit");
        let of_gpu = unit.units_in(MiB(16384));
        let mut node = node("n1", vec![Gpu { units: of_gpu, ..gpu(0) }]);
        (node.capacity_units, node.allocatable_units) = (of_gpu, of_gpu);
        if let Some(Ok(inventory)) = &mut node.inventory {
            inventory.unit = unit;
        }
        let planned = plan(&snapshot_in(unit, &[node], |_| {}), &TargetChoice::default()).expect("a plan");
        assert_eq!(planned[0].ask, Ok(TestAsk::Units(units)), "{unit}");
    }
}

#[test]
fn a_node_that_takes_no_pods_is_skipped_with_the_reason() {
    let nodes = [node("n1", vec![gpu(0)])];
    for (change, reason) in [
        (
            (|site: &mut NodeSite| site.cordoned = true) as fn(&mut NodeSite),
            "SKIP the node is cordoned; kubectl uncordon n1",
        ),
        (
            |site| site.ready = false,
            "SKIP the node is not ready; kubectl describe node n1 says why",
        ),
    ] {
        let planned = plan(&snapshot(&nodes, change), &TargetChoice::default()).expect("a plan");
        assert_eq!(shown(&planned), [format!("n1 GPU 0 (GPU-00aa): {reason}")]);
    }
}

#[test]
fn an_inventory_that_cannot_be_used_is_an_error_of_its_node() {
    let mut one = node("n1", vec![gpu(0)]);
    let Some(Ok(inventory)) = &mut one.inventory else {
        panic!("an inventory")
    };
    inventory.unschedulable = true;
    let mut other = node("n2", Vec::new());
    (other.capacity_units, other.allocatable_units) = (16, 16);
    other.inventory = Some(Err(Inventory::parse("{").expect_err("not an inventory")));
    let planned = plan(&snapshot(&[one, other], |_| {}), &TargetChoice::default()).expect("a plan");
    let shown = shown(&planned);
    assert!(
        shown[0].starts_with("n1 GPU 0 (GPU-00aa): ERROR node n1 is not offered: its agent or its kubelet is starting"),
        "{shown:?}"
    );
    assert!(shown[1].starts_with("n2: ERROR node n2 is not offered: "), "{shown:?}");
}

#[test]
fn a_gpu_is_named_by_uuid_prefix_or_index() {
    let nodes = [
        node("n1", vec![gpu(1), gpu(2)]),
        node(
            "n2",
            vec![Gpu {
                uuid: "GPU-11ab".to_owned(),
                ..gpu(1)
            }],
        ),
    ];
    let snapshot = snapshot(&nodes, |_| {});
    let chosen = |nodes: &[&str], gpu: Option<&str>| {
        let planned = plan(&snapshot, &choice(nodes, gpu)).expect("a plan");
        planned
            .into_iter()
            .map(|one| format!("{} {}", one.target.node, one.target.uuid))
            .collect::<Vec<_>>()
    };
    assert_eq!(chosen(&["n2"], None), ["n2 GPU-11ab"]);
    assert_eq!(chosen(&[], Some("1")), ["n1 GPU-11aa", "n2 GPU-11ab"]);
    assert_eq!(chosen(&[], Some("GPU-11aa")), ["n1 GPU-11aa"]);
    assert_eq!(chosen(&[], Some("GPU-2")), ["n1 GPU-22aa"]);
    assert_eq!(chosen(&["n2"], Some("GPU-11")), ["n2 GPU-11ab"]);
}

#[test]
fn a_wrong_choice_is_refused_with_what_there_is() {
    let mut plain = node("n3", Vec::new());
    plain.inventory = None;
    let nodes = [
        node("n1", vec![gpu(1)]),
        node(
            "n2",
            vec![Gpu {
                uuid: "GPU-11ab".to_owned(),
                ..gpu(1)
            }],
        ),
        plain,
    ];
    let all = snapshot(&nodes, |_| {});
    let error = |snapshot: &ClusterSnapshot, choice: &TargetChoice| plan(snapshot, choice).expect_err("an error").to_string();
    let texts = [
        error(&all, &choice(&["n9"], None)),
        error(&all, &choice(&["n3"], None)),
        error(&all, &choice(&[], Some("7"))),
        error(&all, &choice(&[], Some("GPU-9"))),
        error(&all, &choice(&[], Some(""))),
        error(&all, &choice(&[], Some("GPU-11"))),
        error(&snapshot(&nodes[2..], |_| {}), &TargetChoice::default()),
    ];
    insta::assert_snapshot!(texts.join("\n"));
    assert_eq!(
        plan(&snapshot(&[], |_| {}), &TargetChoice::default()),
        Err(TargetError::Nothing)
    );
}
