//! Nodes and pods as values of `divvy-model`.

use std::collections::BTreeMap;

use divvy_model::legacy::LegacyAllocation;
use divvy_model::{
    Allocation, ContainerKind, ContainerRequest, Gpu, GpuShare, Health, Held, Inventory, MemoryUnit, MiB, Node, Phase, Pod,
    PodRequest,
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

/// Return a node with Divvy's agent and GPUs of these sizes, in units of GiB.
pub fn divvy_node(name: &str, sizes: &[u64]) -> Node {
    let gpus: Vec<Gpu> = sizes.iter().enumerate().map(|(i, units)| gpu(name, i, *units)).collect();
    Node {
        inventory: Some(Ok(Inventory {
            v: 1,
            agent: "0.1.0".to_owned(),
            driver: "550.54.15".to_owned(),
            unit: GIB,
            other_units: std::collections::BTreeSet::new(),
            unschedulable: false,
            driver_trouble: None,
            gpus,
        })),
        ..gpushare_node(name, sizes.iter().sum(), sizes.len() as u64)
    }
}

pub fn uuid(node: &str, index: usize) -> String {
    format!("GPU-{node}-{index}")
}

fn gpu(node: &str, index: usize, units: u64) -> Gpu {
    Gpu {
        uuid: uuid(node, index),
        kind: "gpu".to_owned(),
        parent: None,
        index: index as u32,
        minor: index as u32,
        pci: String::new(),
        model: "NVIDIA Test".to_owned(),
        cc: String::new(),
        sms: 0,
        clock_mhz: 0,
        bandwidth_gbs: 0,
        total: MiB(units * 1024),
        reserve: MiB::ZERO,
        units,
        held: MiB::ZERO,
        numa: None,
        health: Health::Ok,
        reason: None,
        links: Vec::new(),
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
            }],
            containers: BTreeMap::new(),
        }),
        ..pending(name, units)
    }
}
