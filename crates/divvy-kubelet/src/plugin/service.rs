//! The gRPC service of a [`Plugin`].

use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::Arc;

use futures::Stream;
use prost::Message as _;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};
use tracing::{error, warn};

use super::{Plugin, PluginDevice, PluginOptions};
use crate::api::{KUBELET_MESSAGE_LIMIT, v1beta1};

/// The `ListAndWatch` streams of one listener.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Streams {
    /// The number of streams that have been opened so far.
    pub(super) opened: u64,
    /// The number of streams that are open now; at most one.
    pub(super) open: usize,
}

/// Signals that end the parts of a server one after the other.
#[derive(Debug, Clone, Default)]
pub(super) struct ServerEnding {
    /// Cancelled to end the streams and to accept no further connections and streams. Pending calls continue.
    pub(super) streams: CancellationToken,
    /// Cancelled to fail pending calls with an explanation.
    pub(super) calls: CancellationToken,
    /// Cancelled to close connections without the cooperation of their peers.
    pub(super) connections: CancellationToken,
}

#[derive(Debug)]
pub(super) struct PluginService<P> {
    pub(super) plugin: Arc<P>,
    pub(super) streams: Arc<watch::Sender<Streams>>,
    pub(super) ending: ServerEnding,
}

impl From<PluginOptions> for v1beta1::DevicePluginOptions {
    fn from(options: PluginOptions) -> Self {
        Self {
            pre_start_required: options.pre_start_required,
            get_preferred_allocation_available: options.preferred_allocation,
        }
    }
}

#[tonic::async_trait]
impl<P: Plugin> v1beta1::device_plugin_server::DevicePlugin for PluginService<P> {
    type ListAndWatchStream = Pin<Box<dyn Stream<Item = Result<v1beta1::ListAndWatchResponse, Status>> + Send>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<v1beta1::Empty>,
    ) -> Result<Response<v1beta1::DevicePluginOptions>, Status> {
        Ok(Response::new(self.plugin.options().into()))
    }

    async fn list_and_watch(&self, _: Request<v1beta1::Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let Some(open) = OpenStream::new(&self.streams) else {
            let text = format!(
                "the kubelet already watches {}; a second stream would end the first",
                self.plugin.resource_name()
            );
            warn!("refused a ListAndWatch call: {text}");
            return Err(Status::already_exists(text));
        };
        let list = DeviceStream {
            resource: self.plugin.resource_name().to_owned(),
            devices: self.plugin.devices(),
            sent: None,
            end: self.ending.streams.clone(),
            _open: open,
        };
        Ok(Response::new(Box::pin(futures::stream::unfold(list, DeviceStream::next))))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<v1beta1::PreferredAllocationRequest>,
    ) -> Result<Response<v1beta1::PreferredAllocationResponse>, Status> {
        let mut container_responses = Vec::new();
        for asked in &request.get_ref().container_requests {
            let size = usize::try_from(asked.allocation_size).unwrap_or(0);
            let (available, must_include) = (&asked.available_device_ids, &asked.must_include_device_ids);
            let device_ids = self.plugin.preferred(available, must_include, size).await;
            container_responses.push(v1beta1::ContainerPreferredAllocationResponse { device_ids });
        }
        Ok(Response::new(v1beta1::PreferredAllocationResponse { container_responses }))
    }

    async fn allocate(&self, request: Request<v1beta1::AllocateRequest>) -> Result<Response<v1beta1::AllocateResponse>, Status> {
        let mut container_responses = Vec::new();
        for asked in &request.get_ref().container_requests {
            container_responses.push(self.plugin.allocate(&asked.devices_ids)?.into());
        }
        Ok(Response::new(v1beta1::AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        request: Request<v1beta1::PreStartContainerRequest>,
    ) -> Result<Response<v1beta1::PreStartContainerResponse>, Status> {
        tokio::select! {
            biased;
            done = self.plugin.pre_start(request.into_inner().devices_ids) => done?,
            () = self.ending.calls.cancelled() => {
                let text = format!("the device plugin for {} is stopping; the container's start will be tried again", self.plugin.resource_name());
                return Err(Status::unavailable(text));
            }
        }
        Ok(Response::new(v1beta1::PreStartContainerResponse {}))
    }
}

/// A guard that counts one stream as open as long as it exists.
struct OpenStream(Arc<watch::Sender<Streams>>);

impl OpenStream {
    /// Count a new stream. Return `None` if one is open already.
    fn new(streams: &Arc<watch::Sender<Streams>>) -> Option<Self> {
        streams
            .send_if_modified(|streams| {
                let free = streams.open == 0;
                if free {
                    *streams = Streams {
                        opened: streams.opened + 1,
                        open: 1,
                    };
                }
                free
            })
            .then(|| Self(Arc::clone(streams)))
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.0.send_modify(|streams| streams.open -= 1);
    }
}

/// One `ListAndWatch` stream.
struct DeviceStream {
    resource: String,
    devices: watch::Receiver<Arc<Vec<PluginDevice>>>,
    sent: Option<Arc<Vec<PluginDevice>>>,
    end: CancellationToken,
    _open: OpenStream,
}

impl DeviceStream {
    /// Wait for a list that differs from the last one sent, and return it. Equal lists are skipped, because each message makes
    /// the kubelet rewrite its checkpoint.
    async fn next(mut self) -> Option<(Result<v1beta1::ListAndWatchResponse, Status>, Self)> {
        loop {
            if self.end.is_cancelled() {
                return None;
            }
            let now = Arc::clone(&self.devices.borrow_and_update());
            if self.sent.as_ref().is_none_or(|sent| !same_devices(sent, &now)) {
                let message = v1beta1::ListAndWatchResponse {
                    devices: now.iter().map(to_wire).collect(),
                };
                let bytes = message.encoded_len();
                let count = now.len();
                self.sent = Some(now);
                if bytes > KUBELET_MESSAGE_LIMIT {
                    let text = format!(
                        "the list of {count} devices of {} takes {bytes} bytes, but the kubelet accepts at most {KUBELET_MESSAGE_LIMIT}: \
                         choose larger units, so that there are fewer devices",
                        self.resource
                    );
                    error!("{text}");
                    return Some((Err(Status::resource_exhausted(text)), self));
                }
                return Some((Ok(message), self));
            }
            tokio::select! {
                () = self.end.cancelled() => return None,
                changed = self.devices.changed() => {
                    if changed.is_err() {
                        // The sender is gone, so the list stays as it is.
                        self.end.cancelled().await;
                    }
                }
            }
        }
    }
}

/// Report whether two lists have the same content, regardless of the order.
fn same_devices(one: &Arc<Vec<PluginDevice>>, other: &Arc<Vec<PluginDevice>>) -> bool {
    if Arc::ptr_eq(one, other) || one == other {
        return true;
    }
    let set = |list: &Arc<Vec<PluginDevice>>| list.iter().cloned().collect::<BTreeSet<PluginDevice>>();
    set(one) == set(other)
}

fn to_wire(device: &PluginDevice) -> v1beta1::Device {
    v1beta1::Device {
        id: device.id.clone(),
        health: if device.healthy { "Healthy" } else { "Unhealthy" }.to_owned(),
        topology: device.numa.map(|id| v1beta1::TopologyInfo {
            nodes: vec![v1beta1::NumaNode { id }],
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_compared_by_content_and_not_by_order() {
        let device = |id: &str, healthy| PluginDevice {
            id: id.into(),
            healthy,
            numa: Some(0),
        };
        let list =
            |devices: &[(&str, bool)]| Arc::new(devices.iter().map(|(id, healthy)| device(id, *healthy)).collect::<Vec<_>>());
        let one = list(&[("a", true), ("b", false)]);
        assert!(same_devices(&one, &list(&[("b", false), ("a", true)])));
        assert!(!same_devices(&one, &list(&[("b", true), ("a", true)])));
        assert!(!same_devices(&one, &list(&[("a", true)])));
        assert!(!same_devices(
            &one,
            &Arc::new(vec![
                PluginDevice {
                    numa: None,
                    ..device("a", true)
                },
                device("b", false)
            ])
        ));
    }

    /// The limit is the size of the largest message that the kubelet accepts.
    #[test]
    fn a_quarter_of_the_limit_holds_4096_ids() {
        let devices = (0..4096)
            .map(|slot| {
                to_wire(&PluginDevice {
                    id: format!("GPU-01234567-89ab-cdef-0123-456789abcdef::m{slot}"),
                    healthy: true,
                    numa: Some(1),
                })
            })
            .collect();
        let bytes = v1beta1::ListAndWatchResponse { devices }.encoded_len();
        assert!(bytes < KUBELET_MESSAGE_LIMIT / 4, "{bytes}");
    }
}
