use std::collections::{BTreeMap, BTreeSet};

use divvy_agent_core::{
    AgentAction, CoreSettings, DecisionFacts, DisagreementClass, Escape, FileChange, Guard, Reaction, ResourceSpec,
};
use divvy_model::limits::NODE_EVICTIONS;
use divvy_model::{MiB, Phase};

use crate::node::{Node, gpu, key, settings, simple};

fn running(gpus: &[u64], pods: &[(&str, u32, u64)]) -> Node {
    let mut node = Node::new(gpus);
    for (uid, gpu, units) in pods {
        node.see(simple(uid, *gpu, *units));
        node.admit(uid).expect("admitted");
        node.start(uid, "main").expect("started");
    }
    node
}

#[test]
fn at_rest_there_is_nothing_to_do() {
    let mut node = running(&[4096, 4096], &[("a", 0, 3), ("b", 1, 3)]);
    assert_eq!(node.reconcile(), divvy_agent_core::Reconciled::default());
}

/// Invariants 3 and 4 (`crates/divvy/tests/it/invariants.rs`).
#[test]
fn a_grant_ends_only_after_pod_and_processes() {
    type End = fn(&mut Node);
    let over: [(&str, End); 2] = [
        ("object gone", |node| node.object_gone("a")),
        ("succeeded", |node| {
            node.change("a", |pod| {
                pod.phase = Phase::Succeeded;
                pod.container_running = false;
            });
        }),
    ];
    for (name, over) in over {
        let mut node = running(&[4096], &[("a", 0, 3)]);
        over(&mut node);
        assert_eq!(
            node.reconcile().held.get("GPU-0"),
            Some(&MiB(3072)),
            "{name}: processes are left"
        );
        assert_eq!(node.records.len(), 1, "{name}");
        node.populated.remove("a");
        let found = node.reconcile();
        assert_eq!(found.classes.get(&DisagreementClass::GrantEnded), Some(&1), "{name}");
        assert!(node.records.is_empty() && node.specs.is_empty(), "{name}");
        // The other order: no processes are left, but the object still exists.
        let mut node = running(&[4096], &[("a", 0, 3)]);
        node.processes_end("a");
        node.reconcile();
        assert_eq!(node.records.len(), 1, "{name}: a container may restart");
        over(&mut node);
        node.reconcile();
        assert!(node.records.is_empty() && node.specs.is_empty(), "{name}");
    }
}

#[test]
fn nothing_is_gone_before_the_pod_list_is_complete() {
    let mut node = running(&[4096], &[("a", 0, 3)]);
    node.processes_end("a");
    let (records, pods) = (node.records.clone(), std::mem::take(&mut node.pods));
    node.synced = false;
    node.restart_agent();
    node.reconcile();
    assert_eq!(node.records, records);
    assert_eq!(node.specs.len(), 1);
    node.pods = pods;
    node.synced = true;
    node.restart_agent();
    node.reconcile();
    assert_eq!(node.records, records);
}

/// Case K12 of `docs/compatibility/kubelet.md`: the directory of specs is a tmpfs.
#[test]
fn after_a_reboot_specs_are_rebuilt_from_the_records() {
    let mut node = running(&[4096, 4096], &[("a", 1, 3)]);
    let before = node.specs.clone();
    node.specs.clear();
    node.populated.clear();
    // Another boot may change the numbers; only the UUIDs stay.
    let mut gpus = vec![gpu(0, 4096), gpu(1, 4096)];
    gpus[0].nodes = vec!["nvidia1".to_owned()];
    gpus[1].nodes = vec!["nvidia0".to_owned()];
    let mut rebooted = Node::with(
        CoreSettings {
            boot_id: "boot-2".to_owned(),
            ..settings()
        },
        gpus,
    );
    rebooted.records = node.records;
    rebooted.handouts = node.handouts;
    rebooted.pods = node.pods;
    rebooted.restart_agent();
    let found = rebooted.reconcile();
    assert_eq!(found.classes.get(&DisagreementClass::SpecRebuilt), Some(&1));
    assert_eq!(
        rebooted.specs.keys().collect::<BTreeSet<_>>(),
        before.keys().collect::<BTreeSet<_>>()
    );
    // There is no Allocate: the kubelet replays its answer, and PreStart renews the grant for this boot.
    let running = rebooted.start("a", "main").expect("started");
    assert!(running.devices.contains(&"/dev/nvidia0".to_owned()), "{running:?}");
    assert_eq!(rebooted.records[&key("a", "main")].boot_id, "boot-2");
}

#[test]
fn a_lost_state_directory_comes_back_from_the_specs() {
    let mut node = running(&[4096, 4096], &[("a", 0, 3), ("ghost", 1, 2), ("over", 1, 1)]);
    let before = node.records.clone();
    node.object_gone("ghost");
    node.object_gone("over");
    node.processes_end("over");
    node.records.clear();
    node.restart_agent();
    let found = node.reconcile();
    assert_eq!(found.classes.get(&DisagreementClass::RecordRebuilt), Some(&2));
    assert_eq!(found.classes.get(&DisagreementClass::SpecOrphan), Some(&1));
    assert_eq!(node.records[&key("a", "main")], before[&key("a", "main")]);
    assert_eq!(
        node.records[&key("ghost", "main")],
        before[&key("ghost", "main")],
        "its annotation is gone, its spec is not"
    );
    assert_eq!(node.core.inventory().gpus[1].held, MiB(2048));
    assert_eq!(node.specs.len(), 2);
}

/// Running pods come back from the kubelet's checkpoint and their allocation.
#[test]
fn lost_records_and_specs_come_back_from_the_checkpoint() {
    let mut node = running(&[4096], &[("a", 0, 3)]);
    let (records, specs) = (std::mem::take(&mut node.records), std::mem::take(&mut node.specs));
    // This pod is admitted but not started, so there is no grant to rebuild.
    node.see(simple("b", 0, 1));
    node.admit("b").expect("admitted");
    node.restart_agent();
    node.reconcile();
    assert_eq!((node.records.clone(), node.specs.clone()), (records, specs));
}

#[test]
fn specs_of_nobody_go_and_specs_that_were_changed_come_back() {
    let mut node = running(&[4096], &[("a", 0, 3)]);
    let before = node.specs.clone();
    let name = before.keys().next().expect("one").clone();
    // The second time, the agent remembers what it has made.
    for _ in 0..2 {
        node.specs.insert("00".repeat(16), "garbage".to_owned());
        node.specs.insert(name.clone(), "{}".to_owned());
        let found = node.reconcile();
        assert_eq!(found.classes.get(&DisagreementClass::SpecOrphan), Some(&1));
        assert_eq!(found.classes.get(&DisagreementClass::SpecRebuilt), Some(&1));
        assert_eq!(node.specs, before);
        assert_eq!(node.reconcile().classes, [].into());
    }
}

/// Case K11 of `docs/compatibility/kubelet.md`.
#[test]
fn a_restarted_agent_knows_what_the_old_one_knew() {
    let mut node = running(&[4096, 4096], &[("a", 0, 3), ("b", 1, 2), ("c", 1, 1)]);
    node.object_gone("b");
    node.reconcile();
    let inventory = node.core.inventory();
    let records: Vec<_> = node.core.records().cloned().collect();
    let devices = node.core.devices(ResourceSpec::MEMORY);
    node.restart_agent();
    node.reconcile();
    assert_eq!(node.core.inventory(), inventory);
    assert_eq!(node.core.records().cloned().collect::<Vec<_>>(), records);
    assert_eq!(node.core.devices(ResourceSpec::MEMORY), devices);
}

/// Cases K14 and K15 of `docs/compatibility/kubelet.md`.
#[test]
fn what_ended_while_nobody_looked_is_not_counted() {
    let mut node = running(&[4096], &[("a", 0, 2), ("b", 0, 2)]);
    node.pods.get_mut("a").expect("there").phase = Phase::Succeeded;
    node.pods.get_mut("a").expect("there").container_running = false;
    node.pods.remove("b");
    node.populated.clear();
    node.restart_agent();
    node.see(simple("c", 0, 4));
    node.kubelet_forgets("a");
    node.kubelet_forgets("b");
    node.admit("c").expect("admitted");
    node.start("c", "main").expect("all of it is free, before any reconciliation");
    node.reconcile();
    assert_eq!(node.records.keys().collect::<Vec<_>>(), [&key("c", "main")]);
}

#[test]
fn a_lost_checkpoint_is_said_once_for_each_pod() {
    let mut node = running(&[4096], &[("a", 0, 2), ("b", 0, 2)]);
    node.handouts.clear();
    for _ in 0..3 {
        assert_eq!(node.reconcile().classes.get(&DisagreementClass::CheckpointLost), Some(&2));
    }
    assert_eq!(node.events.len(), 2, "{:?}", node.events);
    // A checkpoint that cannot be read is different: nothing is known, so no event is posted and nothing is lost.
    let facts = DecisionFacts {
        handouts: None,
        ..node.facts()
    };
    let found = node.core.reconcile(&facts);
    assert_eq!(found.actions, Vec::<AgentAction>::new());
}

#[test]
fn a_gpu_that_became_too_small_is_reported_and_takes_no_more() {
    let mut node = running(&[4096], &[("a", 0, 2), ("b", 0, 2)]);
    let mut smaller = Node::with(
        CoreSettings {
            reserve: MiB(1024),
            whole: false,
            ..settings()
        },
        vec![gpu(0, 4096)],
    );
    smaller.records = std::mem::take(&mut node.records);
    smaller.specs = std::mem::take(&mut node.specs);
    smaller.handouts = std::mem::take(&mut node.handouts);
    smaller.pods = std::mem::take(&mut node.pods);
    smaller.populated = std::mem::take(&mut node.populated);
    smaller.restart_agent();
    let found = smaller.reconcile();
    assert_eq!(found.classes.get(&DisagreementClass::Overcommitted), Some(&2));
    let text = &smaller
        .events
        .iter()
        .find(|(_, reason, _)| *reason == "Overcommitted")
        .expect("said")
        .2;
    assert!(text.contains("4096 MiB") && text.contains("3072 MiB"), "{text}");
}

#[test]
fn a_pod_restarts_from_its_record_without_the_api_server() {
    let mut node = running(&[4096], &[("a", 0, 3)]);
    node.pods.clear();
    node.synced = false;
    node.restart_agent();
    let before = node.records.clone();
    node.start("a", "main").expect("from its record");
    assert_eq!(node.records, before);
}

/// The driver's processes are compared with the grants. Each difference is reported once per pod and class, and no pod loses anything.
#[test]
fn a_process_without_or_beyond_a_grant_is_reported_once() {
    type Case<'a> = (&'a str, &'a [(&'a str, usize, u64)], &'a [(DisagreementClass, u64)]);
    let cases: [Case<'_>; 8] = [
        ("no processes", &[], &[]),
        ("within the grant", &[("a", 0, 3072)], &[]),
        ("the driver does not say how much", &[("a", 0, 0)], &[]),
        (
            "more than granted",
            &[("a", 0, 3073)],
            &[(DisagreementClass::MemoryExceeded, 1)],
        ),
        ("the wrong GPU", &[("a", 1, 1)], &[(DisagreementClass::NotGranted, 1)]),
        (
            "a pod without a request",
            &[("other", 1, 10)],
            &[(DisagreementClass::NotGranted, 1)],
        ),
        ("an unknown pod", &[("unknown", 1, 10)], &[(DisagreementClass::NotGranted, 1)]),
        (
            "both at once",
            &[("a", 0, 4000), ("a", 1, 1)],
            &[(DisagreementClass::NotGranted, 1), (DisagreementClass::MemoryExceeded, 1)],
        ),
    ];
    for (name, processes, expected) in cases {
        let mut node = running(&[4096, 4096], &[("a", 0, 3)]);
        node.see(divvy_model::Pod {
            held: divvy_model::Held::Nothing,
            request: divvy_model::PodRequest::default(),
            ..simple("other", 0, 1)
        });
        node.processes(processes);
        let before = (node.records.clone(), node.specs.clone());
        for _ in 0..2 {
            let found = node.reconcile();
            assert_eq!(found.classes.into_iter().collect::<Vec<_>>(), expected, "{name}");
        }
        assert_eq!((node.records.clone(), node.specs.clone()), before, "{name}");
        let said: Vec<&str> = node.events.iter().map(|(_, reason, _)| *reason).collect();
        let known = expected.iter().filter(|_| processes[0].0 != "unknown");
        assert_eq!(said.len(), known.count(), "{name}: {said:?}");
    }
}

/// An escaped pod is not held to its share.
#[test]
fn an_escaped_pod_is_told_once_and_always_counted() {
    let unguarded = |gpu: &str| Escape::Unguarded {
        uuid: gpu.to_owned(),
        pid: 4711,
    };
    let tampered = Escape::Tampered {
        uuid: "GPU-0".to_owned(),
        change: FileChange::Size(3),
    };
    for (escapes, class, reason, parts) in [
        (
            vec![unguarded("GPU-0")],
            DisagreementClass::Unguarded,
            "GuardAvoided",
            ["process 4711", "GPU 0"],
        ),
        (
            vec![tampered],
            DisagreementClass::Tampered,
            "GuardFileChanged",
            ["the file has 3 bytes", "GPU 0"],
        ),
        (
            vec![Escape::NotGranted {
                uuid: "GPU-0".to_owned(),
                pid: 4711,
            }],
            DisagreementClass::NotGranted,
            "GpuNotGranted",
            ["process 4711", "GPU 0, which was not granted"],
        ),
        (
            vec![exceeded()],
            DisagreementClass::MemoryExceeded,
            "GpuMemoryExceeded",
            ["use 4000 MiB of GPU 0", "3072 MiB were granted"],
        ),
        (
            vec![Escape::Busy {
                uuid: "GPU-0".to_owned(),
            }],
            DisagreementClass::Busy,
            "GuardFileBusy",
            ["cannot be read in time", "GPU 0"],
        ),
        (
            vec![Escape::Crowded {
                uuid: "GPU-0".to_owned(),
            }],
            DisagreementClass::Crowded,
            "TooManyGpuProcesses",
            ["at most 256 processes", "GPU 0"],
        ),
        (
            vec![Escape::Untimed {
                uuid: "GPU-0".to_owned(),
                text: "not supported".to_owned(),
            }],
            DisagreementClass::Untimed,
            "NotLimited",
            ["compute time", "(not supported)"],
        ),
        (vec![unguarded("GPU-gone")], DisagreementClass::Unguarded, "", [""; 2]),
    ] {
        let mut node = running(&[4096], &[("a", 0, 3)]);
        let expected = usize::from(!reason.is_empty());
        node.escapes = BTreeMap::from([("a".to_owned(), escapes)]);
        for _ in 0..2 {
            assert_eq!(
                node.reconcile().classes.get(&class).copied().unwrap_or(0),
                expected as u64,
                "{class:?}"
            );
        }
        let said: Vec<_> = node.events.iter().filter(|(_, of, _)| *of == reason).collect();
        assert_eq!(said.len(), expected, "{said:?}");
        assert!(
            said.iter().all(|(.., text)| parts.iter().all(|part| text.contains(part))),
            "{said:?}"
        );
    }
}

fn exceeded() -> Escape {
    Escape::Exceeded {
        uuid: "GPU-0".to_owned(),
        used: MiB(4000),
        share: MiB(3072),
    }
}

/// A node that guards and does this about pods that do not keep to their shares, with pods that have 1 GiB each.
fn reacting(reaction: Reaction, pods: usize) -> Node {
    let names: Vec<String> = (0..pods).map(|number| format!("pod-{number:02}")).collect();
    let of: Vec<(&str, u32, u64)> = names.iter().map(|name| (&**name, 0, 1)).collect();
    let mut node = running(&[1024 * pods as u64], &of);
    node.change_settings(|settings| {
        settings.guard = Some(Guard {
            cuda: String::new(),
            nvml: String::new(),
            shares: String::new(),
            audit: None,
            reaction,
        });
    });
    node.escapes = names.into_iter().map(|name| (name, vec![exceeded()])).collect();
    node
}

/// A greedy pod uses more than its share.
#[test]
fn one_event_says_what_happens_to_a_greedy_pod() {
    for (reaction, part) in [
        (Reaction::Event, "limit what the program uses"),
        (Reaction::Throttle, "wait (--on-escape throttle)"),
        (Reaction::Evict, "The pod is evicted (--on-escape evict)"),
        (Reaction::Kill, "kills such processes (--on-escape kill)"),
    ] {
        let mut node = reacting(reaction, 1);
        // The list of the driver says the same as the sign.
        node.processes(&[("pod-00", 0, 4000)]);
        let found = node.reconcile();
        assert_eq!(
            found.classes.get(&DisagreementClass::MemoryExceeded),
            Some(&1),
            "counted once"
        );
        let texts: Vec<_> = node.events.iter().map(|(.., text)| text.clone()).collect();
        assert!(
            matches!(&texts[..], [text] if text.ends_with(part)),
            "{reaction:?}: {texts:?}"
        );
    }
}

#[test]
fn the_inventory_names_a_pod_to_evict_until_it_ends() {
    for reaction in [Reaction::Event, Reaction::Throttle, Reaction::Kill] {
        let mut node = reacting(reaction, 1);
        node.reconcile();
        assert_eq!(node.core.inventory().evict, BTreeSet::new(), "{reaction:?}");
    }
    let mut node = reacting(Reaction::Evict, 2);
    let named = |node: &Node| node.core.inventory().evict.into_iter().collect::<Vec<_>>();
    node.escapes.remove("pod-01");
    node.reconcile();
    assert_eq!(named(&node), ["pod-00"]);
    // Its program has ended since.
    node.escapes.clear();
    node.reconcile();
    assert_eq!(named(&node), ["pod-00"]);
    node.change("pod-00", |pod| pod.deleting = true);
    node.reconcile();
    assert_eq!(named(&node), [""; 0]);
    // A sign that is a limit of Divvy's own evicts no pod.
    let uuid = "GPU-0".to_owned();
    node.escapes = BTreeMap::from([("pod-01".to_owned(), vec![Escape::Crowded { uuid }])]);
    node.reconcile();
    assert_eq!(named(&node), [""; 0]);
    // Readers refuse an inventory that names more.
    let mut node = reacting(Reaction::Evict, NODE_EVICTIONS + 3);
    node.reconcile();
    let inventory = node.core.inventory();
    assert_eq!(inventory.evict.len(), NODE_EVICTIONS);
    assert_eq!(divvy_model::Inventory::parse(&inventory.to_json()), Ok(inventory));
}

#[test]
fn a_process_of_a_grant_that_has_just_ended_is_no_stray() {
    let mut node = running(&[4096], &[("a", 0, 3)]);
    node.processes(&[("a", 0, 3072)]);
    node.object_gone("a");
    node.processes_end("a");
    let found = node.reconcile();
    assert_eq!(
        found.classes.keys().copied().collect::<Vec<_>>(),
        [DisagreementClass::GrantEnded]
    );
}
