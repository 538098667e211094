//! An extended resource, and the server that keeps it registered with the kubelet.
//!
//! The kubelet's behavior determines the design of [`PluginServer`]:
//!
//! * The kubelet dials back *inside* `Register`, so the plugin serves before it registers.
//! * The kubelet never retries `ListAndWatch`, and it removes all sockets when it starts. Therefore the server watches the
//!   directory and its own stream.
//! * If an old stream of a resource ends after a new registration, the kubelet disconnects the new one (kubernetes#121994).
//!   Therefore the server never has two streams.

mod backoff;
mod directory;
mod lifecycle;
mod lock;
mod service;
mod session;
mod socket;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use crate::api::v1beta1;

pub use lifecycle::PluginServer;

/// An extended resource, as the kubelet sees it.
pub trait Plugin: Send + Sync + 'static {
    /// The name of the resource, such as `vendor.example/memory`. It never changes.
    fn resource_name(&self) -> &str;

    /// Return which optional calls the kubelet should make. The kubelet queries this once per registration.
    fn options(&self) -> PluginOptions;

    /// Return all devices, in any order. A list with the same content as the last one is not sent again. Of several changes in
    /// quick succession, only the last is sent.
    fn devices(&self) -> watch::Receiver<Arc<Vec<PluginDevice>>>;

    /// Return the `size` devices among `available` that suit a container best, including all of `must_include`.
    ///
    /// The kubelet tolerates any answer: it drops surplus and unknown ids, and chooses missing ones at random. An error would
    /// reject the pod, so this method cannot fail. The kubelet makes this call without a deadline, and the call delays the
    /// admission of all pods on the node.
    fn preferred(&self, available: &[String], must_include: &[String], size: usize) -> impl Future<Output = Vec<String>> + Send {
        std::future::ready(any_legal(available, must_include, size))
    }

    /// Return what a container with these devices receives. The call names neither the pod nor the container.
    ///
    /// The kubelet makes this call during admission, without a deadline, so the method must not do I/O. The kubelet stores the answer and
    /// reuses it without another call, even after a reboot.
    ///
    /// # Errors
    /// If this fails, the pod fails permanently, and its message contains the text of the refusal.
    fn allocate(&self, ids: &[String]) -> Result<AllocateAnswer, CallRefusal>;

    /// Prepare the start of a container with these devices. The kubelet calls this before each start if
    /// [`PluginOptions::pre_start_required`] is set. The method may do I/O. The future is dropped if the kubelet stops waiting, which
    /// it does after 30 s, or if the plugin has to end.
    ///
    /// # Errors
    /// If this fails, the kubelet retries the container's start later, and an event contains the text of the refusal.
    fn pre_start(&self, ids: Vec<String>) -> impl Future<Output = Result<(), CallRefusal>> + Send {
        let _ = ids;
        std::future::ready(Ok(()))
    }
}

/// Return a valid answer to [`Plugin::preferred`] without any preference: the devices that must be included, then the available
/// ones in their given order.
pub fn any_legal(available: &[String], must_include: &[String], size: usize) -> Vec<String> {
    let mut seen = std::collections::BTreeSet::new();
    must_include
        .iter()
        .chain(available)
        .filter(|id| seen.insert(id.as_str()))
        .take(size)
        .cloned()
        .collect()
}

/// Which optional calls of the device plugin API the kubelet should make.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PluginOptions {
    /// Whether the kubelet should call [`Plugin::pre_start`].
    pub pre_start_required: bool,
    /// Whether the kubelet should call [`Plugin::preferred`].
    pub preferred_allocation: bool,
}

/// A device: one unit of the resource.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PluginDevice {
    /// The device id. The API documents a limit of 63 characters. The id must be unique among *all* resources of a node, because
    /// the kubelet looks up the health of an id without regard to the resource.
    pub id: String,
    /// Whether the device is healthy. Unhealthy devices count towards the node's capacity but are not allocatable.
    pub healthy: bool,
    /// The device's NUMA node, which the kubelet's Topology Manager uses, or `None`.
    pub numa: Option<i64>,
}

/// A mount in the container.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PluginMount {
    /// The absolute path in the container.
    pub container_path: String,
    /// The absolute path on the host.
    pub host_path: String,
    /// Whether the mount is read-only in the container.
    pub read_only: bool,
}

/// A device node in the container.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PluginDeviceNode {
    /// The absolute path in the container.
    pub container_path: String,
    /// The absolute path on the host.
    pub host_path: String,
    /// The permissions: a combination of `r`, `w`, and `m`.
    pub permissions: String,
}

/// What a container receives together with its devices.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AllocateAnswer {
    /// Environment variables. If the pod itself sets a variable, the pod's value takes precedence.
    pub envs: BTreeMap<String, String>,
    /// Mounts, in order.
    pub mounts: Vec<PluginMount>,
    /// Device nodes, in order.
    pub devices: Vec<PluginDeviceNode>,
    /// Annotations of the container in the container runtime (not of the pod).
    pub annotations: BTreeMap<String, String>,
    /// Fully qualified CDI device names. The container runtime resolves them at each start. Environment variables in a CDI spec
    /// take precedence over the pod's.
    pub cdi_devices: Vec<String>,
}

impl From<AllocateAnswer> for v1beta1::ContainerAllocateResponse {
    fn from(answer: AllocateAnswer) -> Self {
        Self {
            envs: answer.envs,
            mounts: answer
                .mounts
                .into_iter()
                .map(
                    |PluginMount {
                         container_path,
                         host_path,
                         read_only,
                     }| v1beta1::Mount {
                        container_path,
                        host_path,
                        read_only,
                    },
                )
                .collect(),
            devices: answer
                .devices
                .into_iter()
                .map(
                    |PluginDeviceNode {
                         container_path,
                         host_path,
                         permissions,
                     }| v1beta1::DeviceSpec {
                        container_path,
                        host_path,
                        permissions,
                    },
                )
                .collect(),
            annotations: answer.annotations,
            cdi_devices: answer
                .cdi_devices
                .into_iter()
                .map(|name| v1beta1::CdiDevice { name })
                .collect(),
        }
    }
}

impl From<v1beta1::ContainerAllocateResponse> for AllocateAnswer {
    fn from(response: v1beta1::ContainerAllocateResponse) -> Self {
        Self {
            envs: response.envs,
            mounts: response
                .mounts
                .into_iter()
                .map(
                    |v1beta1::Mount {
                         container_path,
                         host_path,
                         read_only,
                     }| PluginMount {
                        container_path,
                        host_path,
                        read_only,
                    },
                )
                .collect(),
            devices: response
                .devices
                .into_iter()
                .map(
                    |v1beta1::DeviceSpec {
                         container_path,
                         host_path,
                         permissions,
                     }| PluginDeviceNode {
                        container_path,
                        host_path,
                        permissions,
                    },
                )
                .collect(),
            annotations: response.annotations,
            cdi_devices: response.cdi_devices.into_iter().map(|device| device.name).collect(),
        }
    }
}

/// Why a call failed. The text reaches the user unchanged, in an event or in the pod's message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallRefusal {
    kind: RefusalKind,
    text: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RefusalKind {
    Invalid,
    NotYet,
    Failed,
    Unknown,
}

impl CallRefusal {
    /// The request is invalid and will stay invalid, for example because of unknown ids. gRPC status `InvalidArgument`.
    pub fn invalid(text: impl Into<String>) -> Self {
        Self {
            kind: RefusalKind::Invalid,
            text: text.into(),
        }
    }

    /// The request may succeed later. gRPC status `Unavailable`.
    pub fn not_yet(text: impl Into<String>) -> Self {
        Self {
            kind: RefusalKind::NotYet,
            text: text.into(),
        }
    }

    /// The plugin has an internal failure. gRPC status `Internal`.
    pub fn failed(text: impl Into<String>) -> Self {
        Self {
            kind: RefusalKind::Failed,
            text: text.into(),
        }
    }

    /// Like [`CallRefusal::invalid`], but with the gRPC status `Unknown`, which a plugin in Go gives to every error.
    pub fn unknown(text: impl Into<String>) -> Self {
        Self {
            kind: RefusalKind::Unknown,
            text: text.into(),
        }
    }

    /// Return the text for the user.
    pub fn text(&self) -> &str {
        &self.text
    }
}

impl fmt::Display for CallRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for CallRefusal {}

impl From<CallRefusal> for tonic::Status {
    fn from(CallRefusal { kind, text }: CallRefusal) -> Self {
        match kind {
            RefusalKind::Invalid => Self::invalid_argument(text),
            RefusalKind::NotYet => Self::unavailable(text),
            RefusalKind::Failed => Self::internal(text),
            RefusalKind::Unknown => Self::unknown(text),
        }
    }
}

/// The location of a plugin's socket, and the timing of its server.
#[derive(Debug, Clone)]
pub struct PluginSettings {
    /// The directory of the plugins' sockets, usually `/var/lib/kubelet/device-plugins`.
    pub device_plugin_dir: PathBuf,
    /// The path of the kubelet's socket, if it is not `kubelet.sock` in that directory.
    pub kubelet_socket: Option<PathBuf>,
    /// Whether the plugin registers with the kubelet. If not, it only serves its socket.
    pub registers: bool,
    /// The prefix of the socket names `<prefix>-<six characters>.sock`. Each resource needs its own prefix.
    pub socket_prefix: String,
    /// Whether the socket is always named `<prefix>.sock`. This is for resources whose socket other programs know by name.
    pub is_socket_fixed: bool,
    /// Intervals and timeouts. The defaults suit a real kubelet.
    pub timing: PluginTiming,
}

impl PluginSettings {
    /// Return the path of the kubelet's socket.
    pub(crate) fn kubelet_path(&self) -> PathBuf {
        let usual = || self.device_plugin_dir.join(crate::api::KUBELET_SOCKET);
        self.kubelet_socket.clone().unwrap_or_else(usual)
    }

    /// Create settings with the default [`PluginTiming`].
    pub fn new(device_plugin_dir: impl Into<PathBuf>, socket_prefix: impl Into<String>) -> Self {
        Self {
            device_plugin_dir: device_plugin_dir.into(),
            kubelet_socket: None,
            registers: true,
            socket_prefix: socket_prefix.into(),
            is_socket_fixed: false,
            timing: PluginTiming::default(),
        }
    }
}

/// The intervals and timeouts of a [`PluginServer`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PluginTiming {
    /// The interval at which the directory is checked even without inotify events, because inotify can overflow or be
    /// unavailable. Default: 500 ms.
    pub look_every: Duration,
    /// The timeout of `Register`. Default: 15 s, because the kubelet dials back for up to 10 s within the call.
    pub register_timeout: Duration,
    /// How long the kubelet may take to open a stream after a registration. A kubelet that takes longer will never open one.
    /// Default: 5 s.
    pub first_stream: Duration,
    /// The wait before the second attempt, which doubles for each further attempt. Default: 100 ms.
    pub retry_first: Duration,
    /// The longest wait between two attempts. Default: 30 s.
    pub retry_max: Duration,
    /// The duration after which a stream counts as a success. A success resets the wait to [`PluginTiming::retry_first`]. Default: 1 s.
    pub settled: Duration,
    /// How long pending calls may continue when the server has to end. Default: 2 s.
    pub grace: Duration,
}

impl Default for PluginTiming {
    fn default() -> Self {
        Self {
            look_every: Duration::from_millis(500),
            register_timeout: Duration::from_secs(15),
            first_stream: Duration::from_secs(5),
            retry_first: Duration::from_millis(100),
            retry_max: Duration::from_secs(30),
            settled: Duration::from_secs(1),
            grace: Duration::from_secs(2),
        }
    }
}

/// The state of a [`PluginServer`], for readiness and metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PluginStatus {
    /// Whether the kubelet has accepted the registration, and the registration is still valid.
    pub registered: bool,
    /// The time at which `registered` last changed.
    pub since: Instant,
    /// The number of registrations that the kubelet has accepted since the server started.
    pub registrations: u64,
    /// The number of open `ListAndWatch` streams: 0 or 1.
    pub open_streams: usize,
    /// The current or last obstacle to a registration. `None` once a stream is open.
    pub last_error: Option<String>,
}

impl PluginStatus {
    /// Report whether the kubelet is watching the list of devices.
    pub fn is_ready(&self) -> bool {
        self.registered && self.open_streams > 0
    }
}

impl Default for PluginStatus {
    fn default() -> Self {
        Self {
            registered: false,
            since: Instant::now(),
            registrations: 0,
            open_streams: 0,
            last_error: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn any_answer_without_a_preference_is_a_legal_one() {
        for (available, must, size, want) in [
            ("a b c", "", 2, "a b"),
            ("a b c", "c", 2, "c a"),
            ("a b c", "b", 3, "b a c"),
            ("a b", "", 5, "a b"),
            ("a a b", "b b", 2, "b a"),
            ("", "", 0, ""),
            ("a", "a", 0, ""),
        ] {
            assert_eq!(
                any_legal(&ids(available), &ids(must), size),
                ids(want),
                "{available} / {must} / {size}"
            );
        }
    }

    #[test]
    fn an_answer_survives_the_wire() {
        let answer = AllocateAnswer {
            envs: BTreeMap::from([("A".into(), "1".into())]),
            mounts: vec![PluginMount {
                container_path: "/c".into(),
                host_path: "/h".into(),
                read_only: true,
            }],
            devices: vec![PluginDeviceNode {
                container_path: "/dev/c".into(),
                host_path: "/dev/h".into(),
                permissions: "rw".into(),
            }],
            annotations: BTreeMap::from([("k".into(), "v".into())]),
            cdi_devices: vec!["vendor.example/class=name".into()],
        };
        assert_eq!(
            AllocateAnswer::from(v1beta1::ContainerAllocateResponse::from(answer.clone())),
            answer
        );
    }

    #[test]
    fn a_refusal_keeps_its_text() {
        let text = "GPU-1 is still held by ns/pod:\n3 MiB – wait for it";
        for (refusal, code) in [
            (CallRefusal::invalid(text), tonic::Code::InvalidArgument),
            (CallRefusal::not_yet(text), tonic::Code::Unavailable),
            (CallRefusal::failed(text), tonic::Code::Internal),
        ] {
            let status = tonic::Status::from(refusal);
            assert_eq!((status.code(), status.message()), (code, text));
        }
    }
}
