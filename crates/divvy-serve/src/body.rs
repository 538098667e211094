//! The body of one request, with limits on time and bytes.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::time::{Instant, Sleep};

use crate::FREE_BYTES;

/// Size of the pieces into which frames are combined. Without this, a body that is sent in chunks of one byte would take a list entry of 32 bytes
/// for each byte.
const PIECE: usize = 64 << 10;

/// Why a body was not read to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stopped {
    /// [`crate::ServerLimits::body`] has passed.
    TooSlow = 1,
    /// [`crate::CallerLimits::body_bytes`] is exceeded.
    TooLarge = 2,
    /// [`crate::ServerLimits::bodies_bytes`] is exceeded.
    NoMemory = 3,
}

/// The memory for all bodies together.
#[derive(Debug)]
pub(crate) struct BodyBudget {
    left: AtomicUsize,
}

impl BodyBudget {
    pub(crate) fn new(bytes: usize) -> BodyBudget {
        BodyBudget {
            left: AtomicUsize::new(bytes),
        }
    }

    fn take(&self, bytes: usize) -> bool {
        self.left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(bytes))
            .is_ok()
    }
}

/// One request's part of the budget. It is held until the request is answered, because handlers keep the body until then.
#[derive(Debug)]
pub(crate) struct BodyAccount {
    budget: Arc<BodyBudget>,
    taken: AtomicUsize,
    stopped: AtomicU8,
}

impl BodyAccount {
    pub(crate) fn new(budget: Arc<BodyBudget>) -> BodyAccount {
        BodyAccount {
            budget,
            taken: AtomicUsize::new(0),
            stopped: AtomicU8::new(0),
        }
    }

    /// Return why the body was not read to its end; `None` if it was, or is still being read.
    pub(crate) fn stopped(&self) -> Option<Stopped> {
        let found = self.stopped.load(Ordering::Relaxed);
        [Stopped::TooSlow, Stopped::TooLarge, Stopped::NoMemory]
            .into_iter()
            .find(|why| *why as u8 == found)
    }

    fn stop(&self, why: Stopped) -> BodyError {
        self.stopped.store(why as u8, Ordering::Relaxed);
        BodyError(why)
    }

    /// Take memory from the budget for a body that has `bytes` bytes so far. Return false if the budget is exhausted.
    fn cover(&self, bytes: usize) -> bool {
        let taken = self.taken.load(Ordering::Relaxed);
        let more = bytes.saturating_sub(FREE_BYTES).saturating_sub(taken);
        if !self.budget.take(more) {
            return false;
        }
        self.taken.store(taken + more, Ordering::Relaxed);
        true
    }
}

impl Drop for BodyAccount {
    fn drop(&mut self) {
        self.budget.left.fetch_add(*self.taken.get_mut(), Ordering::Relaxed);
    }
}

/// The error that a handler gets instead of the rest of a body. The caller gets an HTTP status with the same meaning ([`crate::connection`]).
#[derive(Debug)]
pub(crate) struct BodyError(Stopped);

impl std::fmt::Display for BodyError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self.0 {
            Stopped::TooSlow => "the body did not arrive in time",
            Stopped::TooLarge => "the body is too large for this caller",
            Stopped::NoMemory => "all memory for request bodies is in use",
        })
    }
}

impl std::error::Error for BodyError {}

/// A request body with limits, as handlers read it.
#[derive(Debug)]
pub(crate) struct LimitedBody {
    inner: Incoming,
    deadline: Pin<Box<Sleep>>,
    largest: usize,
    seen: usize,
    /// Bytes that have been read but are not in `piece` yet.
    rest: Bytes,
    piece: BytesMut,
    account: Arc<BodyAccount>,
    ended: bool,
}

impl LimitedBody {
    pub(crate) fn new(inner: Incoming, deadline: Instant, largest: usize, account: Arc<BodyAccount>) -> LimitedBody {
        LimitedBody {
            ended: inner.is_end_stream(),
            inner,
            deadline: Box::pin(tokio::time::sleep_until(deadline)),
            largest,
            seen: 0,
            rest: Bytes::new(),
            piece: BytesMut::new(),
            account,
        }
    }

    /// Move bytes into the piece. Return the piece when it is full.
    fn fill(&mut self) -> Option<Bytes> {
        if self.rest.is_empty() {
            return None;
        }
        if self.piece.capacity() == 0 {
            // Reserve no more than is still to come and no more than a piece, so that the allocated memory is what the budget counts.
            let more = usize::try_from(self.inner.size_hint().upper().unwrap_or(u64::MAX)).unwrap_or(usize::MAX);
            self.piece = BytesMut::with_capacity(self.rest.len().saturating_add(more).min(PIECE));
        }
        let taken = self.rest.split_to(self.rest.len().min(PIECE - self.piece.len()));
        self.piece.extend_from_slice(&taken);
        (self.piece.len() == PIECE).then(|| std::mem::take(&mut self.piece).freeze())
    }

    fn end(&mut self, error: Box<dyn std::error::Error + Send + Sync>) -> Poll<Option<Result<Frame<Bytes>, axum::BoxError>>> {
        self.ended = true;
        self.rest = Bytes::new();
        self.piece = BytesMut::new();
        Poll::Ready(Some(Err(error)))
    }
}

impl Body for LimitedBody {
    type Data = Bytes;
    type Error = axum::BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::BoxError>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        loop {
            if let Some(piece) = self.fill() {
                return Poll::Ready(Some(Ok(Frame::data(piece))));
            }
            let frame = match Pin::new(&mut self.inner).poll_frame(cx) {
                Poll::Ready(frame) => frame,
                Poll::Pending => {
                    ready!(self.deadline.as_mut().poll(cx));
                    let error = self.account.stop(Stopped::TooSlow);
                    return self.end(Box::new(error));
                }
            };
            match frame {
                Some(Ok(frame)) => {
                    // Skip trailers: they have no meaning here.
                    let Ok(data) = frame.into_data() else { continue };
                    self.seen = self.seen.saturating_add(data.len());
                    let stopped = match self.seen {
                        seen if seen > self.largest => Some(Stopped::TooLarge),
                        seen if !self.account.cover(seen) => Some(Stopped::NoMemory),
                        _ => None,
                    };
                    if let Some(why) = stopped {
                        let error = self.account.stop(why);
                        return self.end(Box::new(error));
                    }
                    self.rest = data;
                }
                Some(Err(error)) => return self.end(Box::new(error)),
                None => {
                    self.ended = true;
                    let piece = std::mem::take(&mut self.piece).freeze();
                    return Poll::Ready((!piece.is_empty()).then(|| Ok(Frame::data(piece))));
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.ended
    }

    fn size_hint(&self) -> SizeHint {
        // The inner body's hint does not count the bytes in `piece`.
        SizeHint::default()
    }
}
