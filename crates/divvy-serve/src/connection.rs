//! One connection: its timeouts, and the handling that is common to all its requests.

use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use http::{HeaderValue, Request, StatusCode, header};
use hyper::body::{Body as _, Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;
use tower::ServiceExt as _;

use crate::body::{BodyAccount, LimitedBody, Stopped};
use crate::table::ConnectionPhase;
use crate::{CallerLimits, ConnectionPlace, Door, OpenedConnection, ServerLimits, TurnedAway};

/// Return how long a phase may last. An unknown caller must send a request soon after it connects. A known caller may keep a connection in
/// reserve: Go's http.Transport connects for a request, may then send it over another connection that has become free, and keeps the new one.
fn time_limit(phase: ConnectionPhase, known: bool, share: &CallerLimits, limits: &ServerLimits) -> Duration {
    match phase {
        ConnectionPhase::Fresh if known => share.idle,
        ConnectionPhase::Fresh | ConnectionPhase::Header => limits.header,
        ConnectionPhase::Idle => share.idle,
        ConnectionPhase::Busy => limits.request,
    }
}

pub(crate) async fn serve<D: Door>(opened: OpenedConnection<D::Io, D::Peer>, place: ConnectionPlace<D>, address: SocketAddr) {
    let OpenedConnection { io, known, peer } = opened;
    let place = Arc::new(place);
    let hall = place.hall.clone();
    let limits = hall.limits;
    let share = if known { limits.known } else { limits.unknown };
    let service = service_fn({
        let place = place.clone();
        move |request| answer(place.clone(), share, peer.clone(), address, request)
    });
    let io = TokioIo::new(WatchedStream {
        io,
        place: place.clone(),
    });
    // hyper's timeout for headers is not used: it starts when the last response ends, so it would also close idle connections. HTTP/2 is not
    // served: kube-scheduler, the API server, the kubelet, and Prometheus do not need it.
    let mut connection = pin!(
        http1::Builder::new()
            .max_buf_size(limits.header_bytes)
            .serve_connection(io, service)
            .with_upgrades()
    );
    let mut clock = pin!(tokio::time::sleep_until(Instant::now()));
    let mut stopped = pin!(hall.stop.cancelled());
    let mut stopping = false;
    let phase = || place.hall.table().get(place.id);
    poll_fn(|cx| {
        if !stopping && stopped.as_mut().poll(cx).is_ready() {
            stopping = true;
            connection.as_mut().graceful_shutdown();
        }
        if let Poll::Ready(ended) = connection.as_mut().poll(cx) {
            if let Err(error) = ended {
                tracing::debug!(%address, %error, "a connection ended");
            }
            return Poll::Ready(());
        }
        // The phase only changes while the connection is polled, which happened above.
        let Some((phase, since)) = phase() else {
            return Poll::Ready(());
        };
        if stopping && phase != ConnectionPhase::Busy {
            return Poll::Ready(());
        }
        let ends = since + time_limit(phase, known, &share, &limits);
        if clock.deadline() != ends {
            clock.as_mut().reset(ends);
        }
        if clock.as_mut().poll(cx).is_ready() {
            tracing::debug!(%address, ?phase, "a connection was closed because of a timeout");
            // Being idle is not an error of the client.
            if phase != ConnectionPhase::Idle {
                hall.door.turned_away(TurnedAway::TooSlow, address);
            }
            return Poll::Ready(());
        }
        Poll::Pending
    })
    .await;
}

impl<D: Door> ConnectionPlace<D> {
    fn set(&self, phase: ConnectionPhase) {
        self.hall.table().set(self.id, phase, Instant::now());
    }
}

async fn answer<D: Door>(
    place: Arc<ConnectionPlace<D>>,
    share: CallerLimits,
    peer: D::Peer,
    address: SocketAddr,
    request: Request<Incoming>,
) -> Result<Response<Answering<D>>, Infallible> {
    place.set(ConnectionPhase::Busy);
    // Created before the first await, and dropped with the response: then the connection is idle.
    let mut answering = IdleOnDrop(Some(place.clone()));
    let limits = &place.hall.limits;
    let account = Arc::new(BodyAccount::new(place.hall.budget.clone()));
    let declared = request.body().size_hint().lower();
    let response = if usize::try_from(declared).is_ok_and(|bytes| bytes <= share.body_bytes) {
        let mut request = request.map(|body| {
            Body::new(LimitedBody::new(
                body,
                Instant::now() + limits.body,
                share.body_bytes,
                account.clone(),
            ))
        });
        request.extensions_mut().insert(peer);
        let response = place.hall.router.clone().oneshot(request).await;
        let response = response.unwrap_or_else(|never| match never {});
        match account.stopped() {
            None => response,
            Some(why) => refused(why, &share, limits),
        }
    } else {
        refused(Stopped::TooLarge, &share, limits)
    };
    if account.stopped() == Some(Stopped::TooSlow) {
        place.hall.door.turned_away(TurnedAway::TooSlow, address);
    }
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        // The handler owns the connection now and limits it. The connection keeps its place until it ends.
        answering.0 = None;
    }
    Ok(response.map(|inner| Answering { inner, _done: answering }))
}

fn refused(why: Stopped, share: &CallerLimits, limits: &ServerLimits) -> Response {
    let (status, text) = match why {
        Stopped::TooSlow => (
            StatusCode::REQUEST_TIMEOUT,
            format!(
                "the body of the request did not arrive within {:?}; send the request again",
                limits.body
            ),
        ),
        Stopped::TooLarge => (
            StatusCode::PAYLOAD_TOO_LARGE,
            format!(
                "the body of the request is larger than {} bytes, the limit for this caller",
                share.body_bytes
            ),
        ),
        Stopped::NoMemory => (
            StatusCode::SERVICE_UNAVAILABLE,
            "all memory for request bodies is in use; send the request again in a few seconds".to_owned(),
        ),
    };
    let mut response = (status, axum::Json(serde_json::json!({ "error": text }))).into_response();
    // The connection cannot be used again, because the rest of the body is not read.
    response
        .headers_mut()
        .insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

/// Marks the connection as idle on drop.
struct IdleOnDrop<D: Door>(Option<Arc<ConnectionPlace<D>>>);

impl<D: Door> Drop for IdleOnDrop<D> {
    fn drop(&mut self) {
        if let Some(place) = &self.0 {
            place.set(ConnectionPhase::Idle);
        }
    }
}

/// The body of a response. When it is dropped, the connection becomes idle.
struct Answering<D: Door> {
    inner: Body,
    _done: IdleOnDrop<D>,
}

impl<D: Door> hyper::body::Body for Answering<D> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.inner).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// A stream that detects the first byte of a request.
struct WatchedStream<D: Door> {
    io: D::Io,
    place: Arc<ConnectionPlace<D>>,
}

impl<D: Door> AsyncRead for WatchedStream<D> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.io).poll_read(cx, buffer);
        if buffer.filled().len() > before {
            let mut table = self.place.hall.table();
            if let Some((ConnectionPhase::Fresh | ConnectionPhase::Idle, _)) = table.get(self.place.id) {
                table.set(self.place.id, ConnectionPhase::Header, Instant::now());
            }
        }
        read
    }
}

impl<D: Door> AsyncWrite for WatchedStream<D> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}
