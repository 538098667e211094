//! Pods with whole GPUs: `nvidia.com/gpu` of agents with `--whole-gpus`, which offer each GPU in both ways.

use divvy_agent_core::ResourceSpec;
use divvy_model::{
    ContainerKind, ContainerRequest, DeviceId, Held, Pod, PodRequest, Vendor, WholeContainer, WholeKind, WholeRequest,
};

/// The resource for whole GPUs.
pub const WHOLE: ResourceSpec = ResourceSpec::whole(WholeKind::Gpu(Vendor::Nvidia));

/// Return the request of a pod whose containers request these numbers of whole GPUs.
pub fn request(containers: &[(&str, ContainerKind, u64)]) -> PodRequest {
    let asking = containers.iter().filter(|(.., gpus)| *gpus > 0);
    let whole = WholeRequest {
        kind: WholeKind::Gpu(Vendor::Nvidia),
        containers: asking
            .map(|(name, kind, gpus)| WholeContainer {
                name: (*name).to_owned(),
                kind: *kind,
                gpus: *gpus,
            })
            .collect(),
    };
    let without = containers.iter().map(|(name, kind, _)| ContainerRequest {
        name: (*name).to_owned(),
        kind: *kind,
        units: 0,
        gpu_count: 0,
    });
    PodRequest::with_whole(without.collect(), vec![whole], None)
}

/// Return the resource of which a container requests devices, and how many. `None` for a container that requests none.
pub fn devices(request: &PodRequest, container: &str) -> Option<(ResourceSpec, u64)> {
    let memory = request.memory_containers().find(|asking| asking.name == container);
    let mut whole = request.whole.iter().flat_map(|whole| &whole.containers);
    let whole = whole.find(|asking| asking.name == container);
    let memory = memory.map(|asking| (ResourceSpec::MEMORY, asking.units));
    memory.or(whole.map(|asking| (WHOLE, asking.gpus)))
}

/// Return the number of whole GPUs that a pod requests.
pub fn gpus(request: &PodRequest) -> u64 {
    request.whole.as_deref().map_or(0, |whole| whole.gpus().unwrap())
}

/// Report whether the pod gets the GPUs that its device ids name, because it was bound without the extender.
pub fn is_by_ids(pod: &Pod) -> bool {
    pod.request.whole.is_some() && matches!(pod.held, Held::Nothing | Held::Legacy(_))
}

/// Return how many whole GPUs a bound pod has that its annotation does not name.
pub fn unnamed(pod: &Pod) -> u64 {
    let named = match &pod.held {
        Held::Allocation(allocation) => allocation.gpus.len() as u64,
        Held::Nothing | Held::Legacy(_) | Held::Unreadable(_) => 0,
    };
    gpus(&pod.request).saturating_sub(named)
}

/// Report whether a device id belongs to this resource. Ids of whole GPUs are UUIDs, and ids of memory have a suffix.
pub fn is_of(spec: ResourceSpec, id: &str) -> bool {
    id.parse::<DeviceId>().is_err() == (spec == WHOLE)
}
