//! Nodes and pods as values of `divvy-model`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use divvy_model::legacy::LegacyAllocation;
use divvy_model::{
    Allocation, ContainerKind, ContainerRequest, Gpu, GpuRules, GpuShare, Health, Held, Inventory, MemoryUnit, MiB, Node, Phase,
    Pod, PodRequest, Vendor, WholeContainer, WholeKind, WholeRequest,
};

pub const GIB: MemoryUnit = MemoryUnit::GIB;

/// Return a node as gpushare's device plugin creates it, with `units` of memory on `gpus` GPUs.
pub fn gpushare_node(name: &str, units: u64, gpus: u64) -> Node {
    Node {
        uid: format!("uid-{name}"),
        name: name.to_owned(),
        capacity_units: units,
        capacity_gpus: gpus,
        ..Node::default()
    }
}

/// Return the nodes and pods of `docs/compatibility/gpushare.md`: n1 has 32 units on 2 GPUs, with a (10 on GPU 0) and b (4 on GPU 1); n2 has 16
/// units on 1 GPU, full with c; n3 has no GPUs; n4 has 64 units on 4 GPUs, empty.
pub fn gpushare_cluster() -> ([Node; 4], [Pod; 3]) {
    let nodes = [("n1", 32, 2), ("n2", 16, 1), ("n3", 0, 0), ("n4", 64, 4)];
    let pods = [("a", "n1", 0, 10), ("b", "n1", 1, 4), ("c", "n2", 0, 16)];
    (
        nodes.map(|(name, units, gpus)| gpushare_node(name, units, gpus)),
        pods.map(|(name, node, index, units)| gpushare_pod(name, node, index, units)),
    )
}

/// Return a node with Divvy's agent and GPUs of these sizes, in units of GiB.
pub fn divvy_node(name: &str, sizes: &[u64]) -> Node {
    let gpus: Vec<Gpu> = sizes.iter().enumerate().map(|(i, units)| gpu(name, i, *units)).collect();
    Node {
        inventory: Some(Ok(Inventory {
            agent: "0.1.0".to_owned(),
            drivers: BTreeMap::from([(Vendor::Nvidia, "550.54.15".to_owned())]),
            unit: GIB,
            other_units: std::collections::BTreeSet::new(),
            unschedulable: false,
            driver_trouble: None,
            evict: BTreeSet::new(),
            gpus,
        })),
        ..gpushare_node(name, sizes.iter().sum(), sizes.len() as u64)
    }
}

pub fn uuid(node: &str, index: usize) -> String {
    format!("GPU-{node}-{index}")
}

/// Return a GPU of a node, of this size in units of GiB.
pub fn gpu(node: &str, index: usize, units: u64) -> Gpu {
    Gpu {
        vendor: Vendor::Nvidia,
        uuid: uuid(node, index),
        index: index as u32,
        nodes: vec![format!("nvidia{index}")],
        partition: None,
        pci: String::new(),
        model: "NVIDIA Test".to_owned(),
        cc: String::new(),
        sms: 0,
        clock_mhz: 0,
        bandwidth_gbs: 0,
        enforcement: None,
        total: MiB(units * 1024),
        reserve: MiB::ZERO,
        units,
        whole: None,
        held: MiB::ZERO,
        held_by_pod: None,
        numa: None,
        health: Health::Ok,
        reason: None,
        test: None,
        links: Vec::new(),
    }
}

/// Return a T4 that the agent has found, and of which it offers nothing yet.
pub fn t4(uuid: String, index: u32, mib: u64) -> Gpu {
    Gpu {
        uuid,
        index,
        nodes: vec![format!("nvidia{index}")],
        model: "NVIDIA T4".to_owned(),
        cc: "7.5".to_owned(),
        sms: 40,
        clock_mhz: 1590,
        bandwidth_gbs: 320,
        total: MiB(mib),
        ..gpu("", 0, 0)
    }
}

/// The memory of a GPU of [`add_whole`].
pub const AMD_MEMORY: MiB = MiB(65_520);

/// Return a node with Divvy's agent that offers this many AMD GPUs as whole GPUs.
pub fn amd_node(name: &str, gpus: usize) -> Node {
    let mut node = divvy_node(name, &[]);
    add_amd(&mut node, gpus);
    node
}

/// Add this many AMD GPUs to the node of [`divvy_node`]. Its agent offers them as whole GPUs.
pub fn add_amd(node: &mut Node, gpus: usize) {
    add_whole(node, Vendor::Amd, gpus);
}

/// Add this many GPUs of a vendor whose GPUs are not shared by default to the node of [`divvy_node`]. Its agent offers them as whole GPUs.
pub fn add_whole(node: &mut Node, vendor: Vendor, gpus: usize) {
    let name = node.name.clone();
    let (driver, model) = match vendor {
        Vendor::Intel => ("6.17.0", "Intel GPU 0xe211"),
        Vendor::Amd | Vendor::Nvidia => ("6.10.5", "AMD Instinct MI210"),
    };
    if let Some(Ok(inventory)) = &mut node.inventory {
        inventory.drivers.insert(vendor, driver.to_owned());
        inventory.gpus.extend((0..gpus).map(|index| Gpu {
            vendor,
            uuid: whole_uuid(vendor, &name, index),
            nodes: vec![format!("dri/card{index}"), format!("dri/renderD{}", 128 + index)],
            model: model.to_owned(),
            total: AMD_MEMORY,
            whole: Some(WholeKind::Gpu(vendor)),
            ..gpu(&name, index, 0)
        }));
    }
}

/// Let the node of [`add_whole`] also share these GPUs, in units of GiB.
pub fn share_whole(node: &mut Node) {
    let Some(Ok(inventory)) = &mut node.inventory else { return };
    let whole = inventory.gpus.iter_mut().filter(|gpu| !gpu.vendor.is_shared_by_default());
    whole.for_each(|gpu| gpu.units = GIB.units_in(gpu.total));
    let shared = inventory.gpus.iter().filter(|gpu| gpu.is_shared()).count() as u64;
    (node.capacity_units, node.capacity_gpus) = (inventory.total_units(), shared);
}

/// Set the vendor of whose GPUs a pod gets shares.
pub fn of_vendor(pod: &mut Pod, vendor: Vendor) {
    let rules = GpuRules {
        vendor: Some(vendor),
        ..GpuRules::default()
    };
    pod.request.rules = Some(Arc::new(Ok(rules)));
}

pub fn amd_uuid(node: &str, index: usize) -> String {
    whole_uuid(Vendor::Amd, node, index)
}

/// Return the UUID of a GPU of [`add_whole`].
pub fn whole_uuid(vendor: Vendor, node: &str, index: usize) -> String {
    match vendor {
        Vendor::Intel => format!("{node}-{index}-0xe211"),
        Vendor::Amd | Vendor::Nvidia => format!("0x{node}-{index}"),
    }
}

/// Let a node also offer its shared GPUs as whole GPUs.
pub fn offer_whole(node: &mut Node) {
    if let Some(Ok(inventory)) = &mut node.inventory {
        let shared = inventory.gpus.iter_mut().filter(|gpu| gpu.units > 0);
        shared.for_each(|gpu| gpu.whole = Some(gpu.vendor.into()));
    }
}

/// Return the request of a pod whose containers request these numbers of whole GPUs of AMD.
pub fn amd_request(containers: &[(ContainerKind, u64)]) -> PodRequest {
    whole_request(Vendor::Amd, containers)
}

/// Return the request of a pod whose containers request these numbers of whole GPUs or MIG devices of a kind.
pub fn whole_request(of: impl Into<WholeKind>, containers: &[(ContainerKind, u64)]) -> PodRequest {
    let containers = containers.iter().enumerate().map(|(i, (kind, gpus))| WholeContainer {
        name: format!("c{i}"),
        kind: *kind,
        gpus: *gpus,
    });
    let whole = WholeRequest {
        kind: of.into(),
        containers: containers.collect(),
    };
    PodRequest::with_whole(Vec::new(), vec![whole], None)
}

/// Return a pending pod that requests this many whole GPUs of AMD.
pub fn amd_pending(name: &str, gpus: u64) -> Pod {
    Pod {
        request: amd_request(&[(ContainerKind::App, gpus)]),
        ..pending(name, 0)
    }
}

/// Return a pending pod that requests this many whole GPUs or MIG devices of a kind.
pub fn whole_pending(of: impl Into<WholeKind>, name: &str, gpus: u64) -> Pod {
    Pod {
        request: whole_request(of, &[(ContainerKind::App, gpus)]),
        ..pending(name, 0)
    }
}

/// Return a running pod that has these whole GPUs of AMD.
pub fn amd_pod(name: &str, node: &str, indices: &[usize]) -> Pod {
    let share = |index: &usize| GpuShare {
        uuid: amd_uuid(node, *index),
        memory: AMD_MEMORY,
        cores: 0,
        whole: true,
        enforcement: None,
    };
    Pod {
        node: Some(node.to_owned()),
        phase: Phase::Running,
        held: Held::Allocation(Allocation {
            v: 1,
            gpus: indices.iter().map(share).collect(),
            containers: BTreeMap::new(),
        }),
        ..amd_pending(name, indices.len() as u64)
    }
}

pub fn edit_gpu(node: &mut Node, index: usize, edit: impl FnOnce(&mut Gpu)) {
    if let Some(Ok(inventory)) = &mut node.inventory {
        edit(&mut inventory.gpus[index]);
    }
}

pub fn request(units: &[u64]) -> PodRequest {
    PodRequest {
        containers: units
            .iter()
            .enumerate()
            .map(|(i, units)| ContainerRequest {
                name: format!("c{i}"),
                kind: ContainerKind::App,
                units: *units,
                gpu_count: 0,
            })
            .collect(),
        ..PodRequest::default()
    }
}

/// Return a pending pod that asks for this many units.
pub fn pending(name: &str, units: u64) -> Pod {
    Pod {
        uid: format!("u-{name}"),
        namespace: "default".to_owned(),
        name: name.to_owned(),
        request: request(&[units]),
        ..Pod::default()
    }
}

/// Return a running pod that gpushare placed on the GPU with this index.
pub fn gpushare_pod(name: &str, node: &str, index: u32, units: u64) -> Pod {
    Pod {
        node: Some(node.to_owned()),
        phase: Phase::Running,
        held: Held::Legacy(LegacyAllocation {
            gpus: BTreeMap::from([(index, units)]),
        }),
        ..pending(name, units)
    }
}

/// Return a running pod that Divvy placed on the GPU with this index.
pub fn divvy_pod(name: &str, node: &str, index: usize, units: u64) -> Pod {
    Pod {
        node: Some(node.to_owned()),
        phase: Phase::Running,
        held: Held::Allocation(Allocation {
            v: 1,
            gpus: vec![GpuShare {
                uuid: uuid(node, index),
                memory: MiB(units * 1024),
                cores: 0,
                whole: false,
                enforcement: None,
            }],
            containers: BTreeMap::new(),
        }),
        ..pending(name, units)
    }
}
