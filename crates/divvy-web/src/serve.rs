use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use divvy_serve::{CallerLimits, Door, OpenedConnection, Plain, ServerLimits};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use crate::Impatient;

/// How long a client may read nothing of what it is sent.
pub const PATIENCE: Duration = Duration::from_secs(15);

/// How long requests may still be answered when the program stops.
const GRACE: Duration = Duration::from_secs(1);

/// Serve the pages on a socket, without TLS, until `stop` is cancelled.
pub async fn serve(listener: TcpListener, router: Router, stop: CancellationToken) {
    tokio::select! {
        () = divvy_serve::serve(listener, WebDoor, router, limits(), stop.clone()) => {}
        // A stream is an answer that does not end.
        () = async {
            stop.cancelled().await;
            tokio::time::sleep(GRACE).await;
        } => {}
    }
}

/// The limits of a server of the pages.
pub fn limits() -> ServerLimits {
    let share = CallerLimits {
        connections: 256,
        // Users may come through the same proxy.
        per_address: 256,
        idle: Duration::from_secs(90),
        body_bytes: 64 << 10,
    };
    ServerLimits {
        known: share,
        unknown: share,
        handshakes: 64,
        handshakes_per_address: 16,
        first_byte: Duration::from_secs(5),
        handshake: Duration::from_secs(5),
        header: Duration::from_secs(10),
        body: Duration::from_secs(10),
        // A stream is an answer that does not end. After this time, the browser asks again.
        request: Duration::from_secs(3600),
        header_bytes: 64 << 10,
        bodies_bytes: 1 << 20,
    }
}

/// Lets all connections in, and ends those whose client reads nothing.
#[derive(Debug)]
struct WebDoor;

impl Door for WebDoor {
    type Io = Impatient<TcpStream>;
    type Peer = SocketAddr;
    const HANDSHAKE: bool = false;

    async fn open(&self, stream: TcpStream, address: SocketAddr) -> Option<OpenedConnection<Self::Io, SocketAddr>> {
        let opened = Plain { known: true }.open(stream, address).await?;
        Some(OpenedConnection {
            io: Impatient::new(opened.io, PATIENCE),
            known: opened.known,
            peer: opened.peer,
        })
    }
}
