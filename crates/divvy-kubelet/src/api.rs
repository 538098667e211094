//! The kubelet's device plugin API: messages, clients, and servers.

use std::path::Path;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};

/// The API of device plugins: `k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1`.
#[allow(missing_debug_implementations, unreachable_pub, clippy::all)]
pub mod v1beta1;

/// The API version in a [`v1beta1::RegisterRequest`].
pub const VERSION: &str = "v1beta1";

/// The name of the kubelet's socket in its device plugin directory.
pub const KUBELET_SOCKET: &str = "kubelet.sock";

/// The maximum size in bytes of a message that a kubelet accepts from a plugin: the default of grpc-go.
pub const KUBELET_MESSAGE_LIMIT: usize = 4 << 20;

/// The maximum size in bytes of a message that the plugin accepts from a kubelet. A message may contain all device ids of a node.
pub const MESSAGE_LIMIT: usize = 16 << 20;

/// Connect to a Unix socket.
///
/// # Errors
/// Fails if no process listens on the socket, or if none accepts within `patience`.
pub async fn connect(socket: &Path, patience: Duration) -> Result<Channel, tonic::transport::Error> {
    let socket = socket.to_owned();
    let connector = tower::service_fn(move |_: Uri| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    // This URI only sets the `:authority` header. grpc-go sends and accepts the same value over Unix sockets.
    let endpoint = Endpoint::from_static("http://localhost");
    endpoint.connect_timeout(patience).connect_with_connector(connector).await
}
