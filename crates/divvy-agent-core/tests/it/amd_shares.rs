//! AMD's GPUs with `--amd-shares`: each can be had in shares and as a whole.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use divvy_agent_core::{MigStrategy, Offer, PreStart, Reason, ResourceSpec, Settings};
use divvy_model::{Enforcement, GpuRules, Held, Isolation, MiB, Partition, Phase, Pod, Vendor, names};

use crate::node::{GIB, Node, gpu, settings, simple};
use crate::whole::{AMD, amd, ids, placed};

fn sharing() -> Settings {
    Settings {
        amd_shares: true,
        ..settings()
    }
}

/// Return a pod with a share of the AMD GPU with this index.
fn share(uid: &str, index: u32, units: u64, isolation: Option<Isolation>) -> Pod {
    let mut pod = simple(uid, index, units);
    let Held::Allocation(allocation) = &mut pod.held else {
        panic!("{pod:?}")
    };
    let of_containers = allocation.containers.values_mut().flatten().map(|share| &mut share.uuid);
    let uuids = allocation.gpus.iter_mut().map(|share| &mut share.uuid).chain(of_containers);
    uuids.for_each(|uuid| *uuid = amd(index).uuid);
    pod.request.rules = Some(Arc::new(Ok(GpuRules {
        isolation,
        vendor: Some(Vendor::Amd),
        ..GpuRules::default()
    })));
    pod
}

#[test]
fn an_amd_gpu_is_offered_in_both_ways_if_the_operator_says_so_and_a_partition_as_a_whole() {
    let part = Partition {
        parent: "0000:19:00.0".to_owned(),
        profile: "cpx_nps1".to_owned(),
    };
    let offer = |settings: &Settings, part: Option<&Partition>| {
        let Offer { reserve, units, whole } = settings.offer(Vendor::Amd, MiB(65520), part);
        (reserve, units, whole == Some(Vendor::Amd.into()))
    };
    for (shares, expected) in [(false, (MiB::ZERO, 0, true)), (true, (MiB(2048), 61, true))] {
        // These two are about NVIDIA's GPUs.
        for (whole, mig) in [(false, MigStrategy::None), (true, MigStrategy::Mixed)] {
            let settings = Settings {
                amd_shares: shares,
                reserve: MiB(2048),
                whole,
                mig,
                ..settings()
            };
            assert_eq!(offer(&settings, None), expected);
            assert_eq!(offer(&settings, Some(&part)), (MiB::ZERO, 0, true));
        }
    }
    let node = Node::with(sharing(), vec![gpu(0, 4 * GIB), amd(0)]);
    let offered: Vec<Cow<'static, str>> = node.core.offers().into_iter().map(ResourceSpec::name).collect();
    assert_eq!(offered, [names::GPU_MEM, names::GPU_COUNT, "amd.com/gpu"]);
    assert_eq!(node.core.inventory().total_units(), 4 + 63);
}

#[test]
fn a_container_with_a_share_gets_the_devices_of_the_whole_gpu_and_gpushares_variables() {
    let mut node = Node::with(sharing(), vec![gpu(0, 4 * GIB), amd(0), amd(1)]);
    node.node_files.devices = BTreeMap::from([
        ("/dev/kfd".to_owned(), Some(44)),
        ("/dev/dri/card2".to_owned(), Some(39)),
        ("/dev/dri/renderD129".to_owned(), Some(44)),
    ]);
    node.see(share("a", 1, 3, None));
    node.admit("a").expect("admitted");
    let running = node.start("a", "main").expect("started");
    node.see(placed("b", &[1]));
    assert_eq!(running.devices, ["/dev/kfd", "/dev/dri/card2", "/dev/dri/renderD129"]);
    assert_eq!(running.groups, [39, 44]);
    assert_eq!(
        running.env,
        [
            "ALIYUN_COM_GPU_MEM_IDX=1",
            "ALIYUN_COM_GPU_MEM_POD=3",
            "ALIYUN_COM_GPU_MEM_CONTAINER=3",
            "ALIYUN_COM_GPU_MEM_DEV=63",
        ]
    );
    assert_eq!(node.events, [], "AMD's containers bring their own libraries");
}

#[test]
fn a_share_of_an_amd_gpu_and_the_whole_gpu_wait_for_each_other() {
    let mut node = Node::with(sharing(), vec![amd(0)]);
    node.see(share("share", 0, 3, None));
    node.admit("share").expect("admitted");
    node.start("share", "main").expect("started");
    node.see(placed("whole", &[0]));
    node.allocate_of(AMD, "whole", "main", &ids(&[0])).expect("allocated");
    let (reason, text) = node.start("whole", "main").expect_err("the GPU has a share");
    assert_eq!(reason, Reason::MemoryHeld, "{text}");
    node.change("share", |pod| pod.phase = Phase::Succeeded);
    node.processes_end("share");
    node.reconcile();
    node.start("whole", "main").expect("started");
    node.see(share("later", 0, 1, None));
    node.admit("later").expect("admitted");
    let (reason, text) = node.start("later", "main").expect_err("the GPU is taken as a whole");
    assert_eq!(reason, Reason::MemoryHeld, "{text}");
}

#[test]
fn a_share_is_limited_where_the_kernel_can_do_it_and_a_whole_gpu_never() {
    let limited = |enforcement, pod: Pod| {
        let mut node = Node::with(sharing(), vec![amd(0)]);
        node.set_enforcement(0, enforcement);
        let uid = pod.uid.clone();
        let is_whole = pod.request.whole.is_some();
        node.see(pod);
        match is_whole {
            true => node.allocate_of(AMD, &uid, "main", &ids(&[0])),
            false => node.admit(&uid),
        }
        .expect("admitted");
        match node.pre_start(&uid, "main") {
            PreStart::Granted { limits, .. } => Ok((limits.gpus, limits.guarded, limits.are_required)),
            PreStart::Refused { text, .. } | PreStart::Wait(_, text) => Err(text),
        }
    };
    let set = || vec![(amd(0).uuid, MiB(3 * GIB))];
    let (cgroup, hard) = (Some(Enforcement::CGROUP), Some(Isolation::Hard));
    assert_eq!(limited(cgroup, share("a", 0, 3, None)), Ok((set(), vec![], false)));
    assert_eq!(limited(cgroup, share("a", 0, 3, hard)), Ok((set(), vec![], true)));
    assert_eq!(limited(None, share("a", 0, 3, None)), Ok((vec![], vec![], false)));
    assert_eq!(limited(cgroup, placed("a", &[0])), Ok((vec![], vec![], false)));
    let text = limited(None, share("a", 0, 3, hard)).expect_err("nothing enforces it");
    assert!(
        text.contains("divvy.dev/isolation: hard, but nothing enforces shares of GPU 0x"),
        "{text}"
    );
}
