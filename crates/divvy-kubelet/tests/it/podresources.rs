//! The podresources client against a server of our own (K27).

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use divvy_kubelet::Error;
use divvy_kubelet::api::podresources::pod_resources_lister_server::{PodResourcesLister, PodResourcesListerServer};
use divvy_kubelet::api::podresources::{
    AllocatableResourcesRequest, AllocatableResourcesResponse, ContainerDevices, ContainerResources, GetPodResourcesRequest,
    GetPodResourcesResponse, ListPodResourcesRequest, ListPodResourcesResponse, PodResources,
};
use divvy_kubelet::podresources::Client;
use tempfile::tempdir;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

/// Knows one pod, `web` in `default`, that has one container `main` with 4,096 ids, one entry each.
#[derive(Debug, Clone, Default)]
struct FakeLister {
    /// Calls that are still turned away.
    throttled: Arc<AtomicUsize>,
}

#[tonic::async_trait]
impl PodResourcesLister for FakeLister {
    async fn list(&self, _: Request<ListPodResourcesRequest>) -> Result<Response<ListPodResourcesResponse>, Status> {
        Err(Status::internal("List must not be called"))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<AllocatableResourcesRequest>,
    ) -> Result<Response<AllocatableResourcesResponse>, Status> {
        Err(Status::internal("not called"))
    }

    async fn get(&self, request: Request<GetPodResourcesRequest>) -> Result<Response<GetPodResourcesResponse>, Status> {
        let left = self
            .throttled
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        if left.is_ok() {
            return Err(Status::resource_exhausted("rejected by rate limit"));
        }
        let GetPodResourcesRequest { pod_name, pod_namespace } = request.into_inner();
        if (pod_name.as_str(), pod_namespace.as_str()) != ("web", "default") {
            return Err(Status::unknown(format!(
                "pod {pod_name} in namespace {pod_namespace} not found"
            )));
        }
        let devices = (0..4096)
            .map(|id| ContainerDevices {
                resource_name: "vendor.example/memory".into(),
                device_ids: vec![id.to_string()],
                topology: None,
            })
            .collect();
        let main = ContainerResources {
            name: "main".into(),
            devices,
            ..ContainerResources::default()
        };
        let pod = PodResources {
            name: pod_name,
            namespace: pod_namespace,
            containers: vec![main],
        };
        Ok(Response::new(GetPodResourcesResponse {
            pod_resources: Some(pod),
        }))
    }
}

fn serve(socket: &Path, lister: &FakeLister) -> CancellationToken {
    let listener = UnixListener::bind(socket).expect("bound");
    let stop = CancellationToken::new();
    let server = tonic::transport::Server::builder().serve_with_incoming_shutdown(
        PodResourcesListerServer::new(lister.clone()),
        UnixListenerStream::new(listener),
        stop.clone().cancelled_owned(),
    );
    tokio::spawn(server);
    stop
}

#[tokio::test]
async fn a_pods_devices_are_united_and_an_unknown_pod_is_none() {
    let dir = tempdir().expect("a temporary directory");
    let socket = dir.path().join("kubelet.sock");
    let _stop = serve(&socket, &FakeLister::default());
    let client = Client::new(&socket);
    let pod = client.get("web", "default").await.expect("answered").expect("known");
    assert_eq!(pod.containers["main"]["vendor.example/memory"].len(), 4096);
    assert_eq!(client.get("default", "web").await.expect("answered"), None);
}

#[tokio::test]
async fn k27_a_throttled_call_is_repeated_and_in_the_end_said_to_be_throttled() {
    let dir = tempdir().expect("a temporary directory");
    let socket = dir.path().join("kubelet.sock");
    let lister = FakeLister::default();
    let _stop = serve(&socket, &lister);
    let client = Client::new(&socket);
    lister.throttled.store(5, Ordering::SeqCst);
    assert!(client.get("web", "default").await.expect("answered").is_some());
    lister.throttled.store(usize::MAX, Ordering::SeqCst);
    let error = client
        .with_patience(Duration::from_millis(300))
        .get("web", "default")
        .await
        .expect_err("throttled");
    assert!(matches!(error, Error::Throttled { .. }), "{error}");
}

#[tokio::test]
async fn a_restarted_kubelet_is_found_again_and_a_missing_one_is_an_error() {
    let dir = tempdir().expect("a temporary directory");
    let socket = dir.path().join("kubelet.sock");
    let client = Client::new(&socket);
    let error = client.get("web", "default").await.expect_err("nobody there");
    assert!(error.to_string().contains("kubelet.sock"), "{error}");
    let first = serve(&socket, &FakeLister::default());
    assert!(client.get("web", "default").await.expect("answered").is_some());
    first.cancel();
    std::fs::remove_file(&socket).expect("removed");
    let _second = serve(&socket, &FakeLister::default());
    let deadline = tokio::time::Instant::now() + crate::DEADLINE;
    // The call that is sent while the old connection closes may be lost with it.
    while client.get("web", "default").await.is_err() {
        assert!(tokio::time::Instant::now() < deadline, "not found again");
    }
}
