//! An extended resource, and the server that keeps it registered with the kubelet.
//!
//! What the kubelet does with a plugin, exactly, decides the shape of [`PluginServer`]: it dials back *inside* `Register`,
//! never tries `ListAndWatch` again, removes all sockets when it starts, and, when an old stream of a resource ends after a
//! new registration, disconnects the new one (kubernetes#121994). So: serve, then register; watch the directory and our own
//! stream; and never have two streams.

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

/// One extended resource, as the kubelet sees it.
pub trait Plugin: Send + Sync + 'static {
    /// For example `vendor.example/memory`. The same for as long as the plugin lives.
    fn resource_name(&self) -> &str;

    /// Which of the optional calls the kubelet shall make. It asks once per registration.
    fn options(&self) -> Options;

    /// All devices, in any order. A list with the same content as the last is not sent again; of several changes in a row
    /// only the last is sent.
    fn devices(&self) -> watch::Receiver<Arc<Vec<Device>>>;

    /// Which `size` of the `available` devices a container had better get, `must_include` among them.
    ///
    /// The kubelet takes no part of an answer ill: it fills up, cuts and ignores at random. An error would reject the pod, so
    /// there is none. It has no deadline and holds up the admission of all pods of the node.
    fn preferred(&self, available: &[String], must_include: &[String], size: usize) -> Vec<String> {
        any_legal(available, must_include, size)
    }

    /// What a container that gets these devices shall find in it. Pod and container are not known here.
    ///
    /// Called during admission, without a deadline: no I/O. The kubelet keeps the answer over reboots and uses it without
    /// asking again.
    ///
    /// # Errors
    /// The pod has failed for good, and its message holds the refusal's text.
    fn allocate(&self, ids: &[String]) -> Result<Answer, Refusal>;

    /// Called before each start of a container that holds these devices, if [`Options::pre_start_required`]. May do I/O:
    /// the kubelet waits for 30 s, then (and when the plugin has to end) the future is dropped.
    ///
    /// # Errors
    /// The container's start is tried again later; an event holds the refusal's text.
    fn pre_start(&self, ids: Vec<String>) -> impl Future<Output = Result<(), Refusal>> + Send {
        let _ = ids;
        std::future::ready(Ok(()))
    }
}

/// The first answer to [`Plugin::preferred`] that is legal: what must be included, then the available ones in their order.
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

/// The optional calls of the device plugin API.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Options {
    /// [`Plugin::pre_start`] is to be called.
    pub pre_start_required: bool,
    /// [`Plugin::preferred`] is to be called.
    pub preferred_allocation: bool,
}

/// A device: one unit of the resource.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Device {
    /// At most 63 characters by the API's documentation, and unique over *all* resources of a node (the kubelet's look-up of
    /// health by id ignores the resource).
    pub id: String,
    /// Unhealthy devices count in the node's capacity, but not in what is allocatable.
    pub healthy: bool,
    /// NUMA node, if any: the kubelet's Topology Manager aligns with it.
    pub numa: Option<i64>,
}

/// A mount in the container.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Mount {
    /// Absolute path in the container.
    pub container_path: String,
    /// Absolute path on the host.
    pub host_path: String,
    /// Whether the container may only read.
    pub read_only: bool,
}

/// A device node in the container.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceNode {
    /// Absolute path in the container.
    pub container_path: String,
    /// Absolute path on the host.
    pub host_path: String,
    /// Any of `r`, `w` and `m`.
    pub permissions: String,
}

/// What a container gets along with its devices.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Answer {
    /// Environment. A variable that the pod sets itself wins.
    pub envs: BTreeMap<String, String>,
    /// Mounts, in order.
    pub mounts: Vec<Mount>,
    /// Device nodes, in order.
    pub devices: Vec<DeviceNode>,
    /// Annotations of the container in the runtime (not of the pod).
    pub annotations: BTreeMap<String, String>,
    /// Fully qualified CDI names; the runtime resolves them at each start, and what they say wins over the pod's environment.
    pub cdi_devices: Vec<String>,
}

impl From<Answer> for v1beta1::ContainerAllocateResponse {
    fn from(answer: Answer) -> Self {
        Self {
            envs: answer.envs,
            mounts: answer
                .mounts
                .into_iter()
                .map(
                    |Mount {
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
                    |DeviceNode {
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

impl From<v1beta1::ContainerAllocateResponse> for Answer {
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
                     }| Mount {
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
                     }| DeviceNode {
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

/// Why a call was not carried out. The text reaches the user unchanged, in an event or in the pod's message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    kind: Kind,
    text: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Invalid,
    NotYet,
    Failed,
}

impl Refusal {
    /// What was asked makes no sense here, now or later: unknown ids, for example. gRPC's `InvalidArgument`.
    pub fn invalid(text: impl Into<String>) -> Self {
        Self {
            kind: Kind::Invalid,
            text: text.into(),
        }
    }

    /// It may go well when tried again. gRPC's `Unavailable`.
    pub fn not_yet(text: impl Into<String>) -> Self {
        Self {
            kind: Kind::NotYet,
            text: text.into(),
        }
    }

    /// Something here does not work. gRPC's `Internal`.
    pub fn failed(text: impl Into<String>) -> Self {
        Self {
            kind: Kind::Failed,
            text: text.into(),
        }
    }

    /// The words for the user.
    pub fn text(&self) -> &str {
        &self.text
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Refusal {}

impl From<Refusal> for tonic::Status {
    fn from(Refusal { kind, text }: Refusal) -> Self {
        match kind {
            Kind::Invalid => Self::invalid_argument(text),
            Kind::NotYet => Self::unavailable(text),
            Kind::Failed => Self::internal(text),
        }
    }
}

/// Where a plugin's socket goes, and how patient its server is.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The directory of `kubelet.sock`, normally `/var/lib/kubelet/device-plugins`.
    pub device_plugin_dir: PathBuf,
    /// Sockets are named `<prefix>-<six characters>.sock`. One prefix per resource.
    pub socket_prefix: String,
    /// Times that have good defaults.
    pub timing: Timing,
}

impl Settings {
    /// With the default [`Timing`].
    pub fn new(device_plugin_dir: impl Into<PathBuf>, socket_prefix: impl Into<String>) -> Self {
        Self {
            device_plugin_dir: device_plugin_dir.into(),
            socket_prefix: socket_prefix.into(),
            timing: Timing::default(),
        }
    }
}

/// How patient a [`PluginServer`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// How often the directory is looked at even if inotify says nothing (it can overflow, and may not be had at all). 500 ms.
    pub look_every: Duration,
    /// The kubelet dials back for up to 10 s within `Register`, so this is longer: 15 s.
    pub register_timeout: Duration,
    /// A kubelet that took the registration but opens no stream within this time never will: 5 s.
    pub first_stream: Duration,
    /// Wait before the second attempt, doubled for each one after it: 100 ms.
    pub retry_first: Duration,
    /// The longest wait between attempts: 30 s.
    pub retry_max: Duration,
    /// A stream that lasted this long shows that all was well, and the next attempt's wait is [`Timing::retry_first`] again: 1 s.
    pub settled: Duration,
    /// How long calls in flight may go on when the server has to end: 2 s.
    pub grace: Duration,
}

impl Default for Timing {
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

/// How a [`PluginServer`] is doing, for readiness and metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// The kubelet has taken the registration, and nothing has ended it since.
    pub registered: bool,
    /// When `registered` last changed.
    pub since: Instant,
    /// Registrations that the kubelet took, since the server started.
    pub registrations: u64,
    /// Open `ListAndWatch` streams: 0 or 1.
    pub open_streams: usize,
    /// What stands, or last stood, in the way of being registered; `None` once a stream is open.
    pub last_error: Option<String>,
}

impl Status {
    /// The kubelet listens to the list of devices.
    pub fn is_ready(&self) -> bool {
        self.registered && self.open_streams > 0
    }
}

impl Default for Status {
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
        let answer = Answer {
            envs: BTreeMap::from([("A".into(), "1".into())]),
            mounts: vec![Mount {
                container_path: "/c".into(),
                host_path: "/h".into(),
                read_only: true,
            }],
            devices: vec![DeviceNode {
                container_path: "/dev/c".into(),
                host_path: "/dev/h".into(),
                permissions: "rw".into(),
            }],
            annotations: BTreeMap::from([("k".into(), "v".into())]),
            cdi_devices: vec!["vendor.example/class=name".into()],
        };
        assert_eq!(Answer::from(v1beta1::ContainerAllocateResponse::from(answer.clone())), answer);
    }

    #[test]
    fn a_refusal_keeps_its_text() {
        let text = "GPU-1 is still held by ns/pod:\n3 MiB – wait for it";
        for (refusal, code) in [
            (Refusal::invalid(text), tonic::Code::InvalidArgument),
            (Refusal::not_yet(text), tonic::Code::Unavailable),
            (Refusal::failed(text), tonic::Code::Internal),
        ] {
            let status = tonic::Status::from(refusal);
            assert_eq!((status.code(), status.message()), (code, text));
        }
    }
}
