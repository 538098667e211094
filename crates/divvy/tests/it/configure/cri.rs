//! A minimal client of Kubernetes' container runtime interface (CRI), for pods with one container. The field numbers are those of
//! `k8s.io/cri-api`, `pkg/apis/runtime/v1/api.proto`. Fields that are not declared here are not sent, and are skipped in
//! responses.

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use prost::Message;
use tonic::transport::Channel;

/// The time limit of a call. It is longer than any successful call takes.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Clone, PartialEq, Message)]
pub(super) struct SandboxMetadata {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(string, tag = "2")]
    pub(super) uid: String,
    #[prost(string, tag = "3")]
    pub(super) namespace: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Mount {
    #[prost(string, tag = "1")]
    pub(super) container_path: String,
    #[prost(string, tag = "2")]
    pub(super) host_path: String,
}

/// The namespace modes of a pod. The mode `NODE` (2) means the machine's own namespace.
#[derive(Clone, PartialEq, Message)]
pub(super) struct NamespaceOption {
    #[prost(int32, tag = "1")]
    pub(super) network: i32,
    #[prost(int32, tag = "2")]
    pub(super) pid: i32,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct SandboxSecurity {
    #[prost(message, optional, tag = "1")]
    pub(super) namespaces: Option<NamespaceOption>,
    #[prost(bool, tag = "6")]
    pub(super) privileged: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LinuxSandbox {
    #[prost(string, tag = "1")]
    pub(super) cgroup_parent: String,
    #[prost(message, optional, tag = "2")]
    pub(super) security: Option<SandboxSecurity>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct SandboxConfig {
    #[prost(message, optional, tag = "1")]
    pub(super) metadata: Option<SandboxMetadata>,
    #[prost(string, tag = "3")]
    pub(super) log_directory: String,
    #[prost(message, optional, tag = "8")]
    pub(super) linux: Option<LinuxSandbox>,
}

#[derive(Clone, PartialEq, Message)]
struct RunPodSandbox {
    #[prost(message, optional, tag = "1")]
    config: Option<SandboxConfig>,
    #[prost(string, tag = "2")]
    runtime_handler: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ContainerMetadata {
    #[prost(string, tag = "1")]
    pub(super) name: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Image {
    #[prost(string, tag = "1")]
    pub(super) image: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Variable {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(string, tag = "2")]
    pub(super) value: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ContainerSecurity {
    #[prost(bool, tag = "2")]
    pub(super) privileged: bool,
    #[prost(message, optional, tag = "3")]
    pub(super) namespaces: Option<NamespaceOption>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LinuxContainer {
    #[prost(message, optional, tag = "2")]
    pub(super) security: Option<ContainerSecurity>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct CdiDevice {
    #[prost(string, tag = "1")]
    pub(super) name: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ContainerConfig {
    #[prost(message, optional, tag = "1")]
    pub(super) metadata: Option<ContainerMetadata>,
    #[prost(message, optional, tag = "2")]
    pub(super) image: Option<Image>,
    #[prost(string, repeated, tag = "3")]
    pub(super) command: Vec<String>,
    #[prost(message, repeated, tag = "6")]
    pub(super) envs: Vec<Variable>,
    #[prost(message, repeated, tag = "7")]
    pub(super) mounts: Vec<Mount>,
    #[prost(map = "string, string", tag = "10")]
    pub(super) annotations: HashMap<String, String>,
    #[prost(string, tag = "11")]
    pub(super) log_path: String,
    #[prost(message, optional, tag = "15")]
    pub(super) linux: Option<LinuxContainer>,
    #[prost(message, repeated, tag = "17")]
    pub(super) cdi_devices: Vec<CdiDevice>,
}

#[derive(Clone, PartialEq, Message)]
struct CreateContainer {
    #[prost(string, tag = "1")]
    pod_sandbox_id: String,
    #[prost(message, optional, tag = "2")]
    config: Option<ContainerConfig>,
    #[prost(message, optional, tag = "3")]
    sandbox_config: Option<SandboxConfig>,
}

/// A request or a response that contains one id.
#[derive(Clone, PartialEq, Message)]
struct Id {
    #[prost(string, tag = "1")]
    id: String,
}

#[derive(Clone, PartialEq, Message)]
struct Empty {}

#[derive(Clone, PartialEq, Message)]
struct ImageStatusRequest {
    #[prost(message, optional, tag = "1")]
    image: Option<Image>,
}

#[derive(Clone, PartialEq, Message)]
struct ImageStatusResponse {
    #[prost(message, optional, tag = "1")]
    image: Option<Id>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Condition {
    #[prost(string, tag = "1")]
    pub(super) kind: String,
    #[prost(bool, tag = "2")]
    pub(super) status: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Conditions {
    #[prost(message, repeated, tag = "1")]
    pub(super) conditions: Vec<Condition>,
}

#[derive(Clone, PartialEq, Message)]
struct StatusRequest {
    #[prost(bool, tag = "1")]
    verbose: bool,
}

/// The engine's status.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Status {
    #[prost(message, optional, tag = "1")]
    pub(super) status: Option<Conditions>,
    /// The status as key-value pairs. The value of `config` is the effective configuration as JSON.
    #[prost(map = "string, string", tag = "2")]
    pub(super) info: HashMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ContainerStatus {
    /// The state of the container. `CONTAINER_EXITED` is 2.
    #[prost(int32, tag = "3")]
    pub(super) state: i32,
    #[prost(int32, tag = "7")]
    pub(super) exit_code: i32,
    #[prost(string, tag = "10")]
    pub(super) reason: String,
    #[prost(string, tag = "11")]
    pub(super) message: String,
}

#[derive(Clone, PartialEq, Message)]
struct ContainerStatusResponse {
    #[prost(message, optional, tag = "1")]
    status: Option<ContainerStatus>,
}

/// A connection to an engine's socket.
pub(super) struct Cri {
    runtime: tokio::runtime::Runtime,
    channel: Channel,
}

impl Cri {
    /// Connect to the engine. `None` if the engine does not listen yet.
    pub(super) fn connect(socket: &Path) -> Option<Cri> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        let channel = runtime.block_on(divvy_kubelet::api::connect(socket, PATIENCE)).ok()?;
        Some(Cri { runtime, channel })
    }

    fn call<Q, A>(&self, method: &'static str, request: Q) -> anyhow::Result<A>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let answered = self.runtime.block_on(async {
            let mut grpc = tonic::client::Grpc::new(self.channel.clone());
            grpc.ready()
                .await
                .map_err(|error| tonic::Status::unavailable(error.to_string()))?;
            let mut request = tonic::Request::new(request);
            request.set_timeout(PATIENCE);
            let path = http::uri::PathAndQuery::from_static(method);
            grpc.unary(request, path, tonic_prost::ProstCodec::<Q, A>::default()).await
        });
        answered
            .map(tonic::Response::into_inner)
            .map_err(|status| anyhow::anyhow!("{method}: {}", status.message()))
    }

    pub(super) fn status(&self) -> anyhow::Result<Status> {
        self.call("/runtime.v1.RuntimeService/Status", StatusRequest { verbose: true })
    }

    pub(super) fn has_image(&self, image: &str) -> anyhow::Result<bool> {
        let image = Some(Image { image: image.to_owned() });
        let answer: ImageStatusResponse = self.call("/runtime.v1.ImageService/ImageStatus", ImageStatusRequest { image })?;
        Ok(answer.image.is_some())
    }

    pub(super) fn run_sandbox(&self, config: &SandboxConfig, runtime_handler: &str) -> anyhow::Result<String> {
        let request = RunPodSandbox {
            config: Some(config.clone()),
            runtime_handler: runtime_handler.to_owned(),
        };
        let answer: Id = self.call("/runtime.v1.RuntimeService/RunPodSandbox", request)?;
        Ok(answer.id)
    }

    /// Create a container and start it.
    pub(super) fn start(
        &self,
        sandbox: &str,
        sandbox_config: &SandboxConfig,
        config: &ContainerConfig,
    ) -> anyhow::Result<String> {
        let request = CreateContainer {
            pod_sandbox_id: sandbox.to_owned(),
            config: Some(config.clone()),
            sandbox_config: Some(sandbox_config.clone()),
        };
        let container: Id = self.call("/runtime.v1.RuntimeService/CreateContainer", request)?;
        let _: Empty = self.call("/runtime.v1.RuntimeService/StartContainer", container.clone())?;
        Ok(container.id)
    }

    pub(super) fn container(&self, id: &str) -> anyhow::Result<ContainerStatus> {
        let answer: ContainerStatusResponse =
            self.call("/runtime.v1.RuntimeService/ContainerStatus", Id { id: id.to_owned() })?;
        Ok(answer.status.unwrap_or_default())
    }

    /// Stop a pod, and remove it with its containers.
    pub(super) fn remove_sandbox(&self, id: &str) -> anyhow::Result<()> {
        let id = Id { id: id.to_owned() };
        let _: Empty = self.call("/runtime.v1.RuntimeService/StopPodSandbox", id.clone())?;
        let _: Empty = self.call("/runtime.v1.RuntimeService/RemovePodSandbox", id)?;
        Ok(())
    }
}
