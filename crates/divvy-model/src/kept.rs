//! The part of a pod that a ledger keeps.

use std::collections::BTreeMap;

use crate::{ContainerKind, ContainerRequest, Held, Pod, PodRequest, WholeContainer};

/// Reduce a pod to the part that the ledger keeps. A second call changes nothing. The requests of the individual containers are
/// needed only until the pod is bound. From then on, their sum and the amount that the pod holds on each GPU are enough. For a
/// pod without any request, no container is kept.
pub fn kept(mut pod: Pod) -> Pod {
    let asks = pod
        .request
        .containers
        .iter()
        .any(|container| (container.units, container.gpu_count) != (0, 0));
    if !asks {
        pod.request.containers = Vec::new();
    } else if pod.node.is_some() {
        pod.request.containers = sums(&pod.request);
    }
    if let Some(whole) = pod.request.whole.as_mut().filter(|_| pod.node.is_some()) {
        whole.containers = vec![WholeContainer {
            name: String::new(),
            kind: ContainerKind::App,
            gpus: whole.gpus().unwrap_or(u64::MAX),
        }];
    }
    if pod.node.is_some()
        && let Held::Allocation(allocation) = &mut pod.held
    {
        allocation.containers = BTreeMap::new();
    }
    for text in [&mut pod.uid, &mut pod.namespace, &mut pod.name] {
        text.shrink_to_fit();
    }
    pod
}

/// Return one container that requests as much as all containers together, or two if the sum does not fit into a number.
fn sums(request: &PodRequest) -> Vec<ContainerRequest> {
    let units = request.effective_units();
    let one = ContainerRequest {
        name: String::new(),
        kind: ContainerKind::App,
        units: units.unwrap_or(u64::MAX),
        gpu_count: request.effective(|container| container.gpu_count).unwrap_or(u64::MAX),
    };
    match units {
        Some(_) => vec![one],
        None => vec![one.clone(), one],
    }
}

#[cfg(test)]
mod tests {
    use crate::{Allocation, ContainerShare, GpuShare, MiB};

    use super::ContainerKind::{App, Init, Sidecar};
    use super::*;

    fn pod(uid: &str, name: &str, node: Option<&str>, containers: &[(ContainerKind, u64, u64)]) -> Pod {
        let container = |(i, (kind, units, gpu_count)): (usize, &(ContainerKind, u64, u64))| ContainerRequest {
            name: format!("c{i}"),
            kind: *kind,
            units: *units,
            gpu_count: *gpu_count,
        };
        Pod {
            uid: uid.to_owned(),
            namespace: "ns".to_owned(),
            name: name.to_owned(),
            node: node.map(str::to_owned),
            request: PodRequest::new(containers.iter().enumerate().map(container).collect(), None),
            ..Pod::default()
        }
    }

    /// A waiting pod keeps the request of each container.
    #[test]
    fn a_bound_pod_keeps_only_its_containers_sums() {
        let cases: [&[(ContainerKind, u64, u64)]; 6] = [
            &[],
            &[(App, 0, 0), (App, 0, 0)],
            &[(App, 3, 0), (App, 5, 1)],
            &[(Sidecar, 2, 0), (Init, 4, 0), (App, 1, 0)],
            &[(App, 0, 1)],
            &[(App, u64::MAX, 0), (App, 1, 0)],
        ];
        for containers in cases {
            let waits = pod("u", "p", None, containers);
            let asks = containers.iter().any(|(_, units, count)| units + count > 0);
            let expected = if asks { containers.len() } else { 0 };
            assert_eq!(kept(waits).request.containers.len(), expected, "{containers:?}");

            let bound = pod("u", "p", Some("n"), containers);
            let now = kept(bound.clone());
            assert!(now.request.containers.len() <= 2, "{containers:?}");
            assert_eq!(
                now.request.effective_units(),
                bound.request.effective_units(),
                "{containers:?}"
            );
            assert_eq!(now.request.wants_memory(), bound.request.wants_memory(), "{containers:?}");
            assert_eq!(kept(now.clone()), now, "{containers:?}");
        }
    }

    #[test]
    fn of_an_allocation_the_pods_share_of_each_gpu_is_kept() {
        let share = ContainerShare {
            uuid: "GPU-1".to_owned(),
            memory: MiB(1024),
            cores: 0,
        };
        let gpus = vec![GpuShare {
            uuid: "GPU-1".to_owned(),
            memory: MiB(1024),
            cores: 0,
            whole: false,
            enforcement: None,
        }];
        let allocation = Allocation {
            v: 1,
            gpus: gpus.clone(),
            containers: BTreeMap::from([("c0".to_owned(), vec![share])]),
        };
        let bound = Pod {
            held: Held::Allocation(allocation.clone()),
            ..pod("u", "p", Some("n"), &[(App, 1, 0)])
        };
        let Held::Allocation(now) = kept(bound).held else {
            panic!("an allocation");
        };
        assert_eq!((now.gpus, now.containers.len()), (gpus, 0));
    }
}
