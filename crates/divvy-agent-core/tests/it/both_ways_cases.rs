//! More cases of GPUs that are offered in both ways, which a review found.

use std::collections::{BTreeMap, BTreeSet};

use divvy_agent_core::{CoreSettings, DisagreementClass, Handout, MigStrategy, Reason, ResourceSpec};
use divvy_model::legacy::LegacyAllocation;
use divvy_model::{Health, Held, MiB, Partition, Phase, Vendor, WholeKind};

use crate::both_ways::{WHOLE, both, node, placed, plain, uuid};
use crate::node::{GIB, Node, gpu, gpus_of, key, settings, simple};

fn legacy(index: u32, units: u64) -> Held {
    Held::Legacy(LegacyAllocation {
        gpus: BTreeMap::from([(index, units)]),
    })
}

/// A handout that NVIDIA's device plugin answered. The kubelet replays that answer at each start of the container.
fn theirs(node: &mut Node, uid: &str, id: &str) {
    node.handouts.push(Handout {
        key: key(uid, "main"),
        resource: "nvidia.com/gpu".to_owned(),
        ids: BTreeSet::from([id.to_owned()]),
        grant: None,
    });
}

/// NVIDIA's plugin gave GPU 0 to a pod whose container is in its back-off when Divvy's agent takes over. A share starts on GPU 0. Then the
/// container starts again: with NVIDIA's recorded answer, so on GPU 0, whatever the record says.
#[test]
fn another_plugins_container_starts_on_no_other_gpu() {
    let mut node = node(2);
    node.see(plain("theirs", 1));
    theirs(&mut node, "theirs", "GPU-0");
    node.reconcile();
    node.see(simple("share", 0, 1));
    node.admit("share").expect("admitted");
    node.start("share", "main").expect("started");
    let answer = node.pre_start("theirs", "main");
    assert!(
        !matches!(answer, divvy_agent_core::PreStart::Granted { .. }),
        "it runs on GPU 0 next to the share, and its record says {:?}",
        gpus_of(&node, "theirs", "main")
    );
}

/// The same container runs, but its GPU has failed for the moment.
#[test]
fn a_running_containers_record_names_its_failed_gpu() {
    let mut node = node(2);
    node.set_health(1, Health::Failed, Some("XID 79"));
    let mut running = plain("theirs", 1);
    (running.phase, running.container_running) = (Phase::Running, true);
    node.see(running);
    node.populated.insert("theirs".to_owned());
    theirs(&mut node, "theirs", "GPU-1");
    let found = node.reconcile();
    assert_eq!(found.held.keys().cloned().collect::<Vec<_>>(), [uuid(1)]);
}

/// NVIDIA's plugin with time-slicing has ids such as `GPU-1::0`.
#[test]
fn a_running_time_slices_record_names_its_gpu() {
    let mut node = node(2);
    let mut running = plain("theirs", 1);
    (running.phase, running.container_running) = (Phase::Running, true);
    node.see(running);
    node.populated.insert("theirs".to_owned());
    theirs(&mut node, "theirs", "GPU-1::0");
    let found = node.reconcile();
    assert_eq!(found.held.keys().cloned().collect::<Vec<_>>(), [uuid(1)]);
}

/// gpushare's annotations on a pod that requests a whole GPU: the ledger believes that it has GPU 0.
#[test]
fn the_inventory_shows_a_whole_gpu_despite_gpushare_annotations() {
    let mut node = node(2);
    let mut forged = plain("forged", 1);
    forged.held = legacy(0, 1);
    node.see(forged);
    node.allocate_of(WHOLE, "forged", "main", &[uuid(1)]).expect("allocated");
    node.start("forged", "main").expect("started");
    assert_eq!(gpus_of(&node, "forged", "main"), [uuid(1)]);
    let shown = |node: &Node| node.core.inventory().gpus[1].held_by_pod;
    assert_eq!(shown(&node), Some(true));
    let found = node.reconcile();
    assert_eq!(found.held.keys().cloned().collect::<Vec<_>>(), [uuid(1)]);
    assert_eq!(shown(&node), Some(true));
}

/// A tenant adds an allocation to its running pod, which had none.
#[test]
fn a_late_allocation_leaves_the_gpu_in_the_inventory() {
    let mut node = node(2);
    node.see(plain("late", 1));
    node.allocate_of(WHOLE, "late", "main", &[uuid(1)]).expect("allocated");
    node.start("late", "main").expect("started");
    assert_eq!(node.reconcile().held.keys().cloned().collect::<Vec<_>>(), [uuid(1)]);
    let held = placed("late", &[0]).held;
    node.change("late", |pod| pod.held = held);
    assert_eq!(node.reconcile().held.keys().cloned().collect::<Vec<_>>(), [uuid(1)]);
}

/// A pod that gpushare's extender bound has GPU 0, and has not started yet.
#[test]
fn a_pod_without_an_allocation_takes_no_promised_gpu() {
    let mut node = node(2);
    let mut promised = simple("promised", 0, 1);
    promised.held = legacy(0, 1);
    node.see(promised);
    node.admit("promised").expect("admitted");
    node.see(plain("whole", 1));
    node.allocate_of(WHOLE, "whole", "main", &[uuid(0)]).expect("allocated");
    node.start("whole", "main").expect("started");
    assert_eq!(
        gpus_of(&node, "whole", "main"),
        [uuid(1)],
        "GPU 1 is free and promised to no pod"
    );
}

/// `--reserve-memory` is raised while a pod has a whole GPU, and its container restarts.
#[test]
fn a_whole_gpus_pod_restarts_after_a_larger_reserve() {
    let mut before = node(1);
    before.see(placed("whole", &[0]));
    before.allocate_of(WHOLE, "whole", "main", &[uuid(0)]).expect("allocated");
    before.start("whole", "main").expect("started");
    let smaller = CoreSettings {
        reserve: MiB(1024),
        ..both()
    };
    let mut after = Node::with(smaller, vec![gpu(0, 4 * GIB)]);
    (after.records, after.handouts, after.pods) = (before.records.clone(), before.handouts.clone(), before.pods.clone());
    after.populated.insert("whole".to_owned());
    after.restart_agent();
    let answer = after.start("whole", "main").map(drop);
    assert_eq!(answer, Ok::<(), (Reason, String)>(()));
}

/// `--memory-unit` becomes larger than the GPU while a share of it is in use, and the container restarts. It must
/// start, with and without `--whole-gpus`.
#[test]
fn a_share_restarts_after_the_unit_became_larger_than_its_gpu() {
    for settings in [settings(), both()] {
        let whole = settings.whole;
        let mut node = Node::with(settings, vec![gpu(0, 4 * GIB)]);
        node.see(simple("share", 0, 1));
        node.admit("share").expect("admitted");
        node.start("share", "main").expect("started");
        node.change_unit(divvy_model::MemoryUnit::new(8 * GIB).expect("a unit"));
        let offered = node.core.offers().contains(&ResourceSpec::MEMORY);
        let answer = node.start("share", "main").map(drop);
        assert_eq!((offered, answer), (true, Ok(())), "--whole-gpus={whole}");
    }
}

/// A node with a MIG device of each profile, and the GPU that is not divided.
fn mig_node(mig: MigStrategy, profiles: &[&str]) -> Node {
    let part = |(index, profile): (u32, &&str)| divvy_model::Gpu {
        partition: Some(Partition {
            parent: "GPU-parent".to_owned(),
            profile: (*profile).to_owned(),
        }),
        ..gpu(index, 4 * GIB)
    };
    let parts = (1..).zip(profiles).map(part);
    Node::with(
        CoreSettings { mig, ..both() },
        [gpu(0, 4 * GIB)].into_iter().chain(parts).collect(),
    )
}

#[test]
fn mig_devices_are_offered_by_profile_or_as_gpus() {
    let offered = |mig: MigStrategy, profiles: &[&str]| -> Vec<String> {
        let node = mig_node(mig, profiles);
        let specs = node.core.offers().into_iter().skip(2);
        let ids = |spec: ResourceSpec| {
            node.core
                .devices(spec)
                .into_iter()
                .map(|device| device.id)
                .collect::<Vec<_>>()
        };
        specs
            .map(|spec| format!("{}: {}", spec.name(), ids(spec).join(" ")))
            .collect()
    };
    assert_eq!(
        offered(MigStrategy::Mixed, &["1g.5gb", "1g.5gb", "1g.10gb+me", "odd"]),
        [
            "nvidia.com/gpu: GPU-0",
            "nvidia.com/mig-1g.5gb: GPU-1 GPU-2",
            "nvidia.com/mig-1g.10gb.me: GPU-3"
        ],
        "a profile that cannot be named is only shared"
    );
    let with_plus = mig_node(MigStrategy::Mixed, &["1g.10gb+me"]).core.offers();
    assert_eq!(with_plus[3].socket(), "divvy-mig-1g.10gb.me", "a name that a socket can have");
    assert_eq!(
        offered(MigStrategy::Single, &["1g.5gb", "1g.5gb"]),
        ["nvidia.com/gpu: GPU-0 GPU-1 GPU-2"]
    );
}

/// GPUs that are not divided alike are not the same resource.
#[test]
fn strategy_single_needs_gpus_that_are_divided_alike() {
    let part = |index: u32, profile: Option<&str>| divvy_model::Gpu {
        partition: profile.map(|profile| Partition {
            parent: "GPU-parent".to_owned(),
            profile: profile.to_owned(),
        }),
        ..gpu(index, 4 * GIB)
    };
    let unlike = |mig: MigStrategy, profiles: &[Option<&str>]| {
        let gpus: Vec<_> = (0..).zip(profiles).map(|(index, profile)| part(index, *profile)).collect();
        CoreSettings { mig, ..both() }
            .unlike(&gpus)
            .map(|text| text.split(':').next().unwrap_or_default().to_owned())
    };
    assert_eq!(unlike(MigStrategy::Single, &[]), None);
    assert_eq!(unlike(MigStrategy::Single, &[None, None]), None);
    assert_eq!(unlike(MigStrategy::Single, &[Some("1g.5gb"), Some("1g.5gb")]), None);
    assert_eq!(
        unlike(MigStrategy::Single, &[None, Some("1g.5gb")]).as_deref(),
        Some("GPU 0 is not divided, but GPU 1 is a MIG device 1g.5gb")
    );
    assert!(unlike(MigStrategy::Single, &[Some("1g.5gb"), Some("2g.10gb")]).is_some());
    assert_eq!(unlike(MigStrategy::Mixed, &[None, Some("1g.5gb")]), None);
}

#[test]
fn a_container_with_a_whole_mig_device_holds_all_of_its_memory() {
    let mut node = mig_node(MigStrategy::Mixed, &["1g.5gb", "1g.5gb"]);
    let kind = WholeKind::Mig("1g.5gb".parse().expect("a profile"));
    let spec = ResourceSpec::whole(kind);
    node.see(simple("share", 1, 1));
    node.admit("share").expect("admitted");
    node.start("share", "main").expect("started");
    let mut whole = plain("whole", 1);
    whole.request.whole.as_mut().expect("a request").kind = kind;
    node.see(whole);
    node.allocate_of(spec, "whole", "main", &[uuid(1)]).expect("allocated");
    node.start("whole", "main").expect("started");
    assert_eq!(gpus_of(&node, "whole", "main"), [uuid(2)], "the other device has a share");
    let error = node.allocate_of(spec, "more", "main", &[uuid(0)]).expect_err("a GPU");
    assert_eq!(
        error.to_string(),
        "device id \"GPU-0\" names none of this node's MIG 1g.5gb devices (GPU-1, GPU-2)"
    );
}

/// NVIDIA's plugin offered MIG devices in another way than Divvy's agent does.
#[test]
fn a_pod_keeps_a_device_given_through_another_resource() {
    let mig = WholeKind::Mig("1g.5gb".parse().expect("a profile"));
    let gpu = Vendor::Nvidia.into();
    for (strategy, whole, kind) in [
        (MigStrategy::Single, true, mig),
        (MigStrategy::Mixed, true, gpu),
        (MigStrategy::Mixed, false, mig),
    ] {
        let mut node = mig_node(strategy, &["1g.5gb", "1g.5gb"]);
        node.change_settings(|settings| settings.whole = whole);
        let mut running = plain("theirs", 1);
        running.request.whole.as_mut().expect("a request").kind = kind;
        (running.phase, running.container_running) = (Phase::Running, true);
        node.see(running);
        node.populated.insert("theirs".to_owned());
        theirs(&mut node, "theirs", &uuid(1));
        node.handouts[0].resource = kind.resource().into_owned();
        let found = node.reconcile();
        assert_eq!(found.held, BTreeMap::from([(uuid(1), MiB(4 * GIB))]), "{strategy:?}, {kind}");
        assert_eq!(found.held_by_pods, BTreeSet::from([uuid(1)]), "{strategy:?}, {kind}");
        node.see(simple("ours", 1, 1));
        node.admit("ours").expect("admitted");
        let (reason, _) = node.start("ours", "main").expect_err("the device is in use");
        assert_eq!(reason, Reason::MemoryHeld);
    }
}

/// After a change of the MIG strategy, the kubelet gives the id of a MIG device out a second time, through another resource.
#[test]
fn an_id_under_two_resources_is_not_a_double_handout() {
    let mut node = mig_node(MigStrategy::Mixed, &["1g.5gb", "1g.5gb"]);
    let mig = WholeKind::Mig("1g.5gb".parse().expect("a profile"));
    let mut before = placed("before", &[1]);
    before.request.whole.as_mut().expect("a request").kind = mig;
    node.see(before);
    node.allocate_of(ResourceSpec::whole(mig), "before", "main", &[uuid(1)])
        .expect("allocated");
    node.start("before", "main").expect("started");
    node.change_settings(|settings| settings.mig = MigStrategy::Single);
    node.see(placed("after", &[2]));
    node.allocate_of(WHOLE, "after", "main", &[uuid(1)]).expect("allocated");
    assert_eq!(node.start("after", "main").map(drop), Ok(()));
    assert_eq!(gpus_of(&node, "after", "main"), [uuid(2)]);
    assert_eq!(node.reconcile().classes.get(&DisagreementClass::DoubleHandout), None);
}

#[test]
fn a_profile_without_a_resource_name_is_reported_and_named() {
    let unnamed = |settings: CoreSettings, profiles: &[&str]| {
        let node = mig_node(settings.mig, profiles);
        settings.unnamed(node.core.gpus())
    };
    let mixed = || CoreSettings {
        mig: MigStrategy::Mixed,
        ..both()
    };
    assert_eq!(unnamed(mixed(), &["1g.5gb", "1g.10gb+me"]), None);
    // The driver does not report the profile: the device has failed, and its reason says so.
    assert_eq!(unnamed(mixed(), &[""]), None);
    let text = unnamed(mixed(), &["300g.5gb", "1g.5gb", "odd", "odd"]).expect("reported");
    assert!(
        text.starts_with("MIG devices of the profiles 300g.5gb, odd have no resource"),
        "{text}"
    );
    assert_eq!(unnamed(CoreSettings { whole: false, ..mixed() }, &["odd"]), None);
    let single = CoreSettings {
        mig: MigStrategy::Single,
        ..both()
    };
    assert_eq!(unnamed(single, &["odd"]), None);
}

#[test]
fn a_container_keeps_its_device_when_the_offer_changes() {
    let mig = WholeKind::Mig("1g.5gb".parse().expect("a profile"));
    let changes: [fn(&mut CoreSettings); 2] = [
        |settings| settings.mig = MigStrategy::Single,
        |settings| settings.whole = false,
    ];
    for change in changes {
        for allocated in [true, false] {
            let mut node = mig_node(MigStrategy::Mixed, &["1g.5gb"]);
            let mut pod = if allocated { placed("whole", &[1]) } else { plain("whole", 1) };
            pod.request.whole.as_mut().expect("a request").kind = mig;
            node.see(pod);
            node.allocate_of(ResourceSpec::whole(mig), "whole", "main", &[uuid(1)])
                .expect("allocated");
            node.start("whole", "main").expect("started");
            node.change_settings(change);
            let offers = node.core.offers();
            assert!(offers.contains(&ResourceSpec::whole(mig)), "{offers:?}");
            assert_eq!(node.start("whole", "main").map(drop), Ok(()), "allocated: {allocated}");
            assert_eq!(gpus_of(&node, "whole", "main"), [uuid(1)]);
            // A pod that comes now gets nothing in this way.
            let mut late = placed("late", &[1]);
            late.request.whole.as_mut().expect("a request").kind = mig;
            node.see(late);
            assert!(
                node.allocate_of(ResourceSpec::whole(mig), "late", "main", &[uuid(1)])
                    .is_err()
            );
        }
    }
}

/// kube-scheduler asks the extender, which refuses such a pod, only for the resources in its configuration.
#[test]
fn a_container_that_requests_devices_of_two_kinds_is_told_so() {
    let mut node = mig_node(MigStrategy::Mixed, &["1g.5gb", "2g.10gb"]);
    let kind = |profile: &str| WholeKind::Mig(profile.parse().expect("a profile"));
    let mut pod = plain("both", 1);
    pod.request.whole.as_mut().expect("a request").kind = kind("1g.5gb");
    node.see(pod);
    for (profile, index) in [("1g.5gb", 1), ("2g.10gb", 2)] {
        node.allocate_of(ResourceSpec::whole(kind(profile)), "both", "main", &[uuid(index)])
            .expect("allocated");
    }
    let (reason, text) = node.start("both", "main").expect_err("two kinds");
    assert_eq!(reason, Reason::NoAllocation);
    assert_eq!(
        text,
        "container main of pod default/pod-both requests both nvidia.com/mig-1g.5gb and nvidia.com/mig-2g.10gb; a container gets GPUs of one \
         kind. Delete the pod, and request one of the two"
    );
}

/// With the strategy single, devices that are not divided alike are withdrawn, except from the pods that were promised one.
#[test]
fn a_pod_has_its_device_as_a_whole_before_its_containers_start() {
    let mut node = mig_node(MigStrategy::Single, &["1g.5gb", "1g.5gb"]);
    node.see(placed("whole", &[1]));
    node.see(simple("share", 2, 1));
    let held: Vec<bool> = node.core.gpus().iter().map(|gpu| node.core.holds_whole(gpu)).collect();
    assert_eq!(held, [false, true, false]);
    node.change("whole", |pod| pod.phase = Phase::Succeeded);
    assert!(!node.core.gpus().iter().any(|gpu| node.core.holds_whole(gpu)));
}
