//! GPUs that are shared because the operator says so: each can be had in shares and as a whole.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use divvy_agent_core::{CoreSettings, GpuOffer, MigStrategy, PreStart, Reason, ResourceSpec};
use divvy_model::{Enforcement, GpuRules, Held, Isolation, MiB, Partition, Phase, Pod, Vendor, names};

use crate::node::{GIB, Limits, Node, gpu, settings, simple};
use crate::whole::{gpu_of, ids_of, nodes_of, others, placed_of, whole_of};

fn sharing(vendor: Vendor) -> CoreSettings {
    CoreSettings {
        also_shared: BTreeSet::from([vendor]),
        ..settings()
    }
}

/// Return a pod with a share of the vendor's GPU with this index.
fn share(vendor: Vendor, uid: &str, index: u32, units: u64, isolation: Option<Isolation>) -> Pod {
    let mut pod = simple(uid, index, units);
    let Held::Allocation(allocation) = &mut pod.held else {
        panic!("{pod:?}")
    };
    let of_containers = allocation.containers.values_mut().flatten().map(|share| &mut share.uuid);
    let uuids = allocation.gpus.iter_mut().map(|share| &mut share.uuid).chain(of_containers);
    uuids.for_each(|uuid| *uuid = gpu_of(vendor, index).uuid);
    pod.request.rules = Some(Arc::new(Ok(GpuRules {
        isolation,
        vendor: Some(vendor),
        ..GpuRules::default()
    })));
    pod
}

/// A shared GPU is offered in both ways, and a partition only as a whole.
#[test]
fn a_vendors_gpus_are_shared_if_the_operator_says_so() {
    let part = Partition {
        parent: "0000:19:00.0".to_owned(),
        profile: "cpx_nps1".to_owned(),
    };
    let sets = [vec![], vec![Vendor::Amd], vec![Vendor::Intel], others().collect()];
    for (vendor, shared) in others().flat_map(|vendor| sets.clone().map(|set| (vendor, set))) {
        let expected = if shared.contains(&vendor) {
            (MiB(2048), 61, true)
        } else {
            (MiB::ZERO, 0, true)
        };
        // These two are about NVIDIA's GPUs.
        for (whole, mig) in [(false, MigStrategy::None), (true, MigStrategy::Mixed)] {
            let settings = CoreSettings {
                also_shared: shared.iter().copied().collect(),
                reserve: MiB(2048),
                whole,
                mig,
                ..settings()
            };
            let offer = |part: Option<&Partition>| {
                let GpuOffer { reserve, units, whole } = settings.offer(vendor, MiB(65520), part);
                (reserve, units, whole == Some(vendor.into()))
            };
            assert_eq!(offer(None), expected, "{vendor} {shared:?}");
            assert_eq!(offer(Some(&part)), (MiB::ZERO, 0, true));
        }
    }
}

#[test]
fn a_node_offers_shares_of_all_its_shared_gpus_as_one_resource() {
    for vendor in others() {
        let node = Node::with(sharing(vendor), vec![gpu(0, 4 * GIB), gpu_of(vendor, 0)]);
        let offered: Vec<Cow<'static, str>> = node.core.offers().into_iter().map(ResourceSpec::name).collect();
        assert_eq!(offered, [names::GPU_MEM, names::GPU_COUNT, vendor.whole_resource()]);
        assert_eq!(node.core.inventory().total_units(), 4 + 63);
    }
}

#[test]
fn a_share_comes_with_the_gpus_devices_and_gpushare_variables() {
    for vendor in others() {
        let mut node = Node::with(sharing(vendor), vec![gpu(0, 4 * GIB), gpu_of(vendor, 0), gpu_of(vendor, 1)]);
        node.node_files.devices = BTreeMap::from([
            ("/dev/kfd".to_owned(), Some(44)),
            ("/dev/dri/card2".to_owned(), Some(39)),
            ("/dev/dri/renderD129".to_owned(), Some(44)),
        ]);
        node.see(share(vendor, "a", 1, 3, None));
        node.admit("a").expect("admitted");
        let running = node.start("a", "main").expect("started");
        assert_eq!(running.devices, nodes_of(vendor, 1));
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
        assert_eq!(node.events, [], "the container brings its own libraries");
    }
}

#[test]
fn a_share_of_a_gpu_and_the_whole_gpu_wait_for_each_other() {
    for vendor in others() {
        let mut node = Node::with(sharing(vendor), vec![gpu_of(vendor, 0)]);
        node.see(share(vendor, "share", 0, 3, None));
        node.admit("share").expect("admitted");
        node.start("share", "main").expect("started");
        node.see(placed_of(vendor, "whole", &[0]));
        node.allocate_of(whole_of(vendor), "whole", "main", &ids_of(vendor, &[0]))
            .expect("allocated");
        let (reason, text) = node.start("whole", "main").expect_err("the GPU has a share");
        assert_eq!(reason, Reason::MemoryHeld, "{text}");
        node.change("share", |pod| pod.phase = Phase::Succeeded);
        node.processes_end("share");
        node.reconcile();
        node.start("whole", "main").expect("started");
        node.see(share(vendor, "later", 0, 1, None));
        node.admit("later").expect("admitted");
        let (reason, text) = node.start("later", "main").expect_err("the GPU is taken as a whole");
        assert_eq!(reason, Reason::MemoryHeld, "{text}");
    }
}

/// The kernel limits a share of a GPU if it supports such a limit.
#[test]
fn the_kernel_limits_shares_and_never_whole_gpus() {
    for vendor in others() {
        let limited = |enforcement, pod: Pod| {
            let mut node = Node::with(sharing(vendor), vec![gpu_of(vendor, 0)]);
            node.set_enforcement(0, enforcement);
            let uid = pod.uid.clone();
            let is_whole = pod.request.whole.is_some();
            node.see(pod);
            match is_whole {
                true => node
                    .allocate_of(whole_of(vendor), &uid, "main", &ids_of(vendor, &[0]))
                    .map_err(Into::into),
                false => node.admit(&uid),
            }
            .expect("admitted");
            match node.pre_start(&uid, "main") {
                PreStart::Granted { actions, .. } => {
                    let limits = Limits::of(&actions);
                    Ok((limits.gpus, limits.guarded, limits.are_required))
                }
                PreStart::Refused { text, .. } | PreStart::Wait(_, text) => Err(text),
            }
        };
        let share = |isolation| share(vendor, "a", 0, 3, isolation);
        let uuid = gpu_of(vendor, 0).uuid;
        let set = || vec![(uuid.clone(), MiB(3 * GIB))];
        let (cgroup, hard) = (Some(Enforcement::CGROUP), Some(Isolation::Hard));
        assert_eq!(limited(cgroup, share(None)), Ok((set(), vec![], false)));
        assert_eq!(limited(cgroup, share(hard)), Ok((set(), vec![], true)));
        assert_eq!(limited(None, share(None)), Ok((vec![], vec![], false)));
        assert_eq!(limited(cgroup, placed_of(vendor, "a", &[0])), Ok((vec![], vec![], false)));
        let text = limited(None, share(hard)).expect_err("nothing enforces it");
        let expected = format!("divvy.dev/isolation: hard, but nothing enforces shares of GPU {uuid}");
        assert!(text.contains(&expected), "{text}");
    }
}
