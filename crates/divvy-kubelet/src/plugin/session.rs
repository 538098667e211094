//! One listener: from binding its socket to the end of its last connection.

use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::transport::Server;
use tonic::transport::server::Connected;
use tracing::{debug, warn};

use super::Plugin;
use super::directory::FileIdentity;
use super::service::{PluginService, ServerEnding, Streams};
use crate::AnyAuthority;
use crate::api::MESSAGE_LIMIT;
use crate::api::v1beta1::device_plugin_server::DevicePluginServer;

/// The fraction (1/10) of the grace period that remains for answers after pending calls were cancelled.
const FOR_ANSWERS: u32 = 10;

#[derive(Debug)]
pub(super) struct Session {
    socket: PathBuf,
    identity: FileIdentity,
    ending: ServerEnding,
    streams: watch::Receiver<Streams>,
    server: JoinHandle<Result<(), tonic::transport::Error>>,
}

impl Session {
    /// Listen on the socket and start to serve.
    pub(super) fn listen<P: Plugin>(plugin: Arc<P>, socket: PathBuf) -> io::Result<Self> {
        let listener = UnixListener::bind(&socket)?;
        let identity =
            FileIdentity::at(&socket).ok_or_else(|| io::Error::other("the socket was removed right after its creation"))?;
        let ending = ServerEnding::default();
        let streams = Arc::new(watch::Sender::new(Streams::default()));
        let watched = streams.subscribe();
        let service = DevicePluginServer::new(PluginService {
            plugin,
            streams,
            ending: ending.clone(),
        })
        .max_decoding_message_size(MESSAGE_LIMIT)
        .max_encoding_message_size(MESSAGE_LIMIT);
        let incoming = incoming(listener, ending.connections.clone());
        let server = tokio::spawn(Server::builder().serve_with_incoming_shutdown(
            service,
            incoming,
            ending.streams.clone().cancelled_owned(),
        ));
        Ok(Self {
            socket,
            identity,
            ending,
            streams: watched,
            server,
        })
    }

    /// Return the socket's file name, with which the plugin registers.
    pub(super) fn endpoint(&self) -> String {
        self.socket
            .file_name()
            .map(|name| name.to_string_lossy().into_owned())
            .unwrap_or_default()
    }

    /// Report whether the file at the socket's path is still this session's socket.
    pub(super) fn is_in_place(&self) -> bool {
        FileIdentity::at(&self.socket) == Some(self.identity)
    }

    pub(super) fn streams(&self) -> Streams {
        *self.streams.borrow()
    }

    /// Wait until a stream was opened or has ended, or until the server has ended.
    pub(super) async fn changed(&mut self) {
        if self.streams.changed().await.is_err() {
            // The server has ended together with its sender; `is_serving` reports this.
            debug!("the server of {} has ended", self.socket.display());
        }
    }

    pub(super) fn is_serving(&self) -> bool {
        !self.server.is_finished()
    }

    /// End all streams immediately, let pending calls continue for `grace`, and return when everything that belongs to this
    /// listener has ended.
    pub(super) async fn close(mut self, grace: Duration) {
        self.remove_socket();
        self.ending.streams.cancel();
        let for_answers = grace / FOR_ANSWERS;
        if tokio::time::timeout(grace - for_answers, &mut self.server).await.is_ok() {
            return self.wait_for_streams().await;
        }
        self.ending.calls.cancel();
        if tokio::time::timeout(for_answers, &mut self.server).await.is_ok() {
            return self.wait_for_streams().await;
        }
        self.ending.connections.cancel();
        if let Err(error) = (&mut self.server).await {
            warn!(%error, "the server of {} failed while it stopped", self.socket.display());
        }
        self.wait_for_streams().await;
    }

    /// Wait until the streams have ended. They run in tasks of their own, which end right after their connection.
    async fn wait_for_streams(&mut self) {
        // An error means that all senders are gone, and the streams with them.
        let _ = self.streams.wait_for(|streams| streams.open == 0).await;
    }

    fn remove_socket(&self) {
        if !self.is_in_place() {
            return;
        }
        if let Err(error) = std::fs::remove_file(&self.socket)
            && error.kind() != io::ErrorKind::NotFound
        {
            warn!(%error, "cannot remove the plugin's socket {}", self.socket.display());
        }
    }
}

impl Drop for Session {
    /// Clean up even if [`PluginServer::run`](super::PluginServer::run) is dropped instead of stopped.
    fn drop(&mut self) {
        self.remove_socket();
        self.ending.streams.cancel();
        self.ending.calls.cancel();
        self.ending.connections.cancel();
    }
}

fn incoming(listener: UnixListener, cut: CancellationToken) -> impl futures::Stream<Item = io::Result<CuttableConnection>> {
    futures::stream::unfold((listener, cut), |(listener, cut)| async {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => {
                    let connection = CuttableConnection {
                        stream: AnyAuthority::new(stream),
                        cut: Box::pin(cut.clone().cancelled_owned()),
                    };
                    return Some((Ok(connection), (listener, cut)));
                }
                Err(error) => {
                    // Most likely the process has run out of file descriptors. The connection stays in the queue, so wait before the next attempt.
                    warn!(%error, "cannot accept a connection from the kubelet");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    })
}

/// A connection that can be closed even if the peer is stopped or does not read.
struct CuttableConnection {
    stream: AnyAuthority<UnixStream>,
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl CuttableConnection {
    fn check(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        match self.cut.as_mut().poll(context) {
            Poll::Ready(()) => Err(io::Error::new(io::ErrorKind::ConnectionAborted, "the plugin is stopping")),
            Poll::Pending => Ok(()),
        }
    }
}

impl Connected for CuttableConnection {
    type ConnectInfo = ();

    fn connect_info(&self) -> Self::ConnectInfo {}
}

impl AsyncRead for CuttableConnection {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.check(context)?;
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for CuttableConnection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.check(context)?;
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.check(context)?;
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// Report whether a path is unused. A directory entry of any kind counts as use.
pub(super) fn is_free(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_err()
}
