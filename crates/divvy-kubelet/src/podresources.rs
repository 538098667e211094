//! A small client of the kubelet's podresources: which devices the containers of a pod hold.
//!
//! Only `Get` is used. `List` takes the device manager's lock and makes it prune its books, and if a plugin's call is in
//! flight then, it may hand ids out twice (kubernetes#137534).

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::api::podresources::pod_resources_lister_client::PodResourcesListerClient;
use crate::api::podresources::{GetPodResourcesRequest, PodResources};
use crate::api::{MESSAGE_LIMIT, connect_lazily};
use crate::{Error, Result};

/// How long one question may take, with all its repetitions, unless [`Client::with_patience`] says otherwise.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// All clients of a kubelet share 100 calls per second, in bursts of 10.
const RETRY_FIRST: Duration = Duration::from_millis(20);
const RETRY_MAX: Duration = Duration::from_millis(200);

/// What the containers of one pod hold.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodDevices {
    /// Container → resource → ids. A container that holds nothing is there, with nothing. Ordinary init containers are not.
    pub containers: BTreeMap<String, BTreeMap<String, BTreeSet<String>>>,
}

impl From<PodResources> for PodDevices {
    /// Without NUMA information the kubelet makes one entry per id, so entries of one resource are united.
    fn from(pod: PodResources) -> Self {
        let mut containers: BTreeMap<String, BTreeMap<String, BTreeSet<String>>> = BTreeMap::new();
        for container in pod.containers {
            let resources = containers.entry(container.name).or_default();
            for devices in container.devices {
                resources.entry(devices.resource_name).or_default().extend(devices.device_ids);
            }
        }
        Self { containers }
    }
}

/// Connects when it is first used, and again after a kubelet's restart. Clones share the connection.
#[derive(Debug, Clone)]
pub struct Client {
    socket: PathBuf,
    patience: Duration,
    inner: PodResourcesListerClient<Channel>,
}

impl Client {
    /// For the socket, normally `/var/lib/kubelet/pod-resources/kubelet.sock`. Must be called within a Tokio runtime.
    pub fn new(socket: &Path) -> Self {
        let inner = PodResourcesListerClient::new(connect_lazily(socket)).max_decoding_message_size(MESSAGE_LIMIT);
        Self {
            socket: socket.to_owned(),
            patience: PATIENCE,
            inner,
        }
    }

    /// With another limit for one question.
    #[must_use]
    pub fn with_patience(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    /// What the pod's containers hold. `None`: the kubelet does not know the pod (or has not admitted it yet).
    ///
    /// A kubelet that has too many calls is asked again. The pod is known by name here, so it may be another one than it was.
    ///
    /// # Errors
    /// [`Error::Throttled`] when there were too many calls for all the [`PATIENCE`]; [`Error::PodResources`] for everything else: nobody
    /// listens, no answer in time, or a kubelet before 1.36 that was not told to offer `Get`.
    pub async fn get(&self, name: &str, namespace: &str) -> Result<Option<PodDevices>> {
        let deadline = Instant::now() + self.patience;
        let mut wait = RETRY_FIRST;
        loop {
            let request = GetPodResourcesRequest {
                pod_name: name.to_owned(),
                pod_namespace: namespace.to_owned(),
            };
            let status = match timeout_at(deadline, self.inner.clone().get(request)).await {
                Err(_) => return Err(self.failed(format!("no answer within {:?}", self.patience))),
                Ok(Ok(answer)) => return Ok(answer.into_inner().pod_resources.map(PodDevices::from)),
                Ok(Err(status)) => status,
            };
            if status.code() == Code::ResourceExhausted {
                if Instant::now() + wait >= deadline {
                    return Err(Error::Throttled {
                        path: self.socket.clone(),
                        seconds: self.patience.as_secs(),
                    });
                }
                sleep(wait).await;
                wait = (wait * 2).min(RETRY_MAX);
            } else if is_not_found(&status) {
                return Ok(None);
            } else {
                return Err(self.failed(status.message().to_owned()));
            }
        }
    }

    fn failed(&self, text: String) -> Error {
        Error::PodResources {
            path: self.socket.clone(),
            text,
        }
    }
}

/// A kubelet (1.36) answers `Unknown` with "pod NAME in namespace NAMESPACE not found".
fn is_not_found(status: &Status) -> bool {
    match status.code() {
        Code::NotFound => true,
        Code::Unknown => status.message().starts_with("pod ") && status.message().ends_with("not found"),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::podresources::{ContainerDevices, ContainerResources};

    #[test]
    fn entries_of_one_resource_are_united_per_container() {
        let devices = |resource: &str, ids: &[&str]| ContainerDevices {
            resource_name: resource.into(),
            device_ids: ids.iter().map(|id| (*id).into()).collect(),
            topology: None,
        };
        let container = |name: &str, devices: Vec<ContainerDevices>| ContainerResources {
            name: name.into(),
            devices,
            ..ContainerResources::default()
        };
        let pod = PodResources {
            name: "p".into(),
            namespace: "n".into(),
            containers: vec![
                container(
                    "a",
                    vec![devices("r/x", &["2"]), devices("r/y", &["9"]), devices("r/x", &["1", "2"])],
                ),
                container("b", vec![]),
            ],
        };
        let found = PodDevices::from(pod);
        assert_eq!(found.containers["a"]["r/x"], BTreeSet::from(["1".to_owned(), "2".to_owned()]));
        assert_eq!(found.containers["a"]["r/y"], BTreeSet::from(["9".to_owned()]));
        assert!(found.containers["b"].is_empty());
    }

    #[test]
    fn only_the_pods_absence_is_absence() {
        for (status, want) in [
            (Status::not_found("x"), true),
            (Status::unknown("pod web in namespace default not found"), true),
            (Status::unknown("transport error"), false),
            (Status::unknown("PodResources API Get method disabled"), false),
            (Status::unavailable("pod x not found"), false),
        ] {
            assert_eq!(is_not_found(&status), want, "{status:?}");
        }
    }
}
