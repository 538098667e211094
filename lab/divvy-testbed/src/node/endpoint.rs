//! A connection from the kubelet to a device plugin, and gRPC errors in the form in which Go prints them.

use std::path::PathBuf;
use std::time::Duration;

use divvy_kubelet::api::v1beta1::device_plugin_client::DevicePluginClient;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

/// grpc-go's default limit of a received message (`defaultClientMaxReceiveMessageSize` in `clientconn.go`), which the kubelet does not raise.
const RECEIVE_LIMIT: usize = 4 << 20;

/// Why a plugin cannot be reached.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DialError {
    #[error("{}", chain(.0))]
    Refused(#[source] tonic::transport::Error),
    #[error("context deadline exceeded")]
    TimedOut,
}

/// Connect as the kubelet does: blocking, with authority `localhost`.
pub(crate) async fn dial(socket: PathBuf, timeout: Duration) -> Result<DevicePluginClient<Channel>, DialError> {
    let connector = tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    let endpoint = Endpoint::from_static("http://localhost");
    let connect = endpoint.connect_with_connector(connector);
    match tokio::time::timeout(timeout, connect).await {
        Ok(Ok(channel)) => Ok(DevicePluginClient::new(channel).max_decoding_message_size(RECEIVE_LIMIT)),
        Ok(Err(error)) => Err(DialError::Refused(error)),
        Err(_) => Err(DialError::TimedOut),
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        text = format!("{text}: {inner}");
        source = inner.source();
    }
    text
}

/// Format a status as Go prints it: `rpc error: code = Internal desc = …`.
pub(crate) fn go_error(status: &Status) -> String {
    let code = match status.code() {
        Code::Ok => "OK",
        Code::Cancelled => "Canceled",
        Code::Unknown => "Unknown",
        Code::InvalidArgument => "InvalidArgument",
        Code::DeadlineExceeded => "DeadlineExceeded",
        Code::NotFound => "NotFound",
        Code::AlreadyExists => "AlreadyExists",
        Code::PermissionDenied => "PermissionDenied",
        Code::ResourceExhausted => "ResourceExhausted",
        Code::FailedPrecondition => "FailedPrecondition",
        Code::Aborted => "Aborted",
        Code::OutOfRange => "OutOfRange",
        Code::Unimplemented => "Unimplemented",
        Code::Internal => "Internal",
        Code::Unavailable => "Unavailable",
        Code::DataLoss => "DataLoss",
        Code::Unauthenticated => "Unauthenticated",
    };
    format!("rpc error: code = {code} desc = {}", status.message())
}
