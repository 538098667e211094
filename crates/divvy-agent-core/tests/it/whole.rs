//! Whole GPUs of a vendor whose memory is not shared by default.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use divvy_agent_core::{DisagreementClass, Handout, PreStart, Reason, ResourceSpec};
use divvy_model::ContainerKind::{App, Init};
use divvy_model::{
    ContainerKind, Gpu, GpuLink, Health, Held, LinkKind, MiB, Phase, Pod, PodRequest, Vendor, WholeContainer, WholeKind,
    WholeRequest, names,
};

use crate::node::{Node, gpu, gpus_of, holding, key, settings, simple};

const AMD: ResourceSpec = whole_of(Vendor::Amd);

pub(crate) const fn whole_of(vendor: Vendor) -> ResourceSpec {
    ResourceSpec::whole(WholeKind::Gpu(vendor))
}

/// Return the vendors whose GPUs are not shared by default.
pub(crate) fn others() -> impl Iterator<Item = Vendor> {
    Vendor::ALL.into_iter().filter(|vendor| !vendor.is_shared_by_default())
}

/// Return a GPU of one of these vendors.
pub(crate) fn gpu_of(vendor: Vendor, index: u32) -> Gpu {
    let pci = format!("0000:{:02x}:00.0", 0x19 + index);
    let (uuid, model, cc) = match vendor {
        Vendor::Intel => (pci.replace([':', '.'], "-") + "-0xe211", "Intel GPU 0xe211", ""),
        _ => (format!("0x{index:016x}"), "AMD Instinct MI210", "gfx90a"),
    };
    Gpu {
        vendor,
        uuid,
        nodes: vec![format!("dri/card{}", index + 1), format!("dri/renderD{}", index + 128)],
        pci,
        model: model.to_owned(),
        cc: cc.to_owned(),
        ..gpu(index, 65520)
    }
}

/// Return the ids that the vendor's own device plugin has for these GPUs.
pub(crate) fn ids_of(vendor: Vendor, of: &[u32]) -> Vec<String> {
    let id = |index: &u32| match vendor {
        Vendor::Intel => format!("card{}-0", index + 1),
        _ => gpu_of(vendor, *index).pci,
    };
    of.iter().map(id).collect()
}

/// Return the device nodes that a container with this GPU has.
pub(crate) fn nodes_of(vendor: Vendor, index: u32) -> Vec<String> {
    let shared: &[&str] = match vendor {
        Vendor::Amd => &["/dev/kfd"],
        _ => &[],
    };
    let own = gpu_of(vendor, index).nodes.into_iter().map(|node| format!("/dev/{node}"));
    shared.iter().map(|path| (*path).to_owned()).chain(own).collect()
}

fn amd(index: u32) -> Gpu {
    gpu_of(Vendor::Amd, index)
}

fn ids(of: &[u32]) -> Vec<String> {
    ids_of(Vendor::Amd, of)
}

fn node(gpus: u32) -> Node {
    Node::with(settings(), (0..gpus).map(amd).collect())
}

/// Return a pod that the default scheduler bound. It has no allocation.
fn plain(uid: &str, containers: &[(&str, ContainerKind, u64)]) -> Pod {
    plain_of(Vendor::Amd, uid, containers)
}

pub(crate) fn plain_of(vendor: Vendor, uid: &str, containers: &[(&str, ContainerKind, u64)]) -> Pod {
    let whole = WholeRequest {
        kind: vendor.into(),
        containers: containers
            .iter()
            .map(|(name, kind, gpus)| WholeContainer {
                name: (*name).to_owned(),
                kind: *kind,
                gpus: *gpus,
            })
            .collect(),
    };
    Pod {
        uid: uid.to_owned(),
        namespace: "default".to_owned(),
        name: format!("pod-{uid}"),
        node: Some("n1".to_owned()),
        request: PodRequest::with_whole(Vec::new(), vec![whole], None),
        ..Pod::default()
    }
}

/// Return a pod with one container, to which the extender has given these GPUs.
fn placed(uid: &str, gpus: &[u32]) -> Pod {
    placed_of(Vendor::Amd, uid, gpus)
}

pub(crate) fn placed_of(vendor: Vendor, uid: &str, gpus: &[u32]) -> Pod {
    let uuids: Vec<String> = gpus.iter().map(|index| gpu_of(vendor, *index).uuid).collect();
    let pod = plain_of(vendor, uid, &[("main", App, gpus.len() as u64)]);
    holding(pod, &uuids, MiB(65520))
}

#[test]
fn a_node_offers_the_resources_that_it_has_gpus_for() {
    let offered = |gpus: Vec<Gpu>| -> Vec<Cow<'static, str>> {
        let node = Node::with(settings(), gpus);
        node.core.offers().into_iter().map(ResourceSpec::name).collect()
    };
    for vendor in others() {
        let whole = vendor.whole_resource();
        assert_eq!(offered(vec![gpu_of(vendor, 0)]), [whole]);
        assert_eq!(
            offered(vec![gpu(0, 4096), gpu_of(vendor, 0)]),
            [names::GPU_MEM, names::GPU_COUNT, whole]
        );
    }
    let all = [gpu(0, 4096)].into_iter().chain(others().map(|vendor| gpu_of(vendor, 0)));
    assert_eq!(
        offered(all.collect()),
        [names::GPU_MEM, names::GPU_COUNT, "amd.com/gpu", "gpu.intel.com/xe"]
    );
    assert_eq!(offered(vec![gpu(0, 4096)]), [names::GPU_MEM, names::GPU_COUNT]);
    assert_eq!(offered(Vec::new()), [names::GPU_MEM, names::GPU_COUNT]);
}

#[test]
fn any_ids_give_a_container_its_allocated_gpus() {
    for vendor in others() {
        let mut node = Node::with(settings(), (0..4).map(|index| gpu_of(vendor, index)).collect());
        node.node_files.devices = BTreeMap::from([
            ("/dev/kfd".to_owned(), Some(44)),
            ("/dev/dri/card4".to_owned(), Some(39)),
            ("/dev/dri/renderD131".to_owned(), Some(44)),
        ]);
        node.see(placed_of(vendor, "a", &[3]));
        node.allocate_of(whole_of(vendor), "a", "main", &ids_of(vendor, &[0]))
            .expect("allocated");
        let running = node.start("a", "main").expect("started");
        assert_eq!(running.devices, nodes_of(vendor, 3));
        assert_eq!((running.groups, running.env), (vec![39, 44], Vec::new()));
        assert_eq!(node.events, [], "the container brings its own libraries");
    }
}

/// The vendor's own plugin can share a GPU between several containers. Each then has a numbered id.
#[test]
fn a_running_pod_keeps_the_gpu_of_another_plugin() {
    for (vendor, id, index) in [
        (Vendor::Amd, "0000:1a:00.0", 1),
        (Vendor::Intel, "card2-0", 1),
        (Vendor::Intel, "card2-12", 1),
        (Vendor::Intel, "card12-0", 11),
    ] {
        let mut node = Node::with(settings(), (0..12).map(|index| gpu_of(vendor, index)).collect());
        let mut running = plain_of(vendor, "theirs", &[("main", App, 1)]);
        (running.phase, running.container_running) = (Phase::Running, true);
        node.see(running);
        node.populated.insert("theirs".to_owned());
        node.handouts.push(Handout {
            key: key("theirs", "main"),
            resource: vendor.whole_resource().to_owned(),
            ids: BTreeSet::from([id.to_owned()]),
            grant: None,
        });
        let found = node.reconcile();
        assert_eq!(found.held, BTreeMap::from([(gpu_of(vendor, index).uuid, MiB(65520))]), "{id}");
        assert_eq!(gpus_of(&node, "theirs", "main"), [gpu_of(vendor, index).uuid]);
        assert_eq!(node.specs.len(), 0, "the container does not need a grant");
    }
}

#[test]
fn a_gpu_without_its_ids_node_is_named_by_uuid() {
    let gpu = Gpu {
        nodes: vec!["dri/renderD128".to_owned()],
        ..gpu_of(Vendor::Intel, 0)
    };
    let node = Node::with(settings(), vec![gpu]);
    let devices = node.core.devices(whole_of(Vendor::Intel));
    let ids: Vec<&str> = devices.iter().map(|device| device.id.as_str()).collect();
    assert_eq!(ids, ["0000-19-00-0-0xe211"]);
}

#[test]
fn an_unallocated_container_gets_the_gpus_of_its_ids() {
    for vendor in others() {
        let mut node = Node::with(settings(), (0..4).map(|index| gpu_of(vendor, index)).collect());
        let named = [gpu_of(vendor, 1).uuid, gpu_of(vendor, 2).uuid];
        node.see(plain_of(vendor, "a", &[("main", App, 2)]));
        node.allocate_of(whole_of(vendor), "a", "main", &ids_of(vendor, &[1, 2]))
            .expect("allocated");
        node.start("a", "main").expect("started");
        assert_eq!(gpus_of(&node, "a", "main"), named);
        // The extender sees in the inventory that they are taken.
        node.reconcile();
        let held: Vec<u64> = node.core.inventory().gpus.iter().map(|gpu| gpu.held.0).collect();
        assert_eq!(held, [0, 65520, 65520, 0]);
        // A new agent knows the same, and reports no change of an allocation that there never was.
        node.restart_agent();
        assert_eq!(node.reconcile().classes, BTreeMap::new());
        assert_eq!(node.events, []);
        assert!(matches!(node.pre_start("a", "main"), PreStart::Granted { .. }));
        assert_eq!(gpus_of(&node, "a", "main"), named);
    }
}

#[test]
fn a_gpu_that_an_allocation_promises_is_replaced_by_a_free_one() {
    let mut node = node(3);
    node.see(placed("a", &[0]));
    node.see(plain("b", &[("main", App, 1)]));
    // The kubelet gave b the id of the GPU that a has, although a has not started.
    node.allocate_of(AMD, "b", "main", &ids(&[0])).expect("allocated");
    node.allocate_of(AMD, "a", "main", &ids(&[1])).expect("allocated");
    node.start("b", "main").expect("started");
    assert_eq!(gpus_of(&node, "b", "main"), [amd(1).uuid]);
    node.start("a", "main").expect("started");
    assert_eq!(gpus_of(&node, "a", "main"), [amd(0).uuid]);
}

#[test]
fn without_a_free_gpu_a_container_waits_until_one_is_free() {
    let mut node = node(2);
    node.see(placed("a", &[0]));
    node.allocate_of(AMD, "a", "main", &ids(&[1])).expect("allocated");
    node.start("a", "main").expect("started");
    node.see(plain("b", &[("main", App, 1)]));
    node.allocate_of(AMD, "b", "main", &ids(&[0])).expect("allocated");
    node.set_health(1, Health::Failed, Some("uncorrectable memory error"));
    let (reason, text) = node.start("b", "main").expect_err("no GPU is free");
    assert_eq!(reason, Reason::MemoryHeld);
    assert!(
        text.contains("only 0 of this node's GPUs are healthy and not in use"),
        "{text}"
    );
    node.change("a", |pod| pod.phase = Phase::Succeeded);
    node.processes_end("a");
    node.start("b", "main").expect("started");
    assert_eq!(gpus_of(&node, "b", "main"), [amd(0).uuid]);
}

#[test]
fn app_containers_have_own_gpus_and_reuse_the_init_containers() {
    let mut node = node(4);
    node.see(placed("x", &[2]));
    node.see(plain("a", &[("warm-up", Init, 2), ("one", App, 1), ("two", App, 1)]));
    node.allocate_of(AMD, "a", "warm-up", &ids(&[1, 2])).expect("allocated");
    node.start("a", "warm-up").expect("started");
    let first: BTreeSet<String> = gpus_of(&node, "a", "warm-up").into_iter().collect();
    assert_eq!(first, BTreeSet::from([amd(0).uuid, amd(1).uuid]), "GPU 2 is promised to x");
    node.allocate_of(AMD, "a", "one", &ids(&[1])).expect("allocated");
    node.allocate_of(AMD, "a", "two", &ids(&[2])).expect("allocated");
    node.start("a", "one").expect("started");
    node.start("a", "two").expect("started");
    let (one, two) = (gpus_of(&node, "a", "one"), gpus_of(&node, "a", "two"));
    assert_eq!(one, [amd(1).uuid]);
    assert!(two != one && two != [amd(2).uuid], "{two:?}");
}

#[test]
fn same_ids_give_the_same_gpu_despite_another_claim() {
    let mut node = node(3);
    node.see(plain("a", &[("warm-up", Init, 1), ("main", App, 1)]));
    for container in ["warm-up", "main"] {
        node.allocate_of(AMD, "a", container, &ids(&[1])).expect("allocated");
    }
    node.start("a", "warm-up").expect("started");
    node.see(placed("x", &[1]));
    node.start("a", "main").expect("started");
    assert_eq!(gpus_of(&node, "a", "main"), [amd(1).uuid]);
    assert_eq!(gpus_of(&node, "a", "warm-up"), [amd(1).uuid]);
}

#[test]
fn an_allocation_of_gpus_outside_the_resource_is_refused() {
    let mut node = Node::with(settings(), vec![gpu(0, 65536), amd(0), amd(1)]);
    let whole = |uid: &str, uuid: String, whole: bool| {
        let mut pod = placed(uid, &[0]);
        let Held::Allocation(held) = &mut pod.held else {
            panic!("the fixture's pods have an allocation");
        };
        held.gpus[0].uuid.clone_from(&uuid);
        held.gpus[0].whole = whole;
        held.containers
            .values_mut()
            .for_each(|shares| shares[0].uuid.clone_from(&uuid));
        pod
    };
    node.see(whole("nvidia", "GPU-0".to_owned(), true));
    node.allocate_of(AMD, "nvidia", "main", &ids(&[0])).expect("allocated");
    let (reason, text) = node.start("nvidia", "main").expect_err("another resource");
    assert_eq!(reason, Reason::NoAllocation);
    assert!(
        text.contains("names GPU GPU-0, which is not offered as amd.com/gpu"),
        "{text}"
    );
    node.kubelet_forgets("nvidia");
    let mut cheap = simple("cheap", 0, 1);
    if let Held::Allocation(held) = &mut cheap.held {
        held.gpus[0].uuid = amd(1).uuid;
        held.containers.values_mut().for_each(|shares| shares[0].uuid = amd(1).uuid);
    }
    node.see(cheap);
    node.allocate_as("cheap", "main", &["GPU-0::m0".to_owned()])
        .expect("allocated");
    let (reason, text) = node.start("cheap", "main").expect_err("a share of a whole GPU");
    assert_eq!(reason, Reason::NoAllocation);
    assert!(text.contains("which is not offered as aliyun.com/gpu-mem"), "{text}");
    // A whole GPU is booked as a whole even if the allocation does not say so.
    node.see(whole("small", amd(0).uuid, false));
    node.allocate_of(AMD, "small", "main", &ids(&[1])).expect("allocated");
    node.start("small", "main").expect("started");
    node.see(placed("b", &[0]));
    node.allocate_of(AMD, "b", "main", &ids(&[0])).expect("allocated");
    assert_eq!(node.start("b", "main").expect_err("taken").0, Reason::MemoryHeld);
}

#[test]
fn too_few_gpus_in_an_allocation_are_refused() {
    let mut node = node(2);
    let mut pod = placed("a", &[0]);
    pod.request = plain("a", &[("main", App, 2)]).request;
    node.see(pod);
    node.allocate_of(AMD, "a", "main", &ids(&[0, 1])).expect("allocated");
    let (reason, text) = node.start("a", "main").expect_err("one GPU for two ids");
    assert_eq!(reason, Reason::NoAllocation);
    assert!(
        text.contains("gives container main 1 GPUs, but the kubelet gave it 2 devices"),
        "{text}"
    );
}

#[test]
fn an_id_of_another_vendor_or_of_no_gpu_is_refused() {
    let intel = whole_of(Vendor::Intel);
    let mut node = Node::with(settings(), vec![gpu(0, 4096), amd(0), gpu_of(Vendor::Intel, 1)]);
    for (spec, id, part) in [
        (AMD, "GPU-0::m0", "names none of this node's AMD GPUs (0000:19:00.0)"),
        (AMD, "0000:ff:00.0", "names none of this node's AMD GPUs"),
        (AMD, "card2-0", "names none of this node's AMD GPUs"),
        (intel, "0000:19:00.0", "names none of this node's Intel GPUs (card2-0)"),
        (intel, "card2-1", "names none of this node's Intel GPUs (card2-0)"),
        (ResourceSpec::MEMORY, "0000:19:00.0", "is not an id of this plugin"),
    ] {
        let error = node.core.allocate(spec, &[id.to_owned()]).expect_err(id).to_string();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn only_unheld_ids_of_failed_gpus_turn_unhealthy() {
    let mut node = node(4);
    let healthy = |node: &Node| -> Vec<bool> { node.core.devices(AMD).iter().map(|device| device.healthy).collect() };
    // Pod a is on GPU 3, but the kubelet gave it the id of GPU 0.
    node.see(placed("a", &[3]));
    node.allocate_of(AMD, "a", "main", &ids(&[0])).expect("allocated");
    node.set_health(3, Health::Failed, None);
    assert_eq!(healthy(&node), [true; 4], "three ids are free, and so are three GPUs");
    node.set_health(1, Health::Lost, None);
    assert_eq!(healthy(&node), [true, false, true, true]);
    node.object_gone("a");
    node.kubelet_forgets("a");
    assert_eq!(healthy(&node), [true, false, true, false]);
}

#[test]
fn the_kubelet_is_told_which_ids_lie_on_the_allocated_gpus() {
    let mut node = node(4);
    node.see(placed("a", &[1, 3]));
    let all = ids(&[0, 1, 2, 3]);
    assert_eq!(node.core.preferred(AMD, &all, &[], 2), ids(&[1, 3]));
}

#[test]
fn without_an_allocation_the_most_linked_gpus_are_preferred() {
    let mut gpus: Vec<Gpu> = (0..8).map(amd).collect();
    // Two hives: 0, 2, 4, 6 and 1, 3, 5, 7.
    for index in 0..8_u32 {
        let peers = (0..8_u32).filter(|peer| *peer != index && peer % 2 == index % 2);
        let link = |peer| GpuLink {
            peer: amd(peer).uuid,
            kind: LinkKind::Xgmi,
            count: 1,
        };
        gpus[index as usize].links = peers.map(link).collect();
    }
    let mut node = Node::with(settings(), gpus);
    for (available, must, size, expected) in [
        (vec![0, 1, 2, 3, 4, 5, 6, 7], vec![], 4, vec![0, 2, 4, 6]),
        (vec![0, 1, 2, 3, 4, 5, 6, 7], vec![5], 3, vec![5, 1, 3]),
        // The hive with more free GPUs comes first: it can serve the whole request.
        (vec![0, 1, 3, 5, 6, 7], vec![], 3, vec![1, 3, 5]),
        (vec![2], vec![], 1, vec![2]),
        (vec![2], vec![], 3, vec![2]),
        (vec![], vec![], 1, vec![]),
    ] {
        let chosen = node.core.preferred(AMD, &ids(&available), &ids(&must), size);
        assert_eq!(chosen, ids(&expected), "{available:?} {must:?} {size}");
    }
}

#[test]
fn a_departed_pod_holds_the_gpus_of_all_its_containers() {
    let mut node = node(4);
    node.see(plain("a", &[("one", App, 1), ("two", App, 2)]));
    node.allocate_of(AMD, "a", "one", &ids(&[0])).expect("allocated");
    node.allocate_of(AMD, "a", "two", &ids(&[1, 2])).expect("allocated");
    node.start("a", "one").expect("started");
    node.start("a", "two").expect("started");
    node.object_gone("a");
    let found = node.reconcile();
    assert_eq!(found.classes.get(&DisagreementClass::HeldWithoutPod), Some(&1));
    let held: Vec<&String> = found.held.keys().collect();
    assert_eq!(held, [&amd(0).uuid, &amd(1).uuid, &amd(2).uuid]);
}
