//! An HTTP/1.1 server for axum routers with limits on time, bytes, and connections. Any pod of a cluster may be able to connect to the extender and the
//! agents, and `axum::serve` has none of these limits.
//!
//! - [`ServerLimits`]: the numbers, which each program chooses
//! - [`Door`]: the step before a connection's first request (a TLS handshake, or nothing)
//! - `table`: decides which connection is accepted, and which is closed when a limit is reached; pure values
//! - `connection`: one connection, with its timeouts
//! - `body`: one request's body, with its timeout and its share of memory
//!
//! **If all places are taken, a new connection is not simply refused.** Otherwise the first client that opens many connections could lock out all
//! others. Callers that have identified themselves have reserved places. Within each class of callers, one address has a limited number of places.
//! If the class is full, the address with the most connections loses the connection that has waited longest for its client. So a client that opens
//! one connection for a quick request, such as a kubelet's probe, is answered even while others hold as many connections as they can.

#![forbid(unsafe_code)]

mod body;
mod connection;
mod table;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Router;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use body::BodyBudget;
use table::{CallerNetwork, ConnectionClass, ConnectionId, ConnectionPhase, ConnectionTable, ConnectionVerdict};

/// Pause after an error of `accept`, which is most likely "too many open files".
const AFTER_ACCEPT_ERROR: Duration = Duration::from_millis(100);

/// Length of the socket's queue: the maximum that Linux allows by default (`net.core.somaxconn`).
const QUEUE: u32 = 4096;

/// The maximum number of connections that are accepted in a row before other tasks run.
const IN_A_ROW: u32 = 16;

/// The limits of one class of callers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallerLimits {
    /// The maximum number of connections at the same time.
    pub connections: usize,
    /// The maximum number of connections from one address at the same time. With IPv6, a /64 network counts as one address,
    /// because one machine may have all of it.
    pub per_address: usize,
    /// How long a connection may be open without a request.
    pub idle: Duration,
    /// The maximum size of a request body in bytes.
    pub body_bytes: usize,
}

/// All limits of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServerLimits {
    /// Limits for callers that have identified themselves.
    pub known: CallerLimits,
    /// Limits for all other callers.
    pub unknown: CallerLimits,
    /// The maximum number of handshakes at the same time.
    pub handshakes: usize,
    /// The maximum number of handshakes from one address at the same time.
    pub handshakes_per_address: usize,
    /// Timeout from `accept` to the first byte, if there is a handshake.
    pub first_byte: Duration,
    /// Timeout from `accept` to the end of the handshake.
    pub handshake: Duration,
    /// Timeout from the first byte of a request to the end of its headers. An unknown caller must also send the first byte within this time.
    pub header: Duration,
    /// Timeout from the end of the headers to the end of the body.
    pub body: Duration,
    /// Timeout from the end of the headers until the response has been written.
    pub request: Duration,
    /// The maximum size in bytes of a request's headers; hyper needs at least 8 KiB.
    pub header_bytes: usize,
    /// The maximum size in bytes of all bodies together, not counting the first [`FREE_BYTES`] of each.
    pub bodies_bytes: usize,
}

/// A body up to this size does not count towards [`ServerLimits::bodies_bytes`], so that large bodies cannot block ordinary requests.
pub const FREE_BYTES: usize = 256 << 10;

/// Why a caller got no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TurnedAway {
    /// All places of the caller's class or address were taken, or a newer connection took the caller's place.
    TooMany,
    /// The caller did not finish its request or read the response in time.
    TooSlow,
}

/// A connection whose handshake is done.
#[derive(Debug)]
pub struct OpenedConnection<I, P> {
    /// The stream for requests and responses.
    pub io: I,
    /// Whether the caller has identified itself.
    pub known: bool,
    /// The caller's identity, which handlers find in the request's extensions.
    pub peer: P,
}

/// The step before a connection's first request: it turns a TCP stream into the stream for requests, and identifies the caller.
pub trait Door: Send + Sync + 'static {
    /// The stream for requests and responses.
    type Io: AsyncRead + AsyncWrite + Send + Unpin + 'static;
    /// The caller's identity, which handlers find in the request's extensions.
    type Peer: Clone + Send + Sync + 'static;

    /// Whether there is a handshake. Without one, [`ServerLimits::first_byte`] and [`ServerLimits::handshake`] are not used.
    const HANDSHAKE: bool;

    /// Wait until connections can be served at all. Until then, they wait in the socket's queue.
    fn ready(&self) -> impl Future<Output = ()> + Send {
        std::future::ready(())
    }

    /// Perform the handshake. `None` means that it failed; the implementation has answered the client if possible.
    fn open(
        &self,
        stream: TcpStream,
        address: SocketAddr,
    ) -> impl Future<Output = Option<OpenedConnection<Self::Io, Self::Peer>>> + Send;

    /// Record that a caller got no answer, for logs and metrics.
    fn turned_away(&self, _why: TurnedAway, _address: SocketAddr) {}
}

/// A [`Door`] without a handshake: all callers belong to one class.
#[derive(Debug, Clone, Copy)]
pub struct Plain {
    /// Whether callers count as known.
    pub known: bool,
}

impl Door for Plain {
    type Io = TcpStream;
    type Peer = SocketAddr;
    const HANDSHAKE: bool = false;

    async fn open(&self, stream: TcpStream, address: SocketAddr) -> Option<OpenedConnection<TcpStream, SocketAddr>> {
        Some(OpenedConnection {
            io: stream,
            known: self.known,
            peer: address,
        })
    }
}

/// The data of a connection in the table: the token that is cancelled when a newer connection takes its place, and the client's address.
type ConnectionData = (CancellationToken, SocketAddr);

/// State that all connections share.
struct Hall<D> {
    door: D,
    router: Router,
    limits: ServerLimits,
    table: Mutex<ConnectionTable<Instant, ConnectionData>>,
    budget: Arc<BodyBudget>,
    stop: CancellationToken,
}

impl<D> Hall<D> {
    fn table(&self) -> MutexGuard<'_, ConnectionTable<Instant, ConnectionData>> {
        // Each change of the table is complete before anything can panic.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place in the table, which is released on drop.
struct ConnectionPlace<D: Door> {
    hall: Arc<Hall<D>>,
    id: ConnectionId,
}

impl<D: Door> Drop for ConnectionPlace<D> {
    fn drop(&mut self) {
        self.hall.table().leave(self.id);
    }
}

impl<D: Door> ConnectionPlace<D> {
    /// Take a place; `None` if no place is free. `replaced` is cancelled when a newer connection takes this place.
    fn take(
        hall: &Arc<Hall<D>>,
        class: ConnectionClass,
        address: SocketAddr,
        replaced: &CancellationToken,
    ) -> Option<ConnectionPlace<D>> {
        let source = CallerNetwork::of(address.ip());
        let mut table = hall.table();
        let verdict = table.admit(class, source);
        let victim = match verdict {
            ConnectionVerdict::Replace(id) => table.leave(id),
            ConnectionVerdict::Enter | ConnectionVerdict::Refuse => None,
        };
        let id = (verdict != ConnectionVerdict::Refuse)
            .then(|| table.enter(class, source, Instant::now(), (replaced.clone(), address)));
        drop(table);
        if let Some((token, address)) = victim {
            token.cancel();
            hall.door.turned_away(TurnedAway::TooMany, address);
        }
        if id.is_none() {
            hall.door.turned_away(TurnedAway::TooMany, address);
        }
        id.map(|id| ConnectionPlace { hall: hall.clone(), id })
    }
}

/// Open a listening socket with a queue for many clients that connect at once. If the queue is full, the operating system drops a client's first
/// packet, and the client only tries again after a second, which is too late for a probe.
pub fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    // As TcpListener::bind does: a restarted program must not wait until the connections of its predecessor have expired.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(QUEUE)
}

/// Serve until `stop` is cancelled and the requests that have begun are answered.
pub async fn serve<D: Door>(listener: TcpListener, door: D, router: Router, limits: ServerLimits, stop: CancellationToken) {
    let hall = Arc::new(Hall {
        table: Mutex::new(ConnectionTable::new(&limits)),
        budget: Arc::new(BodyBudget::new(limits.bodies_bytes)),
        door,
        router,
        limits,
        stop: stop.clone(),
    });
    let tasks = TaskTracker::new();
    let mut accepted_in_a_row = 0;
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            accepted = async {
                hall.door.ready().await;
                listener.accept().await
            } => accepted,
        };
        let (stream, address) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(AFTER_ACCEPT_ERROR).await;
                continue;
            }
        };
        let hall = hall.clone();
        tasks.spawn(async move {
            let replaced = CancellationToken::new();
            tokio::select! {
                () = replaced.cancelled() => tracing::debug!(%address, "a newer connection took the place of this one"),
                () = attend(&hall, stream, address, &replaced) => {}
            }
        });
        // If many clients connect at once, their first bytes have usually arrived, and a connection must not count as silent only because its
        // task has not run yet. Yielding after each connection would be too often: the queue must empty faster than it fills.
        accepted_in_a_row = (accepted_in_a_row + 1) % IN_A_ROW;
        if accepted_in_a_row == 0 {
            tokio::task::yield_now().await;
        }
    }
    drop(listener);
    tasks.close();
    tasks.wait().await;
}

/// Handle one connection from `accept` to its end.
async fn attend<D: Door>(hall: &Arc<Hall<D>>, stream: TcpStream, address: SocketAddr, replaced: &CancellationToken) {
    // Ignore the error: this setting only affects latency.
    let _ = stream.set_nodelay(true);
    let opened = if D::HANDSHAKE {
        let Some(place) = ConnectionPlace::take(hall, ConnectionClass::Shaking, address, replaced) else {
            return;
        };
        let handshake = async {
            let mut first = [0];
            match tokio::time::timeout(hall.limits.first_byte, stream.peek(&mut first)).await {
                Ok(Ok(1..)) => {}
                Ok(_) => return Ok(None),
                Err(elapsed) => return Err(elapsed),
            }
            // The client is no longer silent, so newer connections take the places of others first.
            hall.table().set(place.id, ConnectionPhase::Busy, Instant::now());
            Ok(hall.door.open(stream, address).await)
        };
        let opened = tokio::select! {
            // The client has not sent a request yet.
            () = hall.stop.cancelled() => return,
            opened = tokio::time::timeout(hall.limits.handshake, handshake) => opened,
        };
        match opened {
            Ok(Ok(opened)) => opened,
            Ok(Err(elapsed)) | Err(elapsed) => {
                tracing::debug!(%address, %elapsed, "no handshake in time");
                hall.door.turned_away(TurnedAway::TooSlow, address);
                return;
            }
        }
    } else {
        hall.door.open(stream, address).await
    };
    let Some(opened) = opened else { return };
    let class = if opened.known {
        ConnectionClass::Known
    } else {
        ConnectionClass::Unknown
    };
    let Some(place) = ConnectionPlace::take(hall, class, address, replaced) else {
        return;
    };
    connection::serve(opened, place, address).await;
}
