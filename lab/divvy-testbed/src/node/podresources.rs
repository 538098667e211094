//! The kubelet's podresources v1 service, as measured on kubelet 1.36. `Get` knows only admitted pods and reads without side effects.
//! `List` takes the device manager's lock and collects ended pods. Ordinary init containers are never listed, and each id is a separate
//! entry.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use divvy_kubelet::api::podresources::pod_resources_lister_server::PodResourcesLister;
use divvy_kubelet::api::podresources::{
    AllocatableResourcesRequest, AllocatableResourcesResponse, ContainerDevices, ContainerResources, GetPodResourcesRequest,
    GetPodResourcesResponse, ListPodResourcesRequest, ListPodResourcesResponse, PodResources,
};
use divvy_model::ContainerKind;
use tokio::time::Instant;
use tonic::{Request, Response, Status};

use super::devices::DeviceBooks;
use super::manager::DeviceManager;
use super::plan::PodPlan;
use super::shared::{KnownPod, KnownPods};

/// The rate limit in calls per second, and the burst, of all clients together.
const RATE: f64 = 100.0;
const BURST: f64 = 10.0;

#[derive(Debug)]
pub(crate) struct PodResourcesService {
    pub(crate) pods: KnownPods,
    pub(crate) manager: Arc<DeviceManager>,
    bucket: Mutex<(f64, Instant)>,
}

impl PodResourcesService {
    pub(crate) fn new(pods: KnownPods, manager: Arc<DeviceManager>) -> PodResourcesService {
        PodResourcesService {
            pods,
            manager,
            bucket: Mutex::new((BURST, Instant::now())),
        }
    }

    fn limit(&self) -> Result<(), Status> {
        let mut bucket = self.bucket.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let tokens = (bucket.0 + now.duration_since(bucket.1).as_secs_f64() * RATE).min(BURST);
        *bucket = (tokens, now);
        if tokens < 1.0 {
            return Err(Status::resource_exhausted("rejected by rate limit"));
        }
        bucket.0 -= 1.0;
        Ok(())
    }

    fn known(&self) -> BTreeMap<String, KnownPod> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn describe(plan: &PodPlan, books: &DeviceBooks) -> PodResources {
    let listed = plan
        .containers
        .iter()
        .filter(|container| container.kind != ContainerKind::Init);
    let containers = listed.map(|container| {
        let of_container = books.holders().iter();
        let devices = of_container.filter(|(holder, _)| holder.pod == plan.uid && holder.container == container.name);
        let devices = devices.flat_map(|(holder, held)| held.ids.iter().map(|id| one(&holder.resource, id)));
        ContainerResources {
            name: container.name.clone(),
            devices: devices.collect(),
            ..ContainerResources::default()
        }
    });
    PodResources {
        name: plan.name.clone(),
        namespace: plan.namespace.clone(),
        containers: containers.collect(),
    }
}

fn one(resource: &str, id: &str) -> ContainerDevices {
    ContainerDevices {
        resource_name: resource.to_owned(),
        device_ids: vec![id.to_owned()],
        topology: None,
    }
}

#[tonic::async_trait]
impl PodResourcesLister for PodResourcesService {
    async fn list(&self, _: Request<ListPodResourcesRequest>) -> Result<Response<ListPodResourcesResponse>, Status> {
        self.limit()?;
        self.manager.collect();
        let known = self.known();
        let active = known.values().filter(|pod| pod.active);
        let pod_resources = self
            .manager
            .read(|books| active.map(|pod| describe(&pod.plan, books)).collect());
        Ok(Response::new(ListPodResourcesResponse { pod_resources }))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<AllocatableResourcesRequest>,
    ) -> Result<Response<AllocatableResourcesResponse>, Status> {
        self.limit()?;
        let devices = self.manager.read(|books| {
            let healthy = books.healthy().iter();
            healthy
                .flat_map(|(resource, ids)| ids.iter().map(|id| one(resource, id)))
                .collect()
        });
        Ok(Response::new(AllocatableResourcesResponse {
            devices,
            ..AllocatableResourcesResponse::default()
        }))
    }

    async fn get(&self, request: Request<GetPodResourcesRequest>) -> Result<Response<GetPodResourcesResponse>, Status> {
        self.limit()?;
        let request = request.into_inner();
        let known = self.known();
        let named = |pod: &&KnownPod| pod.plan.name == request.pod_name && pod.plan.namespace == request.pod_namespace;
        // If two pods have this name because the older one is still ending, the kubelet's map has the newer one.
        let Some(pod) = known.values().filter(named).max_by_key(|pod| pod.active) else {
            return Err(Status::unknown(format!(
                "pod {} in namespace {} not found",
                request.pod_name, request.pod_namespace
            )));
        };
        let pod_resources = Some(self.manager.read(|books| describe(&pod.plan, books)));
        Ok(Response::new(GetPodResourcesResponse { pod_resources }))
    }
}
