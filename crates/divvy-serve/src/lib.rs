//! Serves an axum router over HTTP/1.1 within limits on time, bytes and connections. Any pod of a cluster may be able to connect to the extender
//! and to the agents, and `axum::serve` has none of these limits.
//!
//! - [`Limits`]: the numbers, which each program chooses
//! - [`Door`]: what happens to a connection before its first request (a TLS handshake, or nothing)
//! - `table`: which connection is accepted and which is closed when a limit is reached, as a function of values
//! - `connection`: one connection, with its clock
//! - `body`: one request's body, with its clock and its share of memory
//!
//! **When all places are taken, a new connection is not simply refused**, because then the first client to open many could lock out all others.
//! Callers that have identified themselves have places reserved for them. Within each class of callers one address has a limited number of places.
//! When the class is full, the address with the most connections loses the one that has been waiting for its client the longest. A client that
//! opens one connection for one quick request, such as a kubelet's probe, is therefore answered while others hold as many connections as they can.

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

use body::Budget;
use table::{Class, Id, Phase, Source, Table, Verdict};

/// After an error of `accept` (too many open files, most likely) before the next try.
const AFTER_ACCEPT_ERROR: Duration = Duration::from_millis(100);

/// Linux allows no more by default (net.core.somaxconn).
const QUEUE: u32 = 4096;

/// So many connections are accepted before those that are there already go on.
const IN_A_ROW: u32 = 16;

/// The limits of one class of callers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// Connections at once.
    pub connections: usize,
    /// Of these from one address (of IPv6: one /64 network, which is what one machine has).
    pub per_address: usize,
    /// How long a connection may be without a request.
    pub idle: Duration,
    /// The largest body of a request.
    pub body_bytes: usize,
}

/// All limits of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Callers that have identified themselves.
    pub known: Share,
    /// All others.
    pub unknown: Share,
    /// Handshakes at once.
    pub handshakes: usize,
    /// Of these from one address.
    pub handshakes_per_address: usize,
    /// From `accept` to the first byte, where there is a handshake.
    pub first_byte: Duration,
    /// From `accept` to the end of the handshake.
    pub handshake: Duration,
    /// From the first byte of a request to the end of its headers. An unknown caller must also send the first byte within this time.
    pub header: Duration,
    /// From the end of the headers to the end of the body.
    pub body: Duration,
    /// From the end of the headers until the response has been written.
    pub request: Duration,
    /// The largest head of a request; hyper needs 8 KiB at least.
    pub header_bytes: usize,
    /// What all bodies together may hold, beyond the first [`FREE_BYTES`] of each.
    pub bodies_bytes: usize,
}

/// A body up to this size does not count towards [`Limits::bodies_bytes`], so that large bodies cannot block ordinary requests.
pub const FREE_BYTES: usize = 256 << 10;

/// Why a caller got no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TurnedAway {
    /// All places of its class or of its address were taken, or a newcomer got its place.
    TooMany,
    /// It did not finish its request, or did not read the response, in time.
    TooSlow,
}

/// A connection whose handshake is done.
#[derive(Debug)]
pub struct Opened<I, P> {
    /// What is read and written.
    pub io: I,
    /// Whether the caller has identified itself.
    pub known: bool,
    /// What handlers find in the request's extensions.
    pub peer: P,
}

/// What happens to a connection before its first request.
pub trait Door: Send + Sync + 'static {
    /// What is read and written afterwards.
    type Io: AsyncRead + AsyncWrite + Send + Unpin + 'static;
    /// Who is at the other end; handlers find it in the request's extensions.
    type Peer: Clone + Send + Sync + 'static;

    /// Whether there is a handshake. Without one, [`Limits::first_byte`] and [`Limits::handshake`] mean nothing.
    const HANDSHAKE: bool;

    /// Waits until connections can be served at all. Until then they wait in the socket's queue.
    fn ready(&self) -> impl Future<Output = ()> + Send {
        std::future::ready(())
    }

    /// The handshake. `None`: it failed, and the client has been told if that was possible.
    fn open(&self, stream: TcpStream, address: SocketAddr) -> impl Future<Output = Option<Opened<Self::Io, Self::Peer>>> + Send;

    /// A caller got no answer.
    fn turned_away(&self, _why: TurnedAway, _address: SocketAddr) {}
}

/// No handshake: every connection is of one class.
#[derive(Debug, Clone, Copy)]
pub struct Plain {
    /// Whether callers count as known.
    pub known: bool,
}

impl Door for Plain {
    type Io = TcpStream;
    type Peer = SocketAddr;
    const HANDSHAKE: bool = false;

    async fn open(&self, stream: TcpStream, address: SocketAddr) -> Option<Opened<TcpStream, SocketAddr>> {
        Some(Opened {
            io: stream,
            known: self.known,
            peer: address,
        })
    }
}

/// What is kept of each connection: how it is told that a newcomer has its place, and where it comes from.
type Member = (CancellationToken, SocketAddr);

/// What the connections share.
struct Hall<D> {
    door: D,
    router: Router,
    limits: Limits,
    table: Mutex<Table<Instant, Member>>,
    budget: Arc<Budget>,
    stop: CancellationToken,
}

impl<D> Hall<D> {
    fn table(&self) -> MutexGuard<'_, Table<Instant, Member>> {
        // Each change of the table is complete before anything can panic.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place in the table, given back when this is dropped.
struct Place<D: Door> {
    hall: Arc<Hall<D>>,
    id: Id,
}

impl<D: Door> Drop for Place<D> {
    fn drop(&mut self) {
        self.hall.table().leave(self.id);
    }
}

impl<D: Door> Place<D> {
    /// `None`: there is no place. `replaced` is cancelled when a newcomer takes this place.
    fn take(hall: &Arc<Hall<D>>, class: Class, address: SocketAddr, replaced: &CancellationToken) -> Option<Place<D>> {
        let source = Source::of(address.ip());
        let mut table = hall.table();
        let verdict = table.admit(class, source);
        let victim = match verdict {
            Verdict::Replace(id) => table.leave(id),
            Verdict::Enter | Verdict::Refuse => None,
        };
        let id = (verdict != Verdict::Refuse).then(|| table.enter(class, source, Instant::now(), (replaced.clone(), address)));
        drop(table);
        if let Some((token, address)) = victim {
            token.cancel();
            hall.door.turned_away(TurnedAway::TooMany, address);
        }
        if id.is_none() {
            hall.door.turned_away(TurnedAway::TooMany, address);
        }
        id.map(|id| Place { hall: hall.clone(), id })
    }
}

/// A socket whose queue has room for many clients that connect at once. When it is full, the system drops a client's first packet, and the client
/// tries again after a second: too late for a probe.
pub fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    // As TcpListener::bind does: a program that is started again must not wait for connections of the one before it.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(QUEUE)
}

/// Serves until `stop` is cancelled, then until the requests that were begun are answered.
pub async fn serve<D: Door>(listener: TcpListener, door: D, router: Router, limits: Limits, stop: CancellationToken) {
    let hall = Arc::new(Hall {
        table: Mutex::new(Table::new(&limits)),
        budget: Arc::new(Budget::new(limits.bodies_bytes)),
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
                () = replaced.cancelled() => tracing::debug!(%address, "a newcomer took the place of this connection"),
                () = attend(&hall, stream, address, &replaced) => {}
            }
        });
        // When many clients connect at once, the first bytes of each are usually there already, and a connection must not count as silent only
        // because its task has not run yet. After each of them would be too often: the socket's queue must empty faster than it fills.
        accepted_in_a_row = (accepted_in_a_row + 1) % IN_A_ROW;
        if accepted_in_a_row == 0 {
            tokio::task::yield_now().await;
        }
    }
    drop(listener);
    tasks.close();
    tasks.wait().await;
}

/// One connection from `accept` to its end.
async fn attend<D: Door>(hall: &Arc<Hall<D>>, stream: TcpStream, address: SocketAddr, replaced: &CancellationToken) {
    // For latency only.
    let _ = stream.set_nodelay(true);
    let opened = if D::HANDSHAKE {
        let Some(place) = Place::take(hall, Class::Shaking, address, replaced) else {
            return;
        };
        let handshake = async {
            let mut first = [0];
            match tokio::time::timeout(hall.limits.first_byte, stream.peek(&mut first)).await {
                Ok(Ok(1..)) => {}
                Ok(_) => return Ok(None),
                Err(elapsed) => return Err(elapsed),
            }
            // It is no longer silent: a newcomer takes the place of others first.
            hall.table().set(place.id, Phase::Busy, Instant::now());
            Ok(hall.door.open(stream, address).await)
        };
        let opened = tokio::select! {
            // Nothing was asked yet.
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
    let class = if opened.known { Class::Known } else { Class::Unknown };
    let Some(place) = Place::take(hall, class, address, replaced) else {
        return;
    };
    connection::serve(opened, place, address).await;
}
